#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "transport/arena.h"

namespace hvd {

// kPlan: the ranks agree on tensors that come back every step, and learn where the others keep the words of
// the plan: members[0].where says it, the members are the tensors. Nothing is reduced.
// kJoin: until all ranks have joined, the others' collectives do without this one.
enum class Op : uint8_t {
  kAllreduce,
  kAllgather,
  kBroadcast,
  kBarrier,
  kPlan,
  kAlltoall,
  kReducescatter,
  kJoin,
};
const char* Name(Op op);
// Works on the rows of its tensors, so they have a first dimension.
inline bool NeedsRows(Op op) {
  return op == Op::kAllgather || op == Op::kAlltoall || op == Op::kReducescatter;
}
// Whether ranks may have different numbers of rows.
inline bool RowsMayDiffer(Op op) { return op == Op::kAllgather || op == Op::kAlltoall; }

// One tensor of a request, as its rank submitted it.
struct Member {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  Location where;  // valid if the tensor lies in the arena and is to be reduced in place

  uint64_t count() const {
    uint64_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<uint64_t>(extent);
    return count;
  }
  uint64_t nbytes() const { return count() * ItemSize(dtype); }
  // Of a tensor with a first dimension.
  uint64_t row_nbytes() const {
    uint64_t nbytes = ItemSize(dtype);
    for (size_t d = 1; d < shape.size(); ++d) nbytes *= static_cast<uint64_t>(shape[d]);
    return nbytes;
  }
  bool operator==(const Member&) const = default;
};

// What a rank announces as ready: one collective over one or several tensors that complete together. Its name
// is the key that the ranks meet under; everything else must agree (the signature), apart from places and the
// first extents in an allgather and an alltoall.
struct Request {
  Op op = Op::kAllreduce;
  std::string name;
  ReduceOp reduce = ReduceOp::kSum;
  double prescale = 1;
  double postscale = 1;
  int32_t root = 0;
  std::vector<Member> members;
  std::vector<int64_t>
      splits{};  // alltoall only, of its one member: rows for each rank, all of them together
  bool operator==(const Request&) const = default;
};

// Stands for what the ranks have agreed on before (scheduler/cache.h).
using CacheId = uint32_t;
inline constexpr CacheId kNoId = ~0u;

// How a rank says that it is ready: by number if all ranks have agreed on just this before, else in full.
struct Announcement {
  CacheId id = kNoId;
  Request request;  // if id is kNoId
};

// What the coordinator decided about a name that all ranks have announced.
struct Decision {
  std::string name;
  std::string mismatch;  // not empty: nothing is done, and this is why
  // Allgather: first extents, [member][rank]. Alltoall: the splits of the ranks, [from][to]. Join: the last
  // rank that did.
  std::vector<std::vector<int64_t>> rows;
  // Allreduce and plan, of members that lie in the arena on every rank: [member][rank]; otherwise empty per
  // member.
  std::vector<std::vector<Location>> places;
  // What ranks that have joined take part with: zeros, or no rows.
  std::optional<Request> stand_in{};
};

// Whether the ranks number it, so that it need not be said in full the next time.
inline bool IsRemembered(Op op, const Decision& decision) {
  return op != Op::kJoin && decision.mismatch.empty() && !decision.stand_in;
}

// The decisions of one moment, in one order for all ranks; Fuse() says which fused batches they make.
struct Round {
  int64_t known_ns = 0;        // when this rank heard of it, for the timeline; does not travel
  uint64_t fusion_nbytes = 0;  // the coordinator's
  std::vector<CacheId> ids;    // as agreed before; kNoId: the next one of in_full
  std::vector<Decision> in_full;
};

std::string Serialize(const std::vector<Announcement>& announcements);
std::string Serialize(const Round& round);
// kPeerLost text if the bytes are not what Serialize wrote.
Result<std::vector<Announcement>> ParseAnnouncements(std::string_view bytes);
Result<Round> ParseRound(std::string_view bytes);

}  // namespace hvd
