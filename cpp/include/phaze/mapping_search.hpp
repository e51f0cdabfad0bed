// Searches over the operator mappings of one problem.
#pragma once

#include <cstdint>
#include <vector>

#include "phaze/mapping.hpp"

namespace phaze {

struct MapSearchRules {
  std::uint64_t seed;
  std::int64_t steps;  // evaluations
  double start;        // accepted loss at the beginning, relative
};
struct MapFound {
  std::vector<OpMapping> op_mappings;
  MapScore score;
  std::int64_t evaluations;
};

// What a search minimises: the step's time where it fits, else how much is missing, and more than
// any time.
double objective(const Mapping& mapping, const MapScore& score) noexcept;

// Threshold accepting from the mapping's present operator mappings, which it leaves at the best it
// found. The same answer on every machine: integers choose, and no transcendental function is
// called.
MapFound anneal(Mapping& mapping, const MapSearchRules& rules);

// Best single changes, one operator after another, until none helps.
MapFound descend(Mapping& mapping, int rounds);

// How many ways there are to choose operator mappings and modes (modes only where there are
// weights), and the best of all of them, tried one by one: for small problems, where others can be
// held against it.
double ways(const Mapping& mapping) noexcept;
MapFound exhaust(Mapping& mapping);

}  // namespace phaze
