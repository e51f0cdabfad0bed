#include <algorithm>
#include <vector>

#include "arrays.hpp"
#include "interrupt.hpp"
#include "phaze/layer_batch.hpp"

namespace phaze::bindings {
namespace {

// Pointers into a flat array: start at 0, never decrease, end at its length.
void check_pointers(std::span<const std::int64_t> pointers, std::size_t length, const char* name) {
  bool good = !pointers.empty() && pointers.front() == 0 &&
              pointers.back() == static_cast<std::int64_t>(length);
  for (std::size_t i = 1; good && i < pointers.size(); ++i) good = pointers[i - 1] <= pointers[i];
  if (!good) {
    throw InvalidInput(std::string(name) +
                       ": pointers must start at 0, never decrease and end at " +
                       std::to_string(length));
  }
}

// The nine arrays of a batch, in the order of phaze_fast.schedule.solve.Packed.
LayerBatch batch_of(const py::tuple& packed, bool overlap) {
  if (packed.size() != 9) throw InvalidInput("layers: expected nine arrays");
  LayerBatch batch{};
  batch.op_ptr = view<std::int64_t>(packed[0], "op_ptr");
  batch.types = view<std::uint8_t>(packed[1], "types");
  const auto ops = static_cast<py::ssize_t>(batch.types.size());
  batch.mode_ptr = view<std::int64_t>(packed[2], "mode_ptr", ops + 1);
  batch.mode_cores = view<std::int32_t>(packed[3], "mode_cores");
  batch.mode_s =
      view<double>(packed[4], "mode_s", static_cast<py::ssize_t>(batch.mode_cores.size()));
  batch.edge_ptr =
      view<std::int64_t>(packed[5], "edge_ptr", static_cast<py::ssize_t>(batch.op_ptr.size()));
  batch.edge_from = view<std::int32_t>(packed[6], "edge_from");
  batch.edge_to =
      view<std::int32_t>(packed[7], "edge_to", static_cast<py::ssize_t>(batch.edge_from.size()));
  check_pointers(batch.op_ptr, batch.types.size(), "op_ptr");
  check_pointers(batch.mode_ptr, batch.mode_cores.size(), "mode_ptr");
  check_pointers(batch.edge_ptr, batch.edge_from.size(), "edge_ptr");
  const auto layers = static_cast<py::ssize_t>(batch.op_ptr.size()) - 1;
  batch.cores = view<std::int32_t>(packed[8], "cores", layers * kResources);
  batch.rule = overlap ? ScheduleRule::kOverlap : ScheduleRule::kExclusive;
  return batch;
}

struct Results {
  Results(std::size_t layers, std::size_t ops)
      : makespan(static_cast<py::ssize_t>(layers)),
        bound(makespan.size()),
        proved(makespan.size()),
        nodes(makespan.size()),
        status(makespan.size()),
        start(static_cast<py::ssize_t>(ops)),
        mode(start.size()) {}

  LayerAnswers answers() {
    return {writable(makespan), writable(bound), writable(proved), writable(nodes),
            writable(status),   writable(start), writable(mode)};
  }

  py::tuple frozen() && {
    return py::make_tuple(freeze(std::move(makespan)), freeze(std::move(bound)),
                          freeze(std::move(proved)), freeze(std::move(nodes)),
                          freeze(std::move(status)), freeze(std::move(start)),
                          freeze(std::move(mode)));
  }

  py::array_t<double> makespan;
  py::array_t<double> bound;
  py::array_t<std::int32_t> proved;
  py::array_t<std::int64_t> nodes;
  py::array_t<std::int32_t> status;
  py::array_t<double> start;
  py::array_t<std::int32_t> mode;
};

py::tuple schedule(const py::tuple& layers, bool overlap, std::int64_t max_nodes,
                   double max_seconds, int threads, bool canonical, const py::object& enough_s) {
  LayerBatch batch = batch_of(layers, overlap);
  if (!enough_s.is_none()) {
    const auto count = static_cast<py::ssize_t>(batch.op_ptr.size()) - 1;
    batch.enough_s = view<double>(enough_s, "enough_s", count);
  }
  Results results(batch.op_ptr.size() - 1, batch.types.size());
  const LayerAnswers answers = results.answers();
  const Terms terms = canonical ? Terms::kCanonical : Terms::kGiven;
  interruptible(max_nodes, max_seconds, threads, [&](const SearchLimits& limits, int workers) {
    solve_layers(batch, limits, terms, answers, workers);
  });
  return std::move(results).frozen();
}

// The arrays of a graph, in the order of phaze_fast.schedule.layers.Graph, and its latencies.
py::tuple schedule_on_chips(const py::tuple& graph, const py::object& one_core_s,
                            const py::object& all_cores_s, const py::object& cores, bool overlap,
                            std::int64_t max_nodes, double max_seconds, int threads,
                            const py::object& enough_s, bool only_decide) {
  if (graph.size() != 3) throw InvalidInput("graph: expected three arrays");
  GraphOnChips given{};
  given.types = view<std::uint8_t>(graph[0], "types");
  given.edge_from = view<std::int32_t>(graph[1], "edge_from");
  given.edge_to =
      view<std::int32_t>(graph[2], "edge_to", static_cast<py::ssize_t>(given.edge_from.size()));
  given.cores = view<std::int32_t>(cores, "cores");
  const std::size_t chips = given.cores.size() / kResources;
  const std::size_t ops = given.types.size();
  if (chips * kResources != given.cores.size()) {
    throw InvalidInput("cores: expected three numbers for each chip");
  }
  const auto latencies = static_cast<py::ssize_t>(chips * ops);
  given.one_core_s = view<double>(one_core_s, "one_core_s", latencies);
  given.all_cores_s = view<double>(all_cores_s, "all_cores_s", latencies);
  given.rule = overlap ? ScheduleRule::kOverlap : ScheduleRule::kExclusive;
  if (!enough_s.is_none()) {
    given.enough_s = view<double>(enough_s, "enough_s", static_cast<py::ssize_t>(chips));
  }
  Results results(chips, chips * ops);
  const LayerAnswers answers = results.answers();
  interruptible(max_nodes, max_seconds, threads, [&](SearchLimits limits, int workers) {
    limits.only_decide = only_decide;
    solve_on_chips(given, limits, answers, workers);
  });
  return std::move(results).frozen();
}

// The canonical form of each layer as bytes; empty bytes for an invalid layer.
py::list canonical(const py::tuple& layers, bool overlap) {
  const LayerBatch batch = batch_of(layers, overlap);
  py::list forms;
  std::vector<std::uint8_t> bytes;
  for (std::size_t b = 0; b + 1 < batch.op_ptr.size(); ++b) {
    canonical_bytes(batch, b, &bytes);
    forms.append(py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  return forms;
}

py::tuple replay_all(const py::tuple& layers, bool overlap, const py::object& start,
                     const py::object& mode) {
  const LayerBatch batch = batch_of(layers, overlap);
  const auto ops = static_cast<py::ssize_t>(batch.types.size());
  const auto starts = view<double>(start, "start", ops);
  const auto modes = view<std::int32_t>(mode, "mode", ops);
  Results results(batch.op_ptr.size() - 1, batch.types.size());
  const LayerAnswers answers = results.answers();
  std::copy(starts.begin(), starts.end(), answers.start_s.begin());
  std::copy(modes.begin(), modes.end(), answers.mode.begin());
  {
    const py::gil_scoped_release release;
    replay_layers(batch, answers);
  }
  return py::make_tuple(freeze(std::move(results.makespan)), freeze(std::move(results.status)),
                        freeze(std::move(results.start)), freeze(std::move(results.mode)));
}

}  // namespace

void bind_layer_schedule(py::module_& module) {
  module.attr("MAX_LAYER_OPS") = kMaxLayerOps;
  module.attr("MAX_LAYER_MODES") = kMaxModes;
  module.attr("PROVED_BY") = py::make_tuple("nothing", "list-schedule", "branch-and-bound");
  module.def("schedule_layers", &schedule, py::arg("layers"), py::arg("overlap"),
             py::arg("max_nodes"), py::arg("max_seconds"), py::arg("threads"),
             py::arg("canonical") = false, py::arg("enough_s") = py::none());
  module.def("schedule_on_chips", &schedule_on_chips, py::arg("graph"), py::arg("one_core_s"),
             py::arg("all_cores_s"), py::arg("cores"), py::arg("overlap"), py::arg("max_nodes"),
             py::arg("max_seconds"), py::arg("threads"), py::arg("enough_s") = py::none(),
             py::arg("only_decide") = false);
  module.def("canonical_layers", &canonical, py::arg("layers"), py::arg("overlap"));
  module.def("replay_layers", &replay_all, py::arg("layers"), py::arg("overlap"), py::arg("start"),
             py::arg("mode"));
}

}  // namespace phaze::bindings
