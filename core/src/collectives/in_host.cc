#include "collectives/in_host.h"

#include <algorithm>
#include <cstring>

namespace hvd {
namespace {

constexpr size_t kLine = 64;

struct Range {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// The elements of `count` that rank owns, in whole cache lines so that no two ranks write the same one.
Range Slice(size_t count, size_t item, int rank, int size) {
  const size_t per_line = kLine / item;
  const size_t lines = (count + per_line - 1) / per_line;
  const size_t each = (lines + static_cast<size_t>(size) - 1) / static_cast<size_t>(size) * per_line;
  const size_t begin = std::min(count, each * static_cast<size_t>(rank));
  return {begin, std::min(count, begin + each)};
}

// Reduces this rank's slice of `count` elements that every rank has at bases[r].
void ReduceSlice(std::span<std::byte* const> bases, size_t count, int rank, DType dtype, ReduceOp op,
                 const Scale& scale) {
  const size_t item = ItemSize(dtype);
  const int size = static_cast<int>(bases.size());
  const Range slice = Slice(count, item, rank, size);
  if (slice.size() == 0) return;
  std::vector<void*> at(bases.size());
  for (size_t r = 0; r < bases.size(); ++r) at[r] = bases[r] + slice.begin * item;
  Reduce(dtype, op, scale, at.data(), size, at.data(), size, slice.size());
}

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

}  // namespace

Status AllreduceInArena(Arena& arena, const Arena::Tick& tick, std::span<const ArenaPiece> pieces,
                        DType dtype, ReduceOp op, const Scale& scale) {
  HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
  for (const ArenaPiece& piece : pieces) ReduceSlice(piece.at, piece.count, arena.rank(), dtype, op, scale);
  return arena.ArriveAndAwait(tick);
}

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
    in.CopyIn(arena.staging(arena.rank(), static_cast<int>(c % 2)), nbytes(c));
    return arena.Arrive();
  };

  uint32_t filled = chunks > 0 ? copy_in(0) : 0;
  for (size_t c = 0; c < chunks; ++c) {
    // Buffer (c + 1) % 2 is free: every rank was done with chunk c - 1 before we copied it out.
    const uint32_t next_filled = c + 1 < chunks ? copy_in(c + 1) : 0;
    HVD_RETURN_IF_ERROR(arena.Await(filled, tick));
    ReduceSlice(buffers[c % 2], nbytes(c) / item, arena.rank(), dtype, op, scale);
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    out.CopyOut(arena.staging(arena.rank(), static_cast<int>(c % 2)), nbytes(c));
    filled = next_filled;
  }
  return Status::Ok();
}

Status Allgather(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::byte* out,
                 std::span<const size_t> nbytes) {
  const size_t chunk = arena.chunk_nbytes();
  std::vector<size_t> begins;
  size_t total = 0, longest = 0;
  for (const size_t n : nbytes) {
    begins.push_back(total);
    total += n;
    longest = std::max(longest, n);
  }
  const auto part = [&](int rank, size_t at) {
    const size_t n = nbytes[static_cast<size_t>(rank)];
    return at < n ? std::min(chunk, n - at) : 0;
  };
  int buffer = 0;
  for (size_t at = 0; at < longest; at += chunk, buffer ^= 1) {
    if (const size_t n = part(arena.rank(), at); n > 0)
      std::memcpy(arena.staging(arena.rank(), buffer), in + at, n);
    // Two buffers and one step: who arrives here has copied out chunk c - 1, so chunk c + 1 may overwrite it.
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    for (int rank = 0; rank < arena.size(); ++rank) {
      if (const size_t n = part(rank, at); n > 0) {
        std::memcpy(out + begins[static_cast<size_t>(rank)] + at, arena.staging(rank, buffer), n);
      }
    }
  }
  // The last chunks are read before anyone may stage something else.
  return arena.ArriveAndAwait(tick);
}

Status Broadcast(Arena& arena, const Arena::Tick& tick, int root, const std::byte* in, std::byte* out,
                 size_t nbytes) {
  const size_t chunk = arena.chunk_nbytes();
  const bool is_root = arena.rank() == root;
  int buffer = 0;
  for (size_t at = 0; at < nbytes; at += chunk, buffer ^= 1) {
    const size_t n = std::min(chunk, nbytes - at);
    if (is_root) std::memcpy(arena.staging(root, buffer), in + at, n);
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    if (!is_root) std::memcpy(out + at, arena.staging(root, buffer), n);
  }
  if (is_root && in != out && nbytes > 0) std::memcpy(out, in, nbytes);
  return arena.ArriveAndAwait(tick);
}

}  // namespace hvd
