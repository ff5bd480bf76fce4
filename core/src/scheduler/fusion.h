#pragma once

#include <span>
#include <vector>

#include "scheduler/request.h"

namespace hvd {

// A decided collective: any rank's request for it (they agree), and what was agreed.
struct Agreed {
  const Request* request;
  const Decision* decision;
};

// A tensor of a round: `member` of the `decision`-th decided collective.
struct TensorRef {
  uint32_t decision = 0;
  uint32_t member = 0;
};

// Packs the tensors of a round into fused batches of at most fusion_nbytes, in the order of the decisions.
// Only allreduces fuse, and only tensors of one dtype, operation and scale that all lie in the arena or all
// do not; a batch always holds at least one tensor. Pure, and the same on all ranks.
std::vector<std::vector<TensorRef>> Fuse(std::span<const Agreed> round, size_t fusion_nbytes);

}  // namespace hvd
