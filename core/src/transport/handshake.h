#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/sha256.h"

namespace hvd {

struct Credentials {
  int rank = 0;
  int size = 1;
  std::string token;  // shared by the job; never sent
  uint64_t epoch = 0;
};

// Which of the links between two ranks a connection is to be.
enum class Channel : uint16_t { kEager = 0, kPlan = 1, kControl = 2 };
struct LinkName {
  int peer = -1;  // the rank at the other end
  Channel channel = Channel::kControl;
  uint16_t stream = 0;
  friend bool operator==(const LinkName&, const LinkName&) = default;
};

// The proof that two sockets belong to ranks of one job. Bytes in, bytes out: no I/O and no clock.
//
//   connector -> acceptor   Hello      {magic, version, from, to, channel, stream, epoch, nonce}
//   acceptor  -> connector  Challenge  {nonce, HMAC(token, "acceptor" Hello nonce)}
//   connector -> acceptor   Proof      HMAC(token, "connector" Hello nonce)
//   acceptor  -> connector  Ack        one byte
//
// The nonces make a recorded exchange useless; the two labels keep one side's proof from serving the other.
using Nonce = std::array<std::byte, 16>;
inline constexpr size_t kHelloBytes = 48;
inline constexpr size_t kChallengeBytes = sizeof(Nonce) + kDigestNbytes;
inline constexpr size_t kProofBytes = kDigestNbytes;
inline constexpr size_t kAckBytes = 1;

using Hello = std::array<std::byte, kHelloBytes>;
using Challenge = std::array<std::byte, kChallengeBytes>;

Hello MakeHello(const Credentials& me, const LinkName& link);
// The link that is wanted, if this is a hello of this job's epoch to `me` from a rank above it.
std::optional<LinkName> ReadHello(std::span<const std::byte> hello, const Credentials& me);
Challenge MakeChallenge(const Hello& hello, const Credentials& me);
bool CheckChallenge(const Hello& hello, const Challenge& challenge, const Credentials& me);
Digest MakeProof(const Hello& hello, const Challenge& challenge, const Credentials& me);

}  // namespace hvd
