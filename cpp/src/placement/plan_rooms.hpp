// How many blocks the stages of a layout have room for, and the least they need: what bounds on
// time and memory are made of. Private to the kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "placement/plan_space.hpp"

namespace phaze {

// Sums in another order differ in their last digits; room must not be called too small for it.
inline constexpr double kRoomy = 1.0 + 1e-9;

// What a block takes at least, so that any number of them without bytes have room.
inline constexpr double kNoBytes = std::numeric_limits<double>::min();

// How many blocks a stage of a layout has room for.
class RoomForBlocks {
 public:
  RoomForBlocks(const PlanSpaceImpl& space, const PlanRow& row, double room_bytes)
      : blocks_(space.blocks), some_blocks_(space.some_blocks) {
    const PlanFrame& frame = space.frames[PlanSpaceImpl::at(row.frame)];
    const int strategy = row.layout.strategy;
    variants_ = space.strategies[PlanSpaceImpl::at(strategy)].variants;
    const double lost = 1.0 + space.training.fragmentation;
    double gather = std::numeric_limits<double>::infinity();
    std::fill_n(stash_, kMaxVariants, std::numeric_limits<double>::infinity());
    std::fill_n(live_, kMaxVariants, std::numeric_limits<double>::infinity());
    for (int k = 0; k < space.kinds; ++k) {
      const LayerKindRecord& size = space.size_of(strategy, k);
      const double held = frame.resident_bytes[PlanSpaceImpl::at(k)];
      once_ += space.last_count[PlanSpaceImpl::at(k)] * lost * size.once_bytes;
      first_ += space.first_count[PlanSpaceImpl::at(k)] * held;
      last_ += space.last_count[PlanSpaceImpl::at(k)] * held;
      for (int v = 0; v < variants_; ++v) {
        first_stash_[v] += space.first_count[PlanSpaceImpl::at(k)] * lost * size.stash_bytes[v];
      }
      if (space.block_count[PlanSpaceImpl::at(k)] == 0) continue;
      alike_ = space.block_count[PlanSpaceImpl::at(k)] == space.blocks &&
               space.training.late_gradients == 0;
      resident_ = std::min(resident_, frame.resident_bytes[PlanSpaceImpl::at(k)]);
      gather = std::min(gather, frame.gather_bytes[PlanSpaceImpl::at(k)]);
      for (int v = 0; v < variants_; ++v) {
        stash_[v] = std::min(stash_[v], lost * size.stash_bytes[v]);
        live_[v] = std::min(live_[v], lost * size.live_bytes[v]);
      }
    }
    if (row.layout.stages > 1) {  // the last layer with its copy of a tied embedding
      last_ += frame.resident_bytes[PlanSpaceImpl::at(space.kinds)] -
               frame.resident_bytes[PlanSpaceImpl::at(space.order.back())];
    }
    for (int v = 0; v < variants_; ++v) live_[v] += lost * gather;
    least_live_ = *std::min_element(live_, live_ + variants_);
    buffers_ = lost * space.buffer_bytes(row);
    left_ = room_bytes * kRoomy - buffers_;
  }

  int variants() const noexcept { return variants_; }

  // Blocks beside the ends that the stage holds; minus infinity where those do not fit.
  double blocks(int v, double in_flight, bool first, bool last) const noexcept {
    return std::floor(share(v, live_[v], in_flight, first, last));
  }

  // The same beside so many live bytes, of the block that does not fit whole the share that does.
  double share(int v, double live, double in_flight, bool first, bool last) const noexcept {
    double left = left_;
    if (first) left -= first_ + in_flight * first_stash_[v];
    if (last) left -= last_;
    const double loss = last ? std::min(in_flight, 1.0) * once_ : 0.0;
    const double each = std::max(resident_ + in_flight * stash_[v], kNoBytes);
    const double fit = (left - std::max(live, loss)) / each * kRoomy;
    const double none =
        left >= loss ? 0.0 : -std::numeric_limits<double>::infinity();  // a stage of ends alone
    return std::min(std::max(fit, none), static_cast<double>(blocks_));
  }

  // The least that a stage needs with `least` to `most` blocks. Where nothing need be recomputed,
  // nothing is.
  double least_bytes(double least, double most, double in_flight, bool first,
                     bool last) const noexcept {
    const double ends = first_ * first + last_ * last;
    double found = std::numeric_limits<double>::infinity();
    for (int v = 0; v < variants_; ++v) {
      const double fixed = ends + (first ? in_flight * first_stash_[v] : 0.0) + buffers_;
      const double each = resident_ + in_flight * stash_[v];
      const double loss = last ? std::min(in_flight, 1.0) * once_ : 0.0;
      const double needed = fixed + std::max(least > 0.0 ? live_[v] : 0.0, loss) + least * each;
      found = std::min(found, v == 0 ? needed : std::max(needed, filled(in_flight)));
      const double all = fixed + std::max(live_[v], loss) + most * each;
      if (v == 0 && alike_ && all <= left_ + buffers_) break;
    }
    return found;
  }

  // The least that a stage of `even` blocks or more needs anywhere in the pipeline.
  double even_bytes(double even, double most, double most_in_flight) const noexcept {
    double found = std::numeric_limits<double>::infinity();
    for (int v = 0; v < variants_; ++v) {
      const double needed = buffers_ + live_[v] + even * (resident_ + stash_[v]);
      found = std::min(found, v == 0 ? needed : std::max(needed, filled(most_in_flight)));
      const double all =
          std::max(live_[v], once_) + most * (resident_ + most_in_flight * stash_[v]);
      if (v == 0 && alike_ && first_ + last_ + most_in_flight * first_stash_[v] + all <= left_)
        break;
    }
    return found;
  }

  // The most blocks of a stage that needs no more than `bytes`.
  double blocks_within(double bytes, double in_flight) const noexcept {
    double found = 0.0;
    const double plain = blocks(0, in_flight, true, true);  // beside any layers none is recomputed
    for (int v = 0; v < variants_; ++v) {
      const double each = std::max(resident_ + in_flight * stash_[v], kNoBytes);
      const double most = std::floor((bytes - buffers_ - live_[v]) / each * kRoomy);
      const double room = blocks(v, in_flight, false, false);
      if (v > 0 && bytes < filled(in_flight)) break;
      if (v == 0 || !alike_ || most > plain) {
        found = std::max(found, std::min(most, std::max(room, 0.0)));
      }
    }
    return std::min(found, static_cast<double>(blocks_));
  }

  // Blocks with which nothing need be recomputed; a share of one where a stage may recompute some
  // blocks alone, since that may be enough. Then each byte beyond costs what it takes to save it,
  // but for live bytes, which may be fewer once all blocks are recomputed.
  double plain(double in_flight, bool first, bool last) const noexcept {
    return some_blocks_ ? share(0, least_live_, in_flight, first, last)
                        : blocks(0, in_flight, first, last);
  }

 private:
  // A stage that recomputes some blocks recomputes no more than it must, so that with a block less
  // it would not fit: it needs as much at least.
  double filled(double in_flight) const noexcept {
    if (!some_blocks_ || !alike_) return 0.0;
    const double least = *std::min_element(stash_, stash_ + variants_);
    return (left_ + buffers_) * (1.0 - 1e-8) - in_flight * (stash_[0] - least) -
           (live_[0] - least_live_);
  }

  int blocks_;
  bool some_blocks_;
  int variants_ = 1;
  bool alike_ = false;  // all blocks are of one kind, and a stage's bytes are known by their number
  double left_ = 0.0;
  double buffers_ = 0.0;
  double resident_ = std::numeric_limits<double>::infinity();
  double first_ = 0.0;
  double last_ = 0.0;
  double once_ = 0.0;  // of the last stage, while the loss is computed
  double stash_[kMaxVariants];
  double live_[kMaxVariants];
  double least_live_ = 0.0;
  double first_stash_[kMaxVariants] = {};
};

}  // namespace phaze
