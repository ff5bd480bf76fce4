#include "scheduler/plan_layout.h"

#include <algorithm>
#include <map>

namespace hvd {

std::vector<std::vector<uint32_t>> PackBatches(std::span<const Member> members, const BatchLimits& limits) {
  struct Open {
    size_t batch;
    uint64_t nbytes;
  };
  std::map<DType, Open> open;
  std::vector<std::vector<uint32_t>> batches;
  for (uint32_t m = 0; m < members.size(); ++m) {
    const uint64_t nbytes = members[m].nbytes();
    const auto found = open.find(members[m].dtype);
    const bool fits =
        found != open.end() &&
        found->second.nbytes + nbytes <= (found->second.batch == 0 ? limits.first_nbytes : limits.nbytes);
    if (fits) {
      found->second.nbytes += nbytes;
      batches[found->second.batch].push_back(m);
    } else {
      open[members[m].dtype] = {batches.size(), nbytes};
      batches.push_back({m});
    }
  }
  return batches;
}

PlanLayout::PlanLayout(std::span<const Member> planned, const BatchLimits& limits)
    : batches(PackBatches(planned, limits)), members(planned.size()) {
  constexpr size_t kLine = 64;
  size_t status = 0;
  for (uint32_t b = 0; b < batches.size(); ++b) {
    first_status.push_back(status);
    for (const uint32_t m : batches[b]) {
      members[m] = {planned[m].count(), b, status++, staged_nbytes};
      staged_nbytes += (planned[m].nbytes() + kLine - 1) / kLine * kLine;
    }
  }
}

Row::Row(std::vector<uint32_t> members, std::span<const size_t> counts) : members_(std::move(members)) {
  size_t end = 0;
  for (const size_t count : counts) ends_.push_back(end += count);
}

void Row::Parts(size_t begin, size_t end, std::vector<MemberPart>* parts) const {
  parts->clear();
  auto at = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  for (; begin < end; ++at) {
    const size_t start = at == 0 ? 0 : ends_[at - 1];
    const size_t stop = std::min(end, ends_[at]);
    if (stop > begin) parts->push_back({members_[at], begin - start, stop - begin});
    begin = std::max(begin, stop);
  }
}

}  // namespace hvd
