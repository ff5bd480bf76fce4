// Several hosts: who is where, which way frames go, how links come to be. Ranks are threads of this process,
// kept apart by forced host ids.
#include <dirent.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <thread>

#include "rank_threads.h"
#include "scheduler/scheduler.h"
#include "transport/bootstrap.h"

namespace hvd {
namespace {

const Layout kLayouts[] = {{1}, {4}, {1, 1}, {2, 2}, {3, 1}, {1, 3}, {1, 1, 1, 1}, {2, 3, 1, 4, 2, 2, 1}};

// -- topology --

TEST(ranks_of_a_host_are_neighbours_or_refused) {
  const Topology t = At({3, 1}, 3);
  CHECK(t.host == 1 && t.local_rank == 0 && t.local_size() == 1 && t.hosts() == 2 && t.slices() == 1);
  const std::vector<std::string> mixed{"a", "b", "a"};
  const auto refused = Topology::Of(mixed, 0);
  CHECK(!refused.ok() && refused.status().text().starts_with("ranks 0 and 2 are on one host"));
}

TEST(every_way_ends_at_its_rank_and_comes_from_where_it_left) {
  for (const Layout& layout : kLayouts) {
    const int size = SizeOf(layout);
    for (int from = 0; from < size; ++from) {
      const Topology t = At(layout, from);
      for (int to = 0; to < size; ++to) {
        if (to == from) continue;
        int at = from, hops = 0;
        std::vector<int> way{from};
        while (at != to && hops++ <= size) way.push_back(at = t.NextHop(at, to));
        CHECK_EQ(at, to);
        // Neighbours only, and the same way back.
        for (size_t i = 1; i < way.size(); ++i) {
          CHECK(At(layout, way[i - 1]).IsNeighbour(way[i]));
          CHECK_EQ(t.NextHop(way[i], from), way[i - 1]);
        }
      }
    }
  }
}

TEST(both_ends_of_a_link_want_it) {
  for (const Layout& layout : kLayouts) {
    const int size = SizeOf(layout);
    for (int rank = 0; rank < size; ++rank) {
      int control = 0;
      for (LinkName link : LinksOf(At(layout, rank), 3)) {
        control += link.channel == Channel::kControl;
        const auto theirs = LinksOf(At(layout, link.peer), 3);
        link.peer = rank;
        CHECK_EQ(std::count(theirs.begin(), theirs.end(), link), 1);
      }
      // The others of the host, and at most a parent and two children.
      CHECK(control <= At(layout, rank).local_size() - 1 + 3);
    }
  }
}

// -- frames that are passed on --

struct Net {
  std::vector<std::unique_ptr<Exchange>> ranks;
};

// Exchanges of a whole Group, joined by socket pairs; `wrap` may put a fault into a link.
Net Connected(const Layout& layout, Clock::duration peer_timeout,
              const std::function<std::unique_ptr<Link>(std::unique_ptr<Link>, int, int)>& wrap = nullptr) {
  Net net;
  const int size = SizeOf(layout);
  for (int rank = 0; rank < size; ++rank)
    net.ranks.push_back(std::make_unique<Exchange>(At(layout, rank), peer_timeout));
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      if (!At(layout, a).IsNeighbour(b)) continue;
      auto [of_a, of_b] = LinkPair(At(layout, a).SameHost(b));
      if (wrap) of_a = wrap(std::move(of_a), a, b), of_b = wrap(std::move(of_b), b, a);
      net.ranks[static_cast<size_t>(a)]->Add(b, std::move(of_a), 0);
      net.ranks[static_cast<size_t>(b)]->Add(a, std::move(of_b), 0);
    }
  }
  return net;
}

TEST(frames_reach_everyone_once_and_in_order) {
  for (const Layout& layout : kLayouts) {
    const int size = SizeOf(layout);
    Net net = Connected(layout, Seconds(30));
    std::atomic<int> done = 0;
    OnEveryRank(size, [&](int rank) {
      Exchange& exchange = *net.ranks[static_cast<size_t>(rank)];
      for (int i = 0; i < 3; ++i) {
        exchange.PostAll(FrameKind::kDecide, std::to_string(i));
        for (int to = 0; to < size; ++to)
          exchange.Post(to, FrameKind::kAnnounce, std::to_string(to) + " " + std::to_string(i));
      }
      exchange.PostHost(FrameKind::kSegment, {});
      std::vector<std::vector<std::string>> heard(static_cast<size_t>(size));
      int segments = 0, left = 6 * (size - 1) + At(layout, rank).local_size() - 1;
      for (const auto deadline = In(20); left > 0 && Clock::now() < deadline;) {
        exchange.Poll(Clock::now() + std::chrono::milliseconds(50));
        while (auto frame = exchange.Next()) {
          --left;
          if (frame->kind == FrameKind::kSegment) {
            CHECK(At(layout, rank).SameHost(frame->peer));
            ++segments;
          } else {
            heard[static_cast<size_t>(frame->peer)].push_back(frame->payload);
          }
        }
      }
      CHECK_EQ(segments, At(layout, rank).local_size() - 1);
      const std::string mine = std::to_string(rank) + " ";
      const std::vector<std::string> expected{"0", mine + "0", "1", mine + "1", "2", mine + "2"};
      for (int peer = 0; peer < size; ++peer)
        if (peer != rank) CHECK(heard[static_cast<size_t>(peer)] == expected);
      // Leaders pass frames on for the others until all have theirs.
      ++done;
      for (const auto deadline = In(20); done < size && Clock::now() < deadline;)
        exchange.Poll(Clock::now() + std::chrono::milliseconds(1));
      CHECK(exchange.lost().ok());
    });
  }
}

TEST(a_goodbye_is_heard_by_all_in_any_order_and_is_no_loss) {
  const Layout layout{2, 3, 1, 2};
  const int size = 8;
  for (int first = 0; first < size; ++first) {
    Net net = Connected(layout, Seconds(30));
    std::atomic<int> left = 0;
    OnEveryRank(size, [&](int rank) {
      Exchange& exchange = *net.ranks[static_cast<size_t>(rank)];
      const auto deadline = In(20);
      // One after another, beginning with `first`.
      const int turn = (rank - first + size) % size;
      while (left < turn && Clock::now() < deadline)
        exchange.Poll(Clock::now() + std::chrono::milliseconds(1));
      if (turn == 1) {
        while (!exchange.HasLeft(first) && Clock::now() < deadline)
          exchange.Poll(Clock::now() + std::chrono::milliseconds(1));
        CHECK(exchange.HasLeft(first));
      }
      exchange.PostAll(FrameKind::kBye, {});
      left++;
      exchange.Linger(In(5));
      CHECK(exchange.lost().ok());
    });
  }
}

TEST(a_rank_behind_one_that_left_cannot_be_reached_because_of_that_one) {
  Net net = Connected({2, 2, 2}, Seconds(30));
  net.ranks[2]->PostAll(FrameKind::kBye, {});
  for (const int rank : {0, 1, 4, 5}) {
    Exchange& exchange = *net.ranks[static_cast<size_t>(rank)];
    for (const auto deadline = In(5); !exchange.HasLeft(2) && Clock::now() < deadline;) {
      net.ranks[0]->Poll(Clock::now());
      net.ranks[4]->Poll(Clock::now());
      exchange.Poll(Clock::now());
    }
    CHECK_EQ(exchange.LeftOnTheWayTo(2), 2);
    CHECK_EQ(exchange.LeftOnTheWayTo(3), 2);
    CHECK_EQ(exchange.LeftOnTheWayTo(rank == 0 ? 4 : 0), -1);
    CHECK(exchange.lost().ok());
  }
  net.ranks[3]->Poll(In(5));
  CHECK_EQ(net.ranks[3]->LeftOnTheWayTo(0), 2);
}

TEST(a_neighbour_that_speaks_for_others_or_in_circles_is_lost) {
  const auto says = [](FrameKind kind, int origin, int destination) {
    return FrameHeader{0, kind, origin, destination}.ToBytes();
  };
  const FrameKind announce = FrameKind::kAnnounce;
  struct Case {
    int rank, from;
    std::string bytes;
    bool lost;
  };
  // Hosts {0, 1}, {2, 3}, {4, 5}: leaders 2 and 4 know each other through 0.
  const Case cases[] = {
      {0, 1, says(announce, 1, 0), false},
      {0, 2, says(announce, 3, 0), false},
      {0, 2, says(announce, 3, 5), false},                                  // to be passed on
      {0, 1, says(announce, 3, 0), true},                                   // another's
      {0, 2, says(announce, 4, 0), true},                                   // of the other child
      {0, 2, says(announce, 0, 0), true},                                   // this rank's own
      {0, 2, says(announce, 3, 2), true},                                   // back where it came from
      {1, 0, says(announce, 3, 1), false},                                  //
      {1, 0, says(announce, 3, 0), true},                                   // only leaders pass on
      {0, 2, says(announce, 6, 0), true},                                   // no such rank
      {0, 2, says(announce, 3, -3), true},                                  //
      {0, 2, says(FrameKind::kSegment, 2, FrameHeader::kNeighbour), true},  // memory of another host
      {0, 2, says(FrameKind::kBeat, 3, FrameHeader::kNeighbour), true},
      {0, 2, says(FrameKind::kBeat, 2, FrameHeader::kEveryone), true},
      {0, 2, says(static_cast<FrameKind>(77), 2, 0), true},
  };
  for (const Case& c : cases) {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    const Topology t = At({2, 2, 2}, c.rank);
    Exchange exchange(t, Seconds(30));
    exchange.Add(c.from, std::make_unique<SocketLink>(UniqueFd(fds[0]), t.SameHost(c.from)), 0, "there");
    const UniqueFd other(fds[1]);
    CHECK(::send(other.get(), c.bytes.data(), c.bytes.size(), 0) == static_cast<ssize_t>(c.bytes.size()));
    exchange.Poll(Clock::now() + std::chrono::milliseconds(20));
    CHECK_EQ(exchange.lost_peer(), c.lost ? c.from : -1);
    if (c.lost) {
      CHECK_EQ(std::string(exchange.lost().text()),
               "lost rank " + std::to_string(c.from) + " (there): it sent a broken frame");
    }
  }
}

TEST(what_comes_before_the_link_to_the_next_is_there_waits_for_it) {
  const auto pair = [] {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    return std::pair(std::make_unique<SocketLink>(UniqueFd(fds[0]), false),
                     std::make_unique<SocketLink>(UniqueFd(fds[1]), false));
  };
  auto low = pair(), high = pair();
  const Layout layout{1, 1, 1, 1};  // 3 is a child of 1, and 1 of 0
  Exchange zero(At(layout, 0), Seconds(30)), one(At(layout, 1), Seconds(30)),
      three(At(layout, 3), Seconds(30));
  one.Add(3, std::move(high.first), 0);
  three.Add(1, std::move(high.second), 0);
  three.Post(0, FrameKind::kAnnounce, "early");  // 3 has all its links, 1 has not
  one.Poll(In(0.05));
  zero.Add(1, std::move(low.first), 0);
  one.Add(0, std::move(low.second), 0);
  zero.Poll(In(5));
  const auto frame = zero.Next();
  CHECK(frame.has_value() && frame->peer == 3 && frame->payload == "early");
}

TEST(an_abort_is_heard_once) {
  const Layout layout{2, 2, 2};
  Net net = Connected(layout, Seconds(30));
  OnEveryRank(6, [&](int rank) {
    Exchange& exchange = *net.ranks[static_cast<size_t>(rank)];
    if (rank == 3) exchange.PostAll(FrameKind::kAbort, "first");
    std::vector<std::string> heard;
    for (const auto deadline = In(5); heard.empty() && rank != 3 && Clock::now() < deadline;) {
      exchange.Poll(Clock::now() + std::chrono::milliseconds(20));
      while (auto frame = exchange.Next()) {
        heard.push_back(frame->payload);
        exchange.PostAll(FrameKind::kAbort, frame->payload);
      }
    }
    exchange.Linger(In(5));
    while (auto frame = exchange.Next()) heard.push_back(frame->payload);
    CHECK(heard == (rank == 3 ? std::vector<std::string>() : std::vector<std::string>{"first"}));
  });
}

// -- the fault sweep over the control tree --

Request Barrier(const std::string& name) {
  Request request;
  request.op = Op::kBarrier;
  request.name = name;
  return request;
}

// Ranks meet in barriers, which are all negotiation, while the link between a and b breaks.
void MeetOverABreakingLink(const Layout& layout, int a, int b, int calls, int* failures) {
  std::atomic<int> calls_left{calls};
  Net net = Connected(layout, Seconds(5), [&](std::unique_ptr<Link> link, int rank, int peer) {
    if (std::minmax(rank, peer) != std::minmax(a, b)) return link;
    return std::unique_ptr<Link>(std::make_unique<BreakingLink>(std::move(link), &calls_left));
  });
  const int size = static_cast<int>(net.ranks.size());
  std::atomic<int> failed = 0;
  OnEveryRank(size, [&](int rank) {
    const Topology t = At(layout, rank);
    auto arena = Arena::Create(t.local_rank, t.local_size(), 4096).value();
    Scheduler scheduler({rank, size, 1 << 20, Seconds(30), Seconds(20)}, t,
                        std::move(net.ranks[static_cast<size_t>(rank)]), std::move(arena), {});
    const auto begin = Clock::now();
    Status status;
    for (int i = 0; i < 4 && status.ok(); ++i) {
      const auto request = std::make_shared<const Request>(Barrier("b" + std::to_string(i)));
      const auto handle = std::make_shared<Handle>(request);
      status = scheduler.Submit({request, {}, handle}, Then::kGoesOn);
      if (!status.ok()) break;
      status = scheduler.Wait(*handle, In(15), {}) ? handle->status() : Status(Code::kInvalid, "hangs");
    }
    scheduler.Close();
    CHECK(Clock::now() - begin < Seconds(10));
    const Code code = status.code();
    CHECK(code == Code::kOk || code == Code::kPeerLost || code == Code::kShutdown);
    if (code == Code::kPeerLost) {
      const std::string text(status.text());
      CHECK(text.find("lost rank " + std::to_string(a)) != std::string::npos ||
            text.find("lost rank " + std::to_string(b)) != std::string::npos);
    }
    failed += code != Code::kOk;
  });
  *failures += failed > 0;
}

TEST(a_control_link_cut_at_any_call_ends_every_rank_in_time_and_names_an_end_of_it) {
  int failures = 0;
  for (const auto& [a, b] : {std::pair{0, 1}, std::pair{0, 2}, std::pair{0, 3}, std::pair{3, 4}}) {
    for (int calls = 1; calls <= 24; calls += kFewer)
      MeetOverABreakingLink({2, 1, 2}, a, b, calls, &failures);
  }
  CHECK(failures > 30 / kFewer);  // the sweep did cut
}

// -- addresses --

TEST(likely_addresses_are_tried_first) {
  const std::vector<Interface> mine{{"lo", 0x7f000001, 0xff000000, true},
                                    {"eth0", 0x0a000005, 0xffffff00, false},
                                    {"docker0", 0xac110001, 0xffff0000, false}};
  const std::vector<std::string> theirs{"172.17.0.1", "192.168.7.7", "10.0.0.9", "127.0.0.1"};
  const std::vector<std::string> expected{"10.0.0.9", "192.168.7.7", "172.17.0.1", "127.0.0.1"};
  CHECK(InOrderOfTrial(theirs, mine) == expected);
  CHECK((InOrderOfTrial({"127.0.0.1", "no address", "10.0.0.5"}, mine) ==
         std::vector<std::string>{"10.0.0.5", "127.0.0.1", "no address"}));
}

// -- bootstrap --

size_t OpenDescriptors() {
  DIR* directory = ::opendir("/proc/self/fd");
  size_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count - 3;  // ".", ".." and the directory itself
}

struct Rank {
  std::unique_ptr<Listener> listener;
  std::unique_ptr<Exchange> exchange;
  std::unique_ptr<Scheduler> scheduler;
  DataLinks data;
  Status status;
};

std::vector<Rank> Bound(const Layout& layout, std::vector<Endpoint>* endpoints) {
  std::vector<Rank> ranks;
  for (const std::string& host : Hosts(layout)) {
    ranks.emplace_back().listener = Listener::Bind(host, "").value();
    endpoints->push_back(ranks.back().listener->endpoint());
  }
  return ranks;
}

void Connect(Rank& me, int rank, const Layout& layout, const std::vector<Endpoint>& endpoints,
             double timeout_s) {
  const Topology t = At(layout, rank);
  me.exchange = std::make_unique<Exchange>(t, Seconds(30));
  const Credentials who{rank, t.size, "token", 7};
  me.status =
      ConnectLinks(*me.listener, endpoints, who, t, {2, In(timeout_s), nullptr}, *me.exchange, &me.data);
}

TEST(a_hundred_and_twenty_eight_ranks_connect_and_agree) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_max < 8192) return std::puts("skipped: needs 8192 open files"), void();
  files.rlim_cur = std::max<rlim_t>(files.rlim_cur, 8192);
  ::setrlimit(RLIMIT_NOFILE, &files);

  const Layout layout(16, 8);
  const int size = 128;
  std::vector<Endpoint> endpoints;
  const size_t before = OpenDescriptors();
  auto ranks = Bound(layout, &endpoints);
  OnEveryRank(size,
              [&](int rank) { Connect(ranks[static_cast<size_t>(rank)], rank, layout, endpoints, 60); });
  size_t links = 0;
  for (int rank = 0; rank < size; ++rank) {
    const Rank& r = ranks[static_cast<size_t>(rank)];
    CHECK(r.status.ok());
    if (!r.status.ok()) std::fprintf(stderr, "%s\n", std::string(r.status.text()).c_str());
    links += LinksOf(At(layout, rank), 2).size();
    CHECK_EQ(r.data.eager.previous.size(), size_t{rank < 8 ? 0u : 2u});
    CHECK_EQ(r.data.plan.next.size(), size_t{rank >= 120 ? 0u : 2u});
  }
  // Two listening sockets, an eventfd and an epoll set each; every link has two ends, and nothing else is
  // open.
  CHECK_EQ(OpenDescriptors() - before, 4 * static_cast<size_t>(size) + links);
  const auto links_of = [](const Layout& l) { return LinksOf(At(l, 8), 2).size(); };
  CHECK_EQ(links_of(layout), links_of(Layout(128, 8)));  // no more in a Group of 1024

  OnEveryRank(size, [&](int rank) {
    Rank& r = ranks[static_cast<size_t>(rank)];
    const Topology t = At(layout, rank);
    auto arena = Arena::Create(t.local_rank, t.local_size(), 4096).value();
    r.scheduler = std::make_unique<Scheduler>(SchedulerOptions{rank, size, 1 << 20, Seconds(30), Seconds(60)},
                                              t, std::move(r.exchange), std::move(arena), std::move(r.data));
    const auto request = std::make_shared<const Request>(Barrier("everyone"));
    const auto handle = std::make_shared<Handle>(request);
    CHECK(r.scheduler->Submit({request, {}, handle}, Then::kGoesOn).ok());
    CHECK(r.scheduler->Wait(*handle, In(60), {}));
    CHECK(handle->status().ok());
  });
  OnEveryRank(size, [&](int rank) { ranks[static_cast<size_t>(rank)].scheduler->Close(); });
  for (const Rank& r : ranks) CHECK(r.scheduler->status().code() == Code::kShutdown);
}

TEST(an_address_that_does_not_answer_costs_little) {
  const Layout layout{1, 1};
  std::vector<Endpoint> endpoints;
  auto ranks = Bound(layout, &endpoints);
  // One that accepts and says nothing, one that refuses (a port of nobody's), then the right ones.
  const UniqueFd silent(::socket(AF_INET, SOCK_STREAM, 0));
  endpoints[0].addresses.insert(endpoints[0].addresses.begin(), "127.0.0.9");
  endpoints[0].addresses.insert(endpoints[0].addresses.begin(), "192.0.2.1");  // RFC 5737: nobody's
  const auto begin = Clock::now();
  OnEveryRank(2, [&](int rank) { Connect(ranks[static_cast<size_t>(rank)], rank, layout, endpoints, 30); });
  CHECK(ranks[0].status.ok() && ranks[1].status.ok());
  CHECK(Clock::now() - begin < Seconds(5));
}

TEST(a_rank_that_does_not_come_is_named_with_the_reason) {
  const Layout layout{1, 1, 2};
  std::vector<Endpoint> endpoints;
  auto ranks = Bound(layout, &endpoints);
  endpoints[0].addresses = {"127.0.0.1"};
  ranks[0].listener.reset();  // of the leaders, 2 needs 0 only
  Connect(ranks[2], 2, layout, endpoints, 0.3);
  CHECK(ranks[2].status.code() == Code::kTimeout);
  CHECK_EQ(std::string(ranks[2].status.text()).substr(0, 62),
           "no connection with rank 0 (127.0.0.1: cannot send: Connection ");
}

TEST(a_rank_that_waits_for_a_late_one_is_not_taken_for_dead) {
  const Layout layout{2, 1};
  std::vector<Endpoint> endpoints;
  auto ranks = Bound(layout, &endpoints);
  std::atomic<bool> is_done = false;
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (int rank = 0; rank < 3; ++rank)
    exchanges.push_back(std::make_unique<Exchange>(At(layout, rank), Seconds(0.5)));
  const auto connect = [&](int rank) {
    DataLinks data;
    const auto i = static_cast<size_t>(rank);
    return ConnectLinks(*ranks[i].listener, endpoints, {rank, 3, "token", 7}, At(layout, rank),
                        {2, In(20), nullptr}, *exchanges[i], &data);
  };
  OnEveryRank(3, [&](int rank) {
    Exchange& exchange = *exchanges[static_cast<size_t>(rank)];
    if (rank == 1) {  // needs rank 0 only, which waits for rank 2
      CHECK(connect(1).ok());
      for (const auto until = In(2); Clock::now() < until;) exchange.Poll(until);
      CHECK(exchange.lost().ok());
      is_done = true;
      return;
    }
    while (rank == 2 && !is_done) std::this_thread::yield();
    CHECK(connect(rank).ok());
  });
}

// Rank 0 has all of its links while 1 and 2 wait for 3, which does not come.
TEST(an_abort_reaches_those_that_still_connect_in_a_tenth_of_a_second) {
  const Layout layout{1, 1, 1, 1};
  auto fastest = Clock::duration::max();
  for (int round = 0; round < 5 && fastest > std::chrono::milliseconds(100); ++round) {
    std::vector<Endpoint> endpoints;
    auto ranks = Bound(layout, &endpoints);
    Clock::time_point aborted_at, heard_at[3];
    OnEveryRank(3, [&](int rank) {
      Rank& me = ranks[static_cast<size_t>(rank)];
      Connect(me, rank, layout, endpoints, 20);
      heard_at[rank] = Clock::now();
      if (rank != 0) return;
      CHECK(me.status.ok());
      aborted_at = Clock::now();
      me.exchange->PostAll(FrameKind::kAbort, std::string("\4\6\0\0\0enough", 11));
      me.exchange->Flush(In(5));
    });
    for (const int rank : {1, 2}) {
      CHECK(ranks[static_cast<size_t>(rank)].status.code() == Code::kAborted);
      CHECK_EQ(std::string(ranks[static_cast<size_t>(rank)].status.text()), "enough");
    }
    fastest = std::min(fastest, std::max(heard_at[1], heard_at[2]) - aborted_at);
  }
  CHECK(fastest < std::chrono::milliseconds(100));
}

TEST(connecting_can_be_interrupted) {
  const Layout layout{2};
  std::vector<Endpoint> endpoints;
  auto ranks = Bound(layout, &endpoints);
  int asked = 0;
  const auto begin = Clock::now();
  Exchange exchange(At(layout, 0), Seconds(30));
  DataLinks data;
  const Status status = ConnectLinks(*ranks[0].listener, endpoints, {0, 2, "token", 7}, At(layout, 0),
                                     {2, In(20), [&] { return ++asked == 3; }}, exchange, &data);
  CHECK(status.code() == Code::kAborted);
  CHECK(Clock::now() - begin < Seconds(2));
}

}  // namespace
}  // namespace hvd
