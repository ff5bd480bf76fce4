#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hvd {

// What the ranks of a host tell each other about a plan: shared memory of one rank, zero at first, written by
// its owner and read by the others (who ring the bell, and write results into the window). A word that equals
// the number of the step under way says that something has happened in it.
class PlanWords {
 public:
  struct alignas(64) Head {
    std::atomic<uint32_t> ended;     // this rank will hand over nothing more
    std::atomic<uint32_t> flags;     // written before `ended`
    std::atomic<uint32_t> finished;  // this rank has read all that it needs from others
    std::atomic<uint32_t> gone;      // not 0: this rank takes no part in this step and later ones
    std::atomic<uint32_t> agreed;    // the votes of all hosts are in agreed_votes()
  };
  struct alignas(64) Bell {
    std::atomic<uint32_t> rung;
    std::atomic<uint32_t> sleeping;
  };
  // One line for each fused batch, so that who waits for one does not slow who works on another.
  struct alignas(64) Batch {
    std::atomic<uint32_t> declared;  // the statuses of its members are valid, and they are staged
    std::atomic<uint32_t> reduced;   // its slice of the result is in the windows of the others
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free);

  // What a rank has of a member; the largest one counts.
  enum Status : uint8_t { kNothing, kTensor, kDeclined };
  // For each bit of the flags one vote that it is set, and one that it is not.
  static constexpr size_t kVotes = 64;

  PlanWords(std::byte* at, size_t batches, size_t parts) : at_(at), batches_(batches), parts_(parts) {}

  // A window may follow.
  static size_t Nbytes(size_t batches, size_t parts) {
    const size_t nbytes = StatusAt(batches) + 2 * parts + 2 * kVotes;
    return (nbytes + 63) / 64 * 64;
  }

  Head& head() const { return *reinterpret_cast<Head*>(at_); }
  Bell& bell() const { return *reinterpret_cast<Bell*>(at_ + sizeof(Head)); }
  Batch& batch(size_t b) const { return *reinterpret_cast<Batch*>(at_ + StatusAt(b)); }
  // For the parts of members in the order of batches: what this rank has, before `declared`, and what all
  // have, where this rank has found it out, between hosts before `reduced`.
  uint8_t* statuses() const { return reinterpret_cast<uint8_t*>(at_ + StatusAt(batches_)); }
  uint8_t* agreed_statuses() const { return statuses() + parts_; }
  // kVotes each, before `ended` and `agreed`.
  uint8_t* votes() const { return statuses() + 2 * parts_; }
  uint8_t* agreed_votes() const { return votes() + kVotes; }
  std::byte* window() const { return at_ + Nbytes(batches_, parts_); }

 private:
  static size_t StatusAt(size_t batches) { return sizeof(Head) + sizeof(Bell) + batches * sizeof(Batch); }

  std::byte* at_;
  size_t batches_;
  size_t parts_;
};

}  // namespace hvd
