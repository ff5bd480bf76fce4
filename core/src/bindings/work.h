#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "scheduler/handle.h"

namespace hvd {

// What a submitted collective belongs to and works in. A reference to each; input and output may be the same.
struct Work {
  nanobind::object owner;   // the Group of hvd_core.group; lives at least as long
  nanobind::object face;    // its GroupFace
  nanobind::object input;   // let go when it is done
  nanobind::object output;  // the result, unless it gathers
  std::shared_ptr<Handle> handle;
  bool gathers;  // the result is memory of its own
};

// As Python has it: an object of the class Handle. One that was made without a handle gets it before anybody
// sees it.
nanobind::object MakeHandle(Work work);
void SetHandle(nanobind::handle made, std::shared_ptr<Handle> handle);

// The result of a done handle: of an alltoall with the rows that came from each rank. Raises what it failed
// with.
nanobind::object ResultOf(const Handle& handle, nanobind::handle output, bool gathers);

void BindHandle(nanobind::module_& m);

}  // namespace hvd
