// Counts of replicas worth a look, and the tiers that boundaries between stages lie on.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "phaze/nest.hpp"

namespace phaze {

// Of one stage: pairs of tiers (in, out), bit 8 * in + out for each pair that some replica has.
using NestTierPairs = std::uint64_t;

inline constexpr NestTierPairs nest_pair(int in, int out) noexcept {
  return NestTierPairs{1} << static_cast<unsigned>(8 * in + out);
}

// So many replicas, and what they make of time: load * rounds + latency + per_byte * weights.
struct NestReplicas {
  std::int64_t replicas;
  double rounds;
  double latency_s;
  double s_per_byte;
};

// Replica counts between which the tiers of all stages are the same.
struct NestEpoch {
  std::int64_t fewest;
  std::int64_t most;
};

// Gradients take the same time for runs of replica counts; the largest of a run has the fewest
// rounds, and of those with as few rounds the smallest is taken.
std::vector<NestReplicas> nest_replica_counts(const NestNetwork& network, std::int64_t stages,
                                              std::int64_t apart, std::int64_t micro_batches,
                                              NestEpoch among);

// Tier pairs of the stages of a pipeline, last stage first, over replicas 0 to `replicas` - 1.
class NestTiers {
 public:
  NestTiers(const NestNetwork& network, std::int64_t stage_devices, int stages);

  // The next replica; whether that changed any pair.
  bool add_replica();

  [[nodiscard]] const std::vector<NestTierPairs>& pairs() const noexcept { return pairs_; }

 private:
  const NestNetwork& network_;
  std::int64_t stage_devices_;
  std::int64_t base_ = 0;
  std::vector<NestTierPairs> pairs_;
};

}  // namespace phaze
