// The orders of docs/pipelines.md, one device at a time, told to a sink: pass(kind, chunk) for each
// pass, segment(repeats) after each run of passes that a device repeats. A pass of a kind and chunk
// is always that of the next micro-batch. Every order has kSegments segments; devices of a pipeline
// repeat segment s in step with each other.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "phaze/pipeline_schedule.hpp"

namespace phaze {

enum class Pass : std::uint32_t {
  kForward = 0,
  kBackward = 1,    // whole
  kInputGrad = 2,   // the part that the stage before waits for
  kWeightGrad = 3,  // the rest
  kPair = 4,        // forward of this chunk together with the whole backward of the other
};
inline constexpr std::size_t kSegments = 3;

struct PipelineShape {
  PipelineSchedule schedule;
  std::int64_t stages;
  std::int64_t chunks;
  std::int64_t micro_batches;

  bool operator==(const PipelineShape&) const = default;
};

inline bool splits_backward(PipelineSchedule schedule) noexcept {
  return static_cast<std::int32_t>(schedule) >= 3;
}

inline bool pairs_passes(PipelineSchedule schedule) noexcept {
  return schedule == PipelineSchedule::kDualPipe || schedule == PipelineSchedule::kDualPipeV;
}

template <typename Sink>
class PipelineOrder {
 public:
  PipelineOrder(const PipelineShape& shape, std::int64_t device, Sink& sink)
      : p_(shape.stages), v_(shape.chunks), m_(shape.micro_batches), d_(device), sink_(sink) {}

  void tell(PipelineSchedule schedule) {
    switch (schedule) {
      case PipelineSchedule::kOneForwardOneBackward:
        return one_forward_one_backward();
      case PipelineSchedule::kGpipe:
        return gpipe();
      case PipelineSchedule::kInterleaved:
        return v_ == 1 ? one_forward_one_backward() : interleaved();
      case PipelineSchedule::kZeroBubbleH1:
        return zero_bubble(std::min(m_, p_ - d_), d_);
      case PipelineSchedule::kZeroBubbleH2:
        return zero_bubble(std::min(m_, 2 * (p_ - d_) - 1), 2 * d_);
      case PipelineSchedule::kZeroBubbleV:
        return zero_bubble_v();
      case PipelineSchedule::kDualPipe:
        return dual(p_ / 2, std::min(d_, p_ - 1 - d_), d_ >= p_ / 2 ? 1 : 0, m_ / 2);
      case PipelineSchedule::kDualPipeV:
        return dual(p_, d_, 0, m_);
    }
  }

 private:
  void several(std::int64_t times, Pass pass, std::int64_t chunk) {
    for (std::int64_t k = 0; k < times; ++k) sink_.pass(pass, chunk);
  }

  void one_forward_one_backward() {
    const std::int64_t warm = std::min(m_, p_ - d_);
    several(warm, Pass::kForward, 0);
    sink_.segment(1);
    sink_.pass(Pass::kBackward, 0);
    sink_.pass(Pass::kForward, 0);
    sink_.segment(m_ - warm);
    several(warm, Pass::kBackward, 0);
    sink_.segment(1);
  }

  void gpipe() {
    sink_.pass(Pass::kForward, 0);
    sink_.segment(m_);
    sink_.pass(Pass::kBackward, 0);
    sink_.segment(m_);
    sink_.segment(0);
  }

  // The n-th forward pass, and the n-th backward pass, of micro-batches in groups of as many as
  // there are stages, each group through one chunk after another. Those that would fill up the last
  // group do not exist.
  void interleaved_forward(std::int64_t n) {
    const std::int64_t within = n % (p_ * v_);
    if (n / (p_ * v_) * p_ + within % p_ < m_) sink_.pass(Pass::kForward, within / p_);
  }

  void interleaved_backward(std::int64_t n) {
    const std::int64_t within = n % (p_ * v_);
    if (n / (p_ * v_) * p_ + within % p_ < m_) sink_.pass(Pass::kBackward, v_ - 1 - within / p_);
  }

  void interleaved() {
    const std::int64_t round = p_ * v_;
    const std::int64_t total = (m_ + p_ - 1) / p_ * round;
    const std::int64_t warm = std::min(total, 2 * (p_ - d_ - 1) + (v_ - 1) * p_);
    const std::int64_t rounds = std::max<std::int64_t>(0, (m_ / p_ * round - warm) / round);
    for (std::int64_t n = 0; n < warm; ++n) interleaved_forward(n);
    sink_.segment(1);
    const auto alternate = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        if (warm + n < total) interleaved_forward(warm + n);
        interleaved_backward(n);
      }
    };
    if (rounds > 0) alternate(0, round);
    sink_.segment(rounds);
    alternate(rounds * round, total);
    sink_.segment(1);
  }

  // `warm` forward passes; then input gradients, each followed by the weight gradient of `late`
  // micro-batches before it and the next forward pass, as far as there are any.
  void zero_bubble(std::int64_t warm, std::int64_t late) {
    const std::int64_t steady = m_ - warm;  // input gradients with a forward pass after them
    const std::int64_t early = std::min(late, steady);
    several(warm, Pass::kForward, 0);
    for (std::int64_t k = 0; k < early; ++k) {
      sink_.pass(Pass::kInputGrad, 0);
      sink_.pass(Pass::kForward, 0);
    }
    sink_.segment(1);
    sink_.pass(Pass::kInputGrad, 0);
    sink_.pass(Pass::kWeightGrad, 0);
    sink_.pass(Pass::kForward, 0);
    sink_.segment(steady - early);
    for (std::int64_t k = steady; k < m_; ++k) {
      sink_.pass(Pass::kInputGrad, 0);
      if (k >= late) sink_.pass(Pass::kWeightGrad, 0);
    }
    several(std::min(late, m_), Pass::kWeightGrad, 0);
    sink_.segment(1);
  }

  // Passes of ZB-V, those of micro-batches that do not exist left out.
  void both(Pass pass, std::int64_t chunk) {
    std::int64_t& count = counts_[static_cast<std::size_t>(pass)][static_cast<std::size_t>(chunk)];
    if (count++ < m_) sink_.pass(pass, chunk);
  }

  void backward_v(std::int64_t chunk) {
    both(Pass::kInputGrad, chunk);
    both(Pass::kWeightGrad, chunk);
  }

  void zero_bubble_v() {
    const std::int64_t n = std::max(m_, 2 * p_ - 1);
    for (std::int64_t k = 0; k < 2 * (p_ - d_) - 1; ++k) both(Pass::kForward, 0);
    for (std::int64_t k = 0; k < d_; ++k) {
      both(Pass::kForward, 1);
      both(Pass::kForward, 0);
    }
    for (std::int64_t k = 0; k < p_ - d_; ++k) {
      both(Pass::kForward, 1);
      backward_v(1);
    }
    const std::int64_t steady = n - (2 * p_ - d_ - 1);
    const std::int64_t first = m_ < n ? steady : 0;  // played out where some are left out
    for (std::int64_t k = 0; k < first; ++k) round_v();
    sink_.segment(1);
    if (steady > first) round_v();
    for (auto& kind : counts_) {  // the rounds that the segment repeats
      for (std::int64_t& count : kind) count += std::max<std::int64_t>(0, steady - first - 1);
    }
    sink_.segment(steady - first);
    end_v();
    sink_.segment(1);
  }

  void round_v() {
    both(Pass::kForward, 0);
    backward_v(0);
    both(Pass::kForward, 1);
    backward_v(1);
  }

  void end_v() {
    for (std::int64_t k = 0; k < p_ - d_ - 1; ++k) {
      backward_v(0);
      both(Pass::kForward, 1);
      backward_v(1);
    }
    for (std::int64_t k = 0; k < d_; ++k) {
      both(Pass::kInputGrad, 0);
      both(Pass::kInputGrad, 1);
    }
    for (std::int64_t k = 0; k < p_ - d_; ++k) backward_v(0);
    for (std::int64_t k = 0; k < d_; ++k) both(Pass::kWeightGrad, 1);
    for (std::int64_t k = 0; k < d_; ++k) both(Pass::kWeightGrad, 0);
  }

  // DualPipe of 2 x half devices, seen from the r-th of its half; chunks are swapped in the second
  // half. DualPipeV is the same with one half alone, which holds both directions' stages.
  void dual(std::int64_t half, std::int64_t r, std::int64_t swap, std::int64_t n) {
    const std::int64_t here = 0 ^ swap;
    const std::int64_t there = 1 ^ swap;
    const std::int64_t inner = half - r - 1;
    several(2 * inner, Pass::kForward, here);
    for (std::int64_t k = 0; k <= r; ++k) {
      sink_.pass(Pass::kForward, here);
      sink_.pass(Pass::kForward, there);
    }
    for (std::int64_t k = 0; k < inner; ++k) {
      sink_.pass(Pass::kInputGrad, there);
      sink_.pass(Pass::kWeightGrad, there);
      sink_.pass(Pass::kForward, there);
    }
    if (inner == 0) {  // these two are not run together
      sink_.pass(Pass::kForward, here);
      sink_.pass(Pass::kBackward, there);
    } else {
      sink_.pass(Pass::kPair, here);
    }
    sink_.pass(Pass::kPair, there);
    sink_.segment(1);
    sink_.pass(Pass::kPair, here);
    sink_.pass(Pass::kPair, there);
    sink_.segment(n - 2 * half + r);
    for (std::int64_t k = 0; k < inner; ++k) {
      sink_.pass(Pass::kBackward, there);
      sink_.pass(Pass::kPair, there);
    }
    dual_end(inner, r, here, there);
    sink_.segment(1);
  }

  // 2 (r + 1) backward passes of both chunks in turn, the last r + 1 without their weight
  // gradients; then the weight gradients that wait, oldest first, with the last input gradients
  // between them.
  void dual_end(std::int64_t inner, std::int64_t r, std::int64_t here, std::int64_t there) {
    for (std::int64_t k = 0; k < 2 * (r + 1); ++k) {
      sink_.pass(k <= r ? Pass::kBackward : Pass::kInputGrad, k % 2 == 0 ? there : here);
    }
    for (std::int64_t k = 0; k < inner + r + 1; ++k) {
      const bool turned = k <= r && (r - k) % 2 == 1;
      sink_.pass(Pass::kWeightGrad, turned ? there : here);
      if (k < inner) sink_.pass(Pass::kInputGrad, here);
    }
  }

  std::int64_t p_;
  std::int64_t v_;
  std::int64_t m_;
  std::int64_t d_;
  Sink& sink_;
  std::array<std::array<std::int64_t, 2>, 5> counts_{};
};

// The order of one device of a pipeline that check_schedule accepts.
template <typename Sink>
void tell_order(const PipelineShape& shape, std::int64_t device, Sink& sink) {
  PipelineOrder<Sink>(shape, device, sink).tell(shape.schedule);
}

}  // namespace phaze
