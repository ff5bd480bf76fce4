// A random order of rows that costs no memory and can be entered anywhere.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace hvd {

// A pseudo-random permutation of [0, n), a pure function of (n, seed, epoch): every rank and every run
// computes the same one, on any machine. Immutable, safe from any thread.
//
// A Feistel network (Luby and Rackoff 1988) over pairs of digits, the least rectangle of them that holds n
// values, so that adding replaces the exclusive or ("generalized Feistel" of Black and Rogaway, "Ciphers with
// Arbitrary Finite Domains", 2002). A value outside of [0, n) is encrypted again until it falls inside: one
// in sqrt(n) at most (more for n < 256, where nobody waits for it).
class Permutation {
 public:
  // 1 <= n <= 2^62.
  Permutation(uint64_t n, uint64_t seed, uint64_t epoch);

  uint64_t n() const { return n_; }

  // The image of i, i < n.
  uint64_t operator()(uint64_t i) const;

  // out[k] = the image of begin + k; begin + out.size() <= n.
  void Fill(uint64_t begin, std::span<int64_t> out) const;

 private:
  static constexpr int kRounds = 8;

  // A value is left * right_size_ + right. Of one value or of several at once.
  template <size_t kLanes>
  void Encrypt(std::array<uint32_t, kLanes>& left, std::array<uint32_t, kLanes>& right) const;

  uint64_t n_;
  uint32_t left_size_, right_size_;  // at most 2^31
  std::array<uint32_t, kRounds> keys_;
};

}  // namespace hvd
