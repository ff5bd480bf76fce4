#pragma once

#include "collectives/in_host.h"

namespace hvd {

// Chooses how a collective is done for the ranks of a Group. All of them are on one host, so all is done in
// shared memory; ranks on several hosts are refused at connect.
class Collectives {
 public:
  // arena outlives this object.
  Collectives(Arena& arena, Arena::Tick tick) : arena_(arena), tick_(std::move(tick)) {}

  Status Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale);
  Status AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op, const Scale& scale);
  Status Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes);
  Status Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes);

 private:
  Arena& arena_;
  Arena::Tick tick_;
};

}  // namespace hvd
