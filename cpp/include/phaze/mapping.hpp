// Step time of training on a mesh of dies when every operator has its own axis assignment.
//
// A stage of the pipeline is a rectangle of dies. Its sides are products of small factors, the
// slots: slot k of an axis groups `size` neighbours that are `stride` dies apart. Each operator
// gives each slot one role: it splits the batch (B), the rows (M), the columns of the output (N),
// the inner dimension (K), or replicates (R). An index of a tensor has one digit per slot, so the
// part of a tensor on a die is determined slot by slot: along a slot a tensor is split by B, M or
// its features, is whole, or, after an operator with a split inner dimension, is a partial sum. Two
// operators that disagree along some slots convert the tensor between them:
//
//   partial -> split     reduce-scatter       split -> whole    all-gather
//   partial -> whole     all-reduce           split -> other    all-to-all
//   whole   -> split     nothing              same              nothing
//
// The gradient is converted in the reverse direction: an operator split by N leaves partial sums of
// it, and one split by K needs it whole. B and M require weight gradients to be summed. M of an
// expert operator splits the experts, a separate dimension: tokens reach them, and return, by an
// all-to-all, and a die has only the weights of its experts. docs/wafer.md has the whole model.
//
// A Mapping stores the terms of each operator and of each fan (the edges that carry one tensor from
// its producer), so changing one operator recomputes its own terms and those of its fans; sums are
// always taken over all terms in one order, so an incremental change and a full evaluation give the
// same bits. A Mapping is used by one thread at a time.
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
inline constexpr int kRunsPerAxis = 3;  // limit of the encoding: runs of equal roles per axis

enum class Role : std::uint8_t { kBatch = 0, kRows = 1, kColumns = 2, kInner = 3, kCopy = 4 };
inline constexpr int kRoleCount = 5;
inline constexpr std::array<const char*, kRoleCount> kRoleNames{"batch", "rows", "columns", "inner",
                                                                "copies"};

enum class WeightMode : std::uint8_t {
  kReplicated = 0,
  kZero1 = 1,    // optimiser state split over the dies that replicate the weights
  kZero2 = 2,    // gradients too
  kZero3 = 3,    // weights too: gathered for each pass
  kStream = 4,   // as kZero3, with all of the state stored off the wafer
  kOffload = 5,  // weights stay on the wafer; gradients and optimiser state are off it, split
};
inline constexpr int kWeightModeCount = 6;
inline constexpr std::array<const char*, kWeightModeCount> kWeightModeNames{
    "replicated", "zero1", "zero2", "zero3", "stream", "offload"};

enum class Output : std::uint8_t { kStash = 0, kRecompute = 1, kOffload = 2 };
inline constexpr int kOutputCount = 3;
inline constexpr std::array<const char*, kOutputCount> kOutputNames{"stash", "recompute",
                                                                    "offload"};

// The slots of each role (bit k = slot k; every slot has one role) and the weight mode.
struct OpMapping {
  std::array<std::uint16_t, kRoleCount> slots;
  std::uint8_t mode;
  std::uint8_t algorithm;  // a MeshAlgorithm, for all collectives of the operator
};

struct MapOpRecord {
  std::int32_t part;           // 0 before the blocks, 1 in every block, 2 after the blocks
  std::int32_t roles;          // bit r is set if role r is accepted
  std::int32_t outputs;        // bit o is set if Output o is accepted
  std::int32_t product;        // 1 if it contracts its input's features with weights
  std::int32_t output_stored;  // 1 if the stored activation is its output, not a mask or statistics
  std::int32_t expert;         // 1 if M splits experts, each with its own weights, instead of rows
  std::int32_t overlap;   // 1: input can arrive in pieces that overlap its work; 2: output likewise
  std::int64_t limit[4];  // largest factor of B, M, N, K
  double stat_bytes;      // row statistics, reduced in both passes if columns are split
  double gather_bytes;    // keys and values of all rows, gathered if rows are split
};

enum class EdgeKind : std::int32_t { kInside = 0, kEntry = 1, kWrap = 2, kExit = 3 };
inline constexpr std::array<const char*, 4> kEdgeKindNames{"inside", "entry", "wrap", "exit"};

struct MapEdgeRecord {
  std::int32_t from;
  std::int32_t to;
  std::int32_t kind;   // an EdgeKind
  std::int32_t again;  // 1 if the backward pass needs the converted tensor once more
  double bytes;        // of the whole tensor, one micro-batch
};

struct MapRulesRecord {
  double x_bytes_per_s;
  double y_bytes_per_s;
  double hop_s;
  double capacity_bytes;         // usable by the model on one die
  double stream_capacity_bytes;  // off the wafer, per die; 0 = none
  double stream_bytes_per_s;     // per die, per direction
  double memory_bytes_per_s;     // memory rate of the optimiser step
  double weight_bytes;           // per parameter
  double gradient_bytes;
  double state_bytes;
  double step_bytes;      // moved per parameter in the optimiser step
  double boundary_bytes;  // of the tensor between two stages, one micro-batch
  std::int64_t micro_batches;
  std::int32_t modes;   // bit w is set if WeightMode w is accepted
  std::int32_t volume;  // 1: collectives cost the bytes a die sends (work is priced by the tables)
  std::int32_t
      linear;  // 1: roles in rank order: columns and inner, then rows and copies, then batch
  std::int32_t stream_shared;  // 1: both directions off the wafer share one rate
  std::int32_t chunks;         // chunks of blocks per stage; more than 1: interleaved
  std::int32_t zero_bubble;    // 1: ZB-H1, weight gradients fill the pipeline's bubble; one chunk
  std::int32_t fabric;         // a MeshFabric
  std::int32_t pieces;         // pieces of a conversion that overlaps work; 1 = no overlap
  double outer_tail_s;         // seconds after the last micro-batch, independent of the mapping
  double stream_link_s;  // of the busiest link to the rim, per byte that each die reads or writes
  double stream_both_s;  // of that link, per byte that each die reads and also writes

  // Bytes of the busier direction off the wafer for the given traffic; their sum if the directions
  // share one rate.
  double streamed(double in_bytes, double out_bytes) const noexcept {
    if (stream_shared != 0) return in_bytes + out_bytes;
    return in_bytes > out_bytes ? in_bytes : out_bytes;
  }

  // Seconds of the busiest link to the rim if each die in use reads and writes this many bytes at
  // once.
  double streamed_link_s(double in_bytes, double out_bytes) const noexcept {
    const double less = in_bytes < out_bytes ? in_bytes : out_bytes;
    return (in_bytes + out_bytes - 2.0 * less) * stream_link_s + less * stream_both_s;
  }

  // Micro-batches in flight at the memory peak of a stage.
  double in_flight(int stages, int stage) const noexcept;
};

struct MapTables {  // one row per operator, one column per combination of factors
  std::span<const double> forward_s;
  std::span<const double> backward_s;
  std::span<const double> stash_bytes;
  std::span<const double> live_bytes;
  std::span<const double> parameters;
  std::span<const double> weight_grad_s;  // part of backward_s that can be deferred
};

struct MapProblem {
  std::span<const MeshRun> slots;  // along x from the inside out, then along y
  std::span<const MapOpRecord> ops;
  std::span<const MapEdgeRecord> edges;
  MapRulesRecord rules;
  std::span<const std::int32_t> divisors;  // of the rectangle's dies, rising, 1 first
  std::span<const std::int32_t> column;    // by positions of B, M, N, K in `divisors`; -1 = none
  std::int32_t columns;
  MapTables tables;
  std::span<const std::int32_t> blocks;  // number of blocks of each stage
  std::span<const double> boundary_s;    // per byte that a stage sends, both directions
  std::span<const std::int32_t> chain;   // operators of a block from its first to its last
  // Cost of off-wafer streams, [k][j][2] over all stages of the pipeline. For k != j: seconds of
  // the busiest link inside stage k per byte that each die of stage j reads or writes ([0]), or
  // reads and writes ([1]). For k == j: seconds of the busiest link of the whole wafer. If empty,
  // all stages stream at once, at the rules' seconds per byte.
  std::span<const double> cross_stage_s;
};

// Memory and time of one stage.
struct MapStage {
  double load_s;
  double memory_bytes;
  double state_bytes;
  double activation_bytes, over_bytes;
  double isolated_s;  // without waiting for the streams of other stages
  std::array<std::uint8_t, kMaxMapOps> outputs;
};

// Result of evaluating a mapping.
struct MapScore {
  double time_s;        // of one step
  double memory_bytes;  // of the fullest die
  double over_bytes;    // beyond the capacity, with everything recomputed that can be
  double stream_bytes;  // off the wafer, per die
  double stream_over_bytes;
  double slowest_stage_s;  // of one micro-batch
  double compute_s;        // of one block, both passes, without recomputation
  double blocking_s;       // collectives that block the work
  double hidden_s;         // collectives that overlap the work
  double tail_s;           // after the last micro-batch
};

// Lower and upper bounds in seconds on a step, and the operators that its fullest stage recomputes:
// a hint for the evaluation of a similar mapping.
struct MapRange {
  double least_s, most_s;
  std::optional<std::uint64_t> again = {};
};

// Returns an error for a factor, slot or operator out of range, tables of the wrong size, or
// numbers above 1e100.
Status check_problem(const MapProblem& problem) noexcept;

// Terms of one operator under one operator mapping, for one micro-batch.
struct MapNode {
  double forward_s, backward_s;       // work
  double weight_grad_s;               // part of backward_s
  double blocking_f_s, blocking_b_s;  // collectives that block the work
  double hidden_f_s, hidden_b_s;      // collectives that overlap the work
  double stream_s;        // traffic to and from off-wafer memory, overlapping all of these
  double sync_s, step_s;  // once per step: gradients, optimiser
  double state_bytes, stream_bytes, stash_bytes, live_bytes, gathered_bytes;
};

// A problem and a mapping of it. Owns copies of all data that the problem points to. Used by one
// thread at a time; data that does not depend on the mapping (all const methods except assigned,
// op_mapping and score) may be read by other threads concurrently. Methods that allocate may throw
// std::bad_alloc and then leave the object unchanged.
class Mapping {
 public:
  explicit Mapping(const MapProblem& problem);  // requires check_problem() to have passed
  ~Mapping();
  Mapping(Mapping&&) noexcept;
  Mapping& operator=(Mapping&&) noexcept;

  int ops() const noexcept;
  int slots() const noexcept;
  int stages() const noexcept;
  // Whether a stage has the first or last layers of the model, and the micro-batches whose
  // activations it stores.
  bool is_first(int stage) const noexcept;
  bool is_last(int stage) const noexcept;
  double flight(int stage) const noexcept;
  const MapRulesRecord& rules() const noexcept;
  const MapOpRecord& op(int i) const noexcept;
  const OpMapping& op_mapping(int i) const noexcept;

  bool assigned() const noexcept;
  bool legal(int op, const OpMapping& op_mapping) const noexcept;

  // Whether an operator has weights, so that its weight mode matters.
  bool weighted(int op) const noexcept;

  // Every legal assignment of slots to the roles of one operator, in a fixed order.
  const std::vector<OpMapping>& choices(int op) const noexcept;

  // Sets all operators and computes every term; each operator mapping must be legal.
  void assign(std::span<const OpMapping> op_mappings);

  // Sets one operator and recomputes only the terms that depend on it.
  void change(int op, const OpMapping& op_mapping);

  // Changes several operators: call propose() for each, then settle() recomputes the affected terms
  // once and returns whether any could have changed, so that the score may differ; withdraw()
  // reverts all proposals since the last keep() without computing anything.
  void propose(int op, const OpMapping& op_mapping);
  bool settle();
  void withdraw() noexcept;
  void keep() noexcept;

  // Outputs are chosen exactly, stage by stage, unless given (stages x ops). If a step takes more
  // than `limit_s`, its time may be returned as infinite and the other fields left unset, which is
  // faster. A shortage equal to all of a die's memory adds `shortage` times the step. For a step
  // that fits and whose time is certain to lie within `range`, the exact time may be left out:
  // `range` then receives lower and upper bounds, outputs are chosen for the slowest stages only,
  // and the time is NaN.
  MapScore score(std::span<const std::uint8_t> outputs = {},
                 std::vector<MapStage>* stages = nullptr,
                 double limit_s = std::numeric_limits<double>::infinity(), double shortage = 0.0,
                 MapRange* range = nullptr) const;

  // ---- for bounds: independent of the current mapping ----

  MapNode node(int op, const OpMapping& op_mapping) const noexcept;
  // Seconds that work waits for a tensor from one operator to the next and for its gradient back.
  double conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                      double bytes) const noexcept;
  std::span<const std::int32_t> chain() const noexcept;
  std::span<const MapEdgeRecord> edges() const noexcept;
  std::span<const std::int32_t> blocks() const noexcept;
  std::span<const double> boundary() const noexcept;
  double stream_link_s() const noexcept;  // of an isolated stage, per byte of each die

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phaze
