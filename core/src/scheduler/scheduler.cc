// What other threads call.
#include "scheduler/scheduler.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/tuning.h"

namespace hvd {
namespace {

constexpr auto kStallCheckEvery = std::chrono::milliseconds(250);

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const Topology& topology,
                     std::unique_ptr<Exchange> exchange, std::unique_ptr<Arena> arena, DataLinks links)
    : options_(options),
      topology_(topology),
      spins_(arena->has_cpu_for_each() ? kSpins : 1),
      plan_links_(std::make_shared<PlanLinks>()),
      exchange_(std::move(exchange)),
      arena_(std::move(arena)),
      collectives_(
          topology, *arena_, std::move(links.eager), [this](int awaited_rank) { return Tick(awaited_rank); },
          options.collectives),
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
  plan_links_->links = std::move(links.plan);
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

Scheduler::Known::Known(std::shared_ptr<const Request> r, Decision d)
    : request(std::move(r)), decision(std::move(d)) {
  std::vector<Tensor> tensors;
  AppendTensors(*request, decision, 0, &tensors);
  if (tensors.size() == 1) tensor = tensors.front();
  if (request->members.size() != 1 || request->op == Op::kAlltoall) return;
  const Member& member = request->members.front();
  call = {request->op,   request->name, request->reduce, request->prescale, request->postscale,
          request->root, member.dtype,  member.shape,    member.where,      {}};
}

Status Scheduler::Submit(Submission submission, Then then) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok()) return dead_;
    if (close_) return Status(Code::kShutdown, "the Group is closed");
    const std::string& name = submission.request->name;
    auto* const known = known_.Find(name);
    if ((known != nullptr && known->value.pending.active()) || pending_.contains(name)) {
      return Status(Code::kInvalid,
                    "'" + name + "' was submitted before and is not done yet; a name can be pending once");
    }
    num_pending_.fetch_add(1, std::memory_order_relaxed);
    if (tracer_.trace() != nullptr) submission.queued_ns = NowNs();
    if (known != nullptr && *known->value.request == *submission.request) {
      submitted_ids_.push_back(known->id);
      known->value.pending = std::move(submission);
    } else {
      submitted_.push_back(name);
      pending_.emplace(name, std::move(submission));
    }
  }
  NewsFor(then);
  return Status::Ok();
}

Result<std::shared_ptr<Handle>> Scheduler::SubmitAgain(const Call& call, Then then) {
  std::shared_ptr<Handle> handle;
  {
    MutexLock lock(mutex_);
    auto* const entry = known_.Find(call.name);
    if (entry == nullptr || !dead_.ok() || close_) return handle;
    Known& known = entry->value;
    // Pending already, also in full: Submit() says so.
    if (known.pending.active() || !known.call || !call.Is(*known.call)) return handle;
    if (!pending_.empty() && pending_.contains(entry->name)) return handle;
    handle = std::make_shared<Handle>(known.request);
    known.pending.only = call.buffer;
    known.pending.handle = handle;
    known.pending.queued_ns = tracer_.trace() == nullptr ? 0 : NowNs();
    submitted_ids_.push_back(entry->id);
    num_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  NewsFor(then);
  return handle;
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

void Scheduler::Kill(const Status& reason) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok() || close_ || !kill_.ok()) return;
    kill_ = reason;
  }
  ending_.store(true, std::memory_order_seq_cst);
  exchange_->Wake();
  Ring(bell_);
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
  Ring(bell_);
  // From the interrupt of this thread's own Wait(): the thread ends when that has given the baton back.
  if (thread_.joinable() && !IsWaiting()) thread_.join();
}

Status Scheduler::status() const {
  MutexLock lock(mutex_);
  return dead_;
}

}  // namespace hvd
