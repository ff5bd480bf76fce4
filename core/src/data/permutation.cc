#include "data/permutation.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

// The network has at least 2^8 values: on fewer, its round functions are too small to reach most orders.
constexpr uint64_t kMinSize = 16;

// Enough for the widest vectors, and for latencies of several multiplications.
constexpr size_t kLanesAtOnce = 16;

// The least s with s * s >= n.
uint64_t CeilSqrt(uint64_t n) {
  auto s = static_cast<uint64_t>(std::sqrt(static_cast<double>(n)));
  while (s * s < n) ++s;
  while (s > 0 && (s - 1) * (s - 1) >= n) --s;
  return s;
}

// A number below `size` from x: lowbias32 (Wellons, "Prospecting for Hash Functions", 2018) without its last
// step, which concerns the low bits, scaled by its high ones.
inline uint32_t MixBelow(uint32_t x, uint32_t size) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return static_cast<uint32_t>((uint64_t{x} * size) >> 32);
}

inline uint32_t AddModulo(uint32_t x, uint32_t y, uint32_t size) { return std::min(x + y, x + y - size); }

}  // namespace

Permutation::Permutation(uint64_t n, uint64_t seed, uint64_t epoch) : n_(n) {
  const uint64_t left_size = std::max(kMinSize, CeilSqrt(n));
  left_size_ = static_cast<uint32_t>(left_size);
  right_size_ = static_cast<uint32_t>(std::max(kMinSize, (n + left_size - 1) / left_size));
  // Mixed one after the other, so that (seed, epoch) and (seed + 1, epoch - 1) have nothing in common.
  uint64_t state = Mix(Mix(seed + kGamma) + epoch + kGamma);
  for (uint32_t& key : keys_) key = static_cast<uint32_t>(Mix(state += kGamma) >> 32);
}

template <size_t kLanes>
inline void Permutation::Encrypt(std::array<uint32_t, kLanes>& left,
                                 std::array<uint32_t, kLanes>& right) const {
  static_assert(kRounds % 2 == 0);
  for (size_t round = 0; round < kRounds; round += 2) {
    const uint32_t left_key = keys_[round], right_key = keys_[round + 1];
    for (size_t i = 0; i < kLanes; ++i) {
      left[i] = AddModulo(left[i], MixBelow(right[i] + left_key, left_size_), left_size_);
      right[i] = AddModulo(right[i], MixBelow(left[i] + right_key, right_size_), right_size_);
    }
  }
}

uint64_t Permutation::operator()(uint64_t i) const {
  do {
    std::array<uint32_t, 1> left{static_cast<uint32_t>(i / right_size_)};
    std::array<uint32_t, 1> right{static_cast<uint32_t>(i % right_size_)};
    Encrypt(left, right);
    i = uint64_t{left[0]} * right_size_ + right[0];
  } while (i >= n_);
  return i;
}

void Permutation::Fill(uint64_t begin, std::span<int64_t> out) const {
  static_assert(kLanesAtOnce <= kMinSize,
                "a block of lanes reaches the next row of the rectangle once at most");
  std::array<uint32_t, kLanesAtOnce> left, right;
  std::array<uint64_t, kLanesAtOnce> images;
  auto next_left = static_cast<uint32_t>(begin / right_size_);
  auto next_right = static_cast<uint32_t>(begin % right_size_);
  for (size_t done = 0; done < out.size(); done += kLanesAtOnce) {
    for (uint32_t i = 0; i < kLanesAtOnce; ++i) {
      const uint32_t at = next_right + i;
      const bool carry = at >= right_size_;
      left[i] = next_left + carry;
      right[i] = carry ? at - right_size_ : at;
    }
    next_right += kLanesAtOnce;
    if (next_right >= right_size_) {
      next_right -= right_size_;
      ++next_left;
    }
    Encrypt(left, right);
    uint64_t largest = 0;
    for (size_t i = 0; i < kLanesAtOnce; ++i) {
      images[i] = uint64_t{left[i]} * right_size_ + right[i];
      largest = std::max(largest, images[i]);
    }
    // What stands behind the last one need not have an image.
    const size_t count = std::min(kLanesAtOnce, out.size() - done);
    if (largest >= n_) {
      for (size_t i = 0; i < count; ++i) images[i] = images[i] < n_ ? images[i] : (*this)(images[i]);
    }
    std::memcpy(out.data() + done, images.data(), count * sizeof(int64_t));
  }
}

}  // namespace hvd
