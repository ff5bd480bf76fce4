#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "scheduler/request.h"

namespace hvd {

// What the ranks have agreed on, by name and by a number that stands for it: the next time the same
// collective is announced and decided in four bytes. Numbers are counted in the order of decisions, and what
// was decided longest ago is forgotten first, so ranks that apply the same rounds hold the same entries under
// the same numbers without telling each other. Pure; T is what one of them keeps.
template <class T>
class Cache {
 public:
  struct Entry {
    CacheId id;
    std::string name;
    T value;
  };

  explicit Cache(size_t capacity) : capacity_(capacity) {}

  size_t size() const { return by_age_.size(); }
  Entry* Find(CacheId id) {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : &*found->second;
  }
  Entry* Find(std::string_view name) {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &*found->second;
  }
  const Entry* Find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &*found->second;
  }
  // False for a number that no rank can have learned.
  bool WasGiven(CacheId id) const { return id != kNoId && next_ - id - 1 < kNoId / 2; }

  // It was decided again.
  void Touch(CacheId id) {
    const auto found = by_id_.find(id);
    if (found != by_id_.end()) by_age_.splice(by_age_.end(), by_age_, found->second);
  }
  // It was decided in full; replaces what had that name.
  Entry& Add(std::string name, T value) {
    if (const auto old = by_name_.find(name); old != by_name_.end()) Erase(old->second);
    const auto added = by_age_.insert(by_age_.end(), Entry{next_, std::move(name), std::move(value)});
    if (++next_ == kNoId) next_ = 0;
    by_id_[added->id] = added;
    by_name_[added->name] = added;
    return *added;
  }
  // To be called after every round: forgets what is too much, after dropped(entry).
  template <class Dropped>
  void Trim(const Dropped& dropped) {
    while (by_age_.size() > capacity_) {
      dropped(by_age_.front());
      Erase(by_age_.begin());
    }
  }
  template <class Visit>
  void ForEach(const Visit& visit) const {
    for (const Entry& entry : by_age_) visit(entry);
  }

  template <class Visit>
  void ForEach(const Visit& visit) {
    for (Entry& entry : by_age_) visit(entry);
  }

 private:
  using Place = typename std::list<Entry>::iterator;
  void Erase(Place place) {
    by_id_.erase(place->id);
    by_name_.erase(place->name);
    by_age_.erase(place);
  }

  const size_t capacity_;
  CacheId next_ = 0;
  std::list<Entry> by_age_;  // longest ago first
  std::unordered_map<CacheId, Place> by_id_;
  std::unordered_map<std::string_view, Place> by_name_;  // views of the entries' names
};

// More names than any model has tensors. The names of calls without one never come again, so there is an end.
inline constexpr size_t kCacheCapacity = 4096;

}  // namespace hvd
