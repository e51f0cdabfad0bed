// Bit-identical results on every machine, as in test_bits.cpp, for layers, pipelines, plans and
// NEST: a change of any formula changes a hash, and the commit that changes it explains why.
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/numbers.hpp"
#include "check.hpp"
#include "hash.hpp"
#include "numbers.hpp"
#include "phaze/layer_schedule.hpp"
#include "phaze/nest.hpp"
#include "phaze/pipeline_schedule.hpp"
#include "phaze/plan.hpp"
#include "schedule/layer_facts.hpp"

namespace {

using namespace phaze;
using test::Hash;
using test::Numbers;
using test::same_everywhere;

constexpr double kNone = 1e300;

double real(Numbers& numbers, double unit) { return unit * (1 + numbers.below(1000)) / 7.0; }

// ---- layers ----

std::uint64_t layer_bits() {
  Numbers numbers(3);
  Hash hash;
  const auto p = std::make_unique<LayerProblem>();
  for (int round = 0; round < 300; ++round) {
    p->size = 2 + numbers.below(8);
    p->capacity[0] = 1 + numbers.below(4);
    p->capacity[1] = 1 + numbers.below(3);
    p->capacity[2] = 1 + numbers.below(2);
    int modes = 0;
    for (int i = 0; i < p->size; ++i) {
      p->before[i] = 0;
      for (int b = 0; b < i; ++b) {
        if (numbers.below(4) == 0) p->before[i] |= OpBits{1} << b;
      }
      p->first_mode[i] = modes;
      const int type = numbers.below(3);
      const double single = real(numbers, 0.01);
      p->modes[modes++] = {single, {type == 0, type == 1, type == 2}};
      const bool overlap = round % 2 == 0;
      p->modes[modes++] = {
          single / (1.0 + numbers.below(3)),
          {type == 0 || !overlap ? p->capacity[0] : 0, type == 1 || !overlap ? p->capacity[1] : 0,
           type == 2 || !overlap ? p->capacity[2] : 0}};
    }
    p->first_mode[p->size] = modes;
    CHECK(check_layer(*p) == Status::kOk);
    LayerFacts<OpBits> facts(*p);
    const double bound_s = facts.root_bound(kInfinite) * kRoundedDown;
    const double list_s = best_list_schedule(facts).makespan_s;
    hash.add(bound_s);
    hash.add(list_s);
    if (p->size <= 64) {  // sets of operators in one word: the same bits
      LayerFacts<std::uint64_t> few(*p);
      CHECK(few.root_bound(kInfinite) * kRoundedDown == bound_s);
      CHECK(best_list_schedule(few).makespan_s == list_s);
    }
    const LayerSolution found = solve_layer(*p, {400, HUGE_VAL, nullptr, nullptr});
    hash.add(found.makespan_s);
    hash.add(found.bound_s);
    hash.add(static_cast<double>(found.nodes));
    for (int i = 0; i < p->size; ++i) hash.add(found.start_s[i] + found.mode[i]);
  }
  return hash.value();
}

// ---- pipelines ----

std::uint64_t pipeline_bits() {
  Numbers numbers(4);
  Hash hash;
  PipelinePlayer player;
  for (int round = 0; round < 600; ++round) {
    const auto schedule = static_cast<PipelineSchedule>(round % kPipelineScheduleCount);
    const std::int32_t stages = 2 + numbers.below(5);
    const std::int32_t chunks = schedule == PipelineSchedule::kInterleaved   ? 1 + numbers.below(3)
                                : schedule >= PipelineSchedule::kZeroBubbleV ? 2
                                                                             : 1;
    const std::int64_t m = 1 + numbers.below(20);
    const PipelineStatus status = check_schedule(schedule, stages, chunks, m);
    hash.add(static_cast<double>(status));
    if (status != PipelineStatus::kOk) continue;
    std::vector<double> forward, backward, weight;
    for (int i = 0; i < stages * chunks; ++i) {
      forward.push_back(real(numbers, 0.01));
      backward.push_back(real(numbers, 0.02));
      weight.push_back(backward.back() * 0.4);
    }
    const PipelineLoads loads{stages, chunks, m, forward, backward, weight, 0.75};
    hash.add(player.step_s(schedule, loads));
    hash.add(player.longest_device_s());
    for (const double busy : player.busy_s()) hash.add(busy);
    hash.add(player.step_bound_s(schedule, loads));
    hash.add(player.full_step_s(schedule, loads));
    const std::vector<double> bytes(static_cast<std::size_t>(chunks), 3.0);
    std::vector<double> held;
    for (std::int32_t device = 0; device < stages; ++device) {
      hash.add(chunks_in_flight(schedule, stages, device, m, chunks));
      hash.add(player.peak_bytes(schedule, stages, chunks, m, device, bytes, 0.5));
      player.peaks_in_flight(schedule, stages, chunks, m, device, &held);
      for (const double count : held) hash.add(count);
      hash.add(static_cast<double>(chunk_of(schedule, stages, chunks, device, chunks - 1)));
    }
  }
  return hash.value();
}

// ---- plans ----

constexpr std::int32_t kKinds = 3;
constexpr std::int32_t kVariants = 3;

struct Model {
  std::vector<std::int32_t> order, from, to, tied_from, tied_to;
  std::vector<StrategyRecord> strategies;
  std::vector<LayerKindRecord> sizes;
  std::vector<LayoutRecord> layouts;
  FabricRecord fabric{};
  TrainingRecord training{};
  std::vector<double> times[5][4];  // by level: forward, plain, backward, weight gradients
  std::vector<double> joules, joules_back;

  KindTimes at(std::size_t level) const {
    return {times[level][0].data(),
            times[level][1].data(),
            times[level][2].data(),
            times[level][3].data(),
            joules.data(),
            joules_back.data(),
            1e9,
            1.5};
  }
};

void draw_sizes(Numbers& numbers, Model* m) {
  const std::int64_t widths[][3] = {{1, 1, 1}, {2, 2, 1}, {1, 2, 2}};
  for (const auto& [tensor, context, expert] : widths) {
    m->strategies.push_back({tensor, context, expert, tensor, 1, real(numbers, 1e4),
                             real(numbers, 1e3), numbers.below(2) * 2e5, real(numbers, 1e4),
                             kVariants, 0});
    for (std::int32_t kind = 0; kind < kKinds; ++kind) {
      LayerKindRecord size{};
      size.parameters = real(numbers, 1e4);
      size.expert_parameters = kind == 1 && expert > 1 ? 0.6 * size.parameters : 0.0;
      for (int v = 0; v < kVariants; ++v) {
        size.stash_bytes[v] = real(numbers, 1e4) / (1 + v);
        size.live_bytes[v] = kind == 1 ? real(numbers, 3e3) * v : 0.0;
      }
      size.once_bytes = kind == 2 ? real(numbers, 1e4) : 0.0;
      size.copy_bytes = real(numbers, 3e2);
      size.cast_bytes = real(numbers, 3e2);
      size.shape_bytes = kind == 1 ? real(numbers, 3e2) : 0.0;
      size.boundary = kind == 1 ? 0 : 1;
      m->sizes.push_back(size);
    }
  }
}

void draw_layouts(Numbers& numbers, int blocks, Model* m) {
  for (std::int32_t s = 0; s < 3; ++s) {
    const StrategyRecord& own = m->strategies[static_cast<std::size_t>(s)];
    const std::int64_t most = 16 / (own.tp * own.cp);
    for (int k = 0; k < 12; ++k) {
      LayoutRecord l{};
      l.strategy = s;
      l.schedule = numbers.below(kPipelineScheduleCount);
      l.pp = 1 << numbers.below(3);
      const auto schedule = static_cast<PipelineSchedule>(l.schedule);
      l.vpp = schedule == PipelineSchedule::kInterleaved
                  ? 2
                  : (schedule >= PipelineSchedule::kZeroBubbleV ? 2 : 1);
      l.dp = own.ep << numbers.below(2);
      l.micro_batches = (1 + numbers.below(3)) * 2 * l.pp;
      l.zero = numbers.below(4);
      l.rank_order = numbers.below(2);
      if (l.zero > 0 && numbers.below(3) == 0) l.shard = own.ep;
      const bool fits = l.pp * l.dp <= most && l.pp * l.vpp <= blocks;
      if (!fits || (l.pp > 1 && check_schedule(schedule, l.pp, l.vpp, l.micro_batches) !=
                                    PipelineStatus::kOk)) {
        continue;
      }
      if (l.pp == 1) l.schedule = 0, l.vpp = 1;
      m->layouts.push_back(l);
    }
  }
}

Model draw_model(Numbers& numbers, int round) {
  Model m;
  const int blocks = 4 + numbers.below(5);
  m.order.assign(1, 0);
  m.order.insert(m.order.end(), static_cast<std::size_t>(blocks), 1);
  m.order.push_back(2);
  for (std::int32_t i = 0; i <= blocks; ++i) {
    m.from.push_back(i);
    m.to.push_back(i + 1);
  }
  if (round % 4 == 1) {
    m.from.push_back(1);
    m.to.push_back(blocks);
  }
  if (round % 5 == 2) {
    m.tied_from.push_back(1);
    m.tied_to.push_back(2);
  }
  draw_sizes(numbers, &m);
  draw_layouts(numbers, blocks, &m);
  m.fabric.levels = 3;
  m.fabric.devices = 16;
  for (int l = 0; l < 3; ++l) {
    m.fabric.size[l] = l == 2 ? 0 : 2 + 2 * (l & (round & 1));
    m.fabric.bytes_per_s[l] = 1e7 / (1 + 3 * l);
    m.fabric.latency_s[l] = 1e-3 * (1 + l);
  }
  if (round % 6 == 5) {  // a torus: no tier is slower than another
    m.fabric.kind = static_cast<std::int32_t>(FabricKind::kGrid);
    m.fabric.levels = 2;
    m.fabric.size[0] = m.fabric.size[1] = 4;
    m.fabric.wrap[0] = m.fabric.wrap[1] = 1;
  }
  m.training = {2.0, 4.0, 12.0, 0.03, 1e5, 0.2, 1e-9, 1e-8, 2.0, 1e4, round % 2, 2};
  const std::size_t cells = static_cast<std::size_t>(kMaxVariants) * kKinds;
  for (std::size_t level = 0; level < 5; ++level) {
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      const double f = 0.05 * static_cast<double>(1 + kind + (5 - level));
      m.times[level][0].push_back(f);
      m.times[level][1].push_back(2.0 * f + 0.01 * static_cast<double>(round % 7));
      m.times[level][3].push_back(0.8 * f);
    }
    for (std::size_t at = 0; at < cells; ++at) {
      const double more = round % 4 == 3 ? -0.1 : 0.3;  // recomputing may be faster than reading
      const double again = more * static_cast<double>(at / kKinds) * m.times[level][0][at % kKinds];
      m.times[level][2].push_back(m.times[level][1][at % kKinds] + again);
    }
  }
  m.joules = {1.0, 3.0, 2.0};
  for (std::size_t at = 0; at < cells; ++at)
    m.joules_back.push_back(1.0 + 0.1 * static_cast<double>(at));
  return m;
}

void add_estimate(const PlanEstimate& e, Hash* hash) {
  const PlanParts& p = e.parts;
  for (const double value :
       {e.time_s, e.energy_j, e.memory_bytes, e.max_load_s, p.compute_s, p.tensor_comm_s,
        p.context_comm_s, p.expert_comm_s, p.pipeline_comm_s, p.data_comm_s, p.bubble_s,
        p.imbalance_s, p.recompute_s, p.optimizer_s, p.host_s}) {
    hash->add(value);
  }
  hash->add(e.fullest + 16 * e.status + 256 * e.instant);
}

void add_memory(const MemoryTerms& m, Hash* hash) {
  for (const double value : {m.weights, m.gradients, m.optimizer, m.activations, m.recompute,
                             m.logits, m.communication, m.fragmentation}) {
    hash->add(value);
  }
}

void add_partition(const Partition& partition, Hash* hash) {
  for (const std::int32_t cut : partition.cuts) hash->add(cut);
  for (const std::int32_t code : partition.variants) hash->add(code);
}

void add_layout(const PlanSpace& space, const Model& m, std::size_t row, double memory_limit,
                Hash* hash) {
  const std::vector<KindTimes> free{m.at(1), m.at(2), m.at(3), m.at(4)};
  const KindTimes times = m.at(0);
  hash->add(space.layout_bound_s(row, times, 0));
  const PlacedPlan best = space.best_of_layout(row, times, memory_limit, kNone);
  hash->add(best.time_s);
  std::vector<StageEstimate> stages;
  Partition even;
  for (const std::int32_t variant : {-1, 1}) {
    const PlanStatus status = space.even_partition(row, times, variant, memory_limit, &even);
    hash->add(static_cast<double>(status));
    if (status != PlanStatus::kOk) continue;
    add_partition(even, hash);
    add_estimate(space.estimate(row, even, times, free, memory_limit, &stages), hash);
    for (const StageEstimate& stage : stages) {
      hash->add(stage.load_s + stage.instant);
      add_memory(stage.memory, hash);
    }
    const PlanPasses passes = space.passes(row, even, times);
    for (const double pass_s : passes.forward_s) hash->add(pass_s);
    for (const double pass_s : passes.backward_s) hash->add(pass_s);
    for (const double pass_s : passes.weight_grad_s) hash->add(pass_s);
    hash->add(passes.step_s);
  }
  if (best.time_s < kNone) {
    add_partition(best.partition, hash);
    add_estimate(space.estimate(row, best.partition, times, free, memory_limit, nullptr), hash);
  }
}

std::uint64_t plan_bits() {
  Numbers numbers(5);
  Hash hash;
  for (int round = 0; round < 40; ++round) {
    const Model m = draw_model(numbers, round);
    const PlanProblem problem{m.fabric, 16,        m.training,    kKinds,    m.order,
                              m.from,   m.to,      m.tied_from,   m.tied_to, m.strategies,
                              m.sizes,  m.layouts, round % 3 == 0};
    const double memory_limit = 1e6 * (20 + numbers.below(400)) / 4.0;
    const std::vector<double> memory_limits{memory_limit, 0.6 * memory_limit};
    const std::vector<std::uint8_t> fits(2 * m.layouts.size(), 1);
    PlanSpace space;
    CHECK(space.build(problem, memory_limits, fits) == Status::kOk);
    for (std::size_t row = 0; row < m.layouts.size(); ++row)
      add_layout(space, m, row, memory_limit, &hash);
    const KindTimes times = m.at(0);
    for (std::int32_t s = 0; s < 3; ++s) {
      for (const std::size_t at : {0, 1}) {
        hash.add(space.strategy_bound_s(s, times, at));
        hash.add(space.work_bound_s(s, 0.4, at));
      }
      std::vector<PlacedPlan> plans(2);
      space.best_of_memory_limits(s, times, times, std::vector<double>{kNone, kNone}, plans);
      for (const PlacedPlan& plan : plans) hash.add(plan.time_s + plan.layout);
    }
    SettledLayouts settled{};
    const std::vector<KindTimes> all(3, times);
    for (const PlacedPlan& plan : space.top_plans(all, 0, 4, 1, &settled)) {
      hash.add(plan.time_s + plan.layout);
    }
    for (const PlacedPlan& plan : space.front(all, 0, kNone, 1, &settled)) {
      hash.add(plan.memory_bytes);
    }
  }
  return hash.value();
}

// ---- NEST ----

std::uint64_t nest_bits() {
  Numbers numbers(6);
  Hash hash;
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> size;
    std::vector<double> rate, latency, forward, backward, weights, kept, sent;
    std::vector<std::int32_t> from, to;
    for (int level = 0; level < 3; ++level) {
      size.push_back(1 + numbers.below(4));
      rate.push_back(real(numbers, 0.2));
      latency.push_back(real(numbers, 0.01));
    }
    const std::int32_t n = 1 + numbers.below(9);
    for (std::int32_t i = 0; i < n; ++i) {
      forward.push_back(real(numbers, 0.1));
      backward.push_back(real(numbers, 0.2));
      weights.push_back(real(numbers, 0.1));
      kept.push_back(real(numbers, 0.05));
      for (std::int32_t j = i + 1; j < n; ++j) {
        if (j > i + 1 && numbers.below(4) > 0) continue;
        from.push_back(i);
        to.push_back(j);
        sent.push_back(real(numbers, 0.2));
      }
    }
    const NestNetwork network{size, rate, latency};
    const NestLayers layers{1 + numbers.below(3), forward, backward, weights, kept, from, to, sent};
    const NestRules rules{real(numbers, 2.0), round % 2 == 0 ? 8.0 : 2.0, 1 + numbers.below(16),
                          round % 3 == 0, round % 5 == 0};
    NestPlan plan;
    CHECK(place_nest(network, layers, rules, kNone, &plan) == Status::kOk);
    hash.add(plan.time_s);
    hash.add(plan.load_s);
    hash.add(static_cast<double>(plan.replicas));
    for (const std::int32_t begin : plan.begins) hash.add(begin);
    NestNeed need{};
    CHECK(least_nest_memory(network, layers, rules, &need) == Status::kOk);
    hash.add(need.bytes + need.stages);
    const std::int64_t replicas = 1 + numbers.below(9);
    hash.add(nest_sync(network, replicas, 1e3, 1 + numbers.below(4)));
  }
  return hash.value();
}

}  // namespace

int main() {
  same_everywhere("layer", layer_bits(), 0x18e439301c2b42e3ULL);
  same_everywhere("pipeline", pipeline_bits(), 0x543649475652c41fULL);
  same_everywhere("plan", plan_bits(), 0xb5581c5ccb82f664ULL);
  same_everywhere("nest", nest_bits(), 0x11ee7ae44d95eb03ULL);
  return phaze::test::report("bits of plans");
}
