// Schedule of one layer on one chip: the start time and core count of each operator that minimise
// the makespan. The problem, the bounds and the search are described in docs/schedule.md.
//
// Nothing here prints or exits; the search may run out of memory (std::bad_alloc), nothing else is
// thrown. It is deterministic for a given node cap; only a time limit or an interruption can make
// two runs differ.
#pragma once

#include <cstdint>
#include <limits>

#include "phaze/status.hpp"

namespace phaze {

inline constexpr int kResources = 3;     // tensor cores, vector cores, network
inline constexpr int kMaxLayerOps = 64;  // operators of one layer; one bit each
inline constexpr int kMaxModes = 8;      // execution modes of one operator

using OpBits = std::uint64_t;

// One execution mode of an operator.
struct LayerMode {
  double seconds;
  std::int32_t use[kResources];  // occupied cores by type; at least one of some type
};

// A layer ready to be scheduled: operators in topological order. Modes of operator i are
// modes[first_mode[i]] up to modes[first_mode[i + 1]].
struct LayerProblem {
  std::int32_t size;
  std::int32_t capacity[kResources];
  OpBits before[kMaxLayerOps];  // predecessors of each operator
  std::int32_t first_mode[kMaxLayerOps + 1];
  LayerMode modes[kMaxLayerOps * kMaxModes];
};

enum class ProvedBy : std::int32_t {
  kNothing = 0,
  kListSchedule = 1,    // a list schedule meets a lower bound
  kBranchAndBound = 2,  // the search is exhausted
};

struct LayerSolution {
  double makespan_s;
  double bound_s;
  ProvedBy proved_by;
  std::int64_t nodes;
  double start_s[kMaxLayerOps];
  std::int32_t mode[kMaxLayerOps];  // position among the operator's own modes
};

struct SearchLimits {
  std::int64_t nodes;          // node cap
  double seconds;              // time limit; infinite = no limit
  bool (*interrupted)(void*);  // polled during the search; may be null
  void* context;
  // The search may stop once the lower bound reaches this; infinite = only a proof of optimality
  // ends it.
  double enough_s = std::numeric_limits<double>::infinity();
  // Whether a schedule shorter than that ends the search as well (decides which of the two is
  // true).
  bool only_decide = false;
};

// Checks counts, latencies and order; a problem that passes can be solved.
Status check_layer(const LayerProblem& problem) noexcept;

// Lower bound on the makespan in seconds: paths, and work as shares of the chip, each plus the time
// that must pass before and after its operators.
double layer_bound(const LayerProblem& problem) noexcept;

// The best of several list schedules, with its lower bound.
LayerSolution list_schedule(const LayerProblem& problem) noexcept;

// Bounds, list schedules, then branch and bound until the optimum is proven or a limit is reached.
LayerSolution solve_layer(const LayerProblem& problem, const SearchLimits& limits);

}  // namespace phaze
