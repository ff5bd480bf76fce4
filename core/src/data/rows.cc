#include "data/rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hvd {
namespace {

static_assert(std::endian::native == std::endian::little, "row hashes read words as little endian");

// Rows ahead that are asked for while one is copied: random rows miss every cache, and the hardware
// prefetcher cannot guess them. Lines after the first four of a row it follows by itself. They are asked for
// in the second-level cache, which has room for more misses at once: half the time of asking in the first.
// Rows of a few bytes are copied so fast that they must be asked for earlier.
constexpr size_t kPrefetchRows = 32;
constexpr size_t kPrefetchSmallRows = 128;
constexpr int kSecondLevel = 2;
constexpr size_t kLineNbytes = 64;
constexpr size_t kPrefetchNbytes = 4 * kLineNbytes;

// `copy(to, from)` copies one row; a template parameter so that the size is known where the loop is compiled.
template <size_t kAhead = kPrefetchRows, class Copy>
void Gather(const std::byte* base, size_t row_nbytes, const int64_t* index, size_t count, std::byte* out,
            Copy copy) {
  const size_t prefetch_nbytes = std::min(row_nbytes, kPrefetchNbytes);
  for (size_t k = 0; k < count; ++k) {
    if (k + kAhead < count) {
      const std::byte* ahead = base + static_cast<size_t>(index[k + kAhead]) * row_nbytes;
      for (size_t i = 0; i < prefetch_nbytes; i += kLineNbytes)
        __builtin_prefetch(ahead + i, 0, kSecondLevel);
    }
    copy(out + k * row_nbytes, base + static_cast<size_t>(index[k]) * row_nbytes);
  }
}

template <size_t kNbytes>
void GatherFixed(const std::byte* base, const int64_t* index, size_t count, std::byte* out) {
  Gather<kPrefetchSmallRows>(base, kNbytes, index, count, out,
                             [](std::byte* to, const std::byte* from) { std::memcpy(to, from, kNbytes); });
}

// MurmurHash3_x64_128 by Austin Appleby (public domain), with a 128-bit seed instead of a 32-bit one used
// twice.
constexpr uint64_t kC1 = 0x87c37b91114253d5u;
constexpr uint64_t kC2 = 0x4cf5ad432745937fu;

uint64_t LoadWord(const std::byte* p, size_t nbytes = 8) {
  uint64_t word = 0;
  std::memcpy(&word, p, nbytes);
  return word;
}

uint64_t MixFirst(uint64_t k) { return std::rotl(k * kC1, 31) * kC2; }
uint64_t MixSecond(uint64_t k) { return std::rotl(k * kC2, 33) * kC1; }

uint64_t Avalanche(uint64_t k) {
  k = (k ^ (k >> 33)) * 0xff51afd7ed558ccdu;
  k = (k ^ (k >> 33)) * 0xc4ceb9fe1a85ec53u;
  return k ^ (k >> 33);
}

RowHash Murmur(const std::byte* data, size_t nbytes, RowHash seed) {
  uint64_t h1 = seed.high;
  uint64_t h2 = seed.low;
  size_t i = 0;
  for (; i + 16 <= nbytes; i += 16) {
    h1 ^= MixFirst(LoadWord(data + i));
    h1 = (std::rotl(h1, 27) + h2) * 5 + 0x52dce729;
    h2 ^= MixSecond(LoadWord(data + i + 8));
    h2 = (std::rotl(h2, 31) + h1) * 5 + 0x38495ab5;
  }
  const size_t left = nbytes - i;
  if (left > 8) h2 ^= MixSecond(LoadWord(data + i + 8, left - 8));
  if (left > 0) h1 ^= MixFirst(LoadWord(data + i, std::min<size_t>(left, 8)));

  h1 ^= nbytes;
  h2 ^= nbytes;
  h1 += h2;
  h2 += h1;
  h1 = Avalanche(h1);
  h2 = Avalanche(h2);
  h1 += h2;
  h2 += h1;
  return {h1, h2};
}

}  // namespace

void GatherRows(const std::byte* base, size_t row_nbytes, const int64_t* index, size_t count,
                std::byte* out) {
  switch (row_nbytes) {
    case 1:
      return GatherFixed<1>(base, index, count, out);
    case 2:
      return GatherFixed<2>(base, index, count, out);
    case 4:
      return GatherFixed<4>(base, index, count, out);
    case 8:
      return GatherFixed<8>(base, index, count, out);
    case 16:
      return GatherFixed<16>(base, index, count, out);
    default:
      break;
  }
  if (row_nbytes % 32 == 0 && row_nbytes <= 256) {
    return Gather(base, row_nbytes, index, count, out, [row_nbytes](std::byte* to, const std::byte* from) {
      for (size_t i = 0; i < row_nbytes; i += 32) std::memcpy(to + i, from + i, 32);
    });
  }
  Gather(base, row_nbytes, index, count, out,
         [row_nbytes](std::byte* to, const std::byte* from) { std::memcpy(to, from, row_nbytes); });
}

void HashRows(std::span<const Block> blocks, uint64_t seed, size_t begin, std::span<RowHash> out) {
  for (size_t r = 0; r < out.size(); ++r) {
    // Each block is seeded with the hash of those before, so bytes cannot move from one block to the next
    // unnoticed.
    RowHash hash{seed, seed};
    for (const Block& block : blocks) {
      hash = Murmur(block.base + (begin + r) * block.row_nbytes, block.row_nbytes, hash);
    }
    out[r] = hash;
  }
}

std::vector<int64_t> SortByHash(std::span<const RowHash> hashes) {
  struct Keyed {
    RowHash hash;
    int64_t row;
    auto operator<=>(const Keyed&) const = default;
  };
  std::vector<Keyed> keyed(hashes.size());
  for (size_t i = 0; i < hashes.size(); ++i) keyed[i] = {hashes[i], static_cast<int64_t>(i)};
  std::sort(keyed.begin(), keyed.end());
  std::vector<int64_t> order(hashes.size());
  for (size_t i = 0; i < hashes.size(); ++i) order[i] = keyed[i].row;
  return order;
}

}  // namespace hvd
