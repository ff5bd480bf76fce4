// Every call into the kernel that moves bytes or waits for them fails once: the first of a job, the second,
// ..., whichever rank it belongs to and whether it connects, agrees, adds or leaves. Linked with --wrap, so
// what is tested is the product as it is.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <random>

#include "group.h"
#include "rank_threads.h"

namespace hvd {
namespace {

enum class Fault {
  kNone,
  kInterrupted,  // a signal
  kNotNow,       // nothing there, no room
  kShort,        // one byte at a time
  kNoMemory,     // of the kernel, or no descriptor
  kReset,        // the connection breaks
  kEnd,          // the connection ends
};

// Which call fails, and how. One for the whole process: that is what --wrap reaches.
std::atomic<Fault> fault{Fault::kNone};
std::atomic<int> calls{0};
std::atomic<int> at{0};

Fault Next() {
  if (calls.fetch_add(1) + 1 != at.load()) return Fault::kNone;
  return fault.load();
}

int Fail(int why) {
  errno = why;
  return -1;
}

void Cut(int fd) { ::shutdown(fd, SHUT_RDWR); }

}  // namespace
}  // namespace hvd

using hvd::Fault;

extern "C" {
// NOLINTBEGIN: the linker's names
ssize_t __real_sendmsg(int fd, const msghdr* message, int flags);
ssize_t __real_recvmsg(int fd, msghdr* message, int flags);
int __real_connect(int fd, const sockaddr* to, socklen_t size);
int __real_accept4(int fd, sockaddr* from, socklen_t* size, int flags);
int __real_poll(pollfd* fds, nfds_t count, int timeout_ms);
int __real_epoll_wait(int fd, epoll_event* events, int most, int timeout_ms);

ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) {
  switch (hvd::Next()) {
    case Fault::kNone:
      break;
    case Fault::kInterrupted:
      return hvd::Fail(EINTR);
    case Fault::kNotNow:
      return hvd::Fail(EAGAIN);
    case Fault::kShort: {
      iovec part{message->msg_iov[0].iov_base, std::min<size_t>(message->msg_iov[0].iov_len, 1)};
      msghdr little = *message;
      little.msg_iov = &part;
      little.msg_iovlen = 1;
      return __real_sendmsg(fd, &little, flags);
    }
    case Fault::kNoMemory:
      hvd::Cut(fd);
      return hvd::Fail(ENOBUFS);
    case Fault::kReset:
    case Fault::kEnd:
      hvd::Cut(fd);
      return hvd::Fail(EPIPE);
  }
  return __real_sendmsg(fd, message, flags);
}

ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags) {
  switch (hvd::Next()) {
    case Fault::kNone:
      break;
    case Fault::kInterrupted:
      return hvd::Fail(EINTR);
    case Fault::kNotNow:
      return hvd::Fail(EAGAIN);
    case Fault::kShort: {
      const size_t before = std::exchange(message->msg_iov[0].iov_len, 1);
      const ssize_t received = __real_recvmsg(fd, message, flags);
      message->msg_iov[0].iov_len = before;
      return received;
    }
    case Fault::kNoMemory:
      hvd::Cut(fd);
      return hvd::Fail(ENOMEM);
    case Fault::kReset:
      hvd::Cut(fd);
      return hvd::Fail(ECONNRESET);
    case Fault::kEnd:
      hvd::Cut(fd);
      return 0;
  }
  return __real_recvmsg(fd, message, flags);
}

int __wrap_connect(int fd, const sockaddr* to, socklen_t size) {
  switch (hvd::Next()) {
    case Fault::kInterrupted:
      return hvd::Fail(EINTR);
    case Fault::kNotNow:
      return hvd::Fail(EAGAIN);
    case Fault::kReset:
    case Fault::kEnd:
      return hvd::Fail(ECONNREFUSED);
    case Fault::kNoMemory:
      return hvd::Fail(ENOBUFS);
    default:
      return __real_connect(fd, to, size);
  }
}

int __wrap_accept4(int fd, sockaddr* from, socklen_t* size, int flags) {
  switch (hvd::Next()) {
    case Fault::kInterrupted:
      return hvd::Fail(EINTR);
    case Fault::kNotNow:
      return hvd::Fail(EAGAIN);
    case Fault::kReset:
    case Fault::kEnd:
      return hvd::Fail(ECONNABORTED);
    case Fault::kNoMemory:
      return hvd::Fail(EMFILE);
    default:
      return __real_accept4(fd, from, size, flags);
  }
}

int __wrap_poll(pollfd* fds, nfds_t count, int timeout_ms) {
  switch (hvd::Next()) {
    case Fault::kInterrupted:
      return hvd::Fail(EINTR);
    case Fault::kNotNow:
      for (nfds_t i = 0; i < count; ++i) fds[i].revents = 0;
      return 0;
    case Fault::kNoMemory:
      return hvd::Fail(ENOMEM);
    default:
      return __real_poll(fds, count, timeout_ms);
  }
}

int __wrap_epoll_wait(int fd, epoll_event* events, int most, int timeout_ms) {
  switch (hvd::Next()) {
    case Fault::kInterrupted:
      return hvd::Fail(EINTR);
    case Fault::kNotNow:
      return 0;
    default:
      return __real_epoll_wait(fd, events, most, timeout_ms);
  }
}
// NOLINTEND
}

namespace hvd {
namespace {

struct Strike {
  int call;
  Fault fault;
};

struct Outcome {
  Status status;
  bool wrong_sum = false;
  double seconds = 0;
};

// Inline, one-shot, large; by the caller and by the Group's thread; new and known names.
Status Add(Group& group, Outcome& outcome) {
  for (int i = 0; i < 6; ++i) {
    const size_t count = (size_t[]){3, 900, 40'000}[i % 3];
    std::vector<float> data(count, 1);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const std::string name = "x" + std::to_string(i % 3);
    const std::vector<int64_t> shape{static_cast<int64_t>(count)};
    Call call;
    call.name = name;
    call.shape = shape;
    call.buffer = {bytes, bytes};
    const auto handle = group.Submit(call, i % 2 == 0 ? Then::kWaits : Then::kGoesOn);
    if (!handle.ok()) return handle.status();
    if (!group.Wait(*handle.value(), In(15), {})) return Status(Code::kInvalid, "hangs");
    HVD_RETURN_IF_ERROR(handle.value()->status());
    for (const float value : data) outcome.wrong_sum |= value != static_cast<float>(group.size());
  }
  return Status::Ok();
}

// Three steps of a plan; a member in each that only the first rank has.
Status MakeSteps(Group& group, Outcome& outcome) {
  const std::vector<size_t> counts{3, 5000, 30'000};
  std::vector<std::vector<float>> tensors;  // longer than the plan
  PlanSpec spec{"plan", {}, ReduceOp::kSum, {}, {8 << 10, 64 << 10}};
  for (size_t m = 0; m < counts.size(); ++m) {
    tensors.emplace_back(counts[m]);
    spec.members.push_back({"t" + std::to_string(m), DType::kFloat32, {static_cast<int64_t>(counts[m])}, {}});
  }
  const auto offer = group.OfferPlan(spec);
  if (!offer.ok()) return offer.status();
  Handle& handle = *offer.value().handle;
  if (!group.Wait(handle, In(15), {})) return Status(Code::kInvalid, "hangs in the offer");
  HVD_RETURN_IF_ERROR(handle.status());
  const auto plan = group.JoinPlan(offer.value());
  if (plan == nullptr) return Status(Code::kInvalid, "there was to be a plan");
  for (uint32_t step = 0; step < 3; ++step) {
    HVD_RETURN_IF_ERROR(plan->Begin());
    for (uint32_t m = 0; m < counts.size(); ++m) {
      const bool has = m != step || group.rank() == 0;
      std::fill(tensors[m].begin(), tensors[m].end(), has ? 1.0f : 0.0f);
      if (has) HVD_RETURN_IF_ERROR(plan->Ready(m, tensors[m].data()));
    }
    for (;;) {
      const auto progress = plan->End(0, In(15));
      if (!progress.ok()) return progress.status();
      if (progress.value() == Plan::Progress::kPending) return Status(Code::kInvalid, "hangs in a step");
      if (progress.value() == Plan::Progress::kDone) break;
      const auto needs = plan->needs();
      for (const uint32_t m : needs) plan->Supply(m, tensors[m].data());
    }
    for (uint32_t m = 0; m < counts.size(); ++m) {
      const auto expected = static_cast<float>(m == step ? 1 : group.size());
      for (const float value : tensors[m]) outcome.wrong_sum |= value != expected;
    }
  }
  return Status::Ok();
}

// A job from its first connection to its last goodbye.
std::vector<Outcome> RunJob(const Layout& layout, const Strike& strike, double connect_timeout_s) {
  const int size = SizeOf(layout);
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::string> endpoints;
  for (const std::string& host : Hosts(layout)) {
    listeners.push_back(Listener::Bind(host, "").value());
    endpoints.push_back(listeners.back()->endpoint().ToString());
  }
  GroupOptions options;
  options.chunk_nbytes = 16 << 10;
  options.connect_timeout_s = connect_timeout_s;
  options.peer_timeout_s = 5;
  options.stall_shutdown_s = 10;
  options.ring_streams = 1;
  fault = strike.fault;
  at = strike.call;
  calls = 0;
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  OnEveryRank(size, [&](int rank) {
    Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    const auto begin = Clock::now();
    const auto group = Group::Connect(listeners[static_cast<size_t>(rank)].get(), endpoints,
                                      {rank, size, "token", 1}, options);
    outcome.status = group.ok() ? Add(*group.value(), outcome) : group.status();
    if (outcome.status.ok()) outcome.status = MakeSteps(*group.value(), outcome);
    if (group.ok()) group.value()->Close();
    outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  });
  fault = Fault::kNone;
  return outcomes;
}

const Layout kLayouts[] = {{2}, {1, 1}, {2, 1}};

// All of the first calls, in which links come to be, and some fifty of the later ones, which are alike: each
// with the next of the faults; others of them, and with another fault, the next time.
std::vector<Strike> Sweep(const Layout& layout, std::initializer_list<Fault> faults) {
  for (const Outcome& outcome : RunJob(layout, {0, Fault::kNone}, 20)) CHECK(outcome.status.ok());
  const int calls_of_a_job = calls;
  std::vector<Strike> strikes;
  std::mt19937_64 random(check::Seed());
  uint64_t next = random();
  const auto strike = [&](int first, int end, int stride) {
    for (int call = first + static_cast<int>(random() % static_cast<uint64_t>(stride)); call < end;
         call += stride)
      strikes.push_back({call, faults.begin()[next++ % faults.size()]});
  };
  strike(1, std::min(60, calls_of_a_job + 1), kFewer);
  strike(60, calls_of_a_job + 1, std::max(6, (calls_of_a_job - 60) / 50) * kFewer);
  return strikes;
}

void Explain(const Strike& strike, const Layout& layout, const Outcome& outcome) {
  std::fprintf(stderr, "fault %d at call %d of %zu ranks on %zu hosts, after %g s: %s%s\n",
               static_cast<int>(strike.fault), strike.call, Hosts(layout).size(), layout.size(),
               outcome.seconds, outcome.wrong_sum ? "a wrong sum, " : "",
               std::string(outcome.status.text()).c_str());
}

TEST(a_call_that_is_interrupted_or_short_or_too_early_is_made_again) {
  for (const Layout& layout : kLayouts) {
    for (const Strike& strike : Sweep(layout, {Fault::kInterrupted, Fault::kNotNow, Fault::kShort})) {
      for (const Outcome& outcome : RunJob(layout, strike, 20)) {
        const bool is_right = outcome.status.ok() && !outcome.wrong_sum;
        CHECK(is_right);
        if (!is_right) Explain(strike, layout, outcome);
      }
    }
  }
}

TEST(a_call_that_fails_ends_every_rank_in_time_or_is_made_good_and_no_sum_is_wrong) {
  for (const Layout& layout : kLayouts) {
    int failed = 0;
    for (const Strike& strike : Sweep(layout, {Fault::kNoMemory, Fault::kReset, Fault::kEnd})) {
      bool is_over = false;
      for (const Outcome& outcome : RunJob(layout, strike, 0.5)) {
        const Code code = outcome.status.code();
        const bool is_right =
            code != Code::kInvalid && code != Code::kMismatch && outcome.seconds < 8 && !outcome.wrong_sum;
        CHECK(is_right);
        if (!is_right) Explain(strike, layout, outcome);
        is_over |= code != Code::kOk;
      }
      failed += is_over;
    }
    CHECK(failed > 5 / kFewer);  // the sweep did break something
  }
}

}  // namespace
}  // namespace hvd
