#include "scheduler/fusion.h"

#include <algorithm>
#include <utility>

namespace hvd {
namespace {

// A batch that may still take tensors.
struct Open {
  FusionKind kind;
  uint32_t batch;
  uint64_t nbytes;
};

}  // namespace

void AppendTensors(const Request& request, const Decision& decision, uint32_t index,
                   std::vector<Tensor>* tensors) {
  if (!decision.mismatch.empty() || request.op == Op::kBarrier) return;
  // The first member of a plan has the place, and that is all there is to do.
  const size_t count =
      request.op == Op::kPlan ? std::min<size_t>(request.members.size(), 1) : request.members.size();
  for (uint32_t m = 0; m < count; ++m) {
    const Member& member = request.members[m];
    Tensor tensor{index, m, member.nbytes(), {}};
    tensor.kind.dtype = member.dtype;
    if (request.op == Op::kAllreduce) {
      tensor.kind = {true,
                     !decision.places[m].empty(),
                     member.dtype,
                     request.reduce,
                     request.prescale,
                     request.postscale};
    }
    tensors->push_back(tensor);
  }
}

Batches Fuse(std::span<const Tensor> round, size_t fusion_nbytes) {
  std::vector<Open> open;  // a handful of kinds
  std::vector<uint32_t> batch_of;
  Batches batches;
  batch_of.reserve(round.size());
  const auto add = [&](uint32_t batch) {
    batch_of.push_back(batch);
    if (batch == batches.ends.size()) batches.ends.push_back(0);
    ++batches.ends[batch];
  };
  for (const Tensor& tensor : round) {
    const auto fresh = static_cast<uint32_t>(batches.ends.size());
    const auto same =
        std::find_if(open.begin(), open.end(), [&](const Open& o) { return o.kind == tensor.kind; });
    if (!tensor.kind.fuses) {
      add(fresh);
    } else if (same == open.end()) {
      open.push_back({tensor.kind, fresh, tensor.nbytes});
      add(fresh);
    } else if (same->nbytes + tensor.nbytes <= fusion_nbytes) {
      same->nbytes += tensor.nbytes;
      add(same->batch);
    } else {
      *same = {tensor.kind, fresh, tensor.nbytes};
      add(fresh);
    }
  }
  uint32_t begin = 0;
  for (uint32_t& end : batches.ends) begin += std::exchange(end, begin);
  batches.tensors.resize(round.size());
  for (size_t i = 0; i < round.size(); ++i) batches.tensors[batches.ends[batch_of[i]]++] = round[i];
  return batches;
}

}  // namespace hvd
