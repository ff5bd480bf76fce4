#pragma once

#include <span>
#include <vector>

#include "collectives/reduce.h"
#include "transport/arena.h"

namespace hvd {

// Collectives of the ranks of one host on the two building blocks of the Arena, segments and steps. All ranks
// call the same function with the same sizes at the same time. Not ok means that the ranks no longer agree on
// the step, so the Group is dead; outputs are then undefined.

// One tensor of a fused batch; in == out is in place.
struct Piece {
  const std::byte* in;
  std::byte* out;
  size_t count;
};

// One tensor that lies in the arena on every rank: at[r] is where rank r has it.
struct ArenaPiece {
  std::vector<std::byte*> at;
  size_t count;
};

// Push in place: rank r reduces slice r of every tensor in rank order and writes the result to all ranks.
// Memory traffic per rank: 2 x the bytes of a tensor, the lower bound when every rank owns a result.
Status AllreduceInArena(Arena& arena, const Arena::Tick& tick, std::span<const ArenaPiece> pieces,
                        DType dtype, ReduceOp op, const Scale& scale);

// The same for tensors in ordinary memory, which pass through the staging buffers chunk by chunk; copying in
// the next chunk overlaps with waiting for the others. Traffic at memory level: about 2 x, the rest stays in
// L2.
Status AllreduceStaged(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                       ReduceOp op, const Scale& scale);

// nbytes[r] bytes of rank r are put one after another in rank order into every rank's `out`.
Status Allgather(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::byte* out,
                 std::span<const size_t> nbytes);

// The bytes of `root`'s `in` to everyone's `out`.
Status Broadcast(Arena& arena, const Arena::Tick& tick, int root, const std::byte* in, std::byte* out,
                 size_t nbytes);

}  // namespace hvd
