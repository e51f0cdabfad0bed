// Chains of passes, each waiting for the one before: lower bounds on a step of a schedule without
// simulating it. Private to the kernel.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "phaze/pipeline_schedule.hpp"

namespace phaze {

// How often a chain contains the passes of each slot (stage * chunks + chunk). The dependencies
// between passes follow from their order alone, so for any durations a step of the same schedule
// takes at least the sum over the chain.
struct PassChain {
  std::vector<double> forward;
  std::vector<double> backward;

  double least_s(std::span<const double> forward_s,
                 std::span<const double> backward_s) const noexcept {
    double sum = 0.0;
    for (std::size_t k = 0; k < forward.size(); ++k) {
      sum += forward[k] * forward_s[k] + backward[k] * backward_s[k];
    }
    return sum;
  }
};

// The critical chain of a simulated step, for schedules of whole backward passes; empty if there
// are no events.
PassChain critical_chain(PipelineSchedule schedule, std::span<const PassEvent> events,
                         std::int64_t stages, std::int64_t chunks, std::int64_t micro_batches);

// Chains that ruled out layer assignments of a schedule, by its shape; most recently successful
// first.
class PassChains {
 public:
  // Selects the shape that later calls refer to.
  void select(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
              std::int64_t micro_batches);

  // Whether some chain exceeds a limit.
  bool above(std::span<const double> forward_s, std::span<const double> backward_s,
             double limit_s) noexcept;

  // Extracts a chain from a step that took too long, less often the more chains are known; `player`
  // simulates it again.
  void learn(const PipelineLoads& loads, PipelinePlayer* player);

 private:
  using Shape = std::array<std::int64_t, 4>;
  struct Known {
    Shape shape{};
    std::vector<PassChain> chains;
    std::int64_t learnt = 0;  // chains, replaced ones included
    std::int64_t wasted = 0;  // steps since then that no chain ruled out
  };
  std::map<Shape, Known> known_;
  Known* own_ = nullptr;
};

}  // namespace phaze
