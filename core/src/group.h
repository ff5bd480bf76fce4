#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "scheduler/connect.h"
#include "scheduler/plan.h"

namespace hvd {

// A plan that this rank has proposed; made when all ranks have and `handle` is done.
struct PlanOffer {
  PlanSpec spec;
  std::shared_ptr<Segment> words;
  std::shared_ptr<Handle> handle;
};

// The ranks of a job, seen by one of them. Everything may be called from any thread. Nothing in here is
// global to the process: several Groups, also several ranks of one, can live in it.
class Group {
 public:
  // All ranks call it at the same time. listener may be null if there is one endpoint only.
  static Result<std::unique_ptr<Group>> Connect(Listener* listener, const std::vector<std::string>& endpoints,
                                                const Credentials& me, const GroupOptions& options);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Topology& topology() const { return topology_; }

  // Checks the request on this rank (kInvalid) and hands it to the engine; an alltoall without splits gets
  // equal ones. buffers[i] belongs to
  // request.members[i] and stays valid until the handle is done. Finds out by address what is in the arena.
  // `kept` is memory that the others need to find until then.
  Result<std::shared_ptr<Handle>> Submit(Request request, std::vector<Buffer> buffers,
                                         Then then = Then::kGoesOn, std::shared_ptr<Segment> kept = nullptr);
  // The same for one tensor; cheaper when it comes again. `where` is found out here.
  Result<std::shared_ptr<Handle>> Submit(Call call, Then then);
  // False if it is not done at the deadline, or interrupt() was true.
  bool Wait(Handle& handle, Clock::time_point deadline, const Engine::Interrupt& interrupt) {
    return engine_->Wait(handle, deadline, interrupt);
  }

  // Memory that allreduces in place without copies, on every rank of the host.
  Result<std::shared_ptr<Segment>> Empty(size_t nbytes);

  // All ranks offer the same under the same name; else their handles are done with kMismatch.
  Result<PlanOffer> OfferPlan(PlanSpec spec);
  // Of an offer whose handle is done and ok. Null, on all ranks, if a plan is not possible: on several hosts
  // one is at a time. The Group outlives the plan.
  std::shared_ptr<Plan> JoinPlan(const PlanOffer& offer) EXCLUDES(mutex_);

  // Tracer says what they do.
  Status StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline();

  // kInvalid for a time that is not positive.
  Status BeginPhase(const std::string& name, double timeout_s);
  void EndPhase() { engine_->DeclarePhase({}); }

  bool IsWaiting() const { return engine_->IsWaiting(); }
  void Abort(const std::string& reason) { engine_->Abort(reason); }
  void Close() EXCLUDES(mutex_);
  Status status() const { return engine_->status(); }
  int death_fd() const { return engine_->death_fd(); }
  const Counters& counters() const { return engine_->counters(); }

 private:
  struct Owned {
    uint32_t number;
    std::weak_ptr<Segment> segment;
  };

  Group(const Topology& topology, std::unique_ptr<Engine> engine)
      : topology_(topology), rank_(topology.rank), size_(topology.size), engine_(std::move(engine)) {}
  Status Check(const Request& request) const;
  Location Locate(const Buffer& buffer, size_t nbytes) EXCLUDES(mutex_);

  const Topology topology_;
  const int rank_;
  const int size_;
  const std::unique_ptr<Engine> engine_;
  Mutex mutex_;
  std::atomic<bool> has_segments_{false};  // some have been made
  uint32_t num_segments_ GUARDED_BY(mutex_) = 0;
  std::map<const std::byte*, Owned> segments_ GUARDED_BY(mutex_);  // by their first byte
  std::vector<std::weak_ptr<Plan>> plans_ GUARDED_BY(mutex_);
};

}  // namespace hvd
