#include "scheduler/scheduler.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/log.h"
#include "transport/wire.h"

namespace hvd {
namespace {

constexpr auto kStallCheckEvery = std::chrono::milliseconds(250);
constexpr auto kIdle = std::chrono::seconds(60);
// How long a dying or closing rank tries to tell the others why.
constexpr auto kLastWords = std::chrono::milliseconds(500);

std::string SecondsText(Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const Topology& topology,
                     std::unique_ptr<Exchange> exchange, std::unique_ptr<Arena> arena, DataLinks links)
    : options_(options),
      topology_(topology),
      exchange_(std::move(exchange)),
      arena_(std::move(arena)),
      collectives_(
          topology, *arena_, std::move(links.eager), [this](int awaited_rank) { return Tick(awaited_rank); },
          options.collectives),
      plan_links_(std::move(links.plan)),
      negotiator_(options.size, options.fusion_nbytes),
      next_stall_check_(Clock::now() + kStallCheckEvery),
      death_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      pid_(::getpid()) {
  // Signals are for the threads of the program.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Scheduler::~Scheduler() { Close(); }

Status Scheduler::Submit(Submission submission) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok()) return dead_;
    if (close_) return Status(Code::kShutdown, "the Group is closed");
    const std::string name = submission.request.name;
    if (!pending_.emplace(name, std::move(submission)).second) {
      return Status(Code::kInvalid,
                    "'" + name + "' was submitted before and is not done yet; a name can be pending once");
    }
    submitted_.push_back(name);
  }
  exchange_->Wake();
  return Status::Ok();
}

void Scheduler::AddSegment(uint32_t number, std::shared_ptr<Segment> segment) {
  MutexLock lock(mutex_);
  new_segments_.emplace_back(number, std::move(segment));
}

void Scheduler::Abort(const std::string& reason) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok() || close_) return;
    abort_ = true;
    abort_reason_ = reason;
  }
  exchange_->Wake();
}

void Scheduler::Close() {
  if (::getpid() != pid_) {  // forked: the thread, and who holds the mutexes, is in the parent
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));  // can only be leaked
    return;
  }
  MutexLock closing(close_mutex_);
  {
    MutexLock lock(mutex_);
    close_ = true;
  }
  exchange_->Wake();
  if (thread_.joinable()) thread_.join();
}

Status Scheduler::status() const {
  MutexLock lock(mutex_);
  return dead_;
}

void Scheduler::Run() {
  ::pthread_setname_np(::pthread_self(), "hvd");
  if (Status status = RunUntilClosed(); !status.ok()) return Die(status, true);
  exchange_->PostAll(FrameKind::kBye, {});
  exchange_->Linger(Clock::now() + kLastWords);
  Die(Status(Code::kShutdown, "the Group is closed"), false);
}

Status Scheduler::RunUntilClosed() {
  for (;;) {
    {
      MutexLock lock(mutex_);
      // Before close_: the peers must hear the reason also when the Group is closed right after.
      if (abort_) return Status(Code::kAborted, abort_reason_);
      if (close_) return Status::Ok();
    }
    HVD_RETURN_IF_ERROR(Step());
  }
}

// One turn: wait for news, announce, decide, run what was decided.
Status Scheduler::Step() {
  const auto patience = negotiator_.idle() ? Clock::duration(kIdle) : Clock::duration(kStallCheckEvery);
  exchange_->Poll(HasSubmissions() ? Clock::now() : Clock::now() + patience);
  HVD_RETURN_IF_ERROR(TakeSubmissions());
  HVD_RETURN_IF_ERROR(HandleFrames());
  Decide();
  while (!rounds_.empty()) {
    const Round round = std::move(rounds_.front());
    rounds_.pop_front();
    HVD_RETURN_IF_ERROR(Execute(round));
  }
  HVD_RETURN_IF_ERROR(CheckPeers());
  return CheckStalls();
}

// What was submitted while a batch ran: Tick() may have taken its Wake().
bool Scheduler::HasSubmissions() {
  MutexLock lock(mutex_);
  return !submitted_.empty();
}

Status Scheduler::TakeSubmissions() {
  std::vector<Request> requests;
  std::vector<std::pair<uint32_t, std::shared_ptr<Segment>>> segments;
  {
    MutexLock lock(mutex_);
    if (abort_) return Status(Code::kAborted, abort_reason_);
    for (const std::string& name : submitted_) requests.push_back(pending_.at(name).request);
    submitted_.clear();
    segments.swap(new_segments_);
  }
  for (auto& [number, segment] : segments) {
    Writer payload;
    payload.Put(number);
    payload.Put(static_cast<uint64_t>(segment->nbytes()));
    exchange_->PostHost(FrameKind::kSegment, payload.Take(), segment->fd());
    HVD_RETURN_IF_ERROR(arena_->AddSegment(topology_.local_rank, number, std::move(segment)));
  }
  if (requests.empty()) return Status::Ok();
  if (!IsCoordinator()) {
    exchange_->Post(0, FrameKind::kAnnounce, Serialize(requests));
    return Status::Ok();
  }
  for (Request& request : requests) negotiator_.Announce(0, std::move(request), Clock::now());
  return Status::Ok();
}

Status Scheduler::HandleFrames() {
  while (std::optional<Frame> frame = exchange_->Next()) {
    const std::string from = "rank " + std::to_string(frame->peer);
    const bool from_coordinator = frame->peer == 0;
    if ((frame->kind == FrameKind::kAnnounce && !IsCoordinator()) ||
        (frame->kind == FrameKind::kDecide && !from_coordinator)) {
      return Status(Code::kPeerLost, from + " sent what only goes to or comes from rank 0");
    }
    switch (frame->kind) {
      case FrameKind::kAnnounce: {
        auto requests = ParseRequests(frame->payload);
        if (!requests.ok()) return requests.status().Prepend(from);
        for (Request& request : requests.value())
          negotiator_.Announce(frame->peer, std::move(request), Clock::now());
        break;
      }
      case FrameKind::kDecide: {
        auto round = ParseRound(frame->payload);
        if (!round.ok()) return round.status().Prepend(from);
        rounds_.push_back(std::move(round).value());
        break;
      }
      case FrameKind::kSegment: {
        Reader in(frame->payload);
        const auto number = in.Get<uint32_t>();
        const auto nbytes = in.Get<uint64_t>();
        auto segment = Segment::Map(std::move(frame->fd), nbytes);
        if (!segment.ok()) return segment.status().Prepend(from);
        HVD_RETURN_IF_ERROR(
            arena_->AddSegment(topology_.LocalRankOf(frame->peer), number, std::move(segment).value()));
        break;
      }
      case FrameKind::kAbort: {
        Reader in(frame->payload);
        const auto code = static_cast<Code>(in.Get<uint8_t>());
        return Status(code == Code::kOk ? Code::kAborted : code, in.GetString());
      }
      case FrameKind::kBye:
      case FrameKind::kBeat:
        break;
    }
  }
  return Status::Ok();
}

void Scheduler::Decide() {
  if (!IsCoordinator()) return;
  Round round = negotiator_.Decide();
  if (round.decisions.empty()) return;
  exchange_->PostAll(FrameKind::kDecide, Serialize(round));
  rounds_.push_back(std::move(round));
}

// Called while a step of the arena is awaited: frames move on, and a lost peer or an abort ends the wait.
Status Scheduler::Tick(int awaited_rank) {
  exchange_->Poll(Clock::now());
  HVD_RETURN_IF_ERROR(HandleFrames());
  {
    MutexLock lock(mutex_);
    if (abort_) return Status(Code::kAborted, abort_reason_);
    if (close_)
      return Status(Code::kShutdown,
                    "rank " + std::to_string(options_.rank) + " closed the Group during " + doing_);
  }
  if (const Status& lost = exchange_->lost(); !lost.ok()) {
    return Status(lost.code(), std::string(lost.text()) + " (in " + doing_ + ")");
  }
  if (exchange_->HasLeft(awaited_rank)) {
    return Status(Code::kShutdown,
                  "rank " + std::to_string(awaited_rank) + " closed the Group during " + doing_);
  }
  return Status::Ok();
}

Status Scheduler::CheckPeers() {
  if (const Status& lost = exchange_->lost(); !lost.ok()) {
    const std::string waiting = PendingName();
    return Status(lost.code(),
                  std::string(lost.text()) + (waiting.empty() ? "" : " (while '" + waiting + "' waited)"));
  }
  if (!IsCoordinator()) {
    const int leaver = exchange_->LeftOnTheWayTo(0);
    if (leaver < 0) return Status::Ok();
    const std::string waiting = PendingName();
    if (waiting.empty()) return Status::Ok();
    return Status(Code::kShutdown,
                  "rank " + std::to_string(leaver) + " closed the Group while '" + waiting + "' waited");
  }
  for (int peer = 1; peer < options_.size; ++peer) {
    const int leaver = exchange_->LeftOnTheWayTo(peer);
    if (leaver < 0) continue;
    if (const auto name = negotiator_.WaitsFor(peer)) {
      return Status(Code::kShutdown, "rank " + std::to_string(leaver) +
                                         " closed the Group without submitting '" + *name + "'");
    }
  }
  return Status::Ok();
}

Status Scheduler::CheckStalls() {
  const auto now = Clock::now();
  if (!IsCoordinator() || now < next_stall_check_) return Status::Ok();
  next_stall_check_ = now + kStallCheckEvery;
  const auto waits = negotiator_.Waits();
  std::unordered_map<std::string, Clock::time_point> warned;
  for (const auto& waiting : waits) {
    const auto age = now - waiting.since;
    if (options_.stall_shutdown > Clock::duration::zero() && age > options_.stall_shutdown) {
      return Status(Code::kTimeout,
                    negotiator_.Describe(waiting) + " for " + SecondsText(age) + " (stall_shutdown_s)");
    }
    if (age < options_.stall_warn) continue;
    const auto before = stall_warned_.find(waiting.name);
    const bool told = before != stall_warned_.end() && before->second == waiting.since;
    if (!told)
      Log(Level::kWarning, negotiator_.Describe(waiting) + " for " + SecondsText(age) + " (stall_warn_s)");
    warned[waiting.name] = waiting.since;
  }
  stall_warned_ = std::move(warned);
  return Status::Ok();
}

std::string Scheduler::PendingName() {
  MutexLock lock(mutex_);
  return pending_.empty() ? std::string() : pending_.begin()->first;
}

Status Scheduler::Resolve(const Round& round, std::vector<Submission*>* submissions) {
  const Status broken(Code::kPeerLost, "rank 0 decided about what rank " + std::to_string(options_.rank) +
                                           " has not submitted");
  {
    // References into the map stay valid; an entry goes only in Execute and Die, on this thread.
    MutexLock lock(mutex_);
    for (const Decision& decision : round.decisions) {
      const auto found = pending_.find(decision.name);
      if (found == pending_.end()) return broken;
      submissions->push_back(&found->second);
    }
  }
  for (const auto& batch : round.batches) {
    if (batch.empty()) return broken;
    for (const TensorRef& tensor : batch) {
      if (tensor.decision >= submissions->size()) return broken;
      const Decision& decision = round.decisions[tensor.decision];
      const Request& request = (*submissions)[tensor.decision]->request;
      if (tensor.member >= request.members.size()) return broken;
      if ((request.op == Op::kAllreduce || request.op == Op::kPlan) &&
          decision.places.size() != request.members.size())
        return broken;
      if (request.op == Op::kAllgather &&
          (decision.rows.size() != request.members.size() ||
           decision.rows[tensor.member].size() != static_cast<size_t>(options_.size)))
        return broken;
    }
  }
  return Status::Ok();
}

Status Scheduler::Execute(const Round& round) {
  std::vector<Submission*> submissions;
  HVD_RETURN_IF_ERROR(Resolve(round, &submissions));
  for (const auto& batch : round.batches) {
    const auto begin = Clock::now();
    HVD_RETURN_IF_ERROR(RunBatch(round, submissions, batch));
    counters_.work_ns += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
    ++counters_.fused_batches;
  }
  for (const Decision& decision : round.decisions) {
    std::shared_ptr<Handle> handle;
    {
      MutexLock lock(mutex_);
      const auto found = pending_.find(decision.name);
      handle = std::move(found->second.handle);
      pending_.erase(found);
    }
    ++counters_.collectives;
    handle->Complete(decision.mismatch.empty() ? Status::Ok() : Status(Code::kMismatch, decision.mismatch));
  }
  return Status::Ok();
}

Status Scheduler::RunBatch(const Round& round, const std::vector<Submission*>& submissions,
                           const std::vector<TensorRef>& batch) {
  const TensorRef& first = batch.front();
  Submission& submission = *submissions[first.decision];
  const Request& request = submission.request;
  const Member& member = request.members[first.member];
  doing_ = std::string(Name(request.op)) + " '" + member.name + "'";
  for (const TensorRef& tensor : batch) {
    counters_.nbytes += submissions[tensor.decision]->request.members[tensor.member].nbytes();
  }
  switch (request.op) {
    case Op::kAllreduce:
      return RunAllreduce(round, submissions, batch);
    case Op::kAllgather:
      return RunAllgather(submission, first.member, round.decisions[first.decision].rows[first.member]);
    case Op::kBroadcast: {
      const Buffer& buffer = submission.buffers[first.member];
      return collectives_.Broadcast(request.root, buffer.in, buffer.out, member.nbytes());
    }
    case Op::kPlan:
      return RunPlan(submission, round.decisions[first.decision].places[first.member]);
    case Op::kBarrier:
      break;
  }
  return Status::Ok();
}

Status Scheduler::RunAllreduce(const Round& round, const std::vector<Submission*>& submissions,
                               const std::vector<TensorRef>& batch) {
  const TensorRef& front = batch.front();
  const Request& first = submissions[front.decision]->request;
  const DType dtype = first.members[front.member].dtype;
  const Scale scale{first.prescale, first.postscale, first.reduce == ReduceOp::kAverage ? options_.size : 1};
  const bool in_arena = !round.decisions[front.decision].places[front.member].empty();
  std::vector<ArenaPiece> placed;
  std::vector<Piece> pieces;
  for (const TensorRef& tensor : batch) {
    const Submission& submission = *submissions[tensor.decision];
    const Member& member = submission.request.members[tensor.member];
    if (in_arena) {
      const auto& places = round.decisions[tensor.decision].places[tensor.member];
      HVD_RETURN_IF_ERROR(Place(member, places, &placed.emplace_back()));
    } else {
      const Buffer& buffer = submission.buffers[tensor.member];
      pieces.push_back({buffer.in, buffer.out, member.count()});
    }
  }
  return in_arena ? collectives_.AllreduceInPlace(placed, dtype, first.reduce, scale)
                  : collectives_.Allreduce(pieces, dtype, first.reduce, scale);
}

// A peer's segment may still be on its way.
Status Scheduler::AwaitSegment(int rank, const Location& place) {
  const int local = topology_.LocalRankOf(rank);
  const auto give_up = Clock::now() + options_.peer_timeout;
  while (!arena_->HasSegment(local, place.segment)) {
    exchange_->Poll(Clock::now() + kStallCheckEvery);
    HVD_RETURN_IF_ERROR(Tick(rank));
    if (Clock::now() < give_up || arena_->HasSegment(local, place.segment)) continue;
    return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": its memory for " + doing_ +
                                       " did not come for " + SecondsText(options_.peer_timeout) +
                                       " (peer_timeout_s)");
  }
  return Status::Ok();
}

// Where every rank of this host lets the others of a plan find it.
Status Scheduler::RunPlan(Submission& submission, const std::vector<Location>& places) {
  Meeting meeting;
  const int local_size = places.empty() ? 0 : topology_.local_size();
  for (int local = 0; local < local_size; ++local) {
    const int rank = topology_.GlobalRank(local);
    const Location& place = places[static_cast<size_t>(rank)];
    HVD_RETURN_IF_ERROR(AwaitSegment(rank, place));
    meeting.segments.push_back(arena_->SegmentOf(local, place.segment));
    meeting.offsets.push_back(place.offset);
  }
  if (const PeerMemory* peers = arena_->peers(); peers != nullptr) {
    meeting.read = [memory = *peers](int from, std::span<const PeerMemory::Copy> copies) {
      return memory.Read(from, copies);
    };
  }
  meeting.has_cpu_for_each = arena_->has_cpu_for_each();
  meeting.stall_warn = options_.stall_warn;
  meeting.stall_shutdown = options_.stall_shutdown;
  submission.handle->SetMeeting(std::move(meeting));
  return Status::Ok();
}

// Where every rank has the tensor.
Status Scheduler::Place(const Member& member, const std::vector<Location>& places, ArenaPiece* piece) {
  const Status nowhere(Code::kPeerLost,
                       "a rank announced a place outside of its arena for '" + member.name + "'");
  if (places.size() != static_cast<size_t>(options_.size)) return nowhere;
  piece->count = member.count();
  for (int local = 0; local < topology_.local_size(); ++local) {
    const int rank = topology_.GlobalRank(local);
    const Location& place = places[static_cast<size_t>(rank)];
    HVD_RETURN_IF_ERROR(AwaitSegment(rank, place));
    std::byte* at = arena_->At(local, place, member.nbytes());
    if (at == nullptr) return nowhere;
    piece->at.push_back(at);
  }
  return Status::Ok();
}

Status Scheduler::RunAllgather(Submission& submission, uint32_t index, const std::vector<int64_t>& rows) {
  const Member& member = submission.request.members[index];
  size_t row_nbytes = ItemSize(member.dtype);
  for (size_t d = 1; d < member.shape.size(); ++d) row_nbytes *= static_cast<size_t>(member.shape[d]);
  Gathered gathered;
  gathered.dtype = member.dtype;
  gathered.shape = member.shape;
  gathered.shape[0] = 0;
  std::vector<size_t> nbytes;
  for (const int64_t n : rows) {
    gathered.shape[0] += n;
    nbytes.push_back(static_cast<size_t>(n) * row_nbytes);
  }
  const size_t total = static_cast<size_t>(gathered.shape[0]) * row_nbytes;
  gathered.data = std::shared_ptr<std::byte[]>(new (std::nothrow) std::byte[total + 1]);
  if (gathered.data == nullptr) {
    return Status(Code::kAborted, "rank " + std::to_string(options_.rank) + " has no memory for the " +
                                      std::to_string(total) + " bytes of " + doing_);
  }
  HVD_RETURN_IF_ERROR(collectives_.Gather(submission.buffers[index].in, gathered.data.get(), nbytes));
  auto& results = submission.handle->results();
  results.resize(submission.request.members.size());
  results[index] = std::move(gathered);
  return Status::Ok();
}

void Scheduler::Die(Status status, bool tell_peers) {
  arena_->SetDead();  // before anything pending is given back
  if (tell_peers) {
    Writer payload;
    payload.Put(static_cast<uint8_t>(status.code()));
    payload.PutString(status.text());
    exchange_->PostAll(FrameKind::kAbort, payload.Take());
  }
  std::unordered_map<std::string, Submission> pending;
  {
    MutexLock lock(mutex_);
    dead_ = status;
    pending.swap(pending_);
    submitted_.clear();
    new_segments_.clear();
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(death_.get(), &one, sizeof one);
  for (auto& [name, submission] : pending) submission.handle->Complete(status);
  if (tell_peers) exchange_->Linger(Clock::now() + kLastWords);
}

}  // namespace hvd
