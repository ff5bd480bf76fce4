// What the timeline hears of a plan.
#include "scheduler/plan.h"

namespace hvd {

void Plan::NoteDone(size_t b) const {
  const BatchState& batch = batches_[b];
  const int64_t done_ns = NowNs();
  const uint64_t number = step_.load(std::memory_order_relaxed) * batches_.size() + b;
  const DType dtype = spec_.members[batch.members.front()].dtype;
  uint64_t nbytes = 0;
  for (const uint32_t m : batch.members) {
    const Member& member = spec_.members[m];
    nbytes += member.nbytes();
    TensorTrace tensor{member.name, "allreduce", BatchRow::kPlan, number, member.nbytes()};
    tensor.queued_ns = members_[m].is_given ? members_[m].given_ns : batch.declared_ns;
    tensor.negotiated_ns = batch.resolved_ns;
    tensor.begun_ns = batch.begun_ns;
    tensor.reduced_ns = tensor.done_ns = done_ns;
    trace_->Tensor(tensor);
  }
  const std::string what = std::string("allreduce ") + Name(dtype);
  trace_->Batch({BatchRow::kPlan, number, what, static_cast<uint32_t>(batch.members.size()), nbytes,
                 batch.begun_ns, done_ns},
                batch.phases.spans());
}

}  // namespace hvd
