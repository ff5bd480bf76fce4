#include <cstring>

#include "collectives/in_host.h"

namespace hvd {
namespace {

// One rank's part of the work on each chunk. Buffer c % 2 of rank r's staging holds what r has of the slices
// of the others, each at its place in chunk c; their owners put the results there.
struct Stager {
  Arena& arena;
  const Batch& batch;
  const size_t item;

  std::byte* At(int rank, Range elements, size_t chunk, Range slice) const {
    return arena.staging(rank, static_cast<int>(chunk % 2)) + (slice.begin - elements.begin) * item;
  }

  // copy(piece, first, count, where it is staged here) for everything but the own slice.
  template <class Copy>
  void ForOthers(Range elements, size_t chunk, Copy copy) const {
    for (int owner = 0; owner < arena.size(); ++owner) {
      if (owner == arena.rank()) continue;
      const Range slice = SliceOf(elements, item, owner, arena.size());
      std::byte* staged = At(arena.rank(), elements, chunk, slice);
      batch.ForEach(slice, [&](const Piece& piece, size_t first, size_t count) {
        copy(piece, first * item, count * item, staged);
        staged += count * item;
      });
    }
  }

  void CopyIn(Range elements, size_t chunk) const {
    const PhaseScope copying(arena.phases(), Phase::kCopyIn);
    ForOthers(elements, chunk, [](const Piece& piece, size_t offset, size_t nbytes, std::byte* staged) {
      std::memcpy(staged, piece.in + offset, nbytes);
    });
  }

  void CopyOut(Range elements, size_t chunk) const {
    const PhaseScope copying(arena.phases(), Phase::kCopyOut);
    ForOthers(elements, chunk, [](const Piece& piece, size_t offset, size_t nbytes, const std::byte* staged) {
      std::memcpy(piece.out + offset, staged, nbytes);
    });
  }

  void ReduceOwn(Range elements, size_t chunk, DType dtype, ReduceOp op, const Scale& scale) const {
    const PhaseScope reducing(arena.phases(), Phase::kReduce);
    const auto mine = static_cast<size_t>(arena.rank());
    const Range slice = SliceOf(elements, item, arena.rank(), arena.size());
    std::vector<const void*> from(static_cast<size_t>(arena.size()));
    std::vector<void*> to(from.size());
    size_t offset = 0;
    batch.ForEach(slice, [&](const Piece& piece, size_t first, size_t count) {
      for (size_t r = 0; r < from.size(); ++r)
        from[r] = to[r] = At(static_cast<int>(r), elements, chunk, slice) + offset;
      from[mine] = piece.in + first * item;
      to[mine] = piece.out + first * item;
      Reduce(dtype, op, scale, from.data(), arena.size(), to.data(), arena.size(), count);
      offset += count * item;
    });
  }
};

}  // namespace

// Chunk c is copied in at stage c, reduced at stage c + 1 and copied out at stage c + 2, with one step
// between stages. Two ranks use a line of a buffer in turns, and each writes what it has read; on some
// machines a write to a line that another core has only read takes five times as long.
Status AllreduceStaged(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                       ReduceOp op, const Scale& scale) {
  const size_t item = ItemSize(dtype);
  const Batch batch(pieces);
  const Stager stager{arena, batch, item};
  const Range all{0, batch.count()};
  const size_t each = arena.chunk_nbytes() / item;
  const size_t chunks = (all.size() + each - 1) / each;
  if (chunks == 0) return Status::Ok();
  const auto elements = [&](size_t chunk) { return Part(all, each, chunk); };
  for (size_t stage = 0;; ++stage) {
    if (stage > 0 && stage <= chunks) stager.ReduceOwn(elements(stage - 1), stage - 1, dtype, op, scale);
    if (stage > 1) stager.CopyOut(elements(stage - 2), stage - 2);
    if (stage > chunks) return Status::Ok();
    if (stage < chunks) stager.CopyIn(elements(stage), stage);
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    HVD_RETURN_IF_ERROR(arena.Beat(tick));
  }
}

}  // namespace hvd
