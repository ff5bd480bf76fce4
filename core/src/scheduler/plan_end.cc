// Where a plan waits, and how it ends: a step, or for ever.
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/pause.h"
#include "scheduler/plan.h"

namespace hvd {
namespace {

// How long a dead peer or an abort can go unnoticed by a rank that sleeps in a step.
constexpr auto kTick = std::chrono::milliseconds(20);
// How long to listen for the reason why a rank of this host has left.
constexpr auto kLastWords = std::chrono::seconds(1);
// Waiting for a link while ranks of this host are awaited as well: those do not end a poll.
constexpr int kLinkWaitMs = 1;

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

}  // namespace hvd
