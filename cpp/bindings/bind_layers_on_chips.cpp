#include <algorithm>

#include "layers_on_chips.hpp"

namespace phaze::bindings {
namespace {

template <typename T>
std::span<const T> field(const py::object& record, const char* name) {
  return view<T>(record.attr(name), name);
}

// All elements of a contiguous matrix of `columns` columns.
std::span<const double> cells(const py::object& record, const char* name, py::ssize_t* columns) {
  const auto matrix = py::cast<py::array>(record.attr(name));
  if (!py::isinstance<py::array_t<double, py::array::c_style>>(matrix) || matrix.ndim() != 2) {
    throw InvalidInput(std::string(name) + ": expected a contiguous matrix of float64");
  }
  *columns = matrix.shape(1);
  return {static_cast<const double*>(matrix.data()), static_cast<std::size_t>(matrix.size())};
}

LayerGraphs graphs_of(const py::object& record) {
  return {record.attr("kinds").cast<std::int32_t>(), record.attr("variants").cast<std::int32_t>(),
          field<std::int64_t>(record, "op_ptr"),     field<std::uint8_t>(record, "types"),
          field<double>(record, "most_at_once"),     field<std::int64_t>(record, "edge_ptr"),
          field<std::int32_t>(record, "edge_from"),  field<std::int32_t>(record, "edge_to"),
          field<std::uint8_t>(record, "in_order"),   field<std::uint8_t>(record, "again"),
          field<std::uint8_t>(record, "late"),       field<double>(record, "host_s"),
          field<double>(record, "host_again_s"),     field<double>(record, "wait_s")};
}

LayerCosts costs_of(const py::object& record) {
  std::vector<CostColumns> tables;
  for (const auto& own : record.attr("tables")) {
    const auto table = py::reinterpret_borrow<py::object>(own);
    CostColumns costs{};
    py::ssize_t columns = 0;
    costs.one_core_s = cells(table, "one_core_s", &columns);
    costs.dynamic_j = cells(table, "dynamic_j", &columns);
    costs.time_s = cells(table, "time_s", &columns);
    costs.columns = columns;
    costs.row_of = field<std::int64_t>(table, "chip_of");
    tables.push_back(costs);
  }
  return {std::move(tables),
          field<std::int32_t>(record, "table"),
          field<std::int64_t>(record, "column"),
          field<double>(record, "network_s"),
          field<std::int32_t>(record, "cores"),
          field<double>(record, "hbm_bytes_per_s"),
          field<double>(record, "static_w"),
          field<double>(record, "limit_w"),
          field<double>(record, "step_s"),
          field<double>(record, "launching_s")};
}

}  // namespace

py::dict times_arrays(std::vector<TimesRow>& rows, int kinds, int variants) {
  py::dict arrays;
  const auto put = [&](const char* name, int by_variant, const auto& values_of) {
    std::vector<py::ssize_t> shape{std::ssize(rows), kinds};
    if (by_variant > 1) shape.insert(shape.begin() + 1, variants);
    py::array_t<double> array(shape);
    const std::size_t row_size =
        static_cast<std::size_t>(kinds) * static_cast<std::size_t>(by_variant > 1 ? variants : 1);
    double* out = array.mutable_data();
    std::fill_n(out, rows.size() * row_size, 0.0);
    for (TimesRow& row : rows) {
      const auto values = values_of(row);
      std::copy(values.begin(), values.end(), out);
      out += row_size;
    }
    arrays[name] = freeze(std::move(array));
  };
  put("forward_s", 1, [](TimesRow& row) { return row.forward_s(); });
  put("plain_s", 1, [](TimesRow& row) { return row.plain_s(); });
  put("backward_s", 2, [](TimesRow& row) { return row.backward_s(); });
  put("weight_grad_s", 1, [](TimesRow& row) { return row.weight_grad_s(); });
  put("forward_j", 1, [](TimesRow& row) { return row.forward_j(); });
  put("backward_j", 2, [](TimesRow& row) { return row.backward_j(); });
  put("step_s", 1, [](TimesRow& row) { return row.step_s(); });
  put("ahead_s", 1, [](TimesRow& row) { return row.ahead_s(); });
  py::array_t<double> numbers({py::ssize_t{3}, std::ssize(rows)});
  py::array_t<bool> proven(std::ssize(rows));
  for (std::size_t k = 0; k < rows.size(); ++k) {
    double* number = numbers.mutable_data() + k;
    number[0] = rows[k].hbm_bytes_per_s;
    number[rows.size()] = rows[k].static_w;
    number[2 * rows.size()] = rows[k].limit_w;
    proven.mutable_data()[k] = rows[k].proven;
  }
  const py::object parts = freeze(std::move(numbers));
  int at = 0;
  for (const char* name : {"hbm_bytes_per_s", "static_w", "limit_w"}) {
    arrays[name] = parts.attr("__getitem__")(at++);
  }
  arrays["proven"] = freeze(std::move(proven));
  return arrays;
}

PyLayersOnChips::PyLayersOnChips(const py::object& graphs, const py::object& costs)
    : graphs_(graphs), costs_(costs) {
  raise_for_layers(core_.build(graphs_of(graphs), costs_of(costs)));
}

std::span<const std::int64_t> PyLayersOnChips::checked(const py::object& chips) const {
  const auto positions = view<std::int64_t>(chips, "chips");
  for (const std::int64_t chip : positions) check(static_cast<std::size_t>(chip));
  return positions;
}

void PyLayersOnChips::check(std::size_t chip) const {
  if (chip >= core_.chips()) throw InvalidInput("chips: expected positions of the priced chips");
}

py::dict PyLayersOnChips::map(const py::object& chips, int threads) const {
  const auto positions = checked(chips);
  std::vector<TimesRow> least = rows(positions.size());
  const int workers = checked_threads(threads);
  {
    const py::gil_scoped_release release;
    each_chip(positions, workers, [&](std::size_t k, std::size_t chip) {
      core_.map(chip, &least[k]);
      core_.add_joules(chip, &least[k]);
      return Status::kOk;
    });
  }
  return times_arrays(least, core_.kinds(), core_.variants());
}

py::dict PyLayersOnChips::bound(const py::object& chips, int threads) const {
  const auto positions = checked(chips);
  std::vector<TimesRow> least = rows(positions.size());
  interruptible(1, std::numeric_limits<double>::infinity(), threads,
                [&](const SearchLimits&, int workers) {
                  each_chip(positions, workers, [&](std::size_t k, std::size_t chip) {
                    core_.add_joules(chip, &least[k]);
                    return core_.bound(chip, &least[k]);
                  });
                });
  return times_arrays(least, core_.kinds(), core_.variants());
}

py::dict PyLayersOnChips::time(const py::object& chips, const py::object& makespan_s) const {
  const auto positions = checked(chips);
  const std::size_t graphs = 2 * static_cast<std::size_t>(core_.kinds());
  const auto seconds =
      view<double>(makespan_s, "makespan_s", static_cast<py::ssize_t>(positions.size() * graphs));
  std::vector<TimesRow> times = rows(positions.size());
  {
    const py::gil_scoped_release release;
    each_chip(positions, 1, [&](std::size_t k, std::size_t chip) {
      core_.time(chip, seconds.subspan(k * graphs, graphs), &times[k]);
      core_.add_joules(chip, &times[k]);
      return Status::kOk;
    });
  }
  return times_arrays(times, core_.kinds(), core_.variants());
}

py::tuple PyLayersOnChips::roots(std::size_t chip, int threads) const {
  check(chip);
  py::array_t<double> bound_s(py::ssize_t{2} * core_.kinds());
  py::array_t<std::uint8_t> proven(bound_s.size());
  const std::span<double> bounds = writable(bound_s);
  const std::span<std::uint8_t> attained = writable(proven);
  const int workers = checked_threads(threads);
  Status status = Status::kOk;
  {
    const py::gil_scoped_release release;
    status = core_.roots(chip, workers, bounds, attained);
  }
  raise_for_layers(status);
  return py::make_tuple(freeze(std::move(bound_s)), freeze(std::move(proven)));
}

py::tuple PyLayersOnChips::schedule(const py::object& chips, std::int64_t max_nodes,
                                    int threads) const {
  const auto positions = checked(chips);
  std::vector<TimesRow> times = rows(positions.size());
  std::vector<TimesRow> least = times;
  interruptible(max_nodes, std::numeric_limits<double>::infinity(), threads,
                [&](const SearchLimits& limits, int workers) {
                  each_chip(positions, workers, [&](std::size_t k, std::size_t chip) {
                    core_.add_joules(chip, &times[k]);
                    core_.add_joules(chip, &least[k]);
                    return core_.schedule(chip, limits, &times[k], &least[k]);
                  });
                });
  return py::make_tuple(times_arrays(times, core_.kinds(), core_.variants()),
                        times_arrays(least, core_.kinds(), core_.variants()));
}

void bind_layers_on_chips(py::module_& module) {
  py::class_<PyLayersOnChips>(module, "LayersOnChips")
      .def(py::init<const py::object&, const py::object&>(), py::arg("graphs"), py::arg("costs"))
      .def("__len__", [](const PyLayersOnChips& own) { return own.core().chips(); })
      .def("map", &PyLayersOnChips::map, py::arg("chips"), py::arg("threads"))
      .def("bound", &PyLayersOnChips::bound, py::arg("chips"), py::arg("threads"))
      .def("time", &PyLayersOnChips::time, py::arg("chips"), py::arg("makespan_s"))
      .def("roots", &PyLayersOnChips::roots, py::arg("chip"), py::arg("threads"))
      .def("schedule", &PyLayersOnChips::schedule, py::arg("chips"), py::arg("max_nodes"),
           py::arg("threads"));
}

}  // namespace phaze::bindings
