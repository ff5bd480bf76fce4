#include "transport/bootstrap.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <utility>

#include "transport/pending_link.h"

namespace hvd {
namespace {

// A stranger may hold this many connections for this long; a rank proves itself in a round trip.
constexpr size_t kMaxPending = 256;
constexpr auto kPendingFor = std::chrono::seconds(5);
// A rank that is still closing its former Group refuses; try again.
constexpr auto kRetryAfter = std::chrono::milliseconds(20);
constexpr auto kAskEvery = std::chrono::milliseconds(100);
// An address from which no answer to the SYN comes, or where somebody accepts and says nothing (a rank that
// is late, or a stranger with the same address), gets so long before the next one is tried; twice as long
// every time all of them failed.
constexpr auto kConnectFor = std::chrono::milliseconds(500);
constexpr auto kSilentFor = std::chrono::seconds(5);
constexpr int kMostDoublings = 6;

int PeerPid(int fd) {
  ucred who{};
  socklen_t size = sizeof who;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 ? who.pid : 0;
}

// Empty if it is no IPv4 socket.
std::string PeerAddress(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  char text[INET_ADDRSTRLEN] = {};
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 && address.sin_family == AF_INET)
    ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
  return text;
}

// The connection may still be in progress; poll tells.
UniqueFd ConnectTcp(const std::string& address, uint16_t port) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  if (!fd.valid() || ::inet_pton(AF_INET, address.c_str(), &to.sin_addr) != 1) return {};
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) == 0 || errno == EINPROGRESS)
    return fd;
  const int why = errno;
  fd.Reset();
  errno = why;
  return {};
}

class Bootstrap {
 public:
  Bootstrap(Listener& listener, const std::vector<Endpoint>& endpoints, const Credentials& me,
            const Topology& topology, const BootstrapOptions& options, Exchange& exchange, DataLinks* data)
      : listener_(listener),
        endpoints_(endpoints),
        me_(me),
        topology_(topology),
        options_(options),
        exchange_(exchange),
        data_(data) {
    for (const LinkName& name : LinksOf(topology, options.ring_streams)) wanted_.emplace_back().name = name;
  }

  Status Run() {
    HVD_RETURN_IF_ERROR(OrderAddresses());
    // Again, so that who connects from now on is told this process, not one that bound the listener and
    // forked.
    ::listen(listener_.unix_fd(), SOMAXCONN);
    missing_ = wanted_.size();
    auto next_ask = Clock::now();
    while (missing_ > 0) {
      const auto now = Clock::now();
      if (now >= options_.deadline) return Missing();
      if (options_.interrupted && now >= next_ask) {
        next_ask = now + kAskEvery;
        if (options_.interrupted()) return Status(Code::kAborted, "interrupted while connecting");
      }
      const bool again = StartAll(now);
      Wait(std::min(options_.deadline, now + (again ? Clock::duration(kRetryAfter) : kAskEvery)));
      AcceptAll();
      HVD_RETURN_IF_ERROR(AdvanceAll());
      // Who has all of its links already hears that this rank still waits for others.
      exchange_.Turn();
      HVD_RETURN_IF_ERROR(exchange_.ended());
    }
    return Status::Ok();
  }

 private:
  struct Wanted {
    LinkName name;
    bool is_connected = false;
    bool is_trying = false;
    Clock::time_point not_before{};
    std::string why;  // the last attempt failed
  };
  // Where to reach a rank on another host. Its links share what was learned about its addresses.
  struct Route {
    std::vector<std::string> addresses;
    size_t tried = 0;     // attempts, one after another, that failed
    size_t timeouts = 0;  // those of them in which nobody answered
    const std::string& address() const { return addresses[tried % addresses.size()]; }
    int patience() const {
      return 1 << std::min(kMostDoublings, static_cast<int>(timeouts / addresses.size()));
    }
  };
  struct Attempt {
    PendingLink link;
    size_t tried = 0;  // of the route, when it began
    bool was_established = false;
  };

  Status OrderAddresses() {
    if (topology_.hosts() == 1) return Status::Ok();
    const auto mine = Interfaces();
    if (!mine.ok()) return mine.status();
    for (const Wanted& wanted : wanted_) {
      const int peer = wanted.name.peer;
      if (topology_.SameHost(peer) || routes_.contains(peer)) continue;
      const Endpoint& endpoint = endpoints_[static_cast<size_t>(peer)];
      routes_[peer].addresses = InOrderOfTrial(endpoint.addresses, mine.value());
      if (routes_[peer].addresses.empty())
        return Status(Code::kInvalid, "rank " + std::to_string(peer) + " offers no address");
    }
    return Status::Ok();
  }

  // Starts to connect where this rank is to; true if it has to be tried again soon.
  bool StartAll(Clock::time_point now) {
    bool again = false;
    for (Wanted& wanted : wanted_) {
      const bool is_ours = wanted.name.peer < me_.rank;
      if (is_ours && !wanted.is_connected && !wanted.is_trying) again |= !Start(wanted, now);
    }
    return again;
  }

  bool Start(Wanted& wanted, Clock::time_point now) {
    if (now < wanted.not_before) return false;
    wanted.not_before = now + kRetryAfter;
    const int peer = wanted.name.peer;
    const Endpoint& endpoint = endpoints_[static_cast<size_t>(peer)];
    const bool is_unix = topology_.SameHost(peer);
    Route* route = is_unix ? nullptr : &routes_[peer];
    UniqueFd fd = is_unix ? ConnectUnix(endpoint.unix_name) : ConnectTcp(route->address(), endpoint.port);
    if (!fd.valid()) {
      Failed(wanted, std::strerror(errno), is_unix ? 0 : route->tried);
      return false;
    }
    const auto give_up = is_unix ? Clock::time_point::max() : now + kConnectFor * route->patience();
    wanted.is_trying = true;
    attempts_.push_back(
        {PendingLink::Connector(SocketLink(std::move(fd), is_unix), me_, wanted.name, give_up),
         is_unix ? 0 : route->tried});
    return true;
  }

  // Several links to one rank fail at the same address; that counts once.
  void Failed(Wanted& wanted, std::string_view why, size_t tried, bool is_timeout = false) {
    wanted.is_trying = false;
    const auto route = routes_.find(wanted.name.peer);
    if (route == routes_.end()) {
      wanted.why = "Unix socket: " + std::string(why) +
                   "; it shares this rank's network namespace. If something between them forbids it, give "
                   "each its own HVD_HOST_ID, and they talk TCP";
      return;
    }
    wanted.why = route->second.address() + ": " + std::string(why);
    if (route->second.tried != tried) return;
    ++route->second.tried;
    route->second.timeouts += is_timeout ? 1 : 0;
  }

  void Wait(Clock::time_point until) {
    const short accepting = attempts_.size() < kMaxPending ? POLLIN : 0;
    std::vector<pollfd> fds{{listener_.tcp_fd(), accepting, 0},
                            {listener_.unix_fd(), accepting, 0},
                            {exchange_.wait_fd(), POLLIN, 0}};
    for (const Attempt& attempt : attempts_) {
      const bool sends = attempt.link.wants_to_send();
      fds.push_back({attempt.link.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::max<int64_t>(left, 0)));
  }

  void AcceptAll() {
    for (const int listening : {listener_.unix_fd(), listener_.tcp_fd()}) {
      const bool is_unix = listening == listener_.unix_fd();
      while (attempts_.size() < kMaxPending) {
        UniqueFd fd(::accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd.valid()) break;
        attempts_.push_back(
            {PendingLink::Acceptor(SocketLink(std::move(fd), is_unix), me_, Clock::now() + kPendingFor)});
      }
    }
  }

  Status AdvanceAll() {
    const auto now = Clock::now();
    for (auto it = attempts_.begin(); it != attempts_.end();) {
      const auto progress = it->link.Advance();
      if (progress == PendingLink::Progress::kWaiting && !IsGivenUp(*it, now)) {
        ++it;
        continue;
      }
      if (progress == PendingLink::Progress::kWrongToken) {
        return Status(Code::kInvalid, "rank " + std::to_string(it->link.name().peer) +
                                          " does not know the token of this job");
      }
      Wanted* wanted = Find(it->link.name());
      if (progress == PendingLink::Progress::kDone && wanted != nullptr && !wanted->is_connected &&
          it->link.is_unix() == topology_.SameHost(wanted->name.peer)) {
        Connected(*wanted, it->link);
      } else if (it->link.is_connector()) {
        const bool is_timeout = progress == PendingLink::Progress::kWaiting;
        Failed(*wanted, is_timeout ? "no answer" : it->link.failure().text(), it->tried, is_timeout);
      } else {
        listener_.CountDropped();
      }
      it = attempts_.erase(it);
    }
    return Status::Ok();
  }

  // A connector whose peer has answered waits for it; so does one that knows no other address.
  bool IsGivenUp(Attempt& attempt, Clock::time_point now) {
    PendingLink& link = attempt.link;
    if (link.is_connector() && !link.is_unix() && link.is_established()) {
      const Route& route = routes_[link.name().peer];
      if (link.is_answered() || route.addresses.size() == 1) return false;
      if (!std::exchange(attempt.was_established, true))
        link.set_give_up(now + kSilentFor * route.patience());
    }
    return now >= link.give_up();
  }

  Wanted* Find(const LinkName& name) {
    const auto found = std::find_if(wanted_.begin(), wanted_.end(),
                                    [&](const Wanted& wanted) { return wanted.name == name; });
    return found == wanted_.end() ? nullptr : &*found;
  }

  void Connected(Wanted& wanted, PendingLink& pending) {
    const int peer = wanted.name.peer;
    wanted.is_connected = true;
    wanted.is_trying = false;
    --missing_;
    const int pid = pending.is_unix() ? PeerPid(pending.fd()) : 0;
    // How an error names the host: the forced id, or the address over which it was reached.
    const Endpoint& endpoint = endpoints_[static_cast<size_t>(peer)];
    const std::string reached = endpoint.forced_id.empty() ? PeerAddress(pending.fd()) : "";
    const std::string where = reached.empty() ? endpoint.HostName() : reached;
    auto link = std::make_unique<SocketLink>(pending.TakeLink());
    if (wanted.name.channel == Channel::kControl) {
      exchange_.Add(peer, std::move(link), pid, topology_.hosts() > 1 ? where : "");
      return;
    }
    RingLinks& ring = wanted.name.channel == Channel::kEager ? data_->eager : data_->plan;
    auto& side = peer < me_.rank ? ring.previous : ring.next;
    side.resize(static_cast<size_t>(options_.ring_streams));
    side[wanted.name.stream] = std::move(link);
  }

  Status Missing() const {
    std::map<int, std::string> missing;  // why, by rank
    for (const Wanted& wanted : wanted_) {
      if (!wanted.is_connected) missing.emplace(wanted.name.peer, wanted.why);
    }
    std::string text;
    for (const auto& [rank, why] : missing)
      text += (text.empty() ? "" : ", ") + std::to_string(rank) + (why.empty() ? "" : " (" + why + ")");
    return Status(Code::kTimeout, "no connection with rank " + text);
  }

  Listener& listener_;
  const std::vector<Endpoint>& endpoints_;
  const Credentials& me_;
  const Topology& topology_;
  const BootstrapOptions& options_;
  Exchange& exchange_;
  DataLinks* const data_;
  std::vector<Wanted> wanted_;
  size_t missing_ = 0;
  std::map<int, Route> routes_;
  std::list<Attempt> attempts_;
};

}  // namespace

std::vector<LinkName> LinksOf(const Topology& topology, int ring_streams) {
  std::vector<LinkName> names;
  for (int local = 0; local < topology.local_size(); ++local) {
    const int peer = topology.GlobalRank(local);
    if (peer != topology.rank) names.push_back({peer, Channel::kControl, 0});
  }
  for (int host = 0; host < topology.hosts() && topology.local_rank == 0; ++host) {
    const int peer = topology.leader(host);
    if (host != topology.host && topology.IsNeighbour(peer)) names.push_back({peer, Channel::kControl, 0});
  }
  if (topology.local_rank >= topology.slices()) return names;
  for (const int host : {topology.host - 1, topology.host + 1}) {
    if (host < 0 || host >= topology.hosts()) continue;
    const int peer = topology.leader(host) + topology.local_rank;
    for (const Channel channel : {Channel::kEager, Channel::kPlan}) {
      for (int stream = 0; stream < ring_streams; ++stream)
        names.push_back({peer, channel, static_cast<uint16_t>(stream)});
    }
  }
  return names;
}

Status ConnectLinks(Listener& listener, const std::vector<Endpoint>& endpoints, const Credentials& me,
                    const Topology& topology, const BootstrapOptions& options, Exchange& exchange,
                    DataLinks* data) {
  return Bootstrap(listener, endpoints, me, topology, options, exchange, data).Run();
}

}  // namespace hvd
