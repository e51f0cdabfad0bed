// Searches over the operator mappings of one problem.
#pragma once

#include <cstdint>
#include <vector>

#include "phaze/mapping.hpp"

namespace phaze {

struct MapSearchRules {
  std::uint64_t seed;
  std::int64_t steps;  // evaluations
  double start;        // relative loss accepted at the beginning
};
struct MapSearchResult {
  std::vector<OpMapping> op_mappings;
  MapScore score;
  std::int64_t evaluations;
};

// Objective of a search: the step time of a mapping that fits; otherwise the missing memory, scaled
// to exceed any time.
double objective(const Mapping& mapping, const MapScore& score) noexcept;

// Threshold accepting from the mapping's current operator mappings; on return the mapping holds the
// best ones found. The result is the same on every machine: choices use integers, and no
// transcendental function is called.
MapSearchResult anneal(Mapping& mapping, const MapSearchRules& rules);

// Makes the best change of one operator after another until no change improves the objective.
MapSearchResult descend(Mapping& mapping, int rounds);

// The number of combinations of operator mappings and weight modes (modes only for operators with
// weights), and the best of them by exhaustive enumeration: the reference for small problems.
double ways(const Mapping& mapping) noexcept;
MapSearchResult exhaust(Mapping& mapping);

// The need of a stage is its memory plus `off_wafer` (>= 0) times its off-wafer memory, per die.
// Returns the least need of the fullest stage under any operator mappings and outputs, and operator
// mappings with that need; boundary layers have those with the least need of their own stage. No
// mapping fits if this exceeds the die's capacity plus `off_wafer` times that off it. Memory has
// no term that couples two operators except two maxima, the operands of the largest operator and
// the largest gathered weights: with limits on both, every operator is chosen on its own, exactly.
// Every operator has a legal operator mapping.
struct MapMemory {
  double bytes;
  std::vector<OpMapping> op_mappings;
};
MapMemory least_memory(const Mapping& mapping, double off_wafer);

}  // namespace phaze
