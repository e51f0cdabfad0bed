#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "base/numbers.hpp"
#include "schedule/layer_facts.hpp"

namespace phaze {
namespace {

// How a list schedule picks the mode of an operator.
enum class ModeChoice {
  kFastest,
  kNarrowest,
  kShared,  // the fastest if its time x the number of ready operators is below the time of the
            // narrowest, and no running operator lasts as long as that; else the narrowest
};

template <typename Bits>
int wanted_mode(const LayerFacts<Bits>& facts, ModeChoice choice,
                const PartialSchedule<Bits>& partial, int op, int ready) noexcept {
  const int fastest = facts.useful(op, 0);
  const int narrowest = facts.useful(op, facts.useful_count(op) - 1);
  if (choice == ModeChoice::kFastest) return fastest;
  if (choice == ModeChoice::kNarrowest) return narrowest;
  const LayerMode* modes = facts.problem().modes;
  for (int i = 0; i < partial.running_count; ++i) {
    if (partial.running[i].finish_s >= partial.now_s + modes[narrowest].seconds) return narrowest;
  }
  const bool fast = modes[fastest].seconds * ready < modes[narrowest].seconds;
  return fast ? fastest : narrowest;
}

// Abandoned, with an infinite makespan, once it is certain not to be shorter than `enough_s`.
template <typename Bits>
LayerSolution list_with(const LayerFacts<Bits>& facts, ModeChoice choice,
                        double enough_s) noexcept {
  LayerSolution schedule;
  schedule.nodes = 0;
  schedule.proved_by = ProvedBy::kNothing;
  PartialSchedule<Bits> partial = facts.beginning();
  while (partial.done != facts.all()) {
    std::int32_t ready[kMostOps<Bits>];
    int count = 0;
    for_ops(partial.ready, [&](int op) {
      int at = count++;  // longest tail first
      for (; at > 0 && facts.tail_s(ready[at - 1]) < facts.tail_s(op); --at) {
        ready[at] = ready[at - 1];
      }
      ready[at] = op;
    });
    for (int i = 0; i < count; ++i) {
      const int op = ready[i];
      const int mode = wanted_mode(facts, choice, partial, op, count);
      if (!facts.fits(partial, mode)) continue;
      schedule.start_s[op] = partial.now_s;
      schedule.mode[op] = mode - facts.problem().first_mode[op];
      facts.start(&partial, op, mode);
      const double end_s = partial.running[partial.running_count - 1].finish_s + facts.rest_s(op);
      if (end_s * kRoundedDown >= enough_s) {
        schedule.makespan_s = kInfinite;
        return schedule;
      }
    }
    facts.advance(&partial);
  }
  schedule.makespan_s = partial.now_s;
  return schedule;
}

// Decisions of an OverlapSchedule about the operators with successors.
template <typename Bits>
struct Choices {
  std::int8_t useful[kMostOps<Bits>];    // position of the chosen mode among the useful ones
  std::int8_t wait_for[kMostOps<Bits>];  // delayed until this operator starts; -1: not delayed
  bool operator==(const Choices&) const = default;
};

template <typename Bits>
struct ChoicesHash {
  std::size_t operator()(const Choices<Bits>& choices) const noexcept {
    std::uint64_t words[sizeof(Choices<Bits>) / sizeof(std::uint64_t)];
    std::memcpy(words, &choices, sizeof(words));
    std::uint64_t h = 0;
    for (const std::uint64_t word : words) h = std::rotl(h ^ word, 29) * 0x9E3779B97F4A7C15ULL;
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

// A list schedule with overlap: operators with successors run in the chosen modes, operators
// without successors (leaves) run in the gaps between them.
template <typename Bits>
class OverlapSchedule {
 public:
  // The schedule is abandoned once it is certain to be as long as `enough_s`.
  OverlapSchedule(const LayerFacts<Bits>& facts, const Choices<Bits>& choices,
                  double enough_s) noexcept
      : facts_(facts),
        choices_(choices),
        enough_s_(enough_s),
        inner_(facts.all() & ~facts.leaves()) {
    schedule_.nodes = 0;
    schedule_.proved_by = ProvedBy::kNothing;
    find_paths();
  }

  const LayerSolution& run() noexcept {
    PartialSchedule<Bits> partial = facts_.beginning();
    while (partial.done != facts_.all()) {
      if (least_end(partial) >= enough_s_) {
        schedule_.makespan_s = kInfinite;
        return schedule_;
      }
      start_inner(&partial, true);
      if (partial.started != facts_.all()) start_leaves(&partial);
      if (partial.running_count == 0) {  // only leaves remain, and overlapping them gains nothing
        const Bits left = facts_.all() & ~partial.started;
        start(&partial, first_of(left), 0);
      }
      facts_.advance(&partial);
    }
    schedule_.makespan_s = partial.now_s;
    return schedule_;
  }

 private:
  // The longest path from each operator on, without the operators that run alone.
  void find_paths() noexcept {
    for (int op = facts_.size() - 1; op >= 0; --op) {
      path_s_[op] = alone_s_[op] = 0.0;
      for_ops(facts_.after(op), [&](int b) { path_s_[op] = std::max(path_s_[op], path_s_[b]); });
      if ((inner_ & op_bit<Bits>(op)) == 0) {
        path_s_[op] = facts_.tail_s(op);
      } else {
        const int u = choices_.useful[op];
        const double own_s = facts_.problem().modes[facts_.useful(op, u)].seconds;
        (facts_.alone(op, u) ? alone_s_ : path_s_)[op] += own_s;
      }
    }
  }

  // Lower bound on the end of the schedule: of the operators that have not started, those that run
  // alone one after another, plus the longest path of the others; minus a margin for rounding.
  double least_end(const PartialSchedule<Bits>& m) const noexcept {
    double alone_s = 0.0;
    double longest_s = 0.0;
    for_ops(facts_.all() & ~m.started, [&](int op) {
      alone_s += alone_s_[op];
      longest_s = std::max(longest_s, path_s_[op]);
    });
    return (m.now_s + alone_s + longest_s) * kRoundedDown;
  }
  int narrow(int op) const noexcept { return facts_.useful_count(op) - 1; }
  double narrow_s(int op) const noexcept {
    return facts_.problem().modes[facts_.useful(op, narrow(op))].seconds;
  }

  void start(PartialSchedule<Bits>* partial, int op, int u) noexcept {
    const int mode = facts_.useful(op, u);
    schedule_.start_s[op] = partial->now_s;
    schedule_.mode[op] = mode - facts_.problem().first_mode[op];
    facts_.start(partial, op, mode);
  }

  bool is_delayed(const PartialSchedule<Bits>& m, int op) const noexcept {
    const int until = choices_.wait_for[op];
    return until >= 0 && (m.started & op_bit<Bits>(until)) == 0;
  }

  // Starts the ready operators with successors that fit, longest tail first. A trial run (not
  // `record`) skips operators whose chosen mode runs alone, and does not fill `schedule_`.
  void start_inner(PartialSchedule<Bits>* partial, bool record) noexcept {
    Bits ready = 0;
    for_ops(inner_ & partial->ready, [&](int op) {
      const bool waits = !record && facts_.alone(op, choices_.useful[op]);
      if (!waits) ready |= op_bit<Bits>(op);
    });
    while (ready != 0) {
      int best = -1;
      int waiting = -1;
      for_ops(ready, [&](int op) {
        const int u = choices_.useful[op];
        if (!facts_.fits(*partial, facts_.useful(op, u))) return;
        int& rank = is_delayed(*partial, op) ? waiting : best;
        if (rank < 0 || facts_.tail_s(op) > facts_.tail_s(rank)) rank = op;
      });
      if (best < 0 && waiting >= 0 && record && partial->running_count == 0) best = waiting;
      if (best < 0) return;
      ready &= ~op_bit<Bits>(best);
      if (record) {
        start(partial, best, choices_.useful[best]);
      } else {
        facts_.start(partial, best, facts_.useful(best, choices_.useful[best]));
      }
    }
  }

  // The time at which the next operator would run alone, if there were no leaves.
  double gap_end(PartialSchedule<Bits> partial) noexcept {
    while (partial.running_count > 0) {
      facts_.advance(&partial);
      start_inner(&partial, false);
    }
    return partial.now_s;
  }

  // Starts leaves that overlap the running operators, shortest first. Their number is the one with
  // the largest gain: the time that they would take alone, less the delay of the end of the gap.
  void start_leaves(PartialSchedule<Bits>* partial) noexcept {
    std::int32_t ready[kMostOps<Bits>];
    int count = 0;
    for_ops(facts_.leaves() & partial->ready, [&](int op) {
      if (!facts_.fits(*partial, facts_.useful(op, narrow(op)))) return;
      int at = count++;  // shortest first
      for (; at > 0 && narrow_s(ready[at - 1]) > narrow_s(op); --at) ready[at] = ready[at - 1];
      ready[at] = op;
    });
    if (count == 0) return;
    const double until_s = gap_end(*partial);
    PartialSchedule<Bits> trial = *partial;
    int fitting[kMostOps<Bits>];
    int fit = 0;
    int chosen = 0;
    double gain = 0.0;
    double most = 0.0;
    for (int i = 0; i < count; ++i) {
      const int op = ready[i];
      const int mode = facts_.useful(op, narrow(op));
      if (!facts_.fits(trial, mode)) continue;
      facts_.start(&trial, op, mode);
      fitting[fit++] = op;
      gain += facts_.alone_s(op);
      const double late = std::max(0.0, partial->now_s + narrow_s(op) - until_s);
      if (gain - late > most) {
        most = gain - late;
        chosen = fit;
      }
    }
    for (int i = 0; i < chosen; ++i) start(partial, fitting[i], narrow(fitting[i]));
  }

  const LayerFacts<Bits>& facts_;
  const Choices<Bits>& choices_;
  double enough_s_;
  Bits inner_;
  double path_s_[kMostOps<Bits>];
  double alone_s_[kMostOps<Bits>];
  LayerSolution schedule_;
};

// Local search: changes choices as long as the OverlapSchedule gets shorter.
template <typename Bits>
class Improvement {
 public:
  Improvement(const LayerFacts<Bits>& facts, LayerSolution* best) noexcept
      : facts_(facts), best_(best) {
    inner_ = facts.all() & ~facts.leaves();
    for_ops(inner_, [&](int op) {
      if (facts.before(op) == 0) sources_ |= op_bit<Bits>(op);
    });
    std::fill(choices_.useful, choices_.useful + kMostOps<Bits>, std::int8_t{0});
    std::fill(choices_.wait_for, choices_.wait_for + kMostOps<Bits>, std::int8_t{-1});
  }

  void run() {
    const Choices<Bits> plain = choices_;
    keep_if_shorter(plain);
    for_runs([&](int first, int last) {  // one gap; sources are delayed until it begins
      Choices<Bits> gap = plain;
      narrow(first, last, true, &gap);
      delay_sources(first, &gap);
      keep_if_shorter(gap);
    });
    for (bool shorter = true; shorter;) {
      shorter = false;
      for_runs([&](int first, int last) {
        for (const bool narrower : {true, false}) {
          Choices<Bits> changed = choices_;
          narrow(first, last, narrower, &changed);
          shorter = keep_if_shorter(changed) || shorter;
          if (!narrower) continue;
          delay_sources(first, &changed);
          shorter = keep_if_shorter(changed) || shorter;
        }
      });
      for_ops(sources_, [&](int op) {
        for (int until = -1; until < facts_.size(); ++until) {
          Choices<Bits> changed = choices_;
          changed.wait_for[op] = static_cast<std::int8_t>(until);
          if (until != op) shorter = keep_if_shorter(changed) || shorter;
        }
      });
    }
  }

 private:
  template <typename F>
  void for_runs(const F& f) const {
    constexpr int kLongest = 6;
    for (int first = 0; first < facts_.size(); ++first) {
      for (int last = first; last < std::min(facts_.size(), first + kLongest); ++last) {
        f(first, last);
      }
    }
  }

  void narrow(int first, int last, bool narrower, Choices<Bits>* choices) const noexcept {
    for (int op = first; op <= last; ++op) {
      if ((inner_ & op_bit<Bits>(op)) == 0) continue;
      choices->useful[op] = static_cast<std::int8_t>(narrower ? facts_.useful_count(op) - 1 : 0);
    }
  }

  void delay_sources(int until, Choices<Bits>* choices) const noexcept {
    for_ops(sources_, [&](int op) { choices->wait_for[op] = static_cast<std::int8_t>(until); });
  }

  // Keeps the changed choices if their schedule is shorter than that of the current ones. Choices
  // that were tried before are not: schedules of the current choices only get shorter.
  bool keep_if_shorter(const Choices<Bits>& changed) {
    if (changed == choices_ && reached_s_ < kInfinite) return false;
    if (!tried_.insert(changed).second) return false;
    OverlapSchedule<Bits> hiding(facts_, changed, reached_s_);
    const LayerSolution& schedule = hiding.run();
    if (schedule.makespan_s < best_->makespan_s) {
      best_->makespan_s = schedule.makespan_s;
      std::copy(schedule.start_s, schedule.start_s + facts_.size(), best_->start_s);
      std::copy(schedule.mode, schedule.mode + facts_.size(), best_->mode);
    }
    if (!(schedule.makespan_s < reached_s_)) return false;
    reached_s_ = schedule.makespan_s;
    choices_ = changed;
    return true;
  }

  const LayerFacts<Bits>& facts_;
  LayerSolution* best_;
  Bits inner_;
  Bits sources_ = 0;
  Choices<Bits> choices_;
  std::unordered_set<Choices<Bits>, ChoicesHash<Bits>> tried_;
  double reached_s_ = kInfinite;
};

}  // namespace

template <typename Bits>
void improve_schedule(const LayerFacts<Bits>& facts, LayerSolution* best) {
  Improvement<Bits>(facts, best).run();
}

template <typename Bits>
LayerSolution best_list_schedule(const LayerFacts<Bits>& facts) noexcept {
  LayerSolution best = list_with(facts, ModeChoice::kFastest, kInfinite);
  for (const ModeChoice choice : {ModeChoice::kNarrowest, ModeChoice::kShared}) {
    if (best.makespan_s <= facts.longest_path_s()) break;
    const LayerSolution schedule = list_with(facts, choice, best.makespan_s);
    if (schedule.makespan_s < best.makespan_s) best = schedule;
  }
  return best;
}

template void improve_schedule(const LayerFacts<std::uint64_t>&, LayerSolution*);
template void improve_schedule(const LayerFacts<OpBits>&, LayerSolution*);
template LayerSolution best_list_schedule(const LayerFacts<std::uint64_t>&) noexcept;
template LayerSolution best_list_schedule(const LayerFacts<OpBits>&) noexcept;

}  // namespace phaze
