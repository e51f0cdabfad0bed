// Area terms as Python passes them: one number each, in the order of `AreaTerms`.
#pragma once

#include <pybind11/stl.h>

#include <array>
#include <string>

#include "arrays.hpp"
#include "phaze/silicon.hpp"

namespace phaze::bindings {

using TermRates = std::array<double, kAreaTermCount>;

inline AreaTerms checked_terms(const TermRates& rates) {
  constexpr std::array<const char*, kAreaTermCount> names = {"network_mm2_per_port_byte",
                                                             "hbm_mm2_per_stack",
                                                             "control_mm2_per_lane",
                                                             "link_mm2_per_byte_per_s",
                                                             "die_to_die_share",
                                                             "fp8_share",
                                                             "logic_growth",
                                                             "sram_growth"};
  constexpr std::size_t first_growth = 6;  // growth terms may be negative: nodes below 7 nm shrink
  for (std::size_t i = 0; i < rates.size(); ++i) {
    const double least = i < first_growth ? 0.0 : -0.999;
    if (!(rates[i] >= least) || rates[i] > 1e6) {
      throw InvalidInput(std::string(names[i]) + ": " + std::to_string(rates[i]) +
                         " is not accepted; expected a number from " +
                         (i < first_growth ? "0" : "-0.999") + " to 1e6");
    }
  }
  return {rates[0], rates[1], rates[2], rates[3], rates[4], rates[5], rates[6], rates[7]};
}

}  // namespace phaze::bindings
