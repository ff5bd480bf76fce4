#pragma once

#include <nanobind/nanobind.h>

#include <functional>

#include "base/status.h"

namespace hvd {

class Group;

// What all bindings do alike; module.cc has it.
struct Python {
  void (*raise_if_error)(const Status& status);
  Group& (*group_of)(nanobind::handle);
  void (*without_gil)(const std::function<void()>& work);
};

// Plan, and make_plan(group, ...). After the class Group.
void BindPlan(nanobind::module_& m, const Python& python);

}  // namespace hvd
