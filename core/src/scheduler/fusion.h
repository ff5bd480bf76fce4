#pragma once

#include <span>
#include <vector>

#include "scheduler/request.h"

namespace hvd {

// What the tensors of a fused batch have in common.
struct FusionKind {
  bool fuses = false;  // only allreduces do
  bool in_arena = false;
  DType dtype = DType::kFloat32;
  ReduceOp reduce = ReduceOp::kSum;
  double prescale = 1;
  double postscale = 1;
  bool operator==(const FusionKind&) const = default;
};

// A tensor of a round: `member` of the `decision`-th decided collective.
struct Tensor {
  uint32_t decision = 0;
  uint32_t member = 0;
  uint64_t nbytes = 0;
  FusionKind kind;

  uint64_t count() const { return nbytes / ItemSize(kind.dtype); }
};

// Appends the tensors of the `index`-th decided collective: any rank's request for it (they agree), and what
// was agreed.
void AppendTensors(const Request& request, const Decision& decision, uint32_t index,
                   std::vector<Tensor>* tensors);

// The tensors of a round, batch after batch.
struct Batches {
  std::vector<Tensor> tensors;
  std::vector<uint32_t> ends;  // of each batch, in tensors

  size_t size() const { return ends.size(); }
  std::span<const Tensor> operator[](size_t batch) const {
    const uint32_t begin = batch == 0 ? 0 : ends[batch - 1];
    return {tensors.data() + begin, ends[batch] - begin};
  }
};

// Packs tensors into fused batches of at most fusion_nbytes, in the given order. Only those of one kind fuse;
// a batch always holds at least one tensor. Pure, and the same on all ranks.
Batches Fuse(std::span<const Tensor> round, size_t fusion_nbytes);

}  // namespace hvd
