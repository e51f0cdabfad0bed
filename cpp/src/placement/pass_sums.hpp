// Seconds of the passes of all layers before each position, so that those of a stage are a few
// subtractions. Private to the kernel; one object per thread, reused.
#pragma once

#include <algorithm>
#include <vector>

#include "placement/plan_space.hpp"

namespace phaze {

class PassSums {
 public:
  // Of a layout on a chip; where `free_data`, exchanges of weights and gradients cost nothing, and
  // what is built holds for every layout of the strategy.
  void build(const PlanSpaceImpl& space, const PlanRow& row, const PlanFrame& frame,
             const KindTimes& times, bool free_data);

  double forward_s(int i, int j) const noexcept {
    return before_[at(j)].forward - before_[at(i)].forward;
  }
  double backward_s(StageRecompute r, int i, int j) const noexcept {
    const int border = border_of(r, i, j);
    return backward_part(r.more, i, border) + backward_part(r.rest, border, j);
  }
  double weight_grad_s(int i, int j) const noexcept {
    return before_[at(j)].weight_grad - before_[at(i)].weight_grad;
  }
  // The backward passes that gradients hide behind: nothing recomputed, so that a plan takes the
  // same time whatever else a stage might have recomputed.
  double plain_s(int i, int j) const noexcept {
    return before_[at(j)].plain - before_[at(i)].plain;
  }
  // Of one layer, in the quickest variant.
  double least_backward_s(int i) const noexcept {
    double least = backward_part(0, i, i + 1);
    for (int v = 1; v < variants_; ++v) least = std::min(least, backward_part(v, i, i + 1));
    return least;
  }
  // Where the blocks of a chunk end that are recomputed as `more` has it; ends are as they are.
  int border_of(StageRecompute r, int i, int j) const noexcept {
    return r.count == 0 ? i : std::min(std::max(i, first_block_) + r.count, j);
  }

 private:
  // Side by side, to be added up at once.
  struct Seconds {
    double forward, plain, weight_grad, unused;
  };

  static std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }
  double backward_part(int v, int i, int j) const noexcept {
    const std::size_t first = at(v) * before_.size();
    return backward_[first + at(j)] - backward_[first + at(i)];
  }

  int first_block_ = 0;
  int variants_ = 0;
  std::vector<Seconds> before_;   // by position
  std::vector<double> backward_;  // [variant][position]
};

}  // namespace phaze
