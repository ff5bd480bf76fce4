// A random order of rows that costs no memory and can be entered anywhere.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace hvd {

// A pseudo-random permutation of [0, n), a pure function of (n, seed, epoch): every rank and every run
// computes the same one, on any machine. Immutable, safe from any thread.
//
// A balanced Feistel network (Luby and Rackoff 1988) over the next even number of bits, restricted to [0, n)
// by cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): a value outside is
// encrypted again until it falls inside, at most 4 times on average (more for n < 64, where nobody waits for
// it).
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

  uint64_t n_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace hvd
