// What bounds, list schedules and the search share: a layer worked out once. Plain arrays, so that
// thousands of layers need no memory from the system.
#pragma once

#include <bit>
#include <cstdint>

#include "phaze/layer_schedule.hpp"

namespace phaze {

inline constexpr double kSame = 1e-12;               // relative; closer than this is equal
inline constexpr double kRoundedDown = 1.0 - 1e-13;  // keeps a bound below what it rounds up to
inline constexpr int kMixes = 8;                     // ways to weigh what a mode holds

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

// Where a schedule under construction stands.
struct Moment {
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
  // alone.
  double bound(const Moment& moment, OpBits barred) const noexcept;

  const LayerProblem& problem() const noexcept { return problem_; }
  int size() const noexcept { return problem_.size; }
  Moment beginning() const noexcept;
  OpBits all() const noexcept { return all_; }
  OpBits after(int op) const noexcept { return after_[op]; }
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
  int width(OpBits set) const noexcept;
  double preemptive_bound(int mix, const Moment& moment, OpBits barred,
                          const double* ready_s) const noexcept;

  const LayerProblem& problem_;
  OpBits all_;
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
  int most_useful_ = 0;
  int mixes_ = 0;
  double beside_share_s_[kMixes][kMaxLayerOps];    // the same if it may not run alone
  double share_s_[kMixes][kMaxLayerOps];           // least time of a whole chip an operator takes
  double rate_[kMixes][kMaxLayerOps * kMaxModes];  // share of the chip that a mode holds
};

// The best of several list schedules; its bound is not filled in.
LayerSolution best_list_schedule(const LayerFacts& facts) noexcept;

}  // namespace phaze
