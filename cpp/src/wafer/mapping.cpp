#include "phaze/mapping.hpp"

#include <algorithm>

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };
constexpr auto kRole = [](Role role) { return static_cast<std::size_t>(role); };

}  // namespace

// ---- states of a tensor along the slots ----

Mapping::State Mapping::state(int op, const OpMapping& g, std::uint16_t features,
                              std::uint16_t partial, std::uint16_t whole) const noexcept {
  const std::uint16_t batch = g.slots[kRole(Role::kBatch)], rows = g.slots[kRole(Role::kRows)];
  if (ops_[kAt(op)].expert != 0) return {batch, 0, rows, features, partial, whole};
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
  if (ops_[kAt(op)].product != 0) {
    return state(op, g, inner, 0, static_cast<std::uint16_t>(columns | copy));
  }
  return state(op, g, columns, 0, static_cast<std::uint16_t>(inner | copy));
}

Mapping::State Mapping::gradient_made(int op, const OpMapping& g) const noexcept {
  const std::uint16_t inner = g.slots[kRole(Role::kInner)];
  const std::uint16_t columns = g.slots[kRole(Role::kColumns)];
  const std::uint16_t copy = g.slots[kRole(Role::kCopy)];
  if (ops_[kAt(op)].product != 0) return state(op, g, inner, columns, copy);
  return state(op, g, columns, 0, static_cast<std::uint16_t>(inner | copy));
}

Mapping::State Mapping::gradient_wanted(int op, const OpMapping& g) const noexcept {
  return state(
      op, g, g.slots[kRole(Role::kColumns)], 0,
      static_cast<std::uint16_t>(g.slots[kRole(Role::kInner)] | g.slots[kRole(Role::kCopy)]));
}

Mapping::State Mapping::at_boundary() const noexcept {
  return gradient_wanted(last_, op_mappings_[kAt(last_)]);
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
  const std::int64_t* limit = ops_[kAt(op)].limit;
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
  const std::size_t cell = kAt(op) * columns_ + kAt(column_of(g));
  return forward ? forward_s_[cell] : backward_s_[cell];
}

// Whether a tensor may come in pieces beside the work of who takes it.
bool Mapping::takes_beside(int from, int to) const noexcept {
  return rules_.pieces > 1 && ops_[kAt(from)].beside != 2 && ops_[kAt(to)].beside == 1;
}

double Mapping::conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                             double bytes) const noexcept {
  const bool made_beside = rules_.pieces > 1 && ops_[kAt(from_op)].beside == 2;
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
  std::size_t at = 0;
  for (std::size_t r = 0; r < 4; ++r) {
    const auto factor = static_cast<std::size_t>(size(op_mapping.slots[r]));
    at = at * divisors_ + kAt(position_[factor]);
  }
  return column_[at];
}

Mapping::Node Mapping::node(int op, const OpMapping& g) const noexcept {
  const MapOpRecord& record = ops_[kAt(op)];
  const std::size_t cell = kAt(op) * columns_ + kAt(column_of(g));
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
  const OpMapping& from = op_mappings_[kAt(shape.from)];
  Fan found{};
  if (shape.kind == static_cast<int>(EdgeKind::kEntry)) {
    const State between = gradient_wanted(entry_, op_mappings_[kAt(entry_)]);
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
  const bool beside = rules_.pieces > 1 && ops_[kAt(shape.from)].beside == 2;
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
    const Node& work = nodes_[kAt(to)];
    const Overlap part = overlap(whole, piece, forward ? work.forward_s : work.backward_s);
    waits += part.waits_s;
    (forward ? found.beside_f_s : found.beside_b_s) += part.beside_s;
  };
  for (std::size_t i = 0; i < shape.to.size(); ++i) {
    const std::int32_t to = shape.to[i];
    const OpMapping& op_mapping = op_mappings_[kAt(to)];
    const State in = wanted(to, op_mapping), back = gradient_made(to, op_mapping);
    bool again_in = false, again_back = false;  // an earlier consumer pays for it
    for (std::size_t j = 0; j < i; ++j) {
      const OpMapping& other = op_mappings_[kAt(shape.to[j])];
      again_in = again_in || same(wanted(shape.to[j], other), in);
      again_back = again_back || same(gradient_made(shape.to[j], other), back);
    }
    if (!again_in) {
      bool again = false;  // some consumer that shares this conversion needs it once more
      for (std::size_t j = i; j < shape.to.size(); ++j) {
        again = again ||
                (shape.again[j] && same(wanted(shape.to[j], op_mappings_[kAt(shape.to[j])]), in));
      }
      add(made(shape.from, from), in, to, true, again ? &found.again_s : nullptr);
    }
    if (!again_back) add(back, gradient_wanted(shape.from, from), to, false, nullptr);
  }
  if (!beside) return found;
  const Node& work = nodes_[kAt(shape.from)];
  const Overlap there = overlap(found.forward_s, piece_f_s, work.forward_s);
  const Overlap back = overlap(found.backward_s, piece_b_s, work.backward_s);
  return {there.waits_s, back.waits_s, found.again_s, there.beside_s, back.beside_s};
}

void Mapping::assign(std::span<const OpMapping> op_mappings) {
  nodes_.resize(ops_.size());
  fan_terms_.resize(fans_.size());
  // Last: assigned() stays false if memory runs out.
  op_mappings_.assign(op_mappings.begin(), op_mappings.end());
  for (int i = 0; i < ops(); ++i) nodes_[kAt(i)] = node(i, op_mappings_[kAt(i)]);
  for (std::size_t f = 0; f < fans_.size(); ++f) fan_terms_[f] = fan(fans_[f]);
}

void Mapping::propose(int op, const OpMapping& op_mapping) {
  proposed_.touched.push_back(op);  // what may throw comes first
  proposed_.op_mappings.emplace_back(op, op_mappings_[kAt(op)]);
  op_mappings_[kAt(op)] = op_mapping;
}

bool Mapping::settle() {
  Proposed& p = proposed_;
  bool differs = false;
  const std::size_t first = p.op_mappings.size() - p.touched.size();
  for (std::size_t i = 0; i < p.touched.size(); ++i) {
    const std::int32_t op = p.touched[i];
    const OpMapping& now = op_mappings_[kAt(op)];
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
    p.nodes.emplace_back(op, nodes_[kAt(op)]);
    nodes_[kAt(op)] = node(op, op_mappings_[kAt(op)]);
  }
  for (const std::int32_t op : p.touched) {
    for (const std::int32_t f : fans_of_[kAt(op)]) {
      if (p.seen[kAt(f)] != 0) continue;
      p.seen[kAt(f)] = 1;
      p.fans.emplace_back(f, fan_terms_[kAt(f)]);
      fan_terms_[kAt(f)] = fan(fans_[kAt(f)]);
    }
  }
  p.touched.clear();
  return true;
}

void Mapping::withdraw() noexcept {
  Proposed& p = proposed_;
  for (auto it = p.op_mappings.rbegin(); it != p.op_mappings.rend(); ++it) {
    op_mappings_[kAt(it->first)] = it->second;
  }
  for (auto it = p.nodes.rbegin(); it != p.nodes.rend(); ++it) nodes_[kAt(it->first)] = it->second;
  for (auto it = p.fans.rbegin(); it != p.fans.rend(); ++it) {
    fan_terms_[kAt(it->first)] = it->second;
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
  op_mappings_[kAt(op)] = op_mapping;
  nodes_[kAt(op)] = node(op, op_mapping);
  for (const std::int32_t f : fans_of_[kAt(op)]) fan_terms_[kAt(f)] = fan(fans_[kAt(f)]);
}

}  // namespace phaze
