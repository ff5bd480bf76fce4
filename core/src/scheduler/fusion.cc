#include "scheduler/fusion.h"

#include <map>
#include <tuple>

namespace hvd {

std::vector<std::vector<TensorRef>> Fuse(const std::vector<Decision>& decisions,
                                         const std::vector<const Request*>& requests, size_t fusion_nbytes) {
  using Key = std::tuple<DType, ReduceOp, double, double, bool>;
  struct Open {
    size_t batch;
    uint64_t nbytes;
  };
  std::map<Key, Open> open;
  std::vector<std::vector<TensorRef>> batches;
  for (uint32_t d = 0; d < decisions.size(); ++d) {
    const Request& request = *requests[d];
    if (!decisions[d].mismatch.empty() || request.op == Op::kBarrier) continue;
    for (uint32_t m = 0; m < request.members.size(); ++m) {
      const Member& member = request.members[m];
      if (request.op == Op::kPlan && m > 0)
        break;  // members[0] has the place, and that is all there is to do
      if (request.op != Op::kAllreduce) {
        batches.push_back({{d, m}});
        continue;
      }
      const Key key{member.dtype, request.reduce, request.prescale, request.postscale,
                    !decisions[d].places[m].empty()};
      const auto found = open.find(key);
      if (found != open.end() && found->second.nbytes + member.nbytes() <= fusion_nbytes) {
        found->second.nbytes += member.nbytes();
        batches[found->second.batch].push_back({d, m});
      } else {
        open[key] = {batches.size(), member.nbytes()};
        batches.push_back({{d, m}});
      }
    }
  }
  return batches;
}

}  // namespace hvd
