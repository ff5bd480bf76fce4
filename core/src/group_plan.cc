// How a Group comes to a plan: it offers its words, and joins those of the others.
#include <algorithm>

#include "group.h"

namespace hvd {

Result<PlanOffer> Group::OfferPlan(PlanSpec spec) {
  Request request{Op::kAllreduce, spec.name, spec.reduce, spec.scale.pre, spec.scale.post, 0, spec.members};
  HVD_RETURN_IF_ERROR(Check(request));
  auto words = Empty(Plan::WordsNbytes(spec));
  if (!words.ok()) return words.status();
  request.op = Op::kPlan;
  const std::byte* at = words.value()->data();
  if (!request.members.empty()) {
    request.members.front().where = Locate({at, words.value()->data()}, Plan::WordsNbytes(spec));
  }
  auto handle = Submit(std::move(request), {});
  if (!handle.ok()) return handle.status();
  return PlanOffer{std::move(spec), std::move(words).value(), std::move(handle).value()};
}

std::shared_ptr<Plan> Group::JoinPlan(const PlanOffer& offer) {
  const Meeting& meeting = offer.handle->meeting();
  auto segments = meeting.segments;
  if (size_ == 1) segments = {offer.words};
  if (segments.size() != static_cast<size_t>(size_) || (size_ > 1 && meeting.read == nullptr)) return nullptr;
  PlanHost host;
  host.rank = rank_;
  for (size_t r = 0; r < segments.size(); ++r) {
    const size_t offset = size_ == 1 ? 0 : meeting.offsets[r];
    const size_t room = segments[r]->nbytes();
    if (offset > room || room - offset < Plan::WordsNbytes(offer.spec)) return nullptr;
    host.words.push_back(segments[r]->data() + offset);
  }
  host.owner = std::make_shared<const std::vector<std::shared_ptr<Segment>>>(std::move(segments));
  host.read = meeting.read;
  host.status = [this] { return engine_->status(); };
  host.abort = [this](const std::string& reason) { engine_->Abort(reason); };
  host.has_cpu_for_each = meeting.has_cpu_for_each;
  host.stall_warn = meeting.stall_warn;
  host.stall_shutdown = meeting.stall_shutdown;
  host.trace = [this] { return engine_->tracer().trace(); };
  auto plan = std::make_shared<Plan>(offer.spec, std::move(host));
  MutexLock lock(mutex_);
  std::erase_if(plans_, [](const auto& other) { return other.expired(); });
  plans_.push_back(plan);
  return plan;
}

void Group::Close() {
  {
    MutexLock lock(mutex_);
    for (const auto& weak : plans_) {
      if (const auto plan = weak.lock()) plan->Leave();
    }
  }
  engine_->Close();
}

}  // namespace hvd
