// Records with awkward numbers in some of their fields, given to the entry points of the core: each
// call ends, reads and writes nothing beside its records (the sanitizers see to that), and its
// answer is a status or a number that can be.
//
// An argument gives the seconds to go on for; by default a second or two in all.

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <memory>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "phaze/collective.hpp"
#include "phaze/layer_schedule.hpp"
#include "phaze/placement.hpp"
#include "phaze/types.hpp"
#include "placement/placement_tables.hpp"

namespace {

using namespace phaze;
using phaze::test::Numbers;
using phaze::test::Table;

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kNumbers[] = {
    0.0,   -0.0,  1.0,    -1.0,    0.5,       1e-300,     5e-324,
    1e100, 1e300, -1e300, 1.7e308, kInfinite, -kInfinite, std::numeric_limits<double>::quiet_NaN()};
constexpr std::int64_t kIntegers[] = {0,
                                      1,
                                      -1,
                                      2,
                                      3,
                                      63,
                                      64,
                                      65,
                                      std::int64_t{1} << 31,
                                      std::int64_t{1} << 40,
                                      std::int64_t{1} << 62,
                                      std::numeric_limits<std::int64_t>::max(),
                                      std::numeric_limits<std::int64_t>::min()};

double awkward(Numbers& numbers) {
  return kNumbers[numbers.below(static_cast<std::int32_t>(std::size(kNumbers)))];
}

std::int64_t awkward_integer(Numbers& numbers) {
  return kIntegers[numbers.below(static_cast<std::int32_t>(std::size(kIntegers)))];
}

void spoil(Numbers& numbers, std::vector<double>* values) {
  if (values->empty()) return;
  const auto at = static_cast<std::size_t>(numbers.below(static_cast<int>(values->size())));
  (*values)[at] = awkward(numbers);
}

FabricRecord fabric_of(Numbers& numbers) {
  FabricRecord fabric{};
  fabric.kind = numbers.below(3);
  fabric.levels = 1 + numbers.below(3);
  for (int i = 0; i < fabric.levels; ++i) {
    fabric.size[i] = 1 + numbers.below(9);
    fabric.bytes_per_s[i] = 1e9 * (1 + numbers.below(100));
    fabric.latency_s[i] = 1e-6 * numbers.below(10);
    fabric.wrap[i] = numbers.below(2);
  }
  for (int changes = numbers.below(3); changes > 0; --changes) {
    const int at = numbers.below(kMaxLevels);
    switch (numbers.below(7)) {
      case 0:
        fabric.kind = static_cast<std::int32_t>(awkward_integer(numbers));
        break;
      case 1:
        fabric.levels = static_cast<std::int32_t>(awkward_integer(numbers));
        break;
      case 2:
        fabric.devices = awkward_integer(numbers);
        break;
      case 3:
        fabric.size[at] = awkward_integer(numbers);
        break;
      case 4:
        fabric.bytes_per_s[at] = awkward(numbers);
        break;
      case 5:
        fabric.latency_s[at] = awkward(numbers);
        break;
      default:
        fabric.protocols[0] = static_cast<std::int32_t>(awkward_integer(numbers));
    }
  }
  return fabric;
}

void collectives(Numbers& numbers) {
  const FabricRecord fabric = fabric_of(numbers);
  const bool odd = numbers.below(3) == 0;
  const GroupShape shape{odd ? awkward_integer(numbers) : 1 + numbers.below(9),
                         numbers.below(4) == 0 ? awkward_integer(numbers) : 1 + numbers.below(4),
                         numbers.below(4) == 0 ? awkward_integer(numbers) : 1 + numbers.below(3),
                         numbers.below(4) == 0 ? awkward_integer(numbers) : numbers.below(40)};
  const auto op = static_cast<CollectiveOp>(numbers.below(kCollectiveOpCount));
  const double bytes = numbers.below(3) == 0 ? awkward(numbers) : 1e6 * numbers.below(1000);
  const CollectiveResult found = collective(fabric, op, bytes, shape);
  CHECK(found.status == Status::kOk ? found.time_s >= 0.0 : std::isnan(found.time_s));
  for (int each = 0; each < kAlgorithmCount; ++each) {
    collective_with(fabric, op, bytes, shape, static_cast<Algorithm>(each));
  }
  const CollectiveResult sent =
      message(fabric, bytes, awkward_integer(numbers), awkward_integer(numbers));
  CHECK(sent.status == Status::kOk ? sent.time_s >= 0.0 : std::isnan(sent.time_s));
}

void layers(Numbers& numbers) {
  const auto problem = std::make_unique<LayerProblem>();
  problem->size = 1 + numbers.below(9);
  for (int r = 0; r < kResources; ++r) problem->capacity[r] = 1 + numbers.below(3);
  for (int i = 0; i < problem->size; ++i) {
    problem->before[i] = i > 0 ? OpBits{1} << numbers.below(i) : 0;
    problem->first_mode[i] = i;
    problem->modes[i] = {1.0 + numbers.below(9), {1, 0, 0}};
  }
  problem->first_mode[problem->size] = problem->size;
  const int at = numbers.below(problem->size);
  switch (numbers.below(7)) {
    case 0:
      problem->size = static_cast<std::int32_t>(awkward_integer(numbers));
      break;
    case 1:
      problem->capacity[numbers.below(kResources)] =
          static_cast<std::int32_t>(awkward_integer(numbers));
      break;
    case 2:
      problem->before[at] = static_cast<OpBits>(awkward_integer(numbers));
      break;
    case 3:
      problem->first_mode[at] = static_cast<std::int32_t>(awkward_integer(numbers));
      break;
    case 4:
      problem->modes[at].seconds = awkward(numbers);
      break;
    case 5:
      problem->modes[at].use[numbers.below(kResources)] =
          static_cast<std::int32_t>(awkward_integer(numbers));
      break;
    default:
      break;
  }
  if (check_layer(*problem) != Status::kOk) return;
  const LayerSolution found = solve_layer(*problem, {1000, 1.0, nullptr, nullptr});
  CHECK(found.bound_s <= found.makespan_s);
}

void placements(Numbers& numbers) {
  Table table = phaze::test::random_chain(numbers, 1 + numbers.below(7));
  std::vector<double>* const columns[] = {
      &table.forward, &table.backward, &table.stash, &table.live,   &table.resident,  &table.once,
      &table.gather,  &table.sync,     &table.step,  &table.edge_s, &table.edge_bytes};
  for (int changes = numbers.below(3); changes > 0; --changes) {
    spoil(numbers, columns[numbers.below(static_cast<std::int32_t>(std::size(columns)))]);
  }
  if (!table.from.empty() && numbers.below(6) == 0) {
    table.from[0] = static_cast<std::int32_t>(awkward_integer(numbers));
  }
  PlacementLayers view = table.view();
  if (numbers.below(8) == 0) view.layers = static_cast<std::int32_t>(awkward_integer(numbers));
  if (numbers.below(8) == 0) view.variants = static_cast<std::int32_t>(awkward_integer(numbers));
  const PublishedRules rules{numbers.below(4) == 0 ? awkward(numbers) : 20.0,
                             numbers.below(4) == 0 ? awkward_integer(numbers) : 4,
                             numbers.below(4) == 0 ? awkward_integer(numbers) : 8,
                             1 + numbers.below(2),
                             numbers.below(2) == 0,
                             numbers.below(3),
                             numbers.below(3)};
  PlacementPlan best;
  if (check_placement(view) != Status::kOk) {
    CHECK(place_published(view, rules, kInfinite, &best) != Status::kOk);
    return;
  }
  if (place_published(view, rules, kInfinite, &best) == Status::kOk) CHECK(best.time_s >= 0.0);
  std::vector<PlacementPlan> plans;
  const PipelineRules pipeline{
      numbers.below(4) == 0 ? awkward(numbers) : 20.0,
      1.0,
      0.5,
      numbers.below(4) == 0 ? awkward_integer(numbers) : 1 + numbers.below(9),
      1,
      1 + numbers.below(5),
      {},
      false};
  if (place_pipeline(view, pipeline, &plans) == Status::kOk) {
    for (const PlacementPlan& plan : plans) CHECK(plan.time_s >= 0.0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.5;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const auto begin = std::chrono::steady_clock::now();
  Numbers numbers(seed);
  long cases = 0;
  double spent = 0.0;
  while (spent < seconds && phaze::test::failures() == 0) {
    for (int i = 0; i < 50; ++i, ++cases) {
      collectives(numbers);
      layers(numbers);
      placements(numbers);
    }
    spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::printf("%ld cases in %.1f s, seed %llu\n", cases, spent,
              static_cast<unsigned long long>(seed));
  return phaze::test::report("fuzz");
}
