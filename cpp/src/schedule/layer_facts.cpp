
#include "schedule/layer_facts.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"

namespace phaze {

namespace {

// Weight of each core type in a weighting. The weighted core shares of all running operators never
// exceed one in total, so the sum of shares times durations is a lower bound of the makespan.
constexpr double kWeights[][kResources] = {{1.0, 0.0, 0.0},  {0.0, 1.0, 0.0}, {0.0, 0.0, 1.0},
                                           {0.5, 0.5, 0.0},  {0.8, 0.2, 0.0}, {0.2, 0.8, 0.0},
                                           {0.45, 0.45, 0.1}};

bool no_worse(const LayerMode& a, const LayerMode& b) noexcept {
  for (int r = 0; r < kResources; ++r) {
    if (a.use[r] > b.use[r]) return false;
  }
  return a.seconds <= b.seconds;
}

}  // namespace

template <typename Bits>
LayerFacts<Bits>::LayerFacts(const LayerProblem& problem) noexcept : problem_(problem) {
  const int n = problem.size;
  all_ = n == kMostOps<Bits> ? ~Bits{0} : op_bit<Bits>(n) - 1;
  Bits ancestors[kMostOps<Bits>];
  double end_s[kMostOps<Bits>];  // earliest
  for (int i = 0; i < n; ++i) {
    find_modes(i);
    after_[i] = 0;
    before_[i] = static_cast<Bits>(problem.before[i]);
    ancestors[i] = before_[i];
    double start_s = 0.0;
    for_ops(before_[i], [&](int b) {
      ancestors[i] |= ancestors[b];
      after_[b] |= op_bit<Bits>(i);
      start_s = std::max(start_s, end_s[b]);
    });
    end_s[i] = start_s + shortest_s_[i];
    longest_path_s_ = std::max(longest_path_s_, end_s[i]);
  }
  for (int i = n - 1; i >= 0; --i) {
    rest_s_[i] = 0.0;
    descendants_[i] = after_[i];
    for_ops(after_[i], [&](int next) {
      rest_s_[i] = std::max(rest_s_[i], tail_s(next));
      descendants_[i] |= descendants_[next];
    });
  }
  for (int i = 0; i < n; ++i) {
    if (after_[i] == 0) leaves_ |= op_bit<Bits>(i);
    if (before_[i] == 0) sources_ |= op_bit<Bits>(i);
    may_overlap_[i] = all_ & ~(ancestors[i] | descendants_[i] | op_bit<Bits>(i));
  }
  find_alone();
  rank_by_rest();
}

template <typename Bits>
void LayerFacts<Bits>::rank_by_rest() noexcept {
  std::int32_t ranked[kMostOps<Bits>];
  for (int i = 0; i < size(); ++i) {
    int at = i;
    for (; at > 0 && rest_s_[ranked[at - 1]] < rest_s_[i]; --at) ranked[at] = ranked[at - 1];
    ranked[at] = i;
  }
  for (int i = 0; i < size(); ++i) {
    rank_[ranked[i]] = i;
    ranked_rest_s_[i] = rest_s_[ranked[i]];
  }
}

template <typename Bits>
void LayerFacts<Bits>::find_alone() noexcept {
  for (int m = 0; m < problem_.first_mode[problem_.size]; ++m) {
    for (int r = 0; r < kResources; ++r) used_[r] = used_[r] || problem_.modes[m].use[r] > 0;
  }
  std::fill(alone_, alone_ + kMaxModes, Bits{0});
  std::fill(no_overlap_, no_overlap_ + kMaxModes, all_);
  std::fill(occupants_, occupants_ + kResources, Bits{0});
  for (int i = 0; i < problem_.size; ++i) {
    overlap_s_[i] = kInfinite;
    alone_s_[i] = kInfinite;
    most_useful_ = std::max(most_useful_, static_cast<int>(useful_count_[i]));
    int overlapping = 0;
    for (int r = 0; r < kResources; ++r) most_use_[r][i] = 0;
    for (int u = 0; u < useful_count_[i]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[i][u]];
      bool alone = true;
      for (int r = 0; r < kResources; ++r) {
        alone = alone && (!used_[r] || mode.use[r] == problem_.capacity[r]);
      }
      if (alone) {
        alone_[u] |= op_bit<Bits>(i);
        alone_s_[i] = std::min(alone_s_[i], mode.seconds);
        continue;
      }
      ++overlapping;
      no_overlap_[u] &= ~op_bit<Bits>(i);
      overlap_s_[i] = std::min(overlap_s_[i], mode.seconds);
      for (int r = 0; r < kResources; ++r) {
        if (mode.use[r] > 0) occupants_[r] |= op_bit<Bits>(i);
        most_use_[r][i] = std::max(most_use_[r][i], mode.use[r]);
      }
    }
    if (alone_s_[i] == kInfinite) no_alone_ |= op_bit<Bits>(i);
    if (overlapping != 1) continue;
    one_overlap_ |= op_bit<Bits>(i);
    if (most_use_[0][i] + most_use_[1][i] + most_use_[2][i] == 1) one_core_ |= op_bit<Bits>(i);
  }
}

template <typename Bits>
void LayerFacts<Bits>::find_modes(int op) noexcept {
  const int first = problem_.first_mode[op];
  const int last = problem_.first_mode[op + 1];
  int count = 0;
  shortest_s_[op] = kInfinite;
  for (int m = first; m < last; ++m) {
    const LayerMode& mode = problem_.modes[m];
    shortest_s_[op] = std::min(shortest_s_[op], mode.seconds);
    bool useful = true;
    for (int other = first; other < last; ++other) {
      const LayerMode& rival = problem_.modes[other];
      const bool beaten = other != m && no_worse(rival, mode);
      if (beaten && (other < m || !no_worse(mode, rival))) useful = false;
    }
    if (!useful) continue;
    int at = count++;
    for (; at > 0 && problem_.modes[useful_[op][at - 1]].seconds > mode.seconds; --at) {
      useful_[op][at] = useful_[op][at - 1];
    }
    useful_[op][at] = m;
  }
  useful_count_[op] = count;
}

// The largest antichain of a set: the number of operators minus the largest matching of operators
// with later ones (Dilworth's theorem).
template <typename Bits>
int LayerFacts<Bits>::width(Bits set) const noexcept {
  const int size = count_ops(set);
  if (size <= 1) return size;
  std::int8_t partner[kMostOps<Bits>];  // of a later operator: the earlier one matched with it
  Bits free = set;                      // operators without a partner
  Bits seen = 0;
  const auto augment = [&](const auto& self, int op) -> bool {
    Bits choices = descendants_[op] & set & ~seen;
    if ((choices & free) != 0) choices &= free;
    while (choices != 0) {
      const int next = first_of(choices);
      seen |= op_bit<Bits>(next);
      if ((free & op_bit<Bits>(next)) != 0 || self(self, partner[next])) {
        partner[next] = static_cast<std::int8_t>(op);
        free &= ~op_bit<Bits>(next);
        return true;
      }
      choices &= ~seen;
    }
    return false;
  };
  for_ops(set, [&](int op) {
    seen = 0;
    augment(augment, op);
  });
  return count_ops(free);
}

// If at most q operators use a core type at once, each is charged 1/q of that type, which is more
// than one core's share on a chip with many; this is valid if modes use one core or all.
template <typename Bits>
void LayerFacts<Bits>::find_charges(int r, double* charged_of) noexcept {
  bool single = problem_.capacity[r] > 1;
  for (int i = 0; i < problem_.size; ++i) {
    for (int u = 0; u < useful_count_[i]; ++u) {
      single = single && (problem_.modes[useful_[i][u]].use[r] <= 1 || alone(i, u));
    }
  }
  std::fill(charged_of, charged_of + problem_.first_mode[size()], problem_.capacity[r]);
  for (int i = 0; i < problem_.size; ++i) {
    const Bits rivals = may_overlap_[i] & occupants_[r];
    const int own = single ? 1 + width(rivals) : problem_.capacity[r];
    for (int u = 0; u < useful_count_[i]; ++u) {
      if (!alone(i, u)) charged_of[useful_[i][u]] = std::min(problem_.capacity[r], own);
    }
    if (rivals == 0 || (single && own <= problem_.capacity[r])) {
      always_fits_[r] |= op_bit<Bits>(i);
    }
  }
}

template <typename Bits>
void LayerFacts<Bits>::add_weighting(const double* weights, const ChargedOf& charged_of) noexcept {
  double* rate = rate_[weightings_];
  const int modes = problem_.first_mode[size()];
  std::fill(rate, rate + modes, 0.0);
  for (int r = 0; r < kResources; ++r) {
    if (weights[r] == 0.0) continue;
    for (int m = 0; m < modes; ++m) {
      rate[m] += weights[r] * problem_.modes[m].use[r] / charged_of[r][m];
    }
  }
  find_shares(weightings_++);
}

// A weighting by operators: one of at most k concurrent operators counts 1/k, and 1 if it uses
// every core of every type.
template <typename Bits>
void LayerFacts<Bits>::add_weighting_by_operators() noexcept {
  for (int i = 0; i < problem_.size; ++i) {
    const double least = 1.0 / (1 + width(may_overlap_[i]));
    for (int u = 0; u < useful_count_[i]; ++u) {
      rate_[weightings_][useful_[i][u]] = alone(i, u) ? 1.0 : least;
    }
  }
  find_shares(weightings_++);
}

template <typename Bits>
void LayerFacts<Bits>::find_shares(int weighting) noexcept {
  for (int i = 0; i < problem_.size; ++i) {
    double least = kInfinite;
    double overlap_share = kInfinite;
    for (int u = 0; u < useful_count_[i]; ++u) {
      const int m = useful_[i][u];
      const double share = rate_[weighting][m] * problem_.modes[m].seconds;
      least = std::min(least, share);
      if (!alone(i, u)) overlap_share = std::min(overlap_share, share);
    }
    share_s_[weighting][i] = least;
    overlap_share_s_[weighting][i] = overlap_share;
  }
}

template <typename Bits>
PartialSchedule<Bits> LayerFacts<Bits>::beginning() const noexcept {
  PartialSchedule<Bits> m;
  m.now_s = 0.0;
  m.started = 0;
  m.done = 0;
  m.ready = sources_;
  m.running_count = 0;
  std::copy(problem_.capacity, problem_.capacity + kResources, m.free);
  return m;
}

template <typename Bits>
void LayerFacts<Bits>::start(PartialSchedule<Bits>* m, int op, int mode) const noexcept {
  const LayerMode& chosen = problem_.modes[mode];
  for (int r = 0; r < kResources; ++r) m->free[r] -= chosen.use[r];
  m->started |= op_bit<Bits>(op);
  m->ready &= ~op_bit<Bits>(op);
  m->running[m->running_count++] = {op, mode, m->now_s + chosen.seconds};
}

template <typename Bits>
void LayerFacts<Bits>::advance(PartialSchedule<Bits>* m) const noexcept {
  double next = kInfinite;
  for (int i = 0; i < m->running_count; ++i) next = std::min(next, m->running[i].finish_s);
  m->now_s = next;
  int count = 0;
  Bits freed = 0;  // successors of those that end
  for (int i = 0; i < m->running_count; ++i) {
    const Running r = m->running[i];
    if (r.finish_s > next) {
      m->running[count++] = r;
      continue;
    }
    for (int k = 0; k < kResources; ++k) m->free[k] += problem_.modes[r.mode].use[k];
    m->done |= op_bit<Bits>(r.op);
    freed |= after_[r.op];
  }
  m->running_count = count;
  for_ops(freed, [&](int op) {
    if ((before_[op] & ~m->done) == 0) m->ready |= op_bit<Bits>(op);
  });
}

template <typename Bits>
double LayerFacts<Bits>::find_heads(const PartialSchedule<Bits>& m, Bits held, double enough_s,
                                    Limited* limited, double* ready_s) const noexcept {
  double finish_s[kMostOps<Bits>];  // earliest finish of unfinished operators
  double most = m.now_s;
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    finish_s[r.op] = r.finish_s;
    most = std::max(most, r.finish_s);  // successors are added below
  }
  const double last_s = most;
  double free_s[kResources] = {kInfinite, kInfinite, kInfinite};  // first release of a core
  if (held != 0) {
    for (int i = 0; i < m.running_count; ++i) {
      const Running& running = m.running[i];
      for (int r = 0; r < kResources; ++r) {
        const bool uses = problem_.modes[running.mode].use[r] > 0;
        if (uses) free_s[r] = std::min(free_s[r], running.finish_s);
      }
    }
  }
  for (Bits left = all_ & ~m.started; left != 0 && most < enough_s; left &= left - 1) {
    const int op = first_of(left);
    double ready = m.now_s;
    for_ops(before_[op] & ~m.done, [&](int b) { ready = std::max(ready, finish_s[b]); });
    if ((held & op_bit<Bits>(op)) != 0) {
      // It starts alongside others only once it did not fit and a core was released.
      double until = last_s;
      for (int r = 0; r < kResources; ++r) {
        if ((always_fits_[r] & op_bit<Bits>(op)) != 0) continue;
        until = std::min({until, free_s[r], m.now_s + rival_s_[r][op]});
      }
      ready = std::max(ready, until);
    }
    // An operator can run alone only after all running operators have ended.
    const double alone = (limited->barred & op_bit<Bits>(op)) != 0 ? kInfinite : alone_s_[op];
    if (ready + overlap_s_[op] + rest_s_[op] >= enough_s) {  // too late to overlap anything
      limited->isolated |= op_bit<Bits>(op);
      ready = std::max(ready, last_s);
      finish_s[op] = ready + alone;
    } else {
      finish_s[op] = std::min(ready + overlap_s_[op], std::max(ready, last_s) + alone);
    }
    ready_s[op] = ready;
    most = std::max(most, finish_s[op] + rest_s_[op]);
  }
  return most;
}

template <typename Bits>
int LayerFacts<Bits>::sort_by_head(Bits waiting, const double* ready_s,
                                   std::int32_t* in_time) const noexcept {
  int count = 0;
  for_ops(waiting, [&](int op) {
    int at = count++;
    for (; at > 0 && ready_s[in_time[at - 1]] > ready_s[op]; --at) in_time[at] = in_time[at - 1];
    in_time[at] = op;
  });
  return count;
}

template <typename Bits>
double LayerFacts<Bits>::raised(double most, double enough_s) const noexcept {
  if (most >= enough_s) return most;
  const std::span<const std::int32_t> waiting(root_in_time_, static_cast<std::size_t>(size()));
  return std::max(most, preemptive_bound(weightings_ - 1, beginning(), Limited{}, waiting,
                                         root_ready_s_, enough_s));
}

template <typename Bits>
double LayerFacts<Bits>::root_bound(double enough_s) noexcept {
  Limited limited;
  double most = find_heads(beginning(), 0, enough_s, &limited, root_ready_s_);
  if (most >= enough_s) return most;
  sort_by_head(all_, root_ready_s_, root_in_time_);
  ChargedOf charged_of;
  for (int r = 0; r < kResources; ++r) {
    if (used_[r]) find_charges(r, charged_of[r]);
  }
  for (const auto& weights : kWeights) {
    bool whole = true;
    for (int r = 0; r < kResources; ++r) whole = whole && (weights[r] == 0.0 || used_[r]);
    if (!whole) continue;
    add_weighting(weights, charged_of);
    most = raised(most, enough_s);
    if (most >= enough_s) return most;
  }
  add_weighting_by_operators();
  return raised(most, enough_s);
}

template <typename Bits>
double LayerFacts<Bits>::bound(const PartialSchedule<Bits>& m, Bits barred, Bits held,
                               bool thorough, double enough_s) const noexcept {
  double ready_s[kMostOps<Bits>];
  Limited limited{barred, 0};
  double most = find_heads(m, held, enough_s, &limited, ready_s);
  if (most >= enough_s) return most;
  std::int32_t in_time[kMostOps<Bits>];
  const int count = sort_by_head(all_ & ~m.started, ready_s, in_time);
  const std::span<const std::int32_t> waiting(in_time, static_cast<std::size_t>(count));
  // One weighting prunes nearly all states of a search. Of the others, one more is tried per state;
  // if that one prunes the state, it is tried first from then on.
  most = std::max(most, preemptive_bound(best_weighting_, m, limited, waiting, ready_s, enough_s));
  if (!thorough) return most;
  if (most < enough_s) most = path_bound(m, limited, most);
  if (most >= enough_s || weightings_ < 2) return most;
  other_weighting_ = (other_weighting_ + 1) % weightings_;
  if (other_weighting_ == best_weighting_) other_weighting_ = (other_weighting_ + 1) % weightings_;
  most = std::max(most, preemptive_bound(other_weighting_, m, limited, waiting, ready_s, enough_s));
  if (most >= enough_s) std::swap(best_weighting_, other_weighting_);
  return most;
}

// Jackson's preemptive schedule on one machine, with the weighted shares as processing times and
// rest_s_ as delivery times: the ready operator with the longest rest runs first.
template <typename Bits>
double LayerFacts<Bits>::preemptive_bound(int weighting, const PartialSchedule<Bits>& m,
                                          const Limited& limited,
                                          std::span<const std::int32_t> in_time,
                                          const double* ready_s, double enough_s) const noexcept {
  double left_s[kMostOps<Bits>];  // remaining work by rank
  Bits open = 0;                  // ranks that are ready and have work left
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    const double left = rate_[weighting][r.mode] * (r.finish_s - m.now_s);
    if (left <= 0.0) continue;
    left_s[rank_[r.op]] = left;
    open |= op_bit<Bits>(rank_[r.op]);
  }
  double most = m.now_s;
  double clock = m.now_s;
  const auto work_until = [&](double until) {
    while (open != 0 && most < enough_s) {
      const int first = first_of(open);
      if (clock + left_s[first] > until) {
        left_s[first] -= until - clock;
        clock = until;
        return;
      }
      clock += left_s[first];
      most = std::max(most, clock + ranked_rest_s_[first]);
      open &= open - 1;
    }
  };
  for (const std::int32_t op : in_time) {
    const double work = share(weighting, op, limited);
    if (work <= 0.0) continue;
    if (ready_s[op] > clock) {
      work_until(ready_s[op]);
      if (most >= enough_s) return most;
      clock = std::max(clock, ready_s[op]);
    }
    left_s[rank_[op]] = work;
    open |= op_bit<Bits>(rank_[op]);
  }
  work_until(kInfinite);
  return most;
}

Status check_layer(const LayerProblem& problem) noexcept {
  if (problem.size < 1) return Status::kBadShape;
  if (problem.size > kMaxLayerOps) return Status::kTooManyOps;
  for (const std::int32_t cores : problem.capacity) {
    if (cores < 0) return Status::kBadChip;
  }
  for (int i = 0; i < problem.size; ++i) {
    const std::int32_t first = problem.first_mode[i];
    const std::int32_t last = problem.first_mode[i + 1];
    if (first < 0 || last > kMaxLayerOps * kMaxModes) return Status::kBadMode;
    if (last <= first || last - first > kMaxModes) return Status::kBadMode;
    if ((problem.before[i] >> i) != 0) return Status::kBadEdge;
    for (int m = problem.first_mode[i]; m < problem.first_mode[i + 1]; ++m) {
      const LayerMode& mode = problem.modes[m];
      if (!std::isfinite(mode.seconds)) return Status::kNotFinite;
      if (mode.seconds < 0.0) return Status::kNegative;
      // The bounds assume that nothing overlaps a mode that occupies all cores, so every mode must
      // use at least one core.
      if (std::all_of(mode.use, mode.use + kResources, [](auto n) { return n == 0; })) {
        return Status::kBadMode;
      }
      for (int r = 0; r < kResources; ++r) {
        if (mode.use[r] < 0 || mode.use[r] > problem.capacity[r]) return Status::kBadMode;
      }
    }
  }
  return Status::kOk;
}

// ---- rates at which overlap gains nothing: the fifth bound of docs/schedule.md ----

// Each operator in turn gets the rate alone_s / overlap_s, at which overlapped execution counts as
// much as isolated execution, or a smaller rate if operators that already have one and may overlap
// this operator leave less of 1. Of concurrent operators, the last to get its rate got at most what
// the others had left, so their rates never add up to more than one. Longer operators come first,
// and with `by_type` operators on the first core type before all others.
template <typename Bits>
void LayerFacts<Bits>::add_even_weighting(bool by_type) noexcept {
  const auto before = [&](int a, int b) {
    const bool first_a = (occupants_[0] & op_bit<Bits>(a)) != 0;
    const bool first_b = (occupants_[0] & op_bit<Bits>(b)) != 0;
    if (by_type && first_a != first_b) return first_a;
    return shortest_s_[a] > shortest_s_[b];
  };
  std::int32_t order[kMostOps<Bits>];
  for (int i = 0; i < size(); ++i) {
    int at = i;
    for (; at > 0 && before(i, order[at - 1]); --at) order[at] = order[at - 1];
    order[at] = i;
  }
  double rate[kMostOps<Bits>];
  Bits rated = 0;
  for (int k = 0; k < size(); ++k) {
    const int op = order[k];
    rate[op] = 0.0;
    if (overlap_s_[op] < kInfinite) {
      const double even = alone_s_[op] < overlap_s_[op] ? alone_s_[op] / overlap_s_[op] : 1.0;
      rate[op] = std::max(0.0, std::min(even, 1.0 - most_overlapping(op, rated, rate)));
      if (rate[op] > 0.0) rated |= op_bit<Bits>(op);
    }
    for (int u = 0; u < useful_count_[op]; ++u) {
      rate_[weightings_][useful_[op][u]] = alone(op, u) ? 1.0 : rate[op];
    }
  }
  find_shares(weightings_++);
}

// Upper bound on the sum of the rates of operators that overlap `op`: of operators in a chain only
// one runs at a time, and no more run than there are cores.
template <typename Bits>
double LayerFacts<Bits>::most_overlapping(int op, Bits rated, const double* rate) const noexcept {
  const Bits others = may_overlap_[op] & rated;
  double by_type = 0.0;
  Bits left = others;
  for (int r = 0; r < kResources && left != 0; ++r) {
    const Bits own = left & occupants_[r];
    if (own == 0) continue;
    left &= ~own;
    int least = problem_.capacity[r];
    for (int u = 0; u < useful_count_[op]; ++u) {
      if (!alone(op, u)) least = std::min(least, problem_.modes[useful_[op][u]].use[r]);
    }
    by_type += most_in_chains(own, problem_.capacity[r] - least, rate);
    if (own == others) return by_type;  // no more than all its chains
  }
  if (left != 0) return kInfinite;
  return std::min(by_type, most_in_chains(others, kMostOps<Bits>, rate));
}

// Partitions a set into chains of dependent operators, and sums the largest rates of at most
// `count` chains.
template <typename Bits>
double LayerFacts<Bits>::most_in_chains(Bits set, int count, const double* rate) const noexcept {
  double largest[kMostOps<Bits>];
  int rows = 0;
  while (set != 0) {
    double most = 0.0;
    Bits row = set;
    while (row != 0) {
      const int op = first_of(row);
      most = std::max(most, rate[op]);
      set &= ~op_bit<Bits>(op);
      row &= descendants_[op];
    }
    int at = rows++;
    for (; at > 0 && largest[at - 1] < most; --at) largest[at] = largest[at - 1];
    largest[at] = most;
  }
  double sum = 0.0;
  for (int i = 0; i < std::min(rows, count); ++i) sum += largest[i];
  return sum;
}

// ---- the longest path without the network, and the gaps for overlapping other operators ----

namespace {

constexpr int kNetwork = kResources - 1;

}  // namespace

template <typename Bits>
double LayerFacts<Bits>::prepare_search(double most, double enough_s) noexcept {
  find_path();
  add_path_weighting();
  find_waste();
  find_gains();
  most = raised(path_bound(beginning(), Limited{}, most), enough_s);
  for (int first_type = 0; first_type < 2 && most < enough_s; ++first_type) {
    add_even_weighting(first_type == 1);
    most = raised(most, enough_s);
  }
  if (most < enough_s) {
    find_twins();
    find_rivals();
  }
  return most;
}

template <typename Bits>
bool LayerFacts<Bits>::same_modes(int a, int b) const noexcept {
  const int first_a = problem_.first_mode[a];
  const int first_b = problem_.first_mode[b];
  const int count = problem_.first_mode[a + 1] - first_a;
  if (count != problem_.first_mode[b + 1] - first_b) return false;
  for (int m = 0; m < count; ++m) {
    const LayerMode& x = problem_.modes[first_a + m];
    const LayerMode& y = problem_.modes[first_b + m];
    if (x.seconds != y.seconds || !std::equal(x.use, x.use + kResources, y.use)) return false;
  }
  return true;
}

template <typename Bits>
void LayerFacts<Bits>::find_twins() noexcept {
  // Whether no mode of an operator ends earlier than a compatible mode that started before it: only
  // then does exchanging two operators never delay the one that moves.
  const auto in_order = [&](int op) {
    for (int u = 0; u < useful_count_[op]; ++u) {
      for (int v = 0; v < u; ++v) {  // the faster of the two
        const std::int32_t* slow = problem_.modes[useful_[op][u]].use;
        const std::int32_t* fast = problem_.modes[useful_[op][v]].use;
        bool apart = false;
        for (int r = 0; r < kResources; ++r) {
          apart = apart || slow[r] + fast[r] > problem_.capacity[r];
        }
        if (!apart) return false;
      }
    }
    return true;
  };
  std::fill(twins_, twins_ + size(), Bits{0});
  std::fill(urgent_, urgent_ + size(), Bits{0});
  std::fill(mirrored_, mirrored_ + size(), Bits{0});
  int successors[kMostOps<Bits>];
  for (int i = 0; i < size(); ++i) {
    successors[i] = count_ops(after_[i]);
    int at = i;
    for (; at > 0 && successors[start_order_[at - 1]] < successors[i]; --at) {
      start_order_[at] = start_order_[at - 1];
    }
    start_order_[at] = i;
  }
  for (int turn = 0; turn < size(); ++turn) turn_[start_order_[turn]] = turn;
  for (int i = 0; i < size(); ++i) {
    for (int j = 0; j < i; ++j) {
      if (shortest_s_[i] != shortest_s_[j] || !same_modes(i, j)) continue;
      if (after_[i] == after_[j]) {
        twins_[i] |= op_bit<Bits>(j);
        twins_[j] |= op_bit<Bits>(i);
        continue;
      }
      if (before_[i] == before_[j] && mirrored_[i] == 0) mirrored_[i] = moved_by_mirroring(j, i);
      if (!in_order(i)) continue;
      if ((after_[i] & ~after_[j]) == 0) {
        urgent_[i] |= op_bit<Bits>(j);
      } else if ((after_[j] & ~after_[i]) == 0) {
        urgent_[j] |= op_bit<Bits>(i);
      }
    }
  }
}

// The operators moved by an automorphism of the layer that exchanges two operators with the same
// modes and predecessors: besides these, the successors that only one of the two has, and so on.
// Empty if none is found.
template <typename Bits>
Bits LayerFacts<Bits>::moved_by_mirroring(int a, int b) const noexcept {
  std::int32_t image[kMostOps<Bits>];
  std::int32_t waiting[kMostOps<Bits>];  // the first of each pair
  int pairs = 0;
  Bits moved = 0;
  const auto pair = [&](int x, int y) {
    image[x] = y;
    image[y] = x;
    moved |= op_bit<Bits>(x) | op_bit<Bits>(y);
    waiting[pairs++] = x;
  };
  pair(a, b);
  for (int next = 0; next < pairs; ++next) {
    const int x = waiting[next];
    Bits own = after_[x] & ~after_[image[x]];
    Bits other = after_[image[x]] & ~after_[x];
    for (; own != 0; own &= own - 1) {
      const int from = first_of(own);
      Bits to =
          (moved & op_bit<Bits>(from)) != 0 ? other & op_bit<Bits>(image[from]) : other & ~moved;
      while (to != 0 && (moved & op_bit<Bits>(from)) == 0) {
        const int into = first_of(to);
        if (same_modes(from, into) && count_ops(after_[from]) == count_ops(after_[into])) {
          pair(from, into);
          to = op_bit<Bits>(into);
        } else {
          to &= to - 1;
        }
      }
      if (to == 0) return 0;
      other &= ~to;
    }
    if (other != 0) return 0;
  }
  for (Bits left = moved; left != 0; left &= left - 1) {
    const int op = first_of(left);
    Bits expected = before_[op] & ~moved;
    for_ops(before_[op] & moved, [&](int p) { expected |= op_bit<Bits>(image[p]); });
    if (expected != before_[image[op]]) return 0;
  }
  return moved;
}

// What `find_heads` and `unhindered` need to know of the operators that may overlap each other.
template <typename Bits>
void LayerFacts<Bits>::find_rivals() noexcept {
  for (int r = 0; r < kResources; ++r) {
    always_fits_[r] |= all_ & ~occupants_[r];
    for_ops(all_ & ~always_fits_[r], [&](int op) {
      rival_s_[r][op] = kInfinite;
      for_ops(may_overlap_[op] & occupants_[r],
              [&](int other) { rival_s_[r][op] = std::min(rival_s_[r][op], overlap_s_[other]); });
    });
  }
}

template <typename Bits>
Bits LayerFacts<Bits>::unhindered(const PartialSchedule<Bits>& m, Bits ignored) const noexcept {
  double last_s = m.now_s;
  for (int i = 0; i < m.running_count; ++i) last_s = std::max(last_s, m.running[i].finish_s);
  // Whether the cores of a type suffice for an operator and all `others` that may overlap it.
  const auto suffices = [&](int op, Bits others) {
    for (int r = 0; r < kResources; ++r) {
      if ((always_fits_[r] & op_bit<Bits>(op)) != 0) continue;
      int left = m.free[r] - most_use_[r][op];
      for_ops(others & occupants_[r], [&](int other) { left -= most_use_[r][other]; });
      if (left < 0) return false;
    }
    return true;
  };
  Bits found = 0;
  Bits unclear = 0;
  for_ops(m.ready & one_overlap_, [&](int op) {
    if (m.now_s + overlap_s_[op] > last_s) return;
    const Bits others = may_overlap_[op] & ~(m.started | ignored);
    if (suffices(op, others)) {
      found |= op_bit<Bits>(op);
    } else if (suffices(op, others & m.ready)) {
      unclear |= op_bit<Bits>(op);
    }
  });
  if (unclear == 0) return found;
  double end_s[kMostOps<Bits>];  // earliest, as in find_heads
  double start_s[kMostOps<Bits>];
  for (int i = 0; i < m.running_count; ++i) end_s[m.running[i].op] = m.running[i].finish_s;
  for_ops(all_ & ~m.started, [&](int op) {
    start_s[op] = m.now_s;
    for_ops(before_[op] & ~m.done, [&](int b) { start_s[op] = std::max(start_s[op], end_s[b]); });
    end_s[op] =
        std::min(start_s[op] + overlap_s_[op], std::max(start_s[op], last_s) + alone_s_[op]);
  });
  for_ops(unclear, [&](int op) {
    Bits soon = 0;  // operators that may start before this one would end
    for_ops(may_overlap_[op] & ~(m.started | ignored), [&](int other) {
      if (start_s[other] < m.now_s + overlap_s_[op]) soon |= op_bit<Bits>(other);
    });
    if (suffices(op, soon)) found |= op_bit<Bits>(op);
  });
  return found;
}

template <typename Bits>
void LayerFacts<Bits>::find_path() noexcept {
  int at = 0;
  for (int i = 1; i < size(); ++i) {
    if (tail_s(i) > tail_s(at)) at = i;
  }
  while (at >= 0) {
    path_[path_size_++] = at;
    on_path_ |= op_bit<Bits>(at);
    int next = -1;
    for_ops(after_[at], [&](int op) {
      if (next < 0 || tail_s(op) > tail_s(next)) next = op;
    });
    at = next;
  }
  for (int i = 0; i < size(); ++i) {
    bool always = true;  // no two such operators overlap in any mode
    for (int u = 0; u < useful_count_[i]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[i][u]];
      always = always && !alone(i, u) && 2 * mode.use[kNetwork] > problem_.capacity[kNetwork];
    }
    if (always) network_ops_ |= op_bit<Bits>(i);
  }
}

// At any time at most one operator of the longest path runs and at most one network operator. A
// network operator on the path counts with rate 1, others with one common network rate; other
// operators of the path count with the rate at which overlap gains nothing, limited to 1 minus the
// network rate. The network rate is the one with the largest sum of rates times seconds.
template <typename Bits>
void LayerFacts<Bits>::add_path_weighting() noexcept {
  const auto even = [&](int op) {
    return alone_s_[op] < overlap_s_[op] ? alone_s_[op] / overlap_s_[op] : 1.0;
  };
  const Bits plain = on_path_ & ~network_ops_;
  double most = -1.0;
  const auto consider = [&](double rate) {
    double sum = 0.0;
    for_ops(network_ops_ & ~on_path_, [&](int op) { sum += rate * overlap_s_[op]; });
    for_ops(plain, [&](int op) {
      sum += std::min(alone_s_[op], std::min(even(op), 1.0 - rate) * overlap_s_[op]);
    });
    if (sum <= most) return;
    most = sum;
    network_rate_ = rate;
  };
  consider(0.0);
  for_ops(plain, [&](int op) { consider(1.0 - even(op)); });
  for (int i = 0; i < size(); ++i) {
    const bool on_path = (on_path_ & op_bit<Bits>(i)) != 0;
    const bool on_network = (network_ops_ & op_bit<Bits>(i)) != 0;
    for (int u = 0; u < useful_count_[i]; ++u) {
      double rate = 0.0;
      if (alone(i, u)) {
        rate = 1.0;
      } else if (on_network) {
        rate = on_path ? 1.0 : network_rate_;
      } else if (on_path) {
        rate = std::min(even(i), 1.0 - network_rate_);
      }
      rate_[weightings_][useful_[i][u]] = rate;
    }
  }
  find_shares(weightings_);
  path_weighting_ = weightings_++;
}

template <typename Bits>
void LayerFacts<Bits>::find_waste() noexcept {
  double network_s = 0.0;  // seconds of network operators that overlap the path
  for_ops(network_ops_ & ~on_path_, [&](int op) { network_s += overlap_s_[op]; });
  for_ops(all_ & ~on_path_ & ~network_ops_, [&](int op) {
    int first = 0;
    while (first < path_size_ &&
           (descendants_[path_[path_size_ - 1 - first]] & op_bit<Bits>(op)) == 0)
      ++first;
    first = path_size_ - first;
    int last = first;
    while (last < path_size_ && (descendants_[op] & op_bit<Bits>(path_[last])) == 0) ++last;
    const double waste = least_waste(first, last, overlap_s_[op], network_s);
    int at = off_path_count_++;
    for (; at > 0 && waste_s_[at - 1] < waste; --at) {
      off_path_[at] = off_path_[at - 1];
      waste_s_[at] = waste_s_[at - 1];
      path_overlaps_[at] = path_overlaps_[at - 1];
    }
    path_overlaps_[at] = 0;
    for (int k = first; k < last; ++k) path_overlaps_[at] |= op_bit<Bits>(path_[k]);
    off_path_[at] = op;
    waste_s_[at] = waste;
  });
}

// A gap is a time interval in which no operator runs alone; an operator that starts in a gap ends
// in that gap. In a gap with an operator off the longest path, the path advances by a run of
// consecutive operators that are independent of that operator, the first possibly started before
// the gap. The rest of the gap, minus network work that runs in it, is wasted. Returns the least
// waste over runs within path_[from..to) and gaps of at least `length_s` seconds.
template <typename Bits>
double LayerFacts<Bits>::least_waste(int from, int to, double length_s,
                                     double network_s) const noexcept {
  double least = std::max(0.0, length_s - network_rate_ * std::min(network_s, length_s));
  for (int first = from; first < to; ++first) {
    const int partly_run = path_[first];  // may have started before the gap
    const bool on_network = (network_ops_ & op_bit<Bits>(partly_run)) != 0;
    const double rate = rate_[path_weighting_][useful_[partly_run][useful_count_[partly_run] - 1]];
    double full_s = 0.0;          // seconds of the other operators of the run
    double share_sum_s = 0.0;     // their weighted shares
    double network_busy_s = 0.0;  // their seconds on the network
    for (int last = first; last < to; ++last) {
      if (last > first) {
        const int op = path_[last];
        full_s += overlap_s_[op];
        share_sum_s += share_s_[path_weighting_][op];
        if ((network_ops_ & op_bit<Bits>(op)) != 0) network_busy_s += overlap_s_[op];
      }
      if (full_s == kInfinite) break;
      const double gap_s = std::max(length_s, full_s);
      const double partly_run_s = std::min(overlap_s_[partly_run], gap_s - full_s);
      const double free_s = gap_s - network_busy_s - (on_network ? partly_run_s : 0.0);
      const double overlap_s = network_rate_ * std::min(network_s, free_s);
      least = std::min(least, gap_s - share_sum_s - rate * partly_run_s - overlap_s);
    }
  }
  return std::max(0.0, least);
}

// Sorts the operators of the longest path by gain for each second in which they run in a gap: their
// rate, minus the share of the tensor cores that operators off the path cannot use meanwhile.
template <typename Bits>
void LayerFacts<Bits>::find_gains() noexcept {
  for (int at = 0; at < path_size_; ++at) {
    const int op = path_[at];
    const LayerMode& mode = problem_.modes[useful_[op][useful_count_[op] - 1]];
    const double core_share = mode.use[0] > 0 ? 1.0 / problem_.capacity[0] : 0.0;
    gain_[op] =
        std::max(0.0, rate_[path_weighting_][useful_[op][useful_count_[op] - 1]] - core_share);
    int place = at;
    for (; place > 0 && gain_[by_gain_[place - 1]] < gain_[op]; --place) {
      by_gain_[place] = by_gain_[place - 1];
    }
    by_gain_[place] = op;
  }
  for (int op = 0; op < size(); ++op) {
    area_s_[op] = kInfinite;
    for (int u = 0; u < useful_count_[op]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[op][u]];
      if (!alone(op, u)) area_s_[op] = std::min(area_s_[op], mode.seconds * mode.use[0]);
    }
    area_s_[op] /= std::max(1, problem_.capacity[0]);
  }
}

// Upper bound on the seconds that the path gains (find_gains) in gaps of `limit_s` seconds in all,
// if only its operators in `open` run there, each for at most its remaining time `left_s`. Stops
// once that exceeds `enough_s`.
template <typename Bits>
double LayerFacts<Bits>::most_gained(Bits open, const double* left_s, double limit_s,
                                     double enough_s) const noexcept {
  double gained = 0.0;
  for (int i = 0; i < path_size_ && limit_s > 0.0 && gained <= enough_s; ++i) {
    const int op = by_gain_[i];
    if (gain_[op] == 0.0) break;
    if ((open & op_bit<Bits>(op)) == 0) continue;
    const double time_s = std::min(limit_s, left_s[op]);
    gained += gain_[op] * time_s;
    limit_s -= time_s;
  }
  return gained;
}

// Adds what the operators off the path take to `sum_s`. They either run alone, or in gaps. Gaps
// cost at least the largest waste of an operator in them, and at least the tensor-core time of all
// operators in them minus what the path gains in that time (find_gains).
template <typename Bits>
double LayerFacts<Bits>::gap_bound(const PartialSchedule<Bits>& m, Bits isolated, double sum_s,
                                   double network_share_s, double longer_s, const double* left_s,
                                   double known_s) const noexcept {
  double alone_before_s[kMostOps<Bits>];  // of the remaining operators before off_path_[i]
  double alone_left = 0.0;
  for (int i = 0; i < off_path_count_; ++i) {
    alone_before_s[i] = alone_left;
    const Bits own = op_bit<Bits>(off_path_[i]);
    if ((m.started & own) != 0) continue;
    ((isolated & own) != 0 ? sum_s : alone_left) += alone_s_[off_path_[i]];
  }
  double least = alone_left;
  const int cores = problem_.capacity[0];
  double area = 0.0;
  double fill = 0.0;
  Bits open = 0;
  for (int i = off_path_count_ - 1; i >= 0; --i) {
    const int op = off_path_[i];
    if (((m.started | isolated) & op_bit<Bits>(op)) != 0) continue;
    if (sum_s + least <= known_s) return known_s;
    area += area_s_[op];
    fill += std::min(area_s_[op], alone_s_[op]);
    open |= path_overlaps_[i] & ~(m.done | isolated);
    const double waste = std::max(0.0, waste_s_[i] - longer_s);
    if (alone_before_s[i] + waste >= least) continue;
    double filled = fill - network_share_s;
    if (filled > waste) {  // a gain of the difference is as good as a larger one
      const double area_limit = cores > 1 ? area * cores / (cores - 1) : kInfinite;
      filled -= most_gained(open, left_s, area_limit, filled - waste);
    }
    least = std::min(least, alone_before_s[i] + std::max(waste, filled));
  }
  return std::max(known_s, sum_s + least);
}

template <typename Bits>
double LayerFacts<Bits>::path_bound(const PartialSchedule<Bits>& m, const Limited& limited,
                                    double known_s) const noexcept {
  double sum = m.now_s;
  double left_s[kMostOps<Bits>];
  // Running operators may be in a slower mode than the waste was computed for.
  double longer_s = 0.0;
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    const double rate = rate_[path_weighting_][r.mode];
    left_s[r.op] = r.finish_s - m.now_s;
    sum += rate * left_s[r.op];
    if (((on_path_ | network_ops_) & op_bit<Bits>(r.op)) != 0) {
      longer_s += rate * std::max(0.0, left_s[r.op] - overlap_s_[r.op]);
    }
  }
  double network_share_s = 0.0;
  for_ops((on_path_ | network_ops_) & ~m.started, [&](int op) {
    const double work = share(path_weighting_, op, limited);
    sum += work;
    left_s[op] = overlap_s_[op];
    if ((on_path_ & op_bit<Bits>(op)) == 0) network_share_s += work;
  });
  for (int i = 0; i < m.running_count; ++i) {
    const Bits own = op_bit<Bits>(m.running[i].op);
    if ((network_ops_ & ~on_path_ & own) != 0) {
      network_share_s += rate_[path_weighting_][m.running[i].mode] * left_s[m.running[i].op];
    }
  }
  return gap_bound(m, limited.isolated, sum, network_share_s, longer_s, left_s, known_s);
}

template class LayerFacts<std::uint64_t>;
template class LayerFacts<OpBits>;

}  // namespace phaze
