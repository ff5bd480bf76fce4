#include "scheduler/plan.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/log.h"
#include "base/pause.h"

namespace hvd {
namespace {

// How long a dead peer or an abort can go unnoticed by a rank that sleeps in a step.
constexpr auto kTick = std::chrono::milliseconds(20);
// How long to listen for the reason why a rank of this host has left.
constexpr auto kLastWords = std::chrono::seconds(1);
// Waiting for a link while ranks of this host are awaited as well: those do not end a poll.
constexpr int kLinkWaitMs = 1;

std::vector<PlanWords> WordsOf(const PlanHost& host, const PlanLayout& layout) {
  std::vector<PlanWords> words;
  for (std::byte* at : host.words) words.emplace_back(at, layout.batches.size(), layout.parts);
  return words;
}

void SleepWhile(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
  const timespec timeout{0, std::chrono::nanoseconds(kTick).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::sleep_for(std::chrono::milliseconds(1));
#endif
}

void WakeSleeper([[maybe_unused]] std::atomic<uint32_t>& word) {
#ifdef __linux__
  ::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
#endif
}

uint64_t Nanoseconds(Clock::duration duration) {
  return static_cast<uint64_t>(std::chrono::nanoseconds(duration).count());
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
  if (progressed) times_.ready_ns += Nanoseconds(Clock::now() - begin);
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

// Wakes who sleeps. Pairs with SleepUnlessNews: the words before are seq_cst, so either it sees them or we
// see that it sleeps.
void Plan::Ring() {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == host_.rank) continue;
    PlanWords::Bell& bell = words_[static_cast<size_t>(rank)].bell();
    if (bell.sleeping.load(std::memory_order_seq_cst) == 0) continue;
    bell.rung.fetch_add(1, std::memory_order_seq_cst);
    WakeSleeper(bell.rung);
  }
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

bool Plan::AllEnded() const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  return std::all_of(words_.begin(), words_.end(), [&](const PlanWords& words) {
    return words.head().ended.load(std::memory_order_acquire) == step;
  });
}

// A rank that knows that all have finished may have begun the next step.
bool Plan::AllFinished() const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  return std::all_of(words_.begin(), words_.end(), [&](const PlanWords& words) {
    return static_cast<int32_t>(words.head().finished.load(std::memory_order_acquire) - step) >= 0;
  });
}

// This rank has all it needs from others; until here nobody's words of this step change.
void Plan::Settle() {
  outcome_.flags_of_all = ~0u;
  if (several_hosts()) {
    const uint8_t* const votes = words_.front().agreed_votes();
    outcome_.flags_of_all = 0;
    for (size_t bit = 0; bit < PlanWords::kVotes / 2; ++bit) {
      outcome_.flags_of_any |= static_cast<uint32_t>(votes[bit]) << bit;
      outcome_.flags_of_all |= static_cast<uint32_t>(votes[PlanWords::kVotes / 2 + bit] == 0) << bit;
    }
  }
  for (const PlanWords& words : words_) {
    if (several_hosts()) break;
    const uint32_t flags = words.head().flags.load(std::memory_order_relaxed);
    outcome_.flags_of_any |= flags;
    outcome_.flags_of_all &= flags;
  }
  auto& declined = outcome_.declined;
  std::sort(declined.begin(), declined.end());
  declined.erase(std::unique(declined.begin(), declined.end()), declined.end());  // of several batches
  is_settled_ = true;
  mine().head().finished.store(step_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
  Ring();
}

Result<bool> Plan::Turn(bool* progressed) {
  if (!is_settled_) {
    HVD_RETURN_IF_ERROR(Advance(progressed));
    if (several_hosts()) AgreeOnVotes(progressed);
    if (several_hosts() && done_ == batches_.size() && !is_agreed_) ResolveAgreed();
    if (done_ < batches_.size() || !needs_.empty() || !AllEnded()) return false;
    const uint32_t agreed = words_.front().head().agreed.load(std::memory_order_acquire);
    if (several_hosts() && agreed != step_.load(std::memory_order_relaxed)) return false;
    Settle();
    *progressed = true;
  }
  if (!AllFinished()) return false;
  HVD_RETURN_IF_ERROR(Check());
  return true;
}

Result<Plan::Progress> Plan::End(uint32_t flags, Clock::time_point deadline) {
  HVD_RETURN_IF_ERROR(broken_);
  if (!is_open()) return Status(Code::kInvalid, "'" + spec_.name + "': no step is open");
  const auto begin = Clock::now();
  if (!has_ended_) CompleteRest(flags);
  int idle = 0;
  for (;;) {
    bool progressed = false;
    Result<bool> turn = Turn(&progressed);
    if (turn.ok() && !turn.value() && !progressed && needs_.empty()) {
      const auto before = Clock::now();
      if (++idle < (host_.has_cpu_for_each ? kSpins : 1)) {
        Pause();
      } else if (idle < kSpins + kYields) {
        ::sched_yield();
      } else {
        SleepUnlessNews(&progressed, &turn);
        if (turn.ok() && !turn.value()) {
          if (Status status = Check(); !status.ok()) turn = status;
        }
        if (turn.ok() && !turn.value()) {
          if (Status status = CheckStall(); !status.ok()) turn = status;
        }
      }
      times_.wait_ns += Nanoseconds(Clock::now() - before);
    }
    if (progressed) idle = 0;
    const auto now = Clock::now();
    const bool is_over = !turn.ok() || turn.value();
    const bool needs_memory = !progressed && !needs_.empty();
    if (!is_over && !needs_memory && now < deadline) continue;
    times_.end_ns += Nanoseconds(now - begin);
    if (!turn.ok()) return Fail(turn.status());
    if (!turn.value()) return needs_memory ? Progress::kNeedsMemory : Progress::kPending;
    open_.store(false, std::memory_order_seq_cst);
    return Progress::kDone;
  }
}

void Plan::SleepUnlessNews(bool* progressed, Result<bool>* turn) {
  if (AwaitsLinks()) {
    fds_.clear();
    host_.chain->Wants(&fds_);
    ::poll(fds_.data(), static_cast<nfds_t>(fds_.size()), kLinkWaitMs);
    *turn = Turn(progressed);
    return;
  }
  PlanWords::Bell& bell = mine().bell();
  const uint32_t rung = bell.rung.load(std::memory_order_seq_cst);
  bell.sleeping.store(1, std::memory_order_seq_cst);
  *turn = Turn(progressed);
  if (turn->ok() && !turn->value() && !*progressed && needs_.empty()) SleepWhile(bell.rung, rung);
  bell.sleeping.store(0, std::memory_order_relaxed);
}

// Not ok if the Group is dead or a rank has gone: what was read from it need not be what it was.
Status Plan::Check() {
  HVD_RETURN_IF_ERROR(host_.status());
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint32_t step = step_.load(std::memory_order_relaxed);
  for (int rank = 0; rank < size(); ++rank) {
    const uint32_t gone = words_[static_cast<size_t>(rank)].head().gone.load(std::memory_order_seq_cst);
    if (gone == 0 || static_cast<int32_t>(gone - step) > 0) continue;
    return Status(Code::kShutdown, "rank " + NameOf(rank) + " has left");
  }
  if (!AwaitsLinks() || !host_.has_left(host_.chain->awaited_rank())) return Status::Ok();
  const auto now = Clock::now();
  if (!left_at_) left_at_ = now;
  if (now - *left_at_ < kCauseWithin) return Status::Ok();
  return Status(Code::kShutdown, "rank " + std::to_string(host_.chain->awaited_rank()) + " has left");
}

// The others are told, and the first cause wins: what killed the Group, if that is known soon.
Status Plan::Fail(Status status) {
  const auto deadline = Clock::now() + (status.code() == Code::kPeerLost ? kCauseWithin : kLastWords);
  Status cause = host_.status();
  while (cause.ok() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cause = host_.status();
  }
  host_.kill(Status(status.code(), std::string(status.text()) + " (in '" + spec_.name + "')"));
  const bool is_own = cause.ok() || status.code() == Code::kTimeout;
  broken_ = is_own ? status : Status(cause.code(), std::string(cause.text()) + " (in " + Waits() + ")");
  Leave();
  return broken_;
}

void Plan::Leave() {
  if (::getpid() != pid_) return;  // forked: the words are not mapped here, and the parent goes on
  const uint32_t step = step_.load(std::memory_order_relaxed);
  const bool is_open = open_.load(std::memory_order_seq_cst);
  const uint32_t first = is_open ? step : step + 1;
  uint32_t nobody = 0;
  mine().head().gone.compare_exchange_strong(nobody, std::max(first, 1u), std::memory_order_seq_cst);
  // What the owner does with its memory from now on comes after, for everybody.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Ring();
  // The links are in the middle of something, for everybody. No effect on a Group that is dead.
  if (is_open && several_hosts())
    host_.kill(Status(Code::kShutdown, "rank " + NameOf(host_.rank) + " has left '" + spec_.name + "'"));
}

template <class IsLate>
std::string Plan::Late(const char* what, IsLate is_late) const {
  std::string ranks;
  for (int rank = 0; rank < size(); ++rank) {
    if (is_late(rank)) ranks += (ranks.empty() ? "" : ", ") + NameOf(rank);
  }
  return ranks.empty() ? "" : ", " + std::string(what) + " by rank " + ranks;
}

bool Plan::HasEnded(int rank) const {
  return words_[static_cast<size_t>(rank)].head().ended.load() == step_.load(std::memory_order_relaxed);
}

// What this rank waits for: a fused batch by its first tensor, and who has not handed it over. Who is in End
// itself waits for others.
std::string Plan::Waits() const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  const auto words = [&](int rank, size_t b) -> const auto& {
    return words_[static_cast<size_t>(rank)].batch(b);
  };
  std::string late, text = "'" + spec_.name + "'";
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (batches_[b].is_done) continue;
    const uint32_t first = layout_.batches[b].row.parts().front().member;
    text += ", fused batch of '" + spec_.members[first].name + "'";
    late = Late("not handed over",
                [&](int rank) { return words(rank, b).declared.load() != step && !HasEnded(rank); });
    if (late.empty())
      late = Late("not handed over", [&](int rank) { return words(rank, b).declared.load() != step; });
    if (late.empty() && several_hosts()) {
      const int beyond = AwaitsLinks() ? host_.chain->awaited_rank() : -1;
      return text + ", not back from " +
             (beyond < 0 ? "other hosts" : "the host of rank " + std::to_string(beyond));
    }
    if (late.empty())
      late = Late("not reduced", [&](int rank) { return words(rank, b).reduced.load() != step; });
    return text + late;
  }
  late = Late("not ended", [&](int rank) { return !HasEnded(rank); });
  if (!late.empty()) return text + late;
  if (several_hosts() && !is_settled_) return text + ", not ended on other hosts";
  return text + Late("not ended", [&](int rank) {
           return static_cast<int32_t>(words_[static_cast<size_t>(rank)].head().finished.load() - step) < 0;
         });
}

bool Plan::IsLateElsewhere() const {
  if (!several_hosts()) return false;
  const uint32_t step = step_.load(std::memory_order_relaxed);
  return std::all_of(words_.begin(), words_.end(), [&](const PlanWords& words) {
    const bool waits = words.head().ended.load() == step;
    return waits || (first_ < batches_.size() && words.batch(first_).declared.load() == step);
  });
}

Status Plan::CheckStall() {
  const auto now = Clock::now();
  const auto age = now - ended_at_;
  const LongPhases* const phases = host_.long_phases;
  const auto excused_until = phases == nullptr ? Clock::time_point::min() : phases->ExcusedUntil(now);
  const auto unexcused = now - std::max(ended_at_, excused_until);
  const auto text = [&](const char* setting) {
    return Waits() + " for " + WholeSeconds(age) + " (" + setting + ")" +
           (phases == nullptr ? "" : phases->Describe(now));
  };
  // Who waits for another host leaves it to a rank there to say who is missing.
  const auto limit = IsLateElsewhere() ? host_.stall_shutdown * 3 / 2 : host_.stall_shutdown;
  if (host_.stall_shutdown > Clock::duration::zero() && unexcused > limit) {
    const Status status(Code::kTimeout, text("stall_shutdown_s"));
    host_.kill(status);
    return status;
  }
  if (warned_ || age < host_.stall_warn) return Status::Ok();
  warned_ = true;
  // One rank speaks for all that wait.
  for (int rank = 0; rank < host_.rank; ++rank) {
    if (HasEnded(rank)) return Status::Ok();
  }
  Log(Level::kWarning, text("stall_warn_s"));
  return Status::Ok();
}

}  // namespace hvd
