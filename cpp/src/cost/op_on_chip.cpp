#include "cost/op_on_chip.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "base/numbers.hpp"
#include "phaze/fusion.hpp"
#include "phaze/parallel.hpp"
#include "phaze/vector_op.hpp"

namespace phaze {

bool is_convolution(const OperatorRecord& op) noexcept { return op.function >= kFirstConvolution; }

bool is_product(const OperatorRecord& op) noexcept {
  return op.function == static_cast<std::int32_t>(Function::kProduct) || is_convolution(op);
}

namespace {

bool is_attention(const OperatorRecord& op) noexcept {
  return op.function == static_cast<std::int32_t>(Function::kAttention) ||
         op.function == static_cast<std::int32_t>(Function::kAttentionBackward);
}

}  // namespace

bool is_collective(const OperatorRecord& op) noexcept {
  return op.function == static_cast<std::int32_t>(Function::kCollective);
}

GemmShape shape_of(const OperatorRecord& op, const Precision& p) noexcept {
  GemmShape shape{op.b, op.m, op.k, op.n};
  if (!is_convolution(op)) return shape;
  constexpr double kLeastDistinct = 1e-6;
  const double depth = static_cast<double>(op.b) * static_cast<double>(op.k) * p.in_bytes;
  const double left = op.read_bytes - depth * static_cast<double>(op.n);
  shape.distinct = std::clamp(left / (depth * static_cast<double>(op.m)), kLeastDistinct, 1.0);
  shape.aligned = true;
  return shape;
}

Status check_op(const OperatorRecord& op) noexcept {
  if (op.function < 0 || op.function >= static_cast<std::int32_t>(std::size(kFunctionNames)))
    return Status::kBadOperation;
  if (is_collective(op)) return Status::kOk;
  for (const double bytes : {op.read_bytes, op.write_bytes}) {
    if (!std::isfinite(bytes)) return Status::kNotFinite;
    if (bytes < 0.0) return Status::kNegative;
  }
  if (op.epilogue < 0) return Status::kNegative;
  for (const std::int32_t function : op.epilogue_functions) {
    constexpr auto first = static_cast<std::int32_t>(Function::kFirstVector);
    if (function != 0 && (function < first || function >= kFirstConvolution)) {
      return Status::kBadOperation;
    }
  }
  if (!(std::abs(op.kept_share) <= 1e9 && op.kept_share <= 1.0)) return Status::kBadOperation;
  const std::int64_t k = is_product(op) || is_attention(op) ? op.k : 1;
  return check_shape({op.b, op.m, k, op.n});
}

namespace {

const VectorCost& vector_cost(const OperatorRecord& op, const Machine& machine) noexcept {
  return machine.tuning->functions[static_cast<std::size_t>(op.function)];
}

// Lane operations on top of the product of a convolution, such as gathering patches from arrays of
// few channels: per multiply-accumulate, and per element that is read or written.
double gathering_ops(const OperatorRecord& op, const Machine& machine) noexcept {
  const VectorCost& cost = vector_cost(op, machine);
  const double macs = static_cast<double>(op.b) * static_cast<double>(op.m) *
                      static_cast<double>(op.k) * static_cast<double>(op.n);
  const double elements = (op.read_bytes + op.write_bytes) / machine.precision.in_bytes;
  return macs * cost.ops_per_element + elements * cost.ops_per_row;
}

// Share of an operator's HBM bytes that are moved.
double hbm_share(const OperatorRecord& op) noexcept { return 1.0 - op.kept_share; }

}  // namespace

double extra_bytes_of(const OperatorRecord& op, const Precision& p) noexcept {
  const auto b = static_cast<double>(op.b);
  const auto m = static_cast<double>(op.m);
  const auto k = static_cast<double>(op.k);
  const auto n = static_cast<double>(op.n);
  const double left = m * k * shape_of(op, p).distinct;
  const double own = b * ((left + k * n) * p.in_bytes + m * n * p.out_bytes);
  const double recorded = op.read_bytes + op.write_bytes;
  return recorded > 0.0 ? recorded - own : 0.0;
}

namespace {

// What is fused onto a product. A fused operator takes the lane operations of its function.
Epilogue epilogue_of(const OperatorRecord& op, const Machine& machine) noexcept {
  constexpr auto add = static_cast<std::size_t>(Function::kFirstVector);
  const VectorCost* functions = machine.tuning->functions;
  double additions = op.epilogue;
  double ops = 0.0;
  for (const std::int32_t function : op.epilogue_functions) {
    if (function == 0) continue;
    ops += functions[static_cast<std::size_t>(function)].ops_per_element;
    additions -= 1.0;
  }
  ops += std::max(additions, 0.0) * functions[add].ops_per_element;
  const double outputs =
      static_cast<double>(op.b) * static_cast<double>(op.m) * static_cast<double>(op.n);
  if (is_convolution(op)) ops += gathering_ops(op, machine) / outputs;
  return {ops, extra_bytes_of(op, machine.precision), hbm_share(op)};
}

AttentionShape attention_of(const OperatorRecord& op) noexcept {
  return {op.b,
          op.m,
          op.n,
          op.k,
          (op.read_bytes + op.write_bytes) * hbm_share(op),
          op.write_bytes * hbm_share(op),
          op.causal != 0,
          op.function == static_cast<std::int32_t>(Function::kAttentionBackward)};
}

VectorShape vector_of(const OperatorRecord& op) noexcept {
  return {static_cast<double>(op.b) * static_cast<double>(op.m), static_cast<double>(op.n),
          op.read_bytes + op.write_bytes, op.write_bytes, hbm_share(op)};
}

}  // namespace

double vector_per_core(const ChipRecord& chip, Cores cores) noexcept {
  if (cores == Cores::kOne) return 1.0;
  return static_cast<double>(chip.vector_cores) / static_cast<double>(chip.tensor_cores);
}

CostRecord failed(Status status) noexcept {
  CostRecord record{};
  for (double* figure :
       {&record.time_s, &record.bound_s, &record.compute_s, &record.port_s, &record.buffer_s,
        &record.hbm_s, &record.power_s, &record.vector_s, &record.fill_s, &record.fixed_s,
        &record.overhead_s, &record.compute_cycles, &record.macs, &record.vector_ops,
        &record.port_bytes, &record.buffer_bytes, &record.hbm_bytes, &record.utilization,
        &record.energy_j}) {
    *figure = kNan;
  }
  record.dataflow = -1;
  record.order = -1;
  record.status = static_cast<std::int32_t>(status);
  return record;
}

namespace {

CostRecord idle() noexcept {
  CostRecord record{};
  record.dataflow = -1;
  record.order = -1;
  record.limit = static_cast<std::int32_t>(Limit::kLaunch);
  return record;
}

// Copying `bytes` into another memory layout.
CostRecord conversion(double bytes, int function, const Machine& machine) noexcept {
  const VectorCost& cost = machine.tuning->functions[static_cast<std::size_t>(function)];
  return vector_op({1.0, bytes / machine.precision.in_bytes, 2.0 * bytes, bytes}, cost, machine);
}

// A convolution: its product by kernels that may be slower than those of plain products, and where
// arrays are in NCHW, the conversions of activations and weights before and after it.
CostRecord convolution(const OperatorRecord& op, const Machine& machine, CostRecord cost) noexcept {
  const double product_s = cost.time_s;
  const double slower = std::max(vector_cost(op, machine).byte_factor, 1.0);
  cost.time_s = cost.fixed_s + (cost.time_s - cost.fixed_s) * slower;
  if (op.function >= kFirstNchw) {
    const bool weight_gradient = (op.function - kFirstConvolution) % 3 == 2;
    const double right = static_cast<double>(op.b) * static_cast<double>(op.k) *
                         static_cast<double>(op.n) * machine.precision.in_bytes;
    const double weights = weight_gradient ? op.write_bytes : std::min(right, op.read_bytes);
    const double rest = op.read_bytes + op.write_bytes - weights;
    for (const CostRecord& part :
         {conversion(rest, kLayout, machine), conversion(weights, kLayoutWeights, machine)}) {
      cost.time_s += part.time_s;
      cost.fixed_s += part.time_s;
      cost.hbm_bytes += part.hbm_bytes;
      cost.buffer_bytes += part.buffer_bytes;
      cost.port_bytes += part.port_bytes;
      cost.vector_ops += part.vector_ops;
    }
  }
  cost.utilization *= product_s / cost.time_s;
  return cost;
}

}  // namespace

CostRecord cost_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                   double vectors, KnownGemm* known) noexcept {
  if (is_collective(op)) return idle();
  if (is_attention(op)) return attention(attention_of(op), machine, vectors);
  if (!is_product(op)) return vector_op(vector_of(op), vector_cost(op, machine), machine);
  const CostRecord cost =
      best_gemm(shape_of(op, machine.precision), machine, traffic, epilogue_of(op, machine), known);
  if (!std::isfinite(cost.time_s)) return failed(Status::kNoMapping);
  return is_convolution(op) ? convolution(op, machine, cost) : cost;
}

double time_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
               double vectors, KnownGemm* known) noexcept {
  if (!is_product(op) || is_convolution(op)) {
    return cost_on(op, machine, traffic, vectors, known).time_s;
  }
  const double time_s = best_gemm_time(shape_of(op, machine.precision), machine, traffic,
                                       epilogue_of(op, machine), known);
  return std::isfinite(time_s) ? time_s : kNan;
}

double bound_on(const OperatorRecord& op, const Machine& machine, double vectors) noexcept {
  if (is_collective(op)) return 0.0;
  if (is_attention(op)) return attention_bound(attention_of(op), machine, vectors);
  if (!is_product(op)) return vector_bound(vector_of(op), vector_cost(op, machine), machine);
  return gemm_bound(shape_of(op, machine.precision), machine, epilogue_of(op, machine));
}

double block_bound_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                      double vectors) noexcept {
  if (is_attention(op)) return attention(attention_of(op), machine, vectors).time_s * kRounding;
  if (!is_product(op)) return bound_on(op, machine, vectors);
  const Epilogue epilogue = epilogue_of(op, machine);
  return gemm_block_bound(shape_of(op, machine.precision), machine, traffic, epilogue);
}

double energy_j(const CostRecord& cost, const EnergyTable& table, double static_w) noexcept {
  return cost.macs * table.mac_j + cost.vector_ops * table.vector_op_j +
         cost.port_bytes * table.local_byte_j + cost.buffer_bytes * table.buffer_byte_j +
         cost.hbm_bytes * table.hbm_byte_j + static_w * cost.time_s;
}

CostRecord least_events(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                        double vectors) noexcept {
  if (is_product(op)) {
    return least_gemm_events(shape_of(op, machine.precision), machine, traffic,
                             epilogue_of(op, machine));
  }
  CostRecord cost = cost_on(op, machine, traffic, vectors);
  if (is_attention(op)) cost.port_bytes = cost.buffer_bytes = 0.0;
  return cost;
}

std::vector<Status> checked(std::span<const OperatorRecord> ops) {
  std::vector<Status> good(ops.size());
  std::transform(ops.begin(), ops.end(), good.begin(), check_op);
  return good;
}

TrafficTable::TrafficTable(std::span<const OperatorRecord> ops, std::span<const Status> good,
                           const ChipBatch& batch, int threads)
    : ops_(ops.size()) {
  for (std::size_t c = 0; c < batch.chips.size(); ++c) {
    capacities_.push_back(tile_capacity_bytes(batch.chips[c]));
  }
  row_of_.resize(capacities_.size());
  distinct_ = capacities_;
  std::sort(distinct_.begin(), distinct_.end());
  distinct_.erase(std::unique(distinct_.begin(), distinct_.end()), distinct_.end());
  for (std::size_t c = 0; c < capacities_.size(); ++c) {
    const auto at = std::lower_bound(distinct_.begin(), distinct_.end(), capacities_[c]);
    row_of_[c] = static_cast<std::size_t>(at - distinct_.begin());
  }
  table_.resize(distinct_.size() * ops_, kNoTraffic);
  parallel_for(table_.size(), threads, 256, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const OperatorRecord& op = ops[i % ops_];
      if (good[i % ops_] != Status::kOk || !is_product(op)) continue;
      table_[i] = hbm_traffic(shape_of(op, batch.precision), distinct_[i / ops_], batch.precision);
    }
  });
}

CostRecord op_cost(const OperatorRecord& op, const ChipRecord& chip, const TuningRecord& tuning,
                   const Precision& precision, Cores cores, const EnergyTable& energy,
                   double static_w) noexcept {
  Status status = check_machine(chip, tuning, precision);
  if (status == Status::kOk) status = check_op(op);
  if (status != Status::kOk) return failed(status);
  const Machine machine(chip, tuning, precision, cores == Cores::kOne);
  const Traffic traffic =
      is_product(op) ? hbm_traffic(shape_of(op, precision), machine.capacity_bytes, precision)
                     : kNoTraffic;
  CostRecord cost = cost_on(op, machine, traffic, vector_per_core(chip, cores));
  cost.energy_j = energy_j(cost, energy, static_w);
  return cost;
}

double op_hbm_bytes(const OperatorRecord& op, double capacity_bytes, const Precision& p,
                    bool exact) noexcept {
  if (check_op(op) != Status::kOk) return kNan;
  if (is_collective(op)) return 0.0;
  if (!is_product(op)) return op.read_bytes + op.write_bytes;
  double bytes = hbm_traffic(shape_of(op, p), capacity_bytes, p).hbm_bytes;
  if (exact && !is_convolution(op) && p.in_bytes == p.out_bytes) {
    const BufferRules rules{p.in_bytes, p.acc_bytes, p.strip_depth * p.copies, p.spills};
    bytes = std::min(bytes, least_product_bytes(op.m, op.k, op.n, capacity_bytes, rules));
  }
  return std::max(static_cast<double>(op.b) * bytes + extra_bytes_of(op, p), 0.0);
}

}  // namespace phaze
