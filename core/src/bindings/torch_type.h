// How to ask a torch tensor for its memory: the table of C functions that torch shows on the type of its
// tensors since 2.10 (DLPack 1.3). It answers in a tenth of the time that `__dlpack__` takes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace hvd {

// What a type offers; all null for types that are not torch's. Other frameworks may have the table too, but
// it does not tell whether an array may be written.
struct TorchType {
  // Fills `tensor`, which then points into the object. Not 0: an exception is set. Null in an older torch.
  int (*look)(void* object, void* tensor) = nullptr;
  // Tensor.is_neg: DLPack says nothing of the negative bit.
  PyObject* is_negative = nullptr;

  bool is_torch() const { return is_negative != nullptr; }
};

TorchType TorchTypeOf(PyTypeObject* type);

// Whether the values of this tensor are the negatives of what stands in its memory.
bool IsNegative(const TorchType& type, nanobind::handle object);

}  // namespace hvd
