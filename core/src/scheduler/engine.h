#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/handle.h"
#include "scheduler/long_phases.h"
#include "scheduler/request.h"
#include "scheduler/tracer.h"

namespace hvd {

// The memory of one member of a request. `out` is unused in an allgather; in == out is in place.
struct Buffer {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
};

struct Submission {
  std::shared_ptr<const Request> request;
  std::vector<Buffer> buffers;  // empty: `only` is the only one
  std::shared_ptr<Handle> handle;
  int64_t queued_ns = 0;  // only while a timeline is written
  bool running = false;   // a round that is being run has it
  Buffer only{};

  bool active() const { return handle != nullptr; }
  const Buffer& buffer(uint32_t member) const { return buffers.empty() ? only : buffers[member]; }
};

// A collective on one tensor as its caller has it, without memory of its own.
struct Call {
  Op op = Op::kAllreduce;
  std::string_view name;
  ReduceOp reduce = ReduceOp::kSum;
  double prescale = 1;
  double postscale = 1;
  int32_t root = 0;
  DType dtype = DType::kFloat32;
  std::span<const int64_t> shape;
  Location where;
  Buffer buffer;

  // The same collective, whatever the memory.
  bool Is(const Call& other) const {
    return op == other.op && dtype == other.dtype && reduce == other.reduce && root == other.root &&
           prescale == other.prescale && postscale == other.postscale && where == other.where &&
           std::ranges::equal(shape, other.shape);
  }
};

struct Counters {
  std::atomic<uint64_t> collectives{0};    // completed, of any kind
  std::atomic<uint64_t> fused_batches{0};  // runs over the data
  std::atomic<uint64_t> nbytes{0};         // of this rank's tensors
  std::atomic<uint64_t> work_ns{0};        // spent in those runs, waiting for peers included
};

// How the caller comes back to what it submits: kWaits says that it calls Wait() next, and so needs nobody
// else to do the work.
enum class Then : uint8_t { kGoesOn, kWaits };

// What carries out the collectives of a Group: a Scheduler, or Solo for a Group of one. Any thread.
class Engine {
 public:
  // Called now and then on the thread that waits; true ends its wait. May take long (it waits for the GIL),
  // and may call the Engine, but not Wait().
  using Interrupt = std::function<bool()>;

  virtual ~Engine() = default;

  // A name may be pending once. The buffers stay valid until the handle is done.
  virtual Status Submit(Submission submission, Then then) = 0;
  // Submits what all ranks have agreed on before, cheaply. Null if they have not (or no longer know): then it
  // is to be submitted in full.
  virtual Result<std::shared_ptr<Handle>> SubmitAgain(const Call& call, Then then) = 0;
  // False if it is not done at the deadline, or was interrupted. May do the work on this thread.
  virtual bool Wait(Handle& handle, Clock::time_point deadline, const Interrupt& interrupt) = 0;
  // Whether this thread is in Wait() already, below its interrupt.
  virtual bool IsWaiting() const = 0;
  // Makes `segment` (number > 0, counted by the caller) known to the other ranks, before anything that is
  // submitted later.
  virtual void AddSegment(uint32_t number, std::shared_ptr<Segment> segment) = 0;
  // Waiting for this rank is legal for a while, or no longer.
  virtual void DeclarePhase(PhaseNews news) = 0;
  // Both end the Group on all ranks, for this reason.
  void Abort(const std::string& reason) { Kill(Status(Code::kAborted, reason)); }
  virtual void Kill(const Status& reason) = 0;
  // Pending handles get kShutdown. Idempotent, bounded in time.
  virtual void Close() = 0;
  // Why the Group is dead; ok while it lives.
  virtual Status status() const = 0;
  // A descriptor that becomes readable when the Group is dead.
  virtual int death_fd() const = 0;
  // Whether `rank` has closed the Group.
  virtual bool HasLeft(int rank) const = 0;
  // How many plans have given the data links of plans back, of those that have had them.
  virtual uint32_t plan_links_returned() const = 0;
  // Which ranks are rightly waited for.
  virtual const LongPhases& long_phases() const = 0;
  virtual const Counters& counters() const = 0;
  // Start, Stop and trace() are for any thread.
  virtual Tracer& tracer() = 0;
};

}  // namespace hvd
