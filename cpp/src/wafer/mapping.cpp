// Mappings of operators onto a mesh of dies: validation of problems, and changes of a mapping that
// recompute only the affected terms.
#include "phaze/mapping.hpp"

#include <algorithm>

#include "base/numbers.hpp"
#include "wafer/mapping_terms.hpp"

namespace phaze {

namespace {

bool is_rate(double value) noexcept {
  return value >= 1.0 / kLargestInput && value <= kLargestInput;
}

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
    if (op < 0 || op >= ops || p.ops[at(op)].part != 1) return false;
    if (i == 0) continue;
    const bool joined = std::any_of(p.edges.begin(), p.edges.end(), [&](const MapEdgeRecord& e) {
      return e.kind == 0 && e.from == p.chain[i - 1] && e.to == op;
    });
    if (!joined) return false;
  }
  return true;
}

// Checks that slots are ordered along x from the inside out, then along y, and that the stride of
// each is the product of the sizes further inside.
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
    if (at(count) >= d || p.divisors[at(count)] != i) return false;
    ++count;
  }
  if (at(count) != d || p.column.size() != d * d * d * d) return false;
  for (std::size_t position = 0; position < p.column.size(); ++position) {
    std::int64_t product = 1;
    for (std::size_t rest = position, r = 0; r < 4; ++r, rest /= d) product *= p.divisors[rest % d];
    const std::int32_t column = p.column[position];
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
  for (const double seconds : {r.outer_tail_s, r.stream_link_s, r.stream_both_s}) {
    if (!is_size(seconds)) return false;
  }
  if (r.chunks < 1 || (r.zero_bubble != 0 && r.chunks > 1)) return false;
  if (r.fabric < 0 || r.fabric >= kMeshFabricCount || r.pieces < 1 || r.pieces > 64) return false;
  if (r.modes <= 0 || r.modes >= 1 << kWeightModeCount) return false;
  const bool streams = (r.modes >> static_cast<int>(WeightMode::kStream) & 1) != 0 ||
                       (r.modes >> static_cast<int>(WeightMode::kOffload) & 1) != 0;
  return (r.stream_capacity_bytes <= 0.0 && !streams) || r.stream_bytes_per_s > 0.0;
}

}  // namespace

Status check_problem(const MapProblem& p) noexcept {
  if (p.ops.empty() || p.ops.size() > kMaxMapOps || p.slots.size() > kMaxSlots ||
      p.blocks.empty() || p.blocks.size() > kMaxMapStages || p.chain.empty()) {
    return Status::kTooManyOps;
  }
  std::int64_t dies = 1;
  if (!good_slots(p, &dies)) return Status::kBadRanks;
  const auto cells = p.ops.size() * at(std::max(p.columns, 0));
  for (const auto& table : {p.tables.forward_s, p.tables.backward_s, p.tables.stash_bytes,
                            p.tables.live_bytes, p.tables.parameters, p.tables.weight_grad_s}) {
    if (table.size() != cells) return Status::kBadLayers;
    if (!std::all_of(table.begin(), table.end(), is_size)) return Status::kNotFinite;
  }
  for (const MapOpRecord& op : p.ops) {
    if (op.part < 0 || op.part > 2 || op.overlap < 0 || op.overlap > 2 || !is_size(op.stat_bytes) ||
        !is_size(op.gather_bytes)) {
      return Status::kBadLayers;
    }
  }
  if (!good_columns(p, dies) || p.boundary_s.size() != p.blocks.size()) return Status::kBadLayers;
  if (!std::all_of(p.boundary_s.begin(), p.boundary_s.end(), is_size)) return Status::kNotFinite;
  const auto all = p.blocks.size();
  if (!p.cross_stage_s.empty() && p.cross_stage_s.size() != all * all * 2)
    return Status::kBadLayers;
  if (!std::all_of(p.cross_stage_s.begin(), p.cross_stage_s.end(), is_size))
    return Status::kNotFinite;
  if (std::any_of(p.blocks.begin(), p.blocks.end(), [](auto n) { return n < 0; })) {
    return Status::kNegative;
  }
  if (!good_rules(p.rules)) return Status::kBadRules;
  if (!is_rate(p.rules.x_bytes_per_s) || !is_rate(p.rules.y_bytes_per_s) ||
      !is_size(p.rules.hop_s)) {
    return Status::kBadFabric;
  }
  return good_edges(p) ? Status::kOk : Status::kBadEdge;
}

struct Mapping::Impl {
  explicit Impl(const MapProblem& problem) : terms(problem) {
    // Reserves for the largest proposal, so that propose() never allocates.
    state.proposed.op_mappings.reserve(4 * terms.ops.size());
    state.proposed.nodes.reserve(4 * terms.ops.size());
    state.proposed.touched.reserve(4 * terms.ops.size());
    state.proposed.fans.reserve(terms.fans.size());
    state.proposed.seen.reserve(terms.fans.size());
  }

  MapTerms terms;
  MapState state;
};

Mapping::Mapping(const MapProblem& problem) : impl_(std::make_unique<Impl>(problem)) {}
Mapping::~Mapping() = default;
Mapping::Mapping(Mapping&&) noexcept = default;
Mapping& Mapping::operator=(Mapping&&) noexcept = default;

int Mapping::ops() const noexcept { return impl_->terms.op_count(); }
int Mapping::slots() const noexcept { return static_cast<int>(impl_->terms.slots.size()); }
int Mapping::stages() const noexcept { return impl_->terms.stage_count(); }
bool Mapping::is_first(int k) const noexcept { return impl_->terms.is_first(k); }
bool Mapping::is_last(int k) const noexcept { return impl_->terms.is_last(k); }
double Mapping::flight(int k) const noexcept { return impl_->terms.flight(k); }
const MapRulesRecord& Mapping::rules() const noexcept { return impl_->terms.rules; }
const MapOpRecord& Mapping::op(int i) const noexcept { return impl_->terms.ops[at(i)]; }
const OpMapping& Mapping::op_mapping(int i) const noexcept {
  return impl_->state.op_mappings[at(i)];
}
bool Mapping::assigned() const noexcept {
  return impl_->state.op_mappings.size() == impl_->terms.ops.size();
}
bool Mapping::legal(int op, const OpMapping& op_mapping) const noexcept {
  return impl_->terms.legal(op, op_mapping);
}
bool Mapping::weighted(int op) const noexcept { return impl_->terms.weighted[at(op)] != 0; }
const std::vector<OpMapping>& Mapping::choices(int op) const noexcept {
  return impl_->terms.choices[at(op)];
}
MapNode Mapping::node(int op, const OpMapping& op_mapping) const noexcept {
  return impl_->terms.node(op, op_mapping);
}
double Mapping::conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                             double bytes) const noexcept {
  return impl_->terms.conversion_s(from, from_op, to, to_op, bytes);
}
std::span<const std::int32_t> Mapping::chain() const noexcept { return impl_->terms.chain; }
std::span<const MapEdgeRecord> Mapping::edges() const noexcept { return impl_->terms.edges; }
std::span<const std::int32_t> Mapping::blocks() const noexcept { return impl_->terms.blocks; }
std::span<const double> Mapping::boundary() const noexcept { return impl_->terms.boundary_s; }
double Mapping::stream_link_s() const noexcept { return impl_->terms.link_s; }

MapScore Mapping::score(std::span<const std::uint8_t> outputs, std::vector<MapStage>* described,
                        double limit_s, double shortage, MapRange* range) const {
  return score_step(impl_->terms, impl_->state, {outputs, described, limit_s, shortage, range});
}

void Mapping::assign(std::span<const OpMapping> op_mappings) {
  auto& [terms, state] = *impl_;
  state.nodes.resize(terms.ops.size());
  state.fans.resize(terms.fans.size());
  // Set last, so that assigned() stays false if an allocation fails.
  state.op_mappings.assign(op_mappings.begin(), op_mappings.end());
  for (int i = 0; i < ops(); ++i) state.nodes[at(i)] = terms.node(i, state.op_mappings[at(i)]);
  for (std::size_t f = 0; f < terms.fans.size(); ++f) {
    state.fans[f] = terms.fan(terms.fans[f], state);
  }
}

void Mapping::propose(int op, const OpMapping& op_mapping) {
  MapState& state = impl_->state;
  state.proposed.touched.push_back(op);  // may throw, so before any change
  state.proposed.op_mappings.emplace_back(op, state.op_mappings[at(op)]);
  state.op_mappings[at(op)] = op_mapping;
}

bool Mapping::settle() {
  auto& [terms, state] = *impl_;
  MapState::Proposed& p = state.proposed;
  bool differs = false;
  const std::size_t first = p.op_mappings.size() - p.touched.size();
  for (std::size_t i = 0; i < p.touched.size(); ++i) {
    const std::int32_t op = p.touched[i];
    const OpMapping& now = state.op_mappings[at(op)];
    const OpMapping& before = p.op_mappings[first + i].second;
    differs = differs || now.slots != before.slots || now.algorithm != before.algorithm ||
              (now.mode != before.mode && weighted(op));
  }
  if (!differs) {  // a mode matters only if there are weights
    p.touched.clear();
    return false;
  }
  p.seen.assign(terms.fans.size(), 0);
  for (const std::int32_t op : p.touched) {
    p.nodes.emplace_back(op, state.nodes[at(op)]);
    state.nodes[at(op)] = terms.node(op, state.op_mappings[at(op)]);
  }
  for (const std::int32_t op : p.touched) {
    for (const std::int32_t f : terms.fans_of[at(op)]) {
      if (p.seen[at(f)] != 0) continue;
      p.seen[at(f)] = 1;
      p.fans.emplace_back(f, state.fans[at(f)]);
      state.fans[at(f)] = terms.fan(terms.fans[at(f)], state);
    }
  }
  p.touched.clear();
  return true;
}

void Mapping::withdraw() noexcept {
  MapState& state = impl_->state;
  const MapState::Proposed& p = state.proposed;
  for (auto it = p.op_mappings.rbegin(); it != p.op_mappings.rend(); ++it) {
    state.op_mappings[at(it->first)] = it->second;
  }
  for (auto it = p.nodes.rbegin(); it != p.nodes.rend(); ++it) {
    state.nodes[at(it->first)] = it->second;
  }
  for (auto it = p.fans.rbegin(); it != p.fans.rend(); ++it) state.fans[at(it->first)] = it->second;
  keep();
}

void Mapping::keep() noexcept {
  MapState::Proposed& p = impl_->state.proposed;
  p.op_mappings.clear();
  p.nodes.clear();
  p.fans.clear();
  p.touched.clear();
}

void Mapping::change(int op, const OpMapping& op_mapping) {
  auto& [terms, state] = *impl_;
  state.op_mappings[at(op)] = op_mapping;
  state.nodes[at(op)] = terms.node(op, op_mapping);
  for (const std::int32_t f : terms.fans_of[at(op)]) {
    state.fans[at(f)] = terms.fan(terms.fans[at(f)], state);
  }
}

}  // namespace phaze
