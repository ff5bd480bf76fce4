#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "scheduler/request.h"
#include "transport/ring_links.h"

namespace hvd {

// What an allgather or an alltoall returns: memory of its own, since nobody knows the size before all ranks
// have announced.
struct Gathered {
  std::shared_ptr<std::byte[]> data;
  DType dtype = DType::kUInt8;
  std::vector<int64_t> shape;
  std::vector<int64_t> rows;  // how many came from each rank
};

// What a plan request gives: by local rank, the segments that the ranks of this host named. Empty unless all
// of them named one.
struct Meeting {
  std::vector<std::shared_ptr<Segment>> segments;
  // The data links of plans; null on all ranks while another plan has them on some. The last copy gives them
  // back.
  std::shared_ptr<RingLinks> links;
  DType wire_dtype = DType::kFloat32;
  bool has_cpu_for_each = false;
  Clock::duration stall_warn{}, stall_shutdown{};
};

// A submitted collective. Completed once by the engine; waited for by any number of threads.
class Handle {
 public:
  explicit Handle(std::shared_ptr<const Request> request) : request_(std::move(request)) {}

  const Request& request() const { return *request_; }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Of a done handle.
  const Status& status() const { return status_; }
  const std::vector<Gathered>& gathered() const { return results_ ? results_->gathered : kNothing.gathered; }
  // Once. Links go back when nobody holds them, and the engine may hold this handle for a moment longer.
  Meeting TakeMeeting() { return results_ ? std::exchange(results_->meeting, {}) : Meeting(); }

  // Sleeps until the handle is done, the deadline has passed, or Poke() was called after `pokes` was read.
  uint32_t pokes() const { return pokes_.load(std::memory_order_acquire); }
  bool Wait(Clock::time_point deadline, uint32_t pokes) EXCLUDES(mutex_) {
    if (done()) return true;
    MutexLock lock(mutex_);
    // seq_cst pairs with Complete(): either we see done_ or it sees us.
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    while (!done_.load(std::memory_order_seq_cst) && pokes_.load(std::memory_order_relaxed) == pokes) {
      if (!changed_.WaitUntil(mutex_, deadline)) break;
    }
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    return done();
  }
  void Poke() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    pokes_.fetch_add(1, std::memory_order_release);
    changed_.SignalAll();
  }

  // The engine's side: results first, then Complete().
  std::vector<Gathered>& results() { return Made().gathered; }
  void SetMeeting(Meeting meeting) { Made().meeting = std::move(meeting); }
  // Lives as long as this handle, so at least until the collective is done. Before it is submitted.
  void Keep(std::shared_ptr<Segment> segment) { Made().kept = std::move(segment); }
  void Complete(Status status) EXCLUDES(mutex_) {
    if (done()) return;
    status_ = std::move(status);
    done_.store(true, std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_seq_cst) == 0) return;
    MutexLock lock(mutex_);
    changed_.SignalAll();
  }

 private:
  // What few collectives have: one handle is made for every tensor that is submitted.
  struct Results {
    std::vector<Gathered> gathered;
    Meeting meeting;
    std::shared_ptr<Segment> kept;
  };
  static const Results kNothing;
  Results& Made() {
    if (results_ == nullptr) results_ = std::make_unique<Results>();
    return *results_;
  }

  const std::shared_ptr<const Request> request_;
  std::atomic<bool> done_{false};
  std::atomic<uint32_t> waiters_{0};
  std::atomic<uint32_t> pokes_{0};
  Status status_;                     // written before done_, read after
  std::unique_ptr<Results> results_;  // as well
  Mutex mutex_;
  CondVar changed_;
};

inline const Handle::Results Handle::kNothing{};

}  // namespace hvd
