#include "scheduler/plan.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/log.h"
#include "base/pause.h"

namespace hvd {
namespace {

// How long a dead peer or an abort can go unnoticed by a rank that sleeps in a step.
constexpr auto kTick = std::chrono::milliseconds(20);
constexpr int kSpins = 50;
constexpr int kYields = 10;
// How long to listen for the reason why a peer is gone.
constexpr auto kLastWords = std::chrono::seconds(1);
// All peers' chunks together stay in L2, beside the chunk of this rank; a chunk is not so small that the
// system call shows.
constexpr size_t kScratchNbytes = 512 << 10;
constexpr size_t kChunkNbytes = 256 << 10;
constexpr size_t kLeastChunkNbytes = 32 << 10;

size_t ChunkNbytes(size_t ranks) {
  return ranks < 2 ? kChunkNbytes : std::clamp(kScratchNbytes / (ranks - 1), kLeastChunkNbytes, kChunkNbytes);
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

size_t Plan::WordsNbytes(const PlanSpec& spec) {
  return PlanWords::Nbytes(PackBatches(spec.members, spec.limits).size(), spec.members.size());
}

Plan::Plan(PlanSpec spec, PlanHost host)
    : spec_(std::move(spec)),
      host_(std::move(host)),
      members_(spec_.members.size()),
      chunk_nbytes_(ChunkNbytes(host_.words.size())),
      scratch_((host_.words.size() - 1) * chunk_nbytes_) {
  const auto packed = PackBatches(spec_.members, spec_.limits);
  for (std::byte* at : host_.words) words_.emplace_back(at, packed.size());
  for (const auto& batch : packed) {
    for (const uint32_t m : batch) members_[m].batch = static_cast<uint32_t>(batches_.size());
    BatchState state;
    state.members = batch;
    state.fetched.resize(host_.words.size());
    batches_.push_back(std::move(state));
  }
  for (const Member& member : spec_.members) counts_.push_back(member.count());
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
  }
  for (MemberState& member : members_) {
    member.is_given = false;
    member.in = 0;
    member.out = nullptr;
  }
  has_ended_ = is_settled_ = warned_ = false;
  trace_ = host_.trace ? host_.trace() : nullptr;
  done_ = declared_ = 0;
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
  return Give(member, in, static_cast<std::byte*>(at));
}

Status Plan::Decline(uint32_t member) { return Give(member, PlanWords::kElsewhere, nullptr); }

Status Plan::Give(uint32_t member, uint64_t in, std::byte* out) {
  HVD_RETURN_IF_ERROR(broken_);
  if (!is_open() || has_ended_ || member >= members_.size())
    return Status(Code::kInvalid,
                  "'" + spec_.name + "': no step is open for member " + std::to_string(member));
  MemberState& state = members_[member];
  BatchState& batch = batches_[state.batch];
  if (batch.is_declared) {
    return Status(Code::kInvalid,
                  spec_.members[member].name + " was handed over twice, and is being reduced already");
  }
  state.in = in;
  state.out = out;
  if (!state.is_given) --batch.waiting;
  state.is_given = true;
  if (trace_ != nullptr) state.given_ns = NowNs();
  if (batch.waiting == 0) {
    Declare(state.batch);
    Ring();
  }
  if (declared_ == done_) return Status::Ok();
  const auto begin = Clock::now();
  bool progressed = false;
  Status status = Advance(&progressed);
  if (progressed) times_.ready_ns += Nanoseconds(Clock::now() - begin);
  return status.ok() ? status : Fail(status);
}

void Plan::Declare(size_t b) {
  BatchState& batch = batches_[b];
  for (const uint32_t m : batch.members) {
    PlanWords::Place& place = mine().place(m);
    place.in.store(members_[m].in, std::memory_order_relaxed);
    place.out.store(reinterpret_cast<uintptr_t>(members_[m].out), std::memory_order_relaxed);
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
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (batches_[b].is_declared && !batches_[b].is_done) HVD_RETURN_IF_ERROR(AdvanceBatch(b, progressed));
  }
  return Status::Ok();
}

Status Plan::AdvanceBatch(size_t b, bool* progressed) {
  BatchState& batch = batches_[b];
  const uint32_t step = step_.load(std::memory_order_relaxed);
  if (!batch.is_resolved) {
    if (!IsDeclaredByAll(b)) return Status::Ok();
    Resolve(b);
    if (trace_ != nullptr) batch.resolved_ns = NowNs();
  }
  Phases* const phases = trace_ == nullptr ? nullptr : &batch.phases;
  if (batch.blocked > 0) return Status::Ok();
  if (!batch.is_reduced) {
    if (trace_ != nullptr) batch.begun_ns = NowNs();
    HVD_RETURN_IF_ERROR(InPhase(phases, Phase::kReduce, [&] { return ReduceSlice(b); }));
    batch.is_reduced = true;
    mine().batch(b).reduced.store(step, std::memory_order_seq_cst);
    Ring();
    *progressed = true;
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == host_.rank || batch.fetched[static_cast<size_t>(rank)]) continue;
    const PlanWords& theirs = words_[static_cast<size_t>(rank)];
    if (theirs.batch(b).reduced.load(std::memory_order_acquire) != step) continue;
    HVD_RETURN_IF_ERROR(InPhase(phases, Phase::kCopyOut, [&] { return Fetch(b, rank); }));
    batch.fetched[static_cast<size_t>(rank)] = true;
    ++batch.fetched_count;
    *progressed = true;
  }
  if (batch.fetched_count + 1 == words_.size()) {
    batch.is_done = true;
    if (trace_ != nullptr) NoteDone(b);
    batch.phases.Clear();
    ++done_;
    *progressed = true;
  }
  return Status::Ok();
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
  batch.is_resolved = true;
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
    counts.push_back(counts_[m]);
    if (members_[m].in != 0) continue;
    needs_.push_back(m);
    ++batch.blocked;
  }
  batch.row = Row(std::move(reduced), counts);
}

void Plan::Supply(uint32_t member, void* at) {
  const auto found = std::find(needs_.begin(), needs_.end(), member);
  if (found == needs_.end()) return;
  needs_.erase(found);
  members_[member].out = static_cast<std::byte*>(at);
  // Read by others after `reduced`.
  mine().place(member).out.store(reinterpret_cast<uintptr_t>(at), std::memory_order_relaxed);
  --batches_[members_[member].batch].blocked;
}

Status Plan::ReduceSlice(size_t b) {
  const BatchState& batch = batches_[b];
  const DType dtype = spec_.members[batch.members.front()].dtype;
  const size_t item = ItemSize(dtype);
  const Range slice = SliceOf({0, batch.row.count()}, item, host_.rank, size());
  const size_t step = chunk_nbytes_ / item;
  std::vector<const void*> sources(words_.size());
  for (size_t begin = slice.begin; begin < slice.end; begin += step) {
    batch.row.Parts(begin, std::min(slice.end, begin + step), &parts_);
    for (int rank = 0, other = 0; rank < size(); ++rank) {
      if (rank == host_.rank) continue;
      std::byte* to = scratch_.data() + static_cast<size_t>(other++) * chunk_nbytes_;
      copies_.clear();
      for (const MemberPart& part : parts_) {
        const uint64_t in =
            words_[static_cast<size_t>(rank)].place(part.member).in.load(std::memory_order_relaxed);
        copies_.push_back({in == 0 ? 0 : in + part.begin * item, to, part.count * item});
        to += part.count * item;
      }
      HVD_RETURN_IF_ERROR(host_.read(rank, copies_));
    }
    size_t at = 0;
    for (const MemberPart& part : parts_) {
      std::byte* own = members_[part.member].out + part.begin * item;
      for (int rank = 0, other = 0; rank < size(); ++rank) {
        sources[static_cast<size_t>(rank)] =
            rank == host_.rank ? own : scratch_.data() + static_cast<size_t>(other++) * chunk_nbytes_ + at;
      }
      void* destination = own;
      Reduce(dtype, spec_.reduce, spec_.scale, sources.data(), size(), &destination, 1, part.count);
      at += part.count * item;
    }
  }
  return Status::Ok();
}

Status Plan::Fetch(size_t b, int from) {
  const BatchState& batch = batches_[b];
  const size_t item = ItemSize(spec_.members[batch.members.front()].dtype);
  const Range slice = SliceOf({0, batch.row.count()}, item, from, size());
  batch.row.Parts(slice.begin, slice.end, &parts_);
  copies_.clear();
  for (const MemberPart& part : parts_) {
    const uint64_t out =
        words_[static_cast<size_t>(from)].place(part.member).out.load(std::memory_order_relaxed);
    copies_.push_back(
        {out + part.begin * item, members_[part.member].out + part.begin * item, part.count * item});
  }
  return host_.read(from, copies_);
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
  for (const PlanWords& words : words_) {
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
    if (done_ < batches_.size() || !AllEnded()) return false;
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
    return Status(Code::kShutdown, "rank " + std::to_string(rank) + " has left");
  }
  return Status::Ok();
}

// The others are told, and the first cause wins: what killed the Group, if that is known soon.
Status Plan::Fail(Status status) {
  const auto deadline = Clock::now() + kLastWords;
  Status cause = host_.status();
  while (cause.ok() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cause = host_.status();
  }
  host_.abort(std::string(status.text()) + " (in '" + spec_.name + "')");  // no effect on a dead Group
  const bool is_own = cause.ok() || status.code() == Code::kTimeout;
  broken_ = is_own ? status : Status(cause.code(), std::string(cause.text()) + " (in " + Waits() + ")");
  Leave();
  return broken_;
}

void Plan::Leave() {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  const uint32_t first = open_.load(std::memory_order_seq_cst) ? step : step + 1;
  uint32_t nobody = 0;
  mine().head().gone.compare_exchange_strong(nobody, std::max(first, 1u), std::memory_order_seq_cst);
  // What the owner does with its memory from now on comes after, for everybody.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Ring();
}

// What this rank waits for: a fused batch by its first tensor, and who has not handed it over.
std::string Plan::Waits() const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (batches_[b].is_done) continue;
    std::string missing;
    for (int rank = 0; rank < size(); ++rank) {
      if (words_[static_cast<size_t>(rank)].batch(b).declared.load() == step) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    return "'" + spec_.name + "', fused batch of '" + spec_.members[batches_[b].members.front()].name + "'" +
           (missing.empty() ? "" : ", not handed over by rank " + missing);
  }
  std::string missing;
  for (int rank = 0; rank < size(); ++rank) {
    const PlanWords::Head& head = words_[static_cast<size_t>(rank)].head();
    if (static_cast<int32_t>(head.finished.load() - step) >= 0) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "'" + spec_.name + "'" + (missing.empty() ? "" : ", not ended by rank " + missing);
}

Status Plan::CheckStall() {
  const auto age = Clock::now() - ended_at_;
  if (host_.stall_shutdown > Clock::duration::zero() && age > host_.stall_shutdown) {
    const Status status(Code::kTimeout, Waits() + " for " + SecondsText(age) + " (stall_shutdown_s)");
    host_.abort(std::string(status.text()));
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
