#include <algorithm>
#include <cmath>
#include <limits>

#include "phaze/mapping.hpp"
#include "placement/memory_rule.hpp"
#include "wafer/mapping_parts.hpp"
#include "wafer/mapping_range.hpp"
#include "wafer/output_choice.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };
using Outputs = std::array<std::uint8_t, kMaxMapOps>;
constexpr double kNever = std::numeric_limits<double>::infinity();

MapScore too_long() noexcept {
  MapScore score{};
  score.time_s = kNever;
  return score;
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
  if (edge.again != 0 || ops_[kAt(edge.from)].kept == 0) return 0.0;
  const State in = wanted(edge.to, op_mappings_[kAt(edge.to)]);
  for (const MapEdgeRecord& other : edges_) {
    if (other.from != edge.from || other.kind != edge.kind || other.again == 0) continue;
    const State its = wanted(other.to, op_mappings_[kAt(other.to)]);
    if (its.same_splits(in)) return 0.0;
  }
  const OpMapping& from = op_mappings_[kAt(edge.from)];
  double again = 0.0;
  convert_s(edge.from, made(edge.from, from), in, edge.bytes, from.algorithm, &again);
  return again;
}

// Sums of a block, and of what stands before and behind the blocks.
void Mapping::sum_parts(Block& block, std::array<Block, 2>& ends) const {
  for (int i = 0; i < ops(); ++i) {
    const int part = ops_[kAt(i)].part;
    (part == 1 ? block : ends[part == 0 ? 0 : 1]).add(nodes_[kAt(i)]);
  }
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    const int part = ops_[kAt(fans_[f].from)].part;
    const bool exit = fans_[f].kind == static_cast<int>(EdgeKind::kExit);
    (part == 1 && !exit ? block : ends[part == 0 ? 0 : 1]).add(fan_terms_[f]);
  }
}

// What may be computed again or moved off the wafer, and what that costs.
void Mapping::list_items(Block& block) const {
  std::array<Fan, kMaxMapOps> sent{};
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    const FanShape& shape = fans_[f];
    if (ops_[kAt(shape.from)].part != 1 || shape.kind == static_cast<int>(EdgeKind::kExit))
      continue;
    sent[kAt(shape.from)].forward_s += fan_terms_[f].forward_s;
    sent[kAt(shape.from)].again_s += fan_terms_[f].again_s;
    sent[kAt(shape.from)].beside_f_s += fan_terms_[f].beside_f_s;
  }
  std::array<double, kMaxMapOps> entering{};
  for (const MapEdgeRecord& edge : edges_) {
    const bool passes = edge.kind == static_cast<int>(EdgeKind::kInside) ||
                        edge.kind == static_cast<int>(EdgeKind::kWrap);
    if (passes && ops_[kAt(edge.to)].part == 1) entering[kAt(edge.to)] += reentry_s(edge);
  }
  for (int i = 0; i < ops(); ++i) {
    const MapOpRecord& record = ops_[kAt(i)];
    const bool again = (record.outputs >> static_cast<int>(Output::kRecompute) & 1) != 0;
    const bool out = (record.outputs >> static_cast<int>(Output::kOffload) & 1) != 0 &&
                     rules_.stream_capacity_bytes > 0.0;
    const Node& own = nodes_[kAt(i)];
    if (record.part != 1 || !(own.stash_bytes > 0.0) || !(again || out)) continue;
    Item item{i, again, out, own.stash_bytes, own.forward_s, 0.0, 0.0, 0.0, 0.0};
    item.blocking_s = own.blocking_f_s + sent[kAt(i)].forward_s;
    if (record.kept != 0) item.blocking_s += entering[kAt(i)];
    item.hidden_s = sent[kAt(i)].beside_f_s - sent[kAt(i)].again_s;
    for (const std::int32_t f : forced_[kAt(i)]) {
      item.work_s += nodes_[kAt(f)].forward_s;
      item.blocking_s += nodes_[kAt(f)].blocking_f_s + sent[kAt(f)].forward_s + entering[kAt(f)];
      item.hidden_s += sent[kAt(f)].beside_f_s;
    }
    if (out) {
      const double moved = rules_.streamed(own.stash_bytes, own.stash_bytes);
      item.stream_s = moved / rules_.stream_bytes_per_s;
      item.link_s = own.stash_bytes * link_s_;
    }
    block.items[kAt(block.count++)] = item;
  }
}

double Mapping::block_s(const Block& block, const Outputs& outputs) const {
  double blocking = block.blocking_b_s, work = block.backward_s, hidden = block.hidden_b_s;
  double stream = block.stream_s, hidden_f = block.hidden_f_s;
  for (int i = 0; i < block.count; ++i) {
    const Item& item = block.items[kAt(i)];
    switch (static_cast<Output>(outputs[kAt(item.op)])) {
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
    const Item& item = block.items[kAt(i)];
    if (outputs[kAt(item.op)] != 0) saved += item.saved_bytes;
  }
  return saved;
}

// Seconds of a stage besides its blocks: ends, and what it sends.
double Mapping::others_s(const std::array<Block, 2>& ends, int k, double regather_s,
                         double copies) const {
  const bool first = is_first(k), last = is_last(k);
  double sending = boundary_[kAt(k)] * rules_.boundary_bytes;
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
  const double blocks = blocks_[kAt(k)];
  Frame f{};
  f.flight = flights_[kAt(k)];
  f.state_bytes = blocks * block.state_bytes;
  f.stream_bytes = blocks * block.stream_bytes;
  f.sync_s = blocks * block.sync_s;
  f.step_s = blocks * block.step_s;
  double live = blocks > 0.0 ? block.live_bytes : 0.0;
  double gathered = blocks > 0.0 ? block.gathered_bytes : 0.0;
  for (int e = 0; e < 2; ++e) {
    if (!(e == 0 ? is_first(k) : is_last(k))) continue;
    const Block& end = ends[kAt(e)];
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
  const double regather = gather_s(between.whole, share, op_mappings_[kAt(last_)].algorithm);
  const double copies = size(between.whole);
  const int count = stages();
  const double plain_s = block.plain_s();
  const auto weight_grad = [&](int k) {
    return blocks_[kAt(k)] * block.weight_grad_s + (is_first(k) ? ends[0].weight_grad_s : 0.0) +
           (is_last(k) ? ends[1].weight_grad_s : 0.0);
  };
  std::array<Frame, kMaxMapStages> frames;  // `count` of them
  Pipeline least(rules_);                   // with everything kept: it takes no less
  bool short_of_room = false;
  for (int k = 0; k < count; ++k) {
    frames[kAt(k)] = frame(block, ends, k, regather, copies);
    short_of_room = short_of_room || frames[kAt(k)].needed_bytes > 0.0;
    least.add(frames[kAt(k)].others_s + blocks_[kAt(k)] * plain_s, weight_grad(k));
  }
  limit_s *= 1.0 + kLimitRounding;
  const double most_s = limit_s - rules_.outer_tail_s;
  if (least.least_s() > most_s) return too_long();
  const bool chooses = outputs.empty() && short_of_room;
  if (chooses || !outputs.empty()) list_items(block);
  Chooser<Item> chooser(block.items.data(), block.count, block);
  const auto least_s = [&](int k) {
    const double needed = frames[kAt(k)].needed_bytes;
    if (!(needed > 0.0 && chooser.surely(needed, frames[kAt(k)].stream_room))) return plain_s;
    return std::max(plain_s, chooser.least_s(needed));
  };
  if (chooses && most_s < kNever) {  // with outputs saved in parts, as suits them best
    least = Pipeline(rules_);
    for (int k = 0; k < count; ++k) {
      Frame& f = frames[kAt(k)];
      f.least_s = f.others_s + blocks_[kAt(k)] * least_s(k);
      least.add(f.least_s, weight_grad(k));
    }
    if (least.least_s() > most_s) return too_long();
  }
  const double least_step_s = least.least_s();
  const auto lacks = [&](double over) {
    return over > 0.0 && least_step_s * (1.0 + shortage * over / rules_.capacity_bytes) > limit_s;
  };
  for (int k = 0; chooses && most_s < kNever && k < count; ++k) {  // whatever is chosen
    const Frame& f = frames[kAt(k)];
    const double kept = f.flight * blocks_[kAt(k)];
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
    const Frame& f = frames[kAt(k)];
    const double beside = std::max(0.0, blocks_[kAt(k)] - 1.0) * block.backward_s;
    const double exposed = std::max(f.sync_s - beside, std::min(f.sync_s, block.sync_s));
    tail_s = std::max(tail_s, exposed + f.step_s);
  }
  const bool plain = rules_.zero_bubble == 0 && rules_.chunks == 1 && cross_stage_s_.empty();
  if (range != nullptr && chooses && most_s < kNever && plain &&
      narrow(chooser, {frames.data(), kAt(count)}, least, plain_s, tail_s + rules_.outer_tail_s,
             limit_s, *range)) {
    MapScore score = too_long();
    if (range->most_s < kNever) score.time_s = std::numeric_limits<double>::quiet_NaN();
    return score;
  }
  MapScore total{};
  total.compute_s = block.forward_s + block.backward_s;
  total.blocking_s = block.blocking_f_s + block.blocking_b_s;
  total.hidden_s = block.hidden_f_s + block.hidden_b_s;
  if (described != nullptr) described->resize(kAt(count));
  Pipeline pipeline(rules_);
  const bool streams = !cross_stage_s_.empty();  // that stages may wait for
  std::array<double, kMaxMapStages> loads_s;  // these and the next where there are, `count` of them
  std::array<MapOther, kMaxMapStages> alone;
  const std::array<Moved, 3> weights = streams ? moved_weights() : std::array<Moved, 3>{};
  Outputs chosen{};
  for (int k = 0; k < count; ++k) {
    const Frame& f = frames[kAt(k)];
    const double blocks = blocks_[kAt(k)], kept = f.flight * blocks;
    if (!outputs.empty()) {
      for (int i = 0; i < ops(); ++i) chosen[kAt(i)] = outputs[kAt(k) * kAt(ops()) + kAt(i)];
    } else if (!(f.needed_bytes > 0.0)) {
      chosen.fill(0);
    } else {
      double worst_s = kNever;
      if (most_s < kNever) worst_s = (least.most_s(most_s, f.least_s) - f.others_s) / blocks;
      if (!chooser.choose(f.needed_bytes, f.stream_room, worst_s, chosen)) return too_long();
    }
    const double saved = saved_bytes(block, chosen);
    const double activations = kept * (block.stash_bytes - saved) + (kept > 0.0 ? saved : 0.0);
    const double memory = f.fixed_bytes + activations;
    const double over = std::max(0.0, memory - rules_.capacity_bytes * (1.0 + 1e-12));
    if (lacks(over)) return too_long();
    double moved = 0.0;
    for (int i = 0; i < block.count; ++i) {
      const Item& item = block.items[kAt(i)];
      if (chosen[kAt(item.op)] == 2) moved += item.saved_bytes;
    }
    const double stream = f.stream_bytes + kept * moved;
    const double per_block = block_s(block, chosen);
    const double load = f.others_s + blocks * per_block;
    pipeline.add(load, weight_grad(k));
    least.now(load, f.least_s);
    if (streams) {
      loads_s[kAt(k)] = load;
      alone[kAt(k)] = streams_of(weights, k, load, moved);
    }
    total.memory_bytes = std::max(total.memory_bytes, memory);
    total.over_bytes = std::max(total.over_bytes, over);
    total.stream_bytes = std::max(total.stream_bytes, stream);
    total.stream_over_bytes =
        std::max(total.stream_over_bytes, stream - rules_.stream_capacity_bytes * (1.0 + 1e-12));
    if (described != nullptr) {
      (*described)[kAt(k)] = {load,          memory,
                              f.state_bytes, activations + f.stash_bytes,
                              over,          streams ? alone[kAt(k)] : MapOther{load, 0.0, 0.0},
                              chosen};
    }
  }
  if (streams) {
    const Charged others =
        charge_cross_stage({alone.data(), kAt(count)}, {loads_s.data(), kAt(count)});
    pipeline = Pipeline(rules_);
    pipeline.sum_s = pipeline.idle_s = others.sum_s;
    pipeline.slowest_s = pipeline.slowest_idle_s = others.slowest_s;
    for (int k = 0; k < count; ++k) {
      pipeline.add(loads_s[kAt(k)], weight_grad(k));
      if (described != nullptr) (*described)[kAt(k)].load_s = loads_s[kAt(k)];
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
