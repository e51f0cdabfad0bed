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

// Dies from the first member of a run to its last.
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
  double share = 1.0;  // of V that the run works on, the last run on all of it
  for (int at = count - 1; at >= 0; --at) {
    const MeshRun& run = runs[static_cast<std::size_t>(order[static_cast<std::size_t>(at)])];
    const double size = run.size;
    line.s_per_byte += weight(run, links) * (size - 1.0) / size * share;
    line.fixed_s += links.hop_s * reach(run);
    share /= size;
  }
  return line;
}

// One run along each axis, whichever comes first.
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
  // Rows are walked to and fro where there is an even number of them, else columns.
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

// One link of each die to the switches: whoever the others are.
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

}  // namespace phaze
