#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/exchange.h"
#include "transport/fd.h"

namespace hvd {

// Where a rank can be reached: "hvd1;host=<key>;unix=<name>;tcp=<address>,...:<port>".
// `host` is a hint only (boot id and network namespace, or the forced id); whether two ranks share a host is
// decided by whether the Unix connection between them works. A forced id keeps ranks with other ids apart.
struct Endpoint {
  std::string host;
  bool forced_host = false;
  std::string unix_name;
  std::vector<std::string> addresses;
  uint16_t port = 0;

  std::string ToString() const;
  static Result<Endpoint> Parse(std::string_view text);
};

// A bound TCP socket (port chosen by the kernel) and a bound abstract Unix socket. Stays open from before the
// endpoint is told to anyone until its rank needs no further Group: never closed and bound again.
class Listener {
 public:
  // host_id: forced host id or "". interface: offer only its addresses, or "" for all; a wrong name is a
  // kInvalid that lists the valid ones.
  static Result<std::unique_ptr<Listener>> Bind(const std::string& host_id, const std::string& interface);

  const Endpoint& endpoint() const { return endpoint_; }
  int tcp_fd() const { return tcp_.get(); }
  int unix_fd() const { return unix_.get(); }
  // Connections that could not prove to belong to the job.
  uint64_t dropped() const { return dropped_; }
  void CountDropped() { ++dropped_; }

 private:
  Listener() = default;
  UniqueFd tcp_, unix_;
  Endpoint endpoint_;
  uint64_t dropped_ = 0;
};

struct Credentials {
  int rank = 0;
  int size = 1;
  std::string token;  // shared by the job; never sent
  uint64_t epoch = 0;
};

// Connects this rank with every other and adds the links to the exchange: to lower ranks it connects, from
// higher ones it accepts. Both sides prove that they know the token (HMAC-SHA256 over fixed frames, core.md
// §2) before anything else is read. Who cannot is dropped and counted, and the job goes on. All ranks call it
// at the same time; a rank that does not come is a kTimeout that names it.
Status ConnectAll(Listener& listener, const std::vector<Endpoint>& endpoints, const Credentials& me,
                  Clock::time_point deadline, Exchange& exchange);

}  // namespace hvd
