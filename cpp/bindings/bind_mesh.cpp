#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "phaze/mesh.hpp"

namespace phaze::bindings {
namespace {

constexpr std::int64_t kMostDies = 1 << 20;

MeshGrid grid_of(std::int64_t columns, std::int64_t rows, const py::object& dead_dies,
                 const py::object& dead_links) {
  const auto dead = view<std::uint8_t>(dead_dies, "dead");
  const auto broken = view<std::uint8_t>(dead_links, "dead_links");
  if (columns < 1 || rows < 1 || columns > kMostDies || rows > kMostDies ||
      columns * rows > kMostDies) {
    throw InvalidInput("grid: " + std::to_string(columns) + " x " + std::to_string(rows) +
                       " is not accepted; expected 1 to 2^20 dies");
  }
  if (!dead.empty() && static_cast<std::int64_t>(dead.size()) != columns * rows) {
    throw InvalidInput("dead: length " + std::to_string(dead.size()) +
                       " is not accepted; expected 0 or one value per die");
  }
  if (!broken.empty() &&
      static_cast<std::int64_t>(broken.size()) != kMeshDirections * columns * rows) {
    throw InvalidInput("dead_links: length " + std::to_string(broken.size()) +
                       " is not accepted; expected 0 or four values per die");
  }
  return {static_cast<std::int32_t>(columns), static_cast<std::int32_t>(rows), dead, broken};
}

using PyLinks = std::tuple<double, double, double, std::int32_t>;

MeshLinks links_of(const PyLinks& links) {
  return {{std::get<0>(links), std::get<1>(links)},
          std::get<2>(links),
          static_cast<MeshFabric>(std::get<3>(links))};
}

void refuse(Status status, const char* name) {
  if (status != Status::kOk) throw InvalidInput(std::string(name) + ": " + sentence(status));
}

// Runs of row i are ptr[i] up to ptr[i + 1]. Returns (time_s, algorithm, status).
py::tuple collectives(const py::object& op, const py::object& algorithm, const py::object& bytes,
                      const py::object& ptr, const py::object& axis, const py::object& size,
                      const py::object& stride, const PyLinks& links) {
  const auto ops = view<std::uint8_t>(op, "op");
  const auto count = static_cast<py::ssize_t>(ops.size());
  const auto wanted = view<std::uint8_t>(algorithm, "algorithm", count);
  const auto volumes = view<double>(bytes, "bytes", count);
  const auto first = view<std::int64_t>(ptr, "ptr", count + 1);
  const auto axes = view<std::int32_t>(axis, "axis");
  const auto runs = static_cast<py::ssize_t>(axes.size());
  const auto sizes = view<std::int32_t>(size, "size", runs);
  const auto strides = view<std::int32_t>(stride, "stride", runs);
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (first[i] < 0 || first[i] > runs || (i > 0 && first[i] < first[i - 1])) {
      throw InvalidInput("ptr: expected rising positions in the list of runs");
    }
  }
  std::vector<MeshRun> all(axes.size());
  for (std::size_t i = 0; i < axes.size(); ++i) all[i] = {axes[i], sizes[i], strides[i]};
  py::array_t<double> time_s(count);
  py::array_t<std::uint8_t> chosen(count);
  py::array_t<std::uint8_t> status(count);
  const auto times = writable(time_s);
  const auto algorithms = writable(chosen);
  const auto statuses = writable(status);
  const MeshLinks wires = links_of(links);
  {
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const std::span<const MeshRun> mine{all.data() + first[i],
                                          static_cast<std::size_t>(first[i + 1] - first[i])};
      const MeshResult result = mesh_collective(static_cast<CollectiveOp>(ops[i]), volumes[i], mine,
                                                wires, static_cast<MeshAlgorithm>(wanted[i]));
      times[i] = result.time_s;
      algorithms[i] = static_cast<std::uint8_t>(result.algorithm);
      statuses[i] = static_cast<std::uint8_t>(result.status);
    }
  }
  return py::make_tuple(freeze(std::move(time_s)), freeze(std::move(chosen)),
                        freeze(std::move(status)));
}

py::array_t<double> loads(std::int64_t columns, std::int64_t rows, const py::object& dead,
                          const py::object& dead_links, const py::object& from,
                          const py::object& to, const py::object& bytes) {
  const MeshGrid grid = grid_of(columns, rows, dead, dead_links);
  const auto sources = view<std::int32_t>(from, "from");
  const auto count = static_cast<py::ssize_t>(sources.size());
  const auto targets = view<std::int32_t>(to, "to", count);
  const auto volumes = view<double>(bytes, "bytes", count);
  py::array_t<double> loads(columns * rows * kMeshDirections);
  const auto filled = writable(loads);
  std::fill(filled.begin(), filled.end(), 0.0);
  std::vector<MeshFlow> flows(sources.size());
  for (std::size_t i = 0; i < flows.size(); ++i) flows[i] = {sources[i], targets[i], volumes[i]};
  Status status;
  {
    const py::gil_scoped_release release;
    status = mesh_loads(grid, flows, filled);
  }
  if (status == Status::kNotApplicable) {
    throw InvalidInput("flows: no way around what is dead; expected ends that are connected");
  }
  if (status == Status::kBadShape) {
    throw InvalidInput("flows: a die lies outside the grid; expected 0 to " +
                       std::to_string(columns * rows - 1));
  }
  refuse(status, "flows");
  return freeze(std::move(loads));
}

// Each collective is (op, algorithm, bytes, (x, y, width, height), [(axis, size, stride), ...]).
std::vector<MeshCollective> collectives_of(const py::list& items) {
  std::vector<MeshCollective> all;
  for (const py::handle& item : items) {
    const auto parts = py::cast<py::tuple>(item);
    if (parts.size() != 5) throw InvalidInput("collectives: expected tuples of 5 entries");
    const auto where = py::cast<std::array<std::int32_t, 4>>(parts[3]);
    MeshCollective c{static_cast<CollectiveOp>(py::cast<std::uint8_t>(parts[0])),
                     static_cast<MeshAlgorithm>(py::cast<std::uint8_t>(parts[1])),
                     py::cast<double>(parts[2]),
                     where[0],
                     where[1],
                     where[2],
                     where[3],
                     {}};
    for (const auto& run : py::cast<std::vector<std::array<std::int32_t, 3>>>(parts[4])) {
      c.runs.push_back({run[0], run[1], run[2]});
    }
    all.push_back(std::move(c));
  }
  return all;
}

py::array_t<double> collective_loads(std::int64_t columns, std::int64_t rows, const PyLinks& links,
                                     const py::list& items) {
  const MeshGrid grid =
      grid_of(columns, rows, py::array_t<std::uint8_t>(0), py::array_t<std::uint8_t>(0));
  const std::vector<MeshCollective> all = collectives_of(items);
  py::array_t<double> loads(columns * rows * kMeshDirections);
  const auto filled = writable(loads);
  std::fill(filled.begin(), filled.end(), 0.0);
  Status status;
  {
    const py::gil_scoped_release release;
    status = mesh_collective_loads(grid, all, links_of(links), filled);
  }
  refuse(status, "collectives");
  return freeze(std::move(loads));
}

}  // namespace

void bind_mesh(py::module_& module) {
  py::tuple names(kMeshAlgorithmCount);
  for (std::size_t i = 0; i < kMeshAlgorithmCount; ++i) names[i] = kMeshAlgorithmNames[i];
  module.attr("MESH_ALGORITHMS") = names;
  module.def("mesh_collectives", &collectives, py::arg("op"), py::arg("algorithm"),
             py::arg("payload_bytes"), py::arg("ptr"), py::arg("axis"), py::arg("size"),
             py::arg("stride"), py::arg("links"));
  module.def("mesh_loads", &loads, py::arg("columns"), py::arg("rows"), py::arg("dead"),
             py::arg("dead_links"), py::arg("source"), py::arg("target"), py::arg("payload_bytes"));
  module.def("mesh_collective_loads", &collective_loads, py::arg("columns"), py::arg("rows"),
             py::arg("links"), py::arg("collectives"));
}

}  // namespace phaze::bindings
