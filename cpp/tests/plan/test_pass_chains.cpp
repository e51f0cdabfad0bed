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

  PipelineLoads loads(int stages, int chunks, std::int64_t micro_batches) const {
    return {stages, chunks, micro_batches, forward_s, backward_s, forward_s, 1.0};
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
  }
  return passes;
}

void chains_bound_steps(std::mt19937_64* random) {
  constexpr PipelineSchedule kInterleaved = PipelineSchedule::kInterleaved;
  phaze::PipelinePlayer player;
  phaze::PassChains known;
  const auto among = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(*random);
  };
  int ruled_out = 0;
  for (int round = 0; round < 120; ++round) {
    const int stages = among(2, 7);
    const int chunks = among(2, 4);
    const std::int64_t micro_batches = among(1, 24);
    if (phaze::check_schedule(kInterleaved, stages, chunks, micro_batches) !=
        phaze::PipelineStatus::kOk) {
      continue;
    }
    const auto slots = static_cast<std::size_t>(stages * chunks);
    const Passes own = random_passes(slots, random);
    const PipelineLoads loads = own.loads(stages, chunks, micro_batches);
    const double own_s = player.full_step_s(kInterleaved, loads);
    const std::vector<phaze::PassEvent> events = player.events(kInterleaved, loads);
    const phaze::PassChain chain =
        phaze::critical_chain(kInterleaved, events, stages, chunks, micro_batches);
    CHECK(std::abs(chain.least_s(own.forward_s, own.backward_s) - own_s) <= 1e-12 * own_s);
    known.select(kInterleaved, stages, chunks, micro_batches);
    known.learn(loads, &player);
    for (int other = 0; other < 20; ++other) {
      const Passes passes = random_passes(slots, random);
      const PipelineLoads others = passes.loads(stages, chunks, micro_batches);
      const double step_s = player.full_step_s(kInterleaved, others);
      CHECK(chain.least_s(passes.forward_s, passes.backward_s) <= step_s * (1.0 + 1e-12));
      CHECK(!known.above(passes.forward_s, passes.backward_s, step_s));
      ruled_out += known.above(passes.forward_s, passes.backward_s, 0.8 * step_s) ? 1 : 0;
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
