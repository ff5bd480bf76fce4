#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <new>

namespace hvd {

// What a C function of CPython returns for `fn()`, which returns an object or throws.
template <class Function>
PyObject* Called(Function fn) noexcept(false) {  // a thread that the interpreter ends is unwound through it
  try {
    return nanobind::object(fn()).release().ptr();
  } catch (nanobind::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The methods of _native.Group that submit collectives. They take their arguments by position and without
// nanobind: a call with cold caches costs what it touches.
extern PyMethodDef group_calls[];

}  // namespace hvd
