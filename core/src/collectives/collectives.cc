#include "collectives/collectives.h"

namespace hvd {

Status Collectives::Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale) {
  return AllreduceStaged(arena_, tick_, pieces, dtype, op, scale);
}

Status Collectives::AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op,
                                     const Scale& scale) {
  return AllreduceInArena(arena_, tick_, pieces, dtype, op, scale);
}

Status Collectives::Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes) {
  return Allgather(arena_, tick_, in, out, nbytes);
}

Status Collectives::Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes) {
  return hvd::Broadcast(arena_, tick_, root, in, out, nbytes);
}

}  // namespace hvd
