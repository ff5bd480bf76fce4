#include <sys/eventfd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "fuzz.h"
#include "scheduler/request.h"
#include "transport/bootstrap.h"
#include "transport/exchange.h"
#include "transport/frame.h"
#include "transport/handshake.h"

// Designated initialisers leave the other members at their defaults.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace hvd::fuzz {
namespace {

void Require(bool condition, const char* text) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: %s\n", text);
  std::abort();
}

Credentials Me() { return {.rank = 1, .size = 6, .token = "a token", .epoch = 3}; }

void FuzzHello(std::string_view bytes) {
  Hello hello{};
  std::memcpy(hello.data(), bytes.data(), std::min(bytes.size(), hello.size()));
  const auto link = ReadHello(hello, Me());
  if (link) Require(link->peer > 1 && link->peer < 6, "a hello from a rank that does not connect here");
}

void FuzzChallenge(std::string_view bytes) {
  const Hello hello = MakeHello(Me(), {.peer = 0});
  Challenge challenge{};
  std::memcpy(challenge.data(), bytes.data(), std::min(bytes.size(), challenge.size()));
  Require(!CheckChallenge(hello, challenge, Me()), "a challenge by somebody who has not seen the hello");
}

void FuzzEndpoint(std::string_view text) {
  const auto endpoint = Endpoint::Parse(text);
  if (!endpoint.ok()) return;
  const std::string written = endpoint.value().ToString();
  const auto again = Endpoint::Parse(written);
  Require(again.ok() && again.value().ToString() == written, "an endpoint that is not what it was read from");
}

void FuzzAnnouncements(std::string_view bytes) {
  const auto announcements = ParseAnnouncements(bytes);
  if (announcements.ok())
    Require(Serialize(announcements.value()) == bytes, "announcements that nobody writes so");
}

void FuzzRound(std::string_view bytes) {
  const auto round = ParseRound(bytes);
  if (round.ok()) Require(Serialize(round.value()) == bytes, "a round that nobody writes so");
}

// Gives the bytes in pieces, each as long as the byte before it says, and then ends.
class ByteLink final : public Link {
 public:
  explicit ByteLink(std::string_view bytes)
      : bytes_(bytes), ready_(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  Result<size_t> TrySend(std::span<const std::byte> bytes, int) override { return bytes.size(); }
  Result<size_t> TryRecv(std::span<std::byte> into, UniqueFd*) override {
    if (bytes_.empty()) return Status(Code::kPeerLost, "the end of the input");
    const size_t piece = static_cast<uint8_t>(bytes_[0]) % 40 + 1;
    const size_t n = std::min({piece, into.size(), bytes_.size()});
    std::memcpy(into.data(), bytes_.data(), n);
    bytes_.remove_prefix(n);
    return n;
  }
  int fd() const override { return ready_.get(); }
  bool same_host() const override { return true; }

 private:
  std::string_view bytes_;
  UniqueFd ready_;
};

// Rank 0 of three hosts with two ranks each, so that frames are taken, passed on and refused; rank 1 speaks,
// or the leader of another host.
void FuzzExchange(std::string_view bytes) {
  const std::string hosts[] = {"a", "a", "b", "b", "c", "c"};
  const int speaker = !bytes.empty() && bytes[0] % 2 != 0 ? 2 : 1;
  Exchange exchange(Topology::Of(hosts, 0).value(), Seconds(1000));
  for (const int peer : {1, 2, 4}) {
    exchange.Add(peer, std::make_unique<ByteLink>(peer == speaker ? bytes.substr(!bytes.empty()) : "\x01"),
                 0);
  }
  for (size_t i = 0; i < bytes.size() + 4 && exchange.lost_peer() != speaker; ++i) {
    exchange.Poll(Clock::now());
    while (const auto frame = exchange.Next()) {
      Require(frame->peer > 0 && frame->peer < 6, "a frame from nobody");
      Require(speaker != 1 || frame->peer == 1, "rank 1 speaks for somebody else");
      Require(frame->payload.size() <= bytes.size(), "a payload that was not sent");
    }
  }
}

using Parser = void (*)(std::string_view);
constexpr Parser kParsers[] = {FuzzHello,         FuzzChallenge, FuzzEndpoint,
                               FuzzAnnouncements, FuzzRound,     FuzzExchange};

std::string Frames(int origin, std::initializer_list<FrameKind> kinds, std::string_view payload) {
  std::string bytes;
  for (const FrameKind kind : kinds) {
    for (const int32_t destination :
         {FrameHeader::kNeighbour, FrameHeader::kEveryone, int32_t{0}, int32_t{5}}) {
      FrameHeader header{static_cast<uint32_t>(payload.size()), kind, origin, destination};
      bytes += header.ToBytes();
      bytes += payload;
      if (kind == FrameKind::kSegment || kind == FrameKind::kBeat) break;
    }
  }
  return bytes;
}

template <class Array>
std::string TextOf(const Array& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace

int FuzzOne(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  kParsers[data[0] % std::size(kParsers)](bytes);
  return 0;
}

std::vector<std::string> Corpus() {
  std::vector<std::string> corpus;
  const auto add = [&](Parser parser, const std::string& bytes) {
    const auto at = std::find(std::begin(kParsers), std::end(kParsers), parser) - std::begin(kParsers);
    corpus.push_back(static_cast<char>(at) + bytes);
  };
  Credentials peer = Me();
  peer.rank = 3;
  for (const Channel channel : {Channel::kEager, Channel::kPlan, Channel::kControl}) {
    const Hello hello = MakeHello(peer, {.peer = 1, .channel = channel, .stream = 1});
    add(FuzzHello, TextOf(hello));
    add(FuzzChallenge, TextOf(MakeChallenge(hello, Me())));
  }
  add(FuzzEndpoint, "hvd1;host=4f1c-4026531840;unix=hvd-1-2;tcp=127.0.0.1,10.0.0.7:34567");
  add(FuzzEndpoint, "hvd1;forced=a;unix=hvd-77-1;tcp=10.1.2.3:1");

  const Member scalar{.name = "loss", .dtype = DType::kFloat64};
  const Member matrix{.name = "grad/fc1.weight", .dtype = DType::kBFloat16, .shape = {12, 4}};
  const Member placed{.name = "grad/fc2.weight", .shape = {3}, .where = {.segment = 2, .offset = 4096}};
  Request sum{.name = "grad/fc1.weight", .members = {matrix}};
  Request group{
      .name = "step", .reduce = ReduceOp::kAverage, .prescale = 0.5, .members = {matrix, placed, scalar}};
  Request gather{.op = Op::kAllgather, .name = "predictions", .members = {matrix}};
  Request sent{.op = Op::kBroadcast, .name = "weights", .root = 1, .members = {scalar}};
  const Request end{.op = Op::kBarrier, .name = "end"};
  std::vector<Announcement> all;
  for (const Request& request : {sum, group, gather, sent, end}) all.push_back({.request = request});
  all.push_back({.id = 7});
  add(FuzzAnnouncements, Serialize(std::vector<Announcement>{}));
  add(FuzzAnnouncements, Serialize(all));

  Round round;
  round.in_full = {{.name = "step", .places = {{{1, 64}, {2, 128}}, {}}},
                   {.name = "predictions", .rows = {{3, 0, 12}}},
                   {.name = "loss", .mismatch = "loss: rank 3 has shape (12,), rank 0 has (10,)"}};
  round.ids = {kNoId, 7, kNoId, kNoId};
  round.fusion_nbytes = 4 << 20;
  add(FuzzRound, Serialize(Round{}));
  add(FuzzRound, Serialize(round));

  using enum FrameKind;
  const std::string announcement = Serialize(std::vector<Announcement>{{.request = sum}});
  add(FuzzExchange, '\0' + Frames(1, {kBeat, kSegment, kAnnounce, kDecide, kBye}, announcement));
  add(FuzzExchange, '\0' + Frames(1, {kAbort, kAbort}, "why"));
  add(FuzzExchange, '\1' + Frames(3, {kAnnounce, kAbort, kBye}, announcement));
  add(FuzzExchange, '\1' + Frames(2, {kBeat, kDecide, kBye}, Serialize(round)));
  return corpus;
}

}  // namespace hvd::fuzz

// What libFuzzer calls.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return hvd::fuzz::FuzzOne(data, size);
}
