#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "transport/fd.h"

namespace hvd {

enum class FrameKind : uint8_t {
  kSegment = 1,  // a shared memory segment; its descriptor travels along
  kAnnounce,     // to the coordinator: this rank has submitted
  kDecide,       // from the coordinator: what to do next, in one order for all
  kAbort,        // the Group is dead, with the reason
  kBye,          // the sender closed the Group; its connections end next
  kTrace,        // between the Tracers
  kPhase,        // this rank begins or ends a declared phase
  kRelease,      // the sender's tensors have left a segment
  kBeat,         // still there
};

struct Frame {
  int peer = -1;  // whose it is: the rank where it began its way
  FrameKind kind = FrameKind::kBeat;
  std::string payload;
  UniqueFd fd;
};

// What stands before the payload on the wire.
struct FrameHeader {
  // Destinations that are no rank.
  static constexpr int32_t kEveryone = -1;
  static constexpr int32_t kNeighbour = -2;  // whom it is sent to, and no further

  static constexpr size_t kBytes = 16;
  // Announcements and decisions of ten thousand tensors take about 1 MiB; a length above this is a broken
  // stream.
  static constexpr uint32_t kMaxPayloadBytes = 256u << 20;

  uint32_t nbytes = 0;  // of the payload
  FrameKind kind = FrameKind::kBeat;
  int32_t origin = 0;
  int32_t destination = kNeighbour;

  std::string ToBytes() const {
    std::string bytes(kBytes, '\0');
    std::memcpy(bytes.data(), &nbytes, sizeof nbytes);
    bytes[4] = static_cast<char>(kind);
    std::memcpy(bytes.data() + 8, &origin, sizeof origin);
    std::memcpy(bytes.data() + 12, &destination, sizeof destination);
    return bytes;
  }

  // bytes.size() >= kBytes. Nothing if no rank of a Group of `size` can have sent it.
  static std::optional<FrameHeader> Parse(std::string_view bytes, int size) {
    FrameHeader header;
    std::memcpy(&header.nbytes, bytes.data(), sizeof header.nbytes);
    header.kind = static_cast<FrameKind>(bytes[4]);
    std::memcpy(&header.origin, bytes.data() + 8, sizeof header.origin);
    std::memcpy(&header.destination, bytes.data() + 12, sizeof header.destination);
    if (header.nbytes > kMaxPayloadBytes || header.kind < FrameKind::kSegment ||
        header.kind > FrameKind::kBeat || header.origin < 0 || header.origin >= size ||
        header.destination < kNeighbour || header.destination >= size)
      return std::nullopt;
    const bool stays = header.kind == FrameKind::kSegment || header.kind == FrameKind::kRelease ||
                       header.kind == FrameKind::kBeat;
    if (stays && header.destination != kNeighbour) return std::nullopt;
    return header;
  }
};

}  // namespace hvd
