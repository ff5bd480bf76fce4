#include "bindings/work.h"

#include <nanobind/ndarray.h>

#include <new>
#include <utility>
#include <vector>

#include "bindings/calls.h"
#include "bindings/face.h"
#include "bindings/python.h"
#include "bindings/view.h"

namespace nb = nanobind;

namespace hvd {
namespace {

// A type of CPython's own making, because one is made and freed for every tensor that is on its way.
struct HandleObject {
  PyObject_HEAD Work work;
};

PyTypeObject* type = nullptr;

Work& WorkOf(PyObject* self) { return reinterpret_cast<HandleObject*>(self)->work; }

bool IsPending(const Work& work) { return work.handle != nullptr && !work.handle->done(); }

void Free(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Work work = std::move(WorkOf(self));
  WorkOf(self).~Work();
  PyObject_GC_Del(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
  if (IsPending(work)) {
    nb::inst_ptr<GroupFace>(work.face)->Keep(std::move(work.handle), std::move(work.input),
                                             std::move(work.output));
  }
}

// There is no tp_clear: what the core may still work in is not let go.
int Traverse(PyObject* self, visitproc visit, void* arg) {
  const Work& work = WorkOf(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(work.owner.ptr());
  Py_VISIT(work.face.ptr());
  // While the core works in them they must not be taken for garbage: it would be cleared, not only let go.
  if (!IsPending(work)) {
    Py_VISIT(work.input.ptr());
    Py_VISIT(work.output.ptr());
  }
  return 0;
}

PyObject* Done(PyObject* self, PyObject*) { return PyBool_FromLong(WorkOf(self).handle->done()); }

PyObject* Wait(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  return Called([&] {
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    if (count + named > 1 ||
        (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, 0), "timeout_s") != 0)) {
      PyErr_SetString(PyExc_TypeError, "wait() takes timeout_s only");
      throw nb::python_error();
    }
    Work& work = WorkOf(self);
    const Patience patience = count + named == 1 ? PatienceOf(args[0]) : kForEver;
    nb::inst_ptr<GroupFace>(work.face)->Await(*work.handle, patience);
    work.input.reset();
    return ResultOf(*work.handle, work.output, work.gathers);
  });
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

PyMethodDef methods[] = {
    {"done", Done, METH_NOARGS, "True once `wait()` would not block."},
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Wait)), METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout_s=None)\n--\n\n"
     "Waits for the result and returns it; for a grouped collective a list.\n\n"
     "Raises what went wrong between the ranks (`MismatchError`, `PeerLost`, `Aborted`, ...), or\n"
     "`CollectiveTimeout` after `timeout_s` seconds; the collective then goes on, and `wait()` may be\n"
     "called again. Ctrl-C gets through."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(Free)},
                       {Py_tp_traverse, reinterpret_cast<void*>(Traverse)},
                       {Py_tp_methods, methods},
                       {Py_tp_doc, const_cast<char*>("A collective on its way. Keeps its arrays alive; they "
                                                     "must not be touched until it is done.")},
                       {0, nullptr}};

PyType_Spec spec = {"hvd_core._native.Handle", sizeof(HandleObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

nb::object MakeHandle(Work work) {
  PyObject* const self = PyObject_GC_New(PyObject, type);
  if (self == nullptr) throw nb::python_error();
  new (&WorkOf(self)) Work(std::move(work));
  PyObject_GC_Track(self);
  return nb::steal(self);
}

void SetHandle(nb::handle made, std::shared_ptr<Handle> handle) {
  WorkOf(made.ptr()).handle = std::move(handle);
}

nb::object ResultOf(const Handle& handle, nb::handle output, bool gathers) {
  RaiseIfError(handle.status());
  if (!gathers) return nb::borrow(output);
  nb::object gathered = Gather(handle, 0);
  if (handle.request().op != Op::kAlltoall) return gathered;
  nb::list rows;
  for (const int64_t n : handle.gathered()[0].rows) rows.append(n);
  return nb::make_tuple(std::move(gathered), std::move(rows));
}

void BindHandle(nb::module_& m) {
  type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw nb::python_error();
  m.attr("Handle") = nb::borrow(reinterpret_cast<PyObject*>(type));
}

}  // namespace hvd
