#include "phaze/chip_grid.hpp"

#include <algorithm>
#include <limits>

namespace phaze {
namespace {

// The nearest representable integer; a plain cast of a value out of range is undefined.
std::int64_t to_whole(double value) noexcept {
  constexpr double limit = 9.2e18;
  if (!(value > -limit)) return std::numeric_limits<std::int64_t>::min();
  return value < limit ? static_cast<std::int64_t>(value)
                       : std::numeric_limits<std::int64_t>::max();
}

// The field of a column: an integer or a real number.
struct Field {
  constexpr Field(std::int64_t ChipRecord::* field) : whole(field) {}
  constexpr Field(double ChipRecord::* field) : real(field) {}

  std::int64_t ChipRecord::* whole = nullptr;
  double ChipRecord::* real = nullptr;
};

constexpr Field kFields[kChipColumnCount] = {// by ChipColumn
                                             &ChipRecord::tensor_cores,
                                             &ChipRecord::tensor_width,
                                             &ChipRecord::tensor_depth,
                                             &ChipRecord::tensor_local_bytes,
                                             &ChipRecord::vector_cores,
                                             &ChipRecord::vector_lanes,
                                             &ChipRecord::vector_alus_per_lane,
                                             &ChipRecord::vector_local_bytes,
                                             &ChipRecord::buffer_bytes,
                                             &ChipRecord::buffer_bytes_per_cycle,
                                             &ChipRecord::buffer_port_bytes_per_cycle,
                                             &ChipRecord::hbm_bytes,
                                             &ChipRecord::hbm_bytes_per_s,
                                             &ChipRecord::hbm_stacks,
                                             &ChipRecord::clock_hz,
                                             &ChipRecord::links,
                                             &ChipRecord::link_bytes_per_s,
                                             &ChipRecord::dies,
                                             &ChipRecord::fp8,
                                             &ChipRecord::other_cores,
                                             &ChipRecord::other_width,
                                             &ChipRecord::other_depth};

void set(ChipRecord& chip, ChipColumn column, double value) noexcept {
  const Field& field = kFields[static_cast<std::size_t>(column)];
  if (field.real != nullptr) {
    chip.*field.real = value;
  } else {
    chip.*field.whole = to_whole(value);
  }
}

double get(const ChipRecord& chip, ChipColumn column) noexcept {
  const Field& field = kFields[static_cast<std::size_t>(column)];
  return field.real != nullptr ? chip.*field.real : static_cast<double>(chip.*field.whole);
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
  const bool one_shape =
      chip.other_width == chip.tensor_width && chip.other_depth == chip.tensor_depth;
  if (chip.other_cores > 0 && one_shape) return false;
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
