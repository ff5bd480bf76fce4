#pragma once

#include <memory>
#include <span>
#include <vector>

#include "collectives/chain.h"
#include "collectives/reduce.h"
#include "scheduler/plan_layout.h"
#include "scheduler/plan_words.h"

namespace hvd {

// How members of a plan are added.
struct PlanArithmetic {
  ReduceOp reduce = ReduceOp::kSum;
  Scale scale;
};

// The bytes of a plan: where this rank has its members, and what the ranks of the host stage for each other.
//
// A rank copies the slices of a fused batch that others own into its window. The owner of a slice reduces it
// from its own tensors and the windows of the others, and writes the result to its own tensors and into those
// windows, from where the others copy it out. So nobody touches private memory of another, and a line is
// written by who has read it last (AllreduceStaged says why). Owned by one thread at a time.
class PlanData {
 public:
  // The ranks are numbered as words are; `rank` is this one, and the first `owners` own slices. The layout
  // outlives this.
  PlanData(const PlanLayout& layout, std::span<const Member> members, const PlanArithmetic& how,
           std::vector<PlanWords> words, int rank, int owners);

  // This rank's member is at `at` until it is put elsewhere, and its result goes there; null: it has none.
  void Put(uint32_t member, std::byte* at) { at_[member] = at; }
  // Zeros that are not the program's, to Put.
  std::byte* Spare(uint32_t member);
  std::byte* at(uint32_t member) const { return at_[member]; }

  Range Slice(size_t batch, int owner) const;
  // This rank's members of the batch, as far as others own it, into its window; zeros for what it has not.
  void CopyIn(size_t batch);
  // Results of a slice from there to this rank's members. agreed_by: which are reduced stands in this rank's
  // words.
  void CopyOut(size_t batch, int owner, int agreed_by);
  // This rank's slice, for all ranks of this host.
  void Reduce(size_t batch);

  // As ChainMemory, between hosts; members without a result are not written.
  void Sources(size_t batch, const Chunk& chunk, Runs<const void*>* runs);
  void Targets(size_t batch, const Chunk& chunk, Runs<void*>* runs);

 private:
  int size() const { return static_cast<int>(words_.size()); }
  const PlanWords& words(int rank) const { return words_[static_cast<size_t>(rank)]; }
  bool HasResult(const MemberPart& part, int agreed_by) const {
    return words(agreed_by).agreed_statuses()[part.status] == PlanWords::kTensor;
  }

  const PlanLayout& layout_;
  std::vector<size_t> nbytes_;  // by member
  const PlanArithmetic how_;
  const std::vector<PlanWords> words_;
  const int rank_;
  const int owners_;
  std::vector<std::byte*> at_;                        // by member, of this rank
  std::vector<std::unique_ptr<std::byte[]>> spares_;  // by member
  std::unique_ptr<std::byte[]> sink_;                 // for results that nobody wants
  std::vector<void*> places_;                         // scratch, by rank
};

}  // namespace hvd
