#include "collectives/direct.h"

namespace hvd {
namespace {

// What is read of one peer at a time: it and what it is added to stay in L2.
constexpr size_t kChunkNbytes = 256 << 10;
constexpr size_t kLine = 64;

std::byte* At(uint64_t address, size_t offset) { return reinterpret_cast<std::byte*>(address) + offset; }

// Copies what is in `range` of the batch, of one rank, to one place: to(tensor, first, offset in range).
template <class To>
std::vector<PeerMemory::Copy> CopiesOf(const PeerBatch& batch, const uint64_t* from, Range range, To to) {
  const size_t item = ItemSize(batch.dtype);
  std::vector<PeerMemory::Copy> copies;
  size_t offset = 0;
  const auto count_of = [&](size_t i) { return batch.counts[i]; };
  ForEachPart(batch.counts.size(), count_of, range, [&](size_t i, size_t first, size_t count) {
    const uint64_t at = from[i] == 0 ? 0 : from[i] + first * item;
    copies.push_back({at, to(i, first, offset), count * item});
    offset += count * item;
  });
  return copies;
}

Status ReduceChunk(const PeerBatch& batch, Range range, ReduceOp op, const Scale& scale, std::byte* scratch,
                   size_t each_nbytes) {
  const size_t item = ItemSize(batch.dtype);
  const auto mine = static_cast<size_t>(batch.rank);
  const auto buffer = [&](size_t r) { return scratch + r * each_nbytes; };
  for (int r = 0; r < batch.size(); ++r) {
    if (r == batch.rank) continue;
    const auto rank = static_cast<size_t>(r);
    const auto copies = CopiesOf(batch, batch.in[rank], range,
                                 [&](size_t, size_t, size_t offset) { return buffer(rank) + offset; });
    HVD_RETURN_IF_ERROR(batch.peers.Read(r, copies));
  }
  std::vector<const void*> srcs(batch.in.size());
  size_t offset = 0;
  const auto count_of = [&](size_t i) { return batch.counts[i]; };
  ForEachPart(batch.counts.size(), count_of, range, [&](size_t i, size_t first, size_t count) {
    for (size_t r = 0; r < srcs.size(); ++r) srcs[r] = buffer(r) + offset;
    if (batch.in[mine][i] != 0) {
      srcs[mine] = At(batch.in[mine][i], first * item);
    } else {
      std::fill_n(buffer(mine) + offset, count * item, std::byte{});
    }
    void* dst = At(batch.out[mine][i], first * item);
    Reduce(batch.dtype, op, scale, srcs.data(), batch.size(), &dst, 1, count);
    offset += count * item;
  });
  return Status::Ok();
}

}  // namespace

Status ReduceRange(const PeerBatch& batch, Range range, ReduceOp op, const Scale& scale,
                   std::span<std::byte> scratch) {
  const size_t fits = scratch.size() / batch.in.size() / kLine * kLine;
  const size_t each_nbytes = std::min(kChunkNbytes, fits);
  const size_t each = each_nbytes / ItemSize(batch.dtype);
  for (size_t i = 0; i * each < range.size(); ++i) {
    HVD_RETURN_IF_ERROR(ReduceChunk(batch, Part(range, each, i), op, scale, scratch.data(), each_nbytes));
  }
  return Status::Ok();
}

Status FetchRange(const PeerBatch& batch, int owner, Range range) {
  const size_t item = ItemSize(batch.dtype);
  const size_t each = kChunkNbytes / item;
  const uint64_t* mine = batch.out[static_cast<size_t>(batch.rank)];
  for (size_t i = 0; i * each < range.size(); ++i) {
    const auto copies =
        CopiesOf(batch, batch.out[static_cast<size_t>(owner)], Part(range, each, i),
                 [&](size_t tensor, size_t first, size_t) { return At(mine[tensor], first * item); });
    HVD_RETURN_IF_ERROR(batch.peers.Read(owner, copies));
  }
  return Status::Ok();
}

}  // namespace hvd
