#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/frame.h"
#include "transport/link.h"
#include "transport/topology.h"

namespace hvd {

using Clock = std::chrono::steady_clock;

// "For ever" (infinity, 1e300) is thirty years, so that a deadline can be reckoned with.
inline Clock::duration Seconds(double seconds) {
  constexpr double kForEver = 1e9;
  const double bounded = seconds < kForEver ? std::max(seconds, -kForEver) : kForEver;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

// Frames to and from every rank, and the only place that waits on Links. This rank has links to its
// neighbours only (topology.h); what goes further is passed on by the leaders of hosts. On the wire a frame
// is a FrameHeader and the payload. Frames from one rank to another arrive in the order in which they were
// sent.
//
// Also tells who is gone: a neighbour whose stream ends without kBye, whose process on this host has ended,
// or from which nothing came for peer_timeout (everybody sends a kBeat ten times as often), is lost.
//
// Owned by one thread at a time, except Wake() and wait_fd().
class Exchange {
 public:
  // Throws nothing; what cannot be made (an eventfd) shows in status().
  Exchange(const Topology& topology, Clock::duration peer_timeout);

  // The link to a neighbour. peer_pid is its process on this host, 0 if unknown: its end is seen even if a
  // forked child of it keeps the connection open. `where` names its host in errors.
  void Add(int peer, std::unique_ptr<Link> link, int peer_pid, std::string where = {});

  // Queues a frame and sends what fits now. Dropped if a rank on the way has left or is lost.
  void Post(int peer, FrameKind kind, std::string_view payload);
  // To every other rank. An abort once only, also when it is the echo of one that was heard: a neighbour
  // that has not heard it yet must read the reason before it finds this rank's connection ended.
  void PostAll(FrameKind kind, std::string_view payload);
  // To the other ranks of this host. pass_fd must stay open until the frame is gone.
  void PostHost(FrameKind kind, std::string_view payload, int pass_fd = -1);

  // Moves bytes until a frame is there, a peer is newly gone, Wake() was called, or the deadline has passed.
  void Poll(Clock::time_point deadline);

  // Moves what can be moved now, and beats if it is time, also with frames waiting.
  void Turn() { PollOnce(Clock::now()); }

  // The oldest frame not yet taken. kBye and kBeat are dealt with here and never come out.
  std::optional<Frame> Next();
  // Puts frames that were taken too early back in front.
  void PutBack(std::vector<Frame> frames);

  // Why the first lost neighbour is lost; ok while none is.
  const Status& lost() const { return lost_; }
  int lost_peer() const { return lost_peer_; }
  // Why all of this is over before it began: an abort that was heard, or lost(). For who connects and does
  // not take frames yet.
  const Status& ended() const { return heard_abort_.ok() ? lost_ : heard_abort_; }
  // The payload of a kAbort, and what it says; kAborted if its code is none.
  static std::string AbortPayload(const Status& reason);
  static Status ReasonOf(std::string_view abort_payload);
  // `rank` has closed the Group and said so.
  bool HasLeft(int rank) const {  // any thread
    return left_[static_cast<size_t>(rank)];
  }
  // The rank that has closed the Group so that nothing reaches `rank` or comes from it any more: itself or
  // one on the way to it; -1 while there is none.
  int LeftOnTheWayTo(int rank) const;

  // Sends everything queued, or gives up at the deadline.
  void Flush(Clock::time_point deadline);
  // After the last frame: sends everything queued, then ends the connections to other hosts and waits until
  // their other sides have done so, or gives up at the deadline. A TCP socket that is closed with bytes
  // unread takes what it sent last with it.
  void Linger(Clock::time_point deadline);

  // Ends a Poll, now or the next one. Any thread.
  void Wake();

  // Readable (level-triggered) while a Poll would find something: bytes, an ended peer, a Wake(). A thread
  // that does not own the Exchange may wait on it; it must take over by next_beat() at the latest and Poll.
  int wait_fd() const { return epoll_.get(); }
  Clock::time_point next_beat() const { return next_beat_; }

  // The process of a rank on this host; 0 if unknown or on another host.
  int pid(int peer) const {
    const auto& p = peers_[static_cast<size_t>(peer)];
    return p == nullptr ? 0 : p->pid;
  }

  const Status& status() const { return status_; }

 private:
  enum class State { kConnected, kLeft, kLost };
  struct Outgoing {
    std::string bytes;
    size_t sent = 0;
    int pass_fd = -1;
  };
  struct Peer {
    State state = State::kConnected;
    std::unique_ptr<Link> link;
    bool wants_to_send = false;  // what the epoll set knows
    int pid = 0;
    UniqueFd process;  // a pidfd, readable when the process has ended
    std::string where;
    std::deque<Outgoing> outgoing;
    std::string incoming;
    std::deque<UniqueFd> incoming_fds;  // in the order of their kSegment frames
    Clock::time_point heard;
  };

  Peer* Connected(int peer) const;  // null if it is no neighbour, has left or is lost
  void PostTo(int next, FrameKind kind, int32_t destination, std::string_view payload, int pass_fd = -1);
  void Queue(int next, std::string bytes, int pass_fd);
  void Flood(std::string_view bytes, int from);
  bool HasQueued() const;
  bool PollOnce(Clock::time_point deadline);  // true: something happened that a caller wants to see
  bool Watch(int fd, uint64_t what);
  void Disconnect(int peer, State state);
  void Send(int peer);
  void SendQueued(int peer);
  bool Receive(int peer, bool to_the_end = false);
  bool Parse(int peer);
  bool IsPlausible(const FrameHeader& header, int from) const;
  bool Take(int from, const FrameHeader& header, std::string_view bytes);
  void Lose(int peer, const Status& why);
  bool LoseEnded(int peer);
  bool CheckSilence(Clock::time_point now);

  const Topology topology_;
  const Clock::duration peer_timeout_;
  const Clock::duration beat_every_;
  Clock::time_point next_beat_;
  Clock::time_point last_poll_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where there is no link
  std::vector<int> neighbours_;
  // Frames of ranks that have connected already, on their way to a neighbour that has not.
  std::vector<std::pair<int, std::string>> early_;
  std::vector<std::atomic<bool>> left_;  // by rank
  std::deque<Frame> inbox_;
  Status lost_;
  int lost_peer_ = -1;
  Status heard_abort_;
  bool told_abort_ = false;
  bool knows_abort_ = false;  // told or heard: those that come later are echoes
  bool leaving_ = false;      // in Linger: an ended connection is no loss
  UniqueFd wake_, epoll_;
  Status status_;
};

}  // namespace hvd
