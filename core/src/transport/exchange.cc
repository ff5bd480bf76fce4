#include "transport/exchange.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace hvd {
namespace {

constexpr size_t kHeaderBytes = 5;
// Announcements and decisions of ten thousand tensors take about 1 MiB; a length above this is a broken
// stream.
constexpr uint32_t kMaxPayloadBytes = 256u << 20;
constexpr size_t kReadBytes = 64 << 10;
constexpr int kEventsAtOnce = 64;

// What an epoll event is about: the wake eventfd, or the link or the process of a peer.
constexpr uint64_t kWakeEvent = ~uint64_t{0};
constexpr uint64_t LinkEvent(int peer) { return static_cast<uint64_t>(peer) * 2; }
constexpr uint64_t ProcessEvent(int peer) { return static_cast<uint64_t>(peer) * 2 + 1; }

std::string Header(FrameKind kind, size_t payload) {
  std::string header(kHeaderBytes, '\0');
  const auto size = static_cast<uint32_t>(payload);
  std::memcpy(header.data(), &size, sizeof size);
  header[4] = static_cast<char>(kind);
  return header;
}

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

Exchange::Exchange(int self, int size, Clock::duration peer_timeout)
    : self_(self),
      peer_timeout_(peer_timeout),
      beat_every_(peer_timeout / 10),
      next_beat_(Clock::now() + beat_every_),
      last_poll_(Clock::now()),
      peers_(static_cast<size_t>(size)),
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

void Exchange::Add(int peer, std::unique_ptr<Link> link, int peer_pid) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  p.state = State::kConnected;
  p.link = std::move(link);
  p.pid = peer_pid;
  p.heard = Clock::now();
  if (!Watch(p.link->fd(), LinkEvent(peer))) {
    return Lose(peer, Status(Code::kPeerLost, std::string("cannot watch its link: ") + std::strerror(errno)));
  }
  if (peer_pid <= 0 || peer_pid == ::getpid()) return;
  p.process.Reset(static_cast<int>(::syscall(SYS_pidfd_open, peer_pid, 0)));  // an old kernel has none
  if (p.process.valid()) Watch(p.process.get(), ProcessEvent(peer));
}

void Exchange::Post(int peer, FrameKind kind, std::string_view payload, int pass_fd) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (p.state != State::kConnected) return;
  std::string bytes = Header(kind, payload.size());
  bytes.append(payload);
  p.outgoing.push_back({std::move(bytes), 0, pass_fd});
  Send(peer);
}

void Exchange::PostAll(FrameKind kind, std::string_view payload, int pass_fd) {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) Post(peer, kind, payload, pass_fd);
}

void Exchange::PostHost(FrameKind kind, std::string_view payload, int pass_fd) {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    const Peer& p = peers_[static_cast<size_t>(peer)];
    if (p.link != nullptr && p.link->same_host()) Post(peer, kind, payload, pass_fd);
  }
}

void Exchange::Poll(Clock::time_point deadline) {
  while (inbox_.empty() && !PollOnce(deadline) && Clock::now() < deadline) {
  }
}

bool Exchange::PollOnce(Clock::time_point deadline) {
  auto now = Clock::now();
  // A process that was stopped itself has heard nothing; that is not the peers' fault.
  if (now - last_poll_ > peer_timeout_ / 2) {
    for (Peer& p : peers_) p.heard = now;
  }
  bool happened = false;
  if (now >= next_beat_) {
    next_beat_ = now + beat_every_;
    PostAll(FrameKind::kBeat, {});
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
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (p.link == nullptr || p.wants_to_send == !p.outgoing.empty()) return;
  p.wants_to_send = !p.outgoing.empty();
  epoll_event event{};
  event.events = p.wants_to_send ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = LinkEvent(peer);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, p.link->fd(), &event);
}

void Exchange::SendQueued(int peer) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  while (p.state == State::kConnected && !p.outgoing.empty()) {
    Outgoing& front = p.outgoing.front();
    const auto rest = std::as_bytes(std::span(front.bytes)).subspan(front.sent);
    auto sent = p.link->TrySend(rest, front.pass_fd);
    // What the peer wrote before it went (its reason to abort) is still to be read: Receive() finds the end.
    if (!sent.ok()) return p.outgoing.clear();
    if (sent.value() == 0) return;
    front.pass_fd = -1;
    front.sent += sent.value();
    if (front.sent == front.bytes.size()) p.outgoing.pop_front();
  }
}

bool Exchange::Receive(int peer, bool to_the_end) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  std::byte bytes[kReadBytes];
  bool happened = false;
  while (p.state == State::kConnected) {
    UniqueFd passed;
    auto received = p.link->TryRecv(bytes, &passed);
    if (!received.ok()) {
      Lose(peer, received.status());
      return true;
    }
    if (received.value() == 0) break;
    if (passed.valid()) p.incoming_fds.push_back(std::move(passed));
    p.heard = Clock::now();
    p.incoming.append(reinterpret_cast<const char*>(bytes), received.value());
    happened |= Parse(peer);
    if (received.value() < sizeof bytes && !to_the_end) break;
  }
  return happened;
}

bool Exchange::Parse(int peer) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  bool happened = false;
  size_t at = 0;
  while (p.state == State::kConnected && p.incoming.size() - at >= kHeaderBytes) {
    uint32_t size = 0;
    std::memcpy(&size, p.incoming.data() + at, sizeof size);
    const auto kind = static_cast<FrameKind>(p.incoming[at + 4]);
    if (size > kMaxPayloadBytes || kind < FrameKind::kSegment || kind > FrameKind::kBeat) {
      Lose(peer, Status(Code::kPeerLost, "it sent a broken frame"));
      return true;
    }
    if (p.incoming.size() - at < kHeaderBytes + size) break;
    if (kind == FrameKind::kBye) {
      Disconnect(peer, State::kLeft);
      happened = true;
    } else if (kind != FrameKind::kBeat) {
      Frame frame{peer, kind, p.incoming.substr(at + kHeaderBytes, size), UniqueFd()};
      if (kind == FrameKind::kSegment && !p.incoming_fds.empty()) {
        frame.fd = std::move(p.incoming_fds.front());
        p.incoming_fds.pop_front();
      }
      inbox_.push_back(std::move(frame));
      happened = true;
    }
    at += kHeaderBytes + size;
  }
  p.incoming.erase(0, at);
  return happened;
}

// Out of the set before it is closed: a forked child of this process may hold the same socket, and then
// closing it alone would leave it there. Not done when the Exchange goes, which such a child may do too.
void Exchange::Disconnect(int peer, State state) {
  Peer& p = peers_[static_cast<size_t>(peer)];
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
  if (!lost_.ok()) return;
  lost_peer_ = peer;
  lost_ = Status(Code::kPeerLost, "lost rank " + std::to_string(peer) + ": " + std::string(why.text()));
}

// What it said before it ended (goodbye, or why) comes first.
bool Exchange::LoseEnded(int peer) {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  if (p.state != State::kConnected) return false;
  Receive(peer, true);
  if (p.state == State::kConnected) Lose(peer, Status(Code::kPeerLost, "its process ended"));
  return true;
}

bool Exchange::CheckSilence(Clock::time_point now) {
  bool lost = false;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    Peer& p = peers_[static_cast<size_t>(peer)];
    if (p.state != State::kConnected || now - p.heard < peer_timeout_) continue;
    Lose(peer, Status(Code::kPeerLost, std::string(IsStopped(p.pid) ? "its process is stopped; " : "") +
                                           "no byte for " + InSeconds(now - p.heard) +
                                           " (peer_timeout_s=" + InSeconds(peer_timeout_) + ")"));
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

int Exchange::FirstOnOtherHost() const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    const Peer& p = peers_[static_cast<size_t>(peer)];
    if (p.link != nullptr && !p.link->same_host()) return peer;
  }
  return -1;
}

void Exchange::Flush(Clock::time_point deadline) {
  const auto pending = [this] {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& p) { return p.state == State::kConnected && !p.outgoing.empty(); });
  };
  while (pending() && Clock::now() < deadline) PollOnce(deadline);
}

void Exchange::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

}  // namespace hvd
