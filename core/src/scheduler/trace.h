#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/phases.h"

namespace hvd {

// Times are NowNs() of the host that noted them.

// Whether the number can be one, or a difference of two, so that reckoning with it overflows nowhere: another
// rank may say anything.
inline bool IsTraceTime(int64_t ns) {
  constexpr int64_t kThirtyYears = 1'000'000'000'000'000'000;
  return ns > -kThirtyYears && ns < kThirtyYears;
}

// Which of a rank's rows a fused batch is drawn in: those of a row never overlap.
enum class BatchRow : uint8_t { kEager, kPlan };

// A run over the data.
struct BatchTrace {
  BatchRow row = BatchRow::kEager;
  uint64_t number = 0;    // counted per row, equal on all ranks
  std::string_view what;  // "allreduce float32"
  uint32_t tensors = 0;
  uint64_t nbytes = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// A tensor on its way. queued <= negotiated <= begun <= reduced <= done.
struct TensorTrace {
  std::string_view name;
  std::string_view what;  // "allreduce"
  BatchRow row = BatchRow::kEager;
  uint64_t batch = 0;
  uint64_t nbytes = 0;
  int64_t queued_ns = 0;
  int64_t negotiated_ns = 0;  // all ranks have it
  int64_t begun_ns = 0;       // its fused batch began ...
  int64_t reduced_ns = 0;     // ... and ended
  int64_t done_ns = 0;        // its handle is complete
  bool failed = false;        // it never got done; later times are those of the failure
};

// What a rank notes while a timeline is written. Notes wait here, packed, until somebody takes them; if
// nobody does, new ones are dropped and counted. Any thread.
class Trace {
 public:
  // More than this waits for nobody.
  static constexpr size_t kMostNbytes = 8 << 20;
  // Worth sending before the usual interval is over.
  static constexpr size_t kManyNbytes = 64 << 10;

  void Tensor(const TensorTrace& tensor) EXCLUDES(mutex_);
  void Batch(const BatchTrace& batch, const std::vector<PhaseSpan>& phases) EXCLUDES(mutex_);
  // A moment, drawn as a line over the rank's rows.
  void Mark(std::string_view text, int64_t at_ns) EXCLUDES(mutex_);

  // What was noted since the last Take; empty if nothing.
  std::string Take() EXCLUDES(mutex_);
  bool HasMany() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return notes_.size() >= kManyNbytes;
  }

 private:
  bool HasRoom() REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::string notes_ GUARDED_BY(mutex_);
  uint64_t dropped_ GUARDED_BY(mutex_) = 0;
};

// How far a host's clock is ahead of rank 0's, from a ping that left here at `sent_ns`, was answered at
// `answered_ns` of rank 0's clock and was back at `back_ns`: the answer is taken to be half way. Wrong by at
// most half of the round trip.
struct Ping {
  int64_t sent_ns = 0;
  int64_t answered_ns = 0;
  int64_t back_ns = 0;
};
// By the fastest of the pings; 0 without any. Pure.
int64_t ClockAheadNs(const std::vector<Ping>& pings);

}  // namespace hvd
