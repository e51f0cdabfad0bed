#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "phaze/silicon.hpp"

namespace {

using namespace phaze;

ChipRecord tpu_like() {
  ChipRecord chip{};
  chip.tensor_cores = 8;
  chip.tensor_width = 128;
  chip.tensor_depth = 128;
  chip.tensor_local_bytes = 256 * 1024;
  chip.vector_cores = 2;
  chip.vector_lanes = 128;
  chip.vector_alus_per_lane = 1;
  chip.vector_local_bytes = 2 * 1024;
  chip.buffer_bytes = 128LL << 20;
  chip.buffer_bytes_per_cycle = 4096.0;
  chip.buffer_port_bytes_per_cycle = 64.0;
  chip.hbm_bytes = 32LL << 30;
  chip.hbm_bytes_per_s = 1.2e12;
  chip.hbm_stacks = 4;
  chip.clock_hz = 1.05e9;
  return chip;
}

void published_chip() {
  const AreaBreakdown area = chip_area(tpu_like(), {0.0, 0.0});
  const double um2 =
      8.0 * (16384.0 * 760.041386 + 446565.0) + 2.0 * (128.0 * 759.823853 + 8248.43) + 175423000.0;
  CHECK_CLOSE(area.total_mm2, um2 / 1e6, 1e-15);
  CHECK(area.extrapolated == 0);
  CHECK(area.status == static_cast<int>(Status::kOk));
}

// Links between dies take a share of the logic, where there is more than one die.
void dies() {
  AreaTerms terms{};
  terms.die_to_die_share = 0.25;
  ChipRecord chip = tpu_like();
  chip.dies = 1;
  const double alone = chip_area(chip, {}).total_mm2;
  CHECK(chip_area(chip, terms).total_mm2 == alone);
  chip.dies = 2;
  CHECK_CLOSE(chip_area(chip, terms).total_mm2, 1.25 * alone, 1e-15);
}

void sram_tables() {
  bool outside = false;
  CHECK(local_sram_um2(1.0, &outside) == 6133.98);
  CHECK(local_sram_um2(1024.0, &outside) == 1634130.0);
  CHECK(global_sram_um2(2.0, &outside) == 3338220.0);
  CHECK(global_sram_um2(128.0, &outside) == 175423000.0);
  CHECK_CLOSE(local_sram_um2(1.5, &outside), (6133.98 + 8248.43) / 2.0, 1e-15);
  CHECK(!outside);
  CHECK(local_sram_um2(0.0, &outside) == 0.0);
  CHECK(!outside);
  CHECK(local_sram_um2(2048.0, &outside) > 1634130.0);
  CHECK(outside);
  outside = false;
  CHECK(global_sram_um2(1.0, &outside) >= 0.0);
  CHECK(outside);
  outside = false;
  CHECK(std::isfinite(global_sram_um2(1e300, &outside)));
}

void malformed_chips() {
  ChipRecord chip = tpu_like();
  chip.vector_cores = -1;
  CHECK(chip_area(chip, {0.0, 0.0}).status == static_cast<int>(Status::kBadChip));
  chip = tpu_like();
  chip.clock_hz = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(chip_area(chip, {0.0, 0.0}).total_mm2));
  chip = tpu_like();
  chip.tensor_width = std::numeric_limits<std::int64_t>::max();
  chip.tensor_depth = std::numeric_limits<std::int64_t>::max();
  CHECK(std::isfinite(chip_area(chip, {0.0, 0.0}).total_mm2));
}

void batches_are_loops() {
  std::vector<ChipRecord> chips(40000, tpu_like());
  for (std::size_t i = 0; i < chips.size(); ++i) {
    chips[i].tensor_cores = static_cast<std::int64_t>(i % 97 + 1);
    chips[i].buffer_bytes = static_cast<std::int64_t>(i) * 4099;
  }
  const AreaTerms terms{0.007, 16.0};
  const EnergyTable energy{1e-12, 1e-12, 1e-12, 2e-12, 4e-11, 8e-11, 0.15};
  std::vector<AreaBreakdown> out(chips.size());
  std::vector<double> total(chips.size());
  std::vector<double> power(chips.size());
  chip_area_batch(chips, terms, out, 3);
  chip_area_total_batch(chips, terms, total, 2);
  peak_power_batch(chips, energy, total, power, 4);
  for (std::size_t i = 0; i < chips.size(); ++i) {
    const double alone = chip_area(chips[i], terms).total_mm2;
    CHECK(out[i].total_mm2 == alone);
    CHECK(total[i] == alone);
    CHECK(power[i] == peak_power_w(chips[i], energy, alone));
  }
}

}  // namespace

int main() {
  published_chip();
  dies();
  sram_tables();
  malformed_chips();
  batches_are_loops();
  return phaze::test::report("silicon");
}
