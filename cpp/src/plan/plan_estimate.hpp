// Estimates of given plans, many at once: plans that differ in sharding, ZeRO stage and rank order
// alone share most of their sums and simulated steps. A step is one training step, simulated with
// given seconds of passes (forward, backward or weight gradient of a micro-batch in a chunk).
// Exchanges are those of gradients and weights among replicas. Level 0 is a plan's step in which
// exchanges take no time; each further level makes one more cost free: messages between stages,
// then as in kFreeLevels. Private to the kernel; one object per thread, reused to save allocations.
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
  // Plans of one strategy with the same stages, chunks, schedule, micro-batches and partition.
  struct Group {
    const LayoutOnChip& on;                // of one of the plans
    std::span<const std::size_t> layouts;  // positions in the space's list of layouts
    const Partition& partition;
    KindTimes times;
    std::span<const KindTimes> free;  // of kFreeLevels levels; empty: parts are not estimated
    double usable_bytes;
  };

  // Estimates the plans of a group, in the order of its layouts. `stages`, if given, receives the
  // stages of the first plan. The result is valid until the next call.
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
  // Bytes of plans that differ in rank order alone, and so have the same bytes.
  struct Sizes {
    std::array<std::int64_t, 3> of;  // replicas, those that shard state together, ZeRO stage
    const PricedLayout* layout;      // of the first such plan
    std::size_t own_step;            // column: optimiser without exchanges
    PlanEstimate fullest;            // with the memory of the fullest stage only
    double moved_bytes;              // to and from HBM by the optimiser
  };
  struct Row {
    const PricedLayout* layout;
    const LayoutCosts* costs;
    std::size_t step, plain_step;  // positions in `steps_`: with exchanges during passes, without
    std::size_t sizes;
    std::size_t sync, after;  // columns: exchange of gradients; optimiser with gathers of weights
  };
  // A level after level 0, see above.
  struct Level {
    std::size_t part;  // number of the cost that this level makes free, in the order of `parts`
    const KindTimes* times;
    std::size_t step;
  };
  // Sums over all layers, stage by stage, and what plans with the same sums have in common.
  struct Totals {
    std::int32_t strategy = -1;
    const double* times = nullptr;
    std::int32_t variant = -1;
    std::int32_t stages = 0;
    double passes_j = 0.0;
    LayerKindRecord parameters{};
  };
  // Bytes of a stage that do not depend on sharding.
  struct StageBytes {
    StageRecompute recompute;
    double in_flight, live, once, stash, first_stash;
    int blocks;                   // number of blocks if the stage has equal blocks alone, else -1
    std::size_t kinds_at, kinds;  // first and number of its layers' kinds in `kinds_in_`
    std::size_t state_at;         // position of its state in `states_`
  };

  const LayoutRecord& shape() const noexcept { return space_->layouts[layouts_[0]].record; }
  std::size_t place_of(int stage, int chunk) const noexcept {
    return at(on_->chain_of(stage, chunk));
  }
  template <typename F>
  void for_chunks(int stage, const F& f) const {
    for (int c = 0; c < chunks_; ++c) {
      const std::size_t place = place_of(stage, c);
      f(c, partition_->cuts[place], partition_->cuts[place + 1]);
    }
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
  double backward_s(std::size_t column, int stage, int chunk) const noexcept;
  // ---- steps ----
  void find_loads();
  void find_passes(int stage, int chunk, int i, int j, double* load_s);
  void simulate(PipelinePlayer* player);
  double longest_tail_s(const Row& row) const;
  void find_before();
  void find_tails();
  void find_work();
  PlanParts parts(const Row& row, double time_s) const;
  // ---- bytes and joules ----
  void sum_bytes();
  void find_stage_bytes();
  StageBytes stage_bytes(int stage);
  void find_sizes(Sizes* sizes, std::vector<StageEstimate>* stages);
  void sum_states();
  void sum_state(int stage, std::size_t first);
  LateGradients late_gradients(int stage) const;
  void find_totals();
  void find_moved();
  double energy_j(const Row& row, double time_s) const;

  // ---- of the group ----
  const PlanSpaceImpl* space_ = nullptr;
  const LayoutOnChip* on_ = nullptr;
  std::span<const std::size_t> layouts_;
  const Partition* partition_ = nullptr;
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
  std::vector<PlanEstimate> found_;

  // Columns of seconds, summed over the layers before each cut and each border between variants.
  std::size_t columns_ = 0;
  std::vector<double> by_kind_;          // [kind][column]; the row after all kinds: last layer
  std::vector<std::int32_t> positions_;  // rising
  std::vector<std::size_t> position_at_;
  std::vector<double> sums_;      // [position][column]
  std::vector<double> of_chunk_;  // [stage * chunks + chunk][column]
  std::vector<double> of_stage_;  // [stage][column]

  // Seconds in the simulated steps: [pass of a chunk][step], `loads_s_` [stage][step], then [step].
  std::size_t width_ = 0;  // number of steps, filled up to a multiple of kSteps unless it is one
  std::vector<double> forward_s_, backward_s_, weight_grad_s_, loads_s_, max_load_s_, step_s_;
  std::vector<double> before_s_;  // [stage][level]: backward passes of the earlier stages
  std::vector<double> tails_s_;   // [sizes][level]
  double mean_s_ = 0.0;           // of the stages' work on a micro-batch
  double again_s_ = 0.0;          // mean of the stages' recomputation
  double most_s_ = 0.0;           // longest work of a stage

  // Bytes: sums over the layers before each position, of the strategy `bytes_of_`.
  std::array<const void*, 2> bytes_of_{};
  std::vector<double> once_, stash_;  // by position; [variant][position]
  std::vector<double> late_;          // late gradients by position, of one of `sizes_`; empty: none
  std::vector<double> by_chunk_;      // scratch
  std::vector<StageBytes> stage_bytes_;
  std::vector<std::int32_t> kinds_in_;
  std::vector<std::int32_t> layer_kinds_;  // kinds of all layers, stage by stage
  std::vector<double> moved_;              // scratch
  // Weights, gradients and optimiser state for each of `sizes_`, by kind and by stage.
  std::size_t state_width_ = 0;
  std::vector<double> state_by_kind_, states_;
  Totals totals_;
};

}  // namespace phaze
