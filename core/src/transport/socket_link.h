#pragma once

#include "transport/link.h"

namespace hvd {

// A Link over a connected stream socket: Unix inside a host, TCP between hosts.
class SocketLink final : public Link {
 public:
  // Takes a connected socket and makes it non-blocking.
  SocketLink(UniqueFd socket, bool same_host);

  Result<size_t> TrySend(std::span<const std::byte> bytes, int pass_fd) override;
  Result<size_t> TryRecv(std::span<std::byte> bytes, UniqueFd* passed_fd) override;
  int fd() const override { return socket_.get(); }
  bool same_host() const override { return same_host_; }

 private:
  UniqueFd socket_;
  const bool same_host_;
};

}  // namespace hvd
