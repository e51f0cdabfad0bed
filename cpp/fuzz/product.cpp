#include <cmath>

#include "bytes.hpp"
#include "phaze/gemm.hpp"
#include "phaze/op_cost.hpp"

namespace phaze::fuzz {
namespace {

ChipRecord chip_of(Bytes& bytes) {
  const auto power = [&](std::int32_t most) { return std::int64_t{1} << bytes.below(most); };
  ChipRecord chip{};
  chip.tensor_cores = power(8);
  chip.tensor_width = power(9);
  chip.tensor_depth = power(9);
  chip.tensor_local_bytes = power(20);
  chip.vector_cores = power(8);
  chip.vector_lanes = power(9);
  chip.vector_alus_per_lane = power(4);
  chip.buffer_bytes = bytes.below(4) == 1 ? 0 : power(30);
  chip.buffer_bytes_per_cycle = bytes.below(256) * 16.0;
  chip.hbm_bytes_per_s = bytes.below(6) == 1 ? 0.0 : 1e10 * bytes.below(300);
  chip.clock_hz = 1e8 * (1 + bytes.below(30));
  std::int64_t* const fields[] = {
      &chip.tensor_cores, &chip.tensor_width, &chip.tensor_depth,         &chip.tensor_local_bytes,
      &chip.vector_cores, &chip.vector_lanes, &chip.vector_alus_per_lane, &chip.buffer_bytes};
  if (bytes.rarely(6)) {
    *fields[bytes.below(static_cast<std::int32_t>(std::size(fields)))] = bytes.awkward_integer();
  }
  if (bytes.rarely(12)) chip.clock_hz = bytes.awkward();
  if (bytes.rarely(12)) chip.hbm_bytes_per_s = bytes.awkward();
  return chip;
}

TuningRecord tuning_of(Bytes& bytes) {
  TuningRecord t{};
  t.clock_factor = t.vector_launch_share = t.efficiency = 1.0;
  t.hbm_share = t.hbm_write_share = t.product_hbm_share = t.port_share = 1.0;
  t.attention_efficiency = t.attention_backward_efficiency = 1.0;
  t.attention_ops = 8.0;
  t.attention_backward_ops = 16.0;
  t.overlapped = bytes.below(2);
  t.dataflows = 1 + bytes.below(7);
  t.launch_s = bytes.number(1e-7);
  t.unit_overhead_s = bytes.number(1e-8);
  t.reduction_s = bytes.number(1e-7);
  t.sustained_macs_per_s = bytes.number(1e13);
  if (bytes.below(3) == 1) {
    t.tiles = bytes.rarely(16) ? bytes.awkward_int() : 1 + bytes.below(4);
    for (int i = 0; i < 4; ++i) {
      t.tile_m[i] = bytes.rarely(16) ? bytes.awkward_integer() : 16 * (1 + bytes.below(16));
      t.tile_n[i] = 16 * (1 + bytes.below(16));
    }
  }
  double* const shares[] = {&t.clock_factor,        &t.efficiency,        &t.hbm_share,
                            &t.hbm_write_share,     &t.product_hbm_share, &t.port_share,
                            &t.attention_efficiency};
  if (bytes.rarely(6)) {
    *shares[bytes.below(static_cast<std::int32_t>(std::size(shares)))] = bytes.awkward();
  }
  for (VectorCost& cost : t.functions) cost = {4.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0};
  return t;
}

}  // namespace

void product(Bytes bytes) {
  const ChipRecord chip = chip_of(bytes);
  const TuningRecord tuning = tuning_of(bytes);
  const auto size = [&] {
    return bytes.rarely(30) ? bytes.awkward_integer() : 1 + std::int64_t{bytes.below(5000)};
  };
  OperatorRecord op{};
  op.b = 1 + bytes.below(9);
  op.m = size();
  op.n = size();
  op.k = size();
  op.collective = -1;
  op.function = bytes.rarely(20) ? bytes.awkward_int() : bytes.below(32);
  op.read_bytes = bytes.number(1e6);
  op.write_bytes = bytes.number(1e6);
  op.causal = bytes.below(2);
  op.epilogue = bytes.below(3);
  const Precision precision{2.0, 2.0, 4.0, bytes.rarely(12) ? bytes.awkward() : 1.0};
  const EnergyTable energy{1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0};
  for (const Cores cores : {Cores::kAll, Cores::kOne}) {
    const CostRecord cost = op_cost(op, chip, tuning, precision, cores, energy, 1.0);
    const bool good = cost.status == static_cast<std::int32_t>(Status::kOk);
    REQUIRE(good ? cost.time_s >= 0.0 : std::isnan(cost.time_s));
    REQUIRE(!good || cost.bound_s <= cost.time_s * (1.0 + 1e-12));
  }
  Status status = Status::kOk;
  const auto dataflow = static_cast<Dataflow>(bytes.below(kDataflows));
  const std::int64_t cycles = array_cycles(op.m, op.k, op.n, chip.tensor_depth, chip.tensor_width,
                                           dataflow, tuning.overlapped == 1, &status);
  REQUIRE(status == Status::kOk ? cycles > 0 : cycles == -1);
}

}  // namespace phaze::fuzz
