// What plans have in common that differ in their replicas, ZeRO stage or rank order alone. Private
// to the kernel; one object per thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "phaze/plan.hpp"
#include "plan/memory_rule.hpp"

namespace phaze {

// The step with exchanges of weights and gradients at no cost, and then with messages and more and
// more of the other communication at no cost.
struct SharedStep {
  struct Level {
    std::size_t part;  // of the step that this level makes free, see Estimator::parts
    double step_s;
    std::vector<double> before_s;  // by stage: backward passes of the stages before it
  };

  // Of the passes: joules, and the kinds of all layers with the sums of their parameters.
  bool summed = false;
  double passes_j = 0.0;
  LayerKindRecord parameters{};
  std::vector<std::int32_t> kinds;

  // Without exchanges: backward passes by stage, and the step by the seconds of messages.
  Level own{};
  std::vector<double> plain_s;
  struct Sent {
    std::vector<double> message_s;
    double wrap_s;
    double step_s;
  };
  std::vector<Sent> sent;

  bool played = false;
  std::vector<Level> levels;
  double mean_s = 0.0;   // of the stages' work on a micro-batch
  double again_s = 0.0;  // mean of their recomputation
  double most_s = 0.0;   // the longest

  // What the last plan has in common with those that differ in rank order alone.
  struct Sizes {
    std::array<std::int64_t, 3> of{-1, -1, -1};  // replicas, those that share state, ZeRO stage
    PlanEstimate fullest{};                      // its bytes
    double moved_bytes = 0.0;                    // by the optimiser
    std::vector<double> tails_s;                 // of `own` and all levels
  };
  Sizes sizes;
};

// The shared steps of one strategy with the same times, by shape and recomputation.
class SharedSteps {
 public:
  // Scratch: state of the first blocks of a layout, by their number.
  std::vector<StateBytes> block_states;

  SharedStep* of(const LayoutRecord& layout, const Partition& partition) {
    const std::int32_t variant = partition.variants.front();
    for (const std::int32_t own : partition.variants) {
      if (own != variant) {  // stages differ: not shared
        other_ = {};
        return &other_;
      }
    }
    if (layout.strategy != strategy_) {
      steps_.clear();
      last_ = nullptr;
    }
    strategy_ = layout.strategy;
    const Key key{layout.schedule, layout.pp, layout.vpp, layout.micro_batches, variant};
    if (last_ == nullptr || key != last_key_) last_ = &steps_[key];
    last_key_ = key;
    return last_;
  }

 private:
  std::int32_t strategy_ = -1;
  SharedStep other_;
  using Key = std::array<std::int64_t, 5>;
  std::map<Key, SharedStep> steps_;
  Key last_key_{};
  SharedStep* last_ = nullptr;
};

}  // namespace phaze
