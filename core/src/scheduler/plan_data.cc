#include "scheduler/plan_data.h"

#include <cstring>

namespace hvd {

PlanData::PlanData(const PlanLayout& layout, std::span<const Member> members, const PlanArithmetic& how,
                   std::vector<PlanWords> words, int rank, int owners)
    : layout_(layout),
      how_(how),
      words_(std::move(words)),
      rank_(rank),
      owners_(owners),
      at_(members.size()),
      spares_(members.size()),
      places_(words_.size()) {
  for (const Member& member : members) nbytes_.push_back(member.nbytes());
}

std::byte* PlanData::Spare(uint32_t member) {
  auto& spare = spares_[member];
  if (spare == nullptr) spare.reset(new std::byte[nbytes_[member] + 1]);
  std::memset(spare.get(), 0, nbytes_[member]);
  return spare.get();
}

Range PlanData::Slice(size_t b, int owner) const {
  const PlanLayout::Batch& batch = layout_.batches[b];
  return SliceOf({0, batch.row.count()}, ItemSize(batch.dtype), owner, owners_);
}

void PlanData::CopyIn(size_t b) {
  const PlanLayout::Batch& batch = layout_.batches[b];
  const size_t item = ItemSize(batch.dtype);
  std::byte* const window = words(rank_).window() + layout_.SlotOf(b);
  for (int owner = 0; owner < owners_; ++owner) {
    if (owner == rank_) continue;
    batch.row.ForEach(Slice(b, owner), [&](const MemberPart& part, size_t offset) {
      const std::byte* from = at_[part.member];
      if (from == nullptr) {
        std::memset(window + offset * item, 0, part.count * item);
      } else {
        std::memcpy(window + offset * item, from + part.begin * item, part.count * item);
      }
    });
  }
}

void PlanData::CopyOut(size_t b, int owner, int agreed_by) {
  const PlanLayout::Batch& batch = layout_.batches[b];
  const size_t item = ItemSize(batch.dtype);
  const std::byte* const window = words(rank_).window() + layout_.SlotOf(b);
  batch.row.ForEach(Slice(b, owner), [&](const MemberPart& part, size_t offset) {
    if (!HasResult(part, agreed_by)) return;
    std::memcpy(at_[part.member] + part.begin * item, window + offset * item, part.count * item);
  });
}

void PlanData::Reduce(size_t b) {
  const PlanLayout::Batch& batch = layout_.batches[b];
  const size_t item = ItemSize(batch.dtype);
  batch.row.ForEach(Slice(b, rank_), [&](const MemberPart& part, size_t offset) {
    if (!HasResult(part, rank_)) return;
    for (int rank = 0; rank < size(); ++rank) {
      places_[static_cast<size_t>(rank)] = rank == rank_
                                               ? at_[part.member] + part.begin * item
                                               : words(rank).window() + layout_.SlotOf(b) + offset * item;
    }
    hvd::Reduce(batch.dtype, how_.reduce, how_.scale, places_.data(), size(), places_.data(), size(),
                part.count);
  });
}

void PlanData::Sources(size_t b, const Chunk& chunk, Runs<const void*>* runs) {
  const PlanLayout::Batch& batch = layout_.batches[b];
  const size_t item = ItemSize(batch.dtype);
  runs->ranks = words_.size();
  batch.row.ForEach({chunk.begin, chunk.begin + chunk.count}, [&](const MemberPart& part, size_t offset) {
    for (int rank = 0; rank < size(); ++rank) {
      runs->at.push_back(rank == rank_ ? at_[part.member] + part.begin * item
                                       : words(rank).window() + layout_.SlotOf(b) + offset * item);
    }
    runs->counts.push_back(part.count);
  });
}

// The result is sent on from this rank's own.
void PlanData::Targets(size_t b, const Chunk& chunk, Runs<void*>* runs) {
  const PlanLayout::Batch& batch = layout_.batches[b];
  const size_t item = ItemSize(batch.dtype);
  runs->ranks = words_.size();
  batch.row.ForEach({chunk.begin, chunk.begin + chunk.count}, [&](const MemberPart& part, size_t offset) {
    const bool has_result = HasResult(part, rank_);
    if (!has_result && sink_ == nullptr) sink_.reset(new std::byte[kMaxChunkNbytes]);
    runs->at.push_back(has_result ? at_[part.member] + part.begin * item : sink_.get());
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == rank_) continue;
      runs->at.push_back(has_result ? words(rank).window() + layout_.SlotOf(b) + offset * item : sink_.get());
    }
    runs->counts.push_back(part.count);
  });
}

}  // namespace hvd
