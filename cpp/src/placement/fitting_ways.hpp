// What a stage may recompute so that it fits: whatever the chip, so that it is worked out once for
// all chips. Private to the kernel; one object per thread.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "phaze/plan.hpp"

namespace phaze {

// Ways that fit, as `StageRecompute` writes them, in the order in which they are offered: of ways
// whose seconds differ by rounding alone the first is taken.
struct FittingWays {
  std::vector<std::int32_t> whole;    // all blocks in one variant
  std::vector<std::int32_t> leaning;  // as few blocks as must be in a variant that fits, others not
  std::vector<std::int32_t> filling;  // as many as can be in a variant that does not fit
  bool partial = false;  // only the first variant was looked at: it fits, and none is faster
};

// `most` is the number of blocks of the longest chunk; bytes fall with the blocks that are
// recomputed further. `first_is_fastest`: no variant is faster than the first.
template <typename Bytes>
FittingWays fitting_ways(int variants, bool first_is_fastest, bool some_blocks, bool alike,
                         int most, double room_bytes, const Bytes& bytes) {
  FittingWays ways;
  bool fits[kMaxVariants];
  for (int v = 0; v < variants; ++v) {
    fits[v] = bytes(StageRecompute{v, v, 0}) <= room_bytes;
    if (fits[v]) ways.whole.push_back(v);
    ways.partial = first_is_fastest && fits[0];
    if (ways.partial) return ways;
  }
  if (!some_blocks || ways.whole.empty()) return ways;
  // The border between counts of blocks that fit and that do not, `low` and `high` known of.
  const auto border = [&](int rest, int more, bool low_fits) {
    int low = 0;
    int high = most;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool own = bytes(StageRecompute{rest, more, middle}) <= room_bytes;
      (own == low_fits ? low : high) = middle;
    }
    return low_fits ? low : high;
  };
  for (int rest = 0; rest < variants; ++rest) {
    for (int more = 0; more < variants && !fits[rest]; ++more) {
      if (!fits[more]) continue;
      const int count = border(rest, more, false);
      if (count < most) ways.leaning.push_back(StageRecompute{rest, more, count}.code());
    }
  }
  if (alike) return ways;
  // Where blocks or chunks differ it matters which come first: the others may be the lean ones.
  for (int rest = 0; rest < variants; ++rest) {
    for (int more = 0; more < variants && fits[rest]; ++more) {
      if (fits[more]) continue;
      const int count = border(rest, more, true);
      if (count > 0) ways.filling.push_back(StageRecompute{rest, more, count}.code());
    }
  }
  return ways;
}

// The fastest of ways that fit, or -1.
template <typename Seconds>
std::int32_t fastest_way(const FittingWays& ways, bool first_is_fastest, const Seconds& seconds) {
  std::int32_t best = -1;
  double best_s = std::numeric_limits<double>::infinity();
  const auto offer = [&](std::int32_t code) {
    const double own = seconds(StageRecompute::of(code));
    if (best >= 0 && !(own < best_s * (1.0 - 1e-12))) return;
    best = code;
    best_s = own;
  };
  if (first_is_fastest && !ways.whole.empty() && ways.whole.front() == 0) return 0;
  for (const std::int32_t code : ways.whole) offer(code);
  std::int32_t last = -1;  // the variant of the others, and whether it is worth it
  bool faster = false;
  for (const std::int32_t code : ways.leaning) {
    const std::int32_t rest = StageRecompute::of(code).rest;
    if (rest != last) faster = seconds(StageRecompute{rest, rest, 0}) < best_s;
    last = rest;
    if (faster) offer(code);
  }
  for (const std::int32_t code : ways.filling) offer(code);
  return best;
}

// Ways of the stages of a space's layouts that were worked out.
class KnownWays {
 public:
  struct Key {
    std::int64_t row;
    std::int64_t stage;  // with what it holds
    double room_bytes;

    bool operator==(const Key&) const = default;
  };

  // Those of a key, which `make` gives where they are not known as far as they are needed.
  template <typename Make>
  const FittingWays& of(const Key& key, bool first_is_fastest, const Make& make) {
    const auto known = ways_.find(key);
    if (known != ways_.end() && (first_is_fastest || !known->second.partial)) return known->second;
    FittingWays ways = make();
    if (ways_.size() >= kMost) ways_.clear();
    return ways_.insert_or_assign(key, std::move(ways)).first->second;
  }

  void clear() noexcept { ways_.clear(); }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      std::uint64_t hash = std::bit_cast<std::uint64_t>(key.room_bytes);
      for (const std::int64_t part : {key.row, key.stage}) {
        hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9E3779B97F4A7C15ULL;
        hash ^= hash >> 29U;
      }
      return static_cast<std::size_t>(hash);
    }
  };
  static constexpr std::size_t kMost = 1 << 15;
  std::unordered_map<Key, FittingWays, Hash> ways_;
};

}  // namespace phaze
