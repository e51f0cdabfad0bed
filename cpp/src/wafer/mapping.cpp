// Mappings of operators onto a mesh of dies: what a problem may be, which operator mappings are
// legal, and the terms of each.
#include "phaze/mapping.hpp"

#include <algorithm>
#include <bit>

#include "base/numbers.hpp"

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
  const auto cells = p.ops.size() * at(std::max(p.columns, 0));
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
  const auto all = std::max(p.blocks.size(), at(std::max(p.rules.pipeline_stages, 0)));
  if (!p.foreign_s.empty() && p.foreign_s.size() != all * all * 2) return Status::kBadLayers;
  if (!std::all_of(p.foreign_s.begin(), p.foreign_s.end(), is_size)) return Status::kNotFinite;
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

Mapping::Mapping(const MapProblem& p)
    : slots_(p.slots.begin(), p.slots.end()),
      ops_(p.ops.begin(), p.ops.end()),
      edges_(p.edges.begin(), p.edges.end()),
      rules_(p.rules),
      column_(p.column.begin(), p.column.end()),
      divisors_(p.divisors.size()),
      columns_(at(p.columns)),
      forward_s_(p.tables.forward_s.begin(), p.tables.forward_s.end()),
      backward_s_(p.tables.backward_s.begin(), p.tables.backward_s.end()),
      stash_bytes_(p.tables.stash_bytes.begin(), p.tables.stash_bytes.end()),
      live_bytes_(p.tables.live_bytes.begin(), p.tables.live_bytes.end()),
      parameters_(p.tables.parameters.begin(), p.tables.parameters.end()),
      weight_grad_s_(p.tables.weight_grad_s.begin(), p.tables.weight_grad_s.end()),
      blocks_(p.blocks.begin(), p.blocks.end()),
      boundary_(p.boundary_s.begin(), p.boundary_s.end()),
      foreign_s_(p.foreign_s.begin(), p.foreign_s.end()),
      link_s_(p.rules.stream_link_s),
      both_s_(p.rules.stream_both_s),
      chain_(p.chain.begin(), p.chain.end()),
      last_(p.chain.back()),
      entry_(p.chain.back()) {
  const MeshLinks links{{rules_.x_bytes_per_s, rules_.y_bytes_per_s},
                        rules_.hop_s,
                        static_cast<MeshFabric>(rules_.fabric)};
  reduce_line_ = mesh_reduce_line(links);
  for (int k = 0; k < stages(); ++k) flights_.push_back(flight(k));
  if (!foreign_s_.empty()) {  // every stage as the one of these that stands worst
    link_s_ = both_s_ = 0.0;
    for (int k = rules_.first_stage; k < rules_.first_stage + stages(); ++k) {
      const double* own = &foreign_s_[at(k) * at(pipeline_stages() + 1) * 2];
      link_s_ = std::max(link_s_, own[0]);
      both_s_ = std::max(both_s_, own[1]);
    }
  }
  const std::size_t sets = std::size_t{1} << slots_.size();
  sizes_.resize(sets);
  gather_lines_.resize(sets);
  exchange_lines_.resize(sets);
  for (std::size_t set = 0; set < sets; ++set) {
    std::vector<MeshRun> runs;  // neighbouring slots of one axis are one run
    double product = 1.0;
    for (std::size_t k = 0; k < slots_.size(); ++k) {
      if ((set >> k & 1) == 0) continue;
      const MeshRun& slot = slots_[k];
      product *= slot.size;
      if (!runs.empty() && runs.back().axis == slot.axis &&
          runs.back().stride * runs.back().size == slot.stride) {
        runs.back().size *= slot.size;
      } else {
        runs.push_back(slot);
      }
    }
    sizes_[set] = product;
    gather_lines_[set] = mesh_gather_lines(runs, links);
    exchange_lines_[set] = mesh_exchange_line(runs, links);
  }
  for (const MapEdgeRecord& entry : edges_) {
    if (entry.kind != static_cast<int>(EdgeKind::kEntry)) continue;
    for (const MapEdgeRecord& wrap : edges_) {
      if (wrap.kind == static_cast<int>(EdgeKind::kWrap) && wrap.to == entry.to) entry_ = wrap.from;
    }
  }
  position_.assign(at(p.divisors.back()) + 1, -1);
  for (std::size_t i = 0; i < divisors_; ++i) position_[at(p.divisors[i])] = static_cast<int>(i);
  for (const MapEdgeRecord& edge : edges_) {
    auto same = std::find_if(fans_.begin(), fans_.end(), [&](const FanShape& f) {
      return f.from == edge.from && f.kind == edge.kind;
    });
    if (same == fans_.end()) {
      fans_.push_back({edge.from, edge.kind, edge.bytes, {}, {}});
      same = fans_.end() - 1;
    }
    // The next of the chain pays first where consumers share: the relaxation prices it alone.
    const auto position = std::find(chain_.begin(), chain_.end(), edge.from);
    const bool next = position != chain_.end() && position + 1 != chain_.end() &&
                      *(position + 1) == edge.to &&
                      edge.kind == static_cast<int>(EdgeKind::kInside);
    same->to.insert(next ? same->to.begin() : same->to.end(), edge.to);
    same->again.insert(next ? same->again.begin() : same->again.end(), edge.again != 0);
  }
  fans_of_.resize(ops_.size());
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    std::vector<std::int32_t> touched = fans_[f].to;
    touched.push_back(fans_[f].from);
    // The tensor that enters a block lies as the block before leaves it.
    if (fans_[f].kind == static_cast<int>(EdgeKind::kEntry)) touched.push_back(entry_);
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (const std::int32_t op : touched) fans_of_[at(op)].push_back(static_cast<int>(f));
  }
  forced_.resize(ops_.size());
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    std::vector<std::int32_t>& found = forced_[i];
    std::vector<std::int32_t> open{static_cast<std::int32_t>(i)};
    if (ops_[i].kept == 0) open.clear();  // a mask comes from its seed, statistics with the output
    while (!open.empty()) {
      const std::int32_t position = open.back();
      open.pop_back();
      for (const MapEdgeRecord& edge : edges_) {
        if (edge.kind != 0 || edge.to != position || ops_[at(edge.from)].part != 1) continue;
        if (ops_[at(edge.from)].kept != 0 ||
            std::find(found.begin(), found.end(), edge.from) != found.end())
          continue;
        found.push_back(edge.from);
        open.push_back(edge.from);
      }
    }
    std::sort(found.begin(), found.end());
  }
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    const auto row = parameters_.begin() + static_cast<std::ptrdiff_t>(i * columns_);
    const bool any = std::any_of(row, row + static_cast<std::ptrdiff_t>(columns_),
                                 [](double count) { return count > 0.0; });
    weighted_.push_back(any ? 1 : 0);
  }
  // No proposal has more changes, so that none of them runs out of memory half way.
  proposed_.op_mappings.reserve(4 * ops_.size());
  proposed_.nodes.reserve(4 * ops_.size());
  proposed_.touched.reserve(4 * ops_.size());
  proposed_.fans.reserve(fans_.size());
  proposed_.seen.reserve(fans_.size());
  choices_.resize(ops_.size());
  for (int i = 0; i < ops(); ++i) enumerate(i);
}

bool Mapping::legal(int op, const OpMapping& op_mapping) const noexcept {
  const MapOpRecord& record = ops_[at(op)];
  const unsigned all = (1U << slots_.size()) - 1U;
  unsigned seen = 0;
  for (int r = 0; r < kRoleCount; ++r) {
    const unsigned mask = op_mapping.slots[at(r)];
    if ((mask & seen) != 0 || (mask & ~all) != 0) return false;
    seen |= mask;
    if (mask == 0) continue;
    if ((record.roles >> r & 1) == 0) return false;
    if (r < 4 && size(static_cast<std::uint16_t>(mask)) > static_cast<double>(record.limit[r])) {
      return false;
    }
  }
  if (seen != all || op_mapping.mode >= kWeightModeCount ||
      op_mapping.algorithm >= kMeshAlgorithmCount) {
    return false;
  }
  if ((rules_.modes >> op_mapping.mode & 1) == 0) return false;
  int changes[2] = {0, 0};
  for (std::size_t k = 1; k < slots_.size(); ++k) {
    if (slots_[k].axis != slots_[k - 1].axis) continue;
    for (const std::uint16_t mask : op_mapping.slots) {
      if ((mask >> (k - 1) & 1) != 0 && (mask >> k & 1) == 0) ++changes[slots_[k].axis];
    }
  }
  if (changes[0] >= kRunsPerAxis || changes[1] >= kRunsPerAxis) return false;
  if (rules_.linear == 0) return true;
  constexpr int kRank[kRoleCount] = {2, 1, 0, 0, 1};
  int rank = 0;
  for (std::size_t k = 0; k < slots_.size(); ++k) {
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      if ((op_mapping.slots[r] >> k & 1) == 0) continue;
      if (kRank[r] < rank) return false;
      rank = kRank[r];
    }
  }
  return true;
}

void Mapping::enumerate(int op) {
  // Per axis: every way to give each slot a role with few enough changes from the inside out.
  using Pattern = std::array<std::uint16_t, kRoleCount>;
  const auto patterns = [&](int axis) {
    std::vector<std::pair<Pattern, std::pair<int, int>>> open{{Pattern{}, {-1, 0}}};
    for (std::size_t k = 0; k < slots_.size(); ++k) {
      if (slots_[k].axis != axis) continue;
      std::vector<std::pair<Pattern, std::pair<int, int>>> longer;
      for (const auto& [pattern, last] : open) {
        for (int role = 0; role < kRoleCount; ++role) {
          const int runs = last.second + (role != last.first ? 1 : 0);
          if (runs > kRunsPerAxis) continue;
          Pattern next = pattern;
          next[at(role)] = static_cast<std::uint16_t>(next[at(role)] | 1U << k);
          longer.push_back({next, {role, runs}});
        }
      }
      open = std::move(longer);
    }
    std::vector<Pattern> found;
    for (const auto& [pattern, last] : open) found.push_back(pattern);
    return found;
  };
  const auto along_x = patterns(0), along_y = patterns(1);
  for (const auto& x : along_x) {
    for (const auto& y : along_y) {
      OpMapping op_mapping{{}, static_cast<std::uint8_t>(std::countr_zero(at(rules_.modes))), 0};
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        op_mapping.slots[r] = static_cast<std::uint16_t>(x[r] | y[r]);
      }
      if (legal(op, op_mapping)) choices_[at(op)].push_back(op_mapping);
    }
  }
}

namespace {

constexpr auto kRole = [](Role role) { return static_cast<std::size_t>(role); };

}  // namespace

// ---- states of a tensor along the slots ----

Mapping::State Mapping::state(int op, const OpMapping& g, std::uint16_t features,
                              std::uint16_t partial, std::uint16_t whole) const noexcept {
  const std::uint16_t batch = g.slots[kRole(Role::kBatch)], rows = g.slots[kRole(Role::kRows)];
  if (ops_[at(op)].expert != 0) return {batch, 0, rows, features, partial, whole};
  return {batch, rows, 0, features, partial, whole};
}

Mapping::State Mapping::made(int op, const OpMapping& g) const noexcept {
  return state(op, g, g.slots[kRole(Role::kColumns)], g.slots[kRole(Role::kInner)],
               g.slots[kRole(Role::kCopy)]);
}

Mapping::State Mapping::wanted(int op, const OpMapping& g) const noexcept {
  const std::uint16_t inner = g.slots[kRole(Role::kInner)];
  const std::uint16_t columns = g.slots[kRole(Role::kColumns)];
  const std::uint16_t copy = g.slots[kRole(Role::kCopy)];
  if (ops_[at(op)].product != 0) {
    return state(op, g, inner, 0, static_cast<std::uint16_t>(columns | copy));
  }
  return state(op, g, columns, 0, static_cast<std::uint16_t>(inner | copy));
}

Mapping::State Mapping::gradient_made(int op, const OpMapping& g) const noexcept {
  const std::uint16_t inner = g.slots[kRole(Role::kInner)];
  const std::uint16_t columns = g.slots[kRole(Role::kColumns)];
  const std::uint16_t copy = g.slots[kRole(Role::kCopy)];
  if (ops_[at(op)].product != 0) return state(op, g, inner, columns, copy);
  return state(op, g, columns, 0, static_cast<std::uint16_t>(inner | copy));
}

Mapping::State Mapping::gradient_wanted(int op, const OpMapping& g) const noexcept {
  return state(
      op, g, g.slots[kRole(Role::kColumns)], 0,
      static_cast<std::uint16_t>(g.slots[kRole(Role::kInner)] | g.slots[kRole(Role::kCopy)]));
}

Mapping::State Mapping::at_boundary() const noexcept {
  return gradient_wanted(last_, op_mappings_[at(last_)]);
}

// ---- collectives over sets of slots ----

double Mapping::gather_s(std::uint16_t slots, double bytes, std::uint8_t algorithm) const noexcept {
  if (slots == 0) return 0.0;
  if (rules_.volume != 0) return bytes * (size(slots) - 1.0) / size(slots);
  return mesh_gather(gather_lines_[slots], bytes, static_cast<MeshAlgorithm>(algorithm)).time_s;
}

double Mapping::reduce_s(std::uint16_t slots, double bytes, std::uint8_t algorithm) const noexcept {
  if (slots == 0 || rules_.volume != 0 || reduce_line_.s_per_byte < 0.0) {
    return 2.0 * gather_s(slots, bytes, algorithm);
  }
  return reduce_line_.s_per_byte * bytes + reduce_line_.fixed_s;
}

double Mapping::exchange_s(std::uint16_t slots, double bytes) const noexcept {
  if (slots == 0) return 0.0;
  if (rules_.volume != 0) return bytes * (size(slots) - 1.0) / size(slots);
  return exchange_lines_[slots].s_per_byte * bytes + exchange_lines_[slots].fixed_s;
}

// First what makes the tensor smaller, last what makes it larger. `again_s` gets the part that is
// paid once more when the tensor is kept as it was made.
double Mapping::convert_s(int op, const State& from, const State& to, double bytes,
                          std::uint8_t algorithm, double* again_s) const noexcept {
  const auto mask = [](int bits) { return static_cast<std::uint16_t>(bits); };
  const std::uint16_t splits = to.split(), held = from.split();
  const std::uint16_t scatter = mask(from.partial & splits);
  const std::uint16_t reduce = mask(from.partial & to.whole);
  const std::uint16_t stays = mask((from.batch & to.batch) | (from.rows & to.rows) |
                                   (from.experts & to.experts) | (from.features & to.features));
  const std::uint16_t exchange = mask(held & splits & ~stays);
  const std::uint16_t gather = mask(held & to.whole);
  if ((scatter | reduce | exchange | gather) == 0) return 0.0;
  // A whole tensor is cut before it travels, unless that takes more digits than a dimension has; it
  // is not cut by experts.
  const std::int64_t* limit = ops_[at(op)].limit;
  const auto cut = [&](std::uint16_t before, std::uint16_t after, std::size_t dimension) {
    const bool room = size(mask(before | after)) <= static_cast<double>(limit[dimension]);
    return room ? from.whole & after : 0;
  };
  const std::uint16_t sliced = mask(cut(from.batch, to.batch, 0) | cut(from.rows, to.rows, 1) |
                                    cut(from.features, to.features, 2));
  double here = bytes / size(held) / size(sliced);
  double seconds = 0.0;
  seconds += gather_s(scatter, here, algorithm);
  here /= size(scatter);
  const double exchanged = exchange_s(exchange, here);
  seconds += exchanged;
  seconds += reduce_s(reduce, here, algorithm);
  const double gathered = gather_s(gather, here * size(gather), algorithm);
  seconds += gathered;
  if (again_s != nullptr) *again_s += exchanged + gathered;
  return seconds;
}

// Pieces of a conversion beside pieces of the work they come from or go to: the first, or the last,
// has none to run beside. Whole where that is no shorter.
Mapping::Overlap Mapping::overlap(double whole_s, double piece_s, double work_s) const noexcept {
  const double pieces = rules_.pieces, others = pieces - 1.0;
  const double waits = piece_s + others * std::max(0.0, piece_s - work_s / pieces);
  if (!(waits < whole_s)) return {whole_s, 0.0};
  return {waits, others * std::min(piece_s, work_s / pieces)};
}

double Mapping::work_s(int op, const OpMapping& g, bool forward) const noexcept {
  const std::size_t cell = at(op) * columns_ + at(column_of(g));
  return forward ? forward_s_[cell] : backward_s_[cell];
}

// Whether a tensor may come in pieces beside the work of who takes it.
bool Mapping::takes_beside(int from, int to) const noexcept {
  return rules_.pieces > 1 && ops_[at(from)].beside != 2 && ops_[at(to)].beside == 1;
}

double Mapping::conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                             double bytes) const noexcept {
  const bool made_beside = rules_.pieces > 1 && ops_[at(from_op)].beside == 2;
  const bool beside = made_beside || takes_beside(from_op, to_op);
  const auto waits = [&](const State& before, const State& after, bool forward) {
    const auto of = [&](double size) {
      return convert_s(from_op, before, after, size, from.algorithm, nullptr);
    };
    const double whole = of(bytes);
    if (!beside || !(whole > 0.0)) return whole;
    const double work = made_beside ? work_s(from_op, from, forward) : work_s(to_op, to, forward);
    return overlap(whole, of(bytes / rules_.pieces), work).waits_s;
  };
  return waits(made(from_op, from), wanted(to_op, to), true) +
         waits(gradient_made(to_op, to), gradient_wanted(from_op, from), false);
}

// ---- terms ----

std::int32_t Mapping::column_of(const OpMapping& op_mapping) const noexcept {
  std::size_t position = 0;
  for (std::size_t r = 0; r < 4; ++r) {
    const auto factor = static_cast<std::size_t>(size(op_mapping.slots[r]));
    position = position * divisors_ + at(position_[factor]);
  }
  return column_[position];
}

Mapping::Node Mapping::node(int op, const OpMapping& g) const noexcept {
  const MapOpRecord& record = ops_[at(op)];
  const std::size_t cell = at(op) * columns_ + at(column_of(g));
  const std::uint16_t batch = g.slots[0], rows = g.slots[1];
  const std::uint16_t columns = g.slots[2], copy = g.slots[4];
  Node n{};
  n.forward_s = forward_s_[cell];
  n.backward_s = backward_s_[cell];
  n.weight_grad_s = weight_grad_s_[cell];
  n.stash_bytes = stash_bytes_[cell];
  n.live_bytes = live_bytes_[cell];
  if (record.stat_bytes > 0.0 && columns != 0) {
    const double here = record.stat_bytes / size(static_cast<std::uint16_t>(batch | rows));
    n.blocking_f_s = reduce_s(columns, here, g.algorithm);
    n.blocking_b_s = n.blocking_f_s;
  }
  if (record.gather_bytes > 0.0 && rows != 0) {
    const double here = record.gather_bytes / size(static_cast<std::uint16_t>(batch | columns));
    const double once = gather_s(rows, here, g.algorithm);
    n.blocking_f_s += once;
    n.blocking_b_s += once;
    n.hidden_b_s += once;  // gathered again beside the work
  }
  const double parameters = parameters_[cell];
  if (!(parameters > 0.0)) return n;
  const auto summed = static_cast<std::uint16_t>(record.expert != 0 ? batch : batch | rows);
  const auto copies = static_cast<std::uint16_t>(summed | copy);
  const double weights = parameters * rules_.weight_bytes;
  const double gradients = parameters * rules_.gradient_bytes;
  const double state = parameters * rules_.state_bytes;
  const double among = size(copies);
  const double scatter = gather_s(summed, gradients, g.algorithm);
  const double gather = gather_s(copies, weights, g.algorithm);
  const auto mode = static_cast<WeightMode>(g.mode);
  double updated = parameters / among;
  switch (mode) {
    case WeightMode::kReplicated:
      n.sync_s = reduce_s(summed, gradients, g.algorithm);
      n.state_bytes = weights + gradients + state;
      updated = parameters;
      break;
    case WeightMode::kZero1:
      n.sync_s = scatter + gather;
      n.state_bytes = weights + gradients + state / among;
      break;
    case WeightMode::kZero2:
      n.hidden_b_s += scatter;
      n.sync_s = gather;
      n.state_bytes = weights + (gradients + state) / among;
      n.gathered_bytes = gradients;
      break;
    case WeightMode::kOffload:
      n.hidden_b_s += scatter;
      n.sync_s = gather;
      n.state_bytes = weights;
      n.gathered_bytes = gradients;
      break;
    case WeightMode::kZero3:
    case WeightMode::kStream:
      n.hidden_f_s += gather;
      n.hidden_b_s += gather + scatter;
      n.gathered_bytes = weights + gradients;
      n.state_bytes = (weights + gradients + state) / among;
      break;
  }
  n.step_s = updated * rules_.step_bytes / rules_.memory_bytes_per_s;
  if (mode == WeightMode::kStream) {
    n.stream_bytes = n.state_bytes;
    n.state_bytes = 0.0;
    n.stream_s = rules_.streamed(2.0 * weights, gradients) / among / rules_.stream_bytes_per_s;
    n.step_s = 0.0;  // off the wafer, beside the next step
    n.hidden_f_s += streamed_link_s(weights / among, 0.0);
    n.hidden_b_s += streamed_link_s(weights / among, gradients / among);
  } else if (mode == WeightMode::kOffload) {
    n.stream_bytes = (gradients + state) / among;
    n.stream_s = gradients / among / rules_.stream_bytes_per_s;
    n.hidden_b_s += streamed_link_s(0.0, gradients / among);
    n.step_s = std::max(weights / among / rules_.stream_bytes_per_s,  // new weights come back
                        rules_.streamed_link_s(weights / among, 0.0));
  }
  return n;
}

Mapping::Fan Mapping::fan(const FanShape& shape) const noexcept {
  const OpMapping& from = op_mappings_[at(shape.from)];
  Fan found{};
  if (shape.kind == static_cast<int>(EdgeKind::kEntry)) {
    const State between = gradient_wanted(entry_, op_mappings_[at(entry_)]);
    found.forward_s = convert_s(shape.from, made(shape.from, from), between, shape.bytes,
                                from.algorithm, nullptr);
    found.backward_s = convert_s(shape.from, between, gradient_wanted(shape.from, from),
                                 shape.bytes, from.algorithm, nullptr);
    return found;
  }
  const auto same = [](const State& a, const State& b) {
    return a.same_splits(b) && a.partial == b.partial;
  };
  // Seconds that pass before the work goes on; pieces beside the producer's work are summed first.
  const bool beside = rules_.pieces > 1 && ops_[at(shape.from)].beside == 2;
  double piece_f_s = 0.0, piece_b_s = 0.0;
  const auto add = [&](const State& before, const State& after, std::int32_t to, bool forward,
                       double* again_s) {
    const double whole = convert_s(shape.from, before, after, shape.bytes, from.algorithm, again_s);
    double& waits = forward ? found.forward_s : found.backward_s;
    if (!(whole > 0.0) || !(beside || takes_beside(shape.from, to))) {
      waits += whole;
      return;
    }
    const double piece =
        convert_s(shape.from, before, after, shape.bytes / rules_.pieces, from.algorithm, nullptr);
    if (beside) {
      waits += whole;
      (forward ? piece_f_s : piece_b_s) += piece;
      return;
    }
    const Node& work = nodes_[at(to)];
    const Overlap part = overlap(whole, piece, forward ? work.forward_s : work.backward_s);
    waits += part.waits_s;
    (forward ? found.beside_f_s : found.beside_b_s) += part.beside_s;
  };
  for (std::size_t i = 0; i < shape.to.size(); ++i) {
    const std::int32_t to = shape.to[i];
    const OpMapping& op_mapping = op_mappings_[at(to)];
    const State in = wanted(to, op_mapping), back = gradient_made(to, op_mapping);
    bool again_in = false, again_back = false;  // an earlier consumer pays for it
    for (std::size_t j = 0; j < i; ++j) {
      const OpMapping& other = op_mappings_[at(shape.to[j])];
      again_in = again_in || same(wanted(shape.to[j], other), in);
      again_back = again_back || same(gradient_made(shape.to[j], other), back);
    }
    if (!again_in) {
      bool again = false;  // some consumer that shares this conversion needs it once more
      for (std::size_t j = i; j < shape.to.size(); ++j) {
        again = again ||
                (shape.again[j] && same(wanted(shape.to[j], op_mappings_[at(shape.to[j])]), in));
      }
      add(made(shape.from, from), in, to, true, again ? &found.again_s : nullptr);
    }
    if (!again_back) add(back, gradient_wanted(shape.from, from), to, false, nullptr);
  }
  if (!beside) return found;
  const Node& work = nodes_[at(shape.from)];
  const Overlap there = overlap(found.forward_s, piece_f_s, work.forward_s);
  const Overlap back = overlap(found.backward_s, piece_b_s, work.backward_s);
  return {there.waits_s, back.waits_s, found.again_s, there.beside_s, back.beside_s};
}

void Mapping::assign(std::span<const OpMapping> op_mappings) {
  nodes_.resize(ops_.size());
  fan_terms_.resize(fans_.size());
  // Last: assigned() stays false if memory runs out.
  op_mappings_.assign(op_mappings.begin(), op_mappings.end());
  for (int i = 0; i < ops(); ++i) nodes_[at(i)] = node(i, op_mappings_[at(i)]);
  for (std::size_t f = 0; f < fans_.size(); ++f) fan_terms_[f] = fan(fans_[f]);
}

void Mapping::propose(int op, const OpMapping& op_mapping) {
  proposed_.touched.push_back(op);  // what may throw comes first
  proposed_.op_mappings.emplace_back(op, op_mappings_[at(op)]);
  op_mappings_[at(op)] = op_mapping;
}

bool Mapping::settle() {
  Proposed& p = proposed_;
  bool differs = false;
  const std::size_t first = p.op_mappings.size() - p.touched.size();
  for (std::size_t i = 0; i < p.touched.size(); ++i) {
    const std::int32_t op = p.touched[i];
    const OpMapping& now = op_mappings_[at(op)];
    const OpMapping& before = p.op_mappings[first + i].second;
    differs = differs || now.slots != before.slots || now.algorithm != before.algorithm ||
              (now.mode != before.mode && weighted(op));
  }
  if (!differs) {  // a mode counts only where there are weights
    p.touched.clear();
    return false;
  }
  p.seen.assign(fans_.size(), 0);
  for (const std::int32_t op : p.touched) {
    p.nodes.emplace_back(op, nodes_[at(op)]);
    nodes_[at(op)] = node(op, op_mappings_[at(op)]);
  }
  for (const std::int32_t op : p.touched) {
    for (const std::int32_t f : fans_of_[at(op)]) {
      if (p.seen[at(f)] != 0) continue;
      p.seen[at(f)] = 1;
      p.fans.emplace_back(f, fan_terms_[at(f)]);
      fan_terms_[at(f)] = fan(fans_[at(f)]);
    }
  }
  p.touched.clear();
  return true;
}

void Mapping::withdraw() noexcept {
  Proposed& p = proposed_;
  for (auto it = p.op_mappings.rbegin(); it != p.op_mappings.rend(); ++it) {
    op_mappings_[at(it->first)] = it->second;
  }
  for (auto it = p.nodes.rbegin(); it != p.nodes.rend(); ++it) nodes_[at(it->first)] = it->second;
  for (auto it = p.fans.rbegin(); it != p.fans.rend(); ++it) {
    fan_terms_[at(it->first)] = it->second;
  }
  keep();
}

void Mapping::keep() noexcept {
  proposed_.op_mappings.clear();
  proposed_.nodes.clear();
  proposed_.fans.clear();
  proposed_.touched.clear();
}

void Mapping::change(int op, const OpMapping& op_mapping) {
  op_mappings_[at(op)] = op_mapping;
  nodes_[at(op)] = node(op, op_mapping);
  for (const std::int32_t f : fans_of_[at(op)]) fan_terms_[at(f)] = fan(fans_[at(f)]);
}

}  // namespace phaze
