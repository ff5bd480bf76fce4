#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace hvd {

// Which rank is on which host, seen by one of them. Ranks of a host are contiguous (World.arrange numbers
// them so): sums run in rank order, and only then can a host add all of its ranks at once. Pure data.
struct Topology {
  // hosts[rank] is a key that is equal for ranks of one host. kInvalid if a host's ranks are not contiguous.
  static Result<Topology> Of(std::span<const std::string> hosts, int rank);
  static Topology OneHost(int rank, int size);

  int rank = 0;
  int size = 1;
  int host = 0;                       // index of this rank's host, 0 .. hosts() - 1 (Horovod's cross_rank)
  int local_rank = 0;                 // among the ranks of its host
  std::vector<int> first_rank{0, 1};  // first_rank[h] .. first_rank[h + 1] - 1 are the ranks of host h

  int hosts() const { return static_cast<int>(first_rank.size()) - 1; }
  int local_size(int h) const {
    return first_rank[static_cast<size_t>(h) + 1] - first_rank[static_cast<size_t>(h)];
  }
  int local_size() const { return local_size(host); }
  int leader(int h) const { return first_rank[static_cast<size_t>(h)]; }
  int HostOf(int r) const;
  bool SameHost(int r) const { return HostOf(r) == host; }
  int LocalRankOf(int r) const { return r - leader(HostOf(r)); }
  int GlobalRank(int local) const { return leader(host) + local; }
  // Slices of a fused batch that travel between hosts, one for each of the first `slices` ranks of every
  // host.
  int slices() const;  // the smallest local size

  // Control links: every two ranks of a host have one, and the leaders of hosts that are neighbours in a
  // binary tree over the hosts (the parent of host h is (h - 1) / 2).
  //
  // The neighbour of `from` on the only way to `to`, which is another rank.
  int NextHop(int from, int to) const;
  bool IsNeighbour(int r) const { return r != rank && NextHop(rank, r) == r; }
};

}  // namespace hvd
