// Lower bounds of whole layers on many chips, from bounds of their operators.
#pragma once

#include <cstdint>
#include <span>

#include "phaze/op_cost.hpp"

namespace phaze {

// Operators of one number format, with what software reaches in it, and its bytes.
struct FormatOps {
  std::span<const OperatorRecord> ops;
  std::span<const TuningRecord> tunings;
  Precision precision;
};

// Graphs whose nodes are operators, in topological order. Nodes of graph g are node_ptr[g] up to
// node_ptr[g + 1]; predecessors of node i are before[before_ptr[i]] up to before[before_ptr[i +
// 1]], all of them below i and of the same graph.
struct PathBatch {
  std::span<const std::int64_t> node_ptr;
  std::span<const std::int32_t> op;  // per node: which operator it is, counted through the formats
  std::span<const double> extra_s;   // per node: seconds on any chip in addition to its bound
  std::span<const std::int64_t> before_ptr;
  std::span<const std::int32_t> before;
  std::span<const double> count;         // per graph: number of executions
  std::span<const std::int32_t> sum_of;  // per graph: which sum it belongs to
};

// out[n * chips + c]: sum n over its graphs of count times the longest path, each operator at its
// lower bound; NaN for a bad chip or operator. `tuning_of` has a position in the tunings of every
// format for each chip. The caller checks that sizes and positions agree. Chips with the same rates
// are bounded once.
void path_bound_batch(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                      std::span<const std::int32_t> tuning_of, const PathBatch& paths,
                      std::span<double> out, int threads);

// What schedules share: how many operators may run while one does, itself included, per node; and
// whether products load bytes again that do not fit on the chip.
struct SharedWork {
  std::span<const double> most_at_once;
  bool loads_again;
};

// The same sums of tighter bounds: products are bounded by their blocks, and graphs also by the
// work of all operators, which run alone on all cores or share them on one core of each type
// (docs/schedule.md).
void work_bound_batch(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                      std::span<const std::int32_t> tuning_of, const PathBatch& paths,
                      const SharedWork& shared, std::span<double> out, int threads);

}  // namespace phaze
