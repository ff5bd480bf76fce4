#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "scheduler/request.h"
#include "transport/peer_memory.h"

namespace hvd {

// What an allgather returns: memory of its own, since nobody knows the size before all ranks have announced.
struct Gathered {
  std::shared_ptr<std::byte[]> data;
  DType dtype = DType::kUInt8;
  std::vector<int64_t> shape;
};

// What a plan request gives: by local rank, the segments that the ranks of this host named. Empty unless all
// of them named one.
struct Meeting {
  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<uint64_t> offsets;
  // Copies from the memory of a local rank; null if the ranks may not read each other's.
  std::function<Status(int rank, std::span<const PeerMemory::Copy>)> read;
  bool has_cpu_for_each = false;
  Clock::duration stall_warn{}, stall_shutdown{};
};

// A submitted collective. Completed once by the scheduler; waited for by any number of threads.
class Handle {
 public:
  bool done() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return done_;
  }
  // False if it is not done at the deadline.
  bool Wait(Clock::time_point deadline) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!done_) {
      if (!completed_.WaitUntil(mutex_, deadline) && !done_) return false;
    }
    return true;
  }
  // Of a done handle.
  Status status() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return status_;
  }
  const std::vector<Gathered>& gathered() const { return gathered_; }
  const Meeting& meeting() const { return meeting_; }

  // The scheduler's side: results first, then Complete().
  std::vector<Gathered>& results() { return gathered_; }
  void SetMeeting(Meeting meeting) { meeting_ = std::move(meeting); }
  void Complete(Status status) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (done_) return;
    status_ = std::move(status);
    done_ = true;
    completed_.SignalAll();
  }

 private:
  mutable Mutex mutex_;
  mutable CondVar completed_;
  bool done_ GUARDED_BY(mutex_) = false;
  Status status_ GUARDED_BY(mutex_);
  std::vector<Gathered> gathered_;  // written before done_, read after
  Meeting meeting_;                 // likewise
};

}  // namespace hvd
