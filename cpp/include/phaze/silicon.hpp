// Area and power of a chip of the tensor-core/vector-core template.
//
// The area formula and its SRAM tables are those of the PHAZE paper's template (Wang et al., ICML
// 2024), exact at the published sizes. Between two table entries the area is linear in capacity;
// outside the table the nearest segment is extrapolated, and `extrapolated` is set. All functions
// are pure and may run from any thread; only a batch can throw, if there is no memory for its
// threads (std::bad_alloc).
#pragma once

#include <cstddef>
#include <span>

#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

// Terms that the published formula omits; 0 disables a term.
struct AreaTerms {
  double network_mm2_per_port_byte = 0.0;  // core-to-buffer network, per core and port B/cycle
  double hbm_mm2_per_stack = 0.0;          // PHY and controller of one 1,024-bit stack
  double control_mm2_per_lane = 0.0;       // registers and control, per vector lane
  double link_mm2_per_byte_per_s = 0.0;  // SerDes and controller, per byte/s of a link's direction
  double die_to_die_share = 0.0;         // relative area of links between dies
  double fp8_share = 0.0;                // relative area that FP8 adds to the multipliers
  double logic_growth = 0.0;             // multipliers and lanes: size relative to 7 nm, minus 1
  double sram_growth = 0.0;              // buffers: size relative to 7 nm, minus 1
};
inline constexpr int kAreaTermCount = 8;

struct AreaBreakdown {
  double tensor_mm2;
  double vector_mm2;
  double buffer_mm2;
  double network_mm2;
  double hbm_mm2;
  double control_mm2;
  double links_mm2;
  double die_to_die_mm2;
  double total_mm2;
  std::int32_t extrapolated;  // 1 if an SRAM size is outside the published table
  std::int32_t status;        // a Status; unless it is kOk every area is NaN
};

// Energy of each kind of event, joules; static power per area, W/mm^2.
struct EnergyTable {
  double mac_j;             // one bf16 multiply with fp32 accumulate
  double vector_op_j;       // one fp32 operation of a vector lane
  double local_byte_j;      // one byte to or from a core's local buffer
  double buffer_byte_j;     // one byte to or from the global buffer
  double hbm_byte_j;        // one byte to or from HBM
  double network_byte_j;    // one byte over an off-package link
  double static_w_per_mm2;  // leakage and clock tree, per mm^2 of die
};

inline constexpr double kLocalSramFirstKib = 1.0;
inline constexpr double kLocalSramLastKib = 1024.0;
inline constexpr double kGlobalSramFirstMib = 2.0;
inline constexpr double kGlobalSramLastMib = 128.0;

// Area in um^2 of a core's local buffer (KiB) and of the global buffer (MiB). O(1).
double local_sram_um2(double kib, bool* extrapolated) noexcept;
double global_sram_um2(double mib, bool* extrapolated) noexcept;

AreaBreakdown chip_area(const ChipRecord& chip, const AreaTerms& terms) noexcept;

// Power with every unit busy each cycle and every memory at full bandwidth, plus static power of
// `area_mm2`: an upper bound on what the modelled units can draw. Watts.
double peak_power_w(const ChipRecord& chip, const EnergyTable& table, double area_mm2) noexcept;

// out[i] = chip_area(chips[i]); sizes must agree.
void chip_area_batch(std::span<const ChipRecord> chips, const AreaTerms& terms,
                     std::span<AreaBreakdown> out, int threads);

// out[i] = chip_area(chips[i]).total_mm2: the area filter of a space, without the breakdown.
void chip_area_total_batch(std::span<const ChipRecord> chips, const AreaTerms& terms,
                           std::span<double> out, int threads);

// out[i] = peak_power_w(chips[i], table, area_mm2[i]); sizes must agree.
void peak_power_batch(std::span<const ChipRecord> chips, const EnergyTable& table,
                      std::span<const double> area_mm2, std::span<double> out, int threads);

}  // namespace phaze
