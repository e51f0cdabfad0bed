// What a PipelinePlayer keeps from call to call: the orders of all devices as words, the loads, and
// the clocks and end times of a step that is being played.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "placement/pipeline_schedule_orders.hpp"

namespace phaze {

// A pass of a slot (device * chunks + chunk) in one word.
struct Token {
  std::uint32_t word;

  Token(Pass kind, std::size_t slot) noexcept
      : word(static_cast<std::uint32_t>(slot) * 8 + static_cast<std::uint32_t>(kind)) {}
  Pass kind() const noexcept { return static_cast<Pass>(word % 8); }
  std::size_t slot() const noexcept { return word / 8; }
};

struct Segment {
  std::size_t first;
  std::size_t last;  // one past
  std::int64_t repeats;
};

// Where a device stands in its order.
struct Cursor {
  const Token* token;
  const Token* last;
  double clock_s;
  std::int64_t repeats;  // of the segment, this one included; 0 at the end of the order
  std::size_t segment;
  bool paused;
};

inline constexpr std::int64_t kWorthSkipping = 4;  // rounds left below which none are compared

// Rounding of clocks that have come to `clock_s` when a round takes `shift_s`.
inline double rounding(double clock_s, double shift_s) noexcept {
  constexpr double kUlp = std::numeric_limits<double>::epsilon();
  return 1e-13 * shift_s + 4.0 * kUlp * std::abs(clock_s);
}

// All of a state moves on by these seconds in so many rounds; 0 rounds: it does not.
struct Shift {
  double seconds;
  std::int64_t rounds;
};

inline Shift shift_between(const std::vector<double>& before, const std::vector<double>& state,
                           std::int64_t rounds) noexcept {
  if (before.size() != state.size()) return {0.0, 0};
  const double shift_s = state[0] - before[0];
  for (std::size_t i = 1; i < state.size(); ++i) {
    const double own_s = state[i] - before[i];
    if (std::abs(own_s - shift_s) > rounding(state[i], shift_s)) return {0.0, 0};
  }
  return {shift_s, rounds};
}

class PipelinePlayer::Game {
 public:
  // Orders are written down when they are first needed: GPipe and 1F1B are played without them.
  bool prepare(const PipelineShape& shape);
  bool prepare(PipelineSchedule schedule, const PipelineLoads& loads) {
    return prepare({schedule, loads.stages, loads.chunks, loads.micro_batches});
  }
  bool load(const PipelineLoads& loads);
  double play(bool skip);
  double bound();
  void count_work();  // start_s and busy_s
  double peak(std::int64_t device, std::span<const double> bytes, double kept);
  void held(std::int64_t device, std::vector<double>* moments);

  std::vector<PassEvent> events();  // of a step that is loaded

  std::vector<double> start_s;  // by device
  std::vector<double> end_s;
  std::vector<double> busy_s;

 private:
  void record(std::size_t device, Token token, double end_s);
  void write_orders();
  void link(const PipelineShape& shape);
  void restart();
  double play_once(bool skip);
  bool round();
  bool finish();
  bool run(std::size_t device, bool one_round);
  bool forward_ready(std::size_t slot, double* ready_s);
  bool backward_ready(std::size_t slot, double* ready_s);
  bool step(Token token, double* clock_s);
  void next_segment(Cursor* cursor) const;
  bool rounds_of(std::size_t segment, bool skip);
  void note_state();
  void skip_rounds(std::size_t segment, const Shift& shift, std::int64_t times);
  double gpipe();
  double one_forward_one_backward();
  double seconds(Token token) const noexcept;
  double drain(std::size_t device) const;
  std::size_t devices() const noexcept { return static_cast<std::size_t>(shape_.stages); }
  std::size_t place(std::size_t slot, std::int64_t micro_batch) const noexcept {
    return slot * static_cast<std::size_t>(ring_) +
           static_cast<std::size_t>(micro_batch & (ring_ - 1));
  }
  const Segment& segment(std::size_t device, std::size_t s) const {
    return segments_[device * kSegments + s];
  }

  PipelineShape shape_{PipelineSchedule::kGpipe, 0, 0, 0};
  bool ordered_ = false;  // whether the orders are those of the shape
  std::vector<Token> tokens_;
  std::vector<Segment> segments_;  // [device * kSegments + segment]
  std::vector<std::size_t> prev_;  // slot before in the chain; the last slot of all is nowhere
  std::vector<std::size_t> next_;
  std::size_t slots_ = 0;

  std::vector<double> forward_s_;
  std::vector<double> backward_s_;
  std::vector<double> input_s_;
  std::vector<double> weight_s_;
  std::vector<double> pair_s_;  // of this slot's forward with the other's backward

  std::vector<std::vector<PassEvent>>* recorded_ = nullptr;  // by device, where events are wanted
  std::vector<std::int64_t> weight_grads_;                   // done, by slot, where they are

  std::int64_t ring_ = 0;  // length, a power of two
  bool ring_full_ = false;
  bool down_ = true;  // direction of the next sweep over the devices
  std::vector<Cursor> cursors_;
  std::vector<std::int64_t> forwards_;  // done, by slot; nowhere has done them all at time 0
  std::vector<std::int64_t> backwards_;
  std::vector<double> forward_end_;  // [slot * ring + micro-batch mod ring]
  std::vector<double> backward_end_;
  std::vector<double> state_;
  std::vector<double> before_;
  std::vector<double> marked_;
  std::vector<std::int64_t> added_;  // passes that skipping adds, by slot
};

}  // namespace phaze
