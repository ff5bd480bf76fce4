#include "collectives/in_host.h"

#include <cstring>

#include "collectives/direct.h"

namespace hvd {
namespace {

// Addresses of one rank in its table: those of `in` in the first half, those of `out` in the second.
constexpr size_t kMostPieces = Arena::kTableEntries / 2;
// Tensors of a batch are read if they hold so much on average; smaller ones cost more in the kernel than two
// copies. 4 MiB at n=2, staged against read, on a busy machine: 7.6 against 13.4 ms in pieces of 4 KiB, 8.2
// against 5.4 of 16 KiB, 5.3 against 2.8 of 64 KiB.
constexpr size_t kLeastReadNbytes = 10 << 10;

// Says where this rank has its tensors, and waits for the others to say it. *readable: they can be read on
// every rank.
Status ShareAddresses(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, bool* readable) {
  uint64_t* table = arena.table(arena.rank());
  bool mine = true;
  for (size_t i = 0; i < pieces.size(); ++i) {
    table[i] = reinterpret_cast<uintptr_t>(pieces[i].in);
    table[kMostPieces + i] = reinterpret_cast<uintptr_t>(pieces[i].out);
    if (pieces[i].count == 0) continue;
    mine = mine && PeerMemory::IsReadable(pieces[i].in) &&
           (pieces[i].in == pieces[i].out || PeerMemory::IsReadable(pieces[i].out));
  }
  *arena.inlined(arena.rank(), arena.next_step()) = std::byte{mine};
  const uint32_t step = arena.Arrive();
  HVD_RETURN_IF_ERROR(arena.Await(step, tick));
  *readable = true;
  for (int rank = 0; rank < arena.size(); ++rank)
    *readable = *readable && *arena.inlined(rank, step) != std::byte{0};
  return Status::Ok();
}

}  // namespace

Status AllreduceByReads(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                        ReduceOp op, const Scale& scale) {
  while (pieces.size() > kMostPieces) {
    HVD_RETURN_IF_ERROR(AllreduceByReads(arena, tick, pieces.first(kMostPieces), dtype, op, scale));
    pieces = pieces.subspan(kMostPieces);
  }
  bool readable = false;
  HVD_RETURN_IF_ERROR(ShareAddresses(arena, tick, pieces, &readable));
  if (!readable) return AllreduceStaged(arena, tick, pieces, dtype, op, scale);
  const int size = arena.size();
  std::vector<size_t> counts;
  for (const Piece& piece : pieces) counts.push_back(piece.count);
  std::vector<const uint64_t*> in, out;
  for (int rank = 0; rank < size; ++rank) {
    in.push_back(arena.table(rank));
    out.push_back(arena.table(rank) + kMostPieces);
  }
  const PeerBatch batch{*arena.peers(), arena.rank(), dtype, counts, in, out};
  const auto slice = [&](int rank) { return SliceOf({0, CountOf(pieces)}, ItemSize(dtype), rank, size); };
  // Not used otherwise while no chunk is staged.
  const std::span<std::byte> scratch(arena.staging(arena.rank(), 0), 2 * arena.chunk_nbytes());
  const Status read = InPhase(arena.phases(), Phase::kReduce,
                              [&] { return ReduceRange(batch, slice(arena.rank()), op, scale, scratch); });
  if (!read.ok()) return arena.Explain(read, tick);
  const uint32_t reduced = arena.Arrive();
  for (int i = 1; i < size; ++i) {
    const int owner = (arena.rank() + i) % size;
    HVD_RETURN_IF_ERROR(arena.AwaitRank(owner, reduced, tick));
    const Status fetched =
        InPhase(arena.phases(), Phase::kCopyOut, [&] { return FetchRange(batch, owner, slice(owner)); });
    if (!fetched.ok()) return arena.Explain(fetched, tick);
  }
  HVD_RETURN_IF_ERROR(arena.CheckNobodyDied(tick));
  return arena.ArriveAndAwait(tick);
}

Status Allreduce(Arena& arena, const Arena::Tick& tick, std::span<const Piece> pieces, DType dtype,
                 ReduceOp op, const Scale& scale) {
  const size_t nbytes = CountOf(pieces) * ItemSize(dtype);
  if (nbytes == 0) return Status::Ok();
  if (nbytes <= Arena::kInlineNbytes) return AllreduceInline(arena, tick, pieces, dtype, op, scale);
  if (nbytes <= Arena::kSlotNbytes) return AllreduceOneShot(arena, tick, pieces, dtype, op, scale);
  if (arena.peers() != nullptr && nbytes / pieces.size() >= kLeastReadNbytes)
    return AllreduceByReads(arena, tick, pieces, dtype, op, scale);
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
