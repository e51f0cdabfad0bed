#include "plan/pass_chains.hpp"

#include <algorithm>

#include "base/numbers.hpp"

namespace phaze {
namespace {

// Sums in another order differ in their last digits; this factor keeps a bound below its exact
// value.
constexpr double kSure = 1.0 - 1e-9;
constexpr std::size_t kMostChains = 24;        // limit for a shape
constexpr std::size_t kMostShapes = 256;       // limit for a solver
constexpr std::size_t kMostOwn = 512;          // assignments of a shape that have their own chain
constexpr std::int64_t kMostPasses = 1 << 16;  // limit for steps that are simulated for their chain

}  // namespace

PassChain critical_chain(PipelineSchedule schedule, const PipelineLoads& loads,
                         PipelinePlayer* player) {
  PassChain chain;
  const std::vector<double> passes = player->critical_passes(schedule, loads);
  const std::size_t slots = passes.size() / kPassKinds;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const auto count = [&](std::size_t kind, std::size_t of) { return passes[kind * slots + of]; };
    const double pairs = count(4, slot);
    const double other = has_two_chunks(schedule) ? count(4, slot ^ 1U) : 0.0;
    chain.counts.push_back(
        {count(0, slot) + pairs, count(1, slot) + other, count(2, slot), count(3, slot)});
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

double PassChains::OwnChain::least_s(const PipelineLoads& loads) const noexcept {
  double sum = 0.0;
  for (std::size_t k = 0; 2 * k < counts.size(); ++k) {
    sum += counts[2 * k] * loads.forward_s[k] + counts[2 * k + 1] * loads.backward_s[k];
  }
  return sum;
}

bool PassChains::above(const PipelineLoads& loads, double limit_s, std::uint64_t assignment) {
  if (assignment != 0) {
    const auto own = own_->own.find(assignment);
    if (own != own_->own.end() && !own->second.counts.empty()) {
      return own->second.least_s(loads) * kSure > limit_s;
    }
  }
  std::vector<PassChain>& chains = own_->chains;
  for (std::size_t k = 0; k < chains.size(); ++k) {
    if (!(chains[k].least_s(loads) * kSure > limit_s)) continue;
    std::rotate(chains.begin(), chains.begin() + static_cast<std::ptrdiff_t>(k),
                chains.begin() + static_cast<std::ptrdiff_t>(k) + 1);
    return true;
  }
  return false;
}

const PassChain* PassChains::learn(const PipelineLoads& loads, PipelinePlayer* player,
                                   std::uint64_t assignment) {
  const auto schedule = static_cast<PipelineSchedule>(own_->shape[0]);
  OwnChain* own = nullptr;
  if (assignment != 0) {
    if (own_->own.size() >= kMostOwn) own_->own.clear();
    own = &own_->own[assignment];
    if (++own->wasted <= own->learnt + 1) own = nullptr;
  }
  const bool often = ++own_->wasted > own_->learnt;
  if (!often && own == nullptr) return nullptr;
  if (loads.stages * loads.chunks * loads.micro_batches > kMostPasses) return nullptr;
  PassChain chain = critical_chain(schedule, loads, player);
  if (own != nullptr) {
    ++own->learnt;
    own->wasted = 0;
    own->counts.clear();
    for (const PassChain::Counts& counts : chain.counts) {
      own->counts.push_back(static_cast<std::uint16_t>(counts.forward));
      own->counts.push_back(static_cast<std::uint16_t>(counts.backward));
    }
  }
  if (!often) return nullptr;
  own_->wasted = 0;
  ++own_->learnt;
  if (chain.counts.empty()) return nullptr;
  std::vector<PassChain>& chains = own_->chains;
  if (chains.size() >= kMostChains) chains.pop_back();
  return &*chains.insert(chains.begin(), std::move(chain));
}

}  // namespace phaze
