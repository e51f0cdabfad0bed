#include "phaze/plan.hpp"

#include "bytes.hpp"

namespace phaze::fuzz {
namespace {

constexpr std::int32_t kKinds = 3;
constexpr std::size_t kCells = static_cast<std::size_t>(kMaxVariants) * kKinds;

struct Model {
  std::vector<std::int32_t> order, from, to, tied_from, tied_to;
  std::vector<StrategyRecord> strategies;
  std::vector<LayerKindRecord> sizes;
  std::vector<LayoutRecord> layouts;
  FabricRecord fabric{};
  TrainingRecord training{2.0, 4.0, 12.0, 0.03, 1e6, 0.2, 1e-9, 1e-8, 2.0, 0.0, 0, 2};
  std::vector<double> forward, plain, backward, weight, joules, joules_back;

  PlanProblem problem(bool some_blocks) const {
    return {fabric,    8,       training,   kKinds, order,   from,       to,
            tied_from, tied_to, strategies, sizes,  layouts, some_blocks};
  }
  KindTimes times() const {
    return {forward.data(),
            plain.data(),
            backward.data(),
            weight.data(),
            joules.data(),
            joules_back.data(),
            1e9,
            1.0};
  }
};

LayoutRecord layout_of(Bytes& bytes) {
  LayoutRecord l{};
  l.schedule = bytes.rarely(40) ? bytes.awkward_int() : bytes.below(kPipelineScheduleCount);
  l.pp = bytes.rarely(40) ? bytes.awkward_int() : 1 + bytes.below(4);
  l.vpp = bytes.rarely(40) ? bytes.awkward_int() : 1 + bytes.below(2);
  l.zero = bytes.rarely(40) ? bytes.awkward_int() : bytes.below(4);
  l.rank_order = bytes.below(2);
  l.dp = bytes.rarely(40) ? bytes.awkward_integer() : 1 + bytes.below(2);
  l.micro_batches = bytes.rarely(40) ? bytes.awkward_integer() : 1 + bytes.below(9);
  l.shard = bytes.rarely(40) ? bytes.awkward_integer() : bytes.below(3) / 2;
  return l;
}

Model draw(Bytes& bytes) {
  Model m;
  const int blocks = 1 + bytes.below(6);
  m.order.assign(1, 0);
  m.order.insert(m.order.end(), static_cast<std::size_t>(blocks), 1);
  m.order.push_back(2);
  const auto layers = static_cast<std::int32_t>(m.order.size());
  for (std::int32_t i = 0; i + 1 < layers; ++i) {
    m.from.push_back(i);
    m.to.push_back(i + 1);
  }
  if (bytes.rarely(6)) {
    m.tied_from.push_back(bytes.below(layers));
    m.tied_to.push_back(bytes.rarely(6) ? bytes.awkward_int() : bytes.below(layers));
  }
  m.strategies = {{1, 1, 1, 1, 1, bytes.number(1e5), bytes.number(1e4), bytes.below(2) * 2e5, 1e6,
                   1 + bytes.below(3), 0}};
  for (int kind = 0; kind < kKinds; ++kind) {
    LayerKindRecord size{};
    size.parameters = bytes.number(1e5);
    // Ends keep the same whatever is recomputed; blocks the less the more is recomputed.
    const double stash = bytes.number(2e5);
    const double live = bytes.number(2e5);
    for (int v = 0; v < 3; ++v) {
      size.stash_bytes[v] = kind == 1 ? stash / (1 + v) : stash;
      size.live_bytes[v] = kind == 1 ? bytes.number(2e5) : live;
    }
    size.once_bytes = bytes.number(1e5);
    size.boundary = kind == 1 ? 0 : 1;
    m.sizes.push_back(size);
  }
  for (int k = 1 + bytes.below(4); k > 0; --k) m.layouts.push_back(layout_of(bytes));
  m.fabric.kind = static_cast<std::int32_t>(FabricKind::kSwitched);
  m.fabric.levels = 2;
  m.fabric.devices = 8;
  m.fabric.size[0] = 4;
  m.fabric.bytes_per_s[0] = 1e9;
  m.fabric.bytes_per_s[1] = 1e8;
  m.fabric.latency_s[0] = 1e-3;
  m.fabric.latency_s[1] = 5e-3;
  m.training.late_gradients = bytes.below(2);
  m.training.fragmentation = bytes.number(0.01);
  for (int kind = 0; kind < kKinds; ++kind) {
    m.forward.push_back(0.1 * bytes.below(20));
    m.plain.push_back(0.1 * bytes.below(40));
    m.weight.push_back(m.plain.back() * 0.25 * bytes.below(4));
  }
  m.joules.assign(kKinds, 1.0);
  m.joules_back.assign(kCells, 2.0);
  for (std::size_t at = 0; at < kCells; ++at) {
    const std::size_t kind = at % kKinds;
    const auto share = static_cast<double>(at / kKinds) / kMaxVariants;
    m.backward.push_back(m.plain[kind] + share * m.forward[kind]);
  }
  return m;
}

void look(const PlanSpace& space, const Model& m, std::size_t row, double memory_limit) {
  const KindTimes times = m.times();
  const PlacedPlan best = space.best_of_layout(row, times, memory_limit, kInfinite);
  const double bound = space.layout_bound_s(row, times, 0);
  Partition even;
  space.even_partition(row, times, 0, memory_limit, &even);
  if (best.time_s == kInfinite) return;
  REQUIRE(bound <= best.time_s * (1.0 + 1e-12));
  REQUIRE(space.check_partition(row, best.partition) == PlanStatus::kOk);
  std::vector<StageEstimate> stages;
  const std::vector<KindTimes> free(kFreeLevels, times);
  const PlanEstimate e = space.estimate(row, best.partition, times, free, memory_limit, &stages);
  REQUIRE(e.status == 0 && e.memory_bytes <= memory_limit * (1.0 + 1e-9));
  REQUIRE(e.time_s <= best.time_s * (1.0 + 1e-9) && best.time_s <= e.time_s * (1.0 + 1e-9));
}

}  // namespace

void plan(Bytes bytes) {
  const Model m = draw(bytes);
  const double memory_limit = 1e5 * (1 + bytes.below(1000));
  const std::vector<double> memory_limits{memory_limit};
  const std::vector<std::uint8_t> fits(m.layouts.size(), 1);
  PlanSpace space;
  if (space.build(m.problem(bytes.below(3) == 1), memory_limits, fits) != Status::kOk) return;
  const std::vector<KindTimes> all{m.times()};
  for (std::size_t row = 0; row < m.layouts.size(); ++row) look(space, m, row, memory_limit);
  SettledLayouts settled{};
  const auto top = space.top_plans(all, 0, 2, 1, &settled);
  const auto two = space.top_plans(all, 0, 2, 2, &settled);
  REQUIRE(top.size() == two.size());
  for (std::size_t k = 0; k < top.size(); ++k) REQUIRE(top[k].time_s == two[k].time_s);
}

}  // namespace phaze::fuzz
