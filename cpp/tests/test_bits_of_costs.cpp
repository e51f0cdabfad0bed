// Bit-identical results on every machine, as in test_bits.cpp, for products with epilogues,
// protocols of libraries, batches of layers and wide placements: a change of any formula changes a
// hash, and the commit that changes it explains why.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "hash.hpp"
#include "numbers.hpp"
#include "phaze/collective.hpp"
#include "phaze/layer_batch.hpp"
#include "phaze/op_cost.hpp"
#include "phaze/placement.hpp"
#include "plan/placement_tables.hpp"

namespace {

using namespace phaze;
using test::Hash;
using test::Numbers;
using test::same_everywhere;

double real(Numbers& numbers, double unit) { return unit * (1 + numbers.below(1000)) / 7.0; }

TuningRecord tuning_of(Numbers& numbers) {
  TuningRecord t{};
  t.clock_factor = 0.9;
  t.vector_launch_share = 0.5;
  t.efficiency = 0.8;
  t.hbm_share = 0.9;
  t.hbm_write_share = 0.8;
  t.product_hbm_share = 0.95;
  t.port_share = 0.85;
  t.launch_s = real(numbers, 1e-9);
  t.unit_overhead_s = real(numbers, 1e-10);
  t.reduction_s = real(numbers, 1e-9);
  t.port_even_bytes_per_cycle = 20.0;
  t.port_odd_bytes_per_cycle = 10.0;
  t.resident_share = 0.4;
  t.attention_efficiency = 0.6;
  t.attention_backward_efficiency = 0.5;
  t.attention_ops = 8.0;
  t.attention_backward_ops = 16.0;
  t.attention_unit_s = 1e-7;
  t.attention_least = 16;
  t.overlapped = numbers.below(2);
  t.dataflows = 1 + numbers.below(7);
  if (numbers.below(2) == 0) {
    t.dataflows = 1;
    t.tiles = 3;
    for (int i = 0; i < 3; ++i) {
      t.tile_m[i] = 16 << numbers.below(4);
      t.tile_n[i] = 16 << numbers.below(4);
    }
  }
  for (VectorCost& cost : t.functions) cost = {5.0, 2.0, 1.0, 1.1, 2048.0, 1.5, 1.25};
  return t;
}

std::uint64_t product_bits() {
  Numbers numbers(21);
  Hash hash;
  const EnergyTable energy{1e-12, 2e-12, 3e-12, 4e-12, 5e-11, 6e-11, 0.1};
  for (int i = 0; i < 6000; ++i) {
    ChipRecord chip{};
    chip.tensor_cores = 1 + numbers.below(40);
    chip.tensor_width = 4 << numbers.below(5);
    chip.tensor_depth = 4 << numbers.below(5);
    chip.tensor_local_bytes = 1 << (8 + numbers.below(10));
    chip.vector_cores = 1 + numbers.below(20);
    chip.vector_lanes = 1 + numbers.below(64);
    chip.vector_alus_per_lane = 1 + numbers.below(2);
    chip.buffer_bytes = numbers.below(4) == 0 ? 0 : 1 << (10 + numbers.below(12));
    chip.buffer_bytes_per_cycle = real(numbers, 1.0);
    chip.buffer_port_bytes_per_cycle = numbers.below(2) * 8.0;
    chip.hbm_bytes_per_s = numbers.below(5) == 0 ? 0.0 : real(numbers, 1e8);
    chip.clock_hz = 1e9;
    OperatorRecord op{};
    op.b = 1 + numbers.below(5);
    op.m = 1 + numbers.below(300);
    op.k = 1 + numbers.below(300);
    op.n = 1 + numbers.below(300);
    op.unit = numbers.below(3);
    op.epilogue = numbers.below(4);
    op.function = numbers.below(3) == 0 ? numbers.below(29) : 0;
    op.causal = numbers.below(2);
    op.collective = -1;
    op.flops = real(numbers, 1e3);
    op.read_bytes = real(numbers, 1e3);
    op.write_bytes = real(numbers, 1e3);
    const Precision precision{2.0, numbers.below(2) * 2.0 + 2.0, 4.0, 1.0 + numbers.below(2)};
    const CostRecord c = op_cost(op, chip, tuning_of(numbers), precision,
                                 i % 3 == 0 ? Cores::kOne : Cores::kAll, energy, 3.0);
    hash.add(c.status);
    if (c.status != 0) continue;
    for (const double value :
         {c.time_s, c.bound_s, c.compute_s, c.port_s, c.buffer_s, c.hbm_s, c.power_s, c.vector_s,
          c.fill_s, c.fixed_s, c.overhead_s, c.macs, c.vector_ops, c.port_bytes, c.buffer_bytes,
          c.hbm_bytes, c.utilization, c.energy_j}) {
      hash.add(value);
    }
    hash.add(c.limit + 8 * c.order + 64 * c.dataflow);
  }
  return hash.value();
}

FabricRecord fabric_of(Numbers& numbers) {
  FabricRecord fabric{};
  fabric.kind = numbers.below(3) == 0 ? 1 : 0;
  fabric.levels = 1 + numbers.below(3);
  for (int l = 0; l < fabric.levels; ++l) {
    fabric.size[l] = 2 + numbers.below(6);
    fabric.bytes_per_s[l] = real(numbers, 1e7);
    fabric.latency_s[l] = real(numbers, 1e-8);
    fabric.wrap[l] = numbers.below(2);
    if (fabric.kind != 0) continue;
    fabric.full_mesh[l] = numbers.below(4) == 0 ? 1 : 0;
    fabric.in_switch_share[l] = numbers.below(3) == 0 ? 0.8 : 0.0;
    fabric.in_switch_startup_s[l] = real(numbers, 1e-8);
  }
  if (fabric.kind != 0 || numbers.below(2) == 0) return fabric;
  for (int transfer = 0; transfer < kTransfers; ++transfer) {
    fabric.protocols[transfer] = 1 + numbers.below(3);
    for (int k = 0; k < fabric.protocols[transfer]; ++k) {
      ProtocolRecord& way = fabric.protocol[transfer][k];
      way.most_bytes = k + 1 < fabric.protocols[transfer] ? 1e4 * (1 + k) : 0.0;
      for (int l = 0; l < fabric.levels; ++l) {
        way.startup_s[l] = real(numbers, 1e-8);
        way.step_s[l] = real(numbers, 1e-8);
        way.share[l] = 0.3 + 0.01 * numbers.below(60);
        way.copy_s_per_byte[l] = real(numbers, 1e-13);
      }
    }
  }
  return fabric;
}

std::uint64_t protocol_bits() {
  Numbers numbers(22);
  Hash hash;
  for (int i = 0; i < 8000; ++i) {
    const FabricRecord fabric = fabric_of(numbers);
    std::int32_t held = 1;
    for (int l = 0; l < fabric.levels; ++l) held *= static_cast<std::int32_t>(fabric.size[l]);
    const std::int32_t ranks = 1 + numbers.below(held);
    const std::int32_t stride = ranks > 1 ? 1 + numbers.below((held - 1) / (ranks - 1)) : 1;
    const std::int64_t outer = ranks * stride * 2 <= held ? 2 : 1;
    const GroupShape shape{ranks, stride, outer, outer > 1 ? ranks * stride : 0};
    const auto op = static_cast<CollectiveOp>(numbers.below(kCollectiveOpCount));
    const double bytes = real(numbers, i % 2 == 0 ? 1e2 : 1e6);
    const CollectiveResult found = collective(fabric, op, bytes, shape);
    hash.add(static_cast<double>(found.status));
    if (found.status != Status::kOk) continue;
    hash.add(found.time_s);
    hash.add(static_cast<double>(found.algorithm));
    hash.add(collective_bound_s(fabric, op, bytes, shape));
    const std::int64_t from = numbers.below(held);
    const CollectiveResult sent = message(fabric, bytes, from, numbers.below(held));
    hash.add(sent.status == Status::kOk ? sent.time_s : -1.0);
  }
  return hash.value();
}

// Layers as given, with missing or too many modes: answers, statuses and replays.
std::uint64_t batch_bits() {
  Numbers numbers(23);
  Hash hash;
  std::vector<std::int64_t> op_ptr{0}, mode_ptr{0}, edge_ptr{0};
  std::vector<std::uint8_t> types;
  std::vector<std::int32_t> mode_cores, from, to, cores;
  std::vector<double> mode_s;
  constexpr std::size_t kLayers = 120;
  for (std::size_t b = 0; b < kLayers; ++b) {
    const std::int32_t count = 1 + numbers.below(7);
    for (std::int32_t i = 0; i < count; ++i) {
      types.push_back(static_cast<std::uint8_t>(1 + numbers.below(7)));
      for (int way = 1 + numbers.below(3); way > 0; --way) {
        mode_cores.push_back(way - 1);
        mode_s.push_back(real(numbers, 0.01));
      }
      mode_ptr.push_back(static_cast<std::int64_t>(mode_s.size()));
      for (std::int32_t before = 0; before < i; ++before) {
        if (numbers.below(4) != 0) continue;
        from.push_back(before);
        to.push_back(i);
      }
    }
    if (b % 17 == 0 && count > 1) {  // an edge to itself
      from.push_back(1);
      to.push_back(1);
    }
    op_ptr.push_back(static_cast<std::int64_t>(types.size()));
    edge_ptr.push_back(static_cast<std::int64_t>(to.size()));
    const std::int32_t none = numbers.below(12) == 0 ? 1 : 0;
    cores.insert(cores.end(), {2, 1 + numbers.below(3) - none, 1});
  }
  for (const ScheduleRule rule : {ScheduleRule::kExclusive, ScheduleRule::kOverlap}) {
    const LayerBatch batch{op_ptr,   types, mode_ptr, mode_cores, mode_s,
                           edge_ptr, from,  to,       cores,      rule};
    for (const Terms terms : {Terms::kGiven, Terms::kCanonical}) {
      std::vector<double> makespan(kLayers), bound(kLayers), start(types.size());
      std::vector<std::int32_t> proved(kLayers), status(kLayers), mode(types.size());
      std::vector<std::int64_t> nodes(kLayers);
      const LayerAnswers answers{makespan, bound, proved, nodes, status, start, mode};
      solve_layers(batch, {2000, HUGE_VAL, nullptr, nullptr}, terms, answers, 1);
      for (std::size_t b = 0; b < kLayers; ++b) {
        hash.add(status[b] == 0 ? makespan[b] + bound[b] : -status[b]);
      }
      if (terms == Terms::kCanonical) replay_layers(batch, answers);
      for (std::size_t i = 0; i < start.size(); ++i) {
        if (!std::isnan(start[i])) hash.add(start[i] + mode[i]);
      }
      std::vector<std::uint8_t> bytes;
      for (std::size_t b = 0; b < kLayers; ++b) {
        if (canonical_bytes(batch, b, &bytes) != Status::kOk) continue;
        for (const std::uint8_t byte : bytes) hash.add(byte);
      }
    }
  }
  return hash.value();
}

std::uint64_t wide_bits() {
  Numbers numbers(24);
  Hash hash;
  for (int round = 0; round < 600; ++round) {
    test::Table table = test::random_chain(numbers, 2 + numbers.below(9));
    if (round % 4 == 0) test::branch(numbers, &table);
    PlacementPlan best;
    const PublishedRules rules{10.0 + numbers.below(80), 1 + numbers.below(30),
                               1 + numbers.below(20), 1 + numbers.below(4), round % 2 == 0};
    hash.add(static_cast<double>(place_published(table.view(), rules, 1e300, &best)));
    hash.add(best.time_s);
    hash.add(best.max_load_s);
    hash.add(static_cast<double>(best.replicas * 1000 + best.devices));
    for (const std::int32_t stage : best.stage_of) hash.add(stage);
  }
  return hash.value();
}

}  // namespace

int main() {
  same_everywhere("product", product_bits(), 0x7516ff5ebbb48996ULL);
  same_everywhere("protocol", protocol_bits(), 0xfe89b17e267edfaeULL);
  same_everywhere("batch", batch_bits(), 0xd13bab58ec4bf3f1ULL);
  same_everywhere("wide", wide_bits(), 0x620572ed137062c3ULL);
  return phaze::test::report("bits of costs");
}
