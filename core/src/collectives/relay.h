#pragma once

#include <poll.h>

#include <span>
#include <vector>

#include "base/status.h"
#include "transport/link.h"

namespace hvd {

// Passes bytes on: what is received from one link goes to memory and from there to another link. Never
// blocks; whoever drives it waits for the descriptors it wants. Owned by one thread.
class Relay {
 public:
  struct Part {
    std::span<std::byte> bytes;
    bool stays = false;  // is not sent on
  };
  // One stream in one direction. The first `own` parts are there already, the others are received; all that
  // do not stay are sent, if `to` is not null. A part moves on as soon as it is whole.
  struct Flow {
    Link* from = nullptr;
    Link* to = nullptr;
    int from_rank = -1, to_rank = -1;  // to name in errors
    std::vector<Part> parts;
    size_t own = 0;
  };

  explicit Relay(std::vector<Flow> flows);

  // Moves what can be moved now. True: something was.
  Result<bool> Advance();
  bool done() const;
  // The descriptors to wait for before Advance() can do more, and a rank that is waited for.
  void Wants(std::vector<pollfd>* fds) const;
  int awaited_rank() const;

 private:
  struct Moving {
    Flow flow;
    size_t received, received_nbytes = 0;  // parts that are here, bytes of the next one
    size_t sent = 0, sent_nbytes = 0;      // parts that this host is through with
    bool receives() const { return received < flow.parts.size(); }
    bool sends() const { return sent < received; }
    bool done() const { return sent == flow.parts.size(); }
    // Past the parts that are here and go no further.
    void Pass() {
      while (sends() && (flow.to == nullptr || flow.parts[sent].stays)) ++sent;
    }
  };
  static Result<bool> Receive(Moving& moving);
  static Result<bool> Send(Moving& moving);

  std::vector<Moving> flows_;
};

// "lost rank 3: cannot send: ..."
Status LostRank(int rank, const Status& why);

}  // namespace hvd
