#include "schedule/layer_facts.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"

namespace phaze {
namespace {

// How much each resource counts in a mix. At no moment do the shares of all running operators
// exceed one, so the sum of shares times durations is a bound.
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
    beside_s_[i] = kInfinite;
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
      beside_s_[i] = std::min(beside_s_[i], mode.seconds);
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

// The most operators of a set of which none waits for another: their number less the largest
// matching of operators with later ones (Dilworth's theorem).
int LayerFacts::width(OpBits set) const noexcept {
  const int size = std::popcount(set);
  if (size <= 1) return size;
  std::int8_t partner[kMaxLayerOps];  // of a later operator: the earlier one it follows
  std::fill(partner, partner + kMaxLayerOps, std::int8_t{-1});
  int matched = 0;
  OpBits seen = 0;
  const auto augment = [&](const auto& self, int op) -> bool {
    OpBits choices = later_[op] & set & ~seen;
    while (choices != 0) {
      const int next = std::countr_zero(choices);
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
  // Of at most q operators that hold a resource at once, each has a share of 1/q of it. That is
  // more than its share of the cores where a chip has many; it holds where modes take one core or
  // all.
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
  // Time shared out evenly among what runs: one of at most k operators gets at least 1/k of it, and
  // all of it where it holds every core of every type.
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
    double beside = kInfinite;
    for (int u = 0; u < useful_count_[i]; ++u) {
      const int m = useful_[i][u];
      const double share = rate_[mix][m] * problem_.modes[m].seconds;
      least = std::min(least, share);
      if (!alone(i, u)) beside = std::min(beside, share);
    }
    share_s_[mix][i] = least;
    beside_share_s_[mix][i] = beside;
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
  int kept = 0;
  for (int i = 0; i < m->running_count; ++i) {
    const Running r = m->running[i];
    if (r.finish_s > next) {
      m->running[kept++] = r;
      continue;
    }
    for (int k = 0; k < kResources; ++k) m->free[k] += problem_.modes[r.mode].use[k];
    m->done |= op_bit(r.op);
  }
  m->running_count = kept;
}

double LayerFacts::bound(const Moment& m, OpBits barred, double enough_s) const noexcept {
  double ready_s[kMaxLayerOps];
  double finish_s[kMaxLayerOps];  // earliest, of what is not done
  double most = m.now_s;
  double last_s = m.now_s;
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    finish_s[r.op] = r.finish_s;
    last_s = std::max(last_s, r.finish_s);
    most = std::max(most, r.finish_s);  // what follows it is reckoned below
  }
  for_ops(all_ & ~m.started, [&](int op) {
    double ready = m.now_s;
    for_ops(problem_.before[op] & ~m.done, [&](int b) { ready = std::max(ready, finish_s[b]); });
    ready_s[op] = ready;
    // Alone it can only run when all that runs now is done.
    const double alone = (barred & op_bit(op)) != 0 ? kInfinite : alone_s_[op];
    finish_s[op] = std::min(ready + beside_s_[op], std::max(ready, last_s) + alone);
    most = std::max(most, finish_s[op] + rest_s_[op]);
  });
  if (most >= enough_s) return most;
  if (spine_mix_ >= 0) most = std::max(most, spine_bound(m, barred));
  if (most >= enough_s) return most;
  std::int32_t in_time[kMaxLayerOps];  // what has not started, by when it may
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
  // In a search one mix does nearly all there is to do. Beside it the others are tried in turn; the
  // latest to settle a state takes its place.
  most = std::max(most, preemptive_bound(leader_, m, barred, waiting, ready_s));
  if (most >= enough_s || mixes_ < 2) return most;
  challenger_ = (challenger_ + 1) % mixes_;
  if (challenger_ == leader_) challenger_ = (challenger_ + 1) % mixes_;
  most = std::max(most, preemptive_bound(challenger_, m, barred, waiting, ready_s));
  if (most >= enough_s) std::swap(leader_, challenger_);
  return most;
}

// Jackson's preemptive schedule of one machine that works through every operator's share of the
// chip: always on the one with the longest rest among those that are ready.
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
      const int first = std::countr_zero(open);
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
    const bool beside = (barred & op_bit(op)) != 0;
    const double share = beside ? beside_share_s_[mix][op] : share_s_[mix][op];
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
      // The bounds take what holds all cores in use to run alone: nothing may run on no core.
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

}  // namespace phaze
