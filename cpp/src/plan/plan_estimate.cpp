// Estimates of given plans: seconds by part, bytes by term, joules.
#include "plan/plan_estimate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/lanes.hpp"
#include "base/numbers.hpp"

namespace phaze {
namespace {

constexpr std::size_t kBlock = 8;  // columns that are summed together
constexpr std::size_t kSteps = 4;  // steps that are simulated together
constexpr std::size_t kNotPlayed = std::numeric_limits<std::size_t>::max();

// Zero for a difference of times that is negative by rounding alone.
double without_rounding(double part_s, double whole_s) noexcept {
  return part_s < 0.0 && part_s > -1e-12 * whole_s ? 0.0 : part_s;
}

bool same_times(const KindTimes& a, const KindTimes& b, std::size_t kinds, std::size_t variants) {
  const auto same = [](const double* x, const double* y, std::size_t n) {
    return x == y || std::equal(x, x + n, y);
  };
  return same(a.forward_s, b.forward_s, kinds) && same(a.plain_s, b.plain_s, kinds) &&
         same(a.weight_grad_s, b.weight_grad_s, kinds) &&
         same(a.backward_s, b.backward_s, kinds * variants);
}

// Makes room for `count` numbers, whose values are unspecified until they are written.
void reserve(std::vector<double>* numbers, std::size_t count) {
  if (numbers->size() < count) numbers->resize(count);
}

}  // namespace

std::span<const PlanEstimate> PlanEstimator::estimate(const Group& group, PipelinePlayer* player,
                                                      std::vector<StageEstimate>* stages) {
  const bool by_part = !group.free.empty();
  start(group);
  list_variants();
  list_rows();
  list_levels(group.free);
  fill_columns();
  sum_columns();
  add_stages();
  list_played(by_part);
  find_loads();
  simulate(player);
  find_before();
  for (Row& row : rows_) row.longest_tail_s = longest_tail_s(row);
  sum_bytes();
  share_stages();
  find_stage_bytes();
  sum_states();
  find_totals();
  find_moved();
  for (Row& row : rows_) find_joules(&row);
  find_fullest(stages);
  if (by_part) {
    find_tails();
    for (std::size_t p = 0; p < shared_.size(); ++p) find_work(p);
  }
  found_.resize(plans_.size());
  for (std::size_t n = 0; n < plans_.size(); ++n) {
    const Plan& plan = plans_[n];
    const Row& row = rows_[plan.layout];
    const std::size_t played = played_at_[plan.partition * steps_.size() + row.step];
    PlanEstimate& found = found_[n];
    found = fullest_[plan.partition * sizes_.size() + row.sizes];
    found.max_load_s = max_load_s_[played];
    found.time_s = step_s_[played] + row.longest_tail_s + row.layout->exchange_s;
    found.energy_j = energy_j(plan, found.time_s);
    const bool over = found.memory_bytes > group.usable_bytes * kFits;
    found.status = static_cast<std::int32_t>(over ? PlanStatus::kOverMemory : PlanStatus::kOk);
    if (by_part) found.parts = parts(plan, found.time_s);
  }
  return found_;
}

void PlanEstimator::start(const Group& group) {
  on_ = &group.on;
  space_ = group.on.space;
  layouts_ = group.layouts;
  plans_ = group.plans;
  cuts_ = group.partitions[0].cuts;
  shared_.clear();
  for (const Partition& own : group.partitions) shared_.push_back({own.variants, 0, 0, 0, 0});
  times_ = group.times;
  stages_ = shape().pp;
  chunks_ = shape().vpp;
  split_ = schedule_of(shape()) >= PipelineSchedule::kZeroBubbleH1;
  columns_ = 0;
  steps_.clear();
  levels_.clear();
}

// ---- columns ----

void PlanEstimator::list_variants() {
  variants_.clear();
  positions_.assign(cuts_.begin(), cuts_.end());
  std::int32_t last = -1;
  const auto use = [&](std::int32_t v) {
    if (std::find(variants_.begin(), variants_.end(), v) != variants_.end()) return;
    variant_at_[at(v)] = variants_.size();
    variants_.push_back(v);
  };
  for (const Shared& own : shared_) {
    for (int k = 0; k < stages_; ++k) {
      const std::int32_t code = own.variants[at(k)];
      const StageRecompute recompute = StageRecompute::of(code);
      if (code != last) {
        use(recompute.rest);
        if (recompute.count > 0) use(recompute.more);
        last = code;
      }
      if (recompute.count == 0) continue;
      for_chunks(k, [&](int, int i, int j) { positions_.push_back(border_of(recompute, i, j)); });
    }
  }
  std::sort(positions_.begin(), positions_.end());
  positions_.erase(std::unique(positions_.begin(), positions_.end()), positions_.end());
  position_at_.resize(at(space_->layers) + 1);
  for (std::size_t k = 0; k < positions_.size(); ++k) position_at_[at(positions_[k])] = k;
}

PlanEstimator::Passes PlanEstimator::add_passes() {
  const Passes own{columns_, columns_ + 1, columns_ + 2, columns_ + (split_ ? 3U : 2U)};
  columns_ = own.backward + variants_.size();
  return own;
}

std::size_t PlanEstimator::add_step(const Passes& passes, const PricedLayout* layout) {
  steps_.push_back({passes, layout});
  return steps_.size() - 1;
}

// Fills `rows_`, `sizes_` and `steps_`: plans with equal messages share the step of level 0.
void PlanEstimator::list_rows() {
  rows_.clear();
  sizes_.clear();
  plain_ = add_passes();
  for (const std::size_t number : layouts_) {
    const PricedLayout& layout = space_->layouts[number];
    const LayoutCosts& costs = space_->layout_costs[at(layout.costs)];
    Row row{&layout, &costs, 0, 0, 0, columns_, columns_ + 1, 0.0, 0.0, 0.0};
    columns_ += 2;
    const LayoutRecord& l = layout.record;
    const std::array<std::int64_t, 3> of{l.dp, sharing_replicas(l), l.zero};
    const auto same =
        std::find_if(sizes_.begin(), sizes_.end(), [&](const Sizes& own) { return own.of == of; });
    row.sizes = static_cast<std::size_t>(same - sizes_.begin());
    if (same == sizes_.end()) sizes_.push_back({of, &layout, columns_++, 0.0});
    const auto same_messages = [&](const Row& other) {
      return other.layout->wrap_s == layout.wrap_s &&
             (other.layout->message_s.data() == layout.message_s.data() ||
              std::equal(layout.message_s.begin(), layout.message_s.end(),
                         other.layout->message_s.begin()));
    };
    const auto like = std::find_if(rows_.begin(), rows_.end(), same_messages);
    row.plain_step = like != rows_.end() ? like->plain_step : add_step(plain_, &layout);
    row.step = row.plain_step;
    if (l.zero >= 2) {  // passes overlap exchanges
      row.step = add_step(add_passes(), &layout);
    }
    rows_.push_back(row);
  }
}

void PlanEstimator::list_levels(std::span<const KindTimes> free) {
  if (free.empty()) return;
  const auto variants = at(space_->strategies[at(shape().strategy)].variants);
  const KindTimes* last = &times_;
  std::size_t step = rows_[0].plain_step;
  if (stages_ > 1) {
    step = add_step(plain_, nullptr);
    levels_.push_back({0, last, step});
  }
  for (std::size_t n = 0; n < kFreeLevels; ++n) {
    const KindTimes& own = free[n];
    if (own.forward_s == last->forward_s) continue;
    // Where the costs that this level sets to zero are zero already, it has the step of the level
    // before.
    if (!same_times(own, *last, at(space_->kinds), variants))
      step = add_step(add_passes(), nullptr);
    last = &own;
    levels_.push_back({n + 1, last, step});
  }
}

// Fills the columns of passes. The exchanges of `row` overlap them: weights are prefetched while
// the previous layer runs; sharded gradients are exchanged with every micro-batch.
void PlanEstimator::fill_passes(const Passes& passes, const KindTimes& times, const Row* row) {
  const auto kinds = at(space_->kinds);
  const double contention = space_->training.contention;
  const int zero = row == nullptr ? 0 : row->layout->record.zero;
  for (std::size_t k = 0; k <= kinds; ++k) {
    const std::size_t timed = k < kinds ? k : at(space_->order.back());
    const std::size_t kind = k < kinds ? k : at(space_->kind_at(space_->layers - 1, stages_));
    double* const own = &by_kind_[k * columns_];
    own[passes.forward] = times.forward_s[timed];
    own[passes.plain] = times.plain_s[timed];
    if (split_) own[passes.weight_grad] = times.weight_grad_s[timed];
    for (std::size_t u = 0; u < variants_.size(); ++u) {
      own[passes.backward + u] = times.backward_s[at(variants_[u]) * kinds + timed];
    }
    if (zero < 2) continue;
    const auto overlap = [&](std::size_t column, double exchange_s) {
      own[column] = overlapped_s(own[column], exchange_s, contention);
    };
    if (zero >= 3) overlap(passes.forward, row->costs->fetch_s[kind]);
    const double backward_s = row->costs->fetch_s[kind] + row->costs->each_s[kind];
    overlap(passes.plain, backward_s);
    for (std::size_t u = 0; u < variants_.size(); ++u) overlap(passes.backward + u, backward_s);
  }
}

void PlanEstimator::fill_columns() {
  const auto kinds = at(space_->kinds);
  const std::size_t used = columns_;
  columns_ = (columns_ + kBlock - 1) / kBlock * kBlock;
  reserve(&by_kind_, (kinds + 1) * columns_);
  for (std::size_t k = 0; k <= kinds; ++k) {
    std::fill_n(&by_kind_[k * columns_ + used], columns_ - used, 0.0);
  }
  fill_passes(plain_, times_, nullptr);
  for (const Level& level : levels_) {
    const Step& step = steps_[level.step];
    if (step.passes.forward != plain_.forward) fill_passes(step.passes, *level.times, nullptr);
  }
  const auto optimizer_s = [&](const LayoutCosts& costs, std::size_t timed, std::size_t kind) {
    double own_s = costs.step_bytes[kind] / times_.hbm_bytes_per_s;
    if (times_.step_s != nullptr) own_s += times_.step_s[timed] * costs.step_share[kind];
    return own_s;
  };
  for (const Row& row : rows_) {
    if (row.step != row.plain_step) fill_passes(steps_[row.step].passes, times_, &row);
    for (std::size_t k = 0; k <= kinds; ++k) {
      const std::size_t timed = k < kinds ? k : at(space_->order.back());
      const std::size_t kind = k < kinds ? k : at(space_->kind_at(space_->layers - 1, stages_));
      double* const own = &by_kind_[k * columns_];
      const double own_s = optimizer_s(*row.costs, timed, kind);
      own[row.sync] = row.costs->sync_s[kind];
      own[row.after] = own_s + row.costs->shared_s[kind];
      own[sizes_[row.sizes].own_step] = own_s;
    }
  }
}

// Adds layer after layer, so that every sum has the rounding of a column that is summed alone.
void PlanEstimator::sum_columns() {
  using Block = Lanes<kBlock>;
  const int last = space_->layers - 1;
  reserve(&sums_, positions_.size() * columns_);
  for (std::size_t first = 0; first < columns_; first += kBlock) {
    Block sum = Block::all(0.0);
    int n = 0;
    for (std::size_t p = 0; p < positions_.size(); ++p) {
      while (n < positions_[p]) {
        const bool alike = n < last;
        const int until =
            alike ? std::min({positions_[p], space_->same_kind_until[at(n)], last}) : n + 1;
        const int kind = alike ? space_->order[at(n)] : space_->kinds;
        const Block own = Block::load(&by_kind_[at(kind) * columns_ + first]);
        for (; n < until; ++n) sum = sum + own;
      }
      sum.store(&sums_[p * columns_ + first]);
    }
  }
}

// Fills the sums of each chunk and of each stage.
void PlanEstimator::add_stages() {
  reserve(&of_chunk_, at(stages_) * at(chunks_) * columns_);
  if (chunks_ > 1) of_stage_.assign(at(stages_) * columns_, 0.0);
  for (int k = 0; k < stages_; ++k) {
    for_chunks(k, [&](int c, int i, int j) {
      double* const own = &of_chunk_[(at(k) * at(chunks_) + at(c)) * columns_];
      const double* const from = &sums_[position_at_[at(i)] * columns_];
      const double* const to = &sums_[position_at_[at(j)] * columns_];
      for (std::size_t q = 0; q < columns_; ++q) own[q] = to[q] - from[q];
      if (chunks_ == 1) return;
      double* const stage = &of_stage_[at(k) * columns_];
      for (std::size_t q = 0; q < columns_; ++q) stage[q] += own[q];
    });
  }
  if (chunks_ == 1) of_stage_.swap(of_chunk_);
}

double PlanEstimator::backward_s(std::size_t column, StageRecompute r, int stage,
                                 int chunk) const noexcept {
  const std::size_t rest = column + variant_at_[at(r.rest)];
  if (r.count == 0) return chunk_sums(stage, chunk)[rest];
  const std::size_t place = place_of(stage, chunk);
  const int i = cuts_[place];
  const int j = cuts_[place + 1];
  const auto sum = [&](std::size_t of, int position) {
    return sums_[position_at_[at(position)] * columns_ + of];
  };
  const std::size_t more = column + variant_at_[at(r.more)];
  const int border = border_of(r, i, j);
  return (sum(more, border) - sum(more, i)) + (sum(rest, j) - sum(rest, border));
}

// ---- steps ----

// The place among the simulated steps of a step of a partition, which is added if it is new.
std::size_t PlanEstimator::play(std::size_t partition, std::size_t step) {
  std::size_t& own = played_at_[partition * steps_.size() + step];
  if (own == kNotPlayed) {
    own = played_.size();
    played_.push_back({partition, step});
  }
  return own;
}

void PlanEstimator::list_played(bool by_part) {
  played_.clear();
  played_at_.assign(shared_.size() * steps_.size(), kNotPlayed);
  for (const Plan& plan : plans_) {
    play(plan.partition, rows_[plan.layout].step);
    if (by_part) play(plan.partition, rows_[plan.layout].plain_step);
  }
  for (std::size_t p = 0; p < shared_.size(); ++p) {
    for (const Level& level : levels_) play(p, level.step);
  }
  const std::size_t count = played_.size();
  width_ = count == 1 ? 1 : (count + kSteps - 1) / kSteps * kSteps;
}

// Fills the seconds of all passes and the loads of stages in every step, and the largest load.
void PlanEstimator::find_loads() {
  const std::size_t cells = at(stages_) * at(chunks_) * width_;
  forward_s_.resize(cells);
  backward_s_.resize(cells);
  weight_grad_s_.resize(split_ ? cells : 0);
  reserve(&loads_s_, at(stages_) * width_);
  max_load_s_.assign(width_, 0.0);
  for (int k = 0; k < stages_; ++k) {
    double* const load_s = &loads_s_[at(k) * width_];
    std::fill_n(load_s, width_, 0.0);
    find_recomputes(k);
    for_chunks(k, [&](int c, int i, int j) { find_passes(k, c, i, j, load_s); });
    for (std::size_t s = 0; s < width_; ++s) max_load_s_[s] = std::max(max_load_s_[s], load_s[s]);
  }
}

void PlanEstimator::find_recomputes(int stage) {
  recomputes_.clear();
  for (std::size_t p = 0; p < shared_.size(); ++p) recomputes_.push_back(recompute_of(p, stage));
}

// Fills the passes of a chunk, layers i..j, in all steps, and adds them to the stage's loads. The
// steps that fill up `width_` repeat the first one.
void PlanEstimator::find_passes(int stage, int chunk, int i, int j, double* load_s) {
  const std::size_t own = at(stage) * at(chunks_) + at(chunk);
  const double* const sums = chunk_sums(stage, chunk);
  const double enters = space_->enters(i, j);
  const double leaves = space_->leaves(i, j);
  const double share = rounds_of(shape()) / static_cast<double>(shape().micro_batches);
  for (std::size_t s = 0; s < width_; ++s) {
    const Played& played = played_[s < played_.size() ? s : 0];
    const Step& step = steps_[played.step];
    const double forward_s = sums[step.passes.forward];
    const StageRecompute r = recomputes_[played.partition];
    const double back_s = r.count == 0 ? sums[step.passes.backward + variant_at_[at(r.rest)]]
                                       : backward_s(step.passes.backward, r, stage, chunk);
    const bool sends = step.layout != nullptr;
    const double enter_s = sends ? enters * on_->enter_s(*step.layout, own) : 0.0;
    const double leave_s = sends ? leaves * on_->leave_s(*step.layout, own) : 0.0;
    const std::size_t cell = own * width_ + s;
    forward_s_[cell] = forward_s + enter_s;
    backward_s_[cell] = back_s + leave_s;
    if (split_) weight_grad_s_[cell] = std::min(backward_s_[cell], sums[step.passes.weight_grad]);
    load_s[s] += share * (enter_s + leave_s + forward_s + back_s);
  }
}

void PlanEstimator::simulate(PipelinePlayer* player) {
  step_s_.assign(width_, 0.0);
  if (stages_ > 1) {
    player->steps_s(
        schedule_of(shape()),
        {stages_, chunks_, shape().micro_batches, forward_s_, backward_s_, weight_grad_s_, 1.0},
        step_s_);
    return;
  }
  for (std::size_t s = 0; s < width_; ++s) {
    double forward_s = 0.0;
    double back_s = 0.0;
    for (std::size_t c = 0; c < at(chunks_); ++c) {
      forward_s += forward_s_[c * width_ + s];
      back_s += backward_s_[c * width_ + s];
    }
    step_s_[s] = static_cast<double>(shape().micro_batches) * (forward_s + back_s);
  }
}

// The longest work of a stage after the last pass; the same rule as StepPlayer::take_passes.
double PlanEstimator::longest_tail_s(const Row& row) const {
  const bool one_way = !bidirectional(shape());
  const double contention = space_->training.contention;
  const std::size_t plain = steps_[row.step].passes.plain;
  const auto of_one = [&](double all_s) { return chunks_ == 1 ? all_s : all_s / chunks_; };
  double longest_s = 0.0;
  double before_s = 0.0;
  for (int k = 0; k < stages_; ++k) {
    const double* const own = &of_stage_[at(k) * columns_];
    longest_s =
        std::max(longest_s, tail_after(own[row.sync], of_one(own[plain]), row.costs->bucket_s,
                                       own[row.after], of_one(before_s), contention));
    if (one_way) before_s += own[plain];
  }
  return longest_s;
}

// Fills `before_s_`: for every stage and level, the backward passes (of one chunk each) of the
// stages before it.
void PlanEstimator::find_before() {
  const bool one_way = !bidirectional(shape());
  const std::size_t count = levels_.size() + 1;
  reserve(&before_s_, at(stages_) * count);
  for (std::size_t n = 0; n < count; ++n) {
    const std::size_t plain = n == 0 ? plain_.plain : steps_[levels_[n - 1].step].passes.plain;
    double before_s = 0.0;
    for (int k = 0; k < stages_; ++k) {
      before_s_[at(k) * count + n] = chunks_ == 1 ? before_s : before_s / chunks_;
      if (one_way) before_s += of_stage_[at(k) * columns_ + plain];
    }
  }
}

// Fills `tails_s_`: the longest work of an optimiser after the last backward pass, by level.
void PlanEstimator::find_tails() {
  const std::size_t count = levels_.size() + 1;
  tails_s_.assign(sizes_.size() * count, 0.0);
  for (std::size_t s = 0; s < sizes_.size(); ++s) {
    double* const tails_s = &tails_s_[s * count];
    for (std::size_t k = 0; k < at(stages_); ++k) {
      const double own_s = of_stage_[k * columns_ + sizes_[s].own_step];
      const double* const before_s = &before_s_[k * count];
      for (std::size_t n = 0; n < count; ++n) {
        tails_s[n] = std::max(tails_s[n], own_s - before_s[n]);
      }
    }
  }
}

// The mean and the largest work of a stage on a micro-batch in the last level.
void PlanEstimator::find_work(std::size_t partition) {
  const Passes& passes = levels_.empty() ? plain_ : steps_[levels_.back().step].passes;
  Shared& shared = shared_[partition];
  for (int k = 0; k < stages_; ++k) {
    const StageRecompute r = recompute_of(partition, k);
    double load_s = 0.0;
    for (int c = 0; c < chunks_; ++c) {
      const double* const own = chunk_sums(k, c);
      const double back_s = backward_s(passes.backward, r, k, c);
      load_s += own[passes.forward] + back_s;
      shared.again_s += std::max(0.0, back_s - own[passes.plain]) / stages_;
    }
    shared.mean_s += load_s / stages_;
    shared.most_s = std::max(shared.most_s, load_s);
  }
}

// The parts of the step time: the cost of each kind of communication, and of the host, is the
// decrease of the step time to the level that makes it free. In the last level only the devices'
// own work takes time.
PlanParts PlanEstimator::parts(const Plan& plan, double time_s) const {
  const Row& row = rows_[plan.layout];
  const Shared& shared = shared_[plan.partition];
  PlanParts found{};
  const double* const tails_s = &tails_s_[row.sizes * (levels_.size() + 1)];
  double before_s = time_s;
  double step_s = played_s(plan.partition, row.plain_step);
  double tail_s = tails_s[0];
  const auto exposed = [&] {
    const double lost_s = without_rounding(before_s - (step_s + tail_s), time_s);
    before_s = step_s + tail_s;
    return lost_s;
  };
  found.data_comm_s = exposed();
  double* const parts[kFreeLevels + 1] = {&found.pipeline_comm_s, &found.expert_comm_s,
                                          &found.context_comm_s, &found.tensor_comm_s,
                                          &found.host_s};
  for (std::size_t n = 0; n < levels_.size(); ++n) {
    step_s = played_s(plan.partition, levels_[n].step);
    tail_s = tails_s[n + 1];
    *parts[levels_[n].part] = exposed();
  }
  const double m = rounds_of(shape());
  found.compute_s = m * (shared.mean_s - shared.again_s);
  found.recompute_s = m * shared.again_s;
  found.imbalance_s = without_rounding(m * (shared.most_s - shared.mean_s), step_s);
  found.bubble_s = without_rounding(step_s - m * shared.most_s, step_s);
  found.optimizer_s = tail_s;
  return found;
}

// ---- bytes ----

// Bytes of activations of the layers before each position, in each variant of the strategy.
void PlanEstimator::sum_bytes() {
  const int strategy = shape().strategy;
  const std::array<const void*, 2> of{&space_->strategies[at(strategy)],
                                      stages_ > 1 ? space_ : nullptr};
  if (of == bytes_of_) return;
  bytes_of_ = of;
  const auto width = at(space_->layers) + 1;
  const auto variants = at(space_->strategies[at(strategy)].variants);
  once_.assign(width, 0.0);
  stash_.assign(variants * width, 0.0);
  for (int i = 0; i < space_->layers; ++i) {
    const LayerKindRecord& size = space_->size_of(strategy, space_->kind_at(i, stages_));
    once_[at(i) + 1] = once_[at(i)] + size.once_bytes;
    for (std::size_t v = 0; v < variants; ++v) {
      double* const own = &stash_[v * width + at(i)];
      own[1] = own[0] + size.stash_bytes[v];
    }
  }
}

void PlanEstimator::share_stages() {
  stages_shared_.clear();
  runs_.clear();
  for (int k = 0; k < stages_; ++k) stages_shared_.push_back(share_stage(k));
}

PlanEstimator::StageShare PlanEstimator::share_stage(int stage) {
  const LayoutRecord& l = shape();
  StageShare own{0.0, 0.0, 0, runs_.size(), 0, 0};
  own.in_flight = micro_batches_in_flight(schedule_of(l), l.pp, stage, l.micro_batches, l.vpp);
  const int blocks_end = std::min(space_->last_block, space_->layers - (l.pp > 1));
  for_chunks(stage, [&](int, int i, int j) {
    for (int n = i, until = i; n < j; n = until) {
      const bool last = n == space_->layers - 1;
      until = last ? j : std::min({j, space_->same_kind_until[at(n)], space_->layers - 1});
      runs_.push_back({space_->kind_at(n, l.pp), n, until});
    }
    own.once += once_[at(j)] - once_[at(i)];
    const bool alike = space_->equal_blocks && i >= space_->first_block && j <= blocks_end;
    own.blocks = alike && own.blocks >= 0 ? own.blocks + (j - i) : -1;
  });
  own.runs = runs_.size() - own.runs_at;
  return own;
}

void PlanEstimator::find_stage_bytes() {
  stage_bytes_.clear();
  for (std::size_t p = 0; p < shared_.size(); ++p) {
    for (int k = 0; k < stages_; ++k) stage_bytes_.push_back(stage_bytes(p, k));
  }
}

PlanEstimator::StageBytes PlanEstimator::stage_bytes(std::size_t partition, int stage) {
  const StageRecompute r = recompute_of(partition, stage);
  const StageShare& shared = stages_shared_[at(stage)];
  StageBytes own{r, 0.0, 0.0, 0.0};
  const auto stash = [&](int v, int i, int j) {
    const double* const sums = &stash_[at(v) * once_.size()];
    return sums[j] - sums[i];
  };
  const auto both = [&](int i, int border, int j) {
    return stash(r.more, i, border) + stash(r.rest, border, j);
  };
  by_chunk_.clear();
  std::size_t lowest = at(space_->layers);
  std::size_t run = shared.runs_at;
  for_chunks(stage, [&](int c, int i, int j) {
    const int border = border_of(r, i, j);
    for (; run < shared.runs_at + shared.runs && runs_[run].i >= i && runs_[run].j <= j; ++run) {
      const double* const live = space_->size_of(shape().strategy, runs_[run].kind).live_bytes;
      if (runs_[run].i < border) own.live = std::max(own.live, live[r.more]);
      if (runs_[run].j > border) own.live = std::max(own.live, live[r.rest]);
    }
    by_chunk_.push_back(both(i, border, j));
    if (place_of(stage, c) >= lowest) return;
    lowest = place_of(stage, c);
    const int first = std::min(std::max(i, space_->first_block) + 1, j);
    own.first_stash = both(i, std::min(border, first), first);
  });
  own.stash = on_->stash_bytes(by_chunk_, stage, shared.in_flight);
  return own;
}

// Bytes of weights, gradients and optimiser state of every stage for all `sizes_`, added in the
// order of the layers. A stage with as many equal blocks as the one before it has the same sums.
void PlanEstimator::sum_states() {
  const auto kinds = at(space_->kinds);
  state_width_ = (3 * sizes_.size() + kSteps - 1) / kSteps * kSteps;
  reserve(&state_by_kind_, (kinds + 1) * state_width_);
  for (std::size_t k = 0; k <= kinds; ++k) {
    double* own = &state_by_kind_[k * state_width_];
    for (const Sizes& sizes : sizes_) {
      const StateBytes& state = space_->layout_costs[at(sizes.layout->costs)].states[k];
      for (const double bytes : {state.weights, state.gradients, state.optimizer}) *own++ = bytes;
    }
    std::fill(own, &state_by_kind_[k * state_width_] + state_width_, 0.0);
  }
  reserve(&states_, at(stages_) * state_width_);
  const StageShare* last = nullptr;
  for (int k = 0; k < stages_; ++k) {
    StageShare& own = stages_shared_[at(k)];
    own.state_at = at(k) * state_width_;
    if (last != nullptr && last->blocks >= 0 && last->blocks == own.blocks) {
      own.state_at = last->state_at;
    } else {
      for (std::size_t first = 0; first < state_width_; first += kSteps) sum_state(k, first);
    }
    last = &own;
  }
}

void PlanEstimator::sum_state(int stage, std::size_t first) {
  Lanes<kSteps> sum = Lanes<kSteps>::all(0.0);
  for_chunks(stage, [&](int, int i, int j) {
    for (int n = i; n < j; ++n) {
      const std::size_t kind = at(space_->kind_at(n, stages_));
      sum = sum + Lanes<kSteps>::load(&state_by_kind_[kind * state_width_ + first]);
    }
  });
  sum.store(&states_[at(stage) * state_width_ + first]);
}

// Of a stage's chunks, the one that comes first in the model is the last to run backward.
LateGradients PlanEstimator::late_gradients(std::size_t partition, int stage) const {
  LateGradients found{0.0, 0.0, 0.0, stage_bytes_[partition * at(stages_) + at(stage)].first_stash};
  if (late_.empty()) return found;
  std::size_t lowest = at(space_->layers);
  for_chunks(stage, [&](int c, int i, int j) {
    const auto part = [&](int from, int to) { return late_[at(to)] - late_[at(from)]; };
    found.all += part(i, j);
    found.last += part(std::min(std::max(i, space_->last_block), j), j);
    if (place_of(stage, c) >= lowest) return;
    lowest = place_of(stage, c);
    found.first = part(i, std::min(std::max(i, space_->first_block) + 1, j));
  });
  return found;
}

// Finds the fullest stage of all plans; fills `stages`, if given, with those of the first plan.
void PlanEstimator::find_fullest(std::vector<StageEstimate>* stages) {
  if (stages != nullptr) stages->clear();
  fullest_.assign(shared_.size() * sizes_.size(), {});
  std::size_t summed = sizes_.size();  // whose late gradients are summed
  for (std::size_t n = 0; n < plans_.size(); ++n) {
    const std::size_t sizes = rows_[plans_[n].layout].sizes;
    const std::size_t own = plans_[n].partition * sizes_.size() + sizes;
    if (fullest_[own].memory_bytes > 0.0) continue;
    if (sizes != summed) sum_late(space_->layout_costs[at(sizes_[sizes].layout->costs)]);
    summed = sizes;
    fullest_[own] = fullest_stage(plans_[n].partition, sizes, n == 0 ? stages : nullptr);
  }
}

void PlanEstimator::sum_late(const LayoutCosts& costs) {
  late_.clear();
  if (space_->training.late_gradients == 0) return;
  late_.push_back(0.0);
  for (int n = 0; n < space_->layers; ++n) {
    late_.push_back(late_.back() + costs.late_bytes[at(space_->kind_at(n, stages_))]);
  }
}

// Whether a stage has the layers of the stage before it and no more micro-batches in flight, so
// that it is no fuller: peaks rise with the micro-batches in flight if all gradients are always
// there.
bool PlanEstimator::no_fuller(std::size_t partition, int stage) const noexcept {
  if (stage == 0 || space_->training.late_gradients != 0) return false;
  const StageShare& before = stages_shared_[at(stage) - 1];
  const StageShare& shared = stages_shared_[at(stage)];
  const StageBytes* const own = &stage_bytes_[partition * at(stages_) + at(stage)];
  return shared.blocks >= 0 && shared.blocks == before.blocks && shared.once == before.once &&
         shared.in_flight <= before.in_flight && own->live == (own - 1)->live &&
         own->stash == (own - 1)->stash;
}

// The memory of the fullest stage; appends the bytes of every stage to `stages` if given.
PlanEstimate PlanEstimator::fullest_stage(std::size_t partition, std::size_t sizes,
                                          std::vector<StageEstimate>* stages) const {
  const PricedLayout& layout = *sizes_[sizes].layout;
  const LayoutCosts& costs = space_->layout_costs[at(layout.costs)];
  const auto m = static_cast<double>(shape().micro_batches);
  const double buffer_bytes = space_->buffer_bytes(layout);
  const double lost = (1.0 + space_->training.fragmentation) - 1.0;
  const bool layer_peaks = chunks_ == 1 && space_->size_of(shape().strategy, 0).layer_peaks != 0;
  PlanEstimate found{};
  for (int k = 0; k < stages_; ++k) {
    if (stages == nullptr && !layer_peaks && no_fuller(partition, k)) continue;
    const StageShare& shared = stages_shared_[at(k)];
    const StageBytes& own = stage_bytes_[partition * at(stages_) + at(k)];
    double gather = 0.0;
    for (std::size_t q = 0; q < shared.runs; ++q) {
      gather = std::max(gather, costs.gather_bytes[at(runs_[shared.runs_at + q].kind)]);
    }
    MovingBytes moving{own.stash, own.live, shared.once, buffer_bytes + gather};
    if (layer_peaks) {
      const int i = cuts_[at(k)];
      const int j = cuts_[at(k) + 1];
      const bool late = !(m > shared.in_flight);
      find_layer_peak(*space_, layout.record, costs, own.recompute,
                      {i, border_of(own.recompute, i, j), j}, late, &moving);
    }
    const PeakBytes peak =
        peak_bytes(moving, late_gradients(partition, k), shared.in_flight, m, lost);
    const double* const state = &states_[shared.state_at + 3 * sizes];
    const MemoryTerms memory{state[0],       state[1] + peak.gradients,
                             state[2],       peak.activations,
                             peak.live,      peak.once,
                             moving.buffers, peak.lost};
    const auto instant = static_cast<std::int32_t>(peak.instant);
    const double bytes = total(memory);
    if (bytes > found.memory_bytes) {
      found.memory_bytes = bytes;
      found.memory = memory;
      found.fullest = k;
      found.instant = instant;
    }
    if (stages == nullptr) continue;
    stages->push_back({loads_s_[at(k) * width_], memory, instant, 0});
  }
  return found;
}

// ---- joules ----

// Kinds of layers and numbers of parameters, stage by stage, and the joules of passes of each
// partition. Plans of one strategy share these sums if stages have one chunk each, and those of
// passes if all layers have one variant.
void PlanEstimator::find_totals() {
  const LayoutRecord& l = shape();
  const int many = stages_ > 1 ? 2 : 1;
  if (chunks_ != 1 || totals_.space != space_ || totals_.strategy != l.strategy ||
      totals_.times != times_.forward_j || totals_.stages != many) {
    totals_ = {chunks_ == 1 ? space_ : nullptr, l.strategy, times_.forward_j, many, {}, {}};
    totals_.passes_j.fill(kNan);
    layer_kinds_.clear();
    for (int k = 0; k < stages_; ++k) {
      for_chunks(k, [&](int, int i, int j) {
        for (int n = i; n < j; ++n) layer_kinds_.push_back(space_->kind_at(n, stages_));
      });
    }
    for (const std::int32_t kind : layer_kinds_) {
      const LayerKindRecord& size = space_->size_of(l.strategy, kind);
      totals_.parameters.parameters += size.parameters;
      totals_.parameters.frozen_parameters += size.frozen_parameters;
      totals_.parameters.packed_parameters += size.packed_parameters;
      totals_.parameters.packed_bytes += size.packed_bytes;
    }
  }
  for (Shared& own : shared_) {
    const auto& codes = own.variants;
    const bool alike =
        codes[0] < kMaxVariants && std::equal(codes.begin() + 1, codes.end(), codes.begin());
    double* const known = alike ? &totals_.passes_j[at(codes[0])] : nullptr;
    own.passes_j = known != nullptr && !std::isnan(*known) ? *known : passes_j(own);
    if (known != nullptr) *known = own.passes_j;
  }
}

double PlanEstimator::passes_j(const Shared& shared) const {
  double sum_j = 0.0;
  for (int k = 0; k < stages_; ++k) {
    const StageRecompute r = StageRecompute::of(shared.variants[at(k)]);
    for_chunks(k, [&](int, int i, int j) {
      const int border = border_of(r, i, j);
      for (int n = i; n < j; ++n) {
        const std::size_t v = at(n < border ? r.more : r.rest) * at(space_->kinds);
        const std::size_t timed = at(space_->order[at(n)]);
        sum_j += times_.forward_j[timed] + times_.backward_j[v + timed];
      }
    });
  }
  return sum_j;
}

// The bytes that the optimiser moves to and from HBM, for each of `sizes_`.
void PlanEstimator::find_moved() {
  const std::size_t width = (sizes_.size() + kSteps - 1) / kSteps * kSteps;
  moved_.assign((at(space_->kinds) + 1) * width, 0.0);
  for (std::size_t s = 0; s < sizes_.size(); ++s) {
    const LayoutCosts& costs = space_->layout_costs[at(sizes_[s].layout->costs)];
    for (std::size_t k = 0; k <= at(space_->kinds); ++k)
      moved_[k * width + s] = costs.step_bytes[k];
  }
  for (std::size_t first = 0; first < width; first += kSteps) {
    Lanes<kSteps> sum = Lanes<kSteps>::all(0.0);
    for (const std::int32_t kind : layer_kinds_) {
      sum = sum + Lanes<kSteps>::load(&moved_[at(kind) * width + first]);
    }
    double bytes[kSteps];
    sum.store(bytes);
    for (std::size_t s = first; s < std::min(first + kSteps, sizes_.size()); ++s) {
      sizes_[s].moved_bytes = bytes[s - first];
    }
  }
}

// The optimiser's HBM traffic, and the bytes that devices send one another, counted as a ring sends
// them.
void PlanEstimator::find_joules(Row* row) const {
  const LayoutRecord& l = row->layout->record;
  const LayoutCosts& costs = *row->costs;
  const StrategyRecord& s = space_->strategies[at(l.strategy)];
  const auto m = static_cast<double>(l.micro_batches);
  const double inner = static_cast<double>(s.tp * s.cp) * static_cast<double>(l.dp);
  const TrainingRecord& t = space_->training;
  const LayerKindRecord& held = totals_.parameters;
  const double share = (costs.shards - 1.0) / costs.shards;
  const double trained = held.parameters - held.frozen_parameters;
  const double gathered = l.zero == 3 ? held.parameters * mean_weight_bytes(held, t.gather_bytes)
                                      : trained * t.gather_bytes;
  const double gradients = trained * t.gradient_bytes * share;
  const double weights = gathered * share;
  double synced = 2.0 * gradients;
  if (l.zero == 1) synced = gradients + weights;
  if (l.zero >= 2) synced = m * gradients + (l.zero == 3 ? 2.0 * m : 1.0) * weights;
  const double among = 2.0 * (costs.copies - 1.0) / costs.copies;  // all-reduce of equal shards
  synced += among * trained * t.gradient_bytes / costs.shards;
  const double hops = l.pp > 1 ? places_of(l) - 1 : 0.0;
  const double sent = inner * m * (s.sent_bytes + 2.0 * hops * s.message_bytes) + inner * synced;
  row->moved_j = inner * sizes_[row->sizes].moved_bytes * t.hbm_byte_j;
  row->sent_j = sent * t.network_byte_j;
}

// Energy of operators on the chip, traffic and static power; at most what the chips' power limit
// supplies.
double PlanEstimator::energy_j(const Plan& plan, double time_s) const {
  const Row& row = rows_[plan.layout];
  const LayoutRecord& l = row.layout->record;
  const StrategyRecord& s = space_->strategies[at(l.strategy)];
  const double inner = static_cast<double>(s.tp * s.cp) * static_cast<double>(l.dp);
  const double device_s = time_s * inner * l.pp;
  const double drawn_j = inner * rounds_of(l) * shared_[plan.partition].passes_j + row.moved_j +
                         row.sent_j + times_.static_w * device_s;
  return std::min(drawn_j, times_.limit_w * device_s);
}

}  // namespace phaze
