
#include "phaze/mesh.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"

namespace phaze {

namespace {

constexpr MeshLine kCannot{-1.0, 0.0};

double weight(const MeshRun& run, const MeshLinks& links) noexcept {
  return static_cast<double>(run.stride) / links.bytes_per_s[run.axis];
}

// Distance in dies from the first member of a run to its last.
double reach(const MeshRun& run) noexcept {
  return static_cast<double>(run.size - 1) * static_cast<double>(run.stride);
}

// Positions of the runs, the slowest first.
int slowest_first(std::span<const MeshRun> runs, const MeshLinks& links,
                  std::array<int, kMaxMeshRuns>& order) noexcept {
  int count = 0;
  for (int i = 0; i < static_cast<int>(runs.size()); ++i) {
    int at = count++;
    const double mine = weight(runs[static_cast<std::size_t>(i)], links);
    for (; at > 0; --at) {
      const auto before = static_cast<std::size_t>(order[static_cast<std::size_t>(at) - 1]);
      if (weight(runs[before], links) >= mine) break;
      order[static_cast<std::size_t>(at)] = static_cast<int>(before);
    }
    order[static_cast<std::size_t>(at)] = i;
  }
  return count;
}

MeshLine ordered_line(std::span<const MeshRun> runs, const MeshLinks& links) noexcept {
  std::array<int, kMaxMeshRuns> order{};
  const int count = slowest_first(runs, links, order);
  MeshLine line{0.0, 0.0};
  double share = 1.0;  // part of V that a run handles; the last run handles all of it
  for (int at = count - 1; at >= 0; --at) {
    const MeshRun& run = runs[static_cast<std::size_t>(order[static_cast<std::size_t>(at)])];
    const double size = run.size;
    line.s_per_byte += weight(run, links) * (size - 1.0) / size * share;
    line.fixed_s += links.hop_s * reach(run);
    share /= size;
  }
  return line;
}

// Whether there are two runs, one along each axis in either order; returns them as `x` and `y`.
bool plane_of(std::span<const MeshRun> runs, MeshRun& x, MeshRun& y) noexcept {
  if (runs.size() != 2 || runs[0].axis == runs[1].axis) return false;
  x = runs[0].axis == 0 ? runs[0] : runs[1];
  y = runs[0].axis == 0 ? runs[1] : runs[0];
  return true;
}

MeshLine ring_line(std::span<const MeshRun> runs, const MeshLinks& links) noexcept {
  MeshRun x{}, y{};
  if (!plane_of(runs, x, y) || (x.size % 2 != 0 && y.size % 2 != 0)) return kCannot;
  const double ranks = static_cast<double>(x.size) * static_cast<double>(y.size);
  // Rows are traversed back and forth if their number is even, else columns.
  const MeshRun& across = y.size % 2 == 0 ? y : x;
  const MeshRun& along = y.size % 2 == 0 ? x : y;
  const double turns = 2.0 * (across.size - 1.0);
  const double length = turns * across.stride + (ranks - turns) * along.stride -
                        std::min(across.stride, along.stride);
  const double slowest = std::max(weight(x, links), weight(y, links));
  return {slowest * (ranks - 1.0) / ranks * 0.5, links.hop_s * length};
}

MeshLine split_line(std::span<const MeshRun> runs, const MeshLinks& links) noexcept {
  MeshRun x{}, y{};
  if (!plane_of(runs, x, y)) return kCannot;
  const double wx = weight(x, links) * (x.size - 1.0) / x.size;
  const double wy = weight(y, links) * (y.size - 1.0) / y.size;
  const double first = std::max(wx / y.size, wy / x.size);
  return {0.5 * (first + std::max(wx, wy)), links.hop_s * 2.0 * std::max(reach(x), reach(y))};
}

bool good(std::span<const MeshRun> runs) noexcept {
  if (runs.size() > kMaxMeshRuns) return false;
  return std::all_of(runs.begin(), runs.end(), [](const MeshRun& run) {
    return (run.axis == 0 || run.axis == 1) && run.size >= 2 && run.stride >= 1 &&
           run.size <= 4096 && run.stride <= 4096;
  });
}

// Switched: each die uses only its own link.
MeshLine switch_line(std::span<const MeshRun> runs, const MeshLinks& links) noexcept {
  double ranks = 1.0;
  for (const MeshRun& run : runs) ranks *= run.size;
  if (runs.empty()) return {0.0, 0.0};
  return {(ranks - 1.0) / ranks / links.bytes_per_s[0], 2.0 * links.hop_s};
}

bool good(const MeshLinks& links) noexcept {
  if (static_cast<int>(links.fabric) < 0 || static_cast<int>(links.fabric) >= kMeshFabricCount) {
    return false;
  }
  const auto rate = [](double b) { return std::isfinite(b) && b > 0.0; };
  return rate(links.bytes_per_s[0]) && rate(links.bytes_per_s[1]) && std::isfinite(links.hop_s) &&
         links.hop_s >= 0.0;
}

}  // namespace

MeshLines mesh_gather_lines(std::span<const MeshRun> runs, const MeshLinks& links) noexcept {
  if (links.fabric != MeshFabric::kMesh) {
    return {kCannot, switch_line(runs, links), kCannot, kCannot};
  }
  return {kCannot, ordered_line(runs, links), ring_line(runs, links), split_line(runs, links)};
}

MeshLine mesh_reduce_line(const MeshLinks& links) noexcept {
  if (links.fabric != MeshFabric::kSummingSwitch) return kCannot;
  return {1.0 / links.bytes_per_s[0], 2.0 * links.hop_s};
}

MeshLine mesh_exchange_line(std::span<const MeshRun> runs, const MeshLinks& links) noexcept {
  if (links.fabric != MeshFabric::kMesh) return switch_line(runs, links);
  MeshLine line{0.0, 0.0};
  for (const MeshRun& run : runs) {
    const double half = run.size / 2;
    line.s_per_byte += weight(run, links) * half * (run.size - half) / run.size;
    line.fixed_s += links.hop_s * reach(run);
  }
  return line;
}

MeshResult mesh_collective(CollectiveOp op, double bytes, std::span<const MeshRun> runs,
                           const MeshLinks& links, MeshAlgorithm wanted) noexcept {
  constexpr double nan = kNan;
  if (!std::isfinite(bytes)) return {nan, wanted, Status::kNotFinite};
  if (bytes < 0.0) return {nan, wanted, Status::kNegative};
  if (!good(links)) return {nan, wanted, Status::kBadFabric};
  if (!good(runs)) return {nan, wanted, Status::kBadRanks};
  if (static_cast<int>(wanted) >= kMeshAlgorithmCount) return {nan, wanted, Status::kBadOperation};
  if (op == CollectiveOp::kAllToAll) {
    const MeshLine line = mesh_exchange_line(runs, links);
    return {line.s_per_byte * bytes + line.fixed_s, MeshAlgorithm::kOrdered, Status::kOk};
  }
  if (op != CollectiveOp::kAllReduce && op != CollectiveOp::kReduceScatter &&
      op != CollectiveOp::kAllGather) {
    return {nan, wanted, Status::kBadOperation};
  }
  const MeshLine summed = mesh_reduce_line(links);
  if (op == CollectiveOp::kAllReduce && !(summed.s_per_byte < 0.0)) {
    const double time_s = runs.empty() ? 0.0 : summed.s_per_byte * bytes + summed.fixed_s;
    return {time_s, MeshAlgorithm::kOrdered, Status::kOk};
  }
  const MeshTime half = mesh_gather(mesh_gather_lines(runs, links), bytes, wanted);
  const double times = op == CollectiveOp::kAllReduce ? 2.0 : 1.0;
  return {times * half.time_s, half.algorithm, Status::kOk};
}

// ---- traffic, link by link ----

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

  // Finds the links from one die to another, none if the dies are the same; false: no route exists.
  bool route(std::int32_t from, std::int32_t to, std::vector<std::int32_t>& links) {
    links.clear();
    if (dead(from) || dead(to)) return false;
    return straight(from, to, 0, links) || straight(from, to, 1, links) || detour(from, to, links);
  }

 private:
  // Routes along one axis first, then along the other.
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

  // First members of every group: the offsets not covered by a run.
  std::vector<std::int32_t> starts() const {
    std::vector<std::int32_t> members;
    for (std::int32_t y = 0; y < c_.height; ++y) {
      for (std::int32_t x = 0; x < c_.width; ++x) {
        const bool first = std::all_of(c_.runs.begin(), c_.runs.end(), [&](const MeshRun& run) {
          return (run.axis == 0 ? x : y) / run.stride % run.size == 0;
        });
        if (first) members.push_back((c_.y + y) * grid_.columns + c_.x + x);
      }
    }
    return members;
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

  // An all-gather of `bytes` along every line of a run: each part is forwarded to both ends.
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

  // The cycle of ring_line, in both directions.
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
  if (links.fabric != MeshFabric::kMesh)
    return Status::kBadFabric;  // switches: there are no links between dies
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

}  // namespace phaze
