// The arithmetic of allreduce: one pass over n ranks' elements, in rank order, the same bits on every
// machine.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/status.h"
#include "base/types.h"

namespace hvd {

// out = (op over ranks r of (pre * x_r)) / divisor * post. `divisor` is the number of ranks for an average,
// else 1.
//
// Floats scale in the accumulator's type (float for 16-bit floats). Integers: pre * x and the last step are
// computed in double and truncated toward zero (Horovod's meaning; values outside the type clamp, NaN gives
// 0); with post = 1 the division is that of integers, exact for 64 bits.
struct Scale {
  double pre = 1;
  double post = 1;
  int divisor = 1;

  bool operator==(const Scale&) const = default;
};

// kInvalid with a text for a user, if Reduce does not do this: Adasum; scaling or averaging bool.
Status CheckReduce(DType dtype, ReduceOp op, const Scale& scale);

// Reduces `count` elements of n >= 1 sources left to right and writes the result to every one of m
// destinations. A source is read once and before the same elements of any destination are written, so a
// destination may be a source (the same pointer); no other overlap is allowed. Pointers need no alignment.
// `CheckReduce` was ok.
//
// 16-bit floats accumulate in float and round once; integers wrap; min and max propagate NaN; any NaN in the
// result is the canonical quiet one, since which operand's payload survives differs between machines. For min
// and max of -0 and +0 the lower rank's zero wins. bool: sum and max are or, min and product are and; true is
// any byte but 0.
void Reduce(DType dtype, ReduceOp op, const Scale& scale, const void* const* srcs, int n, void* const* dsts,
            int m, size_t count);

// Reduce in parts, for ranks whose elements are not all in one place: each place adds its ranks, in rank
// order, to an accumulator that it passes on. However the ranks are split, Finish gives the bits of Reduce.

// The dtype of an accumulator: float for 16-bit floats, else the dtype itself.
DType AccType(DType dtype);

// acc_out = acc_in op (scale.pre * each of n sources), left to right; with acc_in null it starts at the first
// source, and n >= 1. acc_out may be acc_in or, if AccType(dtype) is dtype, a source. Neither divides nor
// scales afterwards.
void Accumulate(DType dtype, ReduceOp op, const Scale& scale, const void* acc_in, const void* const* srcs,
                int n, void* acc_out, size_t count);

// What is left of Reduce: acc / scale.divisor * scale.post, stored as dtype in every one of m destinations,
// of which one may be acc if AccType(dtype) is dtype.
void Finish(DType dtype, ReduceOp op, const Scale& scale, const void* acc, void* const* dsts, int m,
            size_t count);

// The machine the kernels are compiled for. Chosen by the CPU; results do not depend on it.
enum class Kernels { kBaseline, kAvx2, kAvx512 };
const char* Name(Kernels kernels);

// The best that this CPU runs, and what Reduce uses unless UseKernels says otherwise.
Kernels BestKernels();

// Makes Reduce use "baseline", "avx2", "avx512" or "best" from now on, in this process. kInvalid for an
// unknown name or one that this CPU (or this build) does not run.
Status UseKernels(std::string_view name);

}  // namespace hvd
