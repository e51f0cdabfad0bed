// The layers of one strategy on many chips: lower bounds of their times, each tighter and costlier
// than the one before, and their schedules; and from these the best plan on each chip.
//
// Nothing here prints or exits; memory may run out (std::bad_alloc), nothing else is thrown. Chips
// are spread over threads, and each result is written by one thread, so results are the same bits
// for any thread count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "phaze/layer_schedule.hpp"
#include "phaze/plan.hpp"
#include "phaze/status.hpp"

namespace phaze {

// What no chip changes about the layers of a strategy. Each kind of layer has two graphs: its
// forward pass, then its backward pass. Operators of graph g are op_ptr[g] up to op_ptr[g + 1].
struct LayerGraphs {
  std::int32_t kinds;
  std::int32_t variants;
  std::span<const std::int64_t> op_ptr;
  std::span<const std::uint8_t> types;      // by operator: bit r is set if it needs resource r
  std::span<const double> most_at_once;     // operators that may run while it does, and itself, or
                                            // more; only `map` reads it
  std::span<const std::int64_t> edge_ptr;   // by graph
  std::span<const std::int32_t> edge_from;  // positions in the graph, by rising start
  std::span<const std::int32_t> edge_to;
  std::span<const std::uint8_t> in_order;  // by graph: one operator after another, on all cores
  std::span<const std::uint8_t> again;     // [variant][operator]: a backward pass recomputes it
  std::span<const std::uint8_t> late;      // by operator: it computes gradients of weights
  std::span<const double> host_s;          // [pass][kind], to launch a pass
  std::span<const double> host_again_s;    // [variant][kind], to launch the backward pass
  std::span<const double> wait_s;          // [pass][kind], on top of that
};

// Costs of distinct operators (columns) on distinct chips (rows).
struct CostColumns {
  std::span<const double> time_s;
  std::span<const double> one_core_s;
  std::span<const double> dynamic_j;
  std::int64_t columns;
  std::span<const std::int64_t> row_of;  // of each chip
};

// The operators of a strategy's layers, priced on chips.
struct LayerCosts {
  std::vector<CostColumns> tables;
  std::span<const std::int32_t> table;   // of each operator
  std::span<const std::int64_t> column;  // the same, in its table
  std::span<const double> network_s;     // of collectives: [operator] or [chip][operator]
  std::span<const std::int32_t> cores;   // kResources per chip
  std::span<const double> hbm_bytes_per_s;
  std::span<const double> static_w;
  std::span<const double> limit_w;
  std::span<const double> step_s;       // [chip][kind]: products of the optimiser
  std::span<const double> launching_s;  // the same: in which the host launches them
};

// Times of the layers on one chip, with the memory of its arrays. A row can be copied.
class TimesRow {
 public:
  TimesRow(int kinds, int variants);

  // Arrays by kind of layer, as in KindTimes; those by variant are [variant][kind].
  std::span<double> forward_s() noexcept { return part(0, 1); }
  std::span<double> plain_s() noexcept { return part(1, 1); }
  std::span<double> weight_grad_s() noexcept { return part(2, 1); }
  std::span<double> forward_j() noexcept { return part(3, 1); }
  std::span<double> step_s() noexcept { return part(4, 1); }
  std::span<double> ahead_s() noexcept { return part(5, 1); }
  std::span<double> backward_s() noexcept { return part(6, variants_); }
  std::span<double> backward_j() noexcept { return part(6 + variants_, variants_); }
  KindTimes times() const noexcept;

  double hbm_bytes_per_s = 0.0;
  double static_w = 0.0;
  double limit_w = 0.0;
  bool proven = false;  // whether all schedules are proven

 private:
  std::span<double> part(int first, int count) noexcept {
    const auto kinds = static_cast<std::size_t>(kinds_);
    return {values_.data() + static_cast<std::size_t>(first) * kinds,
            static_cast<std::size_t>(count) * kinds};
  }
  int kinds_;
  int variants_;
  std::vector<double> values_;
};

// Where a step is bounded: a strategy of a space, within one of its memory limits.
struct StepQuery {
  const PlanSpace* space;
  std::int32_t strategy;
  std::size_t memory_limit;
};

// The views that it is built from must outlive it.
class LayersOnChips {
 public:
  // Refuses sizes and positions that do not agree.
  Status build(const LayerGraphs& graphs, const LayerCosts& costs);

  std::size_t chips() const noexcept { return chips_; }
  int kinds() const noexcept { return graphs_.kinds; }
  int variants() const noexcept { return graphs_.variants; }

  // Lower bounds from the operators' seconds: the longest path of a graph; its work in all, and by
  // core type. An operator on all cores runs alone and counts in full; on one core, where at most k
  // operators run at once, it counts a k-th of its time (the rates of docs/schedule.md).
  void map(std::size_t chip, TimesRow* least) const;

  // Fills in the joules of a row of that chip, which its times do not depend on.
  void add_joules(std::size_t chip, TimesRow* out) const;

  // The times of the layers on that chip if their graphs take `makespan_s`.
  void time(std::size_t chip, std::span<const double> makespan_s, TimesRow* times) const;

  // The roots of the graphs' branch-and-bound trees: lower bounds, and whether a schedule attains
  // each. They are stored: two threads may not ask for one chip at a time.
  Status roots(std::size_t chip, int threads, std::span<double> bound_s,
               std::span<std::uint8_t> proven) const;

  // Lower bounds by these roots.
  Status bound(std::size_t chip, TimesRow* least) const;

  // Raises lower bounds, to prove that the step takes longer than `limit_s`: returns a lower bound
  // of the step. With `planned`, the best plan of layers as short as their bounds counts as well;
  // it takes no longer than that of the layers themselves if backward passes that hide gradient
  // exchanges, and the optimiser's step, have the times of the list schedules.
  //
  // Branch and bound that has only to exclude schedules shorter than a given length visits few
  // nodes. The length for each graph is interpolated between its root bound and its list schedule,
  // by the fraction with which the plan exceeds its limit if it grows as the bound.
  Status rule_out(std::size_t chip, const StepQuery& step, double limit_s, bool planned,
                  const SearchLimits& search, TimesRow* least, double* least_s) const;

  // Schedules: the times of the layers, and proven lower bounds of these.
  Status schedule(std::size_t chip, const SearchLimits& search, TimesRow* times,
                  TimesRow* least) const;

 private:
  // What an operator costs on a chip, and what follows for passes independent of their schedules.
  struct Priced;
  struct Root {
    double list_s = 0.0;  // makespan of the list schedule
    double bound_s = 0.0;
    std::uint8_t proven = 0;
  };

  std::size_t graphs() const noexcept { return graphs_.in_order.size(); }
  void price(std::size_t chip, Priced* priced) const;
  double least_makespan_s(std::size_t chip, const Priced& priced, std::size_t graph) const;
  Status solve(std::size_t chip, const Priced& priced, std::size_t graph,
               const SearchLimits& limits, LayerSolution* solution) const;
  Status find_root(std::size_t chip, const Priced& priced, int threads = 1) const;
  std::span<Root> root_of(std::size_t chip) const noexcept {
    return {roots_.get() + chip * graphs(), graphs()};
  }
  void combine(std::size_t chip, const Priced& priced, std::span<const double> makespan_s,
               TimesRow* out) const;

  LayerGraphs graphs_{};
  LayerCosts costs_{};
  std::size_t chips_ = 0;
  std::unique_ptr<Root[]> roots_;           // [chip][graph]
  std::unique_ptr<std::uint8_t[]> rooted_;  // by chip: whether its roots are known
};

// Limits and options of best_on_chips().
struct ChipSearch {
  std::span<const std::int64_t> memory_limit;  // of each chip: its largest
  std::span<const double> below_s;  // [chip][memory limit]: longest step of interest, or -infinity
  bool planned;                     // as in LayersOnChips::rule_out
  SearchLimits search;
  int threads;
};

// The best plan of all strategies on each chip with each memory limit; ties as for `top_plans`.
// layers[s] has the layers of strategy s of the space, all on the same chips. `plans` and `times`
// have one entry per chip and memory limit; `joules` are those of a step.
//
// The candidates of a chip, one per strategy, are taken in the order of their lower bounds, which
// rise with each step; the best plan so far limits the others.
Status best_on_chips(const PlanSpace& space, std::span<const LayersOnChips* const> layers,
                     const ChipSearch& asked, std::span<PlacedPlan> plans,
                     std::span<TimesRow> times, std::span<double> joules);

}  // namespace phaze
