#include "collectives/collectives.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/tuning.h"
#include "collectives/batch_memory.h"

namespace hvd {
namespace {

// How long an abort or a dead rank goes unnoticed by a rank that waits for a link.
constexpr auto kTickEvery = std::chrono::milliseconds(10);
// Waiting for a link while ranks of this host are awaited as well: those do not end a poll.
constexpr auto kLocalWait = std::chrono::milliseconds(1);

// What neighbours must agree on to understand each other's bytes.
struct Greeting {
  uint32_t magic = 0x31647668;
  uint32_t wire_dtype = 0;
  uint64_t window_nbytes = 0;
};

}  // namespace

Collectives::Collectives(const Topology& topology, Arena& arena, RingLinks links, Tick tick,
                         const CollectivesOptions& options)
    : topology_(topology),
      arena_(arena),
      links_(std::move(links)),
      tick_(std::move(tick)),
      local_tick_([this](int local_rank) { return tick_(topology_.GlobalRank(local_rank)); }),
      options_(options),
      chain_(MakeChain(topology_, links_, options.wire_dtype)) {}

Status Collectives::Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale) {
  if (!several_hosts()) return hvd::Allreduce(arena_, local_tick_, pieces, dtype, op, scale);
  const Job job{dtype, op, scale};
  const size_t count = CountOf(pieces);
  if (IsSmall(count * ItemSize(dtype))) return AllreduceSmall(pieces, count, job);
  HVD_RETURN_IF_ERROR(Agree());
  return topology_.local_size() == 1 ? AllreduceStraight(pieces, count, job)
                                     : AllreduceThroughStaging(pieces, count, job);
}

Status Collectives::AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op,
                                     const Scale& scale) {
  if (!several_hosts()) return AllreduceInArena(arena_, local_tick_, pieces, dtype, op, scale);
  const Job job{dtype, op, scale};
  const size_t count = CountOf(pieces);
  if (IsSmall(count * ItemSize(dtype))) {
    std::vector<Piece> own;
    for (const ArenaPiece& piece : pieces) {
      std::byte* at = piece.at[static_cast<size_t>(topology_.local_rank)];
      own.push_back({at, at, piece.count});
    }
    return AllreduceSmall(own, count, job);
  }
  HVD_RETURN_IF_ERROR(Agree());
  HVD_RETURN_IF_ERROR(arena_.ArriveAndAwait(local_tick_));
  if (owns_slice()) {
    BatchMemory memory(pieces, ItemSize(dtype), topology_.local_rank);
    const uint64_t number = chain_->Append(Slice(job, {0, count}, &memory));
    HVD_RETURN_IF_ERROR(Drive(*chain_, [&] { return chain_->Done(number); }));
  }
  return arena_.ArriveAndAwait(local_tick_);
}

bool Collectives::IsSmall(size_t nbytes) const {
  return nbytes <= kSmallNbytes && nbytes * static_cast<size_t>(topology_.size) <= kSmallGatheredNbytes;
}

ChainJob Collectives::Slice(const Job& job, Range range, ChainMemory* memory) const {
  const Range slice = SliceOf(range, ItemSize(job.dtype), topology_.local_rank, topology_.slices());
  return {job.dtype, job.op, job.scale, slice, memory};
}

// Every rank gets the inputs of all and adds them itself.
Status Collectives::AllreduceSmall(std::span<const Piece> pieces, size_t count, const Job& job) {
  if (count == 0) return Status::Ok();
  const size_t item = ItemSize(job.dtype), nbytes = count * item;
  const auto size = static_cast<size_t>(topology_.size);
  inputs_.resize(size * nbytes);
  std::byte* own = inputs_.data() + static_cast<size_t>(topology_.rank) * nbytes;
  std::byte* to = own;
  for (const Piece& piece : pieces) {
    if (piece.count > 0) std::memcpy(to, piece.in, piece.count * item);
    to += piece.count * item;
  }
  HVD_RETURN_IF_ERROR(Gather(own, inputs_.data(), std::vector<size_t>(size, nbytes)));
  std::vector<const void*> inputs(size);
  size_t done = 0;
  for (const Piece& piece : pieces) {
    for (size_t rank = 0; rank < size; ++rank) inputs[rank] = inputs_.data() + rank * nbytes + done * item;
    void* out = piece.out;
    Reduce(job.dtype, job.op, job.scale, inputs.data(), topology_.size, &out, 1, piece.count);
    done += piece.count;
  }
  return Status::Ok();
}

bool Collectives::any_host_stages() const {
  for (int host = 0; host < topology_.hosts(); ++host) {
    if (topology_.local_size(host) > 1) return true;
  }
  return false;
}

// The only rank of its host: the links read and write its tensors.
Status Collectives::AllreduceStraight(std::span<const Piece> pieces, size_t count, const Job& job) {
  const size_t item = ItemSize(job.dtype);
  BatchMemory memory(pieces, item);
  uint64_t last = 0;
  for (const Range window : Windows(count, any_host_stages() ? arena_.chunk_nbytes() / item : 0))
    last = chain_->Append(Slice(job, window, &memory));
  return Drive(*chain_, [&] { return chain_->Done(last); });
}

// Window by window through the staging buffers of all ranks: the owners of its slices add them and write the
// result back to all. While one window is on the wire, the next one is copied in and enters the chain.
Status Collectives::AllreduceThroughStaging(std::span<const Piece> pieces, size_t count, const Job& job) {
  const size_t item = ItemSize(job.dtype);
  const auto windows = Windows(count, arena_.chunk_nbytes() / item);
  BatchMemory tensors(pieces, item);
  std::vector<std::unique_ptr<BatchMemory>> staged;
  for (size_t w = 0; w < std::min<size_t>(windows.size(), 2); ++w) {
    ArenaPiece all{{}, windows[0].size()};
    for (int r = 0; r < arena_.size(); ++r) all.at.push_back(arena_.staging(r, static_cast<int>(w)));
    staged.push_back(std::make_unique<BatchMemory>(std::span(&all, 1), item, topology_.local_rank));
  }
  size_t filled = 0, appended = 0;
  std::vector<uint32_t> filled_step(windows.size());
  std::vector<uint64_t> number(windows.size());
  const auto own = [&](size_t w) { return arena_.staging(topology_.local_rank, static_cast<int>(w % 2)); };
  const auto fill = [&] {
    if (filled == windows.size()) return;
    InPhase(arena_.phases(), Phase::kCopyIn, [&] { tensors.CopyOut(windows[filled], own(filled)); });
    filled_step[filled] = arena_.Arrive();
    ++filled;
  };
  const auto append = [&] {
    for (; appended < filled && arena_.Reached(filled_step[appended]); ++appended) {
      const Range whole{0, windows[appended].size()};
      number[appended] = chain_->Append(Slice(job, whole, staged[appended % 2].get()));
    }
  };
  // Waits for a step of the ranks of this host and keeps the links busy.
  const auto await = [&](uint32_t step) {
    while (owns_slice() && !arena_.Reached(step)) {
      append();
      if (chain_->idle()) break;
      HVD_RETURN_IF_ERROR(Turn(*chain_, kLocalWait));
    }
    return arena_.Await(step, local_tick_);
  };

  fill();
  fill();
  for (size_t w = 0; w < windows.size(); ++w) {
    if (owns_slice()) {
      HVD_RETURN_IF_ERROR(await(filled_step[w]));
      while (append(), !chain_->Done(number[w]))
        HVD_RETURN_IF_ERROR(Turn(*chain_, appended < filled ? kLocalWait : kTickEvery));
    }
    HVD_RETURN_IF_ERROR(await(arena_.Arrive()));
    InPhase(arena_.phases(), Phase::kCopyOut, [&] { tensors.CopyIn(windows[w], own(w)); });
    fill();
  }
  return Status::Ok();
}

Status Collectives::Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes) {
  if (!several_hosts()) return Allgather(arena_, local_tick_, in, out, nbytes);
  HVD_RETURN_IF_ERROR(Agree());
  std::vector<size_t> starts{0};
  for (int host = 0; host < topology_.hosts(); ++host) {
    size_t end = starts.back();
    for (int r = topology_.leader(host); r < topology_.leader(host + 1); ++r)
      end += nbytes[static_cast<size_t>(r)];
    starts.push_back(end);
  }
  const auto leader = static_cast<size_t>(topology_.leader(topology_.host));
  const auto local_size = static_cast<size_t>(topology_.local_size());
  std::byte* here = out + starts[static_cast<size_t>(topology_.host)];
  if (local_size > 1) {
    HVD_RETURN_IF_ERROR(Allgather(arena_, local_tick_, in, here, nbytes.subspan(leader, local_size)));
  } else if (in != here && nbytes[leader] > 0) {
    std::memcpy(here, in, nbytes[leader]);
  }
  return RelayBlocks(out, starts, kEveryHost);
}

Status Collectives::Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes) {
  const int local_root = topology_.LocalRankOf(root);
  if (!several_hosts()) return hvd::Broadcast(arena_, local_tick_, local_root, in, out, nbytes);
  HVD_RETURN_IF_ERROR(Agree());
  const int root_host = topology_.HostOf(root);
  if (topology_.host == root_host && topology_.local_size() > 1) {
    HVD_RETURN_IF_ERROR(hvd::Broadcast(arena_, local_tick_, local_root, in, out, nbytes));
  } else if (topology_.rank == root && in != out && nbytes > 0) {
    std::memcpy(out, in, nbytes);
  }
  std::vector<size_t> starts;
  for (int host = 0; host <= topology_.hosts(); ++host) starts.push_back(host <= root_host ? 0 : nbytes);
  return RelayBlocks(out, starts, root_host);
}

Status Collectives::RelayBlocks(std::byte* out, std::span<const size_t> starts, int root) {
  const int owners = starts.back() <= kSmallGatheredNbytes ? 1 : topology_.slices();
  const auto slice_of = [&](int host, int owner) {
    return SliceOf({starts[static_cast<size_t>(host)], starts[static_cast<size_t>(host) + 1]}, 1, owner,
                   owners);
  };
  if (owns_slice() && topology_.local_rank < owners) {
    std::vector<Relay::Flow> flows;
    for (const bool rising : {true, false}) {
      const RelayPlan plan = PlanRelay(topology_.host, topology_.hosts(), rising, root);
      std::vector<Relay::Part> parts;
      for (const int host : plan.hosts) {
        const Range slice = slice_of(host, topology_.local_rank);
        parts.push_back({{out + slice.begin, slice.size()}, !plan.sends});
      }
      AddFlows(rising, parts, plan.own ? 1 : 0, &flows);
    }
    HVD_RETURN_IF_ERROR(Run(std::move(flows)));
  }
  if (topology_.local_size() == 1) return Status::Ok();
  // Each owner has its slices of the other hosts' blocks; now all ranks of this host get them.
  for (int host = 0; host < topology_.hosts(); ++host) {
    if (host == topology_.host || (root != kEveryHost && root != host)) continue;
    std::vector<size_t> nbytes(static_cast<size_t>(topology_.local_size()), 0);
    for (int owner = 0; owner < owners; ++owner)
      nbytes[static_cast<size_t>(owner)] = slice_of(host, owner).size();
    const size_t own = topology_.local_rank < owners ? slice_of(host, topology_.local_rank).begin : 0;
    std::byte* block = out + starts[static_cast<size_t>(host)];
    HVD_RETURN_IF_ERROR(Allgather(arena_, local_tick_, out + own, block, nbytes));
  }
  return Status::Ok();
}

void Collectives::AddFlows(bool rising, std::span<const Relay::Part> parts, size_t own,
                           std::vector<Relay::Flow>* flows) const {
  const auto& from = rising ? links_.previous : links_.next;
  const auto& to = rising ? links_.next : links_.previous;
  std::vector<Relay::Flow> by_stream(std::max(from.size(), to.size()));
  for (size_t s = 0; s < by_stream.size(); ++s) {
    if (!from.empty()) by_stream[s].from = from[s].get();
    if (!to.empty()) by_stream[s].to = to[s].get();
    by_stream[s].from_rank = NeighbourRank(rising ? -1 : 1);
    by_stream[s].to_rank = NeighbourRank(rising ? 1 : -1);
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto& [bytes, stays] = parts[p];
    for (const Chunk& chunk : Chunks({0, bytes.size()}, 1, static_cast<int>(by_stream.size()))) {
      Relay::Flow& flow = by_stream[static_cast<size_t>(chunk.stream)];
      flow.parts.push_back({bytes.subspan(chunk.begin, chunk.count), stays});
      flow.own += p < own;
    }
  }
  std::move(by_stream.begin(), by_stream.end(), std::back_inserter(*flows));
}

Status Collectives::Run(std::vector<Relay::Flow> flows) {
  Relay relay(std::move(flows));
  return Drive(relay, [&] { return relay.done(); });
}

int Collectives::NeighbourRank(int step) const {
  const int host = topology_.host + step;
  return host < 0 || host >= topology_.hosts() ? -1 : topology_.leader(host) + topology_.local_rank;
}

Status Collectives::Agree() {
  if (agreed_ || !owns_slice()) return Status::Ok();
  const Greeting mine{Greeting{}.magic, static_cast<uint32_t>(options_.wire_dtype), arena_.chunk_nbytes()};
  std::vector<Greeting> greetings(2 * (links_.previous.size() + links_.next.size()));  // each out and in
  std::vector<Relay::Flow> flows;
  std::vector<int> ranks;
  const auto bytes = [&](size_t i) { return std::as_writable_bytes(std::span(&greetings[i], 1)); };
  for (const int step : {-1, 1}) {
    for (const auto& link : step < 0 ? links_.previous : links_.next) {
      const int rank = NeighbourRank(step);
      greetings[flows.size()] = mine;
      flows.push_back({nullptr, link.get(), -1, rank, {{bytes(flows.size())}}, 1});
      flows.push_back({link.get(), nullptr, rank, -1, {{bytes(flows.size())}}, 0});
      ranks.push_back(rank);
    }
  }
  HVD_RETURN_IF_ERROR(Run(std::move(flows)));
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Greeting& theirs = greetings[2 * i + 1];
    const std::string who = "rank " + std::to_string(ranks[i]);
    const std::string me = "rank " + std::to_string(topology_.rank);
    if (theirs.magic != mine.magic)
      return Status(Code::kPeerLost, who + " sent something else than its data");
    if (theirs.wire_dtype != mine.wire_dtype) {
      return Status(Code::kInvalid, who + " has another wire_dtype than " + me + " (" +
                                        Name(static_cast<DType>(theirs.wire_dtype)) + ", " +
                                        Name(options_.wire_dtype) +
                                        "); HVD_WIRE_DTYPE must be the same on all ranks");
    }
    if (theirs.window_nbytes != mine.window_nbytes) {
      return Status(Code::kInvalid, who + " has another chunk_bytes than " + me +
                                        "; HVD_CHUNK_BYTES must be the same on all ranks");
    }
  }
  agreed_ = true;
  return Status::Ok();
}

template <class Machine, class IsDone>
Status Collectives::Drive(Machine& machine, const IsDone& is_done) {
  next_tick_ = Clock::now() + kTickEvery;
  while (!is_done()) HVD_RETURN_IF_ERROR(Turn(machine, kTickEvery));
  return Status::Ok();
}

// Moves what can be moved, or waits for at most `patience`.
template <class Machine>
Status Collectives::Turn(Machine& machine, std::chrono::milliseconds patience) {
  const PhaseScope scope(arena_.phases(), Phase::kWire);
  const auto until = Clock::now() + kLinkLookFor;
  do {
    auto moved = machine.Advance();
    if (!moved.ok()) return Explain(moved.status());
    if (moved.value()) left_at_.reset();
    if (moved.value()) return TickIfDue(machine.awaited_rank());
    ::sched_yield();
  } while (Clock::now() < until);
  fds_.clear();
  machine.Wants(&fds_);
  ::poll(fds_.data(), fds_.size(), static_cast<int>(patience.count()));
  return TickIfDue(machine.awaited_rank());
}

Status Collectives::TickIfDue(int awaited_rank) {
  const auto now = Clock::now();
  if (now < next_tick_) return Status::Ok();
  next_tick_ = now + kTickEvery;
  const Status status = tick_(awaited_rank);
  if (status.code() != Code::kShutdown) return status;
  // Who closed the Group has sent all it owed before, but over another connection than its goodbye.
  if (!left_at_) left_at_ = now;
  return now - *left_at_ < kCauseWithin ? Status::Ok() : status;
}

// Why a link broke: what the control connections say, if they say something soon.
Status Collectives::Explain(const Status& failure) {
  if (failure.code() != Code::kPeerLost) return failure;
  const auto deadline = Clock::now() + kCauseWithin;
  while (Clock::now() < deadline) {
    for (const int step : {-1, 1}) {
      if (const int rank = NeighbourRank(step); rank >= 0) HVD_RETURN_IF_ERROR(tick_(rank));
    }
    ::poll(nullptr, 0, 5);
  }
  return failure;
}

}  // namespace hvd
