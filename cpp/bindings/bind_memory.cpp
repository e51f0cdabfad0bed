// Addresses of the functions of memory_c.hpp by name, for Numba's loops.
#include "arrays.hpp"
#include "phaze/memory_c.hpp"

namespace phaze::bindings {
namespace {

template <typename Function>
std::uintptr_t address(Function* function) {
  return reinterpret_cast<std::uintptr_t>(function);
}

}  // namespace

void bind_memory(py::module_& module) {
  module.attr("MEMORY_RULE") =
      py::dict(py::arg("phaze_in_flight") = address(&phaze_in_flight),
               py::arg("phaze_state_bytes") = address(&phaze_state_bytes),
               py::arg("phaze_mean_weight_bytes") = address(&phaze_mean_weight_bytes),
               py::arg("phaze_shared_parameters") = address(&phaze_shared_parameters),
               py::arg("phaze_unsharded_bytes") = address(&phaze_unsharded_bytes),
               py::arg("phaze_peak_total") = address(&phaze_peak_total),
               py::arg("phaze_peak") = address(&phaze_peak));
}

}  // namespace phaze::bindings
