// Parallel plans of a model on a cluster: what a step takes by a plan, the best plan of a layout,
// and times that no plan of a layout can beat. The formulas are in docs/planning.md and
// docs/search.md.
//
// A strategy says how a layer is split over devices (tensor, context, expert width, micro-batch); a
// layout adds replicas, stages, ZeRO stage, pipeline schedule and rank order; a plan adds which
// layers form a stage and what each stage recomputes. Layers are kinds, each described once, and a
// list of positions.
//
// A PlanSpace is immutable once built and may be used from any thread. Functions that allocate may
// throw std::bad_alloc and nothing else. The same problem has the same answer, bit for bit,
// whatever the thread count: ties go to the layout that stands first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

#include "phaze/pipeline_schedule.hpp"
#include "phaze/placement.hpp"
#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

// Layer assignments to the chunks of one layout are all tried up to this many; of more, two are,
// and with at most kMaxRunChunks chunks those whose longer chunks stand one after another.
inline constexpr int kMaxAssignments = 128;
inline constexpr int kMaxRunChunks = 48;

enum class RankOrder : std::int32_t { kReplicasInside = 0, kStagesInside = 1 };

// One kind of layer on one device under one strategy; bytes are of one micro-batch.
struct LayerKindRecord {
  double parameters;
  double expert_parameters;          // of those, the routed experts'
  double stash_bytes[kMaxVariants];  // of boundary layers the same in all; of blocks falling
  double live_bytes[kMaxVariants];   // while one layer is recomputed and runs backward
  double once_bytes;                 // kept once, however many micro-batches are in flight
  double copy_bytes;                 // of weights in a smaller format, on top of the weights
  double cast_bytes;                 // moved once a step to make them
  double shape_bytes;                // held once for all layers of the kind on a device
  std::int32_t boundary;             // 1: embedding or head, 0: block
  std::int32_t unused;
};

struct StrategyRecord {
  std::int64_t tp;
  std::int64_t cp;
  std::int64_t ep;
  std::int64_t micro_batch;
  double message_bytes;      // between two stages, one way, per device
  double gathered_bytes;     // buffers of sequence parallelism
  double copied_parameters;  // of the embedding that a last stage copies, where it ties to it
  double sent_bytes;         // that a device sends in the collectives of all layers, both passes
  std::int32_t variants;     // recompute variants, least recomputed first
  std::int32_t group_kind;   // how context and expert groups work; plans that differ in it differ
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
  // Neighbouring replicas that share state among themselves, while such groups hold copies of it
  // (hybrid sharding); 0: all replicas.
  std::int64_t shard;
};

// What a stage recomputes: the first `count` blocks of each of its chunks as variant `more` has it,
// the others as `rest`. Written as one number, which below kMaxVariants is a variant of all blocks.
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

// Bytes of one parameter, and what energy costs.
struct TrainingRecord {
  double weight_bytes;
  double gradient_bytes;
  double state_bytes;
  double fragmentation;  // share of moving bytes that an allocator loses
  double bucket_bytes;   // of the gradients that are synchronised last
  double contention;     // share of a second of work lost while gradients or weights move
  double hbm_byte_j;
  double network_byte_j;
  double gather_bytes;          // of a weight as gathers among replicas carry it
  double workspace_bytes;       // that libraries hold whatever runs
  std::int32_t late_gradients;  // 1: a gradient is there from its layer's first backward pass on
  std::int32_t unused;
};

struct PlanProblem {
  FabricRecord fabric;  // with the number of devices
  std::int64_t devices;
  TrainingRecord training;
  std::int32_t kinds;
  std::span<const std::int32_t> order;      // kind of each position
  std::span<const std::int32_t> edge_from;  // positions; every layer follows the one before it
  std::span<const std::int32_t> edge_to;
  std::span<const std::int32_t> tied_from;  // pairs of positions that one stage must hold
  std::span<const std::int32_t> tied_to;
  std::span<const StrategyRecord> strategies;
  std::span<const LayerKindRecord> sizes;  // [strategy][kind]
  std::span<const LayoutRecord> layouts;   // by strategy, rising
  bool some_blocks = false;  // whether a stage may recompute some of its blocks and not others
};

// Seconds and joules of each kind of layer on one chip under one strategy, per micro-batch.
// Arrays by variant are [kMaxVariants][kinds].
struct KindTimes {
  const double* forward_s;
  const double* plain_s;     // backward pass, nothing recomputed
  const double* backward_s;  // by variant, what is recomputed included
  const double* weight_grad_s;
  const double* forward_j;
  const double* backward_j;  // by variant
  double hbm_bytes_per_s;
  double static_w;
};

// Why a plan is not there, or cannot be.
enum class PlanStatus : std::int32_t {
  kOk = 0,
  kOverMemory = 1,     // timed all the same
  kNoPlan = 2,         // no partition fits, or none takes at most what was asked for
  kBadDevices = 3,     // the product of the widths is not the number of devices
  kBadBatch = 4,       // replicas x micro-batch does not divide the batch
  kTooManyStages = 5,  // more stages (or chunks) than layers
  kBadSchedule = 6,    // stages, chunks or micro-batches break a rule of the schedule
  kFewRounds = 7,      // the schedule needs more micro-batches
  kBadExperts = 8,     // expert-parallel width does not divide the replicas
  kBadStrategy = 9,    // the widths break a rule of the model
  kBrokenTie = 10,     // a cut between layers that belong together
  kBadShard = 11,      // replicas that share state are uneven groups, or share nothing
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
    "expert parallelism does not divide data parallelism",
    "the widths do not divide the model",
    "a stage ends between layers that one stage must hold",
    "sharing replicas do not divide data parallelism, are no multiple of expert "
    "parallelism, or share nothing with ZeRO 0",
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
  std::int64_t shard;     // 0: all replicas
  std::int64_t schedule;  // PipelineSchedule
};

// Replicas that the experts of a layer are spread over: an expert on fewer than tp devices leaves
// room for several of them in one tensor-parallel group.
constexpr std::int64_t expert_replicas(std::int64_t tp, std::int64_t ep,
                                       std::int64_t etp) noexcept {
  const std::int64_t parts = etp > 0 && tp > etp ? tp / etp : 1;
  return ep > parts ? ep / parts : 1;
}

// Which rule of expert parallelism or of sharing among replicas is broken; `ep` counts replicas.
constexpr PlanStatus check_sharing(std::int64_t dp, std::int64_t ep, std::int64_t shard,
                                   std::int64_t zero) noexcept {
  if (dp % ep != 0) return PlanStatus::kBadExperts;
  if (shard == 0 || shard == dp) return PlanStatus::kOk;
  return shard > 0 && zero > 0 && dp % shard == 0 && shard % ep == 0 ? PlanStatus::kOk
                                                                     : PlanStatus::kBadShard;
}

// The first rule that widths break, whatever the model: devices, batch, experts and sharing, chunks
// of the schedule, ZeRO stage. The widths are at least 1, `etp`, `zero` and `shard` at least 0.
inline PlanStatus check_widths(const PlanWidths& w, std::int64_t devices,
                               std::int64_t global_batch) noexcept {
  // Products of large numbers would wrap around; as floating-point numbers they only lose digits.
  const auto product = [](auto... factors) { return (1.0 * ... * static_cast<double>(factors)); };
  if (product(w.tp, w.pp, w.dp, w.cp) != static_cast<double>(devices)) {
    return PlanStatus::kBadDevices;
  }
  if (product(w.dp, w.micro_batch) > static_cast<double>(global_batch) ||
      global_batch % (w.dp * w.micro_batch) != 0) {
    return PlanStatus::kBadBatch;
  }
  const PlanStatus sharing =
      check_sharing(w.dp, expert_replicas(w.tp, w.ep, w.etp), w.shard, w.zero);
  if (sharing != PlanStatus::kOk) return sharing;
  if (!takes_chunks(static_cast<PipelineSchedule>(w.schedule), w.vpp)) {
    return PlanStatus::kBadSchedule;
  }
  return w.zero > 3 ? PlanStatus::kBadStrategy : PlanStatus::kOk;
}

// Seconds of a step by what they are spent on; they add up to the step. What is exposed of one kind
// of communication is what the step loses when that kind costs nothing: of data, messages between
// stages, experts, context, tensors, each with those named before it already free, then the host.
// What is left is divided into work, the slowest stage against the mean, fill and drain.
struct PlanParts {
  double compute_s;
  double tensor_comm_s;
  double context_comm_s;
  double expert_comm_s;
  double pipeline_comm_s;  // messages between stages
  double data_comm_s;      // gradients and weights
  double bubble_s;         // fill and drain
  double imbalance_s;      // the slowest stage against the mean
  double recompute_s;
  double optimizer_s;
  double host_s;  // where the host is slower than the device
};

// Times of the same layers as if some of what they wait for were free, each with those before it:
// collectives of expert groups, of context groups, of tensor groups, and the host.
inline constexpr std::size_t kFreeLevels = 4;

// When a device has its peak.
enum class PeakInstant : std::int32_t {
  kLoss = 0,      // the last forward pass in flight has ended, with the loss where there is one
  kBackward = 1,  // the last layer of a micro-batch runs backward
  kFirst = 2,     // the first layer of the first micro-batch runs backward
  kStep = 3,      // all gradients are there
};

// Bytes of one device by term, at that instant.
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

// What a plan takes: one row of a batch.
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

// The partition of a plan: positions where chunks begin (stages x vpp + 1 of them, chunk
// c where `chunk_of` has it), and what each stage recomputes (`StageRecompute`, as one number).
struct Partition {
  std::vector<std::int32_t> cuts;
  std::vector<std::int32_t> variants;
};

struct PlacedPlan {
  double time_s;  // infinite where there is none
  double memory_bytes;
  std::int32_t layout;
  Partition partition;
  bool proven = true;  // whether no other partition of the layout's space is faster
};

// What became of the layouts that were looked at.
struct SettledLayouts {
  std::int64_t solved;  // exactly; all others by their bounds
  std::int64_t empty;   // of those, layouts of which no partition fits that keeps together what
                        // belongs together
  double open_s;        // least bound of layouts that were left open; infinite where none was
};

// Called between waves of layouts by the thread that called: whether to end with the plans so far.
using AskedToStop = std::function<bool()>;

// Seconds of one micro-batch's passes by a plan, each at [stage * chunks + chunk], messages that a
// pass waits for included, and of the step that they make up, without what follows the last pass.
struct PlanPasses {
  std::vector<double> forward_s;
  std::vector<double> backward_s;
  std::vector<double> weight_grad_s;
  double step_s;
};

class PlanSpaceImpl;

class PlanSpace {
 public:
  PlanSpace();
  ~PlanSpace();
  PlanSpace(PlanSpace&&) noexcept;
  PlanSpace& operator=(PlanSpace&&) noexcept;

  // Prices every group and message of every layout. `memory_limits` are bytes of a device for the
  // model, the capacities that will be asked for; fits[layout * memory_limits + memory_limit] says
  // whether a layout may fit (a layout that is not marked is never looked at). Sizes and
  // memory_limits are at most 1e100.
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
  // last stage.
  // Of the variants, `variant`; or where it is negative, for each stage the fastest that fits.
  PlanStatus even_partition(std::size_t layout, const KindTimes& times, std::int32_t variant,
                            double usable_bytes, Partition* partition) const;

  // What each stage of given cuts recomputes: the fastest variant that fits, or the one that needs
  // least memory.
  void choose_recompute(std::size_t layout, const KindTimes& times, double usable_bytes,
                        Partition* partition) const;

  // Whether cuts and variants are a partition for this layout.
  PlanStatus check_partition(std::size_t layout, const Partition& partition) const;

  // The even partitions of many layouts, each in its variant; `times` by strategy, and by level
  // and strategy in `free` where parts are wanted. A layout that has none gets its status, and NaN.
  using TimesOf = std::function<KindTimes(std::size_t)>;
  void estimate_even(std::span<const std::int64_t> layouts, std::span<const std::int32_t> variants,
                     const TimesOf& times, std::span<const TimesOf> free, double usable_bytes,
                     std::span<PlanEstimate> estimates) const;

  // What a step takes by a plan. `stages`, where given, has one entry per stage; `free` are times
  // of kFreeLevels levels, without which there are no parts.
  PlanEstimate estimate(std::size_t layout, const Partition& partition, const KindTimes& times,
                        std::span<const KindTimes> free, double usable_bytes,
                        std::vector<StageEstimate>* stages) const;

  // The passes that the schedule of a plan consists of.
  PlanPasses passes(std::size_t layout, const Partition& partition, const KindTimes& times) const;

  // ---- the best plan ----

  // The best plan of one layout that takes at most `below_s`.
  PlacedPlan best_of_layout(std::size_t layout, const KindTimes& times, double usable_bytes,
                            double below_s) const;

  // The best plan of all layouts of a strategy, within memory limit number `memory_limit`, that
  // takes at most `below_s`. `least` are times that no schedule of the layers beats; equal to
  // `times` where they are proven.
  PlacedPlan best_of_strategy(std::int32_t strategy, const KindTimes& times, const KindTimes& least,
                              std::size_t memory_limit, double below_s) const;

  // The same with every memory limit, each with its own limit of time (minus infinity: not asked
  // for).
  void best_of_memory_limits(std::int32_t strategy, const KindTimes& times, const KindTimes& least,
                             std::span<const double> below_s, std::span<PlacedPlan> plans) const;

  // The fastest `top` plans over several strategies on one chip, distinct but for rank order;
  // fastest first.
  std::vector<PlacedPlan> top_plans(std::span<const KindTimes> times, std::size_t memory_limit,
                                    std::size_t top, int threads, SettledLayouts* settled,
                                    const AskedToStop& stop = {}) const;

  // Of the fastest plans of all layouts those of which none is both faster and smaller than
  // another and that take at most `most_s`; fastest first.
  std::vector<PlacedPlan> front(std::span<const KindTimes> times, std::size_t memory_limit,
                                double most_s, int threads, SettledLayouts* settled) const;

  // ---- bounds ----

  // The least that any plan of a layout takes; infinite where it does not fit.
  double layout_bound_s(std::size_t layout, const KindTimes& least, std::size_t memory_limit) const;
  // The least over the layouts of a strategy.
  double strategy_bound_s(std::int32_t strategy, const KindTimes& least,
                          std::size_t memory_limit) const;
  // The same from the work of one micro-batch on all stages alone; quicker and lower.
  double work_bound_s(std::int32_t strategy, double work_s, std::size_t memory_limit) const;

 private:
  std::unique_ptr<PlanSpaceImpl> impl_;
};

}  // namespace phaze
