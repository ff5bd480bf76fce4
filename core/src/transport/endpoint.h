#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/fd.h"

namespace hvd {

// Where a rank can be reached: "hvd1;host=<key>;unix=<name>;tcp=<address>,...:<port>", with
// "forced=<id>@<key>" instead of "host=<key>" if there is an id.
// Ranks are on one host if both are equal: the key says within what an abstract Unix socket can be reached,
// and an id only parts them further. Containers with one id, and a network namespace each, are two hosts.
struct Endpoint {
  std::string host;       // boot id/network namespace/an address, and /a security policy if there is one
  std::string forced_id;  // HVD_HOST_ID; "" for none
  std::string unix_name;  // nobody listens there if the process may not use Unix sockets
  std::vector<std::string> addresses;
  uint16_t port = 0;

  std::string ToString() const;
  static Result<Endpoint> Parse(std::string_view text);
  std::string HostKey() const {
    return forced_id.empty() ? "host=" + host : "forced=" + forced_id + "@" + host;
  }
  // The host as an error names it: the forced id or the first address.
  std::string HostName() const {
    return !forced_id.empty() ? forced_id : addresses.empty() ? host : addresses.front();
  }
};

// What a person should know if ranks that look as if they were on one host, by their ids or by the boot id,
// are not; "" if there are none.
std::string PartedRanks(std::span<const Endpoint> endpoints);

// An IPv4 address of this host; host byte order.
struct Interface {
  std::string name;
  uint32_t address = 0;
  uint32_t mask = 0;
  bool is_loopback = false;
};
Result<std::vector<Interface>> Interfaces();  // those that are up

// The addresses of a rank on another host, likely ones first: in a network that this host is in too, then
// others, then what is also an address of this host (every docker0 has the same one), loopback last.
std::vector<std::string> InOrderOfTrial(const std::vector<std::string>& addresses,
                                        std::span<const Interface> mine);

// Connected to the abstract Unix socket of that name; not valid, with errno, otherwise.
UniqueFd ConnectUnix(const std::string& name);

// A bound TCP socket (port chosen by the kernel) and a bound abstract Unix socket. A process that a
// security policy forbids those is a host of its own, by its endpoint. Stays open from before the
// endpoint is told to anyone until its rank needs no further Group: never closed and bound again.
class Listener {
 public:
  // host_id: forced host id or "". interface: offer only its addresses, or "" for all; a wrong name is a
  // kInvalid that lists the valid ones.
  static Result<std::unique_ptr<Listener>> Bind(const std::string& host_id, const std::string& interface);

  const Endpoint& endpoint() const { return endpoint_; }
  int tcp_fd() const { return tcp_.get(); }
  int unix_fd() const { return unix_.get(); }  // -1: there is none
  // Connections that could not prove to belong to the job.
  uint64_t dropped() const { return dropped_; }
  void CountDropped() { ++dropped_; }

 private:
  Listener() = default;
  UniqueFd tcp_, unix_;
  Endpoint endpoint_;
  uint64_t dropped_ = 0;
};

}  // namespace hvd
