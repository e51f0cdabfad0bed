// The public functions of the plan kernel.
#include "phaze/plan.hpp"

#include <algorithm>

#include "base/numbers.hpp"
#include "plan/plan_estimate.hpp"
#include "plan/plan_solver.hpp"

namespace phaze {
PlanSpaceImpl::PlanSpaceImpl() : solvers(std::make_unique<SolverPool>()) {}
PlanSpaceImpl::~PlanSpaceImpl() = default;

PlanSpace::PlanSpace() : impl_(std::make_unique<PlanSpaceImpl>()) {}
PlanSpace::~PlanSpace() = default;
PlanSpace::PlanSpace(PlanSpace&&) noexcept = default;
PlanSpace& PlanSpace::operator=(PlanSpace&&) noexcept = default;

Status PlanSpace::build(const PlanProblem& problem, std::span<const double> memory_limits,
                        std::span<const std::uint8_t> fits) {
  impl_ = std::make_unique<PlanSpaceImpl>();
  return impl_->build(problem, memory_limits, fits);
}

std::size_t PlanSpace::layouts() const noexcept { return impl_->layouts.size(); }
std::size_t PlanSpace::strategies() const noexcept { return impl_->strategies.size(); }
std::size_t PlanSpace::memory_limits() const noexcept { return impl_->bounds.memory_limits.size(); }
int PlanSpace::kinds() const noexcept { return impl_->kinds; }
int PlanSpace::layers() const noexcept { return impl_->layers; }
double PlanSpace::usable_bytes(std::size_t memory_limit) const noexcept {
  return impl_->bounds.memory_limits[memory_limit];
}
const LayoutRecord& PlanSpace::layout(std::size_t layout) const noexcept {
  return impl_->layouts[layout].record;
}

PlanStatus PlanSpace::even_partition(std::size_t layout, const KindTimes& times,
                                     std::int32_t variant, double usable_bytes,
                                     Partition* partition) const {
  PlanSolver solver;
  return solver.even(*impl_, layout, times, variant, usable_bytes, partition);
}

void PlanSpace::choose_recompute(std::size_t layout, const KindTimes& times, double usable_bytes,
                                 Partition* partition) const {
  PlanSolver solver;
  solver.start(*impl_, layout, times);
  solver.recompute().choose(usable_bytes, partition);
}

PlanPasses PlanSpace::passes(std::size_t layout, const Partition& partition,
                             const KindTimes& times) const {
  PlanSolver solver;
  solver.start(*impl_, layout, times);
  StepPlayer& step = solver.step();
  const double step_s = step.play(partition).step_s;
  return {step.forward_s(), step.backward_s(), step.weight_grad_s(), step_s};
}

// No cut may separate tied layers; every chunk has a layer, every stage a variant.
PlanStatus PlanSpace::check_partition(std::size_t layout, const Partition& partition) const {
  const LayoutRecord& l = impl_->layouts[layout].record;
  const std::size_t chunks = at(places_of(l));
  if (partition.cuts.size() != chunks + 1 || partition.variants.size() != at(l.pp) ||
      partition.cuts.front() != 0 || partition.cuts.back() != impl_->layers) {
    return PlanStatus::kTooManyStages;
  }
  for (std::size_t c = 0; c < chunks; ++c) {
    if (partition.cuts[c] >= partition.cuts[c + 1]) return PlanStatus::kTooManyStages;
    if (impl_->may_cut[at(partition.cuts[c])] == 0) return PlanStatus::kBrokenTie;
  }
  const int variants = impl_->strategies[at(l.strategy)].variants;
  for (const std::int32_t code : partition.variants) {
    const StageRecompute recompute = StageRecompute::of(code);
    if (code < 0 || recompute.rest >= variants || recompute.more >= variants)
      return PlanStatus::kBadStrategy;
  }
  if (l.pp > 1 &&
      check_schedule(schedule_of(l), l.pp, l.vpp, l.micro_batches) != PipelineStatus::kOk) {
    return PlanStatus::kBadSchedule;
  }
  return PlanStatus::kOk;
}

namespace {

// Plans of one shape, which are estimated together.
class EvenGroup {
 public:
  explicit EvenGroup(const PlanSpaceImpl& space) : space_(space) {}

  bool takes(const LayoutRecord& layout) const noexcept {
    return numbers_.empty() || same_shape(layout, space_.layouts[layouts_[0]].record);
  }
  PlanStatus add(std::size_t number, std::size_t layout, std::int32_t variant,
                 const KindTimes& times, double usable_bytes) {
    std::size_t partition = 0;
    const PlanStatus status = find(layout, variant, times, usable_bytes, &partition);
    if (status != PlanStatus::kOk) return status;
    std::size_t own = layouts_.size();
    while (own > 0 && layouts_[own - 1] != layout) --own;
    if (own == 0) layouts_.push_back(layout);
    plans_.push_back({own == 0 ? layouts_.size() - 1 : own - 1, partition});
    numbers_.push_back(number);
    return PlanStatus::kOk;
  }
  void estimate(const KindTimes& times, std::span<const KindTimes> free, double usable_bytes,
                const PlanSpace::Put& put) {
    if (numbers_.empty()) return;
    solver_.lay(space_, layouts_[0]);
    const std::span<const Partition> partitions(partitions_.data(), variants_.size());
    put(numbers_,
        estimator_.estimate({solver_.on(), layouts_, partitions, plans_, times, free, usable_bytes},
                            solver_.step().player()));
    numbers_.clear();
    layouts_.clear();
    plans_.clear();
    variants_.clear();
  }

 private:
  // The number of a plan's partition, which is added if it is new.
  PlanStatus find(std::size_t layout, std::int32_t variant, const KindTimes& times,
                  double usable_bytes, std::size_t* partition) {
    *partition = variants_.size();
    if (variant >= 0) {
      const auto known = std::find(variants_.begin(), variants_.end(), variant);
      *partition = static_cast<std::size_t>(known - variants_.begin());
      if (known != variants_.end()) return PlanStatus::kOk;
    }
    if (partitions_.size() == variants_.size()) partitions_.emplace_back();
    Partition& own = partitions_[variants_.size()];
    PlanStatus status = PlanStatus::kOk;
    if (variant >= 0 && !variants_.empty()) {
      own.cuts = partitions_[0].cuts;
      status = use_variant(space_, space_.layouts[layout].record, variant, &own);
    } else {
      status = solver_.even(space_, layout, times, variant, usable_bytes, &own);
    }
    if (status != PlanStatus::kOk) return status;
    if (variant < 0) {
      const auto same = [&](const Partition& other) { return other.variants == own.variants; };
      *partition = static_cast<std::size_t>(
          std::find_if(partitions_.begin(), partitions_.end(), same) - partitions_.begin());
    }
    if (*partition == variants_.size()) variants_.push_back(variant);
    return PlanStatus::kOk;
  }

  const PlanSpaceImpl& space_;
  PlanSolver solver_;
  PlanEstimator estimator_;
  std::vector<std::size_t> numbers_;    // of the plans
  std::vector<std::size_t> layouts_;    // distinct
  std::vector<std::int32_t> variants_;  // of each partition, as given
  std::vector<Partition> partitions_;   // distinct; those after the last variant are scratch
  std::vector<PlanEstimator::Plan> plans_;
};

}  // namespace

void PlanSpace::estimate_even(std::span<const std::size_t> plans,
                              std::span<const std::int64_t> layouts,
                              std::span<const std::int32_t> variants, const TimesOf& times,
                              std::span<const TimesOf> free, double usable_bytes,
                              const Put& put) const {
  EvenGroup group(*impl_);
  KindTimes own{};
  std::vector<KindTimes> freed(free.size());
  std::int32_t strategy = -1;
  for (const std::size_t k : plans) {
    const std::size_t layout = at(layouts[k]);
    const LayoutRecord& l = impl_->layouts[layout].record;
    if (!group.takes(l)) group.estimate(own, freed, usable_bytes, put);
    if (l.strategy != strategy) {
      strategy = l.strategy;
      own = times(at(strategy));
      for (std::size_t n = 0; n < free.size(); ++n) freed[n] = free[n](at(strategy));
    }
    const PlanStatus status = group.add(k, layout, variants[k], own, usable_bytes);
    if (status == PlanStatus::kOk) continue;
    PlanEstimate none{};
    none.time_s = kNan;
    none.status = static_cast<std::int32_t>(status);
    put({&k, 1}, {&none, 1});
  }
  group.estimate(own, freed, usable_bytes, put);
}

PlanEstimate PlanSpace::estimate(std::size_t layout, const Partition& partition,
                                 const KindTimes& times, std::span<const KindTimes> free,
                                 double usable_bytes, std::vector<StageEstimate>* stages) const {
  PlanSolver solver;
  solver.lay(*impl_, layout);
  PlanEstimator estimator;
  const PlanEstimator::Plan plan{0, 0};
  return estimator.estimate(
      {solver.on(), {&layout, 1}, {&partition, 1}, {&plan, 1}, times, free, usable_bytes},
      solver.step().player(), stages)[0];
}

PlacedPlan PlanSpace::best_of_layout(std::size_t layout, const KindTimes& times,
                                     double usable_bytes, double below_s) const {
  PlanSolver solver;
  return solver.best(*impl_, layout, times, usable_bytes, below_s);
}

PlacedPlan PlanSpace::best_of_strategy(std::int32_t strategy, const KindTimes& times,
                                       const KindTimes& least, std::size_t memory_limit,
                                       double below_s) const {
  PlanSolver solver;
  return phaze::best_of_strategy(*impl_, strategy, times, least, memory_limit, below_s, &solver);
}

void PlanSpace::best_of_memory_limits(std::int32_t strategy, const KindTimes& times,
                                      const KindTimes& least, std::span<const double> below_s,
                                      std::span<PlacedPlan> plans) const {
  PlayedSteps played;
  const SolverPool::Lease solver = impl_->solvers->lend(&played);
  const PlacedPlan* larger_limit = nullptr;  // the best plan with the next larger memory limit
  for (std::size_t c = below_s.size(); c-- > 0;) {
    plans[c] = {kInfinite, 0.0, -1, {}};
    if (!(below_s[c] > -kInfinite)) continue;
    // The best plan with more memory is also best here, if it fits.
    if (larger_limit != nullptr && larger_limit->memory_bytes <= impl_->bounds.memory_limits[c]) {
      plans[c] = *larger_limit;
    } else {
      plans[c] =
          phaze::best_of_strategy(*impl_, strategy, times, least, c, below_s[c], solver.get());
    }
    if (plans[c].time_s < kInfinite) larger_limit = &plans[c];
  }
}

bool PlanSpace::before(const PlacedPlan& a, const PlacedPlan& b) const {
  return comes_before(*impl_, a, b);
}

std::vector<PlacedPlan> PlanSpace::top_plans(std::span<const KindTimes> times,
                                             std::size_t memory_limit, std::size_t top, int threads,
                                             SettledLayouts* settled, const AskedToStop& stop,
                                             double below_s) const {
  return phaze::top_plans(*impl_, times, memory_limit, top, threads, settled, stop, below_s);
}

std::vector<PlacedPlan> PlanSpace::front(std::span<const KindTimes> times, std::size_t memory_limit,
                                         double most_s, int threads,
                                         SettledLayouts* settled) const {
  return plan_front(*impl_, times, memory_limit, most_s, threads, settled);
}

double PlanSpace::layout_bound_s(std::size_t layout, const KindTimes& least,
                                 std::size_t memory_limit, double enough_s) const {
  const StepTotals totals = totals_of(*impl_, impl_->layouts[layout].record.strategy, least);
  const double bound_s = bound_of_layout(*impl_, layout, memory_limit, totals, least, enough_s);
  if (bound_s > enough_s) return bound_s;
  return std::max(bound_s, bound_of_chunks(*impl_, layout, memory_limit, least, enough_s));
}

double PlanSpace::strategy_bound_s(std::int32_t strategy, const KindTimes& least,
                                   std::size_t memory_limit) const {
  const StepTotals totals = totals_of(*impl_, strategy, least);
  double lowest = kInfinite;
  const std::size_t list = at(strategy) * impl_->bounds.memory_limits.size() + memory_limit;
  const std::vector<std::int64_t>& layouts = impl_->bounds.fitting[list];
  const std::vector<BoundLine>& lines = impl_->bounds.fitting_lines[list];
  const double work_s = line_work_s(*impl_, totals);
  const auto look_at = [&](std::size_t k) {
    lowest = std::min(lowest,
                      bound_of_layout(*impl_, at(layouts[k]), memory_limit, totals, least, lowest));
  };
  std::size_t first = 0;
  double least_s = kInfinite;
  for (std::size_t k = 0; k < lines.size() && lines[k].least_from_here_s(work_s) < least_s; ++k) {
    if (!(lines[k].least_s(work_s) < least_s)) continue;
    least_s = lines[k].least_s(work_s);
    first = k;
  }
  if (!lines.empty()) look_at(first);
  for (std::size_t k = 0; k < lines.size(); ++k) {
    if (lines[k].least_from_here_s(work_s) > lowest) break;
    if (!(lines[k].least_s(work_s) > lowest)) look_at(k);
  }
  return lowest;
}

double PlanSpace::work_bound_s(std::int32_t strategy, double work_s,
                               std::size_t memory_limit) const {
  double lowest = kInfinite;
  for (const BoundLine& line :
       impl_->bounds.lines[at(strategy) * impl_->bounds.memory_limits.size() + memory_limit]) {
    lowest = std::min(lowest, line.slope * work_s + line.height_s);
  }
  return lowest * (1.0 - 1e-9);
}

}  // namespace phaze
