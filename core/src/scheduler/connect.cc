#include "scheduler/connect.h"

#include "scheduler/scheduler.h"
#include "transport/wire.h"

namespace hvd {
namespace {

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

Result<std::unique_ptr<Engine>> ConnectScheduler(Listener& listener,
                                                 const std::vector<std::string>& endpoint_texts,
                                                 const Credentials& me, const GroupOptions& options) {
  const auto deadline = Clock::now() + Seconds(options.connect_timeout_s);
  const int size = me.size;
  auto exchange = std::make_unique<Exchange>(me.rank, size, Seconds(options.peer_timeout_s));
  HVD_RETURN_IF_ERROR(exchange->status());
  std::vector<Endpoint> endpoints;
  for (const std::string& text : endpoint_texts) {
    auto endpoint = Endpoint::Parse(text);
    if (!endpoint.ok()) return endpoint.status();
    endpoints.push_back(std::move(endpoint).value());
  }
  const std::string& mine = endpoints[static_cast<size_t>(me.rank)].host;
  if (const std::string who = RanksElsewhere(endpoints, me.rank); !who.empty())
    return SeveralHosts(who, mine);
  if (Status status = ConnectAll(listener, endpoints, me, deadline, *exchange); !status.ok()) {
    return status.Prepend("rank " + std::to_string(me.rank) + " could not connect within connect_timeout_s");
  }
  if (const int peer = exchange->FirstOnOtherHost(); peer >= 0)
    return SeveralHosts(std::to_string(peer), mine);
  auto arena = Arena::Create(me.rank, size, options.chunk_nbytes, HasCpusFor(size));
  if (!arena.ok()) return arena.status();
  HVD_RETURN_IF_ERROR(ShareControlSegments(*exchange, *arena.value(), deadline));
  const SchedulerOptions scheduling{me.rank, size, options.fusion_nbytes, Seconds(options.stall_warn_s),
                                    Seconds(options.stall_shutdown_s)};
  return std::unique_ptr<Engine>(
      std::make_unique<Scheduler>(scheduling, std::move(exchange), std::move(arena).value()));
}

}  // namespace hvd
