#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <tuple>

#include "arrays.hpp"
#include "phaze/op_cost.hpp"
#include "phaze/parallel.hpp"
#include "phaze/path_bounds.hpp"

namespace phaze::bindings {
namespace {

using PrecisionTuple = std::array<double, 7>;  // the fields of Precision

Precision precision_of(const PrecisionTuple& p) {
  return {p[0], p[1], p[2], p[3], p[4], p[5], p[6]};
}

ChipBatch batch_of(const py::object& chips, const py::object& tuning_of, const py::object& tunings,
                   const PrecisionTuple& precision) {
  const auto rows = view<ChipRecord>(chips, "chips");
  return {rows, view<std::int32_t>(tuning_of, "tuning_of", static_cast<py::ssize_t>(rows.size())),
          view<TuningRecord>(tunings, "tunings"), precision_of(precision)};
}

Cores cores_of(bool one_core) { return one_core ? Cores::kOne : Cores::kAll; }

py::array_t<CostRecord> costs(const py::object& ops, const py::object& chips,
                              const py::object& tuning_of, const py::object& tunings,
                              const PrecisionTuple& precision, bool one_core,
                              const py::object& energy_table, const py::object& static_w,
                              int threads) {
  const auto listed = view<OperatorRecord>(ops, "ops");
  const ChipBatch batch = batch_of(chips, tuning_of, tunings, precision);
  const auto count = static_cast<py::ssize_t>(batch.chips.size());
  const auto tables = view<EnergyTable>(energy_table, "energy_table", count);
  const auto watts = view<double>(static_w, "static_w", count);
  const int workers = checked_threads(threads);
  return computed<CostRecord>(
      listed.size() * batch.chips.size(), [&](std::span<CostRecord> filled) {
        op_cost_batch(listed, batch, cores_of(one_core), tables, watts, filled, workers);
      });
}

// Seconds on all cores and on one, lower bounds, and joules: (chips, operators), flat.
py::tuple figures(const py::object& ops, const py::object& chips, const py::object& tuning_of,
                  const py::object& tunings, const PrecisionTuple& precision,
                  const py::object& energy_table, int threads) {
  const auto listed = view<OperatorRecord>(ops, "ops");
  const ChipBatch batch = batch_of(chips, tuning_of, tunings, precision);
  const auto count = static_cast<py::ssize_t>(batch.chips.size());
  const auto tables = view<EnergyTable>(energy_table, "energy_table", count);
  const int workers = checked_threads(threads);
  const auto cells = static_cast<py::ssize_t>(listed.size()) * count;
  py::array_t<double> time_s(cells), one_core_s(cells), bound_s(cells), dynamic_j(cells);
  const OpFigures out{writable(time_s), writable(one_core_s), writable(bound_s),
                      writable(dynamic_j)};
  {
    const py::gil_scoped_release release;
    op_figures_batch(listed, batch, tables, out, workers);
  }
  return py::make_tuple(freeze(std::move(time_s)), freeze(std::move(one_core_s)),
                        freeze(std::move(bound_s)), freeze(std::move(dynamic_j)));
}

py::array_t<double> energy_bounds(const py::object& ops, const py::object& chips,
                                  const py::object& tuning_of, const py::object& tunings,
                                  const PrecisionTuple& precision, const py::object& energy_table,
                                  const py::object& count, int threads) {
  const auto listed = view<OperatorRecord>(ops, "ops");
  const ChipBatch batch = batch_of(chips, tuning_of, tunings, precision);
  const auto tables =
      view<EnergyTable>(energy_table, "energy_table", static_cast<py::ssize_t>(batch.chips.size()));
  const auto counts = view<double>(count, "count", static_cast<py::ssize_t>(listed.size()));
  const int workers = checked_threads(threads);
  return computed<double>(batch.chips.size(), [&](std::span<double> filled) {
    energy_bound_batch(listed, batch, tables, counts, filled, workers);
  });
}

template <void (*Kernel)(std::span<const OperatorRecord>, const ChipBatch&, Cores,
                         std::span<double>, int)>
py::array_t<double> seconds(const py::object& ops, const py::object& chips,
                            const py::object& tuning_of, const py::object& tunings,
                            const PrecisionTuple& precision, bool one_core, int threads) {
  const auto listed = view<OperatorRecord>(ops, "ops");
  const ChipBatch batch = batch_of(chips, tuning_of, tunings, precision);
  const int workers = checked_threads(threads);
  return computed<double>(listed.size() * batch.chips.size(), [&](std::span<double> filled) {
    Kernel(listed, batch, cores_of(one_core), filled, workers);
  });
}

// HBM bytes of every operator with every buffer: shape (capacities, operators), flat.
py::array_t<double> hbm_bytes(const py::object& ops, const py::object& capacities,
                              const PrecisionTuple& precision, bool exact) {
  const auto listed = view<OperatorRecord>(ops, "ops");
  const auto sizes = view<double>(capacities, "capacities");
  const Precision p = precision_of(precision);
  return computed<double>(listed.size() * sizes.size(), [&](std::span<double> filled) {
    for (std::size_t i = 0; i < filled.size(); ++i) {
      filled[i] = op_hbm_bytes(listed[i % listed.size()], sizes[i / listed.size()], p, exact);
    }
  });
}

// Checks that pointers cover their arrays, operators exist, and predecessors come before a node.
void check_graphs(const PathBatch& paths, std::size_t ops) {
  const auto rising = [](std::span<const std::int64_t> pointers, std::size_t length) {
    return !pointers.empty() && pointers.front() == 0 &&
           pointers.back() == static_cast<std::int64_t>(length) &&
           std::is_sorted(pointers.begin(), pointers.end());
  };
  bool good =
      rising(paths.node_ptr, paths.op.size()) && rising(paths.before_ptr, paths.before.size());
  for (std::size_t i = 0; good && i < paths.op.size(); ++i) {
    good = paths.op[i] >= 0 && static_cast<std::size_t>(paths.op[i]) < ops;
    for (std::int64_t e = paths.before_ptr[i]; good && e < paths.before_ptr[i + 1]; ++e) {
      const std::int32_t before = paths.before[static_cast<std::size_t>(e)];
      good = before >= 0 && static_cast<std::size_t>(before) < i;
    }
  }
  if (!good) throw InvalidInput("graphs: positions must exist, and nodes wait for earlier ones");
}

// `formats` lists operators, tunings and precision of each; `shared`, if given, makes it bounds of
// work.
py::array_t<double> path_bounds(const py::sequence& formats, const py::object& chips,
                                const py::object& tuning_of, const py::tuple& graphs,
                                const std::optional<py::tuple>& shared, int threads) {
  std::vector<FormatOps> listed;
  std::size_t ops = 0;
  for (const py::handle& own : formats) {
    const auto parts = own.cast<std::tuple<py::object, py::object, PrecisionTuple>>();
    listed.push_back({view<OperatorRecord>(std::get<0>(parts), "ops"),
                      view<TuningRecord>(std::get<1>(parts), "tunings"),
                      precision_of(std::get<2>(parts))});
    ops += listed.back().ops.size();
  }
  if (listed.empty()) throw InvalidInput("formats: an empty list is not accepted");
  const auto rows = view<ChipRecord>(chips, "chips");
  const auto tunings =
      view<std::int32_t>(tuning_of, "tuning_of", static_cast<py::ssize_t>(rows.size()));
  if (graphs.size() != 7) throw InvalidInput("graphs: expected seven arrays");
  PathBatch paths{};
  paths.node_ptr = view<std::int64_t>(graphs[0], "node_ptr");
  paths.op = view<std::int32_t>(graphs[1], "op");
  const auto nodes = static_cast<py::ssize_t>(paths.op.size());
  paths.extra_s = view<double>(graphs[2], "extra_s", nodes);
  paths.before_ptr = view<std::int64_t>(graphs[3], "before_ptr", nodes + 1);
  paths.before = view<std::int32_t>(graphs[4], "before");
  const auto count = static_cast<py::ssize_t>(paths.node_ptr.size()) - 1;
  paths.count = view<double>(graphs[5], "count", count);
  paths.sum_of = view<std::int32_t>(graphs[6], "sum_of", count);
  check_graphs(paths, ops);
  std::int32_t sums = 0;
  for (const std::int32_t own : paths.sum_of) {
    if (own < 0 || own > sums) throw InvalidInput("sum_of: expected 0, 1, ... as they first occur");
    sums = std::max(sums, own + 1);
  }
  SharedWork work{};
  if (shared) {
    if (shared->size() != 2) throw InvalidInput("shared: expected an array and a truth value");
    work = {view<double>((*shared)[0], "most_at_once", nodes), (*shared)[1].cast<bool>()};
  }
  const int workers = checked_threads(threads);
  return computed<double>(rows.size() * static_cast<std::size_t>(sums),
                          [&](std::span<double> filled) {
                            if (shared) {
                              work_bound_batch(listed, rows, tunings, paths, work, filled, workers);
                            } else {
                              path_bound_batch(listed, rows, tunings, paths, filled, workers);
                            }
                          });
}

py::tuple cycles(const py::object& m, const py::object& k, const py::object& n,
                 const py::object& rows, const py::object& cols, const py::object& dataflow,
                 bool overlapped, int threads) {
  const auto ms = view<std::int64_t>(m, "m");
  const auto length = static_cast<py::ssize_t>(ms.size());
  const auto ks = view<std::int64_t>(k, "k", length);
  const auto ns = view<std::int64_t>(n, "n", length);
  const auto rs = view<std::int64_t>(rows, "rows", length);
  const auto cs = view<std::int64_t>(cols, "cols", length);
  const auto flows = view<std::int32_t>(dataflow, "dataflow", length);
  for (const std::int32_t flow : flows) {
    if (flow < 0 || flow >= kDataflows) {
      throw InvalidInput("dataflow: " + std::to_string(flow) +
                         " is not accepted; expected a code from 0 to 2");
    }
  }
  const int workers = checked_threads(threads);
  py::array_t<std::int64_t> counts(length);
  py::array_t<std::uint8_t> states(length);
  const auto count = writable(counts);
  const auto state = writable(states);
  {
    const py::gil_scoped_release release;
    parallel_for(ms.size(), workers, 4096, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        Status status = Status::kOk;
        count[i] = array_cycles(ms[i], ks[i], ns[i], rs[i], cs[i], static_cast<Dataflow>(flows[i]),
                                overlapped, &status);
        state[i] = static_cast<std::uint8_t>(status);
      }
    });
  }
  return py::make_tuple(freeze(std::move(counts)), freeze(std::move(states)));
}

}  // namespace

void bind_op_cost(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(OperatorRecord, kind, unit, b, m, n, k, flops, read_bytes, write_bytes,
                       payload_bytes, collective, group, causal, epilogue, function, format,
                       epilogue_functions, kept_share);
  module.attr("OPERATOR_DTYPE") = py::dtype::of<OperatorRecord>();
  PYBIND11_NUMPY_DTYPE(VectorCost, ops_per_element, ops_per_row, launches, byte_factor, row_limit,
                       long_ops, long_bytes, most_rows, row_cycles);
  PYBIND11_NUMPY_DTYPE(TuningRecord, clock_factor, launch_s, vector_launch_share, efficiency,
                       unit_overhead_s, reduction_s, sustained_macs_per_s, hbm_share,
                       hbm_write_share, product_hbm_share, port_share, port_even_bytes_per_cycle,
                       port_odd_bytes_per_cycle, unaligned_unit_overhead_s, unaligned_reduction_s,
                       resident_share, attention_efficiency, attention_unit_s, attention_ops,
                       attention_backward_efficiency, attention_backward_ops, overlapped, tiles,
                       dataflows, attention_least, attention_most, even_tiles, odd_tiles, unused,
                       tile_m, tile_n, even_m, even_n, odd_m, odd_n, functions);
  PYBIND11_NUMPY_DTYPE(CostRecord, time_s, bound_s, compute_s, port_s, buffer_s, hbm_s, power_s,
                       vector_s, fill_s, fixed_s, overhead_s, compute_cycles, macs, vector_ops,
                       port_bytes, buffer_bytes, hbm_bytes, utilization, energy_j, block_m, block_n,
                       split, tiles_i, tiles_j, dataflow, order, limit, status);
  module.attr("TUNING_DTYPE") = py::dtype::of<TuningRecord>();
  module.attr("DATAFLOWS") = py::make_tuple("os", "ws", "is");
  module.attr("LIMITS") =
      py::make_tuple("compute", "port", "buffer", "hbm", "power", "vector", "launch");
  module.attr("ORDERS") = py::make_tuple("outputs", "inputs", "weights", "nothing");
  py::tuple functions(std::size(kFunctionNames));
  for (std::size_t i = 0; i < std::size(kFunctionNames); ++i) functions[i] = kFunctionNames[i];
  module.attr("FUNCTIONS") = functions;
  module.attr("FIRST_CONVOLUTION") = kFirstConvolution;
  module.attr("MAX_TILES") = kMaxTiles;
  module.attr("MAX_EPILOGUES") = kMaxEpilogues;
  const auto define = [&](const char* name, auto function) {
    module.def(name, function, py::arg("ops"), py::arg("chips"), py::arg("tuning_of"),
               py::arg("tunings"), py::arg("precision"), py::arg("one_core"), py::arg("threads"));
  };
  module.def("op_hbm_bytes", &hbm_bytes, py::arg("ops"), py::arg("capacities"),
             py::arg("precision"), py::arg("exact"));
  define("op_times", &seconds<op_time_batch>);
  define("op_bounds", &seconds<op_bound_batch>);
  module.def("path_bounds", &path_bounds, py::arg("formats"), py::arg("chips"),
             py::arg("tuning_of"), py::arg("graphs"), py::arg("shared"), py::arg("threads"));
  module.def("energy_bounds", &energy_bounds, py::arg("ops"), py::arg("chips"),
             py::arg("tuning_of"), py::arg("tunings"), py::arg("precision"),
             py::arg("energy_table"), py::arg("count"), py::arg("threads"));
  module.def("op_costs", &costs, py::arg("ops"), py::arg("chips"), py::arg("tuning_of"),
             py::arg("tunings"), py::arg("precision"), py::arg("one_core"), py::arg("energy_table"),
             py::arg("static_w"), py::arg("threads"));
  module.def("op_figures", &figures, py::arg("ops"), py::arg("chips"), py::arg("tuning_of"),
             py::arg("tunings"), py::arg("precision"), py::arg("energy_table"), py::arg("threads"));
  module.def("array_cycles", &cycles, py::arg("m"), py::arg("k"), py::arg("n"), py::arg("rows"),
             py::arg("cols"), py::arg("dataflow"), py::arg("overlapped"), py::arg("threads"));
}

}  // namespace phaze::bindings
