// Who is ready, what goes together, and what a mismatch says: pure functions, tested without a process.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "check.h"
#include "scheduler/fusion.h"
#include "scheduler/negotiate.h"

namespace hvd {
namespace {

Request Allreduce(const std::string& name, std::vector<int64_t> shape, DType dtype = DType::kFloat32) {
  Request request;
  request.name = name;
  request.members.push_back({name, dtype, std::move(shape), {}});
  return request;
}

const Clock::time_point kNow{};

TEST(nothing_is_decided_before_all_ranks_announced) {
  Negotiator negotiator(3, 1 << 20);
  negotiator.Announce(2, Allreduce("x", {4}), kNow);
  negotiator.Announce(0, Allreduce("x", {4}), kNow);
  CHECK(negotiator.Decide().ids.empty());
  CHECK_EQ(negotiator.Waits().size(), 1u);
  CHECK_EQ(negotiator.Describe(negotiator.Waits()[0]),
           std::string("allreduce 'x' was submitted by ranks 0, 2 but not by rank 1"));
  negotiator.Announce(1, Allreduce("x", {4}), kNow);
  const Round round = negotiator.Decide();
  CHECK_EQ(round.in_full.size(), 1u);
  CHECK(round.in_full[0].mismatch.empty());
  CHECK(negotiator.idle());
}

TEST(a_stall_says_what_the_missing_rank_waits_in) {
  Negotiator negotiator(2, 1 << 20);
  negotiator.Announce(0, Allreduce("mine", {4}), kNow);
  negotiator.Announce(1, Allreduce("yours", {4}), kNow);
  const auto waits = negotiator.Waits();
  CHECK_EQ(waits.size(), 2u);
  CHECK_EQ(
      negotiator.Describe(waits[0]),
      std::string("allreduce 'mine' was submitted by rank 0 but not by rank 1 (which waits in 'yours')"));
}

TEST(every_order_of_announcements_completes_every_name_once) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const int size = 1 + trial % 5;
    std::vector<std::pair<int, int>> events;
    for (int rank = 0; rank < size; ++rank) {
      for (int name = 0; name < 6; ++name) events.emplace_back(rank, name);
    }
    std::shuffle(events.begin(), events.end(), random);
    Negotiator negotiator(size, 1 << 20);
    std::map<std::string, int> decided;
    for (const auto& [rank, name] : events) {
      negotiator.Announce(rank, Allreduce("t" + std::to_string(name), {name}), kNow);
      for (const Decision& decision : negotiator.Decide().in_full) ++decided[decision.name];
    }
    CHECK_EQ(decided.size(), 6u);
    for (const auto& [name, times] : decided) CHECK_EQ(times, 1);
    CHECK(negotiator.idle());
  }
}

std::string MismatchOf(const Request& first, const Request& second) { return FindMismatch({first, second}); }

TEST(a_mismatch_names_tensor_ranks_and_both_values) {
  const Request first = Allreduce("grad/fc1.weight", {10});
  CHECK_EQ(MismatchOf(first, Allreduce("grad/fc1.weight", {12})),
           std::string("grad/fc1.weight: rank 1 has shape (12,), rank 0 has (10,)"));
  CHECK_EQ(MismatchOf(first, Allreduce("grad/fc1.weight", {10}, DType::kFloat64)),
           std::string("grad/fc1.weight: rank 1 has dtype float64, rank 0 has float32"));
  Request other = first;
  other.reduce = ReduceOp::kMax;
  CHECK(!MismatchOf(first, other).empty());
  other = first;
  other.prescale = 0.5;
  CHECK_EQ(MismatchOf(first, other), std::string("grad/fc1.weight: rank 1 has prescale 0.5, rank 0 has 1"));
  other = first;
  other.root = 1;
  CHECK(!MismatchOf(first, other).empty());
  other = first;
  other.op = Op::kBroadcast;
  CHECK_EQ(MismatchOf(first, other),
           std::string("grad/fc1.weight: rank 1 has operation broadcast, rank 0 has allreduce"));
  other = first;
  other.members.push_back(first.members[0]);
  CHECK(!MismatchOf(first, other).empty());
  CHECK(MismatchOf(first, first).empty());
}

TEST(allgather_lets_only_the_first_extent_differ) {
  Request first = Allreduce("g", {2, 3}), second = Allreduce("g", {5, 3}), third = Allreduce("g", {5, 4});
  first.op = second.op = third.op = Op::kAllgather;
  CHECK(MismatchOf(first, second).empty());
  CHECK_EQ(MismatchOf(first, third), std::string("g: rank 1 has shape (5, 4), rank 0 has (2, 3)"));
  Negotiator negotiator(2, 1 << 20);
  negotiator.Announce(0, first, kNow);
  negotiator.Announce(1, second, kNow);
  CHECK((negotiator.Decide().in_full[0].rows == std::vector<std::vector<int64_t>>{{2, 5}}));
}

TEST(alltoall_tells_all_ranks_the_splits_of_all_and_remembers_them) {
  Request first = Allreduce("a", {3, 4}), second = Allreduce("a", {5, 4});
  first.op = second.op = Op::kAlltoall;
  first.splits = {1, 2};
  second.splits = {5, 0};
  CHECK(MismatchOf(first, second).empty());
  Request wider = second;
  wider.members[0].shape[1] = 7;
  CHECK_EQ(MismatchOf(first, wider), std::string("a: rank 1 has shape (5, 7), rank 0 has (3, 4)"));
  Negotiator negotiator(2, 1 << 20);
  negotiator.Announce(0, first, kNow);
  negotiator.Announce(1, second, kNow);
  const std::vector<std::vector<int64_t>> expected{{1, 2}, {5, 0}};
  CHECK(negotiator.Decide().in_full[0].rows == expected);
  // One rank has the same again and says so by number, the other one splits otherwise.
  CHECK(negotiator.Announce(1, CacheId{0}, kNow));
  first.splits = {3, 0};
  negotiator.Announce(0, first, kNow);
  CHECK((negotiator.Decide().in_full[0].rows == std::vector<std::vector<int64_t>>{{3, 0}, {5, 0}}));
}

Request Join() {
  Request join;
  join.op = Op::kJoin;
  join.name = "join";
  return join;
}

TEST(who_has_joined_is_not_waited_for) {
  Request gather = Allreduce("g", {5, 2});
  gather.op = Op::kAllgather;
  Request sent = Allreduce("b", {2});
  sent.op = Op::kBroadcast;
  Request split = Allreduce("a", {3});
  split.op = Op::kAlltoall;
  split.splits = {1, 2, 0};
  Negotiator negotiator(3, 1 << 20);
  for (int rank = 0; rank < 3; ++rank) negotiator.Announce(rank, Allreduce("known", {7}), kNow);
  CHECK_EQ(negotiator.Decide().ids.size(), 1u);
  // Announced before, by number and in full: complete when the last one joins.
  CHECK(negotiator.Announce(1, CacheId{0}, kNow) && negotiator.Announce(2, CacheId{0}, kNow));
  for (const int rank : {1, 2}) negotiator.Announce(rank, gather, kNow);
  CHECK(!negotiator.has_ready());
  negotiator.Announce(0, Join(), kNow);
  Round round = negotiator.Decide();
  CHECK_EQ(round.in_full.size(), 2u);
  for (const Decision& decision : round.in_full) {
    CHECK_EQ(decision.mismatch, "");
    CHECK_EQ(decision.stand_in->name, decision.name);
    if (decision.name == "g") CHECK((decision.rows == std::vector<std::vector<int64_t>>{{0, 5, 5}}));
    if (decision.name == "g") CHECK((decision.stand_in->members[0].shape == std::vector<int64_t>{0, 2}));
  }
  // Later, also by number.
  for (const int rank : {1, 2}) {
    CHECK(negotiator.Announce(rank, CacheId{0}, kNow));
    negotiator.Announce(rank, sent, kNow);
    negotiator.Announce(rank, split, kNow);
  }
  round = negotiator.Decide();
  CHECK_EQ(round.in_full.size(), 3u);
  CHECK_EQ(round.in_full[0].name, "known");
  CHECK_EQ(round.in_full[1].mismatch, "b: its root, rank 0, has joined");
  CHECK((round.in_full[2].rows == std::vector<std::vector<int64_t>>{{0, 0, 0}, {1, 2, 0}, {1, 2, 0}}));
  // What the others disagree about names them.
  negotiator.Announce(1, Allreduce("x", {1}), kNow);
  negotiator.Announce(2, Allreduce("x", {2}), kNow);
  CHECK_EQ(negotiator.Decide().in_full[0].mismatch, "x: rank 2 has shape (2,), rank 1 has (1,)");
  negotiator.Announce(2, Join(), kNow);
  CHECK(!negotiator.has_ready());
  CHECK_EQ(negotiator.Waits().size(), 1u);
  CHECK((negotiator.Waits()[0].missing == std::vector<int>{1}));
  negotiator.Announce(1, Allreduce("alone", {1}), kNow);
  CHECK_EQ(negotiator.Decide().in_full.size(), 1u);
  negotiator.Announce(1, Join(), kNow);
  round = negotiator.Decide();
  CHECK((round.in_full[0].rows == std::vector<std::vector<int64_t>>{{1}}));
  CHECK(!round.in_full[0].stand_in && negotiator.idle());
  // Then all are waited for again, and numbers hold.
  for (const int rank : {1, 2}) CHECK(negotiator.Announce(rank, CacheId{0}, kNow));
  CHECK(!negotiator.has_ready());
  CHECK(negotiator.Announce(0, CacheId{0}, kNow));
  CHECK((negotiator.Decide().ids == std::vector<CacheId>{0}));
}

TEST(fusion_joins_only_what_may_go_together_and_keeps_to_the_limit) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t limit = trial % 7 == 0 ? 0 : 1u << (trial % 14);
    std::vector<Request> requests;
    std::vector<Decision> decisions;
    for (int i = 0; i < 1 + trial % 20; ++i) {
      Request request = Allreduce("t" + std::to_string(i), {static_cast<int64_t>(random() % 500)},
                                  random() % 2 == 0 ? DType::kFloat32 : DType::kInt64);
      if (random() % 3 == 0) request.reduce = ReduceOp::kMax;
      if (random() % 5 == 0) request.op = Op::kBroadcast;
      Decision decision;
      decision.name = request.name;
      decision.places.resize(1);
      requests.push_back(request);
      decisions.push_back(decision);
    }
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < requests.size(); ++i)
      AppendTensors(requests[i], decisions[i], static_cast<uint32_t>(i), &tensors);
    std::vector<int> seen(requests.size());
    const Batches batches = Fuse(tensors, limit);
    for (size_t b = 0; b < batches.size(); ++b) {
      const auto batch = batches[b];
      CHECK(!batch.empty());
      CHECK(std::is_sorted(batch.begin(), batch.end(),
                           [](const Tensor& a, const Tensor& z) { return a.decision < z.decision; }));
      uint64_t nbytes = 0;
      const Request& first = requests[batch[0].decision];
      for (const Tensor& tensor : batch) {
        const Request& request = requests[tensor.decision];
        ++seen[tensor.decision];
        CHECK_EQ(tensor.nbytes, request.members[0].nbytes());
        nbytes += tensor.nbytes;
        CHECK(request.op == first.op && request.reduce == first.reduce);
        CHECK(request.members[0].dtype == first.members[0].dtype);
      }
      CHECK(batch.size() == 1 || nbytes <= limit);
      CHECK(batch.size() == 1 || first.op == Op::kAllreduce);
    }
    for (const int times : seen) CHECK_EQ(times, 1);
  }
}

TEST(a_name_index_finds_what_it_holds) {
  std::mt19937 random(13);
  for (int trial = 0; trial < 50; ++trial) {
    NameIndex index;
    std::map<std::string, uint32_t> expected;
    std::vector<std::string> names(200);
    for (uint32_t slot = 0; slot < names.size(); ++slot) names[slot] = "t" + std::to_string(slot * 7);
    for (int step = 0; step < 1000; ++step) {
      const auto slot = static_cast<uint32_t>(random() % names.size());
      const std::string& name = names[slot];
      if (expected.contains(name)) {
        index.Erase(name, slot);
        expected.erase(name);
      } else {
        index.Insert(name, slot);
        expected[name] = slot;
      }
      const std::string& other = names[random() % names.size()];
      const auto found = expected.find(other);
      CHECK_EQ(index.Find(other, [&](uint32_t s) { return names[s] == other; }),
               found == expected.end() ? NameIndex::kNone : found->second);
      CHECK_EQ(index.size(), expected.size());
    }
  }
}

TEST(a_cache_forgets_what_was_decided_longest_ago_and_never_takes_an_old_number_for_a_new_one) {
  std::mt19937 random(17);
  for (int trial = 0; trial < 100; ++trial) {
    const size_t capacity = 1 + random() % 16;
    Cache<int> cache(capacity);
    std::vector<std::string> by_age;  // the oracle
    std::map<std::string, std::pair<CacheId, int>> last;
    std::vector<CacheId> dead;
    const auto drop = [&](const std::string& name) {
      dead.push_back(last[name].first);
      std::erase(by_age, name);
    };
    for (int step = 0; step < 300; ++step) {
      const std::string name = "n" + std::to_string(random() % (2 * capacity));
      auto* entry = cache.Find(name);
      CHECK_EQ(entry != nullptr, std::ranges::find(by_age, name) != by_age.end());
      if (entry != nullptr && random() % 2 == 0) {
        CHECK_EQ(entry->value, last[name].second);
        cache.Touch(entry->id);
        std::erase(by_age, name);
        by_age.push_back(name);
      } else {
        if (entry != nullptr) drop(name);
        last[name] = {cache.Add(name, step)->id, step};
        by_age.push_back(name);
      }
      cache.Trim([&](const auto& forgotten) {
        CHECK_EQ(forgotten.name, by_age.front());
        drop(by_age.front());
      });
      CHECK(cache.size() <= capacity);
      for (const CacheId id : dead) CHECK(cache.Find(id) == nullptr && cache.WasGiven(id));
      std::vector<std::string> visited;
      cache.ForEach([&](const auto& e) { visited.push_back(e.name); });
      CHECK(visited == by_age);
    }
  }
}

TEST(a_set_of_ranks_holds_any_number_of_them) {
  for (const int size : {1, 2, 16, 63, 64, 65, 200}) {
    RankSet ranks;
    for (int r = size - 1; r >= 0; r -= 3) ranks.Add(r);
    for (int r = 0; r < size; ++r) CHECK_EQ(ranks.Has(r), (size - 1 - r) % 3 == 0);
    ranks.Clear();
    for (int r = 0; r < size; ++r) CHECK(!ranks.Has(r));
  }
}

// A rank as the scheduler has it, apart from the work: what it submits again it announces by number.
struct SimulatedRank {
  struct Mine {
    Request request;
  };
  explicit SimulatedRank(size_t capacity) : known(capacity) {}

  Cache<Mine> known;
  std::map<std::string, Request> pending;
  std::map<std::string, bool> by_id;
  std::deque<Announcement> out;  // to the coordinator, in order
  std::deque<Round> in;
  std::map<std::string, int> decided, mismatched;

  void Submit(const Request& request) {
    const auto* entry = known.Find(request.name);
    by_id[request.name] = entry != nullptr && Same(entry->value.request, request);
    pending[request.name] = request;
    if (by_id[request.name]) {
      out.push_back({entry->id, {}});
    } else {
      out.push_back({kNoId, request});
    }
  }
  static bool Same(const Request& a, const Request& b) {
    return a.members[0].shape == b.members[0].shape && a.members[0].where == b.members[0].where;
  }
  // False if the round is about something that is not pending here.
  bool Apply(const Round& round) {
    auto in_full = round.in_full.begin();
    for (const CacheId id : round.ids) {
      auto* entry = id == kNoId ? nullptr : known.Find(id);
      if (id != kNoId && entry == nullptr) return false;
      const std::string name = entry == nullptr ? in_full->name : entry->name;
      const auto found = pending.find(name);
      if (found == pending.end()) return false;
      ++decided[name];
      if (entry != nullptr) {
        if (!by_id[name]) return false;
        known.Touch(id);
      } else if (in_full->mismatch.empty()) {
        known.Add(name, {found->second});
      } else {
        ++mismatched[name];
      }
      if (id == kNoId) ++in_full;
      pending.erase(found);
    }
    known.Trim([this](const Cache<Mine>::Entry& entry) {
      const auto found = pending.find(entry.name);
      if (found == pending.end() || !by_id[entry.name]) return;
      by_id[entry.name] = false;
      out.push_back({kNoId, found->second});
    });
    return true;
  }
};

TEST(what_comes_again_is_decided_once_whatever_is_forgotten_and_however_late_news_are) {
  std::mt19937 random(21);
  for (int trial = 0; trial < 400; ++trial) {
    const int size = 1 + trial % 16;
    const size_t capacity = 1 + random() % 6;
    const int names = 1 + static_cast<int>(random() % 8), times = 6;
    Negotiator negotiator(size, 1 << 20, capacity);
    std::vector<SimulatedRank> ranks(static_cast<size_t>(size), SimulatedRank(capacity));
    std::vector<std::map<std::string, int>> submitted(static_cast<size_t>(size));
    const auto request_of = [&](int rank, int name, int time) {
      // Now and then another shape, on all ranks or on one of them, or another place.
      Request request = Allreduce("t" + std::to_string(name), {1 + (time * 7 + name) % 5 / 4});
      if ((time + name) % 5 == 3 && rank == size - 1 && size > 1) request.members[0].shape = {9};
      if ((time + rank) % 4 == 0) request.members[0].where = {1, 64};
      return request;
    };
    int left = size * names * times, idle = 0;
    while (left > 0 && idle < 100'000) {
      ++idle;
      const auto rank = static_cast<int>(random() % static_cast<unsigned>(size));
      SimulatedRank& me = ranks[static_cast<size_t>(rank)];
      const int name = static_cast<int>(random() % static_cast<unsigned>(names));
      const std::string text = "t" + std::to_string(name);
      int& time = submitted[static_cast<size_t>(rank)][text];
      switch (random() % 4) {
        case 0:
          if (time < times && !me.pending.contains(text)) me.Submit(request_of(rank, name, time++));
          break;
        case 1:
          if (me.out.empty()) break;
          if (me.out.front().id == kNoId) {
            negotiator.Announce(rank, me.out.front().request, kNow);
          } else {
            CHECK(negotiator.Announce(rank, me.out.front().id, kNow));
          }
          me.out.pop_front();
          break;
        case 2:
          if (me.in.empty()) break;
          left -= static_cast<int>(me.in.front().ids.size());
          CHECK(me.Apply(me.in.front()));
          me.in.pop_front();
          break;
        case 3: {
          const Round round = negotiator.Decide();
          if (round.ids.empty()) break;
          for (SimulatedRank& each : ranks) each.in.push_back(round);
          idle = 0;
        }
      }
    }
    CHECK_EQ(left, 0);
    CHECK(negotiator.idle());
    for (const SimulatedRank& rank : ranks) {
      CHECK(rank.decided == ranks[0].decided && rank.mismatched == ranks[0].mismatched);
      CHECK_EQ(rank.known.size() <= capacity, true);
      for (const auto& [name, count] : rank.decided) CHECK_EQ(count, times);
      for (int n = 0; n < names && size > 1; ++n) {
        int expected = 0;
        for (int t = 0; t < times; ++t) expected += (t + n) % 5 == 3;
        const auto found = rank.mismatched.find("t" + std::to_string(n));
        CHECK_EQ(found == rank.mismatched.end() ? 0 : found->second, expected);
      }
    }
  }
}

TEST(a_number_that_was_never_given_is_noticed) {
  Negotiator negotiator(2, 1 << 20);
  CHECK(!negotiator.Announce(1, CacheId{0}, kNow));
  negotiator.Announce(0, Allreduce("x", {4}), kNow);
  negotiator.Announce(1, Allreduce("x", {4}), kNow);
  CHECK_EQ(negotiator.Decide().in_full.size(), 1u);
  CHECK(negotiator.Announce(1, CacheId{0}, kNow));
  CHECK(!negotiator.Announce(1, CacheId{1}, kNow));
  CHECK(!negotiator.Announce(1, kNoId, kNow));
  CHECK_EQ(negotiator.Waits().size(), 1u);
  CHECK_EQ(negotiator.Describe(negotiator.Waits()[0]),
           std::string("allreduce 'x' was submitted by rank 1 but not by rank 0"));
  CHECK_EQ(negotiator.WaitsFor(0).value(), std::string("x"));
  negotiator.Announce(0, Allreduce("x", {5}), kNow);
  CHECK_EQ(negotiator.Decide().in_full[0].mismatch, std::string("x: rank 1 has shape (4,), rank 0 has (5,)"));
  CHECK(negotiator.idle());
}

TEST(requests_and_rounds_survive_the_wire_and_damage_is_noticed) {
  Request request = Allreduce("x", {2, 0, 5}, DType::kBFloat16);
  request.members[0].where = {3, 4096};
  const std::string bytes = Serialize({{kNoId, request}, {7, {}}, {kNoId, Allreduce("y", {})}});
  const auto parsed = ParseAnnouncements(bytes);
  CHECK(parsed.ok());
  CHECK_EQ(Serialize(parsed.value()), bytes);
  Round round;
  round.fusion_nbytes = 5;
  round.ids = {kNoId, 3, kNoId};
  round.in_full.push_back({"x", "", {{1, 2}}, {{{1, 64}, {2, 128}}}});
  round.in_full.push_back({"y", "they differ", {}, {}});
  const std::string round_bytes = Serialize(round);
  CHECK_EQ(Serialize(ParseRound(round_bytes).value()), round_bytes);
  for (size_t cut = 0; cut < bytes.size(); ++cut) CHECK(!ParseAnnouncements(bytes.substr(0, cut)).ok());
  for (size_t cut = 0; cut < round_bytes.size(); ++cut) CHECK(!ParseRound(round_bytes.substr(0, cut)).ok());
  const int64_t huge = int64_t{1} << 62;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{-1}, {huge, 4}, {huge, 0}})
    CHECK(!ParseAnnouncements(Serialize({{kNoId, Allreduce("x", shape)}})).ok());
  std::mt19937 random(3);
  for (int trial = 0; trial < 2000; ++trial) {  // no crash, no endless allocation
    std::string damaged = bytes;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    [[maybe_unused]] const bool ok = ParseAnnouncements(damaged).ok();
  }
}

}  // namespace
}  // namespace hvd
