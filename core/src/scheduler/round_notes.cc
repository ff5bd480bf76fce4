// What the timeline hears of the rounds, and of the end.
#include "scheduler/scheduler.h"

namespace hvd {

void Scheduler::PostTrace(int rank, const std::string& payload) {
  if (rank < 0) {
    exchange_->PostAll(FrameKind::kTrace, payload);
  } else {
    exchange_->Post(rank, FrameKind::kTrace, payload);
  }
}

void Scheduler::NoteBatch(Trace& trace, std::span<const Tensor> batch, int64_t begin_ns) {
  const NotedBatch& noted =
      noted_.emplace_back(NotedBatch{{batch.begin(), batch.end()},
                                     counters_.fused_batches.load(std::memory_order_relaxed),
                                     begin_ns,
                                     NowNs()});
  uint64_t nbytes = 0;
  for (const Tensor& tensor : batch) nbytes += tensor.nbytes;
  const Request& request = *running_[batch.front().decision].request;
  const Member& front = request.members[batch.front().member];
  const std::string what = std::string(Name(request.op)) + " " + Name(front.dtype);
  trace.Batch({BatchRow::kEager, noted.number, what, static_cast<uint32_t>(batch.size()), nbytes,
               noted.begin_ns, noted.end_ns},
              phases_.spans());
  phases_.Clear();
}

void Scheduler::NoteRound(Trace& trace, const Round& round) {
  const int64_t done_ns = NowNs();
  const auto note = [&](TensorTrace tensor, const Running& running) {
    const int64_t queued_ns = running.submission->queued_ns;
    // Decided ahead of what was submitted, or submitted before notes were taken: no time goes backwards.
    tensor.negotiated_ns = std::min(round.known_ns, tensor.begun_ns > 0 ? tensor.begun_ns : done_ns);
    tensor.queued_ns = queued_ns > 0 ? std::min(queued_ns, tensor.negotiated_ns) : tensor.negotiated_ns;
    tensor.done_ns = done_ns;
    trace.Tensor(tensor);
  };
  for (const NotedBatch& batch : noted_) {
    for (const Tensor& ref : batch.tensors) {
      const Request& request = *running_[ref.decision].request;
      const Member& member = request.members[ref.member];
      TensorTrace tensor{member.name, Name(request.op), BatchRow::kEager, batch.number, member.nbytes()};
      tensor.begun_ns = batch.begin_ns;
      tensor.reduced_ns = batch.end_ns;
      note(tensor, running_[ref.decision]);
    }
  }
  noted_.clear();
  for (size_t i = 0; i < running_.size(); ++i) {  // what has no data, or was refused
    const Request& request = *running_[i].request;
    const bool failed = !running_[i].decision->mismatch.empty();
    if (!failed && !request.members.empty()) continue;
    TensorTrace tensor{request.name, Name(request.op)};
    tensor.failed = failed;
    note(tensor, running_[i]);
  }
  if (tracer_.mark_cycles()) trace.Mark("cycle", round.known_ns);
}

// What will never be done.
void Scheduler::NotePending(Trace& trace) {
  const int64_t now_ns = NowNs();
  const auto note = [&](const std::string& name, const Request& request, int64_t queued_ns) {
    TensorTrace tensor{name, Name(request.op)};
    tensor.queued_ns = queued_ns > 0 ? queued_ns : now_ns;
    tensor.done_ns = now_ns;
    tensor.failed = true;
    trace.Tensor(tensor);
  };
  MutexLock lock(mutex_);
  for (const auto& [name, submission] : pending_) note(name, *submission.request, submission.queued_ns);
  known_.ForEach([&](const Cache<Known>::Entry& entry) {
    const Known& known = entry.value;
    if (known.pending.handle != nullptr) note(entry.name, *known.request, known.pending.queued_ns);
  });
}

// Sends what this rank has left, or collects that of the others.
void Scheduler::EndTimeline(Clock::duration patience) {
  tracer_.Finish();
  if (!IsCoordinator()) return;
  const auto deadline = Clock::now() + patience;
  while (!tracer_.all_ended() && Clock::now() < deadline) {
    for (int rank = 1; rank < options_.size; ++rank) {
      if (exchange_->HasLeft(rank) || exchange_->lost_peer() == rank) tracer_.Gone(rank);
    }
    exchange_->Poll(std::min(deadline, Clock::now() + std::chrono::milliseconds(20)));
    while (std::optional<Frame> frame = exchange_->Next()) {
      if (frame->kind == FrameKind::kTrace) tracer_.OnFrame(frame->peer, frame->payload);
    }
  }
  tracer_.CloseFile();
}

}  // namespace hvd
