// The parts of a PlanSpace: the costs of every layout that do not depend on the chip. Private to
// the kernel.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/numbers.hpp"
#include "phaze/collective.hpp"
#include "phaze/plan.hpp"
#include "plan/memory_rule.hpp"
#include "plan/schedule_cache.hpp"

namespace phaze {

inline PipelineSchedule schedule_of(const LayoutRecord& layout) noexcept {
  return static_cast<PipelineSchedule>(layout.schedule);
}

// Whether micro-batches enter from both ends of the pipeline, half of them in each direction, so
// that each part of the model is on two devices.
inline bool bidirectional(const LayoutRecord& layout) noexcept {
  return schedule_of(layout) == PipelineSchedule::kDualPipe;
}

// Number of chunks of the model.
inline int places_of(const LayoutRecord& layout) noexcept {
  return bidirectional(layout) ? layout.pp : layout.pp * layout.vpp;
}

// Whether layouts have the same layers, stages and order of passes.
inline bool same_shape(const LayoutRecord& a, const LayoutRecord& b) noexcept {
  return a.strategy == b.strategy && a.schedule == b.schedule && a.pp == b.pp && a.vpp == b.vpp &&
         a.micro_batches == b.micro_batches;
}

// Whether all partitions of a layout are searched. For other layouts only those whose chunks differ
// by at most one layer, and that of PlanSpaceImpl::cuts_of_software(), are searched.
inline bool searches_partitions(const LayoutRecord& layout) noexcept {
  const PipelineSchedule schedule = schedule_of(layout);
  if (layout.vpp > 1) return false;
  return layout.pp == 1 || schedule == PipelineSchedule::kOneForwardOneBackward ||
         (schedule == PipelineSchedule::kZeroBubbleH1 && layout.micro_batches >= layout.pp);
}

// Forward passes that each chunk of a device runs in one step.
inline double rounds_of(const LayoutRecord& layout) noexcept {
  return static_cast<double>(layout.micro_batches) * (bidirectional(layout) ? 0.5 : 1.0);
}

// Costs of a strategy's layers with given replicas, ZeRO stage and rank order. Arrays are by kind;
// the kind after the last is the head with its copy of a tied embedding, which replaces the head if
// there are several stages.
struct LayoutCosts {
  explicit LayoutCosts(int kinds) : states(at(kinds) + 1), values_(9 * (at(kinds) + 1)) {
    std::span<double> rest(values_);
    for (std::span<double>* by_kind : {&resident_bytes, &late_bytes, &gather_bytes, &sync_s,
                                       &each_s, &fetch_s, &step_bytes, &step_share, &shared_s}) {
      *by_kind = rest.first(states.size());
      rest = rest.subspan(states.size());
    }
  }
  LayoutCosts(LayoutCosts&&) noexcept = default;

  std::vector<StateBytes> states;  // weights with their copies; gradients unless they are late
  std::span<double> resident_bytes;
  std::span<double> late_bytes;    // of gradients that are not allocated for the whole step
  std::span<double> gather_bytes;  // whole for one layer at a time, before allocator losses
  std::span<double> sync_s;        // to exchange gradients once per step
  std::span<double> each_s;        // to exchange gradients with every micro-batch; else zeros
  std::span<double> fetch_s;       // to gather weights layer by layer; zeros if they are resident
  std::span<double> step_bytes;    // that the optimiser moves to and from HBM
  std::span<double> step_share;    // of the optimiser's products that a device computes
  std::span<double> shared_s;      // to gather weights after the step
  double bucket_s = 0.0;           // to synchronise the last bucket of gradients
  double shards = 1.0;             // devices that shard state
  double copies = 1.0;             // groups of devices that each have all of that state
  int most_stages = 1;             // of the layouts with these costs

 private:
  std::vector<double> values_;
};

// Number of blocks that fit into each stage of a layout; entry s - 1 is the s-th stage from the
// end. Private to the bounds.
struct StageCapacities {
  std::span<double> plain;                // in the plain variant
  std::span<double> smallest;             // in the variant that fits the most, except the plain one
  std::span<double> plain_sum, best_sum;  // over the last s stages: `plain`, best whole blocks
  std::span<double> in_flight;            // micro-batches
};

// Coefficients of a layout's bound; docs/search.md has the proof of each.
struct LayoutBound {
  double loads;  // factor of the largest load of a stage
  double works;  // factor of the work of a micro-batch on all stages
  double chunk;  // interleaved: least number of blocks of a chunk; else 0
  double early;  // stages with at least as many later stages as micro-batches; 0: not counted
  double sends_s;
  double tail_s;
  double step_bytes;
  double sync_s;
  double whole;    // blocks of the longest stage if stages are as even as possible
  double missing;  // blocks minus stages x `whole`: at most zero
};

// The blocks that bounds count: those with at least `parameters` parameters. If blocks differ, a
// few small ones may be left out.
struct CountedBlocks {
  double parameters = 0.0;
  int count = 0;
};

// One layout with one memory limit: whether it fits, and how much must be recomputed.
struct LayoutFit {
  std::int32_t capacities = -1;  // position in the list of StageCapacities; -1: does not fit
  double recomputed = 0.0;       // lower bound on the number of recomputed blocks
};

struct PricedLayout {
  LayoutRecord record;
  std::int32_t costs;                 // position in the list of LayoutCosts
  std::span<const double> message_s;  // [k]: from stage k - 1 to stage k; entry 0 is not used
  double wrap_s;                      // interleaved: message from the last stage to the first
  double exchange_s;  // of the gradients of a tied embedding, between first and last stage
  LayoutBound bound;
};

// A lower bound on a step as a linear function of the work of a micro-batch.
struct BoundLine {
  double slope;
  double height_s;

  // At most what bound_of_layout() returns for the line's layout, even after rounding of the sums.
  double least_s(double work_s) const noexcept {
    return (slope * work_s + height_s) * (1.0 - 2e-9);
  }
  // At most least_s() of this line and of all later ones of a list by ascending slope.
  double least_from_here_s(double work_s) const noexcept { return slope * work_s * (1.0 - 2e-9); }
};

// The inputs of the bounds, for every memory limit of the space; filled once by add_bounds(), then
// only read. Lists "by strategy and limit" are at [strategy * limits + limit].
struct LayoutBounds {
  std::vector<double> memory_limits;             // usable bytes of a device
  std::deque<std::vector<double>> stage_values;  // to which `stage_capacities` points
  std::vector<StageCapacities> stage_capacities;
  std::vector<LayoutFit> layout_fits;                 // [layout * limits + limit]
  std::vector<std::int64_t> without_plan;             // by limit: marked layouts proven not to fit
  std::vector<std::vector<BoundLine>> lines;          // by strategy and limit: the lowest lines
  std::vector<std::vector<std::int64_t>> fitting;     // by strategy and limit: layouts that may
                                                      // fit, by ascending slope of their lines
  std::vector<std::vector<BoundLine>> fitting_lines;  // the line of each layout in `fitting`
};

template <std::size_t N>
struct HashOfWords {
  std::size_t operator()(const std::array<std::int64_t, N>& words) const noexcept {
    std::uint64_t hash = 0;
    for (const std::int64_t word : words) hash = mixed(hash, static_cast<std::uint64_t>(word));
    return static_cast<std::size_t>(hash);
  }
};

// Cache of the seconds of collectives and messages while a space is built: many layouts have groups
// of the same shape, and a group exchanges few different numbers of bytes.
struct GroupPrices {
  struct Price {
    CollectiveOp op;
    double bytes, time_s;
  };
  std::unordered_map<std::array<std::int64_t, 4>, std::vector<Price>, HashOfWords<4>> collectives;
  // By both stages, the three numbers of their ranks, and the bits of the bytes.
  std::unordered_map<std::array<std::int64_t, 6>, double, HashOfWords<6>> messages;
  // Between all neighbouring stages: by the bits of the bytes, the ranks of a block, the runs of
  // replicas and their distance, and the stages.
  std::unordered_map<std::array<std::int64_t, 5>, std::span<const double>, HashOfWords<5>> chains;
  double outward_bytes = -1.0;  // of the latest slower_outward(), and its answer
  bool outward = false;
};

// A group of ranks and the known prices of its collectives.
struct PricedGroup {
  GroupShape shape;
  std::vector<GroupPrices::Price>* prices;
};

// Groups of devices that exchange the state of a layout: `dense` shard the same weights, `experts`
// (`expert_holders` devices) the same experts; `copies` have the same shard.
struct ExchangeGroups {
  PricedGroup dense, experts, copies;
  std::int64_t expert_holders;
};

// The devices of a stage: `runs` blocks of `block` consecutive ranks, every `apart` ranks.
struct StageRanks {
  std::int64_t block, runs, apart;
};

class BlockCapacity;  // plan_bounds.cpp
class InnerStages;
class SolverPool;  // plan_solver.hpp

class PlanSpaceImpl {
 public:
  PlanSpaceImpl();
  ~PlanSpaceImpl();

  Status build(const PlanProblem& problem, std::span<const double> memory_limits,
               std::span<const std::uint8_t> fits);

  // ---- the model ----
  int kinds = 0;
  int layers = 0;
  int blocks = 0;
  int first_block = 0;  // positions of the first block, and of the layer after the last block
  int last_block = 0;
  bool chain = true;
  bool free_cuts = true;      // whether a cut is allowed at every position
  bool equal_blocks = false;  // all blocks are of one kind
  bool some_blocks = false;   // whether a stage may recompute only some of its blocks
  CheckedFabric fabric{FabricRecord{}};
  std::int64_t devices = 0;
  TrainingRecord training{};
  std::vector<std::int32_t> order;
  std::vector<std::int32_t> block_count;       // by kind: number of occurrences among the blocks
  std::vector<std::int32_t> first_count;       // by kind: number of layers before all blocks
  std::vector<std::int32_t> last_count;        // by kind: number of layers after all blocks
  std::vector<std::uint8_t> may_cut;           // by position: whether a stage may begin there
  std::vector<std::int32_t> same_kind_until;   // by position: end of the run of layers of its kind
  std::vector<std::int32_t> enters_, leaves_;  // [i][j]: messages of stage i..j; empty for chains

  // ---- strategies and layouts ----
  std::vector<StrategyRecord> strategies;
  std::vector<LayerKindRecord> sizes;  // [strategy][kind + 1]
  std::vector<CountedBlocks> counted;  // by strategy
  std::vector<std::uint8_t> by_work;   // by strategy: whether the software divides layers by work
  std::vector<LayoutCosts> layout_costs;
  std::deque<std::vector<double>> messages;  // to which `message_s` of `layouts` points
  std::vector<PricedLayout> layouts;

  mutable InFlightCache peaks_in_flight;  // its values do not depend on who computes them
  std::unique_ptr<SolverPool> solvers;

  LayoutBounds bounds;

  // The cuts of software that divides layers by work; empty for other software.
  std::vector<std::int32_t> cuts_of_software(const LayoutRecord& layout) const;
  const LayerKindRecord& size_of(int strategy, int kind) const noexcept {
    return sizes[at(strategy) * at(kinds + 1) + at(kind)];
  }
  bool counts(int strategy, int kind) const noexcept {
    return block_count[at(kind)] > 0 &&
           size_of(strategy, kind).parameters >= counted[at(strategy)].parameters;
  }
  // The kind at a position, in a plan with `stages` stages.
  int kind_at(int position, int stages) const noexcept {
    return stages > 1 && position == layers - 1 ? kinds : order[at(position)];
  }
  // Number of messages that the stage of layers i..j waits for, forward and backward.
  int enters(int i, int j) const noexcept {
    return chain ? (i > 0) : enters_[at(i) * at(layers + 1) + at(j)];
  }
  int leaves(int i, int j) const noexcept {
    return chain ? (j < layers) : leaves_[at(i) * at(layers + 1) + at(j)];
  }
  double buffer_bytes(const PricedLayout& layout) const noexcept;
  // The variant that stores the most activations of the blocks; of equal ones the first.
  int plain_variant(int strategy) const noexcept;

 private:
  Status take_model(const PlanProblem& problem);
  void find_messages(const PlanProblem& problem);
  std::vector<std::int32_t> priced_as() const;
  Status take_layouts(const PlanProblem& problem);
  PricedLayout priced_layout(const LayoutRecord& layout, std::int32_t costs_at, Status* status);
  Status add_layout_costs(const LayoutRecord& layout, int most_stages);
  ExchangeGroups exchange_groups(const LayoutRecord& layout);
  void add_kind(const LayoutRecord& layout, int kind, const ExchangeGroups& groups,
                LayoutCosts* costs, Status* status);
  void add_kind_bytes(const LayoutRecord& layout, int kind, const LayerParameters& p,
                      LayoutCosts* costs) const;
  struct Sender {
    std::int64_t rank;
    std::int64_t unit;  // ranks of one unit below the highest tier that its message crosses
  };
  Sender highest_sender(std::int64_t low, std::int64_t block, std::int64_t distance) const noexcept;
  bool slower_outward(double bytes) noexcept;
  double message_s(const LayoutRecord& layout, double bytes, int from, int to, Status* status);
  double slowest_message_s(const StageRanks& ranks, double bytes, int from, int to, Status* status);
  std::span<const double> messages_of(const LayoutRecord& layout, Status* status);
  PricedGroup priced_group(std::int64_t ranks, std::int64_t stride, std::int64_t outer,
                           std::int64_t outer_stride);
  double collective_s(CollectiveOp op, double bytes, const PricedGroup& group,
                      Status* status) const;
  void add_bounds(std::span<const std::uint8_t> fits);  // plan_bounds.cpp
  CountedBlocks counted_blocks(int strategy) const;
  double most_blocks(const LayoutRecord& layout) const;
  void keep_lines(std::vector<std::vector<BoundLine>> found, std::span<const BoundLine> row_lines);
  LayoutBound bound_of(const PricedLayout& layout) const;
  StageCapacities capacities_of(const PricedLayout& layout, const BlockCapacity& capacity,
                                InnerStages* inner);
  double recomputed_blocks(const PricedLayout& layout, const StageCapacities& stage,
                           const BlockCapacity& capacity) const;

  GroupPrices prices_;  // while the space is built
};

// Terms of the bounds on a step: seconds of one micro-batch, summed over the layers of all stages.
struct StepTotals {
  double work_s;      // both passes of all layers, nothing recomputed
  double backward_s;  // the backward passes alone
  double block_s;     // both passes of the shortest block
  double counted_s;   // both passes of the shortest counted block (CountedBlocks)
  double again_s;     // the least that recomputing a block adds; if stages may recompute some of
                      // their blocks, that saving a block's bytes adds; 0 if impossible
  double first_s;     // both passes of the layers before all blocks
  double last_s;      // both passes of the layers after all blocks
  double blocks_backward_s;  // the backward passes of all blocks
  double backward_share;     // the largest share of a block's passes that is backward
  bool plain_is_fastest;     // no variant is faster than the plain one
};
// The terms of a strategy on a chip; given the costs of a layout, with exchanges during passes.
StepTotals totals_of(const PlanSpaceImpl& space, int strategy, const KindTimes& times,
                     const LayoutCosts* costs = nullptr) noexcept;

// Work at which the lines of layouts are evaluated: recomputation counts only if its time is
// negative, which arbitrary given times allow.
inline double line_work_s(const PlanSpaceImpl& space, const StepTotals& t) noexcept {
  return t.work_s + std::min(0.0, t.again_s) * space.blocks;
}

// Lower bound on the bytes of the fullest stage of the fastest plan of a layout, if no stage has
// more than `most` blocks.
double least_memory(const PlanSpaceImpl& space, const PricedLayout& layout, double usable_bytes,
                    double most);
// Whether all stages together can hold every counted block if each has `bytes` of memory.
bool holds_all(const PlanSpaceImpl& space, const PricedLayout& layout, double usable_bytes,
               double bytes);
// Lower bound on the memory with which holds_all() is true; `low` is a known lower bound.
double least_memory_of_all(const PlanSpaceImpl& space, const PricedLayout& layout,
                           double usable_bytes, double low);

// Lower bound on every plan of a layout; a cheaper, weaker bound if that is above `enough_s`
// already. `totals` are those of `times` under the layout's strategy. `load_s`, if given, receives
// a lower bound on the largest load of a stage.
double bound_of_layout(const PlanSpaceImpl& space, std::size_t layout, std::size_t memory_limit,
                       const StepTotals& totals, const KindTimes& times, double enough_s,
                       double* load_s = nullptr) noexcept;
// Classes of assignments of layers to chunks: whether the embedding and the head count as layers.
inline constexpr unsigned kAllClasses = 0xF;
constexpr unsigned class_bit(bool first, bool last) noexcept {
  return 1U << (2 * static_cast<int>(last) + static_cast<int>(first));
}

// A slower bound of interleaved layouts of equal blocks, mostly tighter; 0 for other layouts. Some
// bound above `enough_s` if it is above that. `classes` receives those whose bound is not.
double bound_of_chunks(const PlanSpaceImpl& space, std::size_t layout, std::size_t memory_limit,
                       const KindTimes& times, double enough_s, unsigned* classes = nullptr);

}  // namespace phaze
