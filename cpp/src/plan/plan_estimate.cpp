// Estimate of a given plan: seconds by part, bytes by term, joules.
#include <algorithm>

#include "base/numbers.hpp"
#include "plan/plan_solver.hpp"

namespace phaze {
namespace {

using Impl = PlanSpaceImpl;

class Estimator {
 public:
  Estimator(const Impl& space, std::size_t layout, const Partition& partition,
            const KindTimes& times, PlanSolver* solver)
      : space_(space),
        layout_(space.layouts[layout]),
        costs_(space.layout_costs[at(layout_.costs)]),
        partition_(partition),
        times_(times),
        on_(solver->on()),
        step_(solver->step()),
        states_(solver->states()) {}

  PlanEstimate run(double usable_bytes, std::vector<StageEstimate>* stages) {
    PlanEstimate found{};
    if (stages != nullptr) stages->clear();
    find_states();
    for (int k = 0; k < layout_.record.pp; ++k) {
      const StageEstimate own = stage(k);
      found.max_load_s = std::max(found.max_load_s, own.load_s);
      const double bytes = total(own.memory);
      if (bytes > found.memory_bytes) {
        found.memory_bytes = bytes;
        found.memory = own.memory;
        found.fullest = k;
        found.instant = own.instant;
      }
      if (stages != nullptr) stages->push_back(own);
    }
    const StepPlayer::Played played = step_.play(partition_);
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
    StepPlayer::Played played{};
    double before_s = time_s;
    const double* last = nullptr;
    std::size_t level = 0;
    const auto exposed = [&](bool changes, const KindTimes& times, bool free_messages) {
      if (!changes) return 0.0;
      played = step_.play_free(partition_, times, level, free_messages);
      const double step_s = played.step_s + played.tail_s;
      const double lost_s = without_rounding(before_s - step_s, time_s);
      before_s = step_s;
      last = times.forward_s;
      return lost_s;
    };
    const bool many = layout_.record.pp > 1;
    found.data_comm_s = exposed(true, times_, false);
    found.pipeline_comm_s = exposed(many, times_, true);
    double* const parts[kFreeLevels] = {&found.expert_comm_s, &found.context_comm_s,
                                        &found.tensor_comm_s, &found.host_s};
    for (std::size_t n = 0; n < kFreeLevels; ++n) {
      level = n + 1;
      *parts[n] = exposed(free[n].forward_s != last, free[n], true);
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

  // One stage of a plan, summed over its chunks.
  StageEstimate stage(int k) const {
    const StageRecompute recompute = StageRecompute::of(partition_.variants[at(k)]);
    const PlanSums& sums = on_.sums;
    const double share =
        rounds_of(layout_.record) / static_cast<double>(layout_.record.micro_batches);
    StageEstimate own{};
    MovingBytes moving{0.0, 0.0, 0.0, 0.0};
    double gather = 0.0;
    StateBytes state{0.0, 0.0, 0.0};
    for_chunks(k, [&](int c, int i, int j) {
      own.load_s += share * (on_.enters_s(k, c, i, j) + on_.leaves_s(k, c, i, j) +
                             sums.forward_s(i, j) + sums.backward_s(recompute, i, j));
      gather = std::max(gather, sums.gather_bytes(i, j));
      moving.live = std::max(moving.live, sums.live_bytes(recompute, i, j));
      moving.once += sums.once_bytes(i, j);
      for (int layer = i; layer < j; ++layer) add_state(layer, &state);
    });
    moving.buffers = space_.buffer_bytes(layout_) + gather;
    moving.stash = on_.stash_bytes(partition_, k, recompute);
    const LateGradients late = on_.late_gradients(partition_, k, recompute);
    const PeakBytes peak = sums.peak(moving, late, k);
    own.memory = {state.weights,   state.gradients + peak.gradients,
                  state.optimizer, peak.activations,
                  peak.live,       peak.once,
                  moving.buffers,  peak.lost};
    own.instant = static_cast<std::int32_t>(peak.instant);
    return own;
  }

  // Weights, gradients and optimiser state of a layer, by kind.
  void find_states() {
    const LayoutRecord& l = layout_.record;
    const auto experts = static_cast<double>(space_.strategies[at(l.strategy)].ep);
    states_.resize(at(space_.kinds) + 1);
    for (int kind = 0; kind <= space_.kinds; ++kind) {
      const LayerKindRecord& size = space_.size_of(l.strategy, kind);
      const double shared =
          shared_parameters(size.parameters, size.expert_parameters, costs_.shards, experts);
      StateBytes own = state_bytes(space_.training, l.zero, size.parameters, shared);
      own.weights += copied_weights(size.copy_bytes, l.zero, size.parameters, shared);
      if (space_.training.late_gradients != 0) own.gradients = 0.0;
      states_[at(kind)] = own;
    }
  }

  void add_state(int position, StateBytes* state) const {
    const StateBytes& own = states_[at(space_.kind_at(position, layout_.record.pp))];
    state->weights += own.weights;
    state->gradients += own.gradients;
    state->optimizer += own.optimizer;
  }

  // A difference of times that is zero but for rounding is zero, so that no part is negative.
  static double without_rounding(double part_s, double whole_s) noexcept {
    return part_s < 0.0 && part_s > -1e-12 * whole_s ? 0.0 : part_s;
  }

  // A step in which only the devices' own work takes time.
  void divide(const StepPlayer::Played& played, PlanParts* parts) const {
    const PassSums& sums = step_.passes();
    const int count = layout_.record.pp;
    const double m = rounds_of(layout_.record);
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
    parts->compute_s = m * (mean - again);
    parts->recompute_s = m * again;
    parts->imbalance_s = without_rounding(m * (most - mean), played.step_s);
    parts->bubble_s = without_rounding(played.step_s - m * most, played.step_s);
    parts->optimizer_s = played.tail_s;
  }

  // Energy of operators on the chip and static power, the optimiser's HBM traffic, and the bytes
  // that devices send one another, counted as a ring sends them.
  double energy(double time_s) const {
    const LayoutRecord& l = layout_.record;
    const StrategyRecord& s = space_.strategies[at(l.strategy)];
    const auto m = static_cast<double>(l.micro_batches);
    const double inner = static_cast<double>(s.tp * s.cp) * static_cast<double>(l.dp);
    double passes_j = 0.0;
    double moved = 0.0;
    double held = 0.0;
    for (int k = 0; k < l.pp; ++k) {
      const StageRecompute recompute = StageRecompute::of(partition_.variants[at(k)]);
      for_chunks(k, [&](int, int i, int j) {
        const int border = on_.sums.border_of(recompute, i, j);
        for (int layer = i; layer < j; ++layer) {
          const std::size_t variant =
              at(layer < border ? recompute.more : recompute.rest) * at(space_.kinds);
          const std::size_t timed = at(space_.order[at(layer)]);
          const int kind = space_.kind_at(layer, l.pp);
          passes_j += times_.forward_j[timed] + times_.backward_j[variant + timed];
          moved += costs_.step_bytes[at(kind)];
          held += space_.size_of(l.strategy, kind).parameters;
        }
      });
    }
    const TrainingRecord& t = space_.training;
    const double share = (costs_.shards - 1.0) / costs_.shards;
    const double gradients = held * t.gradient_bytes * share;
    const double weights = held * t.gather_bytes * share;
    double synced = 2.0 * gradients;
    if (l.zero == 1) synced = gradients + weights;
    if (l.zero >= 2) synced = m * gradients + (l.zero == 3 ? 2.0 * m : 1.0) * weights;
    const double among = 2.0 * (costs_.copies - 1.0) / costs_.copies;  // groups that share state
    synced += among * held * t.gradient_bytes / costs_.shards;
    const double hops = l.pp > 1 ? places_of(l) - 1 : 0.0;
    const double sent = inner * m * (s.sent_bytes + 2.0 * hops * s.message_bytes) + inner * synced;
    return inner * rounds_of(l) * passes_j + inner * moved * t.hbm_byte_j +
           sent * t.network_byte_j + times_.static_w * time_s * inner * l.pp;
  }

  const Impl& space_;
  const PricedLayout& layout_;
  const LayoutCosts& costs_;
  const Partition& partition_;
  const KindTimes& times_;
  const LayoutOnChip& on_;
  StepPlayer& step_;
  std::vector<StateBytes>& states_;
};

}  // namespace

PlanEstimate estimate_plan(const PlanSpaceImpl& space, std::size_t layout,
                           const Partition& partition, const KindTimes& times,
                           std::span<const KindTimes> free, double usable_bytes,
                           std::vector<StageEstimate>* stages, PlanSolver* solver) {
  if (!solver->on().started(space, layout, times)) solver->start(space, layout, times);
  Estimator estimator(space, layout, partition, times, solver);
  PlanEstimate found = estimator.run(usable_bytes, stages);
  if (free.size() == kFreeLevels) found.parts = estimator.parts(found.time_s, free);
  return found;
}

}  // namespace phaze
