// Orders and loads of a step before it is played: what each device does, what that takes and holds
// at least and at most, whatever the others do.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "placement/pipeline_schedule_game.hpp"

namespace phaze {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

// Writes down the order of one device.
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
  shape_ = shape;
  slots_ = at(shape.stages * shape.chunks);
  ordered_ = false;
  return true;
}

void PipelinePlayer::Game::write_orders() {
  if (ordered_) return;
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
  std::vector<std::size_t> slot_at(slots_, 0);  // of a position in the chain, DualPipe's one after
  for (std::int64_t d = 0; d < p; ++d) {        // the other
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

// ---- what a device does and holds ----

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
// less what the device itself does after that pass.
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

double PipelinePlayer::Game::peak(std::int64_t device, std::span<const double> bytes, double kept) {
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
      if (kind == Pass::kInputGrad) held -= (1.0 - kept) * own(slot);
      if (kind == Pass::kWeightGrad) held -= kept * own(slot);
    }
  };
  for (std::size_t s = 0; s < kSegments; ++s) {
    const Segment& part = segment(at(device), s);
    if (part.repeats == 0) continue;
    const double before = held;
    round(part);
    if (part.repeats == 1) continue;
    held += (held - before) * static_cast<double>(part.repeats - 2);  // only GPipe's rounds add up
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
    std::size_t kept = 0;
    for (std::size_t k = 0; k < moments->size(); k += chunks) {
      if (no_more(&(*moments)[k], now.data())) continue;
      std::copy_n(moments->begin() + static_cast<std::ptrdiff_t>(k), chunks,
                  moments->begin() + static_cast<std::ptrdiff_t>(kept));
      kept += chunks;
    }
    moments->resize(kept);
    moments->insert(moments->end(), now.begin(), now.end());
  };
  for (std::size_t s = 0; s < kSegments; ++s) {
    const Segment& part = segment(at(device), s);
    // Rounds repeat what is held, but for GPipe's, whose every round adds to it.
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

}  // namespace phaze
