// The same question asked in other words: layers whose operators are only numbered otherwise, or
// whose latencies differ by one factor, have one canonical form and hence one solution.
#pragma once

#include <cstdint>

#include "phaze/layer_schedule.hpp"

namespace phaze {

// Operators by how far they are from the beginning, then by what they are and what surrounds them;
// latencies as parts of the longest, to 44 binary digits. The form of a form is itself.
struct CanonicalLayer {
  LayerProblem problem;
  std::int32_t order[kMaxLayerOps];  // position in the given layer of each operator
  double scale;                      // seconds that are one in the canonical form
};

// `problem` must have passed check_layer.
void canonical_layer(const LayerProblem& problem, CanonicalLayer* out) noexcept;

// The solution of a layer that has the solution `canonical` in canonical form: the same modes, and
// each operator when those end that end before it there.
LayerSolution replay(const LayerProblem& problem, const CanonicalLayer& form,
                     const LayerSolution& canonical) noexcept;

}  // namespace phaze
