// What comes in and goes out: submissions, announcements, decisions, frames.
#include <algorithm>

#include "scheduler/scheduler.h"
#include "transport/wire.h"

namespace hvd {
namespace {

// In rank 0's mailbox a round is its number of ids and then these, or this: the round comes as a frame.
constexpr uint32_t kFrame = ~0u;
constexpr size_t kMostIds = 1000;  // a longer round comes as a frame
// How often it is looked for segments without tensors.
constexpr auto kReleaseEvery = std::chrono::milliseconds(100);

Status Broken(int rank, const char* what) {
  return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": it sent a broken " + what);
}

}  // namespace

Status Scheduler::TakeSubmissions() {
  if (!news_.load(std::memory_order_relaxed) && unannounced_.empty()) return Status::Ok();
  news_.store(false, std::memory_order_seq_cst);
  std::vector<Announcement> announcements;
  std::vector<std::pair<uint32_t, std::shared_ptr<Segment>>> segments;
  std::vector<PhaseNews> phases;
  {
    MutexLock lock(mutex_);
    HVD_RETURN_IF_ERROR(kill_);
    if (unannounced_.empty()) {
      unannounced_.swap(submitted_ids_);
    } else {
      unannounced_.insert(unannounced_.end(), submitted_ids_.begin(), submitted_ids_.end());
      submitted_ids_.clear();
    }
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
  }
  // A join must not come before what was submitted before it.
  if (mailboxes_ == nullptr || !announcements.empty()) {
    for (const CacheId id : unannounced_) announcements.push_back({id, {}});
    unannounced_.clear();
  }
  if (!announcements.empty()) exchange_->Post(0, FrameKind::kAnnounce, Serialize(announcements));
  return Status::Ok();
}

// The others may still have a segment open when this rank lets it go, but no collective is in it: those of
// its tensors are done.
void Scheduler::ReleaseSegments() {
  const auto now = Clock::now();
  if (now < next_release_) return;
  next_release_ = now + kReleaseEvery;
  for (const uint32_t number : arena_->UnusedSegments()) {
    Writer payload;
    payload.Put(number);
    exchange_->PostHost(FrameKind::kRelease, payload.Take());
    arena_->RemoveSegment(topology_.local_rank, number);
  }
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
    const auto first = words_.begin() + static_cast<ptrdiff_t>(at + 1);
    rounds_.emplace_back().ids.assign(first, first + count);
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
        HVD_RETURN_IF_ERROR(ReadMailboxes());  // it has written there before it sent this
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
      case FrameKind::kRelease: {
        Reader in(frame->payload);
        const auto number = in.Get<uint32_t>();
        if (!topology_.SameHost(frame->peer) || !in.ok() ||
            !arena_->RemoveSegment(topology_.LocalRankOf(frame->peer), number))
          return Broken(frame->peer, "release");
        break;
      }
      case FrameKind::kAbort:
        return Exchange::ReasonOf(frame->payload);
      case FrameKind::kPhase: {
        Reader in(frame->payload);
        PhaseNews news{in.Get<uint8_t>() != 0, {}, in.Get<double>()};
        news.name = in.GetString();
        if (!in.ok()) return Broken(frame->peer, "phase");
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
  if (round.in_full.empty() && round.ids.size() <= kMostIds) {
    words[0] = static_cast<uint32_t>(round.ids.size());
    words.insert(words.end(), round.ids.begin(), round.ids.end());
  } else {
    exchange_->PostAll(FrameKind::kDecide, Serialize(round));
  }
  if (const auto written = mailboxes_->Write(words); !written.ok()) return written.status();
  WakeSleepers();
  return Status::Ok();
}

void Scheduler::TellPhase(const PhaseNews& news) {
  long_phases_.Hear(options_.rank, news, Clock::now());
  Writer payload;
  payload.Put(static_cast<uint8_t>(news.begins));
  payload.Put(news.timeout_s);
  payload.PutString(news.name);
  exchange_->PostAll(FrameKind::kPhase, payload.Take());
}

}  // namespace hvd
