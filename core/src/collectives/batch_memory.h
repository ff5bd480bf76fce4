#pragma once

#include <span>
#include <vector>

#include "collectives/chain.h"
#include "collectives/in_host.h"

namespace hvd {

// The tensors of a fused batch, one after another, as what a Chain works on.
class BatchMemory final : public ChainMemory {
 public:
  // Tensors of one rank. The pieces may go; the tensors stay.
  BatchMemory(std::span<const Piece> pieces, size_t item_nbytes);
  // Tensors that all ranks of the host have in shared memory; results are sent on from those of `own`.
  BatchMemory(std::span<const ArenaPiece> pieces, size_t item_nbytes, int own);

  size_t count() const { return starts_.back(); }
  // One rank only: its elements to `out`, and `in` to where its results belong.
  void CopyOut(Range elements, std::byte* out) const;
  void CopyIn(Range elements, const std::byte* in) const;

  Status Sources(const Chunk& chunk, Runs<const void*>* runs) override;
  Status Targets(const Chunk& chunk, Runs<void*>* runs) override;

 private:
  template <class Bytes, class Pointer>
  void Find(const Chunk& chunk, const std::vector<Bytes>& tensors, Runs<Pointer>* runs) const;

  const size_t item_;
  const size_t ranks_;
  std::vector<size_t> starts_{0};          // the first element of each piece, and the end
  std::vector<const std::byte*> sources_;  // by piece, then by rank
  std::vector<std::byte*> targets_;
};

}  // namespace hvd
