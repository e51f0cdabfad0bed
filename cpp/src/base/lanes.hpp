// Several numbers to which the same operations are applied at once, in vector registers. Each
// number has the bits that it would have if it were computed alone.
#pragma once

#include <cstddef>
#include <cstring>

namespace phaze {

// `width` numbers, a power of two.
template <std::size_t width>
struct Lanes {
  Lanes<width / 2> low, high;

  static Lanes load(const double* from) noexcept {
    return {Lanes<width / 2>::load(from), Lanes<width / 2>::load(from + width / 2)};
  }
  static Lanes all(double value) noexcept {
    return {Lanes<width / 2>::all(value), Lanes<width / 2>::all(value)};
  }
  void store(double* to) const noexcept {
    low.store(to);
    high.store(to + width / 2);
  }
  friend Lanes operator+(Lanes a, Lanes b) noexcept { return {a.low + b.low, a.high + b.high}; }
  friend Lanes operator-(Lanes a, Lanes b) noexcept { return {a.low - b.low, a.high - b.high}; }
  friend Lanes operator*(Lanes a, Lanes b) noexcept { return {a.low * b.low, a.high * b.high}; }
  friend Lanes larger(Lanes a, Lanes b) noexcept {  // as std::max(a, b)
    return {larger(a.low, b.low), larger(a.high, b.high)};
  }
  friend Lanes smaller(Lanes a, Lanes b) noexcept {  // as std::min(a, b)
    return {smaller(a.low, b.low), smaller(a.high, b.high)};
  }
};

template <>
struct Lanes<2> {
  using Pair = double __attribute__((vector_size(16)));
  Pair own;

  static Lanes load(const double* from) noexcept {
    Lanes lanes;
    std::memcpy(&lanes.own, from, sizeof(lanes.own));
    return lanes;
  }
  static Lanes all(double value) noexcept { return {Pair{value, value}}; }
  void store(double* to) const noexcept { std::memcpy(to, &own, sizeof(own)); }
  friend Lanes operator+(Lanes a, Lanes b) noexcept { return {a.own + b.own}; }
  friend Lanes operator-(Lanes a, Lanes b) noexcept { return {a.own - b.own}; }
  friend Lanes operator*(Lanes a, Lanes b) noexcept { return {a.own * b.own}; }
  friend Lanes larger(Lanes a, Lanes b) noexcept { return {a.own < b.own ? b.own : a.own}; }
  friend Lanes smaller(Lanes a, Lanes b) noexcept { return {b.own < a.own ? b.own : a.own}; }
};

template <>
struct Lanes<1> {
  double own;

  static Lanes load(const double* from) noexcept { return {*from}; }
  static Lanes all(double value) noexcept { return {value}; }
  void store(double* to) const noexcept { *to = own; }
  friend Lanes operator+(Lanes a, Lanes b) noexcept { return {a.own + b.own}; }
  friend Lanes operator-(Lanes a, Lanes b) noexcept { return {a.own - b.own}; }
  friend Lanes operator*(Lanes a, Lanes b) noexcept { return {a.own * b.own}; }
  friend Lanes larger(Lanes a, Lanes b) noexcept { return a.own < b.own ? b : a; }
  friend Lanes smaller(Lanes a, Lanes b) noexcept { return b.own < a.own ? b : a; }
};

}  // namespace phaze
