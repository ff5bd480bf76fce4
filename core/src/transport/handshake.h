#pragma once

#include <array>
#include <optional>

#include "base/sha256.h"
#include "transport/bootstrap.h"

namespace hvd {

// The proof that two sockets belong to ranks of one job. Bytes in, bytes out: no I/O and no clock.
//
//   connector -> acceptor   Hello      {magic, version, epoch, from, to, nonce}
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

Hello MakeHello(const Credentials& me, int to);
// The rank that says hello, if this is a hello of this job's epoch to `me` from a rank above it.
std::optional<int> ReadHello(std::span<const std::byte> hello, const Credentials& me);
Challenge MakeChallenge(const Hello& hello, const Credentials& me);
bool CheckChallenge(const Hello& hello, const Challenge& challenge, const Credentials& me);
Digest MakeProof(const Hello& hello, const Challenge& challenge, const Credentials& me);

}  // namespace hvd
