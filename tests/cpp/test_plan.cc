// The step of a plan with ranks as threads of this process: random orders, missing members, aborts; on one
// host and on several.
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "base/log.h"
#include "rank_threads.h"
#include "scheduler/plan.h"

namespace hvd {
namespace {

constexpr auto kForEver = std::chrono::seconds(60);

// Ranks of one process: words in ordinary memory, TCP between hosts.
class World {
 public:
  World(int size, PlanSpec spec) : World(Layout{size}, std::move(spec)) {}
  World(const Layout& layout, PlanSpec spec) : spec_(std::move(spec)) {
    for (int rank = 0; rank < SizeOf(layout); ++rank) {
      topologies_.push_back(At(layout, rank));
      const size_t nbytes = Plan::WordsNbytes(spec_, topologies_.back().local_size());
      words_.push_back(std::make_unique<Block[]>(nbytes / sizeof(Block) + 1));
    }
    links_.resize(topologies_.size());
    left_ = std::vector<std::atomic<bool>>(topologies_.size());
    for (const Topology& here : topologies_) Connect(here);
  }

  std::unique_ptr<Plan> Join(int rank) {
    const Topology& here = topologies_[static_cast<size_t>(rank)];
    PlanHost host;
    host.rank = here.local_rank;
    host.first_rank = here.leader(here.host);
    host.hosts = here.hosts();
    host.owners = here.slices();
    for (int local = 0; local < here.local_size(); ++local)
      host.words.push_back(words_[static_cast<size_t>(here.GlobalRank(local))][0].bytes);
    if (here.hosts() > 1) host.chain = MakeChain(here, links_[static_cast<size_t>(rank)], DType::kFloat32);
    host.has_left = [this](int other) { return left_[static_cast<size_t>(other)].load(); };
    host.status = [this] {
      const std::lock_guard lock(mutex_);
      return dead_;
    };
    host.kill = [this](const Status& reason) { Abort(reason); };
    host.stall_warn = stall_warn;
    host.stall_shutdown = stall_shutdown;
    return std::make_unique<Plan>(spec_, std::move(host));
  }

  void Abort(const Status& status) {
    const std::lock_guard lock(mutex_);
    if (dead_.ok()) dead_ = status;
  }

  void SetLeft(int rank) { left_[static_cast<size_t>(rank)] = true; }

  // Runs body(rank, plan) on a thread for each rank.
  void Run(const std::function<void(int, Plan&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        const auto plan = Join(rank);
        body(rank, *plan);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int size() const { return static_cast<int>(words_.size()); }
  const PlanSpec& spec() const { return spec_; }

  Clock::duration stall_warn = kForEver, stall_shutdown = kForEver;

 private:
  struct alignas(64) Block {
    std::byte bytes[64] = {};
  };
  void Connect(const Topology& here) {
    if (here.host + 1 == here.hosts() || here.local_rank >= here.slices()) return;
    const auto next = static_cast<size_t>(here.leader(here.host + 1) + here.local_rank);
    for (int stream = 0; stream < 2; ++stream) {
      auto [here_end, there_end] = LinkPair(false);
      links_[static_cast<size_t>(here.rank)].next.push_back(std::move(here_end));
      links_[next].previous.push_back(std::move(there_end));
    }
  }

  const PlanSpec spec_;
  std::vector<Topology> topologies_;
  std::vector<std::unique_ptr<Block[]>> words_;
  std::vector<RingLinks> links_;
  std::vector<std::atomic<bool>> left_;
  std::mutex mutex_;
  Status dead_;
};

PlanSpec MakeSpec(const std::vector<int64_t>& counts, const BatchLimits& limits,
                  const std::vector<DType>& dtypes = {DType::kFloat32}) {
  PlanSpec spec{"plan", {}, ReduceOp::kSum, {}, limits};
  for (size_t m = 0; m < counts.size(); ++m) {
    spec.members.push_back({"grad/" + std::to_string(m), dtypes[m % dtypes.size()], {counts[m]}, {}});
  }
  return spec;
}

// What a rank has of a member in a step of the property test.
enum class Has { kNothing, kTensor, kDeclined };

struct Scenario {
  std::vector<std::vector<Has>> has;         // [rank][member]
  std::vector<std::vector<uint32_t>> order;  // [rank]: what is handed over before End
};

Scenario MakeScenario(std::mt19937& random, int size, uint32_t members) {
  Scenario scenario;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<uint32_t> order(members);
    for (uint32_t m = 0; m < members; ++m) order[m] = m;
    std::shuffle(order.begin(), order.end(), random);
    scenario.order.push_back(order);
    scenario.has.emplace_back(members, Has::kTensor);
  }
  const auto flavour = random() % 4;  // 0: everything is there
  for (uint32_t m = 0; m < members; ++m) {
    const bool nowhere = flavour > 1 && random() % 6 == 0;
    for (auto& has : scenario.has) {
      if (nowhere || (flavour > 0 && random() % 5 == 0)) has[m] = Has::kNothing;
      if (flavour == 3 && random() % 12 == 0) has[m] = Has::kDeclined;
    }
  }
  return scenario;
}

float Value(int rank, uint32_t member, int step, size_t i) {
  return static_cast<float>((rank + 1) * 3 + static_cast<int>(member) * 7 + step + static_cast<int>(i % 11));
}

void CheckMember(const World& world, const Scenario& scenario, uint32_t m, int rank, int step,
                 const std::vector<float>& got) {
  bool is_somewhere = false, is_declined = false;
  for (const auto& has : scenario.has) {
    is_somewhere |= has[m] != Has::kNothing;
    is_declined |= has[m] == Has::kDeclined;
  }
  for (size_t i = 0; i < got.size(); ++i) {
    float expected = 0;
    if (!is_somewhere || is_declined) {
      if (scenario.has[static_cast<size_t>(rank)][m] != Has::kTensor) return;  // nothing was handed over
      expected = Value(rank, m, step, i);
    } else {
      for (int r = 0; r < world.size(); ++r) {
        if (scenario.has[static_cast<size_t>(r)][m] == Has::kTensor) expected += Value(r, m, step, i);
      }
    }
    if (got[i] != expected) {
      CHECK_EQ(got[i], expected);
      return;
    }
  }
}

void RunStep(const World& world, Plan& plan, const Scenario& scenario, int rank, int step) {
  const auto members = static_cast<uint32_t>(world.spec().members.size());
  std::vector<std::vector<float>> tensors(members);
  const auto make = [&](uint32_t m) { tensors[m].resize(world.spec().members[m].count()); };
  CHECK(plan.Begin().ok());
  for (const uint32_t m : scenario.order[static_cast<size_t>(rank)]) {
    switch (scenario.has[static_cast<size_t>(rank)][m]) {
      case Has::kNothing:
        break;
      case Has::kDeclined:
        CHECK(plan.Decline(m).ok());
        break;
      case Has::kTensor:
        make(m);
        for (size_t i = 0; i < tensors[m].size(); ++i) tensors[m][i] = Value(rank, m, step, i);
        CHECK(plan.Ready(m, tensors[m].data()).ok());
        break;
    }
  }
  std::vector<bool> supplied(members);
  for (;;) {
    const auto progress = plan.End(1u << rank, Clock::now() + kForEver);
    CHECK(progress.ok());
    if (!progress.ok() || progress.value() == Plan::Progress::kDone) break;
    CHECK(progress.value() == Plan::Progress::kNeedsMemory);
    const std::vector<uint32_t> needs = plan.needs();
    for (const uint32_t m : needs) {
      CHECK(scenario.has[static_cast<size_t>(rank)][m] == Has::kNothing && !supplied[m]);
      supplied[m] = true;
      make(m);
      plan.Supply(m, tensors[m].data());
    }
  }
  std::vector<uint32_t> declined;
  for (uint32_t m = 0; m < members; ++m) {
    bool is_somewhere = false, is_declined = false;
    for (const auto& has : scenario.has) {
      is_somewhere |= has[m] == Has::kTensor;
      is_declined |= has[m] == Has::kDeclined;
    }
    if (is_declined) declined.push_back(m);
    const bool must_supply = scenario.has[static_cast<size_t>(rank)][m] == Has::kNothing;
    CHECK_EQ(static_cast<bool>(supplied[m]), must_supply && is_somewhere && !is_declined);
    CheckMember(world, scenario, m, rank, step, tensors[m]);
  }
  CHECK(plan.outcome().declined == declined);
  CHECK_EQ(plan.outcome().flags_of_any, (1u << world.size()) - 1);
  CHECK_EQ(plan.outcome().flags_of_all, world.size() == 1 ? 1u : 0u);
}

}  // namespace

TEST(batches_have_one_dtype_and_a_limit) {
  const BatchLimits limits{100, 200};
  const auto spec =
      MakeSpec({10, 20, 10, 5, 60, 4, 1}, limits, {DType::kFloat32, DType::kFloat32, DType::kFloat16});
  const auto batches = PackBatches(spec.members, limits);
  // Bytes: 40, 80, 20 (half), 20, 240, 8 (half), 4. The fifth is cut into whole cache lines.
  using Parts = std::vector<std::vector<std::array<size_t, 3>>>;  // member, begin, count
  const Parts expected{{{0, 0, 10}}, {{1, 0, 20}, {3, 0, 5}}, {{2, 0, 10}, {5, 0, 4}},
                       {{4, 0, 32}}, {{4, 32, 28}},           {{6, 0, 1}}};
  Parts got;
  size_t status = 0;
  for (const auto& batch : batches) {
    got.emplace_back();
    for (const MemberPart& part : batch) {
      got.back().push_back({part.member, part.begin, part.count});
      CHECK_EQ(part.status, status++);
    }
  }
  CHECK(got == expected);
  CHECK(PackBatches({}, limits).empty());
}

TEST(slices_cover_a_row_once) {
  for (const size_t count : {0u, 1u, 15u, 16u, 17u, 1000u}) {
    for (int size = 1; size <= 8; ++size) {
      size_t next = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Range slice = SliceOf({0, count}, 4, rank, size);
        CHECK_EQ(slice.begin, next);
        next = slice.end;
      }
      CHECK_EQ(next, count);
    }
  }
  const Row row({{7, 0, 3}, {1, 0, 0}, {5, 2, 4}, {2, 0, 5}});
  CHECK_EQ(row.count(), 12u);
  for (size_t begin = 0; begin <= 12; ++begin) {
    for (size_t end = begin; end <= 12; ++end) {
      size_t total = 0;
      row.ForEach({begin, end}, [&](const MemberPart& part, size_t offset) {
        CHECK(part.count > 0 && part.member != 1);
        CHECK_EQ(offset, begin + total);
        if (part.member == 5) CHECK_EQ(part.begin, offset - 3 + 2);
        total += part.count;
      });
      CHECK_EQ(total, end - begin);
    }
  }
}

void RunRandomSteps(std::mt19937& random, const Layout& layout, int64_t most_elements, int steps) {
  std::vector<int64_t> counts(1 + random() % 12);
  for (int64_t& count : counts) count = static_cast<int64_t>(random()) % most_elements;
  const BatchLimits limits{64 + random() % 2000, 64 + random() % 4000};
  World world(layout, MakeSpec(counts, limits));
  std::vector<Scenario> scenarios;
  for (int step = 0; step < steps; ++step)
    scenarios.push_back(MakeScenario(random, world.size(), static_cast<uint32_t>(counts.size())));
  world.Run([&](int rank, Plan& plan) {
    std::mt19937 delays(static_cast<unsigned>(rank));
    for (int step = 0; step < steps; ++step) {
      if (delays() % 3 == 0) std::this_thread::yield();
      RunStep(world, plan, scenarios[static_cast<size_t>(step)], rank, step);
    }
  });
}

TEST(steps_in_random_orders_with_missing_and_declined_members) {
  std::mt19937 random(1);
  for (int size = 1; size <= 16; size += size < 4 ? 1 : kFewer) {
    RunRandomSteps(random, {size}, 300, 12 / kFewer);
    if (size <= 8) RunRandomSteps(random, {size}, 300, 12 / kFewer);
    if (size <= 6) RunRandomSteps(random, {size}, 200'000, 3);
  }
}

TEST(steps_on_several_hosts_with_missing_and_declined_members) {
  std::mt19937 random(3);
  const Layout layouts[] = {{1, 1}, {2, 2}, {3, 1}, {1, 3}, {1, 1, 2}, {1, 1, 1, 1}, {4, 2, 3}, {4, 4, 4, 4}};
  for (const Layout& layout : layouts) {
    if (kFewer > 1 && layout == Layout{4, 4, 4, 4}) continue;  // 16 threads
    RunRandomSteps(random, layout, 300, 12 / kFewer);
    RunRandomSteps(random, layout, 300, 12 / kFewer);
    if (layout.size() < 4) RunRandomSteps(random, layout, 200'000, 3);
  }
}

// More than the window holds, so that a rank that is ahead has to wait with its copies.
TEST(steps_through_a_window_that_is_smaller_than_the_tensors) {
  std::mt19937 random(4);
  for (const Layout& layout : {Layout{2}, Layout{3}, Layout{2, 2}}) {
    if (kFewer > 1 && layout != Layout{2}) continue;
    const std::vector<int64_t> counts{100, 5 << 20, 3, 1 << 20, 2 << 20};
    World world(layout, MakeSpec(counts, {1 << 20, 4 << 20}));
    const auto nbytes = [&](size_t m) { return world.spec().members[m].nbytes(); };
    CHECK(Plan::WordsNbytes(world.spec(), 2) < nbytes(1) + nbytes(3) + nbytes(4));
    std::vector<Scenario> scenarios;
    for (int step = 0; step < 4 / kFewer; ++step)
      scenarios.push_back(MakeScenario(random, world.size(), static_cast<uint32_t>(counts.size())));
    world.Run([&](int rank, Plan& plan) {
      for (size_t step = 0; step < scenarios.size(); ++step)
        RunStep(world, plan, scenarios[step], rank, static_cast<int>(step));
    });
  }
}

TEST(a_fused_batch_goes_between_hosts_before_end) {
  World world({1, 1}, MakeSpec({1000, 1000}, {4000, 4000}));
  const auto first = world.Join(0), second = world.Join(1);
  std::vector<float> a(1000, 1), b(1000, 2), last(1000, 5), last_b(1000, 6);
  CHECK(first->Begin().ok() && second->Begin().ok());
  CHECK(first->Ready(0, a.data()).ok());   // on its way
  CHECK(second->Ready(0, b.data()).ok());  // there, and on its way back
  CHECK(b == std::vector<float>(1000, 3));
  CHECK(first->Ready(1, last.data()).ok());
  CHECK(a == b);
  CHECK(second->Ready(1, last_b.data()).ok());
  std::thread other([&] { CHECK(second->End(0, Clock::now() + kForEver).ok()); });
  CHECK(first->End(0, Clock::now() + kForEver).value() == Plan::Progress::kDone);
  other.join();
  CHECK(last == std::vector<float>(1000, 11) && last_b == last);
}

TEST(a_rank_of_another_host_that_left_before_the_step_is_named) {
  World world({1, 2}, MakeSpec({100}, {}));
  const auto first = world.Join(0);
  world.SetLeft(1);
  std::vector<float> x(100);
  CHECK(first->Begin().ok() && first->Ready(0, x.data()).ok());
  const auto result = first->End(0, Clock::now() + kForEver);
  CHECK(result.status().code() == Code::kShutdown);
  CHECK(result.status().text().find("rank 1 has left") != std::string_view::npos);
}

TEST(leaving_in_the_middle_of_a_step_ends_the_group_of_several_hosts) {
  World world({1, 1}, MakeSpec({100}, {}));
  auto first = world.Join(0);
  const auto second = world.Join(1);
  std::vector<float> x(100), y(100);
  CHECK(first->Begin().ok() && second->Begin().ok());
  CHECK(first->Ready(0, x.data()).ok() && second->Ready(0, y.data()).ok());
  first.reset();
  const auto result = second->End(0, Clock::now() + kForEver);
  CHECK(result.status().code() == Code::kShutdown);
  CHECK(result.status().text().find("rank 0 has left 'plan'") != std::string_view::npos);
}

TEST(what_all_have_handed_over_is_reduced_before_end) {
  World world(2, MakeSpec({1000, 1000}, {4000, 4000}));
  const auto first = world.Join(0), second = world.Join(1);
  std::vector<float> a(1000, 1), b(1000, 2), last(1000, 5), last_b(1000, 6);
  CHECK(first->Begin().ok() && second->Begin().ok());
  CHECK(first->Ready(0, a.data()).ok());
  CHECK(second->Ready(0, b.data()).ok());    // reduces its half
  CHECK(first->Ready(1, last.data()).ok());  // reduces the other half and fetches
  CHECK(a == std::vector<float>(1000, 3));
  CHECK_EQ(b[999], 3.0f);
  const Status twice = first->Ready(0, a.data());
  CHECK(twice.code() == Code::kInvalid &&
        twice.text().find("grad/0 was handed over twice") != twice.text().npos);
  CHECK(second->Ready(1, last_b.data()).ok());
  std::thread other([&] { CHECK(second->End(0, Clock::now() + kForEver).ok()); });
  CHECK(first->End(0, Clock::now() + kForEver).value() == Plan::Progress::kDone);
  other.join();
  CHECK(last == std::vector<float>(1000, 11) && last_b == last && b == a);
  CHECK(!first->Ready(0, a.data()).ok());
}

TEST(average_of_half_precision_divides_once) {
  auto spec = MakeSpec({333}, {}, {DType::kFloat64});
  spec.reduce = ReduceOp::kAverage;
  spec.scale = {0.5, 4, 3};
  World world(3, spec);
  world.Run([&](int rank, Plan& plan) {
    std::vector<double> x(333, rank + 1);
    CHECK(plan.Begin().ok() && plan.Ready(0, x.data()).ok());
    CHECK(plan.End(0, Clock::now() + kForEver).ok());
    CHECK(x == std::vector<double>(333, 4.0));
  });
}

TEST(an_abort_ends_the_wait_of_everyone_in_time) {
  std::mt19937 random(7);
  const Layout layouts[] = {{2}, {3}, {4}, {5}, {2, 2}, {3, 1}, {1, 1, 2}};
  for (const Layout& layout : layouts) {
    for (int round = 0; round < 4; ++round) {
      World world(layout, MakeSpec({500, 500, 500}, {100, 100}));
      const int size = world.size();
      const int culprit = static_cast<int>(random() % static_cast<unsigned>(size));
      const uint32_t given = static_cast<uint32_t>(random() % 3);
      // Threads, unlike processes, must not read what a rank that fails gives back.
      std::vector<std::vector<std::vector<float>>> tensors(static_cast<size_t>(size));
      world.Run([&](int rank, Plan& plan) {
        auto& x = tensors[static_cast<size_t>(rank)];
        x.resize(3, std::vector<float>(500, 1));
        static_cast<void>(plan.Begin());
        for (uint32_t m = 0; m < (rank == culprit ? given : 3); ++m)
          static_cast<void>(plan.Ready(m, x[m].data()));
        if (rank == culprit) {
          world.Abort(Status(Code::kPeerLost, "lost rank " + std::to_string(culprit)));
          return;  // destroys its plan
        }
        const auto begin = Clock::now();
        const auto result = plan.End(0, Clock::now() + kForEver);
        CHECK(!result.ok() && result.status().code() == Code::kPeerLost);
        CHECK(result.status().text().find("lost rank " + std::to_string(culprit)) != std::string_view::npos);
        CHECK(Clock::now() - begin < std::chrono::milliseconds(500));
        CHECK(plan.Begin().code() == Code::kPeerLost);
        CHECK(plan.Ready(0, x[0].data()).code() == Code::kPeerLost);
      });
    }
  }
}

TEST(a_rank_that_leaves_after_its_last_step_disturbs_nobody) {
  for (int round = 0; round < 50; ++round) {
    World world(3, MakeSpec({100, 100}, {100, 100}));
    world.Run([&](int rank, Plan& plan) {
      std::vector<float> x(100, 1), y(100, 2);
      CHECK(plan.Begin().ok() && plan.Ready(0, x.data()).ok() && plan.Ready(1, y.data()).ok());
      CHECK(plan.End(0, Clock::now() + kForEver).ok());
      CHECK(x[99] == 3 && y[0] == 6);
      if (rank == 0) return;
    });
  }
}

TEST(a_rank_that_left_before_the_step_is_named) {
  World world(2, MakeSpec({100}, {}));
  const auto first = world.Join(0), second = world.Join(1);
  second->Leave();
  std::vector<float> x(100);
  CHECK(first->Begin().ok() && first->Ready(0, x.data()).ok());
  const auto result = first->End(0, Clock::now() + kForEver);
  CHECK(result.status().code() == Code::kShutdown);
  CHECK(result.status().text().find("rank 1 has left") != std::string_view::npos);
}

TEST(a_deadline_leaves_the_step_open) {
  World world(2, MakeSpec({100}, {}));
  const auto first = world.Join(0), second = world.Join(1);
  std::vector<float> x(100, 1), y(100, 2);
  CHECK(first->Begin().ok() && first->Ready(0, x.data()).ok());
  CHECK(first->End(0, Clock::now()).value() == Plan::Progress::kPending);
  CHECK(first->is_open() && first->Begin().code() == Code::kInvalid);
  CHECK(second->Begin().ok() && second->Ready(0, y.data()).ok());
  std::thread other([&] { CHECK(second->End(0, Clock::now() + kForEver).ok()); });
  CHECK(first->End(0, Clock::now() + kForEver).value() == Plan::Progress::kDone);
  other.join();
  CHECK(x == y && x[0] == 3);
}

TEST(a_stall_names_the_fused_batch_and_the_rank) {
  World world(3, MakeSpec({100, 100}, {100, 100}));
  world.stall_warn = std::chrono::milliseconds(1);
  world.stall_shutdown = std::chrono::milliseconds(300);
  static std::atomic<int> warnings = 0;
  SetLogSink([](Level, std::string_view text) {
    CHECK_EQ(text, "'plan', fused batch of 'grad/0', not handed over by rank 1 for 0 s (stall_warn_s)");
    ++warnings;
  });
  std::atomic<int> done = 0;
  world.Run([&](int rank, Plan& plan) {
    if (rank == 1) {
      while (done < 2) std::this_thread::yield();
      return;
    }
    std::vector<float> x(100);
    CHECK(plan.Begin().ok() && plan.Ready(0, x.data()).ok());
    const auto result = plan.End(0, Clock::now() + kForEver);
    CHECK(result.status().code() == Code::kTimeout || result.status().code() == Code::kAborted);
    CHECK(result.status().text().find("not handed over by rank 1") != std::string_view::npos);
    CHECK(result.status().text().find("stall_shutdown_s") != std::string_view::npos);
    ++done;
  });
  SetLogSink(nullptr);
  CHECK_EQ(warnings.load(), 1);
}

// All have handed everything over, and so nobody waits for a fused batch: only who has not called End is
// named, not who waits in it like this rank. On the second layout rank 2 owns no slice.
TEST(a_stall_at_the_end_names_who_has_not_ended) {
  for (const Layout& layout : {Layout{3}, Layout{3, 1}}) {
    World world(layout, MakeSpec({100, 100}, {100, 100}));
    world.stall_shutdown = std::chrono::milliseconds(100);
    std::atomic<int> given = 0, done = 0;
    world.Run([&](int rank, Plan& plan) {
      std::vector<float> x(100), y(100);
      while (rank == 1 && given < world.size() - 1)
        std::this_thread::yield();  // so it reduces its slices at once
      CHECK(plan.Begin().ok() && plan.Ready(0, x.data()).ok() && plan.Ready(1, y.data()).ok());
      ++given;
      if (rank == 1) {
        while (done < world.size() - 1) std::this_thread::yield();
        return;
      }
      const auto result = plan.End(0, Clock::now() + kForEver);
      CHECK(!result.ok());
      const std::string text(result.status().text());
      const bool names_it = text.find("'plan', not ended by rank 1 for") != text.npos;
      if (rank != 3 && !names_it) CHECK_EQ(text, "...");  // shows it
      ++done;
    });
  }
}

}  // namespace hvd
