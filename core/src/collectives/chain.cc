#include "collectives/chain.h"

#include <algorithm>
#include <cstring>

#include "collectives/relay.h"

namespace hvd {
namespace {

// In each direction of a stream: one chunk is received while the one before it is sent on.
constexpr size_t kBuffers = 2;

void Widen(DType wire, const std::byte* in, std::byte* out, size_t count) {
  const void* src = in;
  Accumulate(wire, ReduceOp::kSum, {}, nullptr, &src, 1, out, count);
}

void Narrow(DType wire, const std::byte* in, std::byte* out, size_t count) {
  void* dst = out;
  Finish(wire, ReduceOp::kSum, {}, in, &dst, 1, count);
}

template <class Buffer>
Buffer* Take(std::vector<Buffer*>& free) {
  if (free.empty()) return nullptr;
  Buffer* taken = free.back();
  free.pop_back();
  return taken;
}

std::byte* Bytes(void* at) { return static_cast<std::byte*>(at); }

}  // namespace

std::byte* Chain::Buffer::Wide() {
  if (wide == nullptr) wide.reset(new std::byte[kMaxChunkNbytes]);
  return wide.get();
}

std::byte* Chain::Buffer::Wire() {
  if (wire == nullptr) wire.reset(new std::byte[kMaxChunkNbytes / 2]);
  return wire.get();
}

Chain::Chain(Neighbour previous, Neighbour next, DType wire_dtype)
    : previous_(std::move(previous)), next_(std::move(next)), wire_dtype_(wire_dtype) {
  for (size_t i = 0; i < std::max(previous_.links.size(), next_.links.size()); ++i) {
    Lane& lane = lanes_.emplace_back();
    if (!first_host()) lane.previous = previous_.links[i];
    if (!last_host()) lane.next = next_.links[i];
    lane.buffers.resize(2 * kBuffers);
    for (size_t b = 0; b < kBuffers; ++b) {
      lane.free_up.push_back(&lane.buffers[b]);
      lane.free_down.push_back(&lane.buffers[kBuffers + b]);
    }
  }
}

uint64_t Chain::Append(const ChainJob& what) {
  Job& job = jobs_.emplace_back();
  job.what = what;
  job.narrow_up = wire_dtype_ != DType::kFloat32 && AccType(what.dtype) == DType::kFloat32;
  job.narrow_down = job.narrow_up && what.dtype == DType::kFloat32;
  job.acc_item = ItemSize(AccType(what.dtype));
  job.up_item = job.narrow_up ? ItemSize(wire_dtype_) : job.acc_item;
  job.down_item = job.narrow_down ? ItemSize(wire_dtype_) : ItemSize(what.dtype);
  for (const Chunk& chunk : Chunks(what.slice, job.acc_item, static_cast<int>(lanes_.size()))) {
    Lane& lane = lanes_[static_cast<size_t>(chunk.stream)];
    lane.flights.push_back({&job, chunk});
    ++lane.end;
    ++job.chunks_left;
  }
  RetireJobs();  // it may be empty
  return appended_++;
}

Result<bool> Chain::Advance() {
  bool moved = false;
  for (Lane& lane : lanes_) {
    // What others wait for goes first.
    for (const auto stage : {&Chain::SendDown, &Chain::SendUp, &Chain::ReceiveDown, &Chain::ReceiveUp}) {
      auto result = (this->*stage)(lane);
      if (!result.ok()) return result;
      moved |= result.value();
    }
  }
  return moved;
}

Result<bool> Chain::ReceiveUp(Lane& lane) {
  if (lane.added == lane.end) return false;
  Flight& flight = lane.at(lane.added);
  if (flight.up_buffer == nullptr) flight.up_buffer = Take(lane.free_up);
  if (flight.up_buffer == nullptr) return false;
  bool moved = false;
  if (!first_host() && flight.up_received < flight.up_nbytes()) {
    std::byte* into = flight.job->narrow_up ? flight.up_buffer->Wire() : flight.up_buffer->Wide();
    UniqueFd none;
    auto got =
        lane.previous->TryRecv({into + flight.up_received, flight.up_nbytes() - flight.up_received}, &none);
    if (!got.ok()) return LostRank(previous_.rank, got.status());
    flight.up_received += got.value();
    moved = got.value() > 0;
    if (flight.up_received < flight.up_nbytes()) return moved;
  }
  if (last_host() && !MayStore(flight)) return moved;
  if (last_host() && flight.down_buffer == nullptr) flight.down_buffer = Take(lane.free_down);
  if (last_host() && flight.down_buffer == nullptr) return moved;
  HVD_RETURN_IF_ERROR(Add(flight));
  ++lane.added;
  if (last_host()) {
    lane.free_up.push_back(flight.up_buffer);
    lane.up_sent = lane.stored = lane.added;
  }
  return true;
}

Result<bool> Chain::SendUp(Lane& lane) {
  if (last_host() || lane.up_sent == lane.added) return false;
  Flight& flight = lane.at(lane.up_sent);
  auto put = lane.next->TrySend({flight.up + flight.up_sent, flight.up_nbytes() - flight.up_sent}, -1);
  if (!put.ok()) return LostRank(next_.rank, put.status());
  flight.up_sent += put.value();
  if (flight.up_sent == flight.up_nbytes()) {
    lane.free_up.push_back(flight.up_buffer);
    ++lane.up_sent;
  }
  return put.value() > 0;
}

Result<bool> Chain::ReceiveDown(Lane& lane) {
  if (last_host() || lane.stored == lane.up_sent) return false;
  Flight& flight = lane.at(lane.stored);
  if (!MayStore(flight)) return false;
  if (flight.down_buffer == nullptr) {
    flight.down_buffer = Take(lane.free_down);
    if (flight.down_buffer == nullptr) return false;
    targets_.Clear();
    HVD_RETURN_IF_ERROR(flight.job->what.memory->Targets(flight.chunk, &targets_));
    flight.down = flight.job->narrow_down ? flight.down_buffer->Wire()
                  : targets_.size() == 1  ? Bytes(targets_.at[0])
                                          : flight.down_buffer->Wide();
  }
  UniqueFd none;
  auto got = lane.next->TryRecv(
      {flight.down + flight.down_received, flight.down_nbytes() - flight.down_received}, &none);
  if (!got.ok()) return LostRank(next_.rank, got.status());
  flight.down_received += got.value();
  if (flight.down_received == flight.down_nbytes()) {
    HVD_RETURN_IF_ERROR(Store(flight));
    ++lane.stored;
    if (first_host()) {
      lane.free_down.push_back(flight.down_buffer);
      Retire(lane);
    }
  }
  return got.value() > 0;
}

Result<bool> Chain::SendDown(Lane& lane) {
  if (first_host() || lane.down_sent == lane.stored) return false;
  Flight& flight = lane.at(lane.down_sent);
  auto put =
      lane.previous->TrySend({flight.down + flight.down_sent, flight.down_nbytes() - flight.down_sent}, -1);
  if (!put.ok()) return LostRank(previous_.rank, put.status());
  flight.down_sent += put.value();
  if (flight.down_sent == flight.down_nbytes()) {
    lane.free_down.push_back(flight.down_buffer);
    ++lane.down_sent;
    Retire(lane);
  }
  return put.value() > 0;
}

// Adds this host's ranks to what came from the previous one. Afterwards `up`, or on the last host `down`, is
// what is to be sent.
Status Chain::Add(Flight& flight) {
  const Job& job = *flight.job;
  const ChainJob& what = job.what;
  sources_.Clear();
  HVD_RETURN_IF_ERROR(what.memory->Sources(flight.chunk, &sources_));
  const bool plain = what.scale.pre == 1 && AccType(what.dtype) == what.dtype && !job.narrow_up;
  if (first_host() && plain && sources_.ranks == 1 && sources_.size() == 1) {
    flight.up = static_cast<const std::byte*>(sources_.at[0]);  // is the accumulator as it is
    return Status::Ok();
  }
  std::byte* acc = flight.up_buffer->Wide();
  if (job.narrow_up && !first_host()) Widen(wire_dtype_, flight.up_buffer->Wire(), acc, flight.chunk.count);
  if (last_host()) return Finish(flight);
  AddTo(acc, job, first_host());
  flight.up = acc;
  if (job.narrow_up) {
    Narrow(wire_dtype_, acc, flight.up_buffer->Wire(), flight.chunk.count);
    flight.up = flight.up_buffer->Wire();
  }
  return Status::Ok();
}

void Chain::AddTo(std::byte* acc, const Job& job, bool start) {
  for (size_t run = 0; run < sources_.size(); ++run) {
    Accumulate(job.what.dtype, job.what.op, job.what.scale, start ? nullptr : acc, sources_.of(run),
               static_cast<int>(sources_.ranks), acc, sources_.counts[run]);
    acc += sources_.counts[run] * job.acc_item;
  }
}

// On the last host: the result of `sources_` and the accumulator, in all targets and in `down`.
Status Chain::Finish(Flight& flight) {
  const Job& job = *flight.job;
  const ChainJob& what = job.what;
  targets_.Clear();
  HVD_RETURN_IF_ERROR(what.memory->Targets(flight.chunk, &targets_));
  std::byte* acc = flight.up_buffer->Wide();
  // With nothing to do to the accumulator it is as good as one more rank, and one pass does all.
  const bool one_pass =
      what.scale.pre == 1 && AccType(what.dtype) == what.dtype && sources_.counts == targets_.counts;
  if (!one_pass) AddTo(acc, job, false);
  flight.down = job.narrow_down        ? flight.down_buffer->Wire()
                : targets_.size() == 1 ? Bytes(targets_.at[0])
                                       : flight.down_buffer->Wide();
  size_t done = 0;
  std::vector<const void*> with_acc(1 + sources_.ranks);
  for (size_t run = 0; run < targets_.size(); ++run) {
    const size_t count = targets_.counts[run];
    const int places = static_cast<int>(targets_.ranks);
    with_acc[0] = acc + done * job.acc_item;
    if (one_pass) {
      std::copy_n(sources_.of(run), sources_.ranks, with_acc.begin() + 1);
      Reduce(what.dtype, what.op, what.scale, with_acc.data(), static_cast<int>(with_acc.size()),
             targets_.of(run), places, count);
    } else {
      hvd::Finish(what.dtype, what.op, what.scale, with_acc[0], targets_.of(run), places, count);
    }
    std::byte* down = flight.down + done * job.down_item;
    if (job.narrow_down) {
      Narrow(wire_dtype_, Bytes(targets_.of(run)[0]), down, count);
    } else if (down != targets_.of(run)[0]) {
      std::memcpy(down, targets_.of(run)[0], count * job.down_item);
    }
    done += count;
  }
  return job.narrow_down ? Store(flight) : Status::Ok();
}

// Puts the result from `down` into all targets.
Status Chain::Store(Flight& flight) {
  const Job& job = *flight.job;
  targets_.Clear();
  HVD_RETURN_IF_ERROR(job.what.memory->Targets(flight.chunk, &targets_));
  const size_t item = ItemSize(job.what.dtype);
  const std::byte* down = flight.down;
  for (size_t run = 0; run < targets_.size(); ++run) {
    const size_t count = targets_.counts[run];
    void** at = targets_.of(run);
    if (job.narrow_down) {
      Widen(wire_dtype_, down, Bytes(at[0]), count);
    } else if (at[0] != down) {
      std::memcpy(at[0], down, count * item);
    }
    for (size_t i = 1; i < targets_.ranks; ++i) std::memcpy(at[i], at[0], count * item);
    down += count * job.down_item;
  }
  return Status::Ok();
}

void Chain::Retire(Lane& lane) {
  const uint64_t finished = first_host() ? lane.stored : lane.down_sent;
  for (; lane.first < finished; ++lane.first) {
    --lane.flights.front().job->chunks_left;
    lane.flights.pop_front();
  }
  RetireJobs();
}

void Chain::RetireJobs() {
  for (; !jobs_.empty() && jobs_.front().chunks_left == 0; jobs_.pop_front()) ++done_;
}

bool Chain::WantsUp(const Lane& lane) const {
  if (first_host() || lane.added == lane.end) return false;
  const Flight& flight = lane.at(lane.added);
  return flight.up_buffer != nullptr ? flight.up_received < flight.up_nbytes() : !lane.free_up.empty();
}

bool Chain::WantsDown(const Lane& lane) const {
  if (last_host() || lane.stored == lane.up_sent) return false;
  const Flight& flight = lane.at(lane.stored);
  return flight.down_buffer != nullptr || (!lane.free_down.empty() && MayStore(flight));
}

void Chain::Wants(std::vector<pollfd>* fds) const {
  const auto want = [&](const Link* link, bool in, bool out) {
    const int events = (in ? POLLIN : 0) | (out ? POLLOUT : 0);
    if (events != 0) fds->push_back({link->fd(), static_cast<short>(events), 0});
  };
  for (const Lane& lane : lanes_) {
    want(lane.previous, WantsUp(lane), !first_host() && lane.down_sent < lane.stored);
    want(lane.next, WantsDown(lane), !last_host() && lane.up_sent < lane.added);
  }
}

int Chain::awaited_rank() const {
  for (const Lane& lane : lanes_) {
    if (!last_host() && lane.stored < lane.added) return next_.rank;
    if (!first_host() && lane.down_sent < lane.end) return previous_.rank;
  }
  return first_host() ? next_.rank : previous_.rank;
}

std::unique_ptr<Chain> MakeChain(const Topology& topology, const RingLinks& links, DType wire_dtype) {
  if (links.previous.empty() && links.next.empty()) return nullptr;
  const auto neighbour = [&](int host, const std::vector<std::unique_ptr<Link>>& owned) {
    Chain::Neighbour there;
    if (!owned.empty()) there.rank = topology.leader(host) + topology.local_rank;
    for (const auto& link : owned) there.links.push_back(link.get());
    return there;
  };
  return std::make_unique<Chain>(neighbour(topology.host - 1, links.previous),
                                 neighbour(topology.host + 1, links.next), wire_dtype);
}

}  // namespace hvd
