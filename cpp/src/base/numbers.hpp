// Small arithmetic that several cost kernels need.
#pragma once

#include <cstdint>

#include "phaze/gemm.hpp"

namespace phaze {

// Keeps a bound from excluding what it equals but for rounding.
inline constexpr double kRounding = 1.0 - 1e-12;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

// The largest of several times and what it belongs to; the first of those that tie.
struct Largest {
  double seconds;
  Limit limit;

  void consider(double other_s, Limit which) noexcept {
    if (!(other_s > seconds)) return;
    seconds = other_s;
    limit = which;
  }
};

}  // namespace phaze
