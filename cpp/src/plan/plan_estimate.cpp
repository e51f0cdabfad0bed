// Estimate of a given plan: seconds by part, bytes by term, joules.
#include <algorithm>
#include <array>

#include "base/numbers.hpp"
#include "plan/plan_solver.hpp"

namespace phaze {
namespace {

using Impl = PlanSpaceImpl;

class Estimator {
 public:
  Estimator(const Impl& space, std::size_t layout, const Partition& partition,
            const KindTimes& times, PlanSolver* solver, SharedSteps* shared)
      : space_(space),
        layout_(space.layouts[layout]),
        costs_(space.layout_costs[at(layout_.costs)]),
        partition_(partition),
        times_(times),
        on_(solver->on()),
        step_(solver->step()),
        shared_(*shared->of(layout_.record, partition)),
        block_states_(shared->block_states) {
    block_states_.assign(1, {0.0, 0.0, 0.0});
  }

  PlanEstimate run(double usable_bytes, std::vector<StageEstimate>* stages) {
    SharedStep::Sizes& sizes = shared_.sizes;
    const LayoutRecord& l = layout_.record;
    const std::array<std::int64_t, 3> own{l.dp, sharing_replicas(l), l.zero};
    if (stages != nullptr || sizes.of != own) {
      find_sizes(stages);
      sizes.of = own;
    }
    PlanEstimate found = sizes.fullest;
    for (int k = 0; k < l.pp; ++k) found.max_load_s = std::max(found.max_load_s, load_s(k));
    const StepPlayer::Played played = play();
    found.time_s = played.step_s + played.tail_s + layout_.exchange_s;
    found.energy_j = energy(found.time_s);
    found.status = static_cast<std::int32_t>(
        found.memory_bytes > usable_bytes * kFits ? PlanStatus::kOverMemory : PlanStatus::kOk);
    return found;
  }

  // The parts of the step: the cost of each kind of communication, and of the host, is the decrease
  // of the step time when it becomes free as well.
  PlanParts parts(double time_s, std::span<const KindTimes> free) {
    PlanParts found{};
    double before_s = time_s;
    StepPlayer::Played played{step_without_exchanges_s(), 0.0};
    if (!shared_.played) play_levels(free);
    find_tails();
    played.tail_s = shared_.sizes.tails_s[0];
    const auto exposed = [&] {
      const double step_s = played.step_s + played.tail_s;
      const double lost_s = without_rounding(before_s - step_s, time_s);
      before_s = step_s;
      return lost_s;
    };
    found.data_comm_s = exposed();
    double* const parts[kFreeLevels + 1] = {&found.pipeline_comm_s, &found.expert_comm_s,
                                            &found.context_comm_s, &found.tensor_comm_s,
                                            &found.host_s};
    for (std::size_t n = 0; n < shared_.levels.size(); ++n) {
      const SharedStep::Level& level = shared_.levels[n];
      played = {level.step_s, shared_.sizes.tails_s[n + 1]};
      *parts[level.part] = exposed();
    }
    divide(played, &found);
    return found;
  }

 private:
  template <typename F>
  void for_chunks(int stage, const F& f) const {
    for (int c = 0; c < layout_.record.vpp; ++c) {
      const std::size_t chunk = at(on_.chain_of(stage, c));
      f(c, partition_.cuts[chunk], partition_.cuts[chunk + 1]);
    }
  }

  // Finds the fullest stage, and the bytes that the optimiser moves.
  void find_sizes(std::vector<StageEstimate>* stages) {
    SharedStep::Sizes& sizes = shared_.sizes;
    sizes.fullest = {};
    if (stages != nullptr) stages->clear();
    for (int k = 0; k < layout_.record.pp; ++k) {
      StageEstimate own = stage(k);
      const double bytes = total(own.memory);
      if (bytes > sizes.fullest.memory_bytes) {
        sizes.fullest.memory_bytes = bytes;
        sizes.fullest.memory = own.memory;
        sizes.fullest.fullest = k;
        sizes.fullest.instant = own.instant;
      }
      if (stages == nullptr) continue;
      own.load_s = load_s(k);
      stages->push_back(own);
    }
    if (!shared_.summed) add_layers();
    double moved_bytes = 0.0;
    for (const std::int32_t kind : shared_.kinds) moved_bytes += costs_.step_bytes[at(kind)];
    sizes.moved_bytes = moved_bytes;
    sizes.tails_s.clear();
  }

  double load_s(int k) const {
    const StageRecompute recompute = StageRecompute::of(partition_.variants[at(k)]);
    const PlanSums& sums = on_.sums;
    const double share =
        rounds_of(layout_.record) / static_cast<double>(layout_.record.micro_batches);
    double load_s = 0.0;
    for_chunks(k, [&](int c, int i, int j) {
      load_s += share * (on_.enters_s(k, c, i, j) + on_.leaves_s(k, c, i, j) +
                         sums.forward_s(i, j) + sums.backward_s(recompute, i, j));
    });
    return load_s;
  }

  // Bytes of one stage of a plan, summed over its chunks.
  StageEstimate stage(int k) const {
    const StageRecompute recompute = StageRecompute::of(partition_.variants[at(k)]);
    const PlanSums& sums = on_.sums;
    StageEstimate own{};
    MovingBytes moving{0.0, 0.0, 0.0, 0.0};
    double gather = 0.0;
    for_chunks(k, [&](int, int i, int j) {
      gather = std::max(gather, sums.gather_bytes(i, j));
      moving.live = std::max(moving.live, sums.live_bytes(recompute, i, j));
      moving.once += sums.once_bytes(i, j);
    });
    const StateBytes state = stage_state(k);
    moving.buffers = space_.buffer_bytes(layout_) + gather;
    moving.stash = on_.stash_bytes(partition_, k, recompute);
    if (layout_.record.vpp == 1) {
      const int i = partition_.cuts[at(k)];
      sums.find_layer_peak(recompute, i, partition_.cuts[at(k) + 1], k, &moving);
    }
    const LateGradients late = on_.late_gradients(partition_, k, recompute);
    const PeakBytes peak = sums.peak(moving, late, k);
    own.memory = {state.weights,   state.gradients + peak.gradients,
                  state.optimizer, peak.activations,
                  peak.live,       peak.once,
                  moving.buffers,  peak.lost};
    own.instant = static_cast<std::int32_t>(peak.instant);
    return own;
  }

  // Weights, gradients and optimiser state of a stage: the sum over its layers in order. Most
  // stages have equal blocks alone, whose sums are computed once for all counts.
  StateBytes stage_state(int k) const {
    const int blocks_end = std::min(space_.last_block, space_.layers - (layout_.record.pp > 1));
    StateBytes state{0.0, 0.0, 0.0};
    int blocks = 0;
    bool only_blocks = space_.equal_blocks;
    for_chunks(k, [&](int, int i, int j) {
      int layer = i;
      if (only_blocks && i >= space_.first_block) {
        layer = std::max(i, std::min(j, blocks_end));
        blocks += layer - i;
      }
      if (layer == j) return;
      if (only_blocks) state = blocks_state(blocks);
      only_blocks = false;
      for (; layer < j; ++layer) add(costs_.states[at(kind_at(layer))], &state);
    });
    return only_blocks ? blocks_state(blocks) : state;
  }

  const StateBytes& blocks_state(int blocks) const {
    const StateBytes& block = costs_.states[at(space_.order[at(space_.first_block)])];
    while (block_states_.size() <= at(blocks)) {
      StateBytes next = block_states_.back();
      add(block, &next);
      block_states_.push_back(next);
    }
    return block_states_[at(blocks)];
  }

  static void add(const StateBytes& own, StateBytes* state) noexcept {
    state->weights += own.weights;
    state->gradients += own.gradients;
    state->optimizer += own.optimizer;
  }

  int kind_at(int position) const noexcept { return space_.kind_at(position, layout_.record.pp); }

  // The step as simulated before with the same messages, if it has no exchanges; else null.
  const double* known_step_s() const {
    const auto same = [&](const SharedStep::Sent& own) {
      return own.wrap_s == layout_.wrap_s &&
             std::equal(own.message_s.begin(), own.message_s.end(), costs_.message_s.begin());
    };
    const auto known = std::find_if(shared_.sent.begin(), shared_.sent.end(), same);
    return known == shared_.sent.end() ? nullptr : &known->step_s;
  }

  // Adds the step that was just simulated without exchanges.
  void add_step(double step_s) {
    const auto messages = costs_.message_s.begin();
    shared_.sent.push_back({{messages, messages + layout_.record.pp}, layout_.wrap_s, step_s});
    if (shared_.plain_s.empty()) shared_.own.before_s = before_s(&shared_.plain_s);
  }

  // Passes depend on exchanges from ZeRO stage 2 on.
  StepPlayer::Played play() {
    if (layout_.record.zero >= 2) return step_.play(partition_);
    if (const double* step_s = known_step_s()) return {*step_s, longest_tail_s()};
    const StepPlayer::Played played = step_.play(partition_);
    add_step(played.step_s);
    return played;
  }

  double step_without_exchanges_s() {
    if (const double* step_s = known_step_s()) return *step_s;
    add_step(step_.play_free(partition_, times_, 0, false).step_s);
    return shared_.sent.back().step_s;
  }

  // The longest work after the last pass, see StepPlayer::take_passes.
  double longest_tail_s() const {
    double longest_s = 0.0;
    const int chunks = layout_.record.vpp;
    for (int k = 0; k < layout_.record.pp; ++k) {
      double sync_s = 0.0;
      double step_s = 0.0;
      for_chunks(k, [&](int, int i, int j) {
        sync_s += on_.sums.sync_s(i, j);
        step_s += on_.sums.step_s(i, j);
      });
      longest_s = std::max(
          longest_s, tail_after(sync_s, shared_.plain_s[at(k)] / chunks, costs_.bucket_s, step_s,
                                shared_.own.before_s[at(k)], space_.training.contention));
    }
    return longest_s;
  }

  // Of the last simulated step, by stage: the backward passes of the stages before it; and in
  // `plain_s`, if given, its own.
  std::vector<double> before_s(std::vector<double>* plain_s) const {
    std::vector<double> found;
    double before_s = 0.0;
    for (int k = 0; k < layout_.record.pp; ++k) {
      found.push_back(before_s / layout_.record.vpp);
      double own_s = 0.0;
      for_chunks(k, [&](int, int i, int j) { own_s += step_.passes().plain_s(i, j); });
      if (!bidirectional(layout_.record)) before_s += own_s;
      if (plain_s != nullptr) plain_s->push_back(own_s);
    }
    return found;
  }

  // Simulates the levels of the shared step. Call after the step without exchanges is simulated.
  void play_levels(std::span<const KindTimes> free) {
    const double* last = times_.forward_s;
    const auto play = [&](std::size_t part, const KindTimes& times, std::size_t level) {
      const double step_s = step_.play_free(partition_, times, level, true).step_s;
      shared_.levels.push_back({part, step_s, before_s(nullptr)});
      last = times.forward_s;
    };
    shared_.levels.clear();
    if (layout_.record.pp > 1) play(0, times_, 0);
    for (std::size_t n = 0; n < kFreeLevels; ++n) {
      if (free[n].forward_s != last) play(n + 1, free[n], n + 1);
    }
    find_work();
    shared_.played = true;
  }

  // The longest work after the last pass of each level if exchanges cost nothing.
  void find_tails() {
    std::vector<double>& tails_s = shared_.sizes.tails_s;
    if (!tails_s.empty()) return;
    tails_s.assign(shared_.levels.size() + 1, 0.0);
    for (int k = 0; k < layout_.record.pp; ++k) {
      double step_s = 0.0;
      for_chunks(k, [&](int, int i, int j) { step_s += on_.sums.own_step_s(i, j); });
      for (std::size_t n = 0; n < tails_s.size(); ++n) {
        const SharedStep::Level& level = n == 0 ? shared_.own : shared_.levels[n - 1];
        tails_s[n] = std::max(tails_s[n], step_s - level.before_s[at(k)]);
      }
    }
  }

  // A difference of times that is zero but for rounding is zero, so that no part is negative.
  static double without_rounding(double part_s, double whole_s) noexcept {
    return part_s < 0.0 && part_s > -1e-12 * whole_s ? 0.0 : part_s;
  }

  // The work of the stages in the last simulated step.
  void find_work() {
    const PassSums& sums = step_.passes();
    const int count = layout_.record.pp;
    double mean = 0.0;
    double again = 0.0;
    double most = 0.0;
    for (int k = 0; k < count; ++k) {
      const StageRecompute recompute = StageRecompute::of(partition_.variants[at(k)]);
      double load = 0.0;
      for_chunks(k, [&](int, int i, int j) {
        load += sums.forward_s(i, j) + sums.backward_s(recompute, i, j);
        again += std::max(0.0, sums.backward_s(recompute, i, j) - sums.plain_s(i, j)) / count;
      });
      mean += load / count;
      most = std::max(most, load);
    }
    shared_.mean_s = mean;
    shared_.again_s = again;
    shared_.most_s = most;
  }

  // A step in which only the devices' own work takes time.
  void divide(const StepPlayer::Played& played, PlanParts* parts) const {
    const double m = rounds_of(layout_.record);
    parts->compute_s = m * (shared_.mean_s - shared_.again_s);
    parts->recompute_s = m * shared_.again_s;
    parts->imbalance_s = without_rounding(m * (shared_.most_s - shared_.mean_s), played.step_s);
    parts->bubble_s = without_rounding(played.step_s - m * shared_.most_s, played.step_s);
    parts->optimizer_s = played.tail_s;
  }

  // Sums over all layers, stage by stage.
  void add_layers() {
    for (int k = 0; k < layout_.record.pp; ++k) {
      const StageRecompute recompute = StageRecompute::of(partition_.variants[at(k)]);
      for_chunks(k, [&](int, int i, int j) {
        const int border = on_.sums.border_of(recompute, i, j);
        for (int layer = i; layer < j; ++layer) {
          const std::size_t variant =
              at(layer < border ? recompute.more : recompute.rest) * at(space_.kinds);
          const std::size_t timed = at(space_.order[at(layer)]);
          shared_.passes_j += times_.forward_j[timed] + times_.backward_j[variant + timed];
          shared_.kinds.push_back(kind_at(layer));
          const LayerKindRecord& size = space_.size_of(layout_.record.strategy, kind_at(layer));
          shared_.parameters.parameters += size.parameters;
          shared_.parameters.frozen_parameters += size.frozen_parameters;
          shared_.parameters.packed_parameters += size.packed_parameters;
          shared_.parameters.packed_bytes += size.packed_bytes;
        }
      });
    }
    shared_.summed = true;
  }

  // Energy of operators on the chip and static power, the optimiser's HBM traffic, and the bytes
  // that devices send one another, counted as a ring sends them; at most what the chips' power
  // limit supplies.
  double energy(double time_s) {
    const LayoutRecord& l = layout_.record;
    const StrategyRecord& s = space_.strategies[at(l.strategy)];
    const auto m = static_cast<double>(l.micro_batches);
    const double inner = static_cast<double>(s.tp * s.cp) * static_cast<double>(l.dp);
    const TrainingRecord& t = space_.training;
    const LayerKindRecord& held = shared_.parameters;
    const double share = (costs_.shards - 1.0) / costs_.shards;
    const double trained = held.parameters - held.frozen_parameters;
    const double gathered = l.zero == 3 ? held.parameters * mean_weight_bytes(held, t.gather_bytes)
                                        : trained * t.gather_bytes;
    const double gradients = trained * t.gradient_bytes * share;
    const double weights = gathered * share;
    double synced = 2.0 * gradients;
    if (l.zero == 1) synced = gradients + weights;
    if (l.zero >= 2) synced = m * gradients + (l.zero == 3 ? 2.0 * m : 1.0) * weights;
    const double among = 2.0 * (costs_.copies - 1.0) / costs_.copies;  // groups that share state
    synced += among * trained * t.gradient_bytes / costs_.shards;
    const double hops = l.pp > 1 ? places_of(l) - 1 : 0.0;
    const double sent = inner * m * (s.sent_bytes + 2.0 * hops * s.message_bytes) + inner * synced;
    const double device_s = time_s * inner * l.pp;
    const double drawn_j = inner * rounds_of(l) * shared_.passes_j +
                           inner * shared_.sizes.moved_bytes * t.hbm_byte_j +
                           sent * t.network_byte_j + times_.static_w * device_s;
    return std::min(drawn_j, times_.limit_w * device_s);
  }

  const Impl& space_;
  const PricedLayout& layout_;
  const LayoutCosts& costs_;
  const Partition& partition_;
  const KindTimes& times_;
  const LayoutOnChip& on_;
  StepPlayer& step_;
  SharedStep& shared_;
  std::vector<StateBytes>& block_states_;
};

}  // namespace

PlanEstimate estimate_plan(const PlanSpaceImpl& space, std::size_t layout,
                           const Partition& partition, const KindTimes& times,
                           std::span<const KindTimes> free, double usable_bytes,
                           std::vector<StageEstimate>* stages, PlanSolver* solver,
                           SharedSteps* shared) {
  if (!solver->on().started(space, layout, times)) solver->start(space, layout, times);
  Estimator estimator(space, layout, partition, times, solver, shared);
  PlanEstimate found = estimator.run(usable_bytes, stages);
  if (free.size() == kFreeLevels) found.parts = estimator.parts(found.time_s, free);
  return found;
}

}  // namespace phaze
