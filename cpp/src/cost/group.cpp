#include "cost/group.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/numbers.hpp"

namespace phaze {
namespace {

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

// Links of a device in a full mesh divided by those it can use to reach `members` - 1 others.
double unused_links(const FabricRecord& fabric, int l, std::int64_t members) noexcept {
  if (fabric.full_mesh[l] == 0) return 1.0;
  return static_cast<double>(fabric.size[l] - 1) / static_cast<double>(members - 1);
}

// A group while it is mapped to the levels of a fabric.
struct Layout {
  const FabricRecord& fabric;
  const LinkRates& rates;
  Group& group;
};

void add_level(const Layout& layout, int l, std::int64_t members, std::int64_t stride) noexcept {
  const FabricRecord& fabric = layout.fabric;
  const LinkRates& rates = layout.rates;
  Group& group = layout.group;
  group.outermost = l;
  const bool grid = fabric.kind == static_cast<std::int32_t>(FabricKind::kGrid);
  const double share = grid ? static_cast<double>(stride) : unused_links(fabric, l, members);
  ActiveLevel& level = group.level[group.active++];
  level.members = members;
  level.chain = l == 0 && fabric.protocols[0] > 0;
  level.seconds_per_byte = share / rates.bytes_per_s[l];
  level.hop_latency_s = (grid ? share : 1.0) * rates.latency_s[l];
  // A wrapped dimension of two devices has one cable, not two: it is a line.
  level.ring =
      grid && fabric.wrap[l] != 0 && fabric.size[l] > 2 && members * stride == fabric.size[l];
  // A ring folded onto a line visits every second device in one direction and the others on the
  // return: each directed link carries one edge of the ring, and a step is two hops long.
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

// Visits the levels innermost first and takes as many members of a run as each level holds. Returns
// false if units would contain different numbers of members, or if the run has members on a level
// before `first_free`, which is set to the level after the last one it takes.
bool take_members(const Layout& layout, std::int64_t ranks, std::int64_t stride,
                  int& first_free) noexcept {
  const FabricRecord& fabric = layout.fabric;
  for (int l = 0; l < fabric.levels && ranks > 1; ++l) {
    const std::int64_t size = fabric.size[l] == 0 ? kUnbounded : fabric.size[l];
    if (stride >= size) {
      if (stride % size != 0) return false;
      stride /= size;
      continue;
    }
    if (l < first_free) return false;
    first_free = l + 1;
    if ((ranks - 1) * stride < size) {  // the other members are all on this level
      add_level(layout, l, ranks, stride);
      return true;
    }
    const std::int64_t members = stride == 1 ? size : size / stride;
    const std::int64_t units = ranks / members;
    if (members * stride != size || units * members != ranks) return false;
    add_level(layout, l, members, stride);
    ranks = units;
    stride = 1;
  }
  return ranks == 1;
}

// Distance in ranks from the first member to the last.
std::int64_t extent(const GroupShape& shape) noexcept {
  return (shape.ranks - 1) * shape.stride + (shape.outer_ranks - 1) * shape.outer_stride;
}

// Members in each occupied unit of `unit` ranks, for a group of two runs; 0 if units have different
// numbers of members, or would have with a longer outer run.
std::int64_t members_per_unit(const GroupShape& shape, std::int64_t unit) noexcept {
  const std::int64_t inner = (shape.ranks - 1) * shape.stride;
  if (extent(shape) < unit) return shape.ranks * shape.outer_ranks;
  if (shape.stride >= unit && shape.outer_stride - inner >= unit) return 1;
  if (inner < unit) {  // each unit contains whole inner runs
    const std::int64_t runs = (unit - 1 - inner) / shape.outer_stride + 1;
    if (shape.outer_ranks % runs != 0) return 0;
    // A set of `runs` inner runs may begin at any multiple of this within a unit.
    const std::int64_t grain = std::gcd(runs * shape.outer_stride, unit);
    return (runs - 1) * shape.outer_stride + inner < grain ? runs * shape.ranks : 0;
  }
  // Otherwise each inner run must fill whole units.
  const bool fills = unit % shape.stride == 0 && shape.ranks % (unit / shape.stride) == 0;
  return fills && shape.outer_stride % unit == 0 ? unit / shape.stride : 0;
}

// Two runs on switched tiers; false if the units of some tier contain different numbers of members.
bool count_members(const Layout& layout, const GroupShape& shape) noexcept {
  const FabricRecord& fabric = layout.fabric;
  const std::int64_t reach = extent(shape);
  std::int64_t unit = 1;
  std::int64_t below = 1;  // members in each unit of the tier below
  for (int l = 0; l < fabric.levels && unit <= reach; ++l) {
    const std::int64_t size = fabric.size[l] == 0 ? kUnbounded : fabric.size[l];
    unit = unit > kUnbounded / size ? kUnbounded : unit * size;
    const std::int64_t members = members_per_unit(shape, unit);
    if (members == 0) return false;
    if (members > below) add_level(layout, l, members / below, 1);
    below = members;
  }
  return true;
}

bool lay_out_regular(const Layout& layout, const GroupShape& shape) noexcept {
  int first_free = 0;
  if (shape.outer_ranks == 1) {
    return take_members(layout, shape.ranks, shape.stride, first_free);
  }
  if (layout.fabric.kind != static_cast<std::int32_t>(FabricKind::kGrid)) {
    return count_members(layout, shape);
  }
  // A brick: two runs in one dimension would leave gaps there, otherwise they would be one run.
  return take_members(layout, shape.ranks, shape.stride, first_free) &&
         take_members(layout, shape.outer_ranks, shape.outer_stride, first_free);
}

// An irregular group is charged as one ring in rank order, over every level between the one that
// its smallest gap spans and the one that its extent spans. On a grid, the ring returns along the
// same row at row ends, so a link carries up to two edges of each ring, and the interleaved groups
// that share the link are at most as many as the larger stride. In a full mesh each edge is one
// link.
void charge_irregular(const Layout& layout, const GroupShape& shape) noexcept {
  const FabricRecord& fabric = layout.fabric;
  const LinkRates& rates = layout.rates;
  Group& group = layout.group;
  const bool grid = fabric.kind == static_cast<std::int32_t>(FabricKind::kGrid);
  group.regular = false;
  group.active = 0;
  group.contiguous = false;
  group.slowest_seconds_per_byte = 0.0;
  group.fastest_seconds_per_byte = kInfinite;
  const bool one_run = shape.outer_ranks == 1;
  const std::int64_t between = shape.outer_stride - (shape.ranks - 1) * shape.stride;
  const std::int64_t gap = one_run ? shape.stride : std::min(shape.stride, between);
  const auto sharing = static_cast<double>(one_run ? shape.stride : shape.outer_stride);
  const std::int64_t reach = extent(shape);
  std::int64_t below = 1;  // ranks inside one unit of the level below
  double diameter_s = 0.0;
  for (int l = 0; l < fabric.levels && below <= reach; ++l) {
    const std::int64_t size = fabric.size[l] == 0 ? kUnbounded : fabric.size[l];
    const std::int64_t here = below > kUnbounded / size ? kUnbounded : below * size;
    const double share = grid ? 2.0 * sharing : unused_links(fabric, l, 2);
    if (grid || here > gap) {
      group.outermost = l;
      group.slowest_seconds_per_byte =
          std::max(group.slowest_seconds_per_byte, share / rates.bytes_per_s[l]);
      group.fastest_seconds_per_byte =
          std::min(group.fastest_seconds_per_byte, 1.0 / rates.bytes_per_s[l]);
      group.step_latency_s = std::max(group.step_latency_s, rates.latency_s[l]);
    }
    if (grid) diameter_s += static_cast<double>(size - 1) * rates.latency_s[l];
    below = here;
  }
  if (grid) group.step_latency_s = diameter_s;
}

// Latency of a library's ring: it enters and leaves each unit once, so only these hops pass the
// outer level.
double nested_ring_latency_s(const Group& group) noexcept {
  double latency = 0.0;
  double units = 1.0;
  for (int l = group.active - 1; l >= 0; --l) {
    const auto members = static_cast<double>(group.level[l].members);
    latency += units * (members - 1.0) * group.level[l].step_latency_s;
    units *= members;
  }
  return latency;
}

}  // namespace

// check_fabric ensures that the product fits.
std::int64_t capacity(const FabricRecord& fabric) noexcept {
  const std::int64_t limit = fabric.devices == 0 ? kUnbounded : fabric.devices;
  std::int64_t total = 1;
  for (int l = 0; l < fabric.levels; ++l) {
    if (fabric.size[l] == 0) return limit;
    total *= fabric.size[l];
  }
  return std::min(total, limit);
}

Status normalise(GroupShape& shape) noexcept {
  if (shape.ranks < 1 || shape.outer_ranks < 1) return Status::kBadRanks;
  if (shape.stride < 1) return Status::kBadStride;
  if (shape.outer_ranks == 1) {
    shape.outer_stride = 0;
    return Status::kOk;
  }
  if (shape.outer_stride < 1) return Status::kBadStride;
  if (shape.ranks == 1) {
    shape = {shape.outer_ranks, shape.outer_stride};
    return Status::kOk;
  }
  if (shape.outer_stride < shape.stride) {
    shape = {shape.outer_ranks, shape.outer_stride, shape.ranks, shape.stride};
  }
  std::int64_t inner = 0;
  std::int64_t outer = 0;
  std::int64_t total = 0;
  if (__builtin_mul_overflow(shape.ranks, shape.stride, &inner) ||
      __builtin_mul_overflow(shape.outer_ranks, shape.outer_stride, &outer) ||
      __builtin_mul_overflow(shape.ranks, shape.outer_ranks, &total) ||
      __builtin_add_overflow(inner, outer, &total)) {
    return Status::kGroupTooLarge;
  }
  if (shape.outer_stride == inner) {
    shape = {shape.ranks * shape.outer_ranks, shape.stride};
    return Status::kOk;
  }
  return shape.outer_stride > inner - shape.stride ? Status::kOk : Status::kBadStride;
}

LinkRates link_rates(const FabricRecord& fabric) noexcept {
  LinkRates rates{};
  for (int l = 0; l < fabric.levels; ++l) {
    rates.bytes_per_s[l] = fabric.bytes_per_s[l];
    rates.latency_s[l] = fabric.latency_s[l];
  }
  return rates;
}

LinkRates link_rates(const FabricRecord& fabric, const ProtocolRecord& protocol,
                     bool merged) noexcept {
  LinkRates rates{};
  for (int l = 0; l < fabric.levels; ++l) {
    rates.bytes_per_s[l] = fabric.bytes_per_s[l] * protocol.share[l];
    if (merged) {
      rates.bytes_per_s[l] = 1.0 / (1.0 / rates.bytes_per_s[l] + protocol.copy_s_per_byte[l]);
    }
    rates.latency_s[l] = protocol.step_s[l];
  }
  return rates;
}

Group lay_out(const FabricRecord& fabric, const GroupShape& shape) noexcept {
  return lay_out(fabric, shape, link_rates(fabric));
}

Group lay_out(const FabricRecord& fabric, const GroupShape& shape,
              const LinkRates& rates) noexcept {
  Group group;
  std::int64_t inner = 0;  // normalise() ensures that two runs do not overflow
  if (__builtin_mul_overflow(shape.ranks - 1, shape.stride, &inner) ||
      extent(shape) >= capacity(fabric)) {
    group.status = Status::kGroupTooLarge;
    return group;
  }
  const Layout layout{fabric, rates, group};
  const auto steps = static_cast<double>(shape.ranks * shape.outer_ranks - 1);
  if (!lay_out_regular(layout, shape)) {
    charge_irregular(layout, shape);
    group.ring_latency_s = steps * group.step_latency_s;
    return group;
  }
  group.slowest_seconds_per_byte = 0.0;
  group.fastest_seconds_per_byte = kInfinite;
  for (int l = 0; l < group.active; ++l) {
    const ActiveLevel& level = group.level[l];
    group.slowest_seconds_per_byte =
        std::max(group.slowest_seconds_per_byte, level.seconds_per_byte);
    group.fastest_seconds_per_byte =
        std::min(group.fastest_seconds_per_byte, level.seconds_per_byte);
    group.step_latency_s = std::max(group.step_latency_s, level.step_latency_s);
  }
  group.ring_latency_s = steps * group.step_latency_s;
  if (fabric.protocols[0] > 0) group.ring_latency_s = nested_ring_latency_s(group);
  return group;
}

}  // namespace phaze
