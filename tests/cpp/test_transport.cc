// Links, frames, steps and collectives with ranks as threads of this process, on good links and on bad ones.
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "collectives/in_host.h"
#include "rank_threads.h"
#include "scheduler/connect.h"
#include "scheduler/scheduler.h"
#include "transport/endpoint.h"
#include "transport/handshake.h"

namespace hvd {
namespace {

// -- handshake --

TEST(handshake_accepts_its_own_and_nothing_else) {
  const Credentials low{0, 3, "token", 4}, high{2, 3, "token", 4};
  const LinkName link{0, Channel::kPlan, 3};
  const Hello hello = MakeHello(high, link);
  CHECK((ReadHello(hello, low) == LinkName{2, Channel::kPlan, 3}));
  const Challenge challenge = MakeChallenge(hello, low);
  CHECK(CheckChallenge(hello, challenge, high));
  const Digest proof = MakeProof(hello, challenge, high);
  CHECK(proof == MakeProof(hello, challenge, low));

  const Credentials stranger{2, 3, "guess", 4}, old{2, 3, "token", 3};
  CHECK(!CheckChallenge(hello, challenge, stranger));
  CHECK(!CheckChallenge(hello, MakeChallenge(hello, stranger), high));
  CHECK(MakeProof(hello, challenge, stranger) != proof);
  CHECK(!ReadHello(MakeHello(old, link), low));  // another epoch
  CHECK(!ReadHello(MakeHello(high, {1}), low));  // for another rank
  CHECK(!ReadHello(MakeHello(low, link), low));  // from itself
  // A recorded proof does not fit the next challenge; nor does the acceptor's own digest serve as one.
  CHECK(MakeProof(hello, MakeChallenge(hello, low), high) != proof);
  CHECK(!std::equal(proof.begin(), proof.end(), challenge.begin() + sizeof(Nonce)));
  for (size_t i = 0; i < kChallengeBytes; ++i) {
    Challenge damaged = challenge;
    damaged[i] ^= std::byte{1};
    CHECK(!CheckChallenge(hello, damaged, high));
  }
}

TEST(endpoints_survive_their_text) {
  auto listener = Listener::Bind("", "");
  CHECK(listener.ok());
  const std::string text = listener.value()->endpoint().ToString();
  CHECK_EQ(Endpoint::Parse(text).value().ToString(), text);
  for (const char* bad : {"", "hvd1", "hvd2;host=a;unix=b;tcp=1.2.3.4:5",
                          "hvd1;host=a;unix=b;tcp=1.2.3.4:99999", "hvd1;host=a;unix=b;tcp=1.2.3.4:5x",
                          "hvd1;hos=a;unix=b;tcp=1.2.3.4:5", "hvd1;forced=a;unix=b;tcp=1.2.3.4:5"}) {
    CHECK(!Endpoint::Parse(bad).ok());
  }
  const Endpoint forced = Listener::Bind("me@home", "").value()->endpoint();
  const Endpoint read = Endpoint::Parse(forced.ToString()).value();
  CHECK_EQ(read.ToString(), forced.ToString());
  CHECK_EQ(read.HostName(), "me@home");
  CHECK_EQ(read.host, listener.value()->endpoint().host);
}

TEST(an_id_parts_ranks_and_does_not_join_them) {
  const auto endpoint = [](const std::string& host) {
    return Endpoint::Parse("hvd1;" + host + ";unix=u;tcp=10.0.0.1:1").value();
  };
  const auto hosts = [&](const std::vector<std::string>& keys) {
    std::vector<std::string> texts;
    for (const auto& key : keys) texts.push_back(endpoint(key).ToString());
    const auto topology = TopologyOf(texts, 0);
    return topology.ok() ? topology.value().hosts() : -1;
  };
  const auto parted = [&](const std::vector<std::string>& keys) {
    std::vector<Endpoint> endpoints;
    for (const auto& key : keys) endpoints.push_back(endpoint(key));
    return PartedRanks(endpoints);
  };
  const std::string here = "boot/net:[1]/10.0.0.1", there = "boot/net:[2]/10.0.0.2",
                    far = "other/net:[1]/10.0.0.3";
  CHECK_EQ(hosts({"host=" + here, "host=" + here}), 1);
  CHECK_EQ(hosts({"forced=a@" + here, "forced=b@" + here}), 2);
  CHECK_EQ(hosts({"forced=a@" + here, "forced=a@" + here}), 1);
  CHECK_EQ(hosts({"forced=a@" + here, "forced=a@" + there}), 2);
  CHECK_EQ(hosts({"host=" + here, "host=boot/net:[1]/10.0.0.9"}), 2);  // two of one snapshot
  CHECK_EQ(parted({"host=" + here, "host=" + here, "host=" + far}), "");
  CHECK_EQ(parted({"forced=a@" + here, "forced=b@" + here, "forced=c@" + there}), "");
  CHECK(parted({"forced=b@" + here, "forced=a@" + here, "forced=a@" + there})
            .starts_with("ranks 1 and 2 have HVD_HOST_ID=a but no network namespace in common"));
  CHECK(parted({"host=" + here, "host=" + there}).starts_with("ranks 0 and 1 have the same boot id but"));
  CHECK_EQ(hosts({"host=" + here + "/docker-a", "host=" + here + "/docker-b"}), 2);
  CHECK_EQ(hosts({"host=" + here + "/docker-a", "host=" + here + "/docker-a"}), 1);
  CHECK_EQ(parted({"host=" + here + "/docker/a", "host=" + here}),
           "ranks 0 and 1 have the same boot id and network namespace, but a security policy (AppArmor, "
           "SELinux, seccomp) parts them: 'docker/a' and '', so they share no memory and talk TCP");
}

// -- exchange --

// What every kind of link must do.
template <class Body>
void OnEveryKindOfLink(Body body) {
  for (const bool same_host : {true, false}) body([=] { return LinkPair(same_host); });
}

void ExchangeManyFrames(Links links) {
  const bool same_host = links.first->same_host();
  Exchange a(Topology::OneHost(0, 2), Seconds(30)), b(Topology::OneHost(1, 2), Seconds(30));
  a.Add(1, std::move(links.first), 0);
  b.Add(0, std::move(links.second), 0);
  const int count = 200;
  for (int i = 0; i < count; ++i) {
    a.Post(1, FrameKind::kAnnounce,
           std::string(static_cast<size_t>(i) % 97, static_cast<char>('a' + i % 26)));
  }
  auto segment = Segment::Create(100);
  if (same_host) a.PostHost(FrameKind::kSegment, "with a descriptor", segment.value()->fd());
  a.PostAll(FrameKind::kBye, {});
  std::thread sender([&] { a.Flush(In(20)); });
  int got = 0;
  bool descriptor = false;
  const auto deadline = In(20);
  while (!b.HasLeft(0) && Clock::now() < deadline) {
    b.Poll(deadline);
    while (auto frame = b.Next()) {
      if (frame->kind == FrameKind::kSegment) {
        descriptor = frame->fd.valid();
      } else {
        const std::string expected(static_cast<size_t>(got) % 97, static_cast<char>('a' + got % 26));
        CHECK_EQ(frame->payload, expected);
        ++got;
      }
    }
  }
  sender.join();
  while (auto frame = b.Next())
    (frame->kind == FrameKind::kSegment) ? void(descriptor = frame->fd.valid()) : void(++got);
  CHECK_EQ(got, count);
  CHECK_EQ(descriptor, same_host);
  CHECK(b.lost().ok());
}

TEST(frames_arrive_whole_and_in_order_on_every_link) {
  OnEveryKindOfLink([](auto pair) {
    ExchangeManyFrames(pair());
    Links links = pair();
    ExchangeManyFrames({std::make_unique<DribblingLink>(std::move(links.first), 1),
                        std::make_unique<DribblingLink>(std::move(links.second), 2)});
  });
}

TEST(an_ended_or_silent_or_babbling_peer_is_lost_by_name) {
  OnEveryKindOfLink([](auto pair) {
    {
      Links links = pair();
      Exchange a(Topology::OneHost(0, 2), Seconds(30));
      a.Add(1, std::move(links.first), 0);
      links.second.reset();
      a.Poll(In(5));
      CHECK_EQ(a.lost_peer(), 1);
      CHECK(a.lost().text().starts_with("lost rank 1: "));
    }
    {
      Links links = pair();
      Exchange a(Topology::OneHost(0, 2), Seconds(0.2));
      a.Add(1, std::move(links.first), 0);
      const auto begin = Clock::now();
      while (a.lost().ok() && Clock::now() < begin + Seconds(5)) a.Poll(In(1));
      CHECK(Clock::now() - begin < Seconds(2));
      CHECK(a.lost().text().find("no byte for") != std::string_view::npos);
    }
    {
      Links links = pair();
      Exchange a(Topology::OneHost(0, 2), Seconds(30));
      a.Add(1, std::move(links.first), 0);
      const char junk[] = "GET / HTTP/1.1\r\n\r\n";
      CHECK(links.second->TrySend(std::as_bytes(std::span(junk)), -1).ok());
      a.Poll(In(5));
      CHECK(a.lost().text().find("broken frame") != std::string_view::npos);
    }
  });
}

TEST(wake_ends_a_poll_from_another_thread) {
  Exchange a(Topology::OneHost(0, 1), Seconds(30));
  std::thread waker([&] { a.Wake(); });
  const auto begin = Clock::now();
  a.Poll(In(10));
  CHECK(Clock::now() - begin < Seconds(5));
  waker.join();
}

TEST(another_thread_may_wait_for_news) {
  Links links = LinkPair();
  Exchange a(Topology::OneHost(0, 2), Seconds(30)), b(Topology::OneHost(1, 2), Seconds(30));
  a.Add(1, std::move(links.first), 0);
  b.Add(0, std::move(links.second), 0);
  pollfd news{a.wait_fd(), POLLIN, 0};
  CHECK_EQ(::poll(&news, 1, 0), 0);
  for (const bool by_wake : {false, true}) {
    std::thread teller([&] { by_wake ? a.Wake() : b.Post(0, FrameKind::kAnnounce, "news"); });
    CHECK_EQ(::poll(&news, 1, 10'000), 1);
    CHECK_EQ(::poll(&news, 1, 0), 1);  // until it is taken
    teller.join();
    a.Poll(In(5));
    CHECK_EQ(a.Next().has_value(), !by_wake);
    CHECK_EQ(::poll(&news, 1, 0), 0);
  }
  CHECK(a.next_beat() > Clock::now() && a.next_beat() < In(30));
}

TEST(who_hears_an_abort_tells_it_before_it_goes) {
  Links ab = LinkPair(), bc = LinkPair();
  Exchange a(Topology::OneHost(0, 3), Seconds(30)), c(Topology::OneHost(2, 3), Seconds(30));
  a.Add(1, std::move(ab.first), 0);
  c.Add(1, std::move(bc.second), 0);
  {
    Exchange b(Topology::OneHost(1, 3), Seconds(30));
    b.Add(0, std::move(ab.second), 0);
    b.Add(2, std::move(bc.first), 0);
    c.PostAll(FrameKind::kAbort, "why");  // has not reached a yet
    b.Poll(In(5));
    const auto heard = b.Next();
    CHECK(heard.has_value());
    b.PostAll(FrameKind::kAbort, heard->payload);
    b.Linger(In(5));
  }
  a.Poll(In(5));
  const auto heard = a.Next();
  CHECK(heard.has_value() && heard->payload == "why");
}

TEST(a_peer_that_reads_late_gets_everything) {
  OnEveryKindOfLink([](auto pair) {
    Links links = pair();
    Exchange a(Topology::OneHost(0, 2), Seconds(30)), b(Topology::OneHost(1, 2), Seconds(30));
    a.Add(1, std::move(links.first), 0);
    b.Add(0, std::move(links.second), 0);
    const std::string large(24 << 20, 'x');  // more than the socket holds
    a.Post(1, FrameKind::kAnnounce, large);
    pollfd news{a.wait_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&news, 1, 0), 0);  // nothing to be done until b reads
    std::thread reader([&] {
      std::optional<Frame> frame;
      while (!(frame = b.Next()) && b.lost().ok()) b.Poll(In(10));
      CHECK(frame && frame->payload == large);
    });
    a.Flush(In(10));
    reader.join();
    CHECK_EQ(::poll(&news, 1, 0), 0);
  });
}

// -- in-host collectives --

float Value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101); }

TEST(staged_allreduce_adds_every_element_once_for_all_sizes) {
  const size_t chunk = 4096;  // 1024 floats
  for (int size = 1; size <= 5; ++size) {
    const auto arenas = ConnectedArenas(size, chunk);
    for (const size_t count :
         {size_t{0}, size_t{1}, size_t{15}, size_t{1023}, size_t{1024}, size_t{1025}, size_t{5000}}) {
      OnEveryRank(size, [&](int rank) {
        std::vector<float> first(count), second(count / 3), out(count);
        for (size_t i = 0; i < count; ++i) first[i] = Value(rank, i);
        for (size_t i = 0; i < second.size(); ++i) second[i] = Value(rank, i + 1);
        const auto bytes = [](std::vector<float>& v) { return reinterpret_cast<std::byte*>(v.data()); };
        const Piece pieces[] = {{bytes(first), bytes(out), count},
                                {bytes(second), bytes(second), second.size()}};
        CHECK(AllreduceStaged(*arenas[static_cast<size_t>(rank)], kNeverGiveUp, pieces, DType::kFloat32,
                              ReduceOp::kSum, {})
                  .ok());
        for (size_t i = 0; i < count; ++i) {
          float expected = 0;
          for (int r = 0; r < size; ++r) expected += Value(r, i);
          CHECK_EQ(out[i], expected);
          CHECK_EQ(first[i], Value(rank, i));
        }
        for (size_t i = 0; i < second.size(); ++i) {
          float expected = 0;
          for (int r = 0; r < size; ++r) expected += Value(r, i + 1);
          CHECK_EQ(second[i], expected);
        }
      });
    }
  }
}

TEST(allgather_and_broadcast_move_every_byte) {
  for (int size = 1; size <= 4; ++size) {
    const auto arenas = ConnectedArenas(size, 4096);
    std::vector<size_t> nbytes;
    for (int rank = 0; rank < size; ++rank) nbytes.push_back(static_cast<size_t>(rank) * 5001);
    const size_t total = std::accumulate(nbytes.begin(), nbytes.end(), size_t{0});
    OnEveryRank(size, [&](int rank) {
      Arena& arena = *arenas[static_cast<size_t>(rank)];
      const std::vector<std::byte> in(nbytes[static_cast<size_t>(rank)], static_cast<std::byte>(rank + 1));
      std::vector<std::byte> out(total + 1);
      CHECK(Allgather(arena, kNeverGiveUp, in.data(), out.data(), nbytes).ok());
      size_t at = 0;
      for (int r = 0; r < size; ++r) {
        for (size_t i = 0; i < nbytes[static_cast<size_t>(r)]; ++i)
          CHECK(out[at++] == static_cast<std::byte>(r + 1));
      }
      for (int root = 0; root < size; ++root) {
        std::vector<std::byte> data(20'001, static_cast<std::byte>(rank + 10));
        CHECK(Broadcast(arena, kNeverGiveUp, root, data.data(), data.data(), data.size()).ok());
        CHECK(data.front() == static_cast<std::byte>(root + 10) && data.back() == data.front());
      }
    });
  }
}

// -- scheduler: the fault sweep --

struct Outcome {
  Status status;
  double seconds = 0;
  bool wrong_sum = false;
};

// Two ranks over `links` add until `sums` are done or one fails, then close.
std::vector<Outcome> AddOver(Links links, int sums) {
  auto arenas = ConnectedArenas(2, 4096);
  std::vector<Outcome> outcomes(2);
  std::unique_ptr<Link> ends[2] = {std::move(links.first), std::move(links.second)};
  OnEveryRank(2, [&](int rank) {
    auto exchange = std::make_unique<Exchange>(Topology::OneHost(rank, 2), Seconds(20));
    exchange->Add(1 - rank, std::move(ends[rank]), 0);
    Scheduler scheduler({rank, 2, 1 << 20, Seconds(30), Seconds(20)}, Topology::OneHost(rank, 2),
                        std::move(exchange), std::move(arenas[static_cast<size_t>(rank)]), {});
    Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    const auto begin = Clock::now();
    for (int i = 0; i < sums && outcome.status.ok(); ++i) {
      std::vector<float> data(3000, 1);
      Request request;
      request.name = "x" + std::to_string(i % 3);
      request.members.push_back({request.name, DType::kFloat32, {3000}, {}});
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      auto shared = std::make_shared<const Request>(request);
      auto handle = std::make_shared<Handle>(shared);
      const Then then = i % 2 == 0 ? Then::kWaits : Then::kGoesOn;
      outcome.status = scheduler.Submit({shared, {{bytes, bytes}}, handle}, then);
      if (!outcome.status.ok()) break;
      if (!scheduler.Wait(*handle, In(15), {})) {
        outcome.status = Status(Code::kInvalid, "hangs");
        break;
      }
      outcome.status = handle->status();
      if (!outcome.status.ok()) break;
      for (const float value : data) outcome.wrong_sum |= value != 2;
    }
    scheduler.Close();
    outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  });
  return outcomes;
}

TEST(a_link_cut_at_any_call_ends_both_ranks_in_time_without_a_wrong_sum) {
  OnEveryKindOfLink([](auto pair) {
    int failures = 0;
    for (int cut = 1; cut <= 60; cut += kFewer) {
      std::atomic<int> calls_left{cut};
      Links links = pair();
      const auto outcomes = AddOver({std::make_unique<BreakingLink>(std::move(links.first), &calls_left),
                                     std::make_unique<BreakingLink>(std::move(links.second), &calls_left)},
                                    10);
      for (const Outcome& outcome : outcomes) {
        CHECK(!outcome.wrong_sum);
        CHECK(outcome.seconds < 10);  // no deadline had to pass
        const Code code = outcome.status.code();
        CHECK(code == Code::kOk || code == Code::kPeerLost || code == Code::kShutdown);
        failures += code != Code::kOk;
      }
    }
    CHECK(failures > 20 / kFewer);  // the sweep did cut
  });
}

TEST(good_and_dribbling_links_give_all_sums) {
  OnEveryKindOfLink([](auto pair) {
    for (const Outcome& outcome : AddOver(pair(), 50)) CHECK(outcome.status.ok() && !outcome.wrong_sum);
    Links links = pair();
    for (const Outcome& outcome : AddOver({std::make_unique<DribblingLink>(std::move(links.first), 5),
                                           std::make_unique<DribblingLink>(std::move(links.second), 6)},
                                          20)) {
      CHECK(outcome.status.ok() && !outcome.wrong_sum);
    }
  });
}

}  // namespace
}  // namespace hvd
