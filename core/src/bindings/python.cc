#include "bindings/python.h"

#include <cxxabi.h>
#include <unistd.h>

#include <string>

namespace nb = nanobind;

namespace hvd {
namespace {

bool IsInterpreterEnding() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

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

}  // namespace

bool IsMainThread() { return ::gettid() == ::getpid(); }

Unlocked::Unlocked() : ends_interpreter_(IsInterpreterEnding()), state_(PyEval_SaveThread()) {}

Unlocked::~Unlocked() {
  while (IsInterpreterEnding() && !ends_interpreter_) ::pause();
  try {
    PyEval_RestoreThread(state_);
  } catch (abi::__forced_unwind&) {  // it has begun to end just now
    for (;;) ::pause();
  }
}

bool Unlocked::HasSignalRaised() {
  PyEval_RestoreThread(state_);
  const bool raised = PyErr_CheckSignals() != 0;
  PyEval_SaveThread();
  return raised;
}

void Raise(const Status& status) {
  const nb::object type = nb::module_::import_("hvd_core.errors").attr(ExceptionName(status.code()));
  PyErr_SetString(type.ptr(), std::string(status.text()).c_str());
  throw nb::python_error();
}

std::string_view Text(nb::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) throw nb::python_error();
  return {data, static_cast<size_t>(size)};
}

}  // namespace hvd
