// A step's time to within a range, where that is enough to accept or to refuse a mapping.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "phaze/mapping.hpp"
#include "wafer/mapping_parts.hpp"

namespace phaze {

inline constexpr double kEndless = std::numeric_limits<double>::infinity();
// A limit is this much wider: what ties with it is exact.
inline constexpr double kLimitRounding = 1e-9;

// A 1F1B step that surely takes something in `range`, which then becomes what it takes, or more
// than `limit_s`, which makes it endless; false where that is not known. Outputs are chosen for
// stages that may be the slowest, the fullest first: those with less to save, and no less room off
// the wafer, take no longer than with the same choice, and no less than with outputs saved in
// parts.
template <typename Chooser>
bool Mapping::narrow(Chooser& chooser, std::span<const Frame> frames, Pipeline least,
                     double plain_s, double tail_s, double limit_s, MapRange& range) const {
  std::array<double, kMaxMapStages> most;  // `frames.size()` of them
  std::array<bool, kMaxMapStages> exact;
  for (std::size_t k = 0; k < frames.size(); ++k) {
    const Frame& f = frames[k];
    exact[k] = !(f.needed_bytes > 0.0);
    most[k] = exact[k] ? f.others_s + blocks_[k] * plain_s : kEndless;
  }
  for (bool first = true;; first = false) {
    std::size_t at = 0;  // the slowest, and of those not bounded yet the fullest
    for (std::size_t k = 1; k < frames.size(); ++k) {
      const bool fuller = frames[k].needed_bytes > frames[at].needed_bytes;
      if (most[k] > most[at] || (most[k] == most[at] && fuller)) at = k;
    }
    const Frame& full = frames[at];
    if (exact[at]) return false;
    exact[at] = true;
    const double worst_s =
        (least.most_s(limit_s - tail_s, full.least_s) - full.others_s) / blocks_[at];
    const double block_s = chooser.solve(full.needed_bytes, full.stream_room, worst_s, range.again);
    if (!(block_s < kEndless)) {
      range.most_s = kEndless;
      return chooser.surely(full.needed_bytes, full.stream_room);
    }
    if (first) range.again = chooser.again();
    least.now(full.others_s + blocks_[at] * block_s, full.least_s);
    Pipeline slowest(rules_);
    for (std::size_t k = 0; k < frames.size(); ++k) {
      const Frame& f = frames[k];
      const bool less = f.needed_bytes <= full.needed_bytes && f.stream_room >= full.stream_room;
      if (less) most[k] = std::min(most[k], f.others_s + blocks_[k] * block_s);
      slowest.add(most[k], 0.0);
    }
    const double least_s = (least.time_s() + tail_s) * (1.0 - kLimitRounding);
    const double most_s = (slowest.time_s() + tail_s) * (1.0 + kLimitRounding);
    if (least_s >= range.least_s && most_s <= range.most_s) {
      range.least_s = least_s;
      range.most_s = most_s;
      return true;
    }
  }
}

}  // namespace phaze
