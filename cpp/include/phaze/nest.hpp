// Pipelines on a network of nested tiers, as formulated by NEST (2026): stages of equally many
// devices at consecutive ranks, messages priced by the lowest tier that connects two neighbours.
// Solved exactly; the formulas are in docs/nest.md.
//
// Times are in one unit throughout. Nothing here prints or exits; memory may run out
// (std::bad_alloc), nothing else is thrown. The same problem has the same answer, bit for bit: ties
// go to fewer stages, then to the shorter first stage, then to fewer replicas; if all replicas are
// priced, to the candidate with the lower bound.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phaze/status.hpp"

namespace phaze {

inline constexpr int kMaxNestLevels = 8;
inline constexpr int kMaxNestLayers = 2048;
inline constexpr std::int64_t kMaxNestDevices = std::int64_t{1} << 29;
inline constexpr std::int64_t kMaxNestReplicated =
    65'536;  // limit on devices if all replicas are priced

// Devices in a tree, innermost level first: a group of this level consists of `size` groups of the
// level below.
struct NestNetwork {
  std::span<const std::int64_t> size;  // their product is the number of devices
  std::span<const double> bytes_per_s;
  std::span<const double> latency_s;
};

// The layers of a model at one width, in order. Every layer has an edge to the next one; further
// edges skip layers. No edge occurs twice.
struct NestLayers {
  std::int64_t stage_devices;  // of every stage
  std::span<const double> forward_s;
  std::span<const double> backward_s;
  std::span<const double> weight_bytes;
  std::span<const double> kept_bytes;  // activations
  std::span<const std::int32_t> edge_from;
  std::span<const std::int32_t> edge_to;
  std::span<const double> edge_bytes;
};

struct NestRules {
  double memory_bytes;         // of one device
  double states;               // weights, gradients and moments, as multiples of the weights
  std::int64_t micro_batches;  // of one batch, over all replicas
  bool recompute;              // stages store their inputs only and rerun their layers
  bool all_replicas;           // price messages in every replica, not only in the first
};

struct NestPlan {
  double time_s;  // infinite if there is no plan
  double load_s;  // of the slowest stage
  std::int64_t replicas;
  std::vector<std::int32_t> begins;  // first layer of each stage, first to last
};

// The least memory with which some plan fits, and its stages; 0 stages if there are too few devices
// for one.
struct NestNeed {
  double bytes;
  std::int32_t stages;
};

Status check_nest(const NestNetwork& network, const NestLayers& layers,
                  const NestRules& rules) noexcept;

// The lowest level that connects two devices; the highest level if none does.
int nest_tier(const NestNetwork& network, std::int64_t x, std::int64_t y) noexcept;

// Time to reduce `bytes` of gradients over replicas whose first devices are `apart` devices apart.
double nest_sync(const NestNetwork& network, std::int64_t replicas, double bytes,
                 std::int64_t apart) noexcept;

// The best plan that takes less than `below_s`; time_s is infinite if there is none.
Status place_nest(const NestNetwork& network, const NestLayers& layers, const NestRules& rules,
                  double below_s, NestPlan* best);

Status least_nest_memory(const NestNetwork& network, const NestLayers& layers,
                         const NestRules& rules, NestNeed* need);

}  // namespace phaze
