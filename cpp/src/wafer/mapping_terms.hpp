// A mapping problem prepared for evaluation: the legal operator mappings, and the seconds and bytes
// of each operator and of each conversion between operators. Private to the wafer kernel.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/numbers.hpp"
#include "phaze/mapping.hpp"
#include "phaze/mesh.hpp"

namespace phaze {

// Layout of a tensor along the slots. Each slot is in one of these sets: it splits a dimension, its
// dies have partial sums, or they have the whole tensor.
struct TensorState {
  std::uint16_t batch, rows, experts, features, partial, whole;

  std::uint16_t split() const noexcept {
    return static_cast<std::uint16_t>(batch | rows | experts | features);
  }
  bool same_splits(const TensorState& other) const noexcept {
    return batch == other.batch && rows == other.rows && experts == other.experts &&
           features == other.features;
  }
};

// One tensor from its producer to all its consumers.
struct FanShape {
  std::int32_t from;
  std::int32_t kind;  // an EdgeKind
  double bytes;
  std::vector<std::int32_t> to;
  std::vector<bool> again;  // by consumer: whether the backward pass reads the tensor too
};

// Seconds of the conversions of one fan, by the pass they delay.
struct MapFan {
  double forward_s, backward_s, again_s;
  double overlapped_f_s, overlapped_b_s;  // pieces that overlap work
};

// The current mapping. Invariant: between calls of Mapping's methods `nodes` and `fans` are the
// terms of `op_mappings`; between propose() and settle() the terms of the operators in
// `proposed.touched` are the previous ones. Owned by one Mapping, used by one thread at a time.
struct MapState {
  std::vector<OpMapping> op_mappings;  // empty until assign()
  std::vector<MapNode> nodes;          // by operator
  std::vector<MapFan> fans;            // by fan

  struct Proposed {  // values before the proposal
    std::vector<std::pair<std::int32_t, OpMapping>> op_mappings;
    std::vector<std::pair<std::int32_t, MapNode>> nodes;
    std::vector<std::pair<std::int32_t, MapFan>> fans;
    std::vector<std::int32_t> touched;  // operators whose terms are to be computed
    std::vector<std::uint8_t> seen;     // fans that are computed already
  };
  Proposed proposed;
};

// Owns copies of all data of a problem. Constant once built; any number of threads may
// read it.
class MapTerms {
 public:
  explicit MapTerms(const MapProblem& problem);  // requires check_problem() to have passed

  int op_count() const noexcept { return static_cast<int>(ops.size()); }
  int stage_count() const noexcept { return static_cast<int>(blocks.size()); }
  bool is_first(int k) const noexcept { return k == 0; }
  bool is_last(int k) const noexcept { return k + 1 == stage_count(); }
  double flight(int k) const noexcept { return rules.in_flight(stage_count(), k); }

  bool legal(int op, const OpMapping& op_mapping) const noexcept;
  MapNode node(int op, const OpMapping& op_mapping) const noexcept;
  MapFan fan(const FanShape& shape, const MapState& state) const noexcept;
  double conversion_s(const OpMapping& from, int from_op, const OpMapping& to, int to_op,
                      double bytes) const noexcept;
  // Cost for a recomputed operator to read a stored tensor, if the backward pass does not convert
  // that tensor again anyway.
  double reentry_s(const MapEdgeRecord& edge, const MapState& state) const noexcept;
  // Layout of the tensor between two stages.
  TensorState at_boundary(const MapState& state) const noexcept;
  double gather_s(std::uint16_t slots, double bytes, std::uint8_t algorithm) const noexcept;
  // Number of dies in the group of a set of slots.
  double size(std::uint16_t set) const noexcept { return sizes_[set]; }

  std::vector<MeshRun> slots;
  std::vector<MapOpRecord> ops;
  std::vector<MapEdgeRecord> edges;
  MapRulesRecord rules;
  std::vector<std::int32_t> blocks;
  std::vector<double> boundary_s;
  std::vector<double> flights;        // micro-batches in flight, by stage
  std::vector<double> cross_stage_s;  // see MapProblem
  // Seconds of the busiest link where every die of a stage streams one byte in or out (link_s), or
  // one byte each way (both_s); the maximum over the stages.
  double link_s, both_s;
  std::vector<std::int32_t> chain;
  std::int32_t last;   // operator whose output leaves the block
  std::int32_t entry;  // operator whose output is the input of the next block
  std::vector<FanShape> fans;
  std::vector<std::vector<std::int32_t>> fans_of;  // fans that begin or end at an operator
  std::vector<std::vector<std::int32_t>> forced;   // unstored operators that each one recomputes
  std::vector<std::vector<OpMapping>> choices;     // legal operator mappings, by operator
  std::vector<std::uint8_t> weighted;              // 1 if an operator has parameters

 private:
  struct Overlap {
    double waits_s, overlapped_s;
  };

  void find_stream_links();
  void add_sets_of_slots();
  void find_entry();
  void add_fans();
  void find_forced();
  void enumerate(int op);
  std::vector<std::array<std::uint16_t, kRoleCount>> patterns(int axis) const;
  bool in_rank_order(const OpMapping& op_mapping) const noexcept;

  TensorState state(int op, const OpMapping& op_mapping, std::uint16_t features,
                    std::uint16_t partial, std::uint16_t whole) const noexcept;
  TensorState produced(int op, const OpMapping& op_mapping) const noexcept;
  TensorState required(int op, const OpMapping& op_mapping) const noexcept;
  TensorState gradient_produced(int op, const OpMapping& op_mapping) const noexcept;
  TensorState gradient_required(int op, const OpMapping& op_mapping) const noexcept;

  double reduce_s(std::uint16_t slots, double bytes, std::uint8_t algorithm) const noexcept;
  double exchange_s(std::uint16_t slots, double bytes) const noexcept;
  double convert_s(int op, const TensorState& from, const TensorState& to, double bytes,
                   std::uint8_t algorithm, double* again_s) const noexcept;
  Overlap overlap(double whole_s, double piece_s, double work_s) const noexcept;
  double work_s(int op, const OpMapping& op_mapping, bool forward) const noexcept;
  bool input_overlaps(int from, int to) const noexcept;
  // Seconds of the busiest link to the rim if each die of a stage reads and writes this many bytes.
  double streamed_link_s(double in_bytes, double out_bytes) const noexcept {
    const double less = in_bytes < out_bytes ? in_bytes : out_bytes;
    return (in_bytes + out_bytes - 2.0 * less) * link_s + less * both_s;
  }
  std::size_t cell_of(int op, const OpMapping& op_mapping) const noexcept;
  void add_weights(int op, const OpMapping& op_mapping, double parameters,
                   MapNode* node) const noexcept;
  MapFan entry_fan(const FanShape& shape, const MapState& state) const noexcept;

  std::vector<std::int32_t> position_;  // of a factor in `divisors`
  std::vector<std::int32_t> column_;
  std::size_t divisors_;
  std::size_t columns_;
  std::vector<double> forward_s_, backward_s_, stash_bytes_, live_bytes_, parameters_;
  std::vector<double> weight_grad_s_;
  std::vector<double> sizes_;  // by set of slots, like the lines
  std::vector<MeshLines> gather_lines_;
  std::vector<MeshLine> exchange_lines_;
  MeshLine reduce_line_;
};

// Arguments of Mapping::score().
struct ScoreRequest {
  std::span<const std::uint8_t> outputs;  // by stage and operator; if empty, score() chooses them
  std::vector<MapStage>* stages;          // filled if not null
  double limit_s;
  double shortage;
  MapRange* range;
};
MapScore score_step(const MapTerms& terms, const MapState& state, const ScoreRequest& request);

}  // namespace phaze
