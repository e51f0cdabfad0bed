// What a step takes by a given plan: seconds by part, bytes by term, joules.
#include <algorithm>
#include <limits>

#include "placement/plan_solver.hpp"

namespace phaze {
namespace {

using Impl = PlanSpaceImpl;

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

// One stage of a plan, summed over its chunks.
struct StageSum {
  double load_s = 0.0;      // messages included
  double messages_s = 0.0;  // of those, messages
  double again_s = 0.0;     // of those, recomputation
  double fetched_s = 0.0;   // of those, waiting for weights and gradients under ZeRO
  double optimizer_s = 0.0;
  MemoryTerms memory{};
};

class Estimator {
 public:
  Estimator(const Impl& space, std::size_t row, const Partition& partition, const KindTimes& times,
            PlanSolver* solver)
      : space_(space),
        row_(space.rows[row]),
        frame_(space.frames[at(row_.frame)]),
        partition_(partition),
        times_(times),
        solver_(*solver) {}

  PlanEstimate run(double room_bytes, std::vector<StageEstimate>* stages) {
    const int count = row_.layout.stages;
    std::vector<StageSum> sums(at(count));
    PlanEstimate found{};
    double mean = 0.0;
    double messages = 0.0;
    double again = 0.0;
    double fetched = 0.0;
    for (int k = 0; k < count; ++k) {
      sums[at(k)] = stage(k);
      const StageSum& own = sums[at(k)];
      mean += own.load_s / count;
      messages += own.messages_s / count;
      again += own.again_s / count;
      fetched += own.fetched_s / count;
      found.max_load_s = std::max(found.max_load_s, own.load_s);
      const double bytes = total(own.memory);
      if (bytes > found.memory_bytes) {
        found.memory_bytes = bytes;
        found.memory = own.memory;
        found.fullest = k;
      }
    }
    const auto [step_s, tail_s, optimizer_s] = clock();
    const auto m = static_cast<double>(row_.layout.microbatches);
    found.time_s = step_s + tail_s + row_.exchange_s;
    found.parts = {m * (mean - messages - again - fetched),
                   m * again,
                   m * messages,
                   m * (found.max_load_s - mean),
                   step_s - m * found.max_load_s,
                   m * fetched + tail_s - optimizer_s + row_.exchange_s,
                   optimizer_s};
    found.energy_j = energy(found.time_s);
    found.status = static_cast<std::int32_t>(
        found.memory_bytes > room_bytes * kFits ? PlanStatus::kOverMemory : PlanStatus::kOk);
    if (stages != nullptr) {
      stages->clear();
      for (const StageSum& own : sums) stages->push_back({own.load_s, own.memory});
    }
    return found;
  }

 private:
  template <typename F>
  void for_chunks(int stage, const F& f) const {
    for (int c = 0; c < row_.layout.virtual_stages; ++c) {
      const std::size_t chunk = at(solver_.chain_of(stage, c));
      f(c, partition_.cuts[chunk], partition_.cuts[chunk + 1]);
    }
  }

  StageSum stage(int k) const {
    const StageRecompute way = StageRecompute::of(partition_.variants[at(k)]);
    const PlanSums& sums = solver_.sums();
    const LayoutRecord& l = row_.layout;
    StageSum own;
    MovingBytes moving{0.0, 0.0, 0.0, 0.0};
    double gather = 0.0;
    StateBytes state{0.0, 0.0, 0.0};
    for_chunks(k, [&](int c, int i, int j) {
      const double sent = solver_.enters_s(k, c, i, j) + solver_.leaves_s(k, c, i, j);
      own.messages_s += sent;
      own.load_s += sent + sums.forward_s(i, j) + sums.backward_s(way, i, j);
      gather = std::max(gather, sums.gather_bytes(i, j));
      moving.stash += sums.stash_bytes(way, i, j);
      moving.live = std::max(moving.live, sums.live_bytes(way, i, j));
      moving.once += sums.once_bytes(i, j);
      const int border = sums.border_of(way, i, j);
      for (int layer = i; layer < j; ++layer) {
        add_layer(layer, layer < border ? way.more : way.rest, &own, &state);
      }
    });
    moving.buffers = space_.buffer_bytes(row_) + gather;
    own.memory = terms(state, moving, k);
    return own;
  }

  void add_layer(int position, int v, StageSum* own, StateBytes* state) const {
    const LayoutRecord& l = row_.layout;
    const int kind = space_.kind_at(position, l.stages);
    const LayerKindRecord& size = space_.size_of(l.strategy, kind);
    const std::size_t timed = at(space_.order[at(position)]);
    const double shared =
        shared_parameters(size.parameters, size.expert_parameters, frame_.shards,
                          static_cast<double>(space_.strategies[at(l.strategy)].expert_parallel));
    const StateBytes bytes = state_bytes(space_.training, l.zero, size.parameters, shared);
    state->weights += bytes.weights;
    state->gradients += bytes.gradients;
    state->optimizer += bytes.optimizer;
    own->optimizer_s += frame_.step_bytes[at(kind)] / times_.hbm_bytes_per_s;
    const double plain = times_.plain_s[timed];
    const double chosen = times_.backward_s[at(v) * at(space_.kinds) + timed];
    double fetch_s = 0.0;
    double back_s = 0.0;
    if (l.zero >= 3) fetch_s = frame_.fetch_s[at(kind)];
    if (l.zero >= 2) back_s = frame_.fetch_s[at(kind)] + frame_.sync_s[at(kind)];
    const double forward = times_.forward_s[timed];
    own->fetched_s += std::max(0.0, fetch_s - forward) + std::max(0.0, back_s - chosen);
    own->again_s += std::max(0.0, chosen - plain);
  }

  MemoryTerms terms(const StateBytes& state, const MovingBytes& moving, int k) const {
    const LayoutRecord& l = row_.layout;
    const double in_flight = microbatches_in_flight(static_cast<PipelineSchedule>(l.schedule),
                                                    l.stages, k, l.microbatches, l.virtual_stages);
    return {state.weights,   state.gradients,
            state.optimizer, in_flight * moving.stash,
            moving.live,     std::min(in_flight, 1.0) * moving.once,
            moving.buffers,  space_.training.fragmentation * moving_bytes(moving, in_flight)};
  }

  struct Clock {
    double step_s;
    double tail_s;
    double optimizer_s;  // of the stage whose tail is the longest
  };

  Clock clock() {
    const PlanSolver::Played played = solver_.play(partition_);
    return {played.step_s, played.tail_s,
            std::min(played.tail_s, step_bytes_s(played.longest_tail))};
  }

  double step_bytes_s(int stage) const {
    double bytes = 0.0;
    for_chunks(stage, [&](int, int i, int j) {
      for (int layer = i; layer < j; ++layer) {
        bytes += frame_.step_bytes[at(space_.kind_at(layer, row_.layout.stages))];
      }
    });
    return bytes / times_.hbm_bytes_per_s;
  }

  // Operators on the chip and what flows whatever runs, the optimiser's traffic to HBM, and the
  // bytes that devices send one another, as a ring sends them.
  double energy(double time_s) const {
    const LayoutRecord& l = row_.layout;
    const StrategyRecord& s = space_.strategies[at(l.strategy)];
    const auto m = static_cast<double>(l.microbatches);
    const double inner = static_cast<double>(s.tensor_parallel * s.context_parallel) *
                         static_cast<double>(l.data_parallel);
    double passes_j = 0.0;
    double moved = 0.0;
    double held = 0.0;
    for (int k = 0; k < l.stages; ++k) {
      const StageRecompute way = StageRecompute::of(partition_.variants[at(k)]);
      for_chunks(k, [&](int, int i, int j) {
        const int border = solver_.sums().border_of(way, i, j);
        for (int layer = i; layer < j; ++layer) {
          const std::size_t variant = at(layer < border ? way.more : way.rest) * at(space_.kinds);
          const std::size_t timed = at(space_.order[at(layer)]);
          const int kind = space_.kind_at(layer, l.stages);
          passes_j += times_.forward_j[timed] + times_.backward_j[variant + timed];
          moved += frame_.step_bytes[at(kind)];
          held += space_.size_of(l.strategy, kind).parameters;
        }
      });
    }
    const TrainingRecord& t = space_.training;
    const double share = (frame_.shards - 1.0) / frame_.shards;
    const double gradients = held * t.gradient_bytes * share;
    const double weights = held * t.weight_bytes * share;
    double synced = 2.0 * gradients;
    if (l.zero == 1) synced = gradients + weights;
    if (l.zero >= 2) synced = m * gradients + (l.zero == 3 ? 2.0 * m : 1.0) * weights;
    const double hops = l.stages > 1 ? l.stages * l.virtual_stages - 1 : 0.0;
    const double sent = inner * m * (s.sent_bytes + 2.0 * hops * s.message_bytes) + inner * synced;
    return inner * m * passes_j + inner * moved * t.hbm_byte_j + sent * t.network_byte_j +
           times_.static_w * time_s * inner * l.stages;
  }

  const Impl& space_;
  const PlanRow& row_;
  const PlanFrame& frame_;
  const Partition& partition_;
  const KindTimes& times_;
  PlanSolver& solver_;
};

}  // namespace

PlanEstimate estimate_plan(const PlanSpaceImpl& space, std::size_t row, const Partition& partition,
                           const KindTimes& times, double room_bytes,
                           std::vector<StageEstimate>* stages, PlanSolver* solver) {
  if (!solver->started(space, row, times)) solver->start(space, row, times);
  return Estimator(space, row, partition, times, solver).run(room_bytes, stages);
}

}  // namespace phaze
