#include "cost/group.hpp"

#include <algorithm>
#include <limits>

namespace phaze {
namespace {

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

// Ranks that are there; check_fabric has made sure that the product fits.
std::int64_t capacity(const FabricRecord& fabric) noexcept {
  const std::int64_t limit = fabric.devices == 0 ? kUnbounded : fabric.devices;
  std::int64_t total = 1;
  for (int l = 0; l < fabric.levels; ++l) {
    if (fabric.size[l] == 0) return limit;
    total *= fabric.size[l];
  }
  return std::min(total, limit);
}

void add_level(Group& group, const FabricRecord& fabric, int l, std::int64_t members,
               std::int64_t stride) noexcept {
  const bool grid = fabric.kind == static_cast<std::int32_t>(FabricKind::kGrid);
  const double share = grid ? static_cast<double>(stride) : 1.0;
  ActiveLevel& level = group.level[group.active++];
  level.members = members;
  level.seconds_per_byte = share / fabric.bytes_per_s[l];
  level.hop_latency_s = share * fabric.latency_s[l];
  // A wrapped dimension of two devices has one cable, not two: it is a line.
  level.ring =
      grid && fabric.wrap[l] != 0 && fabric.size[l] > 2 && members * stride == fabric.size[l];
  // A ring folded onto a line visits every second device on the way out and the others on the
  // way back: each directed link carries one edge of the ring, and a step is two hops long.
  level.step_latency_s =
      grid && !level.ring && members > 2 ? 2.0 * level.hop_latency_s : level.hop_latency_s;
  // A closed ring carries half the vector in each direction.
  const auto k = static_cast<double>(members);
  level.inverse = 1.0 / k;
  level.pass_seconds_per_byte =
      (k - 1.0) * level.inverse * (level.ring ? 0.5 : 1.0) * level.seconds_per_byte;
  level.pass_latency_s = (k - 1.0) * level.step_latency_s;
  if (stride != 1) group.contiguous = false;
}

// Walks the levels innermost first, taking as many members as each holds. Returns false where a
// unit would hold a different number of members than its neighbour.
bool take_members(Group& group, const FabricRecord& fabric, std::int64_t ranks,
                  std::int64_t stride) noexcept {
  for (int l = 0; l < fabric.levels && ranks > 1; ++l) {
    const std::int64_t size = fabric.size[l] == 0 ? kUnbounded : fabric.size[l];
    if (stride >= size) {
      if (stride % size != 0) return false;
      stride /= size;
      continue;
    }
    if ((ranks - 1) * stride < size) {  // the rest fits here
      add_level(group, fabric, l, ranks, stride);
      return true;
    }
    const std::int64_t members = stride == 1 ? size : size / stride;
    const std::int64_t units = ranks / members;
    if (members * stride != size || units * members != ranks) return false;
    add_level(group, fabric, l, members, stride);
    ranks = units;
    stride = 1;
  }
  return ranks == 1;
}

// An irregular group is charged as one ring in rank order over every level from the one its
// stride reaches to the one its extent reaches. On a grid, row ends send the ring back along the
// row it came from, so links carry up to two of its edges, and all interleaved groups share them.
void charge_irregular(Group& group, const FabricRecord& fabric, std::int64_t ranks,
                      std::int64_t stride) noexcept {
  const bool grid = fabric.kind == static_cast<std::int32_t>(FabricKind::kGrid);
  group.regular = false;
  group.active = 0;
  group.contiguous = false;
  group.slowest_seconds_per_byte = 0.0;
  group.fastest_seconds_per_byte = std::numeric_limits<double>::infinity();
  const std::int64_t extent = (ranks - 1) * stride;
  std::int64_t below = 1;  // ranks inside one unit of the level below
  double diameter_s = 0.0;
  for (int l = 0; l < fabric.levels && below <= extent; ++l) {
    const std::int64_t size = fabric.size[l] == 0 ? kUnbounded : fabric.size[l];
    const std::int64_t here = below > kUnbounded / size ? kUnbounded : below * size;
    const double share = grid ? 2.0 * static_cast<double>(stride) : 1.0;
    if (grid || here > stride) {
      group.slowest_seconds_per_byte =
          std::max(group.slowest_seconds_per_byte, share / fabric.bytes_per_s[l]);
      group.fastest_seconds_per_byte =
          std::min(group.fastest_seconds_per_byte, 1.0 / fabric.bytes_per_s[l]);
      group.step_latency_s = std::max(group.step_latency_s, fabric.latency_s[l]);
    }
    if (grid) diameter_s += static_cast<double>(size - 1) * fabric.latency_s[l];
    below = here;
  }
  if (grid) group.step_latency_s = diameter_s;
}

}  // namespace

Group lay_out(const FabricRecord& fabric, std::int64_t ranks, std::int64_t stride) noexcept {
  Group group;
  std::int64_t extent = 0;
  if (__builtin_mul_overflow(ranks - 1, stride, &extent) || extent >= capacity(fabric)) {
    group.status = Status::kGroupTooLarge;
    return group;
  }
  if (!take_members(group, fabric, ranks, stride)) {
    charge_irregular(group, fabric, ranks, stride);
    return group;
  }
  group.slowest_seconds_per_byte = 0.0;
  group.fastest_seconds_per_byte = std::numeric_limits<double>::infinity();
  for (int l = 0; l < group.active; ++l) {
    const ActiveLevel& level = group.level[l];
    group.slowest_seconds_per_byte =
        std::max(group.slowest_seconds_per_byte, level.seconds_per_byte);
    group.fastest_seconds_per_byte =
        std::min(group.fastest_seconds_per_byte, level.seconds_per_byte);
    group.step_latency_s = std::max(group.step_latency_s, level.step_latency_s);
  }
  return group;
}

}  // namespace phaze
