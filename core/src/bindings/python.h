// What every binding does alike: Statuses become exceptions, the GIL is let go of, signals get through.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace hvd {

// How often the main thread looks for a signal (Ctrl-C) while it waits. No other thread gets any.
inline constexpr auto kSignalCheckEvery = std::chrono::milliseconds(100);

bool IsMainThread();

// Without the GIL while it lives. Before Python 3.14 a (daemon) thread that asks for the GIL of an
// interpreter that is ending is unwound, which ends the process with an error; it stays here instead.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  // Takes the GIL for a moment, on the main thread: true if a signal handler has raised.
  bool HasSignalRaised();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  const bool ends_interpreter_;  // this is the thread that ends it: no other holds the GIL then
  PyThreadState* const state_;
};

// `status` is not ok.
[[noreturn]] void Raise(const Status& status);

inline void RaiseIfError(const Status& status) {
  if (!status.ok()) Raise(status);
}

template <class T>
T ValueOrRaise(Result<T> result) {
  if (!result.ok()) Raise(result.status());
  return std::move(result).value();
}

// Valid as long as `text` is.
std::string_view Text(nanobind::handle text);

}  // namespace hvd
