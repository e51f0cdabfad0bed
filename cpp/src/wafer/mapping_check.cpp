#include <algorithm>

#include "phaze/mapping.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };

// Sums and products of a few such numbers are finite, and differences of sums are numbers.
constexpr double kMost = 1e100;

bool is_size(double value) noexcept { return value >= 0.0 && value <= kMost; }
bool is_rate(double value) noexcept { return value >= 1.0 / kMost && value <= kMost; }

bool good_edges(const MapProblem& p) noexcept {
  const auto ops = static_cast<std::int32_t>(p.ops.size());
  for (const MapEdgeRecord& edge : p.edges) {
    if (edge.from < 0 || edge.from >= ops || edge.to < 0 || edge.to >= ops) return false;
    if (edge.kind < 0 || edge.kind > 3 || !is_size(edge.bytes)) return false;
    if (edge.kind == 0 && edge.from >= edge.to) return false;
    for (const MapEdgeRecord& other : p.edges) {  // a fan carries one tensor
      if (other.from == edge.from && other.kind == edge.kind && other.bytes != edge.bytes) {
        return false;
      }
    }
  }
  for (std::size_t i = 0; i < p.chain.size(); ++i) {
    const std::int32_t op = p.chain[i];
    if (op < 0 || op >= ops || p.ops[kAt(op)].part != 1) return false;
    if (i == 0) continue;
    const bool joined = std::any_of(p.edges.begin(), p.edges.end(), [&](const MapEdgeRecord& e) {
      return e.kind == 0 && e.from == p.chain[i - 1] && e.to == op;
    });
    if (!joined) return false;
  }
  return true;
}

// Slots along x from the inside out, then along y; each spans what lies inside it.
bool good_slots(const MapProblem& p, std::int64_t* dies) noexcept {
  std::int64_t stride[2] = {1, 1};
  std::int32_t axis = 0;
  *dies = 1;
  for (const MeshRun& slot : p.slots) {
    if (slot.axis < axis || slot.axis > 1 || slot.size < 2 || slot.size > 1 << 16) return false;
    axis = slot.axis;
    if (slot.stride != stride[axis]) return false;
    stride[axis] *= slot.size;
    *dies *= slot.size;
    if (*dies > 1 << 16) return false;
  }
  return true;
}

bool good_columns(const MapProblem& p, std::int64_t dies) noexcept {
  const std::size_t d = p.divisors.size();
  std::int64_t count = 0;
  for (std::int64_t i = 1; i <= dies; ++i) {
    if (dies % i != 0) continue;
    if (kAt(count) >= d || p.divisors[kAt(count)] != i) return false;
    ++count;
  }
  if (kAt(count) != d || p.column.size() != d * d * d * d) return false;
  for (std::size_t at = 0; at < p.column.size(); ++at) {
    std::int64_t product = 1;
    for (std::size_t rest = at, r = 0; r < 4; ++r, rest /= d) product *= p.divisors[rest % d];
    const std::int32_t column = p.column[at];
    if (column < -1 || column >= p.columns || (column < 0 && dies % product == 0)) return false;
  }
  return true;
}

bool good_rules(const MapRulesRecord& r) noexcept {
  if (r.micro_batches < 1 || !is_rate(r.capacity_bytes) || !is_rate(r.memory_bytes_per_s)) {
    return false;
  }
  for (const double size : {r.stream_capacity_bytes, r.stream_bytes_per_s, r.weight_bytes,
                            r.gradient_bytes, r.state_bytes, r.step_bytes, r.boundary_bytes}) {
    if (!is_size(size)) return false;
  }
  for (const double seconds : {r.outer_tail_s, r.stream_link_s, r.stream_both_s, r.other_sum_s,
                               r.other_slowest_s, r.other_tail_s}) {
    if (!is_size(seconds)) return false;
  }
  if (r.chunks < 1 || (r.zero_bubble != 0 && r.chunks > 1)) return false;
  if (r.fabric < 0 || r.fabric >= kMeshFabricCount || r.pieces < 1 || r.pieces > 64) return false;
  if (r.modes <= 0 || r.modes >= 1 << kWeightModeCount) return false;
  const bool streams = (r.modes >> static_cast<int>(WeightMode::kStream) & 1) != 0 ||
                       (r.modes >> static_cast<int>(WeightMode::kOffload) & 1) != 0;
  return (r.stream_capacity_bytes <= 0.0 && !streams) || r.stream_bytes_per_s > 0.0;
}

// Where stages of other classes are part of the pipeline: these have a place in it, not under
// ZB-H1.
bool good_classes(const MapProblem& p) noexcept {
  const MapRulesRecord& r = p.rules;
  if (r.pipeline_stages == 0) {
    return r.first_stage == 0 && r.other_sum_s + r.other_slowest_s + r.other_tail_s == 0.0;
  }
  const auto own = static_cast<std::int64_t>(p.blocks.size());
  const bool placed = r.first_stage >= 0 && r.pipeline_stages <= kMaxMapStages &&
                      r.first_stage + own <= r.pipeline_stages;
  return placed && r.zero_bubble == 0;
}

}  // namespace

Status check_problem(const MapProblem& p) noexcept {
  if (p.ops.empty() || p.ops.size() > kMaxMapOps || p.slots.size() > kMaxSlots ||
      p.blocks.empty() || p.blocks.size() > kMaxMapStages || p.chain.empty()) {
    return Status::kTooManyOps;
  }
  std::int64_t dies = 1;
  if (!good_slots(p, &dies)) return Status::kBadRanks;
  const auto cells = p.ops.size() * kAt(std::max(p.columns, 0));
  for (const auto& table : {p.tables.forward_s, p.tables.backward_s, p.tables.stash_bytes,
                            p.tables.live_bytes, p.tables.parameters, p.tables.weight_grad_s}) {
    if (table.size() != cells) return Status::kBadLayers;
    if (!std::all_of(table.begin(), table.end(), is_size)) return Status::kNotFinite;
  }
  for (const MapOpRecord& op : p.ops) {
    if (op.part < 0 || op.part > 2 || op.beside < 0 || op.beside > 2 || !is_size(op.stat_bytes) ||
        !is_size(op.gather_bytes)) {
      return Status::kBadLayers;
    }
  }
  if (!good_columns(p, dies) || p.boundary_s.size() != p.blocks.size()) return Status::kBadLayers;
  if (!std::all_of(p.boundary_s.begin(), p.boundary_s.end(), is_size)) return Status::kNotFinite;
  const auto all = std::max(p.blocks.size(), kAt(std::max(p.rules.pipeline_stages, 0)));
  if (!p.cross_stage_s.empty() && p.cross_stage_s.size() != all * all * 2) return Status::kBadLayers;
  if (!std::all_of(p.cross_stage_s.begin(), p.cross_stage_s.end(), is_size)) return Status::kNotFinite;
  if (std::any_of(p.blocks.begin(), p.blocks.end(), [](auto n) { return n < 0; })) {
    return Status::kNegative;
  }
  if (!good_rules(p.rules) || !good_classes(p)) return Status::kBadRules;
  if (!is_rate(p.rules.x_bytes_per_s) || !is_rate(p.rules.y_bytes_per_s) ||
      !is_size(p.rules.hop_s)) {
    return Status::kBadFabric;
  }
  return good_edges(p) ? Status::kOk : Status::kBadEdge;
}

}  // namespace phaze
