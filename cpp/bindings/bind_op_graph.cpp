#include "arrays.hpp"
#include "phaze/types.hpp"

namespace phaze::bindings {

void bind_op_graph(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(OperatorRecord, kind, unit, b, m, n, k, flops, read_bytes, write_bytes,
                       payload_bytes, collective, group, causal, epilogue, function, format);
  module.attr("OPERATOR_DTYPE") = py::dtype::of<OperatorRecord>();
}

}  // namespace phaze::bindings
