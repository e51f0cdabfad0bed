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
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "base/numbers.hpp"

namespace phaze {

enum class Pass : std::uint32_t {
  kForward = 0,
  kBackward = 1,    // whole
  kInputGrad = 2,   // the part that the previous stage waits for
  kWeightGrad = 3,  // the rest
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

  // `warm` forward passes; then input gradients, each followed by the weight gradient of `late`
  // micro-batches before it and by the next forward pass, while any remain.
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
    const std::int64_t first = m_ < n ? steady : 0;  // written out if some are omitted
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
    if (inner == 0) {  // these two are not overlapped
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
  std::size_t last;  // one past
  std::int64_t repeats;
};

// Position of a device in its order.
struct Cursor {
  const Token* token;
  const Token* last;
  double clock_s;
  std::int64_t repeats;  // of the segment, this one included; 0 at the end of the order
  std::size_t segment;
  bool paused;
};

inline constexpr std::size_t kMostKeptTokens = std::size_t{1} << 20;  // of orders of other shapes
inline constexpr std::int64_t kWorthSkipping = 4;  // least rounds left to compare states

// Rounding error of clocks at `clock_s` when a round takes `shift_s`.
inline double rounding(double clock_s, double shift_s) noexcept {
  constexpr double kUlp = std::numeric_limits<double>::epsilon();
  return 1e-13 * shift_s + 4.0 * kUlp * std::abs(clock_s);
}

// The whole state advances by these seconds in this many rounds; 0 rounds: it does not.
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
  // Orders are created when first needed: GPipe and 1F1B are simulated without them.
  bool prepare(const PipelineShape& shape);
  bool prepare(PipelineSchedule schedule, const PipelineLoads& loads) {
    return prepare({schedule, loads.stages, loads.chunks, loads.micro_batches});
  }
  bool load(const PipelineLoads& loads);
  double play(bool skip);
  double bound();
  void count_work();  // start_s and busy_s
  double peak(std::int64_t device, std::span<const double> bytes, double weight_grad_share);
  void held(std::int64_t device, std::vector<double>* moments);

  std::vector<PassEvent> events();  // of a step that is loaded

  std::vector<double> start_s;  // by device
  std::vector<double> end_s;
  std::vector<double> busy_s;

 private:
  void record(std::size_t device, Token token, double until_s);
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

  // The orders of another shape, kept until that shape is simulated again.
  struct Orders {
    std::vector<Token> tokens;
    std::vector<Segment> segments;
    std::vector<std::size_t> prev;
    std::vector<std::size_t> next;
    std::int64_t ring = 0;
  };
  void keep_orders();

  PipelineShape shape_{PipelineSchedule::kGpipe, 0, 0, 0};
  bool ordered_ = false;  // whether the orders are those of the shape
  std::vector<Token> tokens_;
  std::vector<Segment> segments_;  // [device * kSegments + segment]
  std::vector<std::size_t> prev_;  // previous slot in the chain; the extra last slot means none
  std::vector<std::size_t> next_;
  std::size_t slots_ = 0;
  std::map<PipelineShape, Orders> kept_;
  std::size_t kept_tokens_ = 0;

  std::vector<double> forward_s_;
  std::vector<double> backward_s_;
  std::vector<double> input_s_;
  std::vector<double> weight_s_;
  std::vector<double> pair_s_;  // of this slot's forward with the other chunk's backward

  std::vector<std::vector<PassEvent>>* recorded_ = nullptr;  // by device, if events are requested
  std::vector<std::int64_t> weight_grads_;  // done, by slot, if events are requested

  std::int64_t ring_ = 0;  // length, a power of two
  bool ring_full_ = false;
  bool down_ = true;  // direction of the next sweep over the devices
  std::vector<Cursor> cursors_;
  std::vector<std::int64_t> forwards_;  // done, by slot; the extra slot has done all at time 0
  std::vector<std::int64_t> backwards_;
  std::vector<double> forward_end_;  // [slot * ring + micro-batch mod ring]
  std::vector<double> backward_end_;
  std::vector<double> state_;
  std::vector<double> before_;
  std::vector<double> marked_;
  std::vector<std::int64_t> added_;  // passes that skipping adds, by slot
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

}  // namespace

// ---- orders ----

bool PipelinePlayer::Game::prepare(const PipelineShape& shape) {
  if (check_schedule(shape.schedule, shape.stages, shape.chunks, shape.micro_batches) !=
      PipelineStatus::kOk) {
    return false;
  }
  if (shape == shape_) return true;
  keep_orders();
  shape_ = shape;
  slots_ = at(shape.stages * shape.chunks);
  return true;
}

void PipelinePlayer::Game::keep_orders() {
  if (!ordered_) return;
  if (kept_tokens_ + tokens_.size() > kMostKeptTokens) {
    kept_.clear();
    kept_tokens_ = 0;
  }
  Orders& own = kept_[shape_];
  kept_tokens_ += tokens_.size();
  own = {std::move(tokens_), std::move(segments_), std::move(prev_), std::move(next_), ring_};
  ordered_ = false;
}

void PipelinePlayer::Game::write_orders() {
  if (ordered_) return;
  const auto known = kept_.find(shape_);
  if (known != kept_.end()) {
    Orders own = std::move(known->second);
    kept_.erase(known);
    kept_tokens_ -= own.tokens.size();
    tokens_ = std::move(own.tokens);
    segments_ = std::move(own.segments);
    prev_ = std::move(own.prev);
    next_ = std::move(own.next);
    ring_ = own.ring;
    ordered_ = true;
    return;
  }
  tokens_.clear();
  segments_.clear();
  for (std::int64_t d = 0; d < shape_.stages; ++d) {
    Recorder recorder{&tokens_, &segments_, at(d * shape_.chunks), tokens_.size()};
    tell_order(shape_, d, recorder);
  }
  link(shape_);
  ring_ = static_cast<std::int64_t>(std::bit_ceil(at(4 * shape_.stages + 4)));
  ordered_ = true;
}

void PipelinePlayer::Game::link(const PipelineShape& shape) {
  const std::int64_t p = shape.stages;
  const std::int64_t v = shape.chunks;
  const bool two_ways = shape.schedule == PipelineSchedule::kDualPipe;
  added_.reserve(2 * (slots_ + 1));
  prev_.assign(slots_ + 1, slots_);
  next_.assign(slots_ + 1, slots_);
  std::vector<std::size_t> slot_at(slots_, 0);  // by position in the chain; DualPipe has two
  for (std::int64_t d = 0; d < p; ++d) {        // consecutive chains
    for (std::int64_t c = 0; c < v; ++c) {
      slot_at[at(chunk_of(shape.schedule, p, v, d, c) + (two_ways ? c * p : 0))] = at(d * v + c);
    }
  }
  for (std::size_t q = 1; q < slots_; ++q) {
    if (two_ways && q == at(p)) continue;
    prev_[slot_at[q]] = slot_at[q - 1];
    next_[slot_at[q - 1]] = slot_at[q];
  }
}

bool PipelinePlayer::Game::load(const PipelineLoads& loads) {
  const bool split = splits_backward(shape_.schedule);
  if (loads.forward_s.size() != slots_ || loads.backward_s.size() != slots_ ||
      (split && loads.weight_grad_s.size() != slots_)) {
    return false;
  }
  forward_s_.assign(loads.forward_s.begin(), loads.forward_s.end());
  backward_s_.assign(loads.backward_s.begin(), loads.backward_s.end());
  bool good = true;
  for (std::size_t s = 0; s < slots_; ++s) {
    good = good && forward_s_[s] >= 0.0 && backward_s_[s] >= 0.0 && std::isfinite(forward_s_[s]) &&
           std::isfinite(backward_s_[s]);
  }
  if (!split) return good;
  weight_s_.assign(loads.weight_grad_s.begin(), loads.weight_grad_s.end());
  input_s_.resize(slots_);
  for (std::size_t s = 0; s < slots_; ++s) {
    good = good && weight_s_[s] >= 0.0 && weight_s_[s] <= backward_s_[s];
    input_s_[s] = backward_s_[s] - weight_s_[s];
  }
  if (!pairs_passes(shape_.schedule)) return good;
  pair_s_.resize(slots_);
  for (std::size_t s = 0; s < slots_; ++s) {
    pair_s_[s] = loads.overlap * (forward_s_[s] + backward_s_[s ^ 1U]);
  }
  return good && loads.overlap >= 0.0 && std::isfinite(loads.overlap);
}

double PipelinePlayer::Game::seconds(Token token) const noexcept {
  switch (token.kind()) {
    case Pass::kForward:
      return forward_s_[token.slot()];
    case Pass::kBackward:
      return backward_s_[token.slot()];
    case Pass::kInputGrad:
      return input_s_[token.slot()];
    case Pass::kWeightGrad:
      return weight_s_[token.slot()];
    case Pass::kPair:
      break;
  }
  return pair_s_[token.slot()];
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
        round_s += seconds(tokens_[i]);
      }
      busy_s[d] += static_cast<double>(segment(d, s).repeats) * round_s;
    }
    start_s[d] = 0.0;
    const std::size_t first = tokens_[segment(d, 0).first].slot();
    for (std::size_t up = prev_[first]; up != slots_; up = prev_[up]) start_s[d] += forward_s_[up];
  }
}

// Least seconds from the last pass of a device that sends a gradient on to the end of the step,
// minus the device's own work after that pass.
double PipelinePlayer::Game::drain(std::size_t device) const {
  std::size_t s = kSegments;
  while (s > 0 && segment(device, s - 1).repeats == 0) --s;
  double own_s = 0.0;
  std::size_t i = segment(device, s - 1).last;
  while (tokens_[i - 1].kind() == Pass::kWeightGrad) own_s += weight_s_[tokens_[--i].slot()];
  const Token sends = tokens_[i - 1];
  const std::size_t slot = sends.kind() == Pass::kPair ? sends.slot() ^ 1U : sends.slot();
  const bool split = splits_backward(shape_.schedule);
  const bool pairs = pairs_passes(shape_.schedule);
  double after_s = 0.0;
  std::size_t top = slot;
  for (std::size_t up = prev_[slot]; up != slots_; up = prev_[up]) {
    const double least_s = split ? input_s_[up] : backward_s_[up];
    after_s += pairs ? std::min(least_s, pair_s_[up ^ 1U]) : least_s;
    top = up;
  }
  if (split && !pairs && top != slot) after_s += weight_s_[top];
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
      const Pass kind = tokens_[i].kind();
      const std::size_t slot = tokens_[i].slot();
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
  for (std::size_t s = 0; s < kSegments; ++s) {
    const Segment& part = segment(at(device), s);
    // Activations are the same after every round, except in GPipe, where every round adds some.
    const bool adds = shape_.schedule == PipelineSchedule::kGpipe;
    const std::int64_t rounds = adds ? part.repeats : std::min<std::int64_t>(part.repeats, 2);
    for (std::int64_t round = 0; round < rounds; ++round) {
      for (std::size_t i = part.first; i < part.last; ++i) {
        const Pass kind = tokens_[i].kind();
        const std::size_t chunk = tokens_[i].slot() % chunks;
        if (kind == Pass::kForward || kind == Pass::kPair) {
          now[chunk] += 1.0;
          note();
        }
        if (kind == Pass::kBackward || kind == Pass::kWeightGrad) now[chunk] -= 1.0;
        if (kind == Pass::kPair) now[chunk ^ 1U] -= 1.0;
      }
    }
  }
}

namespace {

constexpr std::int64_t kAlways = std::numeric_limits<std::int64_t>::max();

}  // namespace

// ---- one pass after another ----

void PipelinePlayer::Game::next_segment(Cursor* cursor) const {
  const auto device = static_cast<std::size_t>(cursor - cursors_.data());
  while (cursor->repeats == 0 && ++cursor->segment < kSegments) {
    cursor->repeats = segment(device, cursor->segment).repeats;
  }
  if (cursor->repeats == 0) return;
  const Segment& own = segment(device, cursor->segment);
  cursor->token = tokens_.data() + own.first;
  cursor->last = tokens_.data() + own.last;
}

void PipelinePlayer::Game::restart() {
  const std::size_t cells = (slots_ + 1) * at(ring_);
  if (forward_end_.size() < cells) forward_end_.resize(cells);
  if (backward_end_.size() < cells) backward_end_.resize(cells);
  forwards_.assign(slots_ + 1, 0);
  backwards_.assign(slots_ + 1, 0);
  forwards_[slots_] = kAlways;
  backwards_[slots_] = kAlways;
  std::fill_n(forward_end_.begin() + static_cast<std::ptrdiff_t>(slots_ * at(ring_)), ring_, 0.0);
  std::fill_n(backward_end_.begin() + static_cast<std::ptrdiff_t>(slots_ * at(ring_)), ring_, 0.0);
  cursors_.resize(devices());
  for (std::size_t d = 0; d < devices(); ++d) {
    cursors_[d] = {nullptr, nullptr, 0.0, segment(d, 0).repeats, 0, false};
    next_segment(&cursors_[d]);
  }
  ring_full_ = false;
  down_ = true;
}

// When a forward (or backward) pass of a slot can start: false if its input has not been computed,
// or if its end time would overwrite one that the neighbour has not read.
bool PipelinePlayer::Game::forward_ready(std::size_t slot, double* ready_s) {
  const std::int64_t k = forwards_[slot];
  const std::size_t from = prev_[slot];
  if (forwards_[from] <= k) return false;
  if (k - forwards_[next_[slot]] >= ring_) {
    ring_full_ = true;
    return false;
  }
  *ready_s = std::max(*ready_s, forward_end_[place(from, k)]);
  return true;
}

bool PipelinePlayer::Game::backward_ready(std::size_t slot, double* ready_s) {
  const std::int64_t k = backwards_[slot];
  const std::size_t from = next_[slot];
  if (backwards_[from] <= k) return false;
  if (k - backwards_[prev_[slot]] >= ring_) {
    ring_full_ = true;
    return false;
  }
  *ready_s = std::max(*ready_s, backward_end_[place(from, k)]);
  return true;
}

// Runs one pass, or returns false if one of its inputs is not ready.
bool PipelinePlayer::Game::step(Token token, double* clock_s) {
  const std::size_t slot = token.slot();
  double until_s = *clock_s;
  switch (token.kind()) {
    case Pass::kForward:
      if (!forward_ready(slot, &until_s)) return false;
      until_s += forward_s_[slot];
      forward_end_[place(slot, forwards_[slot]++)] = until_s;
      break;
    case Pass::kBackward:
    case Pass::kInputGrad:
      if (!backward_ready(slot, &until_s)) return false;
      until_s += token.kind() == Pass::kBackward ? backward_s_[slot] : input_s_[slot];
      backward_end_[place(slot, backwards_[slot]++)] = until_s;
      break;
    case Pass::kWeightGrad:
      until_s += weight_s_[slot];
      break;
    case Pass::kPair: {
      const std::size_t other = slot ^ 1U;
      if (!forward_ready(slot, &until_s) || !backward_ready(other, &until_s)) return false;
      until_s += pair_s_[slot];
      forward_end_[place(slot, forwards_[slot]++)] = until_s;
      backward_end_[place(other, backwards_[other]++)] = until_s;
      break;
    }
  }
  *clock_s = until_s;
  return true;
}

// Runs a device's passes until one must wait, or to the end of its round; returns whether any ran.
bool PipelinePlayer::Game::run(std::size_t device, bool one_round) {
  Cursor& cursor = cursors_[device];
  if (cursor.repeats == 0) return false;
  const Token* const first = cursor.token;
  const std::int64_t repeats = cursor.repeats;
  while (step(*cursor.token, &cursor.clock_s)) {
    if (recorded_ != nullptr) record(device, *cursor.token, cursor.clock_s);
    if (++cursor.token != cursor.last) continue;
    cursor.token = tokens_.data() + segment(device, cursor.segment).first;
    if (--cursor.repeats == 0) next_segment(&cursor);
    if (one_round) {
      cursor.paused = true;
      return true;
    }
    if (cursor.repeats == 0) return true;
  }
  return cursor.token != first || cursor.repeats != repeats;
}

// Runs one round of the segment that all devices are in; false if they cannot all reach it.
bool PipelinePlayer::Game::round() {
  std::size_t left = devices();
  for (Cursor& cursor : cursors_) cursor.paused = false;
  while (true) {
    bool moved = false;
    for (std::size_t i = 0; i < devices(); ++i) {
      const std::size_t d = down_ ? i : devices() - 1 - i;
      if (cursors_[d].paused) continue;
      if (run(d, true)) moved = true;
      if (cursors_[d].paused) --left;
    }
    if (left == 0) return true;
    if (!moved) return false;
    down_ = !down_;
  }
}

bool PipelinePlayer::Game::finish() {
  for (bool moved = true; moved; down_ = !down_) {
    moved = false;
    for (std::size_t i = 0; i < devices(); ++i) {
      if (run(down_ ? i : devices() - 1 - i, false)) moved = true;
    }
  }
  return std::all_of(cursors_.begin(), cursors_.end(),
                     [](const Cursor& cursor) { return cursor.repeats == 0; });
}

// ---- rounds that only shift the clocks ----

void PipelinePlayer::Game::note_state() {
  state_.clear();
  for (const Cursor& cursor : cursors_) state_.push_back(cursor.clock_s);
  for (std::size_t s = 0; s < slots_; ++s) {
    for (std::int64_t k = forwards_[next_[s]]; k < forwards_[s]; ++k) {
      state_.push_back(forward_end_[place(s, k)]);
    }
    for (std::int64_t k = backwards_[prev_[s]]; k < backwards_[s]; ++k) {
      state_.push_back(backward_end_[place(s, k)]);
    }
  }
}

void PipelinePlayer::Game::skip_rounds(std::size_t s, const Shift& shift, std::int64_t times) {
  const double seconds = shift.seconds * static_cast<double>(times);
  const std::int64_t rounds = shift.rounds * times;
  added_.assign(2 * (slots_ + 1), 0);
  for (std::size_t d = 0; d < devices(); ++d) {
    const Segment& own = segment(d, s);
    cursors_[d].repeats -= rounds;
    if (cursors_[d].repeats == 0) next_segment(&cursors_[d]);
    cursors_[d].clock_s += seconds;
    for (std::size_t i = own.first; i < own.last; ++i) {
      const Pass kind = tokens_[i].kind();
      const std::size_t slot = tokens_[i].slot();
      if (kind == Pass::kForward || kind == Pass::kPair) added_[slot] += rounds;
      if (kind == Pass::kBackward || kind == Pass::kInputGrad) added_[slots_ + 1 + slot] += rounds;
      if (kind == Pass::kPair) added_[slots_ + 1 + (slot ^ 1U)] += rounds;
    }
  }
  std::size_t i = devices();
  for (std::size_t slot = 0; slot < slots_; ++slot) {
    const std::int64_t f = added_[slot];
    const std::int64_t b = added_[slots_ + 1 + slot];
    for (std::int64_t k = forwards_[next_[slot]]; k < forwards_[slot]; ++k) {
      forward_end_[place(slot, k + f)] = state_[i++] + seconds;
    }
    for (std::int64_t k = backwards_[prev_[slot]]; k < backwards_[slot]; ++k) {
      backward_end_[place(slot, k + b)] = state_[i++] + seconds;
    }
  }
  for (std::size_t slot = 0; slot < slots_; ++slot) {
    forwards_[slot] += added_[slot];
    backwards_[slot] += added_[slots_ + 1 + slot];
  }
}

// Runs the rounds of a segment common to all devices; returns whether all have reached its end.
bool PipelinePlayer::Game::rounds_of(std::size_t s, bool skip) {
  std::int64_t fewest = segment(0, s).repeats;
  std::int64_t most = fewest;
  for (std::size_t d = 1; d < devices(); ++d) {
    fewest = std::min(fewest, segment(d, s).repeats);
    most = std::max(most, segment(d, s).repeats);
  }
  std::int64_t marked_at = 0;
  before_.clear();
  marked_.clear();
  for (std::int64_t done = 1; done <= fewest; ++done) {
    if (!round()) return false;
    const std::int64_t left = fewest - done;
    if (!skip || left < kWorthSkipping) continue;
    note_state();
    Shift shift = shift_between(before_, state_, 1);
    if (shift.rounds == 0) shift = shift_between(marked_, state_, done - marked_at);
    if (shift.rounds > 0 && left >= shift.rounds) {
      skip_rounds(s, shift, left / shift.rounds);
      done += left / shift.rounds * shift.rounds;
      skip = false;
    } else if (std::has_single_bit(at(done))) {
      marked_ = state_;
      marked_at = done;
    }
    before_.swap(state_);
  }
  return fewest == most;
}

double PipelinePlayer::Game::play_once(bool skip) {
  write_orders();
  restart();
  std::size_t s = 0;
  while (s < kSegments && rounds_of(s, skip)) ++s;
  if (!finish()) return kNan;
  double step_s = 0.0;
  for (const Cursor& cursor : cursors_) step_s = std::max(step_s, cursor.clock_s);
  return step_s;
}

double PipelinePlayer::Game::play(bool skip) {
  if (skip && shape_.schedule == PipelineSchedule::kGpipe) return gpipe();
  if (skip && shape_.schedule == PipelineSchedule::kOneForwardOneBackward) {
    return one_forward_one_backward();
  }
  double step_s = play_once(skip);
  while (std::isnan(step_s) && ring_full_ && ring_ < 2 * shape_.micro_batches) {
    ring_ *= 2;
    step_s = play_once(skip);
  }
  end_s.resize(devices());
  for (std::size_t d = 0; d < devices(); ++d) end_s[d] = cursors_[d].clock_s;
  return step_s;
}

// Micro-batches are identical and no forward pass waits for a later stage: each direction is a flow
// shop of identical jobs, in which the slowest stage sets the pace.
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

// Device k runs min(m, `lead`) forward passes first, `lead` = p - 1 - k, and then one forward pass
// (while any is left) and one backward pass in every round. In round r it waits for the message
// that the device before it sent in round r - 1, and for the gradient that the device after it
// sends in round r. Before that no forward pass waits for a later device, as in GPipe.
double PipelinePlayer::Game::one_forward_one_backward() {
  const std::size_t p = devices();
  const std::int64_t m = shape_.micro_batches;
  // The time at which each device is free, followed by the end of its last forward pass.
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

void PipelinePlayer::Game::record(std::size_t device, Token token, double until_s) {
  const std::size_t slot = token.slot();
  const auto chunks = static_cast<std::size_t>(shape_.chunks);
  std::int64_t micro_batch = 0;
  std::int64_t other = -1;
  switch (token.kind()) {
    case Pass::kForward:
      micro_batch = forwards_[slot] - 1;
      break;
    case Pass::kBackward:
    case Pass::kInputGrad:
      micro_batch = backwards_[slot] - 1;
      // A whole backward pass includes the weight gradient.
      if (token.kind() == Pass::kBackward) ++weight_grads_[slot];
      break;
    case Pass::kWeightGrad:
      micro_batch = weight_grads_[slot]++;
      break;
    case Pass::kPair:
      micro_batch = forwards_[slot] - 1;
      other = backwards_[slot ^ 1U] - 1;
      ++weight_grads_[slot ^ 1U];
      break;
  }
  (*recorded_)[device].push_back({static_cast<std::int32_t>(device),
                                  static_cast<std::int32_t>(token.kind()),
                                  static_cast<std::int32_t>(slot % chunks), 0, micro_batch, other,
                                  until_s - seconds(token), until_s});
}

std::vector<PassEvent> PipelinePlayer::Game::events() {
  std::vector<std::vector<PassEvent>> passes;
  recorded_ = &passes;
  double step_s = std::nan("");
  try {
    do {  // a ring that is too small is enlarged, and the simulation is repeated
      passes.assign(devices(), {});
      weight_grads_.assign(slots_, 0);
      step_s = play_once(false);
      if (!std::isnan(step_s) || !ring_full_) break;
      ring_ *= 2;
    } while (ring_ <= 4 * shape_.micro_batches);
  } catch (...) {
    recorded_ = nullptr;
    throw;
  }
  recorded_ = nullptr;
  std::vector<PassEvent> all;
  if (std::isnan(step_s)) return all;
  for (const auto& own : passes) all.insert(all.end(), own.begin(), own.end());
  return all;
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
