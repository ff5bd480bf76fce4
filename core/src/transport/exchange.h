#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/link.h"

namespace hvd {

using Clock = std::chrono::steady_clock;

// "For ever" (infinity, 1e300) is thirty years, so that a deadline can be reckoned with.
inline Clock::duration Seconds(double seconds) {
  constexpr double kForEver = 1e9;
  const double bounded = seconds < kForEver ? std::max(seconds, -kForEver) : kForEver;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

enum class FrameKind : uint8_t {
  kSegment = 1,  // a shared memory segment; its descriptor travels along
  kAnnounce,     // to the coordinator: this rank has submitted
  kDecide,       // from the coordinator: what to do next, in one order for all
  kAbort,        // the Group is dead, with the reason
  kBye,          // the sender closed the Group; its connection ends next
  kBeat,         // still there
};

struct Frame {
  int peer = -1;
  FrameKind kind = FrameKind::kBeat;
  std::string payload;
  UniqueFd fd;
};

// Frames to and from every peer, and the only place that waits on Links. On the wire a frame is
// {uint32 payload bytes, uint8 kind, payload}. Also tells who is gone: a peer whose stream ends without kBye,
// whose process on this host has ended, or from which nothing came for peer_timeout (everybody sends a kBeat
// ten times as often), is lost.
// Owned by one thread at a time, except Wake() and wait_fd().
class Exchange {
 public:
  // size counts this rank too. Throws nothing; what cannot be made (an eventfd) shows in status().
  Exchange(int self, int size, Clock::duration peer_timeout);

  // peer_pid is its process on this host, 0 if unknown. Its end is seen even if a forked child of it keeps
  // the connection open.
  void Add(int peer, std::unique_ptr<Link> link, int peer_pid);

  // Queues a frame and sends what fits now. pass_fd must stay open until the frame is gone.
  void Post(int peer, FrameKind kind, std::string_view payload, int pass_fd = -1);
  void PostAll(FrameKind kind, std::string_view payload, int pass_fd = -1);
  // To the ranks of this host.
  void PostHost(FrameKind kind, std::string_view payload, int pass_fd = -1);

  // Moves bytes until a frame is there, a peer is newly gone, Wake() was called, or the deadline has passed.
  void Poll(Clock::time_point deadline);

  // The oldest frame not yet taken. kBye and kBeat are dealt with here and never come out.
  std::optional<Frame> Next();
  // Puts frames that were taken too early back in front.
  void PutBack(std::vector<Frame> frames);

  // Why the first lost peer is lost; ok while nobody is.
  const Status& lost() const { return lost_; }
  int lost_peer() const { return lost_peer_; }
  bool HasLeft(int peer) const { return peers_[static_cast<size_t>(peer)].state == State::kLeft; }
  // The lowest peer whose link is not one inside this host, or -1.
  int FirstOnOtherHost() const;

  // Sends everything queued, or gives up at the deadline.
  void Flush(Clock::time_point deadline);

  // Ends a Poll, now or the next one. Any thread.
  void Wake();

  // Readable (level-triggered) while a Poll would find something: bytes, an ended peer, a Wake(). A thread
  // that does not own the Exchange may wait on it; it must take over by next_beat() at the latest and Poll.
  int wait_fd() const { return epoll_.get(); }
  Clock::time_point next_beat() const { return next_beat_; }

  // The process of a peer on this host; 0 if unknown or on another host.
  int pid(int peer) const { return peers_[static_cast<size_t>(peer)].pid; }

  const Status& status() const { return status_; }

 private:
  enum class State { kAbsent, kConnected, kLeft, kLost };
  struct Outgoing {
    std::string bytes;
    size_t sent = 0;
    int pass_fd = -1;
  };
  struct Peer {
    State state = State::kAbsent;
    std::unique_ptr<Link> link;
    bool wants_to_send = false;  // what the epoll set knows
    int pid = 0;
    UniqueFd process;  // a pidfd, readable when the process has ended
    std::deque<Outgoing> outgoing;
    std::string incoming;
    std::deque<UniqueFd> incoming_fds;  // in the order of their kSegment frames
    Clock::time_point heard;
  };

  bool PollOnce(Clock::time_point deadline);  // true: something happened that a caller wants to see
  bool Watch(int fd, uint64_t what);
  void Disconnect(int peer, State state);
  void Send(int peer);
  void SendQueued(int peer);
  bool Receive(int peer, bool to_the_end = false);
  bool Parse(int peer);
  void Lose(int peer, const Status& why);
  bool LoseEnded(int peer);
  void Beat(Clock::time_point now);
  bool CheckSilence(Clock::time_point now);

  const int self_;
  const Clock::duration peer_timeout_;
  const Clock::duration beat_every_;
  Clock::time_point next_beat_;
  Clock::time_point last_poll_;
  std::vector<Peer> peers_;
  std::deque<Frame> inbox_;
  Status lost_;
  int lost_peer_ = -1;
  UniqueFd wake_, epoll_;
  Status status_;
};

}  // namespace hvd
