// Collectives between hosts, with hosts and ranks as threads of this process and socket pairs between them.
#include <sys/socket.h>

#include <atomic>
#include <climits>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "base/half.h"
#include "collectives/collectives.h"
#include "rank_threads.h"

namespace hvd {
namespace {

using Bytes = std::vector<std::byte>;

// Of the sweep over a layout.
constexpr int kMostCuts = 100;
constexpr int kJobsAtOnce = 8;
// Until every rank has ended: at once, beside so many jobs on two CPUs and under a sanitizer.
constexpr double kInTimeS = 15;

// -- plans --

TEST(slices_and_windows_and_chunks_cover_every_element_once_in_order) {
  for (const size_t count : {0, 1, 2, 15, 16, 17, 1000, 65'536, 1'000'001}) {
    for (const size_t item : {1, 2, 4, 8}) {
      for (const size_t window : {size_t{0}, size_t{64}, size_t{4096}, size_t{10'000'000}}) {
        size_t at = 0;
        for (const Range range : Windows(count, window)) {
          CHECK_EQ(range.begin, at);
          CHECK(range.size() > 0 && (window == 0 || range.size() <= window));
          for (int slices = 1; slices <= 5; ++slices) {
            size_t slice_at = range.begin;
            for (int s = 0; s < slices; ++s) {
              const Range slice = SliceOf(range, item, s, slices);
              CHECK_EQ(slice.begin, slice_at);
              CHECK(slice.end == range.end || (slice.end - range.begin) * item % 64 == 0);
              size_t chunk_at = slice.begin;
              int stream = 0;
              const int streams = 1 + s;
              for (const Chunk& chunk : Chunks(slice, item, streams)) {
                CHECK_EQ(chunk.begin, chunk_at);
                CHECK(chunk.count > 0 && chunk.count * item <= kMaxChunkNbytes);
                CHECK_EQ(chunk.stream, stream++ % streams);
                chunk_at += chunk.count;
              }
              CHECK_EQ(chunk_at, slice.end);
              slice_at = slice.end;
            }
            CHECK_EQ(slice_at, range.end);
          }
          at = range.end;
        }
        CHECK_EQ(at, count);
      }
    }
  }
}

TEST(chunks_depend_only_on_the_size_of_a_slice) {
  for (const size_t begin : {0, 64, 4096, 77'777}) {
    const auto here = Chunks({begin, begin + 500'000}, 4, 3), there = Chunks({0, 500'000}, 4, 3);
    CHECK_EQ(here.size(), there.size());
    for (size_t i = 0; i < here.size(); ++i) {
      CHECK_EQ(here[i].count, there[i].count);
      CHECK_EQ(here[i].begin, there[i].begin + begin);
    }
  }
}

TEST(a_relay_brings_every_block_once_and_in_the_order_in_which_it_is_sent) {
  for (int hosts = 1; hosts <= 8; ++hosts) {
    for (int root = kEveryHost; root < hosts; ++root) {
      std::vector<std::map<int, int>> got(static_cast<size_t>(hosts));
      for (const bool rising : {true, false}) {
        for (int host = 0; host < hosts; ++host) {
          const RelayPlan plan = PlanRelay(host, hosts, rising, root);
          for (size_t i = plan.own ? 1 : 0; i < plan.hosts.size(); ++i)
            ++got[static_cast<size_t>(host)][plan.hosts[i]];
          const int next = rising ? host + 1 : host - 1;
          CHECK_EQ(plan.sends, !plan.hosts.empty() && next >= 0 && next < hosts);
          if (!plan.sends) continue;
          const RelayPlan behind = PlanRelay(next, hosts, rising, root);
          CHECK(std::equal(plan.hosts.begin(), plan.hosts.end(), behind.hosts.begin() + (behind.own ? 1 : 0),
                           behind.hosts.end()));
        }
      }
      for (int host = 0; host < hosts; ++host) {
        for (int from = 0; from < hosts; ++from) {
          const bool wanted = from != host && (root == kEveryHost || root == from);
          CHECK_EQ(got[static_cast<size_t>(host)][from], wanted ? 1 : 0);
        }
      }
    }
  }
}

TEST(what_hosts_have_for_each_other_passes_the_hosts_between_them_once_and_in_order) {
  for (int hosts = 1; hosts <= 7; ++hosts) {
    for (const bool rising : {true, false}) {
      const int step = rising ? 1 : -1;
      for (int host = 0; host < hosts; ++host) {
        const std::vector<Trip> leaving = Departures(host, hosts, rising);
        size_t expected = 0;
        for (int from = 0; from < hosts; ++from) {
          for (int to = 0; to < hosts; ++to) {
            const bool passes = (host - from) * step >= 0 && (to - host) * step > 0;
            expected += passes;
            CHECK_EQ(std::count(leaving.begin(), leaving.end(), Trip{from, to}), passes ? 1 : 0);
          }
        }
        CHECK_EQ(leaving.size(), expected);
        const int next = host + step;
        if (next < 0 || next >= hosts) continue;
        std::vector<Trip> goes_on = leaving, passed = Departures(next, hosts, rising);
        std::erase_if(goes_on, [&](const Trip& trip) { return trip.to == next; });
        std::erase_if(passed, [&](const Trip& trip) { return trip.from == next; });
        CHECK(goes_on == passed);
      }
    }
  }
}

// -- hosts and ranks --

using Wrap = std::function<std::unique_ptr<Link>(std::unique_ptr<Link>)>;

struct Options {
  int streams = 2;
  size_t chunk_nbytes = 8192;
  std::function<DType(int rank)> wire = [](int) { return DType::kFloat32; };
  Wrap wrap = [](std::unique_ptr<Link> link) { return link; };
};

// The ranks of a layout, connected.
class Ranks {
 public:
  Ranks(const Layout& layout, const Options& options) : options_(options) {
    for (int rank = 0; rank < SizeOf(layout); ++rank) {
      topologies_.push_back(At(layout, rank));
      const Topology& here = topologies_.back();
      arenas_.push_back(Arena::Create(here.local_rank, here.local_size(), options.chunk_nbytes).value());
    }
    links_.resize(topologies_.size());
    for (size_t rank = 0; rank < topologies_.size(); ++rank) Connect(rank);
  }

  // Calls body(rank, collectives) on every rank, each in its thread. A rank that fails gives up for all, as
  // the scheduler does.
  void Run(const std::function<Status(int, Collectives&)>& body) {
    std::vector<std::thread> threads;
    statuses.resize(topologies_.size());
    for (size_t rank = 0; rank < topologies_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        const auto tick = [this](int) {
          return aborted_ ? Status(Code::kAborted, "a rank has failed") : Status::Ok();
        };
        Collectives collectives(topologies_[rank], *arenas_[rank], std::move(links_[rank]), tick,
                                {options_.wire(static_cast<int>(rank))});
        statuses[rank] = body(static_cast<int>(rank), collectives);
        if (!statuses[rank].ok()) aborted_ = true;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const Topology& topology(int rank) const { return topologies_[static_cast<size_t>(rank)]; }

  std::vector<Status> statuses;

 private:
  void Connect(size_t rank) {
    const Topology& here = topologies_[rank];
    for (int local = 0; local < here.local_size(); ++local) {
      const auto peer = static_cast<size_t>(here.GlobalRank(local));
      if (peer != rank) CHECK(arenas_[rank]->AddSegment(local, 0, arenas_[peer]->control()).ok());
    }
    if (here.host + 1 == here.hosts() || here.local_rank >= here.slices()) return;
    const auto next = static_cast<size_t>(here.leader(here.host + 1) + here.local_rank);
    for (int s = 0; s < options_.streams; ++s) {
      auto [here_end, there_end] = LinkPair(false);
      links_[rank].next.push_back(options_.wrap(std::move(here_end)));
      links_[next].previous.push_back(options_.wrap(std::move(there_end)));
    }
  }

  const Options options_;
  std::vector<Topology> topologies_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<RingLinks> links_;
  std::atomic<bool> aborted_{false};
};

// -- sums --

// What all ranks contribute to a reduction of `pieces` tensors, and the right result.
struct Inputs {
  Inputs(int size, DType dtype, ReduceOp op, const Scale& scale, std::vector<size_t> piece_counts,
         unsigned seed)
      : counts(std::move(piece_counts)), item(ItemSize(dtype)) {
    std::mt19937 random(seed);
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    for (int rank = 0; rank < size; ++rank) {
      Bytes& bytes = of_rank.emplace_back(total * item);
      for (size_t i = 0; i < total; ++i) {
        // Values of many magnitudes, so that another order of additions gives other bits.
        const double value =
            std::ldexp(static_cast<double>(random() % 2001) - 1000.0, static_cast<int>(random() % 9) - 4);
        Put(bytes.data() + i * item, dtype, value);
      }
    }
    expected.resize(total * item);
    std::vector<const void*> srcs;
    for (const Bytes& bytes : of_rank) srcs.push_back(bytes.data());
    void* dst = expected.data();
    Reduce(dtype, op, scale, srcs.data(), size, &dst, 1, total);
  }

  static void Put(std::byte* at, DType dtype, double value) {
    const auto put = [&](auto typed) { std::memcpy(at, &typed, sizeof typed); };
    switch (dtype) {
      case DType::kBool:
        return put(static_cast<uint8_t>(static_cast<int>(value) & 3));
      case DType::kInt32:
        return put(static_cast<int32_t>(value));
      case DType::kInt64:
        return put(static_cast<int64_t>(value));
      case DType::kUInt8:
        return put(static_cast<uint8_t>(static_cast<int>(value)));
      case DType::kFloat16:
        return put(FloatToHalf(static_cast<float>(value)));
      case DType::kBFloat16:
        return put(FloatToBFloat(static_cast<float>(value)));
      case DType::kFloat64:
        return put(value);
      default:
        return put(static_cast<float>(value));
    }
  }

  // The bytes of one tensor in the tensors of a rank.
  std::span<std::byte> Part(Bytes& bytes, size_t piece) const {
    const size_t begin =
        std::accumulate(counts.begin(), counts.begin() + static_cast<ptrdiff_t>(piece), size_t{0});
    return std::span(bytes).subspan(begin * item, counts[piece] * item);
  }

  std::vector<size_t> counts;
  size_t item;
  std::vector<Bytes> of_rank;
  Bytes expected;
};

enum class Where { kOrdinary, kInPlace, kArena };

// One allreduce on all ranks; checks the bits unless `tolerant`, and returns everyone's results.
std::vector<Bytes> Allreduce(const Layout& layout, const Options& options, Inputs inputs, DType dtype,
                             ReduceOp op, const Scale& scale, Where where, bool tolerant = false) {
  Ranks ranks(layout, options);
  std::vector<Bytes> outs(inputs.of_rank.size(), Bytes(inputs.expected.size()));
  const auto untouched = inputs.of_rank;
  ranks.Run([&](int rank, Collectives& collectives) {
    Bytes& in = inputs.of_rank[static_cast<size_t>(rank)];
    Bytes& out = where == Where::kOrdinary ? outs[static_cast<size_t>(rank)] : in;
    if (where == Where::kArena) {
      std::vector<ArenaPiece> pieces;
      for (size_t p = 0; p < inputs.counts.size(); ++p) {
        ArenaPiece& piece = pieces.emplace_back();
        piece.count = inputs.counts[p];
        for (int local = 0; local < ranks.topology(rank).local_size(); ++local) {
          Bytes& theirs = inputs.of_rank[static_cast<size_t>(ranks.topology(rank).GlobalRank(local))];
          piece.at.push_back(inputs.Part(theirs, p).data());
        }
      }
      return collectives.AllreduceInPlace(pieces, dtype, op, scale);
    }
    std::vector<Piece> pieces;
    for (size_t p = 0; p < inputs.counts.size(); ++p)
      pieces.push_back({inputs.Part(in, p).data(), inputs.Part(out, p).data(), inputs.counts[p]});
    return collectives.Allreduce(pieces, dtype, op, scale);
  });
  if (where == Where::kOrdinary) {
    CHECK(inputs.of_rank == untouched);
  } else {
    outs = inputs.of_rank;
  }
  for (const Status& status : ranks.statuses) CHECK_EQ(status.text(), "");
  for (const Bytes& out : outs) CHECK(tolerant || out == inputs.expected);
  return outs;
}

const std::vector<Layout> kLayouts = {{1, 1},    {2, 2},    {3, 1},       {1, 3},
                                      {1, 1, 1}, {2, 1, 3}, {1, 1, 1, 1}, {4, 4}};

TEST(every_layout_gives_the_bits_of_one_host) {
  unsigned seed = 0;
  for (const Layout& layout : kLayouts) {
    for (const Where where : {Where::kOrdinary, Where::kInPlace, Where::kArena}) {
      for (const size_t count : {0, 1, 17, 4096, 4097, 20'001, 300'007}) {
        Options options;
        options.streams = 1 + static_cast<int>(++seed % 4);
        Allreduce(layout, options, {SizeOf(layout), DType::kFloat32, ReduceOp::kSum, {}, {count}, seed},
                  DType::kFloat32, ReduceOp::kSum, {}, where);
      }
    }
  }
}

TEST(every_dtype_and_operation_and_scale) {
  unsigned seed = 100;
  for (const DType dtype : {DType::kBool, DType::kUInt8, DType::kInt32, DType::kInt64, DType::kFloat16,
                            DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (const bool scaled : {false, true}) {
        const Layout& layout = kLayouts[++seed % kLayouts.size()];
        Scale scale;
        if (op == ReduceOp::kAverage) scale.divisor = SizeOf(layout);
        if (scaled) scale.pre = 0.5, scale.post = 3;
        if (!CheckReduce(dtype, op, scale).ok()) continue;
        for (const Where where : {Where::kOrdinary, Where::kArena}) {
          for (const size_t count : {333, 40'000}) {
            Allreduce(layout, {}, {SizeOf(layout), dtype, op, scale, {count, 0, 1, count / 2}, seed}, dtype,
                      op, scale, where);
          }
        }
      }
    }
  }
}

TEST(a_fused_batch_of_many_tensors_and_dribbling_links) {
  std::mt19937 random(7);
  for (const Layout& layout : kLayouts) {
    std::vector<size_t> counts;
    for (int i = 0; i < 60; ++i) counts.push_back(random() % 3 == 0 ? random() % 9000 : random() % 20);
    std::atomic<unsigned> seed{1};
    Options options;
    options.wrap = [&](std::unique_ptr<Link> link) {
      return std::make_unique<DribblingLink>(std::move(link), seed++, 4097);
    };
    for (const Where where : {Where::kOrdinary, Where::kArena}) {
      Allreduce(layout, options,
                {SizeOf(layout), DType::kFloat32, ReduceOp::kAverage, {1, 1, 3}, counts, seed},
                DType::kFloat32, ReduceOp::kAverage, {1, 1, 3}, where);
    }
  }
}

TEST(a_narrow_wire_gives_all_ranks_the_same_rounded_bits) {
  for (const DType wire : {DType::kBFloat16, DType::kFloat16}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kFloat64}) {
      for (const Layout& layout : kLayouts) {
        Options options;
        options.wire = [&](int) { return wire; };
        const Inputs inputs(SizeOf(layout), dtype, ReduceOp::kSum, {}, {100, 30'000}, 5);
        const bool rounds = AccType(dtype) == DType::kFloat32;
        const auto outs =
            Allreduce(layout, options, inputs, dtype, ReduceOp::kSum, {}, Where::kOrdinary, rounds);
        for (const Bytes& out : outs) CHECK(out == outs[0]);
        if (dtype != DType::kFloat32) continue;
        double worst = 0;
        for (size_t i = 0; i < inputs.expected.size() / 4; ++i) {
          float got, expected;
          std::memcpy(&got, outs[0].data() + i * 4, 4);
          std::memcpy(&expected, inputs.expected.data() + i * 4, 4);
          // Every host may round once, and values reach 16 000 a rank.
          worst = std::max(worst, std::abs(static_cast<double>(got) - expected));
        }
        CHECK(worst > 0);
        CHECK(worst < 16'000.0 * SizeOf(layout) / 256 * static_cast<double>(layout.size() + 1));
      }
    }
  }
}

TEST(ranks_that_disagree_about_the_wire_hear_so) {
  Options options;
  options.wire = [](int rank) { return rank == 0 ? DType::kFloat32 : DType::kBFloat16; };
  Ranks ranks({1, 1}, options);
  std::vector<float> data(100'000, 1);
  ranks.Run([&](int, Collectives& collectives) {
    std::vector<float> mine = data;
    auto* bytes = reinterpret_cast<std::byte*>(mine.data());
    const Piece piece{bytes, bytes, mine.size()};
    return collectives.Allreduce({&piece, 1}, DType::kFloat32, ReduceOp::kSum, {});
  });
  int told = 0;
  for (const Status& status : ranks.statuses) {
    CHECK(!status.ok());
    if (status.code() != Code::kInvalid) continue;  // or it heard that the other one has given up
    ++told;
    CHECK(status.text().find("HVD_WIRE_DTYPE") != std::string_view::npos);
  }
  CHECK(told > 0);
}

// -- moving bytes --

TEST(gather_and_broadcast_move_every_byte) {
  for (const Layout& layout : kLayouts) {
    const auto size = static_cast<size_t>(SizeOf(layout));
    for (const size_t unit : {0, 3, 5'001, 400'000}) {
      std::vector<size_t> nbytes;
      Bytes expected;
      for (size_t r = 0; r < size; ++r) {
        nbytes.push_back(r * unit);
        expected.insert(expected.end(), nbytes.back(), static_cast<std::byte>(r + 1));
      }
      Options options;
      options.streams = 1 + static_cast<int>(unit % 4);
      Ranks ranks(layout, options);
      ranks.Run([&](int rank, Collectives& collectives) {
        const Bytes in(nbytes[static_cast<size_t>(rank)], static_cast<std::byte>(rank + 1));
        Bytes out(expected.size());
        HVD_RETURN_IF_ERROR(collectives.Gather(in.data(), out.data(), nbytes));
        CHECK(out == expected);
        for (int root = 0; root < static_cast<int>(size); ++root) {
          const Bytes sent(unit, static_cast<std::byte>(rank + 10));
          Bytes got(unit);
          HVD_RETURN_IF_ERROR(collectives.Broadcast(root, sent.data(), got.data(), unit));
          CHECK(got == Bytes(unit, static_cast<std::byte>(root + 10)));
        }
        return Status::Ok();
      });
      for (const Status& status : ranks.statuses) CHECK_EQ(status.text(), "");
    }
  }
}

std::vector<Layout> WithOneHost() {
  std::vector<Layout> layouts = kLayouts;
  for (const int ranks : {1, 2, 5}) layouts.push_back({ranks});
  return layouts;
}

std::byte AlltoallByte(int from, int to, size_t at) {
  return static_cast<std::byte>(static_cast<size_t>(from * 31 + to * 17) + at * 7 + at / 251);
}

// On one rank; checks every byte.
Status AlltoallOnce(Collectives& collectives, const Traffic& traffic, int rank, int size) {
  Bytes in, expected;
  for (int peer = 0; peer < size; ++peer) {
    for (size_t i = 0; i < traffic.at(rank, peer); ++i) in.push_back(AlltoallByte(rank, peer, i));
    for (size_t i = 0; i < traffic.at(peer, rank); ++i) expected.push_back(AlltoallByte(peer, rank, i));
  }
  const Bytes sent = in;
  Bytes out(expected.size());
  HVD_RETURN_IF_ERROR(collectives.Alltoall(in.data(), out.data(), traffic));
  CHECK(out == expected);
  CHECK(in == sent);
  return Status::Ok();
}

Traffic Uneven(int size, size_t unit) {
  Traffic traffic(size);
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to)
      traffic.at(from, to) = static_cast<size_t>((from * 7 + to * 3) % 5) * unit;
  }
  return traffic;
}

TEST(alltoall_brings_every_rank_what_is_for_it) {
  std::atomic<unsigned> seed{1};
  for (const Layout& layout : WithOneHost()) {
    const int size = SizeOf(layout);
    for (const bool dribbles : {false, true}) {
      Options options;
      options.streams = dribbles ? 2 : 3;
      if (dribbles) {
        options.wrap = [&](std::unique_ptr<Link> link) {
          return std::make_unique<DribblingLink>(std::move(link), seed++, 4097);
        };
      }
      Ranks ranks(layout, options);
      ranks.Run([&](int rank, Collectives& collectives) {
        for (const size_t unit :
             {size_t{0}, size_t{1}, size_t{5'001}, dribbles ? size_t{300} : size_t{30'000}})
          HVD_RETURN_IF_ERROR(AlltoallOnce(collectives, Uneven(size, unit), rank, size));
        Traffic one(size);  // the last rank has something for the first one, and nobody else for anybody
        one.at(size - 1, 0) = 70'000;
        return AlltoallOnce(collectives, one, rank, size);
      });
      for (const Status& status : ranks.statuses) CHECK_EQ(status.text(), "");
    }
  }
}

TEST(reduce_scatter_gives_every_rank_its_part_of_the_bits) {
  unsigned seed = 500;
  for (const Layout& layout : WithOneHost()) {
    const int size = SizeOf(layout);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8}) {
      for (const size_t count : {0, 1, 5, 1'003, 20'001}) {
        const ReduceOp op = ++seed % 2 == 0 ? ReduceOp::kAverage : ReduceOp::kSum;
        const Scale scale{1, 1, op == ReduceOp::kAverage ? size : 1};
        const Inputs inputs(size, dtype, op, scale, {count}, seed);
        std::vector<Range> slices;
        for (int rank = 0; rank < size; ++rank) slices.push_back(RowsOf(count, rank, size));
        CHECK(slices.front().begin == 0 && slices.back().end == count);
        CHECK(slices.front().size() - slices.back().size() <= 1);
        Ranks ranks(layout, {});
        ranks.Run([&](int rank, Collectives& collectives) {
          const Range mine = slices[static_cast<size_t>(rank)];
          const Bytes& in = inputs.of_rank[static_cast<size_t>(rank)];
          Bytes out(mine.size() * inputs.item);
          HVD_RETURN_IF_ERROR(collectives.ReduceScatter(in.data(), out.data(), slices, dtype, op, scale));
          CHECK(std::equal(out.begin(), out.end(),
                           inputs.expected.begin() + static_cast<ptrdiff_t>(mine.begin * inputs.item)));
          return Status::Ok();
        });
        for (const Status& status : ranks.statuses) CHECK_EQ(status.text(), "");
      }
    }
  }
}

TEST(one_collective_after_another_on_the_same_links) {
  for (const Layout& layout : kLayouts) {
    Ranks ranks(layout, {});
    const int size = SizeOf(layout);
    ranks.Run([&](int rank, Collectives& collectives) {
      std::mt19937 random(3);  // the same on all ranks
      for (int i = 0; i < 40; ++i) {
        const size_t count = random() % 3 == 0 ? random() % 100'000 : random() % 3000;
        std::vector<float> data(count, static_cast<float>(rank + i));
        auto* bytes = reinterpret_cast<std::byte*>(data.data());
        if (random() % 4 == 0) {
          HVD_RETURN_IF_ERROR(AlltoallOnce(collectives, Uneven(size, count / 8), rank, size));
        } else if (random() % 4 == 0) {
          const int root = static_cast<int>(random() % static_cast<unsigned>(size));
          HVD_RETURN_IF_ERROR(collectives.Broadcast(root, bytes, bytes, count * 4));
          for (const float value : data) CHECK_EQ(value, static_cast<float>(root + i));
        } else {
          const Piece piece{bytes, bytes, count};
          HVD_RETURN_IF_ERROR(collectives.Allreduce({&piece, 1}, DType::kFloat32, ReduceOp::kSum, {}));
          for (const float value : data)
            CHECK_EQ(value, static_cast<float>(size * i + size * (size - 1) / 2));
        }
      }
      return Status::Ok();
    });
    for (const Status& status : ranks.statuses) CHECK_EQ(status.text(), "");
  }
}

// -- faults --

// Links of which one breaks, for good, when *calls_left calls were made over all of them.
Options BreakingLinks(std::atomic<int>* calls_left) {
  Options options;
  options.wrap = [calls_left](std::unique_ptr<Link> link) {
    return std::make_unique<BreakingLink>(std::move(link), calls_left, 20'000);
  };
  return options;
}

// Four sums over links of which one breaks at the cut-th call, counted over all of them, with a check of what
// is then said. How many ranks failed; *calls is how many calls there were.
int SumOverABreakingLink(const Layout& layout, int cut, int* calls) {
  std::atomic<int> calls_left{cut};
  Ranks ranks(layout, BreakingLinks(&calls_left));
  const int size = SizeOf(layout);
  const auto begin = Clock::now();
  std::atomic<bool> is_right{true};
  ranks.Run([&](int, Collectives& collectives) {
    for (const size_t count : {100, 60'000, 100, 30'000}) {
      std::vector<float> data(count, 1);
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      const Piece piece{bytes, bytes, count};
      HVD_RETURN_IF_ERROR(collectives.Allreduce({&piece, 1}, DType::kFloat32, ReduceOp::kSum, {}));
      for (const float value : data) {
        if (value != static_cast<float>(size)) is_right = false;
      }
    }
    return Status::Ok();
  });
  *calls = cut - calls_left;
  int failed = 0;
  bool named = false;
  for (const Status& status : ranks.statuses) {
    if (!status.ok() && status.code() != Code::kPeerLost && status.code() != Code::kAborted) is_right = false;
    named |= status.text().starts_with("lost rank ");
    failed += !status.ok();
  }
  if (!is_right || Clock::now() - begin >= Seconds(kInTimeS) || named != (failed > 0)) {
    check::Fail(__FILE__, __LINE__,
                "cut at call " + std::to_string(cut) + " of " + std::to_string(size) + " ranks on " +
                    std::to_string(layout.size()) + " hosts");
  }
  return failed;
}

TEST(a_link_cut_at_any_call_ends_every_rank_in_time_without_a_wrong_sum) {
  std::mt19937_64 random(check::Seed());
  for (const Layout& layout : {Layout{1, 1}, Layout{1, 1, 1}, Layout{2, 2}, Layout{1, 2}}) {
    int calls = INT_MAX;  // of a job that looks at its links seldom
    for (int i = 0; i < 8; ++i) {
      int calls_of_it = 0;
      CHECK_EQ(SumOverABreakingLink(layout, INT_MAX, &calls_of_it), 0);
      calls = std::min(calls, calls_of_it);
    }
    // Every call, or every so-manieth from another one on in each run.
    const int stride = std::max(kFewer, calls / kMostCuts);
    std::atomic<int> next{1 + static_cast<int>(random() % static_cast<uint64_t>(stride))}, cuts{0}, ended{0};
    OnEveryRank(kJobsAtOnce, [&](int) {  // who has lost a link waits for a reason
      for (int cut; (cut = next.fetch_add(stride)) <= calls; ++cuts) {
        int calls_of_it = 0;
        ended += SumOverABreakingLink(layout, cut, &calls_of_it) > 0;
      }
    });
    CHECK(ended > cuts / 4);  // the sweep did cut
  }
}

TEST(a_link_cut_in_an_alltoall_ends_every_rank_in_time) {
  for (const Layout& layout : {Layout{1, 1, 1}, Layout{2, 2}, Layout{3, 1}}) {
    int failed = 0;
    for (int cut = 1; cut < 60; cut += 8) {
      std::atomic<int> calls_left{cut};
      Ranks ranks(layout, BreakingLinks(&calls_left));
      const int size = SizeOf(layout);
      const auto begin = Clock::now();
      ranks.Run([&](int rank, Collectives& collectives) {
        for (const size_t unit : {100, 30'000, 100})
          HVD_RETURN_IF_ERROR(AlltoallOnce(collectives, Uneven(size, unit), rank, size));
        return Status::Ok();
      });
      CHECK(Clock::now() - begin < Seconds(kInTimeS));
      for (const Status& status : ranks.statuses) {
        CHECK(status.ok() || status.code() == Code::kPeerLost || status.code() == Code::kAborted);
        failed += !status.ok();
      }
    }
    CHECK(failed > 4);
  }
}

TEST(an_abort_ends_a_wait_for_a_silent_host) {
  Ranks ranks({1, 1}, {});
  const auto begin = Clock::now();
  ranks.Run([&](int rank, Collectives& collectives) {
    if (rank == 1) return Status(Code::kAborted, "no more");
    std::vector<float> data(100'000, 1);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const Piece piece{bytes, bytes, data.size()};
    return collectives.Allreduce({&piece, 1}, DType::kFloat32, ReduceOp::kSum, {});
  });
  CHECK(ranks.statuses[0].code() == Code::kAborted);
  CHECK(Clock::now() - begin < Seconds(2));
}

}  // namespace
}  // namespace hvd
