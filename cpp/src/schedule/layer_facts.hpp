// Data shared by bounds, list schedules and the search, derived once per layer. Plain arrays, so
// that thousands of layers need no heap allocation.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "phaze/layer_schedule.hpp"

namespace phaze {

inline constexpr double kSame = 1e-12;               // relative; closer than this is equal
inline constexpr double kRoundedDown = 1.0 - 1e-13;  // keeps a bound below its rounded value
inline constexpr int kMixes = 11;                    // weightings of the resources of a mode

constexpr OpBits op_bit(int op) noexcept { return OpBits{1} << op; }

// Calls f(op) for every operator of a set, smallest first.
template <typename F>
void for_ops(OpBits set, const F& f) {
  for (std::uint64_t low = low_bits(set); low != 0; low &= low - 1) f(std::countr_zero(low));
  for (std::uint64_t high = high_bits(set); high != 0; high &= high - 1) {
    f(64 + std::countr_zero(high));
  }
}

// An operator that runs now.
struct Running {
  std::int32_t op;
  std::int32_t mode;  // in LayerProblem::modes
  double finish_s;
};

// State of a partial schedule. Copying it copies only the running operators.
struct Moment {
  Moment() = default;
  Moment(const Moment& other) noexcept { *this = other; }
  Moment& operator=(const Moment& other) noexcept {
    now_s = other.now_s;
    started = other.started;
    done = other.done;
    std::copy(other.free, other.free + kResources, free);
    running_count = other.running_count;
    std::copy(other.running, other.running + other.running_count, running);
    return *this;
  }

  double now_s;
  OpBits started;
  OpBits done;
  std::int32_t free[kResources];
  std::int32_t running_count;
  Running running[kMaxLayerOps];
};

class LayerFacts {
 public:
  explicit LayerFacts(const LayerProblem& problem) noexcept;

  // Lower bound on the makespan of every completion, if the operators of `barred` may no longer run
  // alone. Stops once the bound reaches `enough_s`.
  double bound(const Moment& moment, OpBits barred, double enough_s) const noexcept;

  // Adds data that only a search needs: the bound of the longest path and its gaps.
  void prepare_search() noexcept;

  const LayerProblem& problem() const noexcept { return problem_; }
  int size() const noexcept { return problem_.size; }
  Moment beginning() const noexcept;
  OpBits all() const noexcept { return all_; }
  OpBits after(int op) const noexcept { return after_[op]; }
  // Operators with the same modes and the same successors: once two of them may start, they are
  // interchangeable.
  OpBits twins(int op) const noexcept { return twins_[op]; }
  // Operators with the same modes and a superset of the successors: once both may start, such an
  // operator can replace the other (docs/schedule.md has the proof).
  OpBits urgent(int op) const noexcept { return urgent_[op]; }
  // The order of operators that start at the same moment: urgent ones before others.
  int in_turn(int turn) const noexcept { return in_turn_[turn]; }
  // Operators without successors. If such an operator runs alone, it can equally run last.
  OpBits leaves() const noexcept { return leaves_; }
  double alone_s(int op) const noexcept { return alone_s_[op]; }
  double tail_s(int op) const noexcept { return shortest_s_[op] + rest_s_[op]; }
  // Modes that are not dominated by another mode, fastest first.
  int useful_count(int op) const noexcept { return useful_count_[op]; }
  int useful(int op, int i) const noexcept { return useful_[op][i]; }
  int most_useful() const noexcept { return most_useful_; }
  // Whether a useful mode occupies the whole chip, so that nothing can overlap it.
  bool alone(int op, int i) const noexcept { return (alone_[i] & op_bit(op)) != 0; }

  bool fits(const Moment& m, int mode) const noexcept {
    const std::int32_t* use = problem_.modes[mode].use;
    return use[0] <= m.free[0] && use[1] <= m.free[1] && use[2] <= m.free[2];
  }
  bool may_start(const Moment& m, int op) const noexcept {
    return (m.started & op_bit(op)) == 0 && (problem_.before[op] & ~m.done) == 0;
  }
  void start(Moment* m, int op, int mode) const noexcept;
  // Advances to the next finish; at least one operator must be running.
  void advance(Moment* m) const noexcept;

 private:
  void find_modes(int op) noexcept;
  void find_alone() noexcept;
  void add_mixes() noexcept;
  void find_spine() noexcept;
  void add_spine_mix() noexcept;
  void find_waste() noexcept;
  void find_twins() noexcept;
  void find_gains() noexcept;
  double least_waste(int from, int to, double length_s, double wires_s) const noexcept;
  double most_gained(OpBits open, const double* left_s, double room_s) const noexcept;
  double spine_bound(const Moment& moment, OpBits barred) const noexcept;
  void add_even_mixes() noexcept;
  void add_even_mix(const std::int32_t* order) noexcept;
  double most_beside(int op, OpBits rated, const double* rate) const noexcept;
  double most_in_rows(OpBits set, int count, const double* rate) const noexcept;
  void find_shares(int mix) noexcept;
  int width(OpBits set) const noexcept;
  double preemptive_bound(int mix, const Moment& moment, OpBits barred,
                          std::span<const std::int32_t> in_time,
                          const double* ready_s) const noexcept;
  void rank_by_rest() noexcept;

  const LayerProblem& problem_;
  OpBits all_;
  OpBits leaves_ = 0;
  OpBits twins_[kMaxLayerOps];          // only after prepare_search
  OpBits urgent_[kMaxLayerOps];         // the same
  std::int32_t in_turn_[kMaxLayerOps];  // the same
  OpBits after_[kMaxLayerOps];
  OpBits later_[kMaxLayerOps];  // all transitive successors of an operator
  OpBits apart_[kMaxLayerOps];  // operators that may overlap an operator
  OpBits holds_[kResources];    // operators that may occupy a resource while others run
  bool used_[kResources] = {};
  OpBits alone_[kMaxModes];  // [i]: operators whose useful mode i occupies the whole chip
  double shortest_s_[kMaxLayerOps];
  double overlap_s_[kMaxLayerOps];  // shortest of the modes that allow overlap
  double alone_s_[kMaxLayerOps];    // shortest of those that do not
  double rest_s_[kMaxLayerOps];     // longest path from an operator's end to the layer's
  std::int32_t useful_count_[kMaxLayerOps];
  std::int32_t useful_[kMaxLayerOps][kMaxModes];
  std::int32_t rank_[kMaxLayerOps];     // of an operator: longest rest first
  double ranked_rest_s_[kMaxLayerOps];  // by rank
  int most_useful_ = 0;
  int mixes_ = 0;
  mutable std::int32_t leader_ = 0;      // the mix that settles most states of a search
  mutable std::int32_t challenger_ = 0;  // the other mix tried last
  int spine_mix_ = -1;
  int spine_size_ = 0;
  std::int32_t spine_[kMaxLayerOps];  // the longest path
  OpBits on_spine_ = 0;
  OpBits wires_ = 0;  // operators that take the network
  double wire_rate_ = 0.0;
  std::int32_t by_gain_[kMaxLayerOps];  // the spine, largest gain first
  double gain_[kMaxLayerOps];
  double area_s_[kMaxLayerOps];  // share of the tensor cores times seconds, in overlapped modes
  int aside_count_ = 0;
  std::int32_t aside_[kMaxLayerOps];     // operators off the spine and the network
  OpBits spine_overlaps_[kMaxLayerOps];  // operators of the spine that may overlap aside_[i]
  double waste_s_[kMaxLayerOps];         // least waste of a gap with aside_[i]; falls with i
  double overlap_share_s_[kMixes][kMaxLayerOps];   // the same if it may not run alone
  double share_s_[kMixes][kMaxLayerOps];           // least time of a whole chip an operator takes
  double rate_[kMixes][kMaxLayerOps * kMaxModes];  // share of the chip that a mode occupies
};

// Improves a schedule in which operators without successors can overlap others, trying the modes of
// those others in turn.
void improve_schedule(const LayerFacts& facts, LayerSolution* best);

// The best of several list schedules; its bound is not filled in.
LayerSolution best_list_schedule(const LayerFacts& facts) noexcept;

}  // namespace phaze
