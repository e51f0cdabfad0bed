#include <chrono>

#include "arrays.hpp"
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

// Ctrl-C is noticed while kernels run without the GIL; asked at most every 50 ms.
struct Signals {
  std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
  bool raised = false;
};

bool interrupted(void* context) {
  auto* signals = static_cast<Signals*>(context);
  if (signals->raised) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now - signals->last < std::chrono::milliseconds(50)) return false;
  signals->last = now;
  const py::gil_scoped_acquire acquire;
  signals->raised = PyErr_CheckSignals() != 0;
  return signals->raised;
}

py::tuple schedule(const py::object& op_ptr, const py::object& types, const py::object& mode_ptr,
                   const py::object& mode_cores, const py::object& mode_s,
                   const py::object& edge_ptr, const py::object& edge_from,
                   const py::object& edge_to, const py::object& cores, bool overlap,
                   std::int64_t max_nodes, double max_seconds, int threads) {
  LayerBatch batch{};
  batch.op_ptr = view<std::int64_t>(op_ptr, "op_ptr");
  batch.types = view<std::uint8_t>(types, "types");
  const auto ops = static_cast<py::ssize_t>(batch.types.size());
  batch.mode_ptr = view<std::int64_t>(mode_ptr, "mode_ptr", ops + 1);
  batch.mode_cores = view<std::int32_t>(mode_cores, "mode_cores");
  batch.mode_s = view<double>(mode_s, "mode_s", static_cast<py::ssize_t>(batch.mode_cores.size()));
  batch.edge_ptr =
      view<std::int64_t>(edge_ptr, "edge_ptr", static_cast<py::ssize_t>(batch.op_ptr.size()));
  batch.edge_from = view<std::int32_t>(edge_from, "edge_from");
  batch.edge_to =
      view<std::int32_t>(edge_to, "edge_to", static_cast<py::ssize_t>(batch.edge_from.size()));
  check_pointers(batch.op_ptr, batch.types.size(), "op_ptr");
  check_pointers(batch.mode_ptr, batch.mode_cores.size(), "mode_ptr");
  check_pointers(batch.edge_ptr, batch.edge_from.size(), "edge_ptr");
  const auto layers = static_cast<py::ssize_t>(batch.op_ptr.size()) - 1;
  batch.cores = view<std::int32_t>(cores, "cores", layers * kResources);
  batch.rule = overlap ? ScheduleRule::kOverlap : ScheduleRule::kExclusive;
  if (max_nodes < 0) throw InvalidInput("max_nodes: a negative number is not accepted");
  if (!(max_seconds >= 0.0)) {
    throw InvalidInput("max_seconds: expected a number of seconds, zero or more");
  }
  const int workers = checked_threads(threads);
  py::array_t<double> makespan(layers);
  py::array_t<double> bound(layers);
  py::array_t<std::int32_t> proved(layers);
  py::array_t<std::int64_t> nodes(layers);
  py::array_t<std::int32_t> status(layers);
  py::array_t<double> start(ops);
  py::array_t<std::int32_t> mode(ops);
  const LayerAnswers answers{writable(makespan), writable(bound), writable(proved), writable(nodes),
                             writable(status),   writable(start), writable(mode)};
  Signals signals;
  // Signals are looked at by one thread alone, the calling one.
  const bool ask = workers == 1;
  const SearchLimits limits{max_nodes, max_seconds, ask ? &interrupted : nullptr, &signals};
  {
    const py::gil_scoped_release release;
    solve_layers(batch, limits, answers, workers);
  }
  if (signals.raised) throw py::error_already_set();
  return py::make_tuple(freeze(std::move(makespan)), freeze(std::move(bound)),
                        freeze(std::move(proved)), freeze(std::move(nodes)),
                        freeze(std::move(status)), freeze(std::move(start)),
                        freeze(std::move(mode)));
}

}  // namespace

void bind_layer_schedule(py::module_& module) {
  module.attr("MAX_LAYER_OPS") = kMaxLayerOps;
  module.attr("MAX_LAYER_MODES") = kMaxModes;
  module.attr("PROVED_BY") = py::make_tuple("nothing", "list-schedule", "branch-and-bound");
  module.def("schedule_layers", &schedule, py::arg("op_ptr"), py::arg("types"), py::arg("mode_ptr"),
             py::arg("mode_cores"), py::arg("mode_s"), py::arg("edge_ptr"), py::arg("edge_from"),
             py::arg("edge_to"), py::arg("cores"), py::arg("overlap"), py::arg("max_nodes"),
             py::arg("max_seconds"), py::arg("threads"));
}

}  // namespace phaze::bindings
