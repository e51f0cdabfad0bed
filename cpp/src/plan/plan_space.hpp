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
// that two devices have every part of the model.
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

// Whether all partitions of a layout are searched; those of others are assignments of layers to
// chunks that differ by one layer at most, and `PlanSpaceImpl::cuts_of_software`.
inline bool searches_partitions(const LayoutRecord& layout) noexcept {
  const PipelineSchedule schedule = schedule_of(layout);
  if (layout.vpp > 1) return false;
  return layout.pp == 1 || schedule == PipelineSchedule::kOneForwardOneBackward ||
         (schedule == PipelineSchedule::kZeroBubbleH1 && layout.micro_batches >= layout.pp);
}

// Passes of each chunk of a device in one step.
inline double rounds_of(const LayoutRecord& layout) noexcept {
  return static_cast<double>(layout.micro_batches) * (bidirectional(layout) ? 0.5 : 1.0);
}

// Layers of a strategy with given replicas, ZeRO stage and rank order. Arrays are by kind; the kind
// after the last is the head with its copy of a tied embedding, which replaces the head if there
// are several stages.
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
  std::span<double> gather_bytes;  // of one layer at a time, before allocator losses
  std::span<double> sync_s;        // of gradients, once per step
  std::span<double> each_s;        // of gradients exchanged with every micro-batch; else zeros
  std::span<double> fetch_s;       // of weights gathered layer by layer; zeros if they are resident
  std::span<double> step_bytes;    // that the optimiser moves to and from HBM
  std::span<double> step_share;    // of the optimiser's products that a device computes
  std::span<double> shared_s;      // to gather weights after the step
  std::span<const double> message_s;  // from stage k - 1 to stage k; entry 0 is not used
  double bucket_s = 0.0;              // of the gradients that are synchronised last
  double shards = 1.0;                // devices that shard state
  double copies = 1.0;                // replicas of that state

 private:
  std::vector<double> values_;
};

// Number of blocks that fit into the stages of a layout, by position: entry s - 1 is the s-th stage
// from the end. Private to the bounds.
struct StageCapacities {
  std::vector<double> plain;     // in the plain variant
  std::vector<double> smallest;  // in the variant with the least memory, except the plain one
  std::vector<double> plain_sum, best_sum;  // over the last s stages; of whole blocks
};

// Coefficients of a layout's bound; docs/search.md has the proof of each.
struct LayoutBound {
  double loads;  // of the longest load
  double works;  // of the work of a micro-batch
  double chunk;  // interleaved: blocks of a chunk at least
  double early;  // stages followed by at least as many as there are micro-batches; 0: not counted
  double sends_s;
  double tail_s;
  double step_bytes;
  double sync_s;
  double whole;    // blocks of the longest stage, if all were equal
  double missing;  // empty places in that case, negated
};

// The blocks that bounds count: those with at least so many parameters. Of the blocks that differ,
// few small ones are left out.
struct CountedBlocks {
  double parameters = 0.0;
  int count = 0;
};

// One layout with one memory limit: whether it fits, and how much must be recomputed.
struct LayoutFit {
  std::int32_t capacities = -1;  // position in the list of StageCapacities; -1: does not fit
  double recomputed = 0.0;       // blocks, at least
};

struct PricedLayout {
  LayoutRecord record;
  std::int32_t costs;  // position in the list of LayoutCosts
  double wrap_s;       // interleaved: message from the last stage to the first
  double exchange_s;   // of the gradients of a tied embedding, between first and last stage
  LayoutBound bound;
};

// A line over the work of a micro-batch.
struct BoundLine {
  double slope;
  double height_s;

  // At most the value of `bound_of_layout` for its layout, including rounding of the sums.
  double least_s(double work_s) const noexcept {
    return (slope * work_s + height_s) * (1.0 - 2e-9);
  }
};

// The inputs of the bounds, for every memory limit of the space; filled once by add_bounds(), then
// only read. Lists "by strategy and limit" are at [strategy * limits + limit].
struct LayoutBounds {
  std::vector<double> memory_limits;  // usable bytes of a device
  std::vector<StageCapacities> stage_capacities;
  std::vector<LayoutFit> layout_fits;                 // [layout * limits + limit]
  std::vector<std::int64_t> without_plan;             // by limit: marked layouts that do not fit
  std::vector<std::vector<BoundLine>> lines;          // by strategy and limit: the lowest ones
  std::vector<std::vector<std::int64_t>> fitting;     // the same: layouts that may fit, those with
                                                      // the least to pay for work first
  std::vector<std::vector<BoundLine>> fitting_lines;  // of each of those
};

template <std::size_t N>
struct HashOfWords {
  std::size_t operator()(const std::array<std::int64_t, N>& words) const noexcept {
    std::uint64_t hash = 0;
    for (const std::int64_t word : words) hash = mixed(hash, static_cast<std::uint64_t>(word));
    return static_cast<std::size_t>(hash);
  }
};

// Seconds of the collectives and messages of a space while it is built: many layouts have groups of
// the same shape, and a group exchanges few different numbers of bytes.
struct GroupPrices {
  struct Price {
    CollectiveOp op;
    double bytes, time_s;
  };
  std::unordered_map<std::array<std::int64_t, 4>, std::vector<Price>, HashOfWords<4>> collectives;
  // By the ranks' four numbers, their runs and the bits of the bytes.
  std::unordered_map<std::array<std::int64_t, 6>, double, HashOfWords<6>> messages;
};

// A group of ranks and what its collectives are known to take.
struct PricedGroup {
  GroupShape shape;
  std::vector<GroupPrices::Price>* prices;
};

// The groups that exchange the state of a layout: devices with the same weights, and with the same
// experts, that share state; devices with the same share of it.
struct ExchangeGroups {
  PricedGroup dense, experts, copies;
  std::int64_t expert_holders;
};

class BlockCapacity;  // plan_bounds.cpp
class SolverPool;     // plan_solver.hpp

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
  int first_block = 0;  // positions of the first block and after the last
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
  std::vector<std::int32_t> first_count;       // before all blocks
  std::vector<std::int32_t> last_count;        // after all blocks
  std::vector<std::uint8_t> may_cut;           // by position
  std::vector<std::int32_t> same_kind_until;   // by position: end of the run of layers of its kind
  std::vector<std::int32_t> enters_, leaves_;  // [i][j]: messages of stage i..j; empty for chains

  // ---- strategies and layouts ----
  std::vector<StrategyRecord> strategies;
  std::vector<LayerKindRecord> sizes;  // [strategy][kind + 1]
  std::vector<CountedBlocks> counted;  // by strategy
  std::vector<std::uint8_t> by_work;   // by strategy: whether the software divides layers by work
  std::vector<LayoutCosts> layout_costs;
  std::deque<std::vector<double>> messages;  // that they have
  std::vector<PricedLayout> layouts;

  mutable InFlightCache peaks_in_flight;  // a cache: its values do not depend on the caller
  std::unique_ptr<SolverPool> solvers;

  LayoutBounds bounds;

  // Where the software divides layers by work: its cuts; else none.
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
  // Messages that a stage waits for, forward and backward.
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
    std::int64_t unit;  // ranks below the tier that its message crosses
  };
  Sender highest_sender(std::int64_t low, std::int64_t block, std::int64_t distance) const noexcept;
  bool slower_outward(double bytes) const noexcept;
  double message_s(const LayoutRecord& layout, double bytes, int from, int to, Status* status);
  PricedGroup priced_group(std::int64_t ranks, std::int64_t stride, std::int64_t outer,
                           std::int64_t outer_stride);
  double collective_s(CollectiveOp op, double bytes, const PricedGroup& group,
                      Status* status) const;
  void add_bounds(std::span<const std::uint8_t> fits);  // plan_bounds.cpp
  CountedBlocks counted_blocks(int strategy) const;
  double most_blocks(const LayoutRecord& layout) const;
  void keep_lines(std::vector<std::vector<BoundLine>> found, std::span<const BoundLine> row_lines);
  LayoutBound bound_of(const PricedLayout& layout) const;
  StageCapacities capacities_of(const PricedLayout& layout, const BlockCapacity& capacity) const;
  double recomputed_blocks(const PricedLayout& layout, const StageCapacities& stage,
                           const BlockCapacity& capacity) const;

  // While the space is built: prices, and the latest messages by rank order.
  GroupPrices prices_;
  struct MessageShape {
    double bytes = -1.0;
    std::int64_t inner, dp;
    std::int32_t rank_order, pp, most_stages;
    bool operator==(const MessageShape&) const = default;
  };
  struct LastMessages {
    MessageShape shape{};
    std::span<const double> message_s;
  };
  std::array<LastMessages, 2> last_messages_;
};

// The terms of bounds on a step; one micro-batch on one device.
struct StepTotals {
  double work_s;      // both passes of all layers, nothing recomputed
  double backward_s;  // the backward passes alone
  double block_s;     // both passes of the shortest block
  double counted_s;   // both passes of the shortest one that is counted
  double again_s;     // the least that recomputing a block adds, or saving the bytes of one where
                      // some blocks may be recomputed alone; zero if that is impossible
  double first_s;     // both passes of the layers before all blocks
  double last_s;      // both passes of the layers after them
  double blocks_backward_s;  // the backward passes of all blocks
  double backward_share;     // the largest share of a block's passes that is backward
  bool plain_is_fastest;     // no variant is faster than the plain one
};
// With the costs of a layout, including exchanges during passes.
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
// Whether all stages together hold every block if each has `usable_bytes`.
bool holds_all(const PlanSpaceImpl& space, const PricedLayout& layout, double usable_bytes,
               double bytes);
// The same from the total number of blocks that all stages hold; `low` is a known lower bound.
double least_memory_of_all(const PlanSpaceImpl& space, const PricedLayout& layout,
                           double usable_bytes, double low);

// Lower bound on every plan of a layout; a cheaper, weaker value if that is above `enough_s`.
// `totals` are those of `times` under the layout's strategy. `load_s`, if given, is a known lower
// bound on the load of some stage.
double bound_of_layout(const PlanSpaceImpl& space, std::size_t layout, std::size_t memory_limit,
                       const StepTotals& totals, const KindTimes& times, double enough_s,
                       double* load_s = nullptr) noexcept;

}  // namespace phaze
