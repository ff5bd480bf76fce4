#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/request.h"

namespace hvd {

// How large the fused batches of a plan may get.
struct BatchLimits {
  size_t first_nbytes = 1 << 20;  // of the first one: communication starts early
  size_t nbytes = 4 << 20;        // of the others
};

// Packs members into fused batches in the given order: a batch has one dtype and at most the limit, or one
// member that is larger. With several dtypes each has an open batch; a batch stands where its first member
// is. Pure.
std::vector<std::vector<uint32_t>> PackBatches(std::span<const Member> members, const BatchLimits& limits);

// Which member is where, the same on all ranks. Pure.
struct PlanLayout {
  PlanLayout(std::span<const Member> members, const BatchLimits& limits);

  struct Place {
    size_t count;      // elements
    uint32_t batch;    // the fused batch it is in
    size_t status;     // its place among members in the order of batches
    size_t staged_at;  // where it stands in the staging area of a rank, in whole cache lines
  };
  std::vector<std::vector<uint32_t>> batches;
  std::vector<size_t> first_status;  // by batch
  std::vector<Place> members;
  size_t staged_nbytes = 0;
};

// Elements begin .. begin + count - 1 of a member.
struct MemberPart {
  uint32_t member;
  size_t begin;
  size_t count;
};

// Some members one after another, as if they were one tensor.
class Row {
 public:
  Row() = default;
  // counts[i] elements of members[i].
  Row(std::vector<uint32_t> members, std::span<const size_t> counts);

  size_t count() const { return ends_.empty() ? 0 : ends_.back(); }
  const std::vector<uint32_t>& members() const { return members_; }
  // The parts of members that elements begin .. end - 1 fall into.
  void Parts(size_t begin, size_t end, std::vector<MemberPart>* parts) const;

 private:
  std::vector<uint32_t> members_;
  std::vector<size_t> ends_;
};

}  // namespace hvd
