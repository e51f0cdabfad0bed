// What stages that stream at once take from one another.
#include <algorithm>

#include "phaze/mapping.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };

}  // namespace

// Weights and gradients of what stands before the blocks, of one block, and of what stands behind.
std::array<Mapping::Moved, 3> Mapping::moved_weights() const noexcept {
  std::array<Moved, 3> found{};
  const double all = rules_.weight_bytes + rules_.gradient_bytes + rules_.state_bytes;
  for (int i = 0; i < ops(); ++i) {
    const auto mode = static_cast<WeightMode>(op_mappings_[kAt(i)].mode);
    const double kept = nodes_[kAt(i)].stream_bytes;  // off the wafer, of a die's parameters
    Moved& part = found[kAt(ops_[kAt(i)].part)];
    if (mode == WeightMode::kStream) {
      part.taken_bytes += 2.0 * rules_.weight_bytes * (kept / all);
      part.given_bytes += rules_.gradient_bytes * (kept / all);
    } else if (mode == WeightMode::kOffload) {
      part.given_bytes += rules_.gradient_bytes * (kept / (all - rules_.weight_bytes));
    }
  }
  return found;
}

// What a stage's dies take and give for one micro-batch; activations that are moved off the wafer
// (`offloaded`, of each block) come and go.
MapOther Mapping::streams_of(const std::array<Moved, 3>& parts, int k, double isolated_s,
                             double offloaded) const noexcept {
  const double blocks = blocks_[kAt(k)];
  MapOther found{isolated_s, blocks * (parts[1].taken_bytes + offloaded),
                 blocks * (parts[1].given_bytes + offloaded)};
  for (const std::size_t end : {std::size_t{0}, std::size_t{2}}) {
    if (!(end == 0 ? is_first(k) : is_last(k))) continue;
    found.taken_bytes += parts[end].taken_bytes;
    found.given_bytes += parts[end].given_bytes;
  }
  return found;
}

// Collectives of a stage share its links with what other stages stream past them. Each stage
// streams once while the slowest one works: that one meets all of it, a faster one what passes in
// its time. The links to the rim carry no less than if every stage streamed as little as the one
// that streams least.
Mapping::Charged Mapping::charge_cross_stage(std::span<const MapOther> own,
                                             std::span<double> loads_s) const noexcept {
  const std::size_t count = kAt(pipeline_stages()), first = kAt(rules_.first_stage);
  Charged found{rules_.other_sum_s, rules_.other_slowest_s, 0.0};
  std::array<MapOther, kMaxMapStages> all;  // `count` of them
  if (others_.size() + own.size() != count && own.size() != count) return found;
  for (std::size_t k = 0; k < count; ++k) {
    const bool mine = k >= first && k < first + own.size();
    all[k] = mine ? own[k - first] : others_[k < first ? k : k - own.size()];
  }
  double least_in = all[0].taken_bytes, least_out = all[0].given_bytes, most = 0.0, pace_s = 0.0;
  for (std::size_t j = 0; j < count; ++j) {
    least_in = std::min(least_in, all[j].taken_bytes);
    least_out = std::min(least_out, all[j].given_bytes);
    most = std::max({most, all[j].taken_bytes, all[j].given_bytes});
    pace_s = std::max(pace_s, all[j].isolated_s);
  }
  if (!(most > 0.0) || !(pace_s > 0.0)) return found;
  found = {0.0, 0.0, rules_.streamed_link_s(least_in, least_out)};
  for (std::size_t k = 0; k < count; ++k) {
    double past_s = 0.0;
    for (std::size_t j = 0; j < count; ++j) {
      const double less = std::min(all[j].taken_bytes, all[j].given_bytes);
      const double rest = std::max(all[j].taken_bytes, all[j].given_bytes) - less;
      if (j == k || !(rest + less > 0.0)) continue;
      const double* cost = &cross_stage_s_[(k * count + j) * 2];
      past_s += rest * cost[0] + less * cost[1];
    }
    const double load_s = all[k].isolated_s + all[k].isolated_s / pace_s * past_s;
    if (k >= first && k < first + own.size()) {
      loads_s[k - first] = load_s;
    } else {
      found.sum_s += load_s;
      found.slowest_s = std::max(found.slowest_s, load_s);
    }
  }
  return found;
}

}  // namespace phaze
