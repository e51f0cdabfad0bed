// Sums over the layers before each position, for one layout on one chip: a stage is a difference of
// two of them. Private to the kernel; one object per thread, reused.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "base/numbers.hpp"
#include "plan/pipeline_clock.hpp"
#include "plan/plan_space.hpp"

namespace phaze {

// If the strategy has `layer_peaks`, finds the layer with the largest peak in a stage of one chunk,
// layers i..j, and sets its bytes in `moving`. `border` is the end of the layers that use variant
// `more`; `late`: whether gradients are allocated as they are computed.
void find_layer_peak(const PlanSpaceImpl& space, const LayoutRecord& layout,
                     const LayoutCosts& costs, StageRecompute r, std::array<int, 3> i_border_j,
                     bool late, MovingBytes* moving) noexcept;

class PassSums {
 public:
  // Computes the sums of a layout on a chip.
  void build(const PlanSpaceImpl& space, const PricedLayout& layout, const LayoutCosts& costs,
             const KindTimes& times);

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
  // The backward passes that overlap gradient exchanges: without recomputation, so that this
  // overlap is the same for every recomputation of the stage.
  double plain_s(int i, int j) const noexcept {
    return before_[at(j)].plain - before_[at(i)].plain;
  }
  // Backward time of one layer in the fastest variant.
  double least_backward_s(int i) const noexcept {
    double least = backward_part(0, i, i + 1);
    for (int v = 1; v < variants_; ++v) least = std::min(least, backward_part(v, i, i + 1));
    return least;
  }
  // End of the blocks of a chunk that are recomputed by variant `more`; boundary layers are
  // unaffected.
  int border_of(StageRecompute r, int i, int j) const noexcept {
    return r.count == 0 ? i : std::min(std::max(i, first_block_) + r.count, j);
  }
  int variants() const noexcept { return variants_; }

 private:
  // Stored together so that one loop sums all of them.
  struct Seconds {
    double forward, plain, weight_grad, unused;
  };
  std::vector<Seconds> by_kind_;  // scratch; the last layer follows the kinds

  double backward_part(int v, int i, int j) const noexcept {
    const std::size_t first = at(v) * before_.size();
    return backward_[first + at(j)] - backward_[first + at(i)];
  }

  int first_block_ = 0;
  int variants_ = 0;
  std::vector<Seconds> before_;   // by position
  std::vector<double> backward_;  // [variant][position]
};

// Sums of passes, of the work after the last pass, and of bytes, for one layout on one chip.
class PlanSums : public PassSums {
 public:
  // Sums shared by layouts with the same costs are reused from one call to the next; call `forget`
  // if times may have changed in between.
  void build(const PlanSpaceImpl& space, const PricedLayout& layout, const LayoutCosts& costs,
             const KindTimes& times);
  void forget() noexcept { costs_ = nullptr; }

  double stash_bytes(StageRecompute r, int i, int j) const noexcept {
    const int border = border_of(r, i, j);
    return part(stash_, r.more, i, border) + part(stash_, r.rest, border, j);
  }
  double resident_bytes(int i, int j) const noexcept { return part(resident_, 0, i, j); }
  double late_bytes(int i, int j) const noexcept { return part(late_, 0, i, j); }
  double once_bytes(int i, int j) const noexcept { return part(once_, 0, i, j); }
  double sync_s(int i, int j) const noexcept { return after_[at(j)].sync - after_[at(i)].sync; }
  // The optimiser step including its exchanges.
  double step_s(int i, int j) const noexcept { return after_[at(j)].step - after_[at(i)].step; }
  // Computes the sums of both passes in the fastest variant, which work_s() reads.
  void find_work();
  double work_s(int i, int j) const noexcept { return part(work_, 0, i, j); }
  double live_bytes(StageRecompute r, int i, int j) const noexcept {  // largest of one layer
    const int border = border_of(r, i, j);
    return std::max(live_of(r.more, i, border), live_of(r.rest, border, j));
  }
  double gather_bytes(int i, int j) const noexcept;
  // Micro-batches in flight at the peak of a stage.
  double in_flight(int stage) const noexcept { return in_flight_[at(stage)]; }
  double total_work_s() const noexcept { return work_.back(); }
  int layers() const noexcept { return layers_; }
  // Whether no variant is faster than the first.
  bool first_is_fastest() const noexcept { return first_is_fastest_; }

  // All bytes of stage number `stage`, layers i..j, under a recomputation.
  double bytes(StageRecompute r, int i, int j, int stage) const noexcept;
  LateGradients late_gradients(StageRecompute r, int i, int j) const noexcept;
  // Peak bytes of a stage in addition to resident state.
  PeakBytes peak(const MovingBytes& moving, const LateGradients& late, int stage) const noexcept;
  // The stage as used by the pipeline's clock.
  StagePass pass(StageRecompute r, int i, int j, int stage) const noexcept;
  // Number of blocks among layers i..j.
  int blocks(int i, int j) const noexcept {
    return std::max(0, std::min(j, space_->last_block) - std::max(i, space_->first_block));
  }

 private:
  double part(const std::vector<double>& sums, int v, int i, int j) const noexcept {
    const std::size_t first = at(v) * at(layers_ + 1);
    return sums[first + at(j)] - sums[first + at(i)];
  }
  // Seconds after the last pass, of all layers before a position.
  struct After {
    double sync, step;
  };
  std::vector<After> by_kind_;  // scratch; the last layer follows the kinds

  void find_fastest(const KindTimes& times);
  void add_costs(const KindTimes& times);
  void add_bytes();
  double live_of(int v, int i, int j) const noexcept;
  double first_stash(StageRecompute r, int i, int j, int first) const noexcept;
  void add_kinds(bool same_sizes);
  void add_in_flight();

  const PlanSpaceImpl* space_ = nullptr;
  const PricedLayout* layout_ = nullptr;
  const LayoutCosts* costs_ = nullptr;
  const double* times_ = nullptr;
  bool alone_ = false;   // whether there is one stage only
  bool worked_ = false;  // whether `work_` is up to date
  int layers_ = 0;
  bool first_is_fastest_ = true;
  double buffers_ = 0.0;
  double lost_ = 1.0;          // 1 + fraction lost to the allocator
  std::vector<double> stash_;  // [variant][position]
  std::vector<After> after_;   // by position
  std::vector<double> resident_, late_, once_, work_;
  std::vector<double> in_flight_;         // by stage
  std::vector<int> live_kinds_;           // kinds with live or gathered bytes
  std::vector<std::int32_t> kind_count_;  // [of live_kinds_][position]: earlier layers of a kind
};

}  // namespace phaze
