// 64 threads that call every batch function at once on the same inputs, each with its own worker
// threads, get the bits of a single thread; and all fuzz targets run concurrently without a
// failure. Build with PHAZE_SANITIZE_THREADS to run under ThreadSanitizer (python3 dev.py threads).
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "../fuzz/bytes.hpp"
#include "check.hpp"
#include "cost/chips.hpp"
#include "numbers.hpp"
#include "phaze/collective.hpp"
#include "phaze/layer_batch.hpp"
#include "phaze/op_cost.hpp"
#include "phaze/path_bounds.hpp"
#include "phaze/plan.hpp"
#include "phaze/silicon.hpp"
#include "plan/layers_case.hpp"

namespace {

using namespace phaze;
using phaze::test::neutral;
using phaze::test::Numbers;
using Answer = std::vector<std::uint8_t>;

constexpr int kThreads = 64;
constexpr int kInside = 3;

template <typename T>
Answer bits(const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(values.data());
  return {data, data + values.size() * sizeof(T)};
}

struct Inputs {
  std::vector<ChipRecord> chips;
  std::vector<std::int32_t> tuning_of;
  std::vector<TuningRecord> tunings;
  std::vector<OperatorRecord> ops;
  std::vector<double> watts;
  FabricRecord fabric{};
  EnergyTable energy{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0};
};

Inputs inputs() {
  Inputs in;
  for (std::int64_t c = 0; c < 12; ++c) {
    ChipRecord chip{};
    chip.tensor_cores = 1 + c;
    chip.tensor_width = chip.tensor_depth = 64;
    chip.tensor_local_bytes = 1 << 18;
    chip.vector_cores = 2;
    chip.vector_lanes = 64;
    chip.vector_alus_per_lane = 1;
    chip.vector_local_bytes = 1 << 12;
    chip.buffer_bytes = (c % 2) << 24;
    chip.buffer_bytes_per_cycle = 1024.0;
    chip.hbm_bytes_per_s = 1e12;
    chip.clock_hz = 1e9;
    in.chips.push_back(chip);
    in.tuning_of.push_back(0);
    in.watts.push_back(1.0);
  }
  in.tunings.push_back(neutral());
  for (std::int64_t i = 1; i < 30; ++i) {
    OperatorRecord op{};
    op.b = 1;
    op.m = 17 * i;
    op.k = 64;
    op.n = 5 * i;
    op.collective = -1;
    op.function = static_cast<std::int32_t>(i % 29);
    op.read_bytes = op.write_bytes = 1e5;
    in.ops.push_back(op);
  }
  in.fabric.levels = 2;
  in.fabric.size[0] = 4;
  in.fabric.bytes_per_s[0] = 1e9;
  in.fabric.bytes_per_s[1] = 1e8;
  in.fabric.latency_s[0] = in.fabric.latency_s[1] = 1e-6;
  return in;
}

Answer costs(const Inputs& in) {
  const ChipBatch batch{in.chips, in.tuning_of, in.tunings, {2.0, 2.0, 4.0, 1.0}};
  std::vector<CostRecord> records(in.ops.size() * in.chips.size());
  const std::vector<EnergyTable> energy(in.chips.size(), in.energy);
  op_cost_batch(in.ops, batch, Cores::kAll, energy, in.watts, records, kInside);
  return bits(records);
}

Answer times(const Inputs& in) {
  const ChipBatch batch{in.chips, in.tuning_of, in.tunings, {2.0, 2.0, 4.0, 1.0}};
  std::vector<double> found(2 * in.ops.size() * in.chips.size());
  const std::span<double> all(found);
  op_time_batch(in.ops, batch, Cores::kOne, all.first(found.size() / 2), kInside);
  op_bound_batch(in.ops, batch, Cores::kAll, all.last(found.size() / 2), kInside);
  return bits(found);
}

Answer figures(const Inputs& in) {
  const ChipBatch batch{in.chips, in.tuning_of, in.tunings, {2.0, 2.0, 4.0, 1.0}};
  const std::size_t cells = in.ops.size() * in.chips.size();
  const std::vector<EnergyTable> energy(in.chips.size(), in.energy);
  std::vector<double> found(4 * cells);
  const auto part = [&](std::size_t n) { return std::span(found).subspan(n * cells, cells); };
  op_figures_batch(in.ops, batch, energy, {part(0), part(1), part(2), part(3)}, kInside);
  return bits(found);
}

Answer paths(const Inputs& in) {
  const FormatOps format{in.ops, in.tunings, {2.0, 2.0, 4.0, 1.0}};
  const std::vector<std::int64_t> nodes{0, 3}, before_ptr{0, 0, 1, 3};
  const std::vector<std::int32_t> op{0, 1, 2}, before{0, 0, 1}, sum_of{0};
  const std::vector<double> extra{0.0, 1e-6, 0.0}, count{2.0}, most_at_once{1.0, 1.0, 1.0};
  std::vector<double> found(2 * in.chips.size());
  const std::span<double> all(found);
  const PathBatch graphs{nodes, op, extra, before_ptr, before, count, sum_of};
  path_bound_batch({&format, 1}, in.chips, in.tuning_of, graphs, all.first(in.chips.size()),
                   kInside);
  work_bound_batch({&format, 1}, in.chips, in.tuning_of, graphs, {most_at_once, true},
                   all.last(in.chips.size()), kInside);
  return bits(found);
}

Answer silicon(const Inputs& in) {
  std::vector<AreaBreakdown> areas(in.chips.size());
  chip_area_batch(in.chips, {0.01, 5.0}, areas, kInside);
  std::vector<double> found(2 * in.chips.size());
  const std::span<double> all(found);
  chip_area_total_batch(in.chips, {0.01, 5.0}, all.first(in.chips.size()), kInside);
  peak_power_batch(in.chips, in.energy, all.first(in.chips.size()), all.last(in.chips.size()),
                   kInside);
  Answer made = bits(found);
  const Answer more = bits(areas);
  made.insert(made.end(), more.begin(), more.end());
  return made;
}

Answer collectives(const Inputs& in) {
  const std::size_t rows = 40;
  const std::vector<FabricRecord> fabrics{in.fabric};
  const std::vector<std::int32_t> fabric(rows, 0);
  std::vector<std::uint8_t> op, algorithm(rows), status(rows);
  std::vector<double> bytes, found(rows);
  std::vector<std::int64_t> ranks, stride(rows, 1);
  for (std::size_t i = 0; i < rows; ++i) {
    op.push_back(static_cast<std::uint8_t>(i % kCollectiveOpCount));
    bytes.push_back(1e4 * static_cast<double>(i));
    ranks.push_back(static_cast<std::int64_t>(1 + i % 16));
  }
  collective_batch({fabrics, fabric, op, bytes, ranks, stride, {}, {}}, {found, algorithm, status},
                   kInside);
  return bits(found);
}

Answer schedules(const Inputs&) {
  constexpr std::size_t kLayers = 12;
  constexpr std::size_t kOps = 6;
  std::vector<std::int64_t> op_ptr{0}, mode_ptr{0}, edge_ptr{0};
  std::vector<std::uint8_t> types;
  std::vector<std::int32_t> mode_cores, from, to, cores;
  std::vector<double> mode_s;
  Numbers numbers(5);
  for (std::size_t b = 0; b < kLayers; ++b) {
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(kOps); ++i) {
      types.push_back(static_cast<std::uint8_t>(1 << numbers.below(3)));
      mode_cores.insert(mode_cores.end(), {1, 0});
      mode_s.insert(mode_s.end(), {4.0 + numbers.below(9), 2.0 + numbers.below(3)});
      mode_ptr.push_back(static_cast<std::int64_t>(mode_s.size()));
      if (i > 1) {
        from.push_back(numbers.below(i));
        to.push_back(i);
      }
    }
    op_ptr.push_back(static_cast<std::int64_t>(types.size()));
    edge_ptr.push_back(static_cast<std::int64_t>(to.size()));
    cores.insert(cores.end(), {2, 2, 1});
  }
  const LayerBatch batch{op_ptr,   types, mode_ptr, mode_cores, mode_s,
                         edge_ptr, from,  to,       cores,      ScheduleRule::kOverlap};
  std::vector<double> makespan(kLayers), bound(kLayers), start(types.size());
  std::vector<std::int32_t> proved(kLayers), status(kLayers), mode(types.size());
  std::vector<std::int64_t> nodes(kLayers);
  solve_layers(batch, {10'000, fuzz::kInfinite, nullptr, nullptr}, Terms::kGiven,
               {makespan, bound, proved, nodes, status, start, mode}, kInside);
  makespan.insert(makespan.end(), start.begin(), start.end());
  return bits(makespan);
}

Answer best_plans(int threads) {
  std::mt19937 random(4);
  const TwoStrategies c(random, false);
  ChipLayers layers[2];
  for (ChipLayers& own : layers) draw_layers(own, random, 14, true);
  return bits(best_plans(c, layers, threads));
}

Answer plans_on_chips(const Inputs&) { return best_plans(kInside); }

// The fuzz targets call the functions without a batch form: placements, NEST, plans, mappings.
Answer everything_else(const Inputs&) {
  Numbers numbers(9);
  std::vector<std::uint8_t> data(300);
  for (int round = 0; round < 3; ++round) {
    for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(numbers.below(256));
    for (const fuzz::Target& target : fuzz::kTargets) target.run({data.data(), data.size()});
  }
  return {};
}

}  // namespace

int main() {
  CHECK(best_plans(1) == best_plans(4));
  const Inputs in = inputs();
  const std::function<Answer(const Inputs&)> jobs[] = {costs,     times,          figures,
                                                       paths,     silicon,        collectives,
                                                       schedules, plans_on_chips, everything_else};
  std::vector<Answer> expected;
  for (const auto& job : jobs) expected.push_back(job(in));
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> pool;
  for (int t = 0; t < kThreads; ++t) {
    pool.emplace_back([&, t] {
      for (std::size_t k = 0; k < expected.size(); ++k) {
        const std::size_t at = (k + static_cast<std::size_t>(t)) % expected.size();
        if (jobs[at](in) != expected[at]) ++wrong[static_cast<std::size_t>(t)];
      }
    });
  }
  for (std::thread& thread : pool) thread.join();
  for (const int count : wrong) CHECK(count == 0);
  return phaze::test::report("threads");
}
