// The plan kernel against every partition, one by one: best plans, bounds, estimates, fits of what
// is asked for. Small random models, all schedules, ZeRO stages and rank orders.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "phaze/plan.hpp"

using namespace phaze;

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct Case {
  std::vector<std::int32_t> order;
  std::vector<std::int32_t> from, to;
  std::vector<StrategyRecord> strategies;
  std::vector<LayerKindRecord> sizes;
  std::vector<LayoutRecord> layouts;
  FabricRecord fabric{};
  PlanSpace space;
  std::vector<double> forward{0.1, 1.0, 0.4}, plain{0.2, 2.0, 0.7}, weight{0.05, 0.9, 0.3};
  std::vector<double> backward, joules, joules_back;
  double room = 0.0;

  KindTimes times() const {
    return {forward.data(),
            plain.data(),
            backward.data(),
            weight.data(),
            joules.data(),
            joules_back.data(),
            1e9,
            1.0};
  }
};

FabricRecord two_tiers() {
  FabricRecord f{};
  f.kind = static_cast<std::int32_t>(FabricKind::kSwitched);
  f.levels = 2;
  f.size[0] = 4;
  f.size[1] = 0;
  f.bytes_per_s[0] = 1e9;
  f.bytes_per_s[1] = 1e8;
  f.latency_s[0] = 1e-3;
  f.latency_s[1] = 5e-3;
  return f;
}

void build(Case& c, std::mt19937& random, int layouts = 12, int most_blocks = 6) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const int blocks = draw(2, most_blocks);
  c.order.assign(1, 0);
  c.order.insert(c.order.end(), static_cast<std::size_t>(blocks), 1);
  c.order.push_back(2);
  for (std::int32_t i = 0; i + 1 < static_cast<std::int32_t>(c.order.size()); ++i) {
    c.from.push_back(i);
    c.to.push_back(i + 1);
  }
  c.strategies = {{1, 1, 1, 1, 1e6, 0.0, draw(0, 1) * 2e5, 1e6, 2, 0}};
  LayerKindRecord embedding{3e5, 0.0, {1e5, 1e5}, {0.0, 0.0}, 0.0, 0.0, 0.0, 0.0, 1, 0};
  LayerKindRecord block{1e6, 0.0, {4e6, 5e5}, {0.0, 3.5e6}, 0.0, 0.0, 0.0, 0.0, 0, 0};
  LayerKindRecord head{3e5, 0.0, {0.0, 0.0}, {0.0, 0.0}, 2e6, 0.0, 0.0, 0.0, 1, 0};
  c.sizes = {embedding, block, head};
  const int codes[] = {0, 2, 3};
  for (int k = 0; k < layouts; ++k) {
    LayoutRecord l{};
    l.schedule = codes[draw(0, 2)];
    l.stages = draw(1, std::min(blocks, 4));
    l.virtual_stages = 1;
    l.zero = draw(0, 3);
    l.rank_order = draw(0, 1);
    l.data_parallel = draw(1, 2);
    l.microbatches = draw(1, 3) * l.stages;
    if (l.schedule == 2) {
      l.virtual_stages = 2;
      if (blocks % (2 * l.stages) != 0) continue;
    }
    c.layouts.push_back(l);
  }
  c.fabric = two_tiers();
  c.fabric.devices = 8;
  const int kinds = 3;
  c.backward.assign(2 * kinds, 0.0);
  for (std::size_t k = 0; k < 3; ++k) {
    c.backward[k] = c.plain[k];
    c.backward[3 + k] = c.plain[k] + (k == 1 ? c.forward[k] : 0.0);
  }
  c.joules.assign(3, 1.0);
  c.joules_back.assign(6, 2.0);
  c.room = 1e6 * draw(15, 120);
}

// The best time over every partition and every choice of variants of one layout.
double brute_force(const Case& c, std::size_t layout) {
  const LayoutRecord& l = c.layouts[layout];
  const int layers = static_cast<int>(c.order.size());
  const KindTimes times = c.times();
  double best = kInfinite;
  std::vector<std::int32_t> cuts{0};
  const std::function<void()> cut = [&] {
    if (static_cast<int>(cuts.size()) == l.stages) {
      Partition p{cuts, {}};
      p.cuts.push_back(layers);
      for (int choice = 0; choice < (1 << l.stages); ++choice) {
        p.variants.clear();
        for (int k = 0; k < l.stages; ++k) p.variants.push_back(choice >> k & 1);
        const PlanEstimate e = c.space.estimate(layout, p, times, {}, c.room, nullptr);
        if (e.status == 0) best = std::min(best, e.time_s);
      }
      return;
    }
    for (std::int32_t next = cuts.back() + 1; next < layers; ++next) {
      cuts.push_back(next);
      cut();
      cuts.pop_back();
    }
  };
  cut();
  return best;
}

// What differs in rank order alone is one kind of plan.
bool same_kind(const LayoutRecord& a, const LayoutRecord& b) {
  return a.schedule == b.schedule && a.stages == b.stages && a.virtual_stages == b.virtual_stages &&
         a.zero == b.zero && a.data_parallel == b.data_parallel;
}

Status built(Case& c) {
  const TrainingRecord training{2.0, 4.0, 12.0, 0.03, 1e6, 0.2, 1e-9, 1e-8, 2.0, 0.0, 0, 0};
  const PlanProblem problem{c.fabric, 8,  training,     3,       c.order,  c.from, c.to,
                            {},       {}, c.strategies, c.sizes, c.layouts};
  const std::vector<double> rooms{c.room};
  const std::vector<std::uint8_t> fits(c.layouts.size(), 1);
  return c.space.build(problem, rooms, fits);
}

// The list of the fastest plans and the front against the best plan of every layout, of which there
// are more than are solved at once.
void lists_are_those_of_all_layouts(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random, 200, 12);
  if (seed % 2 == 1) {  // many layouts of a kind that take as long
    for (LayoutRecord& l : c.layouts) l.microbatches = 12;
  }
  CHECK(built(c) == Status::kOk);
  const std::vector<KindTimes> all{c.times()};
  std::vector<PlacedPlan> plans;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    plans.push_back(c.space.best_of_layout(k, all[0], c.room, kInfinite));
    if (plans.back().time_s == kInfinite) plans.pop_back();
  }
  std::sort(plans.begin(), plans.end(), [](const PlacedPlan& a, const PlacedPlan& b) {
    return a.time_s < b.time_s || (a.time_s == b.time_s && a.memory_bytes < b.memory_bytes);
  });
  SettledLayouts settled{};
  std::vector<PlacedPlan> kinds, lean;
  for (const PlacedPlan& plan : plans) {
    const auto known = [&](const PlacedPlan& other) {
      return same_kind(c.layouts[static_cast<std::size_t>(other.layout)],
                       c.layouts[static_cast<std::size_t>(plan.layout)]);
    };
    if (std::none_of(kinds.begin(), kinds.end(), known)) kinds.push_back(plan);
    if (lean.empty() || plan.memory_bytes < lean.back().memory_bytes) lean.push_back(plan);
  }
  for (const std::size_t top : {1, 2, 10, 200}) {
    const auto found = c.space.top_plans(all, 0, top, 1, &settled);
    CHECK(found.size() == std::min(top, kinds.size()));
    for (std::size_t k = 0; k < std::min(found.size(), kinds.size()); ++k) {
      CHECK(found[k].time_s == kinds[k].time_s);
    }
  }
  const auto front = c.space.front(all, 0, kInfinite, 1, &settled);
  CHECK(front.size() == lean.size());
  for (std::size_t k = 0; k < std::min(front.size(), lean.size()); ++k) {
    CHECK(front[k].time_s == lean[k].time_s && front[k].memory_bytes == lean[k].memory_bytes);
  }
}

void one_case(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random);
  CHECK(built(c) == Status::kOk);
  const KindTimes times = c.times();
  double best = kInfinite;
  double least_bound = kInfinite;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    const LayoutRecord& l = c.layouts[k];
    const PlacedPlan plan = c.space.best_of_layout(k, times, c.room, kInfinite);
    const double bound = c.space.layout_bound_s(k, times, 0);
    least_bound = std::min(least_bound, bound);
    best = std::min(best, plan.time_s);
    if (plan.time_s == kInfinite) {
      if (l.virtual_stages == 1) CHECK(brute_force(c, k) == kInfinite);
      continue;
    }
    CHECK(bound <= plan.time_s);
    CHECK(c.space.work_bound_s(0, 0.0, 0) <= plan.time_s);
    CHECK(c.space.check_partition(k, plan.partition) == PlanStatus::kOk);
    std::vector<StageEstimate> stages;
    const std::vector<KindTimes> free(kFreeLevels, times);
    const PlanEstimate e = c.space.estimate(k, plan.partition, times, free, c.room, &stages);
    CHECK(std::abs(e.time_s - plan.time_s) <= 1e-12 * plan.time_s);
    const PlanParts& p = e.parts;
    const double parts = p.compute_s + p.recompute_s + p.pipeline_comm_s + p.imbalance_s +
                         p.bubble_s + p.data_comm_s + p.optimizer_s;
    CHECK(std::abs(parts - e.time_s) <= 1e-12 * e.time_s);
    CHECK(e.memory_bytes <= c.room * (1.0 + 1e-9) && e.energy_j > 0.0);
    if (l.virtual_stages == 1) {
      CHECK(std::abs(plan.time_s - brute_force(c, k)) <= 1e-12 * plan.time_s);
      CHECK(c.space.best_of_layout(k, times, c.room, 0.5 * plan.time_s).time_s == kInfinite);
    }
  }
  // Held against one another, layouts are bounded more sharply than each for itself.
  const double strategy_bound = c.space.strategy_bound_s(0, times, 0);
  CHECK(strategy_bound >= least_bound && strategy_bound <= best);
  const PlacedPlan whole = c.space.best_of_strategy(0, times, times, 0, kInfinite);
  CHECK(whole.time_s == kInfinite ? best == kInfinite
                                  : std::abs(whole.time_s - best) <= 1e-12 * best);
  SettledLayouts settled{};
  const std::vector<KindTimes> all{times};
  const auto one = c.space.top_plans(all, 0, 3, 1, &settled);
  const auto two = c.space.top_plans(all, 0, 3, 2, &settled);
  CHECK(settled.open_s == kInfinite);
  SettledLayouts cut{};
  const auto early = c.space.top_plans(all, 0, 3, 1, &cut, [] { return true; });
  if (!early.empty() && !one.empty()) {
    CHECK(early[0].time_s >= one[0].time_s);
    CHECK(std::min(early[0].time_s, cut.open_s) <= one[0].time_s * (1.0 + 1e-12));
  }
  CHECK(one.size() == two.size());
  for (std::size_t k = 0; k < one.size(); ++k) {
    CHECK(one[k].time_s == two[k].time_s && one[k].layout == two[k].layout);
  }
  if (!one.empty()) CHECK(std::abs(one[0].time_s - best) <= 1e-12 * best);
}

// Solvers are kept from call to call: times that change where they lie are read again.
void times_may_change_between_calls(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random, 40, 12);
  CHECK(built(c) == Status::kOk);
  const std::vector<KindTimes> all{c.times()};
  const std::vector<double> below{kInfinite};
  for (int round = 0; round < 3; ++round) {
    for (auto* own : {&c.forward, &c.plain, &c.weight, &c.backward}) {
      for (double& each : *own) each *= 1.0 + 0.5 * round;
    }
    double best = kInfinite;
    for (std::size_t k = 0; k < c.layouts.size(); ++k) {
      best = std::min(best, c.space.best_of_layout(k, all[0], c.room, kInfinite).time_s);
    }
    std::vector<PlacedPlan> plans(1);
    c.space.best_of_rooms(0, all[0], all[0], below, plans);
    CHECK(plans[0].time_s == best);
    SettledLayouts settled{};
    const auto top = c.space.top_plans(all, 0, 1, 1, &settled);
    CHECK(top.empty() ? best == kInfinite : top[0].time_s == best);
  }
}

// A batch keeps sums from plan to plan; one plan at a time has none to keep.
void a_batch_is_its_plans_one_by_one(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random, 60, 12);
  CHECK(built(c) == Status::kOk);
  std::vector<Case> freer(kFreeLevels);
  for (std::size_t n = 0; n < kFreeLevels; ++n) {
    Case& level = freer[n];
    level.forward = c.forward;
    level.plain = c.plain;
    level.weight = c.weight;
    level.backward = c.backward;
    level.joules = c.joules;
    level.joules_back = c.joules_back;
    for (auto* own : {&level.forward, &level.plain, &level.weight, &level.backward}) {
      for (double& each : *own) each *= 0.9 - 0.1 * static_cast<double>(n);
    }
  }
  const KindTimes times = c.times();
  std::vector<PlanSpace::TimesOf> free_of;
  std::vector<KindTimes> free;
  for (const Case& level : freer) {
    free.push_back(level.times());
    free_of.push_back([&level](std::size_t) { return level.times(); });
  }
  std::vector<std::int64_t> layouts;
  std::vector<std::int32_t> variants;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    for (const std::int32_t variant : {1, 0, -1}) {
      layouts.push_back(static_cast<std::int64_t>(k));
      variants.push_back(variant);
    }
  }
  std::vector<PlanEstimate> found(layouts.size());
  c.space.estimate_even(
      layouts, variants, [&](std::size_t) { return times; }, free_of, c.room, found);
  for (std::size_t k = 0; k < layouts.size(); ++k) {
    const auto row = static_cast<std::size_t>(layouts[k]);
    Partition partition;
    const PlanStatus status = c.space.even_partition(row, times, variants[k], c.room, &partition);
    CHECK((status == PlanStatus::kOk) == std::isfinite(found[k].time_s));
    if (status != PlanStatus::kOk) continue;
    const PlanEstimate one = c.space.estimate(row, partition, times, free, c.room, nullptr);
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
    const double parts = a.compute_s + a.recompute_s + a.pipeline_comm_s + a.imbalance_s +
                         a.bubble_s + a.data_comm_s + a.optimizer_s + a.expert_comm_s +
                         a.context_comm_s + a.tensor_comm_s + a.host_s;
    CHECK(std::abs(parts - one.time_s) <= 1e-12 * one.time_s);
  }
}

void refuses_nonsense() {
  std::mt19937 random(1);
  Case c;
  build(c, random);
  const TrainingRecord training{2.0, 4.0, 12.0, 0.03, 1e6, 0.2, 1e-9, 1e-8, 2.0, 0.0, 0, 0};
  const auto status = [&](const std::vector<LayoutRecord>& layouts) {
    const PlanProblem problem{c.fabric, 8,  training,     3,       c.order, c.from, c.to,
                              {},       {}, c.strategies, c.sizes, layouts};
    return c.space.build(problem, {}, {});
  };
  LayoutRecord good{};
  good.stages = good.virtual_stages = 1;
  good.data_parallel = good.microbatches = 1;
  CHECK(status({good}) == Status::kOk);
  LayoutRecord bad = good;
  bad.data_parallel = 9;
  CHECK(status({bad}) == Status::kBadRules);
  bad = good;
  bad.schedule = kPipelineScheduleCount;
  CHECK(status({bad}) == Status::kBadRules);
  bad = good;
  bad.shard = 3;  // of one replica, and nothing is shared
  CHECK(status({bad}) == Status::kBadRules);
  bad.shard = 1;  // of two replicas that share nothing
  bad.data_parallel = 2;
  CHECK(status({bad}) == Status::kBadRules);
  bad.zero = 1;
  CHECK(status({bad}) == Status::kOk);
  // Three chunks on one device that do not lie in a row: no plan, and nothing is written elsewhere.
  bad = good;
  bad.virtual_stages = 3;
  CHECK(status({bad}) == Status::kOk);
  CHECK(c.space.best_of_layout(0, c.times(), 1e12, kInfinite).time_s == kInfinite);
  bad = good;
  bad.strategy = 7;
  CHECK(status({bad}) == Status::kBadRules);
  c.sizes[1].parameters = std::numeric_limits<double>::quiet_NaN();
  CHECK(status({good}) == Status::kNotFinite);
  // Bytes of several blocks were infinite, and what does not fit was called the best plan.
  c.sizes[1].parameters = 1.0;
  c.sizes[1].stash_bytes[0] = 1.7e308;
  CHECK(status({good}) == Status::kNotFinite);
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 150; ++seed) one_case(seed);
  for (unsigned seed = 0; seed < 60; ++seed) lists_are_those_of_all_layouts(seed);
  for (unsigned seed = 0; seed < 40; ++seed) times_may_change_between_calls(seed);
  for (unsigned seed = 0; seed < 40; ++seed) a_batch_is_its_plans_one_by_one(seed);
  refuses_nonsense();
  return phaze::test::report("plan");
}
