#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/endpoint.h"
#include "transport/exchange.h"
#include "transport/handshake.h"
#include "transport/ring_links.h"

namespace hvd {

struct BootstrapOptions {
  int ring_streams = 2;  // TCP connections to each neighbour of the chain of hosts, on each data channel
  Clock::time_point deadline = Clock::time_point::max();
  std::function<bool()> interrupted;  // if set, asked ten times a second whether to give up
};

// The links of `topology`'s rank: control links to its neighbours, and data links on both data channels.
std::vector<LinkName> LinksOf(const Topology& topology, int ring_streams);

// Makes the links of this rank and gives the control links to the exchange. Of two ranks the higher one
// connects and the lower one accepts: on the Unix socket inside a host (descriptors of shared memory travel
// over it), by TCP between hosts. Both sides prove that they know the token (HMAC-SHA256 over fixed frames,
// core.md §2) before anything else is read. Who cannot is dropped and counted, and the job goes on. All ranks
// call it at the same time; a rank that does not come is a kTimeout that names it.
Status ConnectLinks(Listener& listener, const std::vector<Endpoint>& endpoints, const Credentials& me,
                    const Topology& topology, const BootstrapOptions& options, Exchange& exchange,
                    DataLinks* data);

}  // namespace hvd
