// Bit-identical results on every machine: a hash over many results, equal for g++ and clang++,
// aarch64 and x86-64. A change of a formula changes it, and the commit that changes it explains
// why.
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "hash.hpp"
#include "phaze/collective.hpp"
#include "phaze/op_cost.hpp"
#include "phaze/placement.hpp"
#include "phaze/silicon.hpp"
#include "plan/placement_tables.hpp"
#include "wafer/mapping_chain.hpp"

namespace {

using namespace phaze;
using test::Hash;
using test::same_everywhere;

class Numbers {  // a linear congruential generator: integers only, so identical everywhere
 public:
  std::uint64_t next() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return state_ >> 33;
  }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_ = 20240721;
};

FabricRecord random_fabric(Numbers& numbers) {
  FabricRecord fabric{};
  fabric.kind = static_cast<std::int32_t>(numbers.below(2));
  fabric.levels = static_cast<std::int32_t>(numbers.below(4)) + 1;
  for (int l = 0; l < fabric.levels; ++l) {
    fabric.size[l] = numbers.below(8) + 1;
    fabric.bytes_per_s[l] = 1e9 * static_cast<double>(numbers.below(900) + 1) / 7.0;
    fabric.latency_s[l] = 1e-6 * static_cast<double>(numbers.below(100)) / 3.0;
    fabric.wrap[l] = static_cast<std::int32_t>(numbers.below(2));
  }
  return fabric;
}

std::uint64_t collective_bits() {
  Numbers numbers;
  Hash hash;
  for (int i = 0; i < 20000; ++i) {
    const FabricRecord fabric = random_fabric(numbers);
    std::int64_t held = 1;
    for (int l = 0; l < fabric.levels; ++l) held *= fabric.size[l];
    const std::int64_t ranks = numbers.below(held) + 1;
    const std::int64_t most = ranks > 1 ? (held - 1) / (ranks - 1) : 1;
    const std::int64_t stride = most > 0 ? numbers.below(most) + 1 : 1;
    const auto op = static_cast<CollectiveOp>(numbers.below(5));
    const double bytes = static_cast<double>(numbers.next()) / 13.0;
    const CollectiveResult result = collective(fabric, op, bytes, ranks, stride);
    CHECK(result.status == Status::kOk);
    hash.add(result.time_s);
    hash.add(static_cast<double>(result.algorithm));
    hash.add(collective_bound_s(fabric, op, bytes, ranks, stride));
  }
  return hash.value();
}

std::uint64_t silicon_bits() {
  Numbers numbers;
  Hash hash;
  const EnergyTable energy{0.59e-12, 0.845e-12, 1.0625e-12, 1.75e-12, 43.75e-12, 80e-12, 0.15};
  for (int i = 0; i < 20000; ++i) {
    ChipRecord chip{};
    chip.tensor_cores = numbers.below(4096) + 1;
    chip.tensor_width = numbers.below(256) + 1;
    chip.tensor_depth = numbers.below(256) + 1;
    chip.tensor_local_bytes = numbers.below(1 << 21);
    chip.vector_cores = numbers.below(4096) + 1;
    chip.vector_lanes = numbers.below(256) + 1;
    chip.vector_alus_per_lane = numbers.below(16) + 1;
    chip.vector_local_bytes = numbers.below(1 << 21);
    chip.buffer_bytes = numbers.below(1 << 28);
    chip.buffer_bytes_per_cycle = static_cast<double>(numbers.below(10000)) / 3.0;
    chip.buffer_port_bytes_per_cycle = static_cast<double>(numbers.below(600)) / 7.0;
    chip.hbm_bytes_per_s = 1e9 * static_cast<double>(numbers.below(8000));
    chip.hbm_stacks = numbers.below(8);
    chip.clock_hz = 1e6 * static_cast<double>(numbers.below(3000) + 1);
    const AreaBreakdown area = chip_area(chip, {0.0071876, 16.1898});
    hash.add(area.total_mm2);
    hash.add(peak_power_w(chip, energy, area.total_mm2));
  }
  return hash.value();
}

std::uint64_t cost_bits() {
  Numbers numbers;
  Hash hash;
  TuningRecord systolic{};
  systolic.clock_factor = systolic.vector_launch_share = systolic.efficiency = 1.0;
  systolic.hbm_share = systolic.hbm_write_share = 1.0;
  systolic.product_hbm_share = systolic.port_share = 1.0;
  systolic.attention_efficiency = systolic.attention_backward_efficiency = 1.0;
  systolic.attention_ops = systolic.attention_backward_ops = 8.0;
  systolic.overlapped = 1;
  systolic.dataflows = 7;
  for (VectorCost& cost : systolic.functions) cost = {7.0, 3.0, 1.0, 1.25, 4096.0, 2.0, 1.5};
  TuningRecord gpu = systolic;
  gpu.launch_s = 3.2e-6;
  gpu.efficiency = 0.76;
  gpu.unit_overhead_s = 0.6e-6;
  gpu.hbm_write_share = 0.85;
  gpu.sustained_macs_per_s = 3.5e14;
  gpu.port_even_bytes_per_cycle = 9.6;
  gpu.resident_share = 0.5;
  gpu.overlapped = 0;
  gpu.dataflows = 1;
  gpu.tiles = 2;
  gpu.tile_m[0] = gpu.tile_n[1] = 256;
  gpu.tile_n[0] = gpu.tile_m[1] = 128;
  const EnergyTable energy{0.59e-12, 0.845e-12, 1.0625e-12, 1.75e-12, 43.75e-12, 80e-12, 0.15};
  for (int i = 0; i < 20000; ++i) {
    ChipRecord chip{};
    chip.tensor_cores = numbers.below(300) + 1;
    chip.tensor_width = numbers.below(256) + 1;
    chip.tensor_depth = numbers.below(256) + 1;
    chip.tensor_local_bytes = numbers.below(1 << 21);
    chip.vector_cores = numbers.below(300) + 1;
    chip.vector_lanes = numbers.below(256) + 1;
    chip.vector_alus_per_lane = numbers.below(16) + 1;
    chip.buffer_bytes = numbers.below(1 << 27);
    chip.buffer_bytes_per_cycle = static_cast<double>(numbers.below(10000)) / 3.0;
    chip.hbm_bytes_per_s = 1e9 * static_cast<double>(numbers.below(8000));
    chip.clock_hz = 1e6 * static_cast<double>(numbers.below(3000) + 1);
    OperatorRecord op{};
    op.b = numbers.below(9) + 1;
    op.m = numbers.below(5000) + 1;
    op.k = numbers.below(5000) + 1;
    op.n = numbers.below(5000) + 1;
    op.function = static_cast<std::int32_t>(i % 3 == 0 ? numbers.below(29) : 0);
    op.causal = static_cast<std::int32_t>(numbers.below(2));
    op.read_bytes = static_cast<double>(numbers.below(1 << 28)) / 3.0;
    const CostRecord cost = op_cost(op, chip, i % 2 == 0 ? systolic : gpu, {2.0, 2.0, 4.0, 1.0},
                                    i % 5 == 0 ? Cores::kOne : Cores::kAll, energy, 40.0);
    CHECK(cost.status == 0);
    hash.add(cost.time_s);
    hash.add(cost.bound_s);
    hash.add(cost.energy_j);
    hash.add(cost.hbm_bytes);
  }
  return hash.value();
}

std::uint64_t placement_bits() {
  test::Numbers numbers(7);
  Hash hash;
  for (int round = 0; round < 300; ++round) {
    test::Table table = test::random_chain(numbers, 3 + numbers.below(20));
    if (round % 3 == 0) table = test::random_chain(numbers, 8);
    if (round % 3 == 0) test::branch(numbers, &table);
    PlacementPlan best;
    const PublishedRules published{20.0 + numbers.below(200), 24, 16, 2, round % 2 == 0};
    CHECK(place_published(table.view(), published, 1e300, &best) == Status::kOk);
    hash.add(best.time_s);
    for (const std::int32_t stage : best.stage_of) hash.add(stage);
  }
  return hash.value();
}

// Random tables, annealed: random draws, comparisons and sums are the same everywhere.
std::uint64_t mapping_bits() {
  test::Numbers numbers(11);
  Hash hash;
  for (int round = 0; round < 20; ++round) {
    test::Owned made = test::chain_of(5, {{0, 2, 1}, {0, 2, 2}, {1, 3, 1}}, 31);
    for (double& cell : made.table) cell = static_cast<double>(numbers.below(1000) + 1) / 7.0;
    made.rules.capacity_bytes = 500.0 + 1000.0 * numbers.below(20);
    CHECK(check_problem(made.problem()) == Status::kOk);
    Mapping mapping(made.problem());
    std::vector<OpMapping> op_mappings;
    for (int op = 0; op < mapping.ops(); ++op) op_mappings.push_back(mapping.choices(op)[0]);
    mapping.assign(op_mappings);
    const MapSearchResult found = anneal(mapping, {static_cast<std::uint64_t>(round), 2000, 0.1});
    hash.add(found.score.time_s);
    hash.add(found.score.memory_bytes);
    hash.add(found.score.over_bytes);
    for (const OpMapping& op_mapping : found.op_mappings)
      hash.add(op_mapping.slots[0] * 64 + op_mapping.slots[2] + op_mapping.mode);
    hash.add(Relaxation(mapping).bound(0.5, 0.25, 1e-3).time_s);
  }
  return hash.value();
}

}  // namespace

int main() {
  same_everywhere("collective", collective_bits(), 0xee4737941f37d33eULL);
  same_everywhere("silicon", silicon_bits(), 0xbc6c313388ea88d3ULL);
  same_everywhere("cost", cost_bits(), 0xc0f537482c10eb21ULL);
  same_everywhere("placement", placement_bits(), 0x4c4840193b13f4ceULL);
  same_everywhere("mapping", mapping_bits(), 0x9aa39d6dca661a5dULL);
  return phaze::test::report("bits");
}
