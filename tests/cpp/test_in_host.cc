// Collectives inside a host, with ranks as threads: the same bits whatever way and size.
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "collectives/in_host.h"
#include "rank_threads.h"

namespace hvd {
namespace {

using Bytes = std::vector<std::byte>;
using Way = std::function<Status(Arena&, std::span<const Piece>, DType, ReduceOp, const Scale&)>;

// Values whose sum depends on the order of additions.
Bytes Values(DType dtype, size_t count, int rank) {
  std::minstd_rand random(static_cast<unsigned>(rank * 7919 + 1));
  Bytes bytes(count * ItemSize(dtype));
  if (dtype == DType::kFloat32) {
    std::vector<float> values(count);
    for (float& v : values) v = std::ldexp(static_cast<float>(random() % 2048) - 1000, int(random() % 30));
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else if (dtype == DType::kFloat64) {
    std::vector<double> values(count);
    for (double& v : values) v = std::ldexp(static_cast<double>(random() % 2048) - 1000, int(random() % 60));
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else {
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
      for (size_t i = 1; i < bytes.size(); i += 2) bytes[i] &= std::byte{0xbb};  // finite
    }
  }
  return bytes;
}

Bytes Expected(DType dtype, size_t count, int size, ReduceOp op, const Scale& scale) {
  std::vector<Bytes> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(Values(dtype, count, rank));
  Bytes out(count * ItemSize(dtype));
  std::vector<const void*> srcs;
  for (const Bytes& in : all) srcs.push_back(in.data());
  void* dst = out.data();
  Reduce(dtype, op, scale, srcs.data(), size, &dst, 1, count);
  return out;
}

// A batch of `count` elements cut into pieces, the first in place, the others not.
void CheckWay(const Arenas& arenas, const Way& way, DType dtype, size_t count, size_t pieces_in_batch) {
  const int size = static_cast<int>(arenas.size());
  const size_t item = ItemSize(dtype);
  const ReduceOp op = dtype == DType::kBool ? ReduceOp::kSum : ReduceOp::kAverage;
  const Scale scale{1, 1, dtype == DType::kBool ? 1 : size};
  const Bytes expected = Expected(dtype, count, size, op, scale);
  OnEveryRank(size, [&](int rank) {
    const Bytes values = Values(dtype, count, rank);
    Bytes in = values, out(values.size());
    std::vector<Piece> pieces;
    std::minstd_rand random(static_cast<unsigned>(count + pieces_in_batch));  // the same cuts on every rank
    size_t at = 0;
    for (size_t i = 0; i < pieces_in_batch; ++i) {
      const size_t left = count - at;
      const size_t n = i + 1 == pieces_in_batch ? left : random() % (2 * left / (pieces_in_batch - i) + 1);
      std::byte* from = in.data() + at * item;
      pieces.push_back({from, i == 0 ? from : out.data() + at * item, std::min(n, left)});
      at += pieces.back().count;
    }
    CHECK(way(*arenas[static_cast<size_t>(rank)], pieces, dtype, op, scale).ok());
    const size_t in_place = pieces.front().count * item;
    CHECK(std::equal(in.begin(), in.begin() + static_cast<ptrdiff_t>(in_place), expected.begin()));
    CHECK(std::equal(out.begin() + static_cast<ptrdiff_t>(in_place), out.end(),
                     expected.begin() + static_cast<ptrdiff_t>(in_place)));
    CHECK(std::equal(in.begin() + static_cast<ptrdiff_t>(in_place), in.end(),
                     values.begin() + static_cast<ptrdiff_t>(in_place)));
  });
}

template <class F>
Way WayOf(F f) {
  return [f](Arena& arena, std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale) {
    return f(arena, kNeverGiveUp, pieces, dtype, op, scale);
  };
}

// The same batch, with its tensors in shared memory.
Status InArena(Arena& arena, const std::vector<std::shared_ptr<Segment>>& segments,
               std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale) {
  const size_t item = ItemSize(dtype);
  std::vector<ArenaPiece> placed;
  size_t at = 0;
  for (const Piece& piece : pieces) {
    std::memcpy(segments[static_cast<size_t>(arena.rank())]->data() + at, piece.in, piece.count * item);
    placed.push_back({{}, piece.count});
    for (const auto& segment : segments) placed.back().at.push_back(segment->data() + at);
    at += piece.count * item;
  }
  HVD_RETURN_IF_ERROR(AllreduceInArena(arena, kNeverGiveUp, placed, dtype, op, scale));
  for (size_t i = 0; i < pieces.size(); ++i)
    std::memcpy(pieces[i].out, placed[i].at[static_cast<size_t>(arena.rank())], pieces[i].count * item);
  return Status::Ok();
}

TEST(every_way_gives_the_bits_of_reduce_for_all_sizes) {
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kInt8};
  for (int size = 1; size <= 8; size += size < 4 ? 1 : kFewer) {
    const Arenas arenas = ConnectedArenas(size, 8192);
    std::vector<std::shared_ptr<Segment>> segments;
    for (int rank = 0; rank < size; ++rank) segments.push_back(Segment::Create(1 << 20).value());
    const Way in_arena = [&](Arena& arena, auto pieces, DType dtype, ReduceOp op, const Scale& scale) {
      return InArena(arena, segments, pieces, dtype, op, scale);
    };
    for (const DType dtype : dtypes) {
      const size_t item = ItemSize(dtype);
      const size_t line = Arena::kInlineNbytes / item, slot = Arena::kSlotNbytes / item;
      for (const size_t count : {size_t{1}, line, line + 1, slot - 1, slot, slot + 1, 3 * slot + 7}) {
        for (const size_t pieces : {size_t{1}, size_t{3}, size_t{11}}) {
          CheckWay(arenas, WayOf(Allreduce), dtype, count, pieces);
          CheckWay(arenas, WayOf(AllreduceStaged), dtype, count, pieces);
          CheckWay(arenas, in_arena, dtype, count, pieces);
          if (count <= slot) CheckWay(arenas, WayOf(AllreduceOneShot), dtype, count, pieces);
          if (count <= line) CheckWay(arenas, WayOf(AllreduceInline), dtype, count, pieces);
        }
      }
    }
  }
}

TEST(every_dtype_passes_every_way) {
  const Arenas arenas = ConnectedArenas(3, 8192);
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    for (const size_t nbytes : {size_t{48}, size_t{4000}, size_t{70'000}}) {
      CheckWay(arenas, WayOf(Allreduce), dtype, nbytes / ItemSize(dtype), 2);
      CheckWay(arenas, WayOf(AllreduceStaged), dtype, nbytes / ItemSize(dtype), 2);
    }
  }
}

TEST(a_batch_of_thousands_of_pieces_is_reduced) {
  const Arenas arenas = ConnectedArenas(2, 8192);
  CheckWay(arenas, WayOf(Allreduce), DType::kFloat32, 30'000, 10'000);
}

// One collective right after the other, of kinds that use the same buffers: a rank that is ahead must not
// overwrite what another one still reads.
TEST(a_fast_rank_does_not_overtake_a_slow_one) {
  const int size = 3;
  const Arenas arenas = ConnectedArenas(size, 4096);
  OnEveryRank(size, [&](int rank) {
    Arena& arena = *arenas[static_cast<size_t>(rank)];
    std::minstd_rand kinds(1), pauses(static_cast<unsigned>(rank + 5));
    for (int turn = 0; turn < 600 / kFewer; ++turn) {
      const size_t count = (size_t[]){1, 12, 13, 1000, 4096, 5000}[kinds() % 6];
      std::vector<float> data(count);
      for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(turn + rank + static_cast<int>(i % 17));
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      const Piece piece{bytes, bytes, count};
      const auto way = kinds() % 2 == 0 ? Allreduce : AllreduceStaged;
      CHECK(way(arena, kNeverGiveUp, {&piece, 1}, DType::kFloat32, ReduceOp::kSum, {}).ok());
      for (size_t i = 0; i < count; ++i)
        CHECK_EQ(data[i], static_cast<float>(size * (turn + static_cast<int>(i % 17)) + 3));
      for (unsigned pause = pauses() % 4; pause > 0; --pause) std::this_thread::yield();
    }
  });
}

Cpus Allowed(std::initializer_list<int> list, double quota = 0) {
  Cpus cpus;
  CPU_ZERO(&cpus.allowed);
  for (const int cpu : list) CPU_SET(static_cast<size_t>(cpu), &cpus.allowed);
  cpus.quota = quota;
  return cpus;
}

TEST(ranks_with_a_cpu_for_each_are_told_from_ranks_that_share) {
  const auto one_for_each = [](std::vector<Cpus> ranks) { return OneForEach(ranks); };
  CHECK(one_for_each({Allowed({0, 1}), Allowed({0, 1})}));
  CHECK(one_for_each({Allowed({7}), Allowed({3})}));                      // pinned
  CHECK(one_for_each({Allowed({0, 1}), Allowed({0, 2}), Allowed({0})}));  // the first two give way
  CHECK(!one_for_each({Allowed({0, 1}), Allowed({0, 1}), Allowed({0, 1})}));
  CHECK(!one_for_each({Allowed({0}), Allowed({0}), Allowed({1, 2, 3})}));
  CHECK(!one_for_each({Allowed({0, 1}, 1.5), Allowed({0, 1})}));
  CHECK(one_for_each({Allowed({0, 1}, 2), Allowed({0, 1}, 2)}));
}

TEST(a_quota_counts_as_so_many_cpus) {
  if (std::thread::hardware_concurrency() < 2) return;
  for (const double quota : {0.0, 1.5, 2.0}) {
    const Arenas arenas = ConnectedArenas(2, 8192);
    OnEveryRank(2, [&](int rank) {
      Arena& arena = *arenas[static_cast<size_t>(rank)];
      CHECK(arena.CountCpus(quota, kNeverGiveUp).ok());
      CHECK_EQ(arena.has_cpu_for_each(), quota != 1.5);
    });
  }
}

TEST(parts_are_done_once_each_and_by_then_all_where_ranks_share_cpus) {
  const int size = static_cast<int>(std::thread::hardware_concurrency()) + 1;
  const Arenas arenas = ConnectedArenas(size, 8192);
  CHECK(!arenas[0]->has_cpu_for_each());
  for (const uint32_t parts : {1u, 2u, 7u, 300u}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::atomic<int>> done(parts);
      OnEveryRank(size, [&](int rank) {
        Arena& arena = *arenas[static_cast<size_t>(rank)];
        CHECK(arena.ArriveAndAwait(kNeverGiveUp).ok());
        CHECK(arena.ShareOut(parts, [&](uint32_t part) { ++done[part]; }, kNeverGiveUp).ok());
        for (const auto& times : done) CHECK_EQ(times.load(), 1);
      });
    }
  }
  std::vector<std::shared_ptr<Segment>> segments;
  for (int rank = 0; rank < size; ++rank) segments.push_back(Segment::Create(1 << 20).value());
  const Way in_arena = [&](Arena& arena, auto pieces, DType dtype, ReduceOp op, const Scale& scale) {
    return InArena(arena, segments, pieces, dtype, op, scale);
  };
  const size_t count = 5 * kSharedPartNbytes / sizeof(float) + 7;
  for (const size_t pieces : {size_t{1}, size_t{11}})
    CheckWay(arenas, in_arena, DType::kFloat32, count, pieces);
}

// Between chunks a rank still listens: what tick says ends a long batch that nobody waits in.
TEST(a_long_batch_ticks_and_ends_when_told_to) {
  const Arenas arenas = ConnectedArenas(1, 4096);
  auto segment = Segment::Create(17 << 20).value();
  const Piece piece{segment->data(), segment->data(), segment->nbytes() / sizeof(float)};
  const ArenaPiece placed{{segment->data()}, piece.count};
  int ticks = 0;
  const Arena::Tick third_time = [&](int rank) {
    CHECK_EQ(rank, 0);
    return ++ticks % 3 == 0 ? Status(Code::kAborted, "the reason") : Status::Ok();
  };
  Status status, in_arena;
  while (status.ok())
    status = AllreduceStaged(*arenas[0], third_time, {&piece, 1}, DType::kFloat32, ReduceOp::kSum, {});
  while (in_arena.ok())
    in_arena = AllreduceInArena(*arenas[0], third_time, {&placed, 1}, DType::kFloat32, ReduceOp::kSum, {});
  CHECK_EQ(status.text(), "the reason");
  CHECK_EQ(in_arena.text(), "the reason");
}

}  // namespace
}  // namespace hvd
