#include "collectives/in_host.h"

#include <cstring>

#include "base/tuning.h"

namespace hvd {

Status Allreduce(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                 ReduceOp op, const Scale& scale) {
  const size_t nbytes = CountOf(pieces) * ItemSize(dtype);
  if (nbytes == 0) return Status::Ok();
  if (nbytes <= kInlineNbytes) return AllreduceInline(arena, tick, pieces, dtype, op, scale);
  if (nbytes <= (arena.has_cpu_for_each() ? kOneShotNbytes : kOneShotCrowdedNbytes))
    return AllreduceOneShot(arena, tick, pieces, dtype, op, scale);
  return AllreduceStaged(arena, tick, pieces, dtype, op, scale);
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
    HVD_RETURN_IF_ERROR(arena.Beat(tick));
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
    HVD_RETURN_IF_ERROR(arena.Beat(tick));
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    if (!is_root) std::memcpy(out + at, arena.staging(root, buffer), n);
  }
  if (is_root && in != out && nbytes > 0) std::memcpy(out, in, nbytes);
  return arena.ArriveAndAwait(tick);
}

}  // namespace hvd
