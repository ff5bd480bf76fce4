// What a turn does, and how a round that was decided is run.
#include <algorithm>
#include <new>
#include <utility>

#include "scheduler/scheduler.h"

namespace hvd {
namespace {

// While calls come one after another, frames (an abort) wait no longer than this.
constexpr auto kPollEvery = std::chrono::milliseconds(1);
// A signal that comes within a batch waits so long for its end before it ends the Group.
constexpr auto kBatchAfterSignal = std::chrono::milliseconds(100);

// Whether there can be a tensor of so many rows of `like`, together with what *nbytes counts already.
bool AddRows(const std::vector<int64_t>& rows, const Member& like, int64_t* nbytes) {
  int64_t row = static_cast<int64_t>(ItemSize(like.dtype));
  for (size_t d = 1; d < like.shape.size(); ++d) {
    if (__builtin_mul_overflow(row, like.shape[d], &row)) return false;
  }
  for (const int64_t n : rows) {
    int64_t part = 0;
    if (n < 0 || __builtin_mul_overflow(n, row, &part) || __builtin_add_overflow(*nbytes, part, nbytes))
      return false;
  }
  return true;
}

// Whether a decision in full has a place and a number of rows for everything that the request asks for.
bool Fits(const Decision& decision, const Request& request, int rank, int size) {
  const auto me = static_cast<size_t>(rank), ranks = static_cast<size_t>(size);
  const size_t members = request.members.size();
  if ((request.op == Op::kAllreduce || request.op == Op::kPlan) && decision.places.size() != members)
    return false;
  for (const auto& places : decision.places) {
    if (!places.empty() && places.size() != ranks) return false;
  }
  if (request.op == Op::kJoin) return decision.rows.size() == 1 && decision.rows[0].size() == 1;
  if (!RowsMayDiffer(request.op)) return true;
  if (decision.rows.size() != (request.op == Op::kAllgather ? members : ranks)) return false;
  int64_t of_all_ranks = 0;  // of an alltoall
  for (size_t i = 0; i < decision.rows.size(); ++i) {
    const auto& rows = decision.rows[i];
    const Member& member = request.members[request.op == Op::kAllgather ? i : 0];
    if (rows.size() != ranks || member.shape.empty()) return false;
    int64_t of_one = 0;
    if (!AddRows(rows, member, request.op == Op::kAllgather ? &of_one : &of_all_ranks)) return false;
    if (request.op == Op::kAllgather && rows[me] != member.shape[0]) return false;
  }
  return request.op == Op::kAllgather || decision.rows[me] == request.splits;
}

}  // namespace

Result<bool> Scheduler::Turn(bool poll) {
  try {
    return LookAtEverything(poll);
  } catch (const std::bad_alloc&) {
    return Status(Code::kAborted,
                  "rank " + std::to_string(options_.rank) + " ran out of memory (in " + Doing() + ")");
  }
}

Result<bool> Scheduler::LookAtEverything(bool poll) {
  const auto before = counters_.collectives.load(std::memory_order_relaxed);
  if (poll) {
    tracer_.Step();
    exchange_->Poll(Clock::now());
    next_poll_ = Clock::now() + kPollEvery;
    HVD_RETURN_IF_ERROR(HandleFrames());
  }
  HVD_RETURN_IF_ERROR(TakeSubmissions());
  HVD_RETURN_IF_ERROR(ReadMailboxes());
  HVD_RETURN_IF_ERROR(Decide());
  for (;;) {
    HVD_RETURN_IF_ERROR(ReadRounds());
    if (rounds_.empty()) break;
    Round round = std::move(rounds_.front());
    rounds_.pop_front();
    if (tracer_.trace() != nullptr) {
      for (Round& known : rounds_) known.known_ns = known.known_ns == 0 ? NowNs() : known.known_ns;
      round.known_ns = round.known_ns == 0 ? NowNs() : round.known_ns;
    }
    HVD_RETURN_IF_ERROR(Execute(round));
  }
  // After the rounds: a peer may have left or died after it had a part in them.
  if (poll) {
    HVD_RETURN_IF_ERROR(CheckPeers());
    HVD_RETURN_IF_ERROR(CheckStalls());
    ReleaseSegments();
  }
  return counters_.collectives.load(std::memory_order_relaxed) != before;
}

Status Scheduler::Resolve(const Round& round) {
  const auto broken = [] { return Status(Code::kPeerLost, "lost rank 0: it sent a broken decision"); };
  running_.clear();
  tensors_.clear();
  auto in_full = round.in_full.begin();
  // A round that names a submission twice is broken as well.
  const auto run = [&](const Running& running) {
    running_.push_back(running);
    return !std::exchange(running.submission->running, true);
  };
  // What was submitted stays where it is until Complete() or Die(), by this thread.
  MutexLock lock(mutex_);
  for (const CacheId id : round.ids) {
    const auto index = static_cast<uint32_t>(running_.size());
    if (id != kNoId) {
      auto* entry = known_.Find(id);
      if (entry == nullptr || !entry->value.pending.active()) return broken();
      Known& known = entry->value;
      if (!run({&known.pending, known.request.get(), &known.decision, &known, id})) return broken();
      if (known.tensor) {
        tensors_.push_back(*known.tensor);
        tensors_.back().decision = index;
      } else {
        AppendTensors(*known.request, known.decision, index, &tensors_);
      }
      continue;
    }
    const Decision& decision = *in_full++;
    bool is_new = false;
    if (const auto found = pending_.find(decision.name); found != pending_.end()) {
      is_new = run({&found->second, found->second.request.get(), &decision, nullptr, kNoId});
    } else if (auto* entry = known_.Find(decision.name); entry != nullptr && entry->value.pending.active()) {
      // By number here, in full elsewhere.
      Known& known = entry->value;
      is_new = run({&known.pending, known.request.get(), &decision, &known, kNoId});
    } else if (decision.stand_in) {
      Submission* const made = MakeStandIn(decision);
      is_new = run({made, made->request.get(), &decision, nullptr, kNoId});
    }
    if (!is_new) return broken();
    const Request& request = *running_.back().request;
    if (decision.mismatch.empty() && !Fits(decision, request, options_.rank, options_.size)) return broken();
    if (request.op == Op::kJoin && decision.mismatch.empty())
      running_.back().submission->handle->results().push_back({nullptr, {}, {}, decision.rows[0]});
    AppendTensors(request, decision, index, &tensors_);
  }
  return Status::Ok();
}

Submission* Scheduler::MakeStandIn(const Decision& decision) {
  auto& [submission, memory] = stand_ins_.emplace_back();
  submission.request = std::make_shared<const Request>(*decision.stand_in);
  submission.handle = std::make_shared<Handle>(submission.request);
  constexpr size_t kAlign = 64;
  const bool runs = decision.mismatch.empty();
  std::vector<size_t> begins = {0};  // of in and out, member after member
  for (const Member& member : submission.request->members) {
    const size_t nbytes = runs ? (member.nbytes() + kAlign - 1) / kAlign * kAlign : 0;
    begins.push_back(begins.back() + nbytes);
    begins.push_back(begins.back() + nbytes);
  }
  memory.resize(begins.back());
  for (size_t m = 0; m < submission.request->members.size(); ++m)
    submission.buffers.push_back({memory.data() + begins[2 * m], memory.data() + begins[2 * m + 1]});
  return &submission;
}

Status Scheduler::Execute(const Round& round) {
  HVD_RETURN_IF_ERROR(Resolve(round));
  const Batches batches = Fuse(tensors_, fusion_nbytes_);
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto begin = Clock::now();
    if (begin >= next_poll_) {  // long rounds must not look like silence
      exchange_->Poll(begin);
      HVD_RETURN_IF_ERROR(HandleFrames());
      next_poll_ = begin + kPollEvery;
    }
    interruptible_at_ = begin + kBatchAfterSignal;
    Trace* const trace = tracer_.trace();
    arena_->ShowPhases(trace == nullptr ? nullptr : &phases_);
    HVD_RETURN_IF_ERROR(RunBatch(batches[i]));
    if (trace != nullptr) NoteBatch(*trace, batches[i], ToNs(begin));
    counters_.work_ns += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
    ++counters_.fused_batches;
  }
  doing_ = nullptr;
  if (Trace* trace = tracer_.trace()) NoteRound(*trace, round);
  Complete();
  return Status::Ok();
}

// Remembers what was agreed on, then tells who waits.
void Scheduler::Complete() {
  std::vector<std::pair<size_t, Status>> mismatches;
  {
    MutexLock lock(mutex_);
    for (const Running& running : running_) {
      Submission& submission = *running.submission;
      submission.running = false;
      done_.push_back(std::move(submission.handle));
      if (running.id != kNoId) {
        submission.buffers.clear();
        known_.Touch(running.id);
        continue;
      }
      const Decision& decision = *running.decision;
      const auto request = running.known != nullptr ? running.known->request : submission.request;
      if (!decision.mismatch.empty())
        mismatches.emplace_back(done_.size() - 1, Status(Code::kMismatch, decision.mismatch + options_.note));
      submission.buffers.clear();
      if (running.known == nullptr) pending_.erase(decision.name);
      if (IsRemembered(request->op, decision)) known_.Add(decision.name, Known(request, decision));
    }
    known_.Trim([this](Cache<Known>::Entry& entry) { Forget(entry); });
    num_pending_.fetch_sub(static_cast<int>(running_.size() - stand_ins_.size()), std::memory_order_seq_cst);
  }
  running_.clear();
  stand_ins_.clear();
  counters_.collectives += done_.size();
  for (const auto& [index, status] : mismatches) done_[index]->Complete(status);
  for (const auto& handle : done_) handle->Complete(Status::Ok());
  done_.clear();
}

// What was submitted again by a number that is now forgotten is announced in full, as the coordinator
// expects.
void Scheduler::Forget(Cache<Known>::Entry& entry) {
  Submission& submission = entry.value.pending;
  if (submission.handle == nullptr) return;
  submission.request = entry.value.request;
  submitted_.push_back(entry.name);
  pending_.emplace(entry.name, std::move(submission));
  news_.store(true, std::memory_order_seq_cst);
}

}  // namespace hvd
