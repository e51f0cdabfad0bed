// Device memory as plain C functions for loops built by other compilers (Numba). They use the rule
// of the plan kernel, so grids of plans and single plans have the same bytes. docs/workloads.md has
// the formulas. Bytes are doubles. All functions are pure and may be called from any thread.
#pragma once

#include <cstdint>

extern "C" {

// Micro-batches whose activations a stage stores at its peak; `schedule` is a PipelineSchedule.
double phaze_in_flight(std::int64_t schedule, std::int64_t stages, std::int64_t stage,
                       std::int64_t micro_batches, std::int64_t vpp) noexcept;

// Parameters per device when `shards` devices shard them: (parameters - experts) / shards +
// experts / max(1, shards / ep). `ep` of those devices have different experts; `ep` is less than
// one if tensor-parallel devices have copies of an expert.
double phaze_shared_parameters(double parameters, double experts, double shards,
                               double ep) noexcept;

// Writes to out[4] the bytes of weights, gradients, optimiser state, and copies of weights in a
// smaller format (`copy_bytes` on one device), under a ZeRO stage. Of all `parameters`, `experts`
// are in experts; `frozen` have no gradient and no state, `frozen_experts` of them in experts;
// `packed` of the frozen ones take `packed_bytes` in all. The state has `more_state` bytes in all
// beyond `optimizer_bytes` a trained parameter; `weight_bytes` and `gradient_bytes` are bytes a
// parameter too.
void phaze_state_bytes(double parameters, double experts, double frozen, double frozen_experts,
                       double packed, double packed_bytes, double more_state, double copy_bytes,
                       double shards, double ep, std::int64_t zero, double weight_bytes,
                       double gradient_bytes, double optimizer_bytes, double* out) noexcept;

// Mean bytes of a weight if `packed` of the parameters take `packed_bytes` together.
double phaze_mean_weight_bytes(double parameters, double packed, double packed_bytes,
                               double weight_bytes) noexcept;

// Bytes of layers that are whole for a while although replicas shard them: weights of the running
// layer and of the one prefetched (ZeRO 3; `layers` is 2, else 1), gradients of the running layer
// and of the one being reduced (ZeRO 2 and 3; `gradient_bytes` is zero if there are no buffers of
// gradients).
double phaze_unsharded_bytes(std::int64_t zero, double parameters, double trained,
                             double weight_bytes, double gradient_bytes, double shards,
                             double layers) noexcept;

// The peak over the instants of a step, minus resident state. `stash` is stored per micro-batch,
// `live` is the working set of a layer during recomputation, `once` that of the head; the four
// `late` figures are gradients that appear during the backward pass: of all layers, of those after
// the blocks, of the first block and the layers before it, and the stash of these for one
// micro-batch. If `by_layer`, `freed` and `later` are the stash that later layers have freed and
// their gradients while the layer with the largest peak runs backward, and `late_last`,
// `late_first` and `late_first_stash` are not used. `share` is the fraction lost to allocator
// fragmentation. Writes activations, recomputed bytes, logits, late gradients and the total to
// out[5], and returns the instant (PeakInstant).
std::int64_t phaze_peak(double stash, double live, double once, double buffers, double late,
                        double late_last, double late_first, double late_first_stash,
                        double in_flight, double micro_batches, double share, std::int64_t by_layer,
                        double freed, double later, double* out) noexcept;
}
