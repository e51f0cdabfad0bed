// Which items of a choice of outputs may be exchanged.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace phaze {

// Of each item the later ones that save no more bytes and cost no less, by work and by what is
// beside it, and the earlier ones that are as large; only items of which both or none can be moved.
inline void compare_items(int count, const double* bytes, const double* by_work,
                          const double* by_hidden, std::uint64_t movable, std::uint64_t* worse,
                          std::uint64_t* equal) noexcept {
  for (int i = 0; i < count; ++i) equal[i] = 0;
  for (int i = 0; i < count; ++i) {
    std::uint64_t no_better = 0, as_large = 0;
    for (int k = count - 1; k > i; --k) {
      const bool less =
          (bytes[k] <= bytes[i]) & (by_work[k] >= by_work[i]) & (by_hidden[k] >= by_hidden[i]);
      no_better = no_better << 1 | static_cast<std::uint64_t>(less);
      as_large = as_large << 1 | static_cast<std::uint64_t>(bytes[k] == bytes[i]);
    }
    const std::uint64_t alike = (movable >> i & 1) != 0 ? movable : ~movable;
    worse[i] = no_better << 1 << i & alike;
    for (as_large = as_large << 1 << i & alike; as_large != 0; as_large &= as_large - 1) {
      equal[std::countr_zero(as_large)] |= std::uint64_t{1} << i;
    }
  }
}

}  // namespace phaze
