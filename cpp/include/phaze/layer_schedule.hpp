// One layer on one chip: when each operator starts and on how many cores, so that the last one ends
// as early as possible. The problem, the bounds and the search are described in docs/schedule.md.
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
inline constexpr int kMaxModes = 8;      // ways to run one operator

using OpBits = std::uint64_t;

// One way to run an operator.
struct LayerMode {
  double seconds;
  std::int32_t use[kResources];  // cores of each type it holds; of one type at least one
};

// A layer ready to be scheduled: operators in topological order. Modes of operator i are
// modes[first_mode[i]] up to modes[first_mode[i + 1]].
struct LayerProblem {
  std::int32_t size;
  std::int32_t capacity[kResources];
  OpBits before[kMaxLayerOps];  // operators that one waits for
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
  std::int64_t nodes;          // at most this many
  double seconds;              // at most this long; infinite = no limit
  bool (*interrupted)(void*);  // asked now and then; may be null
  void* context;
  // A proof that no schedule is shorter than this is enough; infinite = only that of the optimum.
  double enough_s = std::numeric_limits<double>::infinity();
  // Whether a schedule shorter than that ends the search as well: which of the two is asked for.
  bool only_decide = false;
};

// Checks counts, latencies and order; a problem that passes can be solved.
Status check_layer(const LayerProblem& problem) noexcept;

// Seconds before which no schedule ends: paths, and work in shares of the chip, each with the time
// that must pass before and after its operators.
double layer_bound(const LayerProblem& problem) noexcept;

// The best of several list schedules, with its lower bound.
LayerSolution list_schedule(const LayerProblem& problem) noexcept;

// Bounds, list schedules, then branch and bound until proof or limit.
LayerSolution solve_layer(const LayerProblem& problem, const SearchLimits& limits);

}  // namespace phaze
