#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "phaze/mesh.hpp"

namespace {

using namespace phaze;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr CollectiveOp kOps[] = {CollectiveOp::kAllReduce, CollectiveOp::kReduceScatter,
                                 CollectiveOp::kAllGather, CollectiveOp::kAllToAll};
constexpr MeshAlgorithm kAlgorithms[] = {MeshAlgorithm::kAuto, MeshAlgorithm::kOrdered,
                                         MeshAlgorithm::kRing, MeshAlgorithm::kSplit};

MeshResult run(CollectiveOp op, double bytes, const std::vector<MeshRun>& runs,
               const MeshLinks& links, MeshAlgorithm wanted = MeshAlgorithm::kAuto) {
  return mesh_collective(op, bytes, runs, links, wanted);
}

void by_hand() {
  const MeshLinks links{{4.0, 2.0}, 0.5};
  const std::vector<MeshRun> line = {{0, 4, 1}}, strided = {{1, 4, 3}};
  const std::vector<MeshRun> tile = {{0, 4, 1}, {1, 2, 1}}, odd = {{0, 3, 1}, {1, 3, 1}};
  constexpr auto gather = CollectiveOp::kAllGather;
  // 3/4 of 16 bytes at 4 a second, three hops; at a third of 2 a second, nine hops.
  CHECK(run(gather, 16.0, line, links).time_s == 4.5);
  CHECK(run(gather, 16.0, strided, links).time_s == 22.5);
  CHECK(run(CollectiveOp::kReduceScatter, 16.0, strided, links).time_s == 22.5);
  // The middle link of four carries 2 * 2 parts; of three, 2 * 1.
  CHECK(run(CollectiveOp::kAllToAll, 16.0, line, links).time_s == 5.5);
  CHECK(run(CollectiveOp::kAllToAll, 6.0, {{0, 3, 1}}, links).time_s == 2.0);
  // y first, as it is slower: 1/2 of 4 bytes at 2, then 3/4 of 16 at 4, and four hops. As a ring:
  // 7/8 of 8 bytes each way at 2 a second, and seven hops. Split: halves of 8, x on 4 and y on 2
  // bytes, then y and x on all of it, and twice the hops of the longer side.
  CHECK(run(gather, 16.0, tile, links, MeshAlgorithm::kOrdered).time_s == 6.0);
  CHECK(run(gather, 16.0, tile, links, MeshAlgorithm::kRing).time_s == 7.0);
  CHECK(run(gather, 16.0, tile, links, MeshAlgorithm::kSplit).time_s == 5.75);
  CHECK(run(gather, 16.0, tile, links).algorithm == MeshAlgorithm::kSplit);
  CHECK(run(CollectiveOp::kAllReduce, 16.0, tile, links).time_s == 11.5);
  CHECK(run(CollectiveOp::kAllReduce, 16.0, tile, links, MeshAlgorithm::kOrdered).time_s == 12.0);
  CHECK(run(gather, 16.0, odd, links, MeshAlgorithm::kRing).algorithm == MeshAlgorithm::kOrdered);
  CHECK(run(gather, 16.0, {}, links).time_s == 0.0);
}

void bad_input_gets_a_status() {
  const MeshLinks links{{1.0, 1.0}, 0.0};
  constexpr auto gather = CollectiveOp::kAllGather;
  const auto of_run = [&](MeshRun one) { return run(gather, 1.0, {one}, links).status; };
  CHECK(run(gather, kNan, {}, links).status == Status::kNotFinite);
  CHECK(run(gather, -1.0, {}, links).status == Status::kNegative);
  CHECK(std::isnan(run(gather, -1.0, {}, links).time_s));
  CHECK(run(gather, 1.0, {}, {{0.0, 1.0}, 0.0}).status == Status::kBadFabric);
  CHECK(run(gather, 1.0, {}, {{1.0, kNan}, 0.0}).status == Status::kBadFabric);
  CHECK(run(gather, 1.0, {}, {{1.0, 1.0}, -1.0}).status == Status::kBadFabric);
  CHECK(of_run({2, 4, 1}) == Status::kBadRanks);
  CHECK(of_run({-1, 4, 1}) == Status::kBadRanks);
  CHECK(of_run({0, 1, 1}) == Status::kBadRanks);
  CHECK(of_run({0, 4, 0}) == Status::kBadRanks);
  CHECK(of_run({0, std::numeric_limits<std::int32_t>::max(), 1}) == Status::kBadRanks);
  CHECK(run(gather, 1.0, std::vector<MeshRun>(kMaxMeshRuns + 1, {0, 2, 1}), links).status ==
        Status::kBadRanks);
  CHECK(run(CollectiveOp::kBroadcast, 1.0, {}, links).status == Status::kBadOperation);
  CHECK(run(gather, 1.0, {}, links, static_cast<MeshAlgorithm>(9)).status == Status::kBadOperation);
}

// Every small tile with every small stride: the fastest is chosen, and no link carries more than
// the closed form has time for.
void sweep() {
  std::uint64_t cases = 0;
  const MeshLinks links{{3.0, 2.0}, 0.25};
  for (std::int32_t fx = 1; fx <= 5; ++fx) {
    for (std::int32_t fy = 1; fy <= 4; ++fy) {
      for (std::int32_t sx = 1; sx <= 3; ++sx) {
        for (std::int32_t sy = 1; sy <= 2; ++sy) {
          std::vector<MeshRun> runs;
          if (fx > 1) runs.push_back({0, fx, sx});
          if (fy > 1) runs.push_back({1, fy, sy});
          const MeshGrid grid{fx * sx, fy * sy, {}, {}};
          for (const CollectiveOp op : kOps) {
            for (const double bytes : {0.0, 10.0, 1e5}) {
              const MeshResult best = run(op, bytes, runs, links);
              for (const MeshAlgorithm a : kAlgorithms) {
                const MeshResult one = run(op, bytes, runs, links, a);
                CHECK(one.status == Status::kOk);
                CHECK(best.time_s <= one.time_s);
                if (one.algorithm == best.algorithm) CHECK(best.time_s == one.time_s);
                const MeshCollective c{op, a, bytes, 0, 0, grid.columns, grid.rows, runs};
                std::vector<double> loads(static_cast<std::size_t>(4 * fx * sx * fy * sy), 0.0);
                CHECK(mesh_collective_loads(grid, {&c, 1}, links, loads) == Status::kOk);
                for (std::size_t link = 0; link < loads.size(); ++link) {
                  const double rate = links.bytes_per_s[link % kMeshDirections < 2 ? 0 : 1];
                  CHECK(loads[link] / rate <= one.time_s * (1.0 + 1e-12));
                }
                ++cases;
              }
            }
          }
        }
      }
    }
  }
  CHECK(cases > 5000);
}

void loads_of_flows() {
  // 3 x 2 dies, (1, 0) dead: along the row is blocked, along the column first is not.
  const std::array<std::uint8_t, 6> dead = {0, 1, 0, 0, 0, 0};
  const MeshGrid whole{3, 2, {}, {}}, broken{3, 2, dead, {}};
  std::array<double, 24> loads{};
  const auto add = [&](const MeshGrid& grid, MeshFlow flow) {
    loads.fill(0.0);
    return mesh_loads(grid, {&flow, 1}, loads);
  };
  CHECK(add(whole, {0, 5, 2.0}) == Status::kOk);
  CHECK(loads[0] == 2.0 && loads[4] == 2.0 && loads[4 * 2 + 2] == 2.0);
  CHECK(add(broken, {0, 5, 2.0}) == Status::kOk);
  CHECK(loads[2] == 2.0 && loads[4 * 3] == 2.0 && loads[4 * 4] == 2.0);
  CHECK(add(broken, {0, 2, 2.0}) == Status::kOk);  // both routes are blocked: a detour of four
  CHECK(loads[2] == 2.0 && loads[4 * 3] == 2.0 && loads[4 * 4] == 2.0 && loads[4 * 5 + 3] == 2.0);
  CHECK(add(whole, {4, 4, 2.0}) == Status::kOk);
  for (const double load : loads) CHECK(load == 0.0);
  CHECK(add(broken, {0, 1, 2.0}) == Status::kNotApplicable);
  // The link from (0, 0) to (1, 0) is dead: along the column first; both outgoing links dead: no
  // route.
  std::array<std::uint8_t, 24> cut{};
  cut[0] = 1;
  const MeshGrid cut_once{3, 2, {}, cut};
  CHECK(add(cut_once, {0, 4, 2.0}) == Status::kOk);
  CHECK(loads[0] == 0.0 && loads[2] == 2.0 && loads[4 * 3] == 2.0);
  CHECK(add(cut_once, {0, 1, 2.0}) == Status::kOk);  // a detour of three
  CHECK(loads[2] == 2.0 && loads[4 * 3] == 2.0 && loads[4 * 4 + 3] == 2.0);
  cut[2] = 1;
  CHECK(add(cut_once, {0, 1, 2.0}) == Status::kNotApplicable);
  CHECK(add(whole, {0, 6, 2.0}) == Status::kBadShape);
  CHECK(add(whole, {-1, 0, 2.0}) == Status::kBadShape);
  CHECK(add(whole, {0, 1, kNan}) == Status::kNotFinite);
  CHECK(add(whole, {0, 1, -1.0}) == Status::kNegative);
}

// Link k to k + 1 of a line of f carries f - 1 - k parts of a reduce-scatter and k + 1 of an
// all-gather: together V on every link.
void a_reduce_scatter_mirrors_an_all_gather() {
  const MeshGrid grid{8, 1, {}, {}};
  const MeshLinks links{{1.0, 1.0}, 0.0};
  std::vector<MeshCollective> both;
  for (const auto op : {CollectiveOp::kReduceScatter, CollectiveOp::kAllGather}) {
    both.push_back({op, MeshAlgorithm::kAuto, 8.0, 0, 0, 8, 1, {{0, 8, 1}}});
  }
  std::array<double, 32> loads{};
  CHECK(mesh_collective_loads(grid, both, links, loads) == Status::kOk);
  for (std::size_t die = 0; die < 7; ++die) CHECK_CLOSE(loads[4 * die], 8.0, 1e-12);
}

// Loads of a line's all-gather: link k to k + 1 carries k + 1 parts.
void loads_of_a_collective() {
  const MeshGrid grid{4, 1, {}, {}};
  const MeshLinks links{{1.0, 1.0}, 0.0};
  const MeshCollective c{
      CollectiveOp::kAllGather, MeshAlgorithm::kAuto, 4.0, 0, 0, 4, 1, {{0, 4, 1}}};
  std::array<double, 16> loads{};
  CHECK(mesh_collective_loads(grid, {&c, 1}, links, loads) == Status::kOk);
  CHECK(loads[0] == 1.0 && loads[4] == 2.0 && loads[8] == 3.0);
  CHECK(loads[4 + 1] == 3.0 && loads[8 + 1] == 2.0 && loads[12 + 1] == 1.0);
  const MeshCollective wide{
      CollectiveOp::kAllGather, MeshAlgorithm::kAuto, 4.0, 1, 0, 4, 1, {{0, 4, 1}}};
  CHECK(mesh_collective_loads(grid, {&wide, 1}, links, loads) == Status::kBadShape);
}

void rectangles_that_do_not_fit() {
  const MeshGrid grid{4, 4, {}, {}};
  const MeshLinks links{{1.0, 1.0}, 0.0};
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  const auto status = [&](std::int32_t x, std::int32_t y, std::int32_t width, std::int32_t height,
                          MeshRun one) {
    const MeshCollective c{
        CollectiveOp::kAllGather, MeshAlgorithm::kAuto, 1.0, x, y, width, height, {one}};
    std::array<double, 64> loads{};
    return mesh_collective_loads(grid, {&c, 1}, links, loads);
  };
  CHECK(status(0, 0, 4, 4, {0, 4, 1}) == Status::kOk);
  CHECK(status(1, 0, 4, 4, {0, 4, 1}) == Status::kBadShape);
  CHECK(status(0, 1, 4, 4, {0, 4, 1}) == Status::kBadShape);
  CHECK(status(-1, 0, 4, 4, {0, 4, 1}) == Status::kBadShape);
  CHECK(status(0, 0, 3, 4, {0, 4, 1}) == Status::kBadShape);
  CHECK(status(0, 0, 4, 4, {0, 4, 2}) == Status::kBadShape);
  CHECK(status(0, 0, 4, 4, {0, 65536, 65536}) != Status::kOk);
  CHECK(status(0, 0, 4, 4, {0, most, most}) != Status::kOk);
  CHECK(status(most, 0, 4, 4, {0, 4, 1}) == Status::kBadShape);
  CHECK(status(0, most, 4, 4, {0, 4, 1}) == Status::kBadShape);
}

}  // namespace

int main() {
  by_hand();
  bad_input_gets_a_status();
  sweep();
  loads_of_flows();
  a_reduce_scatter_mirrors_an_all_gather();
  loads_of_a_collective();
  rectangles_that_do_not_fit();
  return phaze::test::report("mesh");
}
