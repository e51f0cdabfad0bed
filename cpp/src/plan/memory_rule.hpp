// The memory rule: micro-batches in flight, ZeRO's shards and the peak bytes of a stage. Numba's
// loop over stages (phaze_fast/memory/kernel.py) calls it through memory_c.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "phaze/plan.hpp"

namespace phaze {

inline constexpr double kFits = 1.0 + 1e-12;  // tolerance for the rounding of sums of bytes

// Micro-batches in flight at the peak of a stage.
inline double micro_batches_in_flight(PipelineSchedule schedule, std::int64_t stages,
                                      std::int64_t stage, std::int64_t micro_batches,
                                      std::int64_t vpp) noexcept {
  switch (schedule) {
    case PipelineSchedule::kGpipe:
      return static_cast<double>(micro_batches);
    case PipelineSchedule::kInterleaved: {  // counted in chunks, each 1 / vpp of the stage
      const std::int64_t chunks = 2 * (stages - stage - 1) + (vpp - 1) * stages + 1;
      const auto each = static_cast<double>(vpp);
      return std::min(static_cast<double>(chunks), static_cast<double>(micro_batches) * each) /
             each;
    }
    case PipelineSchedule::kZeroBubbleH1:  // activations are stored until the weight gradient
    case PipelineSchedule::kZeroBubbleV:
      return static_cast<double>(std::min(micro_batches, stages));
    case PipelineSchedule::kZeroBubbleH2:
      return static_cast<double>(std::min(micro_batches, 2 * stages - 1));
    case PipelineSchedule::kDualPipe:
      return static_cast<double>(stages + 1) / 2.0;
    case PipelineSchedule::kDualPipeV:
      return static_cast<double>(2 * stages + 1) / 2.0;
    case PipelineSchedule::kOneForwardOneBackward:
      return static_cast<double>(std::min(micro_batches, stages - stage));
    default:
      break;
  }
  return chunks_in_flight(schedule, stages, stage, micro_batches, vpp) / static_cast<double>(vpp);
}

// Parameters per device when `shards` devices shard them: (parameters - experts) / shards + experts
// / max(1, shards / ep). `ep` of those devices have different experts, so that an expert is on
// shards / ep of them; `ep` is less than one if tensor-parallel devices have copies of an expert.
inline double shared_parameters(double parameters, double experts, double shards,
                                double ep) noexcept {
  const double copies = std::max(1.0, shards / ep);
  return (parameters - experts) / shards + experts / copies;
}

// Number of devices of one tensor index that have different experts: `ep` of shared_parameters().
inline double expert_spread(const StrategyRecord& s) noexcept {
  return static_cast<double>(s.etp * s.ep) / static_cast<double>(s.tp);
}

// Replicas that shard state among themselves.
inline std::int64_t sharing_replicas(const LayoutRecord& layout) noexcept {
  return layout.shard > 0 ? layout.shard : layout.dp;
}

// Bytes of weights, gradients and optimiser state under ZeRO.
struct StateBytes {
  double weights;
  double gradients;
  double optimizer;
};

// Parameters of a layer on one device: all, and those that are trained; then what is left of both
// if replicas shard them.
struct LayerParameters {
  double all;
  double trained;
  double shared;
  double shared_trained;
};

inline LayerParameters layer_parameters(const LayerKindRecord& size, double shards,
                                        double ep) noexcept {
  const double trained = size.parameters - size.frozen_parameters;
  return {size.parameters, trained,
          shared_parameters(size.parameters, size.expert_parameters, shards, ep),
          shared_parameters(trained, size.expert_parameters - size.frozen_experts, shards, ep)};
}

// Mean bytes of a weight of a layer, given the bytes of those that are not in a smaller format.
inline double mean_weight_bytes(const LayerKindRecord& size, double weight_bytes) noexcept {
  if (!(size.packed_parameters > 0.0)) return weight_bytes;
  return (weight_bytes * (size.parameters - size.packed_parameters) + size.packed_bytes) /
         size.parameters;
}

// Bytes of optimiser state on top of those per parameter, on one of the replicas that shard it.
inline double more_state_bytes(const LayerKindRecord& size, int zero,
                               const LayerParameters& p) noexcept {
  return zero >= 1 && p.trained > 0.0 ? size.more_state_bytes * (p.shared_trained / p.trained)
                                      : size.more_state_bytes;
}

// Weights are of all parameters, gradients and optimiser state of the trained ones.
inline StateBytes state_bytes(const TrainingRecord& training, int zero, const LayerKindRecord& size,
                              const LayerParameters& p) noexcept {
  return {
      mean_weight_bytes(size, training.weight_bytes) * (zero >= 3 ? p.shared : p.all),
      training.gradient_bytes * (zero >= 2 ? p.shared_trained : p.trained),
      training.state_bytes * (1.0 - size.host_state) * (zero >= 1 ? p.shared_trained : p.trained) +
          more_state_bytes(size, zero, p)};
}

// Bytes of what is sharded like a layer's weights, such as copies of them in a smaller format.
inline double copied_weights(double bytes, int zero, double parameters, double shared) noexcept {
  return zero >= 3 && parameters > 0.0 ? bytes * (shared / parameters) : bytes;
}

// Bytes of `layers` layers that are whole for a while although replicas shard them; two layers
// unless software gathers each only when it runs. With ZeRO 3 these are the weights of the running
// layer and of the prefetched one, in the format in which they are gathered; with ZeRO 2 and 3 the
// gradients of the running layer and of the one whose gradients are being reduced (Megatron-FSDP,
// "at least two FSDP units worth" of each). Without buffers of gradients `gradient_bytes` is zero.
inline double unsharded_bytes(int zero, double parameters, double trained, double weight_bytes,
                              double gradient_bytes, double shards, double layers) noexcept {
  const double weights = zero >= 3 ? parameters * weight_bytes : 0.0;
  const double gradients = zero >= 2 ? trained * gradient_bytes : 0.0;
  return layers * (weights + gradients) * (1.0 - 1.0 / shards);
}

// Bytes of a stage in addition to its state, before allocator losses.
struct MovingBytes {
  double stash;    // of one micro-batch
  double live;     // of one layer while it is recomputed
  double once;     // of the head
  double buffers;  // of collectives and messages, gathered weights included
  // If peaks are found layer by layer, `live` is that of the layer with the largest peak; while it
  // runs backward, later layers have freed `freed` bytes of stash and have `later` of gradients.
  bool by_layer = false;
  double freed = 0.0;
  double later = 0.0;
};

// Gradients of a stage that are not allocated for the whole step, bytes.
struct LateGradients {
  double all;          // of all its layers
  double last;         // of the layers after its blocks
  double first;        // of its first block and the layers before it
  double first_stash;  // stash of those layers for one micro-batch
};

// Peak bytes of a stage in addition to resident state.
struct PeakBytes {
  PeakInstant instant;
  double activations;
  double live;
  double once;
  double gradients;
  double lost;   // by the allocator
  double total;  // of all these and the buffers
};

// The maximum over the instants of a step. Activations of all micro-batches in flight are stored
// when the last of their forward passes ends. If there are more micro-batches than fit in flight,
// some have run backward by then and all gradients are allocated; otherwise gradients are allocated
// while the first micro-batch runs backward and frees its activations. `share` is the fraction lost
// to the allocator.
inline PeakBytes peak_bytes(const MovingBytes& m, const LateGradients& g, double in_flight,
                            double micro_batches, double share) noexcept {
  const double stash = in_flight * m.stash;
  const double once = std::min(in_flight, 1.0) * m.once;
  const double others = std::max(in_flight - 1.0, 0.0) * m.stash;
  const bool all = micro_batches > in_flight;
  PeakBytes found{PeakInstant::kLoss, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0};
  const auto offer = [&](PeakInstant instant, double activations, double live, double loss,
                         double gradients) {
    const double moving = activations + live + loss + m.buffers;
    const double sum = gradients + moving + share * moving;
    if (sum > found.total)
      found = {instant, activations, live, loss, gradients, share * moving, sum};
  };
  offer(PeakInstant::kLoss, stash, 0.0, once, all ? g.all : 0.0);
  const double last = m.by_layer ? m.later : g.last;
  offer(PeakInstant::kBackward, stash - m.freed, m.live, 0.0, all ? g.all : last);
  if (!all) {
    if (!m.by_layer)
      offer(PeakInstant::kFirst, others + g.first_stash, m.live, 0.0, g.all - g.first);
    if (in_flight > 1.0) {  // the second micro-batch runs backward
      offer(PeakInstant::kBackward, others, m.live, 0.0, g.all);
    } else {
      offer(PeakInstant::kStep, 0.0, 0.0, 0.0, g.all);
    }
  }
  return found;
}

}  // namespace phaze
