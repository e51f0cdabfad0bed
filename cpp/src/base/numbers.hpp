// Arithmetic shared by the kernels: the index cast, infinity, and the range of accepted numbers.
// All functions are pure and may be called from any thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace phaze {

// Represents "none": the time of a plan that does not exist, or no limit.
inline constexpr double kInfinite = std::numeric_limits<double>::infinity();
// The result if a value cannot be computed from the arguments.
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Keeps a bound from excluding values that equal it up to rounding.
inline constexpr double kRounding = 1.0 - 1e-12;

// Upper limit on sizes, times and rates of a problem: sums and products of a few of them are
// finite, and differences of sums are not NaN.
inline constexpr double kLargestInput = 1e100;

// Casts an index that is known not to be negative.
constexpr std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

// The next state of a hash of 64-bit words.
constexpr std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29U);
}

// False for NaN.
constexpr bool is_size(double value) noexcept { return value >= 0.0 && value <= kLargestInput; }

inline bool all_finite_sizes(std::span<const double> values) noexcept {
  return std::all_of(values.begin(), values.end(),
                     [](double value) { return std::isfinite(value) && value >= 0.0; });
}

}  // namespace phaze
