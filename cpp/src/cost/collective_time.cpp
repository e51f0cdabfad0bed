#include "cost/collective_time.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>

namespace phaze {
namespace {

double ceil_log2(std::int64_t n) noexcept {
  return static_cast<double>(std::bit_width(static_cast<std::uint64_t>(n - 1)));
}

// One way round a ring of k members: a reduce-scatter or an all-gather of v bytes.
double ring_pass(double k, double v, double seconds_per_byte, double step_latency_s) noexcept {
  return (k - 1.0) / k * v * seconds_per_byte + (k - 1.0) * step_latency_s;
}

double level_pass(const ActiveLevel& level, double v) noexcept {
  return v * level.pass_seconds_per_byte + level.pass_latency_s;
}

// ---- one pass (reduce-scatter or all-gather), by algorithm -------------------------------------

double single_ring(const FabricRecord& fabric, const Group& group, double p, double v) noexcept {
  if (group.regular && is_grid(fabric)) {
    return group.active == 1 ? level_pass(group.level[0], v) : kNever;
  }
  return (p - 1.0) / p * v * group.slowest_seconds_per_byte + group.ring_latency_s;
}

double tier_by_tier(const Group& group, double v) noexcept {
  double time = 0.0;
  for (int l = 0; l < group.active; ++l) {
    time += level_pass(group.level[l], v);
    v *= group.level[l].inverse;
  }
  return time;
}

// As many rings as there are members inside an outer unit: each enters and leaves through another
// member, so the outer ports work side by side.
double rail_ring(const Group& group, double p, double v) noexcept {
  double share = 1.0;  // of the vector that one member's port at this level carries
  double limit = 0.0;
  for (int l = 0; l < group.active; ++l) {
    limit = std::max(limit, group.level[l].seconds_per_byte * share);
    share *= group.level[l].inverse;
  }
  return (p - 1.0) / p * v * limit + group.ring_latency_s;
}

// Both directions of one Hamiltonian cycle; one exists in every brick of even size that is at
// least two wide in two dimensions.
double snake_ring(const Group& group, std::int64_t ranks, double v) noexcept {
  if (!group.contiguous || group.active < 2 || ranks % 2 != 0) return kNever;
  double hop = 0.0;
  for (int l = 0; l < group.active; ++l) hop = std::max(hop, group.level[l].hop_latency_s);
  return ring_pass(static_cast<double>(ranks), v, 0.5 * group.slowest_seconds_per_byte, hop);
}

// Fastest dimension first, which an exchange argument shows to be the best order.
double dimension_ordered(const Group& group, double v) noexcept {
  std::array<const ActiveLevel*, kMaxLevels> order{};
  const auto cost = [](const ActiveLevel& level) {
    return level.ring ? 0.5 * level.seconds_per_byte : level.seconds_per_byte;
  };
  for (int l = 0; l < group.active; ++l) {  // insertion sort: at most four, and stable
    auto at = static_cast<std::size_t>(l);
    for (; at > 0 && cost(group.level[l]) < cost(*order[at - 1]); --at) order[at] = order[at - 1];
    order[at] = &group.level[l];
  }
  double time = 0.0;
  for (int l = 0; l < group.active; ++l) {
    const ActiveLevel& level = *order[static_cast<std::size_t>(l)];
    time += level_pass(level, v);
    v *= level.inverse;
  }
  return time;
}

// Part i of the vector starts in dimension i and moves on to the next one, so every dimension is
// busy in every phase; a phase lasts as long as its slowest part.
double multi_ring(const Group& group, double v) noexcept {
  const int dims = group.active;
  std::array<double, kMaxLevels> part{};
  part.fill(v / static_cast<double>(dims));
  double time = 0.0;
  for (int phase = 0; phase < dims; ++phase) {
    double longest = 0.0;
    for (int i = 0; i < dims; ++i) {
      const ActiveLevel& level = group.level[(i + phase) % dims];
      double& mine = part[static_cast<std::size_t>(i)];
      longest = std::max(longest, level_pass(level, mine));
      mine *= level.inverse;
    }
    time += longest;
  }
  return time;
}

// ---- trees -------------------------------------------------------------------------------------

// Steps from the root to the farthest leaf. On a grid the root stands in the middle for a
// reduction, and at a corner for a broadcast.
double tree_depth_s(const FabricRecord& fabric, const Group& group, std::int64_t ranks,
                    bool rooted_in_middle) noexcept {
  // One tree over all ranks, every step at the slowest tier's latency; tier by tier may be shorter.
  const double flat = ceil_log2(ranks) * group.step_latency_s;
  if (!group.regular) return flat;
  double depth = 0.0;
  for (int l = 0; l < group.active; ++l) {
    const ActiveLevel& level = group.level[l];
    if (level.chain) {
      depth += static_cast<double>(level.members - 1) * level.hop_latency_s;
    } else if (!is_grid(fabric)) {
      depth += ceil_log2(level.members) * level.hop_latency_s;
    } else {
      const bool half = rooted_in_middle || level.ring;
      const std::int64_t hops = half ? level.members / 2 : level.members - 1;
      depth += static_cast<double>(hops) * level.hop_latency_s;
    }
  }
  const bool chained = group.active > 0 && group.level[0].chain;
  return is_grid(fabric) || chained ? depth : std::min(depth, flat);
}

double tree_all_reduce(const FabricRecord& fabric, const Group& group, std::int64_t ranks,
                       double v) noexcept {
  if (!group.regular && is_grid(fabric)) return kNever;
  return 2.0 * v * group.slowest_seconds_per_byte +
         2.0 * tree_depth_s(fabric, group, ranks, /*rooted_in_middle=*/true);
}

// ---- operations --------------------------------------------------------------------------------

// An all-reduce is two passes; on tiers the outermost one may use a tree instead.
double hierarchical_all_reduce(const Group& group, double v) noexcept {
  double time = 0.0;
  for (int l = 0; l + 1 < group.active; ++l) {
    time += 2.0 * level_pass(group.level[l], v);
    v *= group.level[l].inverse;
  }
  const ActiveLevel& top = group.level[group.active - 1];
  const double tree =
      2.0 * v * top.seconds_per_byte + 2.0 * ceil_log2(top.members) * top.step_latency_s;
  return time + std::min(2.0 * level_pass(top, v), tree);
}

// All-reduce (two passes) and its halves (one).
double reduction(const FabricRecord& fabric, const Group& group, std::int64_t ranks, double v,
                 bool all_reduce, Algorithm algorithm) noexcept {
  const double passes = all_reduce ? 2.0 : 1.0;
  const auto p = static_cast<double>(ranks);
  const bool several = group.regular && group.active >= 2;
  const bool grid = is_grid(fabric);
  switch (algorithm) {
    case Algorithm::kRing:
      return passes * single_ring(fabric, group, p, v);
    case Algorithm::kTree:  // a half may be an all-reduce of which the rest is dropped
      return tree_all_reduce(fabric, group, ranks, v);
    case Algorithm::kHierarchical:
      if (grid || !several) return kNever;
      return all_reduce ? hierarchical_all_reduce(group, v)
                        : std::min(tier_by_tier(group, v), hierarchical_all_reduce(group, v));
    case Algorithm::kRailRing:
      return grid || !several ? kNever : passes * rail_ring(group, p, v);
    case Algorithm::kSnakeRing:
      return grid && several ? passes * snake_ring(group, ranks, v) : kNever;
    case Algorithm::kDimensionOrdered:
      return grid && several ? passes * dimension_ordered(group, v) : kNever;
    case Algorithm::kMultiRing:
      return grid && several ? passes * multi_ring(group, v) : kNever;
    default:
      return kNever;
  }
}

// Bytes over the most loaded directed link of k members in a row that exchange v bytes each, in
// multiples of v: traffic across the middle of a line, or spread over both ways round a ring.
double exchange_load(const ActiveLevel& level) noexcept {
  const std::int64_t k = level.members;
  const auto kd = static_cast<double>(k);
  if (level.ring) {
    const double squares = kd * kd - (k % 2 == 0 ? 0.0 : 1.0);
    return squares / (8.0 * kd);
  }
  return static_cast<double>(k / 2) * static_cast<double>(k - k / 2) / kd;
}

double grid_all_to_all(const Group& group, std::int64_t ranks, double v,
                       Algorithm algorithm) noexcept {
  if (!group.regular) {
    if (algorithm != Algorithm::kPairwise) return kNever;
    const auto p = static_cast<double>(ranks);
    const double load = std::max((p - 1.0) / p, 0.25 * p);
    return v * load * group.slowest_seconds_per_byte + (p - 1.0) * group.step_latency_s;
  }
  const bool several = group.active >= 2;
  if (several == (algorithm == Algorithm::kPairwise)) return kNever;
  if (algorithm != Algorithm::kPairwise && algorithm != Algorithm::kDimensionOrdered &&
      algorithm != Algorithm::kMultiRing) {
    return kNever;
  }
  double total = 0.0;
  double longest = 0.0;
  double latency = 0.0;
  for (int l = 0; l < group.active; ++l) {
    const ActiveLevel& level = group.level[l];
    const double load = v * exchange_load(level) * level.seconds_per_byte;
    total += load;
    longest = std::max(longest, load);
    latency += static_cast<double>(level.members - 1) * level.hop_latency_s;
  }
  return (algorithm == Algorithm::kMultiRing ? longest : total) + latency;
}

double switched_all_to_all(const Group& group, std::int64_t ranks, double v,
                           Algorithm algorithm) noexcept {
  const auto p = static_cast<double>(ranks);
  if (algorithm == Algorithm::kPairwise) {
    if (!group.regular) {
      return ring_pass(p, v, group.slowest_seconds_per_byte, group.step_latency_s);
    }
    double time = 0.0;
    double inside = 1.0;
    for (int l = 0; l < group.active; ++l) {
      const ActiveLevel& level = group.level[l];
      const double reached = inside * static_cast<double>(level.members);
      const double partners = reached - inside;  // first met at this tier
      time += partners / p * v * level.seconds_per_byte + partners * level.step_latency_s;
      inside = reached;
    }
    return time;
  }
  if (algorithm != Algorithm::kHierarchical || !group.regular || group.active < 2) return kNever;
  double time = 0.0;  // exchange inside each tier, messages for one outer unit travelling together
  for (int l = 0; l < group.active; ++l) time += level_pass(group.level[l], v);
  return time;
}

double broadcast(const FabricRecord& fabric, const Group& group, std::int64_t ranks, double v,
                 Algorithm algorithm) noexcept {
  if (algorithm == Algorithm::kTree) {
    return v * group.slowest_seconds_per_byte +
           tree_depth_s(fabric, group, ranks, /*rooted_in_middle=*/false);
  }
  // Scatter inside, broadcast the pieces side by side over the outer ports, gather inside.
  if (algorithm != Algorithm::kHierarchical || is_grid(fabric) || !group.regular ||
      group.active < 2) {
    return kNever;
  }
  double time = 0.0;
  for (int l = 0; l + 1 < group.active; ++l) {
    time += 2.0 * level_pass(group.level[l], v);
    v *= group.level[l].inverse;
  }
  const ActiveLevel& top = group.level[group.active - 1];
  return time + v * top.seconds_per_byte + ceil_log2(top.members) * top.step_latency_s;
}

// Messages over the busiest link of a row when every rank sends `hops` places on: as many as a
// message has hops, but no more than fit on an open line, and half as many where both ways round
// a ring are equally long.
double shift_load(std::int64_t hops, std::int64_t size, bool ring) noexcept {
  if (!ring) return static_cast<double>(std::min(hops, size - hops));
  return (2 * hops == size ? 0.5 : 1.0) * static_cast<double>(hops);
}

// ---- choosing ----------------------------------------------------------------------------------

// The fastest of some algorithms; ties go to the one that stands first.
template <Algorithm... kCandidates, typename Time>
Choice fastest_of(const Time& time) noexcept {
  Choice best{kNever, Algorithm::kNone};
  const auto consider = [&best, &time](Algorithm algorithm) {
    const double seconds = time(algorithm);
    if (seconds < best.time_s) best = {seconds, algorithm};
  };
  (consider(kCandidates), ...);
  return best;
}

Choice fastest_reduction(const Call& call, const Group& group, bool all_reduce) noexcept {
  using enum Algorithm;
  const auto time = [&](Algorithm algorithm) {
    return reduction(call.fabric, group, call.ranks, call.bytes, all_reduce, algorithm);
  };
  if (!group.regular || group.active == 1) return fastest_of<kRing, kTree>(time);
  if (is_grid(call.fabric)) {
    return fastest_of<kTree, kSnakeRing, kDimensionOrdered, kMultiRing>(time);
  }
  return fastest_of<kRing, kTree, kHierarchical, kRailRing>(time);
}

Choice fastest_all_to_all(const Call& call, const Group& group) noexcept {
  using enum Algorithm;
  if (is_grid(call.fabric)) {
    return fastest_of<kPairwise, kDimensionOrdered, kMultiRing>([&](Algorithm algorithm) {
      return grid_all_to_all(group, call.ranks, call.bytes, algorithm);
    });
  }
  return fastest_of<kHierarchical, kPairwise>([&](Algorithm algorithm) {
    return switched_all_to_all(group, call.ranks, call.bytes, algorithm);
  });
}

// At the rates of `group`, whatever protocols there are.
Choice fastest_on(const Call& call, const Group& group) noexcept {
  using enum Algorithm;
  switch (call.op) {
    case CollectiveOp::kAllReduce:
      return fastest_reduction(call, group, /*all_reduce=*/true);
    case CollectiveOp::kReduceScatter:
    case CollectiveOp::kAllGather:
      return fastest_reduction(call, group, /*all_reduce=*/false);
    case CollectiveOp::kAllToAll:
      return fastest_all_to_all(call, group);
    case CollectiveOp::kBroadcast:
      return fastest_of<kTree, kHierarchical>([&](Algorithm algorithm) {
        return broadcast(call.fabric, group, call.ranks, call.bytes, algorithm);
      });
    case CollectiveOp::kPointToPoint:
      return {message_s(call.fabric, call.bytes, 0, call.shape.stride), kDirect};
  }
  return {kNever, kNone};
}

double time_on(const Call& call, const Group& group, Algorithm algorithm) noexcept {
  switch (call.op) {
    case CollectiveOp::kAllReduce:
    case CollectiveOp::kReduceScatter:
    case CollectiveOp::kAllGather:
      return reduction(call.fabric, group, call.ranks, call.bytes,
                       call.op == CollectiveOp::kAllReduce, algorithm);
    case CollectiveOp::kAllToAll:
      return is_grid(call.fabric) ? grid_all_to_all(group, call.ranks, call.bytes, algorithm)
                                  : switched_all_to_all(group, call.ranks, call.bytes, algorithm);
    case CollectiveOp::kBroadcast:
      return broadcast(call.fabric, group, call.ranks, call.bytes, algorithm);
    case CollectiveOp::kPointToPoint:
      return algorithm == Algorithm::kDirect
                 ? message_s(call.fabric, call.bytes, 0, call.shape.stride)
                 : kNever;
  }
  return kNever;
}

// Whether a protocol may move a vector of which each rank has such a part.
bool may_move(const ProtocolRecord& protocol, double bytes, double ranks) noexcept {
  return protocol.most_bytes == 0.0 || bytes <= protocol.most_bytes * ranks;
}

// What `time` gives at the rates of each protocol in turn, with what begins it and copies.
// Inside one unit copies take their time; where links further out are slower they hide behind them.
template <typename Time>
Choice fastest_protocol(const Call& call, const Group& plain, const Time& time) noexcept {
  const bool one_level = plain.regular && plain.active == 1;
  const auto transfer = static_cast<int>(transfer_of(call.op));
  const double passes = call.op == CollectiveOp::kAllReduce ? 2.0 : 1.0;
  Choice best{kNever, Algorithm::kNone};
  for (int i = 0; i < call.fabric.protocols[transfer]; ++i) {
    const ProtocolRecord& protocol = call.fabric.protocol[transfer][i];
    if (!may_move(protocol, call.bytes, static_cast<double>(call.ranks))) continue;
    const Group group =
        lay_out(call.fabric, call.shape, link_rates(call.fabric, protocol, !one_level));
    const Choice choice = time(group);
    const double copy_s = one_level ? protocol.copy_s_per_byte[group.outermost] : 0.0;
    const double seconds =
        protocol.startup_s[group.outermost] + passes * call.bytes * copy_s + choice.time_s;
    if (seconds < best.time_s) best = {seconds, choice.algorithm};
  }
  return best;
}

// The switch of the one level that the group is on adds up what its members send.
double in_switch_s(const Call& call, const Group& group) noexcept {
  const int l = group.outermost;
  const bool fits = call.op == CollectiveOp::kAllReduce && !is_grid(call.fabric) && group.regular &&
                    group.active == 1 && call.ranks > 2 && call.fabric.in_switch_share[l] > 0.0;
  if (!fits) return kNever;
  return call.fabric.in_switch_startup_s[l] +
         2.0 * group.level[0].pass_seconds_per_byte * call.bytes / call.fabric.in_switch_share[l];
}

// Seconds of a message at one tier.
double tier_message_s(const FabricRecord& fabric, double bytes, int l) noexcept {
  const double links = fabric.full_mesh[l] != 0 ? static_cast<double>(fabric.size[l] - 1) : 1.0;
  const int protocols = fabric.protocols[static_cast<int>(Transfer::kExchange)];
  if (protocols == 0) return bytes * links / fabric.bytes_per_s[l] + fabric.latency_s[l];
  double best = kNever;
  for (int i = 0; i < protocols; ++i) {
    const ProtocolRecord& p = fabric.protocol[static_cast<int>(Transfer::kExchange)][i];
    if (!may_move(p, bytes, 2.0)) continue;
    best = std::min(best, p.startup_s[l] + p.step_s[l] +
                              bytes * (links / (fabric.bytes_per_s[l] * p.share[l]) +
                                       p.copy_s_per_byte[l]));
  }
  return best;
}

}  // namespace

Transfer transfer_of(CollectiveOp op) noexcept {
  switch (op) {
    case CollectiveOp::kAllReduce:
      return Transfer::kAllReduce;
    case CollectiveOp::kReduceScatter:
      return Transfer::kReduceScatter;
    case CollectiveOp::kAllGather:
    case CollectiveOp::kBroadcast:
      return Transfer::kAllGather;
    case CollectiveOp::kAllToAll:
    case CollectiveOp::kPointToPoint:
      return Transfer::kExchange;
  }
  return Transfer::kExchange;
}

Choice fastest_algorithm(const Call& call, const Group& group) noexcept {
  const bool direct = call.op == CollectiveOp::kPointToPoint;  // a message knows its protocols
  Choice best = call.fabric.protocols[static_cast<int>(transfer_of(call.op))] == 0 || direct
                    ? fastest_on(call, group)
                    : fastest_protocol(
                          call, group, [&](const Group& g) { return fastest_on(call, g); });
  const double in_switch = in_switch_s(call, group);
  if (in_switch < best.time_s) best = {in_switch, Algorithm::kInSwitch};
  return best;
}

double time_with(const Call& call, const Group& group, Algorithm algorithm) noexcept {
  if (algorithm == Algorithm::kInSwitch) return in_switch_s(call, group);
  const bool direct = call.op == CollectiveOp::kPointToPoint;
  if (call.fabric.protocols[static_cast<int>(transfer_of(call.op))] == 0 || direct) {
    return time_on(call, group, algorithm);
  }
  return fastest_protocol(call, group, [&](const Group& g) {
           return Choice{time_on(call, g, algorithm), algorithm};
         }).time_s;
}

double message_s(const FabricRecord& fabric, double bytes, std::int64_t from,
                 std::int64_t to) noexcept {
  if (!is_grid(fabric)) {
    for (int l = 0;; ++l) {  // the lowest tier of which one unit holds both
      const bool last = l + 1 == fabric.levels;
      if (!last) {
        from /= fabric.size[l];
        to /= fabric.size[l];
      }
      if (last || from == to) return tier_message_s(fabric, bytes, l);
    }
  }
  double latency = 0.0;
  double seconds_per_byte = 0.0;
  for (int l = 0; l < fabric.levels; ++l) {
    const std::int64_t size = fabric.size[l];
    const bool ring = fabric.wrap[l] != 0 && size > 2;
    std::int64_t hops = std::abs(to % size - from % size);
    if (ring) hops = std::min(hops, size - hops);
    from /= size;
    to /= size;
    latency += static_cast<double>(hops) * fabric.latency_s[l];
    seconds_per_byte =
        std::max(seconds_per_byte, shift_load(hops, size, ring) / fabric.bytes_per_s[l]);
  }
  return bytes * seconds_per_byte + latency;
}

}  // namespace phaze
