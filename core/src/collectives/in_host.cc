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

Status Show(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::span<const size_t> nbytes,
            std::span<const Take> takes) {
  const size_t chunk = arena.chunk_nbytes();
  const size_t own = nbytes[static_cast<size_t>(arena.rank())];
  const size_t longest = *std::max_element(nbytes.begin(), nbytes.end());
  int buffer = 0;
  for (size_t at = 0; at < longest; at += chunk, buffer ^= 1) {
    if (at < own) std::memcpy(arena.staging(arena.rank(), buffer), in + at, std::min(chunk, own - at));
    HVD_RETURN_IF_ERROR(arena.Beat(tick));
    // Two buffers and one step: who arrives here has copied out chunk c - 1, so chunk c + 1 may overwrite it.
    HVD_RETURN_IF_ERROR(arena.ArriveAndAwait(tick));
    for (const Take& take : takes) {
      const size_t from = std::max(at, take.begin), to = std::min(at + chunk, take.begin + take.nbytes);
      if (from >= to) continue;
      std::memcpy(take.out + (from - take.begin), arena.staging(take.rank, buffer) + (from - at), to - from);
    }
  }
  // The last chunks are read before anyone may stage something else.
  return arena.ArriveAndAwait(tick);
}

Status Allgather(Arena& arena, const Arena::Tick& tick, const std::byte* in, std::byte* out,
                 std::span<const size_t> nbytes) {
  std::vector<Take> takes;
  for (const size_t n : nbytes) {
    takes.push_back({static_cast<int>(takes.size()), 0, n, out});
    out += n;
  }
  return Show(arena, tick, in, nbytes, takes);
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
