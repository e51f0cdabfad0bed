// Small random models with layouts of several schedules, for tests of the plan kernel.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "phaze/plan.hpp"

namespace phaze {

// Seconds and joules of three kinds of layers.
struct LayerTimes {
  std::vector<double> forward{0.1, 1.0, 0.4}, plain{0.2, 2.0, 0.7}, weight{0.05, 0.9, 0.3};
  std::vector<double> backward, joules, joules_back;

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
  void scale(double factor) {
    for (auto* own : {&forward, &plain, &weight, &backward}) {
      for (double& each_s : *own) each_s *= factor;
    }
  }
};

struct Case : LayerTimes {
  std::vector<std::int32_t> order;
  std::vector<std::int32_t> from, to;
  std::vector<StrategyRecord> strategies;
  std::vector<LayerKindRecord> sizes;
  std::vector<LayoutRecord> layouts;
  FabricRecord fabric{};
  PlanSpace space;
  double memory_limit = 0.0;
};

inline FabricRecord two_tiers() {
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

inline void build(Case& c, std::mt19937& random, int layouts = 12, int most_blocks = 6) {
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
  c.strategies = {{1, 1, 1, 1, 1, 1e6, 0.0, draw(0, 1) * 2e5, 1e6, 2, 0}};
  LayerKindRecord embedding{3e5, 0.0, {1e5, 1e5}, {0.0, 0.0}, 0.0, 0.0, 0.0, 0.0, 1, 0};
  LayerKindRecord block{1e6, 0.0, {4e6, 5e5}, {0.0, 3.5e6}, 0.0, 0.0, 0.0, 0.0, 0, 0};
  LayerKindRecord head{3e5, 0.0, {0.0, 0.0}, {0.0, 0.0}, 2e6, 0.0, 0.0, 0.0, 1, 0};
  c.sizes = {embedding, block, head};
  const int codes[] = {0, 2, 3};
  for (int k = 0; k < layouts; ++k) {
    LayoutRecord l{};
    l.schedule = codes[draw(0, 2)];
    l.pp = draw(1, std::min(blocks, 4));
    l.vpp = 1;
    l.zero = draw(0, 3);
    l.rank_order = draw(0, 1);
    l.dp = draw(1, 2);
    l.micro_batches = draw(1, 3) * l.pp;
    if (l.schedule == 2) {
      l.vpp = 2;
      if (blocks % (2 * l.pp) != 0) continue;
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
  c.memory_limit = 1e6 * draw(15, 120);
}

// Adds layouts whose stages have several chunks, or whose layers are assigned to stages, and a
// third variant between the two of `build`.
inline void add_chunks(Case& c, std::mt19937& random, int layouts) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const auto blocks = static_cast<int>(c.order.size()) - 2;
  const int codes[] = {1, 2, 4, 5, 6, 7};
  for (int k = 0; k < layouts; ++k) {
    LayoutRecord l{};
    l.schedule = codes[draw(0, 5)];
    l.vpp = l.schedule == 2 ? draw(2, 3) : l.schedule >= 5 ? 2 : 1;
    l.pp = std::min(draw(1, 4), std::max(1, blocks / l.vpp));
    if (l.schedule == 6) l.pp = 2 * draw(1, 2);
    l.zero = draw(0, 3);
    l.dp = draw(1, 2);
    l.micro_batches = 2 * draw(1, 3) * l.pp;
    c.layouts.push_back(l);
  }
  c.strategies[0].variants = 3;
  for (LayerKindRecord& kind : c.sizes) {
    kind.stash_bytes[2] = 0.5 * (kind.stash_bytes[0] + kind.stash_bytes[1]);
    kind.live_bytes[2] = 0.5 * kind.live_bytes[1];
  }
  for (std::size_t k = 0; k < 3; ++k) {
    c.backward.push_back(c.plain[k] + (k == 1 ? 0.1 * draw(1, 6) * c.forward[k] : 0.0));
    c.joules_back.push_back(2.0);
  }
}

// The software divides layers over stages by work, with a head of up to ten blocks.
inline void divide_by_work(Case& c, std::mt19937& random) {
  const double blocks = std::uniform_int_distribution<int>(0, 20)(random) / 2.0;
  c.sizes[0].stage_work = 0.0;
  c.sizes[1].stage_work = 1.0;
  c.sizes[2].stage_work = blocks;
  c.forward[2] = blocks * (c.forward[1] + c.plain[1]);
}

// The same problem with its recompute variants in another order.
inline void permute_variants(Case& c, const std::vector<std::size_t>& order) {
  const std::vector<LayerKindRecord> sizes = c.sizes;
  const std::vector<double> backward = c.backward;
  for (std::size_t v = 0; v < order.size(); ++v) {
    for (std::size_t k = 0; k < 3; ++k) {
      c.sizes[k].stash_bytes[v] = sizes[k].stash_bytes[order[v]];
      c.sizes[k].live_bytes[v] = sizes[k].live_bytes[order[v]];
      c.backward[3 * v + k] = backward[3 * order[v] + k];
    }
  }
}

inline constexpr TrainingRecord kTraining{2.0,  4.0,  12.0, 0.03, 1e6, 0.2,
                                          1e-9, 1e-8, 2.0,  0.0,  0,   2};

inline Status built(Case& c, bool some_blocks = false) {
  const PlanProblem problem{
      c.fabric, c.fabric.devices, kTraining, 3,         c.order,    c.from, c.to, {},
      {},       c.strategies,     c.sizes,   c.layouts, some_blocks};
  const std::vector<double> memory_limits{c.memory_limit};
  const std::vector<std::uint8_t> fits(c.layouts.size(), 1);
  return c.space.build(problem, memory_limits, fits);
}

// Whether each layout fits the case's memory limit, and none of memory.
inline std::vector<std::uint8_t> layouts_that_fit(const Case& c, Status* status) {
  std::vector<LayerKindRecord> sizes = c.sizes;
  sizes.push_back(sizes.back());
  sizes.back().parameters += c.strategies[0].copied_parameters;
  const std::vector<double> limits{c.memory_limit, 0.0};
  std::vector<std::uint8_t> fits(limits.size() * c.layouts.size(), 2);
  *status = layouts_fit({kTraining, c.order, c.strategies, sizes, c.layouts}, limits, fits);
  return fits;
}

}  // namespace phaze
