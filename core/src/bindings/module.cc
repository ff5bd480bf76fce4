// hvd_core._native: converts arguments and results, releases the GIL, turns a Status into an exception.
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <limits>
#include <optional>

#include "base/log.h"
#include "bindings/data.h"
#include "bindings/plan.h"
#include "collectives/reduce.h"
#include "group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hvd {
namespace {

using In = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::c_contig, nb::device::cpu>;

// How often the main thread looks for a signal (Ctrl-C) while it waits. No other thread gets any.
constexpr auto kSignalCheckEvery = std::chrono::milliseconds(100);

bool IsMainThread() { return ::gettid() == ::getpid(); }

bool IsInterpreterEnding() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Without the GIL while it lives. Before Python 3.14 a (daemon) thread that asks for the GIL of an
// interpreter that is ending is unwound, which ends the process with an error; it stays here instead.
class Unlocked {
 public:
  Unlocked() : ends_interpreter_(IsInterpreterEnding()), state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    while (IsInterpreterEnding() && !ends_interpreter_) ::pause();
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {  // it has begun to end just now
      for (;;) ::pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  const bool ends_interpreter_;  // this is the thread that ends it: no other holds the GIL then
  PyThreadState* const state_;
};

const char* ExceptionName(Code code) {
  switch (code) {
    case Code::kMismatch:
      return "MismatchError";
    case Code::kPeerLost:
      return "PeerLost";
    case Code::kTimeout:
      return "CollectiveTimeout";
    case Code::kAborted:
      return "Aborted";
    case Code::kShutdown:
      return "GroupClosed";
    case Code::kInvalid:
    case Code::kOk:
      break;
  }
  return "InvalidArgument";
}

[[noreturn]] void Raise(const Status& status) {
  const nb::object type = nb::module_::import_("hvd_core.errors").attr(ExceptionName(status.code()));
  PyErr_SetString(type.ptr(), std::string(status.text()).c_str());
  throw nb::python_error();
}

void RaiseIfError(const Status& status) {
  if (!status.ok()) Raise(status);
}

template <class T>
T ValueOrRaise(Result<T> result) {
  if (!result.ok()) Raise(result.status());
  return std::move(result).value();
}

struct DTypeRow {
  DType dtype;
  nb::dlpack::dtype_code code;
};
constexpr DTypeRow kDTypes[] = {
    {DType::kBool, nb::dlpack::dtype_code::Bool},       {DType::kUInt8, nb::dlpack::dtype_code::UInt},
    {DType::kInt8, nb::dlpack::dtype_code::Int},        {DType::kUInt16, nb::dlpack::dtype_code::UInt},
    {DType::kInt16, nb::dlpack::dtype_code::Int},       {DType::kUInt32, nb::dlpack::dtype_code::UInt},
    {DType::kInt32, nb::dlpack::dtype_code::Int},       {DType::kUInt64, nb::dlpack::dtype_code::UInt},
    {DType::kInt64, nb::dlpack::dtype_code::Int},       {DType::kFloat16, nb::dlpack::dtype_code::Float},
    {DType::kBFloat16, nb::dlpack::dtype_code::Bfloat}, {DType::kFloat32, nb::dlpack::dtype_code::Float},
    {DType::kFloat64, nb::dlpack::dtype_code::Float},
};

std::optional<DType> FromDLPack(nb::dlpack::dtype dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (dtype.code == static_cast<uint8_t>(row.code) && dtype.bits == ItemSize(row.dtype) * 8 &&
        dtype.lanes == 1) {
      return row.dtype;
    }
  }
  return std::nullopt;
}

nb::dlpack::dtype ToDLPack(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype)
      return {static_cast<uint8_t>(row.code), static_cast<uint8_t>(ItemSize(dtype) * 8), 1};
  }
  return nb::dtype<uint8_t>();
}

// An array of the caller as it is: what would need a copy or another device is refused, never converted.
template <class Array>
Array View(nb::handle object, const std::string& name, const char* what) {
  Array array;
  if (!nb::try_cast(object, array, false)) {
    PyErr_Clear();
    Raise(Status(
        Code::kInvalid,
        name + ": " + what + " must be a contiguous " + (std::is_same_v<Array, Out> ? "writable " : "") +
            "array in CPU memory (buffer or DLPack), not " +
            nb::cast<std::string>(nb::str(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())))))));
  }
  return array;
}

template <class Array>
Member MakeMember(const std::string& name, const Array& array) {
  const auto dtype = FromDLPack(array.dtype());
  if (!dtype) Raise(Status(Code::kInvalid, name + ": this dtype cannot be sent"));
  Member member{name, *dtype, {}, {}};
  for (size_t d = 0; d < array.ndim(); ++d) member.shape.push_back(static_cast<int64_t>(array.shape(d)));
  return member;
}

// tensors: (name, input, output) each; the output is None in an allgather, the input itself for in place.
std::shared_ptr<Handle> Submit(Group& group, int op, const std::string& name, const nb::list& tensors,
                               int reduce, double prescale, double postscale, int root) {
  Request request{static_cast<Op>(op), name, static_cast<ReduceOp>(reduce), prescale, postscale, root, {}};
  std::vector<Buffer> buffers;
  for (const nb::handle item : tensors) {
    const auto tensor = nb::cast<nb::tuple>(item);
    const auto member_name = nb::cast<std::string>(tensor[0]);
    const nb::object input = tensor[1], output = tensor[2];
    if (output.is(input)) {
      const auto both = View<Out>(input, member_name, "the array");
      auto* data = static_cast<std::byte*>(both.data());
      request.members.push_back(MakeMember(member_name, both));
      buffers.push_back({data, data});
      continue;
    }
    const auto in = View<In>(input, member_name, "the input");
    request.members.push_back(MakeMember(member_name, in));
    Buffer buffer{static_cast<const std::byte*>(in.data()), nullptr};
    if (!output.is_none()) {
      const auto out = View<Out>(output, member_name, "the output");
      if (out.dtype() != in.dtype() || out.nbytes() != in.nbytes()) {
        Raise(Status(Code::kInvalid, member_name + ": input and output differ in dtype or size"));
      }
      buffer.out = static_cast<std::byte*>(out.data());
    }
    buffers.push_back(buffer);
  }
  return ValueOrRaise(group.Submit(std::move(request), std::move(buffers)));
}

bool Wait(const Handle& handle, std::optional<double> timeout_s) {
  const auto deadline = Clock::now() + Seconds(timeout_s.value_or(std::numeric_limits<double>::infinity()));
  for (;;) {
    bool done;
    {
      const Unlocked unlocked;
      done = handle.Wait(IsMainThread() ? std::min(deadline, Clock::now() + kSignalCheckEvery) : deadline);
    }
    if (done) {
      RaiseIfError(handle.status());
      return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= deadline) return false;
  }
}

// numpy has no bfloat16: such a result is an object with __dlpack__ instead.
nb::object Gather(const Handle& handle, size_t index) {
  if (index >= handle.gathered().size()) Raise(Status(Code::kInvalid, "this collective has no such result"));
  const Gathered& gathered = handle.gathered()[index];
  std::vector<size_t> shape(gathered.shape.begin(), gathered.shape.end());
  auto* kept = new std::shared_ptr<std::byte[]>(gathered.data);
  const nb::capsule owner(kept,
                          [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte[]>*>(p); });
  const auto dtype = ToDLPack(gathered.dtype);
  void* data = gathered.data.get();
  if (gathered.dtype == DType::kBFloat16)
    return nb::cast(nb::ndarray<>(data, shape.size(), shape.data(), owner, nullptr, dtype));
  return nb::cast(nb::ndarray<nb::numpy>(data, shape.size(), shape.data(), owner, nullptr, dtype));
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> Empty(Group& group, size_t nbytes) {
  std::shared_ptr<Segment> segment = ValueOrRaise(group.Empty(nbytes));
  void* data = segment->data();
  auto* kept = new std::shared_ptr<Segment>(std::move(segment));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Segment>*>(p); });
  return {data, {nbytes}, owner};
}

std::unique_ptr<Group> Connect(Listener* listener, const std::vector<std::string>& endpoints, int rank,
                               const nb::bytes& token, uint64_t epoch, size_t fusion_bytes,
                               size_t chunk_bytes, bool peer_reads, double connect_timeout_s,
                               double peer_timeout_s, double stall_warn_s, double stall_shutdown_s,
                               int ring_streams, const std::string& wire_dtype) {
  const Credentials me{rank, static_cast<int>(endpoints.size()), std::string(token.c_str(), token.size()),
                       epoch};
  std::optional<Unlocked> unlocked(std::in_place);
  bool interrupted = false;
  const auto ask = [&] {
    unlocked.reset();
    interrupted = PyErr_CheckSignals() != 0;
    unlocked.emplace();
    return interrupted;
  };
  const GroupOptions options{fusion_bytes,     chunk_bytes,
                             peer_reads,       connect_timeout_s,
                             peer_timeout_s,   stall_warn_s,
                             stall_shutdown_s, ring_streams,
                             wire_dtype,       IsMainThread() ? ask : std::function<bool()>()};
  Result<std::unique_ptr<Group>> group = Group::Connect(listener, endpoints, me, options);
  unlocked.reset();
  if (interrupted || PyErr_CheckSignals() != 0) throw nb::python_error();  // Ctrl-C came meanwhile
  return ValueOrRaise(std::move(group));
}

nb::dict Stats(const Group& group) {
  const Counters& counters = group.counters();
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

  nb::class_<Handle>(m, "Handle")
      .def("done", &Handle::done)
      .def("wait", &Wait, "timeout_s"_a.none())
      .def("gathered", &Gather, "index"_a);

  nb::class_<Group>(m, "Group")
      .def_static("connect", &Connect, "listener"_a.none(), "endpoints"_a, "rank"_a, "token"_a, "epoch"_a,
                  "fusion_bytes"_a, "chunk_bytes"_a, "peer_reads"_a, "connect_timeout_s"_a,
                  "peer_timeout_s"_a, "stall_warn_s"_a, "stall_shutdown_s"_a, "ring_streams"_a,
                  "wire_dtype"_a)
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def_prop_ro("local_rank", [](const Group& group) { return group.topology().local_rank; })
      .def_prop_ro("local_size", [](const Group& group) { return group.topology().local_size(); })
      .def_prop_ro("cross_rank", [](const Group& group) { return group.topology().host; })
      .def_prop_ro("cross_size", [](const Group& group) { return group.topology().hosts(); })
      .def("submit", &Submit, "op"_a, "name"_a, "tensors"_a, "reduce"_a, "prescale"_a, "postscale"_a,
           "root"_a)
      .def("empty", &Empty, "nbytes"_a)
      .def("abort", &Group::Abort, "reason"_a)
      .def("close", &Group::Close, nb::call_guard<Unlocked>())
      .def("check", [](const Group& group) { RaiseIfError(group.status()); })
      .def("fileno", &Group::death_fd)
      .def("stats", &Stats);

  m.def("kernels", [] { return Name(BestKernels()); });
  m.def("use_kernels", [](const std::string& name) { RaiseIfError(UseKernels(name)); }, "name"_a);
  BindPlan(m, {&RaiseIfError, [](const std::function<void()>& work) {
                 const Unlocked unlocked;
                 work();
               }});
  BindData(m);
}

}  // namespace hvd
