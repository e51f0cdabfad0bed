// The best partition of a layout: which layers form a stage, and what each stage recomputes.
#include "plan/plan_solver.hpp"

#include <algorithm>
#include <numeric>

#include "base/numbers.hpp"

namespace phaze {

namespace {

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

namespace {

// Ways to choose `some` of `all`, as far as they are few.
double choices(int all, int some) noexcept {
  double count = 1.0;
  for (int k = 1; k <= some && count <= kMaxDeals; ++k) count = count * (all - some + k) / k;
  return count;
}

}  // namespace

PlanStatus PlanSolver::check_deal() const {
  const LayoutRecord& l = row_->layout;
  const int ends =
      (space_->first_block > 0 ? 1 : 0) + (space_->layers > space_->last_block ? 1 : 0);
  if (places_of(l) > std::max(1, space_->blocks + ends)) {
    return PlanStatus::kTooManyStages;
  }
  if (stages_ == 1) {  // chunks of one device lie in a row, or folded in two
    const bool row = schedule_of(l) == PipelineSchedule::kInterleaved;
    return row || l.vpp <= 2 ? PlanStatus::kOk : PlanStatus::kBadSchedule;
  }
  const PipelineStatus possible = check_schedule(schedule_of(l), stages_, l.vpp, rounds_);
  if (possible == PipelineStatus::kFewMicroBatches) return PlanStatus::kFewRounds;
  return possible == PipelineStatus::kOk ? PlanStatus::kOk : PlanStatus::kBadSchedule;
}

// The cuts of chunks with `base_` layers, one more where `extra_` says so, of those that count.
bool PlanSolver::cut(bool count_first, int base, Partition* partition) const {
  const std::size_t count = extra_.size();
  partition->cuts.assign(count + 1, 0);
  partition->cuts[count] = space_->layers;
  int position = count_first ? 0 : space_->first_block;
  for (std::size_t c = 0; c + 1 < count; ++c) {
    position += base + extra_[c];
    partition->cuts[c + 1] = position;
    if (position >= space_->layers || space_->may_cut[at(position)] == 0) return false;
  }
  return position < space_->layers;
}

// Layers dealt out one by one, each to where it comes next if all were to be even.
PlanStatus PlanSolver::deal_evenly(Partition* partition) {
  const PlanStatus status = check_deal();
  if (status != PlanStatus::kOk) return status;
  const int count = places_of(row_->layout);
  // Ends count as layers where there would be too few blocks otherwise.
  const bool ends = space_->blocks < count;
  const int total = ends ? space_->layers : std::max(space_->blocks, 1);
  extra_.assign(at(count), 0);
  for (int c = 0; c < count; ++c) {
    const auto upto = [&](std::int64_t k) { return static_cast<int>(k * total / count); };
    extra_[at(c)] = upto(c + 1) - upto(c) - total / count;
  }
  return cut(ends, total / count, partition) ? PlanStatus::kOk : PlanStatus::kBrokenTie;
}

PlanStatus PlanSolver::even(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times,
                            std::int32_t variant, double room_bytes, Partition* partition) {
  start(space, row, times);
  const PlanStatus status = deal_evenly(partition);
  if (status != PlanStatus::kOk) return status;
  if (variant >= 0) {
    const StageRecompute way = StageRecompute::of(variant);
    if (std::max(way.rest, way.more) >= sums_.variants()) return PlanStatus::kBadStrategy;
    partition->variants.assign(at(stages_), variant);
  } else {
    choose_recompute(room_bytes, true, partition);
  }
  return PlanStatus::kOk;
}

double PlanSolver::message_between(int from, int to) const noexcept {
  if (from == to) return 0.0;
  if (from - to == 1 || to - from == 1) return frame_->message_s[at(std::max(from, to))];
  return row_->wrap_s;
}

void PlanSolver::find_places() {
  const int chunks = row_->layout.vpp;
  const std::size_t count = at(stages_) * at(chunks);
  places_.resize(count);
  enter_each_.resize(count);
  leave_each_.resize(count);
  if (chunks == 1) {
    for (int stage = 0; stage < stages_; ++stage) {
      const std::size_t own = at(stage);
      places_[own] = stage;
      enter_each_[own] = stage == 0 ? 0.0 : frame_->message_s[own];
      leave_each_[own] = stage + 1 == stages_ ? 0.0 : frame_->message_s[own + 1];
    }
    return;
  }
  const auto message = [&](int from, int to) {  // shapes that no schedule has are checked later
    return from < 0 || from >= stages_ ? 0.0 : message_between(from, to);
  };
  for (int stage = 0; stage < stages_; ++stage) {
    for (int c = 0; c < chunks; ++c) {
      const std::size_t own = at(stage) * at(chunks) + at(c);
      const int place =
          static_cast<int>(chunk_of(schedule_of(row_->layout), stages_, chunks, stage, c));
      const bool last = place + 1 == places_of(row_->layout);
      places_[own] = place;
      enter_each_[own] = place == 0 ? 0.0 : message(stage_of(place - 1, c), stage);
      leave_each_[own] = last ? 0.0 : message(stage_of(place + 1, c), stage);
    }
  }
}

double PlanSolver::enters_s(int stage, int chunk, int i, int j) const noexcept {
  if (free_.messages) return 0.0;
  return space_->enters(i, j) * enter_each_[at(stage) * at(row_->layout.vpp) + at(chunk)];
}

double PlanSolver::leaves_s(int stage, int chunk, int i, int j) const noexcept {
  if (free_.messages) return 0.0;
  return space_->leaves(i, j) * leave_each_[at(stage) * at(row_->layout.vpp) + at(chunk)];
}

double PlanSolver::take_passes(const Partition& partition) {
  const int chunks = row_->layout.vpp;
  const std::size_t count = at(stages_) * at(chunks);
  forward_s_.resize(count);
  backward_s_.resize(count);
  weight_grad_s_.resize(count);
  double longest_tail_s = 0.0;
  double before_s = 0.0;
  for (int stage = 0; stage < stages_; ++stage) {
    const StageRecompute way = StageRecompute::of(partition.variants[at(stage)]);
    double sync = 0.0;
    double step = 0.0;
    double own_s = 0.0;
    for (int c = 0; c < chunks; ++c) {
      const std::size_t chunk = at(chain_of(stage, c));
      const int i = partition.cuts[chunk];
      const int j = partition.cuts[chunk + 1];
      const std::size_t own = at(stage) * at(chunks) + at(c);
      forward_s_[own] = passes_->forward_s(i, j) + enters_s(stage, c, i, j);
      backward_s_[own] = passes_->backward_s(way, i, j) + leaves_s(stage, c, i, j);
      weight_grad_s_[own] = std::min(backward_s_[own], passes_->weight_grad_s(i, j));
      sync += free_.data ? 0.0 : sums_.sync_s(i, j);
      step += free_.data ? sums_.own_step_s(i, j) : sums_.step_s(i, j);
      own_s += passes_->plain_s(i, j);
    }
    const double bucket_s = free_.data ? 0.0 : frame_->bucket_s;
    const double tail_s = tail_after(sync, own_s / chunks, bucket_s, step, before_s / chunks,
                                     space_->training.contention);
    longest_tail_s = std::max(longest_tail_s, tail_s);
    // Passes that go both ways end on all devices at about the same time.
    if (!both_ways(row_->layout)) before_s += own_s;
  }
  return longest_tail_s;
}

PipelineLoads PlanSolver::loads() const noexcept {
  return {stages_, row_->layout.vpp, rounds_, forward_s_, backward_s_, weight_grad_s_, 1.0};
}

double PlanSolver::step_s() {
  if (stages_ == 1) {
    const double pass = std::accumulate(forward_s_.begin(), forward_s_.end(), 0.0) +
                        std::accumulate(backward_s_.begin(), backward_s_.end(), 0.0);
    return static_cast<double>(rounds_) * pass;
  }
  const PipelineSchedule schedule = schedule_of(row_->layout);
  double step_s = 0.0;
  if (played_ != nullptr) key_.set(schedule, loads());
  if (played_ == nullptr || !played_->find(key_, &step_s)) {
    step_s = player_.step_s(schedule, loads());
    if (played_ != nullptr) played_->add(key_, step_s);
  }
  return step_s;
}

PlanSolver::Played PlanSolver::play(const Partition& partition) {
  const double tail_s = take_passes(partition);
  last_step_s_ = step_s();
  return {last_step_s_, tail_s};
}

PlanSolver::Played PlanSolver::play_free(const Partition& partition, const KindTimes& times,
                                         std::size_t level, bool free_messages) {
  if (free_passes_.size() <= level) free_passes_.resize(level + 1);
  FreePasses& own = free_passes_[level];
  if (own.times != times.forward_s) {
    own.sums.build(*space_, *row_, *frame_, times, true);
    own.times = times.forward_s;
  }
  passes_ = &own.sums;
  free_ = {true, free_messages};
  last_forward_s_.swap(forward_s_);
  last_backward_s_.swap(backward_s_);
  last_weight_grad_s_.swap(weight_grad_s_);
  const double tail_s = take_passes(partition);
  // What follows the last pass does not change the step before it.
  const bool same = forward_s_ == last_forward_s_ && backward_s_ == last_backward_s_ &&
                    weight_grad_s_ == last_weight_grad_s_;
  if (!same) last_step_s_ = step_s();
  return {last_step_s_, tail_s};
}

// Chunks that take a layer more: each time the stage with the least to do, and of its chunks the
// last that has none yet, since fewer layers in the first make the pipeline fill sooner.
void PlanSolver::spread(int base, int extras, bool count_first, bool count_last) {
  const int chunks = row_->layout.vpp;
  const auto work = [&](int kind) { return sums_.work_s(kind, kind + 1); };
  const double block = work(space_->first_block);
  std::vector<double>& load = forward_s_;  // scratch
  load.assign(at(stages_), chunks * base * block);
  const int last = stage_of(stages_ * chunks - 1);
  if (space_->first_block > 0) load[0] += work(0) - (count_first ? block : 0.0);
  if (space_->layers > space_->last_block) {
    load[at(last)] += work(space_->layers - 1) - (count_last ? block : 0.0);
  }
  std::fill(extra_.begin(), extra_.end(), 0);
  for (int k = 0; k < extras; ++k) {
    int chosen = -1;
    for (int stage = 0; stage < stages_; ++stage) {
      if (chosen >= 0 && !(load[at(stage)] < load[at(chosen)] * (1.0 - 1e-9))) continue;
      bool free = false;
      for (int c = 0; c < chunks; ++c) free = free || extra_[at(chain_of(stage, c))] == 0;
      if (free) chosen = stage;
    }
    for (int c = chunks - 1; c >= 0; --c) {
      std::int32_t& own = extra_[at(chain_of(chosen, c))];
      if (own != 0) continue;
      own = 1;
      break;
    }
    load[at(chosen)] += block;
  }
}

double PlanSolver::add_stage(const Partition& partition, int stage, StageRecompute way,
                             DealtBound* bound) const {
  double load = 0.0;
  double first = 0.0;
  for (int c = 0; c < row_->layout.vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    const double own = sums_.forward_s(i, j) + sums_.backward_s(way, i, j) +
                       enters_s(stage, c, i, j) + leaves_s(stage, c, i, j);
    if (c == 0) first = own;
    load += own;
  }
  bound->least_s = std::max(bound->least_s, bound->before_s + rounds_of(row_->layout) * load);
  if (schedule_of(row_->layout) == PipelineSchedule::kInterleaved) bound->before_s += first;
  return bound->least_s;
}

// Takes the deal where it is faster than the best, and at most as long as it may be.
void PlanSolver::offer_deal(double room_bytes, double below_s, Partition* partition,
                            PlacedPlan* best) {
  const double limit = (std::min(below_s, best->time_s) - row_->exchange_s) * (1.0 + 1e-12);
  DealtBound bound;
  for (int stage = 0; stage < stages_; ++stage) {
    if (add_stage(*partition, stage, StageRecompute{}, &bound) > limit) return;
  }
  if (!choose_dealt(room_bytes, limit, partition)) return;
  const double tail_s = take_passes(*partition);
  const bool chained = schedule_of(row_->layout) == PipelineSchedule::kInterleaved && stages_ > 1;
  if (chained) {
    const double most_s = std::min(below_s, best->time_s) - tail_s - row_->exchange_s;
    chains_.select(schedule_of(row_->layout), stages_, row_->layout.vpp, rounds_);
    if (chains_.above(forward_s_, backward_s_, most_s)) return;
  }
  const double time_s = step_s() + tail_s + row_->exchange_s;
  if (!(time_s <= below_s) || !(time_s < best->time_s)) {
    if (chained) chains_.learn(loads(), &player_);
    return;
  }
  best->time_s = time_s;
  best->partition = *partition;
}

// The best of deals in which chunks differ by a layer at most, where the embedding and the head
// count as layers or do not. All deals are tried where they are few. Of many, the best have their
// longer chunks mostly one after another, from the last on with the first.
PlacedPlan PlanSolver::best_dealt(double room_bytes, double below_s) {
  PlacedPlan best{kInfinite, 0.0, 0, {}};
  if (check_deal() != PlanStatus::kOk) return best;
  const int count = places_of(row_->layout);
  Partition partition;
  bool all = true;
  dealt_.resize(std::max(dealt_.size(), at(stages_)));
  for (auto& dealt : dealt_) dealt.clear();
  const auto offer = [&](bool count_first, int base) {
    if (cut(count_first, base, &partition)) offer_deal(room_bytes, below_s, &partition, &best);
  };
  for (int ends = 0; ends < 4; ++ends) {
    const bool first = (ends & 1) != 0;
    const bool last = (ends & 2) != 0;
    if ((first && space_->first_block == 0) || (last && space_->layers == space_->last_block)) {
      continue;
    }
    const int total = space_->blocks + first + last;
    if (total < count) continue;
    const int base = total / count;
    const int extras = total % count;
    extra_.assign(at(count), 0);
    if (!both_ways(row_->layout)) spread(base, extras, first, last);
    if (extras == 0 || !both_ways(row_->layout)) offer(first, base);
    if (extras == 0) continue;
    if (choices(count, extras) <= kMaxDeals) {
      extra_.assign(at(count), 0);
      std::fill(extra_.begin(), extra_.begin() + extras, 1);
      do {
        offer(first, base);
      } while (std::prev_permutation(extra_.begin(), extra_.end()));
      continue;
    }
    for (int c = 0; c < count; ++c) {
      const auto upto = [&](std::int64_t k) { return static_cast<int>(k * total / count); };
      extra_[at(c)] = upto(c + 1) - upto(c) - base;
    }
    offer(first, base);
    for (int begin = 0; begin < count && count <= kMaxRunChunks; ++begin) {
      for (int c = 0; c < count; ++c) {
        extra_[at((begin + c) % count)] = c < extras ? 1 : 0;
      }
      offer(first, base);
    }
    all = false;
  }
  best.proven = all;
  if (best.time_s == kInfinite) return best;
  for (int stage = 0; stage < stages_; ++stage) {
    const StageRecompute way = StageRecompute::of(best.partition.variants[at(stage)]);
    best.memory_bytes = std::max(best.memory_bytes, stage_bytes(best.partition, stage, way));
  }
  return best;
}

std::int32_t PlanSolver::recompute(int i, int j, int stage) {
  std::int32_t* known = nullptr;
  std::int64_t key = 0;
  if (space_->alike) {  // stages with as many blocks and the same ends are alike
    const std::size_t ends = (i < space_->first_block ? 2 : 0) + (j == space_->layers ? 1 : 0);
    const std::size_t own =
        (at(stage) * at(space_->blocks + 1) + at(sums_.blocks(i, j))) * 4 + ends;
    if (own >= known_.size()) known_.resize(at(stages_) * at(space_->blocks + 1) * 4, {0, -1});
    if (known_[own].epoch == epoch_) return known_[own].code;
    known_[own].epoch = epoch_;
    known = &known_[own].code;
    key = static_cast<std::int64_t>(own);
  }
  const auto bytes = [&](StageRecompute r) { return sums_.bytes(r, i, j, stage); };
  const auto make = [&] {
    return fitting_ways(sums_.variants(), sums_.first_is_fastest(), space_->some_blocks,
                        space_->alike, sums_.blocks(i, j), room_bytes_, bytes);
  };
  const auto seconds = [&](StageRecompute r) { return sums_.backward_s(r, i, j); };
  if (known == nullptr) return fastest_way(make(), sums_.first_is_fastest(), seconds);
  const FittingWays& ways =
      ways_.of({row_index(), 2 * key, room_bytes_}, sums_.first_is_fastest(), make);
  *known = fastest_way(ways, sums_.first_is_fastest(), seconds);
  return *known;
}

double PlanSolver::stash_bytes(const Partition& partition, int stage, StageRecompute way) const {
  const auto chunks = static_cast<std::size_t>(row_->layout.vpp);
  double sum = 0.0;
  double least = kInfinite;
  double most = 0.0;
  own_bytes_.resize(chunks);
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, static_cast<int>(c)));
    const double bytes = sums_.stash_bytes(way, partition.cuts[chunk], partition.cuts[chunk + 1]);
    own_bytes_[c] = bytes;
    sum += bytes;
    least = std::min(least, bytes);
    most = std::max(most, bytes);
  }
  if (chunks == 1 || least == most || stages_ == 1) return sum;
  const std::vector<double>& held = (*held_)[at(stage)];
  double peak = 0.0;
  for (std::size_t k = 0; k < held.size(); k += chunks) {
    double now = 0.0;
    for (std::size_t c = 0; c < chunks; ++c) now += held[k + c] * own_bytes_[c];
    peak = std::max(peak, now);
  }
  return std::max(sum, peak / sums_.in_flight(stage));
}

double PlanSolver::stage_bytes(const Partition& partition, int stage, StageRecompute way) const {
  const int chunks = row_->layout.vpp;
  if (chunks == 1) {
    return sums_.bytes(way, partition.cuts[at(stage)], partition.cuts[at(stage) + 1], stage);
  }
  double resident = 0.0;
  double gather = 0.0;
  MovingBytes moving{0.0, 0.0, 0.0, space_->buffer_bytes(*row_)};
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    resident += sums_.resident_bytes(i, j);
    gather = std::max(gather, sums_.gather_bytes(i, j));
    moving.once += sums_.once_bytes(i, j);
    moving.live = std::max(moving.live, sums_.live_bytes(way, i, j));
  }
  moving.buffers += gather;
  moving.stash = stash_bytes(partition, stage, way);
  return resident + sums_.peak(moving, late_gradients(partition, stage, way), stage).total;
}

// Of several chunks, the first of the model is the last to run backward.
LateGradients PlanSolver::late_gradients(const Partition& partition, int stage,
                                         StageRecompute way) const {
  LateGradients found{0.0, 0.0, 0.0, 0.0};
  std::size_t lowest = at(space_->layers);
  for (int c = 0; c < row_->layout.vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const LateGradients own =
        sums_.late_gradients(way, partition.cuts[chunk], partition.cuts[chunk + 1]);
    found.all += own.all;
    found.last += own.last;
    if (chunk >= lowest) continue;
    lowest = chunk;
    found.first = own.first;
    found.first_stash = own.first_stash;
  }
  return found;
}

std::int32_t PlanSolver::recompute_chunks(const Partition& partition, int stage,
                                          double room_bytes) const {
  return fastest_chunks(ways_of_chunks(partition, stage, room_bytes), partition, stage);
}

FittingWays PlanSolver::ways_of_chunks(const Partition& partition, int stage,
                                       double room_bytes) const {
  int most = 0;
  int least = space_->layers;
  for (int c = 0; c < row_->layout.vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int own = sums_.blocks(partition.cuts[chunk], partition.cuts[chunk + 1]);
    most = std::max(most, own);
    least = std::min(least, own);
  }
  return fitting_ways(sums_.variants(), sums_.first_is_fastest(), space_->some_blocks,
                      space_->alike && least == most, most, room_bytes * kFits,
                      [&](StageRecompute r) { return stage_bytes(partition, stage, r); });
}

std::int32_t PlanSolver::fastest_chunks(const FittingWays& ways, const Partition& partition,
                                        int stage) const {
  return fastest_way(ways, sums_.first_is_fastest(), [&](StageRecompute r) {
    double sum = 0.0;
    for (int c = 0; c < row_->layout.vpp; ++c) {
      const std::size_t chunk = at(chain_of(stage, c));
      sum += sums_.backward_s(r, partition.cuts[chunk], partition.cuts[chunk + 1]);
    }
    return sum;
  });
}

bool PlanSolver::choose_recompute(double room_bytes, bool any, Partition* partition) const {
  partition->variants.assign(at(stages_), 0);
  for (int stage = 0; stage < stages_; ++stage) {
    std::int32_t code = recompute_chunks(*partition, stage, room_bytes);
    if (code < 0) {
      if (!any) return false;
      const auto bytes = [&](int v) { return stage_bytes(*partition, stage, {v, v, 0}); };
      code = 0;  // none fits: the leanest
      for (int v = 1; v < sums_.variants(); ++v) {
        if (bytes(v) < bytes(code)) code = v;
      }
    }
    partition->variants[at(stage)] = code;
  }
  return true;
}

// Stages of a deal are alike where their chunks have as many layers each and the same ends.
std::int32_t PlanSolver::recompute_dealt(const Partition& partition, int stage, double room_bytes) {
  const int chunks = row_->layout.vpp;
  if (!space_->alike || chunks > 22) return recompute_chunks(partition, stage, room_bytes);
  int least = space_->layers;
  std::int64_t ends = 0;
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    least = std::min(least, sums_.blocks(i, j));
    if (i < space_->first_block) ends += 1;
    if (j == space_->layers) ends += 2;
  }
  std::int64_t longer = 0;  // by chunk, how many blocks more than the shortest has
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int own = sums_.blocks(partition.cuts[chunk], partition.cuts[chunk + 1]);
    longer = longer * 3 + (own - least);
  }
  const std::int64_t key = ((longer * 4096 + least) * 4 + ends) * 4096 + stage;
  std::vector<std::pair<std::int64_t, std::int32_t>>& dealt = dealt_[at(stage)];
  const auto known = std::find_if(dealt.begin(), dealt.end(),
                                  [&](const auto& entry) { return entry.first == key; });
  if (known != dealt.end()) return known->second;
  const FittingWays& ways =
      ways_.of({row_index(), 2 * key + 1, room_bytes}, sums_.first_is_fastest(),
               [&] { return ways_of_chunks(partition, stage, room_bytes); });
  const std::int32_t code = fastest_chunks(ways, partition, stage);
  dealt.emplace_back(key, code);
  return code;
}

bool PlanSolver::choose_dealt(double room_bytes, double limit_s, Partition* partition) {
  partition->variants.assign(at(stages_), 0);
  DealtBound bound;
  for (int stage = 0; stage < stages_; ++stage) {
    const std::int32_t code = recompute_dealt(*partition, stage, room_bytes);
    if (code < 0) return false;
    partition->variants[at(stage)] = code;
    if (add_stage(*partition, stage, StageRecompute::of(code), &bound) > limit_s) return false;
  }
  return true;
}

}  // namespace phaze
