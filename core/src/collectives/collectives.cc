#include "collectives/collectives.h"

#include <cstring>

namespace hvd {

Status Collectives::Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale) {
  if (arena_ != nullptr) return AllreduceStaged(*arena_, tick_, pieces, dtype, op, scale);
  for (const Piece& piece : pieces) {
    const void* in = piece.in;
    void* out = piece.out;
    if (piece.count > 0) Reduce(dtype, op, scale, &in, 1, &out, 1, piece.count);
  }
  return Status::Ok();
}

Status Collectives::AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op,
                                     const Scale& scale) {
  return AllreduceInArena(*arena_, tick_, pieces, dtype, op, scale);
}

Status Collectives::Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes) {
  if (arena_ != nullptr) return Allgather(*arena_, tick_, in, out, nbytes);
  if (nbytes[0] > 0) std::memcpy(out, in, nbytes[0]);
  return Status::Ok();
}

Status Collectives::Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes) {
  if (arena_ != nullptr) return hvd::Broadcast(*arena_, tick_, root, in, out, nbytes);
  if (in != out && nbytes > 0) std::memcpy(out, in, nbytes);
  return Status::Ok();
}

}  // namespace hvd
