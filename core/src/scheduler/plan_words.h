#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hvd {

// What the ranks of a host tell each other about a plan: shared memory of one rank, zero at first, written by
// its owner and read by the others (the bell is rung by the others). A word that equals the number of the
// step under way says that something has happened in it.
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
    std::atomic<uint32_t> declared;  // the places of its members are valid
    std::atomic<uint32_t> reduced;   // its slice of the result is in its own memory
  };
  // Where the owner has a member, in its own memory. For `in`: 0 if it has none, kElsewhere if the plan
  // cannot carry it in this step. `out` is where the result goes.
  struct Place {
    std::atomic<uint64_t> in;
    std::atomic<uint64_t> out;
  };
  static constexpr uint64_t kElsewhere = 1;
  static constexpr uint64_t kEmpty = 2;  // no elements
  static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

  // What a rank has of a member, as it travels between hosts; the largest one counts.
  enum Status : uint8_t { kNothing, kTensor, kDeclined };
  // For each bit of the flags one vote that it is set, and one that it is not.
  static constexpr size_t kVotes = 64;

  PlanWords(std::byte* at, size_t batches, size_t members) : at_(at), batches_(batches), members_(members) {}

  // Staging areas may follow.
  static size_t Nbytes(size_t batches, size_t members) {
    const size_t nbytes = StatusAt(batches, members) + 2 * members + 2 * kVotes;
    return (nbytes + 63) / 64 * 64;
  }

  Head& head() const { return *reinterpret_cast<Head*>(at_); }
  Bell& bell() const { return *reinterpret_cast<Bell*>(at_ + sizeof(Head)); }
  Batch& batch(size_t b) const {
    return *reinterpret_cast<Batch*>(at_ + sizeof(Head) + sizeof(Bell) + b * sizeof(Batch));
  }
  Place& place(size_t member) const {
    return *reinterpret_cast<Place*>(at_ + PlacesAt(batches_) + member * sizeof(Place));
  }
  // Several hosts only, for members in the order of batches: what this rank has, before `declared`, and what
  // all have, before `reduced`.
  uint8_t* statuses() const { return reinterpret_cast<uint8_t*>(at_ + StatusAt(batches_, members_)); }
  uint8_t* agreed_statuses() const { return statuses() + members_; }
  // kVotes each, before `ended` and `agreed`.
  uint8_t* votes() const { return statuses() + 2 * members_; }
  uint8_t* agreed_votes() const { return votes() + kVotes; }
  std::byte* staging() const { return at_ + Nbytes(batches_, members_); }

 private:
  static size_t PlacesAt(size_t batches) { return sizeof(Head) + sizeof(Bell) + batches * sizeof(Batch); }
  static size_t StatusAt(size_t batches, size_t members) {
    return PlacesAt(batches) + members * sizeof(Place);
  }

  std::byte* at_;
  size_t batches_;
  size_t members_;
};

}  // namespace hvd
