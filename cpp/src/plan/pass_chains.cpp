#include "plan/pass_chains.hpp"

#include <algorithm>

#include "base/numbers.hpp"

namespace phaze {
namespace {

// Sums in another order differ in their last digits; this factor keeps a bound below its exact
// value.
constexpr double kSure = 1.0 - 1e-9;
constexpr std::size_t kMostChains = 24;        // of a shape
constexpr std::size_t kMostShapes = 256;       // of a solver
constexpr std::int64_t kMostPasses = 1 << 16;  // of a step that is simulated for its chain

}  // namespace

PassChain critical_chain(PipelineSchedule schedule, std::span<const PassEvent> events,
                         std::int64_t stages, std::int64_t chunks, std::int64_t micro_batches) {
  PassChain chain;
  if (events.empty()) return chain;
  const std::size_t slots = at(stages * chunks);
  chain.forward.assign(slots, 0.0);
  chain.backward.assign(slots, 0.0);
  const auto place = [&](const PassEvent& e) {
    return chunk_of(schedule, stages, chunks, e.device, e.chunk);
  };
  // Events by direction, position in the model and micro-batch.
  const std::size_t half = slots * at(micro_batches);
  std::vector<std::int32_t> event_at(2 * half, -1);
  const auto cell = [&](bool forward, std::int64_t place_of, std::int64_t micro_batch) {
    return (forward ? 0 : half) + at(place_of * micro_batches + micro_batch);
  };
  std::size_t last = 0;
  for (std::size_t k = 0; k < events.size(); ++k) {
    const PassEvent& e = events[k];
    event_at[cell(e.kind == 0, place(e), e.micro_batch)] = static_cast<std::int32_t>(k);
    if (e.end_s > events[last].end_s) last = k;
  }
  for (auto k = static_cast<std::int64_t>(last); k >= 0;) {
    const PassEvent& e = events[at(k)];
    const bool forward = e.kind == 0;
    (forward ? chain.forward : chain.backward)[at(e.device * chunks + e.chunk)] += 1.0;
    // The pass it waited for: the previous pass on its device, or that of its neighbour in the
    // model.
    std::int64_t waited = k > 0 && events[at(k) - 1].device == e.device ? k - 1 : -1;
    const std::int64_t neighbour = place(e) + (forward ? -1 : 1);
    if (neighbour >= 0 && neighbour < static_cast<std::int64_t>(slots)) {
      const std::int64_t other = event_at[cell(forward, neighbour, e.micro_batch)];
      if (other >= 0 && (waited < 0 || events[at(other)].end_s > events[at(waited)].end_s)) {
        waited = other;
      }
    }
    k = waited;
  }
  return chain;
}

void PassChains::select(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                        std::int64_t micro_batches) {
  const Shape shape{static_cast<std::int64_t>(schedule), stages, chunks, micro_batches};
  if (own_ != nullptr && own_->shape == shape) return;
  own_ = nullptr;
  if (known_.size() >= kMostShapes) known_.clear();
  own_ = &known_[shape];
  own_->shape = shape;
}

bool PassChains::above(std::span<const double> forward_s, std::span<const double> backward_s,
                       double limit_s) noexcept {
  std::vector<PassChain>& chains = own_->chains;
  for (std::size_t k = 0; k < chains.size(); ++k) {
    if (!(chains[k].least_s(forward_s, backward_s) * kSure > limit_s)) continue;
    std::rotate(chains.begin(), chains.begin() + static_cast<std::ptrdiff_t>(k),
                chains.begin() + static_cast<std::ptrdiff_t>(k) + 1);
    return true;
  }
  return false;
}

void PassChains::learn(const PipelineLoads& loads, PipelinePlayer* player) {
  const auto schedule = static_cast<PipelineSchedule>(own_->shape[0]);
  if (++own_->wasted <= own_->learnt) return;
  own_->wasted = 0;
  ++own_->learnt;
  if (loads.stages * loads.chunks * loads.micro_batches > kMostPasses) return;
  const std::vector<PassEvent> events = player->events(schedule, loads);
  PassChain chain =
      critical_chain(schedule, events, loads.stages, loads.chunks, loads.micro_batches);
  if (chain.forward.empty()) return;
  std::vector<PassChain>& chains = own_->chains;
  if (chains.size() >= kMostChains) chains.pop_back();
  chains.insert(chains.begin(), std::move(chain));
}

}  // namespace phaze
