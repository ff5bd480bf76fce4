#include "scheduler/mailbox.h"

#include <algorithm>

namespace hvd {
namespace {

Status Broken(int rank) {
  return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": its mailbox is broken");
}

}  // namespace

Mailboxes::Mailboxes(const Arena& arena) : rank_(arena.rank()), read_(static_cast<size_t>(arena.size())) {
  for (int rank = 0; rank < arena.size(); ++rank) {
    boxes_.push_back(reinterpret_cast<Box*>(arena.mailbox(rank)));
    if (rank != rank_ && (rank_ == 0 || rank == 0)) partners_.push_back(rank);
  }
}

Result<size_t> Mailboxes::Room() {
  uint32_t unread = 0;
  for (const int rank : partners_) {
    const uint32_t behind =
        written_ - box(rank).read[static_cast<size_t>(rank_)].load(std::memory_order_acquire);
    if (behind > kWords) return Broken(rank);
    unread = std::max(unread, behind);
  }
  return kWords - unread;
}

Result<bool> Mailboxes::Write(std::span<const uint32_t> words) {
  auto room = Room();
  if (!room.ok()) return room.status();
  if (words.size() > room.value()) return false;
  Box& mine = box(rank_);
  for (const uint32_t word : words) mine.words[written_++ % kWords].store(word, std::memory_order_relaxed);
  mine.written.store(written_, std::memory_order_seq_cst);
  return true;
}

Status Mailboxes::Read(int rank, std::vector<uint32_t>* words) {
  Box& theirs = box(rank);
  uint32_t& at = read_[static_cast<size_t>(rank)];
  const uint32_t written = theirs.written.load(std::memory_order_acquire);
  if (written == at) return Status::Ok();
  if (written - at > kWords) return Broken(rank);
  for (; at != written; ++at) words->push_back(theirs.words[at % kWords].load(std::memory_order_relaxed));
  box(rank_).read[static_cast<size_t>(rank)].store(at, std::memory_order_release);
  return Status::Ok();
}

bool Mailboxes::HasNews() const {
  return std::any_of(partners_.begin(), partners_.end(), [this](int rank) {
    return box(rank).written.load(std::memory_order_seq_cst) != read_[static_cast<size_t>(rank)];
  });
}

void Mailboxes::SetAsleep(bool asleep) {
  if (asleep == asleep_) return;
  asleep_ = asleep;
  box(rank_).asleep.store(asleep ? 1 : 0, std::memory_order_seq_cst);
}

bool Mailboxes::IsAsleep(int rank) const { return box(rank).asleep.load(std::memory_order_seq_cst) != 0; }

}  // namespace hvd
