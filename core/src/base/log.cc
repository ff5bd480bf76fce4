#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

namespace hvd {
namespace {

std::atomic<Level> log_level{Level::kWarning};
std::atomic<LogSink> log_sink{nullptr};

void WriteToStderr(std::string_view text) {
  std::string line;
  line.reserve(text.size() + 6);
  line.append("hvd: ").append(text).push_back('\n');
  ssize_t written;
  do {
    written = ::write(STDERR_FILENO, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
}

}  // namespace

void Log(Level level, std::string_view text) {
  if (level < log_level.load(std::memory_order_relaxed)) return;
  if (LogSink sink = log_sink.load(std::memory_order_acquire)) {
    sink(level, text);
  } else {
    WriteToStderr(text);
  }
}

void SetLogLevel(Level level) { log_level.store(level, std::memory_order_relaxed); }

void SetLogSink(LogSink sink) { log_sink.store(sink, std::memory_order_release); }

}  // namespace hvd
