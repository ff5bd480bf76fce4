#include "scheduler/fusion.h"

#include <algorithm>

namespace hvd {
namespace {

// A batch that may still take tensors.
struct Open {
  const Request* request;
  DType dtype;
  bool in_arena;
  size_t batch;
  uint64_t nbytes;
};

}  // namespace

std::vector<std::vector<TensorRef>> Fuse(std::span<const Agreed> round, size_t fusion_nbytes) {
  std::vector<Open> open;  // a handful of kinds
  std::vector<std::vector<TensorRef>> batches;
  for (uint32_t d = 0; d < round.size(); ++d) {
    const Request& request = *round[d].request;
    const Decision& decision = *round[d].decision;
    if (!decision.mismatch.empty() || request.op == Op::kBarrier) continue;
    for (uint32_t m = 0; m < request.members.size(); ++m) {
      const Member& member = request.members[m];
      // members[0] has the place, and that is all there is to do.
      if (request.op == Op::kPlan && m > 0) break;
      if (request.op != Op::kAllreduce) {
        batches.push_back({{d, m}});
        continue;
      }
      const bool in_arena = !decision.places[m].empty();
      const auto same = std::find_if(open.begin(), open.end(), [&](const Open& o) {
        return o.dtype == member.dtype && o.in_arena == in_arena && o.request->reduce == request.reduce &&
               o.request->prescale == request.prescale && o.request->postscale == request.postscale;
      });
      if (same != open.end() && same->nbytes + member.nbytes() <= fusion_nbytes) {
        same->nbytes += member.nbytes();
        batches[same->batch].push_back({d, m});
        continue;
      }
      const Open fresh{&request, member.dtype, in_arena, batches.size(), member.nbytes()};
      if (same != open.end()) {
        *same = fresh;
      } else {
        open.push_back(fresh);
      }
      batches.push_back({{d, m}});
    }
  }
  return batches;
}

}  // namespace hvd
