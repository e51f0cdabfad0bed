// Assertions of the C++ tests. A failed check prints its location and expression, and the program
// exits with the number of failures.
#pragma once

#include <cmath>
#include <cstdio>

namespace phaze::test {

inline int& failures() {
  static int count = 0;
  return count;
}

inline void check(bool good, const char* text, const char* file, int line) {
  if (good) return;
  std::printf("%s:%d: failed: %s\n", file, line, text);
  ++failures();
}

inline void check_close(double found, double expected, double tolerance, const char* text,
                        const char* file, int line) {
  if (std::abs(found - expected) <= tolerance * std::abs(expected)) return;
  std::printf("%s:%d: failed: %s: found %.17g, expected %.17g\n", file, line, text, found,
              expected);
  ++failures();
}

inline int report(const char* name) {
  if (failures() == 0) std::printf("%s: all checks passed\n", name);
  return failures() == 0 ? 0 : 1;
}

}  // namespace phaze::test

#define CHECK(expression) ::phaze::test::check((expression), #expression, __FILE__, __LINE__)
#define CHECK_CLOSE(found, expected, tolerance) \
  ::phaze::test::check_close((found), (expected), (tolerance), #found, __FILE__, __LINE__)
