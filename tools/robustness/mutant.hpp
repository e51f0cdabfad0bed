// What an instrumented copy of the sources is made of: each changed place asks whether its own
// number is the one that is chosen, and leaves a mark that it was reached. `a + b` with number 17
// becomes `a +phaze_mutants::Plus<17>{}+ b`, which has the same precedence and the same bits.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

extern "C" {
__attribute__((visibility("default"))) extern int phaze_mutant;
__attribute__((visibility("default"))) extern unsigned char phaze_reached[4096];
}

namespace phaze_mutants {

template <int N>
inline bool on() noexcept {
  phaze_reached[N] = 1;
  return phaze_mutant == N;
}

#define PHAZE_INFIX(Name, OP, OTHER)                                           \
  template <int N>                                                             \
  struct Name {};                                                              \
  template <typename A, int N>                                                 \
  struct Name##Left {                                                          \
    A a;                                                                       \
  };                                                                           \
  template <typename A, int N>                                                 \
  inline Name##Left<std::decay_t<A>, N> operator OP(A&& a, Name<N>) noexcept { \
    return {a};                                                                \
  }                                                                            \
  template <typename A, int N, typename B>                                     \
  inline auto operator OP(const Name##Left<A, N>& left, const B& b) noexcept   \
      -> decltype(left.a OP b) {                                               \
    return on<N>() ? (left.a OTHER b) : (left.a OP b);                         \
  }
PHAZE_INFIX(Plus, +, -)
PHAZE_INFIX(Minus, -, +)
PHAZE_INFIX(Times, *, /)
PHAZE_INFIX(Over, /, *)
PHAZE_INFIX(Less, <, <=)
PHAZE_INFIX(AtMost, <=, <)
PHAZE_INFIX(More, >, >=)
PHAZE_INFIX(AtLeast, >=, >)
PHAZE_INFIX(Equal, ==, !=)
PHAZE_INFIX(Unequal, !=, ==)
#undef PHAZE_INFIX

template <int N, typename T>
inline T most(const T& a, const T& b) noexcept {
  return on<N>() ? std::min(a, b) : std::max(a, b);
}
template <int N, typename T>
inline T least(const T& a, const T& b) noexcept {
  return on<N>() ? std::max(a, b) : std::min(a, b);
}
template <int N>
inline bool flipped(bool condition) noexcept {
  return on<N>() ? !condition : condition;
}
template <int N, typename T>
inline T negated(T value) noexcept {
  return on<N>() ? static_cast<T>(-value) : value;
}
template <int N>
inline double number(double value, double other) noexcept {
  return on<N>() ? other : value;
}

}  // namespace phaze_mutants
