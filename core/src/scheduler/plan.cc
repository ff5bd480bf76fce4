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
// How long to listen for the reason why a peer is gone.
constexpr auto kLastWords = std::chrono::seconds(1);
// Waiting for a link while ranks of this host are awaited as well: those do not end a poll.
constexpr int kLinkWaitMs = 1;
// Who closed the Group has sent all it owed before, but over another connection than its goodbye.
constexpr auto kGoodbyeFirst = std::chrono::milliseconds(250);

std::vector<PlanWords> WordsOf(const PlanHost& host, const PlanLayout& layout) {
  std::vector<PlanWords> words;
  for (std::byte* at : host.words) words.emplace_back(at, layout.batches.size(), layout.members.size());
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

std::string SecondsText(Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

size_t Plan::WordsNbytes(const PlanSpec& spec, bool staged) {
  const PlanLayout layout(spec.members, spec.limits);
  const size_t nbytes = PlanWords::Nbytes(layout.batches.size(), layout.members.size());
  return nbytes + (staged ? layout.staged_nbytes : 0);
}

Plan::Plan(PlanSpec spec, PlanHost host)
    : spec_(std::move(spec)),
      host_(std::move(host)),
      layout_(spec_.members, spec_.limits),
      words_(WordsOf(host_, layout_)),
      data_(layout_, spec_.members, {spec_.reduce, spec_.scale}, words_, host_.rank, host_.read),
      batches_(layout_.batches.size()),
      members_(spec_.members.size()) {
  const auto shared = [&](size_t first, auto part, auto result) {
    std::vector<const uint8_t*> of_ranks;
    for (const PlanWords& words : words_) of_ranks.push_back((words.*part)() + first);
    return SharedBytes(std::move(of_ranks), (mine().*result)() + first);
  };
  for (size_t b = 0; b < batches_.size(); ++b) {
    BatchState& batch = batches_[b];
    batch.members = layout_.batches[b];
    batch.fetched.resize(words_.size());
    if (!several_hosts()) continue;
    std::vector<size_t> counts;
    for (const uint32_t m : batch.members) counts.push_back(layout_.members[m].count);
    batch.row = Row(batch.members, counts);
    batch.travel.statuses =
        shared(layout_.first_status[b], &PlanWords::statuses, &PlanWords::agreed_statuses);
    batch.travel.bytes = BatchBytes(&data_, &batch.row, ItemSize(TypeOf(b)));
  }
  votes_ = shared(0, &PlanWords::votes, &PlanWords::agreed_votes);
}

Status Plan::Begin() {
  HVD_RETURN_IF_ERROR(broken_);
  if (is_open()) return Status(Code::kInvalid, "'" + spec_.name + "': a step was begun and not ended");
  if (Status status = host_.status(); !status.ok()) return Fail(status);
  for (BatchState& batch : batches_) {
    batch.waiting = static_cast<uint32_t>(batch.members.size());
    batch.blocked = 0;
    batch.is_declared = batch.is_resolved = batch.is_reduced = batch.is_done = false;
    batch.fetched.assign(batch.fetched.size(), false);
    batch.fetched_count = 0;
    batch.travel.is_appended = false;
  }
  for (MemberState& member : members_) {
    member.is_given = false;
    member.in = 0;
  }
  has_ended_ = is_settled_ = warned_ = false;
  trace_ = host_.trace ? host_.trace() : nullptr;
  done_ = declared_ = appended_ = 0;
  vote_.reset();
  left_at_.reset();
  needs_.clear();
  outcome_ = {};
  step_.fetch_add(1, std::memory_order_relaxed);
  if (step_.load(std::memory_order_relaxed) == 0) step_.store(1, std::memory_order_relaxed);
  open_.store(true, std::memory_order_seq_cst);
  return Status::Ok();
}

Status Plan::Ready(uint32_t member, void* at) {
  // A tensor without elements may have no address.
  const uint64_t in = at == nullptr ? PlanWords::kEmpty : reinterpret_cast<uintptr_t>(at);
  return Give(member, in, at);
}

Status Plan::Decline(uint32_t member) { return Give(member, PlanWords::kElsewhere, nullptr); }

Status Plan::Give(uint32_t member, uint64_t in, void* at) {
  HVD_RETURN_IF_ERROR(broken_);
  if (!is_open() || has_ended_ || member >= members_.size())
    return Status(Code::kInvalid,
                  "'" + spec_.name + "': no step is open for member " + std::to_string(member));
  MemberState& state = members_[member];
  const uint32_t b = layout_.members[member].batch;
  BatchState& batch = batches_[b];
  if (batch.is_declared) {
    return Status(Code::kInvalid,
                  spec_.members[member].name + " was handed over twice, and is being reduced already");
  }
  const auto begin = Clock::now();
  if (in != PlanWords::kElsewhere) data_.Put(member, static_cast<std::byte*>(at));
  state.in = in;
  if (!state.is_given) --batch.waiting;
  state.is_given = true;
  if (trace_ != nullptr) state.given_ns = NowNs();
  if (batch.waiting == 0) {
    Declare(b);
    Ring();
  }
  bool progressed = data_.is_staged();
  Status status = declared_ == done_ ? Status::Ok() : Advance(&progressed);
  if (progressed) times_.ready_ns += Nanoseconds(Clock::now() - begin);
  return status.ok() ? status : Fail(status);
}

void Plan::Declare(size_t b) {
  BatchState& batch = batches_[b];
  for (const uint32_t m : batch.members) {
    const uint64_t in = members_[m].in;
    const bool has = in != 0 && in != PlanWords::kElsewhere;
    if (!has) data_.PutNothing(m, several_hosts());
    if (several_hosts()) {
      mine().statuses()[layout_.members[m].status] = has       ? PlanWords::kTensor
                                                     : in == 0 ? PlanWords::kNothing
                                                               : PlanWords::kDeclined;
    }
    PlanWords::Place& place = mine().place(m);
    place.in.store(in, std::memory_order_relaxed);
    place.out.store(reinterpret_cast<uintptr_t>(data_.out(m)), std::memory_order_relaxed);
  }
  batch.is_declared = true;
  if (trace_ != nullptr) batch.declared_ns = NowNs();
  ++declared_;
  mine().batch(b).declared.store(step_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
}

void Plan::DeclareRest(uint32_t flags) {
  has_ended_ = true;
  ended_at_ = Clock::now();
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (!batches_[b].is_declared) Declare(b);
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
    for (size_t b = 0; b < batches_.size(); ++b) {
      if (batches_[b].is_declared && !batches_[b].is_done) HVD_RETURN_IF_ERROR(AdvanceBatch(b, progressed));
    }
    moved |= appended_ != before;
    *progressed |= moved;
  }
  return Status::Ok();
}

Status Plan::AdvanceBatch(size_t b, bool* progressed) {
  BatchState& batch = batches_[b];
  const uint32_t step = step_.load(std::memory_order_relaxed);
  if (!batch.is_resolved) {
    if (!IsDeclaredByAll(b)) return Status::Ok();
    batch.is_resolved = true;
    if (!several_hosts()) Resolve(b);
    if (trace_ != nullptr) batch.resolved_ns = NowNs();
  }
  Phases* const phases = trace_ == nullptr ? nullptr : &batch.phases;
  if (batch.blocked > 0) return Status::Ok();
  if (!batch.is_reduced && owns_slice()) {
    if (several_hosts()) {
      Travel(b);
    } else {
      if (trace_ != nullptr) batch.begun_ns = NowNs();
      HVD_RETURN_IF_ERROR(InPhase(phases, Phase::kReduce, [&] { return ReduceSlice(b); }));
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
    HVD_RETURN_IF_ERROR(InPhase(phases, Phase::kCopyOut, [&] {
      return data_.Fetch(batch.row, TypeOf(b), owner, Slice(b, owner), several_hosts());
    }));
    batch.fetched[static_cast<size_t>(owner)] = true;
    ++batch.fetched_count;
    *progressed = true;
  }
  const size_t others = static_cast<size_t>(host_.owners) - (owns_slice() ? 1 : 0);
  if (batch.fetched_count == others && batch.is_reduced == owns_slice()) {
    batch.is_done = true;
    if (several_hosts()) ResolveAgreed(b);
    if (trace_ != nullptr) NoteDone(b);
    batch.phases.Clear();
    ++done_;
    *progressed = true;
  }
  return Status::Ok();
}

Range Plan::Slice(size_t b, int owner) const {
  return SliceOf({0, batches_[b].row.count()}, ItemSize(TypeOf(b)), owner, host_.owners);
}

Status Plan::ReduceSlice(size_t b) { return data_.Reduce(batches_[b].row, TypeOf(b), Slice(b, host_.rank)); }

// Every host appends in the order of batches.
void Plan::Travel(size_t b) {
  BatchState& batch = batches_[b];
  PlanTravel& travel = batch.travel;
  if (!travel.is_appended && appended_ == b) {
    if (trace_ != nullptr) batch.begun_ns = NowNs();
    ++appended_;
    const uint64_t agreed =
        host_.chain->Append({DType::kUInt8, ReduceOp::kMax, {}, {0, batch.members.size()}, &travel.statuses});
    travel.job = host_.chain->Append(
        {TypeOf(b), spec_.reduce, spec_.scale, Slice(b, host_.rank), &travel.bytes, agreed});
    travel.is_appended = true;
  }
  batch.is_reduced = travel.is_appended && host_.chain->Done(travel.job);
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
  std::vector<uint32_t> reduced;
  std::vector<size_t> counts;
  for (const uint32_t m : batch.members) {
    bool is_somewhere = false, is_declined = false;
    for (const PlanWords& words : words_) {
      const uint64_t in = words.place(m).in.load(std::memory_order_relaxed);
      is_somewhere |= in != 0;
      is_declined |= in == PlanWords::kElsewhere;
    }
    if (is_declined) outcome_.declined.push_back(m);
    if (!is_somewhere || is_declined) continue;
    reduced.push_back(m);
    counts.push_back(layout_.members[m].count);
    if (members_[m].in != 0) continue;
    needs_.push_back(m);
    ++batch.blocked;
  }
  batch.row = Row(std::move(reduced), counts);
}

// Its slices have come, and before them what all hosts have.
void Plan::ResolveAgreed(size_t b) {
  const uint8_t* const agreed = words_.front().agreed_statuses();
  for (const uint32_t m : batches_[b].members) {
    const uint8_t status = agreed[layout_.members[m].status];
    if (status == PlanWords::kDeclined) outcome_.declined.push_back(m);
    if (status == PlanWords::kTensor && members_[m].in == 0) needs_.push_back(m);
  }
}

void Plan::Supply(uint32_t member, void* at) {
  const auto found = std::find(needs_.begin(), needs_.end(), member);
  if (found == needs_.end()) return;
  needs_.erase(found);
  if (several_hosts()) {  // the result is there already
    const size_t nbytes = spec_.members[member].nbytes();
    if (nbytes > 0) std::memcpy(at, data_.out(member), nbytes);
    return;
  }
  data_.SetOut(member, static_cast<std::byte*>(at));
  // Read by others after `reduced`.
  mine().place(member).out.store(reinterpret_cast<uintptr_t>(at), std::memory_order_relaxed);
  --batches_[layout_.members[member].batch].blocked;
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
  std::sort(outcome_.declined.begin(), outcome_.declined.end());
  is_settled_ = true;
  mine().head().finished.store(step_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
  Ring();
}

Result<bool> Plan::Turn(bool* progressed) {
  if (!is_settled_) {
    HVD_RETURN_IF_ERROR(Advance(progressed));
    if (several_hosts()) AgreeOnVotes(progressed);
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
  if (!has_ended_) DeclareRest(flags);
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
  if (now - *left_at_ < kGoodbyeFirst) return Status::Ok();
  return Status(Code::kShutdown, "rank " + std::to_string(host_.chain->awaited_rank()) + " has left");
}

// The others are told, and the first cause wins: what killed the Group, if that is known soon.
Status Plan::Fail(Status status) {
  const auto deadline = Clock::now() + kLastWords;
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

// What this rank waits for: a fused batch by its first tensor, and who has not handed it over.
std::string Plan::Waits() const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (batches_[b].is_done) continue;
    std::string missing;
    for (int rank = 0; rank < size(); ++rank) {
      if (words_[static_cast<size_t>(rank)].batch(b).declared.load() == step) continue;
      missing += (missing.empty() ? "" : ", ") + NameOf(rank);
    }
    std::string text =
        "'" + spec_.name + "', fused batch of '" + spec_.members[batches_[b].members.front()].name + "'";
    if (!missing.empty()) return text + ", not handed over by rank " + missing;
    const int beyond = AwaitsLinks() ? host_.chain->awaited_rank() : -1;
    return beyond < 0 ? text : text + ", not back from the host of rank " + std::to_string(beyond);
  }
  std::string missing;
  for (int rank = 0; rank < size(); ++rank) {
    const PlanWords::Head& head = words_[static_cast<size_t>(rank)].head();
    if (static_cast<int32_t>(head.finished.load() - step) >= 0) continue;
    missing += (missing.empty() ? "" : ", ") + NameOf(rank);
  }
  return "'" + spec_.name + "'" + (missing.empty() ? "" : ", not ended by rank " + missing);
}

Status Plan::CheckStall() {
  const auto age = Clock::now() - ended_at_;
  // Who waits for another host leaves it to a rank there to say who is missing.
  const auto limit = AwaitsLinks() ? host_.stall_shutdown * 3 / 2 : host_.stall_shutdown;
  if (host_.stall_shutdown > Clock::duration::zero() && age > limit) {
    const Status status(Code::kTimeout, Waits() + " for " + SecondsText(age) + " (stall_shutdown_s)");
    host_.kill(status);
    return status;
  }
  if (warned_ || age < host_.stall_warn) return Status::Ok();
  warned_ = true;
  // One rank speaks for all that wait.
  for (int rank = 0; rank < host_.rank; ++rank) {
    const uint32_t ended = words_[static_cast<size_t>(rank)].head().ended.load();
    if (ended == step_.load(std::memory_order_relaxed)) return Status::Ok();
  }
  Log(Level::kWarning, Waits() + " for " + SecondsText(age) + " (stall_warn_s)");
  return Status::Ok();
}

}  // namespace hvd
