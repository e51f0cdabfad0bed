// Construction of a PlanSpace: the model's positions, and every group and message of every layout,
// priced on their actual ranks.
#include "plan/plan_space.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <unordered_map>

#include "base/numbers.hpp"
#include "phaze/collective.hpp"

namespace phaze {

namespace {

bool good_kind(const LayerKindRecord& kind, int variants) noexcept {
  bool fine = is_size(kind.parameters) && is_size(kind.expert_parameters) &&
              is_size(kind.once_bytes) && is_size(kind.copy_bytes) && is_size(kind.cast_bytes) &&
              is_size(kind.shape_bytes) && kind.expert_parameters <= kind.parameters &&
              is_size(kind.frozen_parameters) && is_size(kind.frozen_experts) &&
              is_size(kind.packed_parameters) && is_size(kind.packed_bytes) &&
              is_size(kind.more_state_bytes) && is_size(kind.step_gather_bytes) &&
              is_size(kind.host_state) && kind.host_state <= 1.0 && is_size(kind.slice_s) &&
              is_size(kind.stage_work) && kind.frozen_parameters <= kind.parameters &&
              kind.frozen_experts <= kind.expert_parameters &&
              kind.packed_parameters <= kind.frozen_parameters;
  for (int v = 0; v < variants; ++v) {
    fine = fine && is_size(kind.stash_bytes[v]) && is_size(kind.live_bytes[v]);
  }
  return fine;
}

bool good_strategy(const StrategyRecord& s) noexcept {
  return s.tp >= 1 && s.cp >= 1 && s.ep >= 1 && s.etp >= 1 && s.micro_batch >= 1 &&
         s.variants >= 1 && s.variants <= kMaxVariants && is_size(s.message_bytes) &&
         is_size(s.gathered_bytes) && is_size(s.copied_parameters) && is_size(s.sent_bytes) &&
         is_size(s.copied_frozen) && is_size(s.copied_state_bytes) &&
         s.copied_frozen <= s.copied_parameters;
}

bool good_training(const TrainingRecord& t) noexcept {
  return is_size(t.weight_bytes) && is_size(t.gradient_bytes) && is_size(t.state_bytes) &&
         is_size(t.fragmentation) && is_size(t.bucket_bytes) && is_size(t.hbm_byte_j) &&
         is_size(t.network_byte_j) && is_size(t.gather_bytes) && is_size(t.workspace_bytes) &&
         is_size(t.contention) && t.contention < 1.0 && t.whole_layers >= 1;
}

ExpertMesh mesh_of(const LayoutRecord& l, const StrategyRecord& s) noexcept {
  const bool inside = l.rank_order == static_cast<std::int32_t>(RankOrder::kStagesInside);
  return {s.tp * s.cp, l.dp, s.ep, s.etp, inside && l.pp > 1};
}

bool good_layout(const LayoutRecord& l, std::int64_t devices, const StrategyRecord& s) noexcept {
  const std::int64_t inner = s.tp * s.cp;
  return l.pp >= 1 && l.pp <= kMaxPlacedLayers && l.vpp >= 1 && l.zero >= 0 && l.zero <= 3 &&
         l.dp >= 1 && l.micro_batches >= 1 && (l.rank_order == 0 || l.rank_order == 1) &&
         inner <= devices && l.dp <= devices / inner && l.pp <= devices / (inner * l.dp) &&
         check_sharing(mesh_of(l, s), l.shard, l.zero) == PlanStatus::kOk;
}

// The ranks of `count` devices of a stage, every `step`-th from the first on. Devices of a stage
// come in blocks of `inner` consecutive ranks; a block begins `apart` ranks after the one before.
// Either `apart` is `inner`, or `step` divides `inner`.
GroupShape folded_group(std::int64_t count, std::int64_t step, std::int64_t inner,
                        std::int64_t apart) noexcept {
  if (inner % step != 0) return {count, step, 1, 0};
  const std::int64_t run = inner / step;
  return {run, step, count / run, apart};
}

// Whether layers of a kind have the same costs under two strategies in all layouts: they have if
// the strategies differ in recomputation or micro-batches alone.
bool same_costs(const LayerKindRecord& a, const LayerKindRecord& b) noexcept {
  return a.parameters == b.parameters && a.expert_parameters == b.expert_parameters &&
         a.frozen_parameters == b.frozen_parameters && a.frozen_experts == b.frozen_experts &&
         a.packed_parameters == b.packed_parameters && a.packed_bytes == b.packed_bytes &&
         a.more_state_bytes == b.more_state_bytes && a.step_gather_bytes == b.step_gather_bytes &&
         a.host_state == b.host_state && a.copy_bytes == b.copy_bytes &&
         a.cast_bytes == b.cast_bytes && a.shape_bytes == b.shape_bytes && a.slice_s == b.slice_s &&
         a.boundary == b.boundary;
}

// Ranks from a device to the same device of the next replica.
std::int64_t apart_of(const LayoutRecord& l, std::int64_t inner) noexcept {
  return l.rank_order == static_cast<std::int32_t>(RankOrder::kReplicasInside) ? inner
                                                                               : inner * l.pp;
}

StageRanks ranks_of(const LayoutRecord& l, const StrategyRecord& s) noexcept {
  const std::int64_t inner = s.tp * s.cp;
  if (l.rank_order == static_cast<std::int32_t>(RankOrder::kReplicasInside)) {
    return {inner * l.dp, 1, 0};
  }
  return {inner, l.dp, l.dp > 1 ? inner * l.pp : 0};
}

bool known_schedule(std::int32_t code) noexcept {
  return code >= 0 && code < kPipelineScheduleCount;
}

}  // namespace

Status PlanSpaceImpl::build(const PlanProblem& problem, std::span<const double> usable_bytes,
                            std::span<const std::uint8_t> fits) {
  const Status status = take_model(problem);
  if (status != Status::kOk) return status;
  const Status laid = take_layouts(problem);
  prices_ = {};
  if (laid != Status::kOk) return laid;
  bounds.memory_limits.assign(usable_bytes.begin(), usable_bytes.end());
  if (fits.size() != layouts.size() * bounds.memory_limits.size()) return Status::kBadRules;
  if (!std::all_of(bounds.memory_limits.begin(), bounds.memory_limits.end(), is_size))
    return Status::kBadRules;
  counted.clear();
  for (int s = 0; s < static_cast<int>(strategies.size()); ++s)
    counted.push_back(counted_blocks(s));
  add_bounds(fits);
  return Status::kOk;
}

Status PlanSpaceImpl::take_model(const PlanProblem& problem) {
  kinds = problem.kinds;
  layers = static_cast<int>(problem.order.size());
  if (kinds < 1 || layers < 1 || layers > kMaxPlacedLayers || problem.strategies.empty() ||
      problem.sizes.size() != problem.strategies.size() * at(kinds)) {
    return Status::kBadLayers;
  }
  fabric = CheckedFabric(problem.fabric);
  if (fabric.status != Status::kOk || problem.devices < 1) return Status::kBadFabric;
  if (!good_training(problem.training)) return Status::kBadTuning;
  devices = problem.devices;
  training = problem.training;
  some_blocks = problem.some_blocks;
  order.assign(problem.order.begin(), problem.order.end());
  for (const std::int32_t kind : order) {
    if (kind < 0 || kind >= kinds) return Status::kBadLayers;
  }
  strategies.assign(problem.strategies.begin(), problem.strategies.end());
  sizes.clear();
  for (std::size_t s = 0; s < strategies.size(); ++s) {
    if (!good_strategy(strategies[s])) return Status::kBadRules;
    for (int k = 0; k < kinds; ++k) {
      const LayerKindRecord& kind = problem.sizes[s * at(kinds) + at(k)];
      if (!good_kind(kind, strategies[s].variants)) return Status::kNotFinite;
      sizes.push_back(kind);
    }
    LayerKindRecord copy = problem.sizes[s * at(kinds) + at(order.back())];
    copy.parameters += strategies[s].copied_parameters;
    copy.frozen_parameters += strategies[s].copied_frozen;
    copy.more_state_bytes += strategies[s].copied_state_bytes;
    sizes.push_back(copy);
    by_work.push_back(std::any_of(order.begin(), order.end(), [&](std::int32_t kind) {
      return problem.sizes[s * at(kinds) + at(kind)].stage_work > 0.0;
    }));
  }
  for (std::size_t e = 0; e < problem.edge_from.size(); ++e) {
    if (problem.edge_from[e] < 0 || problem.edge_to[e] >= layers ||
        problem.edge_from[e] >= problem.edge_to[e]) {
      return Status::kBadEdge;
    }
  }
  for (std::size_t t = 0; t < problem.tied_from.size(); ++t) {
    const std::int32_t low = std::min(problem.tied_from[t], problem.tied_to[t]);
    const std::int32_t high = std::max(problem.tied_from[t], problem.tied_to[t]);
    if (low < 0 || high >= layers) return Status::kBadEdge;
  }
  find_messages(problem);
  // The bounds assume that the first stage has all layers before the blocks, the last all after.
  if (blocks > 0 && (first_block > 1 || layers - last_block > 1)) return Status::kBadLayers;
  return Status::kOk;
}

// Finds where stages may begin, where blocks are, and the messages into and out of a stage: a
// layer's output enters a stage once, even if several of its layers read it.
void PlanSpaceImpl::find_messages(const PlanProblem& problem) {
  first_block = layers;
  last_block = 0;
  for (int i = 0; i < layers; ++i) {
    if (problem.sizes[at(order[at(i)])].boundary != 0) continue;
    first_block = std::min(first_block, i);
    last_block = i + 1;
    ++blocks;
  }
  if (blocks == 0) first_block = last_block = 0;
  for (auto* count : {&block_count, &first_count, &last_count}) count->assign(at(kinds), 0);
  for (int i = 0; i < layers; ++i) {
    auto& count = i < first_block ? first_count : i < last_block ? block_count : last_count;
    ++count[at(order[at(i)])];
  }
  same_kind_until.assign(at(layers), layers);
  for (int i = layers - 2; i >= 0; --i) {
    const bool alike = order[at(i)] == order[at(i) + 1];
    same_kind_until[at(i)] = alike ? same_kind_until[at(i) + 1] : i + 1;
  }
  equal_blocks = std::find(block_count.begin(), block_count.end(), blocks) != block_count.end();
  may_cut.assign(at(layers) + 1, 1);
  for (std::size_t t = 0; t < problem.tied_from.size(); ++t) {
    for (int cut = 0; cut <= layers; ++cut) {
      if ((problem.tied_from[t] < cut) != (problem.tied_to[t] < cut)) may_cut[at(cut)] = 0;
    }
  }
  free_cuts = std::find(may_cut.begin(), may_cut.end(), 0) == may_cut.end();
  chain = true;
  for (std::size_t e = 0; e < problem.edge_from.size(); ++e) {
    chain = chain && problem.edge_to[e] == problem.edge_from[e] + 1;
  }
  if (chain) return;
  const std::size_t width = at(layers) + 1;
  enters_.assign(width * width, 0);
  leaves_.assign(width * width, 0);
  // The layers that read the output of each layer.
  std::vector<std::vector<std::int32_t>> readers(at(layers));
  for (std::size_t e = 0; e < problem.edge_from.size(); ++e) {
    readers[at(problem.edge_from[e])].push_back(problem.edge_to[e]);
  }
  for (int i = 0; i <= layers; ++i) {
    for (int j = i; j <= layers; ++j) {
      for (int source = 0; source < j; ++source) {
        const auto& to = readers[at(source)];
        const bool inside =
            std::any_of(to.begin(), to.end(), [&](int b) { return b >= i && b < j; });
        const bool after = std::any_of(to.begin(), to.end(), [&](int b) { return b >= j; });
        if (source < i && inside) ++enters_[at(i) * width + at(j)];
        if (source >= i && after) ++leaves_[at(i) * width + at(j)];
      }
    }
  }
}

// For each strategy, the first strategy whose layouts have the same costs.
std::vector<std::int32_t> PlanSpaceImpl::priced_as() const {
  const auto same = [&](std::int32_t a, std::int32_t b) {
    const StrategyRecord& s = strategies[at(a)];
    const StrategyRecord& t = strategies[at(b)];
    bool equal = s.tp == t.tp && s.cp == t.cp && s.ep == t.ep && s.etp == t.etp;
    for (int kind = 0; kind <= kinds && equal; ++kind) {
      equal = same_costs(size_of(a, kind), size_of(b, kind));
    }
    return equal;
  };
  std::vector<std::int32_t> first(strategies.size());
  for (std::int32_t s = 0; at(s) < first.size(); ++s) {
    first[at(s)] = 0;
    while (!same(first[at(s)], s)) ++first[at(s)];  // ends at itself
  }
  return first;
}

Status PlanSpaceImpl::take_layouts(const PlanProblem& problem) {
  using Key = std::array<std::int64_t, 6>;
  const std::vector<std::int32_t> strategy_of = priced_as();
  const auto key_of = [&](const LayoutRecord& l) {
    const std::int32_t stages = l.rank_order || bidirectional(l) ? l.pp : 0;
    return Key{strategy_of[at(l.strategy)],
               l.dp,
               sharing_replicas(l),
               l.zero,
               2 * l.rank_order + (bidirectional(l) ? 1 : 0),
               stages};
  };
  // Layouts that are not adjacent may also share costs; most have the costs of the layout before.
  struct Shared {
    std::int32_t most_stages = 0;
    std::int32_t costs = -1;
  };
  std::unordered_map<Key, Shared, HashOfWords<6>> shared;
  shared.reserve(problem.layouts.size() / 4);
  std::vector<Shared*> own(problem.layouts.size());
  std::int32_t last = 0;
  Key key_before{};
  for (std::size_t r = 0; r < own.size(); ++r) {
    const LayoutRecord& l = problem.layouts[r];
    if (l.strategy < last || l.strategy >= static_cast<std::int32_t>(strategies.size()) ||
        !known_schedule(l.schedule) || !good_layout(l, devices, strategies[at(l.strategy)])) {
      return Status::kBadRules;
    }
    last = l.strategy;
    const Key key = key_of(l);
    own[r] = r > 0 && key == key_before ? own[r - 1] : &shared[key];
    own[r]->most_stages = std::max(own[r]->most_stages, l.pp);
    key_before = key;
  }
  layouts.reserve(own.size());
  for (std::size_t r = 0; r < own.size(); ++r) {
    const LayoutRecord& l = problem.layouts[r];
    if (own[r]->costs < 0) {
      own[r]->costs = static_cast<std::int32_t>(layout_costs.size());
      const Status status = add_layout_costs(l, own[r]->most_stages);
      if (status != Status::kOk) return status;
    }
    Status status = Status::kOk;
    layouts.push_back(priced_layout(l, own[r]->costs, &status));
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

PricedLayout PlanSpaceImpl::priced_layout(const LayoutRecord& l, std::int32_t costs_at,
                                          Status* status) {
  PricedLayout layout{l, costs_at, messages_of(l, status), 0.0, 0.0, {}};
  const StrategyRecord& s = strategies[at(l.strategy)];
  if (l.pp > 1 && l.schedule == static_cast<std::int32_t>(PipelineSchedule::kInterleaved)) {
    layout.wrap_s = message_s(l, s.message_bytes, l.pp - 1, 0, status);
  }
  if (l.pp > 1 && s.copied_parameters > s.copied_frozen) {
    const double share = l.zero >= 2 ? layout_costs[at(costs_at)].shards : 1.0;
    const double trained = s.copied_parameters - s.copied_frozen;
    const double bytes = training.gradient_bytes * trained / share;
    // An all-reduce of two devices: each sends half of its gradients, then half of the sums.
    layout.exchange_s = 2.0 * message_s(l, bytes / 2.0, 0, l.pp - 1, status);
  }
  return layout;
}

PricedGroup PlanSpaceImpl::priced_group(std::int64_t ranks, std::int64_t stride, std::int64_t outer,
                                        std::int64_t outer_stride) {
  const GroupShape shape{ranks, stride, outer, outer > 1 ? outer_stride : 0};
  return {shape, &prices_.collectives[{ranks, stride, outer, shape.outer_stride}]};
}

double PlanSpaceImpl::collective_s(CollectiveOp op, double bytes, const PricedGroup& group,
                                   Status* status) const {
  if (group.shape.ranks * group.shape.outer_ranks <= 1 || bytes <= 0.0) return 0.0;
  for (const GroupPrices::Price& own : *group.prices) {
    if (own.op == op && own.bytes == bytes) return own.time_s;
  }
  const CollectiveResult found = collective(fabric, op, bytes, group.shape);
  if (found.status != Status::kOk) {
    *status = found.status;
    return kInfinite;
  }
  group.prices->push_back({op, bytes, found.time_s});
  return found.time_s;
}

// Gradients and weights of a layer are exchanged among all devices that have the same weights:
// context-parallel devices of all replicas; for an expert, the devices of the stage that have that
// expert. If groups of replicas shard state, gradients are reduced inside each group, and then each
// shard is summed over all groups, once per step.
ExchangeGroups PlanSpaceImpl::exchange_groups(const LayoutRecord& layout) {
  const StrategyRecord& s = strategies[at(layout.strategy)];
  const std::int64_t inner = s.tp * s.cp;
  const std::int64_t apart = apart_of(layout, inner);
  const std::int64_t sharing = sharing_replicas(layout);
  const std::int64_t copies_apart = s.etp * s.ep;  // of an expert, counted in devices of the stage
  const std::int64_t holders = inner * sharing / copies_apart;
  const GroupShape experts = folded_group(holders, copies_apart, inner, apart);
  return {priced_group(s.cp, s.tp, sharing, apart),
          priced_group(experts.ranks, experts.stride, experts.outer_ranks, experts.outer_stride),
          priced_group(layout.dp / sharing, apart * sharing, 1, 0), holders};
}

Status PlanSpaceImpl::add_layout_costs(const LayoutRecord& layout, int most_stages) {
  const StrategyRecord& s = strategies[at(layout.strategy)];
  LayoutCosts costs(kinds);
  const std::int64_t inner = s.tp * s.cp;
  const std::int64_t sharing = sharing_replicas(layout);
  costs.shards = static_cast<double>(sharing * s.cp);
  costs.copies = static_cast<double>(layout.dp / sharing);
  Status status = Status::kOk;
  const PricedGroup replicas = priced_group(s.cp, s.tp, layout.dp, apart_of(layout, inner));
  costs.bucket_s = collective_s(CollectiveOp::kAllReduce, training.bucket_bytes, replicas, &status);
  const ExchangeGroups groups = exchange_groups(layout);
  for (int kind = 0; kind <= kinds; ++kind) add_kind(layout, kind, groups, &costs, &status);
  costs.most_stages = most_stages;
  layout_costs.push_back(std::move(costs));
  return status;
}

// Bytes of a layer's state, of the part that is whole for a while, and of the optimiser's traffic.
void PlanSpaceImpl::add_kind_bytes(const LayoutRecord& layout, int kind, const LayerParameters& p,
                                   LayoutCosts* costs) const {
  const LayerKindRecord& size = size_of(layout.strategy, kind);
  const int zero = layout.zero;
  const std::size_t k = at(kind);
  const double moved = 2.0 * training.state_bytes + training.gradient_bytes + training.weight_bytes;
  const StateBytes state = state_bytes(training, zero, size, p);
  const bool late = training.late_gradients != 0;
  const double copied = copied_weights(size.copy_bytes, zero, p.all, p.shared);
  costs->states[k] = {state.weights + copied, late ? 0.0 : state.gradients, state.optimizer};
  costs->resident_bytes[k] =
      state.weights + state.optimizer + copied + (late ? 0.0 : state.gradients);
  costs->late_bytes[k] = late ? state.gradients : 0.0;
  const double weight_bytes = mean_weight_bytes(size, training.gather_bytes);
  costs->gather_bytes[k] =
      size.boundary != 0 ? 0.0
                         : size.shape_bytes + unsharded_bytes(zero, p.all, p.trained, weight_bytes,
                                                              late ? 0.0 : training.gradient_bytes,
                                                              costs->shards, training.whole_layers);
  costs->step_bytes[k] = (zero >= 1 ? p.shared_trained : p.trained) * moved +
                         2.0 * more_state_bytes(size, zero, p) +
                         copied_weights(size.cast_bytes, zero, p.all, p.shared);
  costs->step_share[k] = zero >= 1 && p.trained > 0.0 ? p.shared_trained / p.trained : 1.0;
}

void PlanSpaceImpl::add_kind(const LayoutRecord& layout, int kind, const ExchangeGroups& groups,
                             LayoutCosts* costs, Status* status) {
  const StrategyRecord& s = strategies[at(layout.strategy)];
  const LayerKindRecord& size = size_of(layout.strategy, kind);
  const LayerParameters p = layer_parameters(size, costs->shards, expert_spread(s));
  add_kind_bytes(layout, kind, p, costs);
  const double experts = size.expert_parameters - size.frozen_experts;  // trained ones only
  const double dense = p.trained - experts;
  const auto seconds = [&](CollectiveOp op, double bytes, double all, double in_experts) {
    return collective_s(op, bytes * (all - in_experts), groups.dense, status) +
           collective_s(op, bytes * in_experts, groups.experts, status);
  };
  const int zero = layout.zero;
  const auto across = [&](double parameters, double sharing_devices) {
    const double bytes = training.gradient_bytes * (parameters / sharing_devices);
    return collective_s(CollectiveOp::kAllReduce, bytes, groups.copies, status);
  };
  double weights_s = 0.0;  // ZeRO 3 gathers all weights, others those that the step has changed
  if (zero >= 3) {
    weights_s = seconds(CollectiveOp::kAllGather, mean_weight_bytes(size, training.gather_bytes),
                        p.all, size.expert_parameters);
  } else if (zero >= 1) {
    weights_s = seconds(CollectiveOp::kAllGather, training.gather_bytes, p.trained, experts);
  }
  const double reduced_s =
      seconds(zero == 0 ? CollectiveOp::kAllReduce : CollectiveOp::kReduceScatter,
              training.gradient_bytes, p.trained, experts);
  double paired_s = 0.0;
  if (bidirectional(layout)) {
    // Two devices have the same layers: each sends half of its gradients to the other, then half of
    // the sums. The first and last device of the pipeline are furthest apart.
    const double bytes = training.gradient_bytes * (zero >= 1 ? p.shared_trained : p.trained);
    paired_s = 2.0 * message_s(layout, bytes / 2.0, 0, layout.pp - 1, status);
  }
  costs->sync_s[at(kind)] = reduced_s + across(dense, costs->shards) +
                            across(experts, static_cast<double>(groups.expert_holders)) + paired_s;
  costs->each_s[at(kind)] = zero >= 2 ? reduced_s : 0.0;
  costs->fetch_s[at(kind)] = zero >= 3 ? weights_s : 0.0;
  double step_s = 0.0;
  if (zero == 1 || zero == 2) {
    step_s = weights_s + (costs->shards > 1.0 ? size.slice_s * costs->shards : 0.0);
  }
  if (zero >= 3 && size.step_gather_bytes > 0.0) {
    step_s =
        seconds(CollectiveOp::kAllGather, size.step_gather_bytes / p.trained, p.trained, experts);
  }
  costs->shared_s[at(kind)] = step_s;
}

double PlanSpaceImpl::buffer_bytes(const PricedLayout& layout) const noexcept {
  const StrategyRecord& s = strategies[at(layout.record.strategy)];
  return training.workspace_bytes + s.gathered_bytes +
         (layout.record.pp > 1 ? 2.0 * s.message_bytes : 0.0);
}

// If each tier of switches is at least as slow for this many bytes as the tiers inside it, a
// message is as slow as the highest tier it crosses. Of the pairs of ranks `low`, ..., `low` +
// `block` - 1 and those `distance` further, returns a sender whose message crosses the highest
// tier, and the number of ranks in a unit below that tier.
PlanSpaceImpl::Sender PlanSpaceImpl::highest_sender(std::int64_t low, std::int64_t block,
                                                    std::int64_t distance) const noexcept {
  Sender found{low, 1};
  std::int64_t unit = 1;
  for (int l = 0; l + 1 < fabric.record.levels; ++l) {
    unit *= fabric.record.size[l];
    const std::int64_t border = (low / unit + 1) * unit;
    const std::int64_t rank = std::min(border - 1, low + block - 1);
    if (rank + distance >= border) found = {rank, unit};
  }
  return found;
}

bool PlanSpaceImpl::slower_outward(double bytes) noexcept {
  if (bytes == prices_.outward_bytes) return prices_.outward;
  prices_.outward_bytes = bytes;
  prices_.outward = false;
  if (fabric.record.kind == static_cast<std::int32_t>(FabricKind::kGrid)) return false;
  std::int64_t unit = 1;
  double inside_s = 0.0;
  for (int l = 0; l < fabric.record.levels && unit < fabric.devices; ++l) {
    const double own_s = message(fabric, bytes, 0, unit).time_s;
    if (!(own_s >= inside_s)) return false;
    inside_s = own_s;
    unit *= std::max<std::int64_t>(fabric.record.size[l], 1);
  }
  return prices_.outward = true;
}

// Messages between neighbouring stages depend on few fields of a layout: most layouts have those of
// an earlier one.
std::span<const double> PlanSpaceImpl::messages_of(const LayoutRecord& layout, Status* status) {
  const StrategyRecord& s = strategies[at(layout.strategy)];
  const StageRanks ranks = ranks_of(layout, s);
  const auto [known, added] =
      prices_.chains.try_emplace({std::bit_cast<std::int64_t>(s.message_bytes), ranks.block,
                                  ranks.runs, ranks.apart, layout.pp});
  if (!added) return known->second;
  std::vector<double>& own = messages.emplace_back(at(layout.pp), 0.0);
  for (int k = 1; k < layout.pp; ++k) {
    own[at(k)] = slowest_message_s(ranks, s.message_bytes, k - 1, k, status);
  }
  return known->second = own;
}

// Other messages are few, and often of layouts that follow each other.
double PlanSpaceImpl::message_s(const LayoutRecord& layout, double bytes, int from, int to,
                                Status* status) {
  const StageRanks ranks = ranks_of(layout, strategies[at(layout.strategy)]);
  const auto [known, added] =
      prices_.messages.try_emplace({std::min(from, to), std::max(from, to), ranks.block, ranks.runs,
                                    ranks.apart, std::bit_cast<std::int64_t>(bytes)},
                                   0.0);
  if (added) known->second = slowest_message_s(ranks, bytes, from, to, status);
  return known->second;
}

// The slowest of the messages from all devices of stage `from` to those of stage `to`, which take
// the same time in both directions.
double PlanSpaceImpl::slowest_message_s(const StageRanks& ranks, double bytes, int from, int to,
                                        Status* status) {
  const std::int64_t distance = std::abs(to - from) * ranks.block;
  const std::int64_t first = std::min(from, to) * ranks.block;
  double slowest = 0.0;
  const auto send = [&](std::int64_t rank) {
    const CollectiveResult sent = message(fabric, bytes, rank, rank + distance);
    if (sent.status != Status::kOk) *status = sent.status;
    slowest = std::max(slowest, sent.time_s);
  };
  if (!slower_outward(bytes)) {
    for (std::int64_t k = 0; k < ranks.runs; ++k) {
      const std::int64_t low = first + k * ranks.apart;
      for (std::int64_t rank = low; rank < low + ranks.block; ++rank) send(rank);
    }
    return slowest;
  }
  std::int64_t top = 1;  // ranks of a unit below the highest tier
  for (int l = 0; l + 1 < fabric.record.levels; ++l) top *= fabric.record.size[l];
  // Runs that lie alike in the units of all tiers cross the same tiers.
  const std::int64_t unlike = std::min(ranks.runs, top / std::gcd(top, ranks.apart));
  Sender highest = highest_sender(first, ranks.block, distance);
  for (std::int64_t k = 1; k < unlike && highest.unit < top; ++k) {
    const Sender own = highest_sender(first + k * ranks.apart, ranks.block, distance);
    if (own.unit > highest.unit) highest = own;
  }
  send(highest.rank);
  return slowest;
}

std::vector<std::int32_t> cuts_by_work(std::span<const double> work, int stages) {
  const int layers = static_cast<int>(work.size());
  std::vector<std::int32_t> cuts;
  // Fills stage after stage up to `most`; the last gets what is left. Returns the largest work.
  const auto fill = [&](double most) {
    cuts.assign(1, 0);
    double largest = 0.0;
    for (int after = stages - 1, i = 0; after >= 0; --after) {
      const int first = i;
      double sum = 0.0;
      while (i < layers - after && (after == 0 || i == first || sum + work[at(i)] <= most)) {
        sum += work[at(i++)];
      }
      largest = std::max(largest, sum);
      cuts.push_back(i);
    }
    return largest;
  };
  double low = *std::max_element(work.begin(), work.end());
  double high = std::accumulate(work.begin(), work.end(), 0.0);
  for (int k = 0; k < 40; ++k) {
    const double middle = (low + high) / 2.0;
    (fill(middle) <= middle ? high : low) = middle;
  }
  fill(high);
  return cuts;
}

std::vector<std::int32_t> PlanSpaceImpl::cuts_of_software(const LayoutRecord& layout) const {
  if (layout.pp == 1 || layout.vpp > 1 || layout.pp > layers) return {};
  if (by_work[at(layout.strategy)] == 0) return {};
  std::vector<double> work;
  for (const std::int32_t kind : order) work.push_back(size_of(layout.strategy, kind).stage_work);
  return cuts_by_work(work, layout.pp);
}

}  // namespace phaze
