#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "scheduler/trace_json.h"
#include "transport/fd.h"

namespace hvd {

// The notes of one rank since its last ones.
struct TraceChunk {
  int rank = 0;
  std::string place;     // "node-7, pid 12"
  int64_t ahead_ns = 0;  // of rank 0's clock
  std::string notes;     // Trace::Take
};

// Writes a timeline. Its thread makes text of the notes and waits for the disk, at the lowest priority;
// nobody else ever does. Once the file cannot be written (disk full) there is one warning, and the rest is
// dropped.
class TraceFile {
 public:
  // `own`: the notes of this rank, which `mine` says the rank and place of; taken from time to time. kInvalid
  // if the path cannot be written.
  static Result<std::unique_ptr<TraceFile>> Open(const std::string& path, Trace* own, TraceChunk mine);
  // Whether Open would succeed; makes an empty file.
  static Status Check(const std::string& path);
  ~TraceFile() { Close(); }
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Any thread. Never waits.
  void Add(TraceChunk chunk) EXCLUDES(mutex_);
  // Writes what is there, ends the array and the thread. Idempotent; of one thread at a time.
  void Close() EXCLUDES(mutex_);
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  TraceFile(std::string path, UniqueFd fd, Trace* own, TraceChunk mine);
  void Run() EXCLUDES(mutex_);
  void WriteNotes() EXCLUDES(mutex_);
  void Write(const std::string& text);

  const std::string path_;
  Trace* const own_;
  const TraceChunk mine_;
  std::atomic<bool> failed_{false};
  // Of the thread; after its end, of who closes.
  UniqueFd fd_;
  TraceJson json_;

  Mutex mutex_;
  CondVar changed_;
  std::vector<TraceChunk> chunks_ GUARDED_BY(mutex_);
  bool close_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hvd
