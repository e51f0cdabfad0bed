#include "placement/pass_sums.hpp"

#include "placement/pipeline_clock.hpp"

namespace phaze {

void PassSums::build(const PlanSpaceImpl& space, const PlanRow& row, const PlanFrame& frame,
                     const KindTimes& times, bool free_data) {
  const int zero = free_data ? 0 : row.layout.zero;
  const double contention = space.training.contention;
  const auto layers = at(space.layers);
  const auto kinds = at(space.kinds);
  first_block_ = space.first_block;
  variants_ = space.strategies[at(row.layout.strategy)].variants;
  before_.resize(layers + 1);
  backward_.resize(at(variants_) * (layers + 1));
  Seconds sum{};
  before_[0] = sum;
  for (std::size_t n = 0; n < layers; ++n) {
    const std::size_t timed = at(space.order[n]);
    Seconds own{times.forward_s[timed], times.plain_s[timed], times.weight_grad_s[timed], 0.0};
    if (zero >= 2) {
      // Weights are fetched while the layer before is at work; gradients that are not kept whole
      // go with every micro-batch.
      const std::size_t kind = at(space.kind_at(static_cast<int>(n), row.layout.stages));
      if (zero >= 3) own.forward = beside(own.forward, frame.fetch_s[kind], contention);
      own.plain = beside(own.plain, frame.fetch_s[kind] + frame.each_s[kind], contention);
    }
    sum.forward += own.forward;
    sum.plain += own.plain;
    sum.weight_grad += own.weight_grad;
    before_[n + 1] = sum;
  }
  for (int v = 0; v < variants_; ++v) {
    const double* own_s = times.backward_s + at(v) * kinds;
    double* backward = &backward_[at(v) * (layers + 1)];
    double total_s = backward[0] = 0.0;
    for (std::size_t n = 0; n < layers; ++n) {
      double b = own_s[space.order[n]];
      if (zero >= 2) {
        const std::size_t kind = at(space.kind_at(static_cast<int>(n), row.layout.stages));
        b = beside(b, frame.fetch_s[kind] + frame.each_s[kind], contention);
      }
      backward[n + 1] = total_s += b;
    }
  }
}

}  // namespace phaze
