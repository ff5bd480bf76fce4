#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/name_index.h"
#include "scheduler/request.h"

namespace hvd {

// What the ranks have agreed on, by name and by a number that stands for it: the next time the same
// collective is announced and decided in four bytes. A number is a slot and how often that slot was given
// before; what was decided longest ago is forgotten first. So ranks that apply the same rounds hold the same
// entries under the same numbers without telling each other. Entries stay where they are. Pure; T is what one
// of them keeps.
template <class T>
class Cache {
 public:
  struct Entry {
    CacheId id = kNoId;  // kNoId: free
    T value;
    std::string name;
  };

  explicit Cache(size_t capacity) : capacity_(capacity) {}

  size_t size() const { return names_.size(); }
  Entry* Find(CacheId id) {
    const size_t slot = SlotOf(id);
    return slot < entries_.size() && id != kNoId && entries_[slot].id == id ? &entries_[slot] : nullptr;
  }
  Entry* Find(std::string_view name) {
    const uint32_t slot = names_.Find(name, [&](uint32_t s) { return entries_[s].name == name; });
    return slot == NameIndex::kNone ? nullptr : &entries_[slot];
  }
  const Entry* Find(std::string_view name) const { return const_cast<Cache*>(this)->Find(name); }
  // False for a number that no rank can have learned.
  bool WasGiven(CacheId id) const {
    const size_t slot = SlotOf(id);
    return slot < entries_.size() && TimesOf(links_[slot].given - id) < kMostTimes / 2;
  }

  // It was decided again.
  void Touch(CacheId id) {
    if (Find(id) == nullptr) return;
    Unlink(SlotOf(id));
    LinkLast(SlotOf(id));
  }
  // It was decided in full; replaces what had that name. Null if there are too many to number.
  Entry* Add(std::string name, T value) {
    if (Entry* old = Find(name)) Erase(SlotOf(old->id));
    if (free_.empty()) {
      if (entries_.size() == kMostSlots - 1) return nullptr;  // kNoId has the last slot
      free_.push_back(static_cast<uint32_t>(entries_.size()));
      entries_.emplace_back();
      links_.push_back({kEnd, kEnd, static_cast<CacheId>(entries_.size() - 1 - kMostSlots)});
    }
    const uint32_t slot = free_.back();
    free_.pop_back();
    links_[slot].given += kMostSlots;
    Entry& entry = entries_[slot];
    entry.id = links_[slot].given;
    entry.name = std::move(name);
    entry.value = std::move(value);
    names_.Insert(entry.name, slot);
    LinkLast(slot);
    return &entry;
  }
  // To be called after every round: forgets what is too much, after dropped(entry).
  template <class Dropped>
  void Trim(const Dropped& dropped) {
    while (size() > capacity_) {
      dropped(entries_[oldest_]);
      Erase(oldest_);
    }
  }
  // Longest ago first.
  template <class Visit>
  void ForEach(const Visit& visit) const {
    for (uint32_t slot = oldest_; slot != kEnd; slot = links_[slot].newer) visit(entries_[slot]);
  }
  template <class Visit>
  void ForEach(const Visit& visit) {
    for (uint32_t slot = oldest_; slot != kEnd; slot = links_[slot].newer) visit(entries_[slot]);
  }

 private:
  static constexpr uint32_t kMostSlots = 1 << 16;
  static constexpr uint32_t kMostTimes = 1 << 16;
  static constexpr uint32_t kEnd = ~0u;

  struct Link {
    uint32_t older, newer;
    CacheId given;  // the last number of this slot
  };

  static uint32_t SlotOf(CacheId id) { return id % kMostSlots; }
  static uint32_t TimesOf(CacheId id) { return id / kMostSlots; }

  void LinkLast(uint32_t slot) {
    links_[slot].older = newest_;
    links_[slot].newer = kEnd;
    (newest_ == kEnd ? oldest_ : links_[newest_].newer) = slot;
    newest_ = slot;
  }
  void Unlink(uint32_t slot) {
    const Link& link = links_[slot];
    (link.older == kEnd ? oldest_ : links_[link.older].newer) = link.newer;
    (link.newer == kEnd ? newest_ : links_[link.newer].older) = link.older;
  }
  void Erase(uint32_t slot) {
    Entry& entry = entries_[slot];
    names_.Erase(entry.name, slot);
    entry = Entry();
    Unlink(slot);
    free_.push_back(slot);
  }

  const size_t capacity_;
  NameIndex names_;
  std::deque<Entry> entries_;  // by slot
  std::vector<Link> links_;    // by slot
  std::vector<uint32_t> free_;
  uint32_t oldest_ = kEnd, newest_ = kEnd;
};

// More names than any model has tensors. The names of calls without one never come again, so there is an end.
inline constexpr size_t kCacheCapacity = 4096;

}  // namespace hvd
