#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/tuning.h"
#include "collectives/batch.h"
#include "scheduler/request.h"

namespace hvd {

// How large the fused batches of a plan may get.
struct BatchLimits {
  size_t first_nbytes = kFirstBatchNbytes;  // of the first one
  size_t nbytes = kBatchNbytes;             // of the others
};

// Elements begin .. begin + count - 1 of a member.
struct MemberPart {
  uint32_t member;
  size_t begin;
  size_t count;
  size_t status = 0;  // its place among the parts of all batches, in order
};

// Packs members into fused batches in the given order: a batch has one dtype and at most the limit. A member
// that is larger than limits.nbytes is cut into batches of its own. With several dtypes each has an open
// batch; a batch stands where its first member is. Pure.
std::vector<std::vector<MemberPart>> PackBatches(std::span<const Member> members, const BatchLimits& limits);

// The members of a fused batch one after another, as if they were one tensor.
class Row {
 public:
  explicit Row(std::vector<MemberPart> parts);

  size_t count() const { return ends_.empty() ? 0 : ends_.back(); }
  const std::vector<MemberPart>& parts() const { return parts_; }
  // Calls visit(part, offset) for what elements begin .. end - 1 fall into, which stands at `offset` in the
  // row.
  template <class Visit>
  void ForEach(Range elements, Visit visit) const {
    auto i =
        static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), elements.begin) - ends_.begin());
    for (size_t at = elements.begin; at < elements.end; ++i) {
      const MemberPart& part = parts_[i];
      const size_t end = std::min(elements.end, ends_[i]), begin = ends_[i] - part.count;
      if (at < end) visit(MemberPart{part.member, part.begin + (at - begin), end - at, part.status}, at);
      at = end;
    }
  }

 private:
  std::vector<MemberPart> parts_;
  std::vector<size_t> ends_;
};

// Which member is where, the same on all ranks. Pure.
struct PlanLayout {
  PlanLayout(std::span<const Member> members, const BatchLimits& limits, size_t window_nbytes);

  struct Batch {
    Row row;
    DType dtype;
  };
  std::vector<Batch> batches;
  std::vector<std::vector<uint32_t>> batches_of;  // by member
  size_t parts = 0;                               // of all batches
  // Ranks stage what they have in windows of this many slots, at most window_nbytes if that is one at least.
  // Batch b stands in slot b % slots, once batch b - slots is done.
  size_t slots = 1;
  size_t slot_nbytes = 0;
  size_t SlotOf(size_t batch) const { return batch % slots * slot_nbytes; }
};

}  // namespace hvd
