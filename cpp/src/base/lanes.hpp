// Numbers that are computed alike and side by side, in vector registers where there are several.
// Every operation is that of each number alone, bit for bit.
#pragma once

#include <cstddef>
#include <cstring>

namespace phaze {

template <std::size_t W>
class Lanes {
 public:
  static Lanes load(const double* from) noexcept {
    Lanes lanes;
    std::memcpy(&lanes.values_, from, sizeof(lanes.values_));
    return lanes;
  }
  static Lanes all(double value) noexcept {
    Lanes lanes;
    for (Pair& own : lanes.values_) own = Pair{value, value};
    return lanes;
  }
  void store(double* to) const noexcept { std::memcpy(to, &values_, sizeof(values_)); }

  friend Lanes operator+(const Lanes& a, const Lanes& b) noexcept {
    return by_pair(a, b, [](Pair x, Pair y) { return x + y; });
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) noexcept {
    return by_pair(a, b, [](Pair x, Pair y) { return x - y; });
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) noexcept {
    return by_pair(a, b, [](Pair x, Pair y) { return x * y; });
  }
  friend Lanes larger(const Lanes& a, const Lanes& b) noexcept {  // as std::max(a, b)
    return by_pair(a, b, [](Pair x, Pair y) { return x < y ? y : x; });
  }

 private:
  static_assert(W % 2 == 0);
  using Pair = double __attribute__((vector_size(16)));
  template <typename F>
  static Lanes by_pair(const Lanes& a, const Lanes& b, const F& f) noexcept {
    Lanes result;
    for (std::size_t k = 0; k < W / 2; ++k) result.values_[k] = f(a.values_[k], b.values_[k]);
    return result;
  }
  Pair values_[W / 2];
};

template <>
class Lanes<1> {
 public:
  static Lanes load(const double* from) noexcept { return all(*from); }
  static Lanes all(double value) noexcept {
    Lanes lanes;
    lanes.value_ = value;
    return lanes;
  }
  void store(double* to) const noexcept { *to = value_; }

  friend Lanes operator+(Lanes a, Lanes b) noexcept { return all(a.value_ + b.value_); }
  friend Lanes operator-(Lanes a, Lanes b) noexcept { return all(a.value_ - b.value_); }
  friend Lanes operator*(Lanes a, Lanes b) noexcept { return all(a.value_ * b.value_); }
  friend Lanes larger(Lanes a, Lanes b) noexcept { return a.value_ < b.value_ ? b : a; }

 private:
  double value_;
};

}  // namespace phaze
