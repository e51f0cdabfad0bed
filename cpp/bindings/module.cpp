// Table of contents of phaze_fast._core. Each bind_*.cpp translates one header and nothing else.
#include <pybind11/pybind11.h>

#include <exception>

#include "arrays.hpp"
#include "phaze/status.hpp"

namespace phaze::bindings {

void bind_chip_grid(py::module_& module);
void bind_collective(py::module_& module);
void bind_fusion(py::module_& module);
void bind_layer_schedule(py::module_& module);
void bind_layers_on_chips(py::module_& module);
void bind_layouts(py::module_& module);
void bind_mapping(py::module_& module);
void bind_memory(py::module_& module);
void bind_mesh(py::module_& module);
void bind_nest(py::module_& module);
void bind_op_cost(py::module_& module);
void bind_pipeline(py::module_& module);
void bind_placement(py::module_& module);
void bind_plan(py::module_& module);
void bind_silicon(py::module_& module);

namespace {

void raise_as(const char* type, const char* message) {
  const py::object error = py::module_::import("phaze_fast.errors").attr(type);
  py::set_error(error, message);
}

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const InvalidType& error) {
      raise_as("InvalidTypeError", error.what());
    } catch (const InvalidInput& error) {
      raise_as("InvalidInputError", error.what());
    } catch (const InUse& error) {
      raise_as("InUseError", error.what());
    }
  });
}

void bind_status(py::module_& module) {
  bind_outcomes<Status>(module, "Status",
                        {"OK",
                         "NOT_FINITE",
                         "NEGATIVE",
                         "BAD_RANKS",
                         "BAD_STRIDE",
                         "GROUP_TOO_LARGE",
                         "BAD_OPERATION",
                         "BAD_FABRIC",
                         "NOT_APPLICABLE",
                         "BAD_CHIP",
                         "BAD_SHAPE",
                         "TOO_LARGE",
                         "BAD_TUNING",
                         "TOO_MANY_OPS",
                         "BAD_MODE",
                         "BAD_EDGE",
                         "NO_MAPPING",
                         "BAD_LAYERS",
                         "TOO_MANY_CUTS",
                         "BAD_RULES"});
  module.attr("STATUS_SENTENCES") = names_of<Status>(kStatusCount, &sentence);
}

}  // namespace
}  // namespace phaze::bindings

PYBIND11_MODULE(_core, module) {
  using namespace phaze::bindings;
  module.doc() = "Compiled kernels of phaze_fast; call them through the packages, not directly.";
  bind_errors();
  bind_status(module);
  bind_silicon(module);
  bind_chip_grid(module);
  bind_collective(module);
  bind_fusion(module);
  bind_mesh(module);
  bind_mapping(module);
  bind_op_cost(module);
  bind_layer_schedule(module);
  bind_pipeline(module);
  bind_placement(module);
  bind_nest(module);
  bind_layers_on_chips(module);
  bind_plan(module);
  bind_layouts(module);
  bind_memory(module);
}
