// Random layers of two strategies on random chips, for tests of the best plans on chips.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "phaze/layers_on_chips.hpp"
#include "plan/plan_case.hpp"

namespace phaze {

inline constexpr std::size_t kKinds = 3;

// Random layers of a strategy on random chips, with the arrays of their views.
struct ChipLayers {
  static constexpr std::size_t variants = 2;
  std::vector<std::int64_t> op_ptr{0}, edge_ptr{0}, column, rows[2];
  std::vector<std::uint8_t> types, in_order, again, late;
  std::vector<double> most_at_once, host_s, host_again_s, wait_s, network_s;
  std::vector<double> time_s[2], one_s[2], joules[2], rate, static_w, limit_w, step_s, launching_s;
  std::vector<std::int32_t> edge_from, edge_to, table, cores;
  LayersOnChips core;

  LayerGraphs graphs() const {
    return {static_cast<std::int32_t>(kKinds),
            static_cast<std::int32_t>(variants),
            op_ptr,
            types,
            most_at_once,
            edge_ptr,
            edge_from,
            edge_to,
            in_order,
            again,
            late,
            host_s,
            host_again_s,
            wait_s};
  }
  LayerCosts costs() const {
    std::vector<CostColumns> tables;
    for (int t = 0; t < 2; ++t) {
      const auto columns = static_cast<std::int64_t>(time_s[t].size() / 3);
      tables.push_back({time_s[t], one_s[t], joules[t], columns, rows[t]});
    }
    return {tables, table, column, network_s, cores, rate, static_w, limit_w, step_s, launching_s};
  }
  double cost(const std::vector<double>* values, std::size_t chip, std::size_t op) const {
    const auto t = static_cast<std::size_t>(table[op]);
    const auto columns = static_cast<std::int64_t>(values[t].size() / 3);
    return values[t][static_cast<std::size_t>(rows[t][chip] * columns + column[op])];
  }
};

inline void draw_layers(ChipLayers& l, std::mt19937& random, std::size_t chips, bool own_network) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const auto real = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  for (std::size_t g = 0; g < 2 * kKinds; ++g) {
    const int size = draw(g == 0 ? 0 : 1, 6);
    for (int i = 0; i < size; ++i) {
      for (int j = i + 1; j < size; ++j) {
        if (draw(0, 2) > 0) continue;
        l.edge_from.push_back(i);
        l.edge_to.push_back(j);
      }
      l.types.push_back(static_cast<std::uint8_t>(1 << draw(0, 2)));
    }
    l.in_order.push_back(draw(0, 5) == 0 ? 1 : 0);
    l.op_ptr.push_back(std::ssize(l.types));
    l.edge_ptr.push_back(std::ssize(l.edge_from));
  }
  const std::size_t ops = l.types.size();
  l.most_at_once.assign(ops, 6.0);  // at least as many as can run at once
  for (std::size_t i = 0; i < ops; ++i) {
    l.table.push_back(draw(0, 1));
    l.column.push_back(draw(0, 9));
    l.late.push_back(static_cast<std::uint8_t>(draw(0, 1)));
  }
  for (std::size_t i = 0; i < l.variants * ops; ++i) {
    l.again.push_back(i < ops ? 0 : static_cast<std::uint8_t>(draw(0, 2) > 0));
  }
  for (int t = 0; t < 2; ++t) {
    for (int cell = 0; cell < 30; ++cell) {
      l.time_s[t].push_back(real(0.01, 0.4));
      l.one_s[t].push_back(l.time_s[t].back() * real(1.0, 3.0));
      l.joules[t].push_back(real(0.1, 2.0));
    }
    for (std::size_t c = 0; c < chips; ++c) l.rows[t].push_back(draw(0, 2));
  }
  for (std::size_t i = 0; i < (own_network ? chips : 1) * ops; ++i) {
    l.network_s.push_back(draw(0, 3) == 0 ? real(0.0, 0.1) : 0.0);
  }
  for (std::size_t k = 0; k < 2 * kKinds; ++k) {
    l.host_s.push_back(real(0.0, 0.3));
    l.wait_s.push_back(draw(0, 1) * 0.01);
  }
  for (std::size_t k = 0; k < l.variants * kKinds; ++k) {
    l.host_again_s.push_back(l.host_s[kKinds + k % kKinds] + real(0.0, 0.1));
  }
  for (std::size_t c = 0; c < chips; ++c) {
    for (const int cores : {draw(1, 4), draw(1, 4), 1}) l.cores.push_back(cores);
    l.rate.push_back(real(1e8, 1e9));
    l.static_w.push_back(real(0.5, 2.0));
    l.limit_w.push_back(draw(0, 1) == 0 ? std::numeric_limits<double>::infinity() : 50.0);
    for (std::size_t k = 0; k < kKinds; ++k) {
      l.step_s.push_back(real(0.0, 0.05));
      l.launching_s.push_back(real(0.0, 0.5));
    }
  }
}

// A space with two strategies of the same layouts, within two memory limits.
struct TwoStrategies : Case {
  std::vector<double> memory_limits;

  // `whole`: no schedule splits backward passes, as `planned` asks.
  TwoStrategies(std::mt19937& random, bool whole) {
    build(*this, random, 8, 5);
    for (LayoutRecord& l : layouts) {
      if (whole && l.schedule == 3) l.schedule = 0;
    }
    strategies.push_back(strategies[0]);
    const std::vector<LayerKindRecord> kinds = sizes;
    sizes.insert(sizes.end(), kinds.begin(), kinds.end());
    const std::size_t own = layouts.size();
    for (std::size_t k = 0; k < own; ++k) {
      layouts.push_back(layouts[k]);
      layouts.back().strategy = 1;
    }
    memory_limits = {0.6 * memory_limit, memory_limit};
    const PlanProblem problem{fabric, fabric.devices, kTraining, kKinds, order, from, to, {},
                              {},     strategies,     sizes,     layouts};
    const std::vector<std::uint8_t> fits(2 * layouts.size(), 1);
    CHECK(space.build(problem, memory_limits, fits) == Status::kOk);
  }
};

// Times and joules of the best plans of two strategies on each chip, with each memory limit.
inline std::vector<double> best_plans(const TwoStrategies& c, const ChipLayers (&layers)[2],
                                      int threads) {
  LayersOnChips cores[2];
  for (std::size_t s = 0; s < 2; ++s) {
    CHECK(cores[s].build(layers[s].graphs(), layers[s].costs()) == Status::kOk);
  }
  const LayersOnChips* const both[] = {&cores[0], &cores[1]};
  const std::size_t chips = cores[0].chips();
  const std::vector<std::int64_t> largest(chips, 1);
  const std::vector<double> below_s(2 * chips, std::numeric_limits<double>::infinity());
  std::vector<PlacedPlan> plans(2 * chips);
  std::vector<TimesRow> rows(2 * chips, TimesRow(0, 0));
  std::vector<double> found(2 * chips);
  const ChipSearch asked{largest, below_s, false, {100'000, below_s[0], nullptr, nullptr}, threads};
  CHECK(best_on_chips(c.space, both, asked, plans, rows, found) == Status::kOk);
  for (const PlacedPlan& plan : plans) found.push_back(plan.time_s);
  return found;
}

}  // namespace phaze
