#include "collectives/collectives.h"

namespace hvd {

Collectives::Collectives(const Topology& topology, Arena& arena, RingLinks links, Tick tick,
                         const CollectivesOptions&)
    : topology_(topology),
      arena_(arena),
      links_(std::move(links)),
      tick_(std::move(tick)),
      local_tick_([this](int local_rank) { return tick_(topology_.GlobalRank(local_rank)); }) {}

Status Collectives::Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale) {
  return AllreduceStaged(arena_, local_tick_, pieces, dtype, op, scale);
}

Status Collectives::AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op,
                                     const Scale& scale) {
  return AllreduceInArena(arena_, local_tick_, pieces, dtype, op, scale);
}

Status Collectives::Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes) {
  return Allgather(arena_, local_tick_, in, out, nbytes);
}

Status Collectives::Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes) {
  return hvd::Broadcast(arena_, local_tick_, topology_.LocalRankOf(root), in, out, nbytes);
}

}  // namespace hvd
