#include "bindings/face.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

#include "bindings/python.h"

namespace nb = nanobind;

namespace hvd {
namespace {

// Counted in the child of every fork: a Group belongs to the process that connected it.
std::atomic<int> forks{0};

// In seconds: what is longer is as good as for ever, and would not fit the clock.
constexpr double kLongest = 1e9;

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

Patience PatienceOf(nb::handle timeout_s) {
  if (timeout_s.is_none()) return kForEver;
  const double seconds = PyFloat_AsDouble(timeout_s.ptr());
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (std::isnan(seconds)) {
    PyErr_SetString(PyExc_ValueError, "timeout_s is not a number of seconds: nan");
    throw nb::python_error();
  }
  return seconds < kLongest ? Patience(seconds) : kForEver;
}

void GroupFace::Await(Handle& handle, const Patience& patience) const {
  Check();
  if (handle.done()) return;
  if (group_->IsWaiting())
    Raise(Status(Code::kInvalid, "a signal handler cannot wait for '" + handle.request().name +
                                     "': this thread is in a collective already"));
  if (!patience) {
    AwaitUntil(handle, Clock::time_point::max());
    return;
  }
  if (AwaitUntil(handle, Clock::now() + Seconds(*patience))) return;
  char text[32];
  std::snprintf(text, sizeof text, "%g", *patience);
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
