// Every dtype, operation, number of ranks, length and alignment against a slow oracle, bit for bit, for every
// set of kernels this CPU runs. So all sets give the same bits.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/half.h"
#include "check.h"
#include "collectives/reduce.h"

namespace hvd {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

std::vector<std::string> UsableKernels() {
  std::vector<std::string> names;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (UseKernels(name).ok()) names.push_back(name);
  }
  CHECK(UseKernels("best").ok());
  return names;
}

// ---- the oracle, one element at a time

template <class T>
T FloatOracle(ReduceOp op, const Scale& scale, const std::vector<T>& xs) {
  const T pre = static_cast<T>(scale.pre), post = static_cast<T>(scale.post);
  T acc = xs[0] * pre;
  for (size_t r = 1; r < xs.size(); ++r) {
    const T x = xs[r] * pre;
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage) acc += x;
    if (op == ReduceOp::kProduct) acc *= x;
    if (op == ReduceOp::kMin && !std::isnan(acc) && (std::isnan(x) || std::isless(x, acc))) acc = x;
    if (op == ReduceOp::kMax && !std::isnan(acc) && (std::isnan(x) || std::isgreater(x, acc))) acc = x;
  }
  acc = acc / static_cast<T>(scale.divisor) * post;
  return std::isnan(acc) ? std::numeric_limits<T>::quiet_NaN() : acc;
}

template <class T>
T ClampedTruncation(double value) {
  if (std::isnan(value)) return 0;
  // long double holds every 64-bit integer.
  const long double whole = std::trunc(static_cast<long double>(value));
  if (whole >= static_cast<long double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  if (whole <= static_cast<long double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(whole);
}

template <class T>
T IntOracle(ReduceOp op, const Scale& scale, const std::vector<T>& xs) {
  const auto prescaled = [&](T x) {
    return scale.pre == 1 ? x : ClampedTruncation<T>(static_cast<double>(x) * scale.pre);
  };
  // Wider than any T: wrapping is the conversion back after each step.
  __extension__ using Wide = __int128;
  T acc = prescaled(xs[0]);
  for (size_t r = 1; r < xs.size(); ++r) {
    const T x = prescaled(xs[r]);
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage) acc = static_cast<T>(static_cast<Wide>(acc) + x);
    if (op == ReduceOp::kProduct) acc = static_cast<T>(static_cast<Wide>(acc) * x);
    if (op == ReduceOp::kMin && x < acc) acc = x;
    if (op == ReduceOp::kMax && x > acc) acc = x;
  }
  if (scale.post != 1) return ClampedTruncation<T>(static_cast<double>(acc) / scale.divisor * scale.post);
  return static_cast<T>(static_cast<Wide>(acc) / scale.divisor);
}

// Stored types with the conversions that the oracle needs.
template <DType kDType>
struct Element;
template <class T>
struct PlainElement {
  using Stored = T;
  static T Reduced(ReduceOp op, const Scale& scale, const std::vector<T>& xs) {
    if constexpr (std::is_floating_point_v<T>) return FloatOracle(op, scale, xs);
    if constexpr (std::is_integral_v<T>) return IntOracle(op, scale, xs);
  }
};
template <float (*kToFloat)(uint16_t), uint16_t (*kFromFloat)(float)>
struct SmallElement {
  using Stored = uint16_t;
  static uint16_t Reduced(ReduceOp op, const Scale& scale, const std::vector<uint16_t>& xs) {
    std::vector<float> floats;
    for (const uint16_t x : xs) floats.push_back(kToFloat(x));
    return kFromFloat(FloatOracle(op, scale, floats));
  }
};
template <>
struct Element<DType::kBool> {
  using Stored = uint8_t;
  static uint8_t Reduced(ReduceOp op, const Scale&, const std::vector<uint8_t>& xs) {
    const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax;
    bool acc = !is_or;
    for (const uint8_t x : xs) acc = is_or ? acc || x != 0 : acc && x != 0;
    return acc;
  }
};
template <>
struct Element<DType::kUInt8> : PlainElement<uint8_t> {};
template <>
struct Element<DType::kInt8> : PlainElement<int8_t> {};
template <>
struct Element<DType::kUInt16> : PlainElement<uint16_t> {};
template <>
struct Element<DType::kInt16> : PlainElement<int16_t> {};
template <>
struct Element<DType::kUInt32> : PlainElement<uint32_t> {};
template <>
struct Element<DType::kInt32> : PlainElement<int32_t> {};
template <>
struct Element<DType::kUInt64> : PlainElement<uint64_t> {};
template <>
struct Element<DType::kInt64> : PlainElement<int64_t> {};
template <>
struct Element<DType::kFloat16> : SmallElement<HalfToFloat, FloatToHalf> {};
template <>
struct Element<DType::kBFloat16> : SmallElement<BFloatToFloat, FloatToBFloat> {};
template <>
struct Element<DType::kFloat32> : PlainElement<float> {};
template <>
struct Element<DType::kFloat64> : PlainElement<double> {};

// ---- inputs

// Half of the elements are any bits at all (so NaN, infinities, subnormals, both zeros), half are small
// numbers, for which sums and products stay in range.
template <DType kDType>
std::vector<typename Element<kDType>::Stored> Inputs(size_t count, std::mt19937_64& random) {
  using Stored = typename Element<kDType>::Stored;
  std::vector<Stored> values(count);
  for (Stored& value : values) {
    const uint64_t bits = random();
    const double small = static_cast<double>(static_cast<int64_t>(bits >> 40) % 2001 - 1000) / 64;
    if (bits & 1) {
      const uint64_t other = random();
      std::memcpy(&value, &other, sizeof value);
      // Zeros, infinities and quiet NaN more often than chance has them.
      if constexpr (std::is_floating_point_v<Stored>) {
        constexpr Stored kSpecial[] = {0, -Stored{0}, std::numeric_limits<Stored>::infinity(),
                                       -std::numeric_limits<Stored>::infinity(),
                                       std::numeric_limits<Stored>::quiet_NaN()};
        if (bits & 2) value = kSpecial[(bits >> 2) % 5];
      }
    } else if constexpr (kDType == DType::kFloat16) {
      value = FloatToHalf(static_cast<float>(small));
    } else if constexpr (kDType == DType::kBFloat16) {
      value = FloatToBFloat(static_cast<float>(small));
    } else if constexpr (kDType == DType::kBool) {
      value = bits >> 63;
    } else if constexpr (std::is_unsigned_v<Stored>) {
      value = static_cast<Stored>(std::fabs(small));
    } else {
      value = static_cast<Stored>(small);
    }
  }
  return values;
}

constexpr std::byte kCanary{0xa5};

// A buffer whose elements start `shift` bytes off alignment, with a canary at each end.
struct Buffer {
  Buffer(const void* data, size_t nbytes, size_t shift_nbytes)
      : shift(64 + shift_nbytes), bytes(shift + nbytes + 64, kCanary) {
    if (data != nullptr && nbytes > 0) std::memcpy(begin(), data, nbytes);
  }
  std::byte* begin() { return bytes.data() + shift; }
  bool IsIntact(size_t nbytes) const {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if ((i < shift || i >= shift + nbytes) && bytes[i] != kCanary) return false;
    }
    return true;
  }

  size_t shift;
  std::vector<std::byte> bytes;
};

struct Shape {
  int n;          // sources
  int m;          // destinations
  bool in_place;  // destination k is source k (as far as there is one)
  size_t count;
  size_t shift;  // bytes off alignment, different for every buffer
};

// Accumulate over the ranks of one host after another, each with kernels of its own, then Finish.
template <DType kDType>
void CheckSplit(ReduceOp op, const Scale& scale, const Shape& shape, std::vector<const void*> srcs,
                const std::vector<typename Element<kDType>::Stored>& expected,
                const std::vector<std::string>& kernels, std::mt19937_64& random) {
  const size_t nbytes = shape.count * sizeof(expected[0]);
  const size_t acc_nbytes = shape.count * ItemSize(AccType(kDType));
  Buffer accs[] = {{nullptr, acc_nbytes, shape.shift}, {nullptr, acc_nbytes, 2 * shape.shift}};
  const auto use_any = [&] { CHECK(UseKernels(kernels[random() % kernels.size()]).ok()); };
  int from = -1;
  std::string split;
  for (int begin = 0; begin < shape.n;) {
    const int ranks = 1 + static_cast<int>(random() % static_cast<uint64_t>(shape.n - begin));
    const int to = from == -1 || random() % 2 == 0 ? 0 : 1;
    use_any();
    Accumulate(kDType, op, scale, from == -1 ? nullptr : accs[from].begin(), srcs.data() + begin, ranks,
               accs[to].begin(), shape.count);
    from = to;
    begin += ranks;
    split += std::to_string(ranks) + ' ';
  }
  std::vector<Buffer> outs;
  std::vector<void*> dsts;
  for (int k = 0; k < shape.m; ++k) outs.emplace_back(nullptr, nbytes, shape.shift);
  for (Buffer& out : outs) dsts.push_back(out.begin());
  if (AccType(kDType) == kDType) dsts[0] = accs[from].begin();
  use_any();
  Finish(kDType, op, scale, accs[from].begin(), dsts.data(), shape.m, shape.count);
  bool is_right = accs[0].IsIntact(acc_nbytes) && accs[1].IsIntact(acc_nbytes);
  for (void* dst : dsts) is_right &= nbytes == 0 || std::memcmp(dst, expected.data(), nbytes) == 0;
  for (const Buffer& out : outs) is_right &= out.IsIntact(nbytes);
  if (!is_right) {
    check::Fail(__FILE__, __LINE__,
                std::string(Name(kDType)) + " " + Name(op) + " ranks of hosts: " + split +
                    "m=" + std::to_string(shape.m) + " count=" + std::to_string(shape.count) +
                    " pre=" + std::to_string(scale.pre) + " post=" + std::to_string(scale.post));
  }
}

template <DType kDType>
void CheckOne(ReduceOp op, const Scale& scale, const Shape& shape, const std::vector<std::string>& kernels,
              std::mt19937_64& random) {
  using Stored = typename Element<kDType>::Stored;
  const size_t nbytes = shape.count * sizeof(Stored);
  std::vector<std::vector<Stored>> inputs;
  for (int r = 0; r < shape.n; ++r) inputs.push_back(Inputs<kDType>(shape.count, random));
  std::vector<Stored> expected(shape.count);
  for (size_t i = 0; i < shape.count; ++i) {
    std::vector<Stored> xs;
    for (const auto& input : inputs) xs.push_back(input[i]);
    expected[i] = Element<kDType>::Reduced(op, scale, xs);
  }

  for (const std::string& name : kernels) {
    CHECK(UseKernels(name).ok());
    std::vector<Buffer> sources, others;
    for (int r = 0; r < shape.n; ++r) {
      sources.emplace_back(inputs[static_cast<size_t>(r)].data(), nbytes,
                           shape.shift * static_cast<size_t>(r + 1));
    }
    for (int k = 0; k < shape.m; ++k)
      others.emplace_back(nullptr, nbytes, shape.shift * static_cast<size_t>(k + 2));
    std::vector<const void*> srcs;
    std::vector<void*> dsts;
    for (auto& source : sources) srcs.push_back(source.begin());
    for (size_t k = 0; k < others.size(); ++k) {
      dsts.push_back(shape.in_place && k < sources.size() ? sources[k].begin() : others[k].begin());
    }
    CheckSplit<kDType>(op, scale, shape, srcs, expected, kernels, random);
    CHECK(UseKernels(name).ok());
    Reduce(kDType, op, scale, srcs.data(), shape.n, dsts.data(), shape.m, shape.count);

    bool is_right = true;
    for (void* dst : dsts) is_right &= nbytes == 0 || std::memcmp(dst, expected.data(), nbytes) == 0;
    for (size_t r = 0; r < sources.size(); ++r) {
      is_right &= sources[r].IsIntact(nbytes);
      const bool is_written = shape.in_place && r < dsts.size();
      if (!is_written && nbytes > 0)
        is_right &= std::memcmp(sources[r].begin(), inputs[r].data(), nbytes) == 0;
    }
    for (const auto& other : others) is_right &= other.IsIntact(nbytes);
    if (!is_right) {
      check::Fail(__FILE__, __LINE__,
                  std::string(Name(kDType)) + " " + Name(op) + " " + name + " n=" + std::to_string(shape.n) +
                      " m=" + std::to_string(shape.m) + (shape.in_place ? " in place" : "") +
                      " count=" + std::to_string(shape.count) + " shift=" + std::to_string(shape.shift) +
                      " pre=" + std::to_string(scale.pre) + " post=" + std::to_string(scale.post));
    }
  }
  CHECK(UseKernels("best").ok());
}

template <DType kDType>
void CheckDType() {
  const std::vector<std::string> kernels = UsableKernels();
  std::mt19937_64 random(static_cast<uint64_t>(kDType) + 1);
  // Around the vector widths of the kernels and what they do at a time.
#if defined(HVD_SANITIZED)
  const size_t counts[] = {0, 1, 33, 255, 1025};
  constexpr int kMostSources = 3;
#else
  const size_t counts[] = {0, 1, 2, 7, 8, 9, 33, 63, 64, 65, 255, 1023, 1024, 1025, 2051};
  constexpr int kMostSources = 5;
#endif
  for (const ReduceOp op : kOps) {
    for (int n = 1; n <= kMostSources; ++n) {
      const int divisor = op == ReduceOp::kAverage ? n : 1;
      std::vector<Scale> scales = {
          {1, 1, divisor}, {0.75, 1, divisor}, {1, -1.5, divisor}, {1e6, 1.0 / 3, divisor}};
      if (kDType == DType::kBool) scales = {{1, 1, 1}};
      if (!CheckReduce(kDType, op, scales[0]).ok()) continue;
      for (const Scale& scale : scales) {
        CHECK(CheckReduce(kDType, op, scale).ok());
        for (const size_t count : counts) {
          const size_t shift = count % 3 == 0   ? 0
                               : count % 3 == 1 ? 1
                                                : sizeof(typename Element<kDType>::Stored);
          CheckOne<kDType>(op, scale, {n, 1 + static_cast<int>(count % 3), false, count, shift}, kernels,
                           random);
          CheckOne<kDType>(op, scale, {n, n, true, count, shift}, kernels, random);
        }
      }
    }
  }
}

TEST(ReducesBool) { CheckDType<DType::kBool>(); }
TEST(ReducesUInt8) { CheckDType<DType::kUInt8>(); }
TEST(ReducesInt8) { CheckDType<DType::kInt8>(); }
TEST(ReducesUInt16) { CheckDType<DType::kUInt16>(); }
TEST(ReducesInt16) { CheckDType<DType::kInt16>(); }
TEST(ReducesUInt32) { CheckDType<DType::kUInt32>(); }
TEST(ReducesInt32) { CheckDType<DType::kInt32>(); }
TEST(ReducesUInt64) { CheckDType<DType::kUInt64>(); }
TEST(ReducesInt64) { CheckDType<DType::kInt64>(); }
TEST(ReducesFloat16) { CheckDType<DType::kFloat16>(); }
TEST(ReducesBFloat16) { CheckDType<DType::kBFloat16>(); }
TEST(ReducesFloat32) { CheckDType<DType::kFloat32>(); }
TEST(ReducesFloat64) { CheckDType<DType::kFloat64>(); }

// Every fp16 bit pattern through the hardware conversions and the portable ones.
TEST(EveryHalfSurvives) {
  std::vector<uint16_t> all(0x10000), zeros(0x10000, 0x8000), expected(0x10000);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<uint16_t>(i);
    expected[i] = (i & 0x7fff) > 0x7c00 ? 0x7e00 : static_cast<uint16_t>(i);
  }
  for (const std::string& name : UsableKernels()) {
    CHECK(UseKernels(name).ok());
    const void* srcs[] = {all.data(), zeros.data()};
    std::vector<uint16_t> out(0x10000);
    void* dst = out.data();
    Reduce(DType::kFloat16, ReduceOp::kSum, {}, srcs, 2, &dst, 1, out.size());
    CHECK(out == expected);
  }
  CHECK(UseKernels("best").ok());
}

// A sum that would differ if products were fused into it, or if additions were paired otherwise.
TEST(AddsFromLeftToRight) {
  const float xs[] = {1e8f, 1.0f, -1e8f, 1.0f};
  const void* srcs[] = {&xs[0], &xs[1], &xs[2], &xs[3]};
  float out = 0;
  void* dst = &out;
  Reduce(DType::kFloat32, ReduceOp::kSum, {}, srcs, 4, &dst, 1, 1);
  CHECK_EQ(out, 1.0f);
}

#if defined(__x86_64__)
TEST(KeepsDenormalsWhereTheProgramFlushesThem) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const void* srcs[] = {&tiny, &tiny};
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  float out = 0;
  void* dst = &out;
  Reduce(DType::kFloat32, ReduceOp::kSum, {}, srcs, 2, &dst, 1, 1);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK_EQ(after & 0x8040, 0x8040u);
  CHECK_EQ(out, 2 * tiny);
}
#endif

TEST(AveragesWholeNumbersExactly) {
  const int64_t xs[] = {(int64_t{1} << 62) + 1, (int64_t{1} << 61) + 1, -3};
  const void* srcs[] = {&xs[0], &xs[1], &xs[2]};
  int64_t out = 0;
  void* dst = &out;
  Reduce(DType::kInt64, ReduceOp::kAverage, {1, 1, 3}, srcs, 3, &dst, 1, 1);
  CHECK_EQ(out, (int64_t{1} << 61) - 1);
  // Toward zero.
  const int64_t negative[] = {-4, -1};
  const void* pair[] = {&negative[0], &negative[1]};
  Reduce(DType::kInt64, ReduceOp::kAverage, {1, 1, 2}, pair, 2, &dst, 1, 1);
  CHECK_EQ(out, -2);
}

// Scaled integers outside their type: at the ends exactly, and far beyond.
template <DType kDType, class T>
void CheckScaled(T x, double factor, T expected) {
  const void* src = &x;
  for (const std::string& name : UsableKernels()) {
    CHECK(UseKernels(name).ok());
    for (const Scale& scale : {Scale{.pre = factor}, Scale{.post = factor}}) {
      T out = 0;
      void* dst = &out;
      Reduce(kDType, ReduceOp::kSum, scale, &src, 1, &dst, 1, 1);
      CHECK_EQ(out, expected);
    }
  }
  CHECK(UseKernels("best").ok());
}

TEST(ClampsScaledIntegers) {
  using Int = std::numeric_limits<int64_t>;
  constexpr int64_t kQuarter = int64_t{1} << 62;
  CheckScaled<DType::kInt64>(kQuarter, 2.0, Int::max());
  CheckScaled<DType::kInt64>(kQuarter, -2.0, Int::min());
  CheckScaled<DType::kInt64>(kQuarter, 1e30, Int::max());
  CheckScaled<DType::kInt64>(kQuarter, -1e30, Int::min());
  CheckScaled<DType::kInt64>(int64_t{0}, INFINITY, int64_t{0});  // NaN
  CheckScaled<DType::kInt64>(int64_t{7}, -0.5, int64_t{-3});
  CheckScaled<DType::kUInt64>(uint64_t{1} << 63, 2.0, std::numeric_limits<uint64_t>::max());
  CheckScaled<DType::kUInt64>(uint64_t{1} << 62, 2.0, uint64_t{1} << 63);
  CheckScaled<DType::kUInt64>(uint64_t{5}, -1.0, uint64_t{0});
}

TEST(AccumulatesInFloatOrAsStored) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const bool is_small_float = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
    CHECK_EQ(AccType(dtype), is_small_float ? DType::kFloat32 : dtype);
  }
}

TEST(RefusesWhatItCannotDo) {
  CHECK_EQ(CheckReduce(DType::kFloat32, ReduceOp::kAdasum, {}).code(), Code::kInvalid);
  CHECK_EQ(CheckReduce(DType::kBool, ReduceOp::kAverage, {}).code(), Code::kInvalid);
  CHECK_EQ(CheckReduce(DType::kBool, ReduceOp::kSum, {.pre = 2}).code(), Code::kInvalid);
  CHECK_EQ(CheckReduce(DType::kInt8, ReduceOp::kAverage, {.divisor = 0}).code(), Code::kInvalid);
  CHECK_EQ(CheckReduce(static_cast<DType>(99), ReduceOp::kSum, {}).code(), Code::kInvalid);
  CHECK_EQ(CheckReduce(DType::kInt8, static_cast<ReduceOp>(99), {}).code(), Code::kInvalid);
  CHECK(CheckReduce(DType::kBool, ReduceOp::kSum, {}).ok());
  CHECK_EQ(UseKernels("sse9").code(), Code::kInvalid);
  CHECK(UseKernels(Name(BestKernels())).ok());
}

}  // namespace
}  // namespace hvd
