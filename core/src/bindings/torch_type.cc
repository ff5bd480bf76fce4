#include "bindings/torch_type.h"

#include <cstddef>
#include <cstdint>

namespace nb = nanobind;

namespace hvd {
namespace {

// The beginning of each table, the same in all versions of DLPack.
struct Header {
  uint32_t major;
  uint32_t minor;
  const Header* previous;  // an older table, or null
};

// Of version 1; in the order of DLPack's dlpack.h.
struct Table {
  Header header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, void* tensor);  // may be null
  void* work_stream;
};
constexpr uint32_t kMajor = 1;
constexpr uint32_t kFirstMinor = 3;

// Types that were asked, with a reference to each, so that no other gets its address. A job has few: Tensor,
// Parameter, and what a model derives from them.
struct Known {
  PyTypeObject* type = nullptr;
  TorchType answer;
};
constexpr size_t kNumKnown = 8;
Known known[kNumKnown];
size_t num_seen = 0;

nb::object Get(PyTypeObject* type, const char* name) {
  nb::object found = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  PyErr_Clear();
  return found;
}

const Table* TableOf(PyTypeObject* type) {
  const nb::object capsule = Get(type, "__dlpack_c_exchange_api__");
  constexpr const char* kName = "dlpack_exchange_api";
  if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), kName)) return nullptr;
  auto* header = static_cast<const Header*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  while (header != nullptr && header->major != kMajor) header = header->previous;
  if (header == nullptr || header->minor < kFirstMinor) return nullptr;
  return reinterpret_cast<const Table*>(header);
}

TorchType Ask(PyTypeObject* type) {
  const nb::object is_negative = Get(type, "is_neg");
  if (!is_negative.is_valid()) return {};
  const Table* table = TableOf(type);
  return {table == nullptr ? nullptr : table->tensor_from_object, is_negative.inc_ref().ptr()};
}

}  // namespace

TorchType TorchTypeOf(PyTypeObject* type) {
  for (const Known& one : known) {
    if (one.type == type) return one.answer;
  }
  const TorchType torch = Ask(type);
  Known& place = known[num_seen++ % kNumKnown];
  const Known forgotten = place;
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  place = {type, torch};
  Py_XDECREF(reinterpret_cast<PyObject*>(forgotten.type));
  Py_XDECREF(forgotten.answer.is_negative);
  return torch;
}

bool IsNegative(const TorchType& type, nb::handle object) {
  PyObject* const self = object.ptr();
  const nb::object answer = nb::steal(PyObject_Vectorcall(type.is_negative, &self, 1, nullptr));
  if (!answer.is_valid()) throw nb::python_error();
  return answer.ptr() == Py_True;
}

}  // namespace hvd
