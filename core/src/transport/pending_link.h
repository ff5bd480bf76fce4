#pragma once

#include <string>

#include "transport/exchange.h"
#include "transport/handshake.h"
#include "transport/socket_link.h"

namespace hvd {

// One connection on its way through the handshake: as the connector, which knows what link it is to be, or as
// the acceptor, which is told.
class PendingLink {
 public:
  enum class Progress { kWaiting, kDone, kDropped, kWrongToken };

  static PendingLink Connector(SocketLink link, const Credentials& me, const LinkName& name,
                               Clock::time_point give_up);
  static PendingLink Acceptor(SocketLink link, const Credentials& me, Clock::time_point give_up);

  // Moves bytes as far as they go without waiting. Never reads past the frame it expects.
  Progress Advance();

  int fd() const { return link_.fd(); }
  bool is_unix() const { return link_.same_host(); }
  bool is_connector() const { return !accepting_; }
  const LinkName& name() const { return name_; }  // of an acceptor: peer is -1 until the hello has come
  bool wants_to_send() const { return !out_.empty(); }
  // A connector's hello has been sent, so there is somebody at this address.
  bool is_established() const { return out_.empty(); }
  // An acceptor has answered a connector's hello: from then on both are about to be done.
  bool is_answered() const { return want_ != kChallengeBytes || !in_.empty(); }
  Clock::time_point give_up() const { return give_up_; }
  void set_give_up(Clock::time_point when) { give_up_ = when; }
  const Status& failure() const { return failure_; }  // why it was dropped, if a call failed
  SocketLink TakeLink() { return std::move(link_); }

 private:
  PendingLink(SocketLink link, const Credentials& me, Clock::time_point give_up)
      : link_(std::move(link)), me_(&me), give_up_(give_up) {}
  Progress Accept();
  Progress Connect();
  Progress Fail(const Status& why);
  template <class Bytes>
  void Queue(const Bytes& bytes) {
    out_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

  SocketLink link_;
  const Credentials* me_;
  bool accepting_ = false;
  bool done_ = false;
  LinkName name_;
  Hello hello_{};
  Challenge challenge_{};
  std::string in_, out_;
  size_t want_ = 0;
  UniqueFd ignored_fd_;
  Clock::time_point give_up_;
  Status failure_;
};

}  // namespace hvd
