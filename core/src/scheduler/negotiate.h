#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/request.h"

namespace hvd {

// Merges what the ranks announce, in any order, and decides what is done next. Lives on the coordinator
// (rank 0). No I/O and no clock of its own: the same announcements give the same decisions.
class Negotiator {
 public:
  Negotiator(int size, size_t fusion_nbytes);

  // `rank` has submitted `request` at `now`. It announces a name again only after that name was decided.
  void Announce(int rank, Request request, Clock::time_point now);

  // Everything that all ranks have announced since the last call, in the order in which it got complete.
  Round Decide();

  // A name that some ranks have announced and others have not.
  struct Waiting {
    std::string name;
    Clock::time_point since;
    std::vector<int> announced;
    std::vector<int> missing;
  };
  std::vector<Waiting> Waits() const;
  bool idle() const { return entries_.empty(); }  // nothing is announced and undecided
  // The first name that waits for `rank`.
  std::optional<std::string> WaitsFor(int rank) const;

  // "allreduce 'x' was submitted by rank 0, 2 but not by rank 1, which waits in 'y'".
  std::string Describe(const Waiting& waiting) const;

 private:
  struct Entry {
    std::vector<std::optional<Request>> by_rank;
    int announced = 0;
    Clock::time_point since;
  };

  const int size_;
  const size_t fusion_nbytes_;
  std::map<std::string, Entry> entries_;
  std::vector<std::string> ready_;
};

// Why the requests of the ranks under one name do not go together; empty if they do.
// For example "grad/fc1.weight: rank 3 has shape (12,), rank 0 has (10,)".
std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank);

}  // namespace hvd
