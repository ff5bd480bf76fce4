#pragma once

#include <vector>

#include "scheduler/request.h"

namespace hvd {

// Packs the tensors of a round's decisions into fused batches of at most fusion_nbytes, in the order of the
// decisions. requests[i] is any rank's request for decisions[i] (they agree). Only allreduces fuse, and only
// tensors of one dtype, operation and scale that all lie in the arena or all do not; a batch always holds at
// least one tensor. Pure.
std::vector<std::vector<TensorRef>> Fuse(const std::vector<Decision>& decisions,
                                         const std::vector<const Request*>& requests, size_t fusion_nbytes);

}  // namespace hvd
