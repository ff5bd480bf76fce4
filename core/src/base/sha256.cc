#include "base/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace hvd {
namespace {

constexpr size_t kBlockNbytes = 64;

// Fractional parts of the cube roots of the first 64 primes, FIPS 180-4 section 4.2.2.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t LoadBigEndian(const std::byte* p) {
  return std::to_integer<uint32_t>(p[0]) << 24 | std::to_integer<uint32_t>(p[1]) << 16 |
         std::to_integer<uint32_t>(p[2]) << 8 | std::to_integer<uint32_t>(p[3]);
}

void StoreBigEndian(uint32_t value, std::byte* p) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<std::byte>(value >> (24 - 8 * i));
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {
}

void Sha256::Compress(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) w[t] = LoadBigEndian(block + 4 * t);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

void Sha256::Update(std::span<const std::byte> data) {
  total_nbytes_ += data.size();
  while (!data.empty()) {
    if (pending_nbytes_ == 0 && data.size() >= kBlockNbytes) {
      Compress(data.data());
      data = data.subspan(kBlockNbytes);
      continue;
    }
    const size_t taken = std::min(kBlockNbytes - pending_nbytes_, data.size());
    std::memcpy(pending_.data() + pending_nbytes_, data.data(), taken);
    pending_nbytes_ += taken;
    data = data.subspan(taken);
    if (pending_nbytes_ == kBlockNbytes) {
      Compress(pending_.data());
      pending_nbytes_ = 0;
    }
  }
}

Digest Sha256::Finish() {
  const uint64_t nbits = total_nbytes_ * 8;
  // A one bit, zeros up to 8 bytes before the end of a block, then the length in bits.
  std::array<std::byte, 2 * kBlockNbytes> padding{};
  padding[0] = std::byte{0x80};
  const size_t zeros_end = (pending_nbytes_ < 56 ? 56 : 120) - pending_nbytes_;
  StoreBigEndian(static_cast<uint32_t>(nbits >> 32), padding.data() + zeros_end);
  StoreBigEndian(static_cast<uint32_t>(nbits), padding.data() + zeros_end + 4);
  Update(std::span(padding).first(zeros_end + 8));

  Digest digest;
  for (size_t i = 0; i < 8; ++i) StoreBigEndian(state_[i], digest.data() + 4 * i);
  return digest;
}

Digest Sha256::Of(std::span<const std::byte> data) {
  Sha256 sha;
  sha.Update(data);
  return sha.Finish();
}

HmacSha256::HmacSha256(std::span<const std::byte> key) {
  std::array<std::byte, kBlockNbytes> padded{};
  if (key.size() > kBlockNbytes) {
    const Digest digest = Sha256::Of(key);
    std::copy(digest.begin(), digest.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  auto masked = padded;
  for (auto& byte : masked) byte ^= std::byte{0x36};
  inner_.Update(masked);
  masked = padded;
  for (auto& byte : masked) byte ^= std::byte{0x5c};
  outer_.Update(masked);
}

void HmacSha256::Update(std::span<const std::byte> data) { inner_.Update(data); }

Digest HmacSha256::Finish() {
  outer_.Update(inner_.Finish());
  return outer_.Finish();
}

Digest HmacSha256::Of(std::span<const std::byte> key, std::span<const std::byte> data) {
  HmacSha256 hmac(key);
  hmac.Update(data);
  return hmac.Finish();
}

bool Equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  // volatile: the compiler may not leave the loop at the first difference.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | std::to_integer<uint8_t>(a[i] ^ b[i]));
  }
  return difference == 0;
}

void RandomBytes(std::span<std::byte> out) {
  while (!out.empty()) {
#if defined(__linux__)
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
#else
    const size_t most = std::min<size_t>(out.size(), 256);  // getentropy gives no more
    const ssize_t got = ::getentropy(out.data(), most) == 0 ? static_cast<ssize_t>(most) : -1;
#endif
    if (got > 0) {
      out = out.subspan(static_cast<size_t>(got));
    } else if (errno != EINTR) {
      std::abort();
    }
  }
}

}  // namespace hvd
