#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/cache.h"
#include "scheduler/request.h"

namespace hvd {

// Some of the ranks 0, 1, ...; without memory of its own up to 64.
class RankSet {
 public:
  bool Has(int rank) const {
    if (rank < 64) return (few_ >> rank & 1) != 0;
    const auto at = static_cast<size_t>(rank) - 64;
    return at < more_.size() && more_[at];
  }
  void Add(int rank) {
    if (rank < 64) {
      few_ |= uint64_t{1} << rank;
      return;
    }
    const auto at = static_cast<size_t>(rank) - 64;
    if (at >= more_.size()) more_.resize(at + 1);
    more_[at] = true;
  }
  void Clear() {
    few_ = 0;
    more_.clear();
  }

 private:
  uint64_t few_ = 0;
  std::vector<bool> more_;
};

// Merges what the ranks announce, in any order, and decides what is done next. Lives on the coordinator
// (rank 0). No I/O and no clock of its own: the same announcements give the same decisions.
class Negotiator {
 public:
  Negotiator(int size, size_t fusion_nbytes, size_t cache_capacity = kCacheCapacity);

  // `rank` has submitted `request` at `now`. It announces a name again only after that name was decided.
  void Announce(int rank, Request request, Clock::time_point now);
  // `rank` has submitted again what all ranks agreed on as `id`. If that is forgotten already, the rank will
  // see it in a round and announce in full. False if there never was such an id.
  bool Announce(int rank, CacheId id, Clock::time_point now);

  // Everything that all ranks have announced since the last call, in the order in which it got complete.
  Round Decide();

  bool has_ready() const { return !ready_.empty(); }

  // A name that some ranks have announced and others have not.
  struct Waiting {
    std::string name;
    Op op;
    Clock::time_point since;
    std::vector<int> announced;
    std::vector<int> missing;
  };
  std::vector<Waiting> Waits() const;
  bool idle() const { return entries_.empty() && known_waiting_ == 0; }  // nothing is announced and undecided
  // The first name that waits for `rank`.
  std::optional<std::string> WaitsFor(int rank) const;

  // "allreduce 'x' was submitted by rank 0, 2 but not by rank 1, which waits in 'y'".
  std::string Describe(const Waiting& waiting) const;

 private:
  // A name that some rank has announced in full.
  struct Entry {
    std::vector<std::optional<Request>> by_rank;
    std::vector<CacheId> ids;  // kNoId where a rank announced in full
    int announced = 0;
    bool is_ready = false;  // all have announced it that have not joined
    Clock::time_point since;
    const Request& first() const;  // of the first rank that has
  };
  // What was agreed on, and who has announced it again by its id.
  struct Known {
    int count = 0;
    RankSet announced;
    Clock::time_point since;
    Request request;                           // rank 0's
    std::vector<std::vector<Location>> where;  // [rank][member]; empty if nothing lies in the arena
    std::vector<std::vector<int64_t>> rows;    // as in Decision
  };

  Entry& EntryOf(const std::string& name, Clock::time_point now);
  void Add(Entry& entry, int rank, Request request, CacheId id);
  void Join(int rank, Clock::time_point now);
  void PushIfComplete(const std::string& name, Entry& entry);
  Request StandIn(const Request& other) const;
  static Request Expand(const Known& known, int rank);
  Known Remember(const Entry& entry, const Decision& decision) const;
  Decision DecideAbout(const Entry& entry, const std::string& name) const;
  void Forget(const Cache<Known>::Entry& forgotten);
  // The name that `rank` has announced and waits in; empty if there is none.
  std::string WaitsIn(int rank) const;

  const int size_;
  const size_t fusion_nbytes_;
  std::map<std::string, Entry> entries_;
  Cache<Known> known_;
  int known_waiting_ = 0;  // entries of known_ that some ranks have announced
  RankSet joined_;         // while some are, nothing is decided by number
  int num_joined_ = 0;
  int last_joined_ = -1;
  std::vector<CacheId> ready_;  // all have announced it; kNoId: the next one of ready_in_full_
  std::vector<std::string> ready_in_full_;
};

// Why the requests of the ranks under one name do not go together; empty if they do. Some ranks may have
// none.
// For example "grad/fc1.weight: rank 3 has shape (12,), rank 0 has (10,)".
std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank);

}  // namespace hvd
