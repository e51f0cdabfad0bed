// The interleaved schedule of Megatron-LM, played through: every pass starts when its stage is free
// and what it needs is there.
#pragma once

#include <cstdint>
#include <span>

namespace phaze {

// Seconds of one step. `forward_s` and `backward_s` have one value for each chunk of each stage
// (stage * chunks + chunk), receiving included; chunk c of stage i comes after chunk c of stage
// i - 1. NaN where micro-batches do not come in groups of as many as there are stages, or sizes do
// not agree.
double interleaved_step(std::span<const double> forward_s, std::span<const double> backward_s,
                        std::int32_t stages, std::int64_t microbatches);

}  // namespace phaze
