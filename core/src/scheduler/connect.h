#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/engine.h"
#include "transport/bootstrap.h"

namespace hvd {

struct GroupOptions {
  size_t fusion_nbytes = kFusionNbytes;
  size_t chunk_nbytes = kStagingNbytes;
  double connect_timeout_s = 60;
  double peer_timeout_s = 30;
  double stall_warn_s = 30;
  double stall_shutdown_s = 600;
  int ring_streams = 2;
  std::string wire_dtype;             // between hosts: "", or "bf16" or "fp16" for float sums
  std::function<bool()> interrupted;  // if set, asked ten times a second whether to give up connecting
  std::string timeline{};             // rank 0 writes one to this file; "" for none
  bool timeline_mark_cycles = false;
  std::string note{};    // behind the text of every error: what a reader needs to know of this Group
  double cpu_quota = 0;  // CPUs that the ranks of this host may use together; 0: no limit
};

// Which rank is on which host, from what their listeners say (Endpoint::ToString).
Result<Topology> TopologyOf(const std::vector<std::string>& endpoints, int rank);

// Connects two or more ranks and starts this one's Scheduler. All ranks call it at the same time.
Result<std::unique_ptr<Engine>> ConnectScheduler(Listener& listener,
                                                 const std::vector<std::string>& endpoints,
                                                 const Credentials& me, const GroupOptions& options);

}  // namespace hvd
