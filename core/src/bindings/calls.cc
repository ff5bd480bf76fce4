#include "bindings/calls.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/face.h"
#include "bindings/python.h"
#include "bindings/view.h"
#include "bindings/work.h"

namespace nb = nanobind;

namespace hvd {
namespace {

// What all ranks must agree about; the end of the arguments of each method.
struct How {
  Op op;
  ReduceOp reduce;
  double prescale, postscale;
  int root;
};

long Integer(PyObject* object) {
  const long value = PyLong_AsLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

double Real(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

nb::list List(PyObject* object) {
  if (PyList_Check(object)) return nb::borrow<nb::list>(object);
  PyErr_SetString(PyExc_TypeError, "expected a list");
  throw nb::python_error();
}

// rest: reduce, prescale, postscale, root.
How HowOf(PyObject* op, PyObject* const* rest) {
  return {static_cast<Op>(Integer(op)), static_cast<ReduceOp>(Integer(rest[0])), Real(rest[1]), Real(rest[2]),
          static_cast<int>(Integer(rest[3]))};
}

Call MakeCall(const How& how, std::string_view name, const View& view, const Buffer& buffer) {
  return {how.op,   name,       how.reduce,     how.prescale, how.postscale,
          how.root, view.dtype, view.extents(), {},           buffer};
}

// The result has memory of its own.
bool Gathers(Op op) { return op == Op::kAllgather || op == Op::kAlltoall; }

Share ShareOf(Op op, const Group& group) {
  return op == Op::kReducescatter ? Share{group.rank(), group.size()} : Share();
}

void Expect(Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
  throw nb::python_error();
}

GroupFace& FaceOf(PyObject* self) {
  auto& face = *nb::inst_ptr<GroupFace>(self);
  face.Check();
  return face;
}

// Submits; what keeps the arrays alive is made first, so that nothing can go wrong afterwards.
template <class Submit>
nb::object Started(PyObject* owner, PyObject* self, nb::object input, nb::object output, Op op,
                   Submit submit) {
  nb::object made = MakeHandle(
      {nb::borrow(owner), nb::borrow(self), std::move(input), std::move(output), nullptr, Gathers(op)});
  SetHandle(made, ValueOrRaise(submit()));
  return made;
}

// Waits for what was submitted with Then::kWaits.
nb::object Finished(PyObject* self, std::shared_ptr<Handle> handle, nb::handle input, nb::handle output,
                    const Patience& patience, Op op) {
  auto& face = *nb::inst_ptr<GroupFace>(self);
  try {
    face.Await(*handle, patience);
  } catch (...) {  // it goes on
    if (!handle->done()) face.Keep(handle, nb::borrow(input), nb::borrow(output));
    throw;
  }
  return ResultOf(*handle, output, Gathers(op));
}

// -- any arrays -------------------------------------------------------------------------------------------

// run(op, name, input, output, reduce, prescale, postscale, root, timeout_s): on this thread as far as
// possible.
PyObject* Run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&] {
    Expect(count, 9);
    auto& face = FaceOf(self);
    const How how = HowOf(args[0], args + 4);
    const Patience patience = PatienceOf(args[8]);
    const std::string_view name = Text(args[1]);
    Buffer buffer;
    View view;
    LookAt(args[2], args[3], ShareOf(how.op, face.group()), name, &view, &buffer);
    auto handle = ValueOrRaise(face.group().Submit(MakeCall(how, name, view, buffer), Then::kWaits));
    return Finished(self, std::move(handle), args[2], args[3], patience, how.op);
  });
}

// start(owner, op, name, input, output, reduce, prescale, postscale, root)
PyObject* Start(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&] {
    Expect(count, 9);
    auto& face = FaceOf(self);
    const How how = HowOf(args[1], args + 5);
    const std::string_view name = Text(args[2]);
    Buffer buffer;
    View view;
    LookAt(args[3], args[4], ShareOf(how.op, face.group()), name, &view, &buffer);
    return Started(args[0], self, nb::borrow(args[3]), nb::borrow(args[4]), how.op,
                   [&] { return face.group().Submit(MakeCall(how, name, view, buffer), Then::kGoesOn); });
  });
}

// The tensors of one collective, which complete together.
class Several {
 public:
  Several(const How& how, std::string_view name, size_t size)
      : name_(name),
        size_(size),
        request_{how.op, std::string(name), how.reduce, how.prescale, how.postscale, how.root, {}} {
    request_.members.reserve(size);
    buffers_.reserve(size);
  }
  // `name` in errors; without one it is numbered.
  std::string NextName() const {
    return name_ + "_" + std::to_string(buffers_.size()) + "of" + std::to_string(size_);
  }
  void Add(std::string name, const View& view, const Buffer& buffer) {
    request_.members.push_back(
        {std::move(name), view.dtype, {view.extents().begin(), view.extents().end()}, {}});
    buffers_.push_back(buffer);
  }
  Result<std::shared_ptr<Handle>> Submit(Group& group) {
    return group.Submit(std::move(request_), std::move(buffers_), Then::kGoesOn);
  }

 private:
  const std::string name_;
  const size_t size_;
  Request request_;
  std::vector<Buffer> buffers_;
};

// start_group(owner, op, name, names, inputs, outputs, reduce, prescale, postscale, root): names, None or a
// list, are those of the members in errors; inputs and outputs are lists.
PyObject* StartGroup(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&] {
    Expect(count, 10);
    auto& face = FaceOf(self);
    const How how = HowOf(args[1], args + 6);
    const auto inputs = List(args[4]);
    const auto outputs = List(args[5]);
    std::optional<nb::list> names;
    if (args[3] != Py_None) names = List(args[3]);
    if (outputs.size() != inputs.size() || (names && names->size() != inputs.size())) {
      PyErr_SetString(PyExc_ValueError, "as many names and outputs as inputs are needed");
      throw nb::python_error();
    }
    Several several(how, Text(args[2]), inputs.size());
    const Share share = ShareOf(how.op, face.group());
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::string member = names ? std::string(Text((*names)[i])) : several.NextName();
      Buffer buffer;
      View view;
      LookAt(inputs[i], outputs[i], share, member, &view, &buffer);
      several.Add(std::move(member), view, buffer);
    }
    return Started(args[0], self, inputs, outputs, how.op, [&] { return several.Submit(face.group()); });
  });
}

// -- torch tensors, the short way -------------------------------------------------------------------------
//
// Each returns NotImplemented, and has done nothing, where an argument is not of the plainest kind: the
// caller then goes the long way, which can do more and knows what is wrong. `output` is the tensor itself,
// for in place, or a function that makes a tensor like it.

nb::object NotPlain() { return nb::borrow(Py_NotImplemented); }

// As HowOf, with None for the average; false if the long way is needed.
bool PlainHow(PyObject* op, PyObject* const* rest, int size, How* how) {
  if (rest[0] != Py_None && !PyLong_Check(rest[0])) return false;
  const long reduce = rest[0] == Py_None ? static_cast<long>(ReduceOp::kAverage) : Integer(rest[0]);
  if (reduce < 0 || reduce >= kNumReduceOps || reduce == static_cast<long>(ReduceOp::kAdasum)) return false;
  if (!PyLong_Check(rest[3])) return false;
  *how = {static_cast<Op>(Integer(op)), static_cast<ReduceOp>(reduce), Real(rest[1]), Real(rest[2]),
          static_cast<int>(Integer(rest[3]))};
  return how->root >= 0 && how->root < size;
}

// The views of a tensor and its output, which is made if need be; null if the long way is needed.
nb::object PlainOutput(nb::handle tensor, nb::handle output, const Share& share, View* view, Buffer* buffer) {
  if (!LookAtTensor(tensor, view)) return {};
  if (output.is(tensor)) {
    *buffer = {view->data, view->data};
    return nb::borrow(tensor);
  }
  nb::object made = nb::steal(PyObject_CallOneArg(output.ptr(), tensor.ptr()));
  if (!made.is_valid()) throw nb::python_error();
  View out;
  if (!LookAtTensor(made, &out) || out.dtype != view->dtype || out.nbytes() != share.Of(*view)) return {};
  *buffer = {view->data, out.data};
  return made;
}

// run_tensor(op, name, tensor, output, reduce, prescale, postscale, root)
PyObject* RunTensor(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&]() -> nb::object {
    Expect(count, 8);
    auto& face = FaceOf(self);
    How how;
    Buffer buffer;
    View view;
    if (!PyUnicode_Check(args[1]) || !PlainHow(args[0], args + 4, face.group().size(), &how))
      return NotPlain();
    const nb::object output = PlainOutput(args[2], args[3], ShareOf(how.op, face.group()), &view, &buffer);
    if (!output.is_valid()) return NotPlain();
    const Call call = MakeCall(how, Text(args[1]), view, buffer);
    auto handle = ValueOrRaise(face.group().Submit(call, Then::kWaits));
    return Finished(self, std::move(handle), args[2], output, kForEver, how.op);
  });
}

// start_tensor(owner, op, name, tensor, output, reduce, prescale, postscale, root)
PyObject* StartTensor(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&]() -> nb::object {
    Expect(count, 9);
    auto& face = FaceOf(self);
    How how;
    Buffer buffer;
    View view;
    if (!PyUnicode_Check(args[2]) || !PlainHow(args[1], args + 5, face.group().size(), &how))
      return NotPlain();
    nb::object output = PlainOutput(args[3], args[4], ShareOf(how.op, face.group()), &view, &buffer);
    if (!output.is_valid()) return NotPlain();
    const Call call = MakeCall(how, Text(args[2]), view, buffer);
    return Started(args[0], self, nb::borrow(args[3]), std::move(output), how.op,
                   [&] { return face.group().Submit(call, Then::kGoesOn); });
  });
}

// start_tensors(owner, op, name, tensors, output, reduce, prescale, postscale, root): `tensors` is a list,
// and `output` a function or None for in place.
PyObject* StartTensors(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&]() -> nb::object {
    Expect(count, 9);
    auto& face = FaceOf(self);
    How how;
    if (!PyUnicode_Check(args[2]) || !PlainHow(args[1], args + 5, face.group().size(), &how))
      return NotPlain();
    const auto tensors = List(args[3]);
    nb::list outputs;
    Several several(how, Text(args[2]), tensors.size());
    const Share share = ShareOf(how.op, face.group());
    for (const nb::handle tensor : tensors) {
      Buffer buffer;
      View view;
      const nb::handle output = args[4] == Py_None ? tensor : nb::handle(args[4]);
      nb::object made = PlainOutput(tensor, output, share, &view, &buffer);
      if (!made.is_valid()) return NotPlain();
      several.Add(several.NextName(), view, buffer);
      outputs.append(std::move(made));
    }
    return Started(args[0], self, tensors, std::move(outputs), how.op,
                   [&] { return several.Submit(face.group()); });
  });
}

// start_alltoall(owner, name, input, splits): splits, None or a list, are the rows for each rank.
PyObject* StartAlltoall(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&] {
    Expect(count, 4);
    auto& face = FaceOf(self);
    const std::string_view name = Text(args[1]);
    Request request;
    request.op = Op::kAlltoall;
    request.name = name;
    Buffer buffer;
    View view;
    LookAt(args[2], Py_None, Share(), name, &view, &buffer);
    request.members.push_back({request.name, view.dtype, {view.extents().begin(), view.extents().end()}, {}});
    if (args[3] != Py_None) {
      const auto splits = List(args[3]);
      for (const nb::handle rows : splits) request.splits.push_back(Integer(rows.ptr()));
      if (request.splits.empty())
        Raise(Status(Code::kInvalid, request.name + ": there are no splits; pass one for each rank"));
    }
    return Started(args[0], self, nb::borrow(args[2]), nb::none(), request.op,
                   [&] { return face.group().Submit(std::move(request), {buffer}, Then::kGoesOn); });
  });
}

// barrier(name, timeout_s)
PyObject* Barrier(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&] {
    Expect(count, 2);
    auto& face = FaceOf(self);
    const Patience patience = PatienceOf(args[1]);
    Request request;
    request.op = Op::kBarrier;
    request.name = Text(args[0]);
    auto handle = ValueOrRaise(face.group().Submit(std::move(request), {}, Then::kWaits));
    return Finished(self, std::move(handle), Py_None, Py_None, patience, Op::kBarrier);
  });
}

// join(timeout_s): the last rank that did.
PyObject* Join(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Called([&]() -> nb::object {
    Expect(count, 1);
    auto& face = FaceOf(self);
    const Patience patience = PatienceOf(args[0]);
    Request request;
    request.op = Op::kJoin;
    request.name = "hvd.join";
    const auto handle = ValueOrRaise(face.group().Submit(std::move(request), {}, Then::kWaits));
    Finished(self, handle, nb::none(), nb::none(), patience, Op::kJoin);
    return nb::int_(handle->gathered()[0].rows[0]);
  });
}

PyMethodDef Method(const char* name, PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
}

}  // namespace

PyMethodDef group_calls[] = {
    Method("run", Run),
    Method("start", Start),
    Method("start_group", StartGroup),
    Method("run_tensor", RunTensor),
    Method("start_tensor", StartTensor),
    Method("start_tensors", StartTensors),
    Method("start_alltoall", StartAlltoall),
    Method("barrier", Barrier),
    Method("join", Join),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hvd
