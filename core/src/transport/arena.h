#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/phases.h"
#include "base/status.h"
#include "base/tuning.h"
#include "transport/cpus.h"
#include "transport/exchange.h"
#include "transport/fd.h"

namespace hvd {

// A memfd mapping. It has no name, so nothing is left behind whatever kills its processes, and no fork
// inherits it. Lives until the last tensor over it is gone.
class Segment {
 public:
  // The memory is allocated here, not page by page later. Ask first whether it is there: a cgroup kills.
  static Result<std::shared_ptr<Segment>> Create(size_t nbytes);
  // Maps the segment of another rank; refuses one that is smaller than it says.
  static Result<std::shared_ptr<Segment>> Map(UniqueFd fd, size_t nbytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_.get(); }  // of the owner; -1 where it was mapped
  bool Contains(const void* at, size_t nbytes) const {
    const auto* p = static_cast<const std::byte*>(at);
    return p >= data_ && nbytes <= nbytes_ && p + nbytes <= data_ + nbytes_;
  }

 private:
  Segment(UniqueFd fd, std::byte* data, size_t nbytes) : fd_(std::move(fd)), data_(data), nbytes_(nbytes) {}
  static Result<std::shared_ptr<Segment>> MapShared(UniqueFd fd, size_t nbytes);

  UniqueFd fd_;
  std::byte* data_;
  size_t nbytes_;
};

// A place in a segment of one rank, as the ranks of a host tell it each other.
struct Location {
  static constexpr uint32_t kNone = ~0u;
  uint32_t segment = kNone;  // number of the owner's segment; kNone: not in the arena
  uint64_t offset = 0;
  bool valid() const { return segment != kNone; }
  bool operator==(const Location&) const = default;
};

// The shared memory of the ranks of one host, seen by one of them: every rank's control segment and the
// segments its tensors live in. Ranks are local ranks here, 0 .. size - 1.
//
// All ranks go through the same sequence of steps: Arrive() says that this rank has reached its next step,
// Await(step) waits until every rank has reached it. What a rank wrote before Arrive() is seen by everyone
// after Await(). A collective awaits the last step it arrives at, so what is double-buffered by the parity of
// its step (inline payloads, slots) is free again two steps later. Owned by one thread at a time.
class Arena {
 public:
  // Called every few milliseconds while waiting for a rank, to move frames and to say when to give up: not ok
  // ends the wait.
  using Tick = std::function<Status(int awaited_rank)>;

  // chunk_nbytes is what one staging buffer holds.
  static Result<std::unique_ptr<Arena>> Create(int rank, int size, size_t chunk_nbytes);

  // Segment `number` of `rank`; number 0 is its control segment, needed before the first step.
  Status AddSegment(int rank, uint32_t number, std::shared_ptr<Segment> segment);
  // Lets it go, on this rank; false if there is none.
  bool RemoveSegment(int rank, uint32_t number);
  // The segments of this rank that nobody else holds any more: no tensor lives in them.
  std::vector<uint32_t> UnusedSegments() const;
  bool HasSegment(int rank, uint32_t number) const;
  std::shared_ptr<Segment> SegmentOf(int rank, uint32_t number) const;  // null if it is not there
  std::byte* At(int rank, const Location& where, size_t nbytes) const;  // null if there is no such place

  const std::shared_ptr<Segment>& control() const { return control_; }
  size_t control_nbytes() const { return control_->nbytes(); }
  bool HasControl(int rank) const { return controls_[static_cast<size_t>(rank)] != nullptr; }
  bool complete() const;  // every rank's control segment is there

  // Finds out together with the other ranks whether there is a CPU for each. All ranks call it once, before
  // any other step, with what its cgroups grant it (Cpus::quota). Not ok: tick gave up on a rank.
  Status CountCpus(double quota, const Tick& tick);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(controls_.size()); }
  // Every rank can run on a CPU of its own, so it is worth to spin a little. The same on all ranks; known
  // from CountCpus on, and false before.
  bool has_cpu_for_each() const { return has_cpu_for_each_; }
  size_t chunk_nbytes() const { return chunk_nbytes_; }
  std::byte* staging(int rank, int buffer) const;
  // kMailboxNbytes that `rank` writes and the others read, zero at first; what is in them is the scheduler's
  // business.
  static constexpr size_t kMailboxNbytes = 16 << 10;
  std::byte* mailbox(int rank) const;
  // What `rank` has to say together with `step`: kInlineNbytes that arrive with the arrival word, in its
  // cache line; kSlotNbytes beside it. Written by their owner between the last Await and Arrive.
  static constexpr size_t kInlineNbytes = hvd::kInlineNbytes;
  std::byte* inlined(int rank, uint32_t step) const { return control(rank)->line[step % 2].payload; }
  static constexpr size_t kSlotNbytes = kOneShotCrowdedNbytes;
  std::byte* slot(int rank, uint32_t step) const;

  // The step that Arrive() will reach.
  uint32_t next_step() const { return step_ + 1; }
  // Returns the number of the step this rank has now reached.
  uint32_t Arrive();
  // Waits until all ranks, or one of them, have reached `step`.
  Status Await(uint32_t step, const Tick& tick);
  Status AwaitRank(int rank, uint32_t step, const Tick& tick);
  // Whether they have; does not wait.
  bool Reached(uint32_t step) const;
  Status ArriveAndAwait(const Tick& tick) { return Await(Arrive(), tick); }
  // Does work(part) for every part below `parts`, each on one of the ranks: whoever has a CPU takes the next
  // one. Returns when all are done. All ranks call it, each time after another step that all have reached.
  Status ShareOut(uint32_t parts, const std::function<void(uint32_t part)>& work, const Tick& tick);
  // For a rank that works for long and awaits nobody: calls tick, with this rank, if a few milliseconds have
  // gone by since it was last called here.
  Status Beat(const Tick& tick);

  // Where collectives over this arena note what they spend their time with; null if nobody looks.
  void ShowPhases(Phases* phases) { phases_ = phases; }
  Phases* phases() const { return phases_; }

 private:
  struct alignas(64) Line {
    std::atomic<uint32_t> arrived;  // the last step of this line's parity
    uint32_t unused;
    std::byte payload[kInlineNbytes];
  };
  static_assert(sizeof(Line) == 64);
  // Of one ShareOut.
  struct Shares {
    alignas(64) std::atomic<uint32_t> taken;
    alignas(64) std::atomic<uint32_t> done;
    std::atomic<uint32_t> sleepers;
  };
  // Cache lines of their own, so that a rank that waits does not slow the one it waits for.
  struct Control {
    Line line[2];
    alignas(64) std::atomic<uint32_t> sleepers;
    alignas(64) Cpus cpus;
    Shares shares[2];  // rank 0's are in use, in turns
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free);

  Arena(int rank, int size, size_t chunk_nbytes);
  Control* control(int rank) const {
    return reinterpret_cast<Control*>(controls_[static_cast<size_t>(rank)]->data());
  }

  const int rank_;
  const size_t chunk_nbytes_;
  bool has_cpu_for_each_ = false;
  uint32_t step_ = 0;
  uint32_t shared_out_ = 0;  // calls of ShareOut
  std::chrono::steady_clock::time_point last_beat_{};
  std::shared_ptr<Segment> control_;
  std::vector<std::shared_ptr<Segment>> controls_;
  std::vector<std::unordered_map<uint32_t, std::shared_ptr<Segment>>> segments_;
  Phases* phases_ = nullptr;
};

}  // namespace hvd
