#include "collectives/reduce.h"

#include <atomic>
#include <string>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "collectives/reduce_kernels.h"

namespace hvd {
namespace {

// Null for kernels that this build does not have.
const KernelTable* TableOf(Kernels kernels) {
  switch (kernels) {
    case Kernels::kBaseline:
      return &kBaselineKernels;
#if defined(__x86_64__)
    case Kernels::kAvx2:
      return &kAvx2Kernels;
    case Kernels::kAvx512:
      return &kAvx512Kernels;
#else
    default:
      break;
#endif
  }
  return nullptr;
}

bool CpuRuns(Kernels kernels) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (kernels == Kernels::kAvx2) return avx2;
  if (kernels == Kernels::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return kernels == Kernels::kBaseline;
}

// Process-wide, which is harmless: every table gives the same bits. Null until the first use.
std::atomic<const KernelTable*> table_in_use{nullptr};

const KernelTable& TableInUse() {
  const KernelTable* table = table_in_use.load(std::memory_order_acquire);
  if (table == nullptr) {
    const KernelTable* best = TableOf(BestKernels());
    table = table_in_use.compare_exchange_strong(table, best) ? best : table;
  }
  return *table;
}

// A program may flush denormals or round otherwise on its own thread (torch.set_flush_denormal), which must
// not change a sum that other ranks see.
class PlainArithmetic {
 public:
#if defined(__x86_64__)
  PlainArithmetic() : before_(_mm_getcsr()) {
    if ((before_ & kChanges) != 0) _mm_setcsr(before_ & ~kChanges);
  }
  ~PlainArithmetic() {
    if ((before_ & kChanges) != 0) _mm_setcsr(before_);
  }

 private:
  // Flush to zero, denormals are zero, direction of rounding.
  static constexpr unsigned kChanges = 0x8000 | 0x0040 | 0x6000;
  const unsigned before_;
#else
  PlainArithmetic() {}
  ~PlainArithmetic() {}
#endif
};

void Run(DType dtype, ReduceOp op, const Scale& scale, const Operands& operands, size_t count) {
  const PlainArithmetic plain;
  TableInUse().reduce[static_cast<size_t>(dtype)](op, scale, operands, count);
}

}  // namespace

const char* Name(Kernels kernels) {
  switch (kernels) {
    case Kernels::kBaseline:
      return "baseline";
    case Kernels::kAvx2:
      return "avx2";
    case Kernels::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Kernels BestKernels() {
  static const Kernels best = [] {
    for (Kernels kernels : {Kernels::kAvx512, Kernels::kAvx2}) {
      if (CpuRuns(kernels)) return kernels;
    }
    return Kernels::kBaseline;
  }();
  return best;
}

Status UseKernels(std::string_view name) {
  if (name == "best") name = Name(BestKernels());
  std::string usable = "best";
  for (Kernels kernels : {Kernels::kBaseline, Kernels::kAvx2, Kernels::kAvx512}) {
    if (!CpuRuns(kernels)) continue;
    if (name == Name(kernels)) {
      table_in_use.store(TableOf(kernels), std::memory_order_release);
      return Status::Ok();
    }
    usable.append(", ").append(Name(kernels));
  }
  return Status(Code::kInvalid, "kernels '" + std::string(name) + "': this machine has " + usable);
}

Status CheckReduce(DType dtype, ReduceOp op, const Scale& scale) {
  if (ItemSize(dtype) == 0) return Status(Code::kInvalid, "cannot reduce: unknown dtype");
  if (static_cast<int>(op) >= kNumReduceOps)
    return Status(Code::kInvalid, "cannot reduce: unknown operation");
  if (op == ReduceOp::kAdasum) return Status(Code::kInvalid, "op=Adasum is not supported yet");
  if (scale.divisor < 1) return Status(Code::kInvalid, "cannot average over fewer than one rank");
  if (dtype == DType::kBool) {
    if (op == ReduceOp::kAverage) return Status(Code::kInvalid, "cannot average bool; cast it first");
    if (scale != Scale{}) return Status(Code::kInvalid, "cannot scale bool; cast it first");
  }
  return Status::Ok();
}

void Reduce(DType dtype, ReduceOp op, const Scale& scale, const void* const* srcs, int n, void* const* dsts,
            int m, size_t count) {
  Run(dtype, op, scale, {.srcs = srcs, .n = n, .dsts = dsts, .m = m}, count);
}

DType AccType(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

void Accumulate(DType dtype, ReduceOp op, const Scale& scale, const void* acc_in, const void* const* srcs,
                int n, void* acc_out, size_t count) {
  Run(dtype, op, scale, {.acc_in = acc_in, .srcs = srcs, .n = n, .acc_out = acc_out}, count);
}

void Finish(DType dtype, ReduceOp op, const Scale& scale, const void* acc, void* const* dsts, int m,
            size_t count) {
  Run(dtype, op, scale, {.acc_in = acc, .dsts = dsts, .m = m}, count);
}

}  // namespace hvd
