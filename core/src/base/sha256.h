// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the handshake between ranks. A few hundred bytes per
// connection: written for clarity, so that the extension links against nothing but libc and libstdc++.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace hvd {

inline constexpr size_t kDigestNbytes = 32;
using Digest = std::array<std::byte, kDigestNbytes>;

class Sha256 {
 public:
  Sha256();
  void Update(std::span<const std::byte> data);
  // The digest of all that was given; the object must not be used afterwards.
  Digest Finish();

  static Digest Of(std::span<const std::byte> data);

 private:
  void Compress(const std::byte* block);

  std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> pending_;
  size_t pending_nbytes_ = 0;
  uint64_t total_nbytes_ = 0;
};

class HmacSha256 {
 public:
  explicit HmacSha256(std::span<const std::byte> key);
  void Update(std::span<const std::byte> data);
  // The object must not be used afterwards.
  Digest Finish();

  static Digest Of(std::span<const std::byte> key, std::span<const std::byte> data);

 private:
  Sha256 inner_;
  Sha256 outer_;
};

// Takes the same time whatever the bytes are; spans of different length are unequal.
bool Equal(std::span<const std::byte> a, std::span<const std::byte> b);

// Bytes from the kernel's generator, fit for keys and challenges. Ends the process if the kernel refuses:
// there is no safe substitute.
void RandomBytes(std::span<std::byte> out);

}  // namespace hvd
