// hvd_core._native: converts arguments and results, releases the GIL, turns a Status into an exception.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/calls.h"
#include "bindings/data.h"
#include "bindings/face.h"
#include "bindings/plan.h"
#include "bindings/python.h"
#include "bindings/work.h"
#include "collectives/reduce.h"
#include "group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hvd {
namespace {

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> Empty(GroupFace& face, size_t nbytes) {
  face.Check();
  std::shared_ptr<Segment> segment = ValueOrRaise(face.group().Empty(nbytes));
  void* data = segment->data();
  auto* kept = new std::shared_ptr<Segment>(std::move(segment));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Segment>*>(p); });
  return {data, {nbytes}, owner};
}

std::unique_ptr<GroupFace> Connect(Listener* listener, const std::vector<std::string>& endpoints, int rank,
                                   const nb::bytes& token, uint64_t epoch, size_t fusion_bytes,
                                   size_t chunk_bytes, double connect_timeout_s, double peer_timeout_s,
                                   double stall_warn_s, double stall_shutdown_s, int ring_streams,
                                   const std::string& wire_dtype, const std::string& timeline,
                                   bool timeline_mark_cycles, double cpu_quota, const std::string& note) {
  const Credentials me{rank, static_cast<int>(endpoints.size()), std::string(token.c_str(), token.size()),
                       epoch};
  std::optional<Unlocked> unlocked(std::in_place);
  bool raised = false;
  const auto ask = [&] { return raised = unlocked->HasSignalRaised(); };
  GroupOptions options{fusion_bytes,   chunk_bytes,  connect_timeout_s,
                       peer_timeout_s, stall_warn_s, stall_shutdown_s,
                       ring_streams,   wire_dtype,   IsMainThread() ? ask : std::function<bool()>()};
  options.timeline = timeline;
  options.timeline_mark_cycles = timeline_mark_cycles;
  options.cpu_quota = cpu_quota;
  options.note = note;
  Result<std::unique_ptr<Group>> group = Group::Connect(listener, endpoints, me, options);
  unlocked.reset();
  if (raised || PyErr_CheckSignals() != 0) throw nb::python_error();  // Ctrl-C came meanwhile
  return std::make_unique<GroupFace>(ValueOrRaise(std::move(group)));
}

nb::dict Stats(const GroupFace& face) {
  const Counters& counters = face.group().counters();
  nb::dict stats;
  stats["collectives"] = counters.collectives.load();
  stats["fused_batches"] = counters.fused_batches.load();
  stats["nbytes"] = counters.nbytes.load();
  stats["work_s"] = static_cast<double>(counters.work_ns.load()) * 1e-9;
  return stats;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The C++ core of hvd; use hvd_core.group.";
  // A process that ends with a Group open has lost nothing; its user need not read about it.
  nb::set_leak_warnings(false);

  nb::class_<Listener>(m, "Listener")
      .def_static(
          "bind",
          [](const std::string& host_id, const std::string& interface) {
            return ValueOrRaise(Listener::Bind(host_id, interface));
          },
          "host_id"_a, "interface"_a)
      .def_prop_ro("endpoint", [](const Listener& listener) { return listener.endpoint().ToString(); })
      .def_prop_ro("dropped", &Listener::dropped);

  BindHandle(m);
  WatchForks();
  static PyType_Slot group_slots[] = {{Py_tp_methods, group_calls}, {0, nullptr}};
  nb::class_<GroupFace>(m, "Group", nb::type_slots(group_slots))
      .def_static("connect", &Connect, "listener"_a.none(), "endpoints"_a, "rank"_a, "token"_a, "epoch"_a,
                  "fusion_bytes"_a, "chunk_bytes"_a, "connect_timeout_s"_a, "peer_timeout_s"_a,
                  "stall_warn_s"_a, "stall_shutdown_s"_a, "ring_streams"_a, "wire_dtype"_a, "timeline"_a,
                  "timeline_mark_cycles"_a, "cpu_quota"_a, "note"_a)
      .def_prop_ro("rank", [](const GroupFace& face) { return face.group().rank(); })
      .def_prop_ro("size", [](const GroupFace& face) { return face.group().size(); })
      .def_prop_ro("local_rank", [](const GroupFace& face) { return face.group().topology().local_rank; })
      .def_prop_ro("local_size", [](const GroupFace& face) { return face.group().topology().local_size(); })
      .def_prop_ro("cross_rank", [](const GroupFace& face) { return face.group().topology().host; })
      .def_prop_ro("cross_size", [](const GroupFace& face) { return face.group().topology().hosts(); })
      .def("empty", &Empty, "nbytes"_a)
      .def(
          "abort",
          [](GroupFace& face, const std::string& reason) {
            face.Check();
            face.group().Abort(reason);
          },
          "reason"_a)
      .def(
          "begin_phase",
          [](GroupFace& face, const std::string& name, double timeout_s) {
            RaiseIfError(face.group().BeginPhase(name, timeout_s));
          },
          "name"_a, "timeout_s"_a)
      .def("end_phase", [](GroupFace& face) { face.group().EndPhase(); })
      .def(
          "start_timeline",
          [](GroupFace& face, const std::string& path, bool mark_cycles) {
            RaiseIfError(face.group().StartTimeline(path, mark_cycles));
          },
          "path"_a, "mark_cycles"_a)
      .def("stop_timeline",
           [](GroupFace& face) {
             face.Check();
             const Unlocked unlocked;
             face.group().StopTimeline();
           })
      .def("close", &GroupFace::Close)
      .def("check",
           [](const GroupFace& face) {
             face.Check();
             RaiseIfError(face.group().status());
           })
      .def("fileno", [](const GroupFace& face) { return face.group().death_fd(); })
      .def("stats", &Stats);

  m.def("kernels", [] { return Name(BestKernels()); });
  m.def("use_kernels", [](const std::string& name) { RaiseIfError(UseKernels(name)); }, "name"_a);
  BindPlan(m, {&RaiseIfError, [](nb::handle face) -> Group& { return nb::cast<GroupFace&>(face).group(); },
               [](const std::function<void()>& work) {
                 const Unlocked unlocked;
                 work();
               }});
  BindData(m);
}

}  // namespace hvd
