#include "scheduler/trace.h"

#include <algorithm>

#include "scheduler/trace_notes.h"

namespace hvd {

bool Trace::HasRoom() {
  if (notes_.size() < kMostNbytes) return true;
  ++dropped_;
  return false;
}

void Trace::Tensor(const TensorTrace& tensor) {
  MutexLock lock(mutex_);
  if (HasRoom()) PutTensor(tensor, &notes_);
}

void Trace::Batch(const BatchTrace& batch, const std::vector<PhaseSpan>& phases) {
  MutexLock lock(mutex_);
  if (HasRoom()) PutBatch(batch, phases, &notes_);
}

void Trace::Mark(std::string_view text, int64_t at_ns) {
  MutexLock lock(mutex_);
  if (HasRoom()) PutMark({text, at_ns}, &notes_);
}

std::string Trace::Take() {
  MutexLock lock(mutex_);
  std::string notes = std::move(notes_);
  notes_.clear();
  if (dropped_ > 0) {
    PutMark({std::to_string(dropped_) + " notes dropped: too many at once", NowNs()}, &notes);
    dropped_ = 0;
  }
  return notes;
}

int64_t ClockAheadNs(const std::vector<Ping>& pings) {
  const auto fastest = std::min_element(pings.begin(), pings.end(), [](const Ping& a, const Ping& b) {
    return a.back_ns - a.sent_ns < b.back_ns - b.sent_ns;
  });
  if (fastest == pings.end()) return 0;
  return fastest->sent_ns + (fastest->back_ns - fastest->sent_ns) / 2 - fastest->answered_ns;
}

}  // namespace hvd
