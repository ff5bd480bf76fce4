#include "data/permutation.h"

#include <algorithm>
#include <bit>

namespace hvd {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
// 2014; constants: Stafford's variant 13).
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// SplitMix64's increment, 2^64 over the golden ratio.
constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;

// The network works on at least 2^8 values: on fewer, its round functions are too small to reach most orders.
constexpr int kMinHalfBits = 4;

}  // namespace

Permutation::Permutation(uint64_t n, uint64_t seed, uint64_t epoch)
    : n_(n), half_bits_(std::max(kMinHalfBits, static_cast<int>(std::bit_width(n - 1) + 1) / 2)) {
  // Mixed one after the other, so that (seed, epoch) and (seed + 1, epoch - 1) have nothing in common.
  uint64_t state = Mix(Mix(seed + kGamma) + epoch + kGamma);
  for (uint64_t& key : keys_) key = Mix(state += kGamma);
}

uint64_t Permutation::operator()(uint64_t i) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = i >> half_bits_;
    uint64_t right = i & mask;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (Mix(right + key) & mask);
      left = right;
      right = next;
    }
    i = left << half_bits_ | right;
  } while (i >= n_);
  return i;
}

void Permutation::Fill(uint64_t begin, std::span<int64_t> out) const {
  for (int64_t& image : out) image = static_cast<int64_t>((*this)(begin++));
}

}  // namespace hvd
