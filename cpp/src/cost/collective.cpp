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

// Checks the arguments; kOk with algorithm kNone means the answer is zero seconds already.
Status check_call(const Call& call) noexcept {
  if (static_cast<int>(call.op) >= kCollectiveOpCount) return Status::kBadOperation;
  if (!std::isfinite(call.bytes)) return Status::kNotFinite;
  if (call.bytes < 0.0) return Status::kNegative;
  if (call.ranks < 1) return Status::kBadRanks;
  if (call.op == CollectiveOp::kPointToPoint && call.ranks > 2) return Status::kBadRanks;
  if (call.stride < 1) return Status::kBadStride;
  return Status::kOk;
}

CollectiveResult fastest(const Call& call) noexcept {
  const Status checked = check_call(call);
  if (checked != Status::kOk) return failed(checked);
  if (call.ranks == 1) return {0.0, Algorithm::kNone, Status::kOk};
  const Group group = lay_out(call.fabric, call.ranks, call.stride);
  if (group.status != Status::kOk) return failed(group.status);
  if (call.bytes == 0.0) return {0.0, Algorithm::kNone, Status::kOk};
  const Choice best = fastest_algorithm(call, group);
  if (!(best.time_s < kNever)) return failed(Status::kNotFinite);
  return {best.time_s, best.algorithm, Status::kOk};
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
    if (!(fabric.bytes_per_s[l] > 0.0) || !std::isfinite(fabric.bytes_per_s[l])) {
      return Status::kBadFabric;
    }
    if (!(fabric.latency_s[l] >= 0.0) || !std::isfinite(fabric.latency_s[l])) {
      return Status::kBadFabric;
    }
  }
  return Status::kOk;
}

CollectiveResult collective(const FabricRecord& fabric, CollectiveOp op, double bytes,
                            std::int64_t ranks, std::int64_t stride) noexcept {
  if (check_fabric(fabric) != Status::kOk) return failed(Status::kBadFabric);
  return fastest({fabric, op, bytes, ranks, stride});
}

CollectiveResult collective_with(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                 std::int64_t ranks, std::int64_t stride,
                                 Algorithm algorithm) noexcept {
  const CollectiveResult best = collective(fabric, op, bytes, ranks, stride);
  if (best.status != Status::kOk || best.algorithm == Algorithm::kNone) return best;
  const Group group = lay_out(fabric, ranks, stride);
  const double time = time_with({fabric, op, bytes, ranks, stride}, group, algorithm);
  if (!std::isfinite(time)) return failed(Status::kNotApplicable);
  return {time, algorithm, Status::kOk};
}

double collective_bound_s(const FabricRecord& fabric, CollectiveOp op, double bytes,
                          std::int64_t ranks, std::int64_t stride) noexcept {
  const CollectiveResult best = collective(fabric, op, bytes, ranks, stride);
  if (best.status != Status::kOk) return kNan;
  if (best.algorithm == Algorithm::kNone) return 0.0;
  const Group group = lay_out(fabric, ranks, stride);
  double ports = 1.0 / group.fastest_seconds_per_byte;  // bytes/s a rank can send at once
  if (is_grid(fabric)) {
    ports = 0.0;
    for (int l = 0; l < fabric.levels; ++l) {
      const double links = fabric.size[l] > 2 ? 2.0 : static_cast<double>(fabric.size[l] - 1);
      ports += links * fabric.bytes_per_s[l];
    }
  }
  const auto p = static_cast<double>(ranks);
  double sent = bytes;
  if (op == CollectiveOp::kAllReduce) sent = 2.0 * (p - 1.0) / p * bytes;
  if (op == CollectiveOp::kReduceScatter || op == CollectiveOp::kAllGather ||
      op == CollectiveOp::kAllToAll) {
    sent = (p - 1.0) / p * bytes;
  }
  // A bound must hold to the last bit: leave room for the rounding of the times it is below.
  constexpr double kRounding = 1.0 - 16.0 * std::numeric_limits<double>::epsilon();
  return kRounding * sent / ports;
}

void collective_batch(const CollectiveQuery& query, const CollectiveAnswer& answer, int threads) {
  std::vector<Status> fabric_status(query.fabrics.size());
  std::transform(query.fabrics.begin(), query.fabrics.end(), fabric_status.begin(), check_fabric);
  parallel_for(query.bytes.size(), threads, kGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto f = static_cast<std::size_t>(query.fabric[i]);
      CollectiveResult result = failed(Status::kBadFabric);
      if (query.fabric[i] >= 0 && f < fabric_status.size() && fabric_status[f] == Status::kOk) {
        result = fastest({query.fabrics[f], static_cast<CollectiveOp>(query.op[i]), query.bytes[i],
                          query.ranks[i], query.stride[i]});
      }
      answer.time_s[i] = result.time_s;
      answer.algorithm[i] = static_cast<std::uint8_t>(result.algorithm);
      answer.status[i] = static_cast<std::uint8_t>(result.status);
    }
  });
}

}  // namespace phaze
