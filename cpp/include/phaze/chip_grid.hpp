// A grid over the fields of a chip: decode a grid position into a chip, and keep those positions
// whose area and power pass a filter. Positions are mixed-radix numbers, the last axis fastest.
// All functions are pure and may run from any thread; vectors are the only allocations.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phaze/silicon.hpp"
#include "phaze/types.hpp"

namespace phaze {

// Fields of ChipRecord in the order they are declared.
enum class ChipColumn : std::int32_t {
  kTensorCores = 0,
  kTensorWidth = 1,
  kTensorDepth = 2,
  kTensorLocalBytes = 3,
  kVectorCores = 4,
  kVectorLanes = 5,
  kVectorAlusPerLane = 6,
  kVectorLocalBytes = 7,
  kBufferBytes = 8,
  kBufferBytesPerCycle = 9,
  kBufferPortBytesPerCycle = 10,
  kHbmBytes = 11,
  kHbmBytesPerS = 12,
  kHbmStacks = 13,
  kClockHz = 14,
  kLinks = 15,
  kLinkBytesPerS = 16,
  kDies = 17,
  kFp8 = 18,
  kOtherCores = 19,
  kOtherWidth = 20,
  kOtherDepth = 21,
};
inline constexpr int kChipColumnCount = 22;

// Whether a column holds whole numbers.
constexpr bool is_whole(ChipColumn column) noexcept {
  return column != ChipColumn::kBufferBytesPerCycle &&
         column != ChipColumn::kBufferPortBytesPerCycle && column != ChipColumn::kHbmBytesPerS &&
         column != ChipColumn::kClockHz && column != ChipColumn::kLinkBytesPerS;
}

struct GridAxis {
  ChipColumn column;
  std::vector<double> values;  // at least one; whole numbers below 2^53 for integer columns
};

struct GridTie {
  ChipColumn column;  // the field that is set to the value of `source`
  ChipColumn source;
};

struct ChipGrid {
  ChipRecord base;             // values of the fields that are not an axis
  std::vector<GridAxis> axes;  // the last varies fastest
  std::vector<GridTie> ties;   // applied after the axes
  bool derive_tensor_local;    // local buffers follow their cores: 16 bytes per element or
  bool derive_vector_local;    // lane, at least 1 KiB, as in the PHAZE template
};

struct GridFilter {
  AreaTerms terms;
  double min_mm2;  // a chip passes if min <= area <= max
  double max_mm2;
  bool keep_small_single_core;  // the minimum is waived where a chip has one core of a kind
  EnergyTable energy;
  double max_power_w;  // infinity where there is no limit
};

struct GridRows {
  std::vector<std::int64_t> index;
  std::vector<ChipRecord> chips;
  std::vector<double> area_mm2;
};

std::int64_t grid_size(const ChipGrid& grid) noexcept;

// Precondition: 0 <= index < grid_size(grid).
ChipRecord chip_at(const ChipGrid& grid, std::int64_t index) noexcept;

// Appends the positions of [begin, end) that pass. O(end - begin).
void filter_grid(const ChipGrid& grid, const GridFilter& filter, std::int64_t begin,
                 std::int64_t end, GridRows& rows);

// Appends the given positions, unfiltered.
void pick_grid(const ChipGrid& grid, const AreaTerms& terms, std::span<const std::int64_t> index,
               GridRows& rows);

}  // namespace phaze
