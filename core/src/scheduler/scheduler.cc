// Who works when: threads that wait, and the Scheduler's own.
#include "scheduler/scheduler.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "base/pause.h"
#include "transport/wire.h"

namespace hvd {
namespace {

// How a thread that waits for a handle goes from awake to asleep: what comes within microseconds is found by
// looking, as long as there is a CPU for each rank; the yields leave the CPU to ranks that have work.
constexpr int kSpins = 50;
constexpr auto kYieldFor = std::chrono::microseconds(150);
constexpr int kYieldsPerPoll = 8;
// The Scheduler's own thread gives way sooner: the program may be computing on this CPU.
constexpr int kYields = 10;
// It lets a burst of submissions come in before it looks, so that they are announced and fused together, and
// so that a caller who waits right after submitting finds the baton free.
constexpr auto kNap = std::chrono::microseconds(50);
constexpr int kMostNaps = 20;  // as long as more keeps coming
// As long as threads of the program keep taking the baton, it looks this often whether they still do.
constexpr auto kParked = std::chrono::milliseconds(20);
// Longest sleep of a coordinator, which looks for stalls, and of everybody else.
constexpr auto kStallCheckEvery = std::chrono::milliseconds(250);
constexpr auto kIdle = std::chrono::seconds(60);
// While words wait for room in a mailbox; nobody says when there is.
constexpr auto kFullMailbox = std::chrono::milliseconds(1);
// How long a dying or closing rank tries to tell the others why.
constexpr auto kLastWords = std::chrono::milliseconds(500);
// How long rank 0 waits for what the others still have to say for the timeline, when it closes or dies.
constexpr auto kLastNotes = std::chrono::milliseconds(1000);
constexpr auto kLastNotesOfTheDying = std::chrono::milliseconds(300);

void Ring(int event_fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_fd, &one, sizeof one);
}

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

bool Has(const Submission& submission) { return submission.handle != nullptr; }

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const Topology& topology,
                     std::unique_ptr<Exchange> exchange, std::unique_ptr<Arena> arena, DataLinks links)
    : options_(options),
      topology_(topology),
      spins_(HasCpusFor(topology.local_size()) ? kSpins : 1),
      exchange_(std::move(exchange)),
      arena_(std::move(arena)),
      collectives_(
          topology, *arena_, std::move(links.eager), [this](int awaited_rank) { return Tick(awaited_rank); },
          options.collectives),
      plan_links_(std::move(links.plan)),
      negotiator_(options.size, options.fusion_nbytes),
      fusion_nbytes_(options.fusion_nbytes),
      next_poll_(Clock::now()),
      next_stall_check_(Clock::now() + kStallCheckEvery),
      known_(kCacheCapacity),
      tracer_(options.rank, options.size, topology.SameHost(0),
              {[this](int rank, const std::string& payload) { PostTrace(rank, payload); },
               [this](const std::string& payload) { PostTrace(-1, payload); },
               [this] {
                 exchange_->Wake();
                 RingBell();
               }}),
      death_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      pid_(::getpid()) {
  if (topology.hosts() == 1 && options.size <= Mailboxes::kMostRanks)
    mailboxes_ = std::make_unique<Mailboxes>(*arena_);
  if (options.expect_timeline) tracer_.Expect();
  // Signals are for the threads of the program.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Scheduler::~Scheduler() { Close(); }

// -- what other threads call ------------------------------------------------------------------------------

Status Scheduler::Submit(Submission submission, Then then) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok()) return dead_;
    if (close_) return Status(Code::kShutdown, "the Group is closed");
    const std::string& name = submission.request->name;
    const auto* known = known_.Find(name);
    if ((known != nullptr && Has(known->value.pending)) || pending_.contains(name)) {
      return Status(Code::kInvalid,
                    "'" + name + "' was submitted before and is not done yet; a name can be pending once");
    }
    submitted_.push_back(name);
    num_pending_.fetch_add(1, std::memory_order_relaxed);
    if (tracer_.trace() != nullptr) submission.queued_ns = NowNs();
    pending_.emplace(name, std::move(submission));
  }
  NewsFor(then);
  return Status::Ok();
}

Result<std::shared_ptr<Handle>> Scheduler::SubmitAgain(const Call& call, Then then) {
  std::shared_ptr<Handle> handle;
  {
    MutexLock lock(mutex_);
    auto* entry = known_.Find(call.name);
    if (entry == nullptr || !dead_.ok() || close_) return handle;
    Known& known = entry->value;
    // Pending already, also in full: Submit() says so.
    if (Has(known.pending) || !call.Is(*known.request)) return handle;
    if (!pending_.empty() && pending_.contains(entry->name)) return handle;
    handle = std::make_shared<Handle>(known.request);
    known.pending.buffers.assign(1, call.buffer);
    known.pending.handle = handle;
    known.pending.queued_ns = tracer_.trace() == nullptr ? 0 : NowNs();
    known.announced = false;
    submitted_ids_.push_back(entry->id);
    num_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  NewsFor(then);
  return handle;
}

// Lets the thread that works know that something was submitted, and wakes one if nobody is about to work.
void Scheduler::NewsFor(Then then) {
  news_.store(true, std::memory_order_seq_cst);
  if (dozing_.load(std::memory_order_seq_cst)) return exchange_->Wake();
  if (then == Then::kGoesOn && !driving_.load(std::memory_order_seq_cst)) RingBell();
}

bool Scheduler::Wait(Handle& handle, Clock::time_point deadline, const Interrupt& interrupt) {
  // A batch cannot be left in the middle, so who must be gone at a deadline leaves the work to the thread.
  const bool works = interrupt != nullptr || deadline == Clock::time_point::max();
  if (!works && news_.load(std::memory_order_seq_cst) && !driving_.load(std::memory_order_seq_cst))
    RingBell();
  for (;;) {
    if (handle.done()) return true;
    if (!works) return handle.Wait(deadline, handle.pokes());
    if (!ending_.load(std::memory_order_acquire) && baton_.TryLock()) {
      driving_.store(true, std::memory_order_seq_cst);
      drives_.fetch_add(1, std::memory_order_relaxed);
      interrupt_ = interrupt ? &interrupt : nullptr;
      const bool undisturbed = Drive(handle, deadline);
      interrupt_ = nullptr;
      driving_.store(false, std::memory_order_seq_cst);
      baton_.Unlock();
      HandOver();
      if (!undisturbed && !handle.done()) return false;
    } else {
      WaitForOthers(handle, deadline);
    }
    if (!handle.done() && Clock::now() >= deadline) return false;
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

void Scheduler::AddSegment(uint32_t number, std::shared_ptr<Segment> segment) {
  MutexLock lock(mutex_);
  new_segments_.emplace_back(number, std::move(segment));
  news_.store(true, std::memory_order_seq_cst);
}

void Scheduler::DeclarePhase(PhaseNews news) {
  {
    MutexLock lock(mutex_);
    phase_news_.push_back(std::move(news));
  }
  NewsFor(Then::kGoesOn);
}

void Scheduler::Abort(const std::string& reason) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok() || close_) return;
    abort_ = true;
    abort_reason_ = reason;
  }
  ending_.store(true, std::memory_order_seq_cst);
  exchange_->Wake();
  Ring(bell_.get());
}

void Scheduler::Close() {
  if (::getpid() != pid_) {  // forked: the thread, and who holds the mutexes, is in the parent
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));  // can only be leaked
    return;
  }
  MutexLock closing(close_mutex_);
  {
    MutexLock lock(mutex_);
    close_ = true;
  }
  ending_.store(true, std::memory_order_seq_cst);
  exchange_->Wake();
  Ring(bell_.get());
  if (thread_.joinable()) thread_.join();
}

Status Scheduler::status() const {
  MutexLock lock(mutex_);
  return dead_;
}

// -- with the baton ---------------------------------------------------------------------------------------

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
  if (!unannounced_.empty()) until = std::min(until, Clock::now() + kFullMailbox);
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

void Scheduler::RingBell() {
  if (asleep_.exchange(false, std::memory_order_seq_cst)) Ring(bell_.get());
}

// -- the thread -------------------------------------------------------------------------------------------

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
      parked = true;
      continue;
    }
    const Status status = RunUntilQuiet();
    const bool quick = negotiator_.idle() && (mailboxes_ == nullptr || !IsCoordinator());
    due =
        std::min(exchange_->next_beat(), Clock::now() + (quick ? Clock::duration(kIdle) : kStallCheckEvery));
    due = std::min(due, tracer_.next_step());
    if (!unannounced_.empty()) due = std::min(due, Clock::now() + kFullMailbox);
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
  const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
  for (int naps = 0; naps < kMostNaps; ++naps) {
    const int before = num_pending_.load(std::memory_order_relaxed);
    ::nanosleep(&nap, nullptr);
    if (num_pending_.load(std::memory_order_relaxed) <= before || ending_.load(std::memory_order_acquire))
      break;
  }
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
  Ring(bell_.get());
}

void Scheduler::End() {
  Status reason;
  {
    MutexLock lock(mutex_);
    reason = failure_;
    // Before close_: the peers must hear the reason also when the Group is closed right after.
    if (reason.ok() && abort_) reason = Status(Code::kAborted, abort_reason_);
  }
  if (!reason.ok()) return Die(reason, true);
  EndTimeline(kLastNotes);
  exchange_->PostAll(FrameKind::kBye, {});
  exchange_->Linger(Clock::now() + kLastWords);
  Die(Status(Code::kShutdown, "the Group is closed"), false);
}

void Scheduler::Die(const Status& status, bool tell_peers) {
  arena_->SetDead();  // before anything pending is given back
  if (tell_peers) {
    Writer payload;
    payload.Put(static_cast<uint8_t>(status.code()));
    payload.PutString(status.text());
    exchange_->PostAll(FrameKind::kAbort, payload.Take());
    if (Trace* trace = tracer_.trace()) NotePending(*trace);
    if (!IsCoordinator()) tracer_.Finish();
  }
  std::vector<std::shared_ptr<Handle>> pending;
  {
    MutexLock lock(mutex_);
    dead_ = status;
    for (auto& [name, submission] : pending_) pending.push_back(std::move(submission.handle));
    known_.ForEach([&](Cache<Known>::Entry& entry) {
      if (Has(entry.value.pending)) pending.push_back(std::move(entry.value.pending.handle));
    });
    pending_.clear();
    submitted_.clear();
    submitted_ids_.clear();
    new_segments_.clear();
  }
  Ring(death_.get());
  for (const auto& handle : pending) handle->Complete(status);
  if (tell_peers) EndTimeline(kLastNotesOfTheDying);
  if (tell_peers) exchange_->Linger(Clock::now() + kLastWords);
}

}  // namespace hvd
