#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "collectives/cross_host.h"
#include "collectives/reduce.h"
#include "transport/ring_links.h"
#include "transport/topology.h"

namespace hvd {

// Where the elements of a chunk lie: runs one after another, each at `ranks` addresses, at[run * ranks + i].
template <class Pointer>
struct Runs {
  size_t ranks = 0;
  std::vector<Pointer> at;
  std::vector<size_t> counts;

  void Clear() {
    at.clear();
    counts.clear();
  }
  size_t size() const { return counts.size(); }
  Pointer* of(size_t run) { return at.data() + run * ranks; }
};

// What a Chain adds and where its results go: memory of the ranks of this host. Called by the thread that
// drives the Chain.
class ChainMemory {
 public:
  virtual ~ChainMemory() = default;

  // The chunk's elements of every rank of this host, in rank order. Must stay as they are until the next
  // call; those of a single rank until the job is done, because they may be sent from where they are.
  virtual Status Sources(const Chunk& chunk, Runs<const void*>* runs) = 0;

  // Every place where the result is wanted, at least one; may be the sources. The result is sent on from the
  // first one, which must stay as it is until the job is done.
  virtual Status Targets(const Chunk& chunk, Runs<void*>* runs) = 0;
};

// A reduction of the elements `slice`, the same on every host.
struct ChainJob {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Scale scale;
  Range slice;
  ChainMemory* memory = nullptr;  // outlives the job
  // Nothing is finished or stored before this job is done, so that Targets() may depend on its result.
  uint64_t after = kNone;
  static constexpr uint64_t kNone = ~uint64_t{0};
};

// This rank's part in reductions between hosts, for the slices it owns (core.md §4). The accumulator of a
// chunk starts on host 0 and travels to the last host; each adds its ranks in rank order, so the bits are
// those of Reduce over all ranks. The last host finishes it, and the result travels back. Chunks are under
// way in both directions at once and over several streams.
//
// Every host appends the same jobs in the same order; a job whose memory is not there yet is appended later.
// It never blocks: whoever drives it waits for the descriptors it wants. After an error it is of no further
// use. Owned by one thread at a time.
class Chain {
 public:
  // The rank at the other end of the links in each direction; no links at the ends of the chain.
  struct Neighbour {
    int rank = -1;
    std::vector<Link*> links;
  };
  // At least one of the two has links, and as many as the other if that has any. wire_dtype: what float
  // accumulators travel as; kFloat32, or a 16-bit float, to which then every host rounds the result.
  Chain(Neighbour previous, Neighbour next, DType wire_dtype);

  // Returns the number of the job, counted from 0.
  uint64_t Append(const ChainJob& job);
  // All jobs up to this one are done: results are in place and nobody needs its memory any more.
  bool Done(uint64_t job) const { return job < done_; }
  bool idle() const { return jobs_.empty(); }

  // Moves and adds what can be now. True: something was. kPeerLost names the rank.
  Result<bool> Advance();
  // The descriptors to wait for before Advance() can do more, and a rank that is waited for.
  void Wants(std::vector<pollfd>* fds) const;
  int awaited_rank() const;

 private:
  struct Job {
    ChainJob what;
    bool narrow_up = false;    // accumulators travel as wire_dtype_
    bool narrow_down = false;  // so does the result
    size_t acc_item = 0;       // bytes of an accumulator here,
    size_t up_item = 0;        // on the way to the last host,
    size_t down_item = 0;      // and of a result on the way back
    size_t chunks_left = 0;    // not done
  };
  // Room for one chunk, made when it is first needed.
  struct Buffer {
    std::unique_ptr<std::byte[]> wide;  // as accumulators, or as the job's dtype
    std::unique_ptr<std::byte[]> wire;  // as wire_dtype_
    std::byte* Wide();
    std::byte* Wire();
  };
  // A chunk under way. What is sent lies in the tensors or in a buffer.
  struct Flight {
    Job* job;
    Chunk chunk;
    Buffer* up_buffer = nullptr;
    Buffer* down_buffer = nullptr;
    const std::byte* up = nullptr;
    std::byte* down = nullptr;
    size_t up_received = 0, up_sent = 0, down_received = 0, down_sent = 0;  // bytes
    size_t up_nbytes() const { return chunk.count * job->up_item; }
    size_t down_nbytes() const { return chunk.count * job->down_item; }
  };
  // One stream. Its chunks pass each stage in order; a stage's number counts those that have.
  struct Lane {
    Link* previous = nullptr;
    Link* next = nullptr;
    std::deque<Flight> flights;
    uint64_t first = 0;  // the number of flights.front()
    uint64_t end = 0;    // one more than that of flights.back()
    uint64_t added = 0, up_sent = 0, stored = 0, down_sent = 0;
    std::vector<Buffer> buffers;
    std::vector<Buffer*> free_up, free_down;
    Flight& at(uint64_t number) { return flights[number - first]; }
    const Flight& at(uint64_t number) const { return flights[number - first]; }
  };

  bool first_host() const { return previous_.links.empty(); }
  bool last_host() const { return next_.links.empty(); }
  Result<bool> ReceiveUp(Lane& lane);
  Result<bool> SendUp(Lane& lane);
  Result<bool> ReceiveDown(Lane& lane);
  Result<bool> SendDown(Lane& lane);
  Status Add(Flight& flight);
  void AddTo(std::byte* acc, const Job& job, bool start);
  Status Finish(Flight& flight);
  Status Store(Flight& flight);
  void Retire(Lane& lane);
  void RetireJobs();
  bool MayStore(const Flight& flight) const {
    return flight.job->what.after == ChainJob::kNone || Done(flight.job->what.after);
  }
  bool WantsUp(const Lane& lane) const;
  bool WantsDown(const Lane& lane) const;

  const Neighbour previous_, next_;
  const DType wire_dtype_;
  std::deque<Lane> lanes_;
  std::deque<Job> jobs_;
  uint64_t appended_ = 0, done_ = 0;
  Runs<const void*> sources_;  // scratch
  Runs<void*> targets_;        // scratch
};

// The Chain over the data links of a rank, which outlive it; null if the rank owns no slice. `slice` of its
// jobs is SliceOf(..., topology.local_rank, topology.slices()).
std::unique_ptr<Chain> MakeChain(const Topology& topology, const RingLinks& links, DType wire_dtype);

}  // namespace hvd
