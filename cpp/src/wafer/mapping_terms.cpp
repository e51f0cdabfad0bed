// The terms of a mapping problem: sets of slots, legal operator mappings, conversions of tensors
// between operators, and the work and weights of each operator. docs/wafer.md has the formulas.
#include "wafer/mapping_terms.hpp"

#include <algorithm>
#include <bit>

namespace phaze {
namespace {

constexpr std::size_t kRole(Role role) noexcept { return static_cast<std::size_t>(role); }

}  // namespace

// ---- the problem ----

MapTerms::MapTerms(const MapProblem& p)
    : slots(p.slots.begin(), p.slots.end()),
      ops(p.ops.begin(), p.ops.end()),
      edges(p.edges.begin(), p.edges.end()),
      rules(p.rules),
      blocks(p.blocks.begin(), p.blocks.end()),
      boundary_s(p.boundary_s.begin(), p.boundary_s.end()),
      cross_stage_s(p.cross_stage_s.begin(), p.cross_stage_s.end()),
      link_s(p.rules.stream_link_s),
      both_s(p.rules.stream_both_s),
      chain(p.chain.begin(), p.chain.end()),
      last(p.chain.back()),
      entry(p.chain.back()),
      column_(p.column.begin(), p.column.end()),
      divisors_(p.divisors.size()),
      columns_(at(p.columns)),
      forward_s_(p.tables.forward_s.begin(), p.tables.forward_s.end()),
      backward_s_(p.tables.backward_s.begin(), p.tables.backward_s.end()),
      stash_bytes_(p.tables.stash_bytes.begin(), p.tables.stash_bytes.end()),
      live_bytes_(p.tables.live_bytes.begin(), p.tables.live_bytes.end()),
      parameters_(p.tables.parameters.begin(), p.tables.parameters.end()),
      weight_grad_s_(p.tables.weight_grad_s.begin(), p.tables.weight_grad_s.end()) {
  for (int k = 0; k < stage_count(); ++k) flights.push_back(flight(k));
  position_.assign(at(p.divisors.back()) + 1, -1);
  for (std::size_t i = 0; i < divisors_; ++i) position_[at(p.divisors[i])] = static_cast<int>(i);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const auto row = parameters_.begin() + static_cast<std::ptrdiff_t>(i * columns_);
    const bool any = std::any_of(row, row + static_cast<std::ptrdiff_t>(columns_),
                                 [](double count) { return count > 0.0; });
    weighted.push_back(any ? 1 : 0);
  }
  find_stream_links();
  add_sets_of_slots();
  find_entry();
  add_fans();
  find_forced();
  choices.resize(ops.size());
  for (int i = 0; i < op_count(); ++i) enumerate(i);
}

// All stages are charged the cost of the stage with the worst position.
void MapTerms::find_stream_links() {
  if (cross_stage_s.empty()) return;
  link_s = both_s = 0.0;
  for (int k = 0; k < stage_count(); ++k) {
    const double* own = &cross_stage_s[at(k) * at(stage_count() + 1) * 2];
    link_s = std::max(link_s, own[0]);
    both_s = std::max(both_s, own[1]);
  }
}

// Dies of every set of slots, and the costs of collectives over them.
void MapTerms::add_sets_of_slots() {
  const MeshLinks links{{rules.x_bytes_per_s, rules.y_bytes_per_s},
                        rules.hop_s,
                        static_cast<MeshFabric>(rules.fabric)};
  reduce_line_ = mesh_reduce_line(links);
  const std::size_t sets = std::size_t{1} << slots.size();
  sizes_.resize(sets);
  gather_lines_.resize(sets);
  exchange_lines_.resize(sets);
  for (std::size_t set = 0; set < sets; ++set) {
    std::vector<MeshRun> runs;  // adjacent slots of one axis form one run
    double product = 1.0;
    for (std::size_t k = 0; k < slots.size(); ++k) {
      if ((set >> k & 1) == 0) continue;
      const MeshRun& slot = slots[k];
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
}

// The operator of a block whose output is the input of the next block.
void MapTerms::find_entry() {
  for (const MapEdgeRecord& into : edges) {
    if (into.kind != static_cast<int>(EdgeKind::kEntry)) continue;
    for (const MapEdgeRecord& wrap : edges) {
      if (wrap.kind == static_cast<int>(EdgeKind::kWrap) && wrap.to == into.to) entry = wrap.from;
    }
  }
}

void MapTerms::add_fans() {
  for (const MapEdgeRecord& edge : edges) {
    auto same = std::find_if(fans.begin(), fans.end(), [&](const FanShape& f) {
      return f.from == edge.from && f.kind == edge.kind;
    });
    if (same == fans.end()) {
      fans.push_back({edge.from, edge.kind, edge.bytes, {}, {}});
      same = fans.end() - 1;
    }
    // If consumers share a conversion, the next operator of the chain comes first: the relaxation
    // charges it to that operator.
    const auto position = std::find(chain.begin(), chain.end(), edge.from);
    const bool next = position != chain.end() && position + 1 != chain.end() &&
                      *(position + 1) == edge.to &&
                      edge.kind == static_cast<int>(EdgeKind::kInside);
    same->to.insert(next ? same->to.begin() : same->to.end(), edge.to);
    same->again.insert(next ? same->again.begin() : same->again.end(), edge.again != 0);
  }
  fans_of.resize(ops.size());
  for (std::size_t f = 0; f < fans.size(); ++f) {
    std::vector<std::int32_t> touched = fans[f].to;
    touched.push_back(fans[f].from);
    // The tensor that enters a block has the layout in which the previous block leaves it.
    if (fans[f].kind == static_cast<int>(EdgeKind::kEntry)) touched.push_back(entry);
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (const std::int32_t op : touched) fans_of[at(op)].push_back(static_cast<int>(f));
  }
}

// Finds the operators that store nothing: they are recomputed with the next operator that stores.
void MapTerms::find_forced() {
  forced.resize(ops.size());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    std::vector<std::int32_t>& operators = forced[i];
    std::vector<std::int32_t> open{static_cast<std::int32_t>(i)};
    if (ops[i].output_stored == 0) open.clear();  // masks and statistics need no other operator
    while (!open.empty()) {
      const std::int32_t position = open.back();
      open.pop_back();
      for (const MapEdgeRecord& edge : edges) {
        if (edge.kind != 0 || edge.to != position || ops[at(edge.from)].part != 1) continue;
        if (ops[at(edge.from)].output_stored != 0 ||
            std::find(operators.begin(), operators.end(), edge.from) != operators.end())
          continue;
        operators.push_back(edge.from);
        open.push_back(edge.from);
      }
    }
    std::sort(operators.begin(), operators.end());
  }
}

bool MapTerms::legal(int op, const OpMapping& op_mapping) const noexcept {
  const MapOpRecord& record = ops[at(op)];
  const unsigned all = (1U << slots.size()) - 1U;
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
  if ((rules.modes >> op_mapping.mode & 1) == 0) return false;
  int changes[2] = {0, 0};
  for (std::size_t k = 1; k < slots.size(); ++k) {
    if (slots[k].axis != slots[k - 1].axis) continue;
    for (const std::uint16_t mask : op_mapping.slots) {
      if ((mask >> (k - 1) & 1) != 0 && (mask >> k & 1) == 0) ++changes[slots[k].axis];
    }
  }
  if (changes[0] >= kRunsPerAxis || changes[1] >= kRunsPerAxis) return false;
  return rules.linear == 0 || in_rank_order(op_mapping);
}

bool MapTerms::in_rank_order(const OpMapping& op_mapping) const noexcept {
  constexpr int kRank[kRoleCount] = {2, 1, 0, 0, 1};
  int rank = 0;
  for (std::size_t k = 0; k < slots.size(); ++k) {
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      if ((op_mapping.slots[r] >> k & 1) == 0) continue;
      if (kRank[r] < rank) return false;
      rank = kRank[r];
    }
  }
  return true;
}

// Every assignment of roles to the slots of an axis with at most kRunsPerAxis runs of equal roles.
std::vector<std::array<std::uint16_t, kRoleCount>> MapTerms::patterns(int axis) const {
  using Pattern = std::array<std::uint16_t, kRoleCount>;
  std::vector<std::pair<Pattern, std::pair<int, int>>> open{{Pattern{}, {-1, 0}}};
  for (std::size_t k = 0; k < slots.size(); ++k) {
    if (slots[k].axis != axis) continue;
    std::vector<std::pair<Pattern, std::pair<int, int>>> longer;
    for (const auto& [pattern, before] : open) {
      for (int role = 0; role < kRoleCount; ++role) {
        const int runs = before.second + (role != before.first ? 1 : 0);
        if (runs > kRunsPerAxis) continue;
        Pattern next = pattern;
        next[at(role)] = static_cast<std::uint16_t>(next[at(role)] | 1U << k);
        longer.push_back({next, {role, runs}});
      }
    }
    open = std::move(longer);
  }
  std::vector<Pattern> patterns;
  for (const auto& entry_of : open) patterns.push_back(entry_of.first);
  return patterns;
}

void MapTerms::enumerate(int op) {
  const auto along_x = patterns(0), along_y = patterns(1);
  for (const auto& x : along_x) {
    for (const auto& y : along_y) {
      OpMapping op_mapping{{}, static_cast<std::uint8_t>(std::countr_zero(at(rules.modes))), 0};
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        op_mapping.slots[r] = static_cast<std::uint16_t>(x[r] | y[r]);
      }
      if (legal(op, op_mapping)) choices[at(op)].push_back(op_mapping);
    }
  }
}

// ---- states of a tensor along the slots ----

TensorState MapTerms::state(int op, const OpMapping& g, std::uint16_t features,
                            std::uint16_t partial, std::uint16_t whole) const noexcept {
  const std::uint16_t batch = g.slots[kRole(Role::kBatch)], rows = g.slots[kRole(Role::kRows)];
  if (ops[at(op)].expert != 0) return {batch, 0, rows, features, partial, whole};
  return {batch, rows, 0, features, partial, whole};
}

TensorState MapTerms::produced(int op, const OpMapping& g) const noexcept {
  return state(op, g, g.slots[kRole(Role::kColumns)], g.slots[kRole(Role::kInner)],
               g.slots[kRole(Role::kCopy)]);
}

TensorState MapTerms::required(int op, const OpMapping& g) const noexcept {
  const std::uint16_t inner = g.slots[kRole(Role::kInner)];
  const std::uint16_t columns = g.slots[kRole(Role::kColumns)];
  const std::uint16_t copy = g.slots[kRole(Role::kCopy)];
  if (ops[at(op)].product != 0) {
    return state(op, g, inner, 0, static_cast<std::uint16_t>(columns | copy));
  }
  return state(op, g, columns, 0, static_cast<std::uint16_t>(inner | copy));
}

TensorState MapTerms::gradient_produced(int op, const OpMapping& g) const noexcept {
  const std::uint16_t inner = g.slots[kRole(Role::kInner)];
  const std::uint16_t columns = g.slots[kRole(Role::kColumns)];
  const std::uint16_t copy = g.slots[kRole(Role::kCopy)];
  if (ops[at(op)].product != 0) return state(op, g, inner, columns, copy);
  return state(op, g, columns, 0, static_cast<std::uint16_t>(inner | copy));
}

TensorState MapTerms::gradient_required(int op, const OpMapping& g) const noexcept {
  return state(
      op, g, g.slots[kRole(Role::kColumns)], 0,
      static_cast<std::uint16_t>(g.slots[kRole(Role::kInner)] | g.slots[kRole(Role::kCopy)]));
}

TensorState MapTerms::at_boundary(const MapState& state) const noexcept {
  return gradient_required(last, state.op_mappings[at(last)]);
}

// ---- collectives over sets of slots ----

double MapTerms::gather_s(std::uint16_t set, double bytes, std::uint8_t algorithm) const noexcept {
  if (set == 0) return 0.0;
  if (rules.volume != 0) return bytes * (size(set) - 1.0) / size(set);
  return mesh_gather(gather_lines_[set], bytes, static_cast<MeshAlgorithm>(algorithm)).time_s;
}

double MapTerms::reduce_s(std::uint16_t set, double bytes, std::uint8_t algorithm) const noexcept {
  if (set == 0 || rules.volume != 0 || reduce_line_.s_per_byte < 0.0) {
    return 2.0 * gather_s(set, bytes, algorithm);
  }
  return reduce_line_.s_per_byte * bytes + reduce_line_.fixed_s;
}

double MapTerms::exchange_s(std::uint16_t set, double bytes) const noexcept {
  if (set == 0) return 0.0;
  if (rules.volume != 0) return bytes * (size(set) - 1.0) / size(set);
  return exchange_lines_[set].s_per_byte * bytes + exchange_lines_[set].fixed_s;
}

// Conversions that shrink the tensor come first, those that enlarge it last. `again_s` receives the
// part that is repeated in the backward pass if the tensor is stored in its original layout.
double MapTerms::convert_s(int op, const TensorState& from, const TensorState& to, double bytes,
                           std::uint8_t algorithm, double* again_s) const noexcept {
  const auto mask = [](int bits) { return static_cast<std::uint16_t>(bits); };
  const std::uint16_t splits = to.split(), present = from.split();
  const std::uint16_t scatter = mask(from.partial & splits);
  const std::uint16_t reduce = mask(from.partial & to.whole);
  const std::uint16_t stays = mask((from.batch & to.batch) | (from.rows & to.rows) |
                                   (from.experts & to.experts) | (from.features & to.features));
  const std::uint16_t exchange = mask(present & splits & ~stays);
  const std::uint16_t gather = mask(present & to.whole);
  if ((scatter | reduce | exchange | gather) == 0) return 0.0;
  // A whole tensor is split before it is sent, unless a dimension is too small for that; it is not
  // split by experts.
  const std::int64_t* limit = ops[at(op)].limit;
  const auto cut = [&](std::uint16_t before, std::uint16_t after, std::size_t dimension) {
    const bool fits = size(mask(before | after)) <= static_cast<double>(limit[dimension]);
    return fits ? from.whole & after : 0;
  };
  const std::uint16_t sliced = mask(cut(from.batch, to.batch, 0) | cut(from.rows, to.rows, 1) |
                                    cut(from.features, to.features, 2));
  double here = bytes / size(present) / size(sliced);
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

// Pieces of a conversion overlap pieces of the work that produces or consumes them, except for the
// first or the last piece. The conversion is not split if that is no shorter.
MapTerms::Overlap MapTerms::overlap(double whole_s, double piece_s, double work_s) const noexcept {
  const double pieces = rules.pieces, after_first = pieces - 1.0;
  const double waits = piece_s + after_first * std::max(0.0, piece_s - work_s / pieces);
  if (!(waits < whole_s)) return {whole_s, 0.0};
  return {waits, after_first * std::min(piece_s, work_s / pieces)};
}

double MapTerms::work_s(int op, const OpMapping& g, bool forward) const noexcept {
  const std::size_t cell = cell_of(op, g);
  return forward ? forward_s_[cell] : backward_s_[cell];
}

// Whether a tensor may arrive in pieces that overlap the work of its consumer.
bool MapTerms::input_overlaps(int from, int to) const noexcept {
  return rules.pieces > 1 && ops[at(from)].overlap != 2 && ops[at(to)].overlap == 1;
}

double MapTerms::conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                              double bytes) const noexcept {
  const bool output_overlaps = rules.pieces > 1 && ops[at(from_op)].overlap == 2;
  const bool overlaps = output_overlaps || input_overlaps(from_op, to_op);
  const auto waits = [&](const TensorState& before, const TensorState& after, bool forward) {
    const auto of = [&](double size) {
      return convert_s(from_op, before, after, size, from.algorithm, nullptr);
    };
    const double whole = of(bytes);
    if (!overlaps || !(whole > 0.0)) return whole;
    const double work =
        output_overlaps ? work_s(from_op, from, forward) : work_s(to_op, to, forward);
    return overlap(whole, of(bytes / rules.pieces), work).waits_s;
  };
  return waits(produced(from_op, from), required(to_op, to), true) +
         waits(gradient_produced(to_op, to), gradient_required(from_op, from), false);
}

// ---- terms ----

// Position of the terms of an operator in the tables.
std::size_t MapTerms::cell_of(int op, const OpMapping& op_mapping) const noexcept {
  std::size_t position = 0;
  for (std::size_t r = 0; r < 4; ++r) {
    const auto factor = static_cast<std::size_t>(size(op_mapping.slots[r]));
    position = position * divisors_ + at(position_[factor]);
  }
  return at(op) * columns_ + at(column_[position]);
}

MapNode MapTerms::node(int op, const OpMapping& g) const noexcept {
  const MapOpRecord& record = ops[at(op)];
  const std::size_t cell = cell_of(op, g);
  const std::uint16_t batch = g.slots[0], rows = g.slots[1];
  const std::uint16_t columns = g.slots[2];
  MapNode n{};
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
    n.hidden_b_s += once;  // the repeated gather overlaps the work
  }
  const double parameters = parameters_[cell];
  if (parameters > 0.0) add_weights(op, g, parameters, &n);
  return n;
}

// Adds weights, gradients and optimiser state to an operator's terms, by its weight mode.
void MapTerms::add_weights(int op, const OpMapping& g, double parameters,
                           MapNode* node) const noexcept {
  const MapOpRecord& record = ops[at(op)];
  const std::uint16_t batch = g.slots[0], rows = g.slots[1], copy = g.slots[4];
  const auto summed = static_cast<std::uint16_t>(record.expert != 0 ? batch : batch | rows);
  const auto copies = static_cast<std::uint16_t>(summed | copy);
  const double weights = parameters * rules.weight_bytes;
  const double gradients = parameters * rules.gradient_bytes;
  const double state = parameters * rules.state_bytes;
  const double among = size(copies);
  const double scatter = gather_s(summed, gradients, g.algorithm);
  const double gather = gather_s(copies, weights, g.algorithm);
  const auto mode = static_cast<WeightMode>(g.mode);
  double updated = parameters / among;
  switch (mode) {
    case WeightMode::kReplicated:
      node->sync_s = reduce_s(summed, gradients, g.algorithm);
      node->state_bytes = weights + gradients + state;
      updated = parameters;
      break;
    case WeightMode::kZero1:
      node->sync_s = scatter + gather;
      node->state_bytes = weights + gradients + state / among;
      break;
    case WeightMode::kZero2:
      node->hidden_b_s += scatter;
      node->sync_s = gather;
      node->state_bytes = weights + (gradients + state) / among;
      node->gathered_bytes = gradients;
      break;
    case WeightMode::kOffload:
      node->hidden_b_s += scatter;
      node->sync_s = gather;
      node->state_bytes = weights;
      node->gathered_bytes = gradients;
      break;
    case WeightMode::kZero3:
    case WeightMode::kStream:
      node->hidden_f_s += gather;
      node->hidden_b_s += gather + scatter;
      node->gathered_bytes = weights + gradients;
      node->state_bytes = (weights + gradients + state) / among;
      break;
  }
  node->step_s = updated * rules.step_bytes / rules.memory_bytes_per_s;
  if (mode == WeightMode::kStream) {
    node->stream_bytes = node->state_bytes;
    node->state_bytes = 0.0;
    node->stream_s = rules.streamed(2.0 * weights, gradients) / among / rules.stream_bytes_per_s;
    node->step_s = 0.0;  // runs off the wafer, during the next step
    node->hidden_f_s += streamed_link_s(weights / among, 0.0);
    node->hidden_b_s += streamed_link_s(weights / among, gradients / among);
  } else if (mode == WeightMode::kOffload) {
    node->stream_bytes = (gradients + state) / among;
    node->stream_s = gradients / among / rules.stream_bytes_per_s;
    node->hidden_b_s += streamed_link_s(0.0, gradients / among);
    node->step_s = std::max(weights / among / rules.stream_bytes_per_s,  // updated weights return
                            rules.streamed_link_s(weights / among, 0.0));
  }
}

// The conversion of the first block's input to the layout in which a block leaves its output.
MapFan MapTerms::entry_fan(const FanShape& shape, const MapState& state) const noexcept {
  const OpMapping& from = state.op_mappings[at(shape.from)];
  const TensorState between = gradient_required(entry, state.op_mappings[at(entry)]);
  MapFan terms{};
  terms.forward_s = convert_s(shape.from, produced(shape.from, from), between, shape.bytes,
                              from.algorithm, nullptr);
  terms.backward_s = convert_s(shape.from, between, gradient_required(shape.from, from),
                               shape.bytes, from.algorithm, nullptr);
  return terms;
}

MapFan MapTerms::fan(const FanShape& shape, const MapState& state) const noexcept {
  if (shape.kind == static_cast<int>(EdgeKind::kEntry)) return entry_fan(shape, state);
  const OpMapping& from = state.op_mappings[at(shape.from)];
  MapFan terms{};
  const auto same = [](const TensorState& a, const TensorState& b) {
    return a.same_splits(b) && a.partial == b.partial;
  };
  // Seconds that delay the work; pieces that overlap the producer's work are summed first.
  const bool overlaps = rules.pieces > 1 && ops[at(shape.from)].overlap == 2;
  double piece_f_s = 0.0, piece_b_s = 0.0;
  const auto add = [&](const TensorState& before, const TensorState& after, std::int32_t to,
                       bool forward, double* again_s) {
    const double whole = convert_s(shape.from, before, after, shape.bytes, from.algorithm, again_s);
    double& waits = forward ? terms.forward_s : terms.backward_s;
    if (!(whole > 0.0) || !(overlaps || input_overlaps(shape.from, to))) {
      waits += whole;
      return;
    }
    const double piece =
        convert_s(shape.from, before, after, shape.bytes / rules.pieces, from.algorithm, nullptr);
    if (overlaps) {
      waits += whole;
      (forward ? piece_f_s : piece_b_s) += piece;
      return;
    }
    const MapNode& work = state.nodes[at(to)];
    const Overlap part = overlap(whole, piece, forward ? work.forward_s : work.backward_s);
    waits += part.waits_s;
    (forward ? terms.overlapped_f_s : terms.overlapped_b_s) += part.overlapped_s;
  };
  for (std::size_t i = 0; i < shape.to.size(); ++i) {
    const std::int32_t to = shape.to[i];
    const OpMapping& op_mapping = state.op_mappings[at(to)];
    const TensorState in = required(to, op_mapping), back = gradient_produced(to, op_mapping);
    bool again_in = false, again_back = false;  // an earlier consumer has the same conversion
    for (std::size_t j = 0; j < i; ++j) {
      const OpMapping& other = state.op_mappings[at(shape.to[j])];
      again_in = again_in || same(required(shape.to[j], other), in);
      again_back = again_back || same(gradient_produced(shape.to[j], other), back);
    }
    if (!again_in) {
      bool again = false;  // whether a consumer repeats it in the backward pass
      for (std::size_t j = i; j < shape.to.size(); ++j) {
        again = again || (shape.again[j] &&
                          same(required(shape.to[j], state.op_mappings[at(shape.to[j])]), in));
      }
      add(produced(shape.from, from), in, to, true, again ? &terms.again_s : nullptr);
    }
    if (!again_back) add(back, gradient_required(shape.from, from), to, false, nullptr);
  }
  if (!overlaps) return terms;
  const MapNode& work = state.nodes[at(shape.from)];
  const Overlap there = overlap(terms.forward_s, piece_f_s, work.forward_s);
  const Overlap back = overlap(terms.backward_s, piece_b_s, work.backward_s);
  return {there.waits_s, back.waits_s, terms.again_s, there.overlapped_s, back.overlapped_s};
}

double MapTerms::reentry_s(const MapEdgeRecord& edge, const MapState& state) const noexcept {
  if (edge.again != 0 || ops[at(edge.from)].output_stored == 0) return 0.0;
  const TensorState in = required(edge.to, state.op_mappings[at(edge.to)]);
  for (const MapEdgeRecord& other : edges) {
    if (other.from != edge.from || other.kind != edge.kind || other.again == 0) continue;
    if (required(other.to, state.op_mappings[at(other.to)]).same_splits(in)) return 0.0;
  }
  const OpMapping& from = state.op_mappings[at(edge.from)];
  double again = 0.0;
  convert_s(edge.from, produced(edge.from, from), in, edge.bytes, from.algorithm, &again);
  return again;
}

}  // namespace phaze
