// Schedule of one layer on one chip: the start time and core count of each operator that minimise
// the makespan. The problem, the bounds and the search are described in docs/schedule.md.
//
// Nothing here prints or exits; the search may run out of memory (std::bad_alloc), nothing else is
// thrown. It is deterministic for a given node cap; only a time limit or an interruption can make
// two runs differ.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "phaze/status.hpp"

namespace phaze {

inline constexpr int kResources = 3;      // tensor cores, vector cores, network
inline constexpr int kMaxLayerOps = 128;  // operators of one layer; one bit each
inline constexpr int kMaxModes = 8;       // execution modes of one operator

__extension__ using OpBits = unsigned __int128;  // a set of operators; g++ and clang have the type

constexpr std::uint64_t low_bits(OpBits set) noexcept { return static_cast<std::uint64_t>(set); }
constexpr std::uint64_t high_bits(OpBits set) noexcept {
  return static_cast<std::uint64_t>(set >> 64);
}

// How many operators a set has.
constexpr int count_ops(OpBits set) noexcept {
  return std::popcount(low_bits(set)) + std::popcount(high_bits(set));
}

// The first operator of a set that is not empty.
constexpr int first_op(OpBits set) noexcept {
  const std::uint64_t low = low_bits(set);
  return low != 0 ? std::countr_zero(low) : 64 + std::countr_zero(high_bits(set));
}

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
  // The search may stop once the lower bound reaches this time; infinite = only a proof of
  // optimality ends the search.
  double enough_s = std::numeric_limits<double>::infinity();
  // Whether a schedule shorter than `enough_s` ends the search as well: the search then only
  // decides whether there is one.
  bool only_decide = false;
};

// Checks counts, latencies and order; a problem that passes can be solved.
Status check_layer(const LayerProblem& problem) noexcept;

// Bounds, list schedules, then branch and bound until the optimum is proven or a limit is reached.
LayerSolution solve_layer(const LayerProblem& problem, const SearchLimits& limits);

}  // namespace phaze
