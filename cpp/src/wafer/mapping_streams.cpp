// What stages that stream at once take from one another.
#include <algorithm>

#include "phaze/mapping.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };

}  // namespace

// Weights and gradients of what stands before the blocks, of one block, and of what stands behind.
std::array<Mapping::Moved, 3> Mapping::moved_weights() const noexcept {
  std::array<Moved, 3> found{};
  const double all = rules_.weight_bytes + rules_.gradient_bytes + rules_.state_bytes;
  for (int i = 0; i < ops(); ++i) {
    const auto mode = static_cast<WeightMode>(op_mappings_[kAt(i)].mode);
    const double kept = nodes_[kAt(i)].stream_bytes;  // off the wafer, of a die's parameters
    Moved& part = found[kAt(ops_[kAt(i)].part)];
    if (mode == WeightMode::kStream) {
      part.taken_bytes += 2.0 * rules_.weight_bytes * (kept / all);
      part.given_bytes += rules_.gradient_bytes * (kept / all);
    } else if (mode == WeightMode::kOffload) {
      part.given_bytes += rules_.gradient_bytes * (kept / (all - rules_.weight_bytes));
    }
  }
  return found;
}

// What the others stream passes a stage's links once in each micro-batch, and its collectives wait
// for it. Activations that are moved off the wafer (`offloaded`, of each stage) come and go.
void Mapping::charge_foreign(std::span<double> loads_s,
                             std::span<const double> offloaded) const noexcept {
  if (foreign_s_.empty()) return;
  const std::array<Moved, 3> parts = moved_weights();
  for (std::size_t j = 0; j < loads_s.size(); ++j) {
    const int stage = static_cast<int>(j);
    double taken = blocks_[j] * parts[1].taken_bytes + offloaded[j];
    double given = blocks_[j] * parts[1].given_bytes + offloaded[j];
    for (const std::size_t end : {std::size_t{0}, std::size_t{2}}) {
      if (!(end == 0 ? is_first(stage) : is_last(stage))) continue;
      taken += parts[end].taken_bytes;
      given += parts[end].given_bytes;
    }
    const double less = std::min(taken, given), rest = std::max(taken, given) - less;
    if (!(rest + less > 0.0)) continue;
    for (std::size_t k = 0; k < loads_s.size(); ++k) {
      const double* cost = &foreign_s_[(k * loads_s.size() + j) * 2];
      loads_s[k] += rest * cost[0] + less * cost[1];
    }
  }
}

}  // namespace phaze
