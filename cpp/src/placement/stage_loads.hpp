// Loads with which the stages of a layout hold all blocks: what bounds on time are made of. Private
// to the kernel; docs/search.md has the proofs.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "placement/plan_space.hpp"

namespace phaze {

// Sums in another order differ in their last digits; a stage must not be said to hold too little.
inline constexpr double kLoose = 1.0 + 1e-9;

// Blocks that a stage holds with a load, in blocks that are not recomputed, where a stage
// recomputes all of its blocks or none, and one takes 1 + r.
struct WholeStages {
  double r;
  double operator()(double load, double plain, double lean) const noexcept {
    return std::max(std::min(std::floor(load * kLoose), plain),
                    std::min(std::floor(load / (1.0 + r) * kLoose), lean));
  }
};

// The same where a stage recomputes as many of its blocks as it must, and r is what it takes to
// save the bytes of one.
struct SomeBlocks {
  double r;
  double operator()(double load, double plain, double lean) const noexcept {
    const double own = load <= plain ? load : (load + r * plain) / (1.0 + r);
    return std::min(std::floor(own * kLoose), std::max(std::floor(plain), lean));
  }
};

template <typename Held>
bool all_held(const StageRooms& rooms, int stages, int blocks, double load,
              const Held& held) noexcept {
  double sum = 0.0;
  for (int s = 0; s < stages; ++s) {
    sum += held(load, rooms.plain[PlanSpaceImpl::at(s)], rooms.lean[PlanSpaceImpl::at(s)]);
    if (sum >= blocks) return true;
  }
  return false;
}

// The smallest load with which all stages together hold every block.
inline double longest_stage(const StageRooms& rooms, int stages, int blocks,
                            WholeStages held) noexcept {
  const auto holds = [&](double load) { return all_held(rooms, stages, blocks, load, held); };
  double least = std::numeric_limits<double>::infinity();
  for (const double unit : {1.0, 1.0 + held.r}) {
    int low = 0;
    int high = blocks;
    if (!holds(high * unit)) continue;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (holds(middle * unit) ? high : low) = middle;
    }
    least = std::min(least, high * unit);
  }
  return std::isfinite(least) ? least : 1.0;
}

inline double longest_stage(const StageRooms& rooms, int stages, int blocks,
                            SomeBlocks held) noexcept {
  const auto holds = [&](double load) { return all_held(rooms, stages, blocks, load, held); };
  double low = std::ceil(static_cast<double>(blocks) / stages);
  if (holds(low)) return low;
  double high = blocks * (1.0 + held.r);
  for (int step = 0; step < 12; ++step) {
    const double middle = 0.5 * (low + high);
    (holds(middle) ? high : low) = middle;
  }
  return low;
}

// Whether the stages of an interleaved pipeline, each with what it waits for before its first pass
// and after its last, can have all blocks through in so many seconds (docs/search.md, 6).
template <typename Held>
class InterleavedStages {
 public:
  InterleavedStages(const PlanSpaceImpl& space, const PlanRow& row, const StageRooms& rooms,
                    const StepTotals& t, const Held& held) noexcept
      : layout_(row.layout),
        message_s_(space.frames[PlanSpaceImpl::at(row.frame)].message_s),
        rooms_(rooms),
        totals_(t),
        held_(held),
        blocks_(space.blocks),
        chunk_(row.bound.chunk),
        wrap_s_((row.layout.vpp - 1.0) *
                (row.layout.stages == 2 ? message_s_[1] : row.wrap_s)) {}

  bool through(double time_s) const noexcept {
    const auto m = static_cast<double>(layout_.micro_batches);
    const double chunks = layout_.vpp;
    double before_s = 0.0;
    double sum = 0.0;
    for (int k = 0; k < layout_.stages; ++k) {
      const bool last = k + 1 == layout_.stages;
      const double enters_s = k > 0 ? message_s_[PlanSpaceImpl::at(k)] : 0.0;
      const double leaves_s = last ? 0.0 : message_s_[PlanSpaceImpl::at(k) + 1];
      // The first chunk of all may hold a block less, where the embedding counts as one.
      const double waits_s = before_s + std::max(0.0, k * chunk_ - 1.0) * totals_.block_s;
      double load_s = (time_s - waits_s) / m - chunks * (enters_s + leaves_s);
      if (k == 0) load_s -= totals_.first_s + wrap_s_;
      if (last) load_s -= totals_.last_s + wrap_s_;
      if (load_s < 0.0) return false;
      const std::size_t place = PlanSpaceImpl::at(layout_.stages - 1 - k);
      sum += held_(load_s / totals_.block_s * kLoose, rooms_.plain[place], rooms_.lean[place]);
      before_s += enters_s + leaves_s;
    }
    return sum >= blocks_;
  }

  // The least time in which they can; `low_s` is known already.
  double least_s(double low_s) const noexcept {
    if (through(low_s)) return low_s;
    double high_s = low_s * 1.125;
    for (int step = 0; step < 24 && !through(high_s); ++step) {
      low_s = high_s;
      high_s *= 1.125;
    }
    for (int step = 0; step < 8; ++step) {
      const double middle_s = 0.5 * (low_s + high_s);
      (through(middle_s) ? high_s : low_s) = middle_s;
    }
    return low_s;
  }

 private:
  const LayoutRecord& layout_;
  const std::vector<double>& message_s_;
  const StageRooms& rooms_;
  const StepTotals& totals_;
  Held held_;
  int blocks_;
  double chunk_;
  double wrap_s_;
};

}  // namespace phaze
