// What a turn does: takes news from all sides, decides, and runs what was decided.
#include <algorithm>
#include <new>

#include "base/log.h"
#include "scheduler/scheduler.h"
#include "transport/wire.h"

namespace hvd {
namespace {

constexpr auto kStallCheckEvery = std::chrono::milliseconds(250);
// While calls come one after another, frames (an abort) wait no longer than this.
constexpr auto kPollEvery = std::chrono::milliseconds(1);
// A signal that comes within a batch waits so long for its end before it ends the Group.
constexpr auto kBatchAfterSignal = std::chrono::milliseconds(100);

// In rank 0's mailbox a round is its number of ids and then these, or this: the round comes as a frame.
constexpr uint32_t kFrame = ~0u;
constexpr size_t kMostIds = 1000;  // a longer round comes as a frame

std::string SecondsText(Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

Status Broken(int rank, const char* what) {
  return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": it sent a broken " + what);
}

}  // namespace

Result<bool> Scheduler::Turn(bool poll) {
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
  }
  return counters_.collectives.load(std::memory_order_relaxed) != before;
}

// -- news -------------------------------------------------------------------------------------------------

Status Scheduler::TakeSubmissions() {
  if (!news_.load(std::memory_order_relaxed) && unannounced_.empty()) return Status::Ok();
  news_.store(false, std::memory_order_seq_cst);
  std::vector<Announcement> announcements;
  std::vector<std::pair<uint32_t, std::shared_ptr<Segment>>> segments;
  std::vector<PhaseNews> phases;
  {
    MutexLock lock(mutex_);
    if (abort_) return Status(Code::kAborted, abort_reason_);
    for (const CacheId id : submitted_ids_) {
      auto* entry = known_.Find(id);
      if (entry == nullptr) continue;  // forgotten meanwhile, and in submitted_
      entry->value.announced = true;
      unannounced_.push_back(id);
    }
    submitted_ids_.clear();
    for (const std::string& name : submitted_) announcements.push_back({kNoId, *pending_.at(name).request});
    submitted_.clear();
    segments.swap(new_segments_);
    phases.swap(phase_news_);
  }
  for (const PhaseNews& news : phases) TellPhase(news);
  for (auto& [number, segment] : segments) {
    Writer payload;
    payload.Put(number);
    payload.Put(static_cast<uint64_t>(segment->nbytes()));
    exchange_->PostHost(FrameKind::kSegment, payload.Take(), segment->fd());
    HVD_RETURN_IF_ERROR(arena_->AddSegment(topology_.local_rank, number, std::move(segment)));
  }
  const auto now = Clock::now();
  if (IsCoordinator()) {
    for (const CacheId id : unannounced_) negotiator_.Announce(0, id, now);
    unannounced_.clear();
    for (Announcement& announcement : announcements)
      negotiator_.Announce(0, std::move(announcement.request), now);
    return Status::Ok();
  }
  if (mailboxes_ != nullptr) {
    HVD_RETURN_IF_ERROR(AnnounceIds());
  } else {
    for (const CacheId id : unannounced_) announcements.push_back({id, {}});
    unannounced_.clear();
  }
  if (!announcements.empty()) exchange_->Post(0, FrameKind::kAnnounce, Serialize(announcements));
  return Status::Ok();
}

// As many as fit; the others in a later turn.
Status Scheduler::AnnounceIds() {
  if (unannounced_.empty()) return Status::Ok();
  auto room = mailboxes_->Room();
  if (!room.ok()) return room.status();
  const size_t count = std::min(room.value(), unannounced_.size());
  if (count == 0) return Status::Ok();
  auto written = mailboxes_->Write(std::span(unannounced_).first(count));
  if (!written.ok()) return written.status();
  unannounced_.erase(unannounced_.begin(), unannounced_.begin() + static_cast<ptrdiff_t>(count));
  WakeSleepers();
  return Status::Ok();
}

// Whoever reads this rank's mailbox and sleeps: a frame wakes it.
void Scheduler::WakeSleepers() {
  for (const int rank : mailboxes_->partners()) {
    if (mailboxes_->IsAsleep(rank)) exchange_->Post(rank, FrameKind::kBeat, {});
  }
}

Status Scheduler::ReadMailboxes() {
  if (mailboxes_ == nullptr || !IsCoordinator()) return Status::Ok();
  for (const int rank : mailboxes_->partners()) {
    HVD_RETURN_IF_ERROR(mailboxes_->Read(rank, &words_));
    if (words_.empty()) continue;
    const auto now = Clock::now();
    for (const uint32_t id : words_) {
      if (!negotiator_.Announce(rank, id, now)) return Broken(rank, "announcement");
    }
    words_.clear();
  }
  return Status::Ok();
}

// The rounds that rank 0's mailbox tells about, in its order.
Status Scheduler::ReadRounds() {
  if (mailboxes_ == nullptr || IsCoordinator() || !rounds_.empty()) {
    for (; mailboxes_ == nullptr && !framed_.empty(); framed_.pop_front())
      rounds_.push_back(std::move(framed_.front()));
    return Status::Ok();
  }
  HVD_RETURN_IF_ERROR(mailboxes_->Read(0, &words_));
  size_t at = 0;
  while (at < words_.size()) {
    const uint32_t count = words_[at];
    if (count == kFrame) {
      if (framed_.empty()) {  // it was sent before the word was written
        exchange_->Poll(Clock::now());
        HVD_RETURN_IF_ERROR(HandleFrames());
        if (framed_.empty()) break;
      }
      rounds_.push_back(std::move(framed_.front()));
      framed_.pop_front();
      ++at;
      continue;
    }
    if (count == 0 || count > kMostIds || count > words_.size() - at - 1) return Broken(0, "decision");
    Round& round = rounds_.emplace_back();
    round.decisions.resize(count);
    for (uint32_t i = 0; i < count; ++i) round.decisions[i].id = words_[at + 1 + i];
    at += 1 + count;
  }
  words_.erase(words_.begin(), words_.begin() + static_cast<ptrdiff_t>(at));
  return Status::Ok();
}

Status Scheduler::HandleAnnouncements(const Frame& frame) {
  auto announcements = ParseAnnouncements(frame.payload);
  if (!announcements.ok()) return announcements.status().Prepend("rank " + std::to_string(frame.peer));
  const auto now = Clock::now();
  for (Announcement& announcement : announcements.value()) {
    if (announcement.id == kNoId) {
      negotiator_.Announce(frame.peer, std::move(announcement.request), now);
    } else if (!negotiator_.Announce(frame.peer, announcement.id, now)) {
      return Broken(frame.peer, "announcement");
    }
  }
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
      case FrameKind::kAnnounce:
        HVD_RETURN_IF_ERROR(HandleAnnouncements(*frame));
        break;
      case FrameKind::kDecide: {
        auto round = ParseRound(frame->payload);
        if (!round.ok()) return round.status().Prepend(from);
        fusion_nbytes_ = round.value().fusion_nbytes;
        framed_.push_back(std::move(round).value());
        break;
      }
      case FrameKind::kSegment: {
        Reader in(frame->payload);
        const auto number = in.Get<uint32_t>();
        const auto nbytes = in.Get<uint64_t>();
        if (!topology_.SameHost(frame->peer)) return Broken(frame->peer, "segment");
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
      case FrameKind::kPhase: {
        Reader in(frame->payload);
        PhaseNews news{in.Get<uint8_t>() != 0, {}, in.Get<double>()};
        news.name = in.GetString();
        if (!in.ok() || !IsCoordinator()) return Broken(frame->peer, "phase");
        long_phases_.Hear(frame->peer, news, Clock::now());
        break;
      }
      case FrameKind::kTrace:
        tracer_.OnFrame(frame->peer, frame->payload);
        break;
      case FrameKind::kBye:
      case FrameKind::kBeat:
        break;
    }
  }
  return Status::Ok();
}

// -- decisions --------------------------------------------------------------------------------------------

Status Scheduler::Decide() {
  if (!IsCoordinator() || !negotiator_.has_ready()) return Status::Ok();
  if (mailboxes_ != nullptr) {  // what is decided must be told
    const auto room = mailboxes_->Room();
    if (!room.ok()) return room.status();
    if (room.value() < kMostIds + 1) return Status::Ok();
  }
  Round round = negotiator_.Decide();
  HVD_RETURN_IF_ERROR(TellMailboxes(round));
  rounds_.push_back(std::move(round));
  return Status::Ok();
}

Status Scheduler::TellMailboxes(const Round& round) {
  if (mailboxes_ == nullptr) {
    exchange_->PostAll(FrameKind::kDecide, Serialize(round));
    return Status::Ok();
  }
  std::vector<uint32_t> words{kFrame};
  const bool only_ids =
      round.decisions.size() <= kMostIds && std::all_of(round.decisions.begin(), round.decisions.end(),
                                                        [](const Decision& d) { return d.id != kNoId; });
  if (only_ids) {
    words[0] = static_cast<uint32_t>(round.decisions.size());
    for (const Decision& decision : round.decisions) words.push_back(decision.id);
  } else {
    exchange_->PostAll(FrameKind::kDecide, Serialize(round));
  }
  if (const auto written = mailboxes_->Write(words); !written.ok()) return written.status();
  WakeSleepers();
  return Status::Ok();
}

// -- peers ------------------------------------------------------------------------------------------------

Status Scheduler::Tick(int awaited_rank) {
  tracer_.Step();
  exchange_->Poll(Clock::now());
  HVD_RETURN_IF_ERROR(HandleFrames());
  {
    MutexLock lock(mutex_);
    if (abort_) return Status(Code::kAborted, abort_reason_);
    if (close_)
      return Status(Code::kShutdown,
                    "rank " + std::to_string(options_.rank) + " closed the Group during " + Doing());
  }
  if (const Status& lost = exchange_->lost(); !lost.ok()) {
    return Status(lost.code(), std::string(lost.text()) + " (in " + Doing() + ")");
  }
  if (exchange_->HasLeft(awaited_rank)) {
    return Status(Code::kShutdown,
                  "rank " + std::to_string(awaited_rank) + " closed the Group during " + Doing());
  }
  if (interrupt_ != nullptr && Clock::now() >= interruptible_at_ && (*interrupt_)()) {
    return Status(Code::kAborted,
                  "rank " + std::to_string(options_.rank) + " was interrupted by a signal during " + Doing());
  }
  return Status::Ok();
}

void Scheduler::TellPhase(const PhaseNews& news) {
  if (IsCoordinator()) return long_phases_.Hear(0, news, Clock::now());
  Writer payload;
  payload.Put(static_cast<uint8_t>(news.begins));
  payload.Put(news.timeout_s);
  payload.PutString(news.name);
  exchange_->Post(0, FrameKind::kPhase, payload.Take());
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
  const auto excused_until = long_phases_.ExcusedUntil(now);
  std::unordered_map<std::string, Clock::time_point> warned;
  for (const auto& waiting : waits) {
    const auto age = now - waiting.since;
    const auto unexcused = now - std::max(waiting.since, excused_until);
    if (options_.stall_shutdown > Clock::duration::zero() && unexcused > options_.stall_shutdown) {
      return Status(Code::kTimeout, negotiator_.Describe(waiting) + " for " + SecondsText(age) +
                                        " (stall_shutdown_s)" + long_phases_.Describe(now));
    }
    if (age < options_.stall_warn) continue;
    const auto before = stall_warned_.find(waiting.name);
    const bool told = before != stall_warned_.end() && before->second == waiting.since;
    if (!told)
      Log(Level::kWarning, negotiator_.Describe(waiting) + " for " + SecondsText(age) + " (stall_warn_s)" +
                               long_phases_.Describe(now));
    warned[waiting.name] = waiting.since;
  }
  stall_warned_ = std::move(warned);
  return Status::Ok();
}

std::string Scheduler::PendingName() {
  MutexLock lock(mutex_);
  if (!pending_.empty()) return pending_.begin()->first;
  std::string name;
  known_.ForEach([&](const Cache<Known>::Entry& entry) {
    if (name.empty() && entry.value.pending.handle != nullptr) name = entry.name;
  });
  return name;
}

// -- a round ----------------------------------------------------------------------------------------------

Status Scheduler::Resolve(const Round& round) {
  const Status broken = Broken(0, "decision");
  running_.clear();
  agreed_.clear();
  {
    // What was submitted stays where it is until Complete() or Die(), by this thread.
    MutexLock lock(mutex_);
    for (const Decision& decision : round.decisions) {
      if (decision.id == kNoId) {
        const auto found = pending_.find(decision.name);
        auto* entry = found == pending_.end() ? known_.Find(decision.name) : nullptr;
        if (found != pending_.end()) {
          running_.push_back({&found->second, &decision, nullptr, kNoId});
        } else if (entry != nullptr && entry->value.announced && entry->value.pending.handle != nullptr) {
          // By number here, in full elsewhere.
          running_.push_back({&entry->value.pending, &decision, &entry->value, kNoId});
        } else {
          return broken;
        }
      } else {
        auto* entry = known_.Find(decision.id);
        if (entry == nullptr || !entry->value.announced || entry->value.pending.handle == nullptr)
          return broken;
        running_.push_back({&entry->value.pending, &entry->value.decision, &entry->value, entry->id});
      }
    }
  }
  for (const Running& running : running_) {
    const Request& request =
        running.known != nullptr ? *running.known->request : *running.submission->request;
    agreed_.push_back({&request, running.decision});
    if (running.id != kNoId || !running.decision->mismatch.empty()) continue;
    const Decision& decision = *running.decision;
    const size_t members = request.members.size();
    if ((request.op == Op::kAllreduce || request.op == Op::kPlan) && decision.places.size() != members)
      return broken;
    for (const auto& places : decision.places) {
      if (!places.empty() && places.size() != static_cast<size_t>(options_.size)) return broken;
    }
    if (request.op != Op::kAllgather) continue;
    if (decision.rows.size() != members) return broken;
    for (const auto& rows : decision.rows) {
      if (rows.size() != static_cast<size_t>(options_.size)) return broken;
    }
  }
  return Status::Ok();
}

Status Scheduler::Execute(const Round& round) {
  HVD_RETURN_IF_ERROR(Resolve(round));
  for (const auto& batch : Fuse(agreed_, fusion_nbytes_)) {
    const auto begin = Clock::now();
    if (begin >= next_poll_) {  // long rounds must not look like silence
      exchange_->Poll(begin);
      HVD_RETURN_IF_ERROR(HandleFrames());
      next_poll_ = begin + kPollEvery;
    }
    interruptible_at_ = begin + kBatchAfterSignal;
    Trace* const trace = tracer_.trace();
    arena_->ShowPhases(trace == nullptr ? nullptr : &phases_);
    HVD_RETURN_IF_ERROR(RunBatch(batch));
    if (trace != nullptr) NoteBatch(*trace, batch, ToNs(begin));
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
  std::vector<std::pair<std::shared_ptr<Handle>, Status>> done;
  done.reserve(running_.size());
  {
    MutexLock lock(mutex_);
    for (Running& running : running_) {
      const Decision& decision = *running.decision;
      const std::string& mismatch = decision.mismatch;
      done.emplace_back(std::move(running.submission->handle),
                        mismatch.empty() ? Status::Ok() : Status(Code::kMismatch, mismatch));
      running.submission->handle = nullptr;
      if (running.id != kNoId) {
        known_.Touch(running.id);
        continue;
      }
      auto request = running.known != nullptr ? running.known->request : running.submission->request;
      if (running.known == nullptr) pending_.erase(decision.name);
      if (mismatch.empty()) known_.Add(decision.name, Known{std::move(request), decision, {}, false});
    }
    known_.Trim([this](Cache<Known>::Entry& entry) { Forget(entry); });
    num_pending_.fetch_sub(static_cast<int>(running_.size()), std::memory_order_seq_cst);
  }
  running_.clear();
  agreed_.clear();
  counters_.collectives += done.size();
  for (auto& [handle, status] : done) handle->Complete(std::move(status));
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

std::string Scheduler::Doing() const {
  if (doing_ == nullptr) return "nothing";
  return std::string(Name(doing_in_->op)) + " '" + doing_->name + "'";
}

Status Scheduler::RunBatch(const std::vector<TensorRef>& batch) {
  const TensorRef& first = batch.front();
  const Running& running = running_[first.decision];
  const Request& request = *agreed_[first.decision].request;
  const Member& member = request.members[first.member];
  doing_ = &member;
  doing_in_ = &request;
  uint64_t nbytes = 0;
  for (const TensorRef& tensor : batch)
    nbytes += agreed_[tensor.decision].request->members[tensor.member].nbytes();
  counters_.nbytes += nbytes;
  switch (request.op) {
    case Op::kAllreduce:
      return RunAllreduce(batch);
    case Op::kAllgather:
      return RunAllgather(running, first.member);
    case Op::kBroadcast: {
      const Buffer& buffer = running.submission->buffers[first.member];
      return collectives_.Broadcast(request.root, buffer.in, buffer.out, member.nbytes());
    }
    case Op::kPlan:
      return RunPlan(running, first.member);
    case Op::kBarrier:
      break;
  }
  return Status::Ok();
}

Status Scheduler::RunAllreduce(const std::vector<TensorRef>& batch) {
  const TensorRef& front = batch.front();
  const Request& first = *agreed_[front.decision].request;
  const DType dtype = first.members[front.member].dtype;
  const Scale scale{first.prescale, first.postscale, first.reduce == ReduceOp::kAverage ? options_.size : 1};
  const bool in_arena = !agreed_[front.decision].decision->places[front.member].empty();
  std::vector<ArenaPiece> placed;
  std::vector<Piece> pieces;
  for (const TensorRef& tensor : batch) {
    const Member& member = agreed_[tensor.decision].request->members[tensor.member];
    if (in_arena) {
      const auto& places = agreed_[tensor.decision].decision->places[tensor.member];
      HVD_RETURN_IF_ERROR(Place(member, places, &placed.emplace_back()));
    } else {
      const Buffer& buffer = running_[tensor.decision].submission->buffers[tensor.member];
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
    return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": its memory for " + Doing() +
                                       " did not come for " + SecondsText(options_.peer_timeout) +
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
  running.submission->handle->SetMeeting(std::move(meeting));
  return Status::Ok();
}

// Where every rank of this host has the tensor.
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

Status Scheduler::RunAllgather(const Running& running, uint32_t index) {
  const Member& member = *doing_;
  size_t row_nbytes = ItemSize(member.dtype);
  for (size_t d = 1; d < member.shape.size(); ++d) row_nbytes *= static_cast<size_t>(member.shape[d]);
  Gathered gathered;
  gathered.dtype = member.dtype;
  gathered.shape = member.shape;
  gathered.shape[0] = 0;
  std::vector<size_t> nbytes;
  for (const int64_t n : running.decision->rows[index]) {
    gathered.shape[0] += n;
    nbytes.push_back(static_cast<size_t>(n) * row_nbytes);
  }
  const size_t total = static_cast<size_t>(gathered.shape[0]) * row_nbytes;
  gathered.data = std::shared_ptr<std::byte[]>(new (std::nothrow) std::byte[total + 1]);
  if (gathered.data == nullptr) {
    return Status(Code::kAborted, "rank " + std::to_string(options_.rank) + " has no memory for the " +
                                      std::to_string(total) + " bytes of " + Doing());
  }
  const Submission& submission = *running.submission;
  HVD_RETURN_IF_ERROR(collectives_.Gather(submission.buffers[index].in, gathered.data.get(), nbytes));
  auto& results = submission.handle->results();
  results.resize(doing_in_->members.size());
  results[index] = std::move(gathered);
  return Status::Ok();
}

}  // namespace hvd
