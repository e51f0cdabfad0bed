#include "phaze/op_cost.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <utility>

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
                   double vectors, KnownGemm* known = nullptr) noexcept {
  if (is_collective(op)) return idle();
  if (is_attention(op)) return attention(attention_of(op), machine, vectors);
  if (!is_product(op)) return vector_op(vector_of(op), vector_cost(op, machine), machine);
  const CostRecord cost =
      best_gemm(shape_of(op, machine.precision), machine, traffic, epilogue_of(op, machine), known);
  if (!std::isfinite(cost.time_s)) return failed(Status::kNoMapping);
  return is_convolution(op) ? convolution(op, machine, cost) : cost;
}

double time_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
               double vectors, KnownGemm* known = nullptr) noexcept {
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

// A tighter bound of products, by their blocks; and the time of attention, which has few mappings.
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

// A valid chip of a batch as it runs operators.
Machine machine_of(const ChipBatch& batch, std::size_t c, Cores cores) noexcept {
  const auto t = static_cast<std::size_t>(batch.tuning_of[c]);
  return {batch.chips[c], batch.tunings[t], batch.precision, cores == Cores::kOne};
}

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
      const Machine machine = machine_of(batch, c, cores);
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
  std::array<double, 12> rates;
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
std::array<double, 12> roofline_rates(const Machine& m, double vector_per_core) noexcept {
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

// The first chip with each set of rates, and the position among these of every chip's own; kNone
// for a bad chip. With several formats, each chip counts as different from all others.
struct AlikeChips {
  std::vector<std::size_t> first;
  std::vector<std::size_t> same;

  explicit AlikeChips(std::span<const ChipBatch> formats) : same(formats[0].chips.size(), kNone) {
    const std::vector<CheckedChips> checks(formats.begin(), formats.end());
    std::unordered_map<Rates, std::size_t, HashOfRates> known;
    for (std::size_t c = 0; c < same.size(); ++c) {
      const auto good = [&](const CheckedChips& check) { return check(c) == Status::kOk; };
      if (!std::ranges::all_of(checks, good)) continue;
      same[c] = first.size();
      if (formats.size() == 1) {
        const ChipBatch& batch = formats[0];
        const double vectors = vector_per_core(batch.chips[c], Cores::kAll);
        const Rates own{roofline_rates(machine_of(batch, c, Cores::kAll), vectors),
                        batch.tuning_of[c]};
        same[c] = known.try_emplace(own, first.size()).first->second;
      }
      if (same[c] == first.size()) first.push_back(c);
    }
  }
};

// A chip of a batch, with all that the search over mappings reads of it: of one core, then the
// number of cores. The other limits of a product enter by their seconds.
struct OrderedChip {
  std::array<double, 10> rates;
  std::size_t chip;

  bool same_core(const OrderedChip& other) const noexcept {
    return std::equal(rates.begin(), rates.end() - 1, other.rates.begin());
  }
};

// The valid chips of a batch, those with the same tensor cores next to each other.
std::vector<OrderedChip> by_tensor_cores(const ChipBatch& batch) {
  const CheckedChips check(batch);
  std::vector<OrderedChip> order;
  for (std::size_t c = 0; c < batch.chips.size(); ++c) {
    if (check(c) != Status::kOk) continue;
    const std::int32_t tuning = batch.tuning_of[c];
    const Machine m(batch.chips[c], batch.tunings[static_cast<std::size_t>(tuning)],
                    batch.precision, true);
    order.push_back(
        {{static_cast<double>(tuning), static_cast<double>(m.rows), static_cast<double>(m.cols),
          m.local_bytes, m.buffer_bytes, m.clock_hz, m.port_bytes_per_s, m.buffer_bytes_per_s,
          m.product_hbm_bytes_per_s, static_cast<double>(batch.chips[c].tensor_cores)},
         c});
  }
  std::ranges::sort(order, {},
                    [](const OrderedChip& own) { return std::pair(own.rates, own.chip); });
  return order;
}

constexpr std::size_t kChipsAtOnce = 64;

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
  const TrafficTable traffic(ops, state, batch, threads);
  for_pairs(
      ops, state, batch, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        out[c * ops.size() + o] =
            time_on(ops[o], machine, traffic.at(c, o), vector_per_core(batch.chips[c], cores));
      },
      [&](std::size_t c, std::size_t o, Status) { out[c * ops.size() + o] = kNan; });
}

void op_figures_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                      std::span<const EnergyTable> energy, const OpFigures& out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  const std::vector<OrderedChip> order = by_tensor_cores(batch);
  const std::size_t count = ops.size();
  for (const std::span<double> column : {out.time_s, out.one_core_s, out.bound_s, out.dynamic_j}) {
    std::fill(column.begin(), column.end(), kNan);
  }
  parallel_for(order.size(), threads, kChipsAtOnce, [&](std::size_t begin, std::size_t end) {
    std::vector<KnownGemm> on_all(count);
    std::vector<KnownGemm> on_one(count);
    for (std::size_t i = begin; i < end; ++i) {
      if (i == begin || !order[i].same_core(order[i - 1])) on_one.assign(count, {});
      if (i == begin || order[i].rates != order[i - 1].rates) on_all.assign(count, {});
      const std::size_t c = order[i].chip;
      const ChipRecord& chip = batch.chips[c];
      const Machine all = machine_of(batch, c, Cores::kAll);
      const Machine one = machine_of(batch, c, Cores::kOne);
      for (std::size_t o = 0; o < count; ++o) {
        if (state[o] != Status::kOk) continue;
        const std::size_t cell = c * count + o;
        const Traffic& moved = traffic.at(c, o);
        const CostRecord cost =
            cost_on(ops[o], all, moved, vector_per_core(chip, Cores::kAll), &on_all[o]);
        out.time_s[cell] = cost.time_s;
        out.bound_s[cell] = cost.bound_s;
        out.dynamic_j[cell] = energy_j(cost, energy[c], 0.0);
        out.one_core_s[cell] =
            time_on(ops[o], one, moved, vector_per_core(chip, Cores::kOne), &on_one[o]);
      }
    }
  });
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

namespace {

// The chips as each of several formats runs them, and the status of all operators.
struct FormatBatches {
  FormatBatches(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                std::span<const std::int32_t> tuning_of) {
    for (const FormatOps& own : formats) {
      batches.push_back({chips, tuning_of, own.tunings, own.precision});
      states.push_back(checked(own.ops));
      count += own.ops.size();
    }
  }

  std::vector<ChipBatch> batches;
  std::vector<std::vector<Status>> states;
  std::size_t count = 0;
};

// Earliest ends of the nodes of a graph that take least_s each; returns the latest, NaN if one is.
double longest_path_s(const PathBatch& paths, std::size_t graph, std::span<const double> least_s,
                      std::span<double> end_s) noexcept {
  double longest = 0.0;
  for (auto i = static_cast<std::size_t>(paths.node_ptr[graph]);
       i < static_cast<std::size_t>(paths.node_ptr[graph + 1]); ++i) {
    double ready = 0.0;
    for (auto e = static_cast<std::size_t>(paths.before_ptr[i]);
         e < static_cast<std::size_t>(paths.before_ptr[i + 1]); ++e) {
      ready = std::max(ready, end_s[static_cast<std::size_t>(paths.before[e])]);
    }
    end_s[i] = ready + (least_s[static_cast<std::size_t>(paths.op[i])] + paths.extra_s[i]);
    // A NaN bound stays NaN.
    if (!(end_s[i] <= longest)) longest = end_s[i];
  }
  return longest;
}

// Bit r is set if the operator needs resource r: tensor cores, vector cores.
unsigned cores_needed(const OperatorRecord& op) noexcept {
  constexpr unsigned kOfUnit[] = {1, 2, 3, 0};  // tensor, vector, both, network
  return kOfUnit[op.unit & 3];
}

// Lower bounds of operators on one chip: on all cores, on one core of each type, and the less.
struct WorkOnChip {
  explicit WorkOnChip(std::size_t ops) : all_s(ops), one_s(ops), least_s(ops), needed(ops) {}

  // What all operators of a graph take in all, where a core or their number limits them.
  double shared_s(const PathBatch& paths, std::size_t graph, const SharedWork& shared,
                  const ChipRecord& chip) const noexcept {
    double work_s = 0.0;
    double of_cores_s[2] = {0.0, 0.0};
    const double cores[2] = {static_cast<double>(chip.tensor_cores),
                             static_cast<double>(chip.vector_cores)};
    for (auto i = static_cast<std::size_t>(paths.node_ptr[graph]);
         i < static_cast<std::size_t>(paths.node_ptr[graph + 1]); ++i) {
      const auto op = static_cast<std::size_t>(paths.op[i]);
      const double on_all_s = all_s[op] + paths.extra_s[i];
      const double on_one_s = one_s[op] + paths.extra_s[i];
      work_s += std::min(on_all_s, on_one_s / shared.most_at_once[i]);
      for (std::size_t r = 0; r < 2; ++r) {
        if ((needed[op] >> r & 1) != 0) of_cores_s[r] += std::min(on_all_s, on_one_s / cores[r]);
      }
    }
    return std::max({work_s, of_cores_s[0], of_cores_s[1]}) * kRounding;
  }

  std::vector<double> all_s, one_s, least_s;
  std::vector<unsigned> needed;
};

}  // namespace

void path_bound_batch(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                      std::span<const std::int32_t> tuning_of, const PathBatch& paths,
                      std::span<double> out, int threads) {
  const FormatBatches all(formats, chips, tuning_of);
  const AlikeChips alike(all.batches);
  const std::vector<std::size_t>& first = alike.first;
  const std::size_t sums = chips.empty() ? 0 : out.size() / chips.size();
  std::vector<double> bounds(first.size() * sums, 0.0);
  constexpr std::size_t kChips = 256;
  parallel_for(first.size(), threads, kChips, [&](std::size_t begin, std::size_t end) {
    std::vector<double> bound_s(all.count, kNan);
    std::vector<double> end_s(paths.op.size());
    for (std::size_t d = begin; d < end; ++d) {
      const ChipRecord& chip = chips[first[d]];
      std::size_t next = 0;
      for (std::size_t f = 0; f < formats.size(); ++f) {
        const Machine machine = machine_of(all.batches[f], first[d], Cores::kAll);
        for (std::size_t o = 0; o < formats[f].ops.size(); ++o, ++next) {
          if (all.states[f][o] != Status::kOk) continue;
          bound_s[next] = bound_on(formats[f].ops[o], machine, vector_per_core(chip, Cores::kAll));
        }
      }
      for (std::size_t g = 0; g + 1 < paths.node_ptr.size(); ++g) {
        bounds[d * sums + static_cast<std::size_t>(paths.sum_of[g])] +=
            paths.count[g] * longest_path_s(paths, g, bound_s, end_s);
      }
    }
  });
  for (std::size_t c = 0; c < chips.size(); ++c) {
    for (std::size_t n = 0; n < sums; ++n) {
      const bool known = alike.same[c] != kNone;
      out[n * chips.size() + c] = known ? bounds[alike.same[c] * sums + n] : kNan;
    }
  }
}

void work_bound_batch(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                      std::span<const std::int32_t> tuning_of, const PathBatch& paths,
                      const SharedWork& shared, std::span<double> out, int threads) {
  const FormatBatches all(formats, chips, tuning_of);
  std::vector<TrafficTable> traffic;
  std::vector<CheckedChips> check;
  for (std::size_t f = 0; f < formats.size(); ++f) {
    traffic.emplace_back(formats[f].ops, all.states[f], all.batches[f], threads);
    check.emplace_back(all.batches[f]);
  }
  constexpr std::size_t kChips = 32;
  parallel_for(chips.size(), threads, kChips, [&](std::size_t begin, std::size_t end) {
    WorkOnChip work(all.count);
    std::vector<double> end_s(paths.op.size());
    for (std::size_t c = begin; c < end; ++c) {
      const ChipRecord& chip = chips[c];
      std::size_t next = 0;
      for (std::size_t f = 0; f < formats.size(); ++f) {
        const std::span<const OperatorRecord> ops = formats[f].ops;
        if (check[f](c) != Status::kOk) {
          std::fill_n(&work.least_s[next], ops.size(), kNan);
          next += ops.size();
          continue;
        }
        const Machine on_all = machine_of(all.batches[f], c, Cores::kAll);
        const Machine on_one = machine_of(all.batches[f], c, Cores::kOne);
        for (std::size_t o = 0; o < ops.size(); ++o, ++next) {
          work.least_s[next] = kNan;
          if (all.states[f][o] != Status::kOk) continue;
          const Traffic& moved = shared.loads_again ? traffic[f].at(c, o) : kNoTraffic;
          work.all_s[next] =
              block_bound_on(ops[o], on_all, moved, vector_per_core(chip, Cores::kAll));
          work.one_s[next] =
              block_bound_on(ops[o], on_one, moved, vector_per_core(chip, Cores::kOne));
          work.least_s[next] = std::min(work.all_s[next], work.one_s[next]);
          work.needed[next] = cores_needed(ops[o]);
        }
      }
      for (std::size_t n = 0; n * chips.size() < out.size(); ++n) out[n * chips.size() + c] = 0.0;
      for (std::size_t g = 0; g + 1 < paths.node_ptr.size(); ++g) {
        double graph_s = longest_path_s(paths, g, work.least_s, end_s);
        const double shared_s = work.shared_s(paths, g, shared, chip);
        if (graph_s < shared_s) graph_s = shared_s;  // NaN stays
        out[static_cast<std::size_t>(paths.sum_of[g]) * chips.size() + c] +=
            paths.count[g] * graph_s;
      }
    }
  });
}

void sums_of_sets(std::span<const double> values, std::span<const std::uint8_t> in_set,
                  std::size_t ops, std::span<double> sums) {
  if (ops == 0) {
    std::fill(sums.begin(), sums.end(), 0.0);
    return;
  }
  const std::size_t rows = values.size() / ops, sets = in_set.size() / ops;
  std::vector<std::size_t> members;
  for (std::size_t s = 0; s < sets; ++s) {
    members.clear();
    for (std::size_t o = 0; o < ops; ++o) {
      if (in_set[s * ops + o] != 0) members.push_back(o);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      double sum = 0.0;
      for (const std::size_t o : members) sum += values[r * ops + o];
      sums[r * sets + s] = sum;
    }
  }
}

}  // namespace phaze
