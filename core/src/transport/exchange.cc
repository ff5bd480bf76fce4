#include "transport/exchange.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

#include "transport/wire.h"

namespace hvd {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr int kEventsAtOnce = 64;

// What an epoll event is about: the wake eventfd, or the link or the process of a peer.
constexpr uint64_t kWakeEvent = ~uint64_t{0};
constexpr uint64_t LinkEvent(int peer) { return static_cast<uint64_t>(peer) * 2; }
constexpr uint64_t ProcessEvent(int peer) { return static_cast<uint64_t>(peer) * 2 + 1; }

// proc(5): the state follows the last ')'.
bool IsStopped(int pid) {
  if (pid <= 0) return false;
  std::FILE* file = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r");
  if (file == nullptr) return false;
  char text[512] = {};
  const size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  const char* paren = std::strrchr(text, ')');
  return size > 0 && paren != nullptr && (paren[2] == 'T' || paren[2] == 't');
}

int MillisecondsUntil(Clock::time_point deadline, Clock::time_point now) {
  if (deadline <= now) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
  return static_cast<int>(std::min<int64_t>(left, 60'000));
}

std::string InSeconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

Exchange::Exchange(const Topology& topology, Clock::duration peer_timeout)
    : topology_(topology),
      peer_timeout_(peer_timeout),
      beat_every_(peer_timeout / 10),
      next_beat_(Clock::now() + beat_every_),
      last_poll_(Clock::now()),
      peers_(static_cast<size_t>(topology.size)),
      left_(static_cast<size_t>(topology.size)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!wake_.valid() || !epoll_.valid() || !Watch(wake_.get(), kWakeEvent)) {
    status_ =
        Status(Code::kInvalid, std::string("cannot make an eventfd or epoll set: ") + std::strerror(errno));
  }
}

bool Exchange::Watch(int fd, uint64_t what) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = what;
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Exchange::Add(int peer, std::unique_ptr<Link> link, int peer_pid, std::string where) {
  auto& p = peers_[static_cast<size_t>(peer)] = std::make_unique<Peer>();
  neighbours_.push_back(peer);
  p->link = std::move(link);
  p->pid = peer_pid;
  p->where = std::move(where);
  p->heard = Clock::now();
  if (!Watch(p->link->fd(), LinkEvent(peer))) {
    return Lose(peer, Status(Code::kPeerLost, std::string("cannot watch its link: ") + std::strerror(errno)));
  }
  std::vector<std::pair<int, std::string>> early;
  early.swap(early_);
  for (auto& [next, bytes] : early) Queue(next, std::move(bytes), -1);
  if (peer_pid <= 0 || peer_pid == ::getpid()) return;
  p->process.Reset(static_cast<int>(::syscall(SYS_pidfd_open, peer_pid, 0)));  // an old kernel has none
  if (p->process.valid()) Watch(p->process.get(), ProcessEvent(peer));
}

Exchange::Peer* Exchange::Connected(int peer) const {
  Peer* p = peers_[static_cast<size_t>(peer)].get();
  return p != nullptr && p->state == State::kConnected ? p : nullptr;
}

void Exchange::Post(int peer, FrameKind kind, std::string_view payload) {
  if (peer == topology_.rank) return;
  // A beat is for a neighbour; the scheduler wakes one with it that waits on its wait_fd().
  const int32_t destination = kind == FrameKind::kBeat ? FrameHeader::kNeighbour : peer;
  PostTo(topology_.NextHop(topology_.rank, peer), kind, destination, payload);
}

void Exchange::PostAll(FrameKind kind, std::string_view payload) {
  if (kind == FrameKind::kAbort) {
    knows_abort_ = true;
    if (std::exchange(told_abort_, true)) return;
  }
  for (const int peer : neighbours_) PostTo(peer, kind, FrameHeader::kEveryone, payload);
}

void Exchange::PostHost(FrameKind kind, std::string_view payload, int pass_fd) {
  for (const int peer : neighbours_) {
    if (topology_.SameHost(peer)) PostTo(peer, kind, FrameHeader::kNeighbour, payload, pass_fd);
  }
}

void Exchange::PostTo(int next, FrameKind kind, int32_t destination, std::string_view payload, int pass_fd) {
  const FrameHeader header{static_cast<uint32_t>(payload.size()), kind, topology_.rank, destination};
  Queue(next, header.ToBytes().append(payload), pass_fd);
}

void Exchange::Queue(int next, std::string bytes, int pass_fd) {
  if (peers_[static_cast<size_t>(next)] == nullptr) {
    early_.emplace_back(next, std::move(bytes));
    return;
  }
  Peer* p = Connected(next);
  if (p == nullptr) return;
  p->outgoing.push_back({std::move(bytes), 0, pass_fd});
  Send(next);
}

// On to where the frame has not been: from this host to the others, from another host also to this one.
void Exchange::Flood(std::string_view bytes, int from) {
  if (topology_.local_rank != 0) return;
  for (const int peer : neighbours_) {
    const bool has_it = topology_.SameHost(from) && topology_.SameHost(peer);
    if (peer != from && !has_it) Queue(peer, std::string(bytes), -1);
  }
}

int Exchange::LeftOnTheWayTo(int rank) const {
  for (int at = topology_.rank; at != rank;) {
    at = topology_.NextHop(at, rank);
    if (HasLeft(at)) return at;
  }
  return -1;
}

void Exchange::Poll(Clock::time_point deadline) {
  while (inbox_.empty() && !PollOnce(deadline) && Clock::now() < deadline) {
  }
}

bool Exchange::PollOnce(Clock::time_point deadline) {
  auto now = Clock::now();
  // A process that was stopped itself has heard nothing; that is not the peers' fault.
  if (now - last_poll_ > peer_timeout_ / 2) {
    for (const int peer : neighbours_) peers_[static_cast<size_t>(peer)]->heard = now;
  }
  bool happened = false;
  if (now >= next_beat_) {
    next_beat_ = now + beat_every_;
    for (const int peer : neighbours_) PostTo(peer, FrameKind::kBeat, FrameHeader::kNeighbour, {});
    happened = CheckSilence(now);
  }
  epoll_event events[kEventsAtOnce];
  const int timeout_ms = happened ? 0 : MillisecondsUntil(std::min(deadline, next_beat_), now);
  const int ready = ::epoll_wait(epoll_.get(), events, kEventsAtOnce, timeout_ms);
  last_poll_ = Clock::now();
  for (int i = 0; i < ready; ++i) {
    const uint64_t what = events[i].data.u64;
    if (what == kWakeEvent) {
      uint64_t count = 0;
      happened |= ::read(wake_.get(), &count, sizeof count) > 0;
      continue;
    }
    const int peer = static_cast<int>(what / 2);
    if (what == ProcessEvent(peer)) {
      happened |= LoseEnded(peer);
      continue;
    }
    if ((events[i].events & EPOLLOUT) != 0) Send(peer);
    if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) happened |= Receive(peer);
  }
  return happened;
}

void Exchange::Send(int peer) {
  SendQueued(peer);
  Peer* p = Connected(peer);
  if (p == nullptr || p->wants_to_send == !p->outgoing.empty()) return;
  p->wants_to_send = !p->outgoing.empty();
  epoll_event event{};
  event.events = p->wants_to_send ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = LinkEvent(peer);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, p->link->fd(), &event);
}

void Exchange::SendQueued(int peer) {
  Peer* p = Connected(peer);
  while (p != nullptr && !p->outgoing.empty()) {
    Outgoing& front = p->outgoing.front();
    const auto rest = std::as_bytes(std::span(front.bytes)).subspan(front.sent);
    auto sent = p->link->TrySend(rest, front.pass_fd);
    // What the peer wrote before it went (its reason to abort) is still to be read: Receive() finds the end.
    if (!sent.ok()) return p->outgoing.clear();
    if (sent.value() == 0) return;
    front.pass_fd = -1;
    front.sent += sent.value();
    if (front.sent == front.bytes.size()) p->outgoing.pop_front();
  }
}

bool Exchange::Receive(int peer, bool to_the_end) {
  std::byte bytes[kReadBytes];
  bool happened = false;
  while (Peer* p = Connected(peer)) {
    UniqueFd passed;
    auto received = p->link->TryRecv(bytes, &passed);
    if (!received.ok()) {
      Lose(peer, received.status());
      return true;
    }
    if (received.value() == 0) break;
    if (passed.valid()) p->incoming_fds.push_back(std::move(passed));
    p->heard = Clock::now();
    p->incoming.append(reinterpret_cast<const char*>(bytes), received.value());
    happened |= Parse(peer);
    if (received.value() < sizeof bytes && !to_the_end) break;
  }
  return happened;
}

bool Exchange::Parse(int peer) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  const std::string_view incoming = p.incoming;
  bool happened = false;
  size_t at = 0;
  while (p.state == State::kConnected && incoming.size() - at >= FrameHeader::kBytes) {
    const auto header = FrameHeader::Parse(incoming.substr(at), topology_.size);
    if (!header || !IsPlausible(*header, peer)) {
      Lose(peer, Status(Code::kPeerLost, "it sent a broken frame"));
      return true;
    }
    const size_t nbytes = FrameHeader::kBytes + header->nbytes;
    if (incoming.size() - at < nbytes) break;
    happened |= Take(peer, *header, incoming.substr(at, nbytes));
    at += nbytes;
  }
  p.incoming.erase(0, at);
  return happened;
}

// A frame comes over the neighbour on the way to its origin, and never back: the links form no circle outside
// of a host, and inside of one nothing is passed on.
bool Exchange::IsPlausible(const FrameHeader& header, int from) const {
  const int self = topology_.rank;
  if (header.origin == self || topology_.NextHop(self, header.origin) != from) return false;
  if (header.kind == FrameKind::kSegment && !topology_.SameHost(from)) return false;
  if (header.destination == FrameHeader::kNeighbour) return header.origin == from;
  if (header.destination == FrameHeader::kEveryone || header.destination == self) return true;
  return topology_.local_rank == 0 && topology_.NextHop(self, header.destination) != from;
}

// True if there is something for the caller in it.
bool Exchange::Take(int from, const FrameHeader& header, std::string_view bytes) {
  if (header.destination == FrameHeader::kEveryone) {
    if (header.kind == FrameKind::kAbort && std::exchange(knows_abort_, true)) return false;
    Flood(bytes, from);
  } else if (header.destination >= 0 && header.destination != topology_.rank) {
    Queue(topology_.NextHop(topology_.rank, header.destination), std::string(bytes), -1);
    return false;
  }
  if (header.kind == FrameKind::kBeat) return false;
  if (header.kind == FrameKind::kBye) {
    left_[static_cast<size_t>(header.origin)] = true;
    if (header.origin == from) Disconnect(from, State::kLeft);
    return true;
  }
  if (header.kind == FrameKind::kAbort && heard_abort_.ok())
    heard_abort_ = ReasonOf(bytes.substr(FrameHeader::kBytes));
  Frame frame{header.origin, header.kind, std::string(bytes.substr(FrameHeader::kBytes)), UniqueFd()};
  auto& fds = peers_[static_cast<size_t>(from)]->incoming_fds;
  if (header.kind == FrameKind::kSegment && !fds.empty()) {
    frame.fd = std::move(fds.front());
    fds.pop_front();
  }
  inbox_.push_back(std::move(frame));
  return true;
}

std::string Exchange::AbortPayload(const Status& reason) {
  Writer payload;
  payload.Put(static_cast<uint8_t>(reason.code()));
  payload.PutString(reason.text());
  return payload.Take();
}

Status Exchange::ReasonOf(std::string_view abort_payload) {
  Reader in(abort_payload);
  const auto code = static_cast<Code>(in.Get<uint8_t>());
  return Status(code == Code::kOk || code > Code::kShutdown ? Code::kAborted : code, in.GetString());
}

// Out of the set before it is closed: a forked child of this process may hold the same socket, and then
// closing it alone would leave it there. Not done when the Exchange goes, which such a child may do too.
void Exchange::Disconnect(int peer, State state) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  p.state = state;
  p.outgoing.clear();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, p.link->fd(), nullptr);
  p.link.reset();
  if (!p.process.valid()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, p.process.get(), nullptr);
  p.process.Reset();
}

void Exchange::Lose(int peer, const Status& why) {
  Disconnect(peer, State::kLost);
  if (!lost_.ok() || leaving_) return;
  lost_peer_ = peer;
  const std::string& where = peers_[static_cast<size_t>(peer)]->where;
  lost_ =
      Status(Code::kPeerLost, "lost rank " + std::to_string(peer) +
                                  (where.empty() ? "" : " (" + where + ")") + ": " + std::string(why.text()));
}

// What it said before it ended (goodbye, or why) comes first.
bool Exchange::LoseEnded(int peer) {
  if (Connected(peer) == nullptr) return false;
  Receive(peer, true);
  if (Connected(peer) != nullptr) Lose(peer, Status(Code::kPeerLost, "its process ended"));
  return true;
}

bool Exchange::CheckSilence(Clock::time_point now) {
  bool lost = false;
  for (const int peer : neighbours_) {
    const Peer* p = Connected(peer);
    if (p == nullptr || now - p->heard < peer_timeout_) continue;
    const std::string silent =
        "no byte for " + InSeconds(now - p->heard) + " (peer_timeout_s=" + InSeconds(peer_timeout_) + ")";
    // If it was only kept from its work it reads this, and not just an end that looks like this rank's.
    PostTo(
        peer, FrameKind::kAbort, FrameHeader::kNeighbour,
        AbortPayload(Status(Code::kPeerLost, "rank " + std::to_string(topology_.rank) + " gave up on rank " +
                                                 std::to_string(peer) + ": " + silent + " from it")));
    Lose(peer,
         Status(Code::kPeerLost, std::string(IsStopped(p->pid) ? "its process is stopped; " : "") + silent));
    lost = true;
  }
  return lost;
}

std::optional<Frame> Exchange::Next() {
  if (inbox_.empty()) return std::nullopt;
  Frame frame = std::move(inbox_.front());
  inbox_.pop_front();
  return frame;
}

void Exchange::PutBack(std::vector<Frame> frames) {
  inbox_.insert(inbox_.begin(), std::make_move_iterator(frames.begin()),
                std::make_move_iterator(frames.end()));
}

bool Exchange::HasQueued() const {
  return std::any_of(neighbours_.begin(), neighbours_.end(), [this](int peer) {
    const Peer* p = Connected(peer);
    return p != nullptr && !p->outgoing.empty();
  });
}

void Exchange::Flush(Clock::time_point deadline) {
  while (HasQueued() && Clock::now() < deadline) PollOnce(deadline);
}

void Exchange::Linger(Clock::time_point deadline) {
  leaving_ = true;
  Flush(deadline);
  std::vector<int> elsewhere;
  for (const int peer : neighbours_) {
    if (topology_.SameHost(peer) || Connected(peer) == nullptr) continue;
    elsewhere.push_back(peer);
    ::shutdown(Connected(peer)->link->fd(), SHUT_WR);
  }
  const auto is_connected = [this](int peer) { return Connected(peer) != nullptr; };
  while (std::any_of(elsewhere.begin(), elsewhere.end(), is_connected) && Clock::now() < deadline)
    PollOnce(deadline);
}

void Exchange::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

}  // namespace hvd
