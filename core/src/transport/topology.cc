#include "transport/topology.h"

#include <algorithm>

namespace hvd {

Result<Topology> Topology::Of(std::span<const std::string> hosts, int rank) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(hosts.size());
  topology.first_rank.clear();
  for (size_t r = 0; r < hosts.size(); ++r) {
    if (r > 0 && hosts[r] == hosts[r - 1]) continue;
    const auto before = hosts.first(r);
    if (const auto same = std::find(before.begin(), before.end(), hosts[r]); same != before.end()) {
      return Status(Code::kInvalid, "ranks " + std::to_string(same - before.begin()) + " and " +
                                        std::to_string(r) +
                                        " are on one host and a rank between them is not: number the ranks "
                                        "host by host (World.arrange)");
    }
    topology.first_rank.push_back(static_cast<int>(r));
  }
  topology.first_rank.push_back(topology.size);
  topology.host = topology.HostOf(rank);
  topology.local_rank = topology.LocalRankOf(rank);
  return topology;
}

Topology Topology::OneHost(int rank, int size) {
  Topology topology;
  topology.rank = topology.local_rank = rank;
  topology.size = size;
  topology.first_rank = {0, size};
  return topology;
}

int Topology::HostOf(int r) const {
  const auto after = std::upper_bound(first_rank.begin(), first_rank.end(), r);
  return static_cast<int>(after - first_rank.begin()) - 1;
}

int Topology::NextHop(int from, int to) const {
  const int here = HostOf(from);
  int there = HostOf(to);
  if (here == there) return to;
  if (from != leader(here)) return leader(here);
  // From `there` up towards the root: through `here`, or else the way leads over its parent.
  while (there > here && (there - 1) / 2 != here) there = (there - 1) / 2;
  return leader(there > here ? there : (here - 1) / 2);
}

int Topology::slices() const {
  int least = size;
  for (int h = 0; h < hosts(); ++h) least = std::min(least, local_size(h));
  return least;
}

}  // namespace hvd
