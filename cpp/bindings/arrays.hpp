// Common code of the bindings: strict views of NumPy arrays, read-only results, and errors that
// name the argument. Nothing is converted silently: a wrong dtype, shape or stride is refused. Take
// views while holding the GIL, compute with it released.
#pragma once

#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace phaze::bindings {

namespace py = pybind11;

// Becomes phaze_fast.errors.InvalidInputError.
struct InvalidInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Becomes phaze_fast.errors.InvalidTypeError, which is also a TypeError.
struct InvalidType : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Becomes phaze_fast.errors.InUseError, which is also a RuntimeError.
struct InUse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string text(const py::handle& object) { return py::str(object).cast<std::string>(); }

// A contiguous one-dimensional array of exactly T, of `length` elements unless that is -1. The span
// is valid as long as the array: the caller keeps a reference for the whole call.
template <typename T>
std::span<const T> view(const py::object& object, const char* name, py::ssize_t length = -1) {
  if (!py::isinstance<py::array>(object)) {
    throw InvalidType(std::string(name) + ": " + text(py::type::of(object).attr("__name__")) +
                      " is not accepted; expected a NumPy array of " + text(py::dtype::of<T>()));
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype wanted = py::dtype::of<T>();
  if (!array.dtype().equal(wanted)) {
    throw InvalidType(std::string(name) + ": dtype " + text(array.dtype()) +
                      " is not accepted; expected " + text(wanted));
  }
  if (array.ndim() != 1) {
    throw InvalidInput(std::string(name) + ": " + std::to_string(array.ndim()) +
                       " dimensions are not accepted; expected 1");
  }
  if (array.size() > 1 && array.strides(0) != array.itemsize()) {
    throw InvalidInput(std::string(name) + ": stride of " + std::to_string(array.strides(0)) +
                       " bytes is not accepted; expected a contiguous array (" +
                       std::to_string(array.itemsize()) + " bytes)");
  }
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) != 0) {
    throw InvalidInput(std::string(name) + ": an unaligned array is not accepted; copy it first");
  }
  if (length >= 0 && array.size() != length) {
    throw InvalidInput(std::string(name) + ": length " + std::to_string(array.size()) +
                       " is not accepted; expected " + std::to_string(length));
  }
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

// A new array and the span to fill it through; call freeze() before returning it.
template <typename T>
std::span<T> writable(py::array_t<T>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

template <typename T>
py::array_t<T> freeze(py::array_t<T> array) {
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

// A read-only array of `size` elements, which `fill` writes with the GIL released.
template <typename T, typename Fill>
py::array_t<T> computed(std::size_t size, const Fill& fill) {
  py::array_t<T> out(static_cast<py::ssize_t>(size));
  const std::span<T> values = writable(out);
  {
    const py::gil_scoped_release release;
    fill(values);
  }
  return freeze(std::move(out));
}

inline int checked_threads(int threads) {
  if (threads < 1 || threads > 1024) {
    throw InvalidInput("threads: " + std::to_string(threads) +
                       " is not accepted; expected a whole number from 1 to 1024");
  }
  return threads;
}

// Values as a read-only Python array.
template <typename T>
py::array_t<T> array(std::span<const T> values) {
  py::array_t<T> copy(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), copy.mutable_data());
  return freeze(std::move(copy));
}

template <typename T>
py::array_t<T> array(const std::vector<T>& values) {
  return array(std::span<const T>(values));
}

// A result type with several named fields: `_core.TYPE`, a named tuple.
inline void bind_result(py::module_& module, const char* type, const char* fields) {
  const py::object named_tuple = py::module_::import("collections").attr("namedtuple");
  module.attr(type) = named_tuple(type, fields, py::arg("module") = "phaze_fast._core");
}

template <typename... Parts>
py::object result(const char* type, Parts&&... parts) {
  return py::module_::import("phaze_fast._core").attr(type)(std::forward<Parts>(parts)...);
}

// The names of codes 0 to `count` - 1, as a tuple.
template <typename Code>
py::tuple names_of(int count, const char* (*name)(Code)) {
  py::tuple names(count);
  for (int i = 0; i < count; ++i) {
    names[static_cast<std::size_t>(i)] = py::str(name(static_cast<Code>(i)));
  }
  return names;
}

// The outcomes of a kernel: `_core.TYPE`, an IntEnum with these names in the order of their codes.
template <typename Status>
void bind_outcomes(py::module_& module, const char* type,
                   std::initializer_list<const char*> names) {
  py::native_enum<Status> outcomes(module, type, "enum.IntEnum");
  int code = 0;
  for (const char* name : names) outcomes.value(name, static_cast<Status>(code++));
  outcomes.finalize();
}

}  // namespace phaze::bindings
