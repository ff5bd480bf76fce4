#include <chrono>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <thread>

#include "base/half.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/types.h"
#include "check.h"

namespace hvd {
namespace {

std::span<const std::byte> BytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string Hex(std::span<const std::byte> bytes) {
  std::string hex;
  for (const std::byte byte : bytes) {
    for (const int nibble : {std::to_integer<int>(byte >> 4), std::to_integer<int>(byte & std::byte{15})}) {
      hex.push_back("0123456789abcdef"[nibble]);
    }
  }
  return hex;
}

TEST(StatusKeepsItsCodeAndGainsViews) {
  const Status ok;
  CHECK(ok.ok());
  CHECK_EQ(ok.code(), Code::kOk);
  CHECK_EQ(ok.text(), "");
  CHECK(ok.Prepend("while reducing").ok());

  const Status lost(Code::kPeerLost, "no byte for 30 s");
  const Status seen = lost.Prepend("rank 3").Prepend("grad/fc1");
  CHECK(!seen.ok());
  CHECK_EQ(seen.code(), Code::kPeerLost);
  CHECK_EQ(seen.text(), "grad/fc1: rank 3: no byte for 30 s");
  CHECK_EQ(lost.text(), "no byte for 30 s");
}

TEST(ResultHoldsOneOfTwo) {
  const Result<std::string> value(std::string("x"));
  CHECK(value.ok());
  CHECK(value.status().ok());
  CHECK_EQ(value.value(), "x");
  const Result<std::string> failure(Code::kInvalid, "no");
  CHECK(!failure.ok());
  CHECK_EQ(failure.status().code(), Code::kInvalid);
}

TEST(DTypesHaveSizesAndNames) {
  CHECK_EQ(ItemSize(DType::kBool), 1u);
  CHECK_EQ(ItemSize(DType::kInt16), 2u);
  CHECK_EQ(ItemSize(DType::kBFloat16), 2u);
  CHECK_EQ(ItemSize(DType::kFloat32), 4u);
  CHECK_EQ(ItemSize(DType::kInt64), 8u);
  CHECK_EQ(std::string(Name(DType::kUInt32)), "uint32");
  CHECK_EQ(std::string(Name(ReduceOp::kProduct)), "product");
  CHECK_EQ(ItemSize(static_cast<DType>(200)), 0u);
  CHECK_EQ(std::string(Name(static_cast<DType>(200))), "unknown");
  CHECK_EQ(std::string(Name(static_cast<ReduceOp>(200))), "unknown");
}

// The value of a finite small float from its definition: sign, exponent with `exponent_bits`, rest mantissa.
double ValueOf(uint32_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return bits & 0x8000 ? -magnitude : magnitude;
}

struct SmallFloat {
  int exponent_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);

  uint16_t infinity() const {
    return static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  }
};
const SmallFloat kHalf{5, HalfToFloat, FloatToHalf};
const SmallFloat kBFloat{8, BFloatToFloat, FloatToBFloat};

// Nearest even by bisection over the non-negative finite values, in double where every one is exact.
uint16_t RoundOracle(const SmallFloat& type, float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  // The first value too large for the type, where rounding to infinity takes place.
  uint32_t low = 0, high = type.infinity();
  const auto value_of = [&](uint32_t bits) { return ValueOf(bits, type.exponent_bits); };
  const double end = 2 * value_of(high - 1) - value_of(high - 2);
  if (magnitude >= end) return static_cast<uint16_t>(sign | high);
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value_of(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - value_of(low);
  const double above = (high == type.infinity() ? end : value_of(high)) - magnitude;
  const uint32_t nearest = below < above || (below == above && low % 2 == 0) ? low : high;
  return static_cast<uint16_t>(sign | nearest);
}

void CheckSmallFloat(const SmallFloat& type) {
  const uint32_t infinity = type.infinity();
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto small = static_cast<uint16_t>(bits);
    const float value = type.to_float(small);
    if ((bits & 0x7fff) > infinity) {
      CHECK(std::isnan(value));
      const uint16_t back = type.from_float(value);
      // Sign and payload stay; the quiet bit is set.
      CHECK_EQ(back, static_cast<uint16_t>(bits | 1u << (14 - type.exponent_bits)));
      continue;
    }
    if ((bits & 0x7fff) == infinity) {
      CHECK(std::isinf(value));
    } else {
      CHECK_EQ(static_cast<double>(value), ValueOf(bits, type.exponent_bits));
      // Halfway to the next value, and one float to each side.
      const float halfway =
          value +
          static_cast<float>((ValueOf(bits + 1, type.exponent_bits) - ValueOf(bits, type.exponent_bits)) / 2);
      if (std::isfinite(halfway)) {
        for (const float near : {std::nextafter(halfway, 0.0f), halfway, std::nextafter(halfway, INFINITY)}) {
          CHECK_EQ(type.from_float(near), RoundOracle(type, near));
        }
      }
    }
    CHECK_EQ(type.from_float(value), small);
    CHECK_EQ(std::signbit(value), (bits & 0x8000) != 0);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float value = BitsToFloat(static_cast<uint32_t>(random()));
    if (!std::isnan(value)) CHECK_EQ(type.from_float(value), RoundOracle(type, value));
  }
  for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffc00000u}) {
    CHECK(std::isnan(type.to_float(type.from_float(BitsToFloat(nan)))));
  }
}

TEST(HalfConvertsEveryValue) { CheckSmallFloat(kHalf); }
TEST(BFloatConvertsEveryValue) { CheckSmallFloat(kBFloat); }

// FIPS 180-4 examples, as NIST publishes them.
TEST(Sha256MatchesNist) {
  CHECK_EQ(Hex(Sha256::Of({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(Hex(Sha256::Of(BytesOf("abc"))),
           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK_EQ(Hex(Sha256::Of(BytesOf(two_blocks))),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 million;
  for (int i = 0; i < 1000; ++i) million.Update(BytesOf(std::string(1000, 'a')));
  CHECK_EQ(Hex(million.Finish()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256DoesNotDependOnThePieces) {
  for (size_t size = 0; size < 200; ++size) {
    const std::string text(size, 'x');
    const Digest whole = Sha256::Of(BytesOf(text));
    for (const size_t piece : {1u, 7u, 63u, 64u, 65u}) {
      Sha256 sha;
      for (size_t i = 0; i < size; i += piece)
        sha.Update(BytesOf(text).subspan(i, std::min(piece, size - i)));
      CHECK(sha.Finish() == whole);
    }
  }
}

// RFC 4231, test cases 1, 2, 3 and 6.
TEST(HmacMatchesRfc4231) {
  const auto hmac = [](const std::string& key, const std::string& data) {
    return Hex(HmacSha256::Of(BytesOf(key), BytesOf(data)));
  };
  CHECK_EQ(hmac(std::string(20, '\x0b'), "Hi There"),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hmac("Jefe", "what do ya want for nothing?"),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(EqualComparesEveryByte) {
  Digest a{};
  RandomBytes(a);
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    CHECK(Equal(a, b));
    b[i] ^= std::byte{1};
    CHECK(!Equal(a, b));
  }
  CHECK(!Equal(a, std::span(a).first(31)));
  CHECK(Equal({}, {}));
}

TEST(RandomBytesFillAndDiffer) {
  std::array<std::byte, 4096> a{}, b{};
  RandomBytes(a);
  RandomBytes(b);
  CHECK(!Equal(a, b));
  std::array<int, 256> seen{};
  for (const std::byte byte : a) ++seen[std::to_integer<size_t>(byte)];
  // 16 expected; the chance of more than 64 anywhere is below 1e-16.
  for (const int count : seen) CHECK(count <= 64);
}

TEST(CondVarPassesEveryItem) {
  Mutex mutex;
  CondVar changed;
  int ready = 0;
  std::thread other([&] {
    for (int i = 0; i < 1000; ++i) {
      MutexLock lock(mutex);
      ++ready;
      changed.Signal();
    }
  });
  int taken = 0;
  while (taken < 1000) {
    MutexLock lock(mutex);
    while (ready == 0) changed.Wait(mutex);
    taken += ready;
    ready = 0;
  }
  other.join();
  CHECK_EQ(taken, 1000);

  MutexLock lock(mutex);
  const auto begin = std::chrono::steady_clock::now();
  while (changed.WaitFor(mutex, std::chrono::milliseconds(5))) {
  }
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(5));
}

std::string logged;

TEST(LogGoesToTheSinkFromItsLevelOn) {
  SetLogSink([](Level, std::string_view text) { logged += std::string(text) + "|"; });
  Log(Level::kInfo, "not this");
  Log(Level::kWarning, "this");
  SetLogLevel(Level::kDebug);
  Log(Level::kInfo, "and this");
  SetLogLevel(Level::kSilent);
  Log(Level::kError, "nothing");
  SetLogSink(nullptr);
  SetLogLevel(Level::kWarning);
  CHECK_EQ(logged, "this|and this|");
}

}  // namespace
}  // namespace hvd
