#include "phaze/pipeline_schedule.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace phaze {
namespace {

constexpr double kNotYet = -1.0;

// A pass of a chunk for a micro-batch.
struct Pass {
  bool forward;
  std::int64_t chunk;
  std::int64_t microbatch;
};

class Interleaved {
 public:
  Interleaved(std::span<const double> forward_s, std::span<const double> backward_s,
              std::int64_t stages, std::int64_t microbatches)
      : forward_s_(forward_s),
        backward_s_(backward_s),
        stages_(stages),
        chunks_(static_cast<std::int64_t>(forward_s.size()) / stages),
        total_(microbatches * chunks_),
        microbatches_(microbatches),
        next_(static_cast<std::size_t>(stages), 0),
        free_s_(static_cast<std::size_t>(stages), 0.0) {
    const auto passes = static_cast<std::size_t>(stages * total_);
    forward_end_.assign(passes, kNotYet);
    backward_end_.assign(passes, kNotYet);
  }

  double run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::int64_t i = 0; i < stages_; ++i) {
        while (next_[at(i)] < 2 * total_ && play(i)) moved = true;
      }
    }
    return *std::max_element(free_s_.begin(), free_s_.end());
  }

 private:
  static std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  std::size_t place(std::int64_t stage, std::int64_t chunk,
                    std::int64_t microbatch) const noexcept {
    return at((stage * chunks_ + chunk) * microbatches_ + microbatch);
  }

  // The n-th pass of a stage: forward passes to warm up, then one forward and one backward in turn,
  // then the backward passes left. Micro-batches go in groups of as many as there are stages
  // through one chunk after another.
  Pass pass(std::int64_t stage, std::int64_t n) const noexcept {
    const std::int64_t warm = std::min(total_, (stages_ - stage - 1) * 2 + (chunks_ - 1) * stages_);
    const std::int64_t steady = 2 * (total_ - warm);
    bool forward = true;
    std::int64_t count = n;
    if (n >= warm && n < warm + steady) {
      forward = (n - warm) % 2 == 0;
      count = forward ? warm + (n - warm) / 2 : (n - warm) / 2;
    } else if (n >= warm + steady) {
      forward = false;
      count = n - total_;
    }
    const std::int64_t group = count / (stages_ * chunks_);
    const std::int64_t within = count % (stages_ * chunks_);
    const std::int64_t chunk = within / stages_;
    return {forward, forward ? chunk : chunks_ - 1 - chunk, group * stages_ + within % stages_};
  }

  // When what a pass needs is there; negative where that is not known yet.
  double needs(std::int64_t stage, const Pass& p) const noexcept {
    if (p.forward) {
      if (stage > 0) return forward_end_[place(stage - 1, p.chunk, p.microbatch)];
      if (p.chunk == 0) return 0.0;
      return forward_end_[place(stages_ - 1, p.chunk - 1, p.microbatch)];
    }
    const double own = forward_end_[place(stage, p.chunk, p.microbatch)];
    double later = own;
    if (stage + 1 < stages_) {
      later = backward_end_[place(stage + 1, p.chunk, p.microbatch)];
    } else if (p.chunk + 1 < chunks_) {
      later = backward_end_[place(0, p.chunk + 1, p.microbatch)];
    }
    return own < 0.0 || later < 0.0 ? kNotYet : std::max(own, later);
  }

  bool play(std::int64_t stage) {
    const Pass p = pass(stage, next_[at(stage)]);
    const double ready = needs(stage, p);
    if (ready < 0.0) return false;
    const std::size_t chunk = at(stage * chunks_ + p.chunk);
    const double seconds = p.forward ? forward_s_[chunk] : backward_s_[chunk];
    const double end = std::max(ready, free_s_[at(stage)]) + seconds;
    (p.forward ? forward_end_ : backward_end_)[place(stage, p.chunk, p.microbatch)] = end;
    free_s_[at(stage)] = end;
    ++next_[at(stage)];
    return true;
  }

  std::span<const double> forward_s_;
  std::span<const double> backward_s_;
  std::int64_t stages_;
  std::int64_t chunks_;
  std::int64_t total_;
  std::int64_t microbatches_;
  std::vector<std::int64_t> next_;
  std::vector<double> free_s_;
  std::vector<double> forward_end_;
  std::vector<double> backward_end_;
};

}  // namespace

double interleaved_step(std::span<const double> forward_s, std::span<const double> backward_s,
                        std::int32_t stages, std::int64_t microbatches) {
  const auto size = static_cast<std::int64_t>(forward_s.size());
  if (stages < 1 || microbatches < 1 || microbatches % stages != 0 || size == 0 ||
      size % stages != 0 || backward_s.size() != forward_s.size()) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return Interleaved(forward_s, backward_s, stages, microbatches).run();
}

}  // namespace phaze
