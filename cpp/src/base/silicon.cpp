#include "phaze/silicon.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/numbers.hpp"
#include "phaze/parallel.hpp"

namespace phaze {
namespace {

// um^2, from the published template: one processing element, one vector lane, and SRAM macros at
// powers of two. The table index is log2 of the capacity relative to the first entry.
constexpr double kElementUm2 = 760.041386;
constexpr double kLaneUm2 = 759.823853;
constexpr std::array<double, 11> kLocalUm2 = {6133.98,  8248.43,  12610.5,  22139.9,
                                              38583.0,  63338.4,  115579.0, 204764.0,
                                              446565.0, 897890.0, 1634130.0};
constexpr std::array<double, 7> kGlobalUm2 = {3338220.0,  6078640.0,  11952400.0, 23745200.0,
                                              46750900.0, 88605700.0, 175423000.0};
constexpr double kUm2PerMm2 = 1e6;
constexpr double kBytesPerKib = 1024.0;
constexpr double kBytesPerMib = 1024.0 * 1024.0;
constexpr std::size_t kGrain = 16384;

// 2^exponent, for exponents of normal doubles.
constexpr double power_of_two(int exponent) noexcept {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// Piecewise linear in capacity over entries at first * 2^i; exact at the entries.
template <std::size_t N>
double table_area(const std::array<double, N>& table, double first, double size,
                  bool* extrapolated) noexcept {
  if (size <= 0.0) return 0.0;  // no such buffer on this chip
  constexpr int last = static_cast<int>(N) - 1;
  const double scaled = size / first;
  const int exponent = static_cast<int>(std::bit_cast<std::uint64_t>(scaled) >> 52) - 1023;
  const int segment = std::clamp(exponent, 0, last - 1);
  *extrapolated |= scaled < 1.0 || scaled > power_of_two(last);
  const auto i = static_cast<std::size_t>(segment);
  if (scaled == power_of_two(last)) return table[N - 1];
  const double beyond = (scaled - power_of_two(segment)) * power_of_two(-segment);
  return std::max(0.0, table[i] + (table[i + 1] - table[i]) * beyond);
}

bool well_formed(const ChipRecord& c) noexcept {
  const std::int64_t counts[] = {
      c.tensor_cores, c.tensor_width, c.tensor_depth,       c.tensor_local_bytes,
      c.vector_cores, c.vector_lanes, c.vector_local_bytes, c.vector_alus_per_lane,
      c.buffer_bytes, c.hbm_bytes,    c.hbm_stacks,         c.links,
      c.dies,         c.fp8,          c.other_cores,        c.other_width,
      c.other_depth};
  for (const std::int64_t count : counts) {
    if (count < 0) return false;
  }
  const double rates[] = {c.buffer_bytes_per_cycle, c.buffer_port_bytes_per_cycle,
                          c.hbm_bytes_per_s, c.clock_hz, c.link_bytes_per_s};
  for (const double rate : rates) {
    if (!(rate >= 0.0) || !std::isfinite(rate)) return false;
  }
  return true;
}

// The chip with its arrays of the other shape in place of the first ones, each with a local buffer
// of 16 bytes per multiplier and 1 KiB at least, as in PHAZE.
ChipRecord with_other_cores(ChipRecord chip) noexcept {
  constexpr double most = 9.2e18;  // saturates for sizes no chip has
  const double bytes =
      16.0 * static_cast<double>(chip.other_width) * static_cast<double>(chip.other_depth);
  chip.tensor_cores = chip.other_cores;
  chip.tensor_width = chip.other_width;
  chip.tensor_depth = chip.other_depth;
  chip.tensor_local_bytes = static_cast<std::int64_t>(std::clamp(bytes, kBytesPerKib, most));
  chip.other_cores = 0;
  return chip;
}

// Area of the first kind of arrays with their local buffers.
double arrays_um2(const ChipRecord& chip, const AreaTerms& terms, bool* extrapolated) noexcept {
  const double element_um2 =
      kElementUm2 * (1.0 + terms.logic_growth) * (1.0 + (chip.fp8 > 0 ? terms.fp8_share : 0.0));
  return static_cast<double>(chip.tensor_cores) *
         (static_cast<double>(chip.tensor_width) * static_cast<double>(chip.tensor_depth) *
              element_um2 +
          (1.0 + terms.sram_growth) *
              local_sram_um2(static_cast<double>(chip.tensor_local_bytes) / kBytesPerKib,
                             extrapolated));
}

// Energy of one cycle of the first kind of arrays: products, and one operand per row and column.
double arrays_j(const ChipRecord& chip, const EnergyTable& table) noexcept {
  constexpr double kOperandBytes = 2.0;  // bf16
  const auto cores = static_cast<double>(chip.tensor_cores);
  const auto width = static_cast<double>(chip.tensor_width);
  const auto depth = static_cast<double>(chip.tensor_depth);
  return cores * width * depth * table.mac_j +
         cores * (width + depth) * kOperandBytes * table.local_byte_j;
}

}  // namespace

double local_sram_um2(double kib, bool* extrapolated) noexcept {
  return table_area(kLocalUm2, kLocalSramFirstKib, kib, extrapolated);
}

double global_sram_um2(double mib, bool* extrapolated) noexcept {
  return table_area(kGlobalUm2, kGlobalSramFirstMib, mib, extrapolated);
}

AreaBreakdown chip_area(const ChipRecord& chip, const AreaTerms& terms) noexcept {
  AreaBreakdown area{};
  if (!well_formed(chip)) {
    constexpr double nan = kNan;
    constexpr auto bad = static_cast<std::int32_t>(Status::kBadChip);
    return {nan, nan, nan, nan, nan, nan, nan, nan, nan, 0, bad};
  }
  bool extrapolated = false;
  const auto lanes = static_cast<double>(chip.vector_lanes);
  const auto alus = static_cast<double>(chip.vector_alus_per_lane);
  const auto tensor_cores = static_cast<double>(chip.tensor_cores);
  const auto vector_cores = static_cast<double>(chip.vector_cores);
  const double logic = 1.0 + terms.logic_growth;
  const double sram = 1.0 + terms.sram_growth;
  double tensor_um2 = arrays_um2(chip, terms, &extrapolated);
  double port_bytes = (tensor_cores + vector_cores) * port_bytes_per_cycle(chip);
  if (chip.other_cores > 0) {
    const ChipRecord other = with_other_cores(chip);
    tensor_um2 += arrays_um2(other, terms, &extrapolated);
    port_bytes += static_cast<double>(other.tensor_cores) * port_bytes_per_cycle(other);
  }
  const double vector_um2 =
      vector_cores *
      (lanes * alus * (kLaneUm2 * logic) +
       sram * local_sram_um2(static_cast<double>(chip.vector_local_bytes) / kBytesPerKib,
                             &extrapolated));
  const double buffer_um2 =
      sram * global_sram_um2(static_cast<double>(chip.buffer_bytes) / kBytesPerMib, &extrapolated);
  area.tensor_mm2 = tensor_um2 / kUm2PerMm2;
  area.vector_mm2 = vector_um2 / kUm2PerMm2;
  area.buffer_mm2 = buffer_um2 / kUm2PerMm2;
  area.network_mm2 = port_bytes * terms.network_mm2_per_port_byte;
  area.hbm_mm2 = static_cast<double>(chip.hbm_stacks) * terms.hbm_mm2_per_stack;
  area.control_mm2 = vector_cores * lanes * terms.control_mm2_per_lane;
  area.links_mm2 =
      static_cast<double>(chip.links) * chip.link_bytes_per_s * terms.link_mm2_per_byte_per_s;
  const double logic_mm2 = (tensor_um2 + vector_um2 + buffer_um2) / kUm2PerMm2 + area.network_mm2 +
                           area.hbm_mm2 + area.control_mm2 + area.links_mm2;
  area.die_to_die_mm2 = chip.dies > 1 ? logic_mm2 * terms.die_to_die_share : 0.0;
  area.total_mm2 = logic_mm2 + area.die_to_die_mm2;
  area.extrapolated = extrapolated ? 1 : 0;
  area.status = static_cast<std::int32_t>(Status::kOk);
  return area;
}

double peak_power_w(const ChipRecord& chip, const EnergyTable& table, double area_mm2) noexcept {
  const double lane_ops = static_cast<double>(chip.vector_cores) *
                          static_cast<double>(chip.vector_lanes) *
                          static_cast<double>(chip.vector_alus_per_lane);
  double tensor_j = arrays_j(chip, table);
  if (chip.other_cores > 0) tensor_j += arrays_j(with_other_cores(chip), table);
  const double per_cycle_j =
      tensor_j + lane_ops * table.vector_op_j + chip.buffer_bytes_per_cycle * table.buffer_byte_j;
  return per_cycle_j * chip.clock_hz + chip.hbm_bytes_per_s * table.hbm_byte_j +
         static_cast<double>(chip.links) * chip.link_bytes_per_s * table.network_byte_j +
         area_mm2 * table.static_w_per_mm2;
}

void chip_area_batch(std::span<const ChipRecord> chips, const AreaTerms& terms,
                     std::span<AreaBreakdown> out, int threads) {
  parallel_for(chips.size(), threads, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) out[i] = chip_area(chips[i], terms);
  });
}

void chip_area_total_batch(std::span<const ChipRecord> chips, const AreaTerms& terms,
                           std::span<double> out, int threads) {
  parallel_for(chips.size(), threads, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) out[i] = chip_area(chips[i], terms).total_mm2;
  });
}

void peak_power_batch(std::span<const ChipRecord> chips, const EnergyTable& table,
                      std::span<const double> area_mm2, std::span<double> out, int threads) {
  parallel_for(chips.size(), threads, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      out[i] = peak_power_w(chips[i], table, area_mm2[i]);
    }
  });
}

}  // namespace phaze
