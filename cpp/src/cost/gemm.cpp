// Matrix products on one chip: shapes, HBM traffic, the search over mappings, and the record of the
// best.
#include "phaze/gemm.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "base/numbers.hpp"
#include "cost/largest.hpp"

namespace phaze {

namespace {

constexpr std::int64_t kMaxDimension = std::int64_t{1} << 40;

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
  if (__builtin_mul_overflow(down, across, &folds)) return -1;
  if (overlapped) {
    if (__builtin_mul_overflow(folds - 1, std::max(stream, rows), &cycles)) return -1;
    if (__builtin_add_overflow(cycles, stream + fill, &cycles)) return -1;
  } else if (__builtin_mul_overflow(folds, stream + fill, &cycles)) {
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
    if (size > kMaxDimension || __builtin_mul_overflow(product, size, &product))
      return Status::kTooLarge;
  }
  return product > (std::int64_t{1} << 62) ? Status::kTooLarge : Status::kOk;
}

namespace {

// 1, 2, 3, 4, 6, 8, 12, ...: each number after 2 is 3/2 or 4/3 of the one before.
std::int64_t next_on_ladder(std::int64_t i) noexcept {
  if (i == 1) return 2;
  return (i & (i - 1)) == 0 ? i / 2 * 3 : i / 3 * 4;
}

// Largest integer t with fixed + t * per_unit <= capacity, at most `most`; 0 if none fits.
std::int64_t largest_fitting(double fixed, double per_unit, double capacity,
                             std::int64_t most) noexcept {
  const double units = (capacity - fixed) / per_unit;
  if (!(units >= 0.5)) return 0;  // below 1 even if the division was rounded down
  if (units >= static_cast<double>(most) + 1.0) return most;
  auto t = static_cast<std::int64_t>(units);
  while (t < most && fixed + static_cast<double>(t + 1) * per_unit <= capacity) ++t;
  while (t > 0 && fixed + static_cast<double>(t) * per_unit > capacity) --t;
  return std::min(t, most);
}

struct Sizes {
  double a;  // bytes of the left operand
  double b;
  double d;         // bytes of the output
  double partials;  // bytes of all accumulators
};

// Stores a t_x by t_y tile of outputs while strips of both operands stream through the buffer.
void outputs_stay(const GemmShape& g, double capacity, const Precision& p, const Sizes& z,
                  Traffic& best) noexcept {
  for (std::int64_t i = 1; i <= g.m; i = next_on_ladder(i)) {
    if (z.a + z.b * static_cast<double>(i) + z.d >= best.hbm_bytes) return;
    const auto tile = static_cast<double>(ceil_div(g.m, i));
    const double strips = p.copies * p.strip_depth * p.in_bytes;
    const std::int64_t most =
        largest_fitting(strips * tile, tile * p.acc_bytes + strips, capacity, g.n);
    if (most == 0) continue;
    const std::int64_t j = ceil_div(g.n, most);
    const double bytes = z.a * static_cast<double>(j) + z.b * static_cast<double>(i) + z.d;
    if (bytes < best.hbm_bytes) best = {bytes, Order::kOutputs, i, j};
  }
}

// Stores a tile of one operand (`stored_bytes`, `x` elements along its outer side) while strips of
// the other (`streamed` bytes) and of the outputs stream through the buffer.
void operand_stays(std::int64_t x, std::int64_t k, double distinct, double stored_bytes,
                   double streamed, double capacity, const Precision& p, const Sizes& z,
                   Order order, Traffic& best) noexcept {
  for (std::int64_t i = 1; i <= x; i = next_on_ladder(i)) {
    const double reads = stored_bytes + streamed * static_cast<double>(i) + z.d;
    if (reads >= best.hbm_bytes) return;
    const auto tile = static_cast<double>(ceil_div(x, i));
    const double stored = tile * p.in_bytes * distinct;
    const double outputs = p.copies * p.strip_depth * tile * p.acc_bytes;
    const double strip = p.copies * p.strip_depth * p.in_bytes;
    std::int64_t j = 1;
    const bool whole = i == 1 && (stored + strip) * static_cast<double>(k) + outputs <= capacity;
    if (!whole) {
      const std::int64_t most = largest_fitting(outputs, p.copies * stored + strip, capacity, k);
      if (most == 0) continue;
      j = ceil_div(k, most);
    }
    const double bytes = reads + p.spills * static_cast<double>(j - 1) * z.partials;
    if (bytes < best.hbm_bytes) best = {bytes, order, i, j};
  }
}

}  // namespace

Traffic hbm_traffic(const GemmShape& g, double capacity, const Precision& p) noexcept {
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  const Sizes z{m * k * p.in_bytes * g.distinct, k * n * p.in_bytes, m * n * p.out_bytes,
                m * n * p.acc_bytes};
  // Without any buffer, operands are read again for every element of the output.
  Traffic best{z.a * n + z.b * m + z.d, Order::kNothing, g.m, g.n};
  outputs_stay(g, capacity, p, z, best);
  operand_stays(g.m, g.k, g.distinct, z.a, z.b, capacity, p, z, Order::kInputs, best);
  operand_stays(g.n, g.k, 1.0, z.b, z.a, capacity, p, z, Order::kWeights, best);
  return best;
}

namespace {

inline constexpr std::int64_t kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
inline constexpr int kSplitCount = 10;
inline constexpr std::int64_t kMultiples[] = {1, 2, 4, 8};
inline constexpr int kMultipleCount = 4;

// One partition of a dimension of the output into blocks.
struct Cut {
  std::int64_t length = 0;  // l
  std::int64_t parts = 0;   // p
  double extent = 0.0;      // l, as a floating-point number
  double row_folds = 0.0;   // folds over the array's rows
  double col_folds = 0.0;   // folds over the array's columns
};

inline Cut cut(std::int64_t dimension, std::int64_t length, const Machine& machine) noexcept {
  return {length, ceil_div(dimension, length), static_cast<double>(length),
          static_cast<double>(ceil_div(length, machine.rows)),
          static_cast<double>(ceil_div(length, machine.cols))};
}

struct Split {
  std::int64_t parts;  // s
  double depth;        // k_c
  double folds;        // of k_c over the rows of the array
};

// The kernels available for one shape. Rows that are not 16-byte aligned cannot be copied in bulk:
// kernels of an earlier generation run there, each with its own blocks and costs.
struct Kernels {
  double port_bytes_per_s;  // of one port
  bool both_ways;           // whether operands and outputs use a port at the same time
  double launch_s;
  double unit_overhead_s;
  double reduction_s;
  int tiles;  // 0 = blocks are multiples of the array
  const std::int64_t* tile_m;
  const std::int64_t* tile_n;
};

inline Kernels kernels_of(const GemmShape& g, const Machine& machine) noexcept {
  const TuningRecord& t = *machine.tuning;
  Kernels kernels{machine.port_bytes_per_s,
                  true,
                  t.launch_s,
                  t.unit_overhead_s,
                  t.reduction_s,
                  t.tiles,
                  t.tile_m,
                  t.tile_n};
  const auto element = static_cast<std::int64_t>(std::ceil(machine.precision.in_bytes));
  const std::int64_t rows = (g.k | g.n) * element;  // low bits: alignment of both row lengths
  if ((rows & 15) == 0 || g.aligned) return kernels;
  const bool even = (rows & 3) == 0;
  const double slow = even ? t.port_even_bytes_per_cycle : t.port_odd_bytes_per_cycle;
  if (slow > 0.0) {
    kernels.port_bytes_per_s = slow * machine.clock_hz;
    kernels.both_ways = false;
  }
  const int tiles = even ? t.even_tiles : t.odd_tiles;
  if (tiles == 0) return kernels;
  kernels.launch_s = t.launch_s * t.vector_launch_share;  // launched like a vector kernel
  kernels.unit_overhead_s = t.unaligned_unit_overhead_s;
  kernels.reduction_s = t.unaligned_reduction_s;
  kernels.tiles = tiles;
  kernels.tile_m = even ? t.even_m : t.odd_m;
  kernels.tile_n = even ? t.even_n : t.odd_n;
  return kernels;
}

// The search over mappings of one shape on one machine. Whole blocks, and splits of a block, are
// pruned if a bound shows that they cannot be faster than the incumbent.
class Search {
 public:
  Search(const GemmShape& shape, const Machine& machine, double floor_s, bool resident) noexcept
      : g_(shape),
        machine_(machine),
        tuning_(*machine.tuning),
        kernels_(kernels_of(shape, machine)),
        floor_s_(floor_s) {
    const Precision& p = machine.precision;
    const auto b = static_cast<double>(g_.b);
    const auto m = static_cast<double>(g_.m);
    const auto n = static_cast<double>(g_.n);
    depth_ = static_cast<double>(g_.k);
    left_bytes_ = b * m * depth_ * p.in_bytes;
    right_bytes_ = b * depth_ * n * p.in_bytes;
    outputs_ = b * m * n;
    per_core_ = 1.0 / static_cast<double>(machine.cores);
    per_cycle_s_ = 1.0 / (machine.clock_hz * p.rate * tuning_.efficiency);
    per_buffer_byte_s_ = 1.0 / machine.buffer_bytes_per_s;
    per_port_byte_s_ = 1.0 / kernels_.port_bytes_per_s;
    rows_ = static_cast<double>(machine.rows);
    // Each part of a split is at least as deep as the array has rows, and so is its first strip.
    fill_element_s_ =
        resident ? 0.0 : std::min(depth_, rows_) * p.in_bytes / machine.product_hbm_bytes_per_s;
    fill_os_ = static_cast<double>(machine.rows + machine.cols - 2);
    fill_stationary_ = fill_os_ + rows_;
    split_[0] = {1, depth_, static_cast<double>(ceil_div(g_.k, machine.rows))};
  }

  GemmMapping run() noexcept {
    if (kernels_.tiles > 0) {
      for (int t = 0; t < kernels_.tiles; ++t) {
        try_block(Dataflow::kOutput, cut(g_.m, kernels_.tile_m[t], machine_),
                  cut(g_.n, kernels_.tile_n[t], machine_));
      }
      return best_;
    }
    for (int d = 0; d < kDataflows; ++d) {
      if ((tuning_.dataflows >> d & 1) != 0) try_dataflow(static_cast<Dataflow>(d));
    }
    return best_;
  }

 private:
  // A multiple of the array that covers a dimension gives the same mapping as every larger
  // multiple.
  void try_dataflow(Dataflow dataflow) noexcept {
    for (int x = 0; x < kMultipleCount; ++x) {
      const std::int64_t length_m = std::min(g_.m, kMultiples[x] * machine_.rows);
      for (int y = 0; y < kMultipleCount; ++y) {
        const std::int64_t length_n = std::min(g_.n, kMultiples[y] * machine_.cols);
        if (fits(dataflow, length_m, length_n)) {
          if (by_m_[x].parts == 0) by_m_[x] = cut(g_.m, length_m, machine_);
          if (by_n_[y].parts == 0) by_n_[y] = cut(g_.n, length_n, machine_);
          try_block(dataflow, by_m_[x], by_n_[y]);
        }
        if (length_n == g_.n) break;
      }
      if (length_m == g_.m) break;
    }
  }

  bool fits(Dataflow dataflow, std::int64_t length_m, std::int64_t length_n) const noexcept {
    if (dataflow == Dataflow::kOutput && length_m <= machine_.rows && length_n <= machine_.cols) {
      return true;
    }
    const Precision& p = machine_.precision;
    const auto m = static_cast<double>(length_m);
    const auto n = static_cast<double>(length_n);
    return 2.0 * (m + n) * rows_ * p.in_bytes + m * n * p.acc_bytes <= machine_.local_bytes;
  }

  // Values common to all splits of a block.
  struct Block {
    Dataflow dataflow;
    const Cut& by_m;
    const Cut& by_n;
    std::int64_t units;      // without a split
    double folds_per_depth;  // folds for each fold of the depth
    double stream;           // T; under kOutput it is the depth itself
    double fill;             // L
    double operand_bytes;    // through the buffer
    double fill_s;           // first strips from HBM, after which a first core can start
    double outputs;          // elements of the output of one unit
  };

  void try_block(Dataflow dataflow, const Cut& by_m, const Cut& by_n) noexcept {
    Block block{dataflow,
                by_m,
                by_n,
                g_.b * by_m.parts * by_n.parts,
                0.0,
                0.0,
                fill_stationary_,
                0.0,
                (by_m.extent + by_n.extent) * fill_element_s_,
                by_m.extent * by_n.extent};
    double least = 0.0;  // least cycles of a block: folds times cycles per fold
    switch (dataflow) {
      case Dataflow::kOutput:
        block.folds_per_depth = by_m.row_folds * by_n.col_folds;
        block.fill = fill_os_;
        least = block.folds_per_depth * depth_;
        break;
      case Dataflow::kWeight:
        block.folds_per_depth = by_n.col_folds;
        block.stream = by_m.extent;
        least = split_[0].folds * block.folds_per_depth * block.stream;
        break;
      case Dataflow::kInput:
        block.folds_per_depth = by_m.col_folds;
        block.stream = by_n.extent;
        least = split_[0].folds * block.folds_per_depth * block.stream;
        break;
    }
    const double units_per_core = static_cast<double>(block.units) * per_core_;
    const double compute_s = (units_per_core * least + block.fill) * per_cycle_s_;
    const double port_s = units_per_core * (by_m.extent + by_n.extent) * depth_ *
                          machine_.precision.in_bytes * per_port_byte_s_;
    double bound_s = std::max(std::max(compute_s, port_s) * kRounding, floor_s_);
    if (kernels_.launch_s + bound_s >= best_.time_s) return;
    add_wave(&block);
    bound_s = kernels_.launch_s +
              std::max(bound_s, block.operand_bytes * per_buffer_byte_s_ * kRounding) +
              block.fill_s * kRounding;
    for (int i = 0; i < kSplitCount; ++i) {
      if (bound_s >= best_.time_s) return;
      if (i == splits_ && !add_split(i)) return;
      try_split(block, split_[i]);
    }
  }

  // Splits are computed when the first block needs them.
  bool add_split(int i) noexcept {
    const std::int64_t parts = kSplits[i];
    const std::int64_t depth = ceil_div(g_.k, parts);
    if (depth < machine_.rows || parts > g_.k) return false;
    split_[i] = {parts, static_cast<double>(depth),
                 static_cast<double>(ceil_div(depth, machine_.rows))};
    splits_ = i + 1;
    return true;
  }

  // The extent of one wave, and how often each operand is read from the buffer.
  void add_wave(Block* block) const noexcept {
    const Cut& by_m = block->by_m;
    const Cut& by_n = block->by_n;
    std::int64_t grid_m = std::min(by_m.parts, machine_.grid_rows);
    const std::int64_t grid_n = std::min(by_n.parts, machine_.cores / grid_m);
    grid_m = std::min(by_m.parts, machine_.cores / grid_n);
    const auto again_left = static_cast<double>(ceil_div(by_n.parts, grid_n));
    const auto again_right = static_cast<double>(ceil_div(by_m.parts, grid_m));
    block->operand_bytes = left_bytes_ * again_left + right_bytes_ * again_right;
  }

  void try_split(const Block& block, const Split& split) noexcept {
    const Precision& p = machine_.precision;
    const bool whole = split.parts == 1;
    const std::int64_t units = block.units * split.parts;
    const auto waves = static_cast<double>(ceil_div(units, machine_.cores));
    const bool output = block.dataflow == Dataflow::kOutput;
    const double folds = output ? block.folds_per_depth : block.folds_per_depth * split.folds;
    const double stream = output ? split.depth : block.stream;
    const double cycles =
        tuning_.overlapped != 0
            ? (waves * folds - 1.0) * std::max(stream, rows_) + stream + block.fill
            : waves * folds * (stream + block.fill);
    const double compute_s = cycles * per_cycle_s_;
    const double fixed = whole ? kernels_.launch_s : kernels_.launch_s + kernels_.reduction_s;
    if (fixed + compute_s >= best_.time_s) return;
    const double in_bytes = (block.by_m.extent + block.by_n.extent) * split.depth * p.in_bytes;
    const double out_size = whole ? p.out_bytes : 2.0 * p.acc_bytes;
    const double out_bytes = block.outputs * out_size;
    const double port_bytes =
        kernels_.both_ways ? std::max(in_bytes, out_bytes) : in_bytes + out_bytes;
    const double port_s = waves * port_bytes * per_port_byte_s_;
    const double overhead_s = waves * kernels_.unit_overhead_s;
    const double buffer_bytes =
        block.operand_bytes + outputs_ * out_size * static_cast<double>(split.parts);
    const double buffer_s = buffer_bytes * per_buffer_byte_s_;
    const double busy =
        std::max(std::max(std::max(compute_s, port_s) + overhead_s, buffer_s), floor_s_);
    const double time_s = fixed + busy + block.fill_s;
    if (!(time_s < best_.time_s)) return;
    best_ = {time_s,
             block.dataflow,
             block.by_m.length,
             block.by_n.length,
             split.parts,
             cycles,
             compute_s,
             port_s,
             buffer_s,
             block.fill_s,
             fixed,
             overhead_s,
             static_cast<double>(units) * (in_bytes + out_bytes),
             buffer_bytes};
  }

  const GemmShape& g_;
  const Machine& machine_;
  const TuningRecord& tuning_;
  Kernels kernels_;
  double floor_s_;
  double depth_;
  double left_bytes_;
  double right_bytes_;
  double outputs_;
  double per_core_;
  double per_cycle_s_;
  double per_buffer_byte_s_;
  double per_port_byte_s_;
  double fill_element_s_;
  double fill_os_;
  double fill_stationary_;
  double rows_;
  int splits_ = 1;
  Split split_[kSplitCount];
  Cut by_m_[kMultipleCount];
  Cut by_n_[kMultipleCount];
  GemmMapping best_;
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

// Negative if heads share operands and so read fewer bytes; resident operands have none to save.
double extra_bytes(const Epilogue& epilogue, bool resident) noexcept {
  return resident ? std::max(epilogue.extra_bytes, 0.0) : epilogue.extra_bytes;
}

// Whether operands of this many bytes are still in the buffer from the previous operator.
bool is_resident(double operands, const Machine& machine) noexcept {
  const double share = machine.tuning->resident_share;
  return share > 0.0 && operands <= share * machine.buffer_bytes;
}

Floor floor_of(const GemmShape& g, const Machine& machine, double product_hbm_bytes,
               const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const auto b = static_cast<double>(g.b);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  Floor f{};
  const double operands = b * (m * k * g.distinct + k * n) * p.in_bytes;
  f.resident = is_resident(operands, machine);
  f.macs = b * m * k * n;
  const double bytes = f.resident ? b * m * n * p.out_bytes : b * product_hbm_bytes;
  const bool hbm = std::isfinite(machine.product_hbm_bytes_per_s);
  f.hbm_bytes =
      hbm ? std::max(bytes + extra_bytes(epilogue, f.resident), 0.0) * epilogue.hbm_share : 0.0;
  const double written = b * m * n * p.out_bytes * epilogue.hbm_share;
  f.hbm_s = (f.hbm_bytes + machine.write_penalty * written) / machine.product_hbm_bytes_per_s;
  f.power_s = f.macs / machine.sustained_macs_per_s;
  f.vector_ops = b * m * n * epilogue.ops_per_output;
  f.vector_s = f.vector_ops / machine.lane_ops_per_s;
  return f;
}

Limit limit_of(const GemmMapping& c, const Floor& f, double launch_s) noexcept {
  Largest most{c.compute_s, Limit::kCompute};
  most.consider(c.port_s, Limit::kPort);
  most.consider(c.buffer_s, Limit::kBuffer);
  most.consider(f.hbm_s, Limit::kHbm);
  most.consider(f.power_s, Limit::kPower);
  most.consider(f.vector_s, Limit::kVector);
  most.consider(launch_s, Limit::kLaunch);
  return most.limit;
}

}  // namespace

namespace {

// The known mapping where it is the answer to the same search: limits apart from the mapping's own
// enter a search by their seconds alone.
GemmMapping best_mapping(const GemmShape& shape, const Machine& machine, const Floor& floor,
                         KnownGemm* known) noexcept {
  const double floor_s = floor.seconds();
  if (known != nullptr && known->floor_s == floor_s) return known->best;
  const GemmMapping best = Search(shape, machine, floor_s, floor.resident).run();
  if (known != nullptr) *known = {floor_s, best};
  return best;
}

}  // namespace

double best_gemm_time(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                      const Epilogue& epilogue, KnownGemm* known) noexcept {
  const Floor floor = floor_of(shape, machine, traffic.hbm_bytes, epilogue);
  return best_mapping(shape, machine, floor, known).time_s;
}

CostRecord best_gemm(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                     const Epilogue& epilogue, KnownGemm* known) noexcept {
  const Floor floor = floor_of(shape, machine, traffic.hbm_bytes, epilogue);
  const GemmMapping best = best_mapping(shape, machine, floor, known);
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
  record.fixed_s = best.fixed_s;
  record.overhead_s = best.overhead_s;
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
  record.limit = static_cast<std::int32_t>(limit_of(best, floor, best.fixed_s + best.overhead_s));
  record.status = static_cast<std::int32_t>(Status::kOk);
  return record;
}

CostRecord least_gemm_events(const GemmShape& g, const Machine& machine, const Traffic& traffic,
                             const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const Floor floor = floor_of(g, machine, traffic.hbm_bytes, epilogue);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  const double moved =
      static_cast<double>(g.b) * ((m * k * g.distinct + k * n) * p.in_bytes + m * n * p.out_bytes);
  CostRecord record{};
  record.macs = floor.macs;
  record.vector_ops = floor.vector_ops;
  record.port_bytes = record.buffer_bytes = moved;
  record.hbm_bytes = floor.hbm_bytes;
  return record;
}

double gemm_bound(const GemmShape& g, const Machine& machine, const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const auto b = static_cast<double>(g.b);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  const double operands = b * (m * k * g.distinct + k * n) * p.in_bytes;
  const double outputs = b * m * n * p.out_bytes;
  const double macs = b * m * k * n;
  const bool resident = is_resident(operands, machine);
  const double compulsory = resident ? outputs : operands + outputs;
  const double hbm =
      std::max(compulsory + extra_bytes(epilogue, resident), 0.0) * epilogue.hbm_share;
  const Kernels kernels = kernels_of(g, machine);
  const double ports = static_cast<double>(machine.cores) * kernels.port_bytes_per_s;
  double most = macs / machine.macs_per_s;
  most = std::max(most, macs / machine.sustained_macs_per_s);
  most = std::max(most, (hbm + machine.write_penalty * outputs * epilogue.hbm_share) /
                            machine.product_hbm_bytes_per_s);
  const double moved = b * (m * k + k * n) * p.in_bytes;
  most = std::max(most, (moved + outputs) / machine.buffer_bytes_per_s);
  most = std::max(most, std::max(moved, outputs) / ports);
  most = std::max(most, b * m * n * epilogue.ops_per_output / machine.lane_ops_per_s);
  return (kernels.launch_s + most) * kRounding;
}

namespace {

// Least 1 / l_m + 1 / l_n of the blocks of a product: elements that enter a core for each
// multiplication. The memory of a core is a limit on l_n as a real number.
double least_reads(const GemmShape& g, const Machine& machine, const Kernels& kernels) noexcept {
  double least = kInfinite;
  for (int t = 0; t < kernels.tiles; ++t) {
    least = std::min(least, 1.0 / static_cast<double>(kernels.tile_m[t]) +
                                1.0 / static_cast<double>(kernels.tile_n[t]));
  }
  if (kernels.tiles > 0) return least;
  const Precision& p = machine.precision;
  const auto m = static_cast<double>(g.m);
  const auto n = static_cast<double>(g.n);
  const auto rows = static_cast<double>(machine.rows);
  const auto cols = static_cast<double>(machine.cols);
  const double strips = 2.0 * rows * p.in_bytes;  // per row or column of a block
  const double widest = std::min(n, cols * static_cast<double>(kMultiples[kMultipleCount - 1]));
  least = 1.0 / std::min(m, rows) + 1.0 / std::min(n, cols);  // one array needs no memory
  for (const std::int64_t multiple : kMultiples) {
    const double length = std::min(m, rows * static_cast<double>(multiple));
    const double width = (machine.local_bytes - strips * length) / (strips + length * p.acc_bytes);
    if (width > 0.0) least = std::min(least, 1.0 / length + 1.0 / std::min(width, widest));
    if (length == m) break;
  }
  return least;
}

}  // namespace

double gemm_block_bound(const GemmShape& g, const Machine& machine, const Traffic& traffic,
                        const Epilogue& epilogue) noexcept {
  const Kernels kernels = kernels_of(g, machine);
  const Floor floor = floor_of(g, machine, traffic.hbm_bytes, epilogue);
  const double port_s = floor.macs * least_reads(g, machine, kernels) * machine.precision.in_bytes /
                        (static_cast<double>(machine.cores) * kernels.port_bytes_per_s);
  const double most = kernels.launch_s + std::max(floor.seconds(), port_s);
  return std::max(gemm_bound(g, machine, epilogue), most * kRounding);
}

}  // namespace phaze
