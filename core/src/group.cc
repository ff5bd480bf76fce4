#include "group.h"

#include "transport/wire.h"

namespace hvd {
namespace {

// Names travel with every announcement and are printed in errors.
constexpr size_t kMaxNameBytes = 4096;

std::string RanksElsewhere(const std::vector<Endpoint>& endpoints, int rank) {
  const Endpoint& mine = endpoints[static_cast<size_t>(rank)];
  std::string text;
  for (size_t peer = 0; peer < endpoints.size(); ++peer) {
    if (endpoints[peer].host == mine.host) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(peer) + " (" + endpoints[peer].host + ")";
  }
  return text;
}

Status SeveralHosts(const std::string& who, const std::string& mine) {
  return Status(Code::kInvalid, "all ranks must be on one host in this version: rank " + who +
                                    " is not on the host of this rank (" + mine + ")");
}

// Every rank sends its control segment to every other and waits for theirs.
Status ShareControlSegments(Exchange& exchange, Arena& arena, Clock::time_point deadline) {
  Writer payload;
  payload.Put(uint32_t{0});
  payload.Put(static_cast<uint64_t>(arena.control_nbytes()));
  exchange.PostAll(FrameKind::kSegment, payload.Take(), arena.control()->fd());
  std::vector<Frame> early;  // of ranks that have connected already
  for (;;) {
    while (std::optional<Frame> frame = exchange.Next()) {
      if (frame->kind != FrameKind::kSegment || arena.complete()) {
        early.push_back(std::move(*frame));
        continue;
      }
      Reader in(frame->payload);
      const auto number = in.Get<uint32_t>();
      auto segment = Segment::Map(std::move(frame->fd), in.Get<uint64_t>());
      if (!segment.ok()) return segment.status().Prepend("rank " + std::to_string(frame->peer));
      HVD_RETURN_IF_ERROR(arena.AddSegment(frame->peer, number, std::move(segment).value()));
    }
    if (arena.complete()) break;
    HVD_RETURN_IF_ERROR(exchange.lost());
    for (int peer = 0; peer < arena.size(); ++peer) {
      // A rank that has shared its memory may be done already, while we still wait for another one.
      if (exchange.HasLeft(peer) && !arena.HasControl(peer))
        return Status(Code::kShutdown, "rank " + std::to_string(peer) + " left while connecting");
    }
    if (Clock::now() >= deadline)
      return Status(Code::kTimeout, "a rank did not share its memory within connect_timeout_s");
    exchange.Poll(deadline);
  }
  exchange.PutBack(std::move(early));
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<Group>> Group::Connect(Listener* listener,
                                              const std::vector<std::string>& endpoint_texts,
                                              const Credentials& me, const GroupOptions& options) {
  const int size = static_cast<int>(endpoint_texts.size());
  if (size < 1 || me.rank < 0 || me.rank >= size) {
    return Status(Code::kInvalid, "rank " + std::to_string(me.rank) + " is not one of " +
                                      std::to_string(size) + " endpoints");
  }
  const auto deadline = Clock::now() + Seconds(options.connect_timeout_s);
  auto exchange = std::make_unique<Exchange>(me.rank, size, Seconds(options.peer_timeout_s));
  HVD_RETURN_IF_ERROR(exchange->status());
  std::unique_ptr<Arena> arena;
  if (size > 1) {
    if (listener == nullptr) return Status(Code::kInvalid, "a Group of several ranks needs a listener");
    if (me.token.empty()) return Status(Code::kInvalid, "a Group of several ranks needs a token");
    std::vector<Endpoint> endpoints;
    for (const std::string& text : endpoint_texts) {
      auto endpoint = Endpoint::Parse(text);
      if (!endpoint.ok()) return endpoint.status();
      endpoints.push_back(std::move(endpoint).value());
    }
    const std::string& mine = endpoints[static_cast<size_t>(me.rank)].host;
    if (const std::string who = RanksElsewhere(endpoints, me.rank); !who.empty())
      return SeveralHosts(who, mine);
    if (Status status = ConnectAll(*listener, endpoints, me, deadline, *exchange); !status.ok()) {
      return status.Prepend("rank " + std::to_string(me.rank) +
                            " could not connect within connect_timeout_s");
    }
    if (const int peer = exchange->FirstOnOtherHost(); peer >= 0)
      return SeveralHosts(std::to_string(peer), mine);
    auto created = Arena::Create(me.rank, size, options.chunk_nbytes, HasCpusFor(size));
    if (!created.ok()) return created.status();
    arena = std::move(created).value();
    HVD_RETURN_IF_ERROR(ShareControlSegments(*exchange, *arena, deadline));
  }
  const SchedulerOptions scheduling{me.rank, size, options.fusion_nbytes, Seconds(options.stall_warn_s),
                                    Seconds(options.stall_shutdown_s)};
  auto scheduler = std::make_unique<Scheduler>(scheduling, std::move(exchange), std::move(arena));
  return std::unique_ptr<Group>(new Group(me.rank, size, std::move(scheduler)));
}

Status Group::Check(const Request& request) const {
  if (request.name.empty()) return Status(Code::kInvalid, "a collective needs a name");
  if (request.name.size() > kMaxNameBytes) {
    return Status(Code::kInvalid, "a name of " + std::to_string(request.name.size()) + " bytes; at most " +
                                      std::to_string(kMaxNameBytes) + " are sent");
  }
  if (request.op == Op::kBroadcast && (request.root < 0 || request.root >= size_)) {
    return Status(Code::kInvalid, "root " + std::to_string(request.root) + " is not a rank; there are " +
                                      std::to_string(size_));
  }
  const Scale scale{request.prescale, request.postscale, request.reduce == ReduceOp::kAverage ? size_ : 1};
  for (const Member& member : request.members) {
    if (request.op == Op::kAllreduce)
      HVD_RETURN_IF_ERROR(CheckReduce(member.dtype, request.reduce, scale).Prepend(member.name));
    if (request.op == Op::kAllgather && member.shape.empty()) {
      return Status(Code::kInvalid, member.name + ": an allgather needs at least one dimension");
    }
  }
  return Status::Ok();
}

Location Group::Locate(const Buffer& buffer, size_t nbytes) {
  if (size_ == 1 || buffer.in != buffer.out || nbytes == 0) return {};
  MutexLock lock(mutex_);
  for (size_t i = 0; i < segments_.size(); ++i) {
    const auto segment = segments_[i].lock();
    if (segment == nullptr || !segment->Contains(buffer.in, nbytes)) continue;
    return {static_cast<uint32_t>(i + 1), static_cast<uint64_t>(buffer.in - segment->data())};
  }
  return {};
}

Result<std::shared_ptr<Handle>> Group::Submit(Request request, std::vector<Buffer> buffers) {
  HVD_RETURN_IF_ERROR(Check(request));
  if (request.op == Op::kAllreduce) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      Member& member = request.members[i];
      member.where = Locate(buffers[i], member.nbytes());
    }
  }
  auto handle = std::make_shared<Handle>();
  HVD_RETURN_IF_ERROR(scheduler_->Submit({std::move(request), std::move(buffers), handle}));
  return handle;
}

Result<std::shared_ptr<Segment>> Group::Empty(size_t nbytes) {
  HVD_RETURN_IF_ERROR(status());
  auto segment = Segment::Create(nbytes > 0 ? nbytes : 1);
  if (!segment.ok()) return segment.status();
  MutexLock lock(mutex_);
  segments_.push_back(segment.value());
  scheduler_->AddSegment(static_cast<uint32_t>(segments_.size()), segment.value());
  return segment;
}

}  // namespace hvd
