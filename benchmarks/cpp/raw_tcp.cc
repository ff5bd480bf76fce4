// What TCP itself moves, and what it moves if the bytes are added on their way: the baselines of
// benchmarks/tcp.py. A shared library for ctypes.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

namespace {

// What can be sent and received now over one of the connections.
struct Way {
  int fd = -1;
  const char* out = nullptr;
  size_t may_send = 0;
  char* in = nullptr;
  size_t may_receive = 0;
};

// So many bytes each way.
struct Plain : Way {
  void Sent(size_t n) { out += n, may_send -= n; }
  void Got(size_t n) { in += n, may_receive -= n; }
  bool done() const { return may_send == 0 && may_receive == 0; }
};

// Sends `theirs`, adds what comes to `mine`, and sends that back as it gets ready; what comes back replaces
// `theirs`.
struct Adding : Way {
  // What is received at a time is added while it is in L2.
  static constexpr size_t kHotNbytes = 128 << 10;

  Adding(int socket, float* my_part, float* their_part, size_t count)
      : mine(my_part), theirs(their_part), nbytes(count * sizeof(float)), hot(kHotNbytes / sizeof(float)) {
    fd = socket;
    Aim();
  }
  void Sent(size_t n) {
    sent += n;
    Aim();
  }
  void Got(size_t n) {
    if (come < nbytes) Add(n);
    come += n;
    Aim();
  }
  bool done() const { return sent == 2 * nbytes && come == 2 * nbytes; }

  void Add(size_t n) {
    pending += n;
    const size_t whole = pending / sizeof(float);
    float* __restrict sum = mine + added;
    const float* __restrict other = hot.data();
    for (size_t i = 0; i < whole; ++i) sum[i] += other[i];
    added += whole;
    pending %= sizeof(float);
    std::memmove(hot.data(), hot.data() + whole, pending);
  }
  void Aim() {
    const bool own_is_sent = sent >= nbytes, other_is_here = come >= nbytes;
    out = own_is_sent ? reinterpret_cast<char*>(mine) + (sent - nbytes)
                      : reinterpret_cast<char*>(theirs) + sent;
    may_send = own_is_sent ? added * sizeof(float) - (sent - nbytes) : nbytes - sent;
    in = other_is_here ? reinterpret_cast<char*>(theirs) + (come - nbytes)
                       : reinterpret_cast<char*>(hot.data()) + pending;
    may_receive = other_is_here ? 2 * nbytes - come : std::min(kHotNbytes - pending, nbytes - come);
  }

  float* mine;
  float* theirs;
  size_t nbytes;
  std::vector<float> hot;
  size_t sent = 0, come = 0;  // bytes
  size_t added = 0;           // elements
  size_t pending = 0;         // bytes of an element that has not come whole
};

// Until all are done: 0, or the errno of what failed; an end of stream is ECONNRESET.
template <class Stream>
int Run(std::vector<Stream>& streams) {
  std::vector<pollfd> fds(streams.size());
  for (;;) {
    bool is_done = true, moved = false;
    for (size_t i = 0; i < streams.size(); ++i) {
      Stream& stream = streams[i];
      if (stream.may_send > 0) {
        const ssize_t sent = ::send(stream.fd, stream.out, stream.may_send, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return errno;
        if (sent > 0) stream.Sent(static_cast<size_t>(sent)), moved = true;
      }
      if (stream.may_receive > 0) {
        const ssize_t got = ::recv(stream.fd, stream.in, stream.may_receive, 0);
        if (got == 0) return ECONNRESET;
        if (got < 0 && errno != EAGAIN && errno != EINTR) return errno;
        if (got > 0) stream.Got(static_cast<size_t>(got)), moved = true;
      }
      fds[i] = {
          stream.fd,
          static_cast<short>((stream.may_send > 0 ? POLLOUT : 0) | (stream.may_receive > 0 ? POLLIN : 0)), 0};
      is_done &= stream.done();
    }
    if (is_done) return 0;
    if (!moved && ::poll(fds.data(), fds.size(), 10'000) == 0) return ETIMEDOUT;
  }
}

}  // namespace

// Both return as Run(). The sockets are connected and do not block.

// Sends all of `out` and receives all of `in`, `nbytes` each and an equal part over each socket, both ways at
// once.
extern "C" int raw_tcp_exchange(const int* sockets, int count, const char* out, char* in, size_t nbytes) {
  const size_t each = (nbytes + static_cast<size_t>(count) - 1) / static_cast<size_t>(count);
  std::vector<Plain> streams;
  for (int i = 0; i < count; ++i) {
    const size_t begin = std::min(nbytes, static_cast<size_t>(i) * each);
    const size_t size = std::min(each, nbytes - begin);
    streams.push_back({{sockets[i], out + begin, size, in + begin, size}});
  }
  return Run(streams);
}

// The sum of two ranks' `data`, in place: each adds one half of it. As many bytes each way as in an exchange
// of `elements` floats, and each is added once by one of the two. An even number of elements for each socket.
extern "C" int raw_tcp_add(const int* sockets, int count, int rank, float* data, size_t elements) {
  const size_t half = elements / 2, each = half / static_cast<size_t>(count);
  std::vector<Adding> streams;
  for (int i = 0; i < count; ++i) {
    float* const first = data + static_cast<size_t>(i) * each;
    streams.emplace_back(sockets[i], rank == 0 ? first : first + half, rank == 0 ? first + half : first,
                         each);
  }
  return Run(streams);
}
