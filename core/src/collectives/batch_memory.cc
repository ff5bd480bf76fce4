#include "collectives/batch_memory.h"

#include <algorithm>
#include <cstring>

namespace hvd {

BatchMemory::BatchMemory(std::span<const Piece> pieces, size_t item_nbytes) : item_(item_nbytes), ranks_(1) {
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    starts_.push_back(starts_.back() + piece.count);
    sources_.push_back(piece.in);
    targets_.push_back(piece.out);
  }
}

BatchMemory::BatchMemory(std::span<const ArenaPiece> pieces, size_t item_nbytes, int own)
    : item_(item_nbytes), ranks_(pieces.empty() ? 1 : pieces.front().at.size()) {
  for (const ArenaPiece& piece : pieces) {
    if (piece.count == 0) continue;
    starts_.push_back(starts_.back() + piece.count);
    sources_.insert(sources_.end(), piece.at.begin(), piece.at.end());
    targets_.insert(targets_.end(), piece.at.begin(), piece.at.end());
    std::swap(targets_[targets_.size() - ranks_],
              targets_[targets_.size() - ranks_ + static_cast<size_t>(own)]);
  }
}

template <class Bytes, class Pointer>
void BatchMemory::Find(const Chunk& chunk, const std::vector<Bytes>& tensors, Runs<Pointer>* runs) const {
  runs->ranks = ranks_;
  const size_t end = chunk.begin + chunk.count;
  auto piece =
      static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), chunk.begin) - starts_.begin()) -
      1;
  for (size_t at = chunk.begin; at < end; ++piece) {
    const size_t count = std::min(end, starts_[piece + 1]) - at;
    for (size_t rank = 0; rank < ranks_; ++rank)
      runs->at.push_back(tensors[piece * ranks_ + rank] + (at - starts_[piece]) * item_);
    runs->counts.push_back(count);
    at += count;
  }
}

void BatchMemory::CopyOut(Range elements, std::byte* out) const {
  Runs<const void*> runs;
  Find({elements.begin, elements.size()}, sources_, &runs);
  for (size_t run = 0; run < runs.size(); out += runs.counts[run++] * item_)
    std::memcpy(out, runs.at[run], runs.counts[run] * item_);
}

void BatchMemory::CopyIn(Range elements, const std::byte* in) const {
  Runs<void*> runs;
  Find({elements.begin, elements.size()}, targets_, &runs);
  for (size_t run = 0; run < runs.size(); in += runs.counts[run++] * item_)
    std::memcpy(runs.at[run], in, runs.counts[run] * item_);
}

Status BatchMemory::Sources(const Chunk& chunk, Runs<const void*>* runs) {
  Find(chunk, sources_, runs);
  return Status::Ok();
}

Status BatchMemory::Targets(const Chunk& chunk, Runs<void*>* runs) {
  Find(chunk, targets_, runs);
  return Status::Ok();
}

}  // namespace hvd
