#include "plan/plan_solver.hpp"

#include <algorithm>
#include <numeric>

#include "base/numbers.hpp"

namespace phaze {
namespace {

constexpr double kLoose = 1.0 + 1e-9;

// Up to kFew assignments are enumerated; up to kMost where the tree search does not apply, which
// takes at most kSearchedChunks chunks. Sums in another order differ by less than the fraction
// kTie; in the tree search, an assignment counts as faster only if it is by twice that.
constexpr int kFew = 128;
constexpr int kMost = 1024;
constexpr int kSearchedChunks = 16;
constexpr double kTie = 5e-13;

// The binomial coefficient C(all, some), or some value above kMost if it exceeds that.
double choices(int all, int some) noexcept {
  double count = 1.0;
  for (int k = 1; k <= some && count <= kMost; ++k) count = count * (all - some + k) / k;
  return count;
}

}  // namespace

// ---- a layout on a chip ----

void LayoutOnChip::lay(const PlanSpaceImpl& of, std::size_t number, PipelinePlayer* player) {
  space = &of;
  layout = &of.layouts[number];
  costs = &of.layout_costs[at(layout->costs)];
  stages = layout->record.pp;
  micro_batches = layout->record.micro_batches;
  zero_bubble = schedule() == PipelineSchedule::kZeroBubbleH1;
  player_ = player;
  held_.assign(at(stages), nullptr);
  find_messages();
}

void LayoutOnChip::start(const PlanSpaceImpl& of, std::size_t number, const KindTimes& times,
                         PipelinePlayer* player) {
  lay(of, number, player);
  sums.build(of, *layout, *costs, times);
}

// Finds the stages of messages and the places of chunks in the model, if the shape has changed.
void LayoutOnChip::find_places() {
  const int chunks = record().vpp;
  const Shape shape{record().schedule, stages, chunks};
  const std::size_t count = at(stages) * at(chunks);
  if (shape == shape_) return;
  places_.resize(count);
  enter_at_.resize(count);
  leave_at_.resize(count);
  // Shapes that no schedule has are checked later.
  const auto message = [&](int from, int to) {
    if (from < 0 || from >= stages || from == to) return 0;
    return from - to == 1 || to - from == 1 ? std::max(from, to) : kWrap;
  };
  for (int stage = 0; stage < stages; ++stage) {
    for (int c = 0; c < chunks; ++c) {
      const std::size_t own = at(stage) * at(chunks) + at(c);
      const int place = static_cast<int>(chunk_of(schedule(), stages, chunks, stage, c));
      const bool last = place + 1 == places_of(record());
      places_[own] = place;
      enter_at_[own] = place == 0 ? 0 : message(stage_of(place - 1, c), stage);
      leave_at_[own] = last ? 0 : message(stage_of(place + 1, c), stage);
    }
  }
  shape_ = shape;
}

void LayoutOnChip::find_messages() {
  find_places();
  enter_each_.resize(places_.size());
  leave_each_.resize(places_.size());
  for (std::size_t own = 0; own < places_.size(); ++own) {
    enter_each_[own] = enter_s(*layout, own);
    leave_each_[own] = leave_s(*layout, own);
  }
}

double LayoutOnChip::stash_bytes(const Partition& partition, int stage,
                                 StageRecompute recompute) const {
  own_bytes_.clear();
  for (int c = 0; c < record().vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    own_bytes_.push_back(
        sums.stash_bytes(recompute, partition.cuts[chunk], partition.cuts[chunk + 1]));
  }
  return stash_bytes(own_bytes_, stage, sums.in_flight(stage));
}

double LayoutOnChip::stash_bytes(std::span<const double> by_chunk, int stage,
                                 double in_flight) const {
  const std::size_t chunks = by_chunk.size();
  double sum = 0.0;
  double least = kInfinite;
  double most = 0.0;
  for (const double bytes : by_chunk) {
    sum += bytes;
    least = std::min(least, bytes);
    most = std::max(most, bytes);
  }
  if (chunks == 1 || least == most || stages == 1) return sum;
  if (held_[at(stage)] == nullptr) {
    held_[at(stage)] =
        &space->peaks_in_flight.of(schedule(), stages, record().vpp, micro_batches, stage, player_);
  }
  const std::vector<double>& held = *held_[at(stage)];
  double peak = 0.0;
  for (std::size_t k = 0; k < held.size(); k += chunks) {
    double now = 0.0;
    for (std::size_t c = 0; c < chunks; ++c) now += held[k + c] * by_chunk[c];
    peak = std::max(peak, now);
  }
  return std::max(sum, peak / in_flight);
}

double LayoutOnChip::stage_bytes(const Partition& partition, int stage,
                                 StageRecompute recompute) const {
  const int chunks = record().vpp;
  if (chunks == 1) {
    return sums.bytes(recompute, partition.cuts[at(stage)], partition.cuts[at(stage) + 1], stage);
  }
  double resident = 0.0;
  double gather = 0.0;
  MovingBytes moving{0.0, 0.0, 0.0, space->buffer_bytes(*layout)};
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    resident += sums.resident_bytes(i, j);
    gather = std::max(gather, sums.gather_bytes(i, j));
    moving.once += sums.once_bytes(i, j);
    moving.live = std::max(moving.live, sums.live_bytes(recompute, i, j));
  }
  moving.buffers += gather;
  moving.stash = stash_bytes(partition, stage, recompute);
  return resident + sums.peak(moving, late_gradients(partition, stage, recompute), stage).total;
}

// Of a stage's chunks, the one that comes first in the model is the last to run backward.
LateGradients LayoutOnChip::late_gradients(const Partition& partition, int stage,
                                           StageRecompute recompute) const {
  LateGradients found{0.0, 0.0, 0.0, 0.0};
  std::size_t lowest = at(space->layers);
  for (int c = 0; c < record().vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const LateGradients own =
        sums.late_gradients(recompute, partition.cuts[chunk], partition.cuts[chunk + 1]);
    found.all += own.all;
    found.last += own.last;
    if (chunk >= lowest) continue;
    lowest = chunk;
    found.first = own.first;
    found.first_stash = own.first_stash;
  }
  return found;
}

// ---- the step of a partition ----

double StepPlayer::take_passes(const Partition& partition) {
  const PlanSums& sums = on_.sums;
  const int chunks = on_.record().vpp;
  const std::size_t count = at(on_.stages) * at(chunks);
  forward_s_.resize(count);
  backward_s_.resize(count);
  weight_grad_s_.resize(count);
  double longest_tail_s = 0.0;
  double before_s = 0.0;
  for (int stage = 0; stage < on_.stages; ++stage) {
    const StageRecompute recompute = StageRecompute::of(partition.variants[at(stage)]);
    double sync = 0.0;
    double step = 0.0;
    double own_s = 0.0;
    for (int c = 0; c < chunks; ++c) {
      const std::size_t chunk = at(on_.chain_of(stage, c));
      const int i = partition.cuts[chunk];
      const int j = partition.cuts[chunk + 1];
      const std::size_t own = at(stage) * at(chunks) + at(c);
      forward_s_[own] = sums.forward_s(i, j) + on_.enters_s(stage, c, i, j);
      backward_s_[own] = sums.backward_s(recompute, i, j) + on_.leaves_s(stage, c, i, j);
      weight_grad_s_[own] = std::min(backward_s_[own], sums.weight_grad_s(i, j));
      sync += sums.sync_s(i, j);
      step += sums.step_s(i, j);
      own_s += sums.plain_s(i, j);
    }
    const double tail_s = tail_after(sync, own_s / chunks, on_.costs->bucket_s, step,
                                     before_s / chunks, on_.space->training.contention);
    longest_tail_s = std::max(longest_tail_s, tail_s);
    // Passes in both directions end on all devices at about the same time.
    if (!bidirectional(on_.record())) before_s += own_s;
  }
  return longest_tail_s;
}

PipelineLoads StepPlayer::loads() const noexcept {
  return {on_.stages, on_.record().vpp, on_.micro_batches, forward_s_, backward_s_, weight_grad_s_,
          1.0};
}

double StepPlayer::step_s() {
  if (on_.stages == 1) {
    const double pass = std::accumulate(forward_s_.begin(), forward_s_.end(), 0.0) +
                        std::accumulate(backward_s_.begin(), backward_s_.end(), 0.0);
    return static_cast<double>(on_.micro_batches) * pass;
  }
  const PipelineSchedule schedule = on_.schedule();
  if (played_ == nullptr || schedule == PipelineSchedule::kOneForwardOneBackward ||
      schedule == PipelineSchedule::kGpipe) {
    return player_.step_s(schedule, loads());  // as fast as a look-up
  }
  double step_s = 0.0;
  key_.set(schedule, loads());
  if (!played_->find(key_, &step_s)) {
    step_s = player_.step_s(schedule, loads());
    played_->add(key_, step_s);
  }
  return step_s;
}

StepPlayer::Played StepPlayer::play(const Partition& partition) {
  const double tail_s = take_passes(partition);
  return {step_s(), tail_s};
}

double StepPlayer::time_s(const Partition& partition) {
  const Played played = play(partition);
  return played.step_s + played.tail_s + on_.layout->exchange_s;
}

// ---- recomputation of a stage ----

void RecomputeChooser::restart(double usable_bytes) {
  usable_bytes_ = usable_bytes;
  ++epoch_;
  assigned_.resize(std::max(assigned_.size(), at(on_.stages)));
  for (auto& known : assigned_) known.clear();
}

std::int32_t RecomputeChooser::fastest_fitting(int i, int j, int stage) {
  std::int32_t* known = nullptr;
  std::int64_t key = 0;
  if (on_.space->equal_blocks) {  // stages with equal block counts and boundary layers are
                                  // interchangeable
    const std::size_t ends =
        (i < on_.space->first_block ? 2 : 0) + (j == on_.space->layers ? 1 : 0);
    const std::size_t own =
        (at(stage) * at(on_.space->blocks + 1) + at(on_.sums.blocks(i, j))) * 4 + ends;
    if (own >= known_.size())
      known_.resize(at(on_.stages) * at(on_.space->blocks + 1) * 4, {0, -1});
    if (known_[own].epoch == epoch_) return known_[own].code;
    known_[own].epoch = epoch_;
    known = &known_[own].code;
    key = static_cast<std::int64_t>(own);
  }
  const auto bytes = [&](StageRecompute r) { return on_.sums.bytes(r, i, j, stage); };
  const auto make = [&] {
    return feasible_recompute(on_.sums.variants(), on_.sums.first_is_fastest(),
                              on_.space->some_blocks, on_.space->equal_blocks,
                              on_.sums.blocks(i, j), usable_bytes_ * kFits, bytes);
  };
  const auto seconds = [&](StageRecompute r) { return on_.sums.backward_s(r, i, j); };
  if (known == nullptr) return fastest_recompute(make(), on_.sums.first_is_fastest(), seconds);
  const FeasibleRecompute& feasible =
      cache_.of({on_.number(), 2 * key, usable_bytes_ * kFits}, on_.sums.first_is_fastest(), make);
  *known = fastest_recompute(feasible, on_.sums.first_is_fastest(), seconds);
  return *known;
}

std::int32_t RecomputeChooser::fastest_of_chunks(const Partition& partition, int stage,
                                                 double usable_bytes) const {
  return fastest_chunks(feasible_of_chunks(partition, stage, usable_bytes), partition, stage);
}

FeasibleRecompute RecomputeChooser::feasible_of_chunks(const Partition& partition, int stage,
                                                       double usable_bytes) const {
  int most = 0;
  int least = on_.space->layers;
  for (int c = 0; c < on_.record().vpp; ++c) {
    const std::size_t chunk = at(on_.chain_of(stage, c));
    const int own = on_.sums.blocks(partition.cuts[chunk], partition.cuts[chunk + 1]);
    most = std::max(most, own);
    least = std::min(least, own);
  }
  return feasible_recompute(on_.sums.variants(), on_.sums.first_is_fastest(),
                            on_.space->some_blocks, on_.space->equal_blocks && least == most, most,
                            usable_bytes * kFits,
                            [&](StageRecompute r) { return on_.stage_bytes(partition, stage, r); });
}

std::int32_t RecomputeChooser::fastest_chunks(const FeasibleRecompute& feasible,
                                              const Partition& partition, int stage) const {
  return fastest_recompute(feasible, on_.sums.first_is_fastest(), [&](StageRecompute r) {
    double sum = 0.0;
    for (int c = 0; c < on_.record().vpp; ++c) {
      const std::size_t chunk = at(on_.chain_of(stage, c));
      sum += on_.sums.backward_s(r, partition.cuts[chunk], partition.cuts[chunk + 1]);
    }
    return sum;
  });
}

void RecomputeChooser::choose(double usable_bytes, Partition* partition) const {
  partition->variants.assign(at(on_.stages), 0);
  for (int stage = 0; stage < on_.stages; ++stage) {
    std::int32_t code = fastest_of_chunks(*partition, stage, usable_bytes);
    if (code < 0) {
      const auto bytes = [&](int v) { return on_.stage_bytes(*partition, stage, {v, v, 0}); };
      code = 0;  // none fits: the one with the least memory
      for (int v = 1; v < on_.sums.variants(); ++v) {
        if (bytes(v) < bytes(code)) code = v;
      }
    }
    partition->variants[at(stage)] = code;
  }
}

// Stages of an assignment are interchangeable if their chunks have the same contents. If all blocks
// are alike, these are the layer counts and the boundary layers.
std::optional<std::int64_t> RecomputeChooser::contents_of(const Partition& partition,
                                                          int stage) const {
  const PlanSpaceImpl& space = *on_.space;
  const int chunks = on_.record().vpp;
  if (!space.equal_blocks) {
    const std::int64_t lengths = space.layers + 1;
    const std::int64_t radix = (space.kinds + space.layers) * lengths;
    std::int64_t key = 0;
    for (int c = 0; c < chunks; ++c) {
      const std::size_t chunk = at(on_.chain_of(stage, c));
      const int i = partition.cuts[chunk];
      const int j = partition.cuts[chunk + 1];
      const bool alike = j <= space.same_kind_until[at(i)];
      if (key > (std::int64_t{1} << 48) / radix) return std::nullopt;
      key = key * radix + (alike ? space.order[at(i)] : space.kinds + i) * lengths + (j - i);
    }
    return key * 4096 + stage;
  }
  if (chunks > 22) return std::nullopt;
  int least = space.layers;
  std::int64_t ends = 0;
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(on_.chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    least = std::min(least, on_.sums.blocks(i, j));
    if (i < space.first_block) ends += 1;
    if (j == space.layers) ends += 2;
  }
  std::int64_t longer = 0;  // by chunk, how many blocks more than the shortest has
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(on_.chain_of(stage, c));
    const int own = on_.sums.blocks(partition.cuts[chunk], partition.cuts[chunk + 1]);
    longer = longer * 3 + (own - least);
  }
  return ((longer * 4096 + least) * 4 + ends) * 4096 + stage;
}

std::int32_t RecomputeChooser::fastest_of_assigned(const Partition& partition, int stage) {
  const std::optional<std::int64_t> contents = contents_of(partition, stage);
  if (!contents) return fastest_of_chunks(partition, stage, usable_bytes_);
  const std::int64_t key = *contents;
  std::vector<std::pair<std::int64_t, std::int32_t>>& known_of_stage = assigned_[at(stage)];
  const auto known = std::find_if(known_of_stage.begin(), known_of_stage.end(),
                                  [&](const auto& entry) { return entry.first == key; });
  if (known != known_of_stage.end()) return known->second;
  const FeasibleRecompute& feasible =
      cache_.of({on_.number(), 2 * key + 1, usable_bytes_}, on_.sums.first_is_fastest(),
                [&] { return feasible_of_chunks(partition, stage, usable_bytes_); });
  const std::int32_t code = fastest_chunks(feasible, partition, stage);
  known_of_stage.emplace_back(key, code);
  return code;
}

// ---- partitions, searched ----

void PartitionSearch::run(double usable_bytes, double below_s, double load_s, PlacedPlan* best) {
  usable_bytes_ = usable_bytes;
  nothing_s_ = 1e-13 * on_.sums.total_work_s();
  const double exchange_s = on_.layout->exchange_s;
  set_limits(below_s * (1.0 + 1e-12) - exchange_s);
  const double least_load_s = quick_plan(load_s, best);
  if (best->time_s < below_s) set_limits(best->time_s - exchange_s);
  if (least_load_s <= load_limit_s_) search(best);
  if (best->time_s == kInfinite) return;
  const double clock_s = best->time_s;
  best->time_s = step_.time_s(best->partition);  // the time that estimates of this plan give
  if (on_.stages > 1 && best->time_s > clock_s * (1.0 + 1e-12)) walk_all(clock_s, best);
}

// Seconds of the messages between the first `stages` stages, both directions.
double PartitionSearch::sends_s(int stages) const noexcept {
  double sum_s = 0.0;
  for (int k = 1; k < stages; ++k) sum_s += 2.0 * on_.layout->message_s[at(k)];
  return sum_s;
}

// Sets both limits: every stage of a plan below `limit_s_` has a load below `load_limit_s_`. A step
// takes at least m loads of any stage, and under 1F1B with m > p + 1 at least (m - p - 1) of them
// plus twice the work of a micro-batch on all p stages (docs/search.md, 1).
void PartitionSearch::set_limits(double limit_s) {
  limit_s_ = limit_s;
  const auto m = static_cast<double>(on_.micro_batches);
  load_limit_s_ = limit_s / m;
  if (!on_.zero_bubble && on_.micro_batches > on_.stages + 1) {
    const double messages_s = sends_s(on_.stages);
    const double work = 2.0 * (on_.sums.total_work_s() + messages_s);
    load_limit_s_ = std::min(load_limit_s_, (limit_s - work) / (m - on_.stages - 1.0));
  }
  load_limit_s_ *= kLoose;
}

double PartitionSearch::timed(const Partition& partition, double* max_load_s) const {
  PipelineClock clock{};
  for (int stage = on_.stages - 1; stage >= 0; --stage) {
    const StagePass pass =
        on_.sums.pass(StageRecompute::of(partition.variants[at(stage)]), partition.cuts[at(stage)],
                      partition.cuts[at(stage) + 1], stage);
    clock = prepend_stage(clock, pass, on_.micro_batches, on_.stages - 1 - stage, stage,
                          on_.zero_bubble);
  }
  *max_load_s = clock.load_s;
  return clock.time_s() + on_.layout->exchange_s;
}

std::int32_t PartitionSearch::fastest(int i, int j, int stage, double* load_s) {
  const std::int32_t code = recompute_.fastest_fitting(i, j, stage);
  if (code < 0) return code;
  const StagePass pass = on_.sums.pass(StageRecompute::of(code), i, j, stage);
  *load_s = pass.forward_s + pass.backward_s;
  return code;
}

// Makes stages as long as a load allows, from the last to the first. More layers take longer and
// need more memory, so the border is searched from the length of the previous stage. `next_s` is
// the least load with which some stage would be longer.
bool PartitionSearch::pack(double load_s, PlacedPlan* plan, double* next_s) {
  Partition& p = plan->partition;
  p.cuts.assign(at(on_.stages) + 1, 0);
  p.variants.assign(at(on_.stages), 0);
  *next_s = kInfinite;
  int j = on_.space->layers;
  int length = 1;
  for (int stage = on_.stages - 1; stage >= 0; --stage) {
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
    while (i < j && on_.space->may_cut[at(i)] == 0) ++i;
    if (i == j) return false;
    if (on_.space->layers != j && length != j - i) chosen = variant(i);
    length = j - i;
    if (chosen < 0) return false;
    p.cuts[at(stage)] = i;
    p.variants[at(stage)] = chosen;
    j = i;
  }
  return j == 0;
}

// Finds an initial incumbent: the plan of the least load with which everything can be placed.
// Returns a lower bound on the largest load of a stage in any plan below the limit; infinite if
// there is no such plan.
double PartitionSearch::quick_plan(double load_s, PlacedPlan* best) {
  const double known = std::max(load_s, on_.sums.total_work_s() / on_.stages);
  // Greedy packing finds the least load only if a longer stage always takes longer, and stages may
  // end anywhere.
  const bool sure = on_.space->chain && on_.space->free_cuts;
  double low = known;
  double high = kInfinite;
  double load = low * kLoose;
  PlacedPlan plan{kInfinite, 0.0, best->layout, {}};
  double next_s = 0.0;
  if (sure && load_limit_s_ < kInfinite && !pack(load_limit_s_, &plan, &next_s)) return kInfinite;
  for (int step = 0; step < 40 && low < high * (1.0 - 1e-12); ++step) {
    if (low > load_limit_s_) return sure ? kInfinite : known;
    load = std::min(load, load_limit_s_);
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

// Finds latest_ and earliest_, where stage k may begin: the stages before it, or from it on, are as
// long as the limit on loads allows. Returns whether both can span all layers.
bool PartitionSearch::find_windows() {
  const int end = on_.space->layers;
  const auto fits = [&](int i, int j, int stage) {
    double load = 0.0;
    return fastest(i, j, stage, &load) >= 0 && load <= load_limit_s_;
  };
  latest_.assign(at(on_.stages) + 1, 0);
  earliest_.assign(at(on_.stages) + 1, end);
  if (!on_.space->chain) {  // a longer stage may wait for fewer messages
    for (int k = 0; k <= on_.stages; ++k) {
      latest_[at(k)] = k == 0 ? 0 : end - (on_.stages - k);
      earliest_[at(k)] = k == on_.stages ? end : k;
    }
    return true;
  }
  for (int k = 0; k < on_.stages; ++k) {
    const int i = latest_[at(k)];
    const int last = end - (on_.stages - 1 - k);
    int j = k > 0 ? std::min(last, i + i - latest_[at(k) - 1]) : i + 1;
    if (j > i + 1 && !fits(i, j, k)) {
      while (j > i + 1 && !fits(i, j - 1, k)) --j;
      j = std::max(i + 1, j - 1);
    } else {
      while (j < last && fits(i, j + 1, k)) ++j;
    }
    latest_[at(k) + 1] = j;
  }
  for (int k = on_.stages - 1; k >= 0; --k) {
    const int j = earliest_[at(k) + 1];
    int i = k + 1 < on_.stages ? std::max(k, j - (earliest_[at(k) + 2] - j)) : j - 1;
    if (i < j - 1 && !fits(i, j, k)) {
      while (i < j - 1 && !fits(i + 1, j, k)) ++i;
      i = std::min(j - 1, i + 1);
    } else {
      while (i > k && fits(i - 1, j, k)) --i;
    }
    earliest_[at(k)] = i;
  }
  return latest_[at(on_.stages)] == end && earliest_[0] == 0;
}

void PartitionSearch::search(PlacedPlan* best) {
  const int end = on_.space->layers;
  if (!find_windows()) return;
  tails_.assign(1, {PipelineClock{}, -1, -1, -1});
  starts_.assign(at(end) + 1, 0);
  ends_.assign(at(end) + 1, 0);
  ends_[at(end)] = 1;
  // `before_s` is a lower bound on the work of the layers before a cut: both passes with 1F1B,
  // forward passes with the zero-bubble schedule; `messages_s` are the messages between them.
  double messages_s = sends_s(on_.stages);
  for (int s = 1; s <= on_.stages; ++s) {
    const int stage = on_.stages - s;
    if (stage + 1 < on_.stages) messages_s -= 2.0 * on_.layout->message_s[at(stage) + 1];
    own_starts_.assign(at(end) + 1, 0);
    own_ends_.assign(at(end) + 1, 0);
    bool any = false;
    for (int i = latest_[at(stage)]; i >= std::max(stage, static_cast<int>(earliest_[at(stage)]));
         --i) {
      if (on_.space->may_cut[at(i)] == 0 || (stage == 0 && i > 0)) continue;
      const std::size_t mine = tails_.size();
      double before_s = on_.sums.forward_s(0, i);
      if (!on_.zero_bubble) {
        before_s = on_.sums.work_s(0, i) +
                   std::max(0.0, messages_s - 2.0 * on_.layout->message_s[at(stage)]);
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
    const double taken = tails_[at(t)].clock.time_s() + on_.layout->exchange_s;
    if (taken < best->time_s) {
      best->time_s = taken;
      finish(at(t), best);
    }
  }
}

// Lower bound with 1F1B on the work and waiting time of the stage i..j with `after` stages after
// it: the trip through those stages is at least their work (see `prepend_stage`).
double PartitionSearch::least_with(int i, int j, int after, double work) const noexcept {
  const auto m = static_cast<double>(on_.micro_batches);
  const double trip = on_.sums.work_s(j, on_.space->layers);
  if (after < on_.micro_batches) return (m - after) * work + 2.0 * trip;
  return m * work + trip - (m - 1.0) * on_.sums.forward_s(i, j);
}

void PartitionSearch::extend(int i, int s, double before_s, std::size_t mine) {
  const int stage = on_.stages - s;
  const int first = std::max(i + 1, static_cast<int>(earliest_[at(stage) + 1]));
  const int last = std::min(on_.space->layers - (s - 1),
                            s == 1 ? on_.space->layers : static_cast<int>(latest_[at(stage) + 1]));
  for (int j = first; j <= last; ++j) {
    const double work = on_.sums.work_s(i, j);
    if (work > load_limit_s_) return;
    if (!on_.zero_bubble && least_with(i, j, s - 1, work) + before_s > limit_s_ * kLoose) {
      if (s - 1 >= on_.micro_batches || on_.micro_batches - (s - 1) >= 2)
        return;  // the bound only grows with the stage
      continue;
    }
    if (starts_[at(j)] == ends_[at(j)]) continue;
    const std::int32_t code = recompute_.fastest_fitting(i, j, stage);
    if (code < 0) {
      if (on_.sums.resident_bytes(i, j) > usable_bytes_ * kFits) return;
      continue;
    }
    const StagePass pass = on_.sums.pass(StageRecompute::of(code), i, j, stage);
    if (pass.forward_s + pass.backward_s > load_limit_s_) continue;
    for (std::int32_t t = starts_[at(j)]; t < ends_[at(j)]; ++t) {
      const ClockedTail whole{prepend_stage(tails_[at(t)].clock, pass, on_.micro_batches, s - 1,
                                            stage, on_.zero_bubble),
                              code, j, t};
      if ((whole.clock.time_s() + before_s) * (1.0 - 1e-12) < limit_s_)
        keep_non_dominated(whole, mine, nothing_s_, &tails_);
    }
  }
}

// The clock is a lower bound on the simulated schedule, and nearly always equal to it. If it is
// not, every partition that it does not rule out is simulated, up to a number of examined stages.
void PartitionSearch::walk_all(double clock_s, PlacedPlan* best) {
  constexpr std::int64_t kMostStages = 512;
  set_limits(best->time_s - on_.layout->exchange_s);
  if (!find_windows()) return;
  walked_ = best->partition;
  steps_left_ = kMostStages;
  walk(on_.stages - 1, on_.space->layers, PipelineClock{}, best);
  if (steps_left_ <= 0) best->open_s = clock_s;
}

void PartitionSearch::walk(int stage, int j, const PipelineClock& rest, PlacedPlan* best) {
  const double messages_s = sends_s(stage);
  const int low = stage == 0 ? 0 : std::max(stage, static_cast<int>(earliest_[at(stage)]));
  const int high = stage == 0 ? 0 : std::min(j - 1, static_cast<int>(latest_[at(stage)]));
  for (int i = high; i >= low && steps_left_ > 0; --i) {
    if (on_.space->may_cut[at(i)] == 0) continue;
    --steps_left_;
    if (on_.sums.work_s(i, j) > load_limit_s_) return;
    const std::int32_t code = recompute_.fastest_fitting(i, j, stage);
    if (code < 0) continue;
    const StagePass pass = on_.sums.pass(StageRecompute::of(code), i, j, stage);
    if (pass.forward_s + pass.backward_s > load_limit_s_) continue;
    const PipelineClock clock = prepend_stage(rest, pass, on_.micro_batches, on_.stages - 1 - stage,
                                              stage, on_.zero_bubble);
    const double before_s =
        on_.zero_bubble ? on_.sums.forward_s(0, i) : on_.sums.work_s(0, i) + messages_s;
    if ((clock.time_s() + before_s) * (1.0 - 1e-12) >= limit_s_) continue;
    walked_.cuts[at(stage)] = i;
    walked_.variants[at(stage)] = code;
    if (stage > 0) {
      walk(stage - 1, i, clock, best);
      continue;
    }
    const double time_s = step_.time_s(walked_);
    if (!(time_s < best->time_s)) continue;
    best->time_s = time_s;
    best->partition = walked_;
    set_limits(time_s - on_.layout->exchange_s);
  }
}

void PartitionSearch::finish(std::size_t from, PlacedPlan* best) const {
  best->partition.cuts.assign(1, 0);
  best->partition.variants.clear();
  for (std::size_t t = from; tails_[t].next_tail >= 0; t = at(tails_[t].next_tail)) {
    best->partition.variants.push_back(tails_[t].variant);
    best->partition.cuts.push_back(tails_[t].next_cut);
  }
}

// ---- layers assigned to chunks ----

PlanStatus AssignmentSearch::check() const {
  const LayoutRecord& l = on_.record();
  const int ends =
      (on_.space->first_block > 0 ? 1 : 0) + (on_.space->layers > on_.space->last_block ? 1 : 0);
  if (places_of(l) > std::max(1, on_.space->blocks + ends)) {
    return PlanStatus::kTooManyStages;
  }
  if (on_.stages == 1) {  // chunks of one device lie in a row, or folded in two
    const bool in_a_row = schedule_of(l) == PipelineSchedule::kInterleaved;
    return in_a_row || l.vpp <= 2 ? PlanStatus::kOk : PlanStatus::kBadSchedule;
  }
  const PipelineStatus possible =
      check_schedule(schedule_of(l), on_.stages, l.vpp, on_.micro_batches);
  if (possible == PipelineStatus::kFewMicroBatches) return PlanStatus::kFewRounds;
  return possible == PipelineStatus::kOk ? PlanStatus::kOk : PlanStatus::kBadSchedule;
}

// Cuts off chunks of `base` counted layers, one more if `extra_` is set; false if not allowed.
bool AssignmentSearch::cut(bool count_first, int base, Partition* partition) const {
  const std::size_t count = extra_.size();
  partition->cuts.assign(count + 1, 0);
  partition->cuts[count] = on_.space->layers;
  int position = count_first ? 0 : on_.space->first_block;
  for (std::size_t c = 0; c + 1 < count; ++c) {
    position += base + extra_[c];
    partition->cuts[c + 1] = position;
    if (position >= on_.space->layers || on_.space->may_cut[at(position)] == 0) return false;
  }
  return position < on_.space->layers;
}

// Chooses the chunks that take one more layer: stages have as even shares of the layers as
// possible, and the later chunks of a stage take what its share has beyond equal chunks.
void AssignmentSearch::spread_evenly(int total) {
  const int count = static_cast<int>(extra_.size());
  const int chunks = count / on_.stages;
  const auto upto = [&](std::int64_t k) { return static_cast<int>(k * total / on_.stages); };
  for (int stage = 0; stage < on_.stages; ++stage) {
    const int more = upto(stage + 1) - upto(stage) - total / count * chunks;
    for (int c = 0; c < chunks; ++c) {
      extra_[at(on_.chain_of(stage, c))] = c >= chunks - more ? 1 : 0;
    }
  }
}

PlanStatus AssignmentSearch::even(Partition* partition) {
  const PlanStatus status = check();
  if (status != PlanStatus::kOk) return status;
  partition->cuts = on_.space->cuts_of_software(on_.record());
  if (!partition->cuts.empty()) {
    const auto tied = [&](std::int32_t cut) { return on_.space->may_cut[at(cut)] == 0; };
    return std::any_of(partition->cuts.begin() + 1, partition->cuts.end() - 1, tied)
               ? PlanStatus::kBrokenTie
               : PlanStatus::kOk;
  }
  const int count = places_of(on_.record());
  // Embedding and head count as layers if there would be too few blocks otherwise.
  const bool ends = on_.space->blocks < count;
  const int total = ends ? on_.space->layers : std::max(on_.space->blocks, 1);
  extra_.assign(at(count), 0);
  spread_evenly(total);
  return cut(ends, total / count, partition) ? PlanStatus::kOk : PlanStatus::kBrokenTie;
}

// Chooses the chunks that take an additional layer: each time the stage with the least work, and of
// its chunks the last that has none yet, since fewer layers in the first chunk fill the pipeline
// earlier.
void AssignmentSearch::spread_by_load(int base, int extras, bool count_first, bool count_last) {
  const int chunks = on_.record().vpp;
  const auto work = [&](int kind) { return on_.sums.work_s(kind, kind + 1); };
  const double block = work(on_.space->first_block);
  std::vector<double>& load = loads_s_;
  load.assign(at(on_.stages), chunks * base * block);
  const int last = on_.stage_of(on_.stages * chunks - 1);
  if (on_.space->first_block > 0) load[0] += work(0) - (count_first ? block : 0.0);
  if (on_.space->layers > on_.space->last_block) {
    load[at(last)] += work(on_.space->layers - 1) - (count_last ? block : 0.0);
  }
  std::fill(extra_.begin(), extra_.end(), 0);
  for (int k = 0; k < extras; ++k) {
    int chosen = -1;
    for (int stage = 0; stage < on_.stages; ++stage) {
      if (chosen >= 0 && !(load[at(stage)] < load[at(chosen)] * (1.0 - 1e-9))) continue;
      bool free = false;
      for (int c = 0; c < chunks; ++c) free = free || extra_[at(on_.chain_of(stage, c))] == 0;
      if (free) chosen = stage;
    }
    for (int c = chunks - 1; c >= 0; --c) {
      std::int32_t& own = extra_[at(on_.chain_of(chosen, c))];
      if (own != 0) continue;
      own = 1;
      break;
    }
    load[at(chosen)] += block;
  }
}

AssignmentSearch::StageLoad AssignmentSearch::load_of(const Partition& partition, int stage,
                                                      std::int32_t recompute) const {
  StageLoad found{0.0, 0.0};
  for (int c = 0; c < on_.record().vpp; ++c) {
    const std::size_t chunk = at(on_.chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    const double passes_s =
        recompute < 0
            ? on_.sums.work_s(i, j)
            : on_.sums.forward_s(i, j) + on_.sums.backward_s(StageRecompute::of(recompute), i, j);
    const double own = passes_s + on_.enters_s(stage, c, i, j) + on_.leaves_s(stage, c, i, j);
    if (c == 0) found.first_s = own;
    found.load_s += own;
  }
  return found;
}

double AssignmentSearch::add_stage(const StageLoad& stage, Bound* bound) const {
  bound->least_s =
      std::max(bound->least_s, bound->before_s + rounds_of(on_.record()) * stage.load_s);
  if (on_.schedule() == PipelineSchedule::kInterleaved) bound->before_s += stage.first_s;
  return bound->least_s;
}

// The load of a stage of `partition` with the fastest variant of every layer, or, once it was
// chosen, with the recomputation of the stage.
AssignmentSearch::StageLoad AssignmentSearch::least_load(const Partition& partition, int stage) {
  KnownLoad* known = known_load(stage);
  if (known != nullptr && known->of_class == class_of(stage)) return known->load;
  const StageLoad load = load_of(partition, stage, -1);
  if (known != nullptr) *known = {class_of(stage), load, -1};
  return load;
}

// Chooses the recomputation of a stage; the load is infinite if the stage does not fit.
AssignmentSearch::StageLoad AssignmentSearch::chosen_load(const Partition& partition, int stage,
                                                          std::int32_t* code) {
  KnownLoad* known = known_load(stage);
  if (known != nullptr && known->of_class == class_of(stage) && known->recompute >= 0) {
    *code = known->recompute;
    return known->load;
  }
  *code = recompute_.fastest_of_assigned(partition, stage);
  const StageLoad load = *code < 0 ? StageLoad{0.0, kInfinite} : load_of(partition, stage, *code);
  if (known != nullptr) *known = {class_of(stage), load, *code};
  return load;
}

// Returns false if a stage does not fit, or once the step is certain to exceed the limit.
bool AssignmentSearch::choose_recompute(double limit_s, Partition* partition) {
  partition->variants.assign(at(on_.stages), 0);
  Bound bound;
  for (int stage = 0; stage < on_.stages; ++stage) {
    std::int32_t& code = partition->variants[at(stage)];
    const StageLoad load = chosen_load(*partition, stage, &code);
    if (add_stage(load, &bound) <= limit_s * kLoose && code >= 0) continue;
    last_too_long_ = stage;
    return false;
  }
  return true;
}

// Starts a class of assignments with `base` layers to a chunk; -1: cuts that belong to no class.
// The loads of stages without embedding and head are those of other classes with the same base.
void AssignmentSearch::start_class(int base) {
  ++class_;
  if (base < 0 || base != inner_base_) inner_class_ = class_;
  inner_base_ = base;
}

// Where the loads of a stage with the longer chunks of `extra_` are stored; null where they depend
// on other stages, or chunks are many.
AssignmentSearch::KnownLoad* AssignmentSearch::known_load(int stage) {
  constexpr int kMostChunks = 8;
  const int chunks = on_.record().vpp;
  if (!on_.space->equal_blocks || !on_.space->chain || chunks > kMostChunks) return nullptr;
  std::size_t longer = at(stage);
  for (int c = 0; c < chunks; ++c) longer = 2 * longer + at(extra_[at(on_.chain_of(stage, c))]);
  if (longer >= known_.size()) known_.resize(at(on_.stages) << chunks);
  return &known_[longer];
}

// Whether stage loads that earlier assignments of the class stored rule out the assignment of
// `extra_`. The limit is loose: sums of equal layers elsewhere in the model differ in last digits.
bool AssignmentSearch::known_too_long(double limit_s) {
  const double most_s = limit_s * kLoose;
  const auto known = [&](int stage) {
    const KnownLoad* own = known_load(stage);
    return own != nullptr && own->of_class == class_of(stage) ? own->load : StageLoad{0.0, 0.0};
  };
  Bound bound;
  if (last_too_long_ < on_.stages && add_stage(known(last_too_long_), &bound) > most_s) return true;
  bound = {};
  for (int stage = 0; stage < on_.stages; ++stage) {
    if (add_stage(known(stage), &bound) <= most_s) continue;
    last_too_long_ = stage;
    return true;
  }
  return false;
}

double AssignmentSearch::limit_s(double below_s, const PlacedPlan& best) const noexcept {
  return (std::min(below_s, best.time_s) - on_.layout->exchange_s) * (1.0 + 1e-12);
}

// Takes the assignment if it is faster than the incumbent and within the time limit.
bool AssignmentSearch::offer(double below_s, PlacedPlan* best) {
  const double exchange_s = on_.layout->exchange_s;
  const double limit = limit_s(below_s, *best);
  const double most_s = limit * kLoose;
  Bound bound;
  if (last_too_long_ < on_.stages &&
      add_stage(least_load(partition_, last_too_long_), &bound) > most_s) {
    return false;
  }
  bound = {};
  for (int stage = 0; stage < on_.stages; ++stage) {
    if (add_stage(least_load(partition_, stage), &bound) <= most_s) continue;
    last_too_long_ = stage;
    return false;
  }
  if (!choose_recompute(limit, &partition_)) return false;
  const double tail_s = step_.take_passes(partition_);
  PassChains& chains = in_tree_ ? tree_chains_ : chains_;
  const bool chained =
      on_.stages > 1 && (in_tree_ || on_.schedule() == PipelineSchedule::kInterleaved);
  std::uint64_t assignment = 0;
  if (chained) {
    if (!in_tree_) {
      for (const std::int32_t cut : partition_.cuts) {
        assignment = mixed(assignment, static_cast<std::uint64_t>(cut));
      }
    }
    const double step_s = std::min(below_s, best->time_s) - tail_s - exchange_s;
    chains.select(on_.schedule(), on_.stages, on_.record().vpp, on_.micro_batches);
    if (chains.above(step_.loads(), step_s, assignment)) return false;
  }
  const double time_s = step_.step_s() + tail_s + exchange_s;
  const double faster_s = best->time_s * (in_tree_ ? 1.0 - 2.0 * kTie : 1.0);
  const bool faster = time_s <= below_s && time_s < faster_s;
  const PassChain* chain = chained && (in_tree_ || !faster)
                               ? chains.learn(step_.loads(), step_.player(), assignment)
                               : nullptr;
  if (faster) {
    best->time_s = time_s;
    best->partition = partition_;
    best_by_load_ = by_load_;
  }
  if (in_tree_ && chain != nullptr) tree_.add(*chain, tree_limit_s(below_s, *best));
  return true;
}

// Keeps in `rows_` those rows of `extras` longer chunks, by their first chunk and cyclic, with
// which each stage by itself fits and takes at most the limit. All blocks are equal, so a stage
// depends on its own chunks alone, and rows that begin between two of its chunks make the same ones
// longer, with one more if they reach the next.
void AssignmentSearch::find_rows(int first, int base, int extras, double limit_s) {
  const int count = static_cast<int>(extra_.size());
  const int stages = on_.stages;
  if (!on_.space->equal_blocks || !on_.space->chain) return;
  partition_.cuts.assign(at(count) + 1, on_.space->layers);
  const auto within = [&](int stage, int begin) {
    const auto before = [&](int place) {  // longer chunks before a place
      return std::min(place, std::max(0, begin + extras - count)) +
             std::clamp(place - begin, 0, std::min(extras, count - begin));
    };
    const auto cut = [&](int place) {
      return place == 0       ? 0
             : place == count ? on_.space->layers
                              : first + place * base + before(place);
    };
    for (int place = stage; place < count; place += stages) {
      extra_[at(place)] = before(place + 1) - before(place);
      partition_.cuts[at(place)] = cut(place);
      partition_.cuts[at(place) + 1] = cut(place + 1);
    }
    const double most_s = limit_s * kLoose;
    std::int32_t code = 0;
    return rounds_of(on_.record()) * least_load(partition_, stage).load_s <= most_s &&
           rounds_of(on_.record()) * chosen_load(partition_, stage, &code).load_s <= most_s;
  };
  // Rows that begin at `from` .. `to` - 1 are alike for the stage.
  const auto keep = [&](int stage, int from, int to) {
    int begin = from;
    while (begin < to && rows_[at((begin + count) % count)] == 0) ++begin;
    if (begin == to || within(stage, (begin + count) % count)) return;
    for (; begin < to; ++begin) rows_[at((begin + count) % count)] = 0;
  };
  for (int k = -1; k < stages; ++k) {
    const int stage = k < 0 ? last_too_long_ % stages : k;
    for (int place = stage; place < count; place += stages) {
      const int more = extras % stages;
      keep(stage, place + 1 - stages, place + 1 - more);
      keep(stage, place + 1 - more, place + 1);
    }
    if (std::find(rows_.begin(), rows_.end(), 1) != rows_.end()) continue;
    last_too_long_ = stage;
    return;
  }
}

// Tries assignments with the embedding and the head counted as layers or not. If there are many,
// the search starts with some that are mostly good: by load, as even as possible, and with
// consecutive longer chunks, cyclically from the last chunk to the first. Where the tree search
// does not apply, only these are compared.
void AssignmentSearch::try_all(bool count_first, bool count_last, double below_s,
                               PlacedPlan* best) {
  const auto count = static_cast<int>(extra_.size());
  const int total = on_.space->blocks + count_first + count_last;
  if (total < count) return;
  const int base = total / count;
  const int extras = total % count;
  start_class(base);
  const auto offer_cut = [&] {
    if (known_too_long(limit_s(below_s, *best))) return false;
    return cut(count_first, base, &partition_) && offer(below_s, best);
  };
  const bool all = choices(count, extras) <= (tree_.applies() ? kFew : kMost);
  std::fill(extra_.begin(), extra_.end(), 0);
  by_load_ = !all;
  if (!bidirectional(on_.record())) spread_by_load(base, extras, count_first, count_last);
  if (extras == 0 || !bidirectional(on_.record())) offer_cut();
  by_load_ = false;
  if (extras == 0) return;
  if (all) {
    std::fill(extra_.begin(), extra_.end(), 0);
    std::fill(extra_.begin(), extra_.begin() + extras, 1);
    do {
      offer_cut();
    } while (std::prev_permutation(extra_.begin(), extra_.end()));
    return;
  }
  spread_evenly(total);
  offer_cut();
  rows_.assign(at(count), 1);
  if (on_.schedule() == PipelineSchedule::kInterleaved) {
    find_rows(count_first ? 0 : on_.space->first_block, base, extras, limit_s(below_s, *best));
  }
  for (int begin = 0; begin < count; ++begin) {
    if (rows_[at(begin)] == 0) continue;
    for (int c = 0; c < count; ++c) extra_[at((begin + c) % count)] = c < extras ? 1 : 0;
    offer_cut();
  }
  if (!tree_.applies()) return;
  if (work_ == 0) {
    best->open_s = 0.0;
    return;
  }
  tree_chains_.clear();
  tree_.start(count_first ? 0 : on_.space->first_block, base, extras, tree_limit_s(below_s, *best));
  in_tree_ = true;
  const double open_s = tree_.search(
      work_, [&] { return tree_limit_s(below_s, *best); },
      [&](const std::vector<std::int32_t>& extra) {
        extra_ = extra;
        return offer_cut();
      });
  in_tree_ = false;
  best->open_s = std::min(best->open_s, open_s + on_.layout->exchange_s);
}

// What step and tail of a better assignment may take.
double AssignmentSearch::tree_limit_s(double below_s, const PlacedPlan& best) const noexcept {
  return std::min(below_s * (1.0 + kTie), best.time_s * (1.0 - kTie)) - on_.layout->exchange_s;
}

void AssignmentSearch::run(double below_s, std::int64_t work, unsigned classes, PlacedPlan* best) {
  work_ = work;
  inner_base_ = -1;
  if (check() != PlanStatus::kOk) return;
  extra_.assign(at(places_of(on_.record())), 0);
  std::vector<std::int32_t>& last_cuts = last_cuts_[on_.number()];
  if (!last_cuts.empty()) below_s = std::min(below_s, known_s(last_cuts, below_s));
  for (const bool last : {false, true}) {
    for (const bool first : {false, true}) {
      if (first && on_.space->first_block == 0) continue;
      if (last && on_.space->layers == on_.space->last_block) continue;
      if ((classes & class_bit(first, last)) == 0) continue;
      try_all(first, last, below_s, best);
    }
  }
  if (!on_.space->cuts_of_software(on_.record()).empty()) {
    start_class(-1);  // these cuts belong to no class, so stored loads do not apply
    if (even(&partition_) == PlanStatus::kOk) offer(below_s, best);
  }
  if (best->time_s < kInfinite && !best_by_load_ && !tree_.applies()) {
    last_cuts = best->partition.cuts;
  }
}

// The time of the plan with these cuts, which every chip tries; infinite if above `below_s`.
double AssignmentSearch::known_s(const std::vector<std::int32_t>& cuts, double below_s) {
  PlacedPlan known{kInfinite, 0.0, 0, {}};
  start_class(-1);
  partition_.cuts = cuts;
  offer(below_s, &known);
  return known.time_s * (1.0 + 2.0 * kTie);
}

// ---- assignments, searched ----

bool AssignmentTree::applies() const noexcept {
  return on_.space->equal_blocks && on_.space->chain && on_.space->free_cuts &&
         places_of(on_.record()) <= kSearchedChunks && on_.stages > 1;
}

void AssignmentTree::start(int first, int base, int extras, double limit_s) {
  extras_ = extras;
  const bool both = bidirectional(on_.record());  // two devices have the same two chunks
  groups_.assign(at(both ? on_.stages / 2 : on_.stages), {});
  extra_.assign(at(places_of(on_.record())), 0);
  dropped_.clear();
  bounds_.clear();
  bool any = true;
  for (int g = 0; at(g) < groups_.size() && any; ++g) {
    Group& group = groups_[at(g)];
    group.stages.assign(1, g);
    if (both) group.stages.push_back(on_.stages - 1 - g);
    for (int c = 0; c < on_.record().vpp; ++c) group.places.push_back(on_.chain_of(g, c));
    add_patterns(first, base, limit_s, &group);
    dropped_.emplace_back(group.patterns.size(), false);
    any = !group.patterns.empty();
  }
  if (!any) groups_[0].patterns.clear();  // no assignment is possible
  chosen_.assign(groups_.size(), 0);
  tails_s_.assign(groups_.size() + 1, 0.0);
  backward_before_s_.assign(groups_.size() + 1, 0.0);
  for (int stage = 0; stage < on_.stages && any; ++stage) {
    add(chain_of_stage(stage), kInfinite);
    drop_patterns(bounds_.back(), limit_s);
  }
  for (Bound& bound : bounds_) {
    find_rest(&bound);
    if (!drop_patterns(bound, limit_s)) continue;
    for (Bound& other : bounds_) find_rest(&other);
  }
}

// The passes of a stage one after another, with those that precede its first pass and follow its
// last.
PassChain AssignmentTree::chain_of_stage(int stage) const {
  const int chunks = on_.record().vpp;
  PassChain chain{std::vector<PassChain::Counts>(at(on_.stages * chunks))};
  for (int before = 0; before < stage && !bidirectional(on_.record()); ++before) {
    PassChain::Counts& own = chain.counts[at(before * chunks)];
    own.forward = 1.0;
    if (on_.schedule() <= PipelineSchedule::kInterleaved) own.backward = 1.0;
  }
  for (int c = 0; c < chunks; ++c) {
    PassChain::Counts& own = chain.counts[at(stage * chunks + c)];
    own.forward = own.backward = rounds_of(on_.record());
  }
  return chain;
}

// Adds the patterns with which the stages of a group fit and their passes take at most the limit.
// It does not matter which chunks of other groups are longer, since all blocks are equal.
void AssignmentTree::add_patterns(int first, int base, double limit_s, Group* group) {
  const auto count = extra_.size();
  std::vector<std::int32_t> sizes(count);
  for (std::int32_t mask = 0; mask < 1 << group->places.size(); ++mask) {
    Pattern pattern{mask, std::popcount(static_cast<std::uint32_t>(mask)), {}, {}};
    const int others = extras_ - pattern.extras;
    if (others < 0 || others > static_cast<int>(count - group->places.size())) continue;
    std::fill(sizes.begin(), sizes.end(), -1);
    for (std::size_t c = 0; c < group->places.size(); ++c) {
      sizes[at(group->places[c])] = base + (mask >> c & 1);
    }
    const auto other = std::find(sizes.begin(), sizes.end(), -1);
    if (other != sizes.end()) *other = base + others;
    std::replace(sizes.begin(), sizes.end(), -1, base);
    partition_.cuts.assign(1, 0);
    int position = first;
    for (std::size_t c = 0; c + 1 < count; ++c) partition_.cuts.push_back(position += sizes[c]);
    partition_.cuts.push_back(on_.space->layers);
    bool fits = true;
    for (const int stage : group->stages) {
      const std::int32_t code = recompute_.fastest_of_assigned(partition_, stage);
      fits = fits && code >= 0;
      if (!fits) break;
      StageTail& tail = pattern.tails.emplace_back();
      double load_s = 0.0;
      for (int c = 0; c < on_.record().vpp; ++c) {
        const std::size_t chunk = at(on_.chain_of(stage, c));
        const int i = partition_.cuts[chunk];
        const int j = partition_.cuts[chunk + 1];
        const double backward_s =
            on_.sums.backward_s(StageRecompute::of(code), i, j) + on_.leaves_s(stage, c, i, j);
        pattern.passes.push_back({on_.sums.forward_s(i, j) + on_.enters_s(stage, c, i, j),
                                  backward_s, std::min(backward_s, on_.sums.weight_grad_s(i, j))});
        tail.sync_s += on_.sums.sync_s(i, j);
        tail.step_s += on_.sums.step_s(i, j);
        tail.own_s += on_.sums.plain_s(i, j);
        load_s += pattern.passes.back().forward + backward_s;
      }
      fits = rounds_of(on_.record()) * load_s <= limit_s;
    }
    if (fits) group->patterns.push_back(std::move(pattern));
  }
}

void AssignmentTree::find_rest(Bound* bound) const {
  bound->rest_s.assign(cell(groups_.size() + 1, 0), kInfinite);
  bound->rest_s[cell(groups_.size(), extras_)] = 0.0;
  std::vector<double> least(at(on_.record().vpp) + 1);  // by longer chunks of the group
  for (std::size_t g = groups_.size(); g-- > 0;) {
    std::fill(least.begin(), least.end(), kInfinite);
    for (std::size_t p = 0; p < groups_[g].patterns.size(); ++p) {
      if (dropped_[g][p]) continue;
      double& own = least[at(groups_[g].patterns[p].extras)];
      own = std::min(own, bound->pattern_s[g][p]);
    }
    for (int longer = 0; longer <= extras_; ++longer) {
      double& rest_s = bound->rest_s[cell(g, longer)];
      for (int e = 0; at(e) < least.size() && longer + e <= extras_; ++e) {
        rest_s = std::min(rest_s, least[at(e)] + bound->rest_s[cell(g + 1, longer + e)]);
      }
    }
  }
}

// Drops the patterns whose least sum, over all choices of the other groups, is above the limit.
// Returns whether there were any.
bool AssignmentTree::drop_patterns(const Bound& bound, double limit_s) {
  bool any = false;
  const std::size_t width = at(on_.record().vpp) + 1;
  std::vector<double> before(at(extras_) + 1, kInfinite), after, own(width), others(width);
  before[0] = 0.0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    // By longer chunks of the group: the least of other groups, and of the group itself.
    others.assign(width, kInfinite);
    own.assign(width, kInfinite);
    for (std::size_t e = 0; e < width; ++e) {
      for (std::size_t longer = 0; longer + e < before.size(); ++longer) {
        const double rest_s = bound.rest_s[cell(g + 1, static_cast<int>(longer + e))];
        others[e] = std::min(others[e], before[longer] + rest_s);
      }
    }
    for (std::size_t p = 0; p < groups_[g].patterns.size(); ++p) {
      if (dropped_[g][p]) continue;
      const auto e = at(groups_[g].patterns[p].extras);
      const double least = others[e] + bound.pattern_s[g][p];
      dropped_[g][p] = least > limit_s || least == kInfinite;
      any = any || dropped_[g][p];
      if (!dropped_[g][p]) own[e] = std::min(own[e], bound.pattern_s[g][p]);
    }
    after.assign(before.size(), kInfinite);
    for (std::size_t e = 0; e < width; ++e) {
      for (std::size_t longer = 0; longer + e < before.size(); ++longer) {
        after[longer + e] = std::min(after[longer + e], before[longer] + own[e]);
      }
    }
    before.swap(after);
  }
  return any;
}

void AssignmentTree::add(const PassChain& chain, double limit_s) {
  constexpr std::ptrdiff_t kMostBounds = 96;
  if (std::ssize(bounds_) >= kMostBounds) bounds_.erase(bounds_.begin() + kMostBounds / 2);
  Bound& bound = bounds_.emplace_back();
  bound.before_s.assign(groups_.size() + 1, 0.0);
  const auto chunks = static_cast<std::size_t>(on_.record().vpp);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::vector<double>& own = bound.pattern_s.emplace_back();
    for (const Pattern& pattern : groups_[g].patterns) {
      double sum = 0.0;
      for (std::size_t k = 0; k < pattern.passes.size(); ++k) {
        const Seconds& pass = pattern.passes[k];
        const std::size_t slot = at(groups_[g].stages[k / chunks]) * chunks + k % chunks;
        sum += chain.counts[slot].seconds(pass.forward, pass.backward, pass.weight_grad);
      }
      own.push_back(sum);
    }
    if (!own.empty()) bound.before_s[g + 1] = bound.before_s[g] + own[chosen_[g]];
  }
  find_rest(&bound);
  if (limit_s == kInfinite || !drop_patterns(bound, limit_s)) return;
  for (Bound& other : bounds_) find_rest(&other);
}

double AssignmentTree::tail_s(std::size_t group, const Pattern& pattern,
                              double* before_s) const noexcept {
  const int chunks = on_.record().vpp;
  double longest_s = tails_s_[group];
  *before_s = backward_before_s_[group];
  for (const StageTail& tail : pattern.tails) {
    longest_s = std::max(
        longest_s, tail_after(tail.sync_s, tail.own_s / chunks, on_.costs->bucket_s, tail.step_s,
                              *before_s / chunks, on_.space->training.contention));
    if (!bidirectional(on_.record())) *before_s += tail.own_s;
  }
  return longest_s;
}

// Lower bound on step and tail with the chosen patterns and one more, or some bound above
// `enough_s`.
double AssignmentTree::least_s(std::size_t group, int longer, std::size_t pattern,
                               double enough_s) const noexcept {
  const Pattern& own = groups_[group].patterns[pattern];
  if (longer + own.extras > extras_) return kInfinite;
  double before_s = 0.0;
  const double tail = tail_s(group, own, &before_s);
  double least = 0.0;
  for (const Bound& bound : bounds_) {
    least = std::max(least, bound.before_s[group] + bound.pattern_s[group][pattern] +
                                bound.rest_s[cell(group + 1, longer + own.extras)]);
    if (least + tail > enough_s) break;
  }
  return least + tail;
}

std::vector<AssignmentTree::Child> AssignmentTree::children(std::size_t group, int longer,
                                                            double limit_s) const {
  std::vector<Child> left;
  for (std::size_t p = 0; p < groups_[group].patterns.size(); ++p) {
    if (dropped_[group][p]) continue;
    const double least = least_s(group, longer, p, limit_s);
    if (least <= limit_s && least < kInfinite) left.push_back({least, p});
  }
  std::stable_sort(left.begin(), left.end(),
                   [](const Child& a, const Child& b) { return a.least_s < b.least_s; });
  return left;
}

void AssignmentTree::choose(std::size_t group, std::size_t pattern) {
  const Pattern& own = groups_[group].patterns[pattern];
  chosen_[group] = pattern;
  for (Bound& bound : bounds_) {
    bound.before_s[group + 1] = bound.before_s[group] + bound.pattern_s[group][pattern];
  }
  tails_s_[group + 1] = tail_s(group, own, &backward_before_s_[group + 1]);
  for (std::size_t c = 0; c < groups_[group].places.size(); ++c) {
    extra_[at(groups_[group].places[c])] = own.mask >> c & 1;
  }
}

// ---- the solver ----

double& KnownLayouts::none_below_s(const PlanSpaceImpl& space, std::size_t layout,
                                   const KindTimes& times, double usable_bytes) {
  const std::int32_t strategy = space.layouts[layout].record.strategy;
  const std::size_t kinds = at(space.kinds);
  const std::size_t variants = at(space.strategies[at(strategy)].variants);
  seconds_.assign({usable_bytes, times.hbm_bytes_per_s});
  for (const auto& [own, count] : {std::pair{times.forward_s, kinds},
                                   {times.plain_s, kinds},
                                   {times.weight_grad_s, kinds},
                                   {times.backward_s, variants * kinds},
                                   {times.step_s, times.step_s == nullptr ? 0 : kinds}}) {
    seconds_.insert(seconds_.end(), own, own + count);
  }
  Strategy& known = strategies_[strategy];
  if (known.seconds != seconds_) {
    known.seconds = seconds_;
    known.none_below_s.clear();
  }
  return known.none_below_s.try_emplace(layout, -kInfinite).first->second;
}

PlacedPlan PlanSolver::best(const PlanSpaceImpl& space, std::size_t layout, const KindTimes& times,
                            double usable_bytes, double below_s, double load_s, std::int64_t work,
                            unsigned classes) {
  PlacedPlan best{kInfinite, 0.0, static_cast<std::int32_t>(layout), {}};
  double& none_below_s = known_.none_below_s(space, layout, times, usable_bytes);
  if (below_s <= none_below_s || space.layouts[layout].record.pp > space.layers) return best;
  start(space, layout, times);
  on_.sums.find_work();
  recompute_.restart(usable_bytes);
  if (searches_partitions(on_.record())) {
    partitions_.run(usable_bytes, below_s, load_s, &best);
  } else {
    assignments_.run(below_s, work, classes, &best);
  }
  const bool none = best.time_s == kInfinite || !(best.time_s <= below_s);
  if (best.open_s == kInfinite) {  // up to the rounding of sums in another order
    none_below_s = std::max(none_below_s, none ? below_s : best.time_s * (1.0 - 1e-9));
  }
  if (none) {
    best.time_s = kInfinite;
    best.partition = {};
    return best;
  }
  for (int stage = 0; stage < on_.stages; ++stage) {
    const StageRecompute recompute = StageRecompute::of(best.partition.variants[at(stage)]);
    best.memory_bytes =
        std::max(best.memory_bytes, on_.stage_bytes(best.partition, stage, recompute));
  }
  return best;
}

PlanStatus PlanSolver::even(const PlanSpaceImpl& space, std::size_t layout, const KindTimes& times,
                            std::int32_t variant, double usable_bytes, Partition* partition) {
  lay(space, layout);
  const PlanStatus status = assignments_.even(partition);
  if (status != PlanStatus::kOk) return status;
  if (variant < 0) {
    start(space, layout, times);
    recompute_.choose(usable_bytes, partition);
    return PlanStatus::kOk;
  }
  return use_variant(space, on_.record(), variant, partition);
}

PlanStatus use_variant(const PlanSpaceImpl& space, const LayoutRecord& layout, std::int32_t variant,
                       Partition* partition) {
  const StageRecompute recompute = StageRecompute::of(variant);
  if (std::max(recompute.rest, recompute.more) >= space.strategies[at(layout.strategy)].variants) {
    return PlanStatus::kBadStrategy;
  }
  partition->variants.assign(at(layout.pp), variant);
  return PlanStatus::kOk;
}

}  // namespace phaze
