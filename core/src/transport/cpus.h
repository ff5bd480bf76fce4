#pragma once

#include <sched.h>

#include <span>

namespace hvd {

// Where a thread may run.
struct Cpus {
  cpu_set_t allowed;  // affinity mask
  double quota = 0;   // whole CPUs that its cgroup grants; 0: no limit

  static Cpus OfThisThread(double quota);
};

// Whether every rank of a host can run on a CPU of its own. A quota is taken for one that all ranks share.
bool OneForEach(std::span<const Cpus> ranks);

}  // namespace hvd
