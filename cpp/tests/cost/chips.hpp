// A chip, and software that reaches all its rates.
#pragma once

#include "phaze/types.hpp"

namespace phaze::test {

inline ChipRecord tpu() {
  ChipRecord chip{};
  chip.tensor_cores = 8;
  chip.tensor_width = 128;
  chip.tensor_depth = 128;
  chip.tensor_local_bytes = 256 << 10;
  chip.vector_cores = 2;
  chip.vector_lanes = 128;
  chip.vector_alus_per_lane = 1;
  chip.buffer_bytes = 128 << 20;
  chip.buffer_bytes_per_cycle = 4096.0;
  chip.hbm_bytes_per_s = 1.2e12;
  chip.clock_hz = 1.05e9;
  return chip;
}

inline TuningRecord neutral() {
  TuningRecord t{};
  t.clock_factor = t.vector_launch_share = t.efficiency = 1.0;
  t.hbm_share = t.hbm_write_share = t.product_hbm_share = t.port_share = 1.0;
  t.attention_efficiency = t.attention_backward_efficiency = 1.0;
  t.attention_ops = 8.0;
  t.attention_backward_ops = 16.0;
  t.overlapped = 1;
  t.dataflows = 7;
  for (VectorCost& cost : t.functions) cost = {4.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0};
  return t;
}

}  // namespace phaze::test
