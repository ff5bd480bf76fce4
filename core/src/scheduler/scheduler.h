#pragma once

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "collectives/collectives.h"
#include "scheduler/engine.h"
#include "scheduler/negotiate.h"
#include "transport/arena.h"
#include "transport/exchange.h"

namespace hvd {

struct SchedulerOptions {
  int rank = 0;
  int size = 1;
  size_t fusion_nbytes = 8 << 20;
  Clock::duration stall_warn{};
  Clock::duration stall_shutdown{};  // zero: never
  Clock::duration peer_timeout = Seconds(30);
  CollectivesOptions collectives{};
};

// The background thread of a Group of two or more ranks. It announces what was submitted, lets the negotiator
// decide (on rank 0, the coordinator), runs the decided batches in the coordinator's order, and notices who
// is gone. After a failure the Group is dead: everything pending and everything later gets the same Status.
class Scheduler final : public Engine {
 public:
  Scheduler(const SchedulerOptions& options, const Topology& topology, std::unique_ptr<Exchange> exchange,
            std::unique_ptr<Arena> arena, DataLinks links);
  ~Scheduler() override;
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  Status Submit(Submission submission) override EXCLUDES(mutex_);
  void AddSegment(uint32_t number, std::shared_ptr<Segment> segment) override EXCLUDES(mutex_);
  void Abort(const std::string& reason) override EXCLUDES(mutex_);
  // Says goodbye and ends the thread.
  void Close() override EXCLUDES(close_mutex_, mutex_);
  Status status() const override EXCLUDES(mutex_);
  int death_fd() const override { return death_.get(); }
  const Counters& counters() const override { return counters_; }

 private:
  void Run();
  Status RunUntilClosed();
  Status Step();
  bool HasSubmissions() EXCLUDES(mutex_);
  Status TakeSubmissions();
  Status HandleFrames();
  Status CheckPeers();
  Status CheckStalls();
  Status Tick(int awaited_rank);
  // The submissions of a round's decisions; not ok if the round does not make sense here.
  Status Resolve(const Round& round, std::vector<Submission*>* submissions) EXCLUDES(mutex_);
  Status Execute(const Round& round);
  Status RunBatch(const Round& round, const std::vector<Submission*>& submissions,
                  const std::vector<TensorRef>& batch);
  Status RunAllreduce(const Round& round, const std::vector<Submission*>& submissions,
                      const std::vector<TensorRef>& batch);
  Status RunAllgather(Submission& submission, uint32_t member, const std::vector<int64_t>& rows);
  Status RunPlan(Submission& submission, const std::vector<Location>& places);
  Status AwaitSegment(int rank, const Location& place);
  Status Place(const Member& member, const std::vector<Location>& places, ArenaPiece* piece);
  void Decide();
  void Die(Status status, bool tell_peers) EXCLUDES(mutex_);
  std::string PendingName() EXCLUDES(mutex_);
  bool IsCoordinator() const { return options_.rank == 0; }

  const SchedulerOptions options_;
  const Topology topology_;
  // Of the thread, after the constructor.
  std::unique_ptr<Exchange> exchange_;
  std::unique_ptr<Arena> arena_;
  Collectives collectives_;
  RingLinks plan_links_;  // of plans
  Negotiator negotiator_;
  std::deque<Round> rounds_;
  Clock::time_point next_stall_check_;
  std::unordered_map<std::string, Clock::time_point> stall_warned_;
  std::string doing_;

  mutable Mutex mutex_;
  std::vector<std::string> submitted_ GUARDED_BY(mutex_);  // names not yet announced
  std::vector<std::pair<uint32_t, std::shared_ptr<Segment>>> new_segments_ GUARDED_BY(mutex_);
  std::unordered_map<std::string, Submission> pending_ GUARDED_BY(mutex_);
  std::string abort_reason_ GUARDED_BY(mutex_);
  bool abort_ GUARDED_BY(mutex_) = false;
  bool close_ GUARDED_BY(mutex_) = false;
  Status dead_ GUARDED_BY(mutex_);

  Counters counters_;
  UniqueFd death_;
  const pid_t pid_;
  Mutex close_mutex_;
  std::thread thread_;
};

}  // namespace hvd
