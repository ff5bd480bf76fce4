// Where the time of one fused batch goes, for the trace. Off is a null pointer: a PhaseScope then costs one
// test.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace hvd {

// CLOCK_MONOTONIC: one clock for all processes of a host.
inline int64_t ToNs(std::chrono::steady_clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}
inline int64_t NowNs() { return ToNs(std::chrono::steady_clock::now()); }

// The numbers travel between ranks: append, never reorder.
enum class Phase : uint8_t { kCopyIn, kWait, kReduce, kWire, kCopyOut };
inline constexpr int kNumPhases = 5;

struct PhaseSpan {
  Phase phase;
  int64_t begin_ns;
  int64_t end_ns;
};

// What one thread did, in the order of time; spans do not overlap. Of one thread at a time.
class Phases {
 public:
  // Spans of one phase with less than this between them become one: chunks of a pipeline.
  static constexpr int64_t kGapNs = 1000;
  // A batch of many chunks is shown up to here.
  static constexpr size_t kMost = 512;

  void Add(Phase phase, int64_t begin_ns, int64_t end_ns) {
    if (!spans_.empty() && spans_.back().phase == phase && begin_ns - spans_.back().end_ns < kGapNs) {
      spans_.back().end_ns = end_ns;
    } else if (spans_.size() < kMost) {
      spans_.push_back({phase, begin_ns, end_ns});
    }
  }
  const std::vector<PhaseSpan>& spans() const { return spans_; }
  void Clear() { spans_.clear(); }

 private:
  std::vector<PhaseSpan> spans_;
};

// Adds its own life time. Scopes of one Phases do not nest.
class PhaseScope {
 public:
  PhaseScope(Phases* phases, Phase phase)
      : phases_(phases), phase_(phase), begin_ns_(phases == nullptr ? 0 : NowNs()) {}
  ~PhaseScope() {
    if (phases_ != nullptr) phases_->Add(phase_, begin_ns_, NowNs());
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Phases* const phases_;
  const Phase phase_;
  const int64_t begin_ns_;
};

// What work() returns.
template <class Work>
auto InPhase(Phases* phases, Phase phase, Work work) {
  const PhaseScope scope(phases, phase);
  return work();
}

}  // namespace hvd
