#include "placement/nest_replicas.hpp"

#include <algorithm>

namespace phaze {
namespace {

std::int64_t divided_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

}  // namespace

std::vector<NestReplicas> nest_replica_counts(const NestNetwork& network, std::int64_t stages,
                                              std::int64_t apart, std::int64_t micro_batches,
                                              NestEpoch among) {
  std::vector<std::int64_t> begins;  // of runs with as many rounds of the sync, over the same tier
  for (std::int64_t power = 1; power <= among.most; power *= 2) begins.push_back(power);
  std::int64_t inside = 1;
  for (const std::int64_t size : network.size) {
    inside *= size;
    begins.push_back(divided_up(inside, apart) + 1);
  }
  begins.push_back(among.fewest);
  std::erase_if(begins, [&](std::int64_t d) { return d < among.fewest || d > among.most; });
  std::sort(begins.begin(), begins.end());
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  std::vector<NestReplicas> counts;
  for (std::size_t k = 0; k < begins.size(); ++k) {
    const std::int64_t last = k + 1 < begins.size() ? begins[k + 1] - 1 : among.most;
    const std::int64_t each = divided_up(micro_batches, last);
    const std::int64_t replicas = std::max(begins[k], divided_up(micro_batches, each));
    const double latency_s = nest_sync(network, replicas, 0.0, apart);
    // Of the bytes alone: what is linear in them, without what does not depend on them.
    NestNetwork silent = network;
    constexpr double kNone[kMaxNestLevels] = {};
    silent.latency_s = std::span<const double>(kNone).first(network.size.size());
    counts.push_back({replicas, static_cast<double>(each + stages - 1), latency_s,
                      nest_sync(silent, replicas, 1.0, apart)});
  }
  return counts;
}

NestTiers::NestTiers(const NestNetwork& network, std::int64_t stage_devices, int stages)
    : network_(network),
      stage_devices_(stage_devices),
      pairs_(static_cast<std::size_t>(stages), 0) {}

bool NestTiers::add_replica() {
  bool changed = false;
  int out = 0;  // of the last stage, which has none
  for (std::size_t s = 0; s < pairs_.size(); ++s) {
    const std::int64_t begin = base_ + static_cast<std::int64_t>(s) * stage_devices_;
    const bool first = s + 1 == pairs_.size();
    const int in = first ? 0 : nest_tier(network_, begin, begin + stage_devices_);
    const NestTierPairs pair = nest_pair(in, out);
    changed = changed || (pairs_[s] & pair) == 0;
    pairs_[s] |= pair;
    out = in;
  }
  base_ += static_cast<std::int64_t>(pairs_.size()) * stage_devices_;
  return changed;
}

}  // namespace phaze
