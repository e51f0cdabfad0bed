#include "phaze/machine.hpp"

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "base/numbers.hpp"

namespace phaze {
namespace {

// Rates and shares below this are refused, so that no product of them underflows.
constexpr double kLeast = 1e-9;
constexpr std::int64_t kMost = std::int64_t{1} << 40;

bool well_formed(const VectorCost& cost) noexcept {
  for (const double number : {cost.ops_per_element, cost.ops_per_row, cost.launches,
                              cost.byte_factor, cost.row_limit, cost.most_rows, cost.row_cycles}) {
    if (!(number >= 0.0) || !std::isfinite(number)) return false;
  }
  if (cost.row_limit == 0.0) return true;
  return cost.long_ops >= 1.0 && cost.long_bytes >= 1.0 && std::isfinite(cost.long_ops) &&
         std::isfinite(cost.long_bytes);
}

// Checks a list of block shapes with `count` used entries.
bool well_formed(std::int32_t count, const std::int64_t* m, const std::int64_t* n) noexcept {
  if (count < 0 || count > kMaxTiles) return false;
  for (int i = 0; i < count; ++i) {
    if (m[i] < 1 || n[i] < 1 || m[i] > kMost || n[i] > kMost) return false;
  }
  return true;
}

}  // namespace

Status check_chip(const ChipRecord& c) noexcept {
  for (const std::int64_t count : {c.tensor_cores, c.tensor_width, c.tensor_depth, c.vector_cores,
                                   c.vector_lanes, c.vector_alus_per_lane}) {
    if (count < 1 || count > kMost) return Status::kBadChip;
  }
  for (const std::int64_t bytes :
       {c.tensor_local_bytes, c.vector_local_bytes, c.buffer_bytes, c.hbm_bytes, c.hbm_stacks}) {
    if (bytes < 0) return Status::kBadChip;
  }
  for (const double rate :
       {c.buffer_bytes_per_cycle, c.buffer_port_bytes_per_cycle, c.hbm_bytes_per_s}) {
    if (!std::isfinite(rate) || !(rate == 0.0 || rate >= kLeast)) return Status::kBadChip;
  }
  return c.clock_hz >= kLeast && std::isfinite(c.clock_hz) ? Status::kOk : Status::kBadChip;
}

Status check_tuning(const TuningRecord& t, const Precision& p) noexcept {
  for (const double number :
       {t.launch_s, t.unit_overhead_s, t.reduction_s, t.sustained_macs_per_s,
        t.port_even_bytes_per_cycle, t.port_odd_bytes_per_cycle, t.unaligned_unit_overhead_s,
        t.unaligned_reduction_s, t.resident_share, t.attention_unit_s, t.attention_ops,
        t.attention_backward_ops}) {
    if (!(number >= 0.0) || !std::isfinite(number)) return Status::kBadTuning;
  }
  for (const double share :
       {t.efficiency, t.vector_launch_share, t.hbm_share, t.hbm_write_share, t.product_hbm_share,
        t.port_share, t.attention_efficiency, t.attention_backward_efficiency}) {
    if (!(share >= kLeast) || !(share <= 1.0)) return Status::kBadTuning;
  }
  for (const double size :
       {p.in_bytes, p.out_bytes, p.acc_bytes, p.rate, p.strip_depth, p.copies, p.spills}) {
    if (!(size >= kLeast) || !(size <= 1e6)) return Status::kBadTuning;
  }
  if (t.attention_least < 0 || t.attention_most < 0) return Status::kBadTuning;
  if (!(t.clock_factor >= kLeast) || !(t.clock_factor <= 4.0)) return Status::kBadTuning;
  if (2.0 * p.acc_bytes < p.out_bytes) return Status::kBadTuning;
  const int allowed = t.tiles > 0 ? 1 : (1 << kDataflows) - 1;
  if (t.dataflows < 1 || (t.dataflows & ~allowed) != 0) return Status::kBadTuning;
  for (const VectorCost& cost : t.functions) {
    if (!well_formed(cost)) return Status::kBadTuning;
  }
  if (!well_formed(t.tiles, t.tile_m, t.tile_n) || !well_formed(t.even_tiles, t.even_m, t.even_n) ||
      !well_formed(t.odd_tiles, t.odd_m, t.odd_n)) {
    return Status::kBadTuning;
  }
  if (t.tiles == 0 && (t.even_tiles > 0 || t.odd_tiles > 0)) return Status::kBadTuning;
  return Status::kOk;
}

Status check_machine(const ChipRecord& c, const TuningRecord& t, const Precision& p) noexcept {
  const Status status = check_chip(c);
  return status == Status::kOk ? check_tuning(t, p) : status;
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
  clock_hz = c.clock_hz * t.clock_factor;
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

}  // namespace phaze
