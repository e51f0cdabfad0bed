#include <algorithm>
#include <cmath>
#include <limits>

#include "phaze/mapping.hpp"
#include "placement/memory_rule.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };
using Outputs = std::array<std::uint8_t, kMaxMapOps>;

}  // namespace

double MapRulesRecord::in_flight(int stages, int stage) const noexcept {
  const PipelineSchedule schedule = zero_bubble != 0 ? PipelineSchedule::kZeroBubbleH1
                                    : chunks > 1     ? PipelineSchedule::kInterleaved
                                                     : PipelineSchedule::kOneForwardOneBackward;
  return microbatches_in_flight(schedule, stages, stage, microbatches, chunks);
}

// An output that may be computed again or moved off the wafer instead of being kept.
struct Mapping::Item {
  int op;
  bool recompute, offload;
  double saved_bytes;
  double work_s, blocking_s, hidden_s;  // that running it again adds to the backward pass
  double stream_s;                      // that moving it out and back adds
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
    hidden_b_s += f.again_s;
  }
  double plain_s() const noexcept {
    const double passes = blocking_f_s + std::max(forward_s, hidden_f_s) + blocking_b_s +
                          std::max(backward_s, hidden_b_s);
    return std::max(passes, stream_s);
  }
};

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

Mapping::Block Mapping::block_of() const {
  Block block;
  for (int i = 0; i < ops(); ++i) {
    if (ops_[kAt(i)].part == 1) block.add(nodes_[kAt(i)]);
  }
  std::array<Fan, kMaxMapOps> sent{};
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    const FanShape& shape = fans_[f];
    if (ops_[kAt(shape.from)].part != 1 || shape.kind == static_cast<int>(EdgeKind::kExit))
      continue;
    block.add(fan_terms_[f]);
    sent[kAt(shape.from)].forward_s += fan_terms_[f].forward_s;
    sent[kAt(shape.from)].again_s += fan_terms_[f].again_s;
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
    Item item{i, again, out, own.stash_bytes, own.forward_s, 0.0, 0.0, 0.0};
    item.blocking_s = own.blocking_f_s + sent[kAt(i)].forward_s;
    if (record.kept != 0) item.blocking_s += entering[kAt(i)];
    item.hidden_s = -sent[kAt(i)].again_s;
    for (const std::int32_t f : forced_[kAt(i)]) {
      item.work_s += nodes_[kAt(f)].forward_s;
      item.blocking_s += nodes_[kAt(f)].blocking_f_s + sent[kAt(f)].forward_s + entering[kAt(f)];
    }
    if (out) {
      const double moved = rules_.streamed(own.stash_bytes, own.stash_bytes);
      item.stream_s = moved / rules_.stream_bytes_per_s;
    }
    block.items[kAt(block.count++)] = item;
  }
  return block;
}

double Mapping::block_s(const Block& block, const Outputs& outputs) const {
  double blocking = block.blocking_b_s, work = block.backward_s, hidden = block.hidden_b_s;
  double stream = block.stream_s;
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
        break;
    }
  }
  const double forward = block.blocking_f_s + std::max(block.forward_s, block.hidden_f_s);
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

namespace {

// Exact choice of outputs: least time with at least so many bytes saved. Items in the order of
// what a saved byte costs, as for a knapsack; a branch is left once it cannot beat the best even
// if the last item could be split.
template <typename Item>
class Chooser {
 public:
  Chooser(const Item* items, int count, double forward_s, double blocking_s, double work_s,
          double hidden_s, double stream_s, double stream_room)
      : forward_s_(forward_s), stream_room_(stream_room), by_work_(work_s >= hidden_s) {
    count_ = count;
    for (int i = 0; i < count; ++i) order_[kAt(i)] = items + i;
    std::sort(order_.begin(), order_.begin() + count, [&](const Item* a, const Item* b) {
      const double left = least(*a) / a->saved_bytes, right = least(*b) / b->saved_bytes;
      return left != right ? left < right : a->op < b->op;
    });
    for (int i = 0; i < count; ++i) {
      if (!items[i].offload) continue;
      offloads_ = true;
      stream_s_per_byte_ = items[i].stream_s / items[i].saved_bytes;
    }
    rest_[kAt(count)] = 0.0;
    for (int i = count - 1; i >= 0; --i) {
      rest_[kAt(i)] = rest_[kAt(i) + 1] + order_[kAt(i)]->saved_bytes;
    }
    start_ = {blocking_s, work_s, hidden_s, stream_s, 0.0, 0.0};
  }

  // Outputs by position in the order; false where nothing saves enough.
  bool solve(double needed) {
    needed_ = needed;
    best_s_ = std::numeric_limits<double>::infinity();
    now_.fill(0);
    descend(0, start_);
    return best_s_ < std::numeric_limits<double>::infinity();
  }
  const Item& item(int i) const { return *order_[kAt(i)]; }
  std::uint8_t output(int i) const { return best_[kAt(i)]; }

 private:
  struct Sums {
    double blocking, work, hidden, stream, saved, moved;
  };
  double least(const Item& item) const noexcept {
    if (!item.recompute) return std::numeric_limits<double>::infinity();
    return item.blocking_s + (by_work_ ? item.work_s : item.hidden_s);
  }
  // Bytes still missing are computed again in parts, the cheapest first, and the others stream.
  double bound(int at, const Sums& s) const noexcept {
    double cost = forward_s_ + s.blocking + (by_work_ ? s.work : s.hidden);
    double missing = needed_ - s.saved;
    double stream = s.stream + (offloads_ ? stream_s_per_byte_ * missing : 0.0);
    for (int i = at; i < count_ && missing > 0.0; ++i) {
      const Item& item = *order_[kAt(i)];
      if (offloads_ && (cost >= stream || !item.recompute)) break;
      if (!item.recompute) continue;
      const double part = std::min(item.saved_bytes, missing);
      const double rate = least(item) / item.saved_bytes;
      const double eased = offloads_ ? stream_s_per_byte_ : 0.0;
      if (offloads_ && cost + rate * part >= stream - eased * part) {
        return cost + rate * (stream - cost) / (rate + eased);
      }
      cost += rate * part;
      stream -= eased * part;
      missing -= part;
    }
    return std::max(cost, stream);
  }
  void descend(int at, const Sums& s) {
    if (s.saved >= needed_) {
      const double time_s =
          std::max(forward_s_ + s.blocking + std::max(s.work, s.hidden), s.stream);
      if (time_s < best_s_) {
        best_s_ = time_s;
        best_ = now_;
        std::fill(best_.begin() + at, best_.end(), std::uint8_t{0});
      }
      return;  // computing still more again never makes a step shorter
    }
    if (at == count_ || s.saved + rest_[kAt(at)] < needed_) return;
    // Relative slack: a bound that ties but for rounding is no improvement.
    if (bound(at, s) >= best_s_ * (1.0 - 1e-12)) return;
    const Item& item = *order_[kAt(at)];
    if (item.recompute) {
      now_[kAt(at)] = static_cast<std::uint8_t>(Output::kRecompute);
      descend(at + 1, {s.blocking + item.blocking_s, s.work + item.work_s, s.hidden + item.hidden_s,
                       s.stream, s.saved + item.saved_bytes, s.moved});
    }
    if (item.offload && s.moved + item.saved_bytes <= stream_room_) {
      now_[kAt(at)] = static_cast<std::uint8_t>(Output::kOffload);
      descend(at + 1, {s.blocking, s.work, s.hidden, s.stream + item.stream_s,
                       s.saved + item.saved_bytes, s.moved + item.saved_bytes});
    }
    now_[kAt(at)] = 0;
    descend(at + 1, s);
  }

  std::array<const Item*, kMaxMapOps> order_{};
  std::array<double, kMaxMapOps + 1> rest_{};
  std::array<std::uint8_t, kMaxMapOps> now_{}, best_{};
  double forward_s_, stream_room_;
  bool by_work_;
  int count_;
  Sums start_{};
  bool offloads_ = false;
  double stream_s_per_byte_ = 0.0;
  double needed_ = 0.0, best_s_ = 0.0;
};

}  // namespace

void Mapping::choose(const Block& block, double needed, double stream_room,
                     Outputs& outputs) const {
  Chooser<Item> chooser(block.items.data(), block.count,
                        block.blocking_f_s + std::max(block.forward_s, block.hidden_f_s),
                        block.blocking_b_s, block.backward_s, block.hidden_b_s, block.stream_s,
                        stream_room);
  const bool found = chooser.solve(needed);
  for (int i = 0; i < block.count; ++i) {
    const Item& item = chooser.item(i);
    const auto all =
        static_cast<std::uint8_t>(item.recompute ? Output::kRecompute : Output::kStash);
    outputs[kAt(item.op)] = found ? chooser.output(i) : all;
  }
}

MapScore Mapping::score(std::span<const std::uint8_t> outputs,
                        std::vector<MapStage>* described) const {
  const Block block = block_of();
  Block ends[2];
  for (int i = 0; i < ops(); ++i) {
    const int part = ops_[kAt(i)].part;
    if (part != 1) ends[part == 0 ? 0 : 1].add(nodes_[kAt(i)]);
  }
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    const int part = ops_[kAt(fans_[f].from)].part;
    const bool exit = fans_[f].kind == static_cast<int>(EdgeKind::kExit);
    if (part != 1 || exit) ends[part == 0 ? 0 : 1].add(fan_terms_[f]);
  }
  // Between stages each die sends its share; copies are sent once and gathered behind.
  const State between = at_boundary();
  const double share = rules_.boundary_bytes / size(between.split());
  const double regather = gather_s(between.whole, share, op_mappings_[kAt(last_)].algorithm);
  const double copies = size(between.whole);

  MapScore total{};
  total.compute_s = block.forward_s + block.backward_s;
  total.blocking_s = block.blocking_f_s + block.blocking_b_s;
  total.hidden_s = block.hidden_f_s + block.hidden_b_s;
  const int count = stages();
  if (described != nullptr) described->resize(kAt(count));
  const double chunks = rules_.chunks;
  double sum_s = 0.0, slowest_s = 0.0, tail_s = 0.0;
  double idle_s = 0.0, slowest_idle_s = 0.0;  // while the pipeline fills: of all, of the slowest
  for (int k = 0; k < count; ++k) {
    const double blocks = blocks_[kAt(k)];
    const bool first = k == 0, last = k == count - 1;
    const double flight = rules_.in_flight(count, k);
    double state = blocks * block.state_bytes, live = blocks > 0.0 ? block.live_bytes : 0.0;
    double gathered = blocks > 0.0 ? block.gathered_bytes : 0.0, stash = 0.0, load = 0.0;
    double stream = blocks * block.stream_bytes;
    double sync = blocks * block.sync_s, step = blocks * block.step_s;
    double weight_grad = blocks * block.weight_grad_s;
    for (int e = 0; e < 2; ++e) {
      if (!(e == 0 ? first : last)) continue;
      state += ends[e].state_bytes;
      live = std::max(live, ends[e].live_bytes);
      gathered = std::max(gathered, ends[e].gathered_bytes);
      stash += flight * ends[e].stash_bytes;
      load += ends[e].plain_s();
      stream += ends[e].stream_bytes;
      sync += ends[e].sync_s;
      step += ends[e].step_s;
      weight_grad += ends[e].weight_grad_s;
    }
    const double fixed = state + live + 2.0 * gathered + stash;
    const double kept = flight * blocks;  // copies of what a block keeps
    const double room = rules_.capacity_bytes - fixed;
    const double stream_room =
        kept > 0.0 ? std::max(0.0, rules_.stream_capacity_bytes - stream) / kept : 0.0;
    Outputs chosen{};
    if (!outputs.empty()) {
      for (int i = 0; i < ops(); ++i) chosen[kAt(i)] = outputs[kAt(k) * kAt(ops()) + kAt(i)];
    } else if (kept * block.stash_bytes > room && kept > 1.0) {
      const double needed = (kept * block.stash_bytes - room) / (kept - 1.0);
      choose(block, needed * (1.0 - 1e-12), stream_room, chosen);
    }
    const double saved = saved_bytes(block, chosen);
    const double activations = kept * (block.stash_bytes - saved) + (kept > 0.0 ? saved : 0.0);
    const double memory = fixed + activations;
    const double over = std::max(0.0, memory - rules_.capacity_bytes * (1.0 + 1e-12));
    double moved = 0.0;
    for (int i = 0; i < block.count; ++i) {
      const Item& item = block.items[kAt(i)];
      if (chosen[kAt(item.op)] == 2) moved += item.saved_bytes;
    }
    stream += kept * moved;
    const double per_block = block_s(block, chosen);
    double sending = boundary_[kAt(k)] * rules_.boundary_bytes;
    if (count > 1) {
      const double ways = 2.0 * chunks - (first ? 1.0 : 0.0) - (last ? 1.0 : 0.0);
      sending = std::min(sending * copies, sending + ways * regather);
    }
    load += blocks * per_block + sending;
    // Gradients of all but the last block are summed while the others still run backward.
    const double beside = std::max(0.0, blocks - 1.0) * block.backward_s;
    const double exposed = std::max(sync - beside, std::min(sync, block.sync_s));
    tail_s = std::max(tail_s, exposed + step);
    sum_s += load;
    const double waits = rules_.zero_bubble != 0 ? std::max(0.0, load - 2.0 * weight_grad) : load;
    idle_s += waits;
    if (load > slowest_s) {
      slowest_s = load;
      slowest_idle_s = waits;
    }
    total.memory_bytes = std::max(total.memory_bytes, memory);
    total.over_bytes = std::max(total.over_bytes, over);
    total.stream_bytes = std::max(total.stream_bytes, stream);
    total.stream_over_bytes =
        std::max(total.stream_over_bytes, stream - rules_.stream_capacity_bytes * (1.0 + 1e-12));
    if (described != nullptr) {
      (*described)[kAt(k)] = {load, memory, state, activations + stash, over, chosen};
    }
  }
  if (!(total.stream_over_bytes > 0.0)) total.stream_over_bytes = 0.0;
  total.slowest_stage_s = slowest_s;
  total.tail_s = tail_s + rules_.outer_tail_s;
  const auto batches = static_cast<double>(rules_.microbatches);
  total.time_s = (batches - 1.0) * slowest_s + sum_s + total.tail_s;
  if (rules_.zero_bubble != 0 || rules_.chunks > 1) {
    total.time_s = batches * slowest_s + (idle_s - slowest_idle_s) / chunks + total.tail_s;
  }
  return total;
}

}  // namespace phaze
