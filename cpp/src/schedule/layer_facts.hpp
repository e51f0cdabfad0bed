// What bounds, list schedules and the search share: a layer worked out once. Plain arrays, so that
// thousands of layers need no memory from the system.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "phaze/layer_schedule.hpp"

namespace phaze {

inline constexpr double kSame = 1e-12;               // relative; closer than this is equal
inline constexpr double kRoundedDown = 1.0 - 1e-13;  // keeps a bound below what it rounds up to
inline constexpr int kMixes = 11;                    // ways to weigh what a mode holds

constexpr OpBits op_bit(int op) noexcept { return OpBits{1} << op; }

// Calls f(op) for every operator of a set, smallest first.
template <typename F>
void for_ops(OpBits set, const F& f) {
  for (; set != 0; set &= set - 1) f(std::countr_zero(set));
}

// An operator that runs now.
struct Running {
  std::int32_t op;
  std::int32_t mode;  // in LayerProblem::modes
  double finish_s;
};

// Where a schedule under construction stands. Copies only what runs.
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

  // No schedule that goes on from here ends earlier, if the operators of `barred` may no longer run
  // alone. Looks no further once the bound is `enough_s`.
  double bound(const Moment& moment, OpBits barred, double enough_s) const noexcept;

  // Adds what only a search needs: the bound of the longest path and the gaps beside it.
  void prepare_search() noexcept;

  const LayerProblem& problem() const noexcept { return problem_; }
  int size() const noexcept { return problem_.size; }
  Moment beginning() const noexcept;
  OpBits all() const noexcept { return all_; }
  OpBits after(int op) const noexcept { return after_[op]; }
  // Operators that can run in the same ways and for which the same wait: once two of them may
  // start, either can take the other's place.
  OpBits twins(int op) const noexcept { return twins_[op]; }
  // Operators that can run in the same ways and for which the same wait and more: once both may
  // start, such a one can take the other's place (docs/schedule.md has the proof).
  OpBits urgent(int op) const noexcept { return urgent_[op]; }
  // The order in which operators start that start at one moment: urgent ones before others.
  int in_turn(int turn) const noexcept { return in_turn_[turn]; }
  // Operators that nothing waits for. Run alone, such a one can as well be the last of all.
  OpBits leaves() const noexcept { return leaves_; }
  double alone_s(int op) const noexcept { return alone_s_[op]; }
  double tail_s(int op) const noexcept { return shortest_s_[op] + rest_s_[op]; }
  // Modes that no other mode makes useless, fastest first.
  int useful_count(int op) const noexcept { return useful_count_[op]; }
  int useful(int op, int i) const noexcept { return useful_[op][i]; }
  int most_useful() const noexcept { return most_useful_; }
  // Whether a useful mode holds the whole chip, so that nothing runs beside it.
  bool alone(int op, int i) const noexcept { return (alone_[i] & op_bit(op)) != 0; }

  bool fits(const Moment& m, int mode) const noexcept {
    const std::int32_t* use = problem_.modes[mode].use;
    return use[0] <= m.free[0] && use[1] <= m.free[1] && use[2] <= m.free[2];
  }
  bool may_start(const Moment& m, int op) const noexcept {
    return (m.started & op_bit(op)) == 0 && (problem_.before[op] & ~m.done) == 0;
  }
  void start(Moment* m, int op, int mode) const noexcept;
  // Moves on to the next finish; at least one operator must run.
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
  OpBits later_[kMaxLayerOps];  // operators that wait for one, however far
  OpBits apart_[kMaxLayerOps];  // operators that may run beside one
  OpBits holds_[kResources];    // operators that may hold a resource while others run
  bool used_[kResources] = {};
  OpBits alone_[kMaxModes];  // [i]: operators whose useful mode i holds the whole chip
  double shortest_s_[kMaxLayerOps];
  double beside_s_[kMaxLayerOps];  // shortest of the modes that leave room for others
  double alone_s_[kMaxLayerOps];   // shortest of those that do not
  double rest_s_[kMaxLayerOps];    // longest path from an operator's end to the layer's
  std::int32_t useful_count_[kMaxLayerOps];
  std::int32_t useful_[kMaxLayerOps][kMaxModes];
  std::int32_t rank_[kMaxLayerOps];     // of an operator: longest rest first
  double ranked_rest_s_[kMaxLayerOps];  // by rank
  int most_useful_ = 0;
  int mixes_ = 0;
  mutable std::int32_t leader_ = 0;      // the mix that settles most states of a search
  mutable std::int32_t challenger_ = 0;  // the one that was tried last beside it
  int spine_mix_ = -1;
  int spine_size_ = 0;
  std::int32_t spine_[kMaxLayerOps];  // the longest path
  OpBits on_spine_ = 0;
  OpBits wires_ = 0;  // operators that take the network
  double wire_rate_ = 0.0;
  std::int32_t by_gain_[kMaxLayerOps];  // the spine, largest gain first
  double gain_[kMaxLayerOps];
  double area_s_[kMaxLayerOps];  // share of the tensor cores times seconds, beside others
  int aside_count_ = 0;
  std::int32_t aside_[kMaxLayerOps];   // operators off the spine and the network
  OpBits beside_spine_[kMaxLayerOps];  // operators of the spine that may run beside aside_[i]
  double waste_s_[kMaxLayerOps];       // least waste of a gap that holds aside_[i]; falls with i
  double beside_share_s_[kMixes][kMaxLayerOps];    // the same if it may not run alone
  double share_s_[kMixes][kMaxLayerOps];           // least time of a whole chip an operator takes
  double rate_[kMixes][kMaxLayerOps * kMaxModes];  // share of the chip that a mode holds
};

// Improves a schedule where operators that nothing waits for can hide beside others, trying one
// after another the ways to run those.
void improve_schedule(const LayerFacts& facts, LayerSolution* best);

// The best of several list schedules; its bound is not filled in.
LayerSolution best_list_schedule(const LayerFacts& facts) noexcept;

}  // namespace phaze
