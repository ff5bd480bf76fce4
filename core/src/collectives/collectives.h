#pragma once

#include "collectives/in_host.h"
#include "transport/ring_links.h"
#include "transport/topology.h"

namespace hvd {

struct CollectivesOptions {};

// Chooses how a collective is done for the ranks of a Group: in shared memory inside a host, over the data
// links between hosts.
//
// All ranks call the same function with the same sizes at the same time. Not ok means that the ranks no
// longer agree on what comes next, so the Group is dead; outputs are then undefined. Owned by one thread at a
// time.
class Collectives {
 public:
  // Called every few milliseconds while waiting for a rank (its number in the Group), to move frames and to
  // say when to give up: not ok ends the wait.
  using Tick = std::function<Status(int awaited_rank)>;

  // arena is that of this host and outlives this object.
  Collectives(const Topology& topology, Arena& arena, RingLinks links, Tick tick,
              const CollectivesOptions& options = {});

  Status Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale);
  // `at` of each piece is by local rank.
  Status AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op, const Scale& scale);
  // nbytes is by rank of the Group.
  Status Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes);
  // root is a rank of the Group.
  Status Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes);

 private:
  const Topology topology_;
  Arena& arena_;
  RingLinks links_;
  Tick tick_;
  Arena::Tick local_tick_;
};

}  // namespace hvd
