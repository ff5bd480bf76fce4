#pragma once

#include <nanobind/nanobind.h>

namespace hvd {

void BindData(nanobind::module_& m);

}  // namespace hvd
