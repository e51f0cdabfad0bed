#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "phaze/collective.hpp"

namespace {

using namespace phaze;

FabricRecord flat(double rate, double latency) {
  FabricRecord fabric{};
  fabric.kind = static_cast<std::int32_t>(FabricKind::kSwitched);
  fabric.levels = 1;
  fabric.bytes_per_s[0] = rate;
  fabric.latency_s[0] = latency;
  return fabric;
}

FabricRecord torus(std::int64_t x, std::int64_t y, std::int64_t z) {
  FabricRecord fabric{};
  fabric.kind = static_cast<std::int32_t>(FabricKind::kGrid);
  fabric.levels = 3;
  const std::int64_t dims[] = {x, y, z};
  for (int d = 0; d < 3; ++d) {
    fabric.size[d] = dims[d];
    fabric.bytes_per_s[d] = 50e9;
    fabric.latency_s[d] = 1e-6;
    fabric.wrap[d] = 1;
  }
  return fabric;
}

void by_hand() {
  const FabricRecord fabric = flat(100.0, 0.5);
  const auto ring =
      collective_with(fabric, CollectiveOp::kAllReduce, 800.0, 4, 1, Algorithm::kRing);
  CHECK(ring.time_s == 15.0);
  const auto tree =
      collective_with(fabric, CollectiveOp::kAllReduce, 800.0, 4, 1, Algorithm::kTree);
  CHECK(tree.time_s == 18.0);
  const auto best = collective(fabric, CollectiveOp::kAllReduce, 800.0, 4, 1);
  CHECK(best.time_s == 15.0 && best.algorithm == Algorithm::kRing);
  CHECK(collective(fabric, CollectiveOp::kAllReduce, 800.0, 1, 1).time_s == 0.0);
  CHECK_CLOSE(collective(torus(4, 4, 4), CollectiveOp::kAllReduce, 64e9, 64, 1).time_s,
              2.0 * 63e9 / 300e9 + 18e-6, 1e-12);
}

// Ranks 0, 9, 13 and 22 on nodes of 4 and racks of 16: no two in one node, so that its links carry
// nothing; two racks have different numbers of them, so that a ring in rank order is charged.
void irregular_group() {
  FabricRecord fabric = flat(1.0, 0.0);
  fabric.levels = 3;
  fabric.size[0] = fabric.size[1] = 4;
  fabric.bytes_per_s[1] = 100.0;
  fabric.bytes_per_s[2] = 50.0;
  const GroupShape apart{2, 9, 2, 13};
  CHECK_CLOSE(collective(fabric, CollectiveOp::kAllReduce, 800.0, apart).time_s,
              2.0 * 0.75 * 800.0 / 50.0, 1e-12);
  const GroupShape near{2, 9, 2, 12};  // ranks 9 and 12 are 3 apart
  CHECK(collective(fabric, CollectiveOp::kAllReduce, 800.0, near).time_s > 1000.0);
}

// Eight devices with a link of 10 bytes/s between each pair.
void full_mesh() {
  FabricRecord fabric = flat(70.0, 0.0);
  fabric.size[0] = 8;
  fabric.full_mesh[0] = 1;
  CHECK(collective(fabric, CollectiveOp::kAllReduce, 800.0, 8, 1).time_s == 20.0);
  CHECK(collective(fabric, CollectiveOp::kAllReduce, 800.0, 2, 1).time_s == 80.0);
  CHECK(collective(fabric, CollectiveOp::kAllToAll, 800.0, 4, 2).time_s == 20.0);
  CHECK(message(fabric, 800.0, 2, 5).time_s == 80.0);
  fabric.size[0] = 0;
  CHECK(check_fabric(fabric) == Status::kBadFabric);
  FabricRecord grid = torus(4, 4, 4);
  grid.full_mesh[1] = 1;
  CHECK(check_fabric(grid) == Status::kBadFabric);
}

// Startup, steps and copies of a protocol, its limit of bytes, and an in-switch all-reduce.
void protocols() {
  FabricRecord fabric = flat(100.0, 0.5);
  fabric.size[0] = 8;
  for (int t = 0; t < kTransfers; ++t) {
    fabric.protocols[t] = 2;
    ProtocolRecord& small = fabric.protocol[t][0];
    small.most_bytes = 10.0;
    small.startup_s[0] = 1.0;
    small.step_s[0] = 0.25;
    small.share[0] = 0.125;
    ProtocolRecord& large = fabric.protocol[t][1];
    large.startup_s[0] = 3.0;
    large.step_s[0] = 0.5;
    large.share[0] = 2.0;
    large.copy_s_per_byte[0] = 0.0075;
  }
  // 8 bytes: 1 + 6 / 4 + 2 * 0.75 * 8 / 12.5
  CHECK_CLOSE(collective(fabric, CollectiveOp::kAllReduce, 8.0, 4, 1).time_s, 3.46, 1e-12);
  // 800 bytes: 3 + 6 / 2 + 2 * (0.75 / 200 + 0.0075) * 800
  CHECK_CLOSE(collective(fabric, CollectiveOp::kAllReduce, 800.0, 4, 1).time_s, 24.0, 1e-12);
  CHECK_CLOSE(collective(fabric, CollectiveOp::kAllGather, 800.0, 4, 1).time_s, 13.5, 1e-12);
  CHECK_CLOSE(message(fabric, 800.0, 0, 1).time_s, 3.5 + 800.0 * 0.0125, 1e-12);
  CHECK(collective_bound_s(fabric, CollectiveOp::kAllReduce, 800.0, 4, 1) <= 12.0);
  fabric.in_switch_startup_s[0] = 2.0;
  fabric.in_switch_share[0] = 0.75;
  const auto added = collective(fabric, CollectiveOp::kAllReduce, 800.0, 4, 1);
  CHECK(added.algorithm == Algorithm::kInSwitch);
  CHECK_CLOSE(added.time_s, 18.0, 1e-12);
  CHECK(collective(fabric, CollectiveOp::kAllReduce, 800.0, 2, 1).algorithm == Algorithm::kRing);
  fabric.protocol[0][1].copy_s_per_byte[0] = 0.001;  // faster than the links
  CHECK(check_fabric(fabric) == Status::kBadFabric);
}

void every_outcome_has_a_sentence() {
  for (int i = 0; i < kStatusCount; ++i) {
    CHECK(std::string_view(sentence(static_cast<Status>(i))) != "unknown status");
  }
  for (int i = 0; i < kAlgorithmCount; ++i) {
    CHECK(std::string_view(name(static_cast<Algorithm>(i))) != "unknown");
  }
  for (int i = 0; i < kCollectiveOpCount; ++i) {
    CHECK(std::string_view(name(static_cast<CollectiveOp>(i))) != "unknown");
  }
}

void bad_input_gets_a_status() {
  const FabricRecord fabric = torus(4, 4, 4);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto status = [&](double bytes, std::int64_t ranks, std::int64_t stride) {
    return collective(fabric, CollectiveOp::kAllGather, bytes, ranks, stride).status;
  };
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
  CHECK(status(nan, 2, 1) == Status::kNotFinite);
  CHECK(status(-1.0, 2, 1) == Status::kNegative);
  CHECK(status(1.0, 0, 1) == Status::kBadRanks);
  CHECK(status(1.0, least, 1) == Status::kBadRanks);
  CHECK(status(1.0, 2, least) == Status::kBadStride);
  CHECK(status(1.0, most, most) == Status::kGroupTooLarge);
  CHECK(status(1.0, 2, most) == Status::kGroupTooLarge);
  CHECK(status(1.0, 2, 64) == Status::kGroupTooLarge);  // of 64 devices the last is 63
  CHECK(status(1.0, 2, 63) == Status::kOk);
  CHECK(collective(fabric, static_cast<CollectiveOp>(200), 1.0, 2, 1).status ==
        Status::kBadOperation);
  CHECK(collective(fabric, CollectiveOp::kPointToPoint, 1.0, 3, 1).status == Status::kBadRanks);
  FabricRecord broken = fabric;
  broken.levels = 9;
  CHECK(check_fabric(broken) == Status::kBadFabric);
  CHECK(collective_with(fabric, CollectiveOp::kAllToAll, 1.0, 8, 1, Algorithm::kTree).status ==
        Status::kNotApplicable);
  const FabricRecord open = flat(1e9, 1e-6);
  CHECK(collective(open, CollectiveOp::kAllReduce, 1e9, most, 1).status == Status::kOk);
  CHECK(collective(open, CollectiveOp::kAllReduce, 1e9, 2, most - 1).status == Status::kOk);
  CHECK(collective(open, CollectiveOp::kAllReduce, 1e9, most, most).status ==
        Status::kGroupTooLarge);
}

// Every shape of group on every small torus and mesh: no crash, never below the bound, and the
// named algorithm reproduces the chosen time.
void sweep() {
  std::uint64_t cases = 0;
  for (const std::int64_t x : {1, 2, 3, 4, 8}) {
    for (const std::int64_t y : {1, 2, 3, 6}) {
      for (const std::int64_t z : {1, 2, 5}) {
        for (const int wrap : {0, 1}) {
          FabricRecord fabric = torus(x, y, z);
          for (int d = 0; d < 3; ++d) fabric.wrap[d] = wrap;
          const std::int64_t total = x * y * z;
          for (std::int64_t ranks = 1; ranks <= total; ++ranks) {
            for (std::int64_t stride = 1; (ranks - 1) * stride < total && stride <= total;
                 ++stride) {
              for (int op = 0; op < kCollectiveOpCount - 1; ++op) {
                const auto what = static_cast<CollectiveOp>(op);
                const auto best = collective(fabric, what, 1e6, ranks, stride);
                CHECK(best.status == Status::kOk);
                const double bound = collective_bound_s(fabric, what, 1e6, ranks, stride);
                CHECK(best.time_s >= bound * (1.0 - 1e-12));
                if (best.algorithm != Algorithm::kNone) {
                  CHECK(collective_with(fabric, what, 1e6, ranks, stride, best.algorithm).time_s ==
                        best.time_s);
                }
                ++cases;
              }
            }
          }
        }
      }
    }
  }
  CHECK(cases > 50000);
}

void batches_do_not_depend_on_threads() {
  const std::vector<FabricRecord> fabrics = {flat(1e9, 1e-6), torus(8, 8, 8)};
  constexpr std::size_t n = 30000;
  std::vector<std::int32_t> fabric(n);
  std::vector<std::uint8_t> op(n);
  std::vector<double> bytes(n);
  std::vector<std::int64_t> ranks(n);
  std::vector<std::int64_t> stride(n, 1);
  for (std::size_t i = 0; i < n; ++i) {
    fabric[i] = static_cast<std::int32_t>(i % 4) - 1;  // two of four are out of range
    op[i] = static_cast<std::uint8_t>(i % 7);
    bytes[i] = static_cast<double>(i * i);
    ranks[i] = static_cast<std::int64_t>(i % 600);
  }
  const CollectiveQuery query{fabrics, fabric, op, bytes, ranks, stride};
  std::vector<double> time[2] = {std::vector<double>(n), std::vector<double>(n)};
  std::vector<std::uint8_t> chosen(n);
  std::vector<std::uint8_t> status[2] = {std::vector<std::uint8_t>(n),
                                         std::vector<std::uint8_t>(n)};
  collective_batch(query, {time[0], chosen, status[0]}, 1);
  collective_batch(query, {time[1], chosen, status[1]}, 7);
  std::array<int, kStatusCount> seen{};
  for (std::size_t i = 0; i < n; ++i) {
    CHECK(status[0][i] == status[1][i]);
    CHECK(time[0][i] == time[1][i] || (std::isnan(time[0][i]) && std::isnan(time[1][i])));
    ++seen[status[0][i]];
  }
  CHECK(seen[static_cast<std::size_t>(Status::kOk)] > 0);
  CHECK(seen[static_cast<std::size_t>(Status::kBadFabric)] > 0);
  CHECK(seen[static_cast<std::size_t>(Status::kGroupTooLarge)] > 0);
}

}  // namespace

int main() {
  by_hand();
  irregular_group();
  full_mesh();
  protocols();
  every_outcome_has_a_sentence();
  bad_input_gets_a_status();
  sweep();
  batches_do_not_depend_on_threads();
  return phaze::test::report("collective");
}
