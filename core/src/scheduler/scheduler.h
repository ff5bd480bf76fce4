#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "base/tuning.h"
#include "collectives/collectives.h"
#include "scheduler/cache.h"
#include "scheduler/engine.h"
#include "scheduler/fusion.h"
#include "scheduler/mailbox.h"
#include "scheduler/negotiate.h"
#include "transport/arena.h"
#include "transport/exchange.h"

namespace hvd {

struct SchedulerOptions {
  int rank = 0;
  int size = 1;
  size_t fusion_nbytes = kFusionNbytes;
  Clock::duration stall_warn{};
  Clock::duration stall_shutdown{};  // zero: never
  Clock::duration peer_timeout = Seconds(30);
  CollectivesOptions collectives{};
  bool expect_timeline = false;  // rank 0 will begin one at once
  std::string note{};            // behind the text of every error
};

// The Engine of a Group of two or more ranks. It announces what was submitted, lets the negotiator decide (on
// rank 0, the coordinator), runs the decided batches in the coordinator's order, and notices who is gone.
// After a failure the Group is dead: everything pending and everything later gets the same Status.
//
// Whoever has the baton does all of that, one turn after another: a thread that waits for a handle if it can
// get hold of the baton, else the thread of the Scheduler, which sleeps while it has nothing to do. Only that
// thread ends the Group. scheduler.cc has what other threads call; the other files are named below.
class Scheduler final : public Engine {
 public:
  // links: to the neighbour hosts; none on one host.
  Scheduler(const SchedulerOptions& options, const Topology& topology, std::unique_ptr<Exchange> exchange,
            std::unique_ptr<Arena> arena, DataLinks links);
  ~Scheduler() override;
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  Status Submit(Submission submission, Then then) override EXCLUDES(mutex_, baton_);
  Result<std::shared_ptr<Handle>> SubmitAgain(const Call& call, Then then) override EXCLUDES(mutex_, baton_);
  bool Wait(Handle& handle, Clock::time_point deadline, const Interrupt& interrupt) override
      EXCLUDES(mutex_, baton_);
  bool IsWaiting() const override {
    return driver_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  void AddSegment(uint32_t number, std::shared_ptr<Segment> segment) override EXCLUDES(mutex_);
  void DeclarePhase(PhaseNews news) override EXCLUDES(mutex_);
  void Kill(const Status& reason) override EXCLUDES(mutex_);
  // Says goodbye and ends the thread.
  void Close() override EXCLUDES(close_mutex_, mutex_, baton_);
  Status status() const override EXCLUDES(mutex_);
  int death_fd() const override { return death_.get(); }
  bool HasLeft(int rank) const override { return exchange_->HasLeft(rank); }
  uint32_t plan_links_returned() const override { return plan_links_->returned; }
  const LongPhases& long_phases() const override { return long_phases_; }
  const Counters& counters() const override { return counters_; }
  Tracer& tracer() override { return tracer_; }

 private:
  // What all ranks agreed on, and this rank's part in it.
  struct Known {
    Known() = default;
    Known(std::shared_ptr<const Request> request, Decision decision);

    Submission pending;  // submitted again and not done; no handle: it is not
    // Of a request with one member and no splits: what Submit compares with, and what is fused.
    std::optional<Call> call;
    std::optional<Tensor> tensor;
    std::shared_ptr<const Request> request;
    Decision decision;
  };
  // A collective of the round that is being run.
  struct Running {
    Submission* submission;
    const Request* request;
    const Decision* decision;
    Known* known;  // null if it was submitted in full
    CacheId id;    // of known; kNoId if it was decided in full
  };

  // This rank has joined, and takes part all the same in what the others do.
  struct StandIn {
    Submission submission;
    std::vector<std::byte> memory;  // zeros
  };

  // -- baton.cc: who works
  void Run() EXCLUDES(baton_, mutex_);
  void NapThroughBurst();
  bool SleepUntilNews(Clock::time_point due, bool parked);
  Status RunUntilQuiet() REQUIRES(baton_);
  bool Drive(const Handle& handle, Clock::time_point deadline) REQUIRES(baton_);
  bool Doze(Clock::time_point until) REQUIRES(baton_);
  bool HasNews() REQUIRES(baton_);
  void WaitForOthers(Handle& handle, Clock::time_point deadline) EXCLUDES(mutex_, baton_);
  void HandOver() EXCLUDES(mutex_, baton_);
  void RingBell();
  static void Ring(const UniqueFd& event);
  void NewsFor(Then then);
  void Fail(const Status& status) EXCLUDES(mutex_);
  void End() REQUIRES(baton_) EXCLUDES(mutex_);
  void Die(const Status& reason, bool tell_peers) REQUIRES(baton_) EXCLUDES(mutex_);

  // -- news.cc: what comes in and goes out
  Status TakeSubmissions() REQUIRES(baton_) EXCLUDES(mutex_);
  void ReleaseSegments() REQUIRES(baton_);
  Status AnnounceIds() REQUIRES(baton_);
  Status ReadMailboxes() REQUIRES(baton_);
  Status ReadRounds() REQUIRES(baton_);
  Status HandleFrames() REQUIRES(baton_);
  Status HandleAnnouncements(const Frame& frame) REQUIRES(baton_);
  Status Decide() REQUIRES(baton_);
  Status TellMailboxes(const Round& round) REQUIRES(baton_);
  void TellPhase(const PhaseNews& news) REQUIRES(baton_);
  void WakeSleepers() REQUIRES(baton_);

  // -- peers.cc: who is gone, and who is awaited too long
  Status CheckPeers() REQUIRES(baton_) EXCLUDES(mutex_);
  Status CheckStalls() REQUIRES(baton_);
  // Called while the collectives wait for a rank; whoever calls them has the baton.
  Status Tick(int awaited_rank) NO_THREAD_SAFETY_ANALYSIS;
  bool IsInterrupted() REQUIRES(baton_) EXCLUDES(lent_mutex_);
  void BeatIfLent() NO_THREAD_SAFETY_ANALYSIS;
  std::string PendingName() EXCLUDES(mutex_);

  // -- rounds.cc: a turn, and the rounds in it
  // Looks at everything once; true if something happened. poll: at the links as well.
  Result<bool> Turn(bool poll) REQUIRES(baton_) EXCLUDES(mutex_);
  Result<bool> LookAtEverything(bool poll) REQUIRES(baton_) EXCLUDES(mutex_);
  // Finds the submissions of a round's decisions; not ok if the round does not make sense here.
  Status Resolve(const Round& round) REQUIRES(baton_) EXCLUDES(mutex_);
  Submission* MakeStandIn(const Decision& decision) REQUIRES(baton_);
  Status Execute(const Round& round) REQUIRES(baton_) EXCLUDES(mutex_);
  void Complete() REQUIRES(baton_) EXCLUDES(mutex_);
  void Forget(Cache<Known>::Entry& entry) NO_THREAD_SAFETY_ANALYSIS;  // with both mutexes

  // -- batches.cc: a fused batch
  Status RunBatch(std::span<const Tensor> batch) REQUIRES(baton_);
  Status RunAllreduce(std::span<const Tensor> batch) REQUIRES(baton_);
  Status RunAllgather(const Running& running, uint32_t member) REQUIRES(baton_);
  Status RunAlltoall(const Running& running) REQUIRES(baton_);
  Status RunReducescatter(const Running& running, uint32_t member) REQUIRES(baton_);
  Result<Gathered> MakeRoom(const std::vector<int64_t>& rows) REQUIRES(baton_);
  Status RunPlan(const Running& running, uint32_t member) REQUIRES(baton_);
  Status AwaitSegment(int rank, const Location& place) REQUIRES(baton_);
  Status Place(const Tensor& tensor, ArenaPiece* piece) REQUIRES(baton_);

  // -- round_notes.cc: what the timeline hears; called only while one is written
  struct NotedBatch {
    std::vector<Tensor> tensors;
    uint64_t number;
    int64_t begin_ns, end_ns;
  };
  void NoteBatch(Trace& trace, std::span<const Tensor> batch, int64_t begin_ns) REQUIRES(baton_);
  void NoteRound(Trace& trace, const Round& round) REQUIRES(baton_);
  void NotePending(Trace& trace) REQUIRES(baton_) EXCLUDES(mutex_);
  void PostTrace(int rank, const std::string& payload) NO_THREAD_SAFETY_ANALYSIS;
  void EndTimeline(Clock::duration patience) REQUIRES(baton_);

  std::string Doing() const REQUIRES(baton_);
  // There is something to be told that does not fit into the mailbox yet.
  bool AwaitsRoom() const REQUIRES(baton_) { return !unannounced_.empty() || negotiator_.has_ready(); }
  bool IsCoordinator() const { return options_.rank == 0; }

  const SchedulerOptions options_;
  const Topology topology_;
  const int spins_;
  // One plan at a time has them: both ends must know what comes next without a word. They outlive us with it.
  struct PlanLinks {
    RingLinks links;
    std::atomic<uint32_t> returned{0};
  };
  const std::shared_ptr<PlanLinks> plan_links_;

  // The baton, and what its holder works with.
  Mutex baton_;
  const std::unique_ptr<Exchange> exchange_;  // any thread: Wake(), wait_fd(), HasLeft()
  const std::unique_ptr<Arena> arena_ PT_GUARDED_BY(baton_);
  Collectives collectives_ GUARDED_BY(baton_);
  uint32_t plan_links_given_ GUARDED_BY(baton_) = 0;  // to how many plans
  Negotiator negotiator_ GUARDED_BY(baton_);
  std::unique_ptr<Mailboxes> mailboxes_ GUARDED_BY(baton_);  // null if there are several hosts
  std::vector<CacheId> unannounced_ GUARDED_BY(baton_);      // did not fit into the mailbox
  std::vector<uint32_t> words_ GUARDED_BY(baton_);           // read from mailboxes, not yet used
  std::deque<Round> framed_ GUARDED_BY(baton_);              // rounds that came as frames
  std::deque<Round> rounds_ GUARDED_BY(baton_);              // to be run
  uint64_t fusion_nbytes_ GUARDED_BY(baton_);                // the coordinator's
  std::vector<Running> running_ GUARDED_BY(baton_);
  std::deque<StandIn> stand_ins_ GUARDED_BY(baton_);              // in running_
  std::vector<Tensor> tensors_ GUARDED_BY(baton_);                // of running_
  std::vector<std::shared_ptr<Handle>> done_ GUARDED_BY(baton_);  // scratch of Complete()
  std::vector<Piece> pieces_ GUARDED_BY(baton_);                  // scratch of RunAllreduce()
  const Member* doing_ GUARDED_BY(baton_) = nullptr;
  const Request* doing_in_ GUARDED_BY(baton_) = nullptr;
  // Of the batches of the round that is being run, while a timeline is written.
  std::vector<NotedBatch> noted_ GUARDED_BY(baton_);
  Phases phases_ GUARDED_BY(baton_);
  const Interrupt* interrupt_ GUARDED_BY(baton_) = nullptr;  // of the thread that has the baton
  Clock::time_point interruptible_at_ GUARDED_BY(baton_);
  Clock::time_point next_poll_ GUARDED_BY(baton_);
  Clock::time_point next_stall_check_ GUARDED_BY(baton_);
  Clock::time_point next_release_ GUARDED_BY(baton_);
  std::unordered_map<std::string, Clock::time_point> stall_warned_ GUARDED_BY(baton_);

  // While the holder of the baton is in the program's code, the Scheduler's thread moves bytes and beats.
  Mutex lent_mutex_;
  bool is_lent_ GUARDED_BY(lent_mutex_) = false;

  mutable Mutex mutex_;
  // Entries come and go under both mutexes; under mutex_ alone an entry can be found and submitted.
  Cache<Known> known_ GUARDED_BY(mutex_);
  std::vector<CacheId> submitted_ids_ GUARDED_BY(mutex_);                   // not yet announced
  std::vector<std::string> submitted_ GUARDED_BY(mutex_);                   // the same, in full
  std::unordered_map<std::string, Submission> pending_ GUARDED_BY(mutex_);  // in full, not done
  std::vector<std::pair<uint32_t, std::shared_ptr<Segment>>> new_segments_ GUARDED_BY(mutex_);
  std::vector<PhaseNews> phase_news_ GUARDED_BY(mutex_);  // not yet told
  std::vector<Handle*> waiting_ GUARDED_BY(mutex_);       // of threads that wait while another one works
  Status kill_ GUARDED_BY(mutex_);  // not ok: what a thread of the program has ended the Group with
  bool close_ GUARDED_BY(mutex_) = false;
  Status failure_ GUARDED_BY(mutex_);  // to die of
  Status dead_ GUARDED_BY(mutex_);

  // Without a mutex; what is written before a sleeper is looked for, and what a sleeper looks at last.
  std::atomic<bool> news_{false};          // something was submitted
  std::atomic<int> num_pending_{0};        // submissions not done
  std::atomic<int> num_waiting_{0};        // threads in waiting_
  std::atomic<bool> ending_{false};        // aborted, closed or failed: the thread ends the Group
  std::atomic<bool> driving_{false};       // a thread of the program has the baton
  std::atomic<std::thread::id> driver_{};  // ... this one
  std::atomic<bool> dozing_{false};        // ... and sleeps with it; Exchange::Wake() wakes it
  std::atomic<bool> handed_over_{false};   // work was left to the thread
  std::atomic<bool> asleep_{false};        // the thread sleeps; bell_ wakes it
  std::atomic<uint64_t> drives_{0};        // how often a thread of the program took the baton

  LongPhases long_phases_;
  Counters counters_;
  Tracer tracer_;  // its Step() and what else is the engine's: with the baton
  UniqueFd death_, bell_;
  const pid_t pid_;
  Mutex close_mutex_;
  std::thread thread_;
};

}  // namespace hvd
