// Placement of layers on devices: which layers form a stage, how many stages, how many replicas.
// Two objectives on one table of layers; both are solved exactly. The formulas are in
// docs/papers.md.
//
// Nothing here prints or exits; memory may run out (std::bad_alloc), nothing else is thrown. The
// same problem has the same answer, bit for bit: ties go to fewer stages, then to the earlier cut.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phaze/status.hpp"

namespace phaze {

inline constexpr int kMaxVariants = 12;
inline constexpr int kMaxPlacedLayers = 4096;
inline constexpr std::int64_t kMostDevices = std::int64_t{1} << 29;
inline constexpr std::int64_t kMostMicroBatches = std::int64_t{1} << 53;
inline constexpr std::int32_t kMaxCuts = 20'000;  // limit on the number of cuts of a graph

// The layers of a model under one strategy, in a topological order. Arrays of variants have one row
// of `layers` values per variant.
struct PlacementLayers {
  std::int32_t layers;
  std::int32_t variants;
  std::span<const double> forward_s;
  std::span<const double> backward_s;
  std::span<const double> stash_bytes;  // stored for every micro-batch in flight
  std::span<const double> live_bytes;   // of one layer at a time: a stage needs the largest
  std::span<const double> resident_bytes;
  std::span<const double> once_bytes;     // stored once, regardless of the micro-batches in flight
  std::span<const double> gather_bytes;   // of one layer at a time, on top of `live_bytes`
  std::span<const double> sync_s;         // of the gradients
  std::span<const double> step_s;         // of the optimiser
  std::span<const double> weight_grad_s;  // deferrable part of the backward pass
  std::span<const std::uint8_t> wide;     // whether a stage with this layer takes `width` devices
  std::span<const std::int32_t> edge_from;
  std::span<const std::int32_t> edge_to;
  std::span<const double> edge_s;  // to send over a boundary between stages, one direction
  std::span<const double> edge_bytes;
  std::span<const std::int32_t> tied_from;  // pairs of layers that must be in the same stage
  std::span<const std::int32_t> tied_to;
};

struct PlacementPlan {
  double time_s;      // infinite if there is no plan
  double tail_s;      // part of it after the last backward pass; 0 in the published objective
  double max_load_s;  // of the slowest stage, per micro-batch
  std::int32_t stages;
  std::int64_t replicas;
  std::int64_t devices;                  // of one replica
  std::vector<std::int32_t> stage_of;    // per layer, 0 = first stage
  std::vector<std::int32_t> variant_of;  // per stage
};

// PHAZE's objective: time = load * (ceil(micro_batches / d) + stages - 1) + sync_first * (d - 1) /
// d.
struct PublishedRules {
  double memory_bytes;  // of one device
  std::int64_t devices;
  std::int64_t micro_batches;
  std::int32_t width;     // devices of a stage with a wide layer
  bool recompute;         // store only a stage's inputs and rerun its forward pass
  std::int32_t stages;    // 0: any
  std::int64_t replicas;  // 0: any
};

enum class PipelineKind : std::int32_t { kOneForwardOneBackward = 0, kZeroBubble = 1 };

// Pipeline objective: the time of the schedule, accumulated from the last stage to the first, plus
// the longest tail (exposed gradient sync and optimiser step).
struct PipelineRules {
  double memory_bytes;
  double piped_bytes;  // bytes of messages, if there is more than one stage
  double bucket_s;     // of the last bucket of gradients, whose exchange is always exposed
  std::int64_t micro_batches;
  std::int32_t first_stages;  // stage counts to examine, first to last
  std::int32_t last_stages;
  PipelineKind kind;
  bool best_only;  // return only the best plan over all stage counts
};

Status check_placement(const PlacementLayers& layers) noexcept;

// The best plan that takes less than `below_s`; time_s is infinite if there is none.
Status place_published(const PlacementLayers& layers, const PublishedRules& rules, double below_s,
                       PlacementPlan* best);

// The best plan for each stage count, first to last; `stages` is 0 if there is none, or if only the
// best is requested and a better plan has another count.
Status place_pipeline(const PlacementLayers& layers, const PipelineRules& rules,
                      std::vector<PlacementPlan>* plans);

}  // namespace phaze
