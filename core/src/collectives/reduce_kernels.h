// Between reduce.cc and the three compilations of reduce_kernels.inc.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace hvd {

struct Scale;

// What Reduce, Accumulate and Finish have in common: start from acc_in or else from the first source, add the
// sources, then either store the accumulator or finish it into the destinations.
struct Operands {
  const void* acc_in = nullptr;
  const void* const* srcs = nullptr;
  int n = 0;
  void* acc_out = nullptr;
  void* const* dsts = nullptr;
  int m = 0;
};

// One dtype's arithmetic.
using ReduceFn = void (*)(ReduceOp op, const Scale& scale, const Operands& operands, size_t count);

// By dtype.
struct KernelTable {
  ReduceFn reduce[kNumDTypes];
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;    // needs AVX2 and F16C
extern const KernelTable kAvx512Kernels;  // needs those and AVX-512 F, BW, VL, DQ
#endif

}  // namespace hvd
