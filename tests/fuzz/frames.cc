#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "base/log.h"
#include "fuzz.h"
#include "scheduler/mailbox.h"
#include "scheduler/negotiate.h"
#include "scheduler/request.h"
#include "scheduler/scheduler.h"
#include "scheduler/trace_json.h"
#include "scheduler/trace_notes.h"
#include "transport/bootstrap.h"
#include "transport/exchange.h"
#include "transport/frame.h"
#include "transport/handshake.h"
#include "transport/wire.h"

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

constexpr size_t kPassedNbytes = 4096;

// Gives the bytes in pieces, each as long as the byte before it says or all at once, some shared memory with
// the first one, and then ends.
class ByteLink final : public Link {
 public:
  explicit ByteLink(std::string_view bytes, bool in_pieces = true)
      : bytes_(bytes), in_pieces_(in_pieces), ready_(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  Result<size_t> TrySend(std::span<const std::byte> bytes, int) override { return bytes.size(); }
  Result<size_t> TryRecv(std::span<std::byte> into, UniqueFd* passed_fd) override {
    if (bytes_.empty()) return Status(Code::kPeerLost, "the end of the input");
    if (passed_fd != nullptr && !std::exchange(has_passed_, true)) {
      passed_fd->Reset(::memfd_create("fuzz", MFD_CLOEXEC));
      Require(::ftruncate(passed_fd->get(), kPassedNbytes) == 0, "no memory");
    }
    const size_t piece = in_pieces_ ? static_cast<uint8_t>(bytes_[0]) % 40 + 1 : bytes_.size();
    const size_t n = std::min({piece, into.size(), bytes_.size()});
    std::memcpy(into.data(), bytes_.data(), n);
    bytes_.remove_prefix(n);
    return n;
  }
  int fd() const override { return ready_.get(); }
  bool same_host() const override { return true; }

 private:
  std::string_view bytes_;
  const bool in_pieces_;
  UniqueFd ready_;
  bool has_passed_ = false;
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

// An abort is shown to users whatever it says.
void FuzzAbort(std::string_view bytes) {
  const Status reason = Exchange::ReasonOf(bytes);
  Require(!reason.ok() && reason.code() <= Code::kShutdown, "an abort without a reason");
}

// Rank 1 writes what it likes into its mailbox, at any moment, while rank 0 reads there, counts its room and
// hands the words to the negotiator as numbers of what was agreed on. The first four bytes of each nine are a
// place in the mailbox, the next four what is put there, the last what rank 0 does then.
void FuzzMailbox(std::string_view bytes) {
  static const auto arenas = [] {
    std::vector<std::unique_ptr<Arena>> made;
    for (const int rank : {0, 1}) made.push_back(Arena::Create(rank, 2, 4096).value());
    for (const int rank : {0, 1})
      Require(made[rank]->AddSegment(1 - rank, 0, made[1 - rank]->control()).ok(), "no arena");
    return made;
  }();
  for (const int rank : {0, 1}) std::memset(arenas[rank]->mailbox(rank), 0, Arena::kMailboxNbytes);
  Mailboxes zero(*arenas[0]);
  Negotiator negotiator(2, 1 << 20, 4);
  const auto now = Clock::now();
  for (const int rank : {0, 1})
    negotiator.Announce(rank, Request{.name = "x", .members = {{.name = "x"}}}, now);
  Require(negotiator.Decide().ids.size() == 1, "no agreement to begin with");
  for (; bytes.size() >= 9; bytes.remove_prefix(9)) {
    uint32_t place = 0, value = 0;
    std::memcpy(&place, bytes.data(), sizeof place);
    std::memcpy(&value, bytes.data() + 4, sizeof value);
    std::memcpy(arenas[1]->mailbox(1) + place % (Arena::kMailboxNbytes / 4) * 4, &value, sizeof value);
    if (bytes[8] % 2 == 0) {
      const auto room = zero.Room();
      Require(!room.ok() || room.value() <= Mailboxes::kWords, "more room than there is");
      const std::vector<uint32_t> words(static_cast<uint8_t>(bytes[8]), 7);
      const auto fits = zero.Write(words);
      Require(fits.ok() == room.ok(), "room that is there and is not");
    } else {
      std::vector<uint32_t> words;
      const Status status = zero.Read(1, &words);
      Require(words.size() <= Mailboxes::kWords, "more words than there are");
      Require(status.ok() || words.empty(), "words of a broken mailbox");
      if (!status.ok()) return;  // it is lost
      static_cast<void>(zero.HasNews());
      for (const CacheId id : words) {
        if (!negotiator.Announce(1, id, now)) return;
      }
      Require(negotiator.Decide().ids.empty(), "decided without rank 0");
    }
  }
}

// A rank that waits in a barrier hears whatever the only other one says, as in a job, and then that one is
// gone or has left. The first byte chooses which of the two it is.
void FuzzJob(std::string_view bytes) {
  static const auto controls = [] {
    std::vector<std::unique_ptr<Arena>> made;
    for (const int rank : {0, 1}) made.push_back(Arena::Create(rank, 2, 4096).value());
    SetLogLevel(Level::kSilent);
    return made;
  }();
  const int rank = !bytes.empty() && bytes[0] % 2 != 0 ? 1 : 0, peer = 1 - rank;
  const Topology topology = Topology::OneHost(rank, 2);
  auto exchange = std::make_unique<Exchange>(topology, Seconds(1000));
  exchange->Add(peer, std::make_unique<ByteLink>(bytes.substr(!bytes.empty()), false), 0);
  auto arena = Arena::Create(rank, 2, 4096).value();
  Require(arena->AddSegment(peer, 0, controls[static_cast<size_t>(peer)]->control()).ok(), "no arena");
  SchedulerOptions options{.rank = rank, .size = 2, .stall_warn = Seconds(1000)};
  Scheduler scheduler(options, topology, std::move(exchange), std::move(arena), {});
  const auto request = std::make_shared<const Request>(Request{.op = Op::kBarrier, .name = "end"});
  const auto handle = std::make_shared<Handle>(request);
  if (!scheduler.Submit({request, {}, handle}, Then::kGoesOn).ok()) return;  // is over already
  Require(scheduler.Wait(*handle, Clock::now() + Seconds(60), {}), "a rank that waits for nobody");
}

// What rank 0 makes of the notes of another rank: always whole events, whatever they say. The first eight
// bytes are how far that rank's clock is ahead.
void FuzzNotes(std::string_view bytes) {
  Reader in(bytes);
  const auto ahead_ns = in.Get<int64_t>();
  std::string json;
  TraceJson trace(12345);
  if (in.ok() && IsTraceTime(ahead_ns)) trace.Add(1, "a \"host\"", ahead_ns, bytes.substr(8), &json);
  trace.End(&json);
  int depth = 0;
  bool in_text = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_text && c == '\\') {
      ++i;
    } else if (c == '"') {
      in_text = !in_text;
    } else if (!in_text) {
      depth += (c == '[' || c == '{') - (c == ']' || c == '}');
      Require(depth > 0 || i + 2 >= json.size(), "an event that ends the timeline");
    }
  }
  Require(depth == 0 && !in_text, "an event that does not end");
}

using Parser = void (*)(std::string_view);
constexpr Parser kParsers[] = {FuzzHello,    FuzzChallenge, FuzzEndpoint, FuzzAnnouncements, FuzzRound,
                               FuzzExchange, FuzzAbort,     FuzzMailbox,  FuzzJob,           FuzzNotes};

// To the neighbour that hears it, and no further.
std::string ToNeighbour(int origin, FrameKind kind, std::string_view payload) {
  return FrameHeader{static_cast<uint32_t>(payload.size()), kind, origin}.ToBytes() + std::string(payload);
}

template <class... Values>
std::string Written(const Values&... values) {
  Writer out;
  const auto put = [&](const auto& value) {
    if constexpr (std::is_convertible_v<decltype(value), std::string_view>) {
      out.PutString(value);
    } else {
      out.Put(value);
    }
  };
  (put(values), ...);
  return out.Take();
}

std::string Notes() {
  std::string notes;
  PutTensor({"grad/fc1.weight", "allreduce", BatchRow::kEager, 3, 4096, 1000, 2000, 3000, 4000, 5000, false},
            &notes);
  PutTensor({"allreduce.noname.7", "allreduce", BatchRow::kPlan, 4, 64, 1000, 0, 0, 0, 5000, true}, &notes);
  PutBatch({BatchRow::kPlan, 3, "allreduce float32", 2, 4160, 3000, 4000},
           {{Phase::kCopyIn, 3000, 3100}, {Phase::kReduce, 3100, 3900}}, &notes);
  PutMark({"cycle", 2500}, &notes);
  return notes;
}

std::string Frames(int origin, std::initializer_list<FrameKind> kinds, std::string_view payload) {
  std::string bytes;
  for (const FrameKind kind : kinds) {
    for (const int32_t destination :
         {FrameHeader::kNeighbour, FrameHeader::kEveryone, int32_t{0}, int32_t{5}}) {
      FrameHeader header{static_cast<uint32_t>(payload.size()), kind, origin, destination};
      bytes += header.ToBytes();
      bytes += payload;
      if (kind == FrameKind::kSegment || kind == FrameKind::kRelease || kind == FrameKind::kBeat) break;
    }
  }
  return bytes;
}

// Words of a mailbox: how many were written, how many were read of rank 0's, the first of the ring.
constexpr uint32_t kReadAt = 32, kWordsAt = kReadAt + Mailboxes::kMostRanks;

struct Poke {
  uint32_t place, value;
  uint8_t then;
};

std::string Pokes(std::initializer_list<Poke> pokes) {
  std::string bytes;
  for (const Poke& poke : pokes) {
    for (const uint32_t number : {poke.place, poke.value})
      bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
    bytes.push_back(static_cast<char>(poke.then));
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
  add(FuzzEndpoint, "hvd1;forced=a@4f1c/net:[1]/10.1.2.3;unix=hvd-77-1;tcp=10.1.2.3:1");

  const Member scalar{.name = "loss", .dtype = DType::kFloat64};
  const Member matrix{.name = "grad/fc1.weight", .dtype = DType::kBFloat16, .shape = {12, 4}};
  const Member placed{.name = "grad/fc2.weight", .shape = {3}, .where = {.segment = 2, .offset = 4096}};
  Request sum{.name = "grad/fc1.weight", .members = {matrix}};
  Request group{
      .name = "step", .reduce = ReduceOp::kAverage, .prescale = 0.5, .members = {matrix, placed, scalar}};
  Request gather{.op = Op::kAllgather, .name = "predictions", .members = {matrix}};
  Request sent{.op = Op::kBroadcast, .name = "weights", .root = 1, .members = {scalar}};
  const Request end{.op = Op::kBarrier, .name = "end"};
  const Request routed{.op = Op::kAlltoall, .name = "tokens", .members = {matrix}, .splits = {3, 1}};
  std::vector<Announcement> all;
  for (const Request& request : {sum, group, gather, sent, end, routed}) all.push_back({.request = request});
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

  // A job: memory that comes and goes, a phase that begins and ends, a timeline, a goodbye.
  const std::string phases = ToNeighbour(1, kPhase, Written(uint8_t{1}, 30.0, "checkpoint")) +
                             ToNeighbour(1, kPhase, Written(uint8_t{0}, 0.0, ""));
  const std::string memory = ToNeighbour(1, kSegment, Written(uint32_t{5}, uint64_t{kPassedNbytes})) +
                             ToNeighbour(1, kRelease, Written(uint32_t{5}));
  const std::string notes = ToNeighbour(1, kTrace, Written(uint8_t{3}, int64_t{-20}, "node-7", Notes()));
  const std::string ends = ToNeighbour(1, kTrace, Written(uint8_t{4})) +
                           ToNeighbour(1, kTrace, Written(uint8_t{5}, int64_t{77})) +
                           ToNeighbour(1, kAnnounce, Serialize(all)) + ToNeighbour(1, kBye, "");
  add(FuzzJob, '\0' + phases + memory + notes + ends);
  add(FuzzJob, '\0' + memory + ToNeighbour(1, kRelease, Written(uint32_t{5})));
  add(FuzzJob, '\0' + ToNeighbour(1, kAbort, Exchange::AbortPayload(Status(Code::kAborted, "enough"))));
  const std::string timeline = ToNeighbour(0, kTrace, Written(uint8_t{1}, uint8_t{1})) +
                               ToNeighbour(0, kTrace, Written(uint8_t{6}, int64_t{10}, int64_t{30})) +
                               ToNeighbour(0, kTrace, Written(uint8_t{2}));
  add(FuzzJob, '\1' + timeline + ToNeighbour(0, kDecide, Serialize(round)) + ToNeighbour(0, kBye, ""));
  add(FuzzNotes, Written(int64_t{-20}) + Notes());

  add(FuzzAbort, std::string("\4\6\0\0\0enough", 11));
  add(FuzzAbort, std::string("\2\0\0\0\0", 5));
  // Announces number 0 twice; says that 5 words were written and 2 read; goes on past the end of the ring.
  add(FuzzMailbox, Pokes({{kWordsAt, 0, 2}, {0, 1, 1}, {kWordsAt + 1, 0, 2}, {0, 2, 1}}));
  add(FuzzMailbox, Pokes({{0, 5, 6}, {kReadAt, 2, 4}, {0, 5, 1}, {0, 6, 1}}));
  add(FuzzMailbox, Pokes({{0, 2048, 1}, {0, 2049, 3}, {kReadAt, 2000, 254}, {kReadAt, 3000, 254}}));
  return corpus;
}

}  // namespace hvd::fuzz

// What libFuzzer calls.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return hvd::fuzz::FuzzOne(data, size);
}
