// How a plan goes on without waiting: what is handed over, declared, resolved, reduced, copied out.
#include "scheduler/plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hvd {
namespace {

std::vector<PlanWords> WordsOf(const PlanHost& host, const PlanLayout& layout) {
  std::vector<PlanWords> words;
  for (std::byte* at : host.words) words.emplace_back(at, layout.batches.size(), layout.parts);
  return words;
}

}  // namespace

size_t Plan::WordsNbytes(const PlanSpec& spec, int ranks_on_host) {
  const PlanLayout layout(spec.members, spec.limits, kPlanWindowNbytes);
  const size_t nbytes = PlanWords::Nbytes(layout.batches.size(), layout.parts);
  return nbytes + (ranks_on_host > 1 ? layout.slots * layout.slot_nbytes : 0);
}

Plan::Plan(PlanSpec spec, PlanHost host)
    : spec_(std::move(spec)),
      host_(std::move(host)),
      layout_(spec_.members, spec_.limits, kPlanWindowNbytes),
      words_(WordsOf(host_, layout_)),
      data_(layout_, spec_.members, {spec_.reduce, spec_.scale}, words_, host_.rank, host_.owners),
      batches_(layout_.batches.size()),
      members_(spec_.members.size()) {
  const auto shared = [&](size_t first, auto part, auto result) {
    std::vector<const uint8_t*> of_ranks;
    for (const PlanWords& words : words_) of_ranks.push_back((words.*part)() + first);
    return SharedBytes(std::move(of_ranks), (mine().*result)() + first);
  };
  for (size_t b = 0; b < batches_.size(); ++b) {
    BatchState& batch = batches_[b];
    batch.fetched.resize(words_.size());
    if (!several_hosts()) continue;
    batch.travel.statuses = shared(layout_.batches[b].row.parts().front().status, &PlanWords::statuses,
                                   &PlanWords::agreed_statuses);
    batch.travel.bytes = BatchBytes(&data_, b);
  }
  votes_ = shared(0, &PlanWords::votes, &PlanWords::agreed_votes);
}

Status Plan::Begin() {
  HVD_RETURN_IF_ERROR(broken_);
  if (::getpid() != pid_)
    return Status(Code::kInvalid,
                  "'" + spec_.name + "' belongs to the process that this one was forked from");
  if (is_open()) return Status(Code::kInvalid, "'" + spec_.name + "': a step was begun and not ended");
  if (Status status = host_.status(); !status.ok()) return Fail(status);
  for (size_t b = 0; b < batches_.size(); ++b) {
    BatchState& batch = batches_[b];
    batch.waiting = static_cast<uint32_t>(layout_.batches[b].row.parts().size());
    batch.is_complete = batch.is_declared = batch.is_resolved = batch.is_reduced = batch.is_done = false;
    batch.lacks.clear();
    batch.fetched.assign(batch.fetched.size(), false);
    batch.fetched_count = 0;
    batch.travel.is_appended = false;
  }
  for (uint32_t m = 0; m < members_.size(); ++m) {
    members_[m] = {};
    data_.Put(m, nullptr);
  }
  has_ended_ = is_agreed_ = is_settled_ = warned_ = false;
  trace_ = host_.trace ? host_.trace() : nullptr;
  done_ = complete_ = appended_ = first_ = 0;
  vote_.reset();
  left_at_.reset();
  needs_.clear();
  outcome_ = {};
  step_.fetch_add(1, std::memory_order_relaxed);
  if (step_.load(std::memory_order_relaxed) == 0) step_.store(1, std::memory_order_relaxed);
  open_.store(true, std::memory_order_seq_cst);
  return Status::Ok();
}

Status Plan::Ready(uint32_t member, void* at) { return Give(member, PlanWords::kTensor, at); }

Status Plan::Decline(uint32_t member) { return Give(member, PlanWords::kDeclined, nullptr); }

Status Plan::Give(uint32_t member, PlanWords::Status status, void* at) {
  HVD_RETURN_IF_ERROR(broken_);
  if (!is_open() || has_ended_ || member >= members_.size())
    return Status(Code::kInvalid,
                  "'" + spec_.name + "': no step is open for member " + std::to_string(member));
  const auto& batches = layout_.batches_of[member];
  for (const uint32_t b : batches) {
    if (!batches_[b].is_declared) continue;
    return Status(Code::kInvalid,
                  spec_.members[member].name + " was handed over twice, and is being reduced already");
  }
  const auto begin = Clock::now();
  MemberState& state = members_[member];
  PutMember(member, status, static_cast<std::byte*>(at));
  for (const uint32_t b : batches) {
    if (!state.is_given && --batches_[b].waiting == 0) Complete(b);
  }
  state.is_given = true;
  if (trace_ != nullptr) state.given_ns = NowNs();
  if (complete_ == done_) return Status::Ok();
  bool progressed = false;
  Status advanced = Advance(&progressed);
  if (progressed)
    times_.ready_ns += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
  return advanced.ok() ? advanced : Fail(advanced);
}

// Between hosts what this rank has not counts as zeros, and the result goes where nobody looks.
void Plan::PutMember(uint32_t m, PlanWords::Status status, std::byte* at) {
  members_[m].status = status;
  data_.Put(m, status == PlanWords::kTensor ? at : several_hosts() ? data_.Spare(m) : nullptr);
}

void Plan::Complete(size_t b) {
  batches_[b].is_complete = true;
  ++complete_;
}

bool Plan::MayStage(size_t b) const {
  return size() == 1 || b < layout_.slots || batches_[b - layout_.slots].is_done;
}

void Plan::Declare(size_t b) {
  BatchState& batch = batches_[b];
  InPhase(trace_ == nullptr ? nullptr : &batch.phases, Phase::kCopyIn, [&] { data_.CopyIn(b); });
  for (const MemberPart& part : layout_.batches[b].row.parts())
    mine().statuses()[part.status] = members_[part.member].status;
  batch.is_declared = true;
  if (trace_ != nullptr) batch.declared_ns = NowNs();
  mine().batch(b).declared.store(step_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
  Ring();
}

void Plan::CompleteRest(uint32_t flags) {
  has_ended_ = true;
  ended_at_ = Clock::now();
  for (uint32_t m = 0; m < members_.size(); ++m) {
    if (!members_[m].is_given) PutMember(m, PlanWords::kNothing, nullptr);
  }
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (!batches_[b].is_complete) Complete(b);
  }
  for (size_t bit = 0; several_hosts() && bit < PlanWords::kVotes / 2; ++bit) {
    mine().votes()[bit] = flags >> bit & 1;
    mine().votes()[PlanWords::kVotes / 2 + bit] = !(flags >> bit & 1);
  }
  mine().head().flags.store(flags, std::memory_order_relaxed);
  mine().head().ended.store(step_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
  Ring();
}

Status Plan::Advance(bool* progressed) {
  for (bool moved = true; moved;) {
    moved = false;
    const size_t before = appended_;
    if (AwaitsLinks()) {
      const auto advanced = host_.chain->Advance();
      if (!advanced.ok()) return advanced.status();
      moved = advanced.value();
      if (moved) left_at_.reset();
    }
    while (first_ < batches_.size() && batches_[first_].is_done) ++first_;
    for (size_t b = first_; b < batches_.size(); ++b) {
      if (batches_[b].is_complete && !batches_[b].is_done) HVD_RETURN_IF_ERROR(AdvanceBatch(b, progressed));
    }
    moved |= appended_ != before;
    *progressed |= moved;
  }
  return Status::Ok();
}

Status Plan::AdvanceBatch(size_t b, bool* progressed) {
  BatchState& batch = batches_[b];
  const uint32_t step = step_.load(std::memory_order_relaxed);
  Phases* const phases = trace_ == nullptr ? nullptr : &batch.phases;
  if (!batch.is_declared) {
    if (!MayStage(b)) return Status::Ok();
    Declare(b);
    *progressed = true;
  }
  if (!batch.is_resolved) {
    if (!IsDeclaredByAll(b)) return Status::Ok();
    batch.is_resolved = true;
    if (!several_hosts()) Resolve(b);
    if (trace_ != nullptr) batch.resolved_ns = batch.begun_ns = NowNs();
  }
  if (LacksMemory(&batch)) return Status::Ok();
  if (!batch.is_reduced && owns_slice()) {
    if (several_hosts()) {
      Travel(b);
    } else {
      if (trace_ != nullptr) batch.begun_ns = NowNs();
      InPhase(phases, Phase::kReduce, [&] { data_.Reduce(b); });
      batch.is_reduced = true;
    }
    if (batch.is_reduced) {
      mine().batch(b).reduced.store(step, std::memory_order_seq_cst);
      Ring();
      *progressed = true;
    }
  }
  for (int owner = 0; owner < host_.owners; ++owner) {
    if (owner == host_.rank || batch.fetched[static_cast<size_t>(owner)]) continue;
    const PlanWords& theirs = words_[static_cast<size_t>(owner)];
    if (theirs.batch(b).reduced.load(std::memory_order_acquire) != step) continue;
    NoteWire(&batch);
    InPhase(phases, Phase::kCopyOut, [&] { data_.CopyOut(b, owner, several_hosts() ? owner : host_.rank); });
    if (batch.wire_ns != 0) batch.wire_ns = NowNs();
    batch.fetched[static_cast<size_t>(owner)] = true;
    ++batch.fetched_count;
    *progressed = true;
  }
  const size_t others = static_cast<size_t>(host_.owners) - (owns_slice() ? 1 : 0);
  if (batch.fetched_count == others && batch.is_reduced == owns_slice()) {
    batch.is_done = true;
    if (trace_ != nullptr) NoteDone(b);
    batch.phases.Clear();
    ++done_;
    *progressed = true;
  }
  return Status::Ok();
}

// Every host appends in the order of batches.
void Plan::Travel(size_t b) {
  BatchState& batch = batches_[b];
  PlanTravel& travel = batch.travel;
  if (!travel.is_appended && appended_ == b) {
    if (trace_ != nullptr) batch.begun_ns = batch.wire_ns = NowNs();
    ++appended_;
    const uint64_t agreed = host_.chain->Append(
        {DType::kUInt8, ReduceOp::kMax, {}, {0, layout_.batches[b].row.parts().size()}, &travel.statuses});
    travel.job = host_.chain->Append({layout_.batches[b].dtype, spec_.reduce, spec_.scale,
                                      data_.Slice(b, host_.rank), &travel.bytes, agreed});
    travel.is_appended = true;
  }
  batch.is_reduced = travel.is_appended && host_.chain->Done(travel.job);
  if (!batch.is_reduced) return;
  NoteWire(&batch);
  batch.wire_ns = 0;
}

// After all batches, and once for a host: what the flags of all ranks are.
void Plan::AgreeOnVotes(bool* progressed) {
  if (host_.rank != 0 || appended_ < batches_.size() || !AllEnded()) return;
  PlanWords::Head& head = mine().head();
  const uint32_t step = step_.load(std::memory_order_relaxed);
  if (head.agreed.load(std::memory_order_relaxed) == step) return;
  if (!vote_)
    vote_ = host_.chain->Append({DType::kUInt8, ReduceOp::kMax, {}, {0, PlanWords::kVotes}, &votes_});
  if (!host_.chain->Done(*vote_)) return;
  head.agreed.store(step, std::memory_order_seq_cst);
  Ring();
  *progressed = true;
}

bool Plan::IsDeclaredByAll(size_t b) const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  return std::all_of(words_.begin(), words_.end(), [&](const PlanWords& words) {
    return words.batch(b).declared.load(std::memory_order_acquire) == step;
  });
}

// All ranks have said what they have of the batch, so all come to the same conclusion.
void Plan::Resolve(size_t b) {
  BatchState& batch = batches_[b];
  for (const MemberPart& part : layout_.batches[b].row.parts()) {
    uint8_t agreed = PlanWords::kNothing;
    for (const PlanWords& words : words_) agreed = std::max(agreed, words.statuses()[part.status]);
    mine().agreed_statuses()[part.status] = agreed;
    if (agreed == PlanWords::kDeclined) outcome_.declined.push_back(part.member);
    if (agreed != PlanWords::kTensor || members_[part.member].status == PlanWords::kTensor) continue;
    batch.lacks.push_back(part.member);
    if (std::find(needs_.begin(), needs_.end(), part.member) == needs_.end()) needs_.push_back(part.member);
  }
}

// All have come, and with them what all hosts have.
void Plan::ResolveAgreed() {
  is_agreed_ = true;
  const uint8_t* const agreed = words_.front().agreed_statuses();
  for (uint32_t m = 0; m < members_.size(); ++m) {
    const auto& parts = layout_.batches[layout_.batches_of[m].front()].row.parts();
    const auto part = std::find_if(parts.begin(), parts.end(), [&](const auto& p) { return p.member == m; });
    const uint8_t status = agreed[part->status];
    if (status == PlanWords::kDeclined) outcome_.declined.push_back(m);
    if (status == PlanWords::kTensor && members_[m].status == PlanWords::kNothing) needs_.push_back(m);
  }
}

bool Plan::LacksMemory(BatchState* batch) const {
  std::erase_if(batch->lacks, [&](uint32_t m) { return members_[m].status == PlanWords::kTensor; });
  return !batch->lacks.empty();
}

void Plan::Supply(uint32_t member, void* at) {
  if (std::erase(needs_, member) == 0) return;
  const size_t nbytes = spec_.members[member].nbytes();
  // Between hosts the result is there already.
  if (several_hosts() && nbytes > 0) std::memcpy(at, data_.at(member), nbytes);
  members_[member].status = PlanWords::kTensor;
  data_.Put(member, static_cast<std::byte*>(at));
}

}  // namespace hvd
