#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace hvd {

// Reads the private memory of the other ranks of this host (process_vm_readv). It never writes: a stopped
// writer was seen to overwrite memory that its owner had freed and used again. Whether the kernel permits it
// is found out once, by Arena::OpenPeers. Any thread.
class PeerMemory {
 public:
  // nbytes of a peer's memory and where they go in this one. From address 0 come zeros.
  struct Copy {
    uint64_t from;
    std::byte* to;
    size_t nbytes;
  };

  // processes[r] is the process of local rank r, as this process sees it. kHere: rank r lives in this address
  // space and is copied from plainly, so that ThreadSanitizer sees it (tests). first_rank is the rank in the
  // Group of local rank 0, for error texts.
  static constexpr pid_t kHere = -1;
  PeerMemory(std::vector<pid_t> processes, int first_rank);

  // Where Yama protects processes from their siblings, asks it to let the peers read this process: the peer
  // itself if there is one, else the nearest common ancestor of the peers (their launcher), since Yama takes
  // one process and accepts its descendants. If there is none but init, any process that the usual rules
  // (same user) admit. Nothing happens without Yama; what it was worth shows when reading is tried.
  static void AskYama(std::span<const pid_t> peers);

  // Copies from the memory of local rank `rank`. Not ok: kPeerLost, with that rank. What the peer writes
  // meanwhile may be seen in part.
  Status Read(int rank, std::span<const Copy> copies) const;

 private:
  Status Lost(int rank, int error) const;

  const std::vector<pid_t> processes_;
  const int first_rank_;
};

}  // namespace hvd
