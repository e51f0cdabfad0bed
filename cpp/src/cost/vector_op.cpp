#include "phaze/vector_op.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"
#include "cost/largest.hpp"

namespace phaze {
namespace {

constexpr std::int64_t kAttentionRows = 128;  // queries of one unit, unless a chip specifies more
// Bytes per element of Q of the two kernels around the backward pass, which overlap nothing: row
// sums of O * dO before it, and the conversion of the fp32 sums of dQ after it.
constexpr double kBackwardBytes = 14.0;
constexpr double kBackwardLaunches = 3.0;

// Cycles of a product on one array, by the best dataflow, if consecutive folds overlap.
double streaming_cycles(double m, double k, double n, double rows, double cols) noexcept {
  const double output = std::ceil(m / rows) * std::ceil(n / cols) * std::max(k, rows);
  const double weight = std::ceil(k / rows) * std::ceil(n / cols) * std::max(m, rows);
  const double input = std::ceil(k / rows) * std::ceil(m / cols) * std::max(n, rows);
  return std::min(output, std::min(weight, input));
}

// Lane operations of an operator whose rows all fit on a core.
double lane_ops(const VectorShape& shape, const VectorCost& cost) noexcept {
  const double rows = cost.most_rows > 0.0 ? std::min(shape.rows, cost.most_rows) : shape.rows;
  return shape.rows * shape.cols * cost.ops_per_element + rows * cost.ops_per_row;
}

double launch_s(const VectorCost& cost, const Machine& machine) noexcept {
  return cost.launches * machine.tuning->launch_s * machine.tuning->vector_launch_share;
}

struct AttentionUnit {
  double tensor_s;
  double vector_s;
  double overhead_s;
  double bytes;  // through the core's port

  double seconds() const noexcept { return tensor_s + vector_s + overhead_s; }
};

std::int64_t most_rows(const Machine& machine) noexcept {
  const std::int64_t most = machine.tuning->attention_most;
  return most > 0 ? most : kAttentionRows;
}

AttentionUnit unit_of(const AttentionShape& a, std::int64_t unit_rows, double keys,
                      const Machine& machine, double vector_per_core) noexcept {
  const TuningRecord& t = *machine.tuning;
  const auto rows = static_cast<double>(machine.rows);
  const auto cols = static_cast<double>(machine.cols);
  const auto width = static_cast<double>(a.width);
  const auto queries = static_cast<double>(unit_rows);
  const double scores = streaming_cycles(queries, width, keys, rows, cols);
  const double values = streaming_cycles(queries, keys, width, rows, cols);
  const double cycles = a.backward ? 2.0 * scores + 3.0 * values : scores + values;
  const double share = a.backward ? t.attention_backward_efficiency : t.attention_efficiency;
  const double ops = a.backward ? t.attention_backward_ops : t.attention_ops;
  const double lanes = machine.lane_ops_per_s / machine.vector_cores * vector_per_core;
  // Bytes per key: K and V, and backward their gradient sums, read and written. Bytes per query: Q
  // and O, and backward dO and dQ.
  const Precision& p = machine.precision;
  const double per_key = 2.0 * p.in_bytes + (a.backward ? 4.0 * p.acc_bytes : 0.0);
  const double per_query = (a.backward ? 4.0 : 2.0) * p.in_bytes;
  return {cycles / (machine.clock_hz * machine.precision.rate * share),
          queries * keys * ops / lanes, t.attention_unit_s,
          width * (keys * per_key + queries * per_query)};
}

double launches_of(const AttentionShape& a) noexcept {
  return a.backward ? kBackwardLaunches : 1.0;
}

// Bytes of the kernels that run before and after the backward pass.
double side_bytes(const AttentionShape& a) noexcept {
  if (!a.backward) return 0.0;
  return kBackwardBytes * static_cast<double>(a.pairs) * static_cast<double>(a.queries) *
         static_cast<double>(a.width);
}

double macs_of(const AttentionShape& a) noexcept {
  const double products = a.backward ? 5.0 : 2.0;
  const double all = products * static_cast<double>(a.pairs) * static_cast<double>(a.queries) *
                     static_cast<double>(a.keys) * static_cast<double>(a.width);
  return a.causal ? 0.5 * all : all;
}

}  // namespace

CostRecord vector_op(const VectorShape& shape, const VectorCost& cost,
                     const Machine& machine) noexcept {
  const bool is_long = cost.row_limit > 0.0 && shape.cols > cost.row_limit;
  const double ops = lane_ops(shape, cost) * (is_long ? cost.long_ops : 1.0);
  const double factor = cost.byte_factor * (is_long ? cost.long_bytes : 1.0);
  const double bytes = shape.bytes * factor;
  CostRecord record{};
  record.vector_ops = ops;
  const double row_s = shape.cols * cost.row_cycles / machine.clock_hz;
  record.vector_s = std::max(ops / machine.lane_ops_per_s, row_s);
  record.port_s = bytes / (machine.vector_cores * machine.port_bytes_per_s);
  record.buffer_s = bytes / machine.buffer_bytes_per_s;
  record.hbm_s = (bytes + machine.write_penalty * shape.written * factor) * shape.hbm_share /
                 machine.hbm_bytes_per_s;
  record.fixed_s = launch_s(cost, machine);
  const double busy =
      std::max(std::max(record.vector_s, record.port_s), std::max(record.buffer_s, record.hbm_s));
  record.time_s = record.fixed_s + busy;
  record.bound_s = vector_bound(shape, cost, machine);
  record.port_bytes = bytes;
  record.buffer_bytes = bytes;
  record.hbm_bytes = std::isfinite(machine.hbm_bytes_per_s) ? bytes * shape.hbm_share : 0.0;
  record.utilization = record.time_s > 0.0 ? record.vector_s / record.time_s : 0.0;
  record.dataflow = -1;
  record.order = -1;
  Largest most{record.vector_s, Limit::kVector};
  most.consider(record.port_s, Limit::kPort);
  most.consider(record.buffer_s, Limit::kBuffer);
  most.consider(record.hbm_s, Limit::kHbm);
  most.consider(record.fixed_s, Limit::kLaunch);
  record.limit = static_cast<std::int32_t>(most.limit);
  return record;
}

double vector_bound(const VectorShape& shape, const VectorCost& cost,
                    const Machine& machine) noexcept {
  const double ops = lane_ops(shape, cost);
  const double factor = std::min(cost.byte_factor, 1.0);
  const double moved = shape.bytes * factor;
  double most = ops / machine.lane_ops_per_s;
  most = std::max(most, moved / (machine.vector_cores * machine.port_bytes_per_s));
  most = std::max(most, moved / machine.buffer_bytes_per_s);
  most = std::max(most, (moved + machine.write_penalty * shape.written * factor) * shape.hbm_share /
                            machine.hbm_bytes_per_s);
  return (launch_s(cost, machine) + most) * kRounding;
}

namespace {

// Fills the fields of a record other than times: work, bytes, block and limit.
void describe(const AttentionShape& a, std::int64_t unit_rows, const Machine& machine, double moved,
              double busy_s, CostRecord& record) noexcept {
  const auto keys = static_cast<double>(a.keys);
  const double side = side_bytes(a);
  const double work = record.compute_s + record.vector_s;
  const double share = a.backward ? machine.tuning->attention_backward_efficiency
                                  : machine.tuning->attention_efficiency;
  record.compute_cycles = record.compute_s * machine.clock_hz * machine.precision.rate * share;
  record.macs = macs_of(a);
  const double ops =
      a.backward ? machine.tuning->attention_backward_ops : machine.tuning->attention_ops;
  record.vector_ops = ops * static_cast<double>(a.pairs) * static_cast<double>(a.queries) * keys *
                      (a.causal ? 0.5 : 1.0);
  record.port_bytes = moved;
  record.buffer_bytes = moved;
  record.hbm_bytes = std::isfinite(machine.hbm_bytes_per_s) ? a.bytes + side : 0.0;
  record.utilization =
      record.macs / (record.time_s * (machine.macs_per_s / machine.tuning->efficiency));
  record.block_m = unit_rows;
  record.block_n = a.keys;
  record.split = 1;
  record.dataflow = static_cast<std::int32_t>(Dataflow::kOutput);
  record.order = -1;
  Limit limit = record.compute_s >= record.vector_s ? Limit::kCompute : Limit::kVector;
  if (record.port_s > work) limit = Limit::kPort;
  if (record.buffer_s > std::max(work, record.port_s)) limit = Limit::kBuffer;
  if (record.hbm_s + record.fill_s > busy_s) limit = Limit::kHbm;
  if (record.fixed_s + record.overhead_s > std::max(busy_s, record.hbm_s + record.fill_s)) {
    limit = Limit::kLaunch;
  }
  record.limit = static_cast<std::int32_t>(limit);
}

// Attention spread over the cores in units of `unit_rows` queries.
CostRecord in_units(const AttentionShape& a, std::int64_t unit_rows, const Machine& machine,
                    double vector_per_core) noexcept {
  const auto cores = static_cast<double>(machine.cores);
  const std::int64_t count = a.pairs * ceil_div(a.queries, unit_rows);
  const auto units = static_cast<double>(count);
  const auto keys = static_cast<double>(a.keys);
  const double mean_keys =
      a.causal ? std::min(keys, (keys + static_cast<double>(unit_rows)) / 2.0) : keys;
  const AttentionUnit longest = unit_of(a, unit_rows, keys, machine, vector_per_core);
  const AttentionUnit mean = unit_of(a, unit_rows, mean_keys, machine, vector_per_core);
  CostRecord record{};
  double scale = 0.0;  // units of the busiest core
  double bytes = 0.0;  // through one core's port
  const auto waves = static_cast<double>(ceil_div(count, machine.cores));
  const double tail = 1.0 - cores / (2.0 * units);
  // Skip masked scores only if that is faster.
  const bool helps =
      a.causal && count > machine.cores &&
      units / cores * mean.seconds() + tail * longest.seconds() < waves * longest.seconds();
  if (helps) {
    scale = units / cores + tail;
    record.compute_s = units / cores * mean.tensor_s + tail * longest.tensor_s;
    record.vector_s = units / cores * mean.vector_s + tail * longest.vector_s;
    bytes = units / cores * mean.bytes + tail * longest.bytes;
  } else {
    scale = waves;
    record.compute_s = scale * longest.tensor_s;
    record.vector_s = scale * longest.vector_s;
    bytes = scale * longest.bytes;
  }
  const double overhead_s = scale * longest.overhead_s;
  const double side = side_bytes(a);
  record.hbm_s = (a.bytes + machine.write_penalty * a.written) / machine.hbm_bytes_per_s;
  record.fixed_s = launches_of(a) * machine.tuning->launch_s;
  record.overhead_s = overhead_s;
  record.fill_s = side / machine.hbm_bytes_per_s;
  const double work = record.compute_s + record.vector_s;
  double moved = a.bytes + side;
  if (unit_rows < most_rows(machine)) {  // smaller units load the same keys more often
    moved = units * mean.bytes + side;
    record.port_s = bytes / machine.port_bytes_per_s;
    record.buffer_s = units * mean.bytes / machine.buffer_bytes_per_s;
  }
  const double busy = std::max(work, std::max(record.port_s, record.buffer_s));
  record.time_s = launches_of(a) * machine.tuning->launch_s +
                  std::max(busy + overhead_s, record.hbm_s) + record.fill_s;
  record.bound_s = attention_bound(a, machine, vector_per_core);
  describe(a, unit_rows, machine, moved, busy, record);
  return record;
}

}  // namespace

CostRecord attention(const AttentionShape& a, const Machine& machine,
                     double vector_per_core) noexcept {
  const std::int64_t fewest = machine.tuning->attention_least;
  const std::int64_t most = most_rows(machine);
  CostRecord best = in_units(a, most, machine, vector_per_core);
  for (std::int64_t rows = most / 2; fewest > 0 && rows >= fewest; rows /= 2) {
    const CostRecord smaller = in_units(a, rows, machine, vector_per_core);
    if (smaller.time_s < best.time_s) best = smaller;
  }
  return best;
}

double attention_bound(const AttentionShape& a, const Machine& machine,
                       double vector_per_core) noexcept {
  const TuningRecord& t = *machine.tuning;
  const auto pairs = static_cast<double>(a.pairs);
  const auto queries = static_cast<double>(a.queries);
  const auto keys = static_cast<double>(a.keys);
  const double share = a.backward ? t.attention_backward_efficiency : t.attention_efficiency;
  const double ops = a.backward ? t.attention_backward_ops : t.attention_ops;
  const double lanes = machine.lane_ops_per_s / machine.vector_cores * vector_per_core *
                       static_cast<double>(machine.cores);
  const double scores = pairs * queries * keys * (a.causal ? 0.5 : 1.0);
  const double busy =
      macs_of(a) / (machine.macs_per_s / t.efficiency * share) + scores * ops / lanes;
  const double moved = (a.bytes + machine.write_penalty * a.written) / machine.hbm_bytes_per_s;
  return (launches_of(a) * t.launch_s + std::max(busy, moved) +
          side_bytes(a) / machine.hbm_bytes_per_s) *
         kRounding;
}

}  // namespace phaze
