// Ranks as threads of one process, and links between them, good and bad.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "transport/arena.h"
#include "transport/socket_link.h"
#include "transport/topology.h"

namespace hvd {

inline Clock::time_point In(double seconds) { return Clock::now() + Seconds(seconds); }

inline void OnEveryRank(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// -- places --

// Ranks per host, for example {3, 1}.
using Layout = std::vector<int>;

inline std::vector<std::string> Hosts(const Layout& layout) {
  std::vector<std::string> hosts;
  for (size_t h = 0; h < layout.size(); ++h)
    hosts.insert(hosts.end(), static_cast<size_t>(layout[h]), "host-" + std::to_string(h));
  return hosts;
}

inline int SizeOf(const Layout& layout) { return static_cast<int>(Hosts(layout).size()); }

inline Topology At(const Layout& layout, int rank) { return Topology::Of(Hosts(layout), rank).value(); }

// -- shared memory --

using Arenas = std::vector<std::unique_ptr<Arena>>;

// Those of the ranks of one host.
inline Arenas ConnectedArenas(int size, size_t chunk_nbytes) {
  Arenas arenas;
  for (int rank = 0; rank < size; ++rank) arenas.push_back(Arena::Create(rank, size, chunk_nbytes).value());
  for (auto& arena : arenas) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == arena->rank()) continue;  // has its own already
      CHECK(arena->AddSegment(peer, 0, arenas[static_cast<size_t>(peer)]->control()).ok());
    }
    CHECK(arena->complete());
  }
  return arenas;
}

inline const Arena::Tick kNeverGiveUp = [](int) { return Status::Ok(); };

// -- links --

using Links = std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>>;

// The two ends of a connection: as inside a host, or as between hosts, over TCP.
inline Links LinkPair(bool same_host = true) {
  int fds[2];
  if (same_host) {
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  } else {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* at = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    CHECK(::bind(listener.get(), at, size) == 0 && ::listen(listener.get(), 1) == 0);
    CHECK(::getsockname(listener.get(), at, &size) == 0);
    fds[0] = ::socket(AF_INET, SOCK_STREAM, 0);
    CHECK(::connect(fds[0], at, size) == 0);
    fds[1] = ::accept(listener.get(), nullptr, nullptr);
    CHECK(fds[1] >= 0);
  }
  return {std::make_unique<SocketLink>(UniqueFd(fds[0]), same_host),
          std::make_unique<SocketLink>(UniqueFd(fds[1]), same_host)};
}

// Moves little at a time, and often nothing.
class DribblingLink final : public Link {
 public:
  DribblingLink(std::unique_ptr<Link> link, unsigned seed, size_t most = 7)
      : link_(std::move(link)), random_(seed), most_(most) {}
  Result<size_t> TrySend(std::span<const std::byte> bytes, int pass_fd) override {
    return IsIdle() ? Result<size_t>(size_t{0}) : link_->TrySend(bytes.first(Some(bytes.size())), pass_fd);
  }
  Result<size_t> TryRecv(std::span<std::byte> bytes, UniqueFd* passed_fd) override {
    return IsIdle() ? Result<size_t>(size_t{0}) : link_->TryRecv(bytes.first(Some(bytes.size())), passed_fd);
  }
  int fd() const override { return link_->fd(); }
  bool same_host() const override { return link_->same_host(); }

 private:
  bool IsIdle() { return random_() % 2 == 0; }
  size_t Some(size_t nbytes) { return std::min<size_t>(nbytes, 1 + random_() % most_); }

  std::unique_ptr<Link> link_;
  std::mt19937 random_;
  const size_t most_;
};

// Breaks at the n-th call, counted over all links that share the counter; the other calls move at most
// `at_once` bytes.
class BreakingLink final : public Link {
 public:
  BreakingLink(std::unique_ptr<Link> link, std::atomic<int>* calls_left, size_t at_once = SIZE_MAX)
      : link_(std::move(link)), calls_left_(calls_left), at_once_(at_once) {}
  Result<size_t> TrySend(std::span<const std::byte> bytes, int pass_fd) override {
    if (Broken()) return Status(Code::kPeerLost, "cut");
    return link_->TrySend(bytes.first(std::min(bytes.size(), at_once_)), pass_fd);
  }
  Result<size_t> TryRecv(std::span<std::byte> bytes, UniqueFd* passed_fd) override {
    if (Broken()) return Status(Code::kPeerLost, "cut");
    return link_->TryRecv(bytes.first(std::min(bytes.size(), at_once_)), passed_fd);
  }
  int fd() const override { return link_->fd(); }
  bool same_host() const override { return link_->same_host(); }

 private:
  bool Broken() {
    if (calls_left_->fetch_sub(1) != 1) return false;
    ::shutdown(link_->fd(), SHUT_RDWR);
    return true;
  }

  std::unique_ptr<Link> link_;
  std::atomic<int>* calls_left_;
  const size_t at_once_;
};

}  // namespace hvd
