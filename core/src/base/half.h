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

// if_true or if_false, without a branch.
static inline uint32_t Select(bool condition, uint32_t if_true, uint32_t if_false) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (if_true & mask) | (if_false & ~mask);
}

static inline float HalfToFloat(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  // Normal: move the exponent from bias 15 to 127.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  // Inf and NaN: all exponent bits; a NaN gets the quiet bit.
  const uint32_t special = (magnitude << 13) | 0x7f800000u | Select(magnitude > 0x7c00u, 0x00400000u, 0u);
  // Subnormal and zero: magnitude units of 2^-24, exact in float. (2^-14 + magnitude 2^-24) - 2^-14.
  const uint32_t subnormal =
      FloatToBits(BitsToFloat((113u << 23) + (magnitude << 13)) - BitsToFloat(113u << 23));
  const uint32_t finite = Select(magnitude < 0x0400u, subnormal, normal);
  return BitsToFloat(sign | Select(magnitude >= 0x7c00u, special, finite));
}

static inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Normal: bias 127 to 15 and drop 13 bits; a carry out of the mantissa rightly raises the exponent, up to
  // infinity.
  const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 leaves magnitude / 2^-24, rounded to nearest even by the addition, in the low
  // bits.
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0.5f) - FloatToBits(0.5f);
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  const uint32_t finite = Select(magnitude < (113u << 23), subnormal, normal);
  // From 65520 on, rounding reaches 2^16.
  const uint32_t ordered = Select(magnitude >= 0x477ff000u, 0x7c00u, finite);
  return static_cast<uint16_t>(sign | Select(magnitude > 0x7f800000u, nan, ordered));
}

static inline float BFloatToFloat(uint16_t bfloat) {
  return BitsToFloat(static_cast<uint32_t>(bfloat) << 16);
}

static inline uint16_t FloatToBFloat(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x0040u;
  return static_cast<uint16_t>(Select((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded));
}

}  // namespace hvd
