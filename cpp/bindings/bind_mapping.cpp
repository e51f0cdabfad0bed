#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <vector>

#include "arrays.hpp"
#include "guarded.hpp"
#include "phaze/mapping_search.hpp"
#include "phaze/relaxation.hpp"

namespace phaze::bindings {
namespace {

// The operator mappings of a mapping change, also while the GIL is released; its problem and its
// choices never change, and a relaxation reads only those.
using PyMapping = Guarded<Mapping>;
using PyRelaxation = Guarded<Relaxation>;

py::array_t<MapScore> one_score(const MapScore& score) {
  return array(std::span<const MapScore>(&score, 1));
}

template <std::size_t n>
py::tuple names_of(const std::array<const char*, n>& names) {
  py::tuple tuple(n);
  for (std::size_t i = 0; i < n; ++i) tuple[i] = names[i];
  return tuple;
}

std::unique_ptr<PyMapping> make(const py::object& slots, const py::object& ops,
                                const py::object& edges, const py::object& rules,
                                const py::object& divisors, const py::object& column,
                                const py::object& forward_s, const py::object& backward_s,
                                const py::object& stash_bytes, const py::object& live_bytes,
                                const py::object& parameters, const py::object& weight_grad_s,
                                const py::object& blocks, const py::object& boundary,
                                const py::object& chain, const py::object& cross_stage) {
  MapProblem p{};
  p.slots = view<MeshRun>(slots, "slots");
  p.ops = view<MapOpRecord>(ops, "ops");
  p.edges = view<MapEdgeRecord>(edges, "edges");
  p.rules = view<MapRulesRecord>(rules, "rules", 1)[0];
  p.divisors = view<std::int32_t>(divisors, "divisors");
  p.column = view<std::int32_t>(column, "column");
  p.tables = {
      view<double>(forward_s, "forward_s"),     view<double>(backward_s, "backward_s"),
      view<double>(stash_bytes, "stash_bytes"), view<double>(live_bytes, "live_bytes"),
      view<double>(parameters, "parameters"),   view<double>(weight_grad_s, "weight_grad_s")};
  p.columns =
      p.ops.empty() ? 0 : static_cast<std::int32_t>(p.tables.forward_s.size() / p.ops.size());
  p.blocks = view<std::int32_t>(blocks, "blocks");
  p.boundary_s = view<double>(boundary, "boundary_s");
  p.chain = view<std::int32_t>(chain, "chain");
  if (!cross_stage.is_none()) p.cross_stage_s = view<double>(cross_stage, "cross_stage_s");
  const Status status = check_problem(p);
  if (status != Status::kOk) throw InvalidInput(std::string("problem: ") + sentence(status));
  return std::make_unique<PyMapping>("Mapping", p);
}

const OpMapping& checked(const Mapping& mapping, int op, const OpMapping& op_mapping) {
  if (op < 0 || op >= mapping.ops()) {
    throw InvalidInput("op: " + std::to_string(op) + " is not accepted; expected 0 to " +
                       std::to_string(mapping.ops() - 1));
  }
  if (!mapping.legal(op, op_mapping)) {
    throw InvalidInput("op_mappings: operator " + std::to_string(op) +
                       " breaks a rule of the encoding");
  }
  return op_mapping;
}

void need_op_mappings(const Mapping& mapping) {
  if (!mapping.assigned()) throw InvalidInput("op_mappings: none yet; expected assign() first");
}

void assign(PyMapping& object, const py::object& op_mappings) {
  const Mapping& mapping = object.fixed();
  const auto given = view<OpMapping>(op_mappings, "op_mappings", mapping.ops());
  for (int i = 0; i < mapping.ops(); ++i) checked(mapping, i, given[static_cast<std::size_t>(i)]);
  PyMapping::Turn(object)->assign(given);
}

void change(PyMapping& object, int op, const py::object& op_mapping) {
  const OpMapping wanted = view<OpMapping>(op_mapping, "op_mapping", 1)[0];
  const PyMapping::Turn mapping(object);
  need_op_mappings(*mapping);
  mapping->change(op, checked(*mapping, op, wanted));
}

std::span<const std::uint8_t> outputs_of(const Mapping& mapping, const py::object& outputs) {
  if (outputs.is_none()) return {};
  const auto given = view<std::uint8_t>(outputs, "outputs",
                                        static_cast<py::ssize_t>(mapping.stages()) * mapping.ops());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const int op = static_cast<int>(i % static_cast<std::size_t>(mapping.ops()));
    if (given[i] >= kOutputCount ||
        (given[i] != 0 && (mapping.op(op).outputs >> given[i] & 1) == 0) ||
        (given[i] == 2 && !(mapping.rules().stream_capacity_bytes > 0.0))) {
      throw InvalidInput("outputs: operator " + std::to_string(op) +
                         " does not accept what it is given");
    }
  }
  return given;
}

MapScore scored(PyMapping& object, const py::object& outputs, std::vector<MapStage>* stages) {
  const auto given = outputs_of(object.fixed(), outputs);
  const PyMapping::Turn mapping(object);
  need_op_mappings(*mapping);
  return mapping->score(given, stages);
}

py::array_t<MapScore> score(PyMapping& object, const py::object& outputs) {
  return one_score(scored(object, outputs, nullptr));
}

// Times and bytes of one stage as Python reads them.
struct StageRecord {
  double load_s, memory_bytes, state_bytes, activation_bytes, over_bytes, isolated_s;
};

// Returns (records of the stages, shape (stages,); outputs, shape (stages, ops)).
py::tuple stages(PyMapping& object, const py::object& outputs) {
  std::vector<MapStage> stages;
  scored(object, outputs, &stages);
  const int ops = object.fixed().ops();
  std::vector<StageRecord> records;
  py::array_t<std::uint8_t> chosen(
      {static_cast<py::ssize_t>(stages.size()), static_cast<py::ssize_t>(ops)});
  for (const MapStage& s : stages) {
    std::copy_n(s.outputs.begin(), ops,
                chosen.mutable_data(static_cast<py::ssize_t>(records.size())));
    records.push_back(
        {s.load_s, s.memory_bytes, s.state_bytes, s.activation_bytes, s.over_bytes, s.isolated_s});
  }
  return py::make_tuple(array(records), freeze(std::move(chosen)));
}

py::array_t<OpMapping> op_mappings_of(PyMapping& object) {
  std::vector<OpMapping> op_mappings;
  {
    const PyMapping::Turn mapping(object);
    need_op_mappings(*mapping);
    for (int i = 0; i < mapping->ops(); ++i) op_mappings.push_back(mapping->op_mapping(i));
  }
  return array(op_mappings);
}

py::array_t<OpMapping> choices(const PyMapping& object, int op) {
  if (op < 0 || op >= object.fixed().ops()) throw InvalidInput("op: out of range");
  return array(object.fixed().choices(op));
}

bool legal(const PyMapping& object, int op, const py::object& op_mapping) {
  if (op < 0 || op >= object.fixed().ops()) throw InvalidInput("op: out of range");
  return object.fixed().legal(op, view<OpMapping>(op_mapping, "op_mapping", 1)[0]);
}

// Searches from the mapping's operator mappings, without the GIL.
template <typename Search>
py::tuple searched(PyMapping& object, const Search& search) {
  MapSearchResult result;
  {
    const PyMapping::Turn mapping(object);
    need_op_mappings(*mapping);
    const py::gil_scoped_release release;
    result = search(*mapping);
  }
  return py::make_tuple(array(result.op_mappings), one_score(result.score), result.evaluations);
}

py::tuple annealed(PyMapping& object, std::uint64_t seed, std::int64_t steps, double start) {
  return searched(object, [&](Mapping& mapping) { return anneal(mapping, {seed, steps, start}); });
}

py::tuple descended(PyMapping& object, int rounds) {
  return searched(object, [&](Mapping& mapping) { return descend(mapping, rounds); });
}

constexpr double kMostWays = 1e8;

py::tuple exhausted(PyMapping& object) {
  if (ways(object.fixed()) > kMostWays) {
    throw InvalidInput("problem: too many mappings to try them all; expected at most 1e8");
  }
  return searched(object, [](Mapping& mapping) { return exhaust(mapping); });
}

void need_choices(const Mapping& mapping) {
  for (int op = 0; op < mapping.ops(); ++op) {
    if (mapping.choices(op).empty()) {
      throw InvalidInput("problem: operator " + std::to_string(op) +
                         " has no legal operator mapping");
    }
  }
}

// Returns (least bytes, the limit on these bytes, operator mappings with the least bytes).
py::tuple least_memory_of(const PyMapping& object, double off_wafer) {
  const Mapping& mapping = object.fixed();
  if (!(off_wafer >= 0.0 && off_wafer <= 1e100)) {
    throw InvalidInput("off_wafer: expected 0 to 1e100");
  }
  need_choices(mapping);
  MapMemory found;
  {
    const py::gil_scoped_release release;
    found = least_memory(mapping, off_wafer);
  }
  const MapRulesRecord& rules = mapping.rules();
  const double limit = rules.capacity_bytes + off_wafer * rules.stream_capacity_bytes;
  return py::make_tuple(found.bytes, limit, array(found.op_mappings));
}

std::unique_ptr<PyRelaxation> relaxed(const PyMapping& object) {
  const Mapping& mapping = object.fixed();
  need_choices(mapping);
  const py::gil_scoped_release release;
  return std::make_unique<PyRelaxation>("Relaxation", mapping);
}

constexpr double kMostPrice = 1e100;

py::tuple bound_of(PyRelaxation& object, double theta, double price, double phi, double enough) {
  if (!(theta >= 0.0 && theta <= 1.0 && phi >= 0.0 && phi <= 1.0 && price >= 0.0 &&
        price <= kMostPrice)) {
    throw InvalidInput("theta, phi: expected 0 to 1; price: expected 0 to 1e100");
  }
  MapBound bound;
  {
    const PyRelaxation::Turn relaxation(object);
    const py::gil_scoped_release release;
    bound = relaxation->bound(theta, phi, price, enough);
  }
  return py::make_tuple(bound.time_s, array(bound.op_mappings));
}

}  // namespace

void bind_mapping(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(MeshRun, axis, size, stride);
  PYBIND11_NUMPY_DTYPE(OpMapping, slots, mode, algorithm);
  PYBIND11_NUMPY_DTYPE(MapOpRecord, part, roles, outputs, product, output_stored, expert, overlap,
                       limit, stat_bytes, gather_bytes);
  PYBIND11_NUMPY_DTYPE(MapEdgeRecord, from, to, kind, again, bytes);
  PYBIND11_NUMPY_DTYPE(MapRulesRecord, x_bytes_per_s, y_bytes_per_s, hop_s, capacity_bytes,
                       stream_capacity_bytes, stream_bytes_per_s, memory_bytes_per_s, weight_bytes,
                       gradient_bytes, state_bytes, step_bytes, boundary_bytes, micro_batches,
                       modes, volume, linear, stream_shared, chunks, zero_bubble, fabric, pieces,
                       outer_tail_s, stream_link_s, stream_both_s);
  PYBIND11_NUMPY_DTYPE(MapScore, time_s, memory_bytes, over_bytes, stream_bytes, stream_over_bytes,
                       slowest_stage_s, compute_s, blocking_s, hidden_s, tail_s);
  PYBIND11_NUMPY_DTYPE(StageRecord, load_s, memory_bytes, state_bytes, activation_bytes, over_bytes,
                       isolated_s);
  module.attr("MESH_RUN_DTYPE") = py::dtype::of<MeshRun>();
  module.attr("OP_MAPPING_DTYPE") = py::dtype::of<OpMapping>();
  module.attr("MAP_OP_DTYPE") = py::dtype::of<MapOpRecord>();
  module.attr("MAP_EDGE_DTYPE") = py::dtype::of<MapEdgeRecord>();
  module.attr("MAP_RULES_DTYPE") = py::dtype::of<MapRulesRecord>();
  module.attr("MAP_SCORE_DTYPE") = py::dtype::of<MapScore>();
  module.attr("ROLES") = names_of(kRoleNames);
  module.attr("WEIGHT_MODES") = names_of(kWeightModeNames);
  module.attr("OUTPUTS") = names_of(kOutputNames);
  module.attr("EDGE_KINDS") = names_of(kEdgeKindNames);
  module.attr("MAX_SLOTS") = kMaxSlots;
  module.attr("MAX_MAP_STAGES") = kMaxMapStages;
  module.attr("RUNS_PER_AXIS") = kRunsPerAxis;
  py::class_<PyMapping>(module, "Mapping")
      .def(py::init(&make), py::kw_only(), py::arg("slots"), py::arg("ops"), py::arg("edges"),
           py::arg("rules"), py::arg("divisors"), py::arg("column"), py::arg("forward_s"),
           py::arg("backward_s"), py::arg("stash_bytes"), py::arg("live_bytes"),
           py::arg("parameters"), py::arg("weight_grad_s"), py::arg("blocks"),
           py::arg("boundary_s"), py::arg("chain"), py::arg("cross_stage_s") = py::none())
      .def("assign", &assign, py::arg("op_mappings"))
      .def("change", &change, py::arg("op"), py::arg("op_mapping"))
      .def("op_mappings", &op_mappings_of)
      .def("choices", &choices, py::arg("op"))
      .def("legal", &legal, py::arg("op"), py::arg("op_mapping"))
      .def("score", &score, py::arg("outputs") = py::none())
      .def("stages", &stages, py::arg("outputs") = py::none())
      .def("anneal", &annealed, py::arg("seed"), py::arg("steps"), py::arg("start"))
      .def("descend", &descended, py::arg("rounds"))
      .def("mapping_count", [](const PyMapping& object) { return ways(object.fixed()); })
      .def("exhaust", &exhausted)
      .def("least_memory", &least_memory_of, py::arg("off_wafer") = 0.0)
      .def("relaxation", &relaxed, py::keep_alive<0, 1>());
  py::class_<PyRelaxation>(module, "Relaxation")
      .def("bound", &bound_of, py::arg("theta"), py::arg("price"), py::arg("phi") = 0.0,
           py::arg("enough") = std::numeric_limits<double>::infinity());
}

}  // namespace phaze::bindings
