#include "transport/pending_link.h"

#include <cstring>

namespace hvd {

PendingLink PendingLink::Connector(SocketLink link, const Credentials& me, const LinkName& name,
                                   Clock::time_point give_up) {
  PendingLink pending(std::move(link), me, give_up);
  pending.name_ = name;
  pending.hello_ = MakeHello(me, name);
  pending.Queue(pending.hello_);
  pending.want_ = kChallengeBytes;
  return pending;
}

PendingLink PendingLink::Acceptor(SocketLink link, const Credentials& me, Clock::time_point give_up) {
  PendingLink pending(std::move(link), me, give_up);
  pending.accepting_ = true;
  pending.want_ = kHelloBytes;
  return pending;
}

PendingLink::Progress PendingLink::Advance() {
  for (;;) {
    while (!out_.empty()) {
      auto sent = link_.TrySend(std::as_bytes(std::span(out_)), -1);
      if (!sent.ok()) return Fail(sent.status());
      if (sent.value() == 0) return Progress::kWaiting;
      out_.erase(0, sent.value());
    }
    if (done_) return Progress::kDone;
    std::byte bytes[kChallengeBytes];
    static_assert(kChallengeBytes >= kHelloBytes && kChallengeBytes >= kProofBytes);
    auto received = link_.TryRecv(std::span(bytes).first(want_ - in_.size()), &ignored_fd_);
    if (!received.ok()) return Fail(received.status());
    if (received.value() == 0) return Progress::kWaiting;
    in_.append(reinterpret_cast<const char*>(bytes), received.value());
    if (in_.size() < want_) continue;
    const Progress progress = accepting_ ? Accept() : Connect();
    if (progress != Progress::kWaiting) return progress;
    in_.clear();
  }
}

PendingLink::Progress PendingLink::Accept() {
  const auto in = std::as_bytes(std::span(in_));
  if (want_ == kHelloBytes) {
    const auto name = ReadHello(in, *me_);
    if (!name) return Progress::kDropped;
    name_ = *name;
    std::memcpy(hello_.data(), in.data(), kHelloBytes);
    challenge_ = MakeChallenge(hello_, *me_);
    Queue(challenge_);
    want_ = kProofBytes;
    return Progress::kWaiting;
  }
  if (!Equal(MakeProof(hello_, challenge_, *me_), in)) return Progress::kDropped;
  out_.push_back('\1');
  done_ = true;
  return Progress::kWaiting;
}

PendingLink::Progress PendingLink::Connect() {
  if (want_ == kAckBytes) return Progress::kDone;
  std::memcpy(challenge_.data(), in_.data(), kChallengeBytes);
  if (!CheckChallenge(hello_, challenge_, *me_)) return Progress::kWrongToken;
  Queue(MakeProof(hello_, challenge_, *me_));
  want_ = kAckBytes;
  return Progress::kWaiting;
}

PendingLink::Progress PendingLink::Fail(const Status& why) {
  failure_ = why;
  return Progress::kDropped;
}

}  // namespace hvd
