// The public functions of the plan kernel.
#include "phaze/plan.hpp"

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

void PlanSpace::estimate_even(std::size_t first, std::span<const std::int32_t> variants,
                              const TimesOf& times, std::span<const TimesOf> free,
                              double usable_bytes, const Put& put) const {
  PlanSolver solver;
  PlanEstimator estimator;
  Partition partition;
  Partition next;
  std::vector<std::size_t> group;  // plans of one strategy, shape and partition
  KindTimes own{};
  std::vector<KindTimes> freed(free.size());
  const auto estimate_group = [&] {
    if (group.empty()) return;
    solver.lay(*impl_, group.front());
    const auto found = estimator.estimate({solver.on(), group, partition, own, freed, usable_bytes},
                                          solver.step().player());
    for (std::size_t k = 0; k < group.size(); ++k) put(group[k], found[k]);
    group.clear();
  };
  std::int32_t strategy = -1;
  std::int32_t variant = -1;
  for (std::size_t k = 0; k < variants.size(); ++k) {
    if (variants[k] < -1) continue;
    const LayoutRecord& l = impl_->layouts[first + k].record;
    const bool same = !group.empty() && variants[k] == variant &&
                      same_shape(l, impl_->layouts[group.front()].record);
    if (same && variant >= 0) {
      group.push_back(first + k);
      continue;
    }
    if (l.strategy != strategy) {
      estimate_group();
      strategy = l.strategy;
      own = times(at(strategy));
      for (std::size_t n = 0; n < free.size(); ++n) freed[n] = free[n](at(strategy));
    }
    const PlanStatus status = solver.even(*impl_, first + k, own, variants[k], usable_bytes, &next);
    if (status != PlanStatus::kOk) {
      PlanEstimate found{};
      found.time_s = kNan;
      found.status = static_cast<std::int32_t>(status);
      put(first + k, found);
      continue;
    }
    if (!same || next.variants != partition.variants) estimate_group();
    if (group.empty()) std::swap(partition, next);
    group.push_back(first + k);
    variant = variants[k];
  }
  estimate_group();
}

PlanEstimate PlanSpace::estimate(std::size_t layout, const Partition& partition,
                                 const KindTimes& times, std::span<const KindTimes> free,
                                 double usable_bytes, std::vector<StageEstimate>* stages) const {
  PlanSolver solver;
  solver.lay(*impl_, layout);
  PlanEstimator estimator;
  return estimator.estimate({solver.on(), {&layout, 1}, partition, times, free, usable_bytes},
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
  return bound_of_layout(*impl_, layout, memory_limit, totals, least, enough_s);
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
