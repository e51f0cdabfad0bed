#include "phaze/op_cost.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <unordered_map>

#include "base/numbers.hpp"
#include "phaze/fusion.hpp"
#include "phaze/parallel.hpp"
#include "phaze/vector_op.hpp"

namespace phaze {
namespace {

constexpr Traffic kNoTraffic{0.0, Order::kNothing, 0, 0};

bool is_convolution(const OperatorRecord& op) noexcept { return op.function >= kFirstConvolution; }

bool is_product(const OperatorRecord& op) noexcept {
  return op.function == static_cast<std::int32_t>(Function::kProduct) || is_convolution(op);
}

bool is_attention(const OperatorRecord& op) noexcept {
  return op.function == static_cast<std::int32_t>(Function::kAttention) ||
         op.function == static_cast<std::int32_t>(Function::kAttentionBackward);
}

bool is_collective(const OperatorRecord& op) noexcept {
  return op.function == static_cast<std::int32_t>(Function::kCollective);
}

// The product of an operator. Patches of a convolution overlap: the bytes that its record reads
// beyond the right operand are those of distinct values.
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

// Bytes that the product's record reads and writes beyond its own operands.
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

// Vector units per tensor core; 1 if costs are those of one core of each type.
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

CostRecord cost_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                   double vectors) noexcept {
  if (is_collective(op)) return idle();
  if (is_attention(op)) return attention(attention_of(op), machine, vectors);
  if (!is_product(op)) return vector_op(vector_of(op), vector_cost(op, machine), machine);
  const CostRecord cost =
      best_gemm(shape_of(op, machine.precision), machine, traffic, epilogue_of(op, machine));
  if (!std::isfinite(cost.time_s)) return failed(Status::kNoMapping);
  return is_convolution(op) ? convolution(op, machine, cost) : cost;
}

double time_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
               double vectors) noexcept {
  if (!is_product(op) || is_convolution(op)) return cost_on(op, machine, traffic, vectors).time_s;
  const double time_s =
      best_gemm_time(shape_of(op, machine.precision), machine, traffic, epilogue_of(op, machine));
  return std::isfinite(time_s) ? time_s : kNan;
}

double bound_on(const OperatorRecord& op, const Machine& machine, double vectors) noexcept {
  if (is_collective(op)) return 0.0;
  if (is_attention(op)) return attention_bound(attention_of(op), machine, vectors);
  if (!is_product(op)) return vector_bound(vector_of(op), vector_cost(op, machine), machine);
  return gemm_bound(shape_of(op, machine.precision), machine, epilogue_of(op, machine));
}

double energy_j(const CostRecord& cost, const EnergyTable& table, double static_w) noexcept {
  return cost.macs * table.mac_j + cost.vector_ops * table.vector_op_j +
         cost.port_bytes * table.local_byte_j + cost.buffer_bytes * table.buffer_byte_j +
         cost.hbm_bytes * table.hbm_byte_j + static_w * cost.time_s;
}

// Events that an operator has at least; bytes that attention moves on the chip are not counted.
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

// HBM traffic depends on the shape and the buffer alone, so chips with equal buffers share it.
class TrafficTable {
 public:
  TrafficTable(std::span<const OperatorRecord> ops, std::span<const Status> good,
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
        table_[i] =
            hbm_traffic(shape_of(op, batch.precision), distinct_[i / ops_], batch.precision);
      }
    });
  }

  const Traffic& at(std::size_t chip, std::size_t op) const noexcept {
    return table_[row_of_[chip] * ops_ + op];
  }

 private:
  std::size_t ops_;
  std::vector<double> capacities_;
  std::vector<double> distinct_;
  std::vector<std::size_t> row_of_;
  std::vector<Traffic> table_;
};

std::vector<Status> checked(std::span<const OperatorRecord> ops) {
  std::vector<Status> good(ops.size());
  std::transform(ops.begin(), ops.end(), good.begin(), check_op);
  return good;
}

// The status of each chip with its tuning; every tuning is checked once.
class CheckedChips {
 public:
  explicit CheckedChips(const ChipBatch& batch) : batch_(batch), tunings_(batch.tunings.size()) {
    std::transform(batch.tunings.begin(), batch.tunings.end(), tunings_.begin(),
                   [&](const TuningRecord& t) { return check_tuning(t, batch.precision); });
  }

  Status operator()(std::size_t c) const noexcept {
    const auto t = static_cast<std::size_t>(batch_.tuning_of[c]);  // negative: beyond the end
    if (t >= tunings_.size()) return Status::kBadTuning;
    const Status status = check_chip(batch_.chips[c]);
    return status == Status::kOk ? tunings_[t] : status;
  }

 private:
  const ChipBatch& batch_;
  std::vector<Status> tunings_;
};

// Calls good(chip, machine, op) for every valid pair and bad(chip, op, status) for every invalid
// one.
template <typename Good, typename Bad>
void for_pairs(std::span<const OperatorRecord> ops, std::span<const Status> state,
               const ChipBatch& batch, Cores cores, int threads, const Good& good, const Bad& bad) {
  const CheckedChips check(batch);
  const std::size_t grain = 1 + 256 / std::max<std::size_t>(ops.size(), 1);
  parallel_for(batch.chips.size(), threads, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t c = begin; c < end; ++c) {
      const Status status = check(c);
      if (status != Status::kOk) {
        for (std::size_t o = 0; o < ops.size(); ++o) bad(c, o, status);
        continue;
      }
      const auto t = static_cast<std::size_t>(batch.tuning_of[c]);
      const Machine machine(batch.chips[c], batch.tunings[t], batch.precision,
                            cores == Cores::kOne);
      for (std::size_t o = 0; o < ops.size(); ++o) {
        if (state[o] == Status::kOk) {
          good(c, machine, o);
        } else {
          bad(c, o, state[o]);
        }
      }
    }
  });
}

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// All that some figure depends on of a chip: it is the same, to the last bit, on chips with equal
// rates.
struct Rates {
  std::array<double, 14> rates;
  std::int32_t tuning;
  bool operator==(const Rates&) const = default;
};

struct HashOfRates {
  std::size_t operator()(const Rates& own) const noexcept {
    auto h = static_cast<std::uint64_t>(own.tuning);
    for (const double rate : own.rates) {
      h = std::rotl(h ^ std::bit_cast<std::uint64_t>(rate), 29) * 0x9E3779B97F4A7C15ULL;
    }
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

// All that `bound_on` reads of a chip with all cores, computed as there.
std::array<double, 14> roofline_rates(const Machine& m, double vector_per_core) noexcept {
  const auto cores = static_cast<double>(m.cores);
  const TuningRecord& t = *m.tuning;
  const bool unaligned = t.port_even_bytes_per_cycle > 0.0 || t.port_odd_bytes_per_cycle > 0.0;
  const double lanes = m.lane_ops_per_s / m.vector_cores * vector_per_core;
  return {m.macs_per_s,
          m.sustained_macs_per_s,
          m.hbm_bytes_per_s,
          m.product_hbm_bytes_per_s,
          m.buffer_bytes_per_s,
          m.lane_ops_per_s,
          lanes * cores,
          cores * m.port_bytes_per_s,
          m.vector_cores * m.port_bytes_per_s,
          unaligned ? cores : 0.0,
          unaligned ? m.clock_hz : 0.0,
          t.resident_share > 0.0 ? m.buffer_bytes : 0.0};
}

// All that `time_on` reads of a chip, apart from its tuning and what follows from these.
std::array<double, 14> mapping_rates(const Machine& m, double vector_per_core) noexcept {
  return {static_cast<double>(m.cores),
          static_cast<double>(m.rows),
          static_cast<double>(m.cols),
          m.local_bytes,
          m.buffer_bytes,
          m.capacity_bytes,
          m.clock_hz,
          m.port_bytes_per_s,
          m.buffer_bytes_per_s,
          m.hbm_bytes_per_s,
          m.lane_ops_per_s,
          m.vector_cores,
          m.sustained_macs_per_s,
          vector_per_core};
}

// The first chip with each set of rates, and the position among these of every chip's own; kNone
// for a bad chip.
struct AlikeChips {
  std::vector<std::size_t> first;
  std::vector<std::size_t> same;

  template <typename RatesOf>
  AlikeChips(const ChipBatch& batch, Cores cores, const RatesOf& rates_of)
      : same(batch.chips.size(), kNone) {
    const CheckedChips check(batch);
    std::unordered_map<Rates, std::size_t, HashOfRates> known;
    for (std::size_t c = 0; c < same.size(); ++c) {
      if (check(c) != Status::kOk) continue;
      const std::int32_t tuning = batch.tuning_of[c];
      const Machine machine(batch.chips[c], batch.tunings[static_cast<std::size_t>(tuning)],
                            batch.precision, cores == Cores::kOne);
      const Rates own{rates_of(machine, vector_per_core(batch.chips[c], cores)), tuning};
      const auto [at, fresh] = known.try_emplace(own, first.size());
      if (fresh) first.push_back(c);
      same[c] = at->second;
    }
  }
};

}  // namespace

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

void op_cost_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                   std::span<const EnergyTable> energy, std::span<const double> static_w,
                   std::span<CostRecord> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  for_pairs(
      ops, state, batch, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        CostRecord& cost = out[c * ops.size() + o];
        cost = cost_on(ops[o], machine, traffic.at(c, o), vector_per_core(batch.chips[c], cores));
        cost.energy_j = energy_j(cost, energy[c], static_w[c]);
      },
      [&](std::size_t c, std::size_t o, Status status) {
        out[c * ops.size() + o] = failed(status);
      });
}

void op_time_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                   std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const AlikeChips alike(batch, cores, mapping_rates);
  std::vector<ChipRecord> chips;
  std::vector<std::int32_t> tuning_of;
  for (const std::size_t c : alike.first) {
    chips.push_back(batch.chips[c]);
    tuning_of.push_back(batch.tuning_of[c]);
  }
  const ChipBatch few{chips, tuning_of, batch.tunings, batch.precision};
  const TrafficTable traffic(ops, state, few, threads);
  std::vector<double> times(chips.size() * ops.size(), kNan);
  for_pairs(
      ops, state, few, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        times[c * ops.size() + o] =
            time_on(ops[o], machine, traffic.at(c, o), vector_per_core(chips[c], cores));
      },
      [](std::size_t, std::size_t, Status) {});
  std::fill(out.begin(), out.end(), kNan);
  for (std::size_t c = 0; c < alike.same.size(); ++c) {
    if (alike.same[c] == kNone) continue;
    std::copy_n(times.data() + alike.same[c] * ops.size(), ops.size(), out.data() + c * ops.size());
  }
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

void op_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                    std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  for_pairs(
      ops, state, batch, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        out[c * ops.size() + o] = bound_on(ops[o], machine, vector_per_core(batch.chips[c], cores));
      },
      [&](std::size_t c, std::size_t o, Status) { out[c * ops.size() + o] = kNan; });
}

void energy_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                        std::span<const EnergyTable> energy, std::span<const double> count,
                        std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  std::fill(out.begin(), out.end(), 0.0);
  for_pairs(
      ops, state, batch, Cores::kAll, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        const double vectors = vector_per_core(batch.chips[c], Cores::kAll);
        const CostRecord cost = least_events(ops[o], machine, traffic.at(c, o), vectors);
        out[c] += count[o] * energy_j(cost, energy[c], 0.0) * kRounding;
      },
      [&](std::size_t c, std::size_t, Status) { out[c] = kNan; });
}

void path_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                      const PathBatch& paths, std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const AlikeChips alike(batch, Cores::kAll, roofline_rates);
  const std::vector<std::size_t>& first = alike.first;
  const std::size_t sums = batch.chips.empty() ? 0 : out.size() / batch.chips.size();
  std::vector<double> bounds(first.size() * sums, 0.0);
  constexpr std::size_t kChips = 256;
  parallel_for(first.size(), threads, kChips, [&](std::size_t begin, std::size_t end) {
    std::vector<double> bound_s(ops.size(), kNan);
    std::vector<double> finish_s(paths.op.size());
    for (std::size_t d = begin; d < end; ++d) {
      const auto t = static_cast<std::size_t>(batch.tuning_of[first[d]]);
      const Machine machine(batch.chips[first[d]], batch.tunings[t], batch.precision, false);
      const double vector = vector_per_core(batch.chips[first[d]], Cores::kAll);
      for (std::size_t o = 0; o < ops.size(); ++o) {
        if (state[o] == Status::kOk) bound_s[o] = bound_on(ops[o], machine, vector);
      }
      double* const sum = &bounds[d * sums];
      for (std::size_t g = 0; g + 1 < paths.node_ptr.size(); ++g) {
        double longest = 0.0;
        for (auto i = static_cast<std::size_t>(paths.node_ptr[g]);
             i < static_cast<std::size_t>(paths.node_ptr[g + 1]); ++i) {
          double ready = 0.0;
          for (auto e = static_cast<std::size_t>(paths.before_ptr[i]);
               e < static_cast<std::size_t>(paths.before_ptr[i + 1]); ++e) {
            ready = std::max(ready, finish_s[static_cast<std::size_t>(paths.before[e])]);
          }
          finish_s[i] = ready + (bound_s[static_cast<std::size_t>(paths.op[i])] + paths.extra_s[i]);
          // A NaN bound stays NaN.
          if (!(finish_s[i] <= longest)) longest = finish_s[i];
        }
        sum[paths.sum_of[g]] += paths.count[g] * longest;
      }
    }
  });
  for (std::size_t c = 0; c < batch.chips.size(); ++c) {
    for (std::size_t n = 0; n < sums; ++n) {
      const bool known = alike.same[c] != kNone;
      out[n * batch.chips.size() + c] = known ? bounds[alike.same[c] * sums + n] : kNan;
    }
  }
}

}  // namespace phaze
