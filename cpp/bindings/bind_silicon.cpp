#include "area_terms.hpp"
#include "arrays.hpp"
#include "phaze/silicon.hpp"

namespace phaze::bindings {
namespace {

py::array_t<AreaBreakdown> area(const py::object& chips, const TermRates& rates, int threads) {
  const auto rows = view<ChipRecord>(chips, "chips");
  const AreaTerms terms = checked_terms(rates);
  const int workers = checked_threads(threads);
  return computed<AreaBreakdown>(rows.size(), [&](std::span<AreaBreakdown> filled) {
    chip_area_batch(rows, terms, filled, workers);
  });
}

py::array_t<double> area_total(const py::object& chips, const TermRates& rates, int threads) {
  const auto rows = view<ChipRecord>(chips, "chips");
  const AreaTerms terms = checked_terms(rates);
  const int workers = checked_threads(threads);
  return computed<double>(rows.size(), [&](std::span<double> filled) {
    chip_area_total_batch(rows, terms, filled, workers);
  });
}

py::array_t<double> power(const py::object& chips, const py::object& energy_table,
                          const py::object& area_mm2, int threads) {
  const auto rows = view<ChipRecord>(chips, "chips");
  const auto table = view<EnergyTable>(energy_table, "energy_table", 1);
  const auto areas = view<double>(area_mm2, "area_mm2", static_cast<py::ssize_t>(rows.size()));
  const int workers = checked_threads(threads);
  return computed<double>(rows.size(), [&](std::span<double> filled) {
    peak_power_batch(rows, table[0], areas, filled, workers);
  });
}

}  // namespace

void bind_silicon(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(ChipRecord, tensor_cores, tensor_width, tensor_depth, tensor_local_bytes,
                       vector_cores, vector_lanes, vector_alus_per_lane, vector_local_bytes,
                       buffer_bytes, buffer_bytes_per_cycle, buffer_port_bytes_per_cycle, hbm_bytes,
                       hbm_bytes_per_s, hbm_stacks, clock_hz, links, link_bytes_per_s, dies, fp8,
                       other_cores, other_width, other_depth);
  PYBIND11_NUMPY_DTYPE(AreaBreakdown, tensor_mm2, vector_mm2, buffer_mm2, network_mm2, hbm_mm2,
                       control_mm2, links_mm2, die_to_die_mm2, total_mm2, extrapolated, status);
  PYBIND11_NUMPY_DTYPE(EnergyTable, mac_j, vector_op_j, local_byte_j, buffer_byte_j, hbm_byte_j,
                       network_byte_j, static_w_per_mm2);
  module.attr("CHIP_DTYPE") = py::dtype::of<ChipRecord>();
  module.attr("AREA_DTYPE") = py::dtype::of<AreaBreakdown>();
  module.attr("ENERGY_DTYPE") = py::dtype::of<EnergyTable>();
  module.def("chip_area", &area, py::arg("chips"), py::arg("terms"), py::arg("threads"));
  module.def("chip_area_total", &area_total, py::arg("chips"), py::arg("terms"),
             py::arg("threads"));
  module.def("peak_power", &power, py::arg("chips"), py::arg("energy_table"), py::arg("area_mm2"),
             py::arg("threads"));
}

}  // namespace phaze::bindings
