#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "data/permutation.h"
#include "data/rows.h"

namespace hvd {
namespace {

std::vector<int64_t> Order(uint64_t n, uint64_t seed, uint64_t epoch) {
  std::vector<int64_t> order(n);
  Permutation(n, seed, epoch).Fill(0, order);
  return order;
}

std::vector<std::byte> RandomData(size_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(nbytes);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

TEST(PermutationIsOneForSmallN) {
  for (uint64_t n = 1; n <= 300; ++n) {
    std::vector<int64_t> order = Order(n, 7, n);
    std::sort(order.begin(), order.end());
    for (uint64_t i = 0; i < n; ++i) CHECK_EQ(order[i], static_cast<int64_t>(i));
  }
}

TEST(PermutationIsOneForLargerN) {
  for (const uint64_t n : {1023u, 1024u, 1025u, 65535u, 65537u, 300007u}) {
    std::vector<bool> seen(n);
    for (const int64_t image : Order(n, 3, 0)) {
      CHECK(image >= 0 && static_cast<uint64_t>(image) < n && !seen[static_cast<size_t>(image)]);
      seen[static_cast<size_t>(image)] = true;
    }
  }
}

TEST(PermutationStaysInsideHugeN) {
  for (const uint64_t n : {(uint64_t{1} << 33) + 1, (uint64_t{1} << 61) - 3, uint64_t{1} << 62}) {
    const Permutation permutation(n, 5, 9);
    std::set<uint64_t> images;
    for (uint64_t k = 0; k < 20000; ++k) {
      // Near both ends, where neighbours would collide first.
      const uint64_t image = permutation(k % 2 ? n - 1 - k : k);
      CHECK(image < n);
      images.insert(image);
    }
    CHECK_EQ(images.size(), 20000u);
  }
}

TEST(PermutationCanBeEnteredAnywhere) {
  const std::vector<int64_t> whole = Order(1000, 1, 2);
  for (const size_t begin : {0u, 1u, 500u, 999u, 1000u}) {
    std::vector<int64_t> part(std::min<size_t>(17, 1000 - begin));
    Permutation(1000, 1, 2).Fill(begin, part);
    CHECK(std::equal(part.begin(), part.end(), whole.begin() + static_cast<ptrdiff_t>(begin)));
  }
}

TEST(PermutationDependsOnSeedAndEpoch) {
  CHECK(Order(100, 1, 1) == Order(100, 1, 1));
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (uint64_t epoch = 0; epoch < 10; ++epoch) orders.insert(Order(100, seed, epoch));
  }
  CHECK_EQ(orders.size(), 100u);
}

// Every order of a few rows comes up equally often: chi-square over all n! orders, with a bound that chance
// passes once in some 10^6 seeds (mean k - 1, deviation sqrt(2k)).
TEST(PermutationReachesEveryOrderEvenly) {
  for (const uint64_t n : {2u, 3u, 4u, 5u}) {
    constexpr int kEpochs = 24000;
    std::map<std::vector<int64_t>, int> counts;
    for (uint64_t epoch = 0; epoch < kEpochs; ++epoch) ++counts[Order(n, 42, epoch)];
    double orders = 1;
    for (uint64_t i = 2; i <= n; ++i) orders *= static_cast<double>(i);
    CHECK_EQ(static_cast<double>(counts.size()), orders);
    double chi_square = 0;
    for (const auto& [order, count] : counts) {
      const double difference = count - kEpochs / orders;
      chi_square += difference * difference * orders / kEpochs;
    }
    CHECK(chi_square < orders - 1 + 6 * std::sqrt(2 * orders) + 12);
  }
}

// Where a row lands in one epoch says nothing about where it, or its neighbour, lands.
TEST(PermutationScattersNeighbours) {
  constexpr uint64_t kRows = 10000;
  const std::vector<int64_t> order = Order(kRows, 11, 0);
  const std::vector<int64_t> next_epoch = Order(kRows, 11, 1);
  const auto correlation = [](const int64_t* a, const int64_t* b, size_t count) {
    const double mean = (kRows - 1) / 2.0, variance = kRows * (kRows / 12.0);
    double sum = 0;
    for (size_t i = 0; i < count; ++i) {
      sum += (static_cast<double>(a[i]) - mean) * (static_cast<double>(b[i]) - mean);
    }
    return sum / static_cast<double>(count) / variance;
  };
  std::vector<int64_t> identity(kRows);
  std::iota(identity.begin(), identity.end(), 0);
  // Deviation 1 / sqrt(10^4).
  CHECK(std::fabs(correlation(order.data(), identity.data(), kRows)) < 0.05);
  CHECK(std::fabs(correlation(order.data(), order.data() + 1, kRows - 1)) < 0.05);
  CHECK(std::fabs(correlation(order.data(), next_epoch.data(), kRows)) < 0.05);
}

TEST(GatherCopiesRows) {
  constexpr size_t kRows = 57;
  std::mt19937 random(2);
  for (const size_t row_nbytes :
       {1u, 2u, 3u, 4u, 5u, 8u, 12u, 16u, 24u, 32u, 33u, 64u, 96u, 256u, 288u, 1000u, 4096u}) {
    // Odd start: nothing may rely on alignment.
    const std::vector<std::byte> data = RandomData(kRows * row_nbytes + 1, static_cast<uint32_t>(row_nbytes));
    const std::byte* base = data.data() + 1;
    for (const size_t count : {0u, 1u, 7u, 8u, 9u, 200u}) {
      std::vector<int64_t> index(count);
      for (auto& i : index) i = static_cast<int64_t>(random() % kRows);
      std::vector<std::byte> out(count * row_nbytes + 2, std::byte{0xee});
      GatherRows(base, row_nbytes, index.data(), count, out.data() + 1);
      for (size_t k = 0; k < count; ++k) {
        const std::byte* row = base + static_cast<size_t>(index[k]) * row_nbytes;
        CHECK(std::memcmp(out.data() + 1 + k * row_nbytes, row, row_nbytes) == 0);
      }
      CHECK(out.front() == std::byte{0xee} && out.back() == std::byte{0xee});
    }
  }
}

// Reference values of MurmurHash3_x64_128 with seed 0, as its public test suites print them.
TEST(HashIsMurmur3) {
  const char* fox = "The quick brown fox jumps over the lazy dog";
  const Block block{reinterpret_cast<const std::byte*>(fox), std::strlen(fox)};
  std::array<RowHash, 1> hash;
  HashRows({&block, 1}, 0, 0, hash);
  CHECK_EQ(hash[0].high, 0xe34bbc7bbc071b6cu);
  CHECK_EQ(hash[0].low, 0x7a433ca9c49a9347u);
}

std::vector<RowHash> HashAll(const std::vector<std::vector<std::byte>>& data,
                             const std::vector<size_t>& sizes, size_t rows, uint64_t seed = 0) {
  std::vector<Block> blocks;
  for (size_t b = 0; b < data.size(); ++b) blocks.push_back({data[b].data(), sizes[b]});
  std::vector<RowHash> hashes(rows);
  HashRows(blocks, seed, 0, hashes);
  return hashes;
}

TEST(HashSeesEveryByte) {
  const std::vector<size_t> sizes = {1, 4, 8, 9, 15, 16, 17, 25, 31, 40};
  std::vector<std::vector<std::byte>> data;
  for (const size_t size : sizes) data.push_back(RandomData(3 * size, static_cast<uint32_t>(size)));
  const std::vector<RowHash> before = HashAll(data, sizes, 3);
  CHECK(before[0] != before[1] && before[1] != before[2] && before[0] != before[2]);
  CHECK(HashAll(data, sizes, 3, 1) != before);
  for (size_t b = 0; b < data.size(); ++b) {
    for (size_t i = 0; i < data[b].size(); ++i) {
      data[b][i] ^= std::byte{0x10};
      const std::vector<RowHash> after = HashAll(data, sizes, 3);
      for (size_t r = 0; r < 3; ++r) CHECK_EQ(after[r] != before[r], r == i / sizes[b]);
      data[b][i] ^= std::byte{0x10};
    }
  }
}

TEST(HashKnowsBlocksApart) {
  const std::vector<std::byte> data = RandomData(8, 1);
  const std::vector<std::byte> left(data.begin(), data.begin() + 3), right(data.begin() + 3, data.end());
  const std::vector<std::byte> longer(data.begin(), data.begin() + 4), shorter(data.begin() + 4, data.end());
  CHECK(HashAll({left, right}, {3, 5}, 1) != HashAll({longer, shorter}, {4, 4}, 1));
  CHECK(HashAll({left, right}, {3, 5}, 1) != HashAll({right, left}, {5, 3}, 1));
}

TEST(HashStartsAtAnyRow) {
  const std::vector<std::byte> data = RandomData(10 * 12, 4);
  const std::vector<RowHash> whole = HashAll({data}, {12}, 10);
  const Block block{data.data(), 12};
  std::vector<RowHash> part(4);
  HashRows({&block, 1}, 0, 5, part);
  CHECK(std::equal(part.begin(), part.end(), whole.begin() + 5));
}

// The rows in hash order are the same rows however they arrived.
TEST(HashOrderForgetsArrival) {
  constexpr size_t kRows = 200, kNbytes = 12;
  std::vector<std::byte> data = RandomData(kRows * kNbytes, 3);
  // Some rows twice.
  std::memcpy(data.data(), data.data() + 50 * kNbytes, 10 * kNbytes);
  const auto in_hash_order = [&](const std::vector<std::byte>& rows) {
    const std::vector<int64_t> order = SortByHash(HashAll({rows}, {kNbytes}, kRows));
    std::vector<std::byte> sorted(rows.size());
    GatherRows(rows.data(), kNbytes, order.data(), kRows, sorted.data());
    return sorted;
  };
  std::vector<std::byte> shuffled(data.size());
  GatherRows(data.data(), kNbytes, Order(kRows, 8, 8).data(), kRows, shuffled.data());
  CHECK(shuffled != data);
  CHECK(in_hash_order(shuffled) == in_hash_order(data));
}

TEST(SortByHashIsStable) {
  const std::vector<RowHash> hashes = {{2, 0}, {1, 5}, {2, 0}, {1, 4}, {0, 9}, {2, 0}, {~uint64_t{0}, 0}};
  CHECK(SortByHash(hashes) == (std::vector<int64_t>{4, 3, 1, 0, 2, 5, 6}));
  CHECK(SortByHash({}).empty());
}

}  // namespace
}  // namespace hvd
