// What TCP itself moves: the baseline of benchmarks/tcp.py. A shared library for ctypes.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <vector>

// Sends all of `out` and receives all of `in`, `nbytes` each and an equal part over each of `count` connected
// non-blocking sockets, both ways at once. 0, or the errno of what failed; an end of stream is ECONNRESET.
extern "C" int raw_tcp_exchange(const int* sockets, int count, const char* out, char* in, size_t nbytes) {
  struct Part {
    const char* out;
    char* in;
    size_t to_send, to_receive;
  };
  const size_t each = (nbytes + static_cast<size_t>(count) - 1) / static_cast<size_t>(count);
  std::vector<Part> parts;
  std::vector<pollfd> fds;
  for (int i = 0; i < count; ++i) {
    const size_t begin = std::min(nbytes, static_cast<size_t>(i) * each);
    const size_t size = std::min(each, nbytes - begin);
    parts.push_back({out + begin, in + begin, size, size});
    fds.push_back({sockets[i], POLLIN | POLLOUT, 0});
  }
  for (bool is_done = nbytes == 0; !is_done;) {
    is_done = true;
    bool moved = false;
    for (size_t i = 0; i < parts.size(); ++i) {
      Part& part = parts[i];
      if (part.to_send > 0) {
        const ssize_t sent = ::send(fds[i].fd, part.out, part.to_send, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return errno;
        if (sent > 0) part.out += sent, part.to_send -= static_cast<size_t>(sent), moved = true;
      }
      if (part.to_receive > 0) {
        const ssize_t received = ::recv(fds[i].fd, part.in, part.to_receive, 0);
        if (received == 0) return ECONNRESET;
        if (received < 0 && errno != EAGAIN && errno != EINTR) return errno;
        if (received > 0) part.in += received, part.to_receive -= static_cast<size_t>(received), moved = true;
      }
      fds[i].events =
          static_cast<short>((part.to_send > 0 ? POLLOUT : 0) | (part.to_receive > 0 ? POLLIN : 0));
      is_done &= fds[i].events == 0;
    }
    if (!is_done && !moved && ::poll(fds.data(), fds.size(), 10'000) == 0) return ETIMEDOUT;
  }
  return 0;
}
