#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"
#include "transport/fd.h"

namespace hvd {

// The seam to one peer: an ordered byte stream that never blocks. Everything that waits for a Link is in
// Exchange; a fault is injected by wrapping one. Owned by one thread.
class Link {
 public:
  virtual ~Link() = default;

  // Sends as many leading bytes as fit now and returns their number; 0 means "not now". `pass_fd`, if not -1,
  // travels with the first byte (links inside a host only) and stays the caller's. kPeerLost when broken.
  virtual Result<size_t> TrySend(std::span<const std::byte> bytes, int pass_fd) = 0;

  // Receives at most bytes.size() bytes; 0 means "nothing now". A descriptor that came along is put in
  // *passed_fd. kPeerLost at the end of the stream.
  virtual Result<size_t> TryRecv(std::span<std::byte> bytes, UniqueFd* passed_fd) = 0;

  // For poll(2).
  virtual int fd() const = 0;

  // True for a link inside one host: descriptors can be passed.
  virtual bool same_host() const = 0;
};

}  // namespace hvd
