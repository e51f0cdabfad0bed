// The plan kernel against enumeration of every partition: best plans, bounds, estimates, and the
// memory limit. Small random models, all schedules, ZeRO stages and rank orders.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"
#include "plan/plan_case.hpp"

using namespace phaze;

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// The best time over every partition and every choice of variants of one layout.
double brute_force(const Case& c, std::size_t layout) {
  const LayoutRecord& l = c.layouts[layout];
  const int layers = static_cast<int>(c.order.size());
  const KindTimes times = c.times();
  double best = kInfinite;
  std::vector<std::int32_t> cuts{0};
  const std::function<void()> cut = [&] {
    if (static_cast<int>(cuts.size()) == l.pp) {
      Partition p{cuts, {}};
      p.cuts.push_back(layers);
      for (int choice = 0; choice < (1 << l.pp); ++choice) {
        p.variants.clear();
        for (int k = 0; k < l.pp; ++k) p.variants.push_back(choice >> k & 1);
        const PlanEstimate e = c.space.estimate(layout, p, times, {}, c.memory_limit, nullptr);
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

// Plans that differ only in rank order count as one.
bool same_kind(const LayoutRecord& a, const LayoutRecord& b) {
  return a.schedule == b.schedule && a.pp == b.pp && a.vpp == b.vpp && a.zero == b.zero &&
         a.dp == b.dp;
}

// The list of the fastest plans and the front against the best plan of every layout, with more
// layouts than are solved at once.
void lists_are_those_of_all_layouts(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random, 200, 12);
  if (seed % 2 == 1) {  // many layouts of a kind with equal times
    for (LayoutRecord& l : c.layouts) l.micro_batches = 12;
  }
  CHECK(built(c) == Status::kOk);
  const std::vector<KindTimes> all{c.times()};
  std::vector<PlacedPlan> plans;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    plans.push_back(c.space.best_of_layout(k, all[0], c.memory_limit, kInfinite));
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
  // What a space knows of its layouts holds for the same times only.
  c.scale(0.5);
  double least_s = kInfinite;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    least_s =
        std::min(least_s, c.space.best_of_layout(k, all[0], c.memory_limit, kInfinite).time_s);
  }
  const auto faster = c.space.top_plans(all, 0, 1, 1, &settled);
  CHECK((faster.empty() ? kInfinite : faster[0].time_s) == least_s);
}

void one_case(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  build(c, random);
  CHECK(built(c) == Status::kOk);
  const KindTimes times = c.times();
  double best = kInfinite;
  double least_bound = kInfinite;
  Status status{};
  const std::vector<std::uint8_t> fits = layouts_that_fit(c, &status);
  CHECK(status == Status::kOk);
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    const LayoutRecord& l = c.layouts[k];
    const PlacedPlan plan = c.space.best_of_layout(k, times, c.memory_limit, kInfinite);
    const double bound = c.space.layout_bound_s(k, times, 0);
    const double quick_bound = c.space.layout_bound_s(k, times, 0, -kInfinite);
    CHECK(quick_bound <= bound);
    const bool packed =
        l.pp == 1 || l.schedule == 0 || (l.schedule == 3 && l.micro_batches >= l.pp);
    const bool fitting = plan.time_s < kInfinite;
    CHECK(packed ? (fits[2 * k] == 1) == fitting : fits[2 * k] == 1 || !fitting);
    CHECK(!packed || fits[2 * k + 1] == 0);
    least_bound = std::min(least_bound, quick_bound);
    best = std::min(best, plan.time_s);
    if (plan.time_s == kInfinite) {
      if (l.vpp == 1) CHECK(brute_force(c, k) == kInfinite);
      continue;
    }
    CHECK(bound <= plan.time_s);
    CHECK(c.space.work_bound_s(0, 0.0, 0) <= plan.time_s);
    CHECK(c.space.check_partition(k, plan.partition) == PlanStatus::kOk);
    std::vector<StageEstimate> stages;
    const std::vector<KindTimes> free(kFreeLevels, times);
    const PlanEstimate e =
        c.space.estimate(k, plan.partition, times, free, c.memory_limit, &stages);
    CHECK(std::abs(e.time_s - plan.time_s) <= 1e-12 * plan.time_s);
    const PlanParts& p = e.parts;
    const double parts = p.compute_s + p.recompute_s + p.pipeline_comm_s + p.imbalance_s +
                         p.bubble_s + p.data_comm_s + p.optimizer_s;
    CHECK(std::abs(parts - e.time_s) <= 1e-12 * e.time_s);
    CHECK(e.memory_bytes <= c.memory_limit * (1.0 + 1e-9) && e.energy_j > 0.0);
    if (l.vpp == 1) {
      CHECK(std::abs(plan.time_s - brute_force(c, k)) <= 1e-12 * plan.time_s);
      CHECK(c.space.best_of_layout(k, times, c.memory_limit, 0.5 * plan.time_s).time_s ==
            kInfinite);
    }
  }
  // The bound over all layouts of a strategy is at least as tight as the layouts' quick bounds.
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

// Bounds of interleaved layouts with chunks of unequal length against their best plans, and the
// best plan over all of them, of which most classes of assignments are ruled out by their bounds.
// Returns how many bounds are within a hundredth of the time.
int bounds_of_chunks(unsigned seed) {
  std::mt19937 random(seed);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Case c;
  build(c, random, 0, 24);
  for (auto* own : {&c.forward, &c.plain}) {
    for (double& each_s : *own) each_s *= 0.1 * draw(5, 20);
  }
  c.backward = c.plain;
  for (std::size_t k = 0; k < 3; ++k) c.backward.push_back(c.plain[k] + (k == 1) * c.forward[k]);
  add_chunks(c, random, 0);
  for (int k = 0; k < 8; ++k) {
    LayoutRecord l{};
    l.schedule = static_cast<std::int32_t>(PipelineSchedule::kInterleaved);
    l.vpp = draw(2, 4);
    l.pp = draw(2, 4);
    l.zero = draw(0, 3);
    l.dp = draw(1, 2);
    l.rank_order = draw(0, 1);
    l.micro_batches = draw(1, 3 * l.pp);
    c.layouts.push_back(l);
  }
  c.memory_limit = 1e6 * draw(40, 400);
  CHECK(built(c, seed % 3 > 0) == Status::kOk);
  int tight = 0;
  double best = kInfinite;
  for (std::size_t k = 0; k < c.layouts.size(); ++k) {
    const double time_s = c.space.best_of_layout(k, c.times(), c.memory_limit, kInfinite).time_s;
    const double bound_s = c.space.layout_bound_s(k, c.times(), 0);
    best = std::min(best, time_s);
    CHECK(bound_s <= time_s);
    CHECK(bound_s == kInfinite ||
          c.space.layout_bound_s(k, c.times(), 0, 0.9 * bound_s) > 0.9 * bound_s);
    tight += time_s < kInfinite && bound_s >= 0.99 * time_s;
  }
  const auto same = [&](double time_s) {
    return time_s == best || std::abs(time_s - best) <= 1e-12 * best;
  };
  CHECK(same(c.space.best_of_strategy(0, c.times(), c.times(), 0, kInfinite).time_s));
  SettledLayouts settled{};
  const std::vector<KindTimes> all{c.times()};
  const auto found = c.space.top_plans(all, 0, 1, 1, &settled);
  CHECK(same(found.empty() ? kInfinite : found[0].time_s));
  return tight;
}

// Best plans, bounds, lists and fronts are the same for every order of the recompute variants.
// Regression: the first variant was taken for the fastest, and better plans of layouts with several
// chunks per stage were ruled out.
void order_of_variants_changes_nothing(unsigned seed) {
  std::vector<std::size_t> order{0, 1, 2};
  std::vector<double> expected;
  do {
    std::mt19937 random(seed);
    Case c;
    build(c, random, 20, 14);
    add_chunks(c, random, 20);
    if (seed % 2 == 0) divide_by_work(c, random);
    permute_variants(c, order);
    CHECK(built(c, seed % 2 == 1) == Status::kOk);
    const std::vector<KindTimes> all{c.times()};
    std::vector<double> found;
    for (std::size_t k = 0; k < c.layouts.size(); ++k) {
      found.push_back(c.space.best_of_layout(k, all[0], c.memory_limit, kInfinite).time_s);
      CHECK(c.space.layout_bound_s(k, all[0], 0) <= found.back());
    }
    const double best = *std::min_element(found.begin(), found.end());
    CHECK(c.space.best_of_strategy(0, all[0], all[0], 0, kInfinite).time_s == best);
    SettledLayouts settled{};
    for (const PlacedPlan& plan : c.space.top_plans(all, 0, 10, 1, &settled)) {
      found.push_back(plan.time_s);
    }
    for (const PlacedPlan& plan : c.space.front(all, 0, kInfinite, 1, &settled)) {
      found.push_back(plan.time_s);
      found.push_back(plan.memory_bytes);
    }
    if (expected.empty()) expected = found;
    CHECK(found.size() == expected.size());
    for (std::size_t k = 0; k < std::min(found.size(), expected.size()); ++k) {
      CHECK(found[k] == expected[k] || std::abs(found[k] - expected[k]) <= 1e-12 * expected[k]);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

// The least time over all assignments whose chunks differ by a layer at most, embedding and head
// counted as layers or not, and as the software divides them, each stage with the fastest
// recomputation that fits.
double best_assignment(const Case& c, std::size_t layout, int places, int* count) {
  const auto blocks = static_cast<int>(c.order.size()) - 2;
  double best = kInfinite;
  const auto consider = [&](Partition p) {
    c.space.choose_recompute(layout, c.times(), c.memory_limit, &p);
    const PlanEstimate e = c.space.estimate(layout, p, c.times(), {}, c.memory_limit, nullptr);
    if (e.status == 0) best = std::min(best, e.time_s);
    ++*count;
  };
  if (c.sizes[1].stage_work > 0.0 && c.layouts[layout].vpp == 1) {
    std::vector<double> work;
    for (const std::int32_t kind : c.order) {
      work.push_back(c.sizes[static_cast<std::size_t>(kind)].stage_work);
    }
    consider({cuts_by_work(work, places), {}});
  }
  for (int ends = 0; ends < 4; ++ends) {
    const int first = ends & 1;
    const int total = blocks + first + (ends >> 1);
    if (total < places) continue;
    std::vector<int> longer(static_cast<std::size_t>(places), 0);
    std::fill(longer.begin(), longer.begin() + total % places, 1);
    do {
      Partition p{{0}, {}};
      int position = 1 - first;
      for (int k = 0; k + 1 < places; ++k) {
        p.cuts.push_back(position += total / places + longer[static_cast<std::size_t>(k)]);
      }
      p.cuts.push_back(blocks + 2);
      consider(std::move(p));
    } while (std::prev_permutation(longer.begin(), longer.end()));
  }
  return best;
}

// Regression: of more than 128 assignments a few were tried, and the best of them called optimal.
void best_of_many_assignments(unsigned seed, int* many) {
  std::mt19937 random(seed);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Case c;
  build(c, random, 1, 4);
  add_chunks(c, random, 0);
  const int shapes[][3] = {{1, 10, 1}, {2, 2, 5}, {2, 4, 3},  {2, 5, 2},
                           {4, 10, 1}, {5, 5, 2}, {6, 10, 2}, {7, 5, 2}};
  const int* shape = shapes[draw(0, 7)];
  LayoutRecord l{};
  l.schedule = shape[0];
  l.pp = shape[1];
  l.vpp = shape[2];
  l.dp = 1;
  l.micro_batches = 2 * draw(1, 8);
  if (l.schedule >= 6) l.micro_batches = 2 * l.pp + 2 * draw(0, 4);
  c.layouts.assign(1, l);
  const int places = l.schedule == 6 ? l.pp : l.pp * l.vpp;
  c.order.assign(1, 0);
  c.order.insert(c.order.end(), static_cast<std::size_t>(draw(places, 3 * places)), 1);
  c.order.push_back(2);
  c.from.clear();
  c.to.clear();
  for (std::int32_t i = 0; i + 1 < static_cast<std::int32_t>(c.order.size()); ++i) {
    c.from.push_back(i);
    c.to.push_back(i + 1);
  }
  c.forward[2] = 0.1 * draw(1, 30);
  c.fabric.devices = 16;
  c.memory_limit = 1e6 * draw(40, 300);
  if (seed % 3 != 0) divide_by_work(c, random);
  CHECK(built(c, seed % 2 == 1) == Status::kOk);
  int count = 0;
  const double best = best_assignment(c, 0, places, &count);
  const PlacedPlan plan = c.space.best_of_layout(0, c.times(), c.memory_limit, kInfinite);
  *many += count > 512 && plan.open_s == kInfinite;
  if (plan.open_s == kInfinite) {
    CHECK(plan.time_s == best || std::abs(plan.time_s - best) <= 2e-12 * best);
  } else {
    CHECK(plan.time_s >= best * (1.0 - 1e-12) && plan.open_s <= best * (1.0 + 1e-12));
  }
}

void refuses_nonsense() {
  std::mt19937 random(1);
  Case c;
  build(c, random);
  for (const auto& spoil :
       {+[](Case& own) { own.strategies[0].variants = kMaxVariants + 1; },
        +[](Case& own) { own.layouts[0].schedule = kPipelineScheduleCount; },
        +[](Case& own) { own.layouts[0].micro_batches = 0; },
        +[](Case& own) { own.layouts[0].strategy = 1; }, +[](Case& own) { own.order[0] = 3; }}) {
    Case own;
    std::mt19937 same(1);
    build(own, same);
    spoil(own);
    Status found{};
    layouts_that_fit(own, &found);
    CHECK(found != Status::kOk);
  }
  TrainingRecord training{2.0, 4.0, 12.0, 0.03, 1e6, 0.2, 1e-9, 1e-8, 2.0, 0.0, 0, 2};
  const auto status = [&](const std::vector<LayoutRecord>& layouts) {
    const PlanProblem problem{c.fabric, 8,  training,     3,       c.order, c.from, c.to,
                              {},       {}, c.strategies, c.sizes, layouts};
    return c.space.build(problem, {}, {});
  };
  LayoutRecord good{};
  good.pp = good.vpp = 1;
  good.dp = good.micro_batches = 1;
  CHECK(status({good}) == Status::kOk);
  LayoutRecord bad = good;
  bad.dp = 9;
  CHECK(status({bad}) == Status::kBadRules);
  bad = good;
  bad.schedule = kPipelineScheduleCount;
  CHECK(status({bad}) == Status::kBadRules);
  bad = good;
  bad.shard = 3;  // of one replica, and nothing is sharded
  CHECK(status({bad}) == Status::kBadRules);
  bad.shard = 1;  // of two replicas that shard nothing
  bad.dp = 2;
  CHECK(status({bad}) == Status::kBadRules);
  bad.zero = 1;
  CHECK(status({bad}) == Status::kOk);
  // Three chunks on one device that are not consecutive: no plan, and no write out of bounds.
  bad = good;
  bad.vpp = 3;
  CHECK(status({bad}) == Status::kOk);
  CHECK(c.space.best_of_layout(0, c.times(), 1e12, kInfinite).time_s == kInfinite);
  bad = good;
  bad.strategy = 7;
  CHECK(status({bad}) == Status::kBadRules);
  training.whole_layers = 0;
  CHECK(status({good}) == Status::kBadTuning);
  training.whole_layers = 1;
  CHECK(status({good}) == Status::kOk);
  c.sizes[1].parameters = std::numeric_limits<double>::quiet_NaN();
  CHECK(status({good}) == Status::kNotFinite);
  // Regression: bytes of several blocks were infinite, and a plan that does not fit was called the
  // best.
  c.sizes[1].parameters = 1.0;
  c.sizes[1].stash_bytes[0] = 1.7e308;
  CHECK(status({good}) == Status::kNotFinite);
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 150; ++seed) one_case(seed);
  for (unsigned seed = 0; seed < 60; ++seed) lists_are_those_of_all_layouts(seed);
  for (unsigned seed = 0; seed < 60; ++seed) order_of_variants_changes_nothing(seed);
  int tight = 0;
  for (unsigned seed = 0; seed < 200; ++seed) tight += bounds_of_chunks(seed);
  CHECK(tight > 100);
  int many = 0;
  for (unsigned seed = 0; seed < 120; ++seed) best_of_many_assignments(seed, &many);
  CHECK(many > 30);
  refuses_nonsense();
  return phaze::test::report("plan");
}
