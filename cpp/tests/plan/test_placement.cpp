#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "phaze/placement.hpp"
#include "plan/placement_tables.hpp"

namespace {

using namespace phaze;
using phaze::test::Numbers;
using phaze::test::Table;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Time of a chain cut after the layers of `ends`, by the published formulas; infinite if it does
// not fit.
double published(const Table& t, const PublishedRules& rules, const std::vector<int>& ends) {
  const int stages = static_cast<int>(ends.size());
  double most = 0.0;
  std::int64_t devices = 0;
  double first_sync = 0.0;
  int begin = 0;
  for (int k = 0; k < stages; ++k) {
    double forward = 0.0;
    double backward = 0.0;
    double held = 0.0;
    double stash = 0.0;
    bool wide = false;
    for (int i = begin; i < ends[static_cast<std::size_t>(k)]; ++i) {
      const auto at = static_cast<std::size_t>(i);
      forward += t.forward[at];
      backward += t.backward[at];
      held += t.resident[at] + t.once[at];
      stash += t.stash[at];
      wide = wide || t.wide[at] != 0;
      if (k == 0) first_sync += t.sync[at];
    }
    const auto entering = begin > 0 ? static_cast<std::size_t>(begin - 1) : 0;
    const int end = ends[static_cast<std::size_t>(k)];
    const double in_s = begin > 0 ? t.edge_s[entering] : 0.0;
    const double out_s = end < t.size ? t.edge_s[static_cast<std::size_t>(end - 1)] : 0.0;
    if (rules.recompute) stash = begin > 0 ? t.edge_bytes[entering] : 0.0;
    const int later = stages - k - 1;
    if (held + later * stash > rules.memory_bytes) return kInfinite;
    const double out = rules.recompute && later > 0 ? std::max(forward, out_s) : out_s;
    most = std::max(most, in_s + forward + out + backward);
    devices += wide ? rules.width : 1;
    begin = end;
  }
  double best = kInfinite;
  for (std::int64_t d = 1; d * devices <= rules.devices; ++d) {
    const auto rounds = static_cast<double>((rules.micro_batches + d - 1) / d + stages - 1);
    const auto replicas = static_cast<double>(d);
    best = std::min(best, most * rounds + first_sync * (replicas - 1.0) / replicas);
  }
  return best;
}

void test_published_chains() {
  Numbers numbers(7);
  for (int round = 0; round < 400; ++round) {
    const Table table = phaze::test::random_chain(numbers, 1 + numbers.below(8));
    const PublishedRules rules{4.0 + numbers.below(60), 1 + numbers.below(12), 1 + numbers.below(9),
                               1 + numbers.below(3), numbers.below(2) == 0};
    PlacementPlan plan;
    CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kOk);
    double best = kInfinite;
    for (int mask = 0; mask < 1 << (table.size - 1); ++mask) {
      std::vector<int> ends;
      for (int i = 0; i + 1 < table.size; ++i) {
        if ((mask >> i & 1) != 0) ends.push_back(i + 1);
      }
      ends.push_back(table.size);
      best = std::min(best, published(table, rules, ends));
    }
    if (best == kInfinite) {
      CHECK(plan.stages == 0);
    } else {
      CHECK_CLOSE(plan.time_s, best, 1e-12);
    }
  }
}

// A chain of equal layers, 1 s forward and 2 s backward each, which needs no memory and no
// messages.
Table equal_layers(int size) {
  const std::vector<double> zeros(static_cast<std::size_t>(size), 0.0);
  Table t{};
  t.size = size;
  t.forward.assign(zeros.size(), 1.0);
  t.backward.assign(zeros.size(), 2.0);
  t.stash = t.resident = t.once = t.sync = zeros;
  t.wide.assign(zeros.size(), 0);
  for (int i = 1; i < size; ++i) {
    t.from.push_back(i - 1);
    t.to.push_back(i);
  }
  t.edge_s = t.edge_bytes = std::vector<double>(zeros.size() - 1, 0.0);
  return t;
}

// Four layers on four devices, four micro-batches, gradients of the first layer 14.4 s: one stage
// takes 12 + 14.4 * 3 / 4 = 22.8 s with 4 replicas, two 18 + 7.2 with 2, four stages 7 * 3 = 21.
void test_published_by_hand() {
  Table four = equal_layers(4);
  four.sync[0] = 14.4;
  PlacementPlan plan;
  CHECK(place_published(four.view(), {1.0, 4, 4, 1, false}, kInfinite, &plan) == Status::kOk);
  CHECK(plan.time_s == 21.0 && plan.stages == 4 && plan.replicas == 1);
}

void test_malformed() {
  Numbers numbers(7);
  Table table = phaze::test::random_chain(numbers, 4);
  PlacementPlan plan;
  PublishedRules rules{100.0, 4, 4, 2, false};
  rules.devices = 0;
  CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kBadRules);
  rules.devices = 4;
  rules.micro_batches = kMostMicroBatches;
  CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kOk);
  ++rules.micro_batches;
  CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kBadRules);
  rules.micro_batches = 4;
  table.forward[1] = -1.0;
  CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kNotFinite);
  table.forward[1] = 1.0;
  table.to[0] = 0;
  CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kBadEdge);
  table.to[0] = 9;
  CHECK(place_published(table.view(), rules, kInfinite, &plan) == Status::kBadEdge);
  // Forty layers without edges have 2^40 cuts.
  Table loose = phaze::test::random_chain(numbers, 40);
  loose.from.clear();
  loose.to.clear();
  loose.edge_s.clear();
  loose.edge_bytes.clear();
  CHECK(place_published(loose.view(), rules, kInfinite, &plan) == Status::kTooManyCuts);
}

}  // namespace

int main() {
  test_published_chains();
  test_published_by_hand();
  test_malformed();
  return phaze::test::report("placement");
}
