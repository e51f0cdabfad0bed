#include <limits>

#include "check.hpp"
#include "phaze/chip_grid.hpp"

namespace {

using namespace phaze;

ChipGrid small_grid() {
  ChipRecord base{};
  base.tensor_cores = 1;
  base.tensor_width = 8;
  base.tensor_depth = 8;
  base.vector_cores = 1;
  base.vector_lanes = 8;
  base.vector_alus_per_lane = 1;
  base.buffer_bytes = 4LL << 20;
  base.clock_hz = 1e9;
  return {base,
          {{ChipColumn::kTensorCores, {1, 2, 4}},
           {ChipColumn::kTensorWidth, {8, 256}},
           {ChipColumn::kClockHz, {0.5e9, 1e9}}},
          {{ChipColumn::kVectorLanes, ChipColumn::kTensorWidth}},
          true,
          true};
}

void positions_decode_last_axis_fastest() {
  const ChipGrid grid = small_grid();
  CHECK(grid_size(grid) == 12);
  CHECK(chip_at(grid, 0).clock_hz == 0.5e9);
  CHECK(chip_at(grid, 1).clock_hz == 1e9);
  CHECK(chip_at(grid, 2).tensor_width == 256);
  CHECK(chip_at(grid, 11).tensor_cores == 4);
  CHECK(chip_at(grid, 11).vector_lanes == 256);
  CHECK(chip_at(grid, 0).tensor_local_bytes == 1024);
  CHECK(chip_at(grid, 11).tensor_local_bytes == 256 * 8 * 16);
  CHECK(chip_at(grid, 11).vector_local_bytes == 256 * 16);
}

void every_column_can_be_set_and_tied() {
  for (int column = 0; column < kChipColumnCount; ++column) {
    ChipGrid grid = small_grid();
    const auto axis = static_cast<ChipColumn>(column);
    const auto tied = static_cast<ChipColumn>((column + 1) % kChipColumnCount);
    grid.axes = {{axis, {3.0, 7.0}}};
    grid.ties = {{tied, axis}};
    grid.derive_tensor_local = grid.derive_vector_local = false;
    const ChipRecord first = chip_at(grid, 0);
    const ChipRecord second = chip_at(grid, 1);
    // Every field is eight bytes wide, so fields compare by their position.
    const auto* a = reinterpret_cast<const unsigned char*>(&first);
    const auto* b = reinterpret_cast<const unsigned char*>(&second);
    int differing = 0;
    for (int field = 0; field < kChipColumnCount; ++field) {
      bool same = true;
      for (int byte = 0; byte < 8; ++byte) same &= a[field * 8 + byte] == b[field * 8 + byte];
      if (!same) {
        ++differing;
        CHECK(field == column || field == (column + 1) % kChipColumnCount);
      }
    }
    CHECK(differing == 2);
  }
}

void filters_keep_what_passes() {
  const ChipGrid grid = small_grid();
  constexpr double inf = std::numeric_limits<double>::infinity();
  const EnergyTable energy{};
  GridRows all;
  filter_grid(grid, {{0.0, 0.0}, 0.0, inf, false, energy, inf}, 0, 12, all);
  CHECK(all.index.size() == 12);
  GridRows none;
  filter_grid(grid, {{0.0, 0.0}, 0.0, 1.0, false, energy, inf}, 0, 12, none);
  CHECK(none.index.empty());
  GridRows waived;  // the smallest area is waived for chips with one core of a kind
  filter_grid(grid, {{0.0, 0.0}, 1e9, 1e10, true, energy, inf}, 0, 12, waived);
  CHECK(waived.index.size() == 12);
  GridRows part;
  filter_grid(grid, {{0.0, 0.0}, 0.0, inf, false, energy, inf}, 3, 5, part);
  CHECK(part.index.size() == 2 && part.index[0] == 3 && part.index[1] == 4);
  GridRows picked;
  const std::int64_t wanted[] = {11, 0};
  pick_grid(grid, {0.0, 0.0}, wanted, picked);
  CHECK(picked.index[0] == 11 && picked.area_mm2[0] == all.area_mm2[11]);
  CHECK(picked.index[1] == 0 && picked.area_mm2[1] == all.area_mm2[0]);
}

void huge_sizes_saturate() {
  ChipGrid grid = small_grid();
  grid.axes = {{ChipColumn::kTensorWidth, {9007199254740991.0}},
               {ChipColumn::kTensorDepth, {9007199254740991.0}}};
  CHECK(chip_at(grid, 0).tensor_local_bytes == std::numeric_limits<std::int64_t>::max());
}

}  // namespace

int main() {
  positions_decode_last_axis_fastest();
  every_column_can_be_set_and_tied();
  filters_keep_what_passes();
  huge_sizes_saturate();
  return phaze::test::report("chip_grid");
}
