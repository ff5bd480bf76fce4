#include <cstring>

#include "collectives/in_host.h"

namespace hvd {
namespace {

// Walks over the bytes of a fused batch as if its tensors were one.
class Cursor {
 public:
  Cursor(std::span<const Piece> pieces, size_t item) : pieces_(pieces), item_(item) {}

  void CopyIn(std::byte* to, size_t nbytes) {
    Walk(nbytes, [&](const Piece& piece, size_t offset, size_t n) {
      std::memcpy(to, piece.in + offset, n);
      to += n;
    });
  }
  void CopyOut(const std::byte* from, size_t nbytes) {
    Walk(nbytes, [&](const Piece& piece, size_t offset, size_t n) {
      std::memcpy(piece.out + offset, from, n);
      from += n;
    });
  }

 private:
  template <class Copy>
  void Walk(size_t nbytes, Copy copy) {
    while (nbytes > 0) {
      const Piece& piece = pieces_[piece_];
      const size_t n = std::min(nbytes, piece.count * item_ - offset_);
      if (n > 0) copy(piece, offset_, n);
      nbytes -= n;
      offset_ += n;
      if (offset_ == piece.count * item_) {
        ++piece_;
        offset_ = 0;
      }
    }
  }

  std::span<const Piece> pieces_;
  const size_t item_;
  size_t piece_ = 0;
  size_t offset_ = 0;
};

std::vector<std::byte*> StagingOfAll(const Arena& arena, int buffer) {
  std::vector<std::byte*> bases(static_cast<size_t>(arena.size()));
  for (int rank = 0; rank < arena.size(); ++rank)
    bases[static_cast<size_t>(rank)] = arena.staging(rank, buffer);
  return bases;
}

// Reduces this rank's slice of `count` elements that every rank has at bases[r].
void ReduceSlice(std::span<std::byte* const> bases, size_t count, int rank, DType dtype, ReduceOp op,
                 const Scale& scale) {
  const size_t item = ItemSize(dtype);
  const int size = static_cast<int>(bases.size());
  const Range slice = SliceOf({0, count}, item, rank, size);
  if (slice.size() == 0) return;
  std::vector<void*> at(bases.size());
  for (size_t r = 0; r < bases.size(); ++r) at[r] = bases[r] + slice.begin * item;
  Reduce(dtype, op, scale, at.data(), size, at.data(), size, slice.size());
}

}  // namespace

Status AllreduceStaged(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                       ReduceOp op, const Scale& scale) {
  const size_t item = ItemSize(dtype);
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.count * item;
  const size_t chunk = arena.chunk_nbytes();
  const size_t chunks = (total + chunk - 1) / chunk;
  const std::vector<std::byte*> buffers[2] = {StagingOfAll(arena, 0), StagingOfAll(arena, 1)};
  Cursor in(pieces, item), out(pieces, item);
  const auto nbytes = [&](size_t c) { return std::min(chunk, total - c * chunk); };
  const auto copy_in = [&](size_t c) {
    const PhaseScope copying(arena.phases(), Phase::kCopyIn);
    in.CopyIn(arena.staging(arena.rank(), static_cast<int>(c % 2)), nbytes(c));
    return arena.Arrive();
  };

  uint32_t filled = chunks > 0 ? copy_in(0) : 0;
  for (size_t c = 0; c < chunks; ++c) {
    // Buffer (c + 1) % 2 is free: every rank was done with chunk c - 1 before we copied it out.
    const uint32_t next_filled = c + 1 < chunks ? copy_in(c + 1) : 0;
    HVD_RETURN_IF_ERROR(arena.Await(filled, tick));
    InPhase(arena.phases(), Phase::kReduce,
            [&] { ReduceSlice(buffers[c % 2], nbytes(c) / item, arena.rank(), dtype, op, scale); });
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    InPhase(arena.phases(), Phase::kCopyOut,
            [&] { out.CopyOut(arena.staging(arena.rank(), static_cast<int>(c % 2)), nbytes(c)); });
    filled = next_filled;
  }
  return Status::Ok();
}

}  // namespace hvd
