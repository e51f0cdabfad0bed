// Why nothing fits: the plan whose fullest stage has the fewest bytes.
#include <algorithm>
#include <limits>

#include "phaze/placement.hpp"
#include "placement_cuts.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::size_t index(int i) noexcept { return static_cast<std::size_t>(i); }

// `bytes(i, j, s, p)` of the leanest variant, and that variant; p is the number of all stages where
// it matters, else 0.
template <typename Bytes>
void leanest(const PlacementCuts& cuts, int first, int last, bool by_count, const Bytes& bytes,
             PlacementPlan* plan) {
  const int end = cuts.count() - 1;
  struct Cell {
    double bytes = kInfinite;
    std::int32_t next = -1;
    std::int32_t variant = 0;
  };
  const auto attempt = [&](int from, int to, int p) {
    std::vector<std::vector<Cell>> cells(1, std::vector<Cell>(index(end) + 1));
    cells[0][index(end)].bytes = 0.0;
    for (int s = 1; s <= to; ++s) {
      cells.emplace_back(index(end) + 1);
      for (int i = end - 1; i >= 0; --i) {
        Cell& best = cells[index(s)][index(i)];
        cuts.for_after(i, [&](int j) {
          const double rest = cells[index(s - 1)][index(j)].bytes;
          if (rest >= best.bytes) return true;
          const auto [own, variant] = bytes(i, j, s, p);
          const double most = std::max(own, rest);
          if (most < best.bytes) best = {most, j, variant};
          return true;
        });
      }
      if (s < from || !(cells[index(s)][0].bytes < plan->time_s)) continue;
      plan->time_s = cells[index(s)][0].bytes;
      plan->stages = s;
      plan->variant_of.clear();
      std::vector<std::int32_t> path{0};
      for (int at = 0, left = s; left > 0; --left) {
        const Cell& cell = cells[index(left)][index(at)];
        plan->variant_of.push_back(cell.variant);
        path.push_back(cell.next);
        at = cell.next;
      }
      plan->stage_of = cuts.stages(path);
    }
  };
  if (!by_count) {
    attempt(first, last, 0);
    return;
  }
  for (int p = first; p <= last; ++p) attempt(p, p, p);
}

}  // namespace

Status least_memory(const PlacementLayers& layers, const PublishedRules& rules,
                    PlacementPlan* plan) {
  *plan = {kInfinite, 0.0, 0, 1, 0, {}, {}};
  const Status status = check_placement(layers);
  if (status != Status::kOk) return status;
  PlacementCuts cuts;
  const Status built = cuts.build(layers, true);
  if (built != Status::kOk) return built;
  const int narrow = cuts.narrow_before(cuts.count() - 1);
  int most = 0;
  while (most < layers.layers) {
    const std::int64_t next = most + 1;
    const std::int64_t devices =
        rules.width * next - std::int64_t{rules.width - 1} * std::min<std::int64_t>(next, narrow);
    if (devices > rules.devices) break;
    ++most;
  }
  if (rules.stages > 0) most = std::min(most, static_cast<int>(rules.stages));
  const auto bytes = [&](int i, int j, int s, int) {
    const double kept = rules.recompute ? cuts.traffic(i, j).in_bytes : cuts.stash_bytes(0, i, j);
    return std::pair{cuts.resident_bytes(i, j) + cuts.once_bytes(i, j) + (s - 1) * kept, 0};
  };
  leanest(cuts, rules.stages > 0 ? most : 1, most, false, bytes, plan);
  return Status::kOk;
}

Status least_memory(const PlacementLayers& layers, const PipelineRules& rules,
                    PlacementPlan* plan) {
  *plan = {kInfinite, 0.0, 0, 1, 0, {}, {}};
  const Status status = check_placement(layers);
  if (status != Status::kOk) return status;
  PlacementCuts cuts;
  const Status built = cuts.build(layers, false);
  if (built != Status::kOk) return built;
  const auto bytes = [&](int i, int j, int s, int p) {
    const double waiting =
        static_cast<double>(std::min<std::int64_t>(rules.microbatches, p > 0 ? p : s));
    const bool single = i == 0 && j == cuts.count() - 1;
    const double held =
        cuts.resident_bytes(i, j) + cuts.once_bytes(i, j) + (single ? 0.0 : rules.piped_bytes);
    std::pair<double, int> best{kInfinite, 0};
    for (int v = 0; v < layers.variants; ++v) {
      const double own = held + waiting * cuts.stash_bytes(v, i, j) + cuts.live_bytes(v, i, j);
      if (own < best.first) best = {own, v};
    }
    return best;
  };
  const int last = std::min(rules.last_stages, layers.layers);
  leanest(cuts, std::min(rules.first_stages, last), last, rules.kind == PipelineKind::kZeroBubble,
          bytes, plan);
  return Status::kOk;
}

}  // namespace phaze
