// A hand-written problem for the evaluation of mappings.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "phaze/mapping_search.hpp"
#include "phaze/relaxation.hpp"

namespace phaze::test {

// Operators in a chain that accept everything; every cost is one and decreases with the split.
struct Owned {
  std::vector<MeshRun> slots;
  std::vector<MapOpRecord> ops;
  std::vector<MapEdgeRecord> edges;
  MapRulesRecord rules{};
  std::vector<std::int32_t> divisors, column;
  std::int32_t columns = 0;
  std::vector<double> table;
  std::vector<std::int32_t> blocks{2, 1};
  std::vector<double> boundary{0.25, 0.5};
  std::vector<std::int32_t> chain;

  MapProblem problem() const {
    return {slots,    ops,      edges,   rules,
            divisors, column,   columns, {table, table, table, table, table, table},
            blocks,   boundary, chain};
  }
};

inline Owned chain_of(int count, std::vector<MeshRun> slots, std::int32_t roles) {
  Owned made;
  made.slots = std::move(slots);
  std::int32_t dies = 1;
  for (const MeshRun& slot : made.slots) dies *= slot.size;
  for (std::int32_t d = 1; d <= dies; ++d) {
    if (dies % d == 0) made.divisors.push_back(d);
  }
  for (const std::int64_t b : made.divisors) {
    for (const std::int64_t m : made.divisors) {
      for (const std::int64_t n : made.divisors) {
        for (const std::int64_t k : made.divisors) {
          const bool have = b * m * n * k <= dies && dies % (b * m * n * k) == 0;
          made.column.push_back(have ? made.columns++ : -1);
        }
      }
    }
  }
  for (std::int32_t i = 0; i < count; ++i) {
    made.ops.push_back(
        {1, roles, 7, i % 2, 1, 0, i % 3, {1 << 20, 1 << 20, 1 << 20, 1 << 20}, 0.5, 0.25});
    made.chain.push_back(i);
    if (i > 0) made.edges.push_back({i - 1, i, 0, 1, 2.0});
  }
  made.edges.push_back({count - 1, 0, static_cast<std::int32_t>(EdgeKind::kWrap), 0, 2.0});
  made.table.assign(static_cast<std::size_t>(count) * static_cast<std::size_t>(made.columns), 1.0);
  made.rules = {1.0, 2.0, 0.125, 1e9, 100.0, 4.0, 8.0, 2.0, 2.0, 12.0, 30.0,
                1.0, 4,   31,    0,   0,     0,   1,   0,   0,   4,    0.0};
  return made;
}

}  // namespace phaze::test
