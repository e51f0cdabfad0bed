// Refuses every allocation of every batch function in turn: the function throws std::bad_alloc or
// returns the right answer, and its objects remain usable. A wrong `noexcept` would terminate the
// program here.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "check.hpp"
#include "cost/chips.hpp"
#include "numbers.hpp"
#include "phaze/chip_grid.hpp"
#include "phaze/collective.hpp"
#include "phaze/layer_batch.hpp"
#include "phaze/nest.hpp"
#include "phaze/op_cost.hpp"
#include "phaze/parallel.hpp"
#include "phaze/placement.hpp"
#include "plan/layers_case.hpp"
#include "plan/placement_tables.hpp"
#include "wafer/mapping_chain.hpp"

namespace {

enum class Refuse { kNothing, kOne, kAllAfter };
std::atomic<Refuse> refuse = Refuse::kNothing;
std::atomic<std::int64_t> until_refused = 0;

bool refused() {
  if (refuse == Refuse::kNothing) return false;
  const std::int64_t left = until_refused.fetch_sub(1);
  return refuse == Refuse::kOne ? left == 0 : left <= 0;
}

void* allocated(std::size_t size) { return refused() ? nullptr : std::malloc(size > 0 ? size : 1); }

}  // namespace

void* operator new(std::size_t size) {
  if (void* memory = allocated(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocated(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace {

using namespace phaze;
using phaze::test::Numbers;

// The allocation to refuse in the nth try: the first ones consecutively, then with growing steps.
std::int64_t nth_refused(std::int64_t tried) {
  return tried < 64 ? tried : 64 + (tried - 64) * (tried - 64) / 4;
}

// Runs `call` with allocations refused; returns whether it threw std::bad_alloc.
template <typename Call>
bool runs_out(Refuse what, std::int64_t nth, const Call& call) {
  until_refused = nth;
  refuse = what;
  bool thrown = false;
  try {
    call();
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  refuse = Refuse::kNothing;
  return thrown;
}

// Calls with one allocation refused, then with all from one on, until none is left to refuse. A
// call that does not throw must return the answer of an undisturbed one.
template <typename Call>
void survives(const char* name, const Call& call) {
  const double answer = call();
  for (const Refuse what : {Refuse::kOne, Refuse::kAllAfter}) {
    std::int64_t tried = 0;
    for (bool more = true; more; ++tried) {
      double found = 0.0;
      const bool thrown = runs_out(what, nth_refused(tried), [&] { found = call(); });
      more = until_refused < 0;
      CHECK(thrown || found == answer);
      CHECK(!thrown || more);
    }
    CHECK(tried > 1);  // something was refused
  }
  const double afterwards = call();
  if (afterwards != answer) std::printf("%s: %g, then %g\n", name, answer, afterwards);
  CHECK(afterwards == answer);
}

struct Layers {
  std::vector<std::int64_t> op_ptr{0}, mode_ptr{0}, edge_ptr{0};
  std::vector<std::uint8_t> types;
  std::vector<std::int32_t> mode_cores, edge_from, edge_to, cores;
  std::vector<double> mode_s;

  void add(Numbers& numbers, int size) {
    for (int i = 0; i < size; ++i) {
      types.push_back(static_cast<std::uint8_t>(1 << numbers.below(kResources)));
      const double seconds = 1.0 + numbers.below(50);
      mode_cores.insert(mode_cores.end(), {1, 0});
      mode_s.insert(mode_s.end(), {seconds, seconds / (1 + numbers.below(3))});
      mode_ptr.push_back(static_cast<std::int64_t>(mode_s.size()));
      for (int b = 0; b < i; ++b) {
        if (numbers.below(4) != 0) continue;
        edge_from.push_back(b);
        edge_to.push_back(i);
      }
    }
    cores.insert(cores.end(), {3, 2, 1});
    op_ptr.push_back(static_cast<std::int64_t>(types.size()));
    edge_ptr.push_back(static_cast<std::int64_t>(edge_from.size()));
  }
  LayerBatch view() const {
    return {op_ptr,   types,     mode_ptr, mode_cores, mode_s,
            edge_ptr, edge_from, edge_to,  cores,      ScheduleRule::kOverlap};
  }
};

void layers_survive() {
  Numbers numbers(5);
  Layers layers;
  for (int b = 0; b < 40; ++b) layers.add(numbers, 9);
  const std::size_t count = layers.op_ptr.size() - 1;
  std::vector<double> makespan(count), bound(count), start(layers.types.size());
  std::vector<std::int32_t> proved(count), status(count), mode(layers.types.size());
  std::vector<std::int64_t> nodes(count);
  const SearchLimits limits{300, std::numeric_limits<double>::infinity(), nullptr, nullptr};
  for (const int threads : {1, 2, 3}) {
    survives("layers", [&] {
      solve_layers(layers.view(), limits, Terms::kGiven,
                   {makespan, bound, proved, nodes, status, start, mode}, threads);
      double sum = 0.0;
      for (const double value : makespan) sum += value;
      return sum;
    });
  }
}

void best_plans_survive() {
  std::mt19937 random(4);
  const TwoStrategies c(random, false);
  ChipLayers layers[2];
  for (ChipLayers& own : layers) draw_layers(own, random, 6, false);
  for (const int threads : {1, 2}) {
    survives("best plans", [&] {
      double sum = 0.0;
      for (const double value : best_plans(c, layers, threads)) {
        if (value < std::numeric_limits<double>::infinity()) sum += value;
      }
      return sum;
    });
  }
}

void placements_survive() {
  Numbers numbers(7);
  std::vector<test::Table> tables;
  for (int i = 0; i < 6; ++i) {
    tables.push_back(test::random_chain(numbers, 8));
    if (i % 2 == 0) test::branch(numbers, &tables.back());
  }
  for (const int threads : {1, 2}) {
    survives("placements", [&] {
      std::vector<double> times(tables.size(), 0.0);
      parallel_for(tables.size(), threads, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
          PlacementPlan best;
          place_published(tables[i].view(), {60.0, 24, 16, 2, i % 2 == 0}, 1e300, &best);
          times[i] = best.stages;
        }
      });
      double sum = 0.0;
      for (const double value : times) sum += value;
      return sum;
    });
  }
}

void nests_survive() {
  const std::vector<std::int64_t> size{2, 2, 4};
  const std::vector<double> rates{8.0, 1.0, 2.0};
  const std::vector<double> latencies{0.1, 0.2, 0.3};
  const std::vector<double> values{3.0, 1.0, 2.0, 2.0, 5.0};
  const std::vector<std::int32_t> from{0, 1, 2, 3, 0};
  const std::vector<std::int32_t> to{1, 2, 3, 4, 4};
  const NestNetwork network{size, rates, latencies};
  const NestLayers layers{1, values, values, values, values, from, to, values};
  for (const bool all : {false, true}) {
    survives("placements on tiers", [&] {
      const NestRules rules{20.0, 2.0, 8, true, all};
      NestPlan plan;
      NestNeed need{};
      place_nest(network, layers, rules, 1e300, &plan);
      least_nest_memory(network, layers, rules, &need);
      return plan.time_s + need.bytes;
    });
  }
}

void costs_survive() {
  const std::vector<ChipRecord> chips(600, test::tpu());
  std::vector<OperatorRecord> ops(3);
  for (OperatorRecord& op : ops) op.b = op.m = op.k = op.n = 64;
  const std::vector<TuningRecord> tunings(1, test::neutral());
  const std::vector<std::int32_t> tuning_of(chips.size(), 0);
  const std::vector<EnergyTable> energy(chips.size());
  std::vector<double> seconds(chips.size() * ops.size());
  const ChipBatch batch{chips, tuning_of, tunings, {2.0, 2.0, 4.0, 1.0}};
  FabricRecord fabric{};
  fabric.levels = 1;
  fabric.bytes_per_s[0] = 1e9;
  const std::size_t rows = 20000;
  const std::vector<std::int32_t> which(rows, 0);
  const std::vector<std::uint8_t> op(rows, 0);
  const std::vector<double> bytes(rows, 1e6);
  const std::vector<std::int64_t> ranks(rows, 8), stride(rows, 1);
  std::vector<double> time_s(rows);
  std::vector<std::uint8_t> algorithm(rows), status(rows);
  for (const int threads : {1, 2}) {
    survives("costs", [&] {
      op_bound_batch(ops, batch, Cores::kAll, seconds, threads);
      op_time_batch(ops, batch, Cores::kAll, seconds, threads);
      op_figures_batch(ops, batch, energy, {seconds, seconds, seconds, seconds}, threads);
      return 1.0;
    });
    survives("collectives", [&] {
      collective_batch({{&fabric, 1}, which, op, bytes, ranks, stride}, {time_s, algorithm, status},
                       threads);
      return time_s.front() + time_s.back();
    });
  }
}

void mappings_survive() {
  const test::Owned made = test::chain_of(4, {{0, 2, 1}, {1, 3, 1}}, 31);
  survives("new mapping", [&] {
    Mapping mapping(made.problem());
    std::vector<OpMapping> op_mappings;
    for (int op = 0; op < mapping.ops(); ++op) op_mappings.push_back(mapping.choices(op)[0]);
    mapping.assign(op_mappings);
    return descend(mapping, 1).score.time_s + Relaxation(mapping).bound(0.5, 0.25, 1e-3).time_s;
  });
  // A mapping that survives: a call that ran out of memory leaves it intact.
  Mapping mapping(made.problem());
  Relaxation relaxation(mapping);
  std::vector<OpMapping> op_mappings;
  for (int op = 0; op < mapping.ops(); ++op) op_mappings.push_back(mapping.choices(op)[0]);
  survives("mapping", [&] {
    mapping.assign(op_mappings);
    return anneal(mapping, {3, 200, 0.1}).score.time_s + mapping.score().time_s +
           relaxation.bound(0.5, 0.25, 1e-3).time_s + relaxation.bound(0.25, 0.5, 0.0).time_s;
  });
  // A mapping whose first use runs out of memory: unused, or equivalent to a new one.
  const double bound_s = Relaxation(mapping).bound(0.25, 0.5, 1e-3).time_s;
  bool more = true;
  for (std::int64_t nth = 0; more; ++nth) {
    Mapping fresh(made.problem());
    Relaxation of_fresh(fresh);
    more = runs_out(Refuse::kOne, nth, [&] { fresh.assign(op_mappings); });
    if (fresh.assigned()) CHECK(fresh.score().time_s > 0.0);
    more |= runs_out(Refuse::kOne, nth, [&] { of_fresh.bound(0.25, 0.5, 1e-3); });
    CHECK(of_fresh.bound(0.25, 0.5, 1e-3).time_s == bound_s);
  }
}

void grids_survive() {
  ChipGrid grid{};
  for (int i = 0; i < 3; ++i) {
    grid.axes.push_back({static_cast<ChipColumn>(i), {1.0, 2.0, 3.0, 4.0}});
  }
  survives("grid", [&] {
    GridRows rows;
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(grid_size(grid)), 1);
    pick_grid(grid, {0.0, 0.0}, wanted, rows);
    return static_cast<double>(rows.index.size());
  });
}

}  // namespace

int main() {
  layers_survive();
  best_plans_survive();
  placements_survive();
  nests_survive();
  costs_survive();
  mappings_survive();
  grids_survive();
  return phaze::test::report("out of memory");
}
