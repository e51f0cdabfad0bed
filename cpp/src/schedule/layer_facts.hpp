// Data shared by bounds, list schedules and the search, derived once per layer. Plain arrays, so
// that thousands of layers need no heap allocation.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "phaze/layer_schedule.hpp"

namespace phaze {

inline constexpr double kSame = 1e-12;               // relative; differences below this are ignored
inline constexpr double kRoundedDown = 1.0 - 1e-13;  // keeps a bound below its rounded value
// A weighting gives each mode a rate; the rates of concurrent operators add up to at most one.
inline constexpr int kMaxWeightings = 11;

// `Bits` is a set of operators: std::uint64_t for layers of up to 64, OpBits for all.
template <typename Bits>
inline constexpr int kMostOps = 8 * static_cast<int>(sizeof(Bits));

template <typename Bits = OpBits>
constexpr Bits op_bit(int op) noexcept {
  return Bits{1} << op;
}

// Calls f(op) for every operator of a set, smallest first.
template <typename Bits, typename F>
void for_ops(Bits set, const F& f) {
  for (std::uint64_t low = low_bits(set); low != 0; low &= low - 1) f(std::countr_zero(low));
  if constexpr (kMostOps<Bits> > 64) {
    for (std::uint64_t high = high_bits(set); high != 0; high &= high - 1) {
      f(64 + std::countr_zero(high));
    }
  }
}

// The first operator of a set, which must not be empty.
template <typename Bits>
constexpr int first_of(Bits set) noexcept {
  if constexpr (kMostOps<Bits> > 64) {
    return first_op(set);
  } else {
    return std::countr_zero(set);
  }
}

// An operator that runs now.
struct Running {
  std::int32_t op;
  std::int32_t mode;  // in LayerProblem::modes
  double finish_s;
};

// State of a partial schedule. Copying it copies only the running operators.
template <typename Bits>
struct PartialSchedule {
  PartialSchedule() = default;
  PartialSchedule(const PartialSchedule& other) noexcept { *this = other; }
  PartialSchedule& operator=(const PartialSchedule& other) noexcept {
    now_s = other.now_s;
    started = other.started;
    done = other.done;
    ready = other.ready;
    std::copy(other.free, other.free + kResources, free);
    running_count = other.running_count;
    std::copy(other.running, other.running + other.running_count, running);
    return *this;
  }

  double now_s;
  Bits started;
  Bits done;
  Bits ready;  // not started, and all predecessors are done
  std::int32_t free[kResources];
  std::int32_t running_count;
  Running running[kMostOps<Bits>];
};

template <typename Bits>
class LayerFacts {
 public:
  explicit LayerFacts(const LayerProblem& problem) noexcept;

  // Bounds 1 to 3 of docs/schedule.md. All bounds stop once they reach `enough_s`.
  double root_bound(double enough_s) noexcept;

  // Raises that bound by bounds 4 and 5; if it stays below `enough_s`, a search may follow.
  double prepare_search(double most, double enough_s) noexcept;

  // Lower bound on the makespan of every completion of a partial schedule that is shorter than
  // `enough_s`, if the operators of `barred` may no longer run alone, on the whole chip, and those
  // of `held`, which are ready, could start now alongside others and do not. Only a thorough bound
  // uses more than the heads and one weighting.
  double bound(const PartialSchedule<Bits>& partial, Bits barred, Bits held, bool thorough,
               double enough_s) const noexcept;

  // The ready operators that can run within the time of a running one without taking a core from
  // any other operator, except those `ignored`: starting them now is never worse than later.
  Bits unhindered(const PartialSchedule<Bits>& partial, Bits ignored) const noexcept;

  const LayerProblem& problem() const noexcept { return problem_; }
  int size() const noexcept { return problem_.size; }
  PartialSchedule<Bits> beginning() const noexcept;
  Bits all() const noexcept { return all_; }
  Bits before(int op) const noexcept { return before_[op]; }
  Bits after(int op) const noexcept { return after_[op]; }
  // Operators with the same modes and the same successors: once two of them may start, they are
  // interchangeable.
  Bits twins(int op) const noexcept { return twins_[op]; }
  // Operators with the same modes and a superset of the successors: once both may start, such an
  // operator can replace the other (docs/schedule.md has the proof).
  Bits urgent(int op) const noexcept { return urgent_[op]; }
  // Whether exchanging an operator with an earlier one, which is ready at the same times, and the
  // successors of the two with each other, changes nothing as long as none of them has started.
  bool mirrors(int op, Bits started) const noexcept {
    return mirrored_[op] != 0 && (mirrored_[op] & started) == 0;
  }
  // The order in which operators that start at the same time are tried: urgent ones first.
  int start_order(int turn) const noexcept { return start_order_[turn]; }
  // The places of some operators in that order.
  Bits turns(Bits ops) const noexcept {
    Bits found = 0;
    for_ops(ops, [&](int op) { found |= op_bit<Bits>(turn_[op]); });
    return found;
  }
  // Operators without successors. One that runs alone can be moved to the end of the schedule.
  Bits leaves() const noexcept { return leaves_; }
  // Operators that have one mode that allows overlap, on a single core.
  Bits one_core() const noexcept { return one_core_; }
  double alone_s(int op) const noexcept { return alone_s_[op]; }
  double shortest_s(int op) const noexcept { return shortest_s_[op]; }
  double rest_s(int op) const noexcept { return rest_s_[op]; }
  double tail_s(int op) const noexcept { return shortest_s_[op] + rest_s_[op]; }
  // Modes that are not dominated by another mode, fastest first.
  int useful_count(int op) const noexcept { return useful_count_[op]; }
  int useful(int op, int i) const noexcept { return useful_[op][i]; }
  int most_useful() const noexcept { return most_useful_; }
  // The longest path, summed as schedules are: none is shorter, not even in its last digit.
  double longest_path_s() const noexcept { return longest_path_s_; }
  // Whether a useful mode occupies the whole chip, so that nothing can overlap it.
  bool alone(int op, int i) const noexcept { return (alone_[i] & op_bit<Bits>(op)) != 0; }
  // Operators without a mode that occupies the whole chip.
  Bits no_alone() const noexcept { return no_alone_; }
  // Operators whose useful mode i, if they have one, allows no overlap.
  Bits no_overlap(int i) const noexcept { return no_overlap_[i]; }

  bool fits(const PartialSchedule<Bits>& m, int mode) const noexcept {
    const std::int32_t* use = problem_.modes[mode].use;
    return use[0] <= m.free[0] && use[1] <= m.free[1] && use[2] <= m.free[2];
  }
  void start(PartialSchedule<Bits>* m, int op, int mode) const noexcept;
  // Advances to the next finish; at least one operator must be running.
  void advance(PartialSchedule<Bits>* m) const noexcept;

 private:
  // Operators whose modes are limited: those that no longer run alone, and those that only do.
  struct Limited {
    Bits barred = 0;
    Bits isolated = 0;
  };
  void find_modes(int op) noexcept;
  void find_alone() noexcept;
  // [r][m]: a mode that uses k cores of type r is charged k over this number.
  using ChargedOf = double[kResources][kMostOps<Bits> * kMaxModes];
  void find_charges(int r, double* charged_of) noexcept;
  void add_weighting(const double* weights, const ChargedOf& charged_of) noexcept;
  void add_weighting_by_operators() noexcept;
  void find_path() noexcept;
  void add_path_weighting() noexcept;
  void find_waste() noexcept;
  void find_twins() noexcept;
  Bits moved_by_mirroring(int a, int b) const noexcept;
  bool same_modes(int a, int b) const noexcept;
  void find_rivals() noexcept;
  void find_gains() noexcept;
  double least_waste(int from, int to, double length_s, double network_s) const noexcept;
  double most_gained(Bits open, const double* left_s, double limit_s,
                     double enough_s) const noexcept;
  // The larger of a known bound and the fourth.
  double path_bound(const PartialSchedule<Bits>& partial, const Limited& limited,
                    double known_s) const noexcept;
  double gap_bound(const PartialSchedule<Bits>& partial, Bits isolated, double sum_s,
                   double network_share_s, double longer_s, const double* left_s,
                   double known_s) const noexcept;
  void add_even_weighting(bool by_type) noexcept;
  double most_overlapping(int op, Bits rated, const double* rate) const noexcept;
  double most_in_chains(Bits set, int count, const double* rate) const noexcept;
  void find_shares(int weighting) noexcept;
  int width(Bits set) const noexcept;
  // The heads of operators: their earliest starts. Returns the bound by the longest path, and adds
  // to `limited` the operators that only ever run alone.
  double find_heads(const PartialSchedule<Bits>& partial, Bits held, double enough_s,
                    Limited* limited, double* ready_s) const noexcept;
  double share(int weighting, int op, const Limited& limited) const noexcept {
    if ((limited.isolated & op_bit<Bits>(op)) != 0) return alone_s_[op];
    const bool overlapped = (limited.barred & op_bit<Bits>(op)) != 0;
    return (overlapped ? overlap_share_s_ : share_s_)[weighting][op];
  }
  int sort_by_head(Bits waiting, const double* ready_s, std::int32_t* in_time) const noexcept;
  // The larger of `most` and the bound at the root by the last weighting.
  double raised(double most, double enough_s) const noexcept;
  double preemptive_bound(int weighting, const PartialSchedule<Bits>& partial,
                          const Limited& limited, std::span<const std::int32_t> in_time,
                          const double* ready_s, double enough_s) const noexcept;
  void rank_by_rest() noexcept;

  const LayerProblem& problem_;
  Bits all_;
  Bits leaves_ = 0;
  Bits sources_ = 0;                          // operators without predecessors
  Bits twins_[kMostOps<Bits>];                // set by prepare_search
  Bits urgent_[kMostOps<Bits>];               // set by prepare_search
  Bits mirrored_[kMostOps<Bits>];             // all that mirroring moves; set by prepare_search
  std::int32_t start_order_[kMostOps<Bits>];  // set by prepare_search
  std::int32_t turn_[kMostOps<Bits>];         // place in start order
  Bits before_[kMostOps<Bits>];
  Bits after_[kMostOps<Bits>];
  Bits descendants_[kMostOps<Bits>];  // all transitive successors of an operator
  Bits may_overlap_[kMostOps<Bits>];  // operators that may overlap this one
  Bits occupants_[kResources];        // operators that may use a core type while others run
  bool used_[kResources] = {};
  Bits alone_[kMaxModes];  // [i]: operators whose useful mode i occupies the whole chip
  Bits no_overlap_[kMaxModes];
  Bits no_alone_ = 0;
  Bits one_overlap_ = 0;  // operators with exactly one useful mode that allows overlap
  Bits one_core_ = 0;     // those of them that occupy a single core in it
  // [r]: operators that fit on type r alongside all that may overlap them.
  Bits always_fits_[kResources] = {};
  double rival_s_[kResources][kMostOps<Bits>];  // shortest operator that may take such a core
  std::int32_t most_use_[kResources][kMostOps<Bits>];  // of useful modes that allow overlap
  double shortest_s_[kMostOps<Bits>];
  double overlap_s_[kMostOps<Bits>];  // shortest mode that allows overlap
  double alone_s_[kMostOps<Bits>];    // shortest mode that does not allow it
  double rest_s_[kMostOps<Bits>];     // longest path from the end of an operator to the layer's
  std::int32_t useful_count_[kMostOps<Bits>];
  std::int32_t useful_[kMostOps<Bits>][kMaxModes];
  std::int32_t rank_[kMostOps<Bits>];          // position of an operator by rest_s_, longest first
  double ranked_rest_s_[kMostOps<Bits>];       // rest_s_ by rank
  double root_ready_s_[kMostOps<Bits>];        // earliest starts
  std::int32_t root_in_time_[kMostOps<Bits>];  // operators by earliest start
  int most_useful_ = 0;
  double longest_path_s_ = 0.0;
  int weightings_ = 0;
  mutable std::int32_t best_weighting_ = 0;   // weighting whose bound prunes most states
  mutable std::int32_t other_weighting_ = 0;  // weighting last tried after that one
  int path_weighting_ = -1;
  int path_size_ = 0;
  std::int32_t path_[kMostOps<Bits>];  // the longest path
  Bits on_path_ = 0;
  Bits network_ops_ = 0;  // operators that use the network
  double network_rate_ = 0.0;
  std::int32_t by_gain_[kMostOps<Bits>];  // the longest path, largest gain first
  double gain_[kMostOps<Bits>];           // see find_gains()
  double area_s_[kMostOps<Bits>];  // least share of tensor cores times seconds, if overlapped
  int off_path_count_ = 0;
  std::int32_t off_path_[kMostOps<Bits>];  // operators neither on the longest path nor network
  Bits path_overlaps_[kMostOps<Bits>];     // operators of the path that may overlap off_path_[i]
  double waste_s_[kMostOps<Bits>];         // least_waste() of a gap with off_path_[i], falling
  // Least rate times seconds over the modes of an operator; overlap_share_s_: over those that allow
  // overlap.
  double share_s_[kMaxWeightings][kMostOps<Bits>], overlap_share_s_[kMaxWeightings][kMostOps<Bits>];
  double rate_[kMaxWeightings][kMostOps<Bits> * kMaxModes];  // of each mode
};

// Replaces a schedule by a shorter one if local search finds one: operators without successors
// overlap the others, and the modes of the others are changed run by run.
template <typename Bits>
void improve_schedule(const LayerFacts<Bits>& facts, LayerSolution* best);

// The best of several list schedules; its bound is not filled in.
template <typename Bits>
LayerSolution best_list_schedule(const LayerFacts<Bits>& facts) noexcept;

}  // namespace phaze
