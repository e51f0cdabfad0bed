// Chains of passes: never longer than a simulated step, and as long as the step they were taken
// from.
#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"
#include "plan/pass_chains.hpp"

namespace {

using phaze::PipelineLoads;
using phaze::PipelineSchedule;

struct Passes {
  std::vector<double> forward_s;
  std::vector<double> backward_s;
  std::vector<double> weight_grad_s;

  PipelineLoads loads(int stages, int chunks, std::int64_t micro_batches) const {
    return {stages, chunks, micro_batches, forward_s, backward_s, weight_grad_s, 1.0};
  }
};

Passes random_passes(std::size_t slots, std::mt19937_64* random) {
  std::uniform_real_distribution<double> seconds(0.0, 1.0);
  std::bernoulli_distribution longer(0.3);
  Passes passes;
  for (std::size_t k = 0; k < slots; ++k) {
    const double scale = longer(*random) ? 5.0 : 1.0;
    passes.forward_s.push_back(scale * seconds(*random));
    passes.backward_s.push_back(2.0 * scale * seconds(*random));
    passes.weight_grad_s.push_back(passes.backward_s.back() * seconds(*random));
  }
  return passes;
}

void chains_bound_steps(std::mt19937_64* random) {
  phaze::PipelinePlayer player;
  phaze::PassChains known;
  const auto among = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(*random);
  };
  int ruled_out = 0;
  for (int round = 0; round < 400; ++round) {
    const auto schedule = static_cast<PipelineSchedule>(among(0, 7));
    const int stages = among(2, 7);
    const int chunks = schedule == PipelineSchedule::kInterleaved   ? among(2, 4)
                       : schedule >= PipelineSchedule::kZeroBubbleV ? 2
                                                                    : 1;
    const std::int64_t micro_batches = among(1, 24);
    if (phaze::check_schedule(schedule, stages, chunks, micro_batches) !=
        phaze::PipelineStatus::kOk) {
      continue;
    }
    const auto slots = static_cast<std::size_t>(stages * chunks);
    const Passes own = random_passes(slots, random);
    const PipelineLoads loads = own.loads(stages, chunks, micro_batches);
    const double own_s = player.full_step_s(schedule, loads);
    const phaze::PassChain chain = phaze::critical_chain(schedule, loads, &player);
    CHECK(std::abs(chain.least_s(loads) - own_s) <= 1e-12 * own_s);
    known.select(schedule, stages, chunks, micro_batches);
    known.learn(loads, &player);
    for (int other = 0; other < 20; ++other) {
      const Passes passes = random_passes(slots, random);
      const PipelineLoads others = passes.loads(stages, chunks, micro_batches);
      const double step_s = player.full_step_s(schedule, others);
      CHECK(chain.least_s(others) <= step_s * (1.0 + 1e-12));
      CHECK(!known.above(others, step_s));
      ruled_out += known.above(others, 0.8 * step_s) ? 1 : 0;
    }
  }
  CHECK(ruled_out > 100);  // otherwise the chains are of no use
}

}  // namespace

int main() {
  std::mt19937_64 random(20);
  chains_bound_steps(&random);
  return phaze::test::report("pass_chains");
}
