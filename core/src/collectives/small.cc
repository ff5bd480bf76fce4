#include <cstring>

#include "collectives/in_host.h"

namespace hvd {
namespace {

// Everyone says its input with one step and reduces all of them. `at(rank, step)` is where it says it.
template <class At>
Status OneShot(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype, ReduceOp op,
               const Scale& scale, At at) {
  const size_t item = ItemSize(dtype);
  InPhase(arena.phases(), Phase::kCopyIn, [&] {
    std::byte* mine = at(arena.rank(), arena.next_step());
    for (const Piece& piece : pieces) {
      if (piece.count == 0) continue;
      std::memcpy(mine, piece.in, piece.count * item);
      mine += piece.count * item;
    }
  });
  const uint32_t step = arena.Arrive();
  HVD_RETURN_IF_ERROR(arena.Await(step, tick));
  const PhaseScope reducing(arena.phases(), Phase::kReduce);
  std::vector<const void*> srcs(static_cast<size_t>(arena.size()));
  size_t offset = 0;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    for (size_t r = 0; r < srcs.size(); ++r) srcs[r] = at(static_cast<int>(r), step) + offset;
    void* dst = piece.out;
    Reduce(dtype, op, scale, srcs.data(), arena.size(), &dst, 1, piece.count);
    offset += piece.count * item;
  }
  return Status::Ok();
}

}  // namespace

Status AllreduceInline(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                       ReduceOp op, const Scale& scale) {
  return OneShot(arena, tick, pieces, dtype, op, scale,
                 [&](int rank, uint32_t step) { return arena.inlined(rank, step); });
}

Status AllreduceOneShot(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                        ReduceOp op, const Scale& scale) {
  return OneShot(arena, tick, pieces, dtype, op, scale,
                 [&](int rank, uint32_t step) { return arena.slot(rank, step); });
}

}  // namespace hvd
