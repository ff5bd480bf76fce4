#pragma once

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/chain.h"
#include "scheduler/long_phases.h"
#include "scheduler/plan_data.h"
#include "scheduler/plan_layout.h"
#include "scheduler/plan_travel.h"
#include "scheduler/plan_words.h"
#include "scheduler/trace.h"

namespace hvd {

// What all ranks have agreed on.
struct PlanSpec {
  std::string name;
  std::vector<Member> members;
  ReduceOp reduce = ReduceOp::kSum;
  Scale scale;
  BatchLimits limits;
};

// The ranks of this host and the way to others, as a plan needs them.
struct PlanHost {
  int rank = 0;        // local, as everywhere in a plan
  int first_rank = 0;  // what local rank 0 is called
  int hosts = 1;
  int owners = 1;                                   // so many ranks of each host reduce a slice
  std::vector<std::byte*> words;                    // by rank: Plan::WordsNbytes each
  std::unique_ptr<Chain> chain;                     // to the neighbour hosts, for an owner
  std::function<Status()> status;                   // why the Group is dead; ok while it lives
  std::function<bool(int rank_of_group)> has_left;  // has closed the Group
  std::function<void(const Status& reason)> kill;   // the Group, on all ranks
  std::shared_ptr<const void> owner;                // of the words
  std::shared_ptr<const void> links;                // of the chain; no other plan uses them
  bool has_cpu_for_each = false;                    // so spin a little
  Clock::duration stall_warn{};
  Clock::duration stall_shutdown{};         // zero: never
  const LongPhases* long_phases = nullptr;  // of the Group; null: there are none
  std::function<Trace*()> trace;            // where notes go now; null, also the function, for nowhere
};

// An allreduce, in place, of tensors that come back every step, without a control message: the ranks of a
// host meet in words of shared memory and stage for each other what the others reduce (PlanData); between
// hosts a chain carries slices of fused batches as soon as all ranks of the host have handed them over. All
// progress is made by the calling threads.
//
// A step is Begin, Ready or Decline for any members in any order, End. All ranks make the same steps. A
// member that was not handed over when End is called counts as zero if another rank has it, and is left alone
// if nobody has. Ready never waits: it advances the fused batches that all ranks have handed over, while the
// program computes on. Rank r reduces slice r of a batch in rank order, or sends it along the hosts.
//
// Memory handed over must stay as it is from Ready until End is done, also after a failed step, until Leave.
// Not thread-safe, except Leave. After a failure every call returns it.
class Plan {
 public:
  Plan(PlanSpec spec, PlanHost host);
  ~Plan() { Leave(); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Shared memory of each rank.
  static size_t WordsNbytes(const PlanSpec& spec, int ranks_on_host);

  Status Begin();
  // Contiguous elements of the agreed dtype and number, in this process. Again for the same member: replaces,
  // unless its fused batch is on its way; then kInvalid.
  Status Ready(uint32_t member, void* at);
  // This rank has the member in a form that the plan cannot carry: no rank reduces it in this step.
  Status Decline(uint32_t member);

  enum class Progress {
    kDone,
    kNeedsMemory,  // of needs(): Supply it, then call End again
    kPending,      // the deadline has passed; call End again
  };
  // Waits until the step is done on all ranks. `flags` are shown to everybody (see outcome).
  Result<Progress> End(uint32_t flags, Clock::time_point deadline);
  // Members that others have and this rank has not.
  const std::vector<uint32_t>& needs() const { return needs_; }
  // Zeros for such a member; the result goes there.
  void Supply(uint32_t member, void* at);

  struct Outcome {
    std::vector<uint32_t> declined;  // by any rank; not reduced, the same list on all ranks
    uint32_t flags_of_any = 0;
    uint32_t flags_of_all = 0;
  };
  const Outcome& outcome() const { return outcome_; }  // of a step that is done

  // Takes part no more; peers that need this rank fail. Any thread. Memory may be freed afterwards.
  void Leave();

  bool is_open() const { return open_.load(std::memory_order_relaxed); }
  size_t batches() const { return layout_.batches.size(); }
  struct Times {
    uint64_t ready_ns = 0;  // work done in Ready: hidden behind the program's own
    uint64_t end_ns = 0;    // in End, waits included: exposed
    uint64_t wait_ns = 0;   // of which: waiting for other ranks
  };
  const Times& times() const { return times_; }

 private:
  struct BatchState {
    uint32_t waiting = 0;  // parts that are not handed over
    // One after another: nobody hands more over; all that others need is staged; all ranks have done so; this
    // rank's slice is reduced; all slices are here.
    bool is_complete = false, is_declared = false, is_resolved = false, is_reduced = false, is_done = false;
    std::vector<uint32_t> lacks;  // members without memory for the result
    PlanTravel travel;            // between hosts
    std::vector<bool> fetched;    // by rank
    size_t fetched_count = 0;
    int64_t declared_ns = 0, resolved_ns = 0, begun_ns = 0;  // while a timeline is written
    int64_t wire_ns = 0;  // likewise: on the wire since, as far as that is not among the phases; 0: it is not
    Phases phases;
  };
  struct MemberState {
    bool is_given = false;
    PlanWords::Status status = PlanWords::kNothing;
    int64_t given_ns = 0;  // while a timeline is written
  };

  int size() const { return static_cast<int>(words_.size()); }
  bool several_hosts() const { return host_.hosts > 1; }
  bool owns_slice() const { return host_.rank < host_.owners; }
  const PlanWords& mine() const { return words_[static_cast<size_t>(host_.rank)]; }
  Status Give(uint32_t member, PlanWords::Status status, void* at);
  void PutMember(uint32_t member, PlanWords::Status status, std::byte* at);
  void Complete(size_t batch);
  void CompleteRest(uint32_t flags);
  bool MayStage(size_t batch) const;
  void Declare(size_t batch);
  // Does what can be done without waiting.
  Status Advance(bool* progressed);
  Status AdvanceBatch(size_t batch, bool* progressed);
  bool IsDeclaredByAll(size_t batch) const;
  // Which members are reduced: at once on one host, after all hosts have agreed on several.
  void Resolve(size_t batch);
  void ResolveAgreed();
  bool LacksMemory(BatchState* batch) const;
  // Hands the batch to the chain, in its turn, and sees whether it is back.
  void Travel(size_t batch);
  void AgreeOnVotes(bool* progressed);
  bool AwaitsLinks() const { return host_.chain != nullptr && !host_.chain->idle(); }
  void NoteWire(BatchState* batch) const;
  void NoteDone(size_t batch) const;
  bool AllEnded() const;
  bool AllFinished() const;
  // One turn of End; true when nothing is left to do.
  Result<bool> Turn(bool* progressed);
  void Settle();
  Status Check();
  Status CheckStall();
  Status Fail(Status status);
  void Ring();
  void SleepUnlessNews(bool* progressed, Result<bool>* turn);
  std::string NameOf(int rank) const { return std::to_string(host_.first_rank + rank); }
  // The ranks of this host, called as in the Group, for which is_late(rank) holds; ", <what> by rank 1, 3".
  template <class IsLate>
  std::string Late(const char* what, IsLate is_late) const;
  bool HasEnded(int rank) const;
  // Whether it is ranks of other hosts that this one waits for, as far as it can see.
  bool IsLateElsewhere() const;
  std::string Waits() const;

  const PlanSpec spec_;
  const PlanHost host_;
  const PlanLayout layout_;
  const std::vector<PlanWords> words_;  // by rank
  PlanData data_;
  std::vector<BatchState> batches_;
  std::vector<MemberState> members_;
  SharedBytes votes_;

  std::atomic<uint32_t> step_{0};
  std::atomic<bool> open_{false};
  bool has_ended_ = false, is_agreed_ = false, is_settled_ = false;
  size_t done_ = 0;                           // batches
  size_t complete_ = 0;                       // batches
  size_t first_ = 0;                          // batch that is not done
  size_t appended_ = 0;                       // batches
  std::optional<uint64_t> vote_;              // the job in the chain
  std::optional<Clock::time_point> left_at_;  // a neighbour is known to have left since, and nothing came
  std::vector<pollfd> fds_;                   // scratch
  std::vector<uint32_t> needs_;
  Outcome outcome_;
  const pid_t pid_ = ::getpid();
  Status broken_;
  Clock::time_point ended_at_;
  bool warned_ = false;
  Trace* trace_ = nullptr;  // for the length of a step
  Times times_;
};

}  // namespace hvd
