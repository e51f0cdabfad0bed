// Integers that are the same on every machine.
#pragma once

#include <cstdint>

namespace phaze::test {

class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) noexcept : state_(seed) {}

  std::int32_t below(std::int32_t limit) noexcept {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_;
};

}  // namespace phaze::test
