// What the timeline hears of a plan.
#include "scheduler/plan.h"

namespace hvd {

void Plan::NoteWire(BatchState* batch) const {
  if (batch->wire_ns == 0) return;
  const int64_t now_ns = NowNs();
  batch->phases.Add(Phase::kWire, batch->wire_ns, now_ns);
  batch->wire_ns = now_ns;
}

void Plan::NoteDone(size_t b) const {
  const BatchState& batch = batches_[b];
  const int64_t done_ns = NowNs();
  const uint64_t number = step_.load(std::memory_order_relaxed) * batches_.size() + b;
  const PlanLayout::Batch& planned = layout_.batches[b];
  const auto& parts = planned.row.parts();
  for (const MemberPart& part : parts) {
    const Member& member = spec_.members[part.member];
    if (part.begin + part.count < member.count()) continue;  // its end stands for it
    const MemberState& state = members_[part.member];
    TensorTrace tensor{member.name, "allreduce", BatchRow::kPlan, number, member.nbytes()};
    tensor.queued_ns = state.is_given ? state.given_ns : batch.declared_ns;
    tensor.negotiated_ns = batch.resolved_ns;
    tensor.begun_ns = batch.begun_ns;
    tensor.reduced_ns = tensor.done_ns = done_ns;
    trace_->Tensor(tensor);
  }
  const uint64_t nbytes = planned.row.count() * ItemSize(planned.dtype);
  const std::string what = std::string("allreduce ") + Name(planned.dtype);
  trace_->Batch(
      {BatchRow::kPlan, number, what, static_cast<uint32_t>(parts.size()), nbytes, batch.begun_ns, done_ns},
      batch.phases.spans());
}

}  // namespace hvd
