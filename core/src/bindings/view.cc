#include "bindings/view.h"

#include <optional>
#include <string>

#include "bindings/python.h"
#include "bindings/torch_type.h"
#include "collectives/batch.h"

namespace nb = nanobind;

namespace hvd {
namespace {

using In = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::c_contig, nb::device::cpu>;

struct DTypeRow {
  DType dtype;
  nb::dlpack::dtype_code code;
};
constexpr DTypeRow kDTypes[] = {
    {DType::kFloat32, nb::dlpack::dtype_code::Float}, {DType::kBFloat16, nb::dlpack::dtype_code::Bfloat},
    {DType::kFloat16, nb::dlpack::dtype_code::Float}, {DType::kFloat64, nb::dlpack::dtype_code::Float},
    {DType::kInt64, nb::dlpack::dtype_code::Int},     {DType::kInt32, nb::dlpack::dtype_code::Int},
    {DType::kInt16, nb::dlpack::dtype_code::Int},     {DType::kInt8, nb::dlpack::dtype_code::Int},
    {DType::kBool, nb::dlpack::dtype_code::Bool},     {DType::kUInt8, nb::dlpack::dtype_code::UInt},
    {DType::kUInt16, nb::dlpack::dtype_code::UInt},   {DType::kUInt32, nb::dlpack::dtype_code::UInt},
    {DType::kUInt64, nb::dlpack::dtype_code::UInt},
};
static_assert(std::size(kDTypes) == kNumDTypes);

std::optional<DType> FromDLPack(nb::dlpack::dtype dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (dtype.code == static_cast<uint8_t>(row.code) && dtype.bits == ItemSize(row.dtype) * 8 &&
        dtype.lanes == 1) {
      return row.dtype;
    }
  }
  return std::nullopt;
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
  const bool fits = dtype.has_value() && buffer.ndim <= static_cast<int>(kMaxDims);
  if (fits) {
    view->dtype = *dtype;
    view->data = static_cast<std::byte*>(buffer.buf);
    view->ndim = static_cast<size_t>(buffer.ndim);
    for (int d = 0; d < buffer.ndim; ++d) view->shape[d] = buffer.shape[d];
  }
  PyBuffer_Release(&buffer);  // who keeps the array keeps its memory
  return fits;
}

bool IsContiguous(const nb::dlpack::dltensor& tensor, uint64_t count) {
  if (tensor.strides == nullptr || count == 0) return true;
  int64_t stride = 1;
  for (int32_t d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] == 1) continue;
    if (tensor.strides[d] != stride) return false;
    stride *= tensor.shape[d];
  }
  return true;
}

bool FromTable(const TorchType& type, nb::handle object, View* view) {
  nb::dlpack::dltensor tensor;
  if (type.look(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto dtype = FromDLPack(tensor.dtype);
  if (!dtype || tensor.device.device_type != nb::device::cpu::value ||
      tensor.ndim > static_cast<int32_t>(kMaxDims)) {
    return false;
  }
  view->dtype = *dtype;
  view->data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view->ndim = static_cast<size_t>(tensor.ndim);
  uint64_t count = 1;
  for (size_t d = 0; d < view->ndim; ++d) {
    view->shape[d] = tensor.shape[d];
    count *= static_cast<uint64_t>(tensor.shape[d]);
  }
  // Wrappers of other tensors and tensors whose storage was freed have no memory and a size.
  return (tensor.data != nullptr || count == 0) && IsContiguous(tensor, count);
}

[[noreturn]] void RefuseArray(nb::handle object, std::string_view name, const char* what, bool writable) {
  PyErr_Clear();
  const nb::str type(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))));
  std::string text = std::string(name) + ": " + what + " must be a contiguous ";
  if (writable) text += "writable ";
  Raise(Status(Code::kInvalid, text + "array in CPU memory (buffer or DLPack), not " + type.c_str()));
}

// Of another framework, or of a torch without a table of C functions.
template <class Array>
void FromArray(nb::handle object, bool is_torch, std::string_view name, const char* what, View* view) {
  nb::object plain = nb::borrow(object);
  if (is_torch) plain = object.attr("detach")();
  Array array;
  if (!nb::try_cast(plain, array, false)) RefuseArray(object, name, what, std::is_same_v<Array, Out>);
  const auto dtype = FromDLPack(array.dtype());
  if (!dtype || array.ndim() > kMaxDims) {
    Raise(Status(Code::kInvalid, std::string(name) + ": this dtype cannot be sent"));
  }
  if (array.data() == nullptr && array.size() > 0)
    RefuseArray(object, name, what, std::is_same_v<Array, Out>);
  view->dtype = *dtype;
  view->data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data())));
  view->ndim = array.ndim();
  for (size_t d = 0; d < array.ndim(); ++d) view->shape[d] = static_cast<int64_t>(array.shape(d));
}

void LookAtOne(nb::handle object, bool writable, std::string_view name, const char* what, View* view) {
  if (PyObject_CheckBuffer(object.ptr()) != 0 && FromBuffer(object, writable, view)) return;
  const TorchType torch = TorchTypeOf(Py_TYPE(object.ptr()));
  if (torch.is_torch() && IsNegative(torch, object)) {
    Raise(Status(Code::kInvalid,
                 std::string(name) + ": " + what + " has torch's negative bit; pass tensor.resolve_neg()"));
  }
  if (torch.look != nullptr && FromTable(torch, object, view)) return;
  writable ? FromArray<Out>(object, torch.is_torch(), name, what, view)
           : FromArray<In>(object, torch.is_torch(), name, what, view);
}

}  // namespace

bool LookAtTensor(nb::handle object, View* view) {
  const TorchType torch = TorchTypeOf(Py_TYPE(object.ptr()));
  return torch.look != nullptr && FromTable(torch, object, view) && !IsNegative(torch, object);
}

uint64_t Share::Of(const View& view) const {
  if (size == 1 || view.ndim == 0 || view.shape[0] == 0) return view.nbytes();
  const auto rows = static_cast<uint64_t>(view.shape[0]);
  return view.nbytes() / rows * RowsOf(rows, rank, size).size();
}

void LookAt(nb::handle input, nb::handle output, const Share& share, std::string_view name, View* view,
            Buffer* buffer) {
  if (output.is(input) && share.size == 1) {
    LookAtOne(input, true, name, "the array", view);
    *buffer = {view->data, view->data};
    return;
  }
  LookAtOne(input, false, name, "the input", view);
  *buffer = {view->data, nullptr};
  if (output.is_none()) return;
  View out;
  LookAtOne(output, true, name, "the output", &out);
  if (out.dtype != view->dtype || out.nbytes() != share.Of(*view)) {
    const char* what = share.size == 1 ? ": input and output differ in dtype or size"
                                       : ": the output is not of the dtype and size of this rank's rows";
    Raise(Status(Code::kInvalid, std::string(name) + what));
  }
  buffer->out = out.data;
}

nb::dlpack::dtype ToDLPack(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype)
      return {static_cast<uint8_t>(row.code), static_cast<uint8_t>(ItemSize(dtype) * 8), 1};
  }
  return nb::dtype<uint8_t>();
}

}  // namespace hvd
