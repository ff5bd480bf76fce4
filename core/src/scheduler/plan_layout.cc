#include "scheduler/plan_layout.h"

#include <algorithm>
#include <map>

namespace hvd {
namespace {

constexpr size_t kLine = 64;

size_t RoundUp(size_t count, size_t to) { return (count + to - 1) / to * to; }

}  // namespace

std::vector<std::vector<MemberPart>> PackBatches(std::span<const Member> members, const BatchLimits& limits) {
  struct Open {
    size_t batch;
    size_t nbytes;
  };
  std::map<DType, Open> open;
  std::vector<std::vector<MemberPart>> batches;
  for (uint32_t m = 0; m < members.size(); ++m) {
    const size_t count = members[m].count(), nbytes = members[m].nbytes();
    const auto found = open.find(members[m].dtype);
    if (nbytes > limits.nbytes) {
      if (found != open.end()) open.erase(found);
      const size_t pieces = (nbytes + limits.nbytes - 1) / limits.nbytes;
      const size_t each = RoundUp((count + pieces - 1) / pieces, kLine / ItemSize(members[m].dtype));
      for (size_t begin = 0; begin < count; begin += each)
        batches.push_back({{m, begin, std::min(each, count - begin)}});
    } else if (found != open.end() && found->second.nbytes + nbytes <=
                                          (found->second.batch == 0 ? limits.first_nbytes : limits.nbytes)) {
      found->second.nbytes += nbytes;
      batches[found->second.batch].push_back({m, 0, count});
    } else {
      open[members[m].dtype] = {batches.size(), nbytes};
      batches.push_back({{m, 0, count}});
    }
  }
  size_t status = 0;
  for (auto& batch : batches) {
    for (MemberPart& part : batch) part.status = status++;
  }
  return batches;
}

Row::Row(std::vector<MemberPart> parts) : parts_(std::move(parts)) {
  size_t end = 0;
  for (const MemberPart& part : parts_) ends_.push_back(end += part.count);
}

PlanLayout::PlanLayout(std::span<const Member> members, const BatchLimits& limits, size_t window_nbytes)
    : batches_of(members.size()) {
  for (auto& packed : PackBatches(members, limits)) {
    const DType dtype = members[packed.front().member].dtype;
    for (const MemberPart& part : packed)
      batches_of[part.member].push_back(static_cast<uint32_t>(batches.size()));
    parts += packed.size();
    batches.push_back({Row(std::move(packed)), dtype});
    slot_nbytes = std::max(slot_nbytes, RoundUp(batches.back().row.count() * ItemSize(dtype), kLine));
  }
  const size_t fitting = slot_nbytes == 0 ? batches.size() : window_nbytes / slot_nbytes;
  slots = std::clamp<size_t>(fitting, 1, std::max<size_t>(batches.size(), 1));
}

}  // namespace hvd
