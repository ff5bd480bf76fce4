#include <cstring>

#include "collectives/in_host.h"

namespace hvd {

// Window by window through the staging buffers: in each, every rank copies in the next part of what each of
// the others owns, and reduces its own.
Status ReduceScatter(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::byte* out,
                     std::span<const Range> slices, DType dtype, ReduceOp op, const Scale& scale) {
  const size_t item = ItemSize(dtype), line = 64 / item;
  const auto me = static_cast<size_t>(arena.rank());
  const size_t share = arena.chunk_nbytes() / item / slices.size();
  const size_t each = share < line ? share : share / line * line;
  size_t longest = 0;
  for (const Range& slice : slices) longest = std::max(longest, slice.size());
  std::vector<const void*> srcs(slices.size());
  for (size_t window = 0; window * each < longest; ++window) {
    const auto staged = [&](size_t rank, size_t owner) {
      return arena.staging(static_cast<int>(rank), static_cast<int>(window % 2)) + owner * each * item;
    };
    InPhase(arena.phases(), Phase::kCopyIn, [&] {
      for (size_t owner = 0; owner < slices.size(); ++owner) {
        const Range part = Part(slices[owner], each, window);
        if (owner == me || part.size() == 0) continue;
        std::memcpy(staged(me, owner), in + part.begin * item, part.size() * item);
      }
    });
    HVD_RETURN_IF_ERROR(arena.Beat(tick));
    // Two buffers and one step, as in Show().
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    const Range part = Part(slices[me], each, window);
    if (part.size() == 0) continue;
    for (size_t rank = 0; rank < slices.size(); ++rank) srcs[rank] = staged(rank, me);
    srcs[me] = in + part.begin * item;
    void* dst = out + (part.begin - slices[me].begin) * item;
    InPhase(arena.phases(), Phase::kReduce,
            [&] { Reduce(dtype, op, scale, srcs.data(), arena.size(), &dst, 1, part.size()); });
  }
  return arena.ArriveAndAwait(tick);
}

}  // namespace hvd
