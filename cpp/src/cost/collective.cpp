#include "phaze/collective.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cost/collective_time.hpp"
#include "cost/group.hpp"
#include "phaze/parallel.hpp"

namespace phaze {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kGrain = 8192;
constexpr std::int64_t kLargestLevel = std::int64_t{1} << 60;  // products with it cannot overflow

CollectiveResult failed(Status status) noexcept { return {kNan, Algorithm::kNone, status}; }

Status check_bytes(double bytes) noexcept {
  if (!std::isfinite(bytes)) return Status::kNotFinite;
  return bytes < 0.0 ? Status::kNegative : Status::kOk;
}

// Checks the arguments, and leaves the call with its normalised shape and ranks in all.
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
  if (!(best.time_s < kNever)) return failed(Status::kNotFinite);
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

// A message on a fabric that was checked and has so many devices.
CollectiveResult checked_message(const FabricRecord& fabric, std::int64_t devices, double bytes,
                                 std::int64_t from, std::int64_t to) noexcept {
  const Status sent = check_bytes(bytes);
  if (sent != Status::kOk) return failed(sent);
  if (from < 0 || to < 0) return failed(Status::kBadRanks);
  if (from >= devices || to >= devices) return failed(Status::kGroupTooLarge);
  if (from == to || bytes == 0.0) return {0.0, Algorithm::kNone, Status::kOk};
  const double time = message_s(fabric, bytes, from, to);
  if (!(time < kNever)) return failed(Status::kNotFinite);
  return {time, Algorithm::kDirect, Status::kOk};
}

bool is_time(double seconds) noexcept { return seconds >= 0.0 && std::isfinite(seconds); }

// A protocol may not beat the links: at its share and with its copies, no byte is faster than they.
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
    // One of them moves messages of any size.
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

CollectiveResult collective(const FabricRecord& fabric, CollectiveOp op, double bytes,
                            std::int64_t ranks, std::int64_t stride) noexcept {
  return collective(fabric, op, bytes, GroupShape{ranks, stride});
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

CollectiveResult collective_with(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                 std::int64_t ranks, std::int64_t stride,
                                 Algorithm algorithm) noexcept {
  return collective_with(fabric, op, bytes, GroupShape{ranks, stride}, algorithm);
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
  // A bound must hold to the last bit: leave room for the rounding of the times it is below.
  constexpr double kRounding = 1.0 - 16.0 * std::numeric_limits<double>::epsilon();
  return kRounding * sent / ports(fabric, lay_out(fabric, call.shape));
}

double collective_bound_s(const FabricRecord& fabric, CollectiveOp op, double bytes,
                          std::int64_t ranks, std::int64_t stride) noexcept {
  return collective_bound_s(fabric, op, bytes, GroupShape{ranks, stride});
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
