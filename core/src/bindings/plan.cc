// Group.plan: converts; the work is in scheduler/plan.h, without the GIL where it may wait.
#include "bindings/plan.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <memory>
#include <tuple>

#include "group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hvd {
namespace {

Python python;

// How often the main thread looks for a signal (Ctrl-C) while it waits. No other thread gets any.
constexpr auto kSignalCheckEvery = std::chrono::milliseconds(100);

bool IsMainThread() { return ::gettid() == ::getpid(); }

// (name, dtype as numpy spells it, shape)
using Tensor = std::tuple<std::string, std::string, std::vector<int64_t>>;

Member MakeMember(const Tensor& tensor) {
  const auto& [name, dtype_name, shape] = tensor;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dtype_name == Name(dtype)) return {name, dtype, shape, {}};
  }
  python.raise_if_error(Status(Code::kInvalid, name + ": " + dtype_name + " cannot be sent"));
  return {};
}

// Calls step(deadline) without the GIL until it says that it is done, and looks for Ctrl-C in between.
template <class Step>
void WaitFor(Step step) {
  for (;;) {
    bool done = false;
    python.without_gil([&] {
      const auto now = Clock::now();
      done = step(IsMainThread() ? now + kSignalCheckEvery : now + std::chrono::hours(1));
    });
    if (done) return;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// What this rank stages for the others of its host, and their words.
size_t SharedNbytes(nb::object self, const std::vector<Tensor>& tensors, size_t first_nbytes, size_t nbytes) {
  PlanSpec spec;
  for (const Tensor& tensor : tensors) spec.members.push_back(MakeMember(tensor));
  spec.limits = {first_nbytes, nbytes};
  return Plan::WordsNbytes(spec, python.group_of(self).topology().local_size());
}

std::shared_ptr<Plan> Make(nb::object self, const std::string& name, const std::vector<Tensor>& tensors,
                           int reduce, double prescale, double postscale, size_t first_nbytes,
                           size_t nbytes) {
  Group& group = python.group_of(self);
  PlanSpec spec;
  spec.name = name;
  for (const Tensor& tensor : tensors) spec.members.push_back(MakeMember(tensor));
  spec.reduce = static_cast<ReduceOp>(reduce);
  spec.scale = {prescale, postscale, spec.reduce == ReduceOp::kAverage ? group.size() : 1};
  spec.limits = {first_nbytes, nbytes};
  auto offer = group.OfferPlan(std::move(spec));
  python.raise_if_error(offer.status());
  Handle& handle = *offer.value().handle;
  WaitFor([&](Clock::time_point deadline) { return group.Wait(handle, deadline, {}); });
  python.raise_if_error(handle.status());
  return group.JoinPlan(offer.value());
}

// The members that need memory; empty when the step is done.
std::vector<uint32_t> End(Plan& plan, uint32_t flags) {
  Result<Plan::Progress> progress = Plan::Progress::kPending;
  WaitFor([&](Clock::time_point deadline) {
    progress = plan.End(flags, deadline);
    return !progress.ok() || progress.value() != Plan::Progress::kPending;
  });
  python.raise_if_error(progress.status());
  return plan.needs();
}

nb::dict Times(const Plan& plan) {
  const Plan::Times& times = plan.times();
  nb::dict result;
  result["ready_s"] = static_cast<double>(times.ready_ns) * 1e-9;
  result["end_s"] = static_cast<double>(times.end_ns) * 1e-9;
  result["wait_s"] = static_cast<double>(times.wait_ns) * 1e-9;
  return result;
}

}  // namespace

void BindPlan(nb::module_& m, const Python& lent) {
  python = lent;
  nb::class_<Plan>(m, "Plan")
      .def("begin", [](Plan& plan) { python.raise_if_error(plan.Begin()); })
      .def(
          "ready",
          [](Plan& plan, uint32_t member, uintptr_t address) {
            const Status status = plan.Ready(member, reinterpret_cast<void*>(address));
            if (!status.ok()) python.raise_if_error(status);
          },
          "member"_a, "address"_a)
      .def(
          "decline", [](Plan& plan, uint32_t member) { python.raise_if_error(plan.Decline(member)); },
          "member"_a)
      .def("end", &End, "flags"_a)
      .def(
          "supply",
          [](Plan& plan, uint32_t member, uintptr_t address) {
            plan.Supply(member, reinterpret_cast<void*>(address));
          },
          "member"_a, "address"_a)
      .def("leave", &Plan::Leave)
      .def_prop_ro("is_open", &Plan::is_open)
      .def_prop_ro("batches", &Plan::batches)
      .def_prop_ro("declined", [](const Plan& plan) { return plan.outcome().declined; })
      .def_prop_ro("flags_of_any", [](const Plan& plan) { return plan.outcome().flags_of_any; })
      .def_prop_ro("flags_of_all", [](const Plan& plan) { return plan.outcome().flags_of_all; })
      .def("times", &Times);
  m.def("plan_nbytes", &SharedNbytes, "group"_a, "tensors"_a, "first_nbytes"_a, "nbytes"_a);
  // The plan calls into the Group.
  m.def("make_plan", &Make, "group"_a, "name"_a, "tensors"_a, "reduce"_a, "prescale"_a, "postscale"_a,
        "first_nbytes"_a, "nbytes"_a, nb::keep_alive<0, 1>());
}

}  // namespace hvd
