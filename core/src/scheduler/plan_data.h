#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collectives/chain.h"
#include "collectives/reduce.h"
#include "scheduler/plan_layout.h"
#include "scheduler/plan_words.h"
#include "transport/peer_memory.h"

namespace hvd {

// How members of a plan are added.
struct PlanArithmetic {
  ReduceOp reduce = ReduceOp::kSum;
  Scale scale;
};

// The bytes of a plan: where the ranks of this host have its members, and what is read and written where.
//
// With `read`, tensors are read where they are. Without, every rank has a staging area behind its words, in
// which its tensors and its slices of results appear; their owner copies. A rank writes to nobody else's
// memory. Owned by one thread at a time.
class PlanData {
 public:
  using Read = std::function<Status(int rank, std::span<const PeerMemory::Copy>)>;
  // The ranks are numbered as words are; `rank` is this one. The layout outlives this.
  PlanData(const PlanLayout& layout, std::span<const Member> members, const PlanArithmetic& how,
           std::vector<PlanWords> words, int rank, Read read);

  bool is_staged() const { return read_ == nullptr && words_.size() > 1; }
  // This rank's member is at `at` from now on, and its result goes there. Not yet seen by others.
  void Put(uint32_t member, std::byte* at);
  // This rank has no such member: it counts as zeros. with_spare: its result goes to spare memory.
  void PutNothing(uint32_t member, bool with_spare);
  std::byte* out(uint32_t member) const { return out_[member]; }
  // Only where results go.
  void SetOut(uint32_t member, std::byte* at) { out_[member] = at; }

  // The elements of `slice`, of all ranks of this host, to this rank's result.
  Status Reduce(const Row& row, DType dtype, Range slice);
  // What rank `from` has reduced, to this rank's result. Between hosts: members that are not to be reduced
  // after all stay as they are.
  Status Fetch(const Row& row, DType dtype, int from, Range slice, bool several_hosts);

  // As ChainMemory, between hosts. agreed: members that have no result are not written.
  Status Sources(const Row& row, size_t item, const Chunk& chunk, Runs<const void*>* runs);
  void Targets(const Row& row, size_t item, const Chunk& chunk, bool several_hosts, Runs<void*>* runs);

 private:
  int size() const { return static_cast<int>(words_.size()); }
  std::byte* staged(int rank, uint32_t member) const {
    return words_[static_cast<size_t>(rank)].staging() + layout_.members[member].staged_at;
  }
  bool HasResult(int owner, uint32_t member) const {
    return words_[static_cast<size_t>(owner)].agreed_statuses()[layout_.members[member].status] ==
           PlanWords::kTensor;
  }

  const PlanLayout& layout_;
  std::vector<size_t> nbytes_;  // by member
  const PlanArithmetic how_;
  const std::vector<PlanWords> words_;
  const int rank_;
  const Read read_;
  const size_t chunk_nbytes_;
  std::vector<std::byte*> out_;                       // by member, of this rank; sources as well
  std::vector<std::unique_ptr<std::byte[]>> spares_;  // by member
  std::vector<std::byte> scratch_;                    // a chunk of every other rank, meant to stay in L2
  std::unique_ptr<std::byte[]> sink_;                 // for results that nobody wants
  std::vector<PeerMemory::Copy> copies_;
  std::vector<MemberPart> parts_;
  Runs<const void*> sources_;
  Runs<void*> targets_;
};

}  // namespace hvd
