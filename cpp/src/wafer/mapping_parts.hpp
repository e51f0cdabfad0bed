// Parts of a mapping's score: what a block and the ends add up to, a stage, and the pipeline.
#pragma once

#include <algorithm>
#include <array>

#include "phaze/mapping.hpp"

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

}  // namespace phaze
