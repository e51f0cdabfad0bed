#include <pybind11/stl.h>

#include <array>
#include <string>

#include "arrays.hpp"
#include "phaze/fusion.hpp"

namespace phaze::bindings {
namespace {

using RulesTuple = std::array<double, 4>;  // the fields of BufferRules

py::array_t<FusedTraffic> group_traffic(const py::object& groups, const py::object& capacities,
                                        const RulesTuple& rules) {
  const auto listed = view<FusedGroup>(groups, "groups");
  const auto sizes = view<double>(capacities, "capacities");
  const BufferRules p{rules[0], rules[1], rules[2], rules[3]};
  for (std::size_t i = 0; i < listed.size(); ++i) {
    if (is_valid(listed[i], p)) continue;
    throw InvalidInput("groups[" + std::to_string(i) +
                       "]: sizes, steps and factors must be positive and at most 2^40; inner or "
                       "outer may be 0, not both");
  }
  return computed<FusedTraffic>(listed.size() * sizes.size(), [&](std::span<FusedTraffic> filled) {
    for (std::size_t i = 0; i < filled.size(); ++i) {
      filled[i] = least_group_traffic(listed[i / sizes.size()], sizes[i % sizes.size()], p);
    }
  });
}

py::array_t<double> product_bytes(std::int64_t m, std::int64_t k, std::int64_t n,
                                  const py::object& capacities, const RulesTuple& rules) {
  const auto sizes = view<double>(capacities, "capacities");
  const BufferRules p{rules[0], rules[1], rules[2], rules[3]};
  if (!is_valid({1, m, 1, k, n, 1, 0, 1.0, 1.0, 1.0, 1.0, 0.0}, p) || k < 1) {
    throw InvalidInput("m, k, n: " + std::to_string(m) + ", " + std::to_string(k) + ", " +
                       std::to_string(n) + " is not accepted; expected 1 to 2^40");
  }
  return computed<double>(sizes.size(), [&](std::span<double> filled) {
    for (std::size_t i = 0; i < filled.size(); ++i) {
      filled[i] = least_product_bytes(m, k, n, sizes[i], p);
    }
  });
}

}  // namespace

void bind_fusion(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(FusedGroup, count, rows, row_step, inner, hidden, hidden_step, outer, first,
                       second, held, inputs, moved);
  PYBIND11_NUMPY_DTYPE(FusedTraffic, hbm_bytes, loops, kept, row_passes, column_passes);
  module.attr("FUSED_GROUP_DTYPE") = py::dtype::of<FusedGroup>();
  module.def("group_traffic", &group_traffic, py::arg("groups"), py::arg("capacities"),
             py::arg("rules"));
  module.def("product_bytes", &product_bytes, py::arg("m"), py::arg("k"), py::arg("n"),
             py::arg("capacities"), py::arg("rules"));
}

}  // namespace phaze::bindings
