#include "scheduler/connect.h"

#include "base/log.h"
#include "scheduler/scheduler.h"
#include "transport/wire.h"

namespace hvd {
namespace {

Result<std::vector<Endpoint>> ParseAll(const std::vector<std::string>& texts) {
  std::vector<Endpoint> endpoints;
  for (const std::string& text : texts) {
    auto endpoint = Endpoint::Parse(text);
    if (!endpoint.ok()) return endpoint.status();
    endpoints.push_back(std::move(endpoint).value());
  }
  return endpoints;
}

Result<Topology> TopologyOf(const std::vector<Endpoint>& endpoints, int rank) {
  std::vector<std::string> hosts;
  for (const Endpoint& endpoint : endpoints) hosts.push_back(endpoint.HostKey());
  return Topology::Of(hosts, rank);
}

Result<DType> WireDType(const std::string& name) {
  if (name.empty()) return DType::kFloat32;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp16") return DType::kFloat16;
  return Status(Code::kInvalid, "wire_dtype '" + name + "' is none of '', 'bf16' and 'fp16'");
}

// Every rank sends its control segment to the others of its host and waits for theirs.
Status ShareControlSegments(const Topology& topology, Exchange& exchange, Arena& arena,
                            const BootstrapOptions& options) {
  Writer payload;
  payload.Put(uint32_t{0});
  payload.Put(static_cast<uint64_t>(arena.control_nbytes()));
  exchange.PostHost(FrameKind::kSegment, payload.Take(), arena.control()->fd());
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
      HVD_RETURN_IF_ERROR(
          arena.AddSegment(topology.LocalRankOf(frame->peer), number, std::move(segment).value()));
    }
    if (arena.complete()) break;
    HVD_RETURN_IF_ERROR(exchange.ended());
    for (int local = 0; local < arena.size(); ++local) {
      // A rank that has shared its memory may be done already, while we still wait for another one.
      const int peer = topology.GlobalRank(local);
      if (exchange.HasLeft(peer) && !arena.HasControl(local))
        return Status(Code::kShutdown, "rank " + std::to_string(peer) + " left while connecting");
    }
    if (Clock::now() >= options.deadline)
      return Status(Code::kTimeout, "a rank did not share its memory within connect_timeout_s");
    if (options.interrupted && options.interrupted())
      return Status(Code::kAborted, "interrupted while connecting");
    exchange.Poll(std::min(options.deadline, Clock::now() + std::chrono::milliseconds(100)));
  }
  exchange.PutBack(std::move(early));
  return Status::Ok();
}

// Whether the ranks of this host have a CPU each.
Status CountCpus(Exchange& exchange, Arena& arena, int first_rank, double cpu_quota,
                 const BootstrapOptions& options) {
  return arena.CountCpus(cpu_quota, [&](int local_rank) {
    const int peer = first_rank + local_rank;
    exchange.Poll(Clock::now());
    HVD_RETURN_IF_ERROR(exchange.ended());
    const std::string who = "rank " + std::to_string(peer);
    if (exchange.HasLeft(peer)) return Status(Code::kShutdown, who + " left while connecting");
    if (Clock::now() >= options.deadline)
      return Status(Code::kTimeout, who + " did not take part within connect_timeout_s");
    if (options.interrupted && options.interrupted())
      return Status(Code::kAborted, "interrupted while connecting");
    return Status::Ok();
  });
}

}  // namespace

Result<Topology> TopologyOf(const std::vector<std::string>& texts, int rank) {
  const auto endpoints = ParseAll(texts);
  if (!endpoints.ok()) return endpoints.status();
  return TopologyOf(endpoints.value(), rank);
}

Result<std::unique_ptr<Engine>> ConnectScheduler(Listener& listener, const std::vector<std::string>& texts,
                                                 const Credentials& me, const GroupOptions& options) {
  const BootstrapOptions connecting{options.ring_streams, Clock::now() + Seconds(options.connect_timeout_s),
                                    options.interrupted};
  const auto endpoints = ParseAll(texts);
  if (!endpoints.ok()) return endpoints.status();
  auto topology = TopologyOf(endpoints.value(), me.rank);
  if (!topology.ok()) return topology.status();
  const Topology& t = topology.value();
  const auto wire_dtype = WireDType(options.wire_dtype);
  if (!wire_dtype.ok()) return wire_dtype.status();
  if (me.rank == 0) {
    if (const std::string parted = PartedRanks(endpoints.value()); !parted.empty())
      Log(Level::kWarning, parted);
  }
  auto exchange = std::make_unique<Exchange>(t, Seconds(options.peer_timeout_s));
  HVD_RETURN_IF_ERROR(exchange->status());
  DataLinks data;
  if (Status status = ConnectLinks(listener, endpoints.value(), me, t, connecting, *exchange, &data);
      !status.ok()) {
    return status.Prepend("rank " + std::to_string(me.rank) + " could not connect within connect_timeout_s");
  }
  // A window that travels between hosts is to hold several chunks for each slice.
  const size_t staging_nbytes = options.chunk_nbytes * (t.hosts() > 1 ? 4 : 1);
  auto arena = Arena::Create(t.local_rank, t.local_size(), staging_nbytes);
  if (!arena.ok()) return arena.status();
  HVD_RETURN_IF_ERROR(ShareControlSegments(t, *exchange, *arena.value(), connecting));
  HVD_RETURN_IF_ERROR(CountCpus(*exchange, *arena.value(), t.leader(t.host), options.cpu_quota, connecting));
  const SchedulerOptions scheduling{me.rank,
                                    me.size,
                                    options.fusion_nbytes,
                                    Seconds(options.stall_warn_s),
                                    Seconds(options.stall_shutdown_s),
                                    Seconds(options.peer_timeout_s),
                                    {wire_dtype.value()},
                                    !options.timeline.empty(),
                                    options.note};
  return std::unique_ptr<Engine>(std::make_unique<Scheduler>(scheduling, t, std::move(exchange),
                                                             std::move(arena).value(), std::move(data)));
}

}  // namespace hvd
