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

enum Kind : std::int32_t { kForward, kBackward, kInputGrad, kWeightGrad, kPair };  // of PassEvent

// The place of each slot in the model, from 1, and the slot at each place; DualPipe has two models.
struct SlotPlaces {
  std::vector<std::int64_t> place_of, slot_at;  // `slots`: there is none
};

SlotPlaces places_of_slots(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks) {
  const std::int64_t slots = stages * chunks;
  const bool two_ways = schedule == PipelineSchedule::kDualPipe;
  SlotPlaces found{std::vector<std::int64_t>(at(slots)),
                   std::vector<std::int64_t>(at(slots) + 2, slots)};
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t model = two_ways ? slot % chunks * stages : 0;
    found.place_of[at(slot)] =
        1 + model + chunk_of(schedule, stages, chunks, slot / chunks, slot % chunks);
    found.slot_at[at(found.place_of[at(slot)])] = slot;
  }
  return found;
}

}  // namespace

PassChain critical_chain(PipelineSchedule schedule, std::span<const PassEvent> events,
                         std::int64_t stages, std::int64_t chunks, std::int64_t micro_batches) {
  PassChain chain;
  if (events.empty()) return chain;
  const std::size_t slots = at(stages * chunks);
  const auto none = static_cast<std::int64_t>(slots);
  const bool two_ways = schedule == PipelineSchedule::kDualPipe;  // a model in each direction
  chain.counts.assign(slots, {});
  const auto [place_of, slot_at] = places_of_slots(schedule, stages, chunks);
  // Events by direction, slot and micro-batch.
  const std::size_t half = (slots + 1) * at(micro_batches);
  std::vector<std::int32_t> event_at(2 * half, -1);
  const auto cell = [&](bool forward, std::int64_t slot, std::int64_t micro_batch) {
    return (forward ? 0 : half) + at(slot * micro_batches + micro_batch);
  };
  const auto slot_of = [&](const PassEvent& e) { return e.device * chunks + e.chunk; };
  std::size_t last = 0;
  for (std::size_t k = 0; k < events.size(); ++k) {
    const PassEvent& e = events[k];
    const auto own = static_cast<std::int32_t>(k);
    if (e.kind == kForward || e.kind == kPair)
      event_at[cell(true, slot_of(e), e.micro_batch)] = own;
    if (e.kind == kBackward || e.kind == kInputGrad)
      event_at[cell(false, slot_of(e), e.micro_batch)] = own;
    if (e.kind == kPair) event_at[cell(false, slot_of(e) ^ 1, e.other_micro_batch)] = own;
    if (e.end_s > events[last].end_s) last = k;
  }
  for (auto k = static_cast<std::int64_t>(last); k >= 0;) {
    const PassEvent& e = events[at(k)];
    const std::int64_t slot = slot_of(e);
    // The pass it waited for: the previous pass on its device, or that of its neighbour in the
    // model.
    std::int64_t waited = k > 0 && events[at(k) - 1].device == e.device ? k - 1 : -1;
    const auto wait = [&, &place_of = place_of, &slot_at = slot_at](bool forward, std::int64_t of,
                                                                    std::int64_t micro_batch) {
      const std::int64_t place = place_of[at(of)] + (forward ? -1 : 1);
      const bool ends = two_ways && place == (forward ? stages : stages + 1);
      const std::int64_t other =
          event_at[cell(forward, ends ? none : slot_at[at(place)], micro_batch)];
      if (other < 0) return;
      if (waited < 0 || events[at(other)].end_s > events[at(waited)].end_s) waited = other;
    };
    PassChain::Counts& own = chain.counts[at(slot)];
    if (e.kind == kForward || e.kind == kPair) {
      own.forward += 1.0;
      wait(true, slot, e.micro_batch);
    }
    if (e.kind == kBackward || e.kind == kInputGrad) {
      (e.kind == kBackward ? own.backward : own.input) += 1.0;
      wait(false, slot, e.micro_batch);
    }
    if (e.kind == kWeightGrad) own.weight += 1.0;
    if (e.kind == kPair) {
      chain.counts[at(slot ^ 1)].backward += 1.0;
      wait(false, slot ^ 1, e.other_micro_batch);
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

bool PassChains::above(const PipelineLoads& loads, double limit_s) noexcept {
  std::vector<PassChain>& chains = own_->chains;
  for (std::size_t k = 0; k < chains.size(); ++k) {
    if (!(chains[k].least_s(loads) * kSure > limit_s)) continue;
    std::rotate(chains.begin(), chains.begin() + static_cast<std::ptrdiff_t>(k),
                chains.begin() + static_cast<std::ptrdiff_t>(k) + 1);
    return true;
  }
  return false;
}

const PassChain* PassChains::learn(const PipelineLoads& loads, PipelinePlayer* player) {
  const auto schedule = static_cast<PipelineSchedule>(own_->shape[0]);
  if (++own_->wasted <= own_->learnt) return nullptr;
  own_->wasted = 0;
  ++own_->learnt;
  if (loads.stages * loads.chunks * loads.micro_batches > kMostPasses) return nullptr;
  const std::vector<PassEvent> events = player->events(schedule, loads);
  PassChain chain =
      critical_chain(schedule, events, loads.stages, loads.chunks, loads.micro_batches);
  if (chain.counts.empty()) return nullptr;
  std::vector<PassChain>& chains = own_->chains;
  if (chains.size() >= kMostChains) chains.pop_back();
  return &*chains.insert(chains.begin(), std::move(chain));
}

}  // namespace phaze
