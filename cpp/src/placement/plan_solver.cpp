// 1F1B and zero-bubble: stages are found from the last to the first, since memory depends on the
// stages that follow. Of the ways to place what comes after a cut those are kept of which none is
// better than another in every respect. A quick plan gives a time to beat, and with it the longest
// load that a stage may have, which leaves few cuts to look at.
#include "placement/plan_solver.hpp"

#include <algorithm>
#include <limits>

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kLoose = 1.0 + 1e-9;

}  // namespace

void PlanSolver::start(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times) {
  space_ = &space;
  row_ = &space.rows[row];
  frame_ = &space.frames[at(row_->frame)];
  free_ = {};
  stages_ = row_->layout.stages;
  rounds_ = row_->layout.micro_batches;
  zero_bubble_ = row_->layout.schedule == static_cast<std::int32_t>(PipelineSchedule::kZeroBubble);
  times_ = times.forward_s;
  sums_.build(space, *row_, *frame_, times);
  passes_ = &sums_.passes();
  nothing_s_ = 1e-13 * sums_.total_work_s();
  ++epoch_;
  find_places();
  const std::int64_t chunks = row_->layout.vpp;
  if (chunks == 1) return;
  held_ = &space.held_chunks.of(schedule_of(row_->layout), stages_, chunks, rounds_, &player_);
}

PlacedPlan PlanSolver::best(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times,
                            double room_bytes, double below_s, double load_s) {
  PlacedPlan best{kInfinite, 0.0, static_cast<std::int32_t>(row), {}};
  start(space, row, times);
  room_bytes_ = room_bytes * kFits;
  if (stages_ > space.layers) return best;
  const bool searched = row_->layout.vpp == 1 &&
                        (stages_ == 1 || (zero_bubble_ && rounds_ >= stages_) ||
                         schedule_of(row_->layout) == PipelineSchedule::kOneForwardOneBackward);
  if (!searched) {
    best = best_dealt(room_bytes, below_s);
    best.layout = static_cast<std::int32_t>(row);
    return best;
  }
  set_limits(below_s * (1.0 + 1e-12) - row_->exchange_s);
  const double least_load_s = quick_plan(load_s, &best);
  if (best.time_s < below_s) set_limits(best.time_s - row_->exchange_s);
  if (least_load_s <= load_limit_s_) search(&best);
  if (best.time_s < kInfinite && stages_ > 1) {
    const double clock_s = best.time_s;
    best.time_s = played_s(best.partition);
    if (best.time_s > clock_s * (1.0 + 1e-12)) walk_all(&best);
  }
  if (best.time_s == kInfinite || !(best.time_s <= below_s)) {
    best.time_s = kInfinite;
    best.partition = {};
    return best;
  }
  for (int k = 0; k < stages_; ++k) {
    const StageRecompute way = StageRecompute::of(best.partition.variants[at(k)]);
    best.memory_bytes = std::max(best.memory_bytes, sums_.bytes(way, best.partition.cuts[at(k)],
                                                                best.partition.cuts[at(k) + 1], k));
  }
  return best;
}

// No stage of a plan below the limit may have this load: m passes of it alone take the time, and
// by 1F1B with m > p + 1 the step takes (m - p - 1) loads and twice the work (docs/search.md, 1).
void PlanSolver::set_limits(double limit_s) {
  limit_s_ = limit_s;
  const auto m = static_cast<double>(rounds_);
  load_limit_s_ = limit_s / m;
  if (!zero_bubble_ && rounds_ > stages_ + 1) {
    double sends_s = 0.0;
    for (int k = 1; k < stages_; ++k) sends_s += 2.0 * frame_->message_s[at(k)];
    const double work = 2.0 * (sums_.total_work_s() + sends_s);
    load_limit_s_ = std::min(load_limit_s_, (limit_s - work) / (m - stages_ - 1.0));
  }
  load_limit_s_ *= kLoose;
}

double PlanSolver::timed(const Partition& partition, double* max_load_s) const {
  PipelineClock clock{};
  for (int stage = stages_ - 1; stage >= 0; --stage) {
    const StagePass pass =
        sums_.pass(StageRecompute::of(partition.variants[at(stage)]), partition.cuts[at(stage)],
                   partition.cuts[at(stage) + 1], stage);
    clock = joined(clock, pass, rounds_, stages_ - 1 - stage, stage, zero_bubble_);
  }
  *max_load_s = clock.load_s;
  return clock.time_s() + row_->exchange_s;
}

std::int32_t PlanSolver::fastest(int i, int j, int stage, double* load_s) {
  const std::int32_t code = recompute(i, j, stage);
  if (code < 0) return code;
  const StagePass pass = sums_.pass(StageRecompute::of(code), i, j, stage);
  *load_s = pass.forward_s + pass.backward_s;
  return code;
}

// Stages as long as a load allows, from the last to the first. More layers take longer and need
// more, so that the border is found by steps from the length of the stage before. `next_s` is the
// least load with which some stage would be longer.
bool PlanSolver::pack(double load_s, PlacedPlan* plan, double* next_s) {
  Partition& p = plan->partition;
  p.cuts.assign(at(stages_) + 1, 0);
  p.variants.assign(at(stages_), 0);
  *next_s = kInfinite;
  int j = space_->layers;
  int length = 1;
  for (int stage = stages_ - 1; stage >= 0; --stage) {
    p.cuts[at(stage) + 1] = j;
    double own_s = 0.0;
    const auto variant = [&](int i) {
      const int v = fastest(i, j, stage, &own_s);
      if (v >= 0 && own_s > load_s) *next_s = std::min(*next_s, own_s);
      return v >= 0 && own_s <= load_s ? v : -1;
    };
    int i = stage == 0 ? 0 : std::max(stage, j - length);
    int chosen = variant(i);
    while (chosen < 0 && i + 1 < j && stage > 0) chosen = variant(++i);
    if (chosen < 0) return false;
    for (int longer = -1; i > stage && (longer = variant(i - 1)) >= 0;) {
      --i;
      chosen = longer;
    }
    while (i < j && space_->may_cut[at(i)] == 0) ++i;
    if (i == j) return false;
    if (space_->layers != j && length != j - i) chosen = variant(i);
    length = j - i;
    if (chosen < 0) return false;
    p.cuts[at(stage)] = i;
    p.variants[at(stage)] = chosen;
    j = i;
  }
  return j == 0;
}

// A plan to beat: that of the least load with which everything can be placed. Gives a load that
// some stage of any plan below the limit has at least; infinite where there is none.
double PlanSolver::quick_plan(double load_s, PlacedPlan* best) {
  const double known = std::max(load_s, sums_.total_work_s() / stages_);
  // Packing as much as fits finds the least load only where a longer stage takes longer, and may
  // end anywhere.
  const bool sure = space_->chain && space_->free_cuts;
  double low = known;
  double high = kInfinite;
  double load = low * kLoose;
  PlacedPlan plan{kInfinite, 0.0, best->layout, {}};
  for (int step = 0; step < 40 && low < high * (1.0 - 1e-12); ++step) {
    if (low > load_limit_s_) return sure ? kInfinite : known;
    load = std::min(load, load_limit_s_);
    double next_s = 0.0;
    if (pack(load, &plan, &next_s)) {
      plan.time_s = timed(plan.partition, &high);
      if (plan.time_s < best->time_s) *best = plan;
    } else {
      if (next_s > load_limit_s_) return sure ? kInfinite : known;
      low = std::max(low, next_s);
    }
    load = high == kInfinite ? std::max(low, load * 1.02) : 0.5 * (low + high);
  }
  return sure ? low : known;
}

// How far the first k stages reach, and how far back the last: each as long as the limit on loads
// allows. Whether stages can meet at all.
bool PlanSolver::find_windows() {
  const int end = space_->layers;
  const auto fits = [&](int i, int j, int stage) {
    double load = 0.0;
    return fastest(i, j, stage, &load) >= 0 && load <= load_limit_s_;
  };
  latest_.assign(at(stages_) + 1, 0);
  earliest_.assign(at(stages_) + 1, end);
  if (!space_->chain) {  // a longer stage may wait for fewer messages
    for (int k = 0; k <= stages_; ++k) {
      latest_[at(k)] = k == 0 ? 0 : end - (stages_ - k);
      earliest_[at(k)] = k == stages_ ? end : k;
    }
    return true;
  }
  for (int k = 0; k < stages_; ++k) {
    const int i = latest_[at(k)];
    const int last = end - (stages_ - 1 - k);
    int j = k > 0 ? std::min(last, i + i - latest_[at(k) - 1]) : i + 1;
    if (j > i + 1 && !fits(i, j, k)) {
      while (j > i + 1 && !fits(i, j - 1, k)) --j;
      j = std::max(i + 1, j - 1);
    } else {
      while (j < last && fits(i, j + 1, k)) ++j;
    }
    latest_[at(k) + 1] = j;
  }
  for (int k = stages_ - 1; k >= 0; --k) {
    const int j = earliest_[at(k) + 1];
    int i = k + 1 < stages_ ? std::max(k, j - (earliest_[at(k) + 2] - j)) : j - 1;
    if (i < j - 1 && !fits(i, j, k)) {
      while (i < j - 1 && !fits(i + 1, j, k)) ++i;
      i = std::min(j - 1, i + 1);
    } else {
      while (i > k && fits(i - 1, j, k)) --i;
    }
    earliest_[at(k)] = i;
  }
  return latest_[at(stages_)] == end && earliest_[0] == 0;
}

void PlanSolver::search(PlacedPlan* best) {
  const int end = space_->layers;
  if (!find_windows()) return;
  tails_.assign(1, {PipelineClock{}, -1, -1, -1});
  starts_.assign(at(end) + 1, 0);
  ends_.assign(at(end) + 1, 0);
  ends_[at(end)] = 1;
  // Of what lies before a cut at least this is still to come: passes both ways by 1F1B, forward
  // ones by the zero-bubble schedule.
  double sends_s = 0.0;
  for (int k = 1; k < stages_; ++k) sends_s += 2.0 * frame_->message_s[at(k)];
  for (int s = 1; s <= stages_; ++s) {
    const int stage = stages_ - s;
    if (stage + 1 < stages_) sends_s -= 2.0 * frame_->message_s[at(stage) + 1];
    own_starts_.assign(at(end) + 1, 0);
    own_ends_.assign(at(end) + 1, 0);
    bool any = false;
    for (int i = latest_[at(stage)]; i >= std::max(stage, static_cast<int>(earliest_[at(stage)]));
         --i) {
      if (space_->may_cut[at(i)] == 0 || (stage == 0 && i > 0)) continue;
      const std::size_t mine = tails_.size();
      double before_s = sums_.forward_s(0, i);
      if (!zero_bubble_) {
        before_s = sums_.work_s(0, i) + std::max(0.0, sends_s - 2.0 * frame_->message_s[at(stage)]);
      }
      extend(i, s, before_s, mine);
      own_starts_[at(i)] = static_cast<std::int32_t>(mine);
      own_ends_[at(i)] = static_cast<std::int32_t>(tails_.size());
      any = any || tails_.size() > mine;
    }
    if (!any) return;
    starts_.swap(own_starts_);
    ends_.swap(own_ends_);
  }
  for (std::int32_t t = starts_[0]; t < ends_[0]; ++t) {
    const double taken = tails_[at(t)].clock.time_s() + row_->exchange_s;
    if (taken < best->time_s) {
      best->time_s = taken;
      finish(at(t), best);
    }
  }
}

// What the stage i..j works and waits at least by 1F1B, with `after` stages after it: the trip
// through those is at least their work (see `joined`).
double PlanSolver::least_with(int i, int j, int after, double work) const noexcept {
  const auto m = static_cast<double>(rounds_);
  const double trip = sums_.work_s(j, space_->layers);
  if (after < rounds_) return (m - after) * work + 2.0 * trip;
  return m * work + trip - (m - 1.0) * sums_.forward_s(i, j);
}

void PlanSolver::extend(int i, int s, double before_s, std::size_t mine) {
  const int stage = stages_ - s;
  const int first = std::max(i + 1, static_cast<int>(earliest_[at(stage) + 1]));
  const int last = std::min(space_->layers - (s - 1),
                            s == 1 ? space_->layers : static_cast<int>(latest_[at(stage) + 1]));
  for (int j = first; j <= last; ++j) {
    const double work = sums_.work_s(i, j);
    if (work > load_limit_s_) return;
    if (!zero_bubble_ && least_with(i, j, s - 1, work) + before_s > limit_s_ * kLoose) {
      if (s - 1 >= rounds_ || rounds_ - (s - 1) >= 2) return;  // it only grows with the stage
      continue;
    }
    if (starts_[at(j)] == ends_[at(j)]) continue;
    const std::int32_t code = recompute(i, j, stage);
    if (code < 0) {
      if (sums_.resident_bytes(i, j) > room_bytes_) return;
      continue;
    }
    const StagePass pass = sums_.pass(StageRecompute::of(code), i, j, stage);
    if (pass.forward_s + pass.backward_s > load_limit_s_) continue;
    for (std::int32_t t = starts_[at(j)]; t < ends_[at(j)]; ++t) {
      const Tail whole{joined(tails_[at(t)].clock, pass, rounds_, s - 1, stage, zero_bubble_), code,
                       j, t};
      if ((whole.clock.time_s() + before_s) * (1.0 - 1e-12) < limit_s_) keep(mine, whole);
    }
  }
}

// The clock is a lower bound of the schedule played, and nearly always equal to it. Where it is
// not, every partition that it does not rule out is played, up to a number of stages looked at.
void PlanSolver::walk_all(PlacedPlan* best) {
  constexpr std::int64_t kMostStages = 512;
  set_limits(best->time_s - row_->exchange_s);
  if (!find_windows()) return;
  walked_ = best->partition;
  steps_left_ = kMostStages;
  walk(stages_ - 1, space_->layers, PipelineClock{}, best);
  best->proven = steps_left_ > 0;
}

void PlanSolver::walk(int stage, int j, const PipelineClock& rest, PlacedPlan* best) {
  double sends_s = 0.0;
  for (int k = 1; k < stage; ++k) sends_s += 2.0 * frame_->message_s[at(k)];
  const int low = stage == 0 ? 0 : std::max(stage, static_cast<int>(earliest_[at(stage)]));
  const int high = stage == 0 ? 0 : std::min(j - 1, static_cast<int>(latest_[at(stage)]));
  for (int i = high; i >= low && steps_left_ > 0; --i) {
    if (space_->may_cut[at(i)] == 0) continue;
    --steps_left_;
    if (sums_.work_s(i, j) > load_limit_s_) return;
    const std::int32_t code = recompute(i, j, stage);
    if (code < 0) continue;
    const StagePass pass = sums_.pass(StageRecompute::of(code), i, j, stage);
    if (pass.forward_s + pass.backward_s > load_limit_s_) continue;
    const PipelineClock clock =
        joined(rest, pass, rounds_, stages_ - 1 - stage, stage, zero_bubble_);
    const double before_s = zero_bubble_ ? sums_.forward_s(0, i) : sums_.work_s(0, i) + sends_s;
    if ((clock.time_s() + before_s) * (1.0 - 1e-12) >= limit_s_) continue;
    walked_.cuts[at(stage)] = i;
    walked_.variants[at(stage)] = code;
    if (stage > 0) {
      walk(stage - 1, i, clock, best);
      continue;
    }
    const double time_s = played_s(walked_);
    if (!(time_s < best->time_s)) continue;
    best->time_s = time_s;
    best->partition = walked_;
    set_limits(time_s - row_->exchange_s);
  }
}

double PlanSolver::played_s(const Partition& partition) {
  const Played played = play(partition);
  return played.step_s + played.tail_s + row_->exchange_s;
}

void PlanSolver::keep(std::size_t mine, const Tail& tail) {
  const auto no_worse = [&](const PipelineClock& a, const PipelineClock& b) {
    return a.bound_s <= b.bound_s + nothing_s_ && a.trip_s <= b.trip_s + nothing_s_ &&
           a.tail_s <= b.tail_s + nothing_s_ && a.sent_s <= b.sent_s + nothing_s_;
  };
  for (std::size_t t = mine; t < tails_.size(); ++t) {
    if (no_worse(tails_[t].clock, tail.clock)) return;
  }
  std::size_t kept = mine;
  for (std::size_t t = mine; t < tails_.size(); ++t) {
    if (!no_worse(tail.clock, tails_[t].clock)) tails_[kept++] = tails_[t];
  }
  tails_.resize(kept);
  tails_.push_back(tail);
}

void PlanSolver::finish(std::size_t from, PlacedPlan* best) const {
  best->partition.cuts.assign(1, 0);
  best->partition.variants.clear();
  for (std::size_t t = from; tails_[t].next_tail >= 0; t = at(tails_[t].next_tail)) {
    best->partition.variants.push_back(tails_[t].variant);
    best->partition.cuts.push_back(tails_[t].next_cut);
  }
}

}  // namespace phaze
