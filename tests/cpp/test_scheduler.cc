// Schedulers with ranks as threads of this process: who works, what comes again, and how it ends.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "rank_threads.h"

namespace hvd {
namespace {

using Ranks = std::vector<std::unique_ptr<Scheduler>>;
using Exchanges = std::vector<std::unique_ptr<Exchange>>;

// Connected by socket pairs.
Exchanges ConnectedExchanges(int size) {
  Exchanges exchanges;
  for (int rank = 0; rank < size; ++rank)
    exchanges.push_back(std::make_unique<Exchange>(Topology::OneHost(rank, size), Seconds(20)));
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      auto [of_a, of_b] = LinkPair();
      exchanges[static_cast<size_t>(a)]->Add(b, std::move(of_a), 0);
      exchanges[static_cast<size_t>(b)]->Add(a, std::move(of_b), 0);
    }
  }
  return exchanges;
}

std::unique_ptr<Scheduler> MakeRank(int rank, int size, Exchanges& exchanges, Arenas& arenas) {
  return std::make_unique<Scheduler>(SchedulerOptions{rank, size, 1 << 16, Seconds(30), Seconds(60)},
                                     Topology::OneHost(rank, size),
                                     std::move(exchanges[static_cast<size_t>(rank)]),
                                     std::move(arenas[static_cast<size_t>(rank)]), DataLinks{});
}

// Connected by socket pairs and one arena.
Ranks Connect(int size) {
  Exchanges exchanges = ConnectedExchanges(size);
  Arenas arenas = ConnectedArenas(size, 4096);
  Ranks ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(MakeRank(rank, size, exchanges, arenas));
  return ranks;
}

void OnEveryRank(const Ranks& ranks, const std::function<void(int, Scheduler&)>& body) {
  hvd::OnEveryRank(static_cast<int>(ranks.size()),
                   [&](int rank) { body(rank, *ranks[static_cast<size_t>(rank)]); });
}

// One tensor of floats, and the handle of its allreduce.
struct Sum {
  std::string name;
  std::vector<float> data;
  std::shared_ptr<Handle> handle;

  Sum(std::string n, size_t count, int rank)
      : name(std::move(n)), data(count, static_cast<float>(rank + 1)) {}
  // As Group::Submit does it.
  Status Submit(Scheduler& scheduler, Then then) {
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const std::vector<int64_t> shape{static_cast<int64_t>(data.size())};
    Call call;
    call.name = name;
    call.shape = shape;
    call.buffer = {bytes, bytes};
    auto again = scheduler.SubmitAgain(call, then);
    if (again.ok() && again.value() != nullptr) {
      handle = again.value();
      return Status::Ok();
    }
    Request request;
    request.name = name;
    request.members.push_back({name, DType::kFloat32, shape, {}});
    auto shared = std::make_shared<const Request>(std::move(request));
    handle = std::make_shared<Handle>(shared);
    return scheduler.Submit({shared, {{bytes, bytes}}, handle}, then);
  }
  bool IsRight(int size) const {
    const auto expected = static_cast<float>(size * (size + 1) / 2);
    return std::all_of(data.begin(), data.end(), [&](float value) { return value == expected; });
  }
};

// Asynchronous tensors in another order on every rank, then waited for; again and again, now and then larger.
void SubmitAtRandom(int rank, int size, Scheduler& scheduler, const std::string& prefix, int rounds) {
  std::mt19937 random(static_cast<unsigned>(rank) * 7 + static_cast<unsigned>(prefix.size()));
  for (int round = 0; round < rounds; ++round) {
    std::vector<Sum> sums;
    for (int i = 0; i < 12; ++i) {
      const auto count = static_cast<size_t>(i * i * 37 % 3000 + (round > rounds / 2 && i % 3 == 0 ? 1 : 0));
      sums.emplace_back(prefix + std::to_string(i), count, rank);
    }
    std::shuffle(sums.begin(), sums.end(), random);
    for (Sum& sum : sums) {
      CHECK(sum.Submit(scheduler, Then::kGoesOn).ok());
      if (random() % 16 == 0) std::this_thread::yield();
    }
    std::shuffle(sums.begin(), sums.end(), random);
    for (Sum& sum : sums) {
      CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
      CHECK(sum.handle->status().ok());
      CHECK(sum.IsRight(size));
    }
  }
}

TEST(threads_that_block_and_threads_that_do_not_all_get_their_sums) {
  for (const int size : {2, 3, 4, 8}) {
    const Ranks ranks = Connect(size);
    const int rounds = 40 / size;
    OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
      std::thread second([&] { SubmitAtRandom(rank, size, scheduler, "second", rounds); });
      std::thread third([&] {
        for (int i = 0; i < 5 * rounds; ++i) {
          Sum sum("third" + std::to_string(i % 3), 20, rank);
          CHECK(sum.Submit(scheduler, Then::kWaits).ok());
          CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
          CHECK(sum.handle->status().ok() && sum.IsRight(size));
        }
      });
      SubmitAtRandom(rank, size, scheduler, "first.", rounds);
      second.join();
      third.join();
    });
    for (const auto& scheduler : ranks) {
      CHECK_EQ(scheduler->counters().collectives.load(), static_cast<uint64_t>(29 * rounds));
      scheduler->Close();
    }
  }
}

TEST(sixteen_ranks_add) {
  const Ranks ranks = Connect(16);
  OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) { SubmitAtRandom(rank, 16, scheduler, "x", 3); });
}

TEST(nobody_waits_and_it_gets_done) {
  const Ranks ranks = Connect(2);
  OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
    for (int i = 0; i < 50; ++i) {
      Sum sum("x", 100, rank);
      CHECK(sum.Submit(scheduler, Then::kGoesOn).ok());
      const auto deadline = In(30);
      while (!sum.handle->done() && Clock::now() < deadline) std::this_thread::yield();
      CHECK(sum.handle->done() && sum.IsRight(2));
    }
  });
}

TEST(more_names_than_are_remembered_do_no_harm) {
  const Ranks ranks = Connect(2);
  OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
    for (int lap = 0; lap < 2; ++lap) {
      for (size_t i = 0; i < kCacheCapacity + 500; i += 250) {
        std::vector<Sum> sums;
        for (size_t j = i; j < i + 250; ++j) sums.emplace_back("t" + std::to_string(j), 3, rank);
        if (rank == 1) std::reverse(sums.begin(), sums.end());
        for (Sum& sum : sums) CHECK(sum.Submit(scheduler, Then::kGoesOn).ok());
        for (Sum& sum : sums) {
          CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
          CHECK(sum.handle->status().ok() && sum.IsRight(2));
        }
      }
    }
  });
}

TEST(a_shape_that_changes_on_one_rank_is_a_mismatch_and_the_ranks_live_on) {
  const Ranks ranks = Connect(3);
  OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
    for (int i = 0; i < 30; ++i) {
      const bool differs = i % 3 == 2;
      Sum sum("w", differs && rank == 1 ? 7 : 5, rank);
      CHECK(sum.Submit(scheduler, Then::kWaits).ok());
      CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
      if (differs) {
        CHECK(sum.handle->status().code() == Code::kMismatch);
        CHECK_EQ(std::string(sum.handle->status().text()),
                 std::string("w: rank 1 has shape (7,), rank 0 has (5,)"));
      } else {
        CHECK(sum.handle->status().ok() && sum.IsRight(3));
      }
    }
  });
}

TEST(a_name_is_pending_once) {
  const Ranks ranks = Connect(2);
  OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
    for (int i = 0; i < 3; ++i) {  // in full, then again
      Sum sum("x", 5, rank), twice("x", 5, rank), go("go", 1, rank);
      if (rank == 0) {
        CHECK(sum.Submit(scheduler, Then::kGoesOn).ok());
        CHECK(twice.Submit(scheduler, Then::kGoesOn).code() == Code::kInvalid);
      }
      CHECK(go.Submit(scheduler, Then::kWaits).ok());
      CHECK(scheduler.Wait(*go.handle, Clock::time_point::max(), {}));
      if (rank == 1) CHECK(sum.Submit(scheduler, Then::kGoesOn).ok());
      CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
      CHECK(sum.IsRight(2));
    }
  });
}

std::shared_ptr<Handle> Join(Scheduler& scheduler) {
  Request request;
  request.op = Op::kJoin;
  request.name = "join";
  const auto shared = std::make_shared<const Request>(std::move(request));
  auto handle = std::make_shared<Handle>(shared);
  CHECK(scheduler.Submit({shared, {}, handle}, Then::kWaits).ok());
  CHECK(scheduler.Wait(*handle, Clock::time_point::max(), {}));
  return handle;
}

// Rank r makes r + 1 times as many sums as rank 0 before it joins.
TEST(ranks_that_have_joined_count_as_zeros) {
  const int size = 4, each = 15;
  const Ranks ranks = Connect(size);
  OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (int i = 0; i < each * (rank + 1); ++i) {
        Sum sum("s" + std::to_string(i % 7), i % 4 == 0 ? 3000 : 30, rank);
        CHECK(sum.Submit(scheduler, i % 2 == 0 ? Then::kWaits : Then::kGoesOn).ok());
        CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
        float expected = 0;
        for (int r = i / each; r < size; ++r) expected += static_cast<float>(r + 1);
        CHECK(sum.handle->status().ok());
        for (const float value : sum.data) CHECK_EQ(value, expected);
      }
      const auto handle = Join(scheduler);
      CHECK(handle->status().ok());
      CHECK_EQ(handle->gathered()[0].rows[0], int64_t{size - 1});
    }
  });
}

// Every rank but `rank` waits, in two threads; `end` is called there.
void EndWhileOthersWait(int size, int ender, Code expected, const std::function<void(Scheduler&)>& end) {
  for (const bool again : {false, true}) {
    const Ranks ranks = Connect(size);
    if (again) OnEveryRank(ranks, [&](int r, Scheduler& s) { SubmitAtRandom(r, size, s, "a", 2); });
    std::atomic<int> waiting{0};
    std::atomic<Clock::rep> ended_at{0};
    OnEveryRank(ranks, [&](int rank, Scheduler& scheduler) {
      if (rank == ender) {
        while (waiting.load() < 2 * (size - 1)) std::this_thread::yield();
        ended_at = Clock::now().time_since_epoch().count();
        return end(scheduler);
      }
      const auto wait = [&](const char* name) {
        Sum sum(name, 4, rank);
        CHECK(sum.Submit(scheduler, name[1] == '0' ? Then::kWaits : Then::kGoesOn).ok());
        ++waiting;
        CHECK(scheduler.Wait(*sum.handle, Clock::time_point::max(), {}));
        CHECK(sum.handle->status().code() == expected);
        const Clock::time_point ended{Clock::duration(ended_at.load())};
        CHECK(Clock::now() - ended < Seconds(2));
      };
      std::thread second([&] { wait("a0"); });
      wait("a1");
      second.join();
    });
  }
}

TEST(an_abort_reaches_every_thread_that_waits) {
  for (const int ender : {0, 1})
    EndWhileOthersWait(4, ender, Code::kAborted, [](Scheduler& scheduler) { scheduler.Abort("enough"); });
}

TEST(a_rank_that_closes_ends_what_needs_it) {
  for (const int ender : {0, 2})
    EndWhileOthersWait(3, ender, Code::kShutdown, [](Scheduler& scheduler) { scheduler.Close(); });
}

TEST(closing_ends_the_waits_of_its_own_rank) {
  const Ranks ranks = Connect(2);
  std::atomic<int> waiting{0};
  const auto wait = [&](const char* name, Then then) {
    Sum sum(name, 4, 0);
    CHECK(sum.Submit(*ranks[0], then).ok());
    ++waiting;
    CHECK(ranks[0]->Wait(*sum.handle, Clock::time_point::max(), {}));
    CHECK(sum.handle->status().code() == Code::kShutdown);
  };
  std::thread first([&] { wait("x", Then::kWaits); });
  std::thread second([&] { wait("y", Then::kGoesOn); });
  while (waiting.load() < 2) std::this_thread::yield();
  ranks[0]->Close();
  first.join();
  second.join();
  Sum late("z", 1, 0);
  CHECK(late.Submit(*ranks[0], Then::kWaits).code() == Code::kShutdown);
}

TEST(a_wait_that_is_interrupted_within_a_batch_ends_the_group) {
  const Ranks ranks = Connect(2);
  // Rank 1 announces but never takes part in the batch: it is taken for rank 0's thread that was told to
  // wait.
  Sum mine("x", 1'000'000, 0), theirs("x", 1'000'000, 1);
  CHECK(theirs.Submit(*ranks[1], Then::kGoesOn).ok());
  CHECK(mine.Submit(*ranks[0], Then::kWaits).ok());
  std::atomic<bool> asked{false};
  const bool done = ranks[0]->Wait(*mine.handle, In(20), [&] { return asked = true; });
  CHECK(done);  // with the sum, or with the interruption if the batch took long
  CHECK(mine.handle->status().ok() ? !asked.load() : mine.handle->status().code() == Code::kAborted);
  CHECK(ranks[1]->Wait(*theirs.handle, In(20), {}));
}

// Rank 0 is driven by hand here, and decides what no rank 0 decides.
TEST(a_round_that_names_a_tensor_twice_ends_the_group) {
  Exchanges exchanges = ConnectedExchanges(2);
  Arenas arenas = ConnectedArenas(2, 4096);
  const auto one = MakeRank(1, 2, exchanges, arenas);
  Sum sum("x", 3, 1);
  CHECK(sum.Submit(*one, Then::kGoesOn).ok());
  Decision decision;
  decision.name = "x";
  decision.places = {{}};
  Round round;
  round.ids = {kNoId, kNoId};
  round.in_full = {decision, decision};
  exchanges[0]->PostAll(FrameKind::kDecide, Serialize(round));
  exchanges[0]->Turn();
  constexpr uint32_t kFrame = ~0u;
  CHECK(Mailboxes(*arenas[0]).Write({&kFrame, 1}).value());
  exchanges[0]->Post(1, FrameKind::kBeat, {});  // wakes it
  exchanges[0]->Turn();
  CHECK(one->Wait(*sum.handle, In(20), {}));
  CHECK_EQ(std::string(sum.handle->status().text()), std::string("lost rank 0: it sent a broken decision"));
}

TEST(a_mailbox_carries_words_in_order_and_refuses_nonsense) {
  const Arenas arenas = ConnectedArenas(3, 4096);
  Mailboxes zero(*arenas[0]), one(*arenas[1]), two(*arenas[2]);
  std::mt19937 random(5);
  uint32_t written = 0;
  std::vector<uint32_t> by_one, by_two;
  while (written < 20'000) {
    std::vector<uint32_t> words(1 + random() % 700);
    for (uint32_t& word : words) word = written++;
    const size_t room = zero.Room().value();
    const bool fits = zero.Write(words).value();
    CHECK_EQ(fits, words.size() <= room);
    if (!fits) written -= static_cast<uint32_t>(words.size());
    if (fits) CHECK(one.HasNews());
    if (!fits || random() % 3 == 0) CHECK(one.Read(0, &by_one).ok());
    if (!fits || random() % 3 == 0) CHECK(two.Read(0, &by_two).ok());
  }
  CHECK(one.Read(0, &by_one).ok() && two.Read(0, &by_two).ok());
  CHECK(!one.HasNews());
  CHECK_EQ(by_one.size(), size_t{written});
  CHECK(by_one == by_two);
  for (uint32_t i = 0; i < written; ++i) CHECK_EQ(by_one[i], i);
  one.SetAsleep(true);
  CHECK(zero.IsAsleep(1) && !zero.IsAsleep(2));
  std::fill_n(reinterpret_cast<uint32_t*>(arenas[1]->mailbox(1)), 4096, 0x7fffffffu);
  std::vector<uint32_t> nonsense;
  CHECK(zero.Read(1, &nonsense).code() == Code::kPeerLost);
  CHECK(!zero.Room().ok());
}

}  // namespace
}  // namespace hvd
