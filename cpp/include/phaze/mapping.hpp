// How long a training step takes on a mesh of dies when every operator is split in its own way.
//
// A stage of the pipeline is a rectangle of dies. Its sides are products of small factors, the
// slots: slot k of an axis joins `size` neighbours that lie `stride` dies apart. Each operator
// gives each slot one role: it splits the batch (B), the rows (M), the columns of the output (N),
// the inner dimension (K), or holds copies (R). An index of a tensor has one digit per slot, so
// that what a die holds follows slot by slot: along a slot a tensor is split by B, M or its
// features, held whole, or, behind a split inner dimension, a partial sum. Two operators that
// disagree along some slots convert the tensor between them:
//
//   partial -> split     reduce-scatter       split -> whole    all-gather
//   partial -> whole     all-reduce           split -> other    all-to-all
//   whole   -> split     nothing              same              nothing
//
// and the gradient goes back the other way, where N leaves partial sums and K wants it whole. B and
// M need weight gradients summed. M of an expert operator splits the experts, a dimension of its
// own: tokens reach them, and come back, by an all-to-all, and a die has the weights of its experts
// only. docs/wafer.md has the whole model.
//
// A Mapping keeps the terms of each operator and of each fan of edges, so that changing one
// operator computes its own terms and those of the fans it ends; sums are always taken over all
// terms in one order, so that changing and starting afresh give the same bits. A Mapping is used by
// one thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "phaze/mesh.hpp"
#include "phaze/status.hpp"

namespace phaze {

inline constexpr int kMaxSlots = 10;
inline constexpr int kMaxMapOps = 48;
inline constexpr int kMaxMapStages = 512;
inline constexpr int kRunsPerAxis = 3;  // a rule of the encoding: at most so many roles per axis

enum class Role : std::uint8_t { kBatch = 0, kRows = 1, kColumns = 2, kInner = 3, kCopy = 4 };
inline constexpr int kRoleCount = 5;
inline constexpr std::array<const char*, kRoleCount> kRoleNames{"batch", "rows", "columns", "inner",
                                                                "copies"};

enum class WeightMode : std::uint8_t {
  kReplicated = 0,
  kZero1 = 1,    // optimiser state split over the dies that hold copies
  kZero2 = 2,    // gradients too
  kZero3 = 3,    // weights too: gathered for each pass
  kStream = 4,   // as kZero3, and all of it lives off the wafer
  kOffload = 5,  // weights stay; gradients and optimiser state live off the wafer, split
};
inline constexpr int kWeightModeCount = 6;
inline constexpr std::array<const char*, kWeightModeCount> kWeightModeNames{
    "replicated", "zero1", "zero2", "zero3", "stream", "offload"};

enum class Output : std::uint8_t { kStash = 0, kRecompute = 1, kOffload = 2 };
inline constexpr int kOutputCount = 3;
inline constexpr std::array<const char*, kOutputCount> kOutputNames{"stash", "recompute",
                                                                    "offload"};

// Which slots each role has (bit k = slot k; every slot has one role), and how weights are kept.
struct OpMapping {
  std::array<std::uint16_t, kRoleCount> slots;
  std::uint8_t mode;
  std::uint8_t algorithm;  // a MeshAlgorithm, of all its collectives
};

struct MapOpRecord {
  std::int32_t part;      // 0 before the blocks, 1 in every block, 2 behind them
  std::int32_t roles;     // bit r set where role r is accepted
  std::int32_t outputs;   // bit o set where Output o is accepted
  std::int32_t product;   // 1 where it contracts its input's features with weights
  std::int32_t kept;      // 1 where what it keeps is its output, not a mask or statistics of it
  std::int32_t expert;    // 1 where M splits experts, each with weights of its own, and not rows
  std::int32_t beside;    // 1: its input may come in pieces that overlap its work; 2: its output
  std::int64_t limit[4];  // largest factor of B, M, N, K
  double stat_bytes;      // summed over split columns, forward and backward; of all rows
  double gather_bytes;    // gathered over split rows (keys and values); whole
};

enum class EdgeKind : std::int32_t { kInside = 0, kEntry = 1, kWrap = 2, kExit = 3 };
inline constexpr std::array<const char*, 4> kEdgeKindNames{"inside", "entry", "wrap", "exit"};

struct MapEdgeRecord {
  std::int32_t from;
  std::int32_t to;
  std::int32_t kind;   // an EdgeKind
  std::int32_t again;  // 1 where the backward pass needs the converted tensor once more
  double bytes;        // of the whole tensor, one micro-batch
};

struct MapRulesRecord {
  double x_bytes_per_s;
  double y_bytes_per_s;
  double hop_s;
  double capacity_bytes;         // of one die, for the model
  double stream_capacity_bytes;  // off the wafer, a die's share; 0 = none
  double stream_bytes_per_s;     // a die's share, per direction
  double memory_bytes_per_s;     // that the optimiser step moves its state at
  double weight_bytes;           // per parameter
  double gradient_bytes;
  double state_bytes;
  double step_bytes;      // moved per parameter in the optimiser step
  double boundary_bytes;  // of the tensor between two stages, one micro-batch
  std::int64_t micro_batches;
  std::int32_t modes;   // bit w set where WeightMode w is accepted
  std::int32_t volume;  // 1: collectives cost the bytes a die sends (work is priced by the tables)
  std::int32_t
      linear;  // 1: roles in rank order: columns and inner, then rows and copies, then batch
  std::int32_t stream_shared;  // 1: both directions off the wafer share one rate
  std::int32_t chunks;         // runs of blocks that a stage has: 1, or interleaved ones
  std::int32_t zero_bubble;    // 1: ZB-H1, weight gradients fill the pipeline's bubble; one chunk
  std::int32_t fabric;         // a MeshFabric
  std::int32_t pieces;         // that a conversion which overlaps work is cut into; 1 = none is
  double outer_tail_s;         // after the last micro-batch, whatever the mapping
  double stream_link_s;  // of the busiest link to the rim, a byte that each die takes or gives
  double stream_both_s;  // the same where each die takes one and gives one
  // Where other classes of stages, each with a shape of its own, are part of the pipeline:
  std::int32_t first_stage;      // stages of it that come before these
  std::int32_t pipeline_stages;  // of all classes; 0 where there are no others
  double other_sum_s;            // of the others' stages, for one micro-batch
  double other_slowest_s;        // of the slowest of them
  double other_tail_s;           // after the last micro-batch

  // Bytes of the busier direction off the wafer where so many come and go; all where they share it.
  double streamed(double in_bytes, double out_bytes) const noexcept {
    if (stream_shared != 0) return in_bytes + out_bytes;
    return in_bytes > out_bytes ? in_bytes : out_bytes;
  }

  // Seconds of the busiest link to the rim where each die in use takes and gives so much at once.
  double streamed_link_s(double in_bytes, double out_bytes) const noexcept {
    const double less = in_bytes < out_bytes ? in_bytes : out_bytes;
    return (in_bytes + out_bytes - 2.0 * less) * stream_link_s + less * stream_both_s;
  }

  // Micro-batches in flight at the peak of a stage.
  double in_flight(int stages, int stage) const noexcept;
};

struct MapTables {  // one row per operator, one column per combination of factors
  std::span<const double> forward_s;
  std::span<const double> backward_s;
  std::span<const double> stash_bytes;
  std::span<const double> live_bytes;
  std::span<const double> parameters;
  std::span<const double> weight_grad_s;  // part of backward_s that nobody waits for
};

struct MapProblem {
  std::span<const MeshRun> slots;  // along x from the inside out, then along y
  std::span<const MapOpRecord> ops;
  std::span<const MapEdgeRecord> edges;
  MapRulesRecord rules;
  std::span<const std::int32_t> divisors;  // of the rectangle's dies, rising, 1 first
  std::span<const std::int32_t> column;    // of (B, M, N, K) as positions in `divisors`; -1 = none
  std::int32_t columns;
  MapTables tables;
  std::span<const std::int32_t> blocks;  // of each stage
  std::span<const double> boundary_s;    // per byte that a stage sends, both ways
  std::span<const std::int32_t> chain;   // operators of a block from its first to its last
  // Streams (pipeline x pipeline stages x 2): of stage k and another one j, seconds of the busiest
  // link between dies of k for a byte that each die of j takes or gives, and for one of each; of k
  // and k, of the busiest link anywhere. Empty: all stream at once, by the rules' seconds.
  std::span<const double> cross_stage_s;
};

// What a stage takes for one micro-batch by itself, and between each of its dies and the rim.
struct MapOther {
  double isolated_s, taken_bytes, given_bytes;
};

// What one stage keeps and how long it takes.
struct MapStage {
  double load_s;
  double memory_bytes;
  double state_bytes;
  double activation_bytes, over_bytes;
  MapOther streams;  // without what it waits for those of others
  std::array<std::uint8_t, kMaxMapOps> outputs;
};

// What a mapping's step takes.
struct MapScore {
  double time_s;        // of one step
  double memory_bytes;  // of the fullest die
  double over_bytes;    // beyond its capacity, when all that may be recomputed is
  double stream_bytes;  // off the wafer, a die's share
  double stream_over_bytes;
  double slowest_stage_s;  // of one micro-batch
  double compute_s;        // of one block, both passes, without recomputation
  double blocking_s;       // collectives it waits for
  double hidden_s;         // collectives that overlap it
  double tail_s;           // after the last micro-batch
};

// Seconds that a step takes at least and at most, and operators that its fullest stage computes
// again, for a mapping that is alike.
struct MapRange {
  double least_s, most_s;
  std::optional<std::uint64_t> again = {};
};

// A factor, slot or operator out of range, tables of the wrong size, or numbers above 1e100.
Status check_problem(const MapProblem& problem) noexcept;

// Terms of one operator under one operator mapping, for one micro-batch.
struct MapNode {
  double forward_s, backward_s;       // work
  double weight_grad_s;               // part of backward_s
  double blocking_f_s, blocking_b_s;  // collectives that the work waits for
  double hidden_f_s, hidden_b_s;      // collectives that overlap the work
  double stream_s;                    // from and to off the wafer, overlapping both
  double sync_s, step_s;              // once in a step: gradients, optimiser
  double state_bytes, stream_bytes, stash_bytes, live_bytes, gathered_bytes;
};

// A problem and a mapping of it. Owns copies of all that the problem points to. Used by one thread
// at a time; what does not depend on the mapping (all const methods but assigned, op_mapping and
// score) may be read by others meanwhile. Methods that allocate may throw std::bad_alloc; they then
// leave what they had.
class Mapping {
 public:
  explicit Mapping(const MapProblem& problem);  // check_problem() comes first
  ~Mapping();
  Mapping(Mapping&&) noexcept;
  Mapping& operator=(Mapping&&) noexcept;

  int ops() const noexcept;
  int slots() const noexcept;
  int stages() const noexcept;
  // Of the whole pipeline, which these stages may be a part of: its length, whether a stage has an
  // end of the model, and the micro-batches whose activations it holds.
  int pipeline_stages() const noexcept;
  bool is_first(int stage) const noexcept;
  bool is_last(int stage) const noexcept;
  double flight(int stage) const noexcept;
  const MapRulesRecord& rules() const noexcept;
  const MapOpRecord& op(int i) const noexcept;
  const OpMapping& op_mapping(int i) const noexcept;

  bool assigned() const noexcept;
  bool legal(int op, const OpMapping& op_mapping) const noexcept;

  // Whether an operator has weights, so that its mode makes a difference.
  bool weighted(int op) const noexcept;

  // Every legal assignment of slots to the roles of one operator, in a fixed order.
  const std::vector<OpMapping>& choices(int op) const noexcept;

  // All operators at once, every term computed; each operator mapping must be legal.
  void assign(std::span<const OpMapping> op_mappings);

  // What the stages of other classes take, where these are a part of a pipeline; seconds >= 0.
  // `each`: one by one, where streams pass other stages' links; none: nobody waits for these.
  void set_others(double sum_s, double slowest_s, double tail_s, std::span<const MapOther> each);

  // One operator, and only the terms that it touches.
  void change(int op, const OpMapping& op_mapping);

  // Several operators: propose() each, then settle() computes the terms that they touch, once, and
  // says whether any could have changed, so that the score is another one; withdraw() takes back
  // all that was proposed since the last keep(), without computing anything.
  void propose(int op, const OpMapping& op_mapping);
  bool settle();
  void withdraw() noexcept;
  void keep() noexcept;

  // Outputs are chosen exactly, stage by stage, unless given (stages x ops). Where a step takes
  // more than `limit_s`, its time may be given as infinite, with nothing else said: that comes
  // sooner. Lacking all of a die's memory counts as `shortage` times the step more. A step that
  // fits and surely takes something in `range` may be told by that alone: then `range` gets what it
  // takes at least and at most, outputs chosen for the slowest stages only, and the time is NaN.
  MapScore score(std::span<const std::uint8_t> outputs = {},
                 std::vector<MapStage>* stages = nullptr,
                 double limit_s = std::numeric_limits<double>::infinity(), double shortage = 0.0,
                 MapRange* range = nullptr) const;

  // ---- for bounds: what does not depend on the mapping at hand ----

  MapNode node(int op, const OpMapping& op_mapping) const noexcept;
  // A tensor from one operator to the next and its gradient back, seconds that work waits for.
  double conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                      double bytes) const noexcept;
  std::span<const std::int32_t> chain() const noexcept;
  std::span<const MapEdgeRecord> edges() const noexcept;
  std::span<const std::int32_t> blocks() const noexcept;
  std::span<const double> boundary() const noexcept;
  double stream_link_s() const noexcept;  // of a stage by itself, per byte of each die

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phaze
