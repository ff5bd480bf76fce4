#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <vector>

#include "group.h"

namespace hvd {

// How long somebody waits: seconds, or nothing for ever.
using Patience = std::optional<double>;
inline constexpr Patience kForEver;
// Of the argument timeout_s. Raises TypeError or ValueError.
Patience PatienceOf(nanobind::handle timeout_s);

// The Group as Python has it. Keeps what is on its way but no longer wanted by anybody: the core works in it.
class GroupFace {
 public:
  explicit GroupFace(std::unique_ptr<Group> group);

  Group& group() const { return *group_; }
  // Raises in a process that was forked from the one that connected it.
  void Check() const;
  // Waits without the GIL, and lets Ctrl-C through. Raises CollectiveTimeout.
  void Await(Handle& handle, const Patience& patience) const;
  void Keep(std::shared_ptr<Handle> handle, nanobind::object input, nanobind::object output);
  void Close();

 private:
  struct Kept {
    std::shared_ptr<Handle> handle;
    nanobind::object input, output;
  };

  bool AwaitUntil(Handle& handle, Clock::time_point deadline) const;

  const std::unique_ptr<Group> group_;
  const int forks_before_;
  std::vector<Kept> abandoned_;
};

// Counts the forks of this process from now on.
void WatchForks();

}  // namespace hvd
