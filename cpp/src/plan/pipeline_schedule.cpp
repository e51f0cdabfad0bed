// Pipeline schedules: the order of the passes of each device, and the resulting step. The file has
// this order: orders, preparation of a step, simulation pass by pass, closed forms for the regular
// schedules, and the public functions.
#include "phaze/pipeline_schedule.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <compare>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/lanes.hpp"
#include "base/numbers.hpp"

namespace phaze {

enum class Pass : std::uint32_t {
  kForward = 0,
  kBackward = 1,    // a whole backward pass
  kInputGrad = 2,   // the part of a backward pass that the previous stage waits for
  kWeightGrad = 3,  // the rest of a backward pass
  kPair = 4,        // forward of this chunk together with the whole backward of the other
};
inline constexpr std::size_t kSegments = 3;

struct PipelineShape {
  PipelineSchedule schedule;
  std::int64_t stages;
  std::int64_t chunks;
  std::int64_t micro_batches;

  auto operator<=>(const PipelineShape&) const = default;
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

  // The n-th forward pass, and the n-th backward pass, of micro-batches in groups of `stages`, each
  // group through one chunk after another. Passes that would fill up the last group do not exist.
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

  // `warm` forward passes; then input gradients, each followed by the weight gradient of the
  // micro-batch that is `late` places before it, and by the next forward pass while any remain.
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

  // Passes of ZB-V, without those of micro-batches that do not exist.
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
    const std::int64_t first = m_ < n ? steady : 0;  // rounds written out: all if some are omitted
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

  // DualPipe of 2 x half devices, for the r-th device of its half; chunks are swapped in the second
  // half. DualPipeV is the same with one half only, which has the stages of both directions.
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
    if (inner == 0) {  // the innermost device does not overlap these two
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
  // gradients; then the deferred weight gradients, oldest first, interleaved with the last input
  // gradients.
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
  std::size_t last;  // one past the last token
  std::int64_t repeats;
};

// One pass of a phase: it starts at the later of two values (see Phase), and its end is a new one.
struct Operation {
  std::uint32_t after;    // the pass before it on its device
  std::uint32_t input;    // the pass whose result it reads
  std::uint32_t seconds;  // position in the durations: kind * slots + slot
};

// Passes that all devices run between two instants, `rounds` times in succession, as one straight
// program. Value 0 is time 0; then follow the values of the state at the start, and the ends of the
// passes, those that depend on fewer others first. A state is what later passes read: when each
// device is free, and the ends of passes whose results have not been read.
struct Phase {
  std::int64_t rounds;
  bool repeats;  // whether the phase is a segment of every device
  std::size_t inputs;
  std::vector<Operation> operations;
  std::vector<std::uint32_t> state;  // values at the end
};

// The orders of all devices of a shape, and the phases of its step once it is simulated.
struct Orders {
  std::vector<Token> tokens;
  std::vector<Segment> segments;  // [device * kSegments + segment]
  std::vector<std::size_t> prev;  // previous slot in the chain; the extra last slot means none
  std::vector<std::size_t> next;
  std::vector<Phase> phases;
};

inline constexpr std::size_t kMostKept = std::size_t{1} << 21;  // limit on `kept_`
inline constexpr std::int64_t kWorthSkipping = 4;  // least rounds left to compare states

// Rounding error of clocks at `clock_s` when a round takes `shift_s`.
inline double rounding(double clock_s, double shift_s) noexcept {
  constexpr double kUlp = std::numeric_limits<double>::epsilon();
  return 1e-13 * shift_s + 4.0 * kUlp * std::abs(clock_s);
}

// Every clock of a state advances by `seconds` in `rounds` rounds; 0 rounds: the clocks differ.
struct Shift {
  double seconds;
  std::int64_t rounds;
};

// The shift of the `count` clocks of one of W steps from `before` to `state`, `rounds` rounds
// later.
template <std::size_t W>
Shift shift_between(const double* before, const double* state, std::size_t count,
                    std::int64_t rounds) noexcept {
  const double shift_s = state[0] - before[0];
  for (std::size_t i = 1; i < count; ++i) {
    const double own_s = state[i * W] - before[i * W];
    if (std::abs(own_s - shift_s) > rounding(state[i * W], shift_s)) return {0.0, 0};
  }
  return {shift_s, rounds};
}

// Steps of one shape that are simulated together.
inline constexpr std::size_t kTogether = 4;

class PipelinePlayer::Game {
 public:
  // Orders are created when first needed: GPipe and 1F1B are simulated without them.
  bool prepare(const PipelineShape& shape);
  bool prepare(PipelineSchedule schedule, const PipelineLoads& loads) {
    return prepare({schedule, loads.stages, loads.chunks, loads.micro_batches});
  }
  bool load(const PipelineLoads& loads) { return load<1>(loads, 0, 1)[0]; }
  // Takes W steps, from number `first` of `steps`; returns which of them can be simulated.
  template <std::size_t W>
  std::array<bool, W> load(const PipelineLoads& loads, std::size_t first, std::size_t steps);
  double play(bool skip) { return play<1>(skip)[0]; }
  template <std::size_t W>
  std::array<double, W> play(bool skip);
  double bound();
  void count_work();  // start_s and busy_s
  double peak(std::int64_t device, std::span<const double> bytes, double weight_grad_share);
  void held(std::int64_t device, std::vector<double>* moments);

  // These two simulate the step that is loaded.
  std::vector<PassEvent> events();
  std::vector<double> critical_passes();

  std::vector<double> start_s;  // by device
  std::vector<double> end_s;
  std::vector<double> busy_s;

 private:
  void record(const Phase& phase, std::vector<PassEvent>* by_device);
  void write_orders();
  bool write_phases();
  // `observe` is called after every round of a phase.
  using Observe = std::function<void(const Phase&)>;
  double play_all(bool skip, const Observe& observe) { return play_all<1>(skip, observe)[0]; }
  template <std::size_t W>
  std::array<double, W> play_all(bool skip, const Observe& observe = {});
  template <std::size_t W>
  void advance(const Phase& phase);
  template <std::size_t W, typename Play>
  void play_rounds(std::int64_t rounds, std::int64_t comparable, bool skip, const Play& play);
  template <std::size_t W>
  void compare_rounds(std::int64_t done, std::int64_t left);
  template <std::size_t W>
  void resume(std::int64_t done);
  template <std::size_t W>
  std::array<double, W> gpipe();
  template <std::size_t W>
  std::array<double, W> one_forward_one_backward();
  template <std::size_t W>
  std::array<double, W> ends();
  double seconds(Pass kind, std::size_t slot) const noexcept {
    return seconds_[static_cast<std::size_t>(kind) * slots_ + slot];
  }
  double seconds(Token token) const noexcept { return seconds(token.kind(), token.slot()); }
  double drain(std::size_t device) const;
  std::size_t devices() const noexcept { return static_cast<std::size_t>(shape_.stages); }
  const Segment& segment(std::size_t device, std::size_t s) const {
    return orders_->segments[device * kSegments + s];
  }
  // Seconds of one kind of pass, from the first slot on, of all steps that are simulated together.
  double* seconds_of(Pass kind, std::size_t together) noexcept {
    return &seconds_[static_cast<std::size_t>(kind) * slots_ * together];
  }

  PipelineShape shape_{PipelineSchedule::kGpipe, 0, 0, 0};
  std::size_t slots_ = 0;
  Orders* orders_ = nullptr;  // of the shape, once they are needed
  std::map<PipelineShape, Orders> known_;
  std::size_t kept_ = 0;  // tokens and passes of all shapes

  // Seconds of passes of each simulated step, by kind and slot (a pair: the slot's forward with the
  // other chunk's backward pass); a 0 follows.
  std::vector<double> seconds_;
  std::vector<double> values_;  // of the current phase
  std::vector<double> state_;   // clocks after the last round
  std::vector<double> before_;  // clocks before the last round
  std::vector<double> marked_;  // clocks after round `marked_at_`
  std::int64_t marked_at_ = 0;
  // A step that skips rounds: its clocks after these, and the round from which it goes on.
  struct Skipped {
    std::vector<double> state;
    std::int64_t until = 0;
    bool compares = true;  // false once the step has skipped rounds
    bool waits = false;
  };
  std::array<Skipped, kTogether> skipped_;

  std::vector<std::int64_t> counts_;  // passes recorded so far, by kind and slot
};

namespace {

// Creates the order of one device.
struct Recorder {
  std::vector<Token>* tokens;
  std::vector<Segment>* segments;
  std::size_t first_slot;
  std::size_t begin;

  void pass(Pass kind, std::int64_t chunk) { tokens->emplace_back(kind, first_slot + at(chunk)); }
  void segment(std::int64_t repeats) {
    segments->push_back({begin, tokens->size(), begin == tokens->size() ? 0 : repeats});
    begin = tokens->size();
  }
};

// Connects the slots of neighbouring stages.
void link(const PipelineShape& shape, Orders* orders) {
  const std::int64_t p = shape.stages;
  const std::int64_t v = shape.chunks;
  const std::size_t slots = at(p * v);
  const bool two_ways = shape.schedule == PipelineSchedule::kDualPipe;
  orders->prev.assign(slots + 1, slots);
  orders->next.assign(slots + 1, slots);
  std::vector<std::size_t> slot_at(slots, 0);  // by position in the chain; DualPipe has two
  for (std::int64_t d = 0; d < p; ++d) {       // consecutive chains
    for (std::int64_t c = 0; c < v; ++c) {
      slot_at[at(chunk_of(shape.schedule, p, v, d, c) + (two_ways ? c * p : 0))] = at(d * v + c);
    }
  }
  for (std::size_t q = 1; q < slots; ++q) {
    if (two_ways && q == at(p)) continue;
    orders->prev[slot_at[q]] = slot_at[q - 1];
    orders->next[slot_at[q - 1]] = slot_at[q];
  }
}

}  // namespace

// ---- orders ----

bool PipelinePlayer::Game::prepare(const PipelineShape& shape) {
  if (check_schedule(shape.schedule, shape.stages, shape.chunks, shape.micro_batches) !=
      PipelineStatus::kOk) {
    return false;
  }
  if (shape == shape_) return true;
  shape_ = shape;
  slots_ = at(shape.stages * shape.chunks);
  orders_ = nullptr;
  return true;
}

void PipelinePlayer::Game::write_orders() {
  if (orders_ != nullptr) return;
  const auto known = known_.find(shape_);
  if (known != known_.end()) {
    orders_ = &known->second;
    return;
  }
  Orders own;
  for (std::int64_t d = 0; d < shape_.stages; ++d) {
    Recorder recorder{&own.tokens, &own.segments, at(d * shape_.chunks), own.tokens.size()};
    tell_order(shape_, d, recorder);
  }
  link(shape_, &own);
  if (kept_ + own.tokens.size() > kMostKept) {
    known_.clear();
    kept_ = 0;
  }
  kept_ += own.tokens.size();
  orders_ = &known_.emplace(shape_, std::move(own)).first->second;
}

template <std::size_t W>
std::array<bool, W> PipelinePlayer::Game::load(const PipelineLoads& loads, std::size_t first,
                                               std::size_t steps) {
  const bool split = splits_backward(shape_.schedule);
  const std::size_t given = slots_ * steps;
  std::array<bool, W> good{};
  if (loads.forward_s.size() != given || loads.backward_s.size() != given ||
      (split && loads.weight_grad_s.size() != given)) {
    return good;
  }
  seconds_.resize((kPassKinds * slots_ + 1) * W);
  std::fill(seconds_.end() - W, seconds_.end(), 0.0);
  using Clocks = Lanes<W>;
  Clocks wrong = Clocks::all(0.0);  // NaN if a number is not finite
  Clocks least = Clocks::all(0.0);
  const auto take = [&](Pass kind, std::span<const double> all) {
    double* const own = seconds_of(kind, W);
    for (std::size_t s = 0; s < slots_; ++s) {
      const Clocks given_s = Clocks::load(&all[s * steps + first]);
      wrong = wrong + given_s * Clocks::all(0.0);
      least = smaller(least, given_s);
      given_s.store(own + s * W);
    }
    return own;
  };
  const double* const forward_s = take(Pass::kForward, loads.forward_s);
  const double* const backward_s = take(Pass::kBackward, loads.backward_s);
  if (split) {
    const double* const weight_s = take(Pass::kWeightGrad, loads.weight_grad_s);
    double* const input_s = seconds_of(Pass::kInputGrad, W);
    for (std::size_t i = 0; i < slots_ * W; i += W) {
      const Clocks rest_s = Clocks::load(backward_s + i) - Clocks::load(weight_s + i);
      least = smaller(least, rest_s);
      rest_s.store(input_s + i);
    }
  }
  double sums[2 * W];
  wrong.store(sums);
  least.store(sums + W);
  for (std::size_t l = 0; l < W; ++l) good[l] = sums[l] == 0.0 && sums[W + l] >= 0.0;
  if (!pairs_passes(shape_.schedule)) return good;
  for (std::size_t i = 0; i < slots_ * W; ++i) {
    const std::size_t other = ((i / W) ^ 1U) * W + i % W;
    seconds_of(Pass::kPair, W)[i] = loads.overlap * (forward_s[i] + backward_s[other]);
  }
  if (!(loads.overlap >= 0.0 && std::isfinite(loads.overlap))) good.fill(false);
  return good;
}

// ---- work and activations of a device ----

void PipelinePlayer::Game::count_work() {
  write_orders();
  start_s.resize(devices());
  busy_s.resize(devices());
  for (std::size_t d = 0; d < devices(); ++d) {
    busy_s[d] = 0.0;
    for (std::size_t s = 0; s < kSegments; ++s) {
      double round_s = 0.0;
      for (std::size_t i = segment(d, s).first; i < segment(d, s).last; ++i) {
        round_s += seconds(orders_->tokens[i]);
      }
      busy_s[d] += static_cast<double>(segment(d, s).repeats) * round_s;
    }
    start_s[d] = 0.0;
    const std::size_t first = orders_->tokens[segment(d, 0).first].slot();
    for (std::size_t up = orders_->prev[first]; up != slots_; up = orders_->prev[up]) {
      start_s[d] += seconds(Pass::kForward, up);
    }
  }
}

// Least seconds between the end of a device's last pass that sends a gradient to another device and
// the end of the step, minus the device's own work in this time.
double PipelinePlayer::Game::drain(std::size_t device) const {
  const std::vector<Token>& tokens = orders_->tokens;
  const std::vector<std::size_t>& prev = orders_->prev;
  std::size_t s = kSegments;
  while (s > 0 && segment(device, s - 1).repeats == 0) --s;
  double own_s = 0.0;
  std::size_t i = segment(device, s - 1).last;
  while (tokens[i - 1].kind() == Pass::kWeightGrad) own_s += seconds(tokens[--i]);
  const Token sends = tokens[i - 1];
  const std::size_t slot = sends.kind() == Pass::kPair ? sends.slot() ^ 1U : sends.slot();
  const bool split = splits_backward(shape_.schedule);
  const bool pairs = pairs_passes(shape_.schedule);
  double after_s = 0.0;
  std::size_t top = slot;
  for (std::size_t up = prev[slot]; up != slots_; up = prev[up]) {
    const double least_s = seconds(split ? Pass::kInputGrad : Pass::kBackward, up);
    after_s += pairs ? std::min(least_s, seconds(Pass::kPair, up ^ 1U)) : least_s;
    top = up;
  }
  if (split && !pairs && top != slot) after_s += seconds(Pass::kWeightGrad, top);
  return after_s - own_s;
}

double PipelinePlayer::Game::bound() {
  count_work();
  double bound_s = 0.0;
  for (std::size_t d = 0; d < devices(); ++d) {
    bound_s = std::max(bound_s, start_s[d] + busy_s[d] + std::max(0.0, drain(d)));
  }
  return bound_s;
}

double PipelinePlayer::Game::peak(std::int64_t device, std::span<const double> bytes,
                                  double weight_grad_share) {
  write_orders();
  if (device < 0 || device >= shape_.stages || bytes.size() != at(shape_.chunks)) return kNan;
  double held = 0.0;
  double most = 0.0;
  const auto own = [&](std::size_t slot) { return bytes[slot % at(shape_.chunks)]; };
  const auto round = [&](const Segment& part) {
    for (std::size_t i = part.first; i < part.last; ++i) {
      const Pass kind = orders_->tokens[i].kind();
      const std::size_t slot = orders_->tokens[i].slot();
      if (kind == Pass::kForward || kind == Pass::kPair) most = std::max(most, held += own(slot));
      if (kind == Pass::kBackward) held -= own(slot);
      if (kind == Pass::kPair) held -= own(slot ^ 1U);
      if (kind == Pass::kInputGrad) held -= (1.0 - weight_grad_share) * own(slot);
      if (kind == Pass::kWeightGrad) held -= weight_grad_share * own(slot);
    }
  };
  for (std::size_t s = 0; s < kSegments; ++s) {
    const Segment& part = segment(at(device), s);
    if (part.repeats == 0) continue;
    const double before = held;
    round(part);
    if (part.repeats == 1) continue;
    held += (held - before) * static_cast<double>(part.repeats - 2);  // nonzero for GPipe only
    round(part);
  }
  return most;
}

void PipelinePlayer::Game::held(std::int64_t device, std::vector<double>* moments) {
  write_orders();
  moments->clear();
  const std::size_t chunks = at(shape_.chunks);
  std::vector<double> now(chunks, 0.0);
  const auto no_more = [&](const double* a, const double* b) {
    for (std::size_t c = 0; c < chunks; ++c) {
      if (a[c] > b[c]) return false;
    }
    return true;
  };
  const auto note = [&] {
    for (std::size_t k = 0; k < moments->size(); k += chunks) {
      if (no_more(now.data(), &(*moments)[k])) return;
    }
    std::size_t size = 0;
    for (std::size_t k = 0; k < moments->size(); k += chunks) {
      if (no_more(&(*moments)[k], now.data())) continue;
      std::copy_n(moments->begin() + static_cast<std::ptrdiff_t>(k), chunks,
                  moments->begin() + static_cast<std::ptrdiff_t>(size));
      size += chunks;
    }
    moments->resize(size);
    moments->insert(moments->end(), now.begin(), now.end());
  };
  bool risen = false;
  for (std::size_t s = 0; s < kSegments; ++s) {
    const Segment& part = segment(at(device), s);
    // Activations are the same after every round, except in GPipe, where every round adds some.
    const bool adds = shape_.schedule == PipelineSchedule::kGpipe;
    const std::int64_t rounds = adds ? part.repeats : std::min<std::int64_t>(part.repeats, 2);
    for (std::int64_t round = 0; round < rounds; ++round) {
      for (std::size_t i = part.first; i < part.last; ++i) {
        const Pass kind = orders_->tokens[i].kind();
        const std::size_t chunk = orders_->tokens[i].slot() % chunks;
        if (kind == Pass::kForward || kind == Pass::kPair) {
          now[chunk] += 1.0;
          risen = true;
        }
        if (kind == Pass::kForward || kind == Pass::kInputGrad) continue;
        if (risen) note();  // until then every moment holds less than the next
        risen = false;
        now[kind == Pass::kPair ? chunk ^ 1U : chunk] -= 1.0;
      }
    }
  }
  if (risen) note();
}

// ---- phases ----

namespace {

constexpr std::int64_t kAlways = std::numeric_limits<std::int64_t>::max();

// Runs the orders of all devices once, without times, and writes down which pass reads which.
class PhaseWriter {
 public:
  PhaseWriter(const PipelineShape& shape, const Orders& orders)
      : orders_(orders),
        devices_(at(shape.stages)),
        slots_(at(shape.stages * shape.chunks)),
        most_(shape.micro_batches) {}

  // The phases of a step: the rounds that all devices have in common, segment by segment, and then
  // all other passes. Empty if some device waits forever.
  std::vector<Phase> write() {
    ring_ = static_cast<std::int64_t>(std::bit_ceil(4 * devices_ + 4));
    while (!write_once()) {
      if (!ring_full_ || ring_ >= 2 * most_) return {};
      ring_ *= 2;
    }
    return std::move(phases_);
  }

 private:
  // Position of a device in its order.
  struct Cursor {
    const Token* token;
    const Token* last;
    std::int64_t repeats;  // of the segment, this one included; 0 at the end of the order
    std::size_t segment;
    std::uint32_t value;  // the end of its last pass
    bool paused;
  };

  bool write_once() {
    restart();
    for (std::size_t s = 0; s < kSegments; ++s) {
      std::int64_t fewest = kAlways;
      std::int64_t most = 0;
      for (std::size_t d = 0; d < devices_; ++d) {
        fewest = std::min(fewest, segment(d, s).repeats);
        most = std::max(most, segment(d, s).repeats);
      }
      if (fewest > 0 && !round(s, fewest)) break;
      if (fewest != most) break;
    }
    if (!finish()) return false;
    close(1, false);
    return true;
  }

  const Segment& segment(std::size_t device, std::size_t s) const {
    return orders_.segments[device * kSegments + s];
  }
  std::size_t place(std::size_t slot, std::int64_t micro_batch) const noexcept {
    return slot * at(ring_) + at(micro_batch & (ring_ - 1));
  }

  void next_segment(Cursor* cursor) const {
    const auto device = static_cast<std::size_t>(cursor - cursors_.data());
    while (cursor->repeats == 0 && ++cursor->segment < kSegments) {
      cursor->repeats = segment(device, cursor->segment).repeats;
    }
    if (cursor->repeats == 0) return;
    const Segment& own = segment(device, cursor->segment);
    cursor->token = orders_.tokens.data() + own.first;
    cursor->last = orders_.tokens.data() + own.last;
  }

  void restart() {
    phases_.clear();
    operations_.clear();
    inputs_ = devices_;
    forwards_.assign(slots_ + 1, 0);
    backwards_.assign(slots_ + 1, 0);
    forwards_[slots_] = backwards_[slots_] = kAlways;
    forward_end_.assign((slots_ + 1) * at(ring_), 0);
    backward_end_.assign((slots_ + 1) * at(ring_), 0);
    cursors_.resize(devices_);
    for (std::size_t d = 0; d < devices_; ++d) {
      const auto value = static_cast<std::uint32_t>(1 + d);
      cursors_[d] = {nullptr, nullptr, segment(d, 0).repeats, 0, value, false};
      next_segment(&cursors_[d]);
    }
    ring_full_ = false;
    down_ = true;
  }

  // Whether a forward (or backward) pass of a slot can start, and the value that it reads. It
  // cannot if its input has not been computed, or if its end would overwrite a value that the
  // neighbour has not read.
  bool ready(const std::vector<std::int64_t>& done, const std::vector<std::uint32_t>& ends,
             std::size_t slot, std::size_t from, std::size_t to, std::uint32_t* input) {
    const std::int64_t k = done[slot];
    if (done[from] <= k) return false;
    if (k - done[to] >= ring_) {
      ring_full_ = true;
      return false;
    }
    *input = ends[place(from, k)];
    return true;
  }
  bool forward_ready(std::size_t slot, std::uint32_t* input) {
    return ready(forwards_, forward_end_, slot, orders_.prev[slot], orders_.next[slot], input);
  }
  bool backward_ready(std::size_t slot, std::uint32_t* input) {
    return ready(backwards_, backward_end_, slot, orders_.next[slot], orders_.prev[slot], input);
  }

  std::uint32_t add(std::uint32_t after, std::uint32_t input, std::size_t seconds) {
    operations_.push_back({after, input, static_cast<std::uint32_t>(seconds)});
    return static_cast<std::uint32_t>(inputs_ + operations_.size());
  }

  // Runs one pass, or returns false if one of its inputs is not ready.
  bool step(Token token, std::uint32_t* value) {
    const std::size_t slot = token.slot();
    const std::size_t seconds = static_cast<std::size_t>(token.kind()) * slots_ + slot;
    std::uint32_t input = 0;
    switch (token.kind()) {
      case Pass::kForward:
        if (!forward_ready(slot, &input)) return false;
        *value = add(*value, input, seconds);
        forward_end_[place(slot, forwards_[slot]++)] = *value;
        return true;
      case Pass::kBackward:
      case Pass::kInputGrad:
        if (!backward_ready(slot, &input)) return false;
        *value = add(*value, input, seconds);
        backward_end_[place(slot, backwards_[slot]++)] = *value;
        return true;
      case Pass::kWeightGrad:
        *value = add(*value, 0, seconds);
        return true;
      case Pass::kPair:
        break;
    }
    const std::size_t other = slot ^ 1U;
    std::uint32_t gradient = 0;
    if (!forward_ready(slot, &input) || !backward_ready(other, &gradient)) return false;
    *value = add(add(*value, input, kPassKinds * slots_), gradient, seconds);
    forward_end_[place(slot, forwards_[slot]++)] = *value;
    backward_end_[place(other, backwards_[other]++)] = *value;
    return true;
  }

  // Runs a device's passes until one must wait, or to the end of its round; returns whether any
  // ran.
  bool run(std::size_t device, bool one_round) {
    Cursor& cursor = cursors_[device];
    if (cursor.repeats == 0) return false;
    const Token* const first = cursor.token;
    const std::int64_t repeats = cursor.repeats;
    while (step(*cursor.token, &cursor.value)) {
      if (++cursor.token != cursor.last) continue;
      cursor.token = orders_.tokens.data() + segment(device, cursor.segment).first;
      if (--cursor.repeats == 0) next_segment(&cursor);
      if (one_round) {
        cursor.paused = true;
        return true;
      }
      if (cursor.repeats == 0) return true;
    }
    return cursor.token != first || cursor.repeats != repeats;
  }

  // Runs one round of the segment that all devices are in, and counts it `rounds` times; false if
  // they cannot all reach its end, or if the next round would not be the same.
  bool round(std::size_t s, std::int64_t rounds) {
    std::size_t left = devices_;
    for (Cursor& cursor : cursors_) cursor.paused = false;
    while (true) {
      bool moved = false;
      for (std::size_t i = 0; i < devices_; ++i) {
        const std::size_t d = down_ ? i : devices_ - 1 - i;
        if (cursors_[d].paused) continue;
        if (run(d, true)) moved = true;
        if (cursors_[d].paused) --left;
      }
      if (left == 0) break;
      if (!moved) return false;
      down_ = !down_;
    }
    return rounds == 1 ? (close(1, true), true) : repeat(s, rounds);
  }

  // Counts the passes of the rounds after the first.
  bool repeat(std::size_t s, std::int64_t rounds) {
    std::vector<std::int64_t> forwards(slots_ + 1, 0);
    std::vector<std::int64_t> backwards(slots_ + 1, 0);
    for (std::size_t d = 0; d < devices_; ++d) {
      for (std::size_t i = segment(d, s).first; i < segment(d, s).last; ++i) {
        const Pass kind = orders_.tokens[i].kind();
        const std::size_t slot = orders_.tokens[i].slot();
        if (kind == Pass::kForward || kind == Pass::kPair) forwards[slot] += rounds - 1;
        if (kind == Pass::kBackward || kind == Pass::kInputGrad) backwards[slot] += rounds - 1;
        if (kind == Pass::kPair) backwards[slot ^ 1U] += rounds - 1;
      }
    }
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      const std::size_t to = orders_.next[slot];
      if (to != slots_ && (forwards[slot] != forwards[to] || backwards[slot] != backwards[to])) {
        return false;
      }
    }
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      const auto move = [&](std::vector<std::uint32_t>* ends, std::int64_t from, std::int64_t to,
                            std::int64_t by) {
        moved_.clear();
        for (std::int64_t k = from; k < to; ++k) moved_.push_back((*ends)[place(slot, k)]);
        for (std::int64_t k = from; k < to; ++k)
          (*ends)[place(slot, k + by)] = moved_[at(k - from)];
      };
      move(&forward_end_, forwards_[orders_.next[slot]], forwards_[slot], forwards[slot]);
      move(&backward_end_, backwards_[orders_.prev[slot]], backwards_[slot], backwards[slot]);
    }
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      forwards_[slot] += forwards[slot];
      backwards_[slot] += backwards[slot];
    }
    for (Cursor& cursor : cursors_) {
      cursor.repeats -= rounds - 1;
      if (cursor.repeats == 0) next_segment(&cursor);
    }
    close(rounds, true);
    return true;
  }

  bool finish() {
    for (bool moved = true; moved; down_ = !down_) {
      moved = false;
      for (std::size_t i = 0; i < devices_; ++i) {
        if (run(down_ ? i : devices_ - 1 - i, false)) moved = true;
      }
    }
    return std::all_of(cursors_.begin(), cursors_.end(),
                       [](const Cursor& cursor) { return cursor.repeats == 0; });
  }

  // Ends a phase, which has the passes since the previous phase; the values of its state become the
  // first values of the next phase.
  void close(std::int64_t rounds, bool repeats) {
    Phase phase{rounds, repeats, inputs_, {}, {}};
    std::uint32_t number = 0;
    const auto keep = [&](std::uint32_t* value) {
      phase.state.push_back(*value);
      *value = ++number;
    };
    for (Cursor& cursor : cursors_) keep(&cursor.value);
    for (std::size_t s = 0; s < slots_; ++s) {
      for (std::int64_t k = forwards_[orders_.next[s]]; k < forwards_[s]; ++k) {
        keep(&forward_end_[place(s, k)]);
      }
      for (std::int64_t k = backwards_[orders_.prev[s]]; k < backwards_[s]; ++k) {
        keep(&backward_end_[place(s, k)]);
      }
    }
    sort_by_depth(&phase);
    inputs_ = phase.state.size();
    operations_.clear();
    phases_.push_back(std::move(phase));
  }

  // Sorts passes by depth, the length of the longest chain of passes they depend on: those of equal
  // depth do not wait for each other.
  void sort_by_depth(Phase* phase) const {
    const std::size_t count = operations_.size();
    std::vector<std::uint32_t> depth(inputs_ + count + 1, 0);
    std::vector<std::uint32_t> first(count + 2, 0);  // by depth
    for (std::size_t i = 0; i < count; ++i) {
      const Operation& own = operations_[i];
      const std::uint32_t here = std::max(depth[own.after], depth[own.input]) + 1;
      depth[inputs_ + 1 + i] = here;
      ++first[here + 1];
    }
    for (std::size_t k = 1; k < first.size(); ++k) first[k] += first[k - 1];
    std::vector<std::uint32_t> value(inputs_ + count + 1);  // new number of each value
    for (std::size_t k = 0; k <= inputs_; ++k) value[k] = static_cast<std::uint32_t>(k);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t old = inputs_ + 1 + i;
      value[old] = static_cast<std::uint32_t>(inputs_ + 1) + first[depth[old]]++;
    }
    phase->operations.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Operation& own = operations_[i];
      phase->operations[value[inputs_ + 1 + i] - inputs_ - 1] = {value[own.after], value[own.input],
                                                                 own.seconds};
    }
    for (std::uint32_t& own : phase->state) own = value[own];
  }

  const Orders& orders_;
  std::size_t devices_;
  std::size_t slots_;
  std::int64_t most_;      // micro-batches
  std::int64_t ring_ = 0;  // length of the rings of ends below, a power of two
  bool ring_full_ = false;
  bool down_ = true;  // direction of the next sweep over the devices
  std::vector<Cursor> cursors_;
  std::vector<std::int64_t> forwards_;  // passes done, by slot; the extra slot has done all at 0 s
  std::vector<std::int64_t> backwards_;
  std::vector<std::uint32_t> forward_end_;  // values, [slot * ring + micro-batch mod ring]
  std::vector<std::uint32_t> backward_end_;
  std::vector<std::uint32_t> moved_;  // scratch
  std::size_t inputs_ = 0;            // values of the state at the start of the current phase
  std::vector<Operation> operations_;
  std::vector<Phase> phases_;
};

}  // namespace

bool PipelinePlayer::Game::write_phases() {
  write_orders();
  if (!orders_->phases.empty()) return true;
  std::vector<Phase> phases = PhaseWriter(shape_, *orders_).write();
  for (const Phase& phase : phases) kept_ += phase.operations.size();
  orders_->phases = std::move(phases);
  return !orders_->phases.empty();
}

// ---- one pass after another ----

template <std::size_t W>
void PipelinePlayer::Game::advance(const Phase& phase) {
  using Clocks = Lanes<W>;
  const std::size_t first = 1 + phase.inputs;
  values_.resize(std::max(values_.size(), (first + phase.operations.size()) * W));
  double* const values = values_.data();
  const double* const seconds = seconds_.data();
  std::fill_n(values, W, 0.0);
  std::copy(before_.begin(), before_.end(), values + W);
  double* end = values + first * W;
  for (const Operation& own : phase.operations) {
    const Clocks after = Clocks::load(values + own.after * W);
    const Clocks input = Clocks::load(values + own.input * W);
    (larger(after, input) + Clocks::load(seconds + own.seconds * W)).store(end);
    end += W;
  }
  state_.resize(phase.state.size() * W);
  for (std::size_t i = 0; i < phase.state.size(); ++i) {
    std::copy_n(values + phase.state[i] * W, W, &state_[i * W]);
  }
}

// Plays rounds by `play`, which reads the clocks before a round in `before_` and writes those after
// the round to `state_`. Where rounds only shift the clocks, they are skipped: `comparable` is the
// number of equal rounds. Of steps that are simulated together each skips its own rounds and waits
// until the others have reached the same round.
template <std::size_t W, typename Play>
void PipelinePlayer::Game::play_rounds(std::int64_t rounds, std::int64_t comparable, bool skip,
                                       const Play& play) {
  marked_.clear();
  for (std::size_t l = 0; l < W; ++l) {
    skipped_[l].compares = skip;
    skipped_[l].waits = false;
  }
  bool compares = skip;
  std::int64_t done = 0;
  while (done < rounds) {
    std::swap(state_, before_);
    play(done++);
    if (!compares) {
      resume<W>(done);
      continue;
    }
    if (comparable - done >= kWorthSkipping) compare_rounds<W>(done, comparable - done);
    resume<W>(done);
    std::int64_t next = rounds;
    bool waiting = true;
    compares = false;
    for (std::size_t l = 0; l < W; ++l) {
      compares = compares || skipped_[l].compares;
      waiting = waiting && skipped_[l].waits;
      if (skipped_[l].waits) next = std::min(next, skipped_[l].until);
    }
    if (!waiting) continue;
    done = next;
    resume<W>(done);
  }
}

// Compares the clocks of each step after `done` rounds with its clocks one round before, and with
// those after the last marked round, whose number is a power of two.
template <std::size_t W>
void PipelinePlayer::Game::compare_rounds(std::int64_t done, std::int64_t left) {
  const std::size_t count = state_.size() / W;
  bool mark = false;
  for (std::size_t l = 0; l < W; ++l) {
    Skipped& own = skipped_[l];
    if (!own.compares) continue;
    Shift shift{0.0, 0};
    if (done > 1) shift = shift_between<W>(&before_[l], &state_[l], count, 1);
    if (shift.rounds == 0 && !marked_.empty()) {
      shift = shift_between<W>(&marked_[l], &state_[l], count, done - marked_at_);
    }
    if (shift.rounds == 0 || left < shift.rounds) {
      mark = true;
      continue;
    }
    const std::int64_t times = left / shift.rounds;
    own.state.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      own.state[i] = state_[i * W + l] + shift.seconds * static_cast<double>(times);
    }
    own.until = done + times * shift.rounds;
    own.compares = false;
    own.waits = true;
  }
  if (!mark || !std::has_single_bit(at(done))) return;
  marked_ = state_;
  marked_at_ = done;
}

template <std::size_t W>
void PipelinePlayer::Game::resume(std::int64_t done) {
  for (std::size_t l = 0; l < W; ++l) {
    if (!skipped_[l].waits || skipped_[l].until != done) continue;
    for (std::size_t i = 0; i < skipped_[l].state.size(); ++i) {
      state_[i * W + l] = skipped_[l].state[i];
    }
    skipped_[l].waits = false;
  }
}

// For each of the steps that are simulated together, the time when all its devices are free. The
// first numbers of a state are the clocks of the devices.
template <std::size_t W>
std::array<double, W> PipelinePlayer::Game::ends() {
  std::array<double, W> last_s{};
  for (std::size_t l = 0; l < W; ++l) {
    last_s[l] = state_[l];
    for (std::size_t d = 1; d < devices(); ++d) last_s[l] = std::max(last_s[l], state_[d * W + l]);
  }
  if (W == 1) end_s.assign(state_.begin(), state_.begin() + std::ptrdiff_t(devices()));
  return last_s;
}

template <std::size_t W>
std::array<double, W> PipelinePlayer::Game::play_all(bool skip, const Observe& observe) {
  if (!write_phases()) {
    std::array<double, W> none{};
    none.fill(kNan);
    return none;
  }
  state_.assign(devices() * W, 0.0);
  for (const Phase& phase : orders_->phases) {
    play_rounds<W>(phase.rounds, phase.rounds, skip && phase.repeats, [&](std::int64_t) {
      advance<W>(phase);
      if (observe) observe(phase);
    });
  }
  return ends<W>();
}

template <std::size_t W>
std::array<double, W> PipelinePlayer::Game::play(bool skip) {
  if (skip && shape_.schedule == PipelineSchedule::kGpipe) return gpipe<W>();
  if (skip && shape_.schedule == PipelineSchedule::kOneForwardOneBackward) {
    return one_forward_one_backward<W>();
  }
  return play_all<W>(skip);
}

// Micro-batches are identical and no forward pass waits for a later stage: each direction is a flow
// shop of identical jobs, in which the slowest stage sets the pace.
template <std::size_t W>
std::array<double, W> PipelinePlayer::Game::gpipe() {
  using Clocks = Lanes<W>;
  const Clocks repeats = Clocks::all(static_cast<double>(shape_.micro_batches - 1));
  const std::size_t p = devices();
  const double* const forward_s = seconds_of(Pass::kForward, W);
  const double* const backward_s = seconds_of(Pass::kBackward, W);
  Clocks trip_s = Clocks::all(0.0);
  Clocks pace_s = trip_s;
  for (std::size_t d = 0; d < p; ++d) {
    trip_s = trip_s + Clocks::load(forward_s + d * W);
    pace_s = larger(pace_s, Clocks::load(forward_s + d * W));
  }
  Clocks clock_s = trip_s + repeats * pace_s;
  state_.resize(p * W);
  pace_s = Clocks::all(0.0);
  for (std::size_t d = p; d-- > 0;) {
    clock_s = clock_s + Clocks::load(backward_s + d * W);
    pace_s = larger(pace_s, Clocks::load(backward_s + d * W));
    (clock_s + repeats * pace_s).store(&state_[d * W]);
  }
  std::array<double, W> last_s = ends<W>();
  std::copy_n(state_.begin(), W, last_s.begin());
  return last_s;
}

// Device k runs min(m, `lead`) forward passes first, `lead` = p - 1 - k, and then one forward pass
// (while any is left) and one backward pass in every round. In round r it waits for the message
// that the device before it sent in round r - 1, and for the gradient that the device after it
// sends in round r. Before that no forward pass waits for a later device, as in GPipe.
template <std::size_t W>
std::array<double, W> PipelinePlayer::Game::one_forward_one_backward() {
  using Clocks = Lanes<W>;
  const std::size_t p = devices();
  const double* const forward_s = seconds_of(Pass::kForward, W);
  const double* const backward_s = seconds_of(Pass::kBackward, W);
  const std::int64_t m = shape_.micro_batches;
  // The time at which each device is free, followed by the end of its last forward pass.
  state_.resize(2 * p * W);
  before_.resize(2 * p * W);
  Clocks trip_s = Clocks::all(0.0);
  Clocks pace_s = trip_s;
  for (std::size_t k = 0; k < p; ++k) {
    const std::int64_t lead = std::min(static_cast<std::int64_t>(p - 1 - k), m);
    trip_s = trip_s + Clocks::load(forward_s + k * W);
    pace_s = larger(pace_s, Clocks::load(forward_s + k * W));
    const Clocks clock_s =
        lead == 0 ? Clocks::all(0.0) : trip_s + Clocks::all(static_cast<double>(lead - 1)) * pace_s;
    clock_s.store(&state_[k * W]);
    clock_s.store(&state_[(p + k) * W]);
  }
  const auto play = [&](std::int64_t r) {
    // Devices from `first` on have a forward pass left.
    const std::int64_t ahead = static_cast<std::int64_t>(p) - (m - r);
    const std::size_t first = ahead <= 0 ? 0 : static_cast<std::size_t>(ahead);
    const double* const clock_before = before_.data();
    const double* const sent_before = clock_before + p * W;
    double* const clock_s = state_.data();
    double* const sent_s = clock_s + p * W;
    Clocks gradient_s = Clocks::all(0.0);
    for (std::size_t k = p; k-- > first;) {
      Clocks ready_s = Clocks::load(clock_before + k * W);
      if (k > 0) ready_s = larger(ready_s, Clocks::load(sent_before + (k - 1) * W));
      ready_s = ready_s + Clocks::load(forward_s + k * W);
      ready_s.store(sent_s + k * W);
      gradient_s = larger(ready_s, gradient_s) + Clocks::load(backward_s + k * W);
      gradient_s.store(clock_s + k * W);
    }
    std::copy_n(sent_before, first * W, sent_s);
    for (std::size_t k = first; k-- > 0;) {
      gradient_s =
          larger(Clocks::load(clock_before + k * W), gradient_s) + Clocks::load(backward_s + k * W);
      gradient_s.store(clock_s + k * W);
    }
  };
  play_rounds<W>(m, m - static_cast<std::int64_t>(p) + 1, true, play);
  return ends<W>();
}

// Appends every pass of a phase that was just run.
void PipelinePlayer::Game::record(const Phase& phase, std::vector<PassEvent>* by_device) {
  const auto chunks = static_cast<std::size_t>(shape_.chunks);
  const auto count = [&](Pass kind, std::size_t slot) -> std::int64_t& {
    return counts_[static_cast<std::size_t>(kind) * slots_ + slot];
  };
  for (std::size_t i = 0; i < phase.operations.size(); ++i) {
    const Operation& own = phase.operations[i];
    const auto kind = static_cast<Pass>(own.seconds / slots_);
    if (own.seconds >= static_cast<std::size_t>(kPassKinds) * slots_) continue;  // half of a pair
    const std::size_t slot = own.seconds % slots_;
    std::int64_t micro_batch = 0;
    std::int64_t other = -1;
    if (kind == Pass::kForward || kind == Pass::kPair) {
      micro_batch = count(Pass::kForward, slot)++;
    } else if (kind == Pass::kWeightGrad) {
      micro_batch = count(Pass::kWeightGrad, slot)++;
    } else {
      micro_batch = count(Pass::kBackward, slot)++;
      // A whole backward pass includes the weight gradient.
      if (kind == Pass::kBackward) ++count(Pass::kWeightGrad, slot);
    }
    if (kind == Pass::kPair) {
      other = count(Pass::kBackward, slot ^ 1U)++;
      ++count(Pass::kWeightGrad, slot ^ 1U);
    }
    const double until_s = values_[1 + phase.inputs + i];
    by_device[slot / chunks].push_back({static_cast<std::int32_t>(slot / chunks),
                                        static_cast<std::int32_t>(kind),
                                        static_cast<std::int32_t>(slot % chunks), 0, micro_batch,
                                        other, until_s - seconds_[own.seconds], until_s});
  }
}

std::vector<PassEvent> PipelinePlayer::Game::events() {
  std::vector<std::vector<PassEvent>> passes(devices());
  counts_.assign(kPassKinds * slots_, 0);
  play_all(false, [&](const Phase& phase) { record(phase, passes.data()); });
  std::vector<PassEvent> all;
  for (const auto& own : passes) all.insert(all.end(), own.begin(), own.end());
  return all;
}

// Goes from the last pass of the device that ends last back to the start, each time to the pass
// that a pass waited for: the one before it on its device, unless its input came later.
std::vector<double> PipelinePlayer::Game::critical_passes() {
  struct Round {
    const Phase* phase;
    std::size_t first;  // number of the round's first value
  };
  std::vector<Round> rounds;
  std::vector<double> values;
  const double step_s = play_all(false, [&](const Phase& phase) {
    rounds.push_back({&phase, values.size()});
    const std::size_t count = 1 + phase.inputs + phase.operations.size();
    values.insert(values.end(), values_.data(), values_.data() + count);
  });
  std::vector<double> counts;
  if (std::isnan(step_s)) return counts;
  counts.assign(kPassKinds * slots_, 0.0);
  const auto last = std::max_element(end_s.begin(), end_s.end()) - end_s.begin();
  std::uint32_t value = rounds.back().phase->state[at(last)];
  for (std::size_t round = rounds.size(); round > 0;) {
    const Phase& phase = *rounds[round - 1].phase;
    if (value == 0) break;
    if (value <= phase.inputs) {
      if (--round > 0) value = rounds[round - 1].phase->state[value - 1];
      continue;
    }
    const Operation& own = phase.operations[value - 1 - phase.inputs];
    if (own.seconds < counts.size()) counts[own.seconds] += 1.0;  // else half of a pair
    const double* const ends = values.data() + rounds[round - 1].first;
    value = ends[own.input] > ends[own.after] ? own.input : own.after;
  }
  return counts;
}

std::vector<double> PipelinePlayer::critical_passes(PipelineSchedule schedule,
                                                    const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->critical_passes() : std::vector<double>{};
}

std::vector<PassEvent> PipelinePlayer::events(PipelineSchedule schedule,
                                              const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->events() : std::vector<PassEvent>{};
}

namespace {

constexpr std::int64_t kMostCells = std::int64_t{1} << 24;  // stages x stages x chunks
constexpr std::int64_t kMostMicroBatches = std::int64_t{1}
                                           << 40;  // exact in a double, with a margin

// Counts the activations of an abbreviated order, in which each segment has a repeat count.
struct Counter {
  std::int64_t held = 0;
  std::int64_t most = 0;

  void pass(Pass kind, std::int64_t /*chunk*/) {
    if (kind == Pass::kForward || kind == Pass::kPair) most = std::max(most, ++held);
    if (kind == Pass::kBackward || kind == Pass::kWeightGrad || kind == Pass::kPair) --held;
  }
  void segment(std::int64_t /*repeats*/) {}  // the count is the same after every round
};

}  // namespace

PipelineStatus check_schedule(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                              std::int64_t micro_batches) noexcept {
  const auto code = static_cast<std::int32_t>(schedule);
  if (code < 0 || code >= kPipelineScheduleCount) return PipelineStatus::kBadSchedule;
  if (stages < 1 || chunks < 1 || micro_batches < 1) return PipelineStatus::kBadSizes;
  if (stages > kMostCells || chunks > kMostCells || stages * chunks > kMostCells ||
      stages * chunks * stages > kMostCells || micro_batches > kMostMicroBatches) {
    return PipelineStatus::kTooLarge;
  }
  if (has_two_chunks(schedule)) {
    if (chunks != 2) return PipelineStatus::kTwoChunks;
  } else if (schedule != PipelineSchedule::kInterleaved && chunks != 1) {
    return PipelineStatus::kOneChunk;
  }
  if (schedule == PipelineSchedule::kDualPipe) {
    if (stages % 2 != 0) return PipelineStatus::kOddStages;
    if (micro_batches % 2 != 0) return PipelineStatus::kOddMicroBatches;
  }
  if (pairs_passes(schedule) && micro_batches < 2 * stages) return PipelineStatus::kFewMicroBatches;
  return PipelineStatus::kOk;
}

std::int64_t chunk_of(PipelineSchedule schedule, std::int64_t stages, std::int64_t /*chunks*/,
                      std::int64_t device, std::int64_t chunk) noexcept {
  switch (schedule) {
    case PipelineSchedule::kZeroBubbleV:
    case PipelineSchedule::kDualPipeV:
      return chunk == 0 ? device : 2 * stages - 1 - device;
    case PipelineSchedule::kDualPipe:
      return chunk == 0 ? device : stages - 1 - device;
    default:
      return chunk * stages + device;
  }
}

double chunks_in_flight(PipelineSchedule schedule, std::int64_t stages, std::int64_t device,
                        std::int64_t micro_batches, std::int64_t chunks) noexcept {
  if (check_schedule(schedule, stages, chunks, micro_batches) != PipelineStatus::kOk ||
      device < 0 || device >= stages) {
    return 0.0;
  }
  switch (schedule) {
    case PipelineSchedule::kGpipe:
      return static_cast<double>(micro_batches);
    case PipelineSchedule::kOneForwardOneBackward:
      return static_cast<double>(std::min(micro_batches, stages - device));
    case PipelineSchedule::kZeroBubbleH1:
      return static_cast<double>(std::min(micro_batches, stages));
    case PipelineSchedule::kZeroBubbleH2:
      return static_cast<double>(std::min(micro_batches, 2 * stages - 1));
    case PipelineSchedule::kInterleaved: {
      const std::int64_t most = 2 * (stages - device - 1) + (chunks - 1) * stages + 1;
      if (chunks > 1 && most <= micro_batches / stages * stages * chunks) {
        return static_cast<double>(most);
      }
      break;  // the step ends earlier, or includes a last group that is not full
    }
    case PipelineSchedule::kZeroBubbleV:
      if (micro_batches >= 2 * stages - 1) return static_cast<double>(2 * stages);
      break;
    case PipelineSchedule::kDualPipe:
      return static_cast<double>(stages + 1);
    case PipelineSchedule::kDualPipeV:
      return static_cast<double>(2 * stages + 1);
  }
  Counter counter;
  tell_order({schedule, stages, chunks, micro_batches}, device, counter);
  return static_cast<double>(counter.most);
}

// ---- the player ----

PipelinePlayer::PipelinePlayer() : game_(std::make_unique<Game>()) {}
PipelinePlayer::~PipelinePlayer() = default;
PipelinePlayer::PipelinePlayer(PipelinePlayer&&) noexcept = default;
PipelinePlayer& PipelinePlayer::operator=(PipelinePlayer&&) noexcept = default;

double PipelinePlayer::step_s(PipelineSchedule schedule, const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->play(true) : kNan;
}

void PipelinePlayer::steps_s(PipelineSchedule schedule, const PipelineLoads& loads,
                             std::span<double> step_s) {
  const std::size_t steps = step_s.size();
  std::fill(step_s.begin(), step_s.end(), kNan);
  if (!game_->prepare(schedule, loads)) return;
  std::size_t done = 0;
  const auto play = [&]<std::size_t W>(std::integral_constant<std::size_t, W>) {
    for (; done + W <= steps; done += W) {
      const std::array<bool, W> good = game_->load<W>(loads, done, steps);
      if (std::none_of(good.begin(), good.end(), [](bool own) { return own; })) continue;
      const std::array<double, W> found_s = game_->play<W>(true);
      for (std::size_t l = 0; l < W; ++l) {
        if (good[l]) step_s[done + l] = found_s[l];
      }
    }
  };
  play(std::integral_constant<std::size_t, kTogether>{});
  play(std::integral_constant<std::size_t, 1>{});
}

double PipelinePlayer::full_step_s(PipelineSchedule schedule, const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->play(false) : kNan;
}

std::span<const double> PipelinePlayer::start_s() {
  game_->count_work();
  return game_->start_s;
}

std::span<const double> PipelinePlayer::end_s() const noexcept { return game_->end_s; }

std::span<const double> PipelinePlayer::busy_s() {
  game_->count_work();
  return game_->busy_s;
}

double PipelinePlayer::longest_device_s() {
  const std::span<const double> begins = start_s();
  double longest = 0.0;
  for (std::size_t d = 0; d < begins.size(); ++d) {
    longest = std::max(longest, game_->end_s[d] - begins[d]);
  }
  return longest;
}

double PipelinePlayer::step_bound_s(PipelineSchedule schedule, const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->bound() : kNan;
}

double PipelinePlayer::peak_bytes(PipelineSchedule schedule, std::int64_t stages,
                                  std::int64_t chunks, std::int64_t micro_batches,
                                  std::int64_t device, std::span<const double> chunk_bytes,
                                  double kept_for_weight_grad) {
  if (!game_->prepare({schedule, stages, chunks, micro_batches})) return kNan;
  return game_->peak(device, chunk_bytes, kept_for_weight_grad);
}

void PipelinePlayer::peaks_in_flight(PipelineSchedule schedule, std::int64_t stages,
                                     std::int64_t chunks, std::int64_t micro_batches,
                                     std::int64_t device, std::vector<double>* held) {
  held->clear();
  if (device < 0 || device >= stages) return;
  if (game_->prepare({schedule, stages, chunks, micro_batches})) game_->held(device, held);
}

}  // namespace phaze
