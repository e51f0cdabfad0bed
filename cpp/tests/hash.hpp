// A hash over the bits of numbers, for answers that must be the same on every machine.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>

#include "check.hpp"

namespace phaze::test {

class Hash {  // FNV-1a over the bytes of each number
 public:
  void add(double value) {
    auto bits = std::bit_cast<std::uint64_t>(value);
    for (int byte = 0; byte < 8; ++byte, bits >>= 8) {
      value_ = (value_ ^ (bits & 0xff)) * 1099511628211ULL;
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037ULL;
};

inline void same_everywhere(const char* what, std::uint64_t found, std::uint64_t expected) {
  if (found != expected) {
    std::printf("%s: 0x%016llxULL\n", what, static_cast<unsigned long long>(found));
  }
  CHECK(found == expected);
}

}  // namespace phaze::test
