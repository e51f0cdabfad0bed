#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "check.hpp"
#include "cost/chips.hpp"
#include "numbers.hpp"
#include "phaze/gemm.hpp"
#include "phaze/op_cost.hpp"
#include "phaze/vector_op.hpp"

namespace {

using namespace phaze;
using phaze::test::neutral;
using phaze::test::tpu;

constexpr Precision kHalf{2.0, 2.0, 4.0, 1.0};

OperatorRecord product(std::int64_t b, std::int64_t m, std::int64_t k, std::int64_t n) {
  OperatorRecord op{};
  op.b = b;
  op.m = m;
  op.k = k;
  op.n = n;
  op.collective = -1;
  return op;
}

void closed_forms() {
  Status status = Status::kOk;
  CHECK(array_cycles(512, 1024, 1024, 128, 128, Dataflow::kOutput, false, &status) == 40896);
  CHECK(array_cycles(512, 1024, 1024, 128, 128, Dataflow::kWeight, false, &status) == 57216);
  CHECK(array_cycles(512, 1024, 1024, 128, 128, Dataflow::kInput, false, &status) == 44992);
  CHECK(array_cycles(512, 1024, 1024, 128, 128, Dataflow::kOutput, true, &status) == 33022);
  CHECK(status == Status::kOk);
  constexpr std::int64_t big = std::int64_t{1} << 40;
  CHECK(array_cycles(big, big, 1, 1, 1, Dataflow::kOutput, false, &status) == -1);
  CHECK(status == Status::kTooLarge);
  CHECK(array_cycles(1, 1, 1, 0, 1, Dataflow::kOutput, false, &status) == -1);
  CHECK(status == Status::kBadShape);
}

void shapes_are_checked() {
  constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  CHECK(check_shape({1, 1, 1, 1}) == Status::kOk);
  CHECK(check_shape({1, least, 1, 1}) == Status::kBadShape);
  CHECK(check_shape({most, 1, 1, 1}) == Status::kTooLarge);
  CHECK(check_shape({1, std::int64_t{1} << 40, std::int64_t{1} << 22, 1}) == Status::kOk);
  CHECK(check_shape({2, std::int64_t{1} << 40, std::int64_t{1} << 22, 1}) == Status::kTooLarge);
}

void traffic_is_compulsory_where_it_fits() {
  const GemmShape g{1, 1000, 2000, 3000};
  const double compulsory = 2.0 * (1000.0 * 2000.0 + 2000.0 * 3000.0 + 1000.0 * 3000.0);
  CHECK(hbm_traffic(g, 64e6, kHalf).hbm_bytes == compulsory);
  double before = std::numeric_limits<double>::infinity();
  for (double capacity = 0.0; capacity < 64e6; capacity = capacity * 1.3 + 100.0) {
    const double bytes = hbm_traffic(g, capacity, kHalf).hbm_bytes;
    CHECK(bytes <= before && bytes >= compulsory);
    before = bytes;
  }
}

void extreme_operators_have_a_status() {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double infinite = std::numeric_limits<double>::infinity();
  constexpr std::int64_t sizes[] = {std::numeric_limits<std::int64_t>::min(),
                                    -1,
                                    0,
                                    1,
                                    7,
                                    std::int64_t{1} << 40,
                                    (std::int64_t{1} << 40) + 1,
                                    std::numeric_limits<std::int64_t>::max()};
  constexpr double bytes[] = {0.0, 1e300, -1.0, nan, infinite};
  const EnergyTable energy{1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0};
  for (const std::int64_t m : sizes) {
    for (const std::int64_t k : sizes) {
      for (const double moved : bytes) {
        for (std::int32_t function = -1; function < kFunctions + 2; ++function) {
          OperatorRecord op = product(1, m, k, m);
          op.function = function;
          op.read_bytes = moved;
          const CostRecord cost = op_cost(op, tpu(), neutral(), kHalf, Cores::kAll, energy, 1.0);
          const bool good = cost.status == static_cast<std::int32_t>(Status::kOk);
          CHECK(good ? cost.time_s >= 0.0 : std::isnan(cost.time_s));
          CHECK(!good || cost.bound_s <= cost.time_s);
        }
      }
    }
  }
}

void extreme_chips_have_a_status() {
  const EnergyTable energy{};
  const OperatorRecord op = product(3, 777, 555, 333);
  for (const std::int64_t count : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1},
                                   std::int64_t{1} << 40, std::int64_t{1} << 62}) {
    for (int field = 0; field < 6; ++field) {
      ChipRecord chip = tpu();
      std::int64_t* const fields[] = {&chip.tensor_cores,         &chip.tensor_width,
                                      &chip.tensor_depth,         &chip.tensor_local_bytes,
                                      &chip.vector_alus_per_lane, &chip.buffer_bytes};
      *fields[field] = count;
      const CostRecord cost = op_cost(op, chip, neutral(), kHalf, Cores::kAll, energy, 0.0);
      const bool good = cost.status == static_cast<std::int32_t>(Status::kOk);
      CHECK(good ? cost.time_s > 0.0 : std::isnan(cost.time_s));
    }
  }
}

void blocks_of_one_row_are_accepted() {
  TuningRecord t = neutral();
  t.dataflows = 1;
  t.tiles = 1;
  t.tile_m[0] = t.tile_n[0] = 1;
  CHECK(check_machine(tpu(), t, kHalf) == Status::kOk);
  t.tile_m[0] = 0;
  CHECK(check_machine(tpu(), t, kHalf) != Status::kOk);
}

void batches_equal_single_calls() {
  std::vector<OperatorRecord> ops;
  for (std::int64_t i = 1; i < 60; ++i) {
    ops.push_back(product(1 + i % 3, 17 * i, 13 * i + 1, 5 * i));
    ops.push_back(product(1, 31 * i, 64, 100 + i));
    ops.back().function = static_cast<std::int32_t>(1 + i % 28);
    ops.back().read_bytes = static_cast<double>(i) * 1e5;
  }
  std::vector<ChipRecord> chips(5, tpu());
  for (std::size_t c = 0; c < chips.size(); ++c) {
    chips[c].tensor_cores = static_cast<std::int64_t>(3 * c + 1);
    chips[c].buffer_bytes = static_cast<std::int64_t>(c % 2) << 22;
  }
  const std::vector<std::int32_t> index(chips.size(), 0);
  const std::vector<TuningRecord> tunings(1, neutral());
  const ChipBatch batch{chips, index, tunings, kHalf};
  const EnergyTable energy{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0};
  const std::vector<EnergyTable> tables(chips.size(), energy);
  const std::vector<double> watts(chips.size(), 9.0);
  for (const Cores cores : {Cores::kAll, Cores::kOne}) {
    for (const int threads : {1, 3}) {
      std::vector<CostRecord> costs(ops.size() * chips.size());
      std::vector<double> times(costs.size());
      std::vector<double> bounds(costs.size());
      op_cost_batch(ops, batch, cores, tables, watts, costs, threads);
      op_time_batch(ops, batch, cores, times, threads);
      op_bound_batch(ops, batch, cores, bounds, threads);
      for (std::size_t i = 0; i < costs.size(); ++i) {
        const CostRecord one = op_cost(ops[i % ops.size()], chips[i / ops.size()], tunings[0],
                                       kHalf, cores, energy, 9.0);
        CHECK(costs[i].time_s == one.time_s && costs[i].energy_j == one.energy_j);
        CHECK(times[i] == one.time_s && bounds[i] == one.bound_s);
      }
    }
  }
}

// Chips with the same tensor cores share mappings, unless lanes limit the fused operators.
void figures_equal_costs() {
  std::vector<OperatorRecord> ops;
  for (std::int64_t i = 1; i < 40; ++i) {
    ops.push_back(product(1 + i % 3, 37 * i, 13 * i + 1, 29 * i));
    ops.back().epilogue = static_cast<std::int32_t>(i % 5);
    ops.push_back(product(1, 31 * i, 64, 100 + i));
    ops.back().function = static_cast<std::int32_t>(1 + i % 28);
    ops.back().read_bytes = static_cast<double>(i) * 1e5;
  }
  ops.push_back(product(0, 1, 1, 1));  // refused
  std::vector<ChipRecord> chips(200, tpu());
  for (std::size_t c = 0; c < chips.size(); ++c) {
    chips[c].tensor_cores = static_cast<std::int64_t>(1) << (c % 3);
    chips[c].tensor_width = 32 << (c / 3 % 2);
    chips[c].vector_cores = static_cast<std::int64_t>(1 + c / 6 % 4);
    chips[c].vector_lanes = static_cast<std::int64_t>(1) << (c / 24 % 8);
    chips[c].hbm_bytes_per_s = c % 5 == 0 ? 1e12 : 2e11;
  }
  chips[7].clock_hz = 0.0;  // refused
  const std::vector<std::int32_t> index(chips.size(), 0);
  const std::vector<TuningRecord> tunings(1, neutral());
  const ChipBatch batch{chips, index, tunings, kHalf};
  const EnergyTable energy{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0};
  const std::vector<EnergyTable> tables(chips.size(), energy);
  const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  for (const int threads : {1, 3}) {
    std::vector<double> time_s(ops.size() * chips.size());
    std::vector<double> one_core_s(time_s), bound_s(time_s), dynamic_j(time_s);
    op_figures_batch(ops, batch, tables, {time_s, one_core_s, bound_s, dynamic_j}, threads);
    for (std::size_t i = 0; i < time_s.size(); ++i) {
      const auto alone = [&](Cores cores) {
        return op_cost(ops[i % ops.size()], chips[i / ops.size()], tunings[0], kHalf, cores, energy,
                       0.0);
      };
      const CostRecord all = alone(Cores::kAll);
      CHECK(same(time_s[i], all.time_s) && same(bound_s[i], all.bound_s));
      CHECK(same(dynamic_j[i], all.energy_j));
      CHECK(same(one_core_s[i], alone(Cores::kOne).time_s));
    }
  }
}

// No mapping is faster than the bound by blocks, which is at least the other bound and often equal.
void block_bounds_hold() {
  test::Numbers numbers(7);
  const auto among = [&](std::initializer_list<std::int64_t> sizes) {
    return sizes.begin()[static_cast<std::ptrdiff_t>(
        numbers.below(static_cast<std::int32_t>(sizes.size())))];
  };
  int tight = 0;
  for (int round = 0; round < 20000; ++round) {
    ChipRecord chip = tpu();
    chip.tensor_cores = among({1, 2, 3, 8, 64});
    chip.tensor_width = among({16, 24, 96, 128, 256});
    chip.tensor_depth = among({16, 24, 96, 128, 256});
    chip.tensor_local_bytes = among({0, 1 << 10, 64 << 10, 256 << 10, 4 << 20});
    chip.buffer_bytes = among({0, 1 << 20, 128 << 20});
    chip.buffer_port_bytes_per_cycle = static_cast<double>(among({8, 64, 512}));
    chip.hbm_bytes_per_s = static_cast<double>(among({0, 100, 1200})) * 1e9;
    TuningRecord tuning = neutral();
    tuning.overlapped = static_cast<std::int32_t>(among({0, 1}));
    tuning.dataflows = static_cast<std::int32_t>(among({1, 2, 4, 7}));
    if (among({0, 1}) == 1) {
      tuning.dataflows = 1;
      tuning.tiles = 2;
      tuning.tile_m[0] = tuning.tile_n[0] = among({32, 128});
      tuning.tile_m[1] = 64;
      tuning.tile_n[1] = 256;
      tuning.odd_tiles = tuning.even_tiles = 1;
      tuning.odd_m[0] = tuning.odd_n[0] = tuning.even_m[0] = tuning.even_n[0] = 64;
      tuning.port_odd_bytes_per_cycle = 16.0;
    }
    const GemmShape shape{among({1, 3}), among({1, 17, 96, 1000, 4096}), among({1, 63, 512, 4096}),
                          among({1, 40, 333, 8192})};
    const Epilogue epilogue{static_cast<double>(among({0, 5})),
                            static_cast<double>(among({0, 999})), among({0, 1}) == 1 ? 1.0 : 0.5};
    for (const bool one_core : {false, true}) {
      const Machine machine(chip, tuning, kHalf, one_core);
      const Traffic traffic = hbm_traffic(shape, machine.capacity_bytes, kHalf);
      const double time_s = best_gemm_time(shape, machine, traffic, epilogue);
      const double bound_s = gemm_block_bound(shape, machine, traffic, epilogue);
      CHECK(bound_s <= time_s);
      CHECK(bound_s >= gemm_bound(shape, machine, epilogue));
      tight += bound_s >= time_s * 0.9 ? 1 : 0;
    }
  }
  CHECK(tight > 8000);
}

}  // namespace

int main() {
  closed_forms();
  shapes_are_checked();
  traffic_is_compulsory_where_it_fits();
  extreme_operators_have_a_status();
  extreme_chips_have_a_status();
  blocks_of_one_row_are_accepted();
  batches_equal_single_calls();
  figures_equal_costs();
  block_bounds_hold();
  return phaze::test::report("gemm");
}
