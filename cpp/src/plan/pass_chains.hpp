// Chains of passes, each waiting for the one before: lower bounds on a step of a schedule without
// simulating it. Private to the kernel.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "phaze/pipeline_schedule.hpp"

namespace phaze {

// How often a chain contains the passes of each slot (stage * chunks + chunk). The order of the
// passes does not depend on their durations, so for any durations a step of the same schedule takes
// at least the sum over the chain.
struct PassChain {
  struct Counts {
    double forward, backward, input, weight;  // a whole backward pass, or its two parts

    double seconds(double forward_s, double backward_s, double weight_grad_s) const noexcept {
      return forward * forward_s + backward * backward_s + input * (backward_s - weight_grad_s) +
             weight * weight_grad_s;
    }
  };
  std::vector<Counts> counts;  // by slot; empty if the step was not simulated

  double least_s(const PipelineLoads& loads) const noexcept {
    double sum = 0.0;
    for (std::size_t k = 0; k < counts.size(); ++k) {
      sum += counts[k].seconds(loads.forward_s[k], loads.backward_s[k], loads.weight_grad_s[k]);
    }
    return sum;
  }
};

// The critical chain of a step, in which a pair of passes takes the sum of both.
PassChain critical_chain(PipelineSchedule schedule, const PipelineLoads& loads,
                         PipelinePlayer* player);

// Chains that ruled out layer assignments, by shape (schedule, stages, chunks, micro-batches); the
// most recently successful first.
class PassChains {
 public:
  // Selects the shape that later calls refer to.
  void select(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
              std::int64_t micro_batches);

  // Drops all chains.
  void clear() noexcept {
    known_.clear();
    own_ = nullptr;
  }

  // Whether some known chain, and so the step, takes more than a limit. `assignment` identifies the
  // layers of the chunks (0: nothing does): a chain of the same assignment is nearly as long as the
  // step, so where one is known, others are not tried.
  bool above(const PipelineLoads& loads, double limit_s, std::uint64_t assignment = 0);

  // Extracts a chain from a step that took too long, less often the more chains are known; `player`
  // simulates that step again. Null if no chain was extracted.
  const PassChain* learn(const PipelineLoads& loads, PipelinePlayer* player,
                         std::uint64_t assignment = 0);

 private:
  using Shape = std::array<std::int64_t, 4>;
  // The last critical chain of an assignment, for schedules that do not split backward passes.
  struct OwnChain {
    std::vector<std::uint16_t> counts;  // by slot: forward and backward passes
    std::int64_t learnt = 0;
    std::int64_t wasted = 0;  // steps since then that no chain ruled out

    double least_s(const PipelineLoads& loads) const noexcept;
  };
  struct Known {
    Shape shape{};
    std::unordered_map<std::uint64_t, OwnChain> own;  // by assignment
    std::vector<PassChain> chains;
    std::int64_t learnt = 0;  // chains, replaced ones included
    std::int64_t wasted = 0;  // steps no chain ruled out since the last one was learnt
  };
  std::map<Shape, Known> known_;
  Known* own_ = nullptr;
};

}  // namespace phaze
