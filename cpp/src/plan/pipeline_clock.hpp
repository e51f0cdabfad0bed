// The time of a pipeline, accumulated from the last stage to the first: the exact objective of the
// placement kernels. docs/papers.md has the formulas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace phaze {

// Summary of the stages after a cut.
struct PipelineClock {
  double bound_s;  // largest work plus waiting of a stage, with one micro-batch in stages before it
  double sent_s;   // zero-bubble: that time until the stage's last gradient is sent on
  double trip_s;   // one micro-batch forward and back
  double tail_s;   // longest gradient exchange and optimiser step after the last backward pass
  double load_s;   // of the slowest stage

  double time_s() const noexcept { return bound_s + tail_s; }

  // Whether this clock is no worse in any respect than the other, up to `nothing_s`: sums in
  // another order differ in their last digits, and such a difference does not justify another plan.
  bool no_worse(const PipelineClock& other, double nothing_s) const noexcept {
    return bound_s <= other.bound_s + nothing_s && trip_s <= other.trip_s + nothing_s &&
           tail_s <= other.tail_s + nothing_s && sent_s <= other.sent_s + nothing_s;
  }
};

// One partition of everything after a cut, as a linked list of stages: its first stage, and the
// tail after that.
struct ClockedTail {
  PipelineClock clock;
  std::int32_t variant;
  std::int32_t next_cut;
  std::int32_t next_tail;  // position in the list of tails; -1 after the last stage
};

// Adds a tail to those of its cut, which begin at position `first`, unless one of them dominates
// it; removes those that it dominates.
inline void keep_non_dominated(const ClockedTail& tail, std::size_t first, double nothing_s,
                               std::vector<ClockedTail>* tails) {
  const auto begin = tails->begin() + static_cast<std::ptrdiff_t>(first);
  for (auto other = begin; other != tails->end(); ++other) {
    if (other->clock.no_worse(tail.clock, nothing_s)) return;
  }
  tails->erase(std::remove_if(begin, tails->end(),
                              [&](const ClockedTail& other) {
                                return tail.clock.no_worse(other.clock, nothing_s);
                              }),
               tails->end());
  tails->push_back(tail);
}

// Times of a stage in the clock, including the messages it waits for.
struct StagePass {
  double forward_s;
  double backward_s;
  double weight_grad_s;  // deferrable part of the backward pass
  double tail_s;
};

// Prepends a stage to the placed stages, for m micro-batches, with `after` stages after it and
// `before` before it. The stage's first backward pass waits for the trip through the later stages,
// minus the forward passes that the stage runs during that time; its last one waits for the same
// trip, minus the backward passes.
inline PipelineClock prepend_stage(const PipelineClock& rest, const StagePass& stage,
                                   std::int64_t m, int after, int before,
                                   bool zero_bubble) noexcept {
  const double f = stage.forward_s;
  const double b = stage.backward_s;
  const auto rounds = static_cast<double>(m);
  const auto later = static_cast<double>(after);
  double waits = std::max(0.0, rest.trip_s - (rounds - 1.0) * f);
  if (after < m) {
    waits = std::max(0.0, rest.trip_s - later * f) + std::max(0.0, rest.trip_s - later * b);
  }
  const double works = rounds * (f + b) + waits;
  PipelineClock whole{std::max(rest.bound_s + f + b, works), 0.0, rest.trip_s + f + b,
                      std::max(rest.tail_s, stage.tail_s), std::max(rest.load_s, f + b)};
  if (zero_bubble) {
    const double w = std::min(b, stage.weight_grad_s);
    whole.bound_s = std::max(rest.bound_s + f, works);
    whole.sent_s = std::max(rest.sent_s + f + b - w, works - static_cast<double>(before + 1) * w);
    whole.trip_s = rest.trip_s + f + b - w;
    if (before == 0) whole.bound_s = std::max(whole.bound_s, whole.sent_s + w);
  }
  return whole;
}

// Gradients are exchanged during the last backward pass, except for one bucket; a later stage also
// has the time in which the backward pass goes through the stages before it. For each overlapped
// second the backward pass takes `contention` seconds longer.
inline double tail_after(double sync_s, double own_backward_s, double bucket_s, double step_s,
                         double backward_before_s, double contention = 0.0) noexcept {
  const double exposed = std::min(sync_s, std::max(sync_s - own_backward_s, bucket_s));
  const double slowed = contention * (sync_s - exposed);
  return std::max(0.0, exposed + slowed + step_s - backward_before_s);
}

// Seconds of work that overlap an exchange of `exchange_s` seconds.
inline double overlapped_s(double work_s, double exchange_s, double contention) noexcept {
  return std::max(exchange_s, work_s + contention * exchange_s);
}

}  // namespace phaze
