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

// Best single changes, one operator after another, until no change improves the objective.
MapSearchResult descend(Mapping& mapping, int rounds);

// The number of combinations of operator mappings and weight modes (modes only for operators with
// weights), and the best of them by exhaustive enumeration: the reference for small problems.
double ways(const Mapping& mapping) noexcept;
MapSearchResult exhaust(Mapping& mapping);

}  // namespace phaze
