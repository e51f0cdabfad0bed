#include "phaze/gemm.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::int64_t kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr int kSplitCount = 10;
constexpr std::int64_t kMultiples[] = {1, 2, 4, 8};
constexpr int kMultipleCount = 4;
constexpr std::int64_t kMaxDimension = std::int64_t{1} << 40;
// Keeps a bound from excluding what it equals but for rounding.
constexpr double kRounding = 1.0 - 1e-12;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

// One way to cut a dimension of the output into blocks.
struct Cut {
  std::int64_t length;  // l
  std::int64_t parts;   // p
  double extent;        // l
  double row_folds;     // over the array's rows
  double col_folds;     // over its columns
};

Cut cut(std::int64_t dimension, std::int64_t length, const Machine& machine) noexcept {
  return {length, ceil_div(dimension, length), static_cast<double>(length),
          static_cast<double>(ceil_div(length, machine.rows)),
          static_cast<double>(ceil_div(length, machine.cols))};
}

struct Split {
  std::int64_t parts;  // s
  double depth;        // k_c
  double folds;        // of the array's rows
};

struct Candidate {
  double time_s = kInfinite;
  Dataflow dataflow = Dataflow::kOutput;
  std::int64_t block_m = 0;
  std::int64_t block_n = 0;
  std::int64_t split = 0;
  double compute_cycles = 0.0;
  double compute_s = 0.0;
  double port_s = 0.0;
  double buffer_s = 0.0;
  double fill_s = 0.0;
  double overhead_s = 0.0;
  double port_bytes = 0.0;
  double buffer_bytes = 0.0;
};

// The search over mappings of one shape on one machine.
class Search {
 public:
  Search(const GemmShape& shape, const Machine& machine, double floor_s, bool resident) noexcept
      : g_(shape), machine_(machine), tuning_(*machine.tuning), floor_s_(floor_s) {
    const Precision& p = machine.precision;
    const auto b = static_cast<double>(g_.b);
    const auto m = static_cast<double>(g_.m);
    const auto k = static_cast<double>(g_.k);
    const auto n = static_cast<double>(g_.n);
    left_bytes_ = b * m * k * p.in_bytes;
    right_bytes_ = b * k * n * p.in_bytes;
    outputs_ = b * m * n;
    per_cycle_s_ = 1.0 / (machine.clock_hz * p.rate * tuning_.efficiency);
    per_hbm_byte_s_ = resident ? 0.0 : 1.0 / machine.product_hbm_bytes_per_s;
    per_port_byte_s_ = 1.0 / port_rate(&both_ways_);
    fill_os_ = static_cast<double>(machine.rows + machine.cols - 2);
    fill_stationary_ = fill_os_ + static_cast<double>(machine.rows);
    rows_ = static_cast<double>(machine.rows);
    splits_ = 0;
    for (const std::int64_t s : kSplits) {
      const std::int64_t depth = ceil_div(g_.k, s);
      if (s > 1 && (depth < machine.rows || s > g_.k)) break;
      split_[splits_++] = {s, static_cast<double>(depth),
                           static_cast<double>(ceil_div(depth, machine.rows))};
    }
    row_folds_of_k_ = split_[0].folds;
  }

  Candidate run() noexcept {
    if (tuning_.tiles > 0) {
      for (int t = 0; t < tuning_.tiles; ++t) {
        try_block(Dataflow::kOutput, cut(g_.m, tuning_.tile_m[t], machine_),
                  cut(g_.n, tuning_.tile_n[t], machine_));
      }
      return best_;
    }
    Cut by_m[kMultipleCount];
    Cut by_n[kMultipleCount];
    const int cuts_m = cuts(g_.m, machine_.rows, by_m);
    const int cuts_n = cuts(g_.n, machine_.cols, by_n);
    for (int d = 0; d < kDataflows; ++d) {
      if ((tuning_.dataflows >> d & 1) == 0) continue;
      for (int x = 0; x < cuts_m; ++x) {
        for (int y = 0; y < cuts_n; ++y) {
          const auto dataflow = static_cast<Dataflow>(d);
          if (fits(dataflow, by_m[x], by_n[y])) try_block(dataflow, by_m[x], by_n[y]);
        }
      }
    }
    return best_;
  }

 private:
  // Operands and outputs pass the port in both directions at once unless rows are not aligned.
  double port_rate(bool* both_ways) const noexcept {
    *both_ways = true;
    const bool even = ((g_.k | g_.n) & 1) == 0;
    if (((g_.k | g_.n) & 7) != 0) {
      const double slow =
          even ? tuning_.port_even_bytes_per_cycle : tuning_.port_odd_bytes_per_cycle;
      *both_ways = !(slow > 0.0);
      if (slow > 0.0) return slow * machine_.clock_hz;
    }
    return machine_.port_bytes_per_s;
  }

  // A multiple that covers the dimension makes larger ones the same mapping.
  int cuts(std::int64_t dimension, std::int64_t side, Cut* out) const noexcept {
    int count = 0;
    for (const std::int64_t multiple : kMultiples) {
      const std::int64_t length = std::min(dimension, multiple * side);
      out[count++] = cut(dimension, length, machine_);
      if (length == dimension) break;
    }
    return count;
  }

  bool fits(Dataflow dataflow, const Cut& by_m, const Cut& by_n) const noexcept {
    if (dataflow == Dataflow::kOutput && by_m.row_folds * by_n.col_folds == 1.0) return true;
    const Precision& p = machine_.precision;
    const double strips = 2.0 * (by_m.extent + by_n.extent) * rows_ * p.in_bytes;
    return strips + by_m.extent * by_n.extent * p.acc_bytes <= machine_.local_bytes;
  }

  void try_block(Dataflow dataflow, const Cut& by_m, const Cut& by_n) noexcept {
    const std::int64_t blocks = g_.b * by_m.parts * by_n.parts;
    double folds_per_depth = 0.0;  // folds of a block for each fold of its depth
    double stream = 0.0;           // T; under kOutput it is the depth itself
    double fill = fill_stationary_;
    double least = 0.0;  // folds times stream of a whole block, over all parts of a split
    switch (dataflow) {
      case Dataflow::kOutput:
        folds_per_depth = by_m.row_folds * by_n.col_folds;
        fill = fill_os_;
        least = folds_per_depth * static_cast<double>(g_.k);
        break;
      case Dataflow::kWeight:
        folds_per_depth = by_n.col_folds;
        stream = by_m.extent;
        least = row_folds_of_k_ * folds_per_depth * stream;
        break;
      case Dataflow::kInput:
        folds_per_depth = by_m.col_folds;
        stream = by_n.extent;
        least = row_folds_of_k_ * folds_per_depth * stream;
        break;
    }
    const double bound_s = static_cast<double>(blocks) / static_cast<double>(machine_.cores) *
                           least * per_cycle_s_ * kRounding;
    if (tuning_.launch_s + std::max(bound_s, floor_s_) >= best_.time_s) return;
    const Wave wave = wave_of(by_m, by_n);
    for (int i = 0; i < splits_; ++i) {
      const Split& split = split_[i];
      const std::int64_t waves = ceil_div(blocks * split.parts, machine_.cores);
      const bool output = dataflow == Dataflow::kOutput;
      const double folds = output ? folds_per_depth : folds_per_depth * split.folds;
      try_split(dataflow, by_m, by_n, split, static_cast<double>(waves), folds,
                output ? split.depth : stream, fill, wave);
    }
  }

  // What one wave covers, and how often each operand is read from the buffer.
  struct Wave {
    double strip_elements;  // along both sides
    double operand_bytes;
  };

  Wave wave_of(const Cut& by_m, const Cut& by_n) const noexcept {
    std::int64_t grid_m = std::min(by_m.parts, machine_.grid_rows);
    const std::int64_t grid_n = std::min(by_n.parts, machine_.cores / grid_m);
    grid_m = std::min(by_m.parts, machine_.cores / grid_n);
    const auto again_left = static_cast<double>(ceil_div(by_n.parts, grid_n));
    const auto again_right = static_cast<double>(ceil_div(by_m.parts, grid_m));
    return {static_cast<double>(grid_m) * by_m.extent + static_cast<double>(grid_n) * by_n.extent,
            left_bytes_ * again_left + right_bytes_ * again_right};
  }

  void try_split(Dataflow dataflow, const Cut& by_m, const Cut& by_n, const Split& split,
                 double waves, double folds, double stream, double fill,
                 const Wave& wave) noexcept {
    const Precision& p = machine_.precision;
    const double cycles = tuning_.overlapped != 0
                              ? (waves * folds - 1.0) * std::max(stream, rows_) + stream + fill
                              : waves * folds * (stream + fill);
    const double compute_s = cycles * per_cycle_s_;
    const double in_bytes = (by_m.extent + by_n.extent) * split.depth * p.in_bytes;
    const double out_size = split.parts == 1 ? p.out_bytes : 2.0 * p.acc_bytes;
    const double out_bytes = by_m.extent * by_n.extent * out_size;
    const double port_bytes = both_ways_ ? std::max(in_bytes, out_bytes) : in_bytes + out_bytes;
    const double port_s = waves * port_bytes * per_port_byte_s_;
    const double overhead_s = waves * tuning_.unit_overhead_s;
    const double buffer_bytes =
        wave.operand_bytes + outputs_ * out_size * static_cast<double>(split.parts);
    const double buffer_s = buffer_bytes / machine_.buffer_bytes_per_s;
    const double fill_s =
        wave.strip_elements * std::min(split.depth, rows_) * p.in_bytes * per_hbm_byte_s_;
    const double busy =
        std::max(std::max(std::max(compute_s, port_s) + overhead_s, buffer_s), floor_s_);
    const double fixed =
        split.parts == 1 ? tuning_.launch_s : tuning_.launch_s + tuning_.reduction_s;
    const double time_s = fixed + busy + fill_s;
    if (!(time_s < best_.time_s)) return;
    best_ = {time_s,
             dataflow,
             by_m.length,
             by_n.length,
             split.parts,
             cycles,
             compute_s,
             port_s,
             buffer_s,
             fill_s,
             fixed + overhead_s,
             static_cast<double>(g_.b * by_m.parts) *
                 static_cast<double>(by_n.parts * split.parts) * (in_bytes + out_bytes),
             buffer_bytes};
  }

  const GemmShape& g_;
  const Machine& machine_;
  const TuningRecord& tuning_;
  double floor_s_;
  double left_bytes_;
  double right_bytes_;
  double outputs_;
  double per_cycle_s_;
  double per_hbm_byte_s_;
  double per_port_byte_s_;
  bool both_ways_;
  double fill_os_;
  double fill_stationary_;
  double rows_;
  double row_folds_of_k_;
  int splits_;
  Split split_[kSplitCount];
  Candidate best_;
};

// Terms that do not depend on the mapping.
struct Floor {
  bool resident;
  double macs;
  double hbm_bytes;
  double hbm_s;
  double power_s;
  double vector_s;
  double vector_ops;

  double seconds() const noexcept { return std::max(std::max(hbm_s, power_s), vector_s); }
};

// Operands that heads share count less than those of the shape; resident ones not at all.
double extra_bytes(const Epilogue& epilogue, bool resident) noexcept {
  return resident ? std::max(epilogue.extra_bytes, 0.0) : epilogue.extra_bytes;
}

Floor floor_of(const GemmShape& g, const Machine& machine, double product_hbm_bytes,
               const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const auto b = static_cast<double>(g.b);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  Floor f{};
  const double operands = b * (m * k + k * n) * p.in_bytes;
  f.resident = machine.tuning->resident_share > 0.0 &&
               operands <= machine.tuning->resident_share * machine.buffer_bytes;
  f.macs = b * m * k * n;
  const double bytes = f.resident ? b * m * n * p.out_bytes : b * product_hbm_bytes;
  const bool hbm = std::isfinite(machine.product_hbm_bytes_per_s);
  f.hbm_bytes = hbm ? bytes + extra_bytes(epilogue, f.resident) : 0.0;
  const double written = b * m * n * p.out_bytes;
  f.hbm_s = (f.hbm_bytes + machine.write_penalty * written) / machine.product_hbm_bytes_per_s;
  f.power_s = f.macs / machine.sustained_macs_per_s;
  f.vector_ops = b * m * n * epilogue.ops_per_output;
  f.vector_s = f.vector_ops / machine.lane_ops_per_s;
  return f;
}

Limit limit_of(const Candidate& c, const Floor& f, double launch_s) noexcept {
  Limit limit = Limit::kCompute;
  double most = c.compute_s;
  const auto consider = [&](double seconds, Limit which) {
    if (seconds > most) {
      most = seconds;
      limit = which;
    }
  };
  consider(c.port_s, Limit::kPort);
  consider(c.buffer_s, Limit::kBuffer);
  consider(f.hbm_s, Limit::kHbm);
  consider(f.power_s, Limit::kPower);
  consider(f.vector_s, Limit::kVector);
  consider(launch_s, Limit::kLaunch);
  return limit;
}

bool multiply(std::int64_t a, std::int64_t b, std::int64_t* out) noexcept {
  return !__builtin_mul_overflow(a, b, out);
}

bool add(std::int64_t a, std::int64_t b, std::int64_t* out) noexcept {
  return !__builtin_add_overflow(a, b, out);
}

}  // namespace

std::int64_t array_cycles(std::int64_t m, std::int64_t k, std::int64_t n, std::int64_t rows,
                          std::int64_t cols, Dataflow dataflow, bool overlapped,
                          Status* status) noexcept {
  *status = Status::kBadShape;
  for (const std::int64_t size : {m, k, n, rows, cols}) {
    if (size < 1) return -1;
  }
  *status = Status::kTooLarge;
  for (const std::int64_t size : {m, k, n, rows, cols}) {
    if (size > kMaxDimension) return -1;
  }
  const bool output = dataflow == Dataflow::kOutput;
  const std::int64_t down = ceil_div(output ? m : k, rows);
  const std::int64_t across = ceil_div(dataflow == Dataflow::kInput ? m : n, cols);
  const std::int64_t stream = output ? k : (dataflow == Dataflow::kWeight ? m : n);
  const std::int64_t fill = output ? rows + cols - 2 : 2 * rows + cols - 2;
  std::int64_t folds = 0;
  std::int64_t cycles = 0;
  if (!multiply(down, across, &folds)) return -1;
  if (overlapped) {
    if (!multiply(folds - 1, std::max(stream, rows), &cycles)) return -1;
    if (!add(cycles, stream + fill, &cycles)) return -1;
  } else if (!multiply(folds, stream + fill, &cycles)) {
    return -1;
  }
  *status = Status::kOk;
  return cycles;
}

Status check_shape(const GemmShape& g) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t size : {g.b, g.m, g.k, g.n}) {
    if (size < 1) return Status::kBadShape;
  }
  for (const std::int64_t size : {g.b, g.m, g.k, g.n}) {
    if (size > kMaxDimension || !multiply(product, size, &product)) return Status::kTooLarge;
  }
  return product > (std::int64_t{1} << 62) ? Status::kTooLarge : Status::kOk;
}

Status check_machine(const ChipRecord& c, const TuningRecord& t, const Precision& p) noexcept {
  constexpr std::int64_t most = std::int64_t{1} << 40;
  for (const std::int64_t count : {c.tensor_cores, c.tensor_width, c.tensor_depth, c.vector_cores,
                                   c.vector_lanes, c.vector_alus_per_lane}) {
    if (count < 1 || count > most) return Status::kBadChip;
  }
  for (const std::int64_t bytes : {c.tensor_local_bytes, c.buffer_bytes, c.hbm_bytes}) {
    if (bytes < 0) return Status::kBadChip;
  }
  for (const double rate :
       {c.buffer_bytes_per_cycle, c.buffer_port_bytes_per_cycle, c.hbm_bytes_per_s}) {
    if (!(rate >= 0.0) || !std::isfinite(rate)) return Status::kBadChip;
  }
  if (!(c.clock_hz > 0.0) || !std::isfinite(c.clock_hz)) return Status::kBadChip;
  for (const double number :
       {t.clock_hz, t.launch_s, t.unit_overhead_s, t.reduction_s, t.sustained_macs_per_s,
        t.port_even_bytes_per_cycle, t.port_odd_bytes_per_cycle, t.resident_share,
        t.attention_unit_s, t.attention_ops, t.attention_backward_ops}) {
    if (!(number >= 0.0) || !std::isfinite(number)) return Status::kBadTuning;
  }
  for (const double share :
       {t.efficiency, t.vector_launch_share, t.hbm_share, t.hbm_write_share, t.product_hbm_share,
        t.port_share, t.attention_efficiency, t.attention_backward_efficiency}) {
    if (!(share > 0.0) || !(share <= 1.0)) return Status::kBadTuning;
  }
  for (const double size : {p.in_bytes, p.out_bytes, p.acc_bytes, p.rate}) {
    if (!(size > 0.0) || !(size <= 1e6)) return Status::kBadTuning;
  }
  if (2.0 * p.acc_bytes < p.out_bytes) return Status::kBadTuning;
  const int allowed = t.tiles > 0 ? 1 : (1 << kDataflows) - 1;
  if (t.dataflows < 1 || (t.dataflows & ~allowed) != 0) return Status::kBadTuning;
  if (t.tiles < 0 || t.tiles > kMaxTiles) return Status::kBadTuning;
  for (int i = 0; i < t.tiles; ++i) {
    if (t.tile_m[i] < 1 || t.tile_n[i] < 1 || t.tile_m[i] > most || t.tile_n[i] > most) {
      return Status::kBadTuning;
    }
  }
  return Status::kOk;
}

double tile_capacity_bytes(const ChipRecord& c) noexcept {
  if (c.buffer_bytes > 0) return static_cast<double>(c.buffer_bytes);
  return static_cast<double>(c.tensor_cores) * static_cast<double>(c.tensor_local_bytes);
}

Machine::Machine(const ChipRecord& c, const TuningRecord& t, const Precision& p,
                 bool one_core) noexcept
    : tuning(&t), precision(p) {
  cores = one_core ? 1 : c.tensor_cores;
  rows = c.tensor_depth;
  cols = c.tensor_width;
  grid_rows = 1;
  while (4 * grid_rows * grid_rows <= cores) grid_rows *= 2;
  local_bytes = static_cast<double>(c.tensor_local_bytes);
  buffer_bytes = static_cast<double>(c.buffer_bytes);
  capacity_bytes = tile_capacity_bytes(c);
  clock_hz = t.clock_hz > 0.0 ? t.clock_hz : c.clock_hz;
  port_bytes_per_s = port_bytes_per_cycle(c) * t.port_share * clock_hz;
  const double buffer = c.buffer_bytes_per_cycle * clock_hz;
  buffer_bytes_per_s = buffer > 0.0 ? buffer : kInfinite;
  const double hbm = c.hbm_bytes_per_s * t.hbm_share;
  hbm_bytes_per_s = hbm > 0.0 ? hbm : kInfinite;
  product_hbm_bytes_per_s = hbm_bytes_per_s * t.product_hbm_share;
  write_penalty = 1.0 / t.hbm_write_share - 1.0;
  vector_cores = one_core ? 1.0 : static_cast<double>(c.vector_cores);
  lane_ops_per_s = vector_cores * static_cast<double>(c.vector_lanes) *
                   static_cast<double>(c.vector_alus_per_lane) * clock_hz;
  const auto used = static_cast<double>(cores);
  macs_per_s = used * static_cast<double>(rows) * static_cast<double>(cols) * clock_hz * p.rate *
               t.efficiency;
  const double sustained =
      t.sustained_macs_per_s * p.rate * used / static_cast<double>(c.tensor_cores);
  sustained_macs_per_s = sustained > 0.0 ? sustained : kInfinite;
}

double best_gemm_time(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                      const Epilogue& epilogue) noexcept {
  const Floor floor = floor_of(shape, machine, traffic.hbm_bytes, epilogue);
  return Search(shape, machine, floor.seconds(), floor.resident).run().time_s;
}

CostRecord best_gemm(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                     const Epilogue& epilogue) noexcept {
  const Floor floor = floor_of(shape, machine, traffic.hbm_bytes, epilogue);
  const Candidate best = Search(shape, machine, floor.seconds(), floor.resident).run();
  CostRecord record{};
  record.time_s = best.time_s;
  record.bound_s = gemm_bound(shape, machine, epilogue);
  record.compute_s = best.compute_s;
  record.port_s = best.port_s;
  record.buffer_s = best.buffer_s;
  record.hbm_s = floor.hbm_s;
  record.power_s = floor.power_s;
  record.vector_s = floor.vector_s;
  record.fill_s = best.fill_s;
  record.fixed_s = best.overhead_s;
  record.compute_cycles = best.compute_cycles;
  record.macs = floor.macs;
  record.vector_ops = floor.vector_ops;
  record.port_bytes = best.port_bytes;
  record.buffer_bytes = best.buffer_bytes;
  record.hbm_bytes = floor.hbm_bytes;
  record.utilization =
      floor.macs / (best.time_s * (machine.macs_per_s / machine.tuning->efficiency));
  record.block_m = best.block_m;
  record.block_n = best.block_n;
  record.split = best.split;
  record.tiles_i = traffic.i;
  record.tiles_j = traffic.j;
  record.dataflow = static_cast<std::int32_t>(best.dataflow);
  record.order = static_cast<std::int32_t>(traffic.order);
  record.limit = static_cast<std::int32_t>(limit_of(best, floor, best.overhead_s));
  record.status = static_cast<std::int32_t>(Status::kOk);
  return record;
}

double gemm_bound(const GemmShape& g, const Machine& machine, const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const auto b = static_cast<double>(g.b);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  const double operands = b * (m * k + k * n) * p.in_bytes;
  const double outputs = b * m * n * p.out_bytes;
  const double macs = b * m * k * n;
  const bool resident = machine.tuning->resident_share > 0.0 &&
                        operands <= machine.tuning->resident_share * machine.buffer_bytes;
  const double hbm = (resident ? outputs : operands + outputs) + extra_bytes(epilogue, resident);
  const double port =
      std::max(machine.port_bytes_per_s,
               machine.clock_hz * std::max(machine.tuning->port_even_bytes_per_cycle,
                                           machine.tuning->port_odd_bytes_per_cycle));
  const double ports = static_cast<double>(machine.cores) * port;
  double most = macs / machine.macs_per_s;
  most = std::max(most, macs / machine.sustained_macs_per_s);
  most = std::max(most, (hbm + machine.write_penalty * outputs) / machine.product_hbm_bytes_per_s);
  most = std::max(most, (operands + outputs) / machine.buffer_bytes_per_s);
  most = std::max(most, std::max(operands, outputs) / ports);
  most = std::max(most, b * m * n * epilogue.ops_per_output / machine.lane_ops_per_s);
  return (machine.tuning->launch_s + most) * kRounding;
}

}  // namespace phaze
