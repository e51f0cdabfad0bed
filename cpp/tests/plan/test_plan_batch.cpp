// Data that the plan kernel caches between plans and between calls changes no answer.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"
#include "plan/plan_case.hpp"

using namespace phaze;

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Solvers are reused between calls: times that change in place are read again.
void times_may_change_between_calls(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random, seed % 2 == 0 ? 40 : 1, 12);
  CHECK(built(c) == Status::kOk);
  const std::vector<KindTimes> all{c.times()};
  const std::vector<double> below{kInfinite};
  for (int round = 0; round < 3; ++round) {
    c.scale(1.0 + 0.5 * round);
    double best = kInfinite;
    for (std::size_t k = 0; k < c.layouts.size(); ++k) {
      best = std::min(best, c.space.best_of_layout(k, all[0], c.memory_limit, kInfinite).time_s);
    }
    std::vector<PlacedPlan> plans(1);
    c.space.best_of_memory_limits(0, all[0], all[0], below, plans);
    CHECK(plans[0].time_s == best);
    SettledLayouts settled{};
    const auto top = c.space.top_plans(all, 0, 1, 1, &settled);
    CHECK(top.empty() ? best == kInfinite : top[0].time_s == best);
  }
}

// The least largest work of a stage, over all divisions of the layers from `first`.
double least_work(const std::vector<double>& work, std::size_t first, int stages) {
  double sum = 0.0, least = kInfinite;
  for (std::size_t i = first; i + static_cast<std::size_t>(stages) <= work.size(); ++i) {
    sum += work[i];
    if (stages > 1) least = std::min(least, std::max(sum, least_work(work, i + 1, stages - 1)));
  }
  return stages > 1 ? least : sum;
}

void stages_by_work_are_as_even_as_any_division(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> work(2 + random() % 8);
  for (double& layer : work) layer = static_cast<double>(random() % 10);
  for (int stages = 1; stages <= static_cast<int>(work.size()); ++stages) {
    const std::vector<std::int32_t> cuts = cuts_by_work(work, stages);
    CHECK(cuts.size() == static_cast<std::size_t>(stages) + 1 && cuts.front() == 0);
    CHECK(cuts.back() == static_cast<std::int32_t>(work.size()));
    double largest = 0.0;
    for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
      CHECK(cuts[k] < cuts[k + 1]);
      largest = std::max(largest,
                         std::accumulate(work.begin() + cuts[k], work.begin() + cuts[k + 1], 0.0));
    }
    CHECK(largest == least_work(work, 0, stages));
  }
}

// Layouts of two strategies, whose layers have different times.
Case two_strategies(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random, 60, 12);
  c.strategies.push_back(c.strategies[0]);
  for (std::size_t k = 0; k < 3; ++k) c.sizes.push_back(c.sizes[k]);
  for (std::size_t k = c.layouts.size() / 2; k < c.layouts.size(); ++k) c.layouts[k].strategy = 1;
  return c;
}

// A batch reuses sums and steps between plans, in any order and with several recomputations of a
// layout; a single plan has none to reuse.
void a_batch_is_its_plans_one_by_one(unsigned seed) {
  Case c = two_strategies(seed);
  CHECK(built(c) == Status::kOk);
  std::vector<LayerTimes> scaled;  // by level and strategy, the first as they are
  for (std::size_t n = 0; n <= kFreeLevels; ++n) {
    for (const double own : {1.0, 1.3}) {
      scaled.push_back(c);
      scaled.back().scale(own * (1.0 - 0.1 * static_cast<double>(n)));
    }
  }
  const auto times_of = [&](std::size_t level, std::size_t s) {
    return scaled[2 * level + s].times();
  };
  std::vector<PlanSpace::TimesOf> free_of;
  for (std::size_t n = 1; n <= kFreeLevels; ++n) {
    free_of.push_back([&, n](std::size_t s) { return times_of(n, s); });
  }
  const std::int32_t choices[] = {-1, 0, 1, StageRecompute{0, 1, 1}.code()};
  std::vector<std::pair<std::int64_t, std::int32_t>> plans;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    for (std::size_t n = 0; n <= (k + seed) / 3 % 3; ++n) {
      plans.emplace_back(static_cast<std::int64_t>(k), choices[(k + seed + n) / 2 % 4]);
    }
  }
  std::mt19937 random(seed);
  if (seed % 2 != 0) std::shuffle(plans.begin(), plans.end(), random);
  std::vector<PlanEstimate> found(plans.size());
  std::vector<std::int64_t> layouts;
  std::vector<std::int32_t> variants;
  for (const auto& [layout, variant] : plans) {
    layouts.push_back(layout);
    variants.push_back(variant);
  }
  std::vector<std::size_t> numbers(plans.size());
  std::iota(numbers.begin(), numbers.end(), 0);
  c.space.estimate_even(
      numbers, layouts, variants, [&](std::size_t s) { return times_of(0, s); }, free_of,
      c.memory_limit,
      [&](std::span<const std::size_t> rows, std::span<const PlanEstimate> own) {
        for (std::size_t k = 0; k < rows.size(); ++k) found[rows[k]] = own[k];
      });
  Case slow = two_strategies(seed);  // only exchanges and messages take longer
  for (double& rate : slow.fabric.bytes_per_s) rate /= 7.0;
  CHECK(built(slow) == Status::kOk);
  for (std::size_t k = 0; k < found.size(); ++k) {
    const auto row = static_cast<std::size_t>(layouts[k]);
    const auto strategy = static_cast<std::size_t>(c.layouts[row].strategy);
    const KindTimes times = times_of(0, strategy);
    std::vector<KindTimes> free;
    for (std::size_t n = 1; n <= kFreeLevels; ++n) free.push_back(times_of(n, strategy));
    Partition partition;
    const PlanStatus status =
        c.space.even_partition(row, times, variants[k], c.memory_limit, &partition);
    CHECK((status == PlanStatus::kOk) == std::isfinite(found[k].time_s));
    if (status != PlanStatus::kOk) continue;
    std::vector<StageEstimate> stages;  // of a plan with stages, no stage is skipped
    const PlanEstimate one = c.space.estimate(row, partition, times, free, c.memory_limit, &stages);
    CHECK(one.fullest == found[k].fullest && one.instant == found[k].instant);
    for (const StageEstimate& own : stages) CHECK(total(own.memory) <= found[k].memory_bytes);
    CHECK(one.time_s == found[k].time_s && one.memory_bytes == found[k].memory_bytes);
    CHECK(one.energy_j == found[k].energy_j && one.status == found[k].status);
    const PlanParts& a = one.parts;
    const PlanParts& b = found[k].parts;
    CHECK(a.data_comm_s == b.data_comm_s && a.pipeline_comm_s == b.pipeline_comm_s);
    CHECK(a.expert_comm_s == b.expert_comm_s && a.context_comm_s == b.context_comm_s);
    CHECK(a.tensor_comm_s == b.tensor_comm_s && a.host_s == b.host_s);
    CHECK(a.compute_s == b.compute_s && a.recompute_s == b.recompute_s);
    CHECK(a.bubble_s == b.bubble_s && a.imbalance_s == b.imbalance_s);
    CHECK(a.optimizer_s == b.optimizer_s);
    const PlanParts far =
        slow.space.estimate(row, partition, times, free, c.memory_limit, nullptr).parts;
    CHECK(far.compute_s == a.compute_s && far.recompute_s == a.recompute_s);
    CHECK(far.bubble_s == a.bubble_s && far.optimizer_s == a.optimizer_s);
    CHECK(far.data_comm_s >= a.data_comm_s - 1e-12 * one.time_s);
    const double parts = a.compute_s + a.recompute_s + a.pipeline_comm_s + a.imbalance_s +
                         a.bubble_s + a.data_comm_s + a.optimizer_s + a.expert_comm_s +
                         a.context_comm_s + a.tensor_comm_s + a.host_s;
    CHECK(std::abs(parts - one.time_s) <= 1e-12 * one.time_s);
  }
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 40; ++seed) times_may_change_between_calls(seed);
  for (unsigned seed = 0; seed < 40; ++seed) a_batch_is_its_plans_one_by_one(seed);
  for (unsigned seed = 0; seed < 40; ++seed) stages_by_work_are_as_even_as_any_division(seed);
  return phaze::test::report("plan batch");
}
