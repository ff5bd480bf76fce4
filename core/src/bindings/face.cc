#include "bindings/face.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <utility>

#include "bindings/python.h"

namespace nb = nanobind;

namespace hvd {
namespace {

// Counted in the child of every fork: a Group belongs to the process that connected it.
std::atomic<int> forks{0};

}  // namespace

void WatchForks() {
  ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
}

GroupFace::GroupFace(std::unique_ptr<Group> group) : group_(std::move(group)), forks_before_(forks.load()) {}

void GroupFace::Check() const {
  if (forks.load(std::memory_order_relaxed) != forks_before_)
    Raise(Status(Code::kInvalid,
                 "this Group belongs to the process that this one was forked from; connect a new one"));
}

// False at the deadline.
bool GroupFace::AwaitUntil(Handle& handle, Clock::time_point deadline) const {
  bool raised = false;
  const bool is_main = IsMainThread();
  for (;;) {
    bool done;
    {
      Unlocked unlocked;
      const Engine::Interrupt look = [&] { return raised = unlocked.HasSignalRaised(); };
      done = group_->Wait(handle, is_main ? std::min(deadline, Clock::now() + kSignalCheckEvery) : deadline,
                          is_main && deadline == Clock::time_point::max() ? look : Engine::Interrupt());
    }
    if (raised) throw nb::python_error();
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= deadline) return false;
  }
}

void GroupFace::Await(Handle& handle, nb::handle timeout_s) const {
  Check();
  if (handle.done()) return;
  if (timeout_s.is_none()) {
    AwaitUntil(handle, Clock::time_point::max());
    return;
  }
  const auto seconds = nb::cast<double>(timeout_s);
  if (AwaitUntil(handle, Clock::now() + Seconds(seconds))) return;
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  Raise(Status(Code::kTimeout, "'" + handle.request().name + "' is not done after " + text + " s"));
}

void GroupFace::Keep(std::shared_ptr<Handle> handle, nb::object input, nb::object output) {
  const auto first_done = std::partition(abandoned_.begin(), abandoned_.end(),
                                         [](const Kept& kept) { return !kept.handle->done(); });
  // Their end may run code that comes back here.
  const std::vector<Kept> done(std::make_move_iterator(first_done),
                               std::make_move_iterator(abandoned_.end()));
  abandoned_.erase(first_done, abandoned_.end());
  abandoned_.push_back({std::move(handle), std::move(input), std::move(output)});
}

void GroupFace::Close() {
  {
    const Unlocked unlocked;
    group_->Close();
  }
  const auto done = std::exchange(abandoned_, {});  // their end may run code that comes back here
}

}  // namespace hvd
