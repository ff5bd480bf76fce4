#include "collectives/relay.h"

#include <algorithm>
#include <string>

namespace hvd {

Status LostRank(int rank, const Status& why) {
  return Status(Code::kPeerLost, "lost rank " + std::to_string(rank) + ": " + std::string(why.text()));
}

Relay::Relay(std::vector<Flow> flows) {
  for (Flow& flow : flows) {
    const auto empty = [](const Part& part) { return part.bytes.empty(); };
    const auto begin = flow.parts.begin();
    const auto own =
        flow.own - static_cast<size_t>(std::count_if(begin, begin + static_cast<ptrdiff_t>(flow.own), empty));
    std::erase_if(flow.parts, empty);
    flows_.push_back({std::move(flow), own});
    flows_.back().Pass();
  }
}

bool Relay::done() const {
  return std::all_of(flows_.begin(), flows_.end(), [](const Moving& moving) { return moving.done(); });
}

Result<bool> Relay::Advance() {
  bool moved = false;
  for (Moving& moving : flows_) {
    for (const auto move : {&Relay::Send, &Relay::Receive}) {
      auto result = move(moving);
      if (!result.ok()) return result;
      moved |= result.value();
    }
  }
  return moved;
}

Result<bool> Relay::Receive(Moving& moving) {
  if (!moving.receives()) return false;
  const auto part = moving.flow.parts[moving.received].bytes;
  UniqueFd none;
  auto got = moving.flow.from->TryRecv(part.subspan(moving.received_nbytes), &none);
  if (!got.ok()) return LostRank(moving.flow.from_rank, got.status());
  moving.received_nbytes += got.value();
  if (moving.received_nbytes == part.size()) {
    ++moving.received;
    moving.received_nbytes = 0;
    moving.Pass();
  }
  return got.value() > 0;
}

Result<bool> Relay::Send(Moving& moving) {
  if (!moving.sends()) return false;
  const auto part = moving.flow.parts[moving.sent].bytes;
  auto put = moving.flow.to->TrySend(part.subspan(moving.sent_nbytes), -1);
  if (!put.ok()) return LostRank(moving.flow.to_rank, put.status());
  moving.sent_nbytes += put.value();
  if (moving.sent_nbytes == part.size()) {
    ++moving.sent;
    moving.sent_nbytes = 0;
    moving.Pass();
  }
  return put.value() > 0;
}

void Relay::Wants(std::vector<pollfd>* fds) const {
  for (const Moving& moving : flows_) {
    if (moving.receives()) fds->push_back({moving.flow.from->fd(), POLLIN, 0});
    if (moving.sends()) fds->push_back({moving.flow.to->fd(), POLLOUT, 0});
  }
}

int Relay::awaited_rank() const {
  for (const Moving& moving : flows_) {
    if (moving.receives()) return moving.flow.from_rank;
    if (moving.sends()) return moving.flow.to_rank;
  }
  return -1;
}

}  // namespace hvd
