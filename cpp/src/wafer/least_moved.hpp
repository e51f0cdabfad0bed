// The least bytes of some items that are enough.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "phaze/mapping.hpp"

namespace phaze {

// Of items added one by one, a set with at least `needed` and at most `most` bytes: the first of
// all with no more than `enough`, in the order that tries each item before leaving it out, else the
// one with the least.
struct LeastMoved {
  LeastMoved(double needed_bytes, double enough_bytes, double most_bytes) noexcept
      : needed(needed_bytes), enough(enough_bytes), most(most_bytes) {}

  double needed, enough, most;
  double least = std::numeric_limits<double>::infinity();  // bytes of the set that was found
  std::uint64_t found = 0;                                 // that set, a bit per item
  std::size_t count = 0;
  std::array<int, kMaxMapOps> item;
  std::array<double, kMaxMapOps> size;
  std::array<std::uint64_t, kMaxMapOps> equal;    // items before it that are as large
  std::array<double, kMaxMapOps> left, smallest;  // of an item and those behind it, bytes

  void add(int i, double bytes, std::uint64_t as_large) noexcept {
    item[count] = i;
    size[count] = bytes;
    equal[count++] = as_large;
  }
  void search() noexcept {
    double sum = 0.0, least_size = std::numeric_limits<double>::infinity();
    for (std::size_t k = count; k-- > 0;) {
      left[k] = sum += size[k];
      smallest[k] = least_size = size[k] < least_size ? size[k] : least_size;
    }
    pick(0, 0.0, 0, 0);
  }

 private:
  bool pick(std::size_t k, double moved, std::uint64_t away, std::uint64_t kept) noexcept {
    for (; k < count && moved + left[k] >= needed && moved + smallest[k] <= most; ++k) {
      const double more = moved + size[k];
      const std::uint64_t bit = std::uint64_t{1} << item[k];
      // Of two that are as large, the earlier one is moved first.
      if (more <= most && more < least && (equal[k] & kept) == 0) {
        if (more >= needed) {
          least = more;
          found = away | bit;
          if (more <= enough) return true;
        } else if (pick(k + 1, more, away | bit, kept)) {
          return true;
        }
      }
      kept |= bit;
    }
    return false;
  }
};

}  // namespace phaze
