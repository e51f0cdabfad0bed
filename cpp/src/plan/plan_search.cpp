// The best plans over many layouts: layouts in the order of their bounds, each solved exactly as
// long as its bound does not rule it out.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "base/numbers.hpp"
#include "phaze/parallel.hpp"
#include "plan/plan_solver.hpp"

namespace phaze {
namespace {

// Layouts solved at once, for any thread count: few at first, as they limit the others.
constexpr std::size_t kFirstWave = 4;
constexpr std::size_t kWave = 32;

// The bounds of a layout, each slower and mostly tighter than the one before.
enum class Bound { kQuick, kLayout, kChunks };

struct Candidate {
  double bound_s;
  double load_s;  // lower bound on the largest load of a stage
  std::int64_t layout;
  Bound bound;       // until kChunks, `bound_s` may still rise
  unsigned classes;  // that may have a plan within the limit
};

// Layouts in the order of their bounds; a removed layout may be reinserted with a higher bound.
class CandidateQueue {
 public:
  // Adds a layout with its quick bound; call `arrange` after the last one.
  void add(double quick_s, std::int64_t layout) {
    heap_.push_back({quick_s, 0.0, layout, Bound::kQuick, kAllClasses});
  }
  void arrange() { std::make_heap(heap_.begin(), heap_.end(), later); }

  bool empty() const noexcept { return heap_.empty(); }
  double least_s() const noexcept { return heap_.front().bound_s; }

  Candidate take() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Candidate own = heap_.back();
    heap_.pop_back();
    return own;
  }

  // Reinserts a candidate with its next bound.
  void put_back(Candidate own, double next_s) {
    own.bound_s = std::max(own.bound_s, next_s);
    own.bound = own.bound == Bound::kQuick ? Bound::kLayout : Bound::kChunks;
    heap_.push_back(own);
    std::push_heap(heap_.begin(), heap_.end(), later);
  }

 private:
  static bool later(const Candidate& a, const Candidate& b) noexcept {
    return a.bound_s != b.bound_s ? a.bound_s > b.bound_s : a.layout > b.layout;
  }

  std::vector<Candidate> heap_;
};

// Layouts that differ only in rank order count as one plan; those of another `group_kind` count
// separately.
using Kind = std::array<std::int64_t, 12>;
Kind kind_of(const PlanSpaceImpl& space, const LayoutRecord& l) noexcept {
  const StrategyRecord& s = space.strategies[at(l.strategy)];
  return {s.tp, s.cp,  s.ep,   s.etp, s.micro_batch,       l.schedule,
          l.pp, l.vpp, l.zero, l.dp,  sharing_replicas(l), s.group_kind};
}

// The times of the fastest plans found so far, one of each kind.
class Fastest {
 public:
  Fastest(std::size_t top, double below_s) : top_(top), below_s_(below_s) {}

  // The time below which a plan is among the `top` fastest and takes at most `below_s_`.
  double limit_s() const {
    return times_.size() < top_ ? below_s_ : std::min(below_s_, times_[top_ - 1]);
  }

  void add(double time_s, const Kind& kind) {
    const auto [known, fresh] = best_.try_emplace(kind, time_s);
    if (!fresh) {
      if (!(time_s < known->second)) return;
      times_.erase(std::lower_bound(times_.begin(), times_.end(), known->second));
      known->second = time_s;
    }
    times_.insert(std::upper_bound(times_.begin(), times_.end(), time_s), time_s);
  }

 private:
  std::size_t top_;
  double below_s_;
  std::map<Kind, double> best_;
  std::vector<double> times_;  // the times in `best_`, rising
};

// The plans found so far that are non-dominated in time and memory.
class Front {
 public:
  // Upper limit on the time of a plan of interest that needs at least `least_bytes`.
  double below(double least_bytes) const {
    const auto above =
        std::upper_bound(front_.begin(), front_.end(), least_bytes,
                         [](double bytes, const Leader& l) { return bytes < l.bytes; });
    return above == front_.begin() ? kInfinite : std::prev(above)->time_s;
  }

  // Least memory of a known plan that takes less than `time_s`; infinite if there is none.
  double least_bytes(double time_s) const {
    const auto slower = std::partition_point(front_.begin(), front_.end(),
                                             [&](const Leader& l) { return l.time_s >= time_s; });
    return slower == front_.end() ? kInfinite : slower->bytes;
  }

  void add(const PlacedPlan& plan) {
    const Leader leader{plan.memory_bytes, plan.time_s};
    const auto place =
        std::lower_bound(front_.begin(), front_.end(), leader.bytes,
                         [](const Leader& l, double bytes) { return l.bytes < bytes; });
    if (place != front_.begin() && std::prev(place)->time_s <= leader.time_s) return;
    if (place != front_.end() && place->bytes == leader.bytes && place->time_s <= leader.time_s) {
      return;
    }
    const auto end = std::find_if(place, front_.end(),
                                  [&](const Leader& l) { return l.time_s < leader.time_s; });
    front_.insert(front_.erase(place, end), leader);
  }

 private:
  struct Leader {
    double bytes;
    double time_s;
  };
  std::vector<Leader> front_;  // by rising bytes and falling time
};

// Upper limit on the time of a layout's plan on the front. Within a time limit the load of a stage
// is limited, and so is its number of blocks; this gives a least memory of the plan, and with that
// a tighter time limit.
double front_limit_s(const PlanSpaceImpl& space, const Candidate& c, const StepTotals& totals,
                     const Front& front, double usable_bytes) {
  if (!totals.plain_is_fastest) return kInfinite;  // recomputation may be faster even if all fits
  const PricedLayout& layout = space.layouts[at(c.layout)];
  const LayoutRecord& l = layout.record;
  const auto m = static_cast<double>(l.micro_batches);
  const double even = std::ceil(static_cast<double>(space.blocks) / l.pp);
  double most = l.vpp > 1 ? (bidirectional(l) ? 2.0 * even : even) : space.blocks;
  double least = least_memory(space, layout, usable_bytes, most);
  double limit = front.below(least);
  if (c.bound_s > limit) return limit;
  const double known = front.least_bytes(c.bound_s);
  if (known < kInfinite && !holds_all(space, layout, usable_bytes, known)) return 0.0;
  least = least_memory_of_all(space, layout, usable_bytes, least);
  limit = front.below(least);
  const double work_s = totals.work_s + layout.bound.sends_s;
  for (int round = 0; round < 4 && c.bound_s <= limit && limit < kInfinite; ++round) {
    if (!(totals.block_s > 0.0) || l.vpp > 1) break;
    double load = limit / m;
    if (l.schedule == 0 && m > l.pp + 1.0) {
      load = std::min(load, (limit - 2.0 * work_s) / (m - l.pp - 1.0));
    }
    most = std::min(most, std::floor(load / totals.block_s * (1.0 + 1e-9)));
    least = std::max(least, least_memory(space, layout, usable_bytes, most));
    const double sharper = front.below(least);
    if (sharper >= limit) break;
    limit = sharper;
  }
  return limit;
}

// The order of plans: the fastest first, ties to the least memory, then to the fewest devices, then
// to the smaller widths, independent of the order of the layouts.
auto plan_order(const PlanSpaceImpl& space, const PlacedPlan& plan) {
  const LayoutRecord& l = space.layouts[at(plan.layout)].record;
  const StrategyRecord& s = space.strategies[at(l.strategy)];
  const std::int64_t devices = s.tp * s.cp * l.pp * l.dp;
  return std::tuple(plan.time_s, plan.memory_bytes, devices, s.tp, l.pp, l.dp, l.zero, plan.layout);
}

void sort_plans(const PlanSpaceImpl& space, std::vector<PlacedPlan>* plans) {
  std::sort(plans->begin(), plans->end(), [&](const PlacedPlan& a, const PlacedPlan& b) {
    return plan_order(space, a) < plan_order(space, b);
  });
}

// Adds the layouts of a list with their quick bounds, as far as these are within a limit.
template <typename Quick>
void add_within(const PlanSpaceImpl& space, std::size_t list, double work_s, double limit,
                const Quick& quick_s, CandidateQueue* queue) {
  for (std::size_t k = 0; k < space.bounds.fitting[list].size(); ++k) {
    const BoundLine& line = space.bounds.fitting_lines[list][k];
    if (line.least_from_here_s(work_s) > limit) break;
    if (line.least_s(work_s) > limit) continue;
    const std::int64_t r = space.bounds.fitting[list][k];
    const double bound_s = quick_s(r);
    if (bound_s <= limit && bound_s < kInfinite) queue->add(bound_s, r);
  }
}

// The layouts of all strategies on one chip, in the order of their bounds; those with bounds above
// `most_s` are left out.
class Layouts {
 public:
  Layouts(const PlanSpaceImpl& space, std::span<const KindTimes> times, std::size_t memory_limit,
          double most_s)
      : space_(space), times_(times), memory_limit_(memory_limit) {
    for (std::size_t s = 0; s < space.strategies.size(); ++s) {
      totals_.push_back(totals_of(space, static_cast<int>(s), times[s]));
      const auto quick_s = [&](std::int64_t r) {
        return bound_of_layout(space, at(r), memory_limit, totals_[s], times[s], -kInfinite);
      };
      add_within(space, s * space.bounds.memory_limits.size() + memory_limit,
                 line_work_s(space, totals_[s]), most_s, quick_s, &queue_);
    }
    queue_.arrange();
  }

  // Solves every layout that may have a plan of interest: `limit` returns the time limit of a
  // candidate's plan, `offer` is called with the plans found, in the order of the bounds. If
  // `stop`, asked after every kWave layouts, returns true, the other layouts are left open.
  template <typename Limit, typename Offer>
  SettledLayouts settle(int threads, const Limit& limit, const Offer& offer,
                        const AskedToStop& stop = {}) {
    SettledLayouts settled{0, space_.bounds.without_plan[memory_limit_], kInfinite};
    double best_s = kInfinite;
    std::vector<Candidate> partly;
    const auto offer_best = [&](PlacedPlan plan) {
      best_s = std::min(best_s, plan.time_s);
      offer(std::move(plan));
    };
    PlayedSteps played;
    std::vector<Candidate> wave;
    std::vector<double> below;
    while (!queue_.empty()) {
      if (settled.solved > 0 && stop && stop()) {
        settled.open_s = queue_.least_s();
        break;
      }
      wave.clear();
      below.clear();
      const std::size_t most = std::clamp(at(settled.solved), kFirstWave, kWave);
      while (!queue_.empty() && wave.size() < most) {
        Candidate own = queue_.take();
        const double most_s = limit(own, totals_[strategy_of(own)]);
        if (own.bound_s > most_s) continue;
        if (own.bound != Bound::kChunks) {
          const double next_s = next_bound_s(&own, most_s);
          if (next_s <= most_s) queue_.put_back(own, next_s);
          continue;
        }
        wave.push_back(own);
        below.push_back(most_s);
      }
      settled.solved += static_cast<std::int64_t>(wave.size());
      settled.empty += solve(wave, below, threads, 0, &played, &partly, offer_best);
    }
    // Again with more work: layouts that may have a plan of interest, then the fastest plan.
    for (const std::int64_t work : {kLittleWork, kMuchWork}) {
      std::vector<Candidate> again;
      below.clear();
      for (const Candidate& own : partly) {
        const double most_s = work == kMuchWork ? best_s : limit(own, totals_[strategy_of(own)]);
        if (own.bound_s < most_s) {
          again.push_back(own);
          below.push_back(most_s);
        } else if (work == kMuchWork) {
          settled.open_s = std::min(settled.open_s, own.bound_s);
        }
      }
      partly.clear();
      settled.empty += solve(again, below, threads, work, &played, &partly, offer_best);
    }
    for (const Candidate& own : partly) settled.open_s = std::min(settled.open_s, own.bound_s);
    return settled;
  }

 private:
  std::size_t strategy_of(const Candidate& c) const noexcept {
    return at(space_.layouts[at(c.layout)].record.strategy);
  }

  // Solves layouts within the work limit `work`: offers their plans, adds layouts that are solved
  // in part to `partly`, and returns the number of layouts without any plan.
  template <typename Offer>
  std::int64_t solve(const std::vector<Candidate>& wave, const std::vector<double>& below,
                     int threads, std::int64_t work, PlayedSteps* played,
                     std::vector<Candidate>* partly, const Offer& offer) const {
    std::vector<PlacedPlan> found(wave.size());
    parallel_for(wave.size(), threads, work == 0 ? 4 : 1, [&](std::size_t begin, std::size_t end) {
      const SolverPool::Lease solver = space_.solvers->lend(played);
      for (std::size_t k = begin; k < end; ++k) {
        found[k] = solver.get()->best(space_, at(wave[k].layout), times_[strategy_of(wave[k])],
                                      space_.bounds.memory_limits[memory_limit_], below[k],
                                      wave[k].load_s, work, wave[k].classes);
      }
    });
    std::int64_t empty = 0;
    for (std::size_t k = 0; k < found.size(); ++k) {
      if (found[k].open_s < kInfinite) {
        partly->push_back(wave[k]);
        partly->back().bound_s = std::max(wave[k].bound_s, found[k].open_s);
      } else {
        empty += found[k].time_s == kInfinite && below[k] == kInfinite;
      }
      if (found[k].time_s < kInfinite) offer(std::move(found[k]));
    }
    return empty;
  }

  double next_bound_s(Candidate* own, double enough_s) const {
    const std::size_t s = strategy_of(*own);
    if (own->bound == Bound::kLayout) {
      return bound_of_chunks(space_, at(own->layout), memory_limit_, times_[s], enough_s,
                             &own->classes);
    }
    return bound_of_layout(space_, at(own->layout), memory_limit_, totals_[s], times_[s], enough_s,
                           &own->load_s);
  }

  const PlanSpaceImpl& space_;
  std::span<const KindTimes> times_;
  std::size_t memory_limit_;
  std::vector<StepTotals> totals_;  // by strategy
  CandidateQueue queue_;
};

// Takes a plan, which then limits others, unless the best one so far comes before it.
void take_better(const PlanSpaceImpl& space, PlacedPlan found, PlacedPlan* best, double* limit_s) {
  if (found.time_s == kInfinite) return;
  if (best->layout >= 0 && comes_before(space, *best, found)) return;
  *best = std::move(found);
  *limit_s = std::min(*limit_s, best->time_s);
}

}  // namespace

bool comes_before(const PlanSpaceImpl& space, const PlacedPlan& a, const PlacedPlan& b) {
  return plan_order(space, a) < plan_order(space, b);
}

PlacedPlan best_of_strategy(const PlanSpaceImpl& space, std::int32_t strategy,
                            const KindTimes& times, const KindTimes& least,
                            std::size_t memory_limit, double below_s, PlanSolver* solver) {
  PlacedPlan best{kInfinite, 0.0, -1, {}};
  const StepTotals totals = totals_of(space, strategy, least);
  double limit = below_s;
  const auto bound_s = [&](std::int64_t r, double enough_s, double* load_s) {
    return bound_of_layout(space, at(r), memory_limit, totals, least, enough_s, load_s);
  };
  const auto chunks_bound_s = [&](Candidate* c) {
    return bound_of_chunks(space, at(c->layout), memory_limit, least, limit, &c->classes);
  };
  const auto solve = [&](const Candidate& c, std::int64_t work) {
    return solver->best(space, at(c.layout), times, space.bounds.memory_limits[memory_limit], limit,
                        c.load_s, work, c.classes);
  };
  const std::size_t list = at(strategy) * space.bounds.memory_limits.size() + memory_limit;
  // The best layout on the chip before: its plan limits the others.
  std::int64_t& last = solver->last_best(list);
  std::int64_t solved = -1;
  if (Candidate c{0.0, 0.0, last, Bound::kChunks, kAllClasses};
      last >= 0 && bound_s(last, limit, &c.load_s) <= limit && chunks_bound_s(&c) <= limit) {
    PlacedPlan found = solve(c, 0);
    if (found.open_s == kInfinite) {
      solved = last;
      take_better(space, std::move(found), &best, &limit);
    }
  }
  CandidateQueue queue;
  add_within(
      space, list, line_work_s(space, totals), limit,
      [&](std::int64_t r) { return r == solved ? kInfinite : bound_s(r, -kInfinite, nullptr); },
      &queue);
  queue.arrange();
  std::vector<Candidate> partly;  // layouts that are solved in part
  while (!queue.empty()) {
    Candidate c = queue.take();
    if (c.bound_s > limit) break;
    if (c.bound != Bound::kChunks) {
      const double next_s =
          c.bound == Bound::kQuick ? bound_s(c.layout, limit, &c.load_s) : chunks_bound_s(&c);
      if (next_s <= limit) queue.put_back(c, next_s);
      continue;
    }
    PlacedPlan found = solve(c, 0);
    if (found.open_s < kInfinite) {
      partly.push_back(c);
      partly.back().bound_s = std::max(c.bound_s, found.open_s);
    }
    take_better(space, std::move(found), &best, &limit);
  }
  double open_s = kInfinite;
  for (const Candidate& c : partly) {  // solved again with more work
    if (c.bound_s > limit) continue;
    PlacedPlan found = solve(c, kMuchWork);
    if (found.open_s < kInfinite) open_s = std::min(open_s, std::max(c.bound_s, found.open_s));
    take_better(space, std::move(found), &best, &limit);
  }
  best.open_s = open_s < limit ? open_s : kInfinite;
  if (best.layout >= 0) last = best.layout;
  return best;
}

std::vector<PlacedPlan> top_plans(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                  std::size_t memory_limit, std::size_t top, int threads,
                                  SettledLayouts* settled, const AskedToStop& stop,
                                  double below_s) {
  Layouts layouts(space, times, memory_limit, below_s);
  Fastest fastest(top, below_s);
  const auto kind = [&](const PlacedPlan& plan) {
    return kind_of(space, space.layouts[at(plan.layout)].record);
  };
  std::vector<PlacedPlan> plans;
  *settled = layouts.settle(
      threads, [&](const Candidate&, const StepTotals&) { return fastest.limit_s(); },
      [&](PlacedPlan plan) {
        fastest.add(plan.time_s, kind(plan));
        plans.push_back(std::move(plan));
      },
      stop);
  sort_plans(space, &plans);
  std::vector<PlacedPlan> selected;
  std::map<Kind, bool> known;
  for (PlacedPlan& plan : plans) {
    if (!known.emplace(kind(plan), true).second) continue;
    selected.push_back(std::move(plan));
    if (selected.size() == top) break;
  }
  return selected;
}

std::vector<PlacedPlan> plan_front(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                   std::size_t memory_limit, double most_s, int threads,
                                   SettledLayouts* settled) {
  Layouts layouts(space, times, memory_limit, most_s);
  Front front;
  std::vector<PlacedPlan> plans;
  *settled = layouts.settle(
      threads,
      [&](const Candidate& c, const StepTotals& totals) {
        if (c.bound_s > most_s) return most_s;
        return std::min(most_s, front_limit_s(space, c, totals, front,
                                              space.bounds.memory_limits[memory_limit]));
      },
      [&](PlacedPlan plan) {
        front.add(plan);
        plans.push_back(std::move(plan));
      });
  sort_plans(space, &plans);
  std::vector<PlacedPlan> selected;
  for (PlacedPlan& plan : plans) {
    if (!selected.empty() && plan.memory_bytes >= selected.back().memory_bytes) continue;
    selected.push_back(std::move(plan));
  }
  return selected;
}

}  // namespace phaze
