// Latency, traffic and mapping of matrix products on one chip. The formulas and the mapping space
// are in docs/cost.md; names here follow its symbols.
//
// All functions are pure, never throw, allocate nothing, and may run from any thread.
#pragma once

#include <cstdint>

#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

enum class Dataflow : std::int32_t { kOutput = 0, kWeight = 1, kInput = 2 };
inline constexpr int kDataflows = 3;

// What limits an operator.
enum class Limit : std::int32_t {
  kCompute = 0,
  kPort = 1,
  kBuffer = 2,
  kHbm = 3,
  kPower = 4,
  kVector = 5,
  kLaunch = 6,
};
inline constexpr int kLimits = 7;

struct GemmShape {
  std::int64_t b;
  std::int64_t m;
  std::int64_t k;
  std::int64_t n;
};

// Which tiles stay in the buffer, and how often the other operands are read.
enum class Order : std::int32_t { kOutputs = 0, kInputs = 1, kWeights = 2, kNothing = 3 };
inline constexpr int kOrders = 4;

struct Traffic {
  double hbm_bytes;  // of one product
  Order order;
  std::int64_t i;  // tiles along m, m or n
  std::int64_t j;  // tiles along n, k or k
};

// One product (or any operator) on one chip, with its breakdown.
struct CostRecord {
  double time_s;
  double bound_s;  // no mapping can be faster
  double compute_s;
  double port_s;
  double buffer_s;
  double hbm_s;
  double power_s;
  double vector_s;
  double fill_s;
  double fixed_s;  // launches, unit overheads and the reduction of a split
  double compute_cycles;
  double macs;
  double vector_ops;
  double port_bytes;
  double buffer_bytes;
  double hbm_bytes;
  double utilization;  // share of the peak of the cores used
  double energy_j;
  std::int64_t block_m;
  std::int64_t block_n;
  std::int64_t split;
  std::int64_t tiles_i;
  std::int64_t tiles_j;
  std::int32_t dataflow;  // a Dataflow; -1 for vector operators
  std::int32_t order;     // an Order; -1 where nothing is tiled
  std::int32_t limit;     // a Limit
  std::int32_t status;    // a Status; on anything but kOk every figure is NaN
};

// Cycles of one product on one array; serial folds give what SCALE-Sim v3 reports, plus one.
// Returns -1 and sets `status` where the shape is bad or the count exceeds 2^63 - 1.
std::int64_t array_cycles(std::int64_t m, std::int64_t k, std::int64_t n, std::int64_t rows,
                          std::int64_t cols, Dataflow dataflow, bool overlapped,
                          Status* status) noexcept;

Status check_shape(const GemmShape& shape) noexcept;
Status check_machine(const ChipRecord& chip, const TuningRecord& tuning,
                     const Precision& precision) noexcept;

// Least HBM bytes of one product (b is ignored) with `capacity_bytes` of buffer. O(log m + log n).
Traffic hbm_traffic(const GemmShape& shape, double capacity_bytes,
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

// What an operator adds to a product.
struct Epilogue {
  double ops_per_output;
  double extra_bytes;  // HBM bytes beyond the product's own operands
};

// The fastest mapping of a valid shape. `traffic` is what hbm_traffic gives for the capacity.
CostRecord best_gemm(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                     const Epilogue& epilogue) noexcept;

// Its time alone: the same search without the record.
double best_gemm_time(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                      const Epilogue& epilogue) noexcept;

// No mapping is faster.
double gemm_bound(const GemmShape& shape, const Machine& machine,
                  const Epilogue& epilogue) noexcept;

}  // namespace phaze
