// GB/s of the reduction kernels on one thread: bytes read and written, (n + m) x the bytes of one source,
// against those of memcpy (2 x) and of float32. Built by `cmake --build build/check --target bench_kernels`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "collectives/reduce.h"

namespace hvd {
namespace {

double SecondsOf(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The best of `samples`, which other programs disturb least; each runs until it has touched 4 MiB.
double BestSeconds(size_t nbytes, int samples, const std::function<void()>& run) {
  const size_t repeats = std::max<size_t>(1, (size_t{4} << 20) / nbytes);
  std::vector<double> seconds;
  for (int i = 0; i <= samples; ++i) {
    seconds.push_back(SecondsOf([&] {
                        for (size_t k = 0; k < repeats; ++k) run();
                      }) /
                      static_cast<double>(repeats));
  }
  return *std::min_element(seconds.begin() + 1, seconds.end());  // the first one warms up
}

struct Memory {
  explicit Memory(size_t n) : nbytes(n), data(static_cast<std::byte*>(std::aligned_alloc(4096, n))) {
    std::memset(data, 0, n);  // zeros: no denormals, no overflow after many rounds in place
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  size_t nbytes;
  std::byte* data;
};

struct Case {
  int n, m;
  ReduceOp op;
  const char* what;
};

constexpr Case kCases[] = {{2, 1, ReduceOp::kSum, "sum"},         {2, 2, ReduceOp::kSum, "sum"},
                           {2, 2, ReduceOp::kAverage, "average"}, {3, 3, ReduceOp::kAverage, "average"},
                           {4, 1, ReduceOp::kSum, "sum"},         {4, 4, ReduceOp::kAverage, "average"},
                           {8, 8, ReduceOp::kSum, "sum"}};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// m == n: in place, as in the arena.
double ReduceSeconds(const Case& c, DType dtype, size_t nbytes, int samples) {
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  // Offset from each other by odd pages, or all would fall into the same sets of the cache; and by more than
  // what is stored at once, or a store would look like the next load modulo 4096.
  const size_t each = nbytes + 4096 + 576;
  Memory memory(each * static_cast<size_t>(c.n + 1) + 4096);
  for (int r = 0; r < c.n; ++r) srcs.push_back(memory.data + each * static_cast<size_t>(r));
  for (int k = 0; k < c.m; ++k)
    dsts.push_back(memory.data + each * static_cast<size_t>(c.m == c.n ? k : c.n));
  const Scale scale{1, 1, c.op == ReduceOp::kAverage ? c.n : 1};
  return BestSeconds(nbytes * static_cast<size_t>(c.n), samples, [&] {
    Reduce(dtype, c.op, scale, srcs.data(), c.n, dsts.data(), c.m, nbytes / ItemSize(dtype));
  });
}

void Table(const char* kernels, size_t nbytes, int samples) {
  if (!UseKernels(kernels).ok()) return;
  Memory from(nbytes), to(nbytes);
  const double copy = 2.0 * static_cast<double>(nbytes) / 1e9 /
                      BestSeconds(nbytes, samples, [&] { std::memcpy(to.data, from.data, nbytes); });
  std::printf("\n%s, %zu KiB a source; memcpy %.1f GB/s\n%-12s", kernels, nbytes >> 10, copy, "");
  for (const DType dtype : kDTypes) std::printf("%19s", Name(dtype));
  std::printf("\n");
  for (const Case& c : kCases) {
    std::printf("n=%d m=%d %-7s", c.n, c.m, c.what);
    double reference = 0;
    for (const DType dtype : kDTypes) {
      const double rate =
          static_cast<double>(nbytes) * (c.n + c.m) / 1e9 / ReduceSeconds(c, dtype, nbytes, samples);
      if (dtype == DType::kFloat32) reference = rate;
      std::printf("%9.1f (x%5.2f) ", rate, rate / reference);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) {
  const std::vector<std::string> kernels = argc > 1 ? std::vector<std::string>(argv + 1, argv + argc)
                                                    : std::vector<std::string>{"baseline", "avx2", "avx512"};
  for (const std::string& name : kernels) {
    for (const size_t nbytes : {size_t{64} << 10, size_t{32} << 20}) hvd::Table(name.c_str(), nbytes, 7);
  }
}
