// What a library's protocols make of collectives and messages.
#include <algorithm>
#include <cstdlib>

#include "cost/collective_time.hpp"

namespace phaze {
namespace {

// Messages over the busiest link of a row when every rank sends `hops` places on: as many as a
// message has hops, but no more than fit on an open line, and half as many where both ways round
// a ring are equally long.
double shift_load(std::int64_t hops, std::int64_t size, bool ring) noexcept {
  if (!ring) return static_cast<double>(std::min(hops, size - hops));
  return (2 * hops == size ? 0.5 : 1.0) * static_cast<double>(hops);
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
  const bool direct = call.op == CollectiveOp::kPointToPoint;  // a message knows its protocols
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
