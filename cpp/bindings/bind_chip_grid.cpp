#include <pybind11/stl.h>

#include "area_terms.hpp"
#include "arrays.hpp"
#include "phaze/chip_grid.hpp"

namespace phaze::bindings {
namespace {

using Axes = std::vector<std::pair<int, std::vector<double>>>;
using Ties = std::vector<std::pair<int, int>>;

ChipColumn checked_column(int column) {
  if (column < 0 || column >= kChipColumnCount) {
    throw InvalidInput("axes: column " + std::to_string(column) +
                       " is not accepted; expected 0 to " + std::to_string(kChipColumnCount - 1));
  }
  return static_cast<ChipColumn>(column);
}

ChipGrid make_grid(const py::object& base, const Axes& axes, const Ties& ties, bool tensor_local,
                   bool vector_local) {
  ChipGrid grid{view<ChipRecord>(base, "base", 1)[0], {}, {}, tensor_local, vector_local};
  double size = 1.0;
  for (const auto& [column, values] : axes) {
    for (const double value : values) {
      // Whole numbers pass through a double, which represents them exactly below 2^53.
      const double limit = is_whole(checked_column(column)) ? 9007199254740992.0 : 1e24;
      if (!(value > -limit && value < limit)) {
        throw InvalidInput("axes: a value of column " + std::to_string(column) +
                           " is out of range");
      }
    }
    size *= static_cast<double>(values.size());
    grid.axes.push_back({checked_column(column), values});
  }
  if (!(size < 9007199254740992.0)) throw InvalidInput("axes: more than 2^53 grid points");
  for (const auto& [column, source] : ties) {
    grid.ties.push_back({checked_column(column), checked_column(source)});
  }
  return grid;
}

template <typename T>
py::array_t<T> copied(const std::vector<T>& values) {
  py::array_t<T> out(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), out.mutable_data());
  return freeze(std::move(out));
}

py::tuple hand_out(const GridRows& rows) {
  return py::make_tuple(copied(rows.index), copied(rows.chips), copied(rows.area_mm2));
}

// A grid stored on the C++ side, so that its description is converted once and not in every call.
class PyGrid {
 public:
  PyGrid(const py::object& base, const Axes& axes, const Ties& ties, bool derive_tensor_local,
         bool derive_vector_local)
      : grid_(make_grid(base, axes, ties, derive_tensor_local, derive_vector_local)) {}

  std::int64_t size() const { return grid_size(grid_); }

  py::tuple filter(std::int64_t begin, std::int64_t end, const TermRates& terms,
                   std::pair<double, double> area_mm2, bool keep_small_single_core,
                   const py::object& energy_table, double max_power_w) const {
    if (begin < 0 || end > size() || begin > end) {
      throw InvalidInput("begin, end: " + std::to_string(begin) + ", " + std::to_string(end) +
                         " is not accepted; expected a range within " + std::to_string(size()));
    }
    const GridFilter filter{checked_terms(terms),
                            area_mm2.first,
                            area_mm2.second,
                            keep_small_single_core,
                            view<EnergyTable>(energy_table, "energy_table", 1)[0],
                            max_power_w};
    GridRows rows;
    {
      const py::gil_scoped_release release;
      filter_grid(grid_, filter, begin, end, rows);
    }
    return hand_out(rows);
  }

  py::tuple pick(const py::object& index, const TermRates& terms) const {
    const auto given = view<std::int64_t>(index, "index");
    const std::vector<std::int64_t> wanted(given.begin(), given.end());  // checked, then trusted
    const std::int64_t limit = size();
    for (const std::int64_t i : wanted) {
      if (i < 0 || i >= limit) {
        throw InvalidInput("index: " + std::to_string(i) + " is not accepted; expected 0 to " +
                           std::to_string(limit - 1));
      }
    }
    const AreaTerms checked = checked_terms(terms);
    GridRows rows;
    {
      const py::gil_scoped_release release;
      pick_grid(grid_, checked, wanted, rows);
    }
    return hand_out(rows);
  }

 private:
  ChipGrid grid_;
};

}  // namespace

void bind_chip_grid(py::module_& module) {
  py::class_<PyGrid>(module, "ChipGrid")
      .def(py::init<const py::object&, const Axes&, const Ties&, bool, bool>(), py::arg("base"),
           py::arg("axes"), py::arg("ties"), py::arg("derive_tensor_local"),
           py::arg("derive_vector_local"))
      .def_property_readonly("size", &PyGrid::size)
      .def("filter", &PyGrid::filter, py::arg("begin"), py::arg("end"), py::arg("terms"),
           py::arg("area_mm2"), py::arg("keep_small_single_core"), py::arg("energy_table"),
           py::arg("max_power_w"))
      .def("pick", &PyGrid::pick, py::arg("index"), py::arg("terms"));
}

}  // namespace phaze::bindings
