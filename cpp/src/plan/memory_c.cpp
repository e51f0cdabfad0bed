// The memory rule as plain C functions.
#include "phaze/memory_c.hpp"

#include "plan/memory_rule.hpp"

using namespace phaze;

double phaze_in_flight(std::int64_t schedule, std::int64_t stages, std::int64_t stage,
                       std::int64_t micro_batches, std::int64_t vpp) noexcept {
  return micro_batches_in_flight(static_cast<PipelineSchedule>(schedule), stages, stage,
                                 micro_batches, vpp);
}

void phaze_state_bytes(double parameters, double experts, double frozen, double frozen_experts,
                       double packed, double packed_bytes, double more_state, double copy_bytes,
                       double shards, double ep, std::int64_t zero, double weight_bytes,
                       double gradient_bytes, double optimizer_bytes, double* out) noexcept {
  const int stage = static_cast<int>(zero);
  LayerKindRecord size{};
  size.parameters = parameters;
  size.expert_parameters = experts;
  size.frozen_parameters = frozen;
  size.frozen_experts = frozen_experts;
  size.packed_parameters = packed;
  size.packed_bytes = packed_bytes;
  size.more_state_bytes = more_state;
  const LayerParameters p = layer_parameters(size, shards, ep);
  TrainingRecord training{};
  training.weight_bytes = weight_bytes;
  training.gradient_bytes = gradient_bytes;
  training.state_bytes = optimizer_bytes;
  const StateBytes state = state_bytes(training, stage, size, p);
  out[0] = state.weights;
  out[1] = state.gradients;
  out[2] = state.optimizer;
  out[3] = copied_weights(copy_bytes, stage, p.all, p.shared);
}

double phaze_mean_weight_bytes(double parameters, double packed, double packed_bytes,
                               double weight_bytes) noexcept {
  LayerKindRecord size{};
  size.parameters = parameters;
  size.packed_parameters = packed;
  size.packed_bytes = packed_bytes;
  return mean_weight_bytes(size, weight_bytes);
}

double phaze_shared_parameters(double parameters, double experts, double shards,
                               double ep) noexcept {
  return shared_parameters(parameters, experts, shards, ep);
}

double phaze_unsharded_bytes(std::int64_t zero, double parameters, double trained,
                             double weight_bytes, double gradient_bytes, double shards,
                             double layers) noexcept {
  return unsharded_bytes(static_cast<int>(zero), parameters, trained, weight_bytes, gradient_bytes,
                         shards, layers);
}

std::int64_t phaze_peak(double stash, double live, double once, double buffers, double late,
                        double late_last, double late_first, double first_stash, double in_flight,
                        double micro_batches, double share, std::int64_t by_layer, double freed,
                        double later, double* out) noexcept {
  const PeakBytes peak =
      peak_bytes({stash, live, once, buffers, by_layer != 0, freed, later},
                 {late, late_last, late_first, first_stash}, in_flight, micro_batches, share);
  out[0] = peak.activations;
  out[1] = peak.live;
  out[2] = peak.once;
  out[3] = peak.gradients;
  out[4] = peak.total;
  return static_cast<std::int64_t>(peak.instant);
}
