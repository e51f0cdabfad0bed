// Which layouts fit, and addresses of the functions of memory_c.hpp by name, for Numba's loops.
#include "arrays.hpp"
#include "phaze/memory_c.hpp"
#include "phaze/plan.hpp"

namespace phaze::bindings {
namespace {

template <typename Function>
std::uintptr_t address(Function* function) {
  return reinterpret_cast<std::uintptr_t>(function);
}

// Whether some partition of each layout fits each memory limit: [layout][limit], flat.
py::array_t<std::uint8_t> fits(const py::object& layouts, const py::object& strategies,
                               const py::object& sizes, const py::object& order,
                               const py::object& training, const py::object& memory_limits) {
  const FitProblem problem{
      view<TrainingRecord>(training, "training", 1)[0], view<std::int32_t>(order, "order"),
      view<StrategyRecord>(strategies, "strategies"), view<LayerKindRecord>(sizes, "sizes"),
      view<LayoutRecord>(layouts, "layouts")};
  const auto limits = view<double>(memory_limits, "memory_limits");
  Status status = Status::kOk;
  py::array_t<std::uint8_t> found = computed<std::uint8_t>(
      problem.layouts.size() * limits.size(),
      [&](std::span<std::uint8_t> out) { status = layouts_fit(problem, limits, out); });
  if (status != Status::kOk) throw InvalidInput(std::string("layouts: ") + sentence(status));
  return found;
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def("layouts_fit", &fits, py::arg("layouts"), py::arg("strategies"), py::arg("sizes"),
             py::arg("order"), py::arg("training"), py::arg("memory_limits"));
  module.attr("MEMORY_RULE") =
      py::dict(py::arg("phaze_in_flight") = address(&phaze_in_flight),
               py::arg("phaze_state_bytes") = address(&phaze_state_bytes),
               py::arg("phaze_mean_weight_bytes") = address(&phaze_mean_weight_bytes),
               py::arg("phaze_shared_parameters") = address(&phaze_shared_parameters),
               py::arg("phaze_unsharded_bytes") = address(&phaze_unsharded_bytes),
               py::arg("phaze_peak") = address(&phaze_peak));
}

}  // namespace phaze::bindings
