// IEEE binary16 and bfloat16 to and from float, round to nearest even. Pure integer arithmetic without
// branches that depend on data, so that loops over these vectorise and every machine gives the same bits.
// NaNs come out quiet with the upper payload bits kept, as the F16C instructions do.
//
// `static inline`: the kernels are compiled several times with other machine flags, and the linker must not
// replace one copy by another that the CPU cannot run.
#pragma once

#include <cstdint>
#include <cstring>

namespace hvd {

static inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The conversions below are for one number or, in the kernels, for a vector of them: `Bits` is uint32_t or a
// vector of uint32_t, and what FloatsOf names for it are the floats with those bits.
template <class Bits>
struct FloatsOf;
template <>
struct FloatsOf<uint32_t> {
  using Type = float;
};

template <class To, class From>
static inline To SameBits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// if_true or if_false, without a branch. A vector's condition is 0 or -1 in each lane.
static inline uint32_t Select(bool condition, uint32_t if_true, uint32_t if_false) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (if_true & mask) | (if_false & ~mask);
}
template <class Mask, class Bits>
static inline Bits Select(Mask condition, Bits if_true, Bits if_false) {
  const Bits mask = SameBits<Bits>(condition);
  return (if_true & mask) | (if_false & ~mask);
}

// `half` has its bits in the lower 16.
template <class Bits>
static inline Bits HalfToFloatBits(Bits half) {
  using Floats = typename FloatsOf<Bits>::Type;
  const Bits magnitude = half & 0x7fffu;
  const Bits sign = (half & 0x8000u) << 16;
  // Normal: move the exponent from bias 15 to 127.
  const Bits normal = (magnitude << 13) + (112u << 23);
  // Inf and NaN: all exponent bits; a NaN gets the quiet bit.
  const Bits special =
      (magnitude << 13) | 0x7f800000u | Select(magnitude > 0x7c00u, Bits{} + 0x00400000u, Bits{});
  // Subnormal and zero: magnitude units of 2^-24, exact in float. (2^-14 + magnitude 2^-24) - 2^-14.
  const Bits subnormal =
      SameBits<Bits>(SameBits<Floats>(Bits{(magnitude << 13) + (113u << 23)}) - BitsToFloat(113u << 23));
  const Bits finite = Select(magnitude < 0x0400u, subnormal, normal);
  return sign | Select(magnitude >= 0x7c00u, special, finite);
}

template <class Bits>
static inline Bits FloatToHalfBits(Bits bits) {
  using Floats = typename FloatsOf<Bits>::Type;
  const Bits magnitude = bits & 0x7fffffffu;
  const Bits sign = (bits >> 16) & 0x8000u;
  // Normal: bias 127 to 15 and drop 13 bits; a carry out of the mantissa rightly raises the exponent, up to
  // infinity.
  const Bits normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 leaves magnitude / 2^-24, rounded to nearest even by the addition, in the low
  // bits.
  const Bits subnormal = SameBits<Bits>(SameBits<Floats>(magnitude) + 0.5f) - FloatToBits(0.5f);
  const Bits nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  const Bits finite = Select(magnitude < (113u << 23), subnormal, normal);
  // From 65520 on, rounding reaches 2^16.
  const Bits ordered = Select(magnitude >= 0x477ff000u, Bits{} + 0x7c00u, finite);
  return sign | Select(magnitude > 0x7f800000u, nan, ordered);
}

// The upper 16 bits of the result are those of the bfloat16; the lower ones are anything. For numbers and the
// canonical NaN only: another NaN might round to an infinity.
template <class Bits>
static inline Bits RoundToBFloat(Bits bits) {
  return bits + ((bits >> 16) & 1u) + 0x7fffu;
}

static inline float HalfToFloat(uint16_t half) { return BitsToFloat(HalfToFloatBits(uint32_t{half})); }

static inline uint16_t FloatToHalf(float value) {
  return static_cast<uint16_t>(FloatToHalfBits(FloatToBits(value)));
}

static inline float BFloatToFloat(uint16_t bfloat) {
  return BitsToFloat(static_cast<uint32_t>(bfloat) << 16);
}

static inline uint16_t FloatToBFloat(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t nan = bits | 0x00400000u;
  return static_cast<uint16_t>(Select((bits & 0x7fffffffu) > 0x7f800000u, nan, RoundToBFloat(bits)) >> 16);
}

}  // namespace hvd
