#pragma once

#include <span>
#include <vector>

#include "collectives/batch.h"
#include "collectives/reduce.h"
#include "transport/arena.h"

namespace hvd {

// Collectives of the ranks of one host on the two building blocks of the Arena, segments and steps. All ranks
// call the same function with the same sizes at the same time. Not ok means that the ranks no longer agree on
// the step, so the Group is dead; outputs are then undefined.

// Every way below gives the bits of Reduce. Chooses one by size.
Status Allreduce(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                 ReduceOp op, const Scale& scale);

// For tensors that lie in the arena. Push in place: rank r reduces slice r of the batch in rank order and
// writes the result to all ranks; with more ranks than CPUs, whoever has one takes the next part. Memory
// traffic per rank: 2 x the bytes of the batch, the lower bound when every rank owns a result.
Status AllreduceInArena(Arena& arena, const Arena::Tick& tick, std::span<const ArenaPiece> pieces,
                        DType dtype, ReduceOp op, const Scale& scale);

// What Allreduce chooses from.
// At most Arena::kInlineNbytes, which travel with the arrival word; at most Arena::kSlotNbytes, beside it.
// Everyone reduces all; one step.
Status AllreduceInline(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                       ReduceOp op, const Scale& scale);
Status AllreduceOneShot(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                        ReduceOp op, const Scale& scale);
// The batch passes through the staging buffers chunk by chunk: a rank copies the slices of the others in,
// reduces its own into its tensors and back over what the others copied in, and copies the others' out.
// Traffic at memory level: about 2 x, the rest stays in L2.
Status AllreduceStaged(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                       ReduceOp op, const Scale& scale);

// What a rank wants of the bytes that `rank` shows, and where.
struct Take {
  int rank;
  size_t begin, nbytes;
  std::byte* out;
};

// Every rank shows its `in` of nbytes[rank] bytes and takes what it wants of anybody's.
Status Show(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::span<const size_t> nbytes,
            std::span<const Take> takes);

// Reduces the ranks' `in` and gives rank r the elements slices[r], which are one after another, in its `out`:
// the bits of Reduce. The staging buffers hold an element for each rank. Traffic at memory level: about 1 x,
// the rest stays in L2.
Status ReduceScatter(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::byte* out,
                     std::span<const Range> slices, DType dtype, ReduceOp op, const Scale& scale);

// nbytes[r] bytes of rank r are put one after another in rank order into every rank's `out`.
Status Allgather(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::byte* out,
                 std::span<const size_t> nbytes);

// The bytes of `root`'s `in` to everyone's `out`.
Status Broadcast(Arena& arena, const Arena::Tick& tick, int root, const std::byte* in, std::byte* out,
                 size_t nbytes);

}  // namespace hvd
