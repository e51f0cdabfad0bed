#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"
#include "phaze/mesh.hpp"

namespace phaze {
namespace {

constexpr int kStepX[] = {1, -1, 0, 0};
constexpr int kStepY[] = {0, 0, 1, -1};

class Router {
 public:
  explicit Router(const MeshGrid& grid) noexcept : grid_(grid) {}

  bool inside(std::int32_t die) const noexcept {
    return die >= 0 && die < grid_.columns * grid_.rows;
  }
  bool dead(std::int32_t die) const noexcept {
    return !grid_.dead.empty() && grid_.dead[static_cast<std::size_t>(die)] != 0;
  }

  bool dead_link(std::int32_t link) const noexcept {
    return !grid_.dead_links.empty() && grid_.dead_links[static_cast<std::size_t>(link)] != 0;
  }

  // Links from one die to another; empty where they are the same, false where there is no way.
  bool route(std::int32_t from, std::int32_t to, std::vector<std::int32_t>& links) {
    links.clear();
    if (dead(from) || dead(to)) return false;
    return straight(from, to, 0, links) || straight(from, to, 1, links) || detour(from, to, links);
  }

 private:
  // Along one axis first, then along the other.
  bool straight(std::int32_t from, std::int32_t to, int first, std::vector<std::int32_t>& links) {
    links.clear();
    std::int32_t at = from;
    for (const int axis : {first, 1 - first}) {
      for (;;) {
        const std::int32_t here = axis == 0 ? at % grid_.columns : at / grid_.columns;
        const std::int32_t goal = axis == 0 ? to % grid_.columns : to / grid_.columns;
        if (here == goal) break;
        const std::int32_t direction = 2 * axis + (goal < here ? 1 : 0);
        links.push_back(kMeshDirections * at + direction);
        if (dead_link(links.back())) return false;
        at += kStepX[direction] + kStepY[direction] * grid_.columns;
        if (dead(at)) return false;
      }
    }
    return true;
  }

  bool detour(std::int32_t from, std::int32_t to, std::vector<std::int32_t>& links) {
    const auto dies =
        static_cast<std::size_t>(grid_.columns) * static_cast<std::size_t>(grid_.rows);
    came_.assign(dies, -1);
    queue_.assign(1, from);
    came_[static_cast<std::size_t>(from)] = -2;
    for (std::size_t head = 0; head < queue_.size(); ++head) {
      const std::int32_t at = queue_[head];
      if (at == to) break;
      for (std::int32_t d = 0; d < kMeshDirections; ++d) {
        const std::int32_t x = at % grid_.columns + kStepX[d];
        const std::int32_t y = at / grid_.columns + kStepY[d];
        if (x < 0 || y < 0 || x >= grid_.columns || y >= grid_.rows) continue;
        const std::int32_t next = y * grid_.columns + x;
        const std::int32_t link = kMeshDirections * at + d;
        if (dead(next) || dead_link(link) || came_[static_cast<std::size_t>(next)] != -1) continue;
        came_[static_cast<std::size_t>(next)] = link;
        queue_.push_back(next);
      }
    }
    if (came_[static_cast<std::size_t>(to)] == -1) return false;
    links.clear();
    for (std::int32_t at = to; at != from;) {
      const std::int32_t link = came_[static_cast<std::size_t>(at)];
      links.push_back(link);
      at = link / kMeshDirections;
    }
    std::reverse(links.begin(), links.end());
    return true;
  }

  const MeshGrid grid_;
  std::vector<std::int32_t> came_;
  std::vector<std::int32_t> queue_;
};

Status add_loads(Router& router, std::span<const MeshFlow> flows, std::span<double> loads,
                 std::vector<std::int32_t>& links) {
  for (const MeshFlow& flow : flows) {
    if (!router.inside(flow.from) || !router.inside(flow.to)) return Status::kBadShape;
    if (!std::isfinite(flow.bytes)) return Status::kNotFinite;
    if (flow.bytes < 0.0) return Status::kNegative;
    if (!router.route(flow.from, flow.to, links)) return Status::kNotApplicable;
    for (const std::int32_t link : links) loads[static_cast<std::size_t>(link)] += flow.bytes;
  }
  return Status::kOk;
}

// Writes the flows of one collective, group by group.
class Writer {
 public:
  Writer(const MeshGrid& grid, const MeshCollective& c) noexcept : grid_(grid), c_(c) {}

  // First members of every group: the offsets that no run reaches.
  std::vector<std::int32_t> starts() const {
    std::vector<std::int32_t> found;
    for (std::int32_t y = 0; y < c_.height; ++y) {
      for (std::int32_t x = 0; x < c_.width; ++x) {
        const bool first = std::all_of(c_.runs.begin(), c_.runs.end(), [&](const MeshRun& run) {
          return (run.axis == 0 ? x : y) / run.stride % run.size == 0;
        });
        if (first) found.push_back((c_.y + y) * grid_.columns + c_.x + x);
      }
    }
    return found;
  }

  std::int32_t step(const MeshRun& run) const noexcept {
    return run.axis == 0 ? run.stride : run.stride * grid_.columns;
  }

  // Every die of the rectangle at which a line of this run begins.
  template <typename Body>
  void lines(const MeshRun& run, const Body& body) const {
    for (std::int32_t y = 0; y < c_.height; ++y) {
      for (std::int32_t x = 0; x < c_.width; ++x) {
        if ((run.axis == 0 ? x : y) / run.stride % run.size != 0) continue;
        body((c_.y + y) * grid_.columns + c_.x + x);
      }
    }
  }

  // An all-gather of `bytes` along every line of a run: each part passes to both ends.
  void gather(const MeshRun& run, double bytes, std::vector<MeshFlow>& flows) const {
    const double part = bytes / run.size;
    lines(run, [&](std::int32_t begin) {
      for (std::int32_t i = 0; i + 1 < run.size; ++i) {
        const std::int32_t here = begin + i * step(run), next = here + step(run);
        flows.push_back({here, next, part * (i + 1)});
        flows.push_back({next, here, part * (run.size - 1 - i)});
      }
    });
  }

  void exchange(const MeshRun& run, double bytes, std::vector<MeshFlow>& flows) const {
    lines(run, [&](std::int32_t begin) {
      for (std::int32_t i = 0; i < run.size; ++i) {
        for (std::int32_t j = 0; j < run.size; ++j) {
          if (i != j)
            flows.push_back({begin + i * step(run), begin + j * step(run), bytes / run.size});
        }
      }
    });
  }

  // The cycle that ring_line walks, both ways.
  void ring(const MeshRun& x, const MeshRun& y, double bytes, std::vector<MeshFlow>& flows) const {
    const bool rows = y.size % 2 == 0;
    const MeshRun& across = rows ? y : x;
    const MeshRun& along = rows ? x : y;
    std::vector<std::int32_t> cycle;  // offsets from a group's first member
    for (std::int32_t i = 0; i < across.size; ++i) {
      for (std::int32_t j = 1; j < along.size; ++j) {
        const std::int32_t at = i % 2 == 0 ? j : along.size - j;
        cycle.push_back(i * step(across) + at * step(along));
      }
    }
    for (std::int32_t i = across.size - 1; i >= 0; --i) cycle.push_back(i * step(across));
    const double ranks = static_cast<double>(cycle.size());
    const double each = bytes * (ranks - 1.0) / ranks * 0.5;
    for (const std::int32_t start : starts()) {
      for (std::size_t i = 0; i < cycle.size(); ++i) {
        const std::int32_t here = start + cycle[i];
        const std::int32_t next = start + cycle[(i + 1) % cycle.size()];
        flows.push_back({here, next, each});
        flows.push_back({next, here, each});
      }
    }
  }

 private:
  const MeshGrid& grid_;
  const MeshCollective& c_;
};

void gather_phases(const Writer& writer, const MeshCollective& c, const MeshLinks& links,
                   std::vector<std::vector<MeshFlow>>& phases) {
  MeshAlgorithm chosen =
      mesh_gather(mesh_gather_lines(c.runs, links), c.bytes, c.algorithm).algorithm;
  if (chosen == MeshAlgorithm::kOrdered) {
    std::vector<MeshRun> runs = c.runs;
    std::stable_sort(runs.begin(), runs.end(), [&](const MeshRun& a, const MeshRun& b) {
      return a.stride / links.bytes_per_s[a.axis] > b.stride / links.bytes_per_s[b.axis];
    });
    double ranks = 1.0;
    for (const MeshRun& run : runs) ranks *= run.size;
    double share = c.bytes / ranks;
    for (const MeshRun& run : runs) {
      share *= run.size;
      phases.emplace_back();
      writer.gather(run, share, phases.back());
    }
    return;
  }
  const MeshRun& x = c.runs[0].axis == 0 ? c.runs[0] : c.runs[1];
  const MeshRun& y = c.runs[0].axis == 0 ? c.runs[1] : c.runs[0];
  phases.emplace_back();
  if (chosen == MeshAlgorithm::kRing) {
    writer.ring(x, y, c.bytes, phases.back());
    return;
  }
  writer.gather(x, 0.5 * c.bytes / y.size, phases.back());
  writer.gather(y, 0.5 * c.bytes / x.size, phases.back());
  phases.emplace_back();
  writer.gather(y, 0.5 * c.bytes, phases.back());
  writer.gather(x, 0.5 * c.bytes, phases.back());
}

bool fits(const MeshGrid& grid, const MeshCollective& c) noexcept {
  constexpr std::int64_t most = 1 << 20;
  for (const std::int32_t side : {c.x, c.y, c.width, c.height}) {
    if (side < 0 || side > most) return false;
  }
  if (c.width < 1 || c.height < 1 || c.x + c.width > grid.columns || c.y + c.height > grid.rows) {
    return false;
  }
  return std::all_of(c.runs.begin(), c.runs.end(), [&](const MeshRun& run) {
    const std::int64_t side = run.axis == 0 ? c.width : c.height;
    return (run.axis == 0 || run.axis == 1) && run.size >= 2 && run.stride >= 1 &&
           run.size <= side && run.stride <= side &&
           side % (static_cast<std::int64_t>(run.stride) * run.size) == 0;
  });
}

Status phases_of(const MeshGrid& grid, const MeshCollective& c, const MeshLinks& links,
                 std::vector<std::vector<MeshFlow>>& phases) {
  phases.clear();
  if (!fits(grid, c)) return Status::kBadShape;
  if (links.fabric != MeshFabric::kMesh) return Status::kBadFabric;  // has no links between dies
  const MeshResult alone = mesh_collective(c.op, c.bytes, c.runs, links, c.algorithm);
  if (alone.status != Status::kOk) return alone.status;
  if (c.runs.empty()) return Status::kOk;
  const Writer writer(grid, c);
  if (c.op == CollectiveOp::kAllToAll) {
    for (const MeshRun& run : c.runs) {
      phases.emplace_back();
      writer.exchange(run, c.bytes, phases.back());
    }
    return Status::kOk;
  }
  gather_phases(writer, c, links, phases);
  if (c.op == CollectiveOp::kAllGather) return Status::kOk;
  // A reduce-scatter is the mirror image of an all-gather; an all-reduce is both.
  std::vector<std::vector<MeshFlow>> mirrored(phases.rbegin(), phases.rend());
  for (std::vector<MeshFlow>& flows : mirrored) {
    for (MeshFlow& flow : flows) std::swap(flow.from, flow.to);
  }
  if (c.op == CollectiveOp::kReduceScatter) phases.clear();
  phases.insert(phases.begin(), mirrored.begin(), mirrored.end());
  return Status::kOk;
}

}  // namespace

Status mesh_loads(const MeshGrid& grid, std::span<const MeshFlow> flows, std::span<double> loads) {
  Router router(grid);
  std::vector<std::int32_t> links;
  return add_loads(router, flows, loads, links);
}

Status mesh_collective_loads(const MeshGrid& grid, std::span<const MeshCollective> collectives,
                             const MeshLinks& links, std::span<double> loads) {
  Router router(grid);
  std::vector<std::int32_t> path;
  std::vector<std::vector<MeshFlow>> phases;
  for (const MeshCollective& c : collectives) {
    Status status = phases_of(grid, c, links, phases);
    for (std::size_t i = 0; i < phases.size() && status == Status::kOk; ++i) {
      status = add_loads(router, phases[i], loads, path);
    }
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

MeshResult mesh_concurrent(const MeshGrid& grid, std::span<const MeshCollective> collectives,
                           const MeshLinks& links) {
  constexpr double nan = kNan;
  std::vector<std::vector<std::vector<MeshFlow>>> all(collectives.size());
  std::size_t most = 0;
  double fixed_s = 0.0;
  for (std::size_t i = 0; i < collectives.size(); ++i) {
    const MeshCollective& c = collectives[i];
    const Status status = phases_of(grid, c, links, all[i]);
    if (status != Status::kOk) return {nan, c.algorithm, status};
    most = std::max(most, all[i].size());
    const MeshAlgorithm chosen =
        mesh_collective(c.op, c.bytes, c.runs, links, c.algorithm).algorithm;
    fixed_s = std::max(fixed_s, mesh_collective(c.op, 0.0, c.runs, links, chosen).time_s);
  }
  Router router(grid);
  std::vector<std::int32_t> path;
  std::vector<double> loads;
  const auto count = static_cast<std::size_t>(grid.columns) * static_cast<std::size_t>(grid.rows);
  double time_s = fixed_s;
  for (std::size_t phase = 0; phase < most; ++phase) {
    loads.assign(kMeshDirections * count, 0.0);
    for (const auto& phases : all) {
      if (phase >= phases.size()) continue;
      const Status status = add_loads(router, phases[phase], loads, path);
      if (status != Status::kOk) return {nan, MeshAlgorithm::kAuto, status};
    }
    double slowest = 0.0;
    for (std::size_t link = 0; link < loads.size(); ++link) {
      const double rate = links.bytes_per_s[link % kMeshDirections < 2 ? 0 : 1];
      slowest = std::max(slowest, loads[link] / rate);
    }
    time_s += slowest;
  }
  return {time_s, MeshAlgorithm::kAuto, Status::kOk};
}

}  // namespace phaze
