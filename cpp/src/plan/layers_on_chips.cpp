#include "phaze/layers_on_chips.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"
#include "phaze/layer_batch.hpp"
#include "phaze/parallel.hpp"

namespace phaze {
namespace {

// How far beyond a limit lower bounds of layers are raised, so that rounding does not matter.
constexpr double kBeyondLimit = 1.03;
// Factors that keep bounds valid although sums in another order differ in their last digits.
constexpr double kSumRoundedDown = 1.0 - 1e-12;
constexpr double kStepRoundedDown = 1.0 - 1e-9;
constexpr double kStepRoundedUp = 1.0 + 1e-9;

// The fraction of the way from `low_s` to `high_s` at which a step exceeds its limit: zero if
// `high_s`, the step with list schedules, is within the limit, so that it cannot be ruled out, and
// negative if `low_s` exceeds it.
double fraction_beyond(double low_s, double high_s, double limit_s) noexcept {
  if (!(limit_s < high_s) || !std::isfinite(high_s)) return 0.0;
  return std::min((limit_s - low_s) / (high_s - low_s) * kBeyondLimit, 1.0);
}

// Whether pointers begin with zero, do not decrease, and end at `length`.
bool pointers_agree(std::span<const std::int64_t> pointers, std::size_t count, std::size_t length) {
  return pointers.size() == count + 1 && pointers.front() == 0 &&
         pointers.back() == static_cast<std::int64_t>(length) &&
         std::is_sorted(pointers.begin(), pointers.end());
}

}  // namespace

TimesRow::TimesRow(int kinds, int variants)
    : kinds_(kinds), variants_(variants), values_(at(kinds) * at(6 + 2 * variants), 0.0) {}

KindTimes TimesRow::times() const noexcept {
  const auto from = [&](int first) { return values_.data() + at(first) * at(kinds_); };
  return {from(0),         from(1),  from(6), from(2), from(3), from(6 + variants_),
          hbm_bytes_per_s, static_w, from(4), limit_w};
}

// ---- costs of operators, and what follows for passes independent of their schedules ----

struct LayersOnChips::Priced {
  Priced(std::size_t ops, std::size_t kinds, std::size_t variants)
      : one_s(ops), all_s(ops), again_s(variants * kinds), late_share(kinds) {}

  std::vector<double> one_s, all_s;  // of every operator, on one core of each type and on all
  std::vector<double> again_s;       // [variant][kind]; NaN: the whole forward pass
  std::vector<double> late_share;    // of the backward pass: gradients of weights
};

Status LayersOnChips::build(const LayerGraphs& graphs, const LayerCosts& costs) {
  const std::size_t ops = graphs.types.size();
  const std::size_t kinds = at(std::max(graphs.kinds, 0));
  const std::size_t variants = at(std::max(graphs.variants, 0));
  const std::size_t chips = costs.hbm_bytes_per_s.size();
  const std::size_t count = 2 * kinds;
  const bool agree =
      kinds > 0 && variants > 0 && variants <= at(kMaxVariants) &&
      graphs.in_order.size() == count && pointers_agree(graphs.op_ptr, count, ops) &&
      graphs.most_at_once.size() == ops &&
      pointers_agree(graphs.edge_ptr, count, graphs.edge_from.size()) &&
      graphs.edge_to.size() == graphs.edge_from.size() && graphs.again.size() == variants * ops &&
      graphs.late.size() == ops && graphs.host_s.size() == count &&
      graphs.host_again_s.size() == variants * kinds && graphs.wait_s.size() == count;
  if (!agree) return Status::kBadLayers;
  for (std::size_t g = 0; g < count; ++g) {
    const std::int64_t size = graphs.op_ptr[g + 1] - graphs.op_ptr[g];
    if (size > kMaxLayerOps && graphs.in_order[g] == 0) return Status::kTooManyOps;
    for (std::size_t e = at(graphs.edge_ptr[g]); e < at(graphs.edge_ptr[g + 1]); ++e) {
      const std::int32_t from = graphs.edge_from[e];
      const bool sorted = e == at(graphs.edge_ptr[g]) || graphs.edge_from[e - 1] <= from;
      if (!sorted || from < 0 || from >= graphs.edge_to[e] || graphs.edge_to[e] >= size) {
        return Status::kBadEdge;
      }
    }
  }
  const bool priced = costs.table.size() == ops && costs.column.size() == ops &&
                      (costs.network_s.size() == ops || costs.network_s.size() == ops * chips) &&
                      costs.cores.size() == chips * at(kResources) &&
                      costs.static_w.size() == chips && costs.limit_w.size() == chips &&
                      costs.step_s.size() == chips * kinds &&
                      costs.launching_s.size() == chips * kinds;
  if (!priced) return Status::kBadShape;
  for (const CostColumns& own : costs.tables) {
    const std::size_t cells = own.time_s.size();
    if (own.columns < 0 || own.row_of.size() != chips || own.one_core_s.size() != cells ||
        own.dynamic_j.size() != cells) {
      return Status::kBadShape;
    }
    for (const std::int64_t row : own.row_of) {
      if (row < 0 || (at(row) + 1) * at(own.columns) > cells) return Status::kBadShape;
    }
  }
  for (std::size_t i = 0; i < ops; ++i) {
    if (costs.table[i] < 0 || at(costs.table[i]) >= costs.tables.size()) return Status::kBadShape;
    const std::int64_t columns = costs.tables[at(costs.table[i])].columns;
    if (costs.column[i] < 0 || costs.column[i] >= columns) return Status::kBadShape;
  }
  graphs_ = graphs;
  costs_ = costs;
  chips_ = chips;
  roots_ = std::make_unique<Root[]>(chips * count);
  rooted_ = std::make_unique<std::uint8_t[]>(chips);
  return Status::kOk;
}

void LayersOnChips::price(std::size_t chip, Priced* priced) const {
  const std::size_t ops = graphs_.types.size();
  const std::size_t kinds = at(graphs_.kinds);
  const double* network_s =
      costs_.network_s.data() + (costs_.network_s.size() > ops ? chip * ops : 0);
  for (std::size_t i = 0; i < ops; ++i) {
    const CostColumns& own = costs_.tables[at(costs_.table[i])];
    const std::size_t cell = at(own.row_of[chip]) * at(own.columns) + at(costs_.column[i]);
    priced->one_s[i] = own.one_core_s[cell] + network_s[i];
    priced->all_s[i] = own.time_s[cell] + network_s[i];
  }
  for (std::size_t k = 0; k < kinds; ++k) {
    const std::size_t begin = at(graphs_.op_ptr[2 * k]);
    const std::size_t middle = at(graphs_.op_ptr[2 * k + 1]);
    const std::size_t end = at(graphs_.op_ptr[2 * k + 2]);
    for (std::size_t v = 0; v < at(graphs_.variants); ++v) {
      const std::uint8_t* again = graphs_.again.data() + v * ops;
      double sum_s = 0.0;
      bool whole = true;
      for (std::size_t i = begin; i < middle; ++i) {
        whole = whole && again[i] != 0;
        if (again[i] != 0) sum_s += priced->all_s[i];
      }
      priced->again_s[v * kinds + k] = whole ? kNan : sum_s;
    }
    double late_s = 0.0;
    double total_s = 0.0;
    for (std::size_t i = middle; i < end; ++i) {
      total_s += priced->all_s[i];
      if (graphs_.late[i] != 0) late_s += priced->all_s[i];
    }
    priced->late_share[k] = total_s > 0.0 ? late_s / total_s : 0.0;
  }
}

void LayersOnChips::add_joules(std::size_t chip, TimesRow* out) const {
  const std::size_t ops = graphs_.types.size();
  const std::size_t kinds = at(graphs_.kinds);
  const auto joules = [&](std::size_t i) {
    const CostColumns& own = costs_.tables[at(costs_.table[i])];
    return own.dynamic_j[at(own.row_of[chip]) * at(own.columns) + at(costs_.column[i])];
  };
  for (std::size_t k = 0; k < kinds; ++k) {
    const std::size_t begin = at(graphs_.op_ptr[2 * k]);
    const std::size_t middle = at(graphs_.op_ptr[2 * k + 1]);
    double forward_j = 0.0;
    double backward_j = 0.0;
    for (std::size_t i = begin; i < middle; ++i) forward_j += joules(i);
    for (std::size_t i = middle; i < at(graphs_.op_ptr[2 * k + 2]); ++i) backward_j += joules(i);
    out->forward_j()[k] = forward_j;
    for (std::size_t v = 0; v < at(graphs_.variants); ++v) {
      double again_j = 0.0;
      for (std::size_t i = begin; i < middle; ++i) {
        if (graphs_.again[v * ops + i] != 0) again_j += joules(i);
      }
      out->backward_j()[v * kinds + k] = backward_j + again_j;
    }
  }
}

// A pass takes the maximum of its schedule and the host's launches; backward passes recompute
// first.
void LayersOnChips::combine(std::size_t chip, const Priced& priced,
                            std::span<const double> makespan_s, TimesRow* out) const {
  const std::size_t kinds = at(graphs_.kinds);
  const std::span<const double> host_s = graphs_.host_s;
  const std::span<const double> wait_s = graphs_.wait_s;
  for (std::size_t k = 0; k < kinds; ++k) {
    const double forward_s = makespan_s[2 * k];
    const double plain_s = makespan_s[2 * k + 1];
    for (std::size_t v = 0; v < at(graphs_.variants); ++v) {
      const double sum_s = priced.again_s[v * kinds + k];
      const double backward_s = plain_s + (std::isnan(sum_s) ? forward_s : sum_s);
      out->backward_s()[v * kinds + k] =
          std::max(backward_s, graphs_.host_again_s[v * kinds + k]) + wait_s[kinds + k];
    }
    out->forward_s()[k] = std::max(forward_s, host_s[k]) + wait_s[k];
    out->plain_s()[k] = std::max(plain_s, host_s[kinds + k]) + wait_s[kinds + k];
    out->weight_grad_s()[k] = out->plain_s()[k] * priced.late_share[k];
    const double ahead_s = std::max(plain_s - host_s[kinds + k], 0.0);
    out->ahead_s()[k] = ahead_s;
    out->step_s()[k] =
        std::max(costs_.step_s[chip * kinds + k], costs_.launching_s[chip * kinds + k] - ahead_s);
  }
  out->hbm_bytes_per_s = costs_.hbm_bytes_per_s[chip];
  out->static_w = costs_.static_w[chip];
  out->limit_w = costs_.limit_w[chip];
}

// ---- bounds ----

double LayersOnChips::least_makespan_s(std::size_t chip, const Priced& priced,
                                       std::size_t graph) const {
  const std::size_t first = at(graphs_.op_ptr[graph]);
  const std::size_t count = at(graphs_.op_ptr[graph + 1]) - first;
  const double* one_s = priced.one_s.data() + first;
  const double* all_s = priced.all_s.data() + first;
  if (graphs_.in_order[graph] != 0) {
    double sum_s = 0.0;
    for (std::size_t i = 0; i < count; ++i) sum_s += all_s[i];
    return sum_s;
  }
  double ready_s[kMaxLayerOps] = {};
  std::size_t edge = at(graphs_.edge_ptr[graph]);
  double longest_s = 0.0;
  double shared_s = 0.0;
  double work_s[2] = {0.0, 0.0};  // of tensor cores and vector cores
  for (std::size_t i = 0; i < count; ++i) {
    const double end_s = ready_s[i] + std::min(one_s[i], all_s[i]);
    longest_s = std::max(longest_s, end_s);
    for (; edge < at(graphs_.edge_ptr[graph + 1]) && at(graphs_.edge_from[edge]) == i; ++edge) {
      double& later_s = ready_s[graphs_.edge_to[edge]];
      later_s = std::max(later_s, end_s);
    }
    shared_s += std::min(all_s[i], one_s[i] / graphs_.most_at_once[first + i]);
    for (std::size_t r = 0; r < 2; ++r) {
      if ((graphs_.types[first + i] >> r & 1) == 0) continue;
      const auto cores = static_cast<double>(costs_.cores[chip * at(kResources) + r]);
      work_s[r] += std::min(all_s[i], one_s[i] / cores);
    }
  }
  return std::max({longest_s, shared_s * kSumRoundedDown, work_s[0], work_s[1]});
}

void LayersOnChips::map(std::size_t chip, TimesRow* least) const {
  Priced priced(graphs_.types.size(), at(graphs_.kinds), at(graphs_.variants));
  price(chip, &priced);
  std::vector<double> least_s(graphs());
  for (std::size_t g = 0; g < graphs(); ++g) least_s[g] = least_makespan_s(chip, priced, g);
  combine(chip, priced, least_s, least);
  least->proven = true;
}

Status LayersOnChips::solve(std::size_t chip, const Priced& priced, std::size_t graph,
                            const SearchLimits& limits, LayerSolution* solution) const {
  const std::size_t first = at(graphs_.op_ptr[graph]);
  const std::size_t count = at(graphs_.op_ptr[graph + 1]) - first;
  solution->proved_by = ProvedBy::kListSchedule;
  solution->nodes = 0;
  if (count == 0 || graphs_.in_order[graph] != 0) {
    double sum_s = 0.0;
    for (std::size_t i = 0; i < count; ++i) sum_s += priced.all_s[first + i];
    solution->makespan_s = solution->bound_s = sum_s;
    return Status::kOk;
  }
  const std::size_t edge = at(graphs_.edge_ptr[graph]);
  const std::size_t edges = at(graphs_.edge_ptr[graph + 1]) - edge;
  GraphOnChips given{};
  given.types = graphs_.types.subspan(first, count);
  given.edge_from = graphs_.edge_from.subspan(edge, edges);
  given.edge_to = graphs_.edge_to.subspan(edge, edges);
  given.one_core_s = std::span(priced.one_s).subspan(first, count);
  given.all_cores_s = std::span(priced.all_s).subspan(first, count);
  given.cores = costs_.cores.subspan(chip * at(kResources), at(kResources));
  given.rule = ScheduleRule::kExclusive;
  return solve_on_chip(given, 0, limits, solution);
}

Status LayersOnChips::find_root(std::size_t chip, const Priced& priced, int threads) const {
  if (rooted_[chip] != 0) return Status::kOk;
  const SearchLimits limits{1, kInfinite, nullptr, nullptr};
  std::vector<Status> statuses(graphs(), Status::kOk);
  parallel_for(graphs(), threads, 8, [&](std::size_t begin, std::size_t end) {
    LayerSolution solution;
    for (std::size_t g = begin; g < end; ++g) {
      statuses[g] = solve(chip, priced, g, limits, &solution);
      root_of(chip)[g] = {solution.makespan_s, solution.bound_s,
                          solution.proved_by != ProvedBy::kNothing};
    }
  });
  for (const Status status : statuses) {
    if (status != Status::kOk) return status;
  }
  rooted_[chip] = 1;
  return Status::kOk;
}

void LayersOnChips::time(std::size_t chip, std::span<const double> makespan_s,
                         TimesRow* times) const {
  Priced priced(graphs_.types.size(), at(graphs_.kinds), at(graphs_.variants));
  price(chip, &priced);
  combine(chip, priced, makespan_s, times);
}

Status LayersOnChips::roots(std::size_t chip, int threads, std::span<double> bound_s,
                            std::span<std::uint8_t> proven) const {
  Priced priced(graphs_.types.size(), at(graphs_.kinds), at(graphs_.variants));
  price(chip, &priced);
  const Status status = find_root(chip, priced, threads);
  if (status != Status::kOk) return status;
  for (std::size_t g = 0; g < graphs(); ++g) {
    bound_s[g] = root_of(chip)[g].bound_s;
    proven[g] = root_of(chip)[g].proven;
  }
  return Status::kOk;
}

Status LayersOnChips::bound(std::size_t chip, TimesRow* least) const {
  Priced priced(graphs_.types.size(), at(graphs_.kinds), at(graphs_.variants));
  price(chip, &priced);
  const Status status = find_root(chip, priced);
  if (status != Status::kOk) return status;
  std::vector<double> bound_s;
  least->proven = true;
  for (const Root& root : root_of(chip)) {
    bound_s.push_back(root.bound_s);
    least->proven = least->proven && root.proven != 0;
  }
  combine(chip, priced, bound_s, least);
  return Status::kOk;
}

Status LayersOnChips::rule_out(std::size_t chip, const StepQuery& step, double limit_s,
                               bool planned, const SearchLimits& search, TimesRow* least,
                               double* least_s) const {
  Priced priced(graphs_.types.size(), at(graphs_.kinds), at(graphs_.variants));
  price(chip, &priced);
  Status status = find_root(chip, priced);
  if (status != Status::kOk) return status;
  const std::span<const Root> roots = root_of(chip);
  std::vector<double> bound_s;
  std::vector<double> list_s;
  bool proven = true;
  for (const Root& root : roots) {
    bound_s.push_back(root.bound_s);
    list_s.push_back(root.list_s);
    proven = proven && root.proven != 0;
  }
  TimesRow longest = *least;
  combine(chip, priced, bound_s, least);
  combine(chip, priced, list_s, &longest);
  least->proven = true;
  const auto step_s = [&](const TimesRow& row) {
    return step.space->strategy_bound_s(step.strategy, row.times(), step.memory_limit);
  };
  const auto plan_s = [&] {
    TimesRow shortest = *least;
    std::ranges::copy(longest.plain_s(), shortest.plain_s().begin());
    std::ranges::copy(longest.step_s(), shortest.step_s().begin());
    const double over_s = limit_s * kStepRoundedUp;
    std::vector<double> below_s(step.space->memory_limits(), -kInfinite);
    std::vector<PlacedPlan> plans(below_s.size());
    below_s[step.memory_limit] = over_s;
    step.space->best_of_memory_limits(step.strategy, shortest.times(), least->times(), below_s,
                                      plans);
    const PlacedPlan& plan = plans[step.memory_limit];
    return std::min(std::min(plan.time_s, plan.open_s) * kStepRoundedDown, over_s);
  };
  const double at_root_s = step_s(*least);
  *least_s = at_root_s;
  if (planned && *least_s <= limit_s && !proven) *least_s = std::max(*least_s, plan_s());
  if (*least_s > limit_s) return Status::kOk;
  const double rise = *least_s > at_root_s ? at_root_s / *least_s : 1.0;
  const double fraction = fraction_beyond(at_root_s, step_s(longest), limit_s * rise);
  if (fraction <= 0.0 || proven) return Status::kOk;
  LayerSolution solution;
  for (std::size_t g = 0; g < roots.size(); ++g) {
    if (roots[g].proven != 0) continue;
    SearchLimits limits = search;
    limits.enough_s = bound_s[g] + fraction * (list_s[g] - bound_s[g]);
    limits.only_decide = true;
    status = solve(chip, priced, g, limits, &solution);
    if (status != Status::kOk) return status;
    bound_s[g] = std::max(bound_s[g], solution.bound_s);
  }
  combine(chip, priced, bound_s, least);
  *least_s = std::max(*least_s, planned ? plan_s() : step_s(*least));
  return Status::kOk;
}

Status LayersOnChips::schedule(std::size_t chip, const SearchLimits& search, TimesRow* times,
                               TimesRow* least) const {
  Priced priced(graphs_.types.size(), at(graphs_.kinds), at(graphs_.variants));
  price(chip, &priced);
  const Status status = find_root(chip, priced);
  if (status != Status::kOk) return status;
  std::vector<double> made_s;
  std::vector<double> bound_s;
  bool proven = true;
  LayerSolution solution;
  for (std::size_t g = 0; g < graphs(); ++g) {
    const Root& root = root_of(chip)[g];
    made_s.push_back(root.list_s);
    bound_s.push_back(root.bound_s);
    if (root.proven != 0) continue;
    const Status solved = solve(chip, priced, g, search, &solution);
    if (solved != Status::kOk) return solved;
    made_s[g] = solution.makespan_s;
    bound_s[g] = solution.bound_s;
    proven = proven && solution.proved_by != ProvedBy::kNothing;
  }
  combine(chip, priced, made_s, times);
  times->proven = proven;
  if (proven) {
    *least = *times;
  } else {
    combine(chip, priced, bound_s, least);
    least->proven = proven;
  }
  return Status::kOk;
}

}  // namespace phaze
