// Numbers read off the bytes of one fuzzed input; zeros where it has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <vector>

namespace phaze::fuzz {

inline constexpr double kInfinite = std::numeric_limits<double>::infinity();
inline constexpr double kAwkward[] = {
    0.0,   -0.0,  1.0,    -1.0,    0.5,       1e-300,     5e-324,
    1e100, 1e300, -1e300, 1.7e308, kInfinite, -kInfinite, std::numeric_limits<double>::quiet_NaN()};
inline constexpr std::int64_t kAwkwardIntegers[] = {0,
                                                    1,
                                                    -1,
                                                    2,
                                                    3,
                                                    63,
                                                    64,
                                                    65,
                                                    std::int64_t{1} << 31,
                                                    std::int64_t{1} << 40,
                                                    std::int64_t{1} << 62,
                                                    std::numeric_limits<std::int64_t>::max(),
                                                    std::numeric_limits<std::int64_t>::min()};

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) noexcept : data_(data), left_(size) {}

  // At least 0 and below `limit`, which is at most 2^16.
  std::int32_t below(std::int32_t limit) noexcept {
    std::int32_t value = next();
    if (limit > 256) value = value * 256 + next();
    return value % limit;
  }
  // True for one value of a byte in `many`.
  bool rarely(std::int32_t many) noexcept { return below(many) == many - 1; }
  double awkward() noexcept {
    return kAwkward[below(static_cast<std::int32_t>(std::size(kAwkward)))];
  }
  std::int64_t awkward_integer() noexcept {
    return kAwkwardIntegers[below(static_cast<std::int32_t>(std::size(kAwkwardIntegers)))];
  }
  std::int32_t awkward_int() noexcept { return static_cast<std::int32_t>(awkward_integer()); }
  // A small multiple of `unit`, or something awkward.
  double number(double unit) noexcept { return rarely(24) ? awkward() : unit * below(40); }
  std::int64_t integer(std::int32_t limit) noexcept {
    return rarely(24) ? awkward_integer() : below(limit);
  }
  void spoil(std::vector<double>* values) noexcept {
    if (values->empty()) return;
    (*values)[static_cast<std::size_t>(below(static_cast<std::int32_t>(values->size())))] =
        awkward();
  }
  bool empty() const noexcept { return left_ == 0; }

 private:
  std::int32_t next() noexcept {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  const std::uint8_t* data_;
  std::size_t left_;
};

// One input of each kind: it ends, touches nothing but its records (the sanitizers see to that),
// and its answer is a status or a number that can be.
void collective(Bytes bytes);
void layer(Bytes bytes);
void mapping(Bytes bytes);
void nest(Bytes bytes);
void placement(Bytes bytes);
void plan(Bytes bytes);
void product(Bytes bytes);

struct Target {
  const char* name;
  void (*run)(Bytes);
};
inline constexpr Target kTargets[] = {
    {"collective", collective}, {"layer", layer}, {"mapping", mapping}, {"nest", nest},
    {"placement", placement},   {"plan", plan},   {"product", product}};

inline void require(bool good, const char* text, const char* file, int line) {
  if (good) return;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
  std::abort();
}

}  // namespace phaze::fuzz

#define REQUIRE(expression) ::phaze::fuzz::require((expression), #expression, __FILE__, __LINE__)
