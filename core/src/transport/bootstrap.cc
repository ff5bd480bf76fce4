#include "transport/bootstrap.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <list>

#include "transport/handshake.h"
#include "transport/socket_link.h"

namespace hvd {
namespace {

// A stranger may hold this many connections for this long; a rank proves itself in a round trip.
constexpr size_t kMaxPending = 256;
constexpr auto kPendingFor = std::chrono::seconds(5);
// A rank that is still closing its former Group refuses; try again.
constexpr auto kRetryAfter = std::chrono::milliseconds(20);

int PeerPid(int fd) {
  ucred who{};
  socklen_t size = sizeof who;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 ? who.pid : 0;
}

UniqueFd ConnectUnix(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (!fd.valid() || name.size() + 1 > sizeof address.sun_path) return {};
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) return fd;
  const int why = errno;
  fd.Reset();
  errno = why;
  return {};
}

// The connection may still be in progress; poll tells.
UniqueFd ConnectTcp(const std::string& address, uint16_t port) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  if (!fd.valid() || ::inet_pton(AF_INET, address.c_str(), &to.sin_addr) != 1) return {};
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0 && errno != EINPROGRESS)
    return {};
  return fd;
}

// One connection on its way through the handshake, as a connector (peer known) or an acceptor (not yet).
class Pending {
 public:
  enum class Progress { kWaiting, kDone, kDropped, kWrongToken };

  static Pending Connector(SocketLink link, const Credentials& me, int peer, bool unix_socket) {
    Pending pending(std::move(link), me, unix_socket);
    pending.peer_ = peer;
    pending.hello_ = MakeHello(me, peer);
    pending.Queue(pending.hello_);
    pending.want_ = kChallengeBytes;
    return pending;
  }

  static Pending Acceptor(SocketLink link, const Credentials& me, bool unix_socket) {
    Pending pending(std::move(link), me, unix_socket);
    pending.accepting_ = true;
    pending.want_ = kHelloBytes;
    pending.give_up_ = Clock::now() + kPendingFor;
    return pending;
  }

  int fd() const { return link_.fd(); }
  int peer() const { return peer_; }
  bool unix_socket() const { return unix_socket_; }
  bool wants_to_send() const { return !out_.empty(); }
  Clock::time_point give_up() const { return give_up_; }
  SocketLink TakeLink() { return std::move(link_); }

  // Moves bytes as far as they go without waiting. Never reads past the frame it expects.
  Progress Advance() {
    for (;;) {
      while (!out_.empty()) {
        auto sent = link_.TrySend(std::as_bytes(std::span(out_)), -1);
        if (!sent.ok()) return Progress::kDropped;
        if (sent.value() == 0) return Progress::kWaiting;
        out_.erase(0, sent.value());
      }
      if (done_) return Progress::kDone;
      std::byte bytes[kHelloBytes];
      auto received = link_.TryRecv(std::span(bytes).first(want_ - in_.size()), &ignored_fd_);
      if (!received.ok()) return Progress::kDropped;
      if (received.value() == 0) return Progress::kWaiting;
      in_.append(reinterpret_cast<const char*>(bytes), received.value());
      if (in_.size() < want_) continue;
      const Progress progress = accepting_ ? Accept() : Connect();
      if (progress != Progress::kWaiting) return progress;
      in_.clear();
    }
  }

 private:
  Pending(SocketLink link, const Credentials& me, bool unix_socket)
      : link_(std::move(link)), me_(&me), unix_socket_(unix_socket) {}

  Progress Accept() {
    const auto in = std::as_bytes(std::span(in_));
    if (want_ == kHelloBytes) {
      const auto from = ReadHello(in, *me_);
      if (!from) return Progress::kDropped;
      peer_ = *from;
      std::memcpy(hello_.data(), in.data(), kHelloBytes);
      challenge_ = MakeChallenge(hello_, *me_);
      Queue(challenge_);
      want_ = kProofBytes;
      return Progress::kWaiting;
    }
    if (!Equal(MakeProof(hello_, challenge_, *me_), in)) return Progress::kDropped;
    out_.push_back('\1');
    done_ = true;
    return Progress::kWaiting;
  }

  Progress Connect() {
    if (want_ == kAckBytes) return Progress::kDone;
    std::memcpy(challenge_.data(), in_.data(), kChallengeBytes);
    if (!CheckChallenge(hello_, challenge_, *me_)) return Progress::kWrongToken;
    Queue(MakeProof(hello_, challenge_, *me_));
    want_ = kAckBytes;
    return Progress::kWaiting;
  }

  template <class Bytes>
  void Queue(const Bytes& bytes) {
    out_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

  SocketLink link_;
  const Credentials* me_;
  bool unix_socket_;
  bool accepting_ = false;
  bool done_ = false;
  int peer_ = -1;
  Hello hello_{};
  Challenge challenge_{};
  std::string in_, out_;
  size_t want_ = 0;
  UniqueFd ignored_fd_;
  Clock::time_point give_up_ = Clock::time_point::max();
};

class Bootstrap {
 public:
  Bootstrap(Listener& listener, const std::vector<Endpoint>& endpoints, const Credentials& me,
            Exchange& exchange)
      : listener_(listener),
        endpoints_(endpoints),
        me_(me),
        exchange_(exchange),
        targets_(static_cast<size_t>(me.rank)) {}

  Status Run(Clock::time_point deadline) {
    connected_.assign(endpoints_.size(), false);
    connected_[static_cast<size_t>(me_.rank)] = true;
    while (!AllConnected()) {
      const auto now = Clock::now();
      if (now >= deadline) return Missing();
      for (int peer = 0; peer < me_.rank; ++peer) Start(peer, now);
      Wait(std::min(deadline, now + kRetryAfter * (Trying() ? 50 : 1)));
      AcceptAll();
      HVD_RETURN_IF_ERROR(AdvanceAll());
    }
    return Status::Ok();
  }

 private:
  struct Target {
    bool trying = false;
    bool tried_unix = false;
    size_t next_address = 0;
    Clock::time_point not_before{};
  };

  bool AllConnected() const {
    return std::all_of(connected_.begin(), connected_.end(), [](bool c) { return c; });
  }
  // True while every lower rank is connected or being tried, so that nothing is to be started again.
  bool Trying() const {
    for (size_t peer = 0; peer < targets_.size(); ++peer) {
      if (!connected_[peer] && !targets_[peer].trying) return false;
    }
    return true;
  }

  bool MayShareHost(const Endpoint& peer) const {
    const Endpoint& mine = endpoints_[static_cast<size_t>(me_.rank)];
    return (!mine.forced_host && !peer.forced_host) || mine.host == peer.host;
  }

  void Start(int peer, Clock::time_point now) {
    Target& target = targets_[static_cast<size_t>(peer)];
    if (connected_[static_cast<size_t>(peer)] || target.trying || now < target.not_before) return;
    const Endpoint& endpoint = endpoints_[static_cast<size_t>(peer)];
    target.not_before = now + kRetryAfter;
    UniqueFd fd;
    bool unix_socket = false;
    if (MayShareHost(endpoint) && !target.tried_unix) {
      fd = ConnectUnix(endpoint.unix_name);
      unix_socket = fd.valid();
      if (!unix_socket && errno == EAGAIN) return;  // its backlog is full, which says nothing about the host
      target.tried_unix = !unix_socket;
    }
    if (!fd.valid() && !endpoint.addresses.empty()) {
      fd = ConnectTcp(endpoint.addresses[target.next_address++ % endpoint.addresses.size()], endpoint.port);
    }
    if (!fd.valid()) return;
    target.trying = true;
    pending_.push_back(Pending::Connector(SocketLink(std::move(fd), unix_socket), me_, peer, unix_socket));
  }

  void Wait(Clock::time_point until) {
    const short accepting = pending_.size() < kMaxPending ? POLLIN : 0;
    std::vector<pollfd> fds{{listener_.tcp_fd(), accepting, 0}, {listener_.unix_fd(), accepting, 0}};
    for (const Pending& pending : pending_) {
      fds.push_back(
          {pending.fd(), static_cast<short>(pending.wants_to_send() ? POLLIN | POLLOUT : POLLIN), 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::max<int64_t>(left, 0)));
  }

  void AcceptAll() {
    for (const int listening : {listener_.unix_fd(), listener_.tcp_fd()}) {
      const bool unix_socket = listening == listener_.unix_fd();
      while (pending_.size() < kMaxPending) {
        UniqueFd fd(::accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd.valid()) break;
        pending_.push_back(Pending::Acceptor(SocketLink(std::move(fd), unix_socket), me_, unix_socket));
      }
    }
  }

  Status AdvanceAll() {
    const auto now = Clock::now();
    for (auto it = pending_.begin(); it != pending_.end();) {
      auto progress = it->Advance();
      if (progress == Pending::Progress::kWaiting && now >= it->give_up())
        progress = Pending::Progress::kDropped;
      if (progress == Pending::Progress::kWaiting) {
        ++it;
        continue;
      }
      const int peer = it->peer();
      const bool ours = peer >= 0 && peer < me_.rank;
      if (ours) targets_[static_cast<size_t>(peer)].trying = false;
      if (progress == Pending::Progress::kWrongToken) {
        return Status(Code::kInvalid,
                      "rank " + std::to_string(peer) + " does not know the token of this job");
      }
      if (progress == Pending::Progress::kDone && !connected_[static_cast<size_t>(peer)]) {
        connected_[static_cast<size_t>(peer)] = true;
        const int pid = it->unix_socket() ? PeerPid(it->fd()) : 0;
        exchange_.Add(peer, std::make_unique<SocketLink>(it->TakeLink()), pid);
      } else if (!ours) {
        listener_.CountDropped();
      }
      it = pending_.erase(it);
    }
    return Status::Ok();
  }

  Status Missing() const {
    std::string missing;
    for (size_t rank = 0; rank < connected_.size(); ++rank) {
      if (!connected_[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    return Status(Code::kTimeout, "no connection with rank " + missing);
  }

  Listener& listener_;
  const std::vector<Endpoint>& endpoints_;
  const Credentials& me_;
  Exchange& exchange_;
  std::vector<Target> targets_;
  std::vector<bool> connected_;
  std::list<Pending> pending_;
};

}  // namespace

Status ConnectAll(Listener& listener, const std::vector<Endpoint>& endpoints, const Credentials& me,
                  Clock::time_point deadline, Exchange& exchange) {
  return Bootstrap(listener, endpoints, me, exchange).Run(deadline);
}

}  // namespace hvd
