#include "base/types.h"

#include <array>

namespace hvd {
namespace {

struct DTypeInfo {
  const char* name;
  size_t item_size;
};

constexpr std::array<DTypeInfo, kNumDTypes> kDTypes = {{
    {"bool", 1},
    {"uint8", 1},
    {"int8", 1},
    {"uint16", 2},
    {"int16", 2},
    {"uint32", 4},
    {"int32", 4},
    {"uint64", 8},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
}};

constexpr std::array<const char*, kNumReduceOps> kReduceOps = {"average", "sum", "adasum",
                                                               "min",     "max", "product"};

}  // namespace

size_t ItemSize(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < kDTypes.size() ? kDTypes[i].item_size : 0;
}

const char* Name(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < kDTypes.size() ? kDTypes[i].name : "unknown";
}

const char* Name(ReduceOp op) {
  const auto i = static_cast<size_t>(op);
  return i < kReduceOps.size() ? kReduceOps[i] : "unknown";
}

}  // namespace hvd
