// Element types and reductions. The numbers are part of the wire format and of the Python enums: append,
// never reorder.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};
inline constexpr int kNumDTypes = 13;

enum class ReduceOp : uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};
inline constexpr int kNumReduceOps = 6;

// Bytes of one element; 0 for a value that is not a DType.
size_t ItemSize(DType dtype);

// As numpy spells it: "float32". "unknown" for a value outside the enum, which a damaged message may hold.
const char* Name(DType dtype);
const char* Name(ReduceOp op);

}  // namespace hvd
