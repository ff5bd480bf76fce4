#include "transport/handshake.h"

#include <cstring>

namespace hvd {
namespace {

constexpr char kMagic[8] = {'h', 'v', 'd', 'r', 'a', 'n', 'k', '\n'};
constexpr uint32_t kVersion = 2;

// Offsets in a Hello.
constexpr size_t kVersionAt = 8, kFromAt = 12, kToAt = 16, kChannelAt = 20, kStreamAt = 22, kEpochAt = 24,
                 kNonceAt = 32;
static_assert(kNonceAt + sizeof(Nonce) == kHelloBytes);

template <class T>
void Store(Hello& hello, size_t at, T value) {
  std::memcpy(hello.data() + at, &value, sizeof value);
}

template <class T>
T Load(std::span<const std::byte> hello, size_t at) {
  T value;
  std::memcpy(&value, hello.data() + at, sizeof value);
  return value;
}

std::span<const std::byte> Bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

Digest Mac(std::string_view label, const Hello& hello, std::span<const std::byte> nonce,
           const Credentials& me) {
  HmacSha256 mac(Bytes(me.token));
  mac.Update(Bytes(label));
  mac.Update(hello);
  mac.Update(nonce);
  return mac.Finish();
}

}  // namespace

Hello MakeHello(const Credentials& me, const LinkName& link) {
  Hello hello{};
  std::memcpy(hello.data(), kMagic, sizeof kMagic);
  Store(hello, kVersionAt, kVersion);
  Store(hello, kFromAt, static_cast<int32_t>(me.rank));
  Store(hello, kToAt, static_cast<int32_t>(link.peer));
  Store(hello, kChannelAt, link.channel);
  Store(hello, kStreamAt, link.stream);
  Store(hello, kEpochAt, me.epoch);
  RandomBytes(std::span(hello).subspan(kNonceAt));
  return hello;
}

std::optional<LinkName> ReadHello(std::span<const std::byte> hello, const Credentials& me) {
  if (std::memcmp(hello.data(), kMagic, sizeof kMagic) != 0) return std::nullopt;
  if (Load<uint32_t>(hello, kVersionAt) != kVersion || Load<uint64_t>(hello, kEpochAt) != me.epoch)
    return std::nullopt;
  const auto from = Load<int32_t>(hello, kFromAt), to = Load<int32_t>(hello, kToAt);
  if (to != me.rank || from <= me.rank || from >= me.size) return std::nullopt;
  const auto channel = Load<Channel>(hello, kChannelAt);
  if (channel > Channel::kControl) return std::nullopt;
  return LinkName{from, channel, Load<uint16_t>(hello, kStreamAt)};
}

Challenge MakeChallenge(const Hello& hello, const Credentials& me) {
  Challenge challenge{};
  const auto nonce = std::span(challenge).first(sizeof(Nonce));
  RandomBytes(nonce);
  const Digest mac = Mac("acceptor", hello, nonce, me);
  std::memcpy(challenge.data() + sizeof(Nonce), mac.data(), mac.size());
  return challenge;
}

bool CheckChallenge(const Hello& hello, const Challenge& challenge, const Credentials& me) {
  const auto nonce = std::span(challenge).first(sizeof(Nonce));
  return Equal(Mac("acceptor", hello, nonce, me), std::span(challenge).subspan(sizeof(Nonce)));
}

Digest MakeProof(const Hello& hello, const Challenge& challenge, const Credentials& me) {
  return Mac("connector", hello, std::span(challenge).first(sizeof(Nonce)), me);
}

}  // namespace hvd
