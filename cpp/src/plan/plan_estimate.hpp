// Estimates of given plans, many at once: plans that differ in sharding, ZeRO stage, rank order and
// recomputation alone share most of their sums, and some of their simulated steps. A step is one
// training step, simulated with given seconds of passes (forward, backward or weight gradient of a
// micro-batch in a chunk). Exchanges are those of gradients and weights among replicas. Level 0 is
// a plan's step in which exchanges take no time; each further level makes one more cost free:
// messages between stages, then as in kFreeLevels. Private to the kernel; one object per thread,
// reused to save allocations.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "phaze/pipeline_schedule.hpp"
#include "phaze/plan.hpp"
#include "plan/memory_rule.hpp"
#include "plan/plan_solver.hpp"

namespace phaze {

class PlanEstimator {
 public:
  // A plan of a group: numbers of its layout and of its partition.
  struct Plan {
    std::size_t layout, partition;
  };
  // Plans of one strategy with the same stages, chunks, schedule, micro-batches and cuts.
  struct Group {
    const LayoutOnChip& on;                 // of one of the plans
    std::span<const std::size_t> layouts;   // positions in the space's list of layouts
    std::span<const Partition> partitions;  // which differ in their recompute variants alone
    std::span<const Plan> plans;
    KindTimes times;
    std::span<const KindTimes> free;  // of kFreeLevels levels; empty: parts are not estimated
    double usable_bytes;
  };

  // Estimates the plans of a group, in their order. `stages`, if given, receives the stages of the
  // first plan. The result is valid until the next call.
  std::span<const PlanEstimate> estimate(const Group& group, PipelinePlayer* player,
                                         std::vector<StageEstimate>* stages = nullptr);

 private:
  // Columns of the sums below with the seconds of passes; `plain`: backward, nothing recomputed.
  struct Passes {
    std::size_t forward, plain, weight_grad;
    std::size_t backward;  // of the first used variant; those of the others follow
  };
  // A step to be simulated: its passes, and the layout of its messages; null: messages are free.
  struct Step {
    Passes passes;
    const PricedLayout* layout;
  };
  // State of layouts that differ in rank order alone, and so have the same bytes.
  struct Sizes {
    std::array<std::int64_t, 3> of;  // replicas, those that shard state together, ZeRO stage
    const PricedLayout* layout;      // the first such layout
    std::size_t own_step;            // column: optimiser without exchanges
    double moved_bytes;              // to and from HBM by the optimiser
  };
  struct Row {
    const PricedLayout* layout;
    const LayoutCosts* costs;
    std::size_t step, plain_step;  // positions in `steps_`: with exchanges during passes, without
    std::size_t sizes;
    std::size_t sync, after;  // columns: exchange of gradients; optimiser with gathers of weights
    double longest_tail_s;    // the longest work of a stage after the last pass
    double moved_j, sent_j;   // of the optimiser's traffic, and of what devices send one another
  };
  // A step of a partition, which is simulated for the plans that need it.
  struct Played {
    std::size_t partition, step;
  };
  // A level after level 0, see above.
  struct Level {
    std::size_t part;  // number of the cost that this level makes free, in the order of `parts`
    const KindTimes* times;
    std::size_t step;
  };
  // Sums over all layers, stage by stage, of plans with the same strategy, times and, if there are
  // several chunks, the same order of layers.
  struct Totals {
    const void* space = nullptr;
    std::int32_t strategy = -1;
    const double* times = nullptr;
    int stages = 0;  // 2 for any number above one
    LayerKindRecord parameters{};
    std::array<double, kMaxVariants> passes_j{};  // by variant of all stages; NaN: not yet summed
  };
  // Layers i..j of one kind of a stage.
  struct Run {
    int kind, i, j;
  };
  // What all partitions have in common in a stage.
  struct StageShare {
    double in_flight, once;
    int blocks;                 // number of blocks if the stage has equal blocks alone, else -1
    std::size_t runs_at, runs;  // first and number of its runs in `runs_`
    std::size_t state_at;       // position of its state in `states_`
  };
  // Bytes of a stage that depend on its recomputation and not on sharding.
  struct StageBytes {
    StageRecompute recompute;
    double live, stash, first_stash;
  };
  // A partition, with what its plans have in common.
  struct Shared {
    std::span<const std::int32_t> variants;
    double mean_s;   // of the stages' work on a micro-batch
    double again_s;  // mean of the stages' recomputation
    double most_s;   // longest work of a stage
    double passes_j;
  };

  const LayoutRecord& shape() const noexcept { return space_->layouts[layouts_[0]].record; }
  std::size_t place_of(int stage, int chunk) const noexcept {
    return at(on_->chain_of(stage, chunk));
  }
  template <typename F>
  void for_chunks(int stage, const F& f) const {
    for (int c = 0; c < chunks_; ++c) {
      const std::size_t place = place_of(stage, c);
      f(c, cuts_[place], cuts_[place + 1]);
    }
  }
  StageRecompute recompute_of(std::size_t partition, int stage) const noexcept {
    return StageRecompute::of(shared_[partition].variants[at(stage)]);
  }
  int border_of(StageRecompute r, int i, int j) const noexcept {
    return r.count == 0 ? i : std::min(std::max(i, space_->first_block) + r.count, j);
  }

  void start(const Group& group);
  // ---- sums over layers ----
  void list_rows();
  void list_variants();
  void list_levels(std::span<const KindTimes> free);
  Passes add_passes();
  std::size_t add_step(const Passes& passes, const PricedLayout* layout);
  void fill_passes(const Passes& passes, const KindTimes& times, const Row* row);
  void fill_columns();
  void sum_columns();
  void add_stages();
  const double* chunk_sums(int stage, int chunk) const noexcept {
    return &(chunks_ == 1 ? of_stage_
                          : of_chunk_)[(at(stage) * at(chunks_) + at(chunk)) * columns_];
  }
  double backward_s(std::size_t column, StageRecompute r, int stage, int chunk) const noexcept;
  // ---- steps ----
  void list_played(bool by_part);
  std::size_t play(std::size_t partition, std::size_t step);
  double played_s(std::size_t partition, std::size_t step) const noexcept {
    return step_s_[played_at_[partition * steps_.size() + step]];
  }
  void find_loads();
  void find_recomputes(int stage);
  void find_passes(int stage, int chunk, int i, int j, double* load_s);
  void simulate(PipelinePlayer* player);
  double longest_tail_s(const Row& row) const;
  void find_before();
  void find_tails();
  void find_work(std::size_t partition);
  PlanParts parts(const Plan& plan, double time_s) const;
  // ---- bytes and joules ----
  void sum_bytes();
  void share_stages();
  StageShare share_stage(int stage);
  void find_stage_bytes();
  StageBytes stage_bytes(std::size_t partition, int stage);
  void find_fullest(std::vector<StageEstimate>* stages);
  void sum_late(const LayoutCosts& costs);
  bool no_fuller(std::size_t partition, int stage) const noexcept;
  PlanEstimate fullest_stage(std::size_t partition, std::size_t sizes,
                             std::vector<StageEstimate>* stages) const;
  void sum_states();
  void sum_state(int stage, std::size_t first);
  LateGradients late_gradients(std::size_t partition, int stage) const;
  void find_totals();
  double passes_j(const Shared& shared) const;
  void find_moved();
  void find_joules(Row* row) const;
  double energy_j(const Plan& plan, double time_s) const;

  // ---- of the group ----
  const PlanSpaceImpl* space_ = nullptr;
  const LayoutOnChip* on_ = nullptr;
  std::span<const std::size_t> layouts_;
  std::span<const Plan> plans_;
  std::span<const std::int32_t> cuts_;
  std::vector<Shared> shared_;  // by partition
  KindTimes times_{};
  int stages_ = 0;
  int chunks_ = 0;
  bool split_ = false;                  // whether weight gradients are passes of their own
  std::vector<std::int32_t> variants_;  // recompute variants that stages use
  std::array<std::size_t, kMaxVariants> variant_at_{};
  std::vector<Row> rows_;
  std::vector<Sizes> sizes_;
  std::vector<Step> steps_;    // of rows; those of levels follow
  std::vector<Level> levels_;  // levels 1, 2, ...
  Passes plain_{};             // of level 0
  std::vector<Played> played_;
  std::vector<StageRecompute> recomputes_;  // of one stage, by partition
  std::vector<std::size_t> played_at_;      // [partition][step]: position in `played_`, or none
  std::vector<PlanEstimate> found_;

  // Columns of seconds, summed over the layers before each cut and each border between variants.
  std::size_t columns_ = 0;
  std::vector<double> by_kind_;          // [kind][column]; the row after all kinds: last layer
  std::vector<std::int32_t> positions_;  // rising
  std::vector<std::size_t> position_at_;
  std::vector<double> sums_;      // [position][column]
  std::vector<double> of_chunk_;  // [stage * chunks + chunk][column]
  std::vector<double> of_stage_;  // [stage][column]

  // Seconds in the simulated steps: [pass of a chunk][played], `loads_s_` [stage][played], then
  // [played].
  std::size_t width_ = 0;  // number of these, filled up to a multiple of kSteps unless it is one
  std::vector<double> forward_s_, backward_s_, weight_grad_s_, loads_s_, max_load_s_, step_s_;
  std::vector<double> before_s_;  // [stage][level]: backward passes of the earlier stages
  std::vector<double> tails_s_;   // [sizes][level]

  // Bytes: sums over the layers before each position, of the strategy `bytes_of_`.
  std::array<const void*, 2> bytes_of_{};
  std::vector<double> once_, stash_;  // by position; [variant][position]
  std::vector<double> late_;          // late gradients by position, of one of `sizes_`; empty: none
  std::vector<double> by_chunk_;      // scratch
  std::vector<StageShare> stages_shared_;
  std::vector<Run> runs_;
  std::vector<StageBytes> stage_bytes_;    // [partition][stage]
  std::vector<PlanEstimate> fullest_;      // [partition][sizes]: memory of the fullest stage only
  std::vector<std::int32_t> layer_kinds_;  // kinds of all layers, stage by stage
  std::vector<double> moved_;              // scratch
  // Weights, gradients and optimiser state for each of `sizes_`, by kind and by stage.
  std::size_t state_width_ = 0;
  std::vector<double> state_by_kind_, states_;
  Totals totals_;
};

}  // namespace phaze
