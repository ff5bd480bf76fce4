#include "transport/cpus.h"

#include <functional>
#include <vector>

namespace hvd {
Cpus Cpus::OfThisThread(double quota) {
  Cpus cpus;
  CPU_ZERO(&cpus.allowed);
  if (::sched_getaffinity(0, sizeof cpus.allowed, &cpus.allowed) != 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &cpus.allowed);  // more than the mask holds
  }
  cpus.quota = quota;
  return cpus;
}

// A matching of ranks and CPUs, by augmenting paths.
bool OneForEach(std::span<const Cpus> ranks) {
  std::vector<int> owner(CPU_SETSIZE, -1);
  std::vector<bool> seen(CPU_SETSIZE);
  const std::function<bool(size_t)> place = [&](size_t rank) {
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &ranks[rank].allowed) || seen[cpu]) continue;
      seen[cpu] = true;
      if (owner[cpu] >= 0 && !place(static_cast<size_t>(owner[cpu]))) continue;
      owner[cpu] = static_cast<int>(rank);
      return true;
    }
    return false;
  };
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].quota != 0 && ranks[rank].quota < static_cast<double>(ranks.size())) return false;
    seen.assign(CPU_SETSIZE, false);
    if (!place(rank)) return false;
  }
  return true;
}

}  // namespace hvd
