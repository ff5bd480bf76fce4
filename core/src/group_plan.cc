// How a Group comes to a plan: it offers its words, and joins those of the others.
#include <algorithm>

#include "group.h"

namespace hvd {

Result<PlanOffer> Group::OfferPlan(PlanSpec spec) {
  Request request{Op::kAllreduce, spec.name, spec.reduce, spec.scale.pre, spec.scale.post, 0, spec.members};
  HVD_RETURN_IF_ERROR(Check(request));
  auto words = Empty(Plan::WordsNbytes(spec, topology_.local_size()));
  if (!words.ok()) return words.status();
  request.op = Op::kPlan;
  std::byte* at = words.value()->data();
  if (!request.members.empty()) {
    // The words are the whole of a segment, so the offset can say which links this rank has seen returned.
    request.members.front().where = {Locate({at, at}, 1).segment, engine_->plan_links_returned()};
  }
  auto handle = Submit(std::move(request), {}, Then::kGoesOn, words.value());
  if (!handle.ok()) return handle.status();
  return PlanOffer{std::move(spec), std::move(words).value(), std::move(handle).value()};
}

std::shared_ptr<Plan> Group::JoinPlan(const PlanOffer& offer) {
  const Meeting meeting = offer.handle->TakeMeeting();
  auto segments = meeting.segments;
  if (size_ == 1) segments = {offer.words};
  if (segments.size() != static_cast<size_t>(topology_.local_size())) return nullptr;
  if (topology_.hosts() > 1 && meeting.links == nullptr) return nullptr;
  PlanHost host;
  host.rank = topology_.local_rank;
  host.first_rank = topology_.leader(topology_.host);
  host.hosts = topology_.hosts();
  host.owners = topology_.slices();
  for (const auto& segment : segments) {
    if (segment->nbytes() < Plan::WordsNbytes(offer.spec, topology_.local_size())) return nullptr;
    host.words.push_back(segment->data());
  }
  host.owner = std::make_shared<const std::vector<std::shared_ptr<Segment>>>(std::move(segments));
  host.status = [this] { return engine_->status(); };
  host.has_left = [this](int rank) { return engine_->HasLeft(rank); };
  host.kill = [this](const Status& reason) { engine_->Kill(reason); };
  if (meeting.links != nullptr) host.chain = MakeChain(topology_, *meeting.links, meeting.wire_dtype);
  host.links = meeting.links;
  host.has_cpu_for_each = meeting.has_cpu_for_each;
  host.stall_warn = meeting.stall_warn;
  host.stall_shutdown = meeting.stall_shutdown;
  host.long_phases = &engine_->long_phases();
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
