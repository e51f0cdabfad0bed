// Layers dealt to the chunks of a schedule, and the schedule played: what there is for schedules
// whose partitions are not searched, and what a step takes by any partition.
#include <algorithm>
#include <limits>
#include <numeric>

#include "placement/plan_solver.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

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
  const PipelineStatus possible =
      check_schedule(schedule_of(l), stages_, l.vpp, rounds_);
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
  return space_->enters(i, j) *
         enter_each_[at(stage) * at(row_->layout.vpp) + at(chunk)];
}

double PlanSolver::leaves_s(int stage, int chunk, int i, int j) const noexcept {
  if (free_.messages) return 0.0;
  return space_->leaves(i, j) *
         leave_each_[at(stage) * at(row_->layout.vpp) + at(chunk)];
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
  return {stages_, row_->layout.vpp, rounds_, forward_s_, backward_s_, weight_grad_s_,
          1.0};
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

}  // namespace phaze
