#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "interrupt.hpp"
#include "layers_on_chips.hpp"
#include "phaze/parallel.hpp"
#include "phaze/plan.hpp"

namespace phaze::bindings {
namespace {

// A plan found by the kernel, as a Python record: its cuts and variants are runs of one array.
struct PlacedRecord {
  double time_s;
  double memory_bytes;
  std::int64_t layout;  // -1 if there is no plan
  std::int64_t cuts_at;
  std::int64_t cuts;
  std::int64_t variants_at;
  std::int64_t variants;
  double open_s;  // see PlacedPlan
};

// Times of `rows` (chips or strategies), read from an object with named arrays.
class TimesView {
 public:
  TimesView(const py::object& times, int kinds, const char* name) : kinds_(kinds) {
    hbm_ = view<double>(times.attr("hbm_bytes_per_s"), "hbm_bytes_per_s");
    rows_ = hbm_.size();
    const auto flat = [&](const char* field, py::ssize_t length) {
      const auto array = py::reinterpret_borrow<py::array>(times.attr(field));
      return view<double>(array.attr("reshape")(-1), field, length);
    };
    const auto one = static_cast<py::ssize_t>(rows_) * kinds;
    forward_ = flat("forward_s", one);
    plain_ = flat("plain_s", one);
    weight_grad_ = flat("weight_grad_s", one);
    forward_j_ = flat("forward_j", one);
    step_ = flat("step_s", one);
    backward_ = flat("backward_s", -1);
    backward_j_ = flat("backward_j", static_cast<py::ssize_t>(backward_.size()));
    static_ = view<double>(times.attr("static_w"), "static_w", static_cast<py::ssize_t>(rows_));
    limit_ = view<double>(times.attr("limit_w"), "limit_w", static_cast<py::ssize_t>(rows_));
    if (rows_ > 0) variants_ = backward_.size() / static_cast<std::size_t>(one);
    if (rows_ > 0 &&
        (variants_ < 1 || variants_ * static_cast<std::size_t>(one) != backward_.size())) {
      throw InvalidInput(std::string(name) + ".backward_s: expected rows x variants x kinds");
    }
  }

  std::size_t rows() const noexcept { return rows_; }
  std::size_t variants() const noexcept { return variants_; }

  KindTimes operator[](std::size_t row) const noexcept {
    const std::size_t one = row * static_cast<std::size_t>(kinds_);
    const std::size_t many = one * variants_;
    return {forward_.data() + one,
            plain_.data() + one,
            backward_.data() + many,
            weight_grad_.data() + one,
            forward_j_.data() + one,
            backward_j_.data() + many,
            hbm_[row],
            static_[row],
            step_.data() + one,
            limit_[row]};
  }

 private:
  int kinds_;
  std::size_t rows_ = 0;
  std::size_t variants_ = 0;
  std::span<const double> hbm_, forward_, plain_, backward_, weight_grad_, forward_j_, backward_j_,
      static_, limit_, step_;
};

struct PlacedArrays {
  py::array_t<PlacedRecord> placed;
  py::array_t<std::int32_t> borders;  // cuts and variants of all plans
};

PlacedArrays placed_arrays(const std::vector<PlacedPlan>& plans) {
  py::array_t<PlacedRecord> records(static_cast<py::ssize_t>(plans.size()));
  std::vector<std::int32_t> pool;
  for (std::size_t k = 0; k < plans.size(); ++k) {
    const PlacedPlan& plan = plans[k];
    const bool there = plan.time_s < std::numeric_limits<double>::infinity();
    PlacedRecord& record = records.mutable_data()[k];
    const auto put = [&](const std::vector<std::int32_t>& values, std::int64_t* at,
                         std::int64_t* count) {
      *at = static_cast<std::int64_t>(pool.size());
      *count = static_cast<std::int64_t>(values.size());
      pool.insert(pool.end(), values.begin(), values.end());
    };
    record = {plan.time_s, plan.memory_bytes, there ? plan.layout : -1, 0, 0, 0, 0, plan.open_s};
    if (!there) continue;
    put(plan.partition.cuts, &record.cuts_at, &record.cuts);
    put(plan.partition.variants, &record.variants_at, &record.variants);
  }
  return {freeze(std::move(records)), array(pool)};
}

// A function that takes the GIL and calls the Python function `stop`; empty if `stop` is None.
// `stop` must outlive the result.
AskedToStop asked_to_stop(const py::object& stop) {
  if (stop.is_none()) return {};
  return [&stop] {
    const py::gil_scoped_acquire held;
    return stop().cast<bool>();
  };
}

// Pairs of positions stored consecutively in an array.
struct Pairs {
  explicit Pairs(std::span<const std::int32_t> flat) {
    for (std::size_t e = 0; e + 1 < flat.size(); e += 2) {
      from.push_back(flat[e]);
      to.push_back(flat[e + 1]);
    }
  }
  std::vector<std::int32_t> from, to;
};

// Estimates as columns, numbers and codes apart.
class EstimateColumns {
 public:
  explicit EstimateColumns(std::size_t rows)
      : rows_(rows), numbers_({kNumbers, rows}), codes_({std::size_t{3}, rows}) {}

  // Writes estimate k into row rows[k], column by column: neighbouring plans often have
  // neighbouring rows. Needs no GIL.
  void put(std::span<const std::size_t> rows, std::span<const PlanEstimate> found) {
    for (std::size_t c = 0; c < kNumbers; ++c) {
      const char* from = reinterpret_cast<const char*>(found.data()) + c * sizeof(double);
      double* const column = &number_[c * rows_];
      for (std::size_t k = 0; k < rows.size(); ++k, from += sizeof(PlanEstimate)) {
        std::memcpy(&column[rows[k]], from, sizeof(double));
      }
    }
    for (std::size_t k = 0; k < rows.size(); ++k) {
      code_[rows[k]] = found[k].fullest;
      code_[rows_ + rows[k]] = found[k].status;
      code_[2 * rows_ + rows[k]] = found[k].instant;
    }
  }

  py::object frozen() && {
    return py::make_tuple(freeze(std::move(numbers_)), freeze(std::move(codes_)));
  }

 private:
  static constexpr std::size_t kNumbers = offsetof(PlanEstimate, fullest) / sizeof(double);
  std::size_t rows_;
  py::array_t<double> numbers_;
  py::array_t<std::int32_t> codes_;
  std::span<double> number_ = writable(numbers_);
  std::span<std::int32_t> code_ = writable(codes_);
};

// The positions of numbers below `count`, by number; equal ones in their order, negative ones left
// out.
std::vector<std::size_t> order_by(std::span<const std::int64_t> numbers, std::size_t count) {
  std::vector<std::size_t> next(count + 1, 0);
  for (const std::int64_t own : numbers) {
    if (own >= 0) ++next[static_cast<std::size_t>(own) + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<std::size_t> order(next.back());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] >= 0) order[next[static_cast<std::size_t>(numbers[i])]++] = i;
  }
  return order;
}

// Calls one(some) for disjoint parts of `rows`. Plans take unequal times, so each thread takes
// every so many blocks of them.
template <typename One>
void deal_out(std::span<const std::size_t> rows, int threads, const One& one) {
  constexpr std::size_t kBlock = 768;
  const auto at_most = static_cast<std::size_t>(std::max(threads, 1));
  const std::size_t ways = std::clamp<std::size_t>(rows.size() / kBlock, 1, at_most);
  parallel_for(ways, threads, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t way = begin; way < end; ++way) {
      std::vector<std::size_t> own;
      for (std::size_t first = way * kBlock; first < rows.size(); first += ways * kBlock) {
        const auto block = rows.subspan(first, std::min(kBlock, rows.size() - first));
        own.insert(own.end(), block.begin(), block.end());
      }
      one(own);
    }
  });
}

class PyPlanSpace {
 public:
  PyPlanSpace(const py::object& fabric, std::int64_t devices, const py::object& training,
              std::int32_t kinds, const py::object& order, const py::object& edges,
              const py::object& tied, const py::object& strategies, const py::object& sizes,
              const py::object& layouts, const py::object& memory_limits, const py::object& fits,
              bool some_blocks) {
    const Pairs edge(view<std::int32_t>(edges, "edges"));
    const Pairs tie(view<std::int32_t>(tied, "tied"));
    const PlanProblem problem{view<FabricRecord>(fabric, "fabric", 1)[0],
                              devices,
                              view<TrainingRecord>(training, "training", 1)[0],
                              kinds,
                              view<std::int32_t>(order, "order"),
                              edge.from,
                              edge.to,
                              tie.from,
                              tie.to,
                              view<StrategyRecord>(strategies, "strategies"),
                              view<LayerKindRecord>(sizes, "sizes"),
                              view<LayoutRecord>(layouts, "layouts"),
                              some_blocks};
    const auto memory_limit = view<double>(memory_limits, "memory_limits");
    const auto may = view<std::uint8_t>(fits, "fits");
    const Status status = [&] {
      const py::gil_scoped_release release;
      return space_.build(problem, memory_limit, may);
    }();
    if (status != Status::kOk) throw InvalidInput(std::string("plan: ") + sentence(status));
  }

  std::size_t layouts() const { return space_.layouts(); }

  // Estimates of even partitions: the fields of PlanEstimate as columns, numbers and codes apart.
  // Rows without a layout (-1) keep their `status`, and have NaN as time.
  py::object estimate_even(const py::object& times, const py::object& layout,
                           const py::object& variant, double usable_bytes, const py::object& free,
                           const py::object& status, int threads) const {
    const TimesView timed = by_strategy(times);
    const std::vector<TimesView> freed = levels(free, space_.strategies());
    std::vector<PlanSpace::TimesOf> free_of;
    for (const TimesView& level : freed) {
      free_of.push_back([&level](std::size_t s) { return level[s]; });
    }
    const auto layouts = view<std::int64_t>(layout, "layout");
    const auto rows = static_cast<py::ssize_t>(layouts.size());
    const auto variants = view<std::int32_t>(variant, "variant", rows);
    const auto known = view<std::int32_t>(status, "status", rows);
    for (const std::int64_t own : layouts) {
      if (own != -1) row_of(own);
    }
    const int workers = checked_threads(threads);
    EstimateColumns columns(layouts.size());
    {
      const py::gil_scoped_release release;
      parallel_for(layouts.size(), workers, 4096, [&](std::size_t row, std::size_t end) {
        PlanEstimate none{};
        none.time_s = std::numeric_limits<double>::quiet_NaN();
        for (; row < end; ++row) {
          none.status = known[row];
          if (layouts[row] < 0) columns.put({&row, 1}, {&none, 1});
        }
      });
      deal_out(order_by(layouts, space_.layouts()), workers, [&](std::span<const std::size_t> own) {
        space_.estimate_even(
            own, layouts, variants, [&](std::size_t s) { return timed[s]; }, free_of, usable_bytes,
            [&](std::span<const std::size_t> of, std::span<const PlanEstimate> found) {
              columns.put(of, found);
            });
      });
    }
    return std::move(columns).frozen();
  }

  // One plan in full: its estimate and its stages. `times` has one row per strategy or, like
  // `free`, a single row for the plan's strategy.
  py::object estimate(const py::object& times, std::int64_t layout, const py::object& cuts,
                      const py::object& variants, double usable_bytes,
                      const py::object& free) const {
    const TimesView timed(times, space_.kinds(), "times");
    const std::size_t row = row_of(layout);
    const bool one = timed.rows() == 1;
    if (!one && timed.rows() != space_.strategies()) throw InvalidInput("times: expected one row");
    const KindTimes own = timed[one ? 0 : static_cast<std::size_t>(space_.layout(row).strategy)];
    const Partition partition = partition_of(row, cuts, variants);
    std::vector<KindTimes> freed;
    for (const TimesView& level : levels(free, 1)) freed.push_back(level[0]);
    std::vector<StageEstimate> stages;
    py::array_t<PlanEstimate> found(1);
    {
      const py::gil_scoped_release release;
      found.mutable_data()[0] = space_.estimate(row, partition, own, freed, usable_bytes, &stages);
    }
    return result("EstimatedPlan", freeze(std::move(found)), array(stages));
  }

  // The passes of the schedule of a plan.
  py::object passes(const py::object& times, std::int64_t layout, const py::object& cuts,
                    const py::object& variants) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    const auto strategy = static_cast<std::size_t>(space_.layout(row).strategy);
    const PlanPasses found = space_.passes(row, partition_of(row, cuts, variants), timed[strategy]);
    return result("PlanPasses", array(found.forward_s), array(found.backward_s),
                  array(found.weight_grad_s), found.step_s);
  }

  // Cuts and variants of the even partition, and its status.
  py::object even_partition(const py::object& times, std::int64_t layout, std::int32_t variant,
                            double usable_bytes) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    const auto strategy = static_cast<std::size_t>(space_.layout(row).strategy);
    Partition partition;
    const PlanStatus status =
        space_.even_partition(row, timed[strategy], variant, usable_bytes, &partition);
    return result("EvenPartition", status, array(partition.cuts), array(partition.variants));
  }

  // Recomputation of each stage for given cuts.
  py::array_t<std::int32_t> recompute(const py::object& times, std::int64_t layout,
                                      const py::object& cuts, double usable_bytes) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    const LayoutRecord& l = space_.layout(row);
    const auto borders = view<std::int32_t>(cuts, "cuts");
    const auto stages = static_cast<std::size_t>(l.pp);
    Partition partition{{borders.begin(), borders.end()}, std::vector<std::int32_t>(stages, 0)};
    const PlanStatus status = space_.check_partition(row, partition);
    if (status != PlanStatus::kOk) throw InvalidInput(std::string("stages: ") + sentence(status));
    space_.choose_recompute(row, timed[static_cast<std::size_t>(l.strategy)], usable_bytes,
                            &partition);
    return array(partition.variants);
  }

  // The fastest plans of one chip, the numbers of layouts solved and without a plan, and the open
  // bound.
  py::object top_plans(const py::object& times, std::int64_t memory_limit, std::int64_t top,
                       int threads, const py::object& stop, double below_s) const {
    if (top < 1) throw InvalidInput("top: expected at least 1");
    const int workers = checked_threads(threads);
    return leading(times, memory_limit,
                   [&](const std::vector<KindTimes>& all, SettledLayouts* settled) {
                     return space_.top_plans(all, static_cast<std::size_t>(memory_limit),
                                             static_cast<std::size_t>(top), workers, settled,
                                             asked_to_stop(stop), below_s);
                   });
  }

  py::object front(const py::object& times, std::int64_t memory_limit, double most_s,
                   int threads) const {
    const int workers = checked_threads(threads);
    return leading(times, memory_limit,
                   [&](const std::vector<KindTimes>& all, SettledLayouts* settled) {
                     return space_.front(all, static_cast<std::size_t>(memory_limit), most_s,
                                         workers, settled);
                   });
  }

  // The best plan of a strategy on each chip with each memory limit that takes at most the entry of
  // `below` (chips x memory limits, seconds; minus infinity: skipped).
  py::object best(std::int32_t strategy, const py::object& times, const py::object& least,
                  const py::object& below, int threads) const {
    check_strategy(strategy);
    const TimesView timed(times, space_.kinds(), "times");
    const TimesView floor(least, space_.kinds(), "least");
    if (floor.rows() != timed.rows()) throw InvalidInput("least: expected as many rows as times");
    const std::size_t memory_limits = space_.memory_limits();
    const auto limits =
        view<double>(below, "below_s", static_cast<py::ssize_t>(timed.rows() * memory_limits));
    const int workers = checked_threads(threads);
    std::vector<PlacedPlan> plans(limits.size());
    {
      const py::gil_scoped_release release;
      parallel_for(timed.rows(), workers, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t chip = begin; chip < end; ++chip) {
          const std::size_t first = chip * memory_limits;
          space_.best_of_memory_limits(strategy, timed[chip], floor[chip],
                                       limits.subspan(first, memory_limits),
                                       std::span(plans).subspan(first, memory_limits));
        }
      });
    }
    const PlacedArrays found = placed_arrays(plans);
    return result("PlacedPlans", found.placed, found.borders);
  }

  // The best plan of all strategies on each chip with each memory limit, the times of its layers,
  // and its joules; layers[s] are those of strategy s, all on the same chips.
  py::object best_on_chips(const py::sequence& layers, const py::object& memory_limit,
                           const py::object& below, bool planned, std::int64_t max_nodes,
                           int threads) const {
    std::vector<const LayersOnChips*> cores;
    for (const auto& own : layers) cores.push_back(&own.cast<const PyLayersOnChips&>().core());
    const std::size_t chips = cores.empty() ? 0 : cores[0]->chips();
    const std::size_t rows = chips * space_.memory_limits();
    const auto largest =
        view<std::int64_t>(memory_limit, "memory_limit", static_cast<py::ssize_t>(chips));
    const auto limits = view<double>(below, "below_s", static_cast<py::ssize_t>(rows));
    std::vector<PlacedPlan> plans(rows);
    std::vector<TimesRow> times(rows, TimesRow(0, 0));
    py::array_t<double> joules(static_cast<py::ssize_t>(rows));
    const std::span<double> spent = writable(joules);
    int variants = 1;
    for (const LayersOnChips* own : cores) variants = std::max(variants, own->variants());
    Status status = Status::kOk;
    interruptible(max_nodes, std::numeric_limits<double>::infinity(), threads,
                  [&](const SearchLimits& search, int workers) {
                    const ChipSearch asked{largest, limits, planned, search, workers};
                    status = phaze::best_on_chips(space_, cores, asked, plans, times, spent);
                  });
    raise_for_layers(status);
    const PlacedArrays found = placed_arrays(plans);
    return result("PlansOnChips", found.placed, found.borders,
                  times_arrays(times, space_.kinds(), variants), freeze(std::move(joules)));
  }

  // Lower bounds of the layers and the step of a strategy on some of the chips, each raised as far
  // as it takes to prove that the step exceeds its limit.
  py::tuple rule_out(std::int32_t strategy, const PyLayersOnChips& layers, const py::object& chips,
                     const py::object& memory_limit, const py::object& limit, bool planned,
                     std::int64_t max_nodes, int threads) const {
    check_strategy(strategy);
    const auto positions = layers.checked(chips);
    const auto count = static_cast<py::ssize_t>(positions.size());
    const auto largest = view<std::int64_t>(memory_limit, "memory_limit", count);
    const auto limits_s = view<double>(limit, "limits_s", count);
    for (const std::int64_t own : largest) check_limit(own);
    if (layers.core().kinds() != space_.kinds()) throw InvalidInput("layers: of another model");
    std::vector<TimesRow> least = layers.rows(positions.size());
    py::array_t<double> bounds(count);
    const std::span<double> least_s = writable(bounds);
    interruptible(max_nodes, std::numeric_limits<double>::infinity(), threads,
                  [&](const SearchLimits& search, int workers) {
                    each_chip(positions, workers, [&](std::size_t k, std::size_t chip) {
                      const StepQuery step{&space_, strategy, static_cast<std::size_t>(largest[k])};
                      layers.core().add_joules(chip, &least[k]);
                      return layers.core().rule_out(chip, step, limits_s[k], planned, search,
                                                    &least[k], &least_s[k]);
                    });
                  });
    return py::make_tuple(times_arrays(least, space_.kinds(), layers.core().variants()),
                          freeze(std::move(bounds)));
  }

  // Seconds and joules of a step of plans, [figure][plan], each by a row of `times`.
  py::array_t<double> figures(const py::object& times, const py::object& row,
                              const py::object& placed, const py::object& borders) const {
    const TimesView timed(times, space_.kinds(), "times");
    const auto plans = view<PlacedRecord>(placed, "placed");
    const auto rows = view<std::int64_t>(row, "row", static_cast<py::ssize_t>(plans.size()));
    const auto pool = view<std::int32_t>(borders, "borders");
    py::array_t<double> found({py::ssize_t{2}, std::ssize(plans)});
    for (std::size_t k = 0; k < plans.size(); ++k) {
      const PlacedRecord& p = plans[k];
      const auto size = static_cast<std::int64_t>(pool.size());
      const bool inside = p.cuts_at >= 0 && p.cuts >= 0 && p.cuts_at <= size - p.cuts &&
                          p.variants_at >= 0 && p.variants >= 0 &&
                          p.variants_at <= size - p.variants;
      if (!inside || rows[k] < 0 || rows[k] >= static_cast<std::int64_t>(timed.rows())) {
        throw InvalidInput("placed: cuts, variants or rows are out of range");
      }
      const std::size_t layout = row_of(p.layout);
      const auto run = [&](std::int64_t at, std::int64_t count) {
        const auto first = pool.begin() + at;
        return std::vector<std::int32_t>(first, first + count);
      };
      const Partition partition{run(p.cuts_at, p.cuts), run(p.variants_at, p.variants)};
      if (space_.check_partition(layout, partition) != PlanStatus::kOk) {
        throw InvalidInput("placed: not a partition of this layout");
      }
      const PlanEstimate plan = space_.estimate(
          layout, partition, timed[static_cast<std::size_t>(rows[k])], {}, 0.0, nullptr);
      found.mutable_at(0, k) = plan.time_s;
      found.mutable_at(1, k) = plan.energy_j;
    }
    return freeze(std::move(found));
  }

  // Lower bounds of a strategy on each chip, each chip with its own memory limit.
  py::array_t<double> bounds(std::int32_t strategy, const py::object& least,
                             const py::object& memory_limit, int threads) const {
    check_strategy(strategy);
    const TimesView floor(least, space_.kinds(), "least");
    const auto memory_limits =
        view<std::int64_t>(memory_limit, "memory_limit", static_cast<py::ssize_t>(floor.rows()));
    for (const std::int64_t r : memory_limits) check_limit(r);
    const int workers = checked_threads(threads);
    return computed<double>(floor.rows(), [&](std::span<double> out) {
      parallel_for(out.size(), workers, 16, [&](std::size_t begin, std::size_t end) {
        for (std::size_t k = begin; k < end; ++k) {
          out[k] = space_.strategy_bound_s(strategy, floor[k],
                                           static_cast<std::size_t>(memory_limits[k]));
        }
      });
    });
  }

  // Lower bounds of a strategy from the work of a micro-batch alone.
  py::array_t<double> work_bounds(std::int32_t strategy, const py::object& work,
                                  const py::object& memory_limit) const {
    check_strategy(strategy);
    const auto seconds = view<double>(work, "work_s");
    const auto memory_limits =
        view<std::int64_t>(memory_limit, "memory_limit", static_cast<py::ssize_t>(seconds.size()));
    for (const std::int64_t r : memory_limits) check_limit(r);
    return computed<double>(seconds.size(), [&](std::span<double> out) {
      for (std::size_t k = 0; k < out.size(); ++k) {
        out[k] =
            space_.work_bound_s(strategy, seconds[k], static_cast<std::size_t>(memory_limits[k]));
      }
    });
  }

  // Quick lower bounds of all layouts.
  py::array_t<double> layout_bounds(const py::object& times, std::int64_t memory_limit) const {
    const TimesView timed = by_strategy(times);
    check_limit(memory_limit);
    return computed<double>(space_.layouts(), [&](std::span<double> out) {
      for (std::size_t r = 0; r < out.size(); ++r) {
        out[r] = space_.layout_bound_s(
            r, timed[static_cast<std::size_t>(space_.layout(r).strategy)],
            static_cast<std::size_t>(memory_limit), -std::numeric_limits<double>::infinity());
      }
    });
  }

  // Bound and exact time of one layout, for tests that compare them.
  py::object solve(const py::object& times, std::int64_t layout, std::int64_t memory_limit,
                   double below_s) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    check_limit(memory_limit);
    const KindTimes own = timed[static_cast<std::size_t>(space_.layout(row).strategy)];
    const double bound = space_.layout_bound_s(row, own, static_cast<std::size_t>(memory_limit));
    const PlacedPlan plan = space_.best_of_layout(
        row, own, space_.usable_bytes(static_cast<std::size_t>(memory_limit)), below_s);
    const PlacedArrays found = placed_arrays({plan});
    return result("SolvedLayout", bound, found.placed, found.borders);
  }

 private:
  Partition partition_of(std::size_t row, const py::object& cuts,
                         const py::object& variants) const {
    const auto borders = view<std::int32_t>(cuts, "cuts");
    const auto codes = view<std::int32_t>(variants, "variants");
    const Partition found{{borders.begin(), borders.end()}, {codes.begin(), codes.end()}};
    const PlanStatus status = space_.check_partition(row, found);
    if (status != PlanStatus::kOk) throw InvalidInput(std::string("stages: ") + sentence(status));
    return found;
  }
  // The plans that `find` returns for the times of all strategies, with the counts of layouts.
  template <typename Find>
  py::object leading(const py::object& times, std::int64_t memory_limit, const Find& find) const {
    const TimesView timed = by_strategy(times);
    check_limit(memory_limit);
    std::vector<KindTimes> all;
    for (std::size_t s = 0; s < timed.rows(); ++s) all.push_back(timed[s]);
    SettledLayouts settled{};
    const auto plans = [&] {
      const py::gil_scoped_release release;
      return find(all, &settled);
    }();
    const PlacedArrays found = placed_arrays(plans);
    return result("RankedPlans", found.placed, found.borders, settled.solved, settled.empty,
                  settled.open_s);
  }

  TimesView by_strategy(const py::object& times) const {
    const TimesView timed(times, space_.kinds(), "times");
    if (timed.rows() != space_.strategies()) {
      throw InvalidInput("times: expected one row for each strategy");
    }
    return timed;
  }
  // Times with some communication costs set to zero, by level; empty if parts are not requested.
  std::vector<TimesView> levels(const py::object& free, std::size_t rows) const {
    std::vector<TimesView> found;
    for (const auto& level : free) {
      found.emplace_back(py::reinterpret_borrow<py::object>(level), space_.kinds(), "free");
      if (found.back().rows() != rows) throw InvalidInput("free: not as many rows as expected");
    }
    if (!found.empty() && found.size() != kFreeLevels) {
      throw InvalidInput("free: expected times of " + std::to_string(kFreeLevels) + " levels");
    }
    return found;
  }
  std::size_t row_of(std::int64_t layout) const {
    if (layout < 0 || layout >= static_cast<std::int64_t>(space_.layouts())) {
      throw InvalidInput("layout: " + std::to_string(layout) + " is not accepted; expected 0 to " +
                         std::to_string(space_.layouts()) + " (exclusive)");
    }
    return static_cast<std::size_t>(layout);
  }
  void check_limit(std::int64_t memory_limit) const {
    if (memory_limit < 0 || memory_limit >= static_cast<std::int64_t>(space_.memory_limits())) {
      throw InvalidInput("memory_limit: there is no such limit");
    }
  }
  void check_strategy(std::int32_t strategy) const {
    if (strategy < 0 || strategy >= static_cast<std::int32_t>(space_.strategies())) {
      throw InvalidInput("strategy: there is no such strategy");
    }
  }

  PlanSpace space_;
};

// Widths of plans as columns, in the order of the fields of PlanWidths; a column may have one
// number for all rows.
class WidthColumns {
 public:
  static constexpr std::size_t kCount = sizeof(PlanWidths) / sizeof(std::int64_t);
  static constexpr const char* kNames[kCount] = {"tp",   "pp",    "dp",          "cp",
                                                 "ep",   "etp",   "micro_batch", "vpp",
                                                 "zero", "shard", "schedule",    "rank_order"};

  explicit WidthColumns(const py::sequence& columns) {
    if (py::len(columns) != kCount) throw InvalidInput("widths: expected a column for each field");
    for (std::size_t k = 0; k < kCount; ++k) {
      columns_[k] = py::cast<py::array_t<std::int64_t>>(columns[k]);
      if (columns_[k].ndim() != 1) throw InvalidInput("widths: expected one-dimensional columns");
      rows_ = std::max(rows_, columns_[k].shape(0));
    }
    for (std::size_t k = 0; k < kCount; ++k) {
      const bool one = columns_[k].shape(0) == 1;
      if (!one && columns_[k].shape(0) != rows_) throw InvalidInput("widths: lengths differ");
      from_[k] = reinterpret_cast<const char*>(columns_[k].data());
      step_[k] = one ? 0 : columns_[k].strides(0);
    }
  }
  std::size_t rows() const noexcept { return static_cast<std::size_t>(rows_); }
  PlanWidths operator[](std::size_t row) const noexcept {
    std::int64_t values[kCount];
    for (std::size_t k = 0; k < kCount; ++k) {
      std::memcpy(&values[k], from_[k] + static_cast<py::ssize_t>(row) * step_[k],
                  sizeof(values[k]));
    }
    PlanWidths widths{};
    std::memcpy(&widths, values, sizeof(widths));
    return widths;
  }

 private:
  py::array_t<std::int64_t> columns_[kCount];
  const char* from_[kCount];
  py::ssize_t step_[kCount];
  py::ssize_t rows_ = 0;
};

// The first rule that each row of widths violates, as a PlanStatus.
py::array_t<std::int32_t> statuses_of(const py::sequence& widths, std::int64_t devices,
                                      std::int64_t global_batch) {
  const WidthColumns columns(widths);
  return computed<std::int32_t>(columns.rows(), [&](std::span<std::int32_t> filled) {
    for (std::size_t i = 0; i < filled.size(); ++i) {
      filled[i] = static_cast<std::int32_t>(check_widths(columns[i], devices, global_batch));
    }
  });
}

// Numbers distinct whole numbers in the order of their arrival.
class Numbering {
 public:
  std::int64_t number_of(std::int64_t value) {
    std::size_t slot = slot_of(value);
    if (table_[slot].number < 0) {
      if (2 * static_cast<std::size_t>(count_) >= table_.size()) {
        grow();
        slot = slot_of(value);
      }
      table_[slot] = {value, count_++};
    }
    return table_[slot].number;
  }
  std::int64_t count() const noexcept { return count_; }

 private:
  struct Slot {
    std::int64_t value, number;  // -1: empty
  };
  // The slot that has a value, or the empty one that it would have.
  std::size_t slot_of(std::int64_t value) const noexcept {
    std::uint64_t hash = static_cast<std::uint64_t>(value) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 32U;
    const std::size_t mask = table_.size() - 1;
    std::size_t slot = hash & mask;
    while (table_[slot].number >= 0 && table_[slot].value != value) slot = (slot + 1) & mask;
    return slot;
  }
  void grow() {
    std::vector<Slot> before(4 * table_.size(), Slot{0, -1});
    before.swap(table_);
    for (const Slot& own : before) {
      if (own.number >= 0) table_[slot_of(own.value)] = own;
    }
  }

  std::vector<Slot> table_ = std::vector<Slot>(1024, Slot{0, -1});
  std::int64_t count_ = 0;
};

// Replaces values by the numbers of distinct ones; returns where each first occurs.
std::vector<std::int64_t> number(std::span<std::int64_t> values) {
  Numbering numbering;
  std::vector<std::int64_t> first;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = numbering.number_of(values[i]);
    if (values[i] == static_cast<std::int64_t>(first.size())) {
      first.push_back(static_cast<std::int64_t>(i));
    }
  }
  return first;
}

std::pair<std::int64_t, std::int64_t> limits(std::span<const std::int64_t> values) noexcept {
  std::int64_t least = values[0];
  std::int64_t most = values[0];
  for (const std::int64_t value : values) {  // in less time than std::minmax_element
    least = std::min(least, value);
    most = std::max(most, value);
  }
  return {least, most};
}

// Where each distinct row of columns of whole numbers first occurs, and the number of each row; a
// column may have one number for all rows.
py::object distinct_rows(const py::sequence& columns) {
  std::vector<py::array_t<std::int64_t>> kept;
  std::vector<std::span<const std::int64_t>> values;
  py::ssize_t rows = 1;
  for (const auto& column : columns) {
    kept.push_back(py::array_t<std::int64_t, py::array::c_style>::ensure(column));
    values.push_back(view<std::int64_t>(kept.back(), "columns"));
    if (values.back().size() != 1) rows = kept.back().size();
  }
  py::array_t<std::int64_t> which(rows);
  const auto codes = writable(which);  // equal for equal rows, and below `range`
  std::vector<std::int64_t> first;
  {
    const py::gil_scoped_release release;
    std::fill(codes.begin(), codes.end(), 0);
    std::int64_t range = 1;
    for (std::span<const std::int64_t> own : values) {
      if (own.size() == 1 || rows == 0) continue;
      if (own.size() != codes.size()) throw InvalidInput("columns: lengths differ");
      constexpr std::int64_t kMost = std::int64_t{1} << 31U;  // more than rows
      std::vector<std::int64_t> numbers;
      auto [least, most] = limits(own);
      if (least < 0 || most >= kMost) {
        numbers.assign(own.begin(), own.end());
        least = 0;
        most = static_cast<std::int64_t>(number(numbers).size()) - 1;
        own = numbers;
      }
      const std::int64_t width = most - least + 1;
      if (range > kMost) range = static_cast<std::int64_t>(number(codes).size());
      for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = codes[i] * width + own[i] - least;
      range *= width;
    }
    first = number(codes);
  }
  return py::make_tuple(array(first), which);
}

// Where each distinct word of an array of words first occurs, and the number of each row's word.
py::object distinct_words(const py::array& words) {
  if (words.ndim() != 1 || words.dtype().kind() != 'U' ||
      (words.shape(0) > 1 && words.strides(0) != words.itemsize())) {
    throw InvalidInput("words: expected a contiguous array of words");
  }
  constexpr std::size_t kFew = 16;  // are compared one by one, which takes less time than hashing
  const auto size = static_cast<std::size_t>(words.itemsize());
  const auto* const bytes = static_cast<const char*>(words.data());
  const auto rows = static_cast<std::size_t>(words.shape(0));
  std::vector<std::int64_t> first;
  std::unordered_map<std::string_view, std::int64_t> numbers;
  py::array_t<std::int64_t> which(static_cast<py::ssize_t>(rows));
  std::int64_t* const number = which.mutable_data();
  const auto same = [&](std::size_t a, std::size_t b) {
    return std::memcmp(bytes + a * size, bytes + b * size, size) == 0;
  };
  for (std::size_t i = 0; i < rows; ++i) {
    std::size_t k = 0;
    while (k < std::min(first.size(), kFew) && !same(i, static_cast<std::size_t>(first[k]))) ++k;
    if (k == kFew) {
      const std::string_view word(bytes + i * size, size);
      const auto next = static_cast<std::int64_t>(first.size());
      k = static_cast<std::size_t>(numbers.try_emplace(word, next).first->second);
    }
    if (k == first.size()) first.push_back(static_cast<std::int64_t>(i));
    number[i] = static_cast<std::int64_t>(k);
  }
  return py::make_tuple(array(first), which);
}

void bind_plan_records(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(LayerKindRecord, parameters, expert_parameters, stash_bytes, live_bytes,
                       once_bytes, copy_bytes, cast_bytes, shape_bytes, boundary, layer_peaks,
                       frozen_parameters, frozen_experts, packed_parameters, packed_bytes,
                       more_state_bytes, step_gather_bytes, slice_s, stage_work, host_state);
  PYBIND11_NUMPY_DTYPE(StrategyRecord, tp, cp, ep, etp, micro_batch, message_bytes, gathered_bytes,
                       copied_parameters, sent_bytes, variants, group_kind, copied_frozen,
                       copied_state_bytes);
  PYBIND11_NUMPY_DTYPE(LayoutRecord, strategy, schedule, pp, vpp, zero, rank_order, dp,
                       micro_batches, shard);
  PYBIND11_NUMPY_DTYPE(TrainingRecord, weight_bytes, gradient_bytes, state_bytes, fragmentation,
                       bucket_bytes, contention, hbm_byte_j, network_byte_j, gather_bytes,
                       workspace_bytes, late_gradients, whole_layers);
  PYBIND11_NUMPY_DTYPE(PlanParts, compute_s, tensor_comm_s, context_comm_s, expert_comm_s,
                       pipeline_comm_s, data_comm_s, bubble_s, imbalance_s, recompute_s,
                       optimizer_s, host_s);
  PYBIND11_NUMPY_DTYPE(MemoryTerms, weights, gradients, optimizer, activations, recompute, logits,
                       communication, fragmentation);
  PYBIND11_NUMPY_DTYPE(PlanEstimate, time_s, energy_j, parts, memory, memory_bytes, max_load_s,
                       fullest, status, instant, unused);
  PYBIND11_NUMPY_DTYPE(StageEstimate, load_s, memory, instant, unused);
  PYBIND11_NUMPY_DTYPE(PlacedRecord, time_s, memory_bytes, layout, cuts_at, cuts, variants_at,
                       variants, open_s);
  py::list names;
  for (const char* name : WidthColumns::kNames) names.append(name);
  module.attr("WIDTHS") = py::tuple(names);
  module.def("check_widths", &statuses_of, py::arg("widths"), py::arg("devices"),
             py::arg("global_batch"));
  module.def("distinct_rows", &distinct_rows, py::arg("columns"));
  module.def("distinct_words", &distinct_words, py::arg("words"));
  module.attr("MAX_VARIANTS") = kMaxVariants;
  module.attr("PLACED_DTYPE") = py::dtype::of<PlacedRecord>();
  module.attr("LAYER_KIND_DTYPE") = py::dtype::of<LayerKindRecord>();
  module.attr("STRATEGY_DTYPE") = py::dtype::of<StrategyRecord>();
  module.attr("LAYOUT_DTYPE") = py::dtype::of<LayoutRecord>();
  module.attr("TRAINING_DTYPE") = py::dtype::of<TrainingRecord>();
  module.attr("ESTIMATE_DTYPE") = py::dtype::of<PlanEstimate>();
  bind_outcomes<PlanStatus>(
      module, "PlanStatus",
      {"OK", "OVER_MEMORY", "NO_PLAN", "BAD_DEVICES", "BAD_BATCH", "TOO_MANY_STAGES",
       "BAD_SCHEDULE", "FEW_ROUNDS", "BAD_EXPERTS", "BAD_STRATEGY", "BROKEN_TIE", "BAD_SHARD"});
  module.attr("PLAN_STATUS_SENTENCES") = names_of<PlanStatus>(kPlanStatusCount, &sentence);
  bind_result(module, "EstimatedPlan", "estimate stages");
  bind_result(module, "PlanPasses", "forward_s backward_s weight_grad_s step_s");
  bind_result(module, "EvenPartition", "status cuts variants");
  bind_result(module, "PlacedPlans", "placed borders");
  bind_result(module, "PlansOnChips", "placed borders times joules");
  bind_result(module, "RankedPlans", "placed borders solved empty open_s");
  bind_result(module, "SolvedLayout", "bound_s placed borders");
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_plan_records(module);
  py::class_<PyPlanSpace>(module, "PlanSpace")
      .def(py::init<const py::object&, std::int64_t, const py::object&, std::int32_t,
                    const py::object&, const py::object&, const py::object&, const py::object&,
                    const py::object&, const py::object&, const py::object&, const py::object&,
                    bool>(),
           py::arg("fabric"), py::arg("devices"), py::arg("training"), py::arg("kinds"),
           py::arg("order"), py::arg("edges"), py::arg("tied"), py::arg("strategies"),
           py::arg("sizes"), py::arg("layouts"), py::arg("memory_limits"), py::arg("fits"),
           py::arg("some_blocks") = false)
      .def("__len__", &PyPlanSpace::layouts)
      .def("estimate_even", &PyPlanSpace::estimate_even, py::arg("times"), py::arg("layout"),
           py::arg("variant"), py::arg("usable_bytes"), py::arg("free"), py::arg("status"),
           py::arg("threads"))
      .def("estimate", &PyPlanSpace::estimate, py::arg("times"), py::arg("layout"), py::arg("cuts"),
           py::arg("variants"), py::arg("usable_bytes"), py::arg("free") = py::tuple())
      .def("passes", &PyPlanSpace::passes, py::arg("times"), py::arg("layout"), py::arg("cuts"),
           py::arg("variants"))
      .def("even_partition", &PyPlanSpace::even_partition, py::arg("times"), py::arg("layout"),
           py::arg("variant"), py::arg("usable_bytes"))
      .def("recompute", &PyPlanSpace::recompute, py::arg("times"), py::arg("layout"),
           py::arg("cuts"), py::arg("usable_bytes"))
      .def("top_plans", &PyPlanSpace::top_plans, py::arg("times"), py::arg("memory_limit"),
           py::arg("top"), py::arg("threads"), py::arg("stop") = py::none(),
           py::arg("below_s") = std::numeric_limits<double>::infinity())
      .def("front", &PyPlanSpace::front, py::arg("times"), py::arg("memory_limit"),
           py::arg("most_s"), py::arg("threads"))
      .def("best", &PyPlanSpace::best, py::arg("strategy"), py::arg("times"), py::arg("least"),
           py::arg("below_s"), py::arg("threads"))
      .def("best_on_chips", &PyPlanSpace::best_on_chips, py::arg("layers"), py::arg("memory_limit"),
           py::arg("below_s"), py::arg("planned"), py::arg("max_nodes"), py::arg("threads"))
      .def("rule_out", &PyPlanSpace::rule_out, py::arg("strategy"), py::arg("layers"),
           py::arg("chips"), py::arg("memory_limit"), py::arg("limits_s"), py::arg("planned"),
           py::arg("max_nodes"), py::arg("threads"))
      .def("figures", &PyPlanSpace::figures, py::arg("times"), py::arg("row"), py::arg("placed"),
           py::arg("borders"))
      .def("bounds", &PyPlanSpace::bounds, py::arg("strategy"), py::arg("least"),
           py::arg("memory_limit"), py::arg("threads"))
      .def("work_bounds", &PyPlanSpace::work_bounds, py::arg("strategy"), py::arg("work_s"),
           py::arg("memory_limit"))
      .def("layout_bounds", &PyPlanSpace::layout_bounds, py::arg("times"), py::arg("memory_limit"))
      .def("solve", &PyPlanSpace::solve, py::arg("times"), py::arg("layout"),
           py::arg("memory_limit"), py::arg("below_s"));
}

}  // namespace phaze::bindings
