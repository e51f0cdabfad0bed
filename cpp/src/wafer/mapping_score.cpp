// What a step takes by a mapping: sums of its terms, stage by stage, and the exact choice of
// outputs.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "base/numbers.hpp"
#include "phaze/mapping.hpp"
#include "plan/memory_rule.hpp"
#include "wafer/output_choice.hpp"

namespace phaze {

// An output that may be computed again or moved off the wafer instead of being kept.
struct Mapping::Item {
  int op;
  bool recompute, offload;
  double saved_bytes;
  double work_s, blocking_s, hidden_s;  // that running it again adds to the backward pass
  double stream_s;                      // that moving it out and back adds
  double link_s;                        // that each of both adds to what is beside the work
};

// Sums over one part of the model: a block, or an end.
struct Mapping::Block {
  double forward_s = 0.0, backward_s = 0.0, weight_grad_s = 0.0;
  double blocking_f_s = 0.0, blocking_b_s = 0.0;
  double hidden_f_s = 0.0, hidden_b_s = 0.0;
  double stream_s = 0.0;
  double sync_s = 0.0, step_s = 0.0;
  double state_bytes = 0.0, stream_bytes = 0.0, stash_bytes = 0.0;
  double live_bytes = 0.0, gathered_bytes = 0.0;
  int count = 0;
  std::array<Item, kMaxMapOps> items;  // `count` of them

  void add(const Node& n) noexcept {
    forward_s += n.forward_s;
    backward_s += n.backward_s;
    weight_grad_s += n.weight_grad_s;
    blocking_f_s += n.blocking_f_s;
    blocking_b_s += n.blocking_b_s;
    hidden_f_s += n.hidden_f_s;
    hidden_b_s += n.hidden_b_s;
    stream_s += n.stream_s;
    sync_s += n.sync_s;
    step_s += n.step_s;
    state_bytes += n.state_bytes;
    stream_bytes += n.stream_bytes;
    stash_bytes += n.stash_bytes;
    live_bytes = std::max(live_bytes, n.live_bytes);
    gathered_bytes = std::max(gathered_bytes, n.gathered_bytes);
  }
  void add(const Fan& f) noexcept {
    blocking_f_s += f.forward_s;
    blocking_b_s += f.backward_s;
    hidden_f_s += f.beside_f_s;
    hidden_b_s += f.again_s + f.beside_b_s;
  }
  // The forward pass, with so much more beside its work.
  double forward_pass_s(double more_s) const noexcept {
    return blocking_f_s + std::max(forward_s, hidden_f_s + more_s);
  }
  double plain_s() const noexcept {
    const double passes = blocking_f_s + std::max(forward_s, hidden_f_s) + blocking_b_s +
                          std::max(backward_s, hidden_b_s);
    return std::max(passes, stream_s);
  }
};

// Seconds of a step by its schedule, as its stages are added.
struct Mapping::Pipeline {
  const MapRulesRecord* rules;
  double sum_s, slowest_s;
  // While it fills: of all stages, of the slowest, and the most of any.
  double idle_s, slowest_idle_s, most_idle_s;

  // Begins with the stages of other classes, where there are any.
  explicit Pipeline(const MapRulesRecord& given) noexcept
      : rules(&given),
        sum_s(given.other_sum_s),
        slowest_s(given.other_slowest_s),
        idle_s(given.other_sum_s),
        slowest_idle_s(given.other_slowest_s),
        most_idle_s(given.other_slowest_s) {}

  void add(double load_s, double weight_grad_s) noexcept;
  double time_s() const noexcept;
  // What stages take that each take no less than these: the slowest may then be another one.
  double least_s() const noexcept;

  // The most that a stage of `load_s` here may take in a step of so long: every micro-batch passes
  // it, or the slowest one so far, and the other stages once, or a part of them.
  double most_s(double limit_s, double load_s) const noexcept {
    const auto batches = static_cast<double>(rules->micro_batches);
    const double part = rules->zero_bubble != 0 ? 0.0 : 1.0 / rules->chunks;
    const double left_s = limit_s - part * (sum_s - load_s);
    if (rules->zero_bubble != 0 || rules->chunks != 1) return left_s / batches;
    return std::min(left_s / batches, left_s - (batches - 1.0) * slowest_s);
  }
  // A stage that was thought to take `least_s` takes so long.
  void now(double load_s, double least_s) noexcept {
    sum_s += load_s - least_s;
    slowest_s = std::max(slowest_s, load_s);
  }
};

// One stage but for the choice of its outputs.
struct Mapping::Frame {
  double flight;       // micro-batches that it holds
  double state_bytes;  // weights, gradients, optimiser state
  double stash_bytes;  // that its ends keep
  double fixed_bytes;  // all but what its blocks keep
  double stream_bytes;
  double sync_s, step_s;
  double others_s;      // besides its blocks
  double needed_bytes;  // that every block has to save; 0 where all it keeps has room
  double stream_room;   // off the wafer, for what a block saves
  double least_s;       // of all of it with outputs saved in parts, where there is a limit
};

// A limit is this much wider: what ties with it is exact.
inline constexpr double kLimitRounding = 1e-9;

// A 1F1B step that surely takes something in `range`, which then becomes what it takes, or more
// than `limit_s`, which makes it endless; false where that is not known. Outputs are chosen for
// stages that may be the slowest, the fullest first: those with less to save, and no less room off
// the wafer, take no longer than with the same choice, and no less than with outputs saved in
// parts.
template <typename Chooser>
bool Mapping::narrow(Chooser& chooser, std::span<const Frame> frames, Pipeline least,
                     double plain_s, double tail_s, double limit_s, MapRange& range) const {
  std::array<double, kMaxMapStages> most;  // `frames.size()` of them
  std::array<bool, kMaxMapStages> exact;
  for (std::size_t k = 0; k < frames.size(); ++k) {
    const Frame& f = frames[k];
    exact[k] = !(f.needed_bytes > 0.0);
    most[k] = exact[k] ? f.others_s + blocks_[k] * plain_s : kInfinite;
  }
  for (bool first = true;; first = false) {
    std::size_t at = 0;  // the slowest, and of those not bounded yet the fullest
    for (std::size_t k = 1; k < frames.size(); ++k) {
      const bool fuller = frames[k].needed_bytes > frames[at].needed_bytes;
      if (most[k] > most[at] || (most[k] == most[at] && fuller)) at = k;
    }
    const Frame& full = frames[at];
    if (exact[at]) return false;
    exact[at] = true;
    const double worst_s =
        (least.most_s(limit_s - tail_s, full.least_s) - full.others_s) / blocks_[at];
    const double block_s = chooser.solve(full.needed_bytes, full.stream_room, worst_s, range.again);
    if (!(block_s < kInfinite)) {
      range.most_s = kInfinite;
      return chooser.surely(full.needed_bytes, full.stream_room);
    }
    if (first) range.again = chooser.again();
    least.now(full.others_s + blocks_[at] * block_s, full.least_s);
    Pipeline slowest(rules_);
    for (std::size_t k = 0; k < frames.size(); ++k) {
      const Frame& f = frames[k];
      const bool less = f.needed_bytes <= full.needed_bytes && f.stream_room >= full.stream_room;
      if (less) most[k] = std::min(most[k], f.others_s + blocks_[k] * block_s);
      slowest.add(most[k], 0.0);
    }
    const double least_s = (least.time_s() + tail_s) * (1.0 - kLimitRounding);
    const double most_s = (slowest.time_s() + tail_s) * (1.0 + kLimitRounding);
    if (least_s >= range.least_s && most_s <= range.most_s) {
      range.least_s = least_s;
      range.most_s = most_s;
      return true;
    }
  }
}

// Weights and gradients of what stands before the blocks, of one block, and of what stands behind.
std::array<Mapping::Moved, 3> Mapping::moved_weights() const noexcept {
  std::array<Moved, 3> found{};
  const double all = rules_.weight_bytes + rules_.gradient_bytes + rules_.state_bytes;
  for (int i = 0; i < ops(); ++i) {
    const auto mode = static_cast<WeightMode>(op_mappings_[at(i)].mode);
    const double kept = nodes_[at(i)].stream_bytes;  // off the wafer, of a die's parameters
    Moved& part = found[at(ops_[at(i)].part)];
    if (mode == WeightMode::kStream) {
      part.taken_bytes += 2.0 * rules_.weight_bytes * (kept / all);
      part.given_bytes += rules_.gradient_bytes * (kept / all);
    } else if (mode == WeightMode::kOffload) {
      part.given_bytes += rules_.gradient_bytes * (kept / (all - rules_.weight_bytes));
    }
  }
  return found;
}

// What a stage's dies take and give for one micro-batch; activations that are moved off the wafer
// (`offloaded`, of each block) come and go.
MapOther Mapping::streams_of(const std::array<Moved, 3>& parts, int k, double alone_s,
                             double offloaded) const noexcept {
  const double blocks = blocks_[at(k)];
  MapOther found{alone_s, blocks * (parts[1].taken_bytes + offloaded),
                 blocks * (parts[1].given_bytes + offloaded)};
  for (const std::size_t end : {std::size_t{0}, std::size_t{2}}) {
    if (!(end == 0 ? is_first(k) : is_last(k))) continue;
    found.taken_bytes += parts[end].taken_bytes;
    found.given_bytes += parts[end].given_bytes;
  }
  return found;
}

// Collectives of a stage share its links with what other stages stream past them. Each stage
// streams once while the slowest one works: that one meets all of it, a faster one what passes in
// its time. The links to the rim carry no less than if every stage streamed as little as the one
// that streams least.
Mapping::Charged Mapping::charge_foreign(std::span<const MapOther> own,
                                         std::span<double> loads_s) const noexcept {
  const std::size_t count = at(pipeline_stages()), first = at(rules_.first_stage);
  Charged found{rules_.other_sum_s, rules_.other_slowest_s, 0.0};
  std::array<MapOther, kMaxMapStages> all;  // `count` of them
  if (others_.size() + own.size() != count && own.size() != count) return found;
  for (std::size_t k = 0; k < count; ++k) {
    const bool mine = k >= first && k < first + own.size();
    all[k] = mine ? own[k - first] : others_[k < first ? k : k - own.size()];
  }
  double least_in = all[0].taken_bytes, least_out = all[0].given_bytes, most = 0.0, pace_s = 0.0;
  for (std::size_t j = 0; j < count; ++j) {
    least_in = std::min(least_in, all[j].taken_bytes);
    least_out = std::min(least_out, all[j].given_bytes);
    most = std::max({most, all[j].taken_bytes, all[j].given_bytes});
    pace_s = std::max(pace_s, all[j].alone_s);
  }
  if (!(most > 0.0) || !(pace_s > 0.0)) return found;
  found = {0.0, 0.0, rules_.streamed_link_s(least_in, least_out)};
  for (std::size_t k = 0; k < count; ++k) {
    double past_s = 0.0;
    for (std::size_t j = 0; j < count; ++j) {
      const double less = std::min(all[j].taken_bytes, all[j].given_bytes);
      const double rest = std::max(all[j].taken_bytes, all[j].given_bytes) - less;
      if (j == k || !(rest + less > 0.0)) continue;
      const double* cost = &foreign_s_[(k * count + j) * 2];
      past_s += rest * cost[0] + less * cost[1];
    }
    const double load_s = all[k].alone_s + all[k].alone_s / pace_s * past_s;
    if (k >= first && k < first + own.size()) {
      loads_s[k - first] = load_s;
    } else {
      found.sum_s += load_s;
      found.slowest_s = std::max(found.slowest_s, load_s);
    }
  }
  return found;
}

namespace {

using Outputs = std::array<std::uint8_t, kMaxMapOps>;

MapScore too_long() noexcept {
  MapScore score{};
  score.time_s = kInfinite;
  return score;
}

// Seconds of the mesh, each way, for outputs that are moved off the wafer.
template <class Block>
double moved_link_s(const Block& block, const Outputs& outputs) noexcept {
  double found = 0.0;
  for (int i = 0; i < block.count; ++i) {
    const auto& item = block.items[at(i)];
    if (outputs[at(item.op)] == 2) found += item.link_s;
  }
  return found;
}

}  // namespace

double MapRulesRecord::in_flight(int stages, int stage) const noexcept {
  const PipelineSchedule schedule = zero_bubble != 0 ? PipelineSchedule::kZeroBubbleH1
                                    : chunks > 1     ? PipelineSchedule::kInterleaved
                                                     : PipelineSchedule::kOneForwardOneBackward;
  return micro_batches_in_flight(schedule, stages, stage, micro_batches, chunks);
}

// What an operator that runs again pays to take in a kept tensor, where the backward pass does not
// convert that tensor once more anyway.
double Mapping::reentry_s(const MapEdgeRecord& edge) const noexcept {
  if (edge.again != 0 || ops_[at(edge.from)].kept == 0) return 0.0;
  const State in = wanted(edge.to, op_mappings_[at(edge.to)]);
  for (const MapEdgeRecord& other : edges_) {
    if (other.from != edge.from || other.kind != edge.kind || other.again == 0) continue;
    const State its = wanted(other.to, op_mappings_[at(other.to)]);
    if (its.same_splits(in)) return 0.0;
  }
  const OpMapping& from = op_mappings_[at(edge.from)];
  double again = 0.0;
  convert_s(edge.from, made(edge.from, from), in, edge.bytes, from.algorithm, &again);
  return again;
}

// Sums of a block, and of what stands before and behind the blocks.
void Mapping::sum_parts(Block& block, std::array<Block, 2>& ends) const {
  for (int i = 0; i < ops(); ++i) {
    const int part = ops_[at(i)].part;
    (part == 1 ? block : ends[part == 0 ? 0 : 1]).add(nodes_[at(i)]);
  }
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    const int part = ops_[at(fans_[f].from)].part;
    const bool exit = fans_[f].kind == static_cast<int>(EdgeKind::kExit);
    (part == 1 && !exit ? block : ends[part == 0 ? 0 : 1]).add(fan_terms_[f]);
  }
}

// What may be computed again or moved off the wafer, and what that costs.
void Mapping::list_items(Block& block) const {
  std::array<Fan, kMaxMapOps> sent{};
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    const FanShape& shape = fans_[f];
    if (ops_[at(shape.from)].part != 1 || shape.kind == static_cast<int>(EdgeKind::kExit)) continue;
    sent[at(shape.from)].forward_s += fan_terms_[f].forward_s;
    sent[at(shape.from)].again_s += fan_terms_[f].again_s;
    sent[at(shape.from)].beside_f_s += fan_terms_[f].beside_f_s;
  }
  std::array<double, kMaxMapOps> entering{};
  for (const MapEdgeRecord& edge : edges_) {
    const bool passes = edge.kind == static_cast<int>(EdgeKind::kInside) ||
                        edge.kind == static_cast<int>(EdgeKind::kWrap);
    if (passes && ops_[at(edge.to)].part == 1) entering[at(edge.to)] += reentry_s(edge);
  }
  for (int i = 0; i < ops(); ++i) {
    const MapOpRecord& record = ops_[at(i)];
    const bool again = (record.outputs >> static_cast<int>(Output::kRecompute) & 1) != 0;
    const bool out = (record.outputs >> static_cast<int>(Output::kOffload) & 1) != 0 &&
                     rules_.stream_capacity_bytes > 0.0;
    const Node& own = nodes_[at(i)];
    if (record.part != 1 || !(own.stash_bytes > 0.0) || !(again || out)) continue;
    Item item{i, again, out, own.stash_bytes, own.forward_s, 0.0, 0.0, 0.0, 0.0};
    item.blocking_s = own.blocking_f_s + sent[at(i)].forward_s;
    if (record.kept != 0) item.blocking_s += entering[at(i)];
    item.hidden_s = sent[at(i)].beside_f_s - sent[at(i)].again_s;
    for (const std::int32_t f : forced_[at(i)]) {
      item.work_s += nodes_[at(f)].forward_s;
      item.blocking_s += nodes_[at(f)].blocking_f_s + sent[at(f)].forward_s + entering[at(f)];
      item.hidden_s += sent[at(f)].beside_f_s;
    }
    if (out) {
      const double moved = rules_.streamed(own.stash_bytes, own.stash_bytes);
      item.stream_s = moved / rules_.stream_bytes_per_s;
      item.link_s = own.stash_bytes * link_s_;
    }
    block.items[at(block.count++)] = item;
  }
}

double Mapping::block_s(const Block& block, const Outputs& outputs) const {
  double blocking = block.blocking_b_s, work = block.backward_s, hidden = block.hidden_b_s;
  double stream = block.stream_s, hidden_f = block.hidden_f_s;
  for (int i = 0; i < block.count; ++i) {
    const Item& item = block.items[at(i)];
    switch (static_cast<Output>(outputs[at(item.op)])) {
      case Output::kStash:
        break;
      case Output::kRecompute:
        blocking += item.blocking_s;
        work += item.work_s;
        hidden += item.hidden_s;
        break;
      case Output::kOffload:
        stream += item.stream_s;
        hidden_f += item.link_s;
        hidden += item.link_s;
        break;
    }
  }
  const double forward = block.blocking_f_s + std::max(block.forward_s, hidden_f);
  return std::max(forward + blocking + std::max(work, hidden), stream);
}

double Mapping::saved_bytes(const Block& block, const Outputs& outputs) const {
  double saved = 0.0;
  for (int i = 0; i < block.count; ++i) {
    const Item& item = block.items[at(i)];
    if (outputs[at(item.op)] != 0) saved += item.saved_bytes;
  }
  return saved;
}

// Seconds of a stage besides its blocks: ends, and what it sends.
double Mapping::others_s(const std::array<Block, 2>& ends, int k, double regather_s,
                         double copies) const {
  const bool first = is_first(k), last = is_last(k);
  double sending = boundary_[at(k)] * rules_.boundary_bytes;
  if (pipeline_stages() > 1) {
    const double ways = 2.0 * rules_.chunks - (first ? 1.0 : 0.0) - (last ? 1.0 : 0.0);
    sending = std::min(sending * copies, sending + ways * regather_s);
  }
  return (first ? ends[0].plain_s() : 0.0) + (last ? ends[1].plain_s() : 0.0) + sending;
}

// Seconds of a step by its schedule, stage by stage.
void Mapping::Pipeline::add(double load_s, double weight_grad_s) noexcept {
  const double waits =
      rules->zero_bubble != 0 ? std::max(0.0, load_s - 2.0 * weight_grad_s) : load_s;
  sum_s += load_s;
  idle_s += waits;
  most_idle_s = std::max(most_idle_s, waits);
  if (load_s > slowest_s) {
    slowest_s = load_s;
    slowest_idle_s = waits;
  }
}

double Mapping::Pipeline::time_s() const noexcept {
  const auto batches = static_cast<double>(rules->micro_batches);
  if (rules->zero_bubble == 0 && rules->chunks == 1) return (batches - 1.0) * slowest_s + sum_s;
  return batches * slowest_s + (idle_s - slowest_idle_s) / rules->chunks;
}

double Mapping::Pipeline::least_s() const noexcept {
  if (rules->zero_bubble == 0) return time_s();
  return static_cast<double>(rules->micro_batches) * slowest_s +
         (idle_s - most_idle_s) / rules->chunks;
}

Mapping::Frame Mapping::frame(const Block& block, const std::array<Block, 2>& ends, int k,
                              double regather_s, double copies) const {
  const double blocks = blocks_[at(k)];
  Frame f{};
  f.flight = flights_[at(k)];
  f.state_bytes = blocks * block.state_bytes;
  f.stream_bytes = blocks * block.stream_bytes;
  f.sync_s = blocks * block.sync_s;
  f.step_s = blocks * block.step_s;
  double live = blocks > 0.0 ? block.live_bytes : 0.0;
  double gathered = blocks > 0.0 ? block.gathered_bytes : 0.0;
  for (int e = 0; e < 2; ++e) {
    if (!(e == 0 ? is_first(k) : is_last(k))) continue;
    const Block& end = ends[at(e)];
    f.state_bytes += end.state_bytes;
    live = std::max(live, end.live_bytes);
    gathered = std::max(gathered, end.gathered_bytes);
    f.stash_bytes += f.flight * end.stash_bytes;
    f.stream_bytes += end.stream_bytes;
    f.sync_s += end.sync_s;
    f.step_s += end.step_s;
  }
  f.fixed_bytes = f.state_bytes + live + 2.0 * gathered + f.stash_bytes;
  f.others_s = others_s(ends, k, regather_s, copies);
  const double kept = f.flight * blocks;  // copies of what a block keeps
  const double room = rules_.capacity_bytes - f.fixed_bytes;
  f.stream_room =
      kept > 0.0 ? std::max(0.0, rules_.stream_capacity_bytes - f.stream_bytes) / kept : 0.0;
  if (kept * block.stash_bytes > room && kept > 1.0) {
    f.needed_bytes = (kept * block.stash_bytes - room) / (kept - 1.0) * (1.0 - 1e-12);
  }
  return f;
}

MapScore Mapping::score(std::span<const std::uint8_t> outputs, std::vector<MapStage>* described,
                        double limit_s, double shortage, MapRange* range) const {
  Block block;
  std::array<Block, 2> ends;
  sum_parts(block, ends);
  // Between stages each die sends its share; copies are sent once and gathered behind.
  const State between = at_boundary();
  const double share = rules_.boundary_bytes / size(between.split());
  const double regather = gather_s(between.whole, share, op_mappings_[at(last_)].algorithm);
  const double copies = size(between.whole);
  const int count = stages();
  const double plain_s = block.plain_s();
  const auto weight_grad = [&](int k) {
    return blocks_[at(k)] * block.weight_grad_s + (is_first(k) ? ends[0].weight_grad_s : 0.0) +
           (is_last(k) ? ends[1].weight_grad_s : 0.0);
  };
  std::array<Frame, kMaxMapStages> frames;  // `count` of them
  Pipeline least(rules_);                   // with everything kept: it takes no less
  bool short_of_room = false;
  for (int k = 0; k < count; ++k) {
    frames[at(k)] = frame(block, ends, k, regather, copies);
    short_of_room = short_of_room || frames[at(k)].needed_bytes > 0.0;
    least.add(frames[at(k)].others_s + blocks_[at(k)] * plain_s, weight_grad(k));
  }
  limit_s *= 1.0 + kLimitRounding;
  const double most_s = limit_s - rules_.outer_tail_s;
  if (least.least_s() > most_s) return too_long();
  const bool chooses = outputs.empty() && short_of_room;
  if (chooses || !outputs.empty()) list_items(block);
  Chooser<Item> chooser(block.items.data(), block.count, block);
  const auto least_s = [&](int k) {
    const double needed = frames[at(k)].needed_bytes;
    if (!(needed > 0.0 && chooser.surely(needed, frames[at(k)].stream_room))) return plain_s;
    return std::max(plain_s, chooser.least_s(needed));
  };
  if (chooses && most_s < kInfinite) {  // with outputs saved in parts, as suits them best
    least = Pipeline(rules_);
    for (int k = 0; k < count; ++k) {
      Frame& f = frames[at(k)];
      f.least_s = f.others_s + blocks_[at(k)] * least_s(k);
      least.add(f.least_s, weight_grad(k));
    }
    if (least.least_s() > most_s) return too_long();
  }
  const double least_step_s = least.least_s();
  const auto lacks = [&](double over) {
    return over > 0.0 && least_step_s * (1.0 + shortage * over / rules_.capacity_bytes) > limit_s;
  };
  for (int k = 0; chooses && most_s < kInfinite && k < count; ++k) {  // whatever is chosen
    const Frame& f = frames[at(k)];
    const double kept = f.flight * blocks_[at(k)];
    if (chooser.most_saved() >= f.needed_bytes) continue;
    const double kept_bytes = (kept - 1.0) * chooser.most_saved();
    if (lacks(f.fixed_bytes + kept * block.stash_bytes - kept_bytes -
              rules_.capacity_bytes * (1.0 + 1e-12))) {
      return too_long();
    }
  }
  // Gradients of all but the last block are summed while the others still run backward.
  double tail_s = rules_.other_tail_s;
  for (int k = 0; k < count; ++k) {
    const Frame& f = frames[at(k)];
    const double beside = std::max(0.0, blocks_[at(k)] - 1.0) * block.backward_s;
    const double exposed = std::max(f.sync_s - beside, std::min(f.sync_s, block.sync_s));
    tail_s = std::max(tail_s, exposed + f.step_s);
  }
  const bool plain = rules_.zero_bubble == 0 && rules_.chunks == 1 && foreign_s_.empty();
  if (range != nullptr && chooses && most_s < kInfinite && plain &&
      narrow(chooser, {frames.data(), at(count)}, least, plain_s, tail_s + rules_.outer_tail_s,
             limit_s, *range)) {
    MapScore score = too_long();
    if (range->most_s < kInfinite) score.time_s = kNan;
    return score;
  }
  MapScore total{};
  total.compute_s = block.forward_s + block.backward_s;
  total.blocking_s = block.blocking_f_s + block.blocking_b_s;
  total.hidden_s = block.hidden_f_s + block.hidden_b_s;
  if (described != nullptr) described->resize(at(count));
  Pipeline pipeline(rules_);
  const bool streams = !foreign_s_.empty();   // that stages may wait for
  std::array<double, kMaxMapStages> loads_s;  // these and the next where there are, `count` of them
  std::array<MapOther, kMaxMapStages> alone;
  const std::array<Moved, 3> weights = streams ? moved_weights() : std::array<Moved, 3>{};
  Outputs chosen{};
  for (int k = 0; k < count; ++k) {
    const Frame& f = frames[at(k)];
    const double blocks = blocks_[at(k)], kept = f.flight * blocks;
    if (!outputs.empty()) {
      for (int i = 0; i < ops(); ++i) chosen[at(i)] = outputs[at(k) * at(ops()) + at(i)];
    } else if (!(f.needed_bytes > 0.0)) {
      chosen.fill(0);
    } else {
      double worst_s = kInfinite;
      if (most_s < kInfinite) worst_s = (least.most_s(most_s, f.least_s) - f.others_s) / blocks;
      if (!chooser.choose(f.needed_bytes, f.stream_room, worst_s, chosen)) return too_long();
    }
    const double saved = saved_bytes(block, chosen);
    const double activations = kept * (block.stash_bytes - saved) + (kept > 0.0 ? saved : 0.0);
    const double memory = f.fixed_bytes + activations;
    const double over = std::max(0.0, memory - rules_.capacity_bytes * (1.0 + 1e-12));
    if (lacks(over)) return too_long();
    double moved = 0.0;
    for (int i = 0; i < block.count; ++i) {
      const Item& item = block.items[at(i)];
      if (chosen[at(item.op)] == 2) moved += item.saved_bytes;
    }
    const double stream = f.stream_bytes + kept * moved;
    const double per_block = block_s(block, chosen);
    const double load = f.others_s + blocks * per_block;
    pipeline.add(load, weight_grad(k));
    least.now(load, f.least_s);
    if (streams) {
      loads_s[at(k)] = load;
      alone[at(k)] = streams_of(weights, k, load, moved);
    }
    total.memory_bytes = std::max(total.memory_bytes, memory);
    total.over_bytes = std::max(total.over_bytes, over);
    total.stream_bytes = std::max(total.stream_bytes, stream);
    total.stream_over_bytes =
        std::max(total.stream_over_bytes, stream - rules_.stream_capacity_bytes * (1.0 + 1e-12));
    if (described != nullptr) {
      const bool first = is_first(k), last = is_last(k);
      (*described)[at(k)] = {
          load,
          memory,
          f.state_bytes,
          activations + f.stash_bytes,
          over,
          streams ? alone[at(k)] : MapOther{load, 0.0, 0.0},
          per_block,
          block.forward_pass_s(moved_link_s(block, chosen)),
          (first ? ends[0].plain_s() : 0.0) + (last ? ends[1].plain_s() : 0.0),
          (first ? ends[0].forward_pass_s(0.0) : 0.0) + (last ? ends[1].forward_pass_s(0.0) : 0.0),
          chosen};
    }
  }
  if (streams) {
    const Charged others = charge_foreign({alone.data(), at(count)}, {loads_s.data(), at(count)});
    pipeline = Pipeline(rules_);
    pipeline.sum_s = pipeline.idle_s = others.sum_s;
    pipeline.slowest_s = pipeline.slowest_idle_s = others.slowest_s;
    for (int k = 0; k < count; ++k) {
      pipeline.add(loads_s[at(k)], weight_grad(k));
      if (described != nullptr) (*described)[at(k)].load_s = loads_s[at(k)];
    }
    const double more = std::max(0.0, others.links_s - pipeline.slowest_s);  // of a micro-batch
    total.time_s = static_cast<double>(rules_.micro_batches - 1) * more;
  }
  if (!(total.stream_over_bytes > 0.0)) total.stream_over_bytes = 0.0;
  total.slowest_stage_s = pipeline.slowest_s;
  total.tail_s = tail_s + rules_.outer_tail_s;
  total.time_s += pipeline.time_s() + total.tail_s;
  return total;
}

}  // namespace phaze
