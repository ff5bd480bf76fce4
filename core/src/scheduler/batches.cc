// How a fused batch is run.
#include <algorithm>
#include <new>
#include <numeric>

#include "scheduler/scheduler.h"

namespace hvd {
namespace {

// How often frames are looked at while a segment is on its way.
constexpr auto kLookEvery = std::chrono::milliseconds(250);

}  // namespace

std::string Scheduler::Doing() const {
  if (doing_ == nullptr) return "nothing";
  return std::string(Name(doing_in_->op)) + " '" + doing_->name + "'";
}

Status Scheduler::RunBatch(std::span<const Tensor> batch) {
  const Tensor& first = batch.front();
  const Running& running = running_[first.decision];
  const Request& request = *running.request;
  const Member& member = request.members[first.member];
  doing_ = &member;
  doing_in_ = &request;
  for (const Tensor& tensor : batch) counters_.nbytes += tensor.nbytes;
  switch (request.op) {
    case Op::kAllreduce:
      return RunAllreduce(batch);
    case Op::kAllgather:
      return RunAllgather(running, first.member);
    case Op::kBroadcast: {
      const Buffer& buffer = running.submission->buffer(first.member);
      return collectives_.Broadcast(request.root, buffer.in, buffer.out, member.nbytes());
    }
    case Op::kPlan:
      return RunPlan(running, first.member);
    case Op::kAlltoall:
      return RunAlltoall(running);
    case Op::kReducescatter:
      return RunReducescatter(running, first.member);
    case Op::kBarrier:
    case Op::kJoin:
      break;
  }
  return Status::Ok();
}

Status Scheduler::RunAllreduce(std::span<const Tensor> batch) {
  const FusionKind& kind = batch.front().kind;
  const Scale scale{kind.prescale, kind.postscale, kind.reduce == ReduceOp::kAverage ? options_.size : 1};
  if (kind.in_arena) {
    std::vector<ArenaPiece> placed(batch.size());
    for (size_t i = 0; i < batch.size(); ++i) HVD_RETURN_IF_ERROR(Place(batch[i], &placed[i]));
    return collectives_.AllreduceInPlace(placed, kind.dtype, kind.reduce, scale);
  }
  pieces_.clear();
  for (const Tensor& tensor : batch) {
    const Buffer& buffer = running_[tensor.decision].submission->buffer(tensor.member);
    pieces_.push_back({buffer.in, buffer.out, tensor.count()});
  }
  return collectives_.Allreduce(pieces_, kind.dtype, kind.reduce, scale);
}

// A peer's segment may still be on its way.
Status Scheduler::AwaitSegment(int rank, const Location& place) {
  const int local = topology_.LocalRankOf(rank);
  const auto give_up = Clock::now() + options_.peer_timeout;
  while (!arena_->HasSegment(local, place.segment)) {
    exchange_->Poll(Clock::now() + kLookEvery);
    HVD_RETURN_IF_ERROR(Tick(rank));
    if (Clock::now() < give_up || arena_->HasSegment(local, place.segment)) continue;
    return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": its memory for " + Doing() +
                                       " did not come for " + WholeSeconds(options_.peer_timeout) +
                                       " (peer_timeout_s)");
  }
  return Status::Ok();
}

Status Scheduler::RunPlan(const Running& running, uint32_t member) {
  const auto& places = running.decision->places[member];
  Meeting meeting;
  for (int local = 0; local < topology_.local_size() && !places.empty(); ++local) {
    const int rank = topology_.GlobalRank(local);
    const Location& place = places[static_cast<size_t>(rank)];
    HVD_RETURN_IF_ERROR(AwaitSegment(rank, place));
    meeting.segments.push_back(arena_->SegmentOf(local, place.segment));
  }
  // Every rank has said with its offer which plan it saw give the links back last, so all decide alike.
  const bool are_free = !places.empty() &&
                        std::all_of(places.begin(), places.end(),
                                    [&](const Location& place) { return place.offset == plan_links_given_; });
  if (topology_.hosts() > 1 && are_free) {
    HVD_RETURN_IF_ERROR(collectives_.Agree());
    ++plan_links_given_;
    meeting.links = {&plan_links_->links, [all = plan_links_](RingLinks*) { ++all->returned; }};
    meeting.wire_dtype = options_.collectives.wire_dtype;
  }
  meeting.has_cpu_for_each = arena_->has_cpu_for_each();
  meeting.stall_warn = options_.stall_warn;
  meeting.stall_shutdown = options_.stall_shutdown;
  running.submission->handle->SetMeeting(std::move(meeting));
  return Status::Ok();
}

// Where every rank of this host has the tensor.
Status Scheduler::Place(const Tensor& tensor, ArenaPiece* piece) {
  const Running& running = running_[tensor.decision];
  const auto& places = running.decision->places[tensor.member];
  const auto nowhere = [&] {
    return Status(Code::kPeerLost, "a rank announced a place outside of its arena for '" +
                                       running.request->members[tensor.member].name + "'");
  };
  if (places.size() != static_cast<size_t>(options_.size)) return nowhere();
  piece->count = tensor.count();
  for (int local = 0; local < topology_.local_size(); ++local) {
    const int rank = topology_.GlobalRank(local);
    const Location& place = places[static_cast<size_t>(rank)];
    HVD_RETURN_IF_ERROR(AwaitSegment(rank, place));
    std::byte* at = arena_->At(local, place, tensor.nbytes);
    if (at == nullptr) return nowhere();
    piece->at.push_back(at);
  }
  return Status::Ok();
}

// For what comes to this rank of the tensor that is worked on: rows[r] rows of rank r.
Result<Gathered> Scheduler::MakeRoom(const std::vector<int64_t>& rows) {
  Gathered gathered{nullptr, doing_->dtype, doing_->shape, rows};
  gathered.shape[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const size_t total = static_cast<size_t>(gathered.shape[0]) * doing_->row_nbytes();
  gathered.data = std::shared_ptr<std::byte[]>(new (std::nothrow) std::byte[total + 1]);
  if (gathered.data != nullptr) return gathered;
  return Status(Code::kAborted, "rank " + std::to_string(options_.rank) + " has no memory for the " +
                                    std::to_string(total) + " bytes of " + Doing());
}

Status Scheduler::RunAllgather(const Running& running, uint32_t index) {
  const auto& rows = running.decision->rows[index];
  auto gathered = MakeRoom(rows);
  if (!gathered.ok()) return gathered.status();
  std::vector<size_t> nbytes;
  for (const int64_t n : rows) nbytes.push_back(static_cast<size_t>(n) * doing_->row_nbytes());
  const Submission& submission = *running.submission;
  HVD_RETURN_IF_ERROR(collectives_.Gather(submission.buffer(index).in, gathered.value().data.get(), nbytes));
  auto& results = submission.handle->results();
  results.resize(running.request->members.size());
  results[index] = std::move(gathered).value();
  return Status::Ok();
}

Status Scheduler::RunAlltoall(const Running& running) {
  const auto& rows = running.decision->rows;
  Traffic traffic(options_.size);
  std::vector<int64_t> received;
  for (int from = 0; from < options_.size; ++from) {
    const auto& splits = rows[static_cast<size_t>(from)];
    received.push_back(splits[static_cast<size_t>(options_.rank)]);
    for (int to = 0; to < options_.size; ++to)
      traffic.at(from, to) = static_cast<size_t>(splits[static_cast<size_t>(to)]) * doing_->row_nbytes();
  }
  auto gathered = MakeRoom(received);
  if (!gathered.ok()) return gathered.status();
  const Submission& submission = *running.submission;
  HVD_RETURN_IF_ERROR(collectives_.Alltoall(submission.buffer(0).in, gathered.value().data.get(), traffic));
  submission.handle->results().push_back(std::move(gathered).value());
  return Status::Ok();
}

Status Scheduler::RunReducescatter(const Running& running, uint32_t index) {
  const Request& request = *running.request;
  const auto rows = static_cast<size_t>(doing_->shape[0]);
  const size_t row = doing_->row_nbytes() / ItemSize(doing_->dtype);
  std::vector<Range> slices;
  for (int rank = 0; rank < options_.size; ++rank) {
    const Range theirs = RowsOf(rows, rank, options_.size);
    slices.push_back({theirs.begin * row, theirs.end * row});
  }
  const Scale scale{request.prescale, request.postscale,
                    request.reduce == ReduceOp::kAverage ? options_.size : 1};
  const Buffer& buffer = running.submission->buffer(index);
  return collectives_.ReduceScatter(buffer.in, buffer.out, slices, doing_->dtype, request.reduce, scale);
}

}  // namespace hvd
