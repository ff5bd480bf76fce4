#pragma once

#include <span>

#include "collectives/batch.h"
#include "collectives/reduce.h"
#include "transport/peer_memory.h"

namespace hvd {

// A fused batch whose tensors lie in the ordinary memory of the ranks of a host. in[r][i] is the address of
// tensor i in rank r's memory, out[r][i] where its result belongs (in == out: in place). A rank reads the
// memory of the others and writes to its own only. in[r][i] == 0: rank r has no such tensor, which counts as
// zeros; its out is still needed.
struct PeerBatch {
  const PeerMemory& peers;
  int rank;  // this one
  DType dtype;
  std::span<const size_t> counts;  // elements of each tensor
  std::span<const uint64_t* const> in, out;

  int size() const { return static_cast<int>(in.size()); }
};

// An allreduce is this, with each rank owning a range of the batch and a step of all ranks in between:
//   every rank's `in` is complete
//     ReduceRange(own range)           reads the range of every `in`, adds in rank order, writes to its `out`
//   the owner has done that
//     FetchRange(owner, its range)     for every other owner: reads the owner's `out` into this rank's
//   every rank has done that
//     `in` and `out` may be used again
// In place, rank r may fetch range q as soon as q has reduced it: nobody else reads r's range q.
// Both go on in chunks that stay in L2 and may be called for parts of a range. scratch is this rank's own,
// and best 256 KiB for each peer. Not ok: kPeerLost with the rank whose memory cannot be read.
Status ReduceRange(const PeerBatch& batch, Range range, ReduceOp op, const Scale& scale,
                   std::span<std::byte> scratch);
Status FetchRange(const PeerBatch& batch, int owner, Range range);

}  // namespace hvd
