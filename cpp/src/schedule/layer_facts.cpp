
#include "schedule/layer_facts.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"

namespace phaze {

namespace {

// Weight of each resource in a mix. At no moment do the shares of all running operators exceed one,
// so the sum of shares times durations is a bound.
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

LayerFacts::LayerFacts(const LayerProblem& problem) noexcept : problem_(problem) {
  const int n = problem.size;
  all_ = n == kMaxLayerOps ? ~OpBits{0} : op_bit(n) - 1;
  OpBits ancestors[kMaxLayerOps];
  for (int i = 0; i < n; ++i) {
    after_[i] = 0;
    ancestors[i] = problem.before[i];
    for_ops(problem.before[i], [&](int b) {
      ancestors[i] |= ancestors[b];
      after_[b] |= op_bit(i);
    });
  }
  for (int i = n - 1; i >= 0; --i) {
    find_modes(i);
    rest_s_[i] = 0.0;
    later_[i] = after_[i];
    for_ops(after_[i], [&](int next) {
      rest_s_[i] = std::max(rest_s_[i], tail_s(next));
      later_[i] |= later_[next];
    });
  }
  for (int i = 0; i < n; ++i) {
    if (after_[i] == 0) leaves_ |= op_bit(i);
    apart_[i] = all_ & ~(ancestors[i] | later_[i] | op_bit(i));
  }
  find_alone();
  add_mixes();
  rank_by_rest();
}

void LayerFacts::rank_by_rest() noexcept {
  std::int32_t ranked[kMaxLayerOps];
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

void LayerFacts::find_alone() noexcept {
  for (int m = 0; m < problem_.first_mode[problem_.size]; ++m) {
    for (int r = 0; r < kResources; ++r) used_[r] = used_[r] || problem_.modes[m].use[r] > 0;
  }
  std::fill(alone_, alone_ + kMaxModes, OpBits{0});
  std::fill(holds_, holds_ + kResources, OpBits{0});
  for (int i = 0; i < problem_.size; ++i) {
    overlap_s_[i] = kInfinite;
    alone_s_[i] = kInfinite;
    most_useful_ = std::max(most_useful_, static_cast<int>(useful_count_[i]));
    for (int u = 0; u < useful_count_[i]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[i][u]];
      bool alone = true;
      for (int r = 0; r < kResources; ++r) {
        alone = alone && (!used_[r] || mode.use[r] == problem_.capacity[r]);
      }
      if (alone) {
        alone_[u] |= op_bit(i);
        alone_s_[i] = std::min(alone_s_[i], mode.seconds);
        continue;
      }
      overlap_s_[i] = std::min(overlap_s_[i], mode.seconds);
      for (int r = 0; r < kResources; ++r) {
        if (mode.use[r] > 0) holds_[r] |= op_bit(i);
      }
    }
  }
}

void LayerFacts::find_modes(int op) noexcept {
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
int LayerFacts::width(OpBits set) const noexcept {
  const int size = count_ops(set);
  if (size <= 1) return size;
  std::int8_t partner[kMaxLayerOps];  // of a later operator: the earlier one it follows
  std::fill(partner, partner + kMaxLayerOps, std::int8_t{-1});
  int matched = 0;
  OpBits seen = 0;
  const auto augment = [&](const auto& self, int op) -> bool {
    OpBits choices = later_[op] & set & ~seen;
    while (choices != 0) {
      const int next = first_op(choices);
      seen |= op_bit(next);
      if (partner[next] < 0 || self(self, partner[next])) {
        partner[next] = static_cast<std::int8_t>(op);
        return true;
      }
      choices &= ~seen;
    }
    return false;
  };
  for_ops(set, [&](int op) {
    seen = 0;
    if (augment(augment, op)) ++matched;
  });
  return size - matched;
}

void LayerFacts::add_mixes() noexcept {
  // If at most q operators occupy a resource at once, each has a share of 1/q of it. That exceeds
  // its share of the cores if a chip has many; it is valid if modes take one core or all.
  int most[kResources][kMaxLayerOps];
  for (int r = 0; r < kResources; ++r) {
    if (!used_[r]) continue;
    bool single = true;
    for (int i = 0; i < problem_.size; ++i) {
      for (int u = 0; u < useful_count_[i]; ++u) {
        single = single && (problem_.modes[useful_[i][u]].use[r] <= 1 || alone(i, u));
      }
    }
    for (int i = 0; i < problem_.size; ++i) {
      most[r][i] = problem_.capacity[r];
      if (!single || problem_.capacity[r] == 1) continue;
      most[r][i] = std::min(most[r][i], 1 + width(apart_[i] & holds_[r]));
    }
  }
  for (const auto& weights : kWeights) {
    bool whole = true;
    for (int r = 0; r < kResources; ++r) whole = whole && (weights[r] == 0.0 || used_[r]);
    if (!whole) continue;
    for (int i = 0; i < problem_.size; ++i) {
      for (int u = 0; u < useful_count_[i]; ++u) {
        const int m = useful_[i][u];
        double rate = 0.0;
        for (int r = 0; r < kResources; ++r) {
          if (weights[r] == 0.0) continue;
          const double cores = alone(i, u) ? problem_.capacity[r] : most[r][i];
          rate += weights[r] * problem_.modes[m].use[r] / cores;
        }
        rate_[mixes_][m] = rate;
      }
    }
    ++mixes_;
  }
  // Time divided evenly among the running operators: one of at most k operators gets at least 1/k
  // of it, and all of it if it occupies every core of every type.
  for (int i = 0; i < problem_.size; ++i) {
    const double least = 1.0 / (1 + width(apart_[i]));
    for (int u = 0; u < useful_count_[i]; ++u) {
      rate_[mixes_][useful_[i][u]] = alone(i, u) ? 1.0 : least;
    }
  }
  ++mixes_;
  for (int mix = 0; mix < mixes_; ++mix) find_shares(mix);
}

void LayerFacts::find_shares(int mix) noexcept {
  for (int i = 0; i < problem_.size; ++i) {
    double least = kInfinite;
    double overlap_share = kInfinite;
    for (int u = 0; u < useful_count_[i]; ++u) {
      const int m = useful_[i][u];
      const double share = rate_[mix][m] * problem_.modes[m].seconds;
      least = std::min(least, share);
      if (!alone(i, u)) overlap_share = std::min(overlap_share, share);
    }
    share_s_[mix][i] = least;
    overlap_share_s_[mix][i] = overlap_share;
  }
}

Moment LayerFacts::beginning() const noexcept {
  Moment m;
  m.now_s = 0.0;
  m.started = 0;
  m.done = 0;
  m.running_count = 0;
  std::copy(problem_.capacity, problem_.capacity + kResources, m.free);
  return m;
}

void LayerFacts::start(Moment* m, int op, int mode) const noexcept {
  const LayerMode& chosen = problem_.modes[mode];
  for (int r = 0; r < kResources; ++r) m->free[r] -= chosen.use[r];
  m->started |= op_bit(op);
  m->running[m->running_count++] = {op, mode, m->now_s + chosen.seconds};
}

void LayerFacts::advance(Moment* m) const noexcept {
  double next = kInfinite;
  for (int i = 0; i < m->running_count; ++i) next = std::min(next, m->running[i].finish_s);
  m->now_s = next;
  int count = 0;
  for (int i = 0; i < m->running_count; ++i) {
    const Running r = m->running[i];
    if (r.finish_s > next) {
      m->running[count++] = r;
      continue;
    }
    for (int k = 0; k < kResources; ++k) m->free[k] += problem_.modes[r.mode].use[k];
    m->done |= op_bit(r.op);
  }
  m->running_count = count;
}

double LayerFacts::bound(const Moment& m, OpBits barred, double enough_s) const noexcept {
  double ready_s[kMaxLayerOps];
  double finish_s[kMaxLayerOps];  // earliest finish of unfinished operators
  double most = m.now_s;
  double last_s = m.now_s;
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    finish_s[r.op] = r.finish_s;
    last_s = std::max(last_s, r.finish_s);
    most = std::max(most, r.finish_s);  // successors are added below
  }
  for_ops(all_ & ~m.started, [&](int op) {
    double ready = m.now_s;
    for_ops(problem_.before[op] & ~m.done, [&](int b) { ready = std::max(ready, finish_s[b]); });
    ready_s[op] = ready;
    // It can run alone only when all running operators have ended.
    const double alone = (barred & op_bit(op)) != 0 ? kInfinite : alone_s_[op];
    finish_s[op] = std::min(ready + overlap_s_[op], std::max(ready, last_s) + alone);
    most = std::max(most, finish_s[op] + rest_s_[op]);
  });
  if (most >= enough_s) return most;
  if (spine_mix_ >= 0) most = std::max(most, spine_bound(m, barred));
  if (most >= enough_s) return most;
  std::int32_t in_time[kMaxLayerOps];  // operators not started, by earliest start
  int count = 0;
  for_ops(all_ & ~m.started, [&](int op) {
    int at = count++;
    for (; at > 0 && ready_s[in_time[at - 1]] > ready_s[op]; --at) in_time[at] = in_time[at - 1];
    in_time[at] = op;
  });
  const std::span<const std::int32_t> waiting{in_time, static_cast<std::size_t>(count)};
  if (m.started == 0) {
    for (int mix = 0; mix < mixes_ && most < enough_s; ++mix) {
      most = std::max(most, preemptive_bound(mix, m, barred, waiting, ready_s));
    }
    return most;
  }
  // In a search one mix prunes nearly all states. In addition the others are tried in turn; the
  // latest one to settle a state replaces it.
  most = std::max(most, preemptive_bound(leader_, m, barred, waiting, ready_s));
  if (most >= enough_s || mixes_ < 2) return most;
  challenger_ = (challenger_ + 1) % mixes_;
  if (challenger_ == leader_) challenger_ = (challenger_ + 1) % mixes_;
  most = std::max(most, preemptive_bound(challenger_, m, barred, waiting, ready_s));
  if (most >= enough_s) std::swap(leader_, challenger_);
  return most;
}

// Jackson's preemptive schedule of one machine that processes every operator's share of the chip:
// always the ready operator with the longest rest.
double LayerFacts::preemptive_bound(int mix, const Moment& m, OpBits barred,
                                    std::span<const std::int32_t> in_time,
                                    const double* ready_s) const noexcept {
  double left_s[kMaxLayerOps];  // by rank: longest rest first
  OpBits open = 0;              // ranks that are ready and have something left
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    const double left = rate_[mix][r.mode] * (r.finish_s - m.now_s);
    if (left <= 0.0) continue;
    left_s[rank_[r.op]] = left;
    open |= op_bit(rank_[r.op]);
  }
  double most = m.now_s;
  double clock = m.now_s;
  const auto work_until = [&](double until) {
    while (open != 0) {
      const int first = first_op(open);
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
    const bool only_overlapped = (barred & op_bit(op)) != 0;
    const double share = only_overlapped ? overlap_share_s_[mix][op] : share_s_[mix][op];
    if (share <= 0.0) continue;
    if (ready_s[op] > clock) {
      work_until(ready_s[op]);
      clock = std::max(clock, ready_s[op]);
    }
    left_s[rank_[op]] = share;
    open |= op_bit(rank_[op]);
  }
  work_until(kInfinite);
  return most;
}

double layer_bound(const LayerProblem& problem) noexcept {
  const LayerFacts facts(problem);
  return facts.bound(facts.beginning(), 0, kInfinite) * kRoundedDown;
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
      // The bounds assume that a mode with all used cores runs alone: no mode may occupy zero
      // cores.
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
// much as isolated execution, or less if the operators that already have a rate and may overlap it
// leave less than that of 1. Among operators that run at once, the last to get its rate respected
// that limit, so their rates never add up to more than one.
void LayerFacts::add_even_mix(const std::int32_t* order) noexcept {
  double rate[kMaxLayerOps];
  OpBits rated = 0;
  for (int k = 0; k < size(); ++k) {
    const int op = order[k];
    rate[op] = 0.0;
    if (overlap_s_[op] < kInfinite) {
      const double even = alone_s_[op] < overlap_s_[op] ? alone_s_[op] / overlap_s_[op] : 1.0;
      rate[op] = std::max(0.0, std::min(even, 1.0 - most_beside(op, rated, rate)));
      if (rate[op] > 0.0) rated |= op_bit(op);
    }
    for (int u = 0; u < useful_count_[op]; ++u) {
      rate_[mixes_][useful_[op][u]] = alone(op, u) ? 1.0 : rate[op];
    }
  }
  find_shares(mixes_++);
}

// Upper bound on the sum of the rates of operators that overlap `op`: of operators in a chain only
// one runs at a time, and no more run than there are cores.
double LayerFacts::most_beside(int op, OpBits rated, const double* rate) const noexcept {
  const OpBits others = apart_[op] & rated;
  double by_type = 0.0;
  OpBits left = others;
  for (int r = 0; r < kResources && left != 0; ++r) {
    const OpBits own = left & holds_[r];
    left &= ~own;
    int least = problem_.capacity[r];
    for (int u = 0; u < useful_count_[op]; ++u) {
      if (!alone(op, u)) least = std::min(least, problem_.modes[useful_[op][u]].use[r]);
    }
    by_type += most_in_rows(own, problem_.capacity[r] - least, rate);
  }
  if (left != 0) return kInfinite;
  return std::min(by_type, most_in_rows(others, kMaxLayerOps, rate));
}

// Partitions a set into chains of dependent operators, and sums the largest rates of at most
// `count` chains.
double LayerFacts::most_in_rows(OpBits set, int count, const double* rate) const noexcept {
  double largest[kMaxLayerOps];
  int rows = 0;
  while (set != 0) {
    double most = 0.0;
    OpBits row = set;
    while (row != 0) {
      const int op = first_op(row);
      most = std::max(most, rate[op]);
      set &= ~op_bit(op);
      row &= later_[op];
    }
    int at = rows++;
    for (; at > 0 && largest[at - 1] < most; --at) largest[at] = largest[at - 1];
    largest[at] = most;
  }
  double sum = 0.0;
  for (int i = 0; i < std::min(rows, count); ++i) sum += largest[i];
  return sum;
}

// Longest first, and again with operators on the first type of cores before all others.
void LayerFacts::add_even_mixes() noexcept {
  std::int32_t order[kMaxLayerOps];
  for (const bool by_type : {false, true}) {
    const auto before = [&](int a, int b) {
      const bool first_a = (holds_[0] & op_bit(a)) != 0;
      const bool first_b = (holds_[0] & op_bit(b)) != 0;
      if (by_type && first_a != first_b) return first_a;
      return shortest_s_[a] > shortest_s_[b];
    };
    for (int i = 0; i < size(); ++i) {
      int at = i;
      for (; at > 0 && before(i, order[at - 1]); --at) order[at] = order[at - 1];
      order[at] = i;
    }
    add_even_mix(order);
  }
}

// ---- the longest path without the network, and the gaps for overlapping other operators ----

namespace {

constexpr int kNetwork = kResources - 1;

}  // namespace

void LayerFacts::prepare_search() noexcept {
  find_spine();
  add_spine_mix();
  find_waste();
  find_gains();
  find_twins();
  add_even_mixes();
}

void LayerFacts::find_twins() noexcept {
  const auto same = [&](int a, int b) {
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
  };
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
  std::fill(twins_, twins_ + size(), OpBits{0});
  std::fill(urgent_, urgent_ + size(), OpBits{0});
  for (int i = 0; i < size(); ++i) {
    int at = i;
    const int own = count_ops(after_[i]);
    for (; at > 0 && count_ops(after_[in_turn_[at - 1]]) < own; --at) {
      in_turn_[at] = in_turn_[at - 1];
    }
    in_turn_[at] = i;
  }
  for (int i = 0; i < size(); ++i) {
    for (int j = 0; j < i; ++j) {
      if (!same(i, j)) continue;
      if (after_[i] == after_[j]) {
        twins_[i] |= op_bit(j);
        twins_[j] |= op_bit(i);
      } else if (!in_order(i)) {
        continue;
      } else if ((after_[i] & ~after_[j]) == 0) {
        urgent_[i] |= op_bit(j);
      } else if ((after_[j] & ~after_[i]) == 0) {
        urgent_[j] |= op_bit(i);
      }
    }
  }
}

void LayerFacts::find_spine() noexcept {
  int at = 0;
  for (int i = 1; i < size(); ++i) {
    if (tail_s(i) > tail_s(at)) at = i;
  }
  while (at >= 0) {
    spine_[spine_size_++] = at;
    on_spine_ |= op_bit(at);
    int next = -1;
    for_ops(after_[at], [&](int op) {
      if (next < 0 || tail_s(op) > tail_s(next)) next = op;
    });
    at = next;
  }
  for (int i = 0; i < size(); ++i) {
    bool always = true;  // in no mode can two of them overlap
    for (int u = 0; u < useful_count_[i]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[i][u]];
      always = always && !alone(i, u) && 2 * mode.use[kNetwork] > problem_.capacity[kNetwork];
    }
    if (always) wires_ |= op_bit(i);
  }
}

// At any moment at most one operator of the spine runs and at most one that takes the network. A
// network operator counts fully if it is on the spine, else with one rate for all; other operators
// of the spine count with the rate at which overlap gains nothing, limited to 1 minus the network's
// rate. The network's rate is the one with the largest sum.
void LayerFacts::add_spine_mix() noexcept {
  const auto even = [&](int op) {
    return alone_s_[op] < overlap_s_[op] ? alone_s_[op] / overlap_s_[op] : 1.0;
  };
  const OpBits plain = on_spine_ & ~wires_;
  double most = -1.0;
  const auto consider = [&](double rate) {
    double sum = 0.0;
    for_ops(wires_ & ~on_spine_, [&](int op) { sum += rate * overlap_s_[op]; });
    for_ops(plain, [&](int op) {
      sum += std::min(alone_s_[op], std::min(even(op), 1.0 - rate) * overlap_s_[op]);
    });
    if (sum <= most) return;
    most = sum;
    wire_rate_ = rate;
  };
  consider(0.0);
  for_ops(plain, [&](int op) { consider(1.0 - even(op)); });
  for (int i = 0; i < size(); ++i) {
    const bool spine = (on_spine_ & op_bit(i)) != 0;
    const bool wire = (wires_ & op_bit(i)) != 0;
    for (int u = 0; u < useful_count_[i]; ++u) {
      double rate = 0.0;
      if (alone(i, u)) {
        rate = 1.0;
      } else if (wire) {
        rate = spine ? 1.0 : wire_rate_;
      } else if (spine) {
        rate = std::min(even(i), 1.0 - wire_rate_);
      }
      rate_[mixes_][useful_[i][u]] = rate;
    }
  }
  find_shares(mixes_);
  spine_mix_ = mixes_++;
}

void LayerFacts::find_waste() noexcept {
  double wires_s = 0.0;  // on the network, overlapping the spine
  for_ops(wires_ & ~on_spine_, [&](int op) { wires_s += overlap_s_[op]; });
  for_ops(all_ & ~on_spine_ & ~wires_, [&](int op) {
    int first = 0;
    while (first < spine_size_ && (later_[spine_[spine_size_ - 1 - first]] & op_bit(op)) == 0)
      ++first;
    first = spine_size_ - first;
    int last = first;
    while (last < spine_size_ && (later_[op] & op_bit(spine_[last])) == 0) ++last;
    const double waste = least_waste(first, last, overlap_s_[op], wires_s);
    int at = aside_count_++;
    for (; at > 0 && waste_s_[at - 1] < waste; --at) {
      aside_[at] = aside_[at - 1];
      waste_s_[at] = waste_s_[at - 1];
      spine_overlaps_[at] = spine_overlaps_[at - 1];
    }
    spine_overlaps_[at] = 0;
    for (int k = first; k < last; ++k) spine_overlaps_[at] |= op_bit(spine_[k]);
    aside_[at] = op;
    waste_s_[at] = waste;
  });
}

// A gap is a time in which nothing runs alone; an operator that starts in it ends in it. While an
// operator runs in a gap, the spine advances by a run of consecutive operators that are independent
// of it, the first possibly started before. The rest of the time, minus the network's overlapped
// work, is wasted. Returns the minimum over runs and over gaps of at least this length.
double LayerFacts::least_waste(int from, int to, double length_s, double wires_s) const noexcept {
  double least = std::max(0.0, length_s - wire_rate_ * std::min(wires_s, length_s));
  for (int first = from; first < to; ++first) {
    const int begun = spine_[first];  // any part of it
    const bool wire = (wires_ & op_bit(begun)) != 0;
    const double rate = rate_[spine_mix_][useful_[begun][useful_count_[begun] - 1]];
    double full_s = 0.0;    // time of the rest of the run
    double credit_s = 0.0;  // and its share
    double taken_s = 0.0;   // of it on the network
    for (int last = first; last < to; ++last) {
      if (last > first) {
        const int op = spine_[last];
        full_s += overlap_s_[op];
        credit_s += share_s_[spine_mix_][op];
        if ((wires_ & op_bit(op)) != 0) taken_s += overlap_s_[op];
      }
      if (full_s == kInfinite) break;
      const double gap_s = std::max(length_s, full_s);
      const double begun_s = std::min(overlap_s_[begun], gap_s - full_s);
      const double free_s = gap_s - taken_s - (wire ? begun_s : 0.0);
      const double overlap_s = wire_rate_ * std::min(wires_s, free_s);
      least = std::min(least, gap_s - credit_s - rate * begun_s - overlap_s);
    }
  }
  return std::max(0.0, least);
}

// Operators of the spine by gain per second of overlap: their rate, minus the share of the tensor
// cores that they take from the operators off the spine.
void LayerFacts::find_gains() noexcept {
  for (int at = 0; at < spine_size_; ++at) {
    const int op = spine_[at];
    const LayerMode& mode = problem_.modes[useful_[op][useful_count_[op] - 1]];
    const double core_share = mode.use[0] > 0 ? 1.0 / problem_.capacity[0] : 0.0;
    gain_[op] = std::max(0.0, rate_[spine_mix_][useful_[op][useful_count_[op] - 1]] - core_share);
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

// Upper bound on the gain of the spine from a position on during overlapped time.
double LayerFacts::most_gained(OpBits open, const double* left_s, double room_s) const noexcept {
  double gained = 0.0;
  for (int i = 0; i < spine_size_ && room_s > 0.0; ++i) {
    const int op = by_gain_[i];
    if ((open & op_bit(op)) == 0) continue;
    const double time_s = std::min(room_s, left_s[op]);
    gained += gain_[op] * time_s;
    room_s -= time_s;
  }
  return gained;
}

double LayerFacts::spine_bound(const Moment& m, OpBits barred) const noexcept {
  double sum = m.now_s;
  double left_s[kMaxLayerOps];
  // Running operators may run longer than the wastes assume, in a mode that is not their fastest.
  double longer_s = 0.0;
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    const double rate = rate_[spine_mix_][r.mode];
    left_s[r.op] = r.finish_s - m.now_s;
    sum += rate * left_s[r.op];
    if (((on_spine_ | wires_) & op_bit(r.op)) != 0) {
      longer_s += rate * std::max(0.0, left_s[r.op] - overlap_s_[r.op]);
    }
  }
  double wires = 0.0;
  for_ops((on_spine_ | wires_) & ~m.started, [&](int op) {
    const bool only_overlapped = (barred & op_bit(op)) != 0;
    const double share =
        only_overlapped ? overlap_share_s_[spine_mix_][op] : share_s_[spine_mix_][op];
    sum += share;
    left_s[op] = overlap_s_[op];
    if ((on_spine_ & op_bit(op)) == 0) wires += share;
  });
  for (int i = 0; i < m.running_count; ++i) {
    const OpBits own = op_bit(m.running[i].op);
    if ((wires_ & ~on_spine_ & own) != 0) {
      wires += rate_[spine_mix_][m.running[i].mode] * left_s[m.running[i].op];
    }
  }
  // The remaining operators off the spine run alone at the end; or, among those that do not, the
  // one with the largest waste is in a gap, and all of them fill the tensor cores, minus the gain
  // of the spine in that time.
  double alone_before_s[kMaxLayerOps];  // of the remaining operators before aside_[i]
  double alone_left = 0.0;
  for (int i = 0; i < aside_count_; ++i) {
    alone_before_s[i] = alone_left;
    if ((m.started & op_bit(aside_[i])) == 0) alone_left += alone_s_[aside_[i]];
  }
  double least = alone_left;
  const int cores = problem_.capacity[0];
  double area = 0.0;
  double fill = 0.0;
  OpBits open = 0;
  for (int i = aside_count_ - 1; i >= 0; --i) {
    const int op = aside_[i];
    if ((m.started & op_bit(op)) != 0) continue;
    area += area_s_[op];
    fill += std::min(area_s_[op], alone_s_[op]);
    open |= spine_overlaps_[i] & ~m.done;
    const double waste = std::max(0.0, waste_s_[i] - longer_s);
    if (alone_before_s[i] + waste >= least) continue;
    const double area_limit = cores > 1 ? area * cores / (cores - 1) : kInfinite;
    const double filled = fill - wires - most_gained(open, left_s, area_limit);
    least = std::min(least, alone_before_s[i] + std::max(waste, filled));
  }
  return sum + least;
}

}  // namespace phaze
