#include "phaze/layer_schedule.hpp"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/numbers.hpp"
#include "schedule/layer_facts.hpp"

namespace phaze {
namespace {

constexpr std::int64_t kBetweenChecks = 256;  // nodes between checks of the clock
// Nodes searched before the local search runs, which takes as long as hundreds of nodes.
constexpr std::int64_t kBeforeImproving = 2048;
constexpr std::size_t kMaxRemembered = 1u << 20;

// A node of the search tree: a time at which operators may start. Operators start in a fixed order,
// so that no set is started in two orders.
template <typename Bits>
struct State {
  PartialSchedule<Bits> partial;
  std::int32_t first;  // operators before this one in start order were decided
  bool begun;          // one operator started while nothing ran; another one is to start with it
  // Operators that could have run by themselves at an earlier time at which nothing ran, and did
  // not. Moving such an operator to that time changes only the order, so running it by itself later
  // need not be tried.
  Bits barred;
  // [i]: operators whose useful mode i could have started at the previous node and did not.
  // Starting such an operator in that mode now would only delay it, so this is not tried.
  Bits passed[kMaxModes];
};

constexpr std::int32_t kWait = -1;  // wait for the next operator to finish
constexpr std::int32_t kEnd = -2;   // run the remaining operators one after another
constexpr int kMaxSide = 12;        // most concurrent operators of a state that is stored

template <typename Bits>
struct Key {
  Bits done;
  Bits running;
  Bits modes;  // hash of the modes of the running operators
  bool operator==(const Key&) const = default;

  std::size_t hash() const noexcept {
    std::uint64_t h = folded(done) * 0x9E3779B97F4A7C15ULL;
    h ^= std::rotl(folded(running) * 0xC2B2AE3D27D4EB4FULL, 29);
    h ^= std::rotl(folded(modes) * 0x165667B19E3779F9ULL, 47);
    return static_cast<std::size_t>(h ^ (h >> 31));
  }

 private:
  static std::uint64_t folded(Bits set) noexcept {
    return low_bits(set) ^ std::rotl(high_bits(set) * 0xFF51AFD7ED558CCDULL, 31);
  }
};

template <typename Bits>
struct Remembered {
  Key<Bits> key;
  double now_s;
  Bits done;
  Bits barred;
  Bits passed[kMaxModes];
  double finish_s[kMaxSide];
  std::int32_t count = 0;
  std::int32_t next;  // the state stored before this one with the same bucket; -1: none
};

// States that were searched, in buckets by the hash of their keys.
template <typename Bits>
class Memory {
 public:
  // Calls covers(state) for the states with the key of `entry`, until it returns true; stores the
  // entry if it never does.
  template <typename F>
  bool find_or_store(const Remembered<Bits>& entry, const F& covers) {
    const std::size_t hash = entry.key.hash();
    for (std::int32_t at = first_[hash & (first_.size() - 1)]; at >= 0; at = states_[at].next) {
      if (states_[at].key == entry.key && covers(states_[at])) return true;
    }
    if (states_.size() == kMaxRemembered) return false;
    if (states_.size() == first_.size()) spread(4 * first_.size());
    states_.push_back(entry);
    link(static_cast<std::int32_t>(states_.size()) - 1);
    return false;
  }

 private:
  void spread(std::size_t buckets) {
    first_.assign(buckets, -1);
    for (std::size_t at = 0; at < states_.size(); ++at) link(static_cast<std::int32_t>(at));
  }
  void link(std::int32_t at) {
    Remembered<Bits>& state = states_[at];
    std::int32_t& first = first_[state.key.hash() & (first_.size() - 1)];
    state.next = first;
    first = at;
  }

  std::vector<Remembered<Bits>> states_;
  std::vector<std::int32_t> first_ = std::vector<std::int32_t>(256, -1);
};

template <typename Bits>
class Search {
 public:
  Search(const LayerFacts<Bits>& facts, const SearchLimits& limits, LayerSolution& best)
      : facts_(facts),
        limits_(limits),
        best_(best),
        below_s_(std::min(best.makespan_s, limits.enough_s)),
        begun_(std::chrono::steady_clock::now()) {}

  // Returns true if the whole tree was searched: no schedule is shorter than the best one found, or
  // than `enough_s` if that is less.
  bool run() {
    State<Bits> root;
    root.partial = facts_.beginning();
    root.first = 0;
    root.begun = false;
    root.barred = 0;
    std::fill(root.passed, root.passed + kMaxModes, Bits{0});
    explore(root);
    best_.nodes = nodes_;
    const double seen_s = stopped_ ? open_s_ * kRoundedDown : best_.makespan_s;
    const double enough_s = limits_.enough_s * (1.0 - 2.0 * kSame);
    best_.bound_s = std::max(best_.bound_s, std::min({seen_s, enough_s, best_.makespan_s}));
    return !stopped_;
  }

 private:
  struct Child {
    double bound_s;
    double tail_s;
    std::int32_t op;      // an operator, kWait or kEnd
    std::int32_t useful;  // position among the operator's useful modes
    std::int32_t turn;    // position of the operator in start order
    bool by_itself;       // whether nothing else starts until it ends
  };

  bool too_late(double bound_s) const noexcept { return bound_s >= below_s_ * (1.0 - kSame); }

  // Records the operators that could start and do not, before time advances to the next finish.
  void pass(State<Bits>* s) const noexcept {
    std::fill(s->passed, s->passed + facts_.most_useful(), Bits{0});
    for_ops(s->partial.ready, [&](int op) {
      for (int u = 0; u < facts_.useful_count(op); ++u) {
        if (facts_.fits(s->partial, facts_.useful(op, u))) s->passed[u] |= op_bit<Bits>(op);
      }
    });
  }

  // Those of the ready operators that were passed in every mode that allows overlap.
  Bits held(Bits ready, const Bits* passed) const noexcept {
    for (int u = 0; u < facts_.most_useful(); ++u) ready &= passed[u] | facts_.no_overlap(u);
    return ready;
  }

  // If nothing runs, a ready operator that does not run by itself now never does; those that do run
  // in order of their number.
  void bar(State<Bits>* s, int op, bool by_itself) const noexcept {
    if (s->partial.running_count > 0) return;
    const Bits below = by_itself ? op_bit<Bits>(op) - 1 : ~Bits{0};
    s->barred |= s->partial.ready & ~facts_.leaves() & below;
  }

  void follow(const Child& child, State<Bits>* s) const noexcept {
    if (child.op >= 0) {
      bar(s, child.op, child.by_itself);
      s->begun = s->partial.running_count == 0;
      facts_.start(&s->partial, child.op, facts_.useful(child.op, child.useful));
      s->first = child.turn + 1;
    }
    if (child.op < 0 || child.by_itself) {
      if (child.op < 0) pass(s);
      if (child.by_itself) std::fill(s->passed, s->passed + facts_.most_useful(), Bits{0});
      facts_.advance(&s->partial);
      s->first = 0;
      s->begun = false;
    }
  }

  // Whether a stored state dominates this one: at least as far advanced, with no fewer choices.
  bool seen(const State<Bits>& s) {
    const PartialSchedule<Bits>& m = s.partial;
    if (m.running_count > kMaxSide) return false;
    Remembered<Bits> entry;
    entry.key = {m.done & ~facts_.leaves(), 0, 0};
    for (int i = 0; i < m.running_count; ++i) entry.key.running |= op_bit<Bits>(m.running[i].op);
    entry.now_s = m.now_s;
    entry.done = m.done;
    entry.barred = s.barred & ~m.started;
    std::copy(s.passed, s.passed + facts_.most_useful(), entry.passed);
    for_ops(entry.key.running, [&](int op) {  // by operator number, independent of start order
      for (int i = 0; i < m.running_count; ++i) {
        if (m.running[i].op != op) continue;
        const int own = m.running[i].mode - facts_.problem().first_mode[op];
        entry.key.modes = entry.key.modes * kMaxModes + static_cast<Bits>(own);
        entry.finish_s[entry.count++] = m.running[i].finish_s;
      }
    });
    return memory_.find_or_store(
        entry, [&](const Remembered<Bits>& other) { return covers(other, entry); });
  }

  bool covers(const Remembered<Bits>& a, const Remembered<Bits>& b) const noexcept {
    if (a.now_s > b.now_s || (b.done & ~a.done) != 0 || (a.barred & ~b.barred) != 0) return false;
    // Without the operators that only `a` has done, an operator may have to run by itself.
    if (a.done != b.done && (a.barred & facts_.no_alone()) != 0) return false;
    for (int i = 0; i < b.count; ++i) {
      if (a.finish_s[i] > b.finish_s[i]) return false;
    }
    for (int u = 0; u < facts_.most_useful(); ++u) {
      if ((a.passed[u] & ~b.passed[u] & ~a.done) != 0) return false;
    }
    return true;
  }

  bool out_of_budget() {
    if (stopped_) return true;
    if (++nodes_ == kBeforeImproving) {
      improve_schedule(facts_, &best_);
      shortened();
    }
    if (nodes_ > limits_.nodes) stopped_ = true;
    if (nodes_ % kBetweenChecks == 0) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun_;
      if (spent.count() > limits_.seconds) stopped_ = true;
      if (limits_.interrupted != nullptr && limits_.interrupted(limits_.context)) stopped_ = true;
    }
    return stopped_;
  }

  void shortened() noexcept {
    below_s_ = std::min(below_s_, best_.makespan_s);
    const double shorter_s = limits_.enough_s * (1.0 - kSame);
    if (limits_.only_decide && best_.makespan_s < shorter_s) stopped_ = true;
  }

  // Runs the remaining operators one after another.
  void end_in_order(const State<Bits>& s) noexcept {
    double end = s.partial.now_s;
    for_ops(facts_.all() & ~s.partial.started, [&](int op) {
      start_s_[op] = end;
      mode_[op] = facts_.useful(op, 0) - facts_.problem().first_mode[op];
      end += facts_.shortest_s(op);
    });
    finish(end);
  }

  static double end_of(const PartialSchedule<Bits>& m) noexcept {
    double end = m.now_s;
    for (int i = 0; i < m.running_count; ++i) end = std::max(end, m.running[i].finish_s);
    return end;
  }

  void finish(double end) noexcept {
    if (end >= best_.makespan_s) return;
    best_.makespan_s = end;
    shortened();
    std::copy(start_s_, start_s_ + facts_.size(), best_.start_s);
    std::copy(mode_, mode_ + facts_.size(), best_.mode);
  }

  // Inserts a child after those, from `first` on, that are at least as promising.
  void insert(const Child& child, std::size_t first) {
    children_.push_back(child);
    std::size_t at = children_.size() - 1;
    const auto better = [&](const Child& other) {
      return child.bound_s != other.bound_s ? child.bound_s < other.bound_s
                                            : child.tail_s > other.tail_s;
    };
    for (; at > first && better(children_[at - 1]); --at) children_[at] = children_[at - 1];
    children_[at] = child;
  }

  // Appends the children of a state that may still improve on the incumbent, most promising first.
  void add_children(const State<Bits>& s) {
    const std::size_t first = children_.size();
    const Bits ready = s.partial.ready;
    const Bits turns = facts_.turns(ready);
    const Bits before = s.first < kMostOps<Bits> ? op_bit<Bits>(s.first) - 1 : ~Bits{0};
    Bits waiting = held(ready, s.passed);  // operators that do not start alongside others now
    for_ops(turns & before, [&](int turn) { waiting |= op_bit<Bits>(facts_.start_order(turn)); });
    const bool idle = s.partial.running_count == 0;
    const Bits wanted = idle ? 0 : facts_.unhindered(s.partial, 0);
    if ((wanted & waiting) != 0) return;  // an earlier start was better
    for (Bits open = turns & ~before; open != 0; open &= open - 1) {
      const int turn = first_of(open);
      const int op = facts_.start_order(turn);
      const Bits twins = facts_.twins(op) & ready;
      if ((twins & (op_bit<Bits>(op) - 1)) != 0) continue;  // only the first twin is tried
      if (facts_.mirrors(op, s.partial.started)) continue;
      const Bits own = op_bit<Bits>(op) | twins;
      for (int u = 0; u < facts_.useful_count(op); ++u) {
        if ((s.passed[u] & own) != 0 || !facts_.fits(s.partial, facts_.useful(op, u))) continue;
        if (idle && u == 0 && ((s.barred | facts_.leaves()) & own) == 0) {
          consider(s, {0.0, facts_.tail_s(op), op, u, turn, true}, waiting, first);
        }
        if (facts_.alone(op, u) || (facts_.urgent(op) & ready) != 0) continue;
        consider(s, {0.0, facts_.tail_s(op), op, u, turn, false}, waiting, first);
      }
      if ((wanted & op_bit<Bits>(op)) != 0) return;
      waiting |= op_bit<Bits>(op);
    }
    // Ready operators on single cores that do not start now do not start as long as a core is free.
    const bool waits = !idle && !s.begun && wanted == 0;
    const Bits passed = ready & facts_.one_core();
    if (waits && (passed == 0 || facts_.unhindered(s.partial, passed) == 0)) {
      consider(s, {0.0, -1.0, kWait, -1, 0, false}, waiting, first);
    }
    const Bits left = facts_.all() & ~s.partial.started;
    if (idle && (left & ~facts_.leaves()) == 0) {
      double end = s.partial.now_s;
      for_ops(left, [&](int op) { end += facts_.shortest_s(op); });
      if (!too_late(end)) insert({end, 0.0, kEnd, -1, 0, false}, first);
    }
  }

  // Inserts a child, as insert() does, unless its bound is too late. Of the ready operators, those
  // `waiting` do not start alongside others now.
  void consider(const State<Bits>& s, Child child, Bits waiting, std::size_t first) {
    const double enough_s = below_s_ * (1.0 - kSame);
    if (child.op >= 0) {
      const LayerMode& mode = facts_.problem().modes[facts_.useful(child.op, child.useful)];
      if (s.partial.now_s + mode.seconds + facts_.rest_s(child.op) >= enough_s) return;
    }
    State<Bits> next;
    next.partial = s.partial;
    next.barred = s.barred;
    follow(child, &next);
    const Bits left = s.partial.ready & next.partial.ready;
    const bool later = next.first == 0;
    const Bits holds = later ? held(left, next.passed) : waiting & left;
    child.bound_s = facts_.bound(next.partial, next.barred, holds, later, enough_s);
    if (!too_late(child.bound_s)) insert(child, first);
  }

  void explore(const State<Bits>& s) {
    if (s.partial.started == facts_.all()) {
      finish(end_of(s.partial));
      return;
    }
    if (out_of_budget()) return;
    const std::size_t first = children_.size();
    add_children(s);
    const std::size_t last = children_.size();
    State<Bits> next;
    for (std::size_t i = first; i < last; ++i) {
      const Child child = children_[i];
      if (too_late(child.bound_s)) break;
      if (stopped_) {
        open_s_ = std::min(open_s_, child.bound_s);
        continue;
      }
      if (child.op == kEnd) {
        end_in_order(s);
        continue;
      }
      next = s;
      follow(child, &next);
      if (child.op >= 0) {
        start_s_[child.op] = s.partial.now_s;
        mode_[child.op] =
            facts_.useful(child.op, child.useful) - facts_.problem().first_mode[child.op];
      }
      if (next.first == 0 && seen(next)) continue;
      explore(next);
      if (stopped_) open_s_ = std::min(open_s_, child.bound_s);
    }
    children_.resize(first);
  }

  const LayerFacts<Bits>& facts_;
  const SearchLimits& limits_;
  LayerSolution& best_;
  double below_s_;  // only shorter schedules are of interest
  double start_s_[kMostOps<Bits>];
  std::int32_t mode_[kMostOps<Bits>];
  std::vector<Child> children_;  // of all states from the root to the current one
  Memory<Bits> memory_;
  std::int64_t nodes_ = 0;
  bool stopped_ = false;
  double open_s_ = kInfinite;
  std::chrono::steady_clock::time_point begun_;
};

template <typename Bits>
LayerSolution solve(const LayerProblem& problem, const SearchLimits& limits) {
  LayerFacts<Bits> facts(problem);
  LayerSolution best = best_list_schedule(facts);
  const double enough_s = best.makespan_s * (1.0 - kSame / 2.0);  // proves it despite rounding
  double bound_s = facts.longest_path_s();
  const auto met = [&] { return best.makespan_s <= bound_s * (1.0 + kSame); };
  if (!met()) bound_s = facts.root_bound(enough_s);
  if (!met()) bound_s = facts.prepare_search(bound_s, enough_s);
  best.bound_s = bound_s * kRoundedDown;
  if (met()) {
    best.proved_by = ProvedBy::kListSchedule;
  } else if (limits.nodes > 0 && best.bound_s < limits.enough_s) {
    const bool exhausted = Search<Bits>(facts, limits, best).run();
    if (exhausted && best.makespan_s <= limits.enough_s) best.proved_by = ProvedBy::kBranchAndBound;
  }
  if (best.proved_by != ProvedBy::kNothing) best.bound_s = best.makespan_s;
  return best;
}

}  // namespace

LayerSolution solve_layer(const LayerProblem& problem, const SearchLimits& limits) {
  return problem.size <= kMostOps<std::uint64_t> ? solve<std::uint64_t>(problem, limits)
                                                 : solve<OpBits>(problem, limits);
}

}  // namespace phaze
