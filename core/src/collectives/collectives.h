#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collectives/chain.h"
#include "collectives/in_host.h"
#include "collectives/relay.h"
#include "transport/ring_links.h"
#include "transport/topology.h"

namespace hvd {

struct CollectivesOptions {
  // What float accumulators travel as between hosts: kFloat32, or kBFloat16 or kFloat16 for half the bytes.
  // Outside the promise that the layout of ranks does not change the bits; all ranks still get the same.
  DType wire_dtype = DType::kFloat32;
};

// Chooses how a collective is done for the ranks of a Group: in shared memory inside a host, over the data
// links between hosts.
//
// All ranks call the same function with the same sizes at the same time. Not ok means that the ranks no
// longer agree on what comes next, so the Group is dead; outputs are then undefined. Owned by one thread at a
// time.
class Collectives {
 public:
  // Called every few milliseconds while waiting for a rank (its number in the Group), to move frames and to
  // say when to give up: not ok ends the wait.
  using Tick = std::function<Status(int awaited_rank)>;

  // arena is that of this host and outlives this object.
  Collectives(const Topology& topology, Arena& arena, RingLinks links, Tick tick,
              const CollectivesOptions& options = {});

  Status Allreduce(std::span<const Piece> pieces, DType dtype, ReduceOp op, const Scale& scale);
  // `at` of each piece is by local rank.
  Status AllreduceInPlace(std::span<const ArenaPiece> pieces, DType dtype, ReduceOp op, const Scale& scale);
  // nbytes is by rank of the Group.
  Status Gather(const std::byte* in, std::byte* out, std::span<const size_t> nbytes);
  // What each rank has for the others stands in its `in` in rank order, and what it gets in its `out`.
  Status Alltoall(const std::byte* in, std::byte* out, const Traffic& traffic);
  // slices[r], one after another, are the elements of the result that rank r of the Group gets.
  Status ReduceScatter(const std::byte* in, std::byte* out, std::span<const Range> slices, DType dtype,
                       ReduceOp op, const Scale& scale);
  // root is a rank of the Group.
  Status Broadcast(int root, const std::byte* in, std::byte* out, size_t nbytes);

  // With the neighbours about what travels, once and before the first use of any data links.
  Status Agree();

 private:
  struct Job {
    DType dtype;
    ReduceOp op;
    Scale scale;
  };
  bool several_hosts() const { return topology_.hosts() > 1; }
  bool owns_slice() const { return chain_ != nullptr; }
  bool any_host_stages() const;
  bool IsSmall(size_t nbytes) const;
  int NeighbourRank(int step) const;  // on the next (1) or the previous host (-1); -1 if there is none

  Status AllreduceSmall(std::span<const Piece> pieces, size_t count, const Job& job);
  Status AllreduceStraight(std::span<const Piece> pieces, size_t count, const Job& job);
  Status AllreduceThroughStaging(std::span<const Piece> pieces, size_t count, const Job& job);
  ChainJob Slice(const Job& job, Range range, ChainMemory* memory) const;

  // Passes the blocks of hosts (of one of them, if root is not kEveryHost) to all hosts; this host's is in
  // `out` already, on each of its ranks. starts[h] is where the block of host h begins, starts[hosts()] the
  // end.
  Status RelayBlocks(std::byte* out, std::span<const size_t> starts, int root);
  // place[r] is where the bytes of rank r belong.
  Status AlltoallBetweenHosts(const std::byte* in, std::span<std::byte* const> place, const Traffic& traffic);
  // On which local rank the bytes of `rank` travel, on every host: its own if it owns a slice. So where hosts
  // have as many ranks nothing is copied inside a host before it travels.
  int CarrierOf(int rank) const;
  size_t ToHost(const Traffic& traffic, int rank, int host) const;
  using Rooms = std::vector<std::unique_ptr<std::byte[]>>;
  Status Borrow(const std::byte* in, const Traffic& traffic, Rooms* rooms,
                std::vector<const std::byte*>* sent);
  void AddTrips(bool rising, const Traffic& traffic, std::span<const std::byte* const> sent,
                std::span<std::byte* const> got, Rooms* rooms, std::vector<Relay::Flow>* flows);

  // Cuts `parts`, of which the first `own` are here already, into chunks for the streams of this rank.
  void AddFlows(bool rising, std::span<const Relay::Part> parts, size_t own,
                std::vector<Relay::Flow>* flows) const;
  Status Run(std::vector<Relay::Flow> flows);

  template <class Machine, class IsDone>
  Status Drive(Machine& machine, const IsDone& is_done);
  template <class Machine>
  Status Turn(Machine& machine, std::chrono::milliseconds patience);
  Status TickIfDue(int awaited_rank);
  Status Explain(const Status& failure);

  const Topology topology_;
  Arena& arena_;
  RingLinks links_;
  const Tick tick_;
  const Arena::Tick local_tick_;
  const CollectivesOptions options_;
  std::unique_ptr<Chain> chain_;  // null on ranks that own no slice
  bool agreed_ = false;
  Clock::time_point next_tick_{};
  std::optional<Clock::time_point> left_at_;  // an awaited rank is known to have left since, and nothing came
  std::vector<pollfd> fds_;                   // scratch
  std::vector<std::byte> inputs_;             // scratch: of all ranks, for a small sum
};

}  // namespace hvd
