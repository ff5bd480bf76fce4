// hvd_core._native: converts arguments and results, releases the GIL, turns a Status into an exception.
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
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

// numpy has 64 at most.
constexpr int kMaxDims = 64;

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
  // Takes the GIL for a moment, on the main thread: true if a signal handler has raised.
  bool HasSignalRaised() {
    PyEval_RestoreThread(state_);
    const bool raised = PyErr_CheckSignals() != 0;
    PyEval_SaveThread();
    return raised;
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

// Valid as long as `name` is.
std::string_view Text(const nb::str& name) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(size)};
}

// -- arrays of the caller ---------------------------------------------------------------------------------

// An array as it is: what would need a copy or another device is refused, never converted.
struct View {
  DType dtype = DType::kUInt8;
  std::byte* data = nullptr;
  size_t ndim = 0;
  int64_t shape[kMaxDims] = {};

  std::span<const int64_t> extents() const { return {shape, ndim}; }
  uint64_t nbytes() const {
    uint64_t count = 1;
    for (const int64_t extent : extents()) count *= static_cast<uint64_t>(extent);
    return count * ItemSize(dtype);
  }
};

[[noreturn]] void RefuseArray(nb::handle object, const std::string& name, const char* what, bool writable) {
  PyErr_Clear();
  Raise(Status(Code::kInvalid, name + ": " + what + " must be a contiguous " + (writable ? "writable " : "") +
                                   "array in CPU memory (buffer or DLPack), not " +
                                   nb::cast<std::string>(nb::str(
                                       nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())))))));
}

// The dtype of a format of one native element, as in the module struct. Long is 4 or 8 bytes.
std::optional<DType> FromFormat(const char* format, Py_ssize_t size) {
  if (format == nullptr) return DType::kUInt8;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == 0 || format[1] != 0) return std::nullopt;
  nb::dlpack::dtype_code code;
  switch (*format) {
    case '?':
      code = nb::dlpack::dtype_code::Bool;
      break;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      code = nb::dlpack::dtype_code::Int;
      break;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      code = nb::dlpack::dtype_code::UInt;
      break;
    case 'e':
    case 'f':
    case 'd':
      code = nb::dlpack::dtype_code::Float;
      break;
    default:
      return std::nullopt;
  }
  return FromDLPack({static_cast<uint8_t>(code), static_cast<uint8_t>(size * 8), 1});
}

// What most arrays are; the quickest way to their memory. False: look at it in another way.
bool FromBuffer(nb::handle object, bool writable, View* view) {
  Py_buffer buffer;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &buffer, flags) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto dtype = FromFormat(buffer.format, buffer.itemsize);
  const bool fits = dtype.has_value() && buffer.ndim <= kMaxDims;
  if (fits) {
    view->dtype = *dtype;
    view->data = static_cast<std::byte*>(buffer.buf);
    view->ndim = static_cast<size_t>(buffer.ndim);
    for (int d = 0; d < buffer.ndim; ++d) view->shape[d] = buffer.shape[d];
  }
  PyBuffer_Release(&buffer);  // who keeps the array keeps its memory
  return fits;
}

template <class Array>
View FromArray(nb::handle object, const std::string& name, const char* what) {
  constexpr bool kWritable = std::is_same_v<Array, Out>;
  // torch gives the memory of a tensor with the negative bit, and leaves the bit out.
  if (nb::hasattr(object, "is_neg") && nb::cast<bool>(object.attr("is_neg")())) {
    Raise(
        Status(Code::kInvalid, name + ": " + what + " has torch's negative bit; pass tensor.resolve_neg()"));
  }
  Array array;
  if (!nb::try_cast(object, array, false)) RefuseArray(object, name, what, kWritable);
  const auto dtype = FromDLPack(array.dtype());
  if (!dtype || array.ndim() > kMaxDims) Raise(Status(Code::kInvalid, name + ": this dtype cannot be sent"));
  View view{*dtype,
            static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data()))),
            array.ndim(),
            {}};
  for (size_t d = 0; d < array.ndim(); ++d) view.shape[d] = static_cast<int64_t>(array.shape(d));
  return view;
}

View ViewOf(nb::handle object, bool writable, std::string_view name, const char* what) {
  View view;
  if (PyObject_CheckBuffer(object.ptr()) != 0 && FromBuffer(object, writable, &view)) return view;
  return writable ? FromArray<Out>(object, std::string(name), what)
                  : FromArray<In>(object, std::string(name), what);
}

// The memory of one tensor of a collective. The output is None in an allgather, the input itself for in
// place.
View ViewOf(nb::handle input, nb::handle output, std::string_view name, Buffer* buffer) {
  if (output.is(input)) {
    const View both = ViewOf(input, true, name, "the array");
    *buffer = {both.data, both.data};
    return both;
  }
  const View in = ViewOf(input, false, name, "the input");
  *buffer = {in.data, nullptr};
  if (!output.is_none()) {
    const View out = ViewOf(output, true, name, "the output");
    if (out.dtype != in.dtype || out.nbytes() != in.nbytes())
      Raise(Status(Code::kInvalid, std::string(name) + ": input and output differ in dtype or size"));
    buffer->out = out.data;
  }
  return in;
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

// -- a Group and what is on its way in it -----------------------------------------------------------------

// Counted in the child of every fork: a Group belongs to the process that connected it.
std::atomic<int> forks{0};

// The Group as Python has it. Keeps what is on its way but no longer wanted by anybody: the core works in it.
struct GroupFace {
  explicit GroupFace(std::unique_ptr<Group> g) : group(std::move(g)) {}

  void Check() const {
    if (forks.load(std::memory_order_relaxed) != forks_before)
      Raise(Status(Code::kInvalid,
                   "this Group belongs to the process that this one was forked from; connect a new one"));
  }
  void Keep(std::shared_ptr<Handle> handle, nb::object arrays) {
    std::erase_if(abandoned, [](const auto& kept) { return kept.first->done(); });
    abandoned.emplace_back(std::move(handle), std::move(arrays));
  }

  const std::unique_ptr<Group> group;
  const int forks_before = forks.load();
  std::vector<std::pair<std::shared_ptr<Handle>, nb::object>> abandoned;
};

// A submitted collective as Python has it.
struct Work {
  Work(nb::object owner_, nb::object face_, std::shared_ptr<Handle> h, nb::object arrays_, nb::object result_,
       bool gathers_)
      : owner(std::move(owner_)),
        face(std::move(face_)),
        handle(std::move(h)),
        arrays(std::move(arrays_)),
        result(std::move(result_)),
        gathers(gathers_) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work() {
    if (!handle->done()) nb::cast<GroupFace&>(face).Keep(std::move(handle), std::move(arrays));
  }

  nb::object owner;  // the Group of hvd_core.group; lives at least as long
  nb::object face;   // its GroupFace
  std::shared_ptr<Handle> handle;
  nb::object arrays;  // what the core works in; let go when it is done
  nb::object result;
  bool gathers;
};

int TraverseWork(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Work& work = *nb::inst_ptr<Work>(self);
  Py_VISIT(work.owner.ptr());
  Py_VISIT(work.face.ptr());
  Py_VISIT(work.arrays.ptr());
  Py_VISIT(work.result.ptr());
  return 0;
}

// Without the GIL until the handle is done, the deadline has passed, or a signal handler has raised.
bool Await(Group& group, Handle& handle, Clock::time_point deadline) {
  bool raised = false;
  const bool is_main = IsMainThread();
  for (;;) {
    bool done;
    {
      Unlocked unlocked;
      const Engine::Interrupt look = [&] { return raised = unlocked.HasSignalRaised(); };
      done = group.Wait(handle, is_main ? std::min(deadline, Clock::now() + kSignalCheckEvery) : deadline,
                        is_main && deadline == Clock::time_point::max() ? look : Engine::Interrupt());
    }
    if (raised) throw nb::python_error();
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= deadline) return false;
  }
}

Clock::time_point Deadline(nb::handle timeout_s) {
  if (timeout_s.is_none()) return Clock::time_point::max();
  return Clock::now() + Seconds(nb::cast<double>(timeout_s));
}

void Await(GroupFace& face, Handle& handle, nb::handle timeout_s) {
  face.Check();
  if (!handle.done() && !Await(*face.group, handle, Deadline(timeout_s))) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", nb::cast<double>(timeout_s));
    Raise(Status(Code::kTimeout, "'" + handle.request().name + "' is not done after " + seconds + " s"));
  }
}

nb::object Wait(Work& work, nb::handle timeout_s) {
  Await(nb::cast<GroupFace&>(work.face), *work.handle, timeout_s);
  work.arrays.reset();
  RaiseIfError(work.handle->status());
  return work.gathers ? Gather(*work.handle, 0) : work.result;
}

Call MakeCall(int op, std::string_view name, const View& view, const Buffer& buffer, int reduce,
              double prescale, double postscale, int root) {
  return {static_cast<Op>(op),
          name,
          static_cast<ReduceOp>(reduce),
          prescale,
          postscale,
          root,
          view.dtype,
          view.extents(),
          {},
          buffer};
}

// Starts a collective on one tensor.
nb::object Start(nb::object self, nb::object owner, int op, std::string_view name, nb::object input,
                 nb::object output, int reduce, double prescale, double postscale, int root) {
  auto& face = nb::cast<GroupFace&>(self);
  face.Check();
  Buffer buffer;
  const View view = ViewOf(input, output, name, &buffer);
  const Call call = MakeCall(op, name, view, buffer, reduce, prescale, postscale, root);
  auto handle = ValueOrRaise(face.group->Submit(call, Then::kGoesOn));
  const bool gathers = call.op == Op::kAllgather;
  nb::object arrays =
      output.is(input) || gathers ? std::move(input) : nb::object(nb::make_tuple(input, output));
  return nb::cast(new Work(std::move(owner), std::move(self), std::move(handle), std::move(arrays),
                           std::move(output), gathers),
                  nb::rv_policy::take_ownership);
}

// Runs one, on this thread as far as possible.
nb::object Run(nb::object self, int op, std::string_view name, nb::object input, nb::object output,
               int reduce, double prescale, double postscale, int root, nb::handle timeout_s) {
  auto& face = nb::cast<GroupFace&>(self);
  face.Check();
  Buffer buffer;
  const View view = ViewOf(input, output, name, &buffer);
  const Call call = MakeCall(op, name, view, buffer, reduce, prescale, postscale, root);
  auto handle = ValueOrRaise(face.group->Submit(call, Then::kWaits));
  const bool gathers = call.op == Op::kAllgather;
  try {
    Await(face, *handle, timeout_s);
  } catch (...) {  // it goes on
    if (!handle->done()) face.Keep(handle, nb::make_tuple(input, output));
    throw;
  }
  RaiseIfError(handle->status());
  return gathers ? Gather(*handle, 0) : output;
}

// tensors: (name, input, output) each, that complete together.
nb::object StartGroup(nb::object self, nb::object owner, int op, const std::string& name,
                      const nb::list& tensors, int reduce, double prescale, double postscale, int root,
                      nb::object result) {
  auto& face = nb::cast<GroupFace&>(self);
  face.Check();
  Request request{static_cast<Op>(op), name, static_cast<ReduceOp>(reduce), prescale, postscale, root, {}};
  std::vector<Buffer> buffers;
  request.members.reserve(tensors.size());
  buffers.reserve(tensors.size());
  for (const nb::handle item : tensors) {
    const auto tensor = nb::cast<nb::tuple>(item);
    auto member = nb::cast<std::string>(tensor[0]);
    const View view = ViewOf(tensor[1], tensor[2], member, &buffers.emplace_back());
    request.members.push_back(
        {std::move(member), view.dtype, {view.extents().begin(), view.extents().end()}, {}});
  }
  auto handle = ValueOrRaise(face.group->Submit(std::move(request), std::move(buffers), Then::kGoesOn));
  return nb::cast(
      new Work(std::move(owner), std::move(self), std::move(handle), tensors, std::move(result), false),
      nb::rv_policy::take_ownership);
}

void Barrier(GroupFace& face, const std::string& name, nb::handle timeout_s) {
  face.Check();
  Request request;
  request.op = Op::kBarrier;
  request.name = name;
  auto handle = ValueOrRaise(face.group->Submit(std::move(request), {}, Then::kWaits));
  Await(face, *handle, timeout_s);
  RaiseIfError(handle->status());
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> Empty(GroupFace& face, size_t nbytes) {
  face.Check();
  std::shared_ptr<Segment> segment = ValueOrRaise(face.group->Empty(nbytes));
  void* data = segment->data();
  auto* kept = new std::shared_ptr<Segment>(std::move(segment));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<Segment>*>(p); });
  return {data, {nbytes}, owner};
}

std::unique_ptr<GroupFace> Connect(Listener* listener, const std::vector<std::string>& endpoints, int rank,
                                   const nb::bytes& token, uint64_t epoch, size_t fusion_bytes,
                                   size_t chunk_bytes, bool peer_reads, double connect_timeout_s,
                                   double peer_timeout_s, double stall_warn_s, double stall_shutdown_s,
                                   int ring_streams, const std::string& wire_dtype,
                                   const std::string& timeline, bool timeline_mark_cycles) {
  const Credentials me{rank, static_cast<int>(endpoints.size()), std::string(token.c_str(), token.size()),
                       epoch};
  std::optional<Unlocked> unlocked(std::in_place);
  bool raised = false;
  const auto ask = [&] { return raised = unlocked->HasSignalRaised(); };
  GroupOptions options{fusion_bytes,     chunk_bytes,
                       peer_reads,       connect_timeout_s,
                       peer_timeout_s,   stall_warn_s,
                       stall_shutdown_s, ring_streams,
                       wire_dtype,       IsMainThread() ? ask : std::function<bool()>()};
  options.timeline = timeline;
  options.timeline_mark_cycles = timeline_mark_cycles;
  Result<std::unique_ptr<Group>> group = Group::Connect(listener, endpoints, me, options);
  unlocked.reset();
  if (raised || PyErr_CheckSignals() != 0) throw nb::python_error();  // Ctrl-C came meanwhile
  return std::make_unique<GroupFace>(ValueOrRaise(std::move(group)));
}

nb::dict Stats(const GroupFace& face) {
  const Counters& counters = face.group->counters();
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

  static PyType_Slot work_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(TraverseWork)}, {0, nullptr}};
  nb::class_<Work>(m, "Handle", nb::type_slots(work_slots),
                   "A collective on its way. Keeps its arrays alive; they must not be touched until it is "
                   "done.")
      .def(
          "done", [](const Work& work) { return work.handle->done(); }, "True once `wait()` would not block.")
      .def("wait", &Wait, "timeout_s"_a.none() = nb::none(),
           "Waits for the result and returns it; for a grouped collective a list.\n\n"
           "Raises what went wrong between the ranks (`MismatchError`, `PeerLost`, `Aborted`, ...), or\n"
           "`CollectiveTimeout` after `timeout_s` seconds; the collective then goes on, and `wait()` may be\n"
           "called again. Ctrl-C gets through.");

  ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  nb::class_<GroupFace>(m, "Group")
      .def_static("connect", &Connect, "listener"_a.none(), "endpoints"_a, "rank"_a, "token"_a, "epoch"_a,
                  "fusion_bytes"_a, "chunk_bytes"_a, "peer_reads"_a, "connect_timeout_s"_a,
                  "peer_timeout_s"_a, "stall_warn_s"_a, "stall_shutdown_s"_a, "ring_streams"_a,
                  "wire_dtype"_a, "timeline"_a, "timeline_mark_cycles"_a)
      .def_prop_ro("rank", [](const GroupFace& face) { return face.group->rank(); })
      .def_prop_ro("size", [](const GroupFace& face) { return face.group->size(); })
      .def_prop_ro("local_rank", [](const GroupFace& face) { return face.group->topology().local_rank; })
      .def_prop_ro("local_size", [](const GroupFace& face) { return face.group->topology().local_size(); })
      .def_prop_ro("cross_rank", [](const GroupFace& face) { return face.group->topology().host; })
      .def_prop_ro("cross_size", [](const GroupFace& face) { return face.group->topology().hosts(); })
      .def(
          "run",
          [](nb::object self, int op, nb::str name, nb::object input, nb::object output, int reduce,
             double prescale, double postscale, int root, nb::object timeout_s) {
            return Run(std::move(self), op, Text(name), std::move(input), std::move(output), reduce, prescale,
                       postscale, root, timeout_s);
          },
          "op"_a, "name"_a, "input"_a.none(), "output"_a.none(), "reduce"_a, "prescale"_a, "postscale"_a,
          "root"_a, "timeout_s"_a.none())
      .def(
          "start",
          [](nb::object self, nb::object owner, int op, nb::str name, nb::object input, nb::object output,
             int reduce, double prescale, double postscale, int root) {
            return Start(std::move(self), std::move(owner), op, Text(name), std::move(input),
                         std::move(output), reduce, prescale, postscale, root);
          },
          "owner"_a, "op"_a, "name"_a, "input"_a.none(), "output"_a.none(), "reduce"_a, "prescale"_a,
          "postscale"_a, "root"_a)
      .def("start_group", &StartGroup, "owner"_a, "op"_a, "name"_a, "tensors"_a, "reduce"_a, "prescale"_a,
           "postscale"_a, "root"_a, "result"_a.none())
      .def("barrier", &Barrier, "name"_a, "timeout_s"_a.none())
      .def("empty", &Empty, "nbytes"_a)
      .def(
          "abort", [](GroupFace& face, const std::string& reason) { face.group->Abort(reason); }, "reason"_a)
      .def(
          "begin_phase",
          [](GroupFace& face, const std::string& name, double timeout_s) {
            RaiseIfError(face.group->BeginPhase(name, timeout_s));
          },
          "name"_a, "timeout_s"_a)
      .def("end_phase", [](GroupFace& face) { face.group->EndPhase(); })
      .def(
          "start_timeline",
          [](GroupFace& face, const std::string& path, bool mark_cycles) {
            RaiseIfError(face.group->StartTimeline(path, mark_cycles));
          },
          "path"_a, "mark_cycles"_a)
      .def("stop_timeline",
           [](GroupFace& face) {
             const Unlocked unlocked;
             face.group->StopTimeline();
           })
      .def("close",
           [](GroupFace& face) {
             {
               const Unlocked unlocked;
               face.group->Close();
             }
             auto abandoned = std::move(face.abandoned);  // all are done
             face.abandoned.clear();
           })
      .def("check", [](const GroupFace& face) { RaiseIfError(face.group->status()); })
      .def("fileno", [](const GroupFace& face) { return face.group->death_fd(); })
      .def("stats", &Stats);

  m.def("kernels", [] { return Name(BestKernels()); });
  m.def("use_kernels", [](const std::string& name) { RaiseIfError(UseKernels(name)); }, "name"_a);
  BindPlan(m, {&RaiseIfError, [](nb::handle face) -> Group& { return *nb::cast<GroupFace&>(face).group; },
               [](const std::function<void()>& work) {
                 const Unlocked unlocked;
                 work();
               }});
  BindData(m);
}

}  // namespace hvd
