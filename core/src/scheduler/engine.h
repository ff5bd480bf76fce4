#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/handle.h"
#include "scheduler/request.h"

namespace hvd {

// The memory of one member of a request. `out` is unused in an allgather; in == out is in place.
struct Buffer {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
};

struct Submission {
  Request request;
  std::vector<Buffer> buffers;
  std::shared_ptr<Handle> handle;
};

struct Counters {
  std::atomic<uint64_t> collectives{0};    // completed, of any kind
  std::atomic<uint64_t> fused_batches{0};  // runs over the data
  std::atomic<uint64_t> nbytes{0};         // of this rank's tensors
  std::atomic<uint64_t> work_ns{0};        // spent in those runs, waiting for peers included
};

// What carries out the collectives of a Group: a Scheduler, or Solo for a Group of one. Any thread.
class Engine {
 public:
  virtual ~Engine() = default;

  // A name may be pending once. The buffers stay valid until the handle is done.
  virtual Status Submit(Submission submission) = 0;
  // Makes `segment` (number > 0, counted by the caller) known to the other ranks, before anything that is
  // submitted later.
  virtual void AddSegment(uint32_t number, std::shared_ptr<Segment> segment) = 0;
  // Kills the Group on all ranks with this reason.
  virtual void Abort(const std::string& reason) = 0;
  // Pending handles get kShutdown. Idempotent, bounded in time.
  virtual void Close() = 0;
  // Why the Group is dead; ok while it lives.
  virtual Status status() const = 0;
  // A descriptor that becomes readable when the Group is dead.
  virtual int death_fd() const = 0;
  virtual const Counters& counters() const = 0;
};

}  // namespace hvd
