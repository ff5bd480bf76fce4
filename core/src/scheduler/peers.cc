// Who is gone, and who is awaited too long.
#include <algorithm>

#include "base/log.h"
#include "scheduler/scheduler.h"

namespace hvd {
namespace {

constexpr auto kStallCheckEvery = std::chrono::milliseconds(250);

}  // namespace

Status Scheduler::Tick(int awaited_rank) {
  tracer_.Step();
  exchange_->Poll(Clock::now());
  HVD_RETURN_IF_ERROR(HandleFrames());
  {
    MutexLock lock(mutex_);
    HVD_RETURN_IF_ERROR(kill_);
    if (close_)
      return Status(Code::kShutdown,
                    "rank " + std::to_string(options_.rank) + " closed the Group during " + Doing());
  }
  if (const Status& lost = exchange_->lost(); !lost.ok()) {
    return Status(lost.code(), std::string(lost.text()) + " (in " + Doing() + ")");
  }
  if (exchange_->HasLeft(awaited_rank)) {
    return Status(Code::kShutdown,
                  "rank " + std::to_string(awaited_rank) + " closed the Group during " + Doing());
  }
  if (interrupt_ != nullptr && Clock::now() >= interruptible_at_ && IsInterrupted()) {
    return Status(Code::kAborted,
                  "rank " + std::to_string(options_.rank) + " was interrupted by a signal during " + Doing());
  }
  return Status::Ok();
}

bool Scheduler::IsInterrupted() {
  const auto lend = [this](bool is_lent) {
    MutexLock lock(lent_mutex_);
    is_lent_ = is_lent;
  };
  lend(true);
  const bool is_interrupted = (*interrupt_)();
  lend(false);
  return is_interrupted;
}

Status Scheduler::CheckPeers() {
  if (const Status& lost = exchange_->lost(); !lost.ok()) {
    const std::string waiting = PendingName();
    return Status(lost.code(),
                  std::string(lost.text()) + (waiting.empty() ? "" : " (while '" + waiting + "' waited)"));
  }
  if (!IsCoordinator()) {
    const int leaver = exchange_->LeftOnTheWayTo(0);
    if (leaver < 0) return Status::Ok();
    const std::string waiting = PendingName();
    if (waiting.empty()) return Status::Ok();
    return Status(Code::kShutdown,
                  "rank " + std::to_string(leaver) + " closed the Group while '" + waiting + "' waited");
  }
  for (int peer = 1; peer < options_.size; ++peer) {
    const int leaver = exchange_->LeftOnTheWayTo(peer);
    if (leaver < 0) continue;
    if (const auto name = negotiator_.WaitsFor(peer)) {
      return Status(Code::kShutdown, "rank " + std::to_string(leaver) +
                                         " closed the Group without submitting '" + *name + "'");
    }
  }
  return Status::Ok();
}

Status Scheduler::CheckStalls() {
  const auto now = Clock::now();
  if (!IsCoordinator() || now < next_stall_check_) return Status::Ok();
  next_stall_check_ = now + kStallCheckEvery;
  const auto waits = negotiator_.Waits();
  const auto excused_until = long_phases_.ExcusedUntil(now);
  std::unordered_map<std::string, Clock::time_point> warned;
  for (const auto& waiting : waits) {
    if (waiting.op == Op::kJoin) continue;  // is there to be waited in
    const auto age = now - waiting.since;
    const auto unexcused = now - std::max(waiting.since, excused_until);
    if (options_.stall_shutdown > Clock::duration::zero() && unexcused > options_.stall_shutdown) {
      return Status(Code::kTimeout, negotiator_.Describe(waiting) + " for " + WholeSeconds(age) +
                                        " (stall_shutdown_s)" + long_phases_.Describe(now));
    }
    if (age < options_.stall_warn) continue;
    const auto before = stall_warned_.find(waiting.name);
    const bool told = before != stall_warned_.end() && before->second == waiting.since;
    if (!told)
      Log(Level::kWarning, negotiator_.Describe(waiting) + " for " + WholeSeconds(age) + " (stall_warn_s)" +
                               long_phases_.Describe(now) + options_.note);
    warned[waiting.name] = waiting.since;
  }
  stall_warned_ = std::move(warned);
  return Status::Ok();
}

std::string Scheduler::PendingName() {
  MutexLock lock(mutex_);
  if (!pending_.empty()) return pending_.begin()->first;
  std::string name;
  known_.ForEach([&](const Cache<Known>::Entry& entry) {
    if (name.empty() && entry.value.pending.handle != nullptr) name = entry.name;
  });
  return name;
}

}  // namespace hvd
