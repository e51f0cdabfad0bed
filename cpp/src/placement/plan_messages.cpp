// What messages between the stages of a layout take on the fabric.
#include <algorithm>
#include <cstdlib>

#include "placement/plan_space.hpp"

namespace phaze {

// Where each tier of switches is at least as slow for so many bytes as those inside it, a message
// is as slow as the highest tier it crosses: of the pairs of ranks `low`, ..., `low` + `block` - 1
// and `distance` further, a sender whose message crosses the highest, and the units below that
// tier.
PlanSpaceImpl::Sender PlanSpaceImpl::highest_sender(std::int64_t low, std::int64_t block,
                                                    std::int64_t distance) const noexcept {
  Sender found{low, 1};
  std::int64_t unit = 1;
  for (int l = 0; l + 1 < fabric.record.levels; ++l) {
    unit *= fabric.record.size[l];
    const std::int64_t border = (low / unit + 1) * unit;
    const std::int64_t rank = std::min(border - 1, low + block - 1);
    if (rank + distance >= border) found = {rank, unit};
  }
  return found;
}

bool PlanSpaceImpl::slower_outward(double bytes) const noexcept {
  if (fabric.record.kind == static_cast<std::int32_t>(FabricKind::kGrid)) return false;
  std::int64_t unit = 1;
  double inside_s = 0.0;
  for (int l = 0; l < fabric.record.levels && unit < fabric.devices; ++l) {
    const double own_s = message(fabric, bytes, 0, unit).time_s;
    if (!(own_s >= inside_s)) return false;
    inside_s = own_s;
    unit *= std::max<std::int64_t>(fabric.record.size[l], 1);
  }
  return true;
}

// The slowest of the messages that all devices of stage `from` send to those of stage `to`: the
// devices of a stage are whole blocks of ranks, one for each run of replicas.
double PlanSpaceImpl::message_s(const LayoutRecord& layout, double bytes, int from, int to,
                                Status* status) const {
  const StrategyRecord& s = strategies[at(layout.strategy)];
  const std::int64_t inner = s.tp * s.cp;
  const bool replicas_inside =
      layout.rank_order == static_cast<std::int32_t>(RankOrder::kReplicasInside);
  const std::int64_t block = replicas_inside ? inner * layout.dp : inner;
  const std::int64_t runs = replicas_inside ? 1 : layout.dp;
  const std::int64_t apart = inner * layout.stages;  // from block to block of a stage
  const std::int64_t distance = std::abs(to - from) * block;
  const std::int64_t first = std::min(from, to) * block;
  double slowest = 0.0;
  // A message takes the same there and back.
  const auto send = [&](std::int64_t rank) {
    const CollectiveResult sent = message(fabric, bytes, rank, rank + distance);
    if (sent.status != Status::kOk) *status = sent.status;
    slowest = std::max(slowest, sent.time_s);
  };
  if (slower_outward(bytes)) {
    Sender highest = highest_sender(first, block, distance);
    for (std::int64_t k = 1; k < runs; ++k) {
      const Sender own = highest_sender(first + k * apart, block, distance);
      if (own.unit > highest.unit) highest = own;
    }
    send(highest.rank);
    return slowest;
  }
  for (std::int64_t k = 0; k < runs; ++k) {
    const std::int64_t low = first + k * apart;
    for (std::int64_t rank = low; rank < low + block; ++rank) send(rank);
  }
  return slowest;
}

}  // namespace phaze
