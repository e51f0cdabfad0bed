// The layouts of strategies as arrays of records.
#include "arrays.hpp"
#include "phaze/layout_list.hpp"

namespace phaze::bindings {
namespace {

using Numbers = std::span<const std::int64_t>;

LayoutGrid grid(std::int64_t devices, std::int64_t node_devices, std::int64_t global_batch,
                std::int64_t blocks, std::int64_t layers, const py::object& widths,
                std::int64_t most_stages, std::int32_t single_schedule, std::int32_t rank_order,
                const py::object& dp, const py::object& pp, const py::object& schedules,
                const py::object& chunks, const py::object& zero, const py::object& shards) {
  const Numbers width = view<std::int64_t>(widths, "widths", 5);
  const Numbers tried = view<std::int64_t>(schedules, "schedules");
  const Numbers stages = view<std::int64_t>(zero, "zero");
  const bool positive = std::all_of(width.begin(), width.end(), [](auto n) { return n >= 1; });
  if (!positive || devices < width[0] || node_devices < 1 || global_batch < width[4] ||
      rank_order > 1 || stages.empty()) {
    throw InvalidInput("widths: not accepted; expected whole numbers, 1 or more, that fit");
  }
  return LayoutGrid(
      {.devices = devices,
       .node_devices = node_devices,
       .global_batch = global_batch,
       .blocks = blocks,
       .layers = layers,
       .inner = width[0],
       .cp = width[1],
       .expert_devices = width[2],
       .expert_replicas = width[3],
       .micro_batch = width[4],
       .most_stages = most_stages,
       .single_schedule = single_schedule,
       .rank_order = rank_order,
       .dp = view<std::int64_t>(dp, "dp"),
       .pp = view<std::int64_t>(pp, "pp"),
       .schedules = tried,
       .chunks = view<std::int64_t>(chunks, "chunks", static_cast<py::ssize_t>(tried.size())),
       .zero = stages,
       .shards = view<std::int64_t>(shards, "shards", static_cast<py::ssize_t>(stages.size()))});
}

py::list rejected(const LayoutGrid& own) {
  py::list rows;
  for (const RejectedLayouts& r : own.rejected()) {
    rows.append(py::make_tuple(static_cast<std::int64_t>(r.fault), r.schedule, r.value, r.count));
  }
  return rows;
}

// The layouts of strategies, one grid each, whose share times the strategy's `work_s` times
// `factor` is at most `most_s`; those of strategy s have its number.
py::array_t<LayoutRecord> list(const py::list& grids, const py::object& work_s, double factor,
                               double most_s) {
  const auto work = view<double>(work_s, "work_s", static_cast<py::ssize_t>(grids.size()));
  std::vector<const LayoutGrid*> own;
  for (const py::handle& one : grids) own.push_back(one.cast<const LayoutGrid*>());
  std::vector<LayoutRecord> layouts;
  {
    const py::gil_scoped_release release;
    for (std::size_t s = 0; s < own.size(); ++s) {
      own[s]->list(static_cast<std::int32_t>(s), work[s], factor, most_s, &layouts);
    }
  }
  return array(layouts);
}

}  // namespace

void bind_layouts(py::module_& module) {
  py::class_<LayoutGrid>(module, "LayoutGrid")
      .def(py::init(&grid), py::arg("devices"), py::arg("node_devices"), py::arg("global_batch"),
           py::arg("blocks"), py::arg("layers"), py::arg("widths"), py::arg("most_stages"),
           py::arg("single_schedule"), py::arg("rank_order"), py::arg("dp"), py::arg("pp"),
           py::arg("schedules"), py::arg("chunks"), py::arg("zero"), py::arg("shards"))
      .def("__len__", &LayoutGrid::size)
      .def_property_readonly("replicas",
                             [](const LayoutGrid& own) { return array(own.replicas()); })
      .def_property_readonly("rejected", &rejected)
      .def("shares", [](const LayoutGrid& own) { return array(own.shares()); });
  module.def("list_layouts", &list, py::arg("grids"), py::arg("work_s"), py::arg("factor"),
             py::arg("most_s"));
}

}  // namespace phaze::bindings
