// What a PipelinePlayer keeps from call to call: the orders of all devices as words, the loads, and
// the clocks and end times of a step that is being played.
#pragma once

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

class PipelinePlayer::Game {
 public:
  bool prepare(const PipelineShape& shape);
  bool prepare(PipelineSchedule schedule, const PipelineLoads& loads) {
    return prepare({schedule, loads.stages, loads.chunks, loads.microbatches});
  }
  bool load(const PipelineLoads& loads);
  double play(bool skip);
  double bound();
  void count_work();  // start_s and busy_s
  double peak(std::int64_t device, std::span<const double> bytes, double kept) const;
  void held(std::int64_t device, std::vector<double>* moments) const;

  std::vector<PassEvent> events();  // of a step that is loaded

  std::vector<double> start_s;  // by device
  std::vector<double> end_s;
  std::vector<double> busy_s;

 private:
  // All of the state moves on by these seconds in so many rounds; 0 rounds: it does not.
  struct Shift {
    double seconds;
    std::int64_t rounds;
  };

  void record(std::size_t device, Token token, double end_s);
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
  Shift compare(const std::vector<double>& before, std::int64_t rounds) const;
  void skip_rounds(std::size_t segment, const Shift& shift, std::int64_t times);
  double gpipe();
  double seconds(Token token) const noexcept;
  double drain(std::size_t device) const;
  std::size_t devices() const noexcept { return static_cast<std::size_t>(shape_.stages); }
  std::size_t place(std::size_t slot, std::int64_t microbatch) const noexcept {
    return slot * static_cast<std::size_t>(ring_) +
           static_cast<std::size_t>(microbatch & (ring_ - 1));
  }
  const Segment& segment(std::size_t device, std::size_t s) const {
    return segments_[device * kSegments + s];
  }

  PipelineShape shape_{PipelineSchedule::kGpipe, 0, 0, 0};
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
