// Parallel plans of a model on a cluster: the step time of a plan, the best plan of a layout, and
// lower bounds on every plan of a layout. The formulas are in docs/planning.md and docs/search.md.
//
// A strategy defines how a layer is split over devices (tensor, context, expert width,
// micro-batch); a layout adds replicas, stages, ZeRO stage, pipeline schedule and rank order; a
// plan adds the layers of each stage and the recomputation of each stage. Layers are given as
// kinds, each described once, and a list of positions.
//
// A PlanSpace is immutable once built and may be used from any thread. Functions that allocate may
// throw std::bad_alloc and nothing else. The same problem has the same answer, bit for bit, for any
// thread count: ties go to the layout listed first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "phaze/pipeline_schedule.hpp"
#include "phaze/placement.hpp"
#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

inline constexpr int kMaxVariants = 12;  // recompute variants

enum class RankOrder : std::int32_t { kReplicasInside = 0, kStagesInside = 1 };

// One kind of layer on one device under one strategy; bytes are of one micro-batch.
struct LayerKindRecord {
  double parameters;
  double expert_parameters;          // of those, the routed experts'
  double stash_bytes[kMaxVariants];  // equal for boundary layers; non-increasing for blocks
  double live_bytes[kMaxVariants];   // while one layer is recomputed and runs backward
  double once_bytes;                 // stored once, regardless of the micro-batches in flight
  double copy_bytes;                 // of weights in a smaller format, on top of the weights
  double cast_bytes;                 // moved once a step to make these copies
  double shape_bytes;                // stored once for all layers of the kind on a device
  std::int32_t boundary;             // 1: embedding or head, 0: block
  // 1: `live_bytes` includes gradients of the layer's own weights, and memory peaks while the layer
  // runs backward that has the largest sum of `live_bytes`, activations of layers up to this one
  // and gradients of later layers. The same for all kinds.
  std::int32_t layer_peaks;
  double frozen_parameters;  // of `parameters`, those without gradients and optimiser state
  double frozen_experts;     // of the frozen parameters, the routed experts'
  double packed_parameters;  // of the frozen ones, those stored in a smaller format,
  double packed_bytes;       // and their bytes
  double more_state_bytes;   // of optimiser state, on top of the bytes per trained parameter
  double step_gather_bytes;  // gathered once a step with ZeRO 3, for an optimiser of whole matrices
  double slice_s;            // host time per sharding device where ZeRO 1 or 2 gathers slices
  double stage_work;         // work that stages share evenly; 0 for all kinds: number of blocks
  double host_state;         // share of the optimiser state per parameter in the host's memory
};

struct StrategyRecord {
  std::int64_t tp;
  std::int64_t cp;
  std::int64_t ep;
  std::int64_t etp;  // devices that share each expert
  std::int64_t micro_batch;
  double message_bytes;       // between two stages, one direction, per device
  double gathered_bytes;      // buffers of sequence parallelism
  double copied_parameters;   // of a tied embedding that the last stage copies
  double sent_bytes;          // sent by a device in the collectives of all layers, both passes
  std::int32_t variants;      // recompute variants, least recomputed first
  std::int32_t group_kind;    // code of how groups communicate and what is offloaded
  double copied_frozen;       // of the copied parameters, those that are not trained
  double copied_state_bytes;  // of the copy's optimiser state, as `more_state_bytes` of a layer
};

struct LayoutRecord {
  std::int32_t strategy;
  std::int32_t schedule;  // PipelineSchedule
  std::int32_t pp;        // stages of the pipeline
  std::int32_t vpp;       // chunks of a stage
  std::int32_t zero;
  std::int32_t rank_order;  // RankOrder
  std::int64_t dp;
  std::int64_t micro_batches;  // of one replica in one step
  // Number of neighbouring replicas that shard state; every such group has all of it (hybrid
  // sharding). 0: all replicas.
  std::int64_t shard;
};

// Recomputation of a stage: the first `count` blocks of each of its chunks use variant `more`, the
// others `rest`. Encoded as one number; a number below kMaxVariants is one variant for all blocks.
struct StageRecompute {
  std::int32_t rest = 0;
  std::int32_t more = 0;
  std::int32_t count = 0;

  static constexpr StageRecompute of(std::int32_t code) noexcept {
    return {code % kMaxVariants, code / kMaxVariants % kMaxVariants,
            code / (kMaxVariants * kMaxVariants)};
  }
  constexpr std::int32_t code() const noexcept {
    return count == 0 ? rest : rest + kMaxVariants * (more + kMaxVariants * count);
  }
};

// Bytes per parameter, and energy costs.
struct TrainingRecord {
  double weight_bytes;
  double gradient_bytes;
  double state_bytes;
  double fragmentation;  // fraction of activation memory lost to the allocator
  double bucket_bytes;   // of the last bucket of gradients to be synchronised
  double contention;     // fraction of compute throughput lost while gradients or weights move
  double hbm_byte_j;
  double network_byte_j;
  double gather_bytes;          // bytes per weight in gathers among replicas
  double workspace_bytes;       // of libraries, always allocated
  std::int32_t late_gradients;  // 1: a gradient is allocated at its layer's first backward pass
  std::int32_t whole_layers;    // layers that are whole at a time although replicas shard them
};

struct PlanProblem {
  FabricRecord fabric;  // with the number of devices
  std::int64_t devices;
  TrainingRecord training;
  std::int32_t kinds;
  std::span<const std::int32_t> order;      // kind of each position
  std::span<const std::int32_t> edge_from;  // positions; every layer follows the one before it
  std::span<const std::int32_t> edge_to;
  std::span<const std::int32_t> tied_from;  // pairs of positions that must be in the same stage
  std::span<const std::int32_t> tied_to;
  std::span<const StrategyRecord> strategies;
  std::span<const LayerKindRecord> sizes;  // [strategy][kind]
  std::span<const LayoutRecord> layouts;   // by strategy, ascending
  bool some_blocks = false;                // whether a stage may recompute only some of its blocks
};

// Layouts and what their memory depends on.
struct FitProblem {
  TrainingRecord training;
  std::span<const std::int32_t> order;  // kind of each position
  std::span<const StrategyRecord> strategies;
  // [strategy][kind]; the kind after the last is the head with its copy of a tied embedding.
  std::span<const LayerKindRecord> sizes;
  std::span<const LayoutRecord> layouts;
};

// Marks in `fits` ([layout][limit]) the layouts with a partition that fits. Stages are packed from
// the last to the first, each with as many layers as fit in some recompute variant; with schedules
// that assign layers to chunks, a layout is marked unless the fewest blocks of a stage do not fit.
// Layers that must be in one stage are not considered.
Status layouts_fit(const FitProblem& problem, std::span<const double> usable_bytes,
                   std::span<std::uint8_t> fits);

// Seconds and joules of each kind of layer on one chip under one strategy, per micro-batch.
// Arrays by variant are [kMaxVariants][kinds].
struct KindTimes {
  const double* forward_s;
  const double* plain_s;     // backward pass, nothing recomputed
  const double* backward_s;  // by variant, recomputation included
  const double* weight_grad_s;
  const double* forward_j;
  const double* backward_j;  // by variant
  double hbm_bytes_per_s;
  double static_w;
  const double* step_s = nullptr;  // optimiser's products if state is not sharded; null: none
  double limit_w = std::numeric_limits<double>::infinity();  // power that a chip is limited to
};

// Why there is no plan, or why a plan is invalid.
enum class PlanStatus : std::int32_t {
  kOk = 0,
  kOverMemory = 1,     // over the memory limit; times are valid
  kNoPlan = 2,         // no partition fits, or none meets the time limit
  kBadDevices = 3,     // the product of the widths is not the number of devices
  kBadBatch = 4,       // replicas x micro-batch does not divide the batch
  kTooManyStages = 5,  // more stages (or chunks) than layers
  kBadSchedule = 6,    // stages, chunks or micro-batches violate a rule of the schedule
  kFewRounds = 7,      // the schedule needs more micro-batches
  kBadExperts = 8,     // expert groups do not divide the devices of a stage
  kBadStrategy = 9,    // the widths violate a rule of the model
  kBrokenTie = 10,     // a cut between layers that must be in the same stage
  kBadShard = 11,      // replicas that shard state are uneven groups, or shard nothing
};
inline constexpr const char* kPlanStatusSentences[] = {
    "ok",
    "the plan needs more memory than a device has",
    "no partition of the layers fits the memory of a device",
    "tensor x pipeline x data x context parallelism is not the number of devices",
    "data parallelism x micro-batch does not divide the global batch",
    "there are more stages x chunks than layers",
    "the schedule does not take so many stages, chunks and micro-batches",
    "the schedule needs at least twice as many micro-batches as stages",
    "expert x expert tensor parallelism does not divide tensor x context x data parallelism, or, "
    "where stages lie between replicas, tensor x context parallelism",
    "the widths do not divide the model",
    "a stage ends between layers that one stage must hold",
    "sharing replicas do not divide data parallelism, do not hold every expert equally often, or "
    "share nothing with ZeRO 0",
};
inline constexpr int kPlanStatusCount = static_cast<int>(std::size(kPlanStatusSentences));

constexpr const char* sentence(PlanStatus status) noexcept {
  const auto code = static_cast<std::size_t>(status);
  return code < std::size(kPlanStatusSentences) ? kPlanStatusSentences[code] : "unknown status";
}

// Widths of a plan as a user gives them, before layers are split or placed.
struct PlanWidths {
  std::int64_t tp;
  std::int64_t pp;
  std::int64_t dp;
  std::int64_t cp;
  std::int64_t ep;
  std::int64_t etp;  // 0: tp
  std::int64_t micro_batch;
  std::int64_t vpp;
  std::int64_t zero;
  std::int64_t shard;       // 0: all replicas
  std::int64_t schedule;    // PipelineSchedule
  std::int64_t rank_order;  // RankOrder
};

// The devices of a stage as experts use them (parallel folding of Megatron-Core, Liu et al. 2025):
// counted tensor index first, then context, then replica, every `etp` neighbours share an expert
// and every etp x ep neighbours have one copy of all experts.
struct ExpertMesh {
  std::int64_t inner;  // tensor x context: neighbouring ranks
  std::int64_t dp;
  std::int64_t ep;
  std::int64_t etp;
  bool stages_between;  // ranks of other stages lie between replicas

  constexpr std::int64_t devices() const noexcept { return etp * ep; }  // of one copy

  // Whether copies of the experts divide the devices of a stage; if stages lie between replicas,
  // those of each replica.
  constexpr bool divides() const noexcept {
    if (static_cast<double>(etp) * static_cast<double>(ep) >
            static_cast<double>(inner) * static_cast<double>(dp) ||
        inner * dp % devices() != 0) {
      return false;
    }
    return !stages_between || inner % devices() == 0;
  }
};

// The rule of expert parallelism or of sharding among replicas that is violated.
constexpr PlanStatus check_sharing(const ExpertMesh& mesh, std::int64_t shard,
                                   std::int64_t zero) noexcept {
  if (!mesh.divides()) return PlanStatus::kBadExperts;
  if (shard == 0 || shard == mesh.dp) return PlanStatus::kOk;
  const bool even = shard > 0 && mesh.dp % shard == 0 && mesh.inner * shard % mesh.devices() == 0;
  return even && zero > 0 ? PlanStatus::kOk : PlanStatus::kBadShard;
}

// The first rule that widths violate for any model: devices, batch, experts and sharding, chunks of
// the schedule, ZeRO stage. The widths are at least 1, `etp`, `zero` and `shard` at least 0.
inline PlanStatus check_widths(const PlanWidths& w, std::int64_t devices,
                               std::int64_t global_batch) noexcept {
  // Products of large integers would overflow; as floating-point numbers they only lose digits.
  const auto product = [](auto... factors) { return (1.0 * ... * static_cast<double>(factors)); };
  if (product(w.tp, w.pp, w.dp, w.cp) != static_cast<double>(devices)) {
    return PlanStatus::kBadDevices;
  }
  if (product(w.dp, w.micro_batch) > static_cast<double>(global_batch) ||
      global_batch % (w.dp * w.micro_batch) != 0) {
    return PlanStatus::kBadBatch;
  }
  const bool between =
      w.pp > 1 && w.rank_order == static_cast<std::int64_t>(RankOrder::kStagesInside);
  const ExpertMesh mesh{w.tp * w.cp, w.dp, w.ep, w.etp > 0 ? w.etp : w.tp, between};
  const PlanStatus sharing = check_sharing(mesh, w.shard, w.zero);
  if (sharing != PlanStatus::kOk) return sharing;
  if (!takes_chunks(static_cast<PipelineSchedule>(w.schedule), w.vpp)) {
    return PlanStatus::kBadSchedule;
  }
  return w.zero > 3 ? PlanStatus::kBadStrategy : PlanStatus::kOk;
}

// Seconds of a step by cause; they add up to the step. The exposed part of one kind of
// communication is the decrease of the step time when that kind becomes free: data, messages
// between stages, experts, context, tensors, in this order and each with the earlier ones already
// free, then the host. The remainder is divided into work, imbalance (slowest stage minus mean),
// fill and drain.
struct PlanParts {
  double compute_s;
  double tensor_comm_s;
  double context_comm_s;
  double expert_comm_s;
  double pipeline_comm_s;  // messages between stages
  double data_comm_s;      // gradients and weights
  double bubble_s;         // fill and drain
  double imbalance_s;      // slowest stage minus mean
  double recompute_s;
  double optimizer_s;
  double host_s;  // while the device waits for the host
};

// Levels of KindTimes with some costs set to zero, cumulatively: collectives of expert groups, of
// context groups, of tensor groups, and the host.
inline constexpr std::size_t kFreeLevels = 4;

// The instant of a device's memory peak.
enum class PeakInstant : std::int32_t {
  kLoss = 0,      // end of the last forward pass in flight, with the loss if there is one
  kBackward = 1,  // the last layer of a micro-batch runs backward
  kFirst = 2,     // the first layer of the first micro-batch runs backward
  kStep = 3,      // all gradients are allocated
};

// Bytes of one device by term, at the peak instant.
struct MemoryTerms {
  double weights;
  double gradients;
  double optimizer;
  double activations;
  double recompute;
  double logits;
  double communication;
  double fragmentation;
};

inline double total(const MemoryTerms& m) noexcept {
  return m.weights + m.gradients + m.optimizer + m.activations + m.recompute + m.logits +
         m.communication + m.fragmentation;
}

// Estimate of a plan: one row of a batch.
struct PlanEstimate {
  double time_s;
  double energy_j;
  PlanParts parts;
  MemoryTerms memory;    // of the fullest stage
  double memory_bytes;   // of the fullest stage
  double max_load_s;     // of the slowest stage, per micro-batch
  std::int32_t fullest;  // stage
  std::int32_t status;   // PlanStatus
  std::int32_t instant;  // PeakInstant of the fullest stage
  std::int32_t unused;
};

struct StageEstimate {
  double load_s;  // per micro-batch, messages included
  MemoryTerms memory;
  std::int32_t instant;  // PeakInstant
  std::int32_t unused;
};

// The partition of a plan: positions at which chunks begin (stages x vpp + 1 of them, chunk c as
// given by `chunk_of`), and the recomputation of each stage (`StageRecompute`, as one number).
struct Partition {
  std::vector<std::int32_t> cuts;
  std::vector<std::int32_t> variants;
};

struct PlacedPlan {
  double time_s;  // infinite if there is no plan
  double memory_bytes;
  std::int32_t layout;
  Partition partition;
  // Lower bound on the partitions that a work limit left unexamined; infinite if there are none.
  double open_s = std::numeric_limits<double>::infinity();
};

// Counts of layouts by outcome.
struct SettledLayouts {
  std::int64_t solved;  // layouts solved exactly; all others are settled by their bounds
  std::int64_t empty;   // layouts proven, by bounds or exactly, to have no partition that fits and
                        // respects the ties between layers
  double open_s;        // least bound of the layouts left open, whole or in part; infinite if none
};

// Called on the calling thread after each batch of layouts: whether to stop with the plans so far.
using AskedToStop = std::function<bool()>;

// Seconds of one micro-batch's passes by a plan, each at [stage * chunks + chunk], including the
// messages that a pass waits for, and seconds of the step without what follows the last pass.
struct PlanPasses {
  std::vector<double> forward_s;
  std::vector<double> backward_s;
  std::vector<double> weight_grad_s;
  double step_s;
};

// The first layer of each stage, and the number of layers, such that the largest work of a stage is
// least; each stage has a layer, and early stages have more if several divisions are equally good.
std::vector<std::int32_t> cuts_by_work(std::span<const double> work, int stages);

class PlanSpaceImpl;

class PlanSpace {
 public:
  PlanSpace();
  ~PlanSpace();
  PlanSpace(PlanSpace&&) noexcept;
  PlanSpace& operator=(PlanSpace&&) noexcept;

  // Prices every group and message of every layout. `memory_limits` are the usable bytes of a
  // device for which queries will be made; fits[layout * memory_limits + memory_limit] is whether a
  // layout may fit (an unmarked layout is never examined). Sizes and memory_limits are at most
  // 1e100.
  Status build(const PlanProblem& problem, std::span<const double> memory_limits,
               std::span<const std::uint8_t> fits);

  std::size_t layouts() const noexcept;
  std::size_t strategies() const noexcept;
  std::size_t memory_limits() const noexcept;
  int kinds() const noexcept;
  int layers() const noexcept;
  const LayoutRecord& layout(std::size_t row) const noexcept;
  double usable_bytes(std::size_t memory_limit) const noexcept;

  // ---- one plan ----

  // The even partition: blocks spread as evenly as possible, embedding and head with the first and
  // last stage; or `cuts_by_work` if kinds have a `stage_work` and a stage has one chunk. Every
  // stage uses `variant`; if it is negative, each stage uses its fastest variant that fits.
  PlanStatus even_partition(std::size_t layout, const KindTimes& times, std::int32_t variant,
                            double usable_bytes, Partition* partition) const;

  // Recomputation of each stage for given cuts: the fastest variant that fits, or the one that
  // needs the least memory.
  void choose_recompute(std::size_t layout, const KindTimes& times, double usable_bytes,
                        Partition* partition) const;

  // Checks that cuts and variants are a valid partition for this layout.
  PlanStatus check_partition(std::size_t layout, const Partition& partition) const;

  // Estimates `plans`: number k is the even partition of layouts[k] with variants[k]; -1: each
  // stage with its fastest that fits. Calls `put` with the numbers of plans and their estimates,
  // once for each run of plans of one shape (strategy, schedule, stages, chunks, micro-batches),
  // which share most of the work. `times` returns the times of a strategy; `free` has such a
  // function for each level, or is empty: no parts. A layout without an even partition gets a
  // status and NaN as time.
  using TimesOf = std::function<KindTimes(std::size_t)>;
  using Put = std::function<void(std::span<const std::size_t>, std::span<const PlanEstimate>)>;
  void estimate_even(std::span<const std::size_t> plans, std::span<const std::int64_t> layouts,
                     std::span<const std::int32_t> variants, const TimesOf& times,
                     std::span<const TimesOf> free, double usable_bytes, const Put& put) const;

  // The step time, memory and energy of a plan. `stages`, if given, receives one entry per stage;
  // `free` has the times of the kFreeLevels levels, or is empty: no parts.
  PlanEstimate estimate(std::size_t layout, const Partition& partition, const KindTimes& times,
                        std::span<const KindTimes> free, double usable_bytes,
                        std::vector<StageEstimate>* stages) const;

  // The passes of the schedule of a plan.
  PlanPasses passes(std::size_t layout, const Partition& partition, const KindTimes& times) const;

  // ---- the best plan ----

  // The best plan of one layout that takes at most `below_s`.
  PlacedPlan best_of_layout(std::size_t layout, const KindTimes& times, double usable_bytes,
                            double below_s) const;

  // The best plan of all layouts of a strategy, within memory limit number `memory_limit`, that
  // takes at most `below_s`. `least` are lower bounds on the layer times; equal to `times` if those
  // are proven optimal.
  PlacedPlan best_of_strategy(std::int32_t strategy, const KindTimes& times, const KindTimes& least,
                              std::size_t memory_limit, double below_s) const;

  // best_of_strategy() for every memory limit, each with its own time limit (minus infinity: skip).
  void best_of_memory_limits(std::int32_t strategy, const KindTimes& times, const KindTimes& least,
                             std::span<const double> below_s, std::span<PlacedPlan> plans) const;

  // Whether a plan comes before another one: the faster, ties to the least memory, then to the
  // fewest devices, then to the smaller widths, then to the layout listed first.
  bool before(const PlacedPlan& a, const PlacedPlan& b) const;

  // The fastest `top` plans over several strategies on one chip, distinct apart from rank order;
  // fastest first. None takes more than `below_s`.
  std::vector<PlacedPlan> top_plans(std::span<const KindTimes> times, std::size_t memory_limit,
                                    std::size_t top, int threads, SettledLayouts* settled,
                                    const AskedToStop& stop = {},
                                    double below_s = std::numeric_limits<double>::infinity()) const;

  // The plans, among the fastest of all layouts, that are non-dominated in time and memory and take
  // at most `most_s`; fastest first.
  std::vector<PlacedPlan> front(std::span<const KindTimes> times, std::size_t memory_limit,
                                double most_s, int threads, SettledLayouts* settled) const;

  // ---- bounds ----

  // Lower bound on every plan of a layout; infinite if it does not fit. A cheaper, weaker bound if
  // that is above `enough_s` already.
  double layout_bound_s(std::size_t layout, const KindTimes& least, std::size_t memory_limit,
                        double enough_s = std::numeric_limits<double>::infinity()) const;
  // The least bound of the layouts of a strategy, without what layout_bound_s() adds for chunks.
  double strategy_bound_s(std::int32_t strategy, const KindTimes& least,
                          std::size_t memory_limit) const;
  // A cheaper, weaker bound for a strategy, from the work of one micro-batch on all stages alone.
  double work_bound_s(std::int32_t strategy, double work_s, std::size_t memory_limit) const;

 private:
  std::unique_ptr<PlanSpaceImpl> impl_;
};

}  // namespace phaze
