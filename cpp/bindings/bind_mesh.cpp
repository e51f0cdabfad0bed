#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
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

using PyRuns = std::vector<std::array<std::int32_t, 3>>;  // axis, size, stride

std::vector<MeshRun> runs_of(const PyRuns& given) {
  std::vector<MeshRun> runs;
  for (const auto& [axis, size, stride] : given) runs.push_back({axis, size, stride});
  return runs;
}

std::pair<double, int> collective(std::uint8_t op, std::uint8_t algorithm, double bytes,
                                  const PyRuns& runs, const PyLinks& links) {
  const MeshResult result = mesh_collective(static_cast<CollectiveOp>(op), bytes, runs_of(runs),
                                            links_of(links), static_cast<MeshAlgorithm>(algorithm));
  refuse(result.status, "mesh_collective");
  return {result.time_s, static_cast<int>(result.algorithm)};
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
    all.push_back({static_cast<CollectiveOp>(py::cast<std::uint8_t>(parts[0])),
                   static_cast<MeshAlgorithm>(py::cast<std::uint8_t>(parts[1])),
                   py::cast<double>(parts[2]), where[0], where[1], where[2], where[3],
                   runs_of(py::cast<PyRuns>(parts[4]))});
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
  module.def("mesh_collective", &collective, py::arg("op"), py::arg("algorithm"),
             py::arg("payload_bytes"), py::arg("runs"), py::arg("links"));
  module.def("mesh_loads", &loads, py::arg("columns"), py::arg("rows"), py::arg("dead"),
             py::arg("dead_links"), py::arg("source"), py::arg("target"), py::arg("payload_bytes"));
  module.def("mesh_collective_loads", &collective_loads, py::arg("columns"), py::arg("rows"),
             py::arg("links"), py::arg("collectives"));
}

}  // namespace phaze::bindings
