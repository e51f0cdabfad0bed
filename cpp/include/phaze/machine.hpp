// One chip as the cost kernels use it: rates per second, limits, and software efficiencies.
//
// All functions are pure, never throw, allocate nothing, and may run from any thread.
#pragma once

#include <cstdint>

#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

enum class Dataflow : std::int32_t { kOutput = 0, kWeight = 1, kInput = 2 };
inline constexpr int kDataflows = 3;

// Return kOk if every count, rate and share is in range.
Status check_chip(const ChipRecord& chip) noexcept;
Status check_tuning(const TuningRecord& tuning, const Precision& precision) noexcept;
Status check_machine(const ChipRecord& chip, const TuningRecord& tuning,
                     const Precision& precision) noexcept;

// Bytes available to tiles: the shared buffer, or the sum of the local buffers if there is none.
double tile_capacity_bytes(const ChipRecord& chip) noexcept;

// Values derived once per chip; P, R, C and rho are symbols of docs/cost.md.
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
  double capacity_bytes;  // bytes available to tiles
  double clock_hz;
  double port_bytes_per_s;         // of one core, aligned
  double buffer_bytes_per_s;       // infinite if there is no shared buffer
  double hbm_bytes_per_s;          // infinite if there is no HBM
  double product_hbm_bytes_per_s;  // HBM rate that matrix products reach
  double write_penalty;            // extra bytes charged per byte written to HBM
  double lane_ops_per_s;           // of the vector units in use
  double vector_cores;             // in use
  double macs_per_s;               // of the cores in use, at the tuning's efficiency
  double sustained_macs_per_s;     // infinite if there is no limit
};

}  // namespace phaze
