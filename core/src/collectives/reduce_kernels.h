// Between reduce.cc and the three compilations of reduce_kernels.inc.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace hvd {

struct Scale;

// One dtype's reduction; arguments as in Reduce.
using ReduceFn = void (*)(ReduceOp op, const Scale& scale, const void* const* srcs, int n, void* const* dsts,
                          int m, size_t count);

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
