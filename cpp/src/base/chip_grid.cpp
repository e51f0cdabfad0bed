#include "phaze/chip_grid.hpp"

#include <algorithm>
#include <limits>

namespace phaze {
namespace {

// The nearest whole number that fits; a plain cast of one that does not is undefined.
std::int64_t to_whole(double value) noexcept {
  constexpr double limit = 9.2e18;
  if (!(value > -limit)) return std::numeric_limits<std::int64_t>::min();
  return value < limit ? static_cast<std::int64_t>(value)
                       : std::numeric_limits<std::int64_t>::max();
}

void set(ChipRecord& chip, ChipColumn column, double value) noexcept {
  const std::int64_t whole = to_whole(value);
  switch (column) {
    case ChipColumn::kTensorCores:
      chip.tensor_cores = whole;
      return;
    case ChipColumn::kTensorWidth:
      chip.tensor_width = whole;
      return;
    case ChipColumn::kTensorDepth:
      chip.tensor_depth = whole;
      return;
    case ChipColumn::kTensorLocalBytes:
      chip.tensor_local_bytes = whole;
      return;
    case ChipColumn::kVectorCores:
      chip.vector_cores = whole;
      return;
    case ChipColumn::kVectorLanes:
      chip.vector_lanes = whole;
      return;
    case ChipColumn::kVectorAlusPerLane:
      chip.vector_alus_per_lane = whole;
      return;
    case ChipColumn::kVectorLocalBytes:
      chip.vector_local_bytes = whole;
      return;
    case ChipColumn::kBufferBytes:
      chip.buffer_bytes = whole;
      return;
    case ChipColumn::kBufferBytesPerCycle:
      chip.buffer_bytes_per_cycle = value;
      return;
    case ChipColumn::kBufferPortBytesPerCycle:
      chip.buffer_port_bytes_per_cycle = value;
      return;
    case ChipColumn::kHbmBytes:
      chip.hbm_bytes = whole;
      return;
    case ChipColumn::kHbmBytesPerS:
      chip.hbm_bytes_per_s = value;
      return;
    case ChipColumn::kHbmStacks:
      chip.hbm_stacks = whole;
      return;
    case ChipColumn::kClockHz:
      chip.clock_hz = value;
      return;
    case ChipColumn::kLinks:
      chip.links = whole;
      return;
    case ChipColumn::kLinkBytesPerS:
      chip.link_bytes_per_s = value;
      return;
    case ChipColumn::kDies:
      chip.dies = whole;
      return;
    case ChipColumn::kFp8:
      chip.fp8 = whole;
      return;
  }
}

double get(const ChipRecord& chip, ChipColumn column) noexcept {
  switch (column) {
    case ChipColumn::kTensorCores:
      return static_cast<double>(chip.tensor_cores);
    case ChipColumn::kTensorWidth:
      return static_cast<double>(chip.tensor_width);
    case ChipColumn::kTensorDepth:
      return static_cast<double>(chip.tensor_depth);
    case ChipColumn::kTensorLocalBytes:
      return static_cast<double>(chip.tensor_local_bytes);
    case ChipColumn::kVectorCores:
      return static_cast<double>(chip.vector_cores);
    case ChipColumn::kVectorLanes:
      return static_cast<double>(chip.vector_lanes);
    case ChipColumn::kVectorAlusPerLane:
      return static_cast<double>(chip.vector_alus_per_lane);
    case ChipColumn::kVectorLocalBytes:
      return static_cast<double>(chip.vector_local_bytes);
    case ChipColumn::kBufferBytes:
      return static_cast<double>(chip.buffer_bytes);
    case ChipColumn::kBufferBytesPerCycle:
      return chip.buffer_bytes_per_cycle;
    case ChipColumn::kBufferPortBytesPerCycle:
      return chip.buffer_port_bytes_per_cycle;
    case ChipColumn::kHbmBytes:
      return static_cast<double>(chip.hbm_bytes);
    case ChipColumn::kHbmBytesPerS:
      return chip.hbm_bytes_per_s;
    case ChipColumn::kHbmStacks:
      return static_cast<double>(chip.hbm_stacks);
    case ChipColumn::kClockHz:
      return chip.clock_hz;
    case ChipColumn::kLinks:
      return static_cast<double>(chip.links);
    case ChipColumn::kLinkBytesPerS:
      return chip.link_bytes_per_s;
    case ChipColumn::kDies:
      return static_cast<double>(chip.dies);
    case ChipColumn::kFp8:
      return static_cast<double>(chip.fp8);
  }
  return 0.0;
}

constexpr double kBytesPerElement = 16.0;
constexpr std::int64_t kLeastLocalBytes = 1024;

// At least 1 KiB; saturates instead of overflowing for sizes no chip has.
std::int64_t local_bytes(double elements) noexcept {
  return std::max(kLeastLocalBytes, to_whole(elements * kBytesPerElement));
}

void derive(const ChipGrid& grid, ChipRecord& chip) noexcept {
  for (const GridTie& tie : grid.ties) set(chip, tie.column, get(chip, tie.source));
  if (grid.derive_tensor_local) {
    chip.tensor_local_bytes = local_bytes(static_cast<double>(chip.tensor_width) *
                                          static_cast<double>(chip.tensor_depth));
  }
  if (grid.derive_vector_local) {
    chip.vector_local_bytes = local_bytes(static_cast<double>(chip.vector_lanes));
  }
}

bool passes(const GridFilter& filter, const ChipRecord& chip, double area_mm2) noexcept {
  if (!(area_mm2 <= filter.max_mm2)) return false;
  const bool single = chip.tensor_cores == 1 || chip.vector_cores == 1;
  if (area_mm2 < filter.min_mm2 && !(filter.keep_small_single_core && single)) return false;
  return peak_power_w(chip, filter.energy, area_mm2) <= filter.max_power_w;
}

}  // namespace

std::int64_t grid_size(const ChipGrid& grid) noexcept {
  std::int64_t size = 1;
  for (const GridAxis& axis : grid.axes) size *= static_cast<std::int64_t>(axis.values.size());
  return size;
}

ChipRecord chip_at(const ChipGrid& grid, std::int64_t index) noexcept {
  ChipRecord chip = grid.base;
  for (std::size_t a = grid.axes.size(); a-- > 0;) {
    const GridAxis& axis = grid.axes[a];
    const auto length = static_cast<std::int64_t>(axis.values.size());
    set(chip, axis.column, axis.values[static_cast<std::size_t>(index % length)]);
    index /= length;
  }
  derive(grid, chip);
  return chip;
}

void filter_grid(const ChipGrid& grid, const GridFilter& filter, std::int64_t begin,
                 std::int64_t end, GridRows& rows) {
  for (std::int64_t index = begin; index < end; ++index) {
    const ChipRecord chip = chip_at(grid, index);
    const double area_mm2 = chip_area(chip, filter.terms).total_mm2;
    if (!passes(filter, chip, area_mm2)) continue;
    rows.index.push_back(index);
    rows.chips.push_back(chip);
    rows.area_mm2.push_back(area_mm2);
  }
}

void pick_grid(const ChipGrid& grid, const AreaTerms& terms, std::span<const std::int64_t> index,
               GridRows& rows) {
  for (const std::int64_t i : index) {
    const ChipRecord chip = chip_at(grid, i);
    rows.index.push_back(i);
    rows.chips.push_back(chip);
    rows.area_mm2.push_back(chip_area(chip, terms).total_mm2);
  }
}

}  // namespace phaze
