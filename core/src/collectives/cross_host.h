#pragma once

#include <cstddef>
#include <vector>

#include "base/tuning.h"
#include "base/types.h"
#include "collectives/batch.h"

namespace hvd {

// What travels between hosts, as data: which elements, over which stream, in which order. No I/O and no
// clock; every rank computes the same plan from the same numbers. Chain and Relay perform it.

// Tensors that pass through staging buffers of `window` elements do so window by window, and each is sliced
// by itself. 0: no staging, so one window.
std::vector<Range> Windows(size_t count, size_t window);

// What is sent at once over one stream.
struct Chunk {
  size_t begin = 0, count = 0;
  int stream = 0;
  bool operator==(const Chunk&) const = default;
};

// The chunks of a slice in the order in which they travel, each at most kMaxChunkNbytes; item_nbytes is that
// of the accumulator.
std::vector<Chunk> Chunks(Range slice, size_t item_nbytes, int streams);

// One direction of a relay: every host passes the blocks of the hosts before it on to the hosts behind it.
struct RelayPlan {
  std::vector<int> hosts;  // whose blocks move here, in order
  bool own = false;        // the first one is this host's own; the others are received
  bool sends = false;      // there is a host behind it
  bool operator==(const RelayPlan&) const = default;
};

// What host `host` does in the direction of rising or falling host numbers. root: only the block of that host
// moves (broadcast); kEveryHost: those of all of them do (allgather).
inline constexpr int kEveryHost = -1;
RelayPlan PlanRelay(int host, int hosts, bool rising, int root);

// How many bytes every rank has for every other one.
class Traffic {
 public:
  explicit Traffic(int size) : size_(static_cast<size_t>(size)), nbytes_(size_ * size_) {}
  size_t& at(int from, int to) {
    return nbytes_[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)];
  }
  size_t at(int from, int to) const { return const_cast<Traffic*>(this)->at(from, to); }
  // To the ranks first .. end - 1.
  size_t Sum(int from, int first, int end) const {
    size_t sum = 0;
    for (int to = first; to < end; ++to) sum += at(from, to);
    return sum;
  }

 private:
  const size_t size_;
  std::vector<size_t> nbytes_;
};

// In an alltoall, what hosts have for each other passes the hosts between them.
struct Trip {
  int from, to;  // hosts
  bool operator==(const Trip&) const = default;
};

// What leaves `host` in the direction of rising or falling host numbers, in order: what it has itself, then
// what has come and goes on, in the order in which it came.
std::vector<Trip> Departures(int host, int hosts, bool rising);

}  // namespace hvd
