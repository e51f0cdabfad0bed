// Collectives and messages on a fabric: the time of each algorithm on a group, the effect of a
// library's protocols, and the minimum. docs/collectives.md derives each formula.
#include "phaze/collective.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "base/numbers.hpp"
#include "cost/group.hpp"
#include "phaze/parallel.hpp"
#include "phaze/types.hpp"

namespace phaze {

inline bool is_grid(const FabricRecord& fabric) noexcept {
  return fabric.kind == static_cast<std::int32_t>(FabricKind::kGrid);
}

struct Call {
  const FabricRecord& fabric;
  CollectiveOp op;
  double bytes;
  GroupShape shape;    // normalised
  std::int64_t ranks;  // total number of ranks
};

struct Choice {
  double time_s;
  Algorithm algorithm;
};

// The fastest algorithm; time kInfinite if none gives a finite time. Preconditions as below.
Choice fastest_algorithm(const Call& call, const Group& group) noexcept;

// Seconds; kInfinite if the algorithm cannot run this call. Precondition: the call was checked and
// `group` is lay_out(call.fabric, call.shape) with status kOk. With protocols of a library, the
// minimum over the permitted ones.
double time_with(const Call& call, const Group& group, Algorithm algorithm) noexcept;

// The same two functions at the rates of `group`: only messages use protocols of a library.
Choice fastest_on(const Call& call, const Group& group) noexcept;
double time_on(const Call& call, const Group& group, Algorithm algorithm) noexcept;

// The class of transfers of a library that an operation belongs to.
Transfer transfer_of(CollectiveOp op) noexcept;

// Seconds of one message. Precondition: both ranks are on the fabric, and it was checked.
double message_s(const FabricRecord& fabric, double bytes, std::int64_t from,
                 std::int64_t to) noexcept;

namespace {

double ceil_log2(std::int64_t n) noexcept {
  return static_cast<double>(std::bit_width(static_cast<std::uint64_t>(n - 1)));
}

// One pass around a ring of k members: a reduce-scatter or an all-gather of v bytes.
double ring_pass(double k, double v, double seconds_per_byte, double step_latency_s) noexcept {
  return (k - 1.0) / k * v * seconds_per_byte + (k - 1.0) * step_latency_s;
}

double level_pass(const ActiveLevel& level, double v) noexcept {
  return v * level.pass_seconds_per_byte + level.pass_latency_s;
}

// ---- one pass (reduce-scatter or all-gather), by algorithm -------------------------------------

double single_ring(const FabricRecord& fabric, const Group& group, double p, double v) noexcept {
  if (group.regular && is_grid(fabric)) {
    return group.active == 1 ? level_pass(group.level[0], v) : kInfinite;
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

// As many rings as there are members inside an outer unit: each enters and leaves a unit through a
// different member, so the outer ports work in parallel.
double rail_ring(const Group& group, double p, double v) noexcept {
  double share = 1.0;  // part of the vector that crosses one member's port at this level
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
  if (!group.contiguous || group.active < 2 || ranks % 2 != 0) return kInfinite;
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
  for (int l = 0; l < group.active; ++l) {  // stable insertion sort of at most four
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

// Steps from the root to the farthest leaf. On a grid the root is in the middle for a reduction,
// and at a corner for a broadcast.
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
  if (!group.regular && is_grid(fabric)) return kInfinite;
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
    case Algorithm::kTree:  // one pass may be an all-reduce of which one half is dropped
      return tree_all_reduce(fabric, group, ranks, v);
    case Algorithm::kHierarchical:
      if (grid || !several) return kInfinite;
      return all_reduce ? hierarchical_all_reduce(group, v)
                        : std::min(tier_by_tier(group, v), hierarchical_all_reduce(group, v));
    case Algorithm::kRailRing:
      return grid || !several ? kInfinite : passes * rail_ring(group, p, v);
    case Algorithm::kSnakeRing:
      return grid && several ? passes * snake_ring(group, ranks, v) : kInfinite;
    case Algorithm::kDimensionOrdered:
      return grid && several ? passes * dimension_ordered(group, v) : kInfinite;
    case Algorithm::kMultiRing:
      return grid && several ? passes * multi_ring(group, v) : kInfinite;
    default:
      return kInfinite;
  }
}

// Load of the busiest directed link in an all-to-all of v bytes per member along a line or ring, as
// a multiple of v: the traffic across the middle, on a ring split over both directions.
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
    if (algorithm != Algorithm::kPairwise) return kInfinite;
    const auto p = static_cast<double>(ranks);
    const double load = std::max((p - 1.0) / p, 0.25 * p);
    return v * load * group.slowest_seconds_per_byte + (p - 1.0) * group.step_latency_s;
  }
  const bool several = group.active >= 2;
  if (several == (algorithm == Algorithm::kPairwise)) return kInfinite;
  if (algorithm != Algorithm::kPairwise && algorithm != Algorithm::kDimensionOrdered &&
      algorithm != Algorithm::kMultiRing) {
    return kInfinite;
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
      const double partners = reached - inside;  // ranks whose lowest common tier is this one
      time += partners / p * v * level.seconds_per_byte + partners * level.step_latency_s;
      inside = reached;
    }
    return time;
  }
  if (algorithm != Algorithm::kHierarchical || !group.regular || group.active < 2) return kInfinite;
  double time = 0.0;  // an exchange per tier; messages to one outer unit are merged
  for (int l = 0; l < group.active; ++l) time += level_pass(group.level[l], v);
  return time;
}

double broadcast(const FabricRecord& fabric, const Group& group, std::int64_t ranks, double v,
                 Algorithm algorithm) noexcept {
  if (algorithm == Algorithm::kTree) {
    return v * group.slowest_seconds_per_byte +
           tree_depth_s(fabric, group, ranks, /*rooted_in_middle=*/false);
  }
  // Scatter inside, broadcast the pieces in parallel over the outer ports, gather inside.
  if (algorithm != Algorithm::kHierarchical || is_grid(fabric) || !group.regular ||
      group.active < 2) {
    return kInfinite;
  }
  double time = 0.0;
  for (int l = 0; l + 1 < group.active; ++l) {
    time += 2.0 * level_pass(group.level[l], v);
    v *= group.level[l].inverse;
  }
  const ActiveLevel& top = group.level[group.active - 1];
  return time + v * top.seconds_per_byte + ceil_log2(top.members) * top.step_latency_s;
}

// ---- choosing ----------------------------------------------------------------------------------

// The fastest of some algorithms; ties go to the one listed first.
template <Algorithm... kCandidates, typename Time>
Choice fastest_of(const Time& time) noexcept {
  Choice best{kInfinite, Algorithm::kNone};
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

}  // namespace

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
  return {kInfinite, kNone};
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
                 : kInfinite;
  }
  return kInfinite;
}

namespace {

// Messages over the busiest link of a row if every rank sends to the rank `hops` further: `hops`,
// on an open line at most `size - hops`; half if both directions of a ring are equally long.
double shift_load(std::int64_t hops, std::int64_t size, bool ring) noexcept {
  if (!ring) return static_cast<double>(std::min(hops, size - hops));
  return (2 * hops == size ? 0.5 : 1.0) * static_cast<double>(hops);
}

// Whether a protocol may move this vector: its limit applies to one rank's part.
bool may_move(const ProtocolRecord& protocol, double bytes, double ranks) noexcept {
  return protocol.most_bytes == 0.0 || bytes <= protocol.most_bytes * ranks;
}

// The minimum of `time` over the protocols' rates, each with its start-up time and copies. Inside
// one unit copies add to the time; if links further out are slower, copies overlap them.
template <typename Time>
Choice fastest_protocol(const Call& call, const Group& plain, const Time& time) noexcept {
  const bool one_level = plain.regular && plain.active == 1;
  const auto transfer = static_cast<int>(transfer_of(call.op));
  const double passes = call.op == CollectiveOp::kAllReduce ? 2.0 : 1.0;
  Choice best{kInfinite, Algorithm::kNone};
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

// In-switch all-reduce: the switch of the group's only level sums the data of its members.
double in_switch_s(const Call& call, const Group& group) noexcept {
  const int l = group.outermost;
  const bool fits = call.op == CollectiveOp::kAllReduce && !is_grid(call.fabric) && group.regular &&
                    group.active == 1 && call.ranks > 2 && call.fabric.in_switch_share[l] > 0.0;
  if (!fits) return kInfinite;
  return call.fabric.in_switch_startup_s[l] +
         2.0 * group.level[0].pass_seconds_per_byte * call.bytes / call.fabric.in_switch_share[l];
}

// Seconds of a message at one tier.
double tier_message_s(const FabricRecord& fabric, double bytes, int l) noexcept {
  const double links = fabric.full_mesh[l] != 0 ? static_cast<double>(fabric.size[l] - 1) : 1.0;
  const int protocols = fabric.protocols[static_cast<int>(Transfer::kExchange)];
  if (protocols == 0) return bytes * links / fabric.bytes_per_s[l] + fabric.latency_s[l];
  double best = kInfinite;
  for (int i = 0; i < protocols; ++i) {
    const ProtocolRecord& p = fabric.protocol[static_cast<int>(Transfer::kExchange)][i];
    if (!may_move(p, bytes, 2.0)) continue;
    best = std::min(
        best, p.startup_s[l] + p.step_s[l] +
                  bytes * (links / (fabric.bytes_per_s[l] * p.share[l]) + p.copy_s_per_byte[l]));
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
  const bool direct = call.op == CollectiveOp::kPointToPoint;  // a message has its own protocols
  Choice best =
      call.fabric.protocols[static_cast<int>(transfer_of(call.op))] == 0 || direct
          ? fastest_on(call, group)
          : fastest_protocol(call, group, [&](const Group& g) { return fastest_on(call, g); });
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
  return fastest_protocol(
             call, group,
             [&](const Group& g) { return Choice{time_on(call, g, algorithm), algorithm}; })
      .time_s;
}

double message_s(const FabricRecord& fabric, double bytes, std::int64_t from,
                 std::int64_t to) noexcept {
  if (!is_grid(fabric)) {
    for (int l = 0;; ++l) {  // the lowest tier with a unit that contains both ranks
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

namespace {

constexpr std::size_t kGrain = 8192;
constexpr std::int64_t kLargestLevel = std::int64_t{1} << 60;  // products with it cannot overflow

CollectiveResult failed(Status status) noexcept { return {kNan, Algorithm::kNone, status}; }

Status check_bytes(double bytes) noexcept {
  if (!std::isfinite(bytes)) return Status::kNotFinite;
  return bytes < 0.0 ? Status::kNegative : Status::kOk;
}

// Checks the arguments, and sets the call's normalised shape and total ranks.
Status prepare(Call& call) noexcept {
  if (static_cast<int>(call.op) >= kCollectiveOpCount) return Status::kBadOperation;
  const Status sent = check_bytes(call.bytes);
  if (sent != Status::kOk) return sent;
  const GroupShape& shape = call.shape;
  if (call.op == CollectiveOp::kPointToPoint &&
      (shape.ranks > 2 || shape.outer_ranks > 2 || (shape.ranks == 2 && shape.outer_ranks == 2))) {
    return Status::kBadRanks;
  }
  const Status group = normalise(call.shape);
  if (group == Status::kOk) call.ranks = shape.ranks * shape.outer_ranks;
  return group;
}

// Precondition: the call was prepared.
CollectiveResult fastest(const Call& call) noexcept {
  if (call.ranks == 1) return {0.0, Algorithm::kNone, Status::kOk};
  const Group group = lay_out(call.fabric, call.shape);
  if (group.status != Status::kOk) return failed(group.status);
  if (call.bytes == 0.0) return {0.0, Algorithm::kNone, Status::kOk};
  const Choice best = fastest_algorithm(call, group);
  if (!(best.time_s < kInfinite)) return failed(Status::kNotFinite);
  return {best.time_s, best.algorithm, Status::kOk};
}

CollectiveResult prepared_and_fastest(Call& call) noexcept {
  const Status status = prepare(call);
  return status == Status::kOk ? fastest(call) : failed(status);
}

// Bytes/s a rank can send at once, over all links of a grid.
double ports(const FabricRecord& fabric, const Group& group) noexcept {
  if (!is_grid(fabric)) return 1.0 / group.fastest_seconds_per_byte;
  double total = 0.0;
  for (int l = 0; l < fabric.levels; ++l) {
    const double links = fabric.size[l] > 2 ? 2.0 : static_cast<double>(fabric.size[l] - 1);
    total += links * fabric.bytes_per_s[l];
  }
  return total;
}

// A message on a fabric that passed the check and has `devices` devices.
CollectiveResult checked_message(const FabricRecord& fabric, std::int64_t devices, double bytes,
                                 std::int64_t from, std::int64_t to) noexcept {
  const Status sent = check_bytes(bytes);
  if (sent != Status::kOk) return failed(sent);
  if (from < 0 || to < 0) return failed(Status::kBadRanks);
  if (from >= devices || to >= devices) return failed(Status::kGroupTooLarge);
  if (from == to || bytes == 0.0) return {0.0, Algorithm::kNone, Status::kOk};
  const double time = message_s(fabric, bytes, from, to);
  if (!(time < kInfinite)) return failed(Status::kNotFinite);
  return {time, Algorithm::kDirect, Status::kOk};
}

bool is_time(double seconds) noexcept { return seconds >= 0.0 && std::isfinite(seconds); }

// A protocol must not exceed the links' rate: with its share and its copies, no byte is faster.
bool good_protocol(const FabricRecord& fabric, const ProtocolRecord& p) noexcept {
  if (!is_time(p.most_bytes)) return false;
  for (int l = 0; l < fabric.levels; ++l) {
    const bool rates = p.share[l] > 0.0 && std::isfinite(p.share[l]);
    if (!rates || !is_time(p.startup_s[l]) || !is_time(p.step_s[l]) ||
        !is_time(p.copy_s_per_byte[l])) {
      return false;
    }
    constexpr double kOne = 1.0 - 8.0 * std::numeric_limits<double>::epsilon();
    if (1.0 / p.share[l] + p.copy_s_per_byte[l] * fabric.bytes_per_s[l] < kOne) return false;
  }
  return true;
}

bool good_library(const FabricRecord& fabric) noexcept {
  for (int t = 0; t < kTransfers; ++t) {
    if (fabric.protocols[t] < 0 || fabric.protocols[t] > kMaxProtocols) return false;
    if (fabric.protocols[t] > 0 && is_grid(fabric)) return false;
    if ((fabric.protocols[t] > 0) != (fabric.protocols[0] > 0)) return false;
    for (int i = 0; i < fabric.protocols[t]; ++i) {
      if (!good_protocol(fabric, fabric.protocol[t][i])) return false;
    }
    // At least one protocol must accept messages of any size.
    if (fabric.protocols[t] > 0 && fabric.protocol[t][fabric.protocols[t] - 1].most_bytes != 0.0) {
      return false;
    }
  }
  for (int l = 0; l < fabric.levels; ++l) {
    if (!(fabric.in_switch_share[l] >= 0.0 && fabric.in_switch_share[l] <= 1.0)) return false;
    if (!is_time(fabric.in_switch_startup_s[l])) return false;
  }
  return true;
}

}  // namespace

Status check_fabric(const FabricRecord& fabric) noexcept {
  const bool grid = is_grid(fabric);
  if (!grid && fabric.kind != static_cast<std::int32_t>(FabricKind::kSwitched)) {
    return Status::kBadFabric;
  }
  if (fabric.levels < 1 || fabric.levels > kMaxLevels) return Status::kBadFabric;
  if (fabric.devices < 0) return Status::kBadFabric;
  std::int64_t total = 1;
  for (int l = 0; l < fabric.levels; ++l) {
    const bool may_be_unbounded = !grid && l + 1 == fabric.levels;
    if (fabric.size[l] < (may_be_unbounded ? 0 : 1)) return Status::kBadFabric;
    if (fabric.size[l] > kLargestLevel) return Status::kBadFabric;
    if (fabric.size[l] > 0) {
      if (total > std::numeric_limits<std::int64_t>::max() / fabric.size[l]) {
        return Status::kBadFabric;
      }
      total *= fabric.size[l];
    }
    if (fabric.full_mesh[l] != 0 && (grid || fabric.size[l] < 2)) return Status::kBadFabric;
    if (!(fabric.bytes_per_s[l] > 0.0) || !std::isfinite(fabric.bytes_per_s[l])) {
      return Status::kBadFabric;
    }
    if (!(fabric.latency_s[l] >= 0.0) || !std::isfinite(fabric.latency_s[l])) {
      return Status::kBadFabric;
    }
  }
  return good_library(fabric) ? Status::kOk : Status::kBadFabric;
}

CheckedFabric::CheckedFabric(const FabricRecord& given) noexcept
    : record(given),
      status(check_fabric(given)),
      devices(status == Status::kOk ? capacity(given) : 0) {}

CollectiveResult collective(const FabricRecord& fabric, CollectiveOp op, double bytes,
                            const GroupShape& shape) noexcept {
  if (check_fabric(fabric) != Status::kOk) return failed(Status::kBadFabric);
  Call call{fabric, op, bytes, shape, 1};
  return prepared_and_fastest(call);
}

CollectiveResult collective(const CheckedFabric& fabric, CollectiveOp op, double bytes,
                            const GroupShape& shape) noexcept {
  if (fabric.status != Status::kOk) return failed(fabric.status);
  Call call{fabric.record, op, bytes, shape, 1};
  return prepared_and_fastest(call);
}

CollectiveResult collective_with(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                 const GroupShape& shape, Algorithm algorithm) noexcept {
  if (check_fabric(fabric) != Status::kOk) return failed(Status::kBadFabric);
  Call call{fabric, op, bytes, shape, 1};
  const CollectiveResult best = prepared_and_fastest(call);
  if (best.status != Status::kOk || best.algorithm == Algorithm::kNone) return best;
  const double time = time_with(call, lay_out(fabric, call.shape), algorithm);
  if (!std::isfinite(time)) return failed(Status::kNotApplicable);
  return {time, algorithm, Status::kOk};
}

double collective_bound_s(const FabricRecord& fabric, CollectiveOp op, double bytes,
                          const GroupShape& shape) noexcept {
  if (check_fabric(fabric) != Status::kOk) return kNan;
  Call call{fabric, op, bytes, shape, 1};
  const CollectiveResult best = prepared_and_fastest(call);
  if (best.status != Status::kOk) return kNan;
  if (best.algorithm == Algorithm::kNone) return 0.0;
  const auto p = static_cast<double>(call.ranks);
  double sent = bytes;
  if (op == CollectiveOp::kAllReduce) sent = 2.0 * (p - 1.0) / p * bytes;
  if (op == CollectiveOp::kReduceScatter || op == CollectiveOp::kAllGather ||
      op == CollectiveOp::kAllToAll) {
    sent = (p - 1.0) / p * bytes;
  }
  // A bound must be valid to the last bit: the factor leaves a margin for the rounding of the
  // times.
  constexpr double kBelow = 1.0 - 16.0 * std::numeric_limits<double>::epsilon();
  return kBelow * sent / ports(fabric, lay_out(fabric, call.shape));
}

CollectiveResult message(const FabricRecord& fabric, double bytes, std::int64_t from,
                         std::int64_t to) noexcept {
  if (check_fabric(fabric) != Status::kOk) return failed(Status::kBadFabric);
  return checked_message(fabric, capacity(fabric), bytes, from, to);
}

CollectiveResult message(const CheckedFabric& fabric, double bytes, std::int64_t from,
                         std::int64_t to) noexcept {
  if (fabric.status != Status::kOk) return failed(fabric.status);
  return checked_message(fabric.record, fabric.devices, bytes, from, to);
}

void collective_batch(const CollectiveQuery& query, const CollectiveAnswer& answer, int threads) {
  std::vector<Status> fabric_status(query.fabrics.size());
  std::transform(query.fabrics.begin(), query.fabrics.end(), fabric_status.begin(), check_fabric);
  parallel_for(query.bytes.size(), threads, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto f = static_cast<std::size_t>(query.fabric[i]);
      CollectiveResult result = failed(Status::kBadFabric);
      if (query.fabric[i] >= 0 && f < fabric_status.size() && fabric_status[f] == Status::kOk) {
        GroupShape shape{query.ranks[i], query.stride[i]};
        if (!query.outer_ranks.empty()) {
          shape.outer_ranks = query.outer_ranks[i];
          shape.outer_stride = query.outer_stride[i];
        }
        Call call{query.fabrics[f], static_cast<CollectiveOp>(query.op[i]), query.bytes[i], shape,
                  1};
        result = prepared_and_fastest(call);
      }
      answer.time_s[i] = result.time_s;
      answer.algorithm[i] = static_cast<std::uint8_t>(result.algorithm);
      answer.status[i] = static_cast<std::uint8_t>(result.status);
    }
  });
}

void message_batch(const MessageQuery& query, const CollectiveAnswer& answer) noexcept {
  const bool good = check_fabric(query.fabric) == Status::kOk;
  const std::int64_t devices = good ? capacity(query.fabric) : 0;
  for (std::size_t i = 0; i < query.bytes.size(); ++i) {
    const CollectiveResult result =
        good ? checked_message(query.fabric, devices, query.bytes[i], query.from[i], query.to[i])
             : failed(Status::kBadFabric);
    answer.time_s[i] = result.time_s;
    answer.algorithm[i] = static_cast<std::uint8_t>(result.algorithm);
    answer.status[i] = static_cast<std::uint8_t>(result.status);
  }
}

}  // namespace phaze
