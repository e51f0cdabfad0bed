// Many layers in one call: arrays in, arrays out.
//
// Nothing prints or exits; memory may run out (std::bad_alloc), nothing else is thrown. Layers are
// spread over threads; each answer is written by one thread, so results are the same bits for any
// thread count (without a time limit or an interruption).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phaze/layer_schedule.hpp"

namespace phaze {

// Whether an operator that takes all cores excludes every other operator, or only operators that
// need the same core types.
enum class ScheduleRule : std::int32_t { kExclusive = 0, kOverlap = 1 };

// Layers one after another. Operators of layer b are op_ptr[b] up to op_ptr[b + 1], and so on;
// edges hold positions within their layer.
struct LayerBatch {
  std::span<const std::int64_t> op_ptr;
  std::span<const std::uint8_t> types;  // per operator: bit r is set if it needs resource r
  std::span<const std::int64_t> mode_ptr;
  std::span<const std::int32_t> mode_cores;  // per mode; 0 = all cores
  std::span<const double> mode_s;
  std::span<const std::int64_t> edge_ptr;
  std::span<const std::int32_t> edge_from;
  std::span<const std::int32_t> edge_to;
  std::span<const std::int32_t> cores;  // kResources per layer
  ScheduleRule rule;
  std::span<const double> enough_s = {};  // per layer, as in SearchLimits; empty: infinite
};

// One row per layer, except `start_s` and `mode`, which have one per operator.
struct LayerAnswers {
  std::span<double> makespan_s;
  std::span<double> bound_s;
  std::span<std::int32_t> proved_by;
  std::span<std::int64_t> nodes;
  std::span<std::int32_t> status;  // a Status; unless it is kOk the other figures are NaN or -1
  std::span<double> start_s;
  std::span<std::int32_t> mode;
};

// One graph on many chips, each operator on one core of each of its types or on all. Latencies and
// `enough_s` have one row per chip.
struct GraphOnChips {
  std::span<const std::uint8_t> types;      // as in LayerBatch
  std::span<const std::int32_t> edge_from;  // positions of operators
  std::span<const std::int32_t> edge_to;
  std::span<const double> one_core_s;
  std::span<const double> all_cores_s;
  std::span<const std::int32_t> cores;  // kResources per chip
  ScheduleRule rule;
  std::span<const double> enough_s = {};  // as in LayerBatch
};

// The operator order and time unit of an answer: those of the given layer, or those of its
// canonical form.
enum class Terms { kGiven, kCanonical };

// Every layer is solved in its canonical form, so layers with the same form have the same solution.
// The caller must ensure that sizes agree and that pointers do not decrease.
void solve_layers(const LayerBatch& batch, const SearchLimits& limits, Terms terms,
                  const LayerAnswers& out, int threads);

// Solves the graph on one chip; `limits` has the time that is enough. The caller must ensure that
// sizes agree.
Status solve_on_chip(const GraphOnChips& given, std::size_t chip, const SearchLimits& limits,
                     LayerSolution* out);

// Solves the graph on every chip; chips with equal latencies and cores are solved once, with the
// largest of their `enough_s`.
void solve_on_chips(const GraphOnChips& given, const SearchLimits& limits, const LayerAnswers& out,
                    int threads);

// The canonical form of one layer as bytes: everything that its solution depends on.
Status canonical_bytes(const LayerBatch& batch, std::size_t layer, std::vector<std::uint8_t>* out);

// Converts solutions from canonical terms (`start_s` and `mode`) to those of the given layers:
// fills in the makespan and status, and replaces starts and modes.
void replay_layers(const LayerBatch& batch, const LayerAnswers& answers);

}  // namespace phaze
