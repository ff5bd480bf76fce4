#include "base/tuning.h"
#include "collectives/in_host.h"

namespace hvd {
namespace {

// Reduces `range` of the batch and writes the result to every rank.
void ReduceForAll(std::span<const ArenaPiece> pieces, Range range, DType dtype, ReduceOp op,
                  const Scale& scale) {
  const size_t item = ItemSize(dtype);
  std::vector<void*> at;
  const auto count_of = [&](size_t i) { return pieces[i].count; };
  ForEachPart(pieces.size(), count_of, range, [&](size_t i, size_t first, size_t count) {
    at.assign(pieces[i].at.begin(), pieces[i].at.end());
    for (void*& p : at) p = static_cast<std::byte*>(p) + first * item;
    const int size = static_cast<int>(at.size());
    Reduce(dtype, op, scale, at.data(), size, at.data(), size, count);
  });
}

}  // namespace

Status AllreduceInArena(Arena& arena, const Arena::Tick& tick, std::span<const ArenaPiece> pieces,
                        DType dtype, ReduceOp op, const Scale& scale) {
  const Range all{0, CountOf(pieces)};
  HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
  if (!arena.has_cpu_for_each()) {
    const size_t each = kSharedPartNbytes / ItemSize(dtype);
    const auto reduce = [&](uint32_t part) {
      InPhase(arena.phases(), Phase::kReduce,
              [&] { ReduceForAll(pieces, Part(all, each, part), dtype, op, scale); });
    };
    return arena.ShareOut(static_cast<uint32_t>((all.size() + each - 1) / each), reduce, tick);
  }
  const Range mine = SliceOf(all, ItemSize(dtype), arena.rank(), arena.size());
  const size_t each = kArenaPartNbytes / ItemSize(dtype);
  for (size_t i = 0; i * each < mine.size(); ++i) {
    if (i > 0) HVD_RETURN_IF_ERROR(arena.Beat(tick));
    InPhase(arena.phases(), Phase::kReduce,
            [&] { ReduceForAll(pieces, Part(mine, each, i), dtype, op, scale); });
  }
  return arena.ArriveAndAwait(tick);
}

}  // namespace hvd
