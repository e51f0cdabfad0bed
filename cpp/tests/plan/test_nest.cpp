// NEST's problem against every partition and replica count, on small random problems, and invalid
// inputs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "phaze/nest.hpp"

namespace {

using namespace phaze;
using phaze::test::Numbers;

// A whole number from `least` to `most`.
std::int32_t between(Numbers& numbers, std::int32_t least, std::int32_t most) {
  return least + numbers.below(most - least + 1);
}

struct Drawn {
  std::vector<std::int64_t> size;
  std::vector<double> rate, latency;
  std::vector<double> forward, backward, weights, kept;
  std::vector<std::int32_t> from, to;
  std::vector<double> bytes;
  std::int64_t stage_devices;
  NestRules rules;

  [[nodiscard]] NestNetwork network() const { return {size, rate, latency}; }
  [[nodiscard]] NestLayers layers() const {
    return {stage_devices, forward, backward, weights, kept, from, to, bytes};
  }
};

Drawn draw(Numbers& numbers) {
  Drawn d;
  for (int level = 0; level < 3; ++level) {
    d.size.push_back(between(numbers, 1, 3));
    d.rate.push_back(static_cast<double>(between(numbers, 1, 20)));
    d.latency.push_back(static_cast<double>(between(numbers, 0, 4)) / 4.0);
  }
  const auto n = static_cast<std::int32_t>(between(numbers, 1, 6));
  for (std::int32_t i = 0; i < n; ++i) {
    d.forward.push_back(static_cast<double>(between(numbers, 0, 12)));
    d.backward.push_back(static_cast<double>(between(numbers, 0, 12)));
    d.weights.push_back(static_cast<double>(between(numbers, 0, 9)));
    d.kept.push_back(static_cast<double>(between(numbers, 0, 9)));
    for (std::int32_t j = i + 1; j < n; ++j) {
      if (j > i + 1 && between(numbers, 0, 3) > 0) continue;
      d.from.push_back(i);
      d.to.push_back(j);
      d.bytes.push_back(static_cast<double>(between(numbers, 0, 40)));
    }
  }
  d.stage_devices = between(numbers, 1, 3);
  d.rules = {static_cast<double>(between(numbers, 5, 120)), between(numbers, 0, 1) == 0 ? 2.0 : 8.0,
             between(numbers, 1, 12), between(numbers, 0, 1) == 0, between(numbers, 0, 2) == 0};
  return d;
}

double message(const Drawn& d, double bytes, int tier) {
  const double rate = *std::min_element(d.rate.begin(), d.rate.begin() + tier + 1);
  const double once = bytes / rate + d.latency[static_cast<std::size_t>(tier)];
  return tier == 0 ? once : 2.0 * once;
}

// Layers begin up to end, with `after` stages after them, in the replica that starts at `base`.
double load_of(const Drawn& d, std::int32_t begin, std::int32_t end, int after, std::int64_t base) {
  const std::int64_t device = base + after * d.stage_devices;
  const int in = nest_tier(d.network(), device, device + d.stage_devices);
  const int out = after > 0 ? nest_tier(d.network(), device - d.stage_devices, device) : 0;
  double forward = 0.0;
  double sum = 0.0;
  for (std::int32_t v = begin; v < end; ++v) {
    const auto at = static_cast<std::size_t>(v);
    for (std::size_t e = 0; e < d.to.size(); ++e) {
      if (d.to[e] == v && d.from[e] < begin)
        forward = std::max(forward, message(d, d.bytes[e], in));
    }
    forward += d.forward[at];
    sum += d.backward[at];
  }
  double backward = d.rules.recompute && after > 0 ? sum : 0.0;
  for (std::int32_t v = end - 1; v >= begin; --v) {
    for (std::size_t e = 0; e < d.to.size(); ++e) {
      if (d.from[e] == v && d.to[e] >= end)
        backward = std::max(backward, message(d, d.bytes[e], out));
    }
    backward += d.backward[static_cast<std::size_t>(v)];
  }
  return forward + backward;
}

double bytes_of(const Drawn& d, std::int32_t begin, std::int32_t end, int after) {
  double weights = 0.0;
  double kept = 0.0;
  double entering = 0.0;
  for (std::int32_t v = begin; v < end; ++v) {
    weights += d.weights[static_cast<std::size_t>(v)];
    kept += d.kept[static_cast<std::size_t>(v)];
  }
  for (std::size_t e = 0; e < d.to.size(); ++e) {
    if (d.from[e] < begin && d.to[e] >= begin && d.to[e] < end) entering += d.bytes[e];
  }
  return d.rules.states * weights + kept + after * (d.rules.recompute ? entering : kept);
}

// Time and bytes of a plan; `begins` has the end of the layers as its last entry.
std::pair<double, double> priced(const Drawn& d, const std::vector<std::int32_t>& begins,
                                 std::int64_t replicas) {
  const int stages = static_cast<int>(begins.size()) - 1;
  const std::int64_t apart = stages * d.stage_devices;
  double load = 0.0;
  double bytes = 0.0;
  for (int q = 0; q < stages; ++q) {
    const auto at = static_cast<std::size_t>(q);
    const int after = stages - 1 - q;
    bytes = std::max(bytes, bytes_of(d, begins[at], begins[at + 1], after));
    for (std::int64_t r = 0; r < (d.rules.all_replicas ? replicas : 1); ++r) {
      load = std::max(load, load_of(d, begins[at], begins[at + 1], after, r * apart));
    }
  }
  double weights = 0.0;
  for (std::int32_t v = 0; v < begins[1]; ++v) weights += d.weights[static_cast<std::size_t>(v)];
  const std::int64_t rounds = (d.rules.micro_batches + replicas - 1) / replicas + stages - 1;
  return {load * static_cast<double>(rounds) + nest_sync(d.network(), replicas, weights, apart),
          bytes};
}

void test_enumeration() {
  Numbers numbers(17);
  int feasible = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    const Drawn d = draw(numbers);
    const auto n = static_cast<std::int32_t>(d.forward.size());
    const std::int64_t devices = d.size[0] * d.size[1] * d.size[2];
    double least = std::numeric_limits<double>::infinity();
    double least_bytes = std::numeric_limits<double>::infinity();
    for (unsigned cuts = 0; cuts < 1U << static_cast<unsigned>(n - 1); ++cuts) {
      std::vector<std::int32_t> begins{0};
      for (std::int32_t v = 1; v < n; ++v) {
        if ((cuts >> static_cast<unsigned>(v - 1) & 1U) != 0) begins.push_back(v);
      }
      begins.push_back(n);
      const std::int64_t apart = (static_cast<std::int64_t>(begins.size()) - 1) * d.stage_devices;
      for (std::int64_t r = 1; r <= d.rules.micro_batches && r * apart <= devices; ++r) {
        const auto [time, bytes] = priced(d, begins, r);
        least_bytes = std::min(least_bytes, bytes);
        if (bytes <= d.rules.memory_bytes) least = std::min(least, time);
      }
    }
    NestPlan plan;
    const double none = std::numeric_limits<double>::infinity();
    CHECK(place_nest(d.network(), d.layers(), d.rules, none, &plan) == Status::kOk);
    NestNeed need{};
    CHECK(least_nest_memory(d.network(), d.layers(), d.rules, &need) == Status::kOk);
    CHECK(need.bytes == least_bytes);
    CHECK(plan.begins.empty() == std::isinf(least));
    if (plan.begins.empty()) continue;
    ++feasible;
    CHECK_CLOSE(plan.time_s, least, 1e-12);
    std::vector<std::int32_t> begins = plan.begins;
    begins.push_back(n);
    CHECK_CLOSE(priced(d, begins, plan.replicas).first, plan.time_s, 1e-12);
    CHECK(priced(d, begins, plan.replicas).second <= d.rules.memory_bytes);
    NestPlan none_better;
    CHECK(place_nest(d.network(), d.layers(), d.rules, least * (1 - 1e-9), &none_better) ==
          Status::kOk);
    CHECK(none_better.begins.empty());
  }
  CHECK(feasible > 1500);
}

void test_by_hand() {
  const Drawn d{{8, 4, 4}, {100, 10, 20}, {1, 2, 3}, {}, {}, {}, {}, {}, {}, {}, 1, {}};
  CHECK(nest_tier(d.network(), 0, 7) == 0);
  CHECK(nest_tier(d.network(), 7, 8) == 1);
  CHECK(nest_tier(d.network(), 31, 32) == 2);
  CHECK(nest_sync(d.network(), 1, 1000, 4) == 0.0);
  // Two rounds on the lowest level: 1 + 10, then 1 + 5.
  CHECK_CLOSE(nest_sync(d.network(), 4, 1000, 1), 17.0, 1e-15);
  // Level 1: 17 + 2 * (2 + 100).
  CHECK_CLOSE(nest_sync(d.network(), 5, 1000, 4), 221.0, 1e-15);
  // Level 2: 221 + 2 * (3 + 50), and level 1 again.
  CHECK_CLOSE(nest_sync(d.network(), 5, 1000, 8), 221.0 + 106.0 + 221.0, 1e-15);
}

// One layer on six replicas, for which the search and the answer sum the time in two orders: no
// plan takes less than the best.
void test_nothing_is_below_the_best() {
  const Drawn d{{4, 4, 4}, {16, 3, 16}, {4, 3.75, 2.5},
                {10},      {10},        {10},
                {10},      {},          {},
                {},        3,           {120.0, 8.0, 11, false, false}};
  NestPlan best;
  CHECK(place_nest(d.network(), d.layers(), d.rules, 1e300, &best) == Status::kOk);
  CHECK(best.replicas == 6);
  NestPlan below;
  CHECK(place_nest(d.network(), d.layers(), d.rules, best.time_s, &below) == Status::kOk);
  CHECK(below.begins.empty());
}

void test_refused() {
  Numbers numbers(3);
  Drawn good = draw(numbers);
  while (good.forward.size() < 3) good = draw(numbers);
  NestPlan plan;
  const auto status = [&](const Drawn& d) {
    return place_nest(d.network(), d.layers(), d.rules, 1e300, &plan);
  };
  CHECK(status(good) == Status::kOk);
  Drawn bad = good;
  bad.rate[1] = 0.0;
  CHECK(status(bad) == Status::kBadFabric);
  bad = good;
  bad.size[0] = std::int64_t{1} << 40;
  CHECK(status(bad) == Status::kBadFabric);
  bad = good;
  bad.latency.pop_back();
  CHECK(status(bad) == Status::kBadFabric);
  bad = good;
  bad.forward[0] = std::numeric_limits<double>::quiet_NaN();
  CHECK(status(bad) == Status::kNotFinite);
  bad = good;
  std::swap(bad.from[0], bad.to[0]);
  CHECK(status(bad) == Status::kBadEdge);
  bad = good;
  bad.to[0] = 100;
  CHECK(status(bad) == Status::kBadEdge);
  bad = good;
  bad.from.clear();
  bad.to.clear();
  bad.bytes.clear();
  CHECK(status(bad) == Status::kBadLayers);
  Drawn most = good;  // levels and devices that are just accepted
  most.size.assign(kMaxNestLevels, 1);
  most.rate.assign(kMaxNestLevels, 1.0);
  most.latency.assign(kMaxNestLevels, 0.0);
  most.size.back() = kMaxNestDevices;
  most.rules.all_replicas = false;
  CHECK(check_nest(most.network(), most.layers(), most.rules) == Status::kOk);
  most.size.front() = 2;
  CHECK(check_nest(most.network(), most.layers(), most.rules) == Status::kBadFabric);
  bad = good;
  bad.rules.micro_batches = 0;
  CHECK(status(bad) == Status::kBadRules);
  bad = good;
  bad.stage_devices = 0;
  CHECK(status(bad) == Status::kBadRules);
}

}  // namespace

int main() {
  test_enumeration();
  test_by_hand();
  test_nothing_is_below_the_best();
  test_refused();
  return phaze::test::report("nest");
}
