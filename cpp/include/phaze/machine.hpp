// What the cost kernels need of one chip: rates in seconds, limits, and how its software uses it.
//
// All functions are pure, never throw, allocate nothing, and may run from any thread.
#pragma once

#include <cstdint>

#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

enum class Dataflow : std::int32_t { kOutput = 0, kWeight = 1, kInput = 2 };
inline constexpr int kDataflows = 3;

// kOk where every count, rate and share is in range.
Status check_machine(const ChipRecord& chip, const TuningRecord& tuning,
                     const Precision& precision) noexcept;

// Bytes that tiles may fill: the shared buffer, or all local ones where there is none.
double tile_capacity_bytes(const ChipRecord& chip) noexcept;

// What the kernels need of one chip, worked out once.
struct Machine {
  Machine(const ChipRecord& chip, const TuningRecord& tuning, const Precision& precision,
          bool one_core) noexcept;

  const TuningRecord* tuning;
  Precision precision;
  std::int64_t cores;      // P
  std::int64_t rows;       // R
  std::int64_t cols;       // C
  std::int64_t grid_rows;  // rho
  double local_bytes;
  double buffer_bytes;
  double capacity_bytes;  // what tiles may fill
  double clock_hz;
  double port_bytes_per_s;         // of one core, aligned
  double buffer_bytes_per_s;       // infinite where there is no shared buffer
  double hbm_bytes_per_s;          // infinite where there is no HBM
  double product_hbm_bytes_per_s;  // the same for matrix products
  double write_penalty;            // bytes that writing one to HBM costs beyond one
  double lane_ops_per_s;           // of the vector units in use
  double vector_cores;             // in use
  double macs_per_s;               // of the cores in use, at the tuning's efficiency
  double sustained_macs_per_s;     // infinite where there is no limit
};

}  // namespace phaze
