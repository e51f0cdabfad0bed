#include <limits>

#include "arrays.hpp"
#include "phaze/parallel.hpp"
#include "phaze/placement.hpp"

namespace phaze::bindings {
namespace {

// A table of layers: a dictionary of the arrays of PlacementLayers, by name.
PlacementLayers table_of(const py::handle& item) {
  if (!py::isinstance<py::dict>(item)) throw InvalidType("tables: expected dictionaries of arrays");
  const auto columns = py::reinterpret_borrow<py::dict>(item);
  const auto column = [&]<typename T>(std::span<const T>* values, const char* name) {
    if (!columns.contains(name)) throw InvalidInput(std::string(name) + ": missing from tables");
    *values = view<T>(columns[name], name);
  };
  PlacementLayers l{};
  column(&l.wide, "wide");
  column(&l.forward_s, "forward_s");
  column(&l.backward_s, "backward_s");
  column(&l.stash_bytes, "stash_bytes");
  column(&l.resident_bytes, "resident_bytes");
  column(&l.once_bytes, "once_bytes");
  column(&l.sync_s, "sync_s");
  column(&l.edge_from, "edge_from");
  column(&l.edge_to, "edge_to");
  column(&l.edge_s, "edge_s");
  column(&l.edge_bytes, "edge_bytes");
  l.layers = static_cast<std::int32_t>(l.wide.size());
  return l;
}

std::vector<PlacementLayers> tables_of(const py::list& tables) {
  std::vector<PlacementLayers> layers;
  layers.reserve(tables.size());
  for (const py::handle& item : tables) layers.push_back(table_of(item));
  return layers;
}

py::object as_result(const PlacementPlan& plan) {
  return result("TablePlan", plan.time_s, plan.max_load_s, plan.stages, plan.replicas, plan.devices,
                array(plan.stage_of));
}

// Problem k has the tables ptr[k] up to ptr[k + 1], one per width. Its answer has the position of
// the best of them, -1 if nothing fits.
py::list published(const py::list& tables, const py::object& ptr, const py::object& memory,
                   const py::object& devices, const py::object& micro_batches,
                   const py::object& width, const py::object& recompute, int threads) {
  const std::vector<PlacementLayers> layers = tables_of(tables);
  const auto count = static_cast<py::ssize_t>(layers.size());
  const auto first = view<std::int64_t>(ptr, "ptr");
  const auto memories = view<double>(memory, "memory_bytes", count);
  const auto device_counts = view<std::int64_t>(devices, "devices", count);
  const auto batches = view<std::int64_t>(micro_batches, "micro_batches", count);
  const auto widths = view<std::int32_t>(width, "width", count);
  const auto again = view<std::uint8_t>(recompute, "recompute", count);
  for (std::size_t k = 0; k < first.size(); ++k) {
    if (first[k] < 0 || first[k] > count || (k > 0 && first[k] < first[k - 1])) {
      throw InvalidInput("ptr: expected rising positions in the list of tables");
    }
  }
  const int workers = checked_threads(threads);
  const std::size_t problems = first.empty() ? 0 : first.size() - 1;
  std::vector<PlacementPlan> plans(problems);
  std::vector<std::int32_t> chosen(problems, -1);
  std::vector<Status> statuses(problems, Status::kOk);
  {
    const py::gil_scoped_release release;
    parallel_for(problems, workers, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t k = begin; k < end; ++k) {
        plans[k].time_s = std::numeric_limits<double>::infinity();
        for (std::int64_t at = first[k]; at < first[k + 1]; ++at) {
          const auto t = static_cast<std::size_t>(at);
          const PublishedRules rules{memories[t], device_counts[t], batches[t], widths[t],
                                     again[t] != 0};
          PlacementPlan plan;
          const Status status = place_published(layers[t], rules, plans[k].time_s, &plan);
          if (status != Status::kOk) statuses[k] = status;
          if (status != Status::kOk || plan.stages == 0) continue;
          plans[k] = std::move(plan);
          chosen[k] = static_cast<std::int32_t>(at - first[k]);
        }
      }
    });
  }
  py::list results;
  for (std::size_t k = 0; k < problems; ++k) {
    results.append(result("PublishedAnswer", statuses[k], chosen[k], as_result(plans[k])));
  }
  return results;
}

}  // namespace

void bind_placement(py::module_& module) {
  module.attr("MAX_PLACED_LAYERS") = kMaxPlacedLayers;
  bind_result(module, "TablePlan", "time_s max_load_s stages replicas devices stage_of");
  bind_result(module, "PublishedAnswer", "status table plan");
  module.def("place_published", &published, py::arg("tables"), py::arg("ptr"),
             py::arg("memory_bytes"), py::arg("devices"), py::arg("micro_batches"),
             py::arg("width"), py::arg("recompute"), py::arg("threads"));
}

}  // namespace phaze::bindings
