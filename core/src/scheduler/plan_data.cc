#include "scheduler/plan_data.h"

#include <algorithm>
#include <cstring>

namespace hvd {
namespace {

// All peers' chunks together stay in L2, beside the chunk of this rank; a chunk is not so small that the
// system call shows.
constexpr size_t kScratchNbytes = 512 << 10;
constexpr size_t kLeastChunkNbytes = 32 << 10;

size_t ChunkNbytes(size_t ranks) {
  if (ranks < 2) return kMaxChunkNbytes;
  return std::clamp(kScratchNbytes / (ranks - 1), kLeastChunkNbytes, kMaxChunkNbytes);
}

}  // namespace

PlanData::PlanData(const PlanLayout& layout, std::span<const Member> members, const PlanArithmetic& how,
                   std::vector<PlanWords> words, int rank, Read read)
    : layout_(layout),
      how_(how),
      words_(std::move(words)),
      rank_(rank),
      read_(std::move(read)),
      chunk_nbytes_(ChunkNbytes(words_.size())),
      out_(members.size()),
      spares_(members.size()) {
  for (const Member& member : members) nbytes_.push_back(member.nbytes());
}

void PlanData::Put(uint32_t member, std::byte* at) {
  out_[member] = at;
  if (is_staged() && nbytes_[member] > 0) std::memcpy(staged(rank_, member), at, nbytes_[member]);
}

void PlanData::PutNothing(uint32_t member, bool with_spare) {
  const size_t nbytes = nbytes_[member];
  out_[member] = nullptr;
  if (nbytes == 0) return;
  if (is_staged()) std::memset(staged(rank_, member), 0, nbytes);
  if (!with_spare) return;
  auto& spare = spares_[member];
  if (spare == nullptr) spare.reset(new std::byte[nbytes]);
  std::memset(spare.get(), 0, nbytes);
  out_[member] = spare.get();
}

Status PlanData::Reduce(const Row& row, DType dtype, Range slice) {
  const size_t item = ItemSize(dtype), step = chunk_nbytes_ / item;
  for (size_t begin = slice.begin; begin < slice.end; begin += step) {
    const Chunk chunk{begin, std::min(step, slice.end - begin), 0};
    sources_.Clear();
    targets_.Clear();
    HVD_RETURN_IF_ERROR(Sources(row, item, chunk, &sources_));
    Targets(row, item, chunk, false, &targets_);
    for (size_t run = 0; run < sources_.size(); ++run) {
      hvd::Reduce(dtype, how_.reduce, how_.scale, sources_.of(run), size(), targets_.of(run),
                  static_cast<int>(targets_.ranks), sources_.counts[run]);
    }
  }
  return Status::Ok();
}

Status PlanData::Sources(const Row& row, size_t item, const Chunk& chunk, Runs<const void*>* runs) {
  row.Parts(chunk.begin, chunk.begin + chunk.count, &parts_);
  runs->ranks = words_.size();
  runs->at.resize(parts_.size() * words_.size());
  for (const MemberPart& part : parts_) runs->counts.push_back(part.count);
  const size_t stride = chunk.count * item;
  if (read_ != nullptr && scratch_.size() < stride * (words_.size() - 1))
    scratch_.resize(stride * (words_.size() - 1));
  std::byte* to = scratch_.data();
  for (int rank = 0; rank < size(); ++rank) {
    copies_.clear();
    for (size_t p = 0; p < parts_.size(); ++p) {
      const MemberPart& part = parts_[p];
      const void*& at = runs->at[p * words_.size() + static_cast<size_t>(rank)];
      if (rank == rank_) {
        at = out_[part.member] + part.begin * item;
      } else if (read_ == nullptr) {
        at = staged(rank, part.member) + part.begin * item;
      } else {
        const uint64_t in =
            words_[static_cast<size_t>(rank)].place(part.member).in.load(std::memory_order_relaxed);
        copies_.push_back({in <= PlanWords::kEmpty ? 0 : in + part.begin * item, to, part.count * item});
        at = to;
        to += part.count * item;
      }
    }
    if (!copies_.empty()) HVD_RETURN_IF_ERROR(read_(rank, copies_));
  }
  return Status::Ok();
}

void PlanData::Targets(const Row& row, size_t item, const Chunk& chunk, bool several_hosts,
                       Runs<void*>* runs) {
  row.Parts(chunk.begin, chunk.begin + chunk.count, &parts_);
  runs->ranks = is_staged() ? 2 : 1;
  for (const MemberPart& part : parts_) {
    if (several_hosts && !HasResult(rank_, part.member)) {
      if (sink_ == nullptr) sink_.reset(new std::byte[2 * kMaxChunkNbytes]);
      for (size_t i = 0; i < runs->ranks; ++i) runs->at.push_back(sink_.get() + i * kMaxChunkNbytes);
    } else {
      runs->at.push_back(out_[part.member] + part.begin * item);
      if (is_staged()) runs->at.push_back(staged(rank_, part.member) + part.begin * item);
    }
    runs->counts.push_back(part.count);
  }
}

Status PlanData::Fetch(const Row& row, DType dtype, int from, Range slice, bool several_hosts) {
  const size_t item = ItemSize(dtype);
  row.Parts(slice.begin, slice.end, &parts_);
  copies_.clear();
  for (const MemberPart& part : parts_) {
    if (several_hosts && !HasResult(from, part.member)) continue;
    std::byte* to = out_[part.member] + part.begin * item;
    if (read_ == nullptr) {
      std::memcpy(to, staged(from, part.member) + part.begin * item, part.count * item);
      continue;
    }
    const uint64_t out =
        words_[static_cast<size_t>(from)].place(part.member).out.load(std::memory_order_relaxed);
    copies_.push_back({out + part.begin * item, to, part.count * item});
  }
  return copies_.empty() ? Status::Ok() : read_(from, copies_);
}

}  // namespace hvd
