#pragma once

#include "base/mutex.h"
#include "scheduler/engine.h"

namespace hvd {

// The Engine of a Group of one: everything is done on the caller's thread before Submit returns, so it needs
// no thread, no socket and no shared memory.
class Solo final : public Engine {
 public:
  Solo();

  Status Submit(Submission submission, Then then) override EXCLUDES(mutex_);
  Result<std::shared_ptr<Handle>> SubmitAgain(const Call&, Then) override {
    return std::shared_ptr<Handle>();
  }
  bool Wait(Handle&, Clock::time_point, const Interrupt&) override { return true; }
  bool IsWaiting() const override { return false; }
  void AddSegment(uint32_t, std::shared_ptr<Segment>) override {}
  void DeclarePhase(PhaseNews) override {}
  void Kill(const Status& reason) override { Die(reason); }
  void Close() override;
  Status status() const override EXCLUDES(mutex_);
  int death_fd() const override { return death_read_.get(); }
  bool HasLeft(int) const override { return false; }
  uint32_t plan_links_returned() const override { return 0; }
  const LongPhases& long_phases() const override { return long_phases_; }
  const Counters& counters() const override { return counters_; }
  Tracer& tracer() override { return tracer_; }

 private:
  Status Run(const Request& request, const Buffer& buffer, size_t index, Handle& handle);
  void Die(const Status& status) EXCLUDES(mutex_);

  const LongPhases long_phases_;
  Counters counters_;
  Tracer tracer_;
  UniqueFd death_read_, death_write_;
  mutable Mutex mutex_;
  Status dead_ GUARDED_BY(mutex_);
};

}  // namespace hvd
