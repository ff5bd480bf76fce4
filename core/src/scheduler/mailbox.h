#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "transport/arena.h"

namespace hvd {

// Words that the ranks of a host leave for each other in shared memory, so that what was agreed before needs
// no system call: ranks announce to rank 0, which tells all of them what it decided. Each rank writes into
// its own mailbox only; readers keep their position, and say in their own mailbox how far they are, so that
// nothing unread is overwritten. Seen by one rank; owned by one thread at a time.
//
// Who is going to sleep says so (SetAsleep) and then looks once more; who has written looks for sleepers and
// wakes them by other means. One of the two sees the other.
class Mailboxes {
 public:
  static constexpr size_t kWords = 2048;
  static constexpr int kMostRanks = 256;

  // The arena is complete, has at most kMostRanks, and outlives this object.
  explicit Mailboxes(const Arena& arena);

  // Adds words to this rank's mailbox; false and nothing written if they do not fit now. Not ok if a reader
  // says nonsense.
  Result<bool> Write(std::span<const uint32_t> words);
  // Words that would fit.
  Result<size_t> Room();
  // Takes everything unread of `rank`, after what is in *words. Not ok if it wrote nonsense.
  Status Read(int rank, std::vector<uint32_t>* words);
  // Whether a Read of one that this rank reads would find something.
  bool HasNews() const;

  void SetAsleep(bool asleep);
  bool IsAsleep(int rank) const;

  // The ranks whose mailboxes this one reads, and who read its own.
  const std::vector<int>& partners() const { return partners_; }

 private:
  struct Box {
    alignas(64) std::atomic<uint32_t> written;  // words so far
    alignas(64) std::atomic<uint32_t> asleep;
    alignas(64) std::atomic<uint32_t> read[kMostRanks];  // words that the owner has read of each rank's
    alignas(64) std::atomic<uint32_t> words[kWords];
  };
  static_assert(sizeof(Box) <= Arena::kMailboxNbytes && (kWords & (kWords - 1)) == 0);

  Box& box(int rank) const { return *boxes_[static_cast<size_t>(rank)]; }

  const int rank_;
  std::vector<Box*> boxes_;
  std::vector<int> partners_;
  uint32_t written_ = 0;
  bool asleep_ = false;
  std::vector<uint32_t> read_;  // by rank
};

}  // namespace hvd
