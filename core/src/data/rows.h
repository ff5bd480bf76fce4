// Rows of a packed shard: taken out in any order, named by their content, put into an order that does not
// depend on how they arrived. A block is `rows` records of `row_nbytes` bytes, one after the other.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd {

// Copies record index[k] of `base` to record k of `out`, for k < count. The caller has checked that every
// index is inside `base`; `out` does not overlap it. No alignment is needed.
void GatherRows(const std::byte* base, size_t row_nbytes, const int64_t* index, size_t count, std::byte* out);

struct Block {
  const std::byte* base;
  size_t row_nbytes;
};

struct RowHash {
  uint64_t high;
  uint64_t low;
  auto operator<=>(const RowHash&) const = default;
};

// out[r] = a hash of record begin + r of every block, in order of the blocks, for r < out.size(). Equal
// records have equal hashes on any machine; not meant to withstand an adversary.
void HashRows(std::span<const Block> blocks, uint64_t seed, size_t begin, std::span<RowHash> out);

// The rows in order of their hashes; equal ones in order of position.
std::vector<int64_t> SortByHash(std::span<const RowHash> hashes);

}  // namespace hvd
