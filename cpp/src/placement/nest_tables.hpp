// What a stage of given layers takes, tabulated for every stage that there can be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phaze/nest.hpp"

namespace phaze {

// Stages are pairs: layers i up to j, j not included. Pairs of one i lie side by side.
class NestTables {
 public:
  // Messages are priced for the levels marked in `tiers`, bit l for level l.
  NestTables(const NestNetwork& network, const NestLayers& layers, const NestRules& rules,
             std::uint32_t tiers);

  [[nodiscard]] int layers() const noexcept { return count_; }

  // Position of the pair (i, i + 1); that of (i, j) is j - i - 1 further on.
  [[nodiscard]] std::size_t row(int i) const noexcept {
    const auto n = static_cast<std::size_t>(count_);
    const auto k = static_cast<std::size_t>(i);
    return k * (2 * n - k + 1) / 2;
  }

  [[nodiscard]] const double* forward(int tier, int i) const noexcept {
    return forward_[static_cast<std::size_t>(tier)].data() + row(i);
  }
  // With the layers run again where that is asked for.
  [[nodiscard]] const double* backward(int tier, int i) const noexcept {
    return backward_[static_cast<std::size_t>(tier)].data() + row(i);
  }
  // Of the last stage, which never runs its layers again.
  [[nodiscard]] double last_backward(int i) const noexcept {
    return last_backward_[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] const double* held(int i) const noexcept { return held_.data() + row(i); }
  [[nodiscard]] const double* stash(int i) const noexcept { return stash_.data() + row(i); }
  // Of layers 0 up to j.
  [[nodiscard]] double weights(int j) const noexcept {
    return weights_[static_cast<std::size_t>(j)];
  }

 private:
  void fill_memory(const NestLayers& layers, const NestRules& rules);
  void fill_forward(const NestNetwork& network, const NestLayers& layers, int tier);
  void fill_backward(const NestNetwork& network, const NestLayers& layers, int tier, bool again);

  int count_;
  std::vector<std::vector<std::int32_t>> edges_from_;  // edges out of each layer
  std::vector<std::vector<std::int32_t>> edges_to_;    // edges into each layer
  std::vector<std::vector<double>> forward_;
  std::vector<std::vector<double>> backward_;
  std::vector<double> last_backward_;
  std::vector<double> held_;   // states and activations
  std::vector<double> stash_;  // for every stage that follows
  std::vector<double> weights_;
};

}  // namespace phaze
