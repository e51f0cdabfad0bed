// ChipLayers on chips and the best plans on chips, against each chip and strategy by itself: costs
// looked up one by one, layers scheduled by the batch function, plans of each strategy in full.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "phaze/layer_batch.hpp"
#include "plan/layers_case.hpp"

using namespace phaze;

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::size_t kChips = 6;
constexpr SearchLimits kSearch{100'000, kInfinite, nullptr, nullptr};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The makespan of a graph on a chip.
double makespan_s(const ChipLayers& l, std::size_t chip, std::size_t graph) {
  const std::size_t first = at(l.op_ptr[graph]);
  const std::size_t count = at(l.op_ptr[graph + 1]) - first;
  const std::size_t ops = l.types.size();
  std::vector<double> one_s, all_s;
  double sum_s = 0.0;
  for (std::size_t i = first; i < first + count; ++i) {
    const double extra_s = l.network_s[l.network_s.size() > ops ? chip * ops + i : i];
    one_s.push_back(l.cost(l.one_s, chip, i) + extra_s);
    all_s.push_back(l.cost(l.time_s, chip, i) + extra_s);
    sum_s += all_s.back();
  }
  if (count == 0 || l.in_order[graph] != 0) return sum_s;
  const std::span<const std::int32_t> from(l.edge_from), to(l.edge_to), cores(l.cores);
  const std::size_t edge = at(l.edge_ptr[graph]);
  const std::size_t edges = at(l.edge_ptr[graph + 1]) - edge;
  const GraphOnChips given{std::span(l.types).subspan(first, count),
                           from.subspan(edge, edges),
                           to.subspan(edge, edges),
                           one_s,
                           all_s,
                           cores.subspan(3 * chip, 3),
                           ScheduleRule::kExclusive};
  double makespan = 0.0, bound = 0.0;
  std::int32_t proved = 0, status = 0;
  std::int64_t nodes = 0;
  std::vector<double> start_s(count);
  std::vector<std::int32_t> mode(count);
  solve_on_chips(
      given, kSearch,
      {{&makespan, 1}, {&bound, 1}, {&proved, 1}, {&nodes, 1}, {&status, 1}, start_s, mode}, 1);
  CHECK(status == 0 && proved != 0);
  return makespan;
}

// The times of the layers on a chip, by the formulas of docs/search.md.
TimesRow times_of(const ChipLayers& l, std::size_t chip) {
  TimesRow row(static_cast<int>(kKinds), static_cast<int>(l.variants));
  const std::size_t ops = l.types.size();
  for (std::size_t k = 0; k < kKinds; ++k) {
    const double forward_s = makespan_s(l, chip, 2 * k);
    const double plain_s = makespan_s(l, chip, 2 * k + 1);
    const std::size_t begin = at(l.op_ptr[2 * k]), middle = at(l.op_ptr[2 * k + 1]);
    const auto seconds = [&](std::size_t i) {
      return l.cost(l.time_s, chip, i) + l.network_s[l.network_s.size() > ops ? chip * ops + i : i];
    };
    for (std::size_t v = 0; v < l.variants; ++v) {
      double again_s = 0.0, again_j = 0.0, own_j = 0.0;
      bool all = true;
      for (std::size_t i = begin; i < middle; ++i) {
        all = all && l.again[v * ops + i] != 0;
        if (l.again[v * ops + i] == 0) continue;
        again_s += seconds(i);
        again_j += l.cost(l.joules, chip, i);
      }
      for (std::size_t i = middle; i < at(l.op_ptr[2 * k + 2]); ++i) {
        own_j += l.cost(l.joules, chip, i);
      }
      row.backward_j()[v * kKinds + k] = own_j + again_j;
      row.backward_s()[v * kKinds + k] =
          std::max(plain_s + (all ? forward_s : again_s), l.host_again_s[v * kKinds + k]) +
          l.wait_s[kKinds + k];
    }
    double late_s = 0.0, total_s = 0.0;
    for (std::size_t i = middle; i < at(l.op_ptr[2 * k + 2]); ++i) {
      total_s += seconds(i);
      if (l.late[i] != 0) late_s += seconds(i);
    }
    for (std::size_t i = begin; i < middle; ++i) row.forward_j()[k] += l.cost(l.joules, chip, i);
    row.forward_s()[k] = std::max(forward_s, l.host_s[k]) + l.wait_s[k];
    row.plain_s()[k] = std::max(plain_s, l.host_s[kKinds + k]) + l.wait_s[kKinds + k];
    row.weight_grad_s()[k] = row.plain_s()[k] * (late_s / total_s);
    row.ahead_s()[k] = std::max(plain_s - l.host_s[kKinds + k], 0.0);
    row.step_s()[k] =
        std::max(l.step_s[chip * kKinds + k], l.launching_s[chip * kKinds + k] - row.ahead_s()[k]);
  }
  row.hbm_bytes_per_s = l.rate[chip];
  row.static_w = l.static_w[chip];
  row.limit_w = l.limit_w[chip];
  row.proven = true;
  return row;
}

bool same(TimesRow a, TimesRow b) {
  const auto equal = [](std::span<double> x, std::span<double> y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end());
  };
  return equal(a.forward_s(), b.forward_s()) && equal(a.plain_s(), b.plain_s()) &&
         equal(a.backward_s(), b.backward_s()) && equal(a.weight_grad_s(), b.weight_grad_s()) &&
         equal(a.step_s(), b.step_s()) && equal(a.ahead_s(), b.ahead_s()) &&
         equal(a.forward_j(), b.forward_j()) && equal(a.backward_j(), b.backward_j()) &&
         a.hbm_bytes_per_s == b.hbm_bytes_per_s && a.static_w == b.static_w &&
         a.limit_w == b.limit_w && a.proven == b.proven;
}

bool no_longer(TimesRow least, TimesRow times) {
  const auto below = [](std::span<double> x, std::span<double> y) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i] > y[i] * (1.0 + 1e-12)) return false;
    }
    return true;
  };
  return below(least.forward_s(), times.forward_s()) && below(least.plain_s(), times.plain_s()) &&
         below(least.backward_s(), times.backward_s());
}

int one_case(unsigned seed) {
  std::mt19937 random(seed);
  const bool planned = seed % 3 == 0;
  const TwoStrategies c(random, planned);
  ChipLayers layers[2];
  std::vector<const LayersOnChips*> cores;
  for (ChipLayers& own : layers) {
    std::mt19937 drawn(2 * seed + (&own == layers ? 0 : seed % 2));
    draw_layers(own, drawn, kChips, seed % 2 == 0);
    if (seed % 2 == 0 && &own != layers) {  // the same layers, a little faster
      for (auto* seconds : {own.time_s, own.one_s}) {
        for (int t = 0; t < 2; ++t) {
          for (double& each_s : seconds[t]) each_s *= 0.98;
        }
      }
    }
    CHECK(own.core.build(own.graphs(), own.costs()) == Status::kOk);
    cores.push_back(&own.core);
  }
  const std::vector<std::int64_t> largest(kChips, 1);
  std::vector<double> below_s(2 * kChips, kInfinite);
  below_s[1] = -kInfinite;  // no plan of the first chip with the larger limit is of interest
  const std::vector<std::int64_t> limits = [&] {
    std::vector<std::int64_t> all = largest;
    all[0] = 0;
    return all;
  }();
  std::vector<PlacedPlan> plans[2];
  std::vector<double> joules[2];
  for (int many = 0; many < 2; ++many) {
    const ChipSearch asked{limits, below_s, planned, kSearch, 1 + 3 * many};
    plans[many].resize(2 * kChips);
    joules[many].resize(2 * kChips);
    std::vector<TimesRow> rows(2 * kChips, TimesRow(0, 0));
    CHECK(best_on_chips(c.space, cores, asked, plans[many], rows, joules[many]) == Status::kOk);
  }
  int ruled_out = 0;
  for (std::size_t chip = 0; chip < kChips; ++chip) {
    PlacedPlan best[2]{{kInfinite, 0.0, -1, {}}, {kInfinite, 0.0, -1, {}}};
    for (std::size_t s = 0; s < 2; ++s) {
      const LayersOnChips& own = layers[s].core;
      const TimesRow expected = times_of(layers[s], chip);
      TimesRow times(3, 2), least(3, 2), mapped(3, 2), root(3, 2);
      own.add_joules(chip, &times);
      CHECK(own.schedule(chip, kSearch, &times, &least) == Status::kOk);
      CHECK(same(times, expected) && same(least, expected));
      own.map(chip, &mapped);
      CHECK(own.bound(chip, &root) == Status::kOk);
      CHECK(no_longer(mapped, expected) && no_longer(root, expected));
      for (const std::size_t limit : {std::size_t{0}, std::size_t{1}}) {
        const auto strategy = static_cast<std::int32_t>(s);
        const PlacedPlan plan =
            c.space.best_of_strategy(strategy, times.times(), times.times(), limit, kInfinite);
        for (const double share : {0.9, 0.999, 1.001}) {
          const double limit_s = plan.time_s * share;
          double least_s = 0.0;
          const StepQuery query{&c.space, strategy, limit};
          CHECK(own.rule_out(chip, query, limit_s, planned, kSearch, &least, &least_s) ==
                Status::kOk);
          CHECK(least_s <= plan.time_s * (1.0 + 1e-9) && no_longer(least, expected));
          ruled_out += plan.time_s < kInfinite && least_s > limit_s;
        }
        if (plan.layout < 0 || below_s[2 * chip + limit] < 0.0) continue;
        if (best[limit].layout < 0 || c.space.before(plan, best[limit])) best[limit] = plan;
      }
    }
    for (std::size_t limit = 0; limit < 2; ++limit) {
      for (int many = 0; many < 2; ++many) {
        const PlacedPlan& found = plans[many][2 * chip + limit];
        CHECK(found.time_s == best[limit].time_s && found.layout == best[limit].layout);
        CHECK(found.partition.cuts == best[limit].partition.cuts);
        CHECK(joules[many][2 * chip + limit] == joules[0][2 * chip + limit]);
        CHECK((joules[many][2 * chip + limit] > 0.0) == (found.layout >= 0));
      }
    }
  }
  return ruled_out;
}

void refuses_other_sizes() {
  std::mt19937 random(1);
  const TwoStrategies c(random, true);
  ChipLayers layers;
  draw_layers(layers, random, kChips, false);
  CHECK(layers.core.build(layers.graphs(), layers.costs()) == Status::kOk);
  const std::vector<const LayersOnChips*> one{&layers.core}, two{&layers.core, &layers.core};
  const std::vector<std::int64_t> limits(kChips, 1), none(kChips, 2);
  const std::vector<double> below_s(2 * kChips, kInfinite);
  std::vector<PlacedPlan> plans(2 * kChips);
  std::vector<TimesRow> rows(2 * kChips, TimesRow(0, 0));
  std::vector<double> joules(2 * kChips);
  const auto status = [&](std::span<const LayersOnChips* const> given,
                          std::span<const std::int64_t> own) {
    return best_on_chips(c.space, given, {own, below_s, true, kSearch, 1}, plans, rows, joules);
  };
  CHECK(status(two, limits) == Status::kOk);
  CHECK(status(one, limits) == Status::kBadShape);
  CHECK(status(two, none) == Status::kBadShape);
  CHECK(status({}, limits) == Status::kBadShape);
  LayersOnChips other;
  for (const auto& spoil :
       {+[](ChipLayers& l) { l.late.pop_back(); }, +[](ChipLayers& l) { l.cores.pop_back(); },
        +[](ChipLayers& l) { l.column[0] = 10; }, +[](ChipLayers& l) { l.table[0] = 2; },
        +[](ChipLayers& l) { l.rows[0][0] = 3; }, +[](ChipLayers& l) { l.op_ptr[1] = 99; }}) {
    ChipLayers bad;
    std::mt19937 again(2);
    draw_layers(bad, again, kChips, false);
    CHECK(other.build(bad.graphs(), bad.costs()) == Status::kOk);
    spoil(bad);
    CHECK(other.build(bad.graphs(), bad.costs()) != Status::kOk);
  }
}

}  // namespace

int main() {
  int ruled_out = 0;
  for (unsigned seed = 0; seed < 60; ++seed) ruled_out += one_case(seed);
  CHECK(ruled_out > 500);
  refuses_other_sizes();
  return phaze::test::report("best_on_chips");
}
