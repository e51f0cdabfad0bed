#include <limits>

#include "arrays.hpp"
#include "phaze/parallel.hpp"
#include "phaze/placement.hpp"

namespace phaze::bindings {
namespace {

constexpr std::size_t kColumns = 17;

// A table of layers: its arrays in the order of PlacementLayers.
PlacementLayers table_of(const py::handle& item) {
  if (!py::isinstance<py::tuple>(item) || py::len(item) != kColumns) {
    throw InvalidType("tables: expected tuples of " + std::to_string(kColumns) + " arrays");
  }
  const auto columns = py::reinterpret_borrow<py::tuple>(item);
  PlacementLayers l{};
  l.wide = view<std::uint8_t>(columns[10], "wide");
  l.layers = static_cast<std::int32_t>(l.wide.size());
  l.forward_s = view<double>(columns[0], "forward_s");
  l.variants = l.layers == 0 ? 0 : static_cast<std::int32_t>(l.forward_s.size() / l.wide.size());
  l.backward_s = view<double>(columns[1], "backward_s");
  l.stash_bytes = view<double>(columns[2], "stash_bytes");
  l.live_bytes = view<double>(columns[3], "live_bytes");
  l.resident_bytes = view<double>(columns[4], "resident_bytes");
  l.once_bytes = view<double>(columns[5], "once_bytes");
  l.gather_bytes = view<double>(columns[6], "gather_bytes");
  l.sync_s = view<double>(columns[7], "sync_s");
  l.step_s = view<double>(columns[8], "step_s");
  l.weight_grad_s = view<double>(columns[9], "weight_grad_s");
  l.edge_from = view<std::int32_t>(columns[11], "edge_from");
  l.edge_to = view<std::int32_t>(columns[12], "edge_to");
  l.edge_s = view<double>(columns[13], "edge_s");
  l.edge_bytes = view<double>(columns[14], "edge_bytes");
  l.tied_from = view<std::int32_t>(columns[15], "tied_from");
  l.tied_to = view<std::int32_t>(columns[16], "tied_to");
  return l;
}

std::vector<PlacementLayers> tables_of(const py::list& tables) {
  std::vector<PlacementLayers> found;
  found.reserve(tables.size());
  for (const py::handle& item : tables) found.push_back(table_of(item));
  return found;
}

py::tuple as_tuple(const PlacementPlan& plan) {
  const auto array = [](const std::vector<std::int32_t>& values) {
    py::array_t<std::int32_t> made(static_cast<py::ssize_t>(values.size()));
    std::copy(values.begin(), values.end(), made.mutable_data());
    return freeze(std::move(made));
  };
  return py::make_tuple(plan.time_s, plan.max_load_s, plan.tail_s, plan.stages, plan.replicas,
                        plan.devices, array(plan.stage_of), array(plan.variant_of));
}

// Problems are runs of tables, one table per width: tables ptr[k] up to ptr[k + 1]. The answer is
// (status, table, plan) of each, table -1 where nothing fits.
py::list published(const py::list& tables, const py::object& ptr, const py::object& memory,
                   const py::object& devices, const py::object& micro_batches,
                   const py::object& width, const py::object& recompute, const py::object& stages,
                   const py::object& replicas, int threads) {
  const std::vector<PlacementLayers> layers = tables_of(tables);
  const auto count = static_cast<py::ssize_t>(layers.size());
  const auto first = view<std::int64_t>(ptr, "ptr");
  const auto memories = view<double>(memory, "memory_bytes", count);
  const auto device_counts = view<std::int64_t>(devices, "devices", count);
  const auto batches = view<std::int64_t>(micro_batches, "micro_batches", count);
  const auto widths = view<std::int32_t>(width, "width", count);
  const auto again = view<std::uint8_t>(recompute, "recompute", count);
  const auto fixed_stages = view<std::int32_t>(stages, "stages", count);
  const auto fixed_replicas = view<std::int64_t>(replicas, "replicas", count);
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
          const PublishedRules rules{memories[t],   device_counts[t], batches[t],       widths[t],
                                     again[t] != 0, fixed_stages[t],  fixed_replicas[t]};
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
  py::list found;
  for (std::size_t k = 0; k < problems; ++k) {
    found.append(py::make_tuple(static_cast<int>(statuses[k]), chosen[k], as_tuple(plans[k])));
  }
  return found;
}

// Each table with its own rules; the answer is (status, [plan with each count of stages]) of each.
py::list pipeline(const py::list& tables, const py::object& memory, const py::object& piped,
                  const py::object& bucket, const py::object& micro_batches,
                  const py::object& first_stages, const py::object& last_stages,
                  const py::object& kind, bool best_only, int threads) {
  const std::vector<PlacementLayers> layers = tables_of(tables);
  const auto count = static_cast<py::ssize_t>(layers.size());
  const auto memories = view<double>(memory, "memory_bytes", count);
  const auto pipes = view<double>(piped, "piped_bytes", count);
  const auto buckets = view<double>(bucket, "bucket_s", count);
  const auto batches = view<std::int64_t>(micro_batches, "micro_batches", count);
  const auto firsts = view<std::int32_t>(first_stages, "first_stages", count);
  const auto lasts = view<std::int32_t>(last_stages, "last_stages", count);
  const auto kinds = view<std::int32_t>(kind, "kind", count);
  const int workers = checked_threads(threads);
  std::vector<std::vector<PlacementPlan>> plans(layers.size());
  std::vector<Status> statuses(layers.size(), Status::kOk);
  {
    const py::gil_scoped_release release;
    parallel_for(layers.size(), workers, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = begin; t < end; ++t) {
        const PipelineRules rules{memories[t],
                                  pipes[t],
                                  buckets[t],
                                  batches[t],
                                  firsts[t],
                                  lasts[t],
                                  static_cast<PipelineKind>(kinds[t]),
                                  best_only};
        statuses[t] = kinds[t] == 0 || kinds[t] == 1 ? place_pipeline(layers[t], rules, &plans[t])
                                                     : Status::kBadRules;
      }
    });
  }
  py::list found;
  for (std::size_t t = 0; t < layers.size(); ++t) {
    py::list counted;
    for (const PlacementPlan& plan : plans[t]) {
      if (plan.stages > 0) counted.append(as_tuple(plan));
    }
    found.append(py::make_tuple(static_cast<int>(statuses[t]), counted));
  }
  return found;
}

}  // namespace

void bind_placement(py::module_& module) {
  module.attr("MAX_PLACED_LAYERS") = kMaxPlacedLayers;
  module.attr("MAX_VARIANTS") = kMaxVariants;
  module.def("place_published", &published, py::arg("tables"), py::arg("ptr"),
             py::arg("memory_bytes"), py::arg("devices"), py::arg("micro_batches"),
             py::arg("width"), py::arg("recompute"), py::arg("stages"), py::arg("replicas"),
             py::arg("threads"));
  module.def("place_pipeline", &pipeline, py::arg("tables"), py::arg("memory_bytes"),
             py::arg("piped_bytes"), py::arg("bucket_s"), py::arg("micro_batches"),
             py::arg("first_stages"), py::arg("last_stages"), py::arg("kind"), py::arg("best_only"),
             py::arg("threads"));
}

}  // namespace phaze::bindings
