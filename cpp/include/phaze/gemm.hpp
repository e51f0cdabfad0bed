// Latency, traffic and mapping of matrix products on one chip. The formulas and the mapping space
// are in docs/cost.md; names here follow its symbols.
//
// All functions are pure, never throw, allocate nothing, and may run from any thread.
#pragma once

#include <cstdint>
#include <limits>

#include "phaze/machine.hpp"
#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

// The resource that limits an operator.
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
  // Distinct bytes of the left operand relative to m * k: below 1 for the overlapping patches of a
  // convolution, which are read from HBM once and gathered on the way to a core.
  double distinct = 1.0;
  bool aligned = false;  // whether rows are padded to 16-byte bounds, whatever k and n are
};

// Which tiles stay in the buffer, and how often the other operands are read.
enum class Order : std::int32_t { kOutputs = 0, kInputs = 1, kWeights = 2, kNothing = 3 };
inline constexpr int kOrders = 4;

struct Traffic {
  double hbm_bytes;  // of one product
  Order order;
  std::int64_t i;  // tiles along m, or along n if weights stay
  std::int64_t j;  // tiles along k if inputs or weights stay, else along n
};

// One product (or any operator) on one chip, with its breakdown.
struct CostRecord {
  double time_s;
  double bound_s;  // lower bound over all mappings
  double compute_s;
  double port_s;
  double buffer_s;
  double hbm_s;
  double power_s;
  double vector_s;
  double fill_s;
  double fixed_s;     // launches and the reduction of a split
  double overhead_s;  // starting and ending units of work, on top of compute or port
  double compute_cycles;
  double macs;
  double vector_ops;
  double port_bytes;
  double buffer_bytes;
  double hbm_bytes;
  double utilization;  // fraction of the peak of the cores used
  double energy_j;
  std::int64_t block_m;
  std::int64_t block_n;
  std::int64_t split;
  std::int64_t tiles_i;
  std::int64_t tiles_j;
  std::int32_t dataflow;  // a Dataflow; -1 for vector operators
  std::int32_t order;     // an Order; -1 if nothing is tiled
  std::int32_t limit;     // a Limit
  std::int32_t status;    // a Status; unless it is kOk, every figure is NaN
};

// Cycles of one product on one array; serial folds give what SCALE-Sim v3 reports, plus one.
// Returns -1 and sets `status` if the shape is invalid or the count exceeds 2^63 - 1.
std::int64_t array_cycles(std::int64_t m, std::int64_t k, std::int64_t n, std::int64_t rows,
                          std::int64_t cols, Dataflow dataflow, bool overlapped,
                          Status* status) noexcept;

Status check_shape(const GemmShape& shape) noexcept;

// Least HBM bytes of one product (b is ignored) with `capacity_bytes` of buffer. O(log m + log n).
Traffic hbm_traffic(const GemmShape& shape, double capacity_bytes,
                    const Precision& precision) noexcept;

// Work and bytes that operators fused onto a product add to it.
struct Epilogue {
  double ops_per_output;
  double extra_bytes;      // HBM bytes beyond the product's own operands
  double hbm_share = 1.0;  // share of all HBM bytes that do not stay on chip in a fused group
};

// A mapping with its times.
struct GemmMapping {
  double time_s = std::numeric_limits<double>::infinity();
  Dataflow dataflow = Dataflow::kOutput;
  std::int64_t block_m = 0;
  std::int64_t block_n = 0;
  std::int64_t split = 0;
  double compute_cycles = 0.0;
  double compute_s = 0.0;
  double port_s = 0.0;
  double buffer_s = 0.0;
  double fill_s = 0.0;
  double fixed_s = 0.0;
  double overhead_s = 0.0;
  double port_bytes = 0.0;
  double buffer_bytes = 0.0;
};

// The fastest mapping on the last chip, kept for chips with equal tensor cores, buffer, HBM and
// tuning: it is the fastest there as well where the time that no mapping can avoid is the same.
struct KnownGemm {
  double floor_s = -1.0;
  GemmMapping best;
};

// The fastest mapping of a valid shape. `traffic` is the result of hbm_traffic for the capacity.
// The answer does not depend on what is known, which is updated.
CostRecord best_gemm(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                     const Epilogue& epilogue, KnownGemm* known = nullptr) noexcept;

// The time of the fastest mapping: the same search without the record.
double best_gemm_time(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                      const Epilogue& epilogue, KnownGemm* known = nullptr) noexcept;

// Events that every mapping has at least: multiplications, lane operations, bytes through ports,
// buffer and HBM. The other fields are zero.
CostRecord least_gemm_events(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                             const Epilogue& epilogue) noexcept;

// Lower bound on the time of every mapping.
double gemm_bound(const GemmShape& shape, const Machine& machine,
                  const Epilogue& epilogue) noexcept;

// A tighter one, which counts the traffic, and operands that every block reads through its port.
double gemm_block_bound(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                        const Epilogue& epilogue) noexcept;

}  // namespace phaze
