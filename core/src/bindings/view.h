#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <string_view>

#include "base/types.h"
#include "scheduler/engine.h"

namespace hvd {

// numpy has 64 at most.
inline constexpr size_t kMaxDims = 64;

// An array of the caller as it is: what would need a copy or another device is refused, never converted.
// Valid as long as somebody keeps the array.
struct View {
  DType dtype;
  std::byte* data;
  size_t ndim;
  int64_t shape[kMaxDims];  // the first ndim

  std::span<const int64_t> extents() const { return {shape, ndim}; }
  uint64_t nbytes() const {
    uint64_t count = 1;
    for (const int64_t extent : extents()) count *= static_cast<uint64_t>(extent);
    return count * ItemSize(dtype);
  }
};

// What the output is of the input: all of it, or its rows for one rank in a reducescatter.
struct Share {
  int rank = 0, size = 1;
  uint64_t Of(const View& view) const;  // in bytes
};

// The memory of one tensor of a collective: of anything with the buffer protocol or DLPack. A torch tensor
// that requires grad counts as its detach(). The output is None where the result gets memory of its own, the
// input itself for in place. Raises InvalidArgument.
void LookAt(nanobind::handle input, nanobind::handle output, const Share& share, std::string_view name,
            View* view, Buffer* buffer);

// Of a torch tensor whose values stand in its memory, on the host, contiguous and of a dtype that can be
// sent, as quickly as can be. False, without an exception, for anything else, and where torch is older than
// its table of C functions (DLPack 1.3).
bool LookAtTensor(nanobind::handle object, View* view);

nanobind::dlpack::dtype ToDLPack(DType dtype);

}  // namespace hvd
