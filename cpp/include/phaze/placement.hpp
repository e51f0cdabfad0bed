// Placement of layers on devices: which layers form a stage, how many stages, how many replicas.
// PHAZE's objective, solved exactly; the formulas are in docs/papers.md.
//
// Nothing here prints or exits; memory may run out (std::bad_alloc), nothing else is thrown. The
// same problem has the same answer, bit for bit: ties go to fewer stages, then to the earlier cut.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phaze/status.hpp"

namespace phaze {

inline constexpr int kMaxPlacedLayers = 4096;
inline constexpr std::int64_t kMostDevices = std::int64_t{1} << 29;
inline constexpr std::int64_t kMostMicroBatches = std::int64_t{1} << 53;
inline constexpr std::int32_t kMaxCuts = 20'000;  // limit on the number of cuts of a graph

// The layers of a model under one strategy, in a topological order.
struct PlacementLayers {
  std::int32_t layers;
  std::span<const double> forward_s;
  std::span<const double> backward_s;
  std::span<const double> stash_bytes;  // stored for every micro-batch in flight
  std::span<const double> resident_bytes;
  std::span<const double> once_bytes;  // stored once, regardless of the micro-batches in flight
  std::span<const double> sync_s;      // of the gradients
  std::span<const std::uint8_t> wide;  // whether a stage with this layer takes `width` devices
  std::span<const std::int32_t> edge_from;
  std::span<const std::int32_t> edge_to;
  std::span<const double> edge_s;  // to send over a boundary between stages, one direction
  std::span<const double> edge_bytes;
};

struct PlacementPlan {
  double time_s;      // infinite if there is no plan
  double max_load_s;  // of the slowest stage, per micro-batch
  std::int32_t stages;
  std::int64_t replicas;
  std::int64_t devices;                // of one replica
  std::vector<std::int32_t> stage_of;  // per layer, 0 = first stage
};

// PHAZE's objective with d replicas and the gradient exchange of the first stage, `sync_first`:
// time = load * (ceil(micro_batches / d) + stages - 1) + sync_first * (d - 1) / d.
struct PublishedRules {
  double memory_bytes;  // of one device
  std::int64_t devices;
  std::int64_t micro_batches;
  std::int32_t width;  // devices of a stage with a wide layer
  bool recompute;      // store only a stage's inputs and rerun its forward pass
};

Status check_placement(const PlacementLayers& layers) noexcept;

// The best plan that takes less than `below_s`; time_s is infinite if there is none.
Status place_published(const PlacementLayers& layers, const PublishedRules& rules, double below_s,
                       PlacementPlan* best);

}  // namespace phaze
