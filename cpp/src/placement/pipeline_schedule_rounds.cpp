// Schedules so regular that they are played without their orders written down.
#include <algorithm>
#include <bit>

#include "placement/pipeline_schedule_game.hpp"

namespace phaze {

// Micro-batches are alike and no forward pass waits for a later stage: each way is a flow shop of
// identical jobs, in which the slowest stage sets the pace.
double PipelinePlayer::Game::gpipe() {
  const double repeats = static_cast<double>(shape_.micro_batches - 1);
  double trip_s = 0.0;
  double pace_s = 0.0;
  for (const double own_s : forward_s_) {
    trip_s += own_s;
    pace_s = std::max(pace_s, own_s);
  }
  double clock_s = trip_s + repeats * pace_s;
  end_s.resize(devices());
  pace_s = 0.0;
  for (std::size_t d = devices(); d-- > 0;) {
    clock_s += backward_s_[d];
    pace_s = std::max(pace_s, backward_s_[d]);
    end_s[d] = clock_s + repeats * pace_s;
  }
  return end_s[0];
}

// Device k is `lead` = p - 1 - k forward passes ahead, all m where there are fewer, and has one
// forward pass (while any is left) and one backward pass in every round from then on. In round r it
// waits for what the device before it sent in round r - 1, and for the gradient that the device
// after it sends in round r. Before that no forward pass waits for a later device, as in GPipe.
double PipelinePlayer::Game::one_forward_one_backward() {
  const std::size_t p = devices();
  const std::int64_t m = shape_.micro_batches;
  // When each device is free, and after those when its last forward pass ended.
  state_.resize(2 * p);
  double* const clock_s = state_.data();
  double* const sent_s = state_.data() + p;
  double trip_s = 0.0;
  double pace_s = 0.0;
  for (std::size_t k = 0; k < p; ++k) {
    const std::int64_t lead = std::min(static_cast<std::int64_t>(p - 1 - k), m);
    trip_s += forward_s_[k];
    pace_s = std::max(pace_s, forward_s_[k]);
    clock_s[k] = sent_s[k] = lead == 0 ? 0.0 : trip_s + static_cast<double>(lead - 1) * pace_s;
  }
  before_.clear();
  marked_.clear();
  std::int64_t marked_at = 0;
  bool skip = true;
  for (std::int64_t r = 0; r < m; ++r) {
    // Devices from `first` on have a forward pass left.
    const std::int64_t ahead = static_cast<std::int64_t>(p) - (m - r);
    const std::size_t first = ahead <= 0 ? 0 : static_cast<std::size_t>(ahead);
    double gradient_s = 0.0;
    for (std::size_t k = p; k-- > first;) {
      const double ready_s = k > 0 ? std::max(clock_s[k], sent_s[k - 1]) : clock_s[k];
      sent_s[k] = ready_s + forward_s_[k];
      clock_s[k] = gradient_s = std::max(sent_s[k], gradient_s) + backward_s_[k];
    }
    for (std::size_t k = first; k-- > 0;) {
      clock_s[k] = gradient_s = std::max(clock_s[k], gradient_s) + backward_s_[k];
    }
    const std::int64_t done = r + 1;
    const std::int64_t left = m - static_cast<std::int64_t>(p) + 1 - done;  // with all forward
    if (!skip || left < kWorthSkipping) continue;
    Shift shift = shift_between(before_, state_, 1);
    if (shift.rounds == 0) shift = shift_between(marked_, state_, done - marked_at);
    if (shift.rounds > 0 && left >= shift.rounds) {
      const std::int64_t times = left / shift.rounds;
      for (double& own_s : state_) own_s += shift.seconds * static_cast<double>(times);
      r += times * shift.rounds;
      skip = false;
      continue;
    }
    if (std::has_single_bit(static_cast<std::uint64_t>(done))) {
      marked_ = state_;
      marked_at = done;
    }
    before_ = state_;
  }
  end_s.assign(clock_s, clock_s + p);
  return *std::max_element(end_s.begin(), end_s.end());
}

}  // namespace phaze
