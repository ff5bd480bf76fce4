#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace hvd {

// The data links of one rank: `ring_streams` to the rank with the same local rank on the previous and on the
// next host. A chain, not a circle: `previous` is empty on the first host and `next` on the last one. Only
// the first Topology::slices() ranks of a host have any.
struct RingLinks {
  std::vector<std::unique_ptr<Link>> previous, next;
};

// A data link that breaks or stays empty is often the echo of something that the control connections tell a
// moment later: who is lost, or that who closed the Group has sent all it owed before. So long to listen.
inline constexpr auto kCauseWithin = std::chrono::milliseconds(250);

// Two independent sets, so that a plan's fused batches and eager collectives never wait for each other.
struct DataLinks {
  RingLinks eager, plan;
};

}  // namespace hvd
