// Costs of every operator of a batch on every chip: seconds, joules and their breakdown.
//
// Nothing here prints or exits; a batch may run out of memory (std::bad_alloc), nothing else is
// thrown. Work is spread over threads by chip; every result is written by one thread, so answers
// are the same bits for any thread count.
#pragma once

#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "phaze/gemm.hpp"
#include "phaze/silicon.hpp"
#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

// Codes of OperatorRecord::function that are not rows of the table of vector costs.
enum class Function : std::int32_t {
  kProduct = 0,
  kAttention = 1,
  kAttentionBackward = 2,
  kCollective = 3,  // costs nothing on the chip
  kFirstVector = 4,
};

// Names of functions in the order of their codes.
inline constexpr const char* kFunctionNames[] = {"product",
                                                 "attention",
                                                 "attention-backward",
                                                 "collective",
                                                 "add",
                                                 "multiply",
                                                 "copy",
                                                 "relu",
                                                 "gelu",
                                                 "silu",
                                                 "softmax",
                                                 "layernorm",
                                                 "rmsnorm",
                                                 "dropout",
                                                 "rotary",
                                                 "embedding",
                                                 "cross-entropy",
                                                 "adamw",
                                                 "multiply-backward",
                                                 "relu-backward",
                                                 "gelu-backward",
                                                 "silu-backward",
                                                 "softmax-backward",
                                                 "layernorm-backward",
                                                 "rmsnorm-backward",
                                                 "dropout-backward",
                                                 "rotary-backward",
                                                 "embedding-backward",
                                                 "cross-entropy-backward",
                                                 "strided",
                                                 "transpose",
                                                 "reduce",
                                                 "reduce-columns",
                                                 "product-fp32",
                                                 "layout",
                                                 "layout-weights",
                                                 "batchnorm",
                                                 "batchnorm-backward",
                                                 "batchnorm-nchw",
                                                 "batchnorm-nchw-backward",
                                                 "groupnorm",
                                                 "groupnorm-backward",
                                                 "layernorm-plain-backward",
                                                 "pool",
                                                 "pool-backward",
                                                 "depthwise",
                                                 "depthwise-input",
                                                 "depthwise-weight",
                                                 "depthwise-nchw",
                                                 "depthwise-nchw-input",
                                                 "depthwise-nchw-weight",
                                                 "convolution",
                                                 "convolution-input",
                                                 "convolution-weight",
                                                 "convolution-narrow",
                                                 "convolution-narrow-input",
                                                 "convolution-narrow-weight",
                                                 "convolution-padded",
                                                 "convolution-padded-input",
                                                 "convolution-padded-weight",
                                                 "convolution-pointwise",
                                                 "convolution-pointwise-input",
                                                 "convolution-pointwise-weight",
                                                 "convolution-nchw",
                                                 "convolution-nchw-input",
                                                 "convolution-nchw-weight",
                                                 "convolution-narrow-nchw",
                                                 "convolution-narrow-nchw-input",
                                                 "convolution-narrow-nchw-weight",
                                                 "convolution-padded-nchw",
                                                 "convolution-padded-nchw-input",
                                                 "convolution-padded-nchw-weight"};
inline constexpr int kFunctions = static_cast<int>(std::size(kFunctionNames));
static_assert(kFunctions <= kMaxFunctions);

// Convolutions come last: products whose left operand is a matrix of patches. The three directions
// of each are the forward pass and the gradients of input and weights; those from kFirstNchw on
// convert their arrays from and to NCHW.
inline constexpr int kFirstConvolution = kFunctions - 21;
inline constexpr int kFirstNchw = kFunctions - 9;
inline constexpr int kLayout = kFirstConvolution - 17;
inline constexpr int kLayoutWeights = kLayout + 1;
static_assert(std::string_view(kFunctionNames[kFirstConvolution]) == "convolution");
static_assert(std::string_view(kFunctionNames[kFirstNchw]) == "convolution-nchw");
static_assert(std::string_view(kFunctionNames[kLayout]) == "layout");

// Chips of a batch. `tuning_of` has a position in `tunings` for each chip; sizes must agree.
struct ChipBatch {
  std::span<const ChipRecord> chips;
  std::span<const std::int32_t> tuning_of;
  std::span<const TuningRecord> tunings;
  Precision precision;
};

enum class Cores : std::int32_t { kAll = 0, kOne = 1 };

// One operator on one chip with its breakdown and energy.
CostRecord op_cost(const OperatorRecord& op, const ChipRecord& chip, const TuningRecord& tuning,
                   const Precision& precision, Cores cores, const EnergyTable& energy,
                   double static_w) noexcept;

// out[c * ops.size() + o] is operator o on chip c; every figure of a bad pair is NaN and its status
// says why. `energy` and `static_w` have one entry per chip.
void op_cost_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                   std::span<const EnergyTable> energy, std::span<const double> static_w,
                   std::span<CostRecord> out, int threads);

// Figures of pairs, at c * ops.size() + o; NaN for bad ones.
struct OpFigures {
  std::span<double> time_s;
  std::span<double> one_core_s;  // on one core of each type
  std::span<double> bound_s;     // lower bounds of time_s
  std::span<double> dynamic_j;   // energy without static power
};

// What layers are scheduled and paid by: equal to those of op_cost_batch and op_time_batch.
// Products are mapped once for all chips on which they have the same mapping.
void op_figures_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                      std::span<const EnergyTable> energy, const OpFigures& out, int threads);

// HBM bytes of one operator, fused with no other, by the size of the buffer; NaN if invalid.
// If `exact`, a product takes the best of all tile sizes (fusion.hpp), not only of those that
// hbm_traffic() tries.
double op_hbm_bytes(const OperatorRecord& op, double capacity_bytes, const Precision& precision,
                    bool exact) noexcept;

// The times alone; NaN for a bad pair.
void op_time_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                   std::span<double> out, int threads);

// Lower bounds alone; NaN for a bad pair.
void op_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                    std::span<double> out, int threads);

// out[c]: lower bound on the dynamic energy of all operators, operator o executed count[o] times,
// in any mapping and in joules; NaN for a bad chip or operator. `energy` has one entry per chip.
void energy_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                        std::span<const EnergyTable> energy, std::span<const double> count,
                        std::span<double> out, int threads);

}  // namespace phaze
