// Who works when: threads that wait, and the Scheduler's own.
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "scheduler/scheduler.h"

#include "base/pause.h"
#include "base/tuning.h"
#include "transport/wire.h"

namespace hvd {
namespace {

// As long as threads of the program keep taking the baton, it looks this often whether they still do.
constexpr auto kParked = std::chrono::milliseconds(20);
// Longest sleep of a coordinator, which looks for stalls, and of everybody else.
constexpr auto kStallCheckEvery = std::chrono::milliseconds(250);
constexpr auto kIdle = std::chrono::seconds(60);
// While words or decisions wait for room in a mailbox; nobody says when there is.
constexpr auto kFullMailbox = std::chrono::milliseconds(1);
// How long a dying or closing rank tries to tell the others why.
constexpr auto kLastWords = std::chrono::milliseconds(500);
// How long rank 0 waits for what the others still have to say for the timeline, when it closes or dies.
constexpr auto kLastNotes = std::chrono::milliseconds(1000);
constexpr auto kLastNotesOfTheDying = std::chrono::milliseconds(300);

void Drain(int event_fd) {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = ::read(event_fd, &count, sizeof count);
}

// Sleeps until a descriptor is readable; errno tells EINTR. poll(2) counts milliseconds, which is too coarse
// for nothing here.
int PollUntil(pollfd* fds, nfds_t count, Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return ::poll(fds, count, static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
}

}  // namespace

// -- threads of the program -------------------------------------------------------------------------------

bool Scheduler::Wait(Handle& handle, Clock::time_point deadline, const Interrupt& interrupt) {
  // A batch cannot be left in the middle, so who must be gone at a deadline leaves the work to the thread.
  const bool works = interrupt != nullptr || deadline == Clock::time_point::max();
  if (!works && news_.load(std::memory_order_seq_cst) && !driving_.load(std::memory_order_seq_cst))
    RingBell();
  for (;;) {
    if (handle.done()) return true;
    if (!works) return handle.Wait(deadline, handle.pokes());
    if (!ending_.load(std::memory_order_acquire) && baton_.TryLock()) {
      driver_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      driving_.store(true, std::memory_order_seq_cst);
      drives_.fetch_add(1, std::memory_order_relaxed);
      interrupt_ = interrupt ? &interrupt : nullptr;
      const bool undisturbed = Drive(handle, deadline);
      interrupt_ = nullptr;
      driving_.store(false, std::memory_order_seq_cst);
      driver_.store({}, std::memory_order_relaxed);
      baton_.Unlock();
      HandOver();
      if (!undisturbed && !handle.done()) return false;
    } else {
      WaitForOthers(handle, deadline);
    }
    if (!handle.done() && Clock::now() >= deadline) {
      HandOver();  // the baton may have been meant for us
      return false;
    }
  }
}

// Another thread has the baton: sleeps until that one has done it or has handed over to this one.
void Scheduler::WaitForOthers(Handle& handle, Clock::time_point deadline) {
  const uint32_t pokes = handle.pokes();
  {
    MutexLock lock(mutex_);
    waiting_.push_back(&handle);
    num_waiting_.store(static_cast<int>(waiting_.size()), std::memory_order_seq_cst);
  }
  // Once more, so that either who gives the baton back sees us, or we see that it is free.
  if (!ending_.load(std::memory_order_acquire) && baton_.TryLock()) {
    baton_.Unlock();
  } else {
    handle.Wait(deadline, pokes);
  }
  {
    MutexLock lock(mutex_);
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &handle));
    num_waiting_.store(static_cast<int>(waiting_.size()), std::memory_order_seq_cst);
  }
  if (handle.done()) HandOver();  // perhaps it was handed to us
}

// Works until the handle is done, the deadline has passed, or the Group is ending. False: a signal came.
bool Scheduler::Drive(const Handle& handle, Clock::time_point deadline) {
  if (mailboxes_ != nullptr) mailboxes_->SetAsleep(false);
  int idle = 0;
  bool poll = Clock::now() >= next_poll_;
  Clock::time_point idle_since;
  while (!handle.done() && !ending_.load(std::memory_order_acquire)) {
    auto happened = Turn(poll);
    if (!happened.ok()) {
      Fail(happened.status());
      return true;
    }
    poll = false;
    if (happened.value()) {
      idle = 0;
      continue;
    }
    if (++idle <= spins_) {
      Pause();
      continue;
    }
    const auto now = Clock::now();
    if (now >= deadline) return true;
    if (idle == spins_ + 1) idle_since = now;
    if (now - idle_since < kYieldFor) {
      poll = (idle - spins_) % kYieldsPerPoll == 1;
      ::sched_yield();
      continue;
    }
    poll = true;
    if (!Doze(deadline)) return false;
  }
  return true;
}

bool Scheduler::HasNews() {
  return news_.load(std::memory_order_seq_cst) || ending_.load(std::memory_order_seq_cst) ||
         (mailboxes_ != nullptr && mailboxes_->HasNews());
}

// Sleeps with the baton until something comes. False if a signal came.
bool Scheduler::Doze(Clock::time_point until) {
  until = std::min({until, exchange_->next_beat(), tracer_.next_step(), Clock::now() + kStallCheckEvery});
  if (AwaitsRoom()) until = std::min(until, Clock::now() + kFullMailbox);
  dozing_.store(true, std::memory_order_seq_cst);
  if (mailboxes_ != nullptr) mailboxes_->SetAsleep(true);
  bool interrupted = false;
  if (!HasNews()) {
    pollfd links{exchange_->wait_fd(), POLLIN, 0};
    interrupted = PollUntil(&links, 1, until) < 0 && errno == EINTR;
  }
  if (mailboxes_ != nullptr) mailboxes_->SetAsleep(false);
  dozing_.store(false, std::memory_order_seq_cst);
  return !interrupted;
}

// The baton is free again: somebody goes on with what is not done.
void Scheduler::HandOver() {
  if (num_waiting_.load(std::memory_order_seq_cst) > 0) {
    MutexLock lock(mutex_);
    if (!waiting_.empty()) return waiting_.front()->Poke();
  }
  if (num_pending_.load(std::memory_order_seq_cst) == 0) return;
  handed_over_.store(true, std::memory_order_seq_cst);
  RingBell();
}

// Wakes who sleeps on it.
void Scheduler::Ring(const UniqueFd& event) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
}

void Scheduler::RingBell() {
  if (asleep_.load(std::memory_order_seq_cst) && asleep_.exchange(false, std::memory_order_seq_cst))
    Ring(bell_);
}

// -- the thread -------------------------------------------------------------------------------------------

// Lets the thread that works know that something was submitted, and wakes one if nobody is about to work.
void Scheduler::NewsFor(Then then) {
  news_.store(true, std::memory_order_seq_cst);
  if (dozing_.load(std::memory_order_seq_cst)) return exchange_->Wake();
  if (then == Then::kGoesOn && !driving_.load(std::memory_order_seq_cst)) RingBell();
}

void Scheduler::Run() {
  ::pthread_setname_np(::pthread_self(), "hvd");
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // naps are short
  bool parked = false;
  uint64_t drives = 0;
  auto due = Clock::now();
  while (!ending_.load(std::memory_order_acquire)) {
    if (SleepUntilNews(due, parked)) NapThroughBurst();
    if (ending_.load(std::memory_order_acquire)) break;
    if (!baton_.TryLock()) {
      BeatIfLent();
      parked = true;
      continue;
    }
    const Status status = RunUntilQuiet();
    const bool quick = negotiator_.idle() && (mailboxes_ == nullptr || !IsCoordinator());
    due =
        std::min(exchange_->next_beat(), Clock::now() + (quick ? Clock::duration(kIdle) : kStallCheckEvery));
    due = std::min(due, tracer_.next_step());
    if (AwaitsRoom()) due = std::min(due, Clock::now() + kFullMailbox);
    baton_.Unlock();
    if (!status.ok()) Fail(status);
    if (num_waiting_.load(std::memory_order_seq_cst) > 0) HandOver();
    const uint64_t now = drives_.load(std::memory_order_relaxed);
    parked = now != drives && num_pending_.load(std::memory_order_seq_cst) == 0;
    drives = now;
  }
  baton_.Lock();
  End();
  baton_.Unlock();
}

void Scheduler::NapThroughBurst() {
  for (auto nap = kFirstNap; nap <= kLastNap && !ending_.load(std::memory_order_acquire); nap *= 2) {
    const int before = num_pending_.load(std::memory_order_relaxed);
    const timespec time{0, std::chrono::nanoseconds(nap).count()};
    ::nanosleep(&time, nullptr);
    if (num_pending_.load(std::memory_order_relaxed) - before < nap / kBurstEvery) break;
  }
}

// A thread that holds the baton may be kept from its work, by a signal handler or by whoever has the GIL;
// this rank is alive all the same.
void Scheduler::BeatIfLent() {
  MutexLock lock(lent_mutex_);
  if (is_lent_) exchange_->Turn();
}

// True if it was the bell. Parked: threads of the program look after the links.
bool Scheduler::SleepUntilNews(Clock::time_point due, bool parked) {
  asleep_.store(true, std::memory_order_seq_cst);
  bool rung = handed_over_.exchange(false, std::memory_order_seq_cst) ||
              ending_.load(std::memory_order_seq_cst) ||
              (news_.load(std::memory_order_seq_cst) && !driving_.load(std::memory_order_seq_cst));
  if (!rung) {
    pollfd fds[] = {{bell_.get(), POLLIN, 0}, {exchange_->wait_fd(), POLLIN, 0}};
    PollUntil(fds, parked ? 1 : 2, parked ? Clock::now() + kParked : due);
    rung = (fds[0].revents & POLLIN) != 0;
  }
  asleep_.store(false, std::memory_order_seq_cst);
  if (rung) Drain(bell_.get());
  handed_over_.store(false, std::memory_order_seq_cst);
  return rung;
}

// Works until there is nothing to do, or nothing to be done before news come, or another thread waits.
Status Scheduler::RunUntilQuiet() {
  if (mailboxes_ != nullptr) mailboxes_->SetAsleep(false);
  bool poll = true;
  for (int idle = 0; !ending_.load(std::memory_order_acquire);) {
    auto happened = Turn(poll);
    if (!happened.ok()) return happened.status();
    poll = false;
    if (happened.value()) {
      idle = 0;
      continue;
    }
    if (num_pending_.load(std::memory_order_seq_cst) == 0) break;
    if (num_waiting_.load(std::memory_order_seq_cst) > 0) break;
    if (++idle <= kYields) {
      ::sched_yield();
      continue;
    }
    if (mailboxes_ == nullptr) break;
    mailboxes_->SetAsleep(true);
    if (!HasNews()) break;
    mailboxes_->SetAsleep(false);
  }
  return Status::Ok();
}

// To be ended by the thread.
void Scheduler::Fail(const Status& status) {
  {
    MutexLock lock(mutex_);
    if (failure_.ok()) failure_ = status;
  }
  ending_.store(true, std::memory_order_seq_cst);
  Ring(bell_);
}

void Scheduler::End() {
  Status reason;
  {
    MutexLock lock(mutex_);
    reason = failure_;
    // Before close_: the peers must hear the reason also when the Group is closed right after.
    if (reason.ok()) reason = kill_;
  }
  if (!reason.ok()) return Die(reason, true);
  EndTimeline(kLastNotes);
  exchange_->PostAll(FrameKind::kBye, {});
  exchange_->Linger(Clock::now() + kLastWords);
  Die(Status(Code::kShutdown, "the Group is closed"), false);
}

void Scheduler::Die(const Status& reason, bool tell_peers) {
  if (tell_peers) {
    exchange_->PostAll(FrameKind::kAbort, Exchange::AbortPayload(reason));
    if (Trace* trace = tracer_.trace()) NotePending(*trace);
    if (!IsCoordinator()) tracer_.Finish();
  }
  const Status status(reason.code(), std::string(reason.text()) + options_.note);
  std::vector<std::shared_ptr<Handle>> pending;
  {
    MutexLock lock(mutex_);
    dead_ = status;
    for (auto& [name, submission] : pending_) pending.push_back(std::move(submission.handle));
    known_.ForEach([&](Cache<Known>::Entry& entry) {
      if (entry.value.pending.active()) pending.push_back(std::move(entry.value.pending.handle));
    });
    pending_.clear();
    submitted_.clear();
    submitted_ids_.clear();
    new_segments_.clear();
  }
  Ring(death_);
  for (const auto& handle : pending) handle->Complete(status);
  if (tell_peers) EndTimeline(kLastNotesOfTheDying);
  if (tell_peers) exchange_->Linger(Clock::now() + kLastWords);
}

}  // namespace hvd
