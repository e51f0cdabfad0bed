// Plays a schedule. Every device runs its order; a pass starts when the device is free and what it
// needs has been computed. End times are kept in rings, one for each chunk of each device, that
// hold only micro-batches which the neighbour has not taken yet.
//
// Orders are fixed, so the end times are a max-plus linear function of those before. While all
// devices repeat a segment of their orders, the clocks and the end times not yet taken are the
// whole state: once a round shifts all of it by the same seconds, every later round does so too,
// and they are skipped at once (Baccelli et al. 1992, Synchronization and Linearity, chapter 3).
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "placement/pipeline_schedule_game.hpp"

namespace phaze {
namespace {

constexpr std::int64_t kAlways = std::numeric_limits<std::int64_t>::max();

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

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

// When a forward (or backward) pass of a slot can start: false where what it needs is not there, or
// where its end time would take the place of one that the neighbour has not taken.
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

// Plays one pass, or returns false where something it needs is not there yet.
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

// Plays a device's passes as far as they go, or to the end of its round; whether there were any.
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

// Plays one round of the segment that all devices are in; false where they cannot all get there.
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

// Plays the rounds that all devices have of a segment; whether all have come to its end.
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
  if (!finish()) return std::numeric_limits<double>::quiet_NaN();
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

}  // namespace phaze
