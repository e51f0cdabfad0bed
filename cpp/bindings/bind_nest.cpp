#include <chrono>
#include <limits>

#include "arrays.hpp"
#include "phaze/nest.hpp"
#include "phaze/parallel.hpp"

namespace phaze::bindings {
namespace {

// Positions of runs in an array of `length` values: rising, from 0 to its end.
std::span<const std::int64_t> pointer(const py::object& object, const char* name,
                                      std::size_t length) {
  const auto ptr = view<std::int64_t>(object, name);
  bool good = !ptr.empty() && ptr.front() == 0 && ptr.back() == static_cast<std::int64_t>(length);
  for (std::size_t k = 1; k < ptr.size(); ++k) good = good && ptr[k - 1] <= ptr[k];
  if (!good) throw InvalidInput(std::string(name) + ": expected rising positions, all covered");
  return ptr;
}

template <typename T>
std::span<const T> run(std::span<const T> values, std::span<const std::int64_t> ptr,
                       std::size_t k) {
  return values.subspan(static_cast<std::size_t>(ptr[k]),
                        static_cast<std::size_t>(ptr[k + 1] - ptr[k]));
}

// The levels of all problems, stored consecutively.
struct Networks {
  explicit Networks(const py::dict& columns)
      : size(view<std::int64_t>(columns["level_size"], "level_size")),
        bytes_per_s(view<double>(columns["level_bytes_per_s"], "level_bytes_per_s", length())),
        latency_s(view<double>(columns["level_latency_s"], "level_latency_s", length())),
        ptr(pointer(columns["level_ptr"], "level_ptr", size.size())) {}

  [[nodiscard]] py::ssize_t length() const { return static_cast<py::ssize_t>(size.size()); }
  [[nodiscard]] NestNetwork operator[](std::size_t k) const {
    return {run(size, ptr, k), run(bytes_per_s, ptr, k), run(latency_s, ptr, k)};
  }

  std::span<const std::int64_t> size;
  std::span<const double> bytes_per_s;
  std::span<const double> latency_s;
  std::span<const std::int64_t> ptr;
};

// The layers of all widths of all problems, and their edges.
struct Widths {
  Widths(const py::dict& layers, const py::dict& edges, const py::object& stage_devices)
      : forward_s(view<double>(layers["forward_s"], "forward_s")),
        backward_s(view<double>(layers["backward_s"], "backward_s", length())),
        weight_bytes(view<double>(layers["weight_bytes"], "weight_bytes", length())),
        kept_bytes(view<double>(layers["kept_bytes"], "kept_bytes", length())),
        layer_ptr(pointer(layers["layer_ptr"], "layer_ptr", forward_s.size())),
        from(view<std::int32_t>(edges["edge_from"], "edge_from")),
        to(view<std::int32_t>(edges["edge_to"], "edge_to", static_cast<py::ssize_t>(from.size()))),
        bytes(
            view<double>(edges["edge_bytes"], "edge_bytes", static_cast<py::ssize_t>(from.size()))),
        edge_ptr(pointer(edges["edge_ptr"], "edge_ptr", from.size())),
        devices(view<std::int64_t>(stage_devices, "stage_devices", count())) {
    if (edge_ptr.size() != layer_ptr.size()) {
      throw InvalidInput("edge_ptr: expected one run for each of layer_ptr");
    }
  }

  [[nodiscard]] py::ssize_t length() const { return static_cast<py::ssize_t>(forward_s.size()); }
  [[nodiscard]] py::ssize_t count() const { return static_cast<py::ssize_t>(layer_ptr.size()) - 1; }
  [[nodiscard]] NestLayers operator[](std::size_t k) const {
    return {devices[k],
            run(forward_s, layer_ptr, k),
            run(backward_s, layer_ptr, k),
            run(weight_bytes, layer_ptr, k),
            run(kept_bytes, layer_ptr, k),
            run(from, edge_ptr, k),
            run(to, edge_ptr, k),
            run(bytes, edge_ptr, k)};
  }

  std::span<const double> forward_s;
  std::span<const double> backward_s;
  std::span<const double> weight_bytes;
  std::span<const double> kept_bytes;
  std::span<const std::int64_t> layer_ptr;
  std::span<const std::int32_t> from;
  std::span<const std::int32_t> to;
  std::span<const double> bytes;
  std::span<const std::int64_t> edge_ptr;
  std::span<const std::int64_t> devices;
};

struct Answer {
  Status status = Status::kOk;
  std::int32_t width = -1;  // position among the widths of the problem
  NestPlan plan{};
  NestNeed need{std::numeric_limits<double>::infinity(), 0};  // set if nothing fits
  std::int32_t need_width = -1;
  double seconds = 0.0;
};

Answer answer(const NestNetwork& network, const Widths& widths, std::size_t begin, std::size_t end,
              const NestRules& rules) {
  const auto start = std::chrono::steady_clock::now();
  Answer answer;
  answer.plan.time_s = std::numeric_limits<double>::infinity();
  for (std::size_t w = begin; w < end && answer.status == Status::kOk; ++w) {
    NestPlan plan;
    answer.status = place_nest(network, widths[w], rules, answer.plan.time_s, &plan);
    if (plan.begins.empty()) continue;
    answer.plan = std::move(plan);
    answer.width = static_cast<std::int32_t>(w - begin);
  }
  for (std::size_t w = begin; w < end && answer.width < 0 && answer.status == Status::kOk; ++w) {
    NestNeed need{};
    answer.status = least_nest_memory(network, widths[w], rules, &need);
    if (need.bytes >= answer.need.bytes) continue;
    answer.need = need;
    answer.need_width = static_cast<std::int32_t>(w - begin);
  }
  answer.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return answer;
}

py::object as_result(const Answer& answer) {
  return result("NestAnswer", answer.status, answer.width, answer.plan.time_s, answer.plan.load_s,
                answer.plan.replicas, array(answer.plan.begins), answer.need.bytes,
                answer.need.stages, answer.need_width, answer.seconds);
}

// Problem k, on network k, has the widths at positions width_ptr[k] up to width_ptr[k + 1].
py::list place(const py::dict& networks, const py::dict& layers, const py::dict& edges,
               const py::object& stage_devices, const py::object& width_ptr,
               const py::object& memory_bytes, const py::object& states,
               const py::object& micro_batches, const py::object& recompute, bool all_replicas,
               int threads) {
  const Networks levels(networks);
  const Widths widths(layers, edges, stage_devices);
  const auto ptr = pointer(width_ptr, "width_ptr", static_cast<std::size_t>(widths.count()));
  const std::size_t problems = ptr.size() - 1;
  const auto count = static_cast<py::ssize_t>(problems);
  if (levels.ptr.size() != ptr.size()) {
    throw InvalidInput("level_ptr: expected one run for each problem");
  }
  const auto memories = view<double>(memory_bytes, "memory_bytes", count);
  const auto multiples = view<double>(states, "states", count);
  const auto batches = view<std::int64_t>(micro_batches, "micro_batches", count);
  const auto again = view<std::uint8_t>(recompute, "recompute", count);
  const int workers = checked_threads(threads);
  std::vector<Answer> answers(problems);
  {
    const py::gil_scoped_release release;
    parallel_for(problems, workers, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t k = begin; k < end; ++k) {
        const NestRules rules{memories[k], multiples[k], batches[k], again[k] != 0, all_replicas};
        answers[k] = answer(levels[k], widths, static_cast<std::size_t>(ptr[k]),
                            static_cast<std::size_t>(ptr[k + 1]), rules);
      }
    });
  }
  py::list results;
  for (const Answer& answer : answers) results.append(as_result(answer));
  return results;
}

}  // namespace

void bind_nest(py::module_& module) {
  module.attr("MAX_NEST_LAYERS") = kMaxNestLayers;
  module.attr("MAX_NEST_LEVELS") = kMaxNestLevels;
  module.attr("MAX_NEST_DEVICES") = kMaxNestDevices;
  module.attr("MAX_NEST_REPLICATED") = kMaxNestReplicated;
  // The best plan, or, if nothing fits, the least memory with which some plan fits, and its stages
  // and width; and the seconds that the kernel took.
  bind_result(module, "NestAnswer",
              "status width time_s load_s replicas begins needed_bytes needed_stages needed_width "
              "seconds");
  module.def("place_nest", &place, py::arg("networks"), py::arg("layers"), py::arg("edges"),
             py::arg("stage_devices"), py::arg("width_ptr"), py::arg("memory_bytes"),
             py::arg("states"), py::arg("micro_batches"), py::arg("recompute"),
             py::arg("all_replicas"), py::arg("threads"));
}

}  // namespace phaze::bindings
