// Bit-identical results on every machine, as in test_bits.cpp, for meshes and mappings on them: a
// change of any formula changes a hash, and the commit that changes it explains why.
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "hash.hpp"
#include "numbers.hpp"
#include "phaze/mapping_search.hpp"
#include "phaze/mesh.hpp"
#include "phaze/relaxation.hpp"
#include "wafer/mapping_chain.hpp"

namespace {

using namespace phaze;
using test::Hash;
using test::Numbers;
using test::same_everywhere;

double real(Numbers& numbers, double unit) { return unit * (1 + numbers.below(1000)) / 7.0; }

std::uint64_t mesh_bits() {
  Numbers numbers(7);
  Hash hash;
  constexpr CollectiveOp kOps[] = {CollectiveOp::kAllReduce, CollectiveOp::kReduceScatter,
                                   CollectiveOp::kAllGather, CollectiveOp::kAllToAll};
  constexpr std::int32_t kColumns = 4;
  constexpr std::int32_t kRows = 4;
  for (int round = 0; round < 300; ++round) {
    const MeshLinks links{{real(numbers, 0.1), real(numbers, 0.1)}, real(numbers, 0.001)};
    std::vector<MeshCollective> works;
    for (int k = 1 + numbers.below(3); k > 0; --k) {
      const std::int32_t wide = 1 << numbers.below(2);
      std::vector<MeshRun> runs{{0, 2, wide}};
      if (numbers.below(2) == 0) runs.push_back({1, 2, 1});
      const auto algorithm = static_cast<MeshAlgorithm>(numbers.below(kMeshAlgorithmCount));
      const double bytes = real(numbers, 1.0);
      const CollectiveOp op = kOps[numbers.below(4)];
      hash.add(mesh_collective(op, bytes, runs, links, algorithm).time_s);
      works.push_back({op, algorithm, bytes, 0, 0, kColumns, kRows, runs});
    }
    std::vector<std::uint8_t> dead(kColumns * kRows, 0);
    if (round % 3 == 0) dead[static_cast<std::size_t>(numbers.below(kColumns * kRows))] = 1;
    const MeshGrid whole{kColumns, kRows, {}, {}};
    const MeshGrid broken{kColumns, kRows, dead, {}};
    std::vector<double> loads(kColumns * kRows * kMeshDirections, 0.0);
    hash.add(static_cast<double>(mesh_collective_loads(whole, works, links, loads)));
    std::vector<MeshFlow> flows;
    for (int k = 0; k < 5; ++k) {
      flows.push_back({numbers.below(16), numbers.below(16), real(numbers, 1.0)});
    }
    hash.add(static_cast<double>(mesh_loads(broken, flows, loads)));
    for (const double load : loads) hash.add(load);
  }
  return hash.value();
}

// Mappings as they are drawn, with every weight mode, streams, chunks and experts.
std::uint64_t score_bits() {
  Numbers numbers(8);
  Hash hash;
  for (int round = 0; round < 60; ++round) {
    test::Owned made = test::chain_of(4, {{0, 2, 1}, {0, 2, 2}, {1, 2, 1}}, 31);
    for (double& cell : made.table) cell = real(numbers, 0.01);
    for (MapOpRecord& op : made.ops) {
      op.expert = numbers.below(4) == 0 ? 1 : 0;
      op.output_stored = numbers.below(3) > 0 ? 1 : 0;
      op.stat_bytes = real(numbers, 0.001);
      op.gather_bytes = real(numbers, 0.001);
    }
    made.rules.capacity_bytes = real(numbers, 5.0);
    made.rules.micro_batches = 1 + numbers.below(8);
    made.rules.modes = 63;
    made.rules.volume = round % 7 == 0 ? 1 : 0;
    made.rules.stream_shared = round % 2;
    made.rules.chunks = 1 + round % 3;
    made.rules.zero_bubble = made.rules.chunks == 1 ? round % 2 : 0;
    made.rules.outer_tail_s = 0.5;
    CHECK(check_problem(made.problem()) == Status::kOk);
    Mapping mapping(made.problem());
    for (int draw = 0; draw < 6; ++draw) {
      std::vector<OpMapping> chosen;
      for (int op = 0; op < mapping.ops(); ++op) {
        const auto& choices = mapping.choices(op);
        chosen.push_back(choices[static_cast<std::size_t>(
            numbers.below(static_cast<std::int32_t>(choices.size())))]);
        chosen.back().mode = static_cast<std::uint8_t>(numbers.below(kWeightModeCount));
        chosen.back().algorithm = static_cast<std::uint8_t>(numbers.below(kMeshAlgorithmCount));
      }
      mapping.assign(chosen);
      std::vector<MapStage> stages;
      const MapScore s = mapping.score({}, &stages);
      for (const double value :
           {s.time_s, s.memory_bytes, s.over_bytes, s.stream_bytes, s.stream_over_bytes,
            s.slowest_stage_s, s.compute_s, s.blocking_s, s.hidden_s, s.tail_s}) {
        hash.add(value);
      }
      for (const MapStage& stage : stages) {
        hash.add(stage.load_s + stage.memory_bytes);
        hash.add(stage.state_bytes + stage.activation_bytes);
      }
    }
    hash.add(descend(mapping, 1).score.time_s);
    hash.add(Relaxation(mapping).bound(0.5, 0.5, 0.0).time_s);
    hash.add(ways(mapping));
  }
  return hash.value();
}

}  // namespace

int main() {
  same_everywhere("mesh", mesh_bits(), 0x58bd9b6eef01edb3ULL);
  same_everywhere("score", score_bits(), 0x3481108143dba7faULL);
  return phaze::test::report("bits of wafers");
}
