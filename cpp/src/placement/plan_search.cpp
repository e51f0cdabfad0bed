// The best plans over many layouts: layouts in the order of their bounds, each solved exactly as
// long as its bound does not rule it out.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "phaze/parallel.hpp"
#include "placement/plan_solver.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::size_t kWave = 32;  // layouts solved at once; fixed, so that threads do not matter

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

struct Candidate {
  double bound_s;
  double load_s;   // that some stage has at least
  double block_s;  // both passes of the shortest block
  double work_s;   // of a micro-batch, messages included
  std::int64_t row;
};

bool sooner(const Candidate& a, const Candidate& b) noexcept {
  return a.bound_s != b.bound_s ? a.bound_s < b.bound_s : a.row < b.row;
}

// Layouts that differ in rank order alone are one kind of plan, although a strategy whose expert
// groups lie further apart is another one.
using Kind = std::array<std::int64_t, 11>;
Kind kind_of(const PlanSpaceImpl& space, const LayoutRecord& l) noexcept {
  const StrategyRecord& s = space.strategies[at(l.strategy)];
  return {s.tensor_parallel,
          s.context_parallel,
          s.expert_parallel,
          s.microbatch,
          l.schedule,
          l.stages,
          l.virtual_stages,
          l.zero,
          l.data_parallel,
          sharing_replicas(l),
          s.way};
}

// Plans found so far: the best of each kind, and the front of time and memory.
class Leaders {
 public:
  explicit Leaders(std::size_t top) : top_(top) {}

  // What a plan of at least so many bytes may take to be of interest.
  double below(double least_bytes) const {
    const double limit = times_.size() < top_ ? kInfinite : times_[top_ - 1];
    if (stale_) refresh();
    const auto above =
        std::upper_bound(front_.begin(), front_.end(), least_bytes,
                         [](double bytes, const Leader& l) { return bytes < l.bytes; });
    const double front = above == front_.begin() ? kInfinite : std::prev(above)->time_s;
    return std::max(limit, front);
  }

  // Bytes of the leanest plan that takes less than this; infinite where there is none, or where a
  // plan would be among the fastest.
  double least_bytes(double time_s) const {
    if (times_.size() < top_ || time_s <= times_[top_ - 1]) return kInfinite;
    if (stale_) refresh();
    const auto slower = std::partition_point(front_.begin(), front_.end(),
                                             [&](const Leader& l) { return l.time_s >= time_s; });
    return slower == front_.end() ? kInfinite : slower->bytes;
  }

  void add(const PlacedPlan& plan, const Kind& kind) {
    const Leader leader{plan.memory_bytes, plan.time_s};
    const auto [known, fresh] = best_.try_emplace(kind, leader);
    if (!fresh) {
      if (!(leader.time_s < known->second.time_s)) return;
      times_.erase(std::lower_bound(times_.begin(), times_.end(), known->second.time_s));
      known->second = leader;
    }
    times_.insert(std::upper_bound(times_.begin(), times_.end(), leader.time_s), leader.time_s);
    stale_ = true;
  }

 private:
  struct Leader {
    double bytes;
    double time_s;
  };

  // A slower rank order of a kind is no plan of its own, so the front is made of leaders alone.
  void refresh() const {
    sorted_.clear();
    for (const auto& [_, leader] : best_) sorted_.push_back(leader);
    std::sort(sorted_.begin(), sorted_.end(), [](const Leader& a, const Leader& b) {
      return a.bytes != b.bytes ? a.bytes < b.bytes : a.time_s < b.time_s;
    });
    front_.clear();
    for (const Leader& leader : sorted_) {
      if (front_.empty() || leader.time_s < front_.back().time_s) front_.push_back(leader);
    }
    stale_ = false;
  }

  std::size_t top_;
  std::map<Kind, Leader> best_;
  std::vector<double> times_;  // of those, rising
  mutable std::vector<Leader> sorted_;
  mutable std::vector<Leader> front_;  // more bytes, less time
  mutable bool stale_ = false;
};

// What a layout's plan may take to be of interest. A plan that takes no longer has no stage above a
// load, so none with more blocks than that; hence a least memory, and a sharper limit.
double limit_of(const PlanSpaceImpl& space, const Candidate& c, const Leaders& leaders,
                double room_bytes) {
  const PlanRow& row = space.rows[at(c.row)];
  const LayoutRecord& l = row.layout;
  const auto m = static_cast<double>(l.microbatches);
  const double even = std::ceil(static_cast<double>(space.blocks) / l.stages);
  double most = l.virtual_stages > 1 ? (both_ways(l) ? 2.0 * even : even) : space.blocks;
  double least = least_memory(space, row, room_bytes, most);
  double limit = leaders.below(least);
  if (c.bound_s > limit) return limit;
  const double known = leaders.least_bytes(c.bound_s);
  if (known < kInfinite && !holds_all(space, row, room_bytes, known)) return 0.0;
  least = least_memory_of_all(space, row, room_bytes, least);
  limit = leaders.below(least);
  for (int round = 0; round < 4 && c.bound_s <= limit && limit < kInfinite; ++round) {
    if (!(c.block_s > 0.0) || l.virtual_stages > 1) break;
    double load = limit / m;
    if (l.schedule == 0 && m > l.stages + 1.0) {
      load = std::min(load, (limit - 2.0 * c.work_s) / (m - l.stages - 1.0));
    }
    most = std::min(most, std::floor(load / c.block_s * (1.0 + 1e-9)));
    least = std::max(least, least_memory(space, row, room_bytes, most));
    const double sharper = leaders.below(least);
    if (sharper >= limit) break;
    limit = sharper;
  }
  return limit;
}

// Of plans in order, those that are among the first of their kind, and those on the front.
std::vector<PlacedPlan> leading(const PlanSpaceImpl& space, std::vector<PlacedPlan> plans,
                                std::size_t top) {
  std::vector<PlacedPlan> kept;
  std::map<Kind, bool> known;
  double least = kInfinite;
  for (PlacedPlan& plan : plans) {
    const bool first =
        known.emplace(kind_of(space, space.rows[at(plan.layout)].layout), true).second;
    if (!first) continue;
    if (known.size() > top && plan.memory_bytes >= least) continue;
    least = std::min(least, plan.memory_bytes);
    kept.push_back(std::move(plan));
  }
  return kept;
}

}  // namespace

PlacedPlan best_of_strategy(const PlanSpaceImpl& space, std::int32_t strategy,
                            const KindTimes& times, const KindTimes& least, std::size_t room,
                            double below_s, PlanSolver* solver) {
  PlacedPlan best{kInfinite, 0.0, -1, {}};
  const StepTotals totals = totals_of(space, strategy, least);
  std::vector<Candidate> candidates;
  for (const std::int64_t r : space.fitting[at(strategy) * space.rooms.size() + room]) {
    double load = 0.0;
    const double bound =
        bound_of_row(space, at(r), room, totals, times.hbm_bytes_per_s, below_s, &load);
    if (bound <= below_s) candidates.push_back({bound, load, 0.0, 0.0, r});
  }
  std::sort(candidates.begin(), candidates.end(), sooner);
  double limit = below_s;
  for (const Candidate& c : candidates) {
    if (c.bound_s > limit) break;
    PlacedPlan found = solver->best(space, at(c.row), times, space.rooms[room], limit, c.load_s);
    const bool better =
        found.time_s < best.time_s || (found.time_s == best.time_s && found.layout < best.layout);
    if (found.time_s == kInfinite || !better) continue;
    best = std::move(found);
    limit = std::min(limit, best.time_s);
  }
  return best;
}

std::vector<PlacedPlan> top_plans(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                  std::size_t room, std::size_t top, int threads,
                                  std::int64_t* solved, std::int64_t* empty) {
  std::vector<Candidate> candidates;
  for (std::size_t s = 0; s < space.strategies.size(); ++s) {
    const StepTotals totals = totals_of(space, static_cast<int>(s), times[s]);
    for (const std::int64_t r : space.fitting[s * space.rooms.size() + room]) {
      double load = 0.0;
      const double bound =
          bound_of_row(space, at(r), room, totals, times[s].hbm_bytes_per_s, kInfinite, &load);
      if (bound == kInfinite) continue;
      const double work = totals.work_s + space.rows[at(r)].bound.sends_s;
      candidates.push_back({bound, load, totals.block_s, work, r});
    }
  }
  std::sort(candidates.begin(), candidates.end(), sooner);
  Leaders leaders(top);
  std::vector<PlacedPlan> plans;
  std::vector<const Candidate*> wave;
  std::vector<double> below;
  *solved = 0;
  *empty = 0;
  for (std::size_t next = 0; next < candidates.size();) {
    wave.clear();
    below.clear();
    for (; next < candidates.size() && wave.size() < kWave; ++next) {
      const double limit = limit_of(space, candidates[next], leaders, space.rooms[room]);
      if (candidates[next].bound_s > limit) continue;
      wave.push_back(&candidates[next]);
      below.push_back(limit);
    }
    std::vector<PlacedPlan> found(wave.size());
    parallel_for(wave.size(), threads, 4, [&](std::size_t begin, std::size_t end) {
      PlanSolver solver;
      for (std::size_t k = begin; k < end; ++k) {
        const std::size_t row = at(wave[k]->row);
        const std::size_t s = at(space.rows[row].layout.strategy);
        found[k] = solver.best(space, row, times[s], space.rooms[room], below[k], wave[k]->load_s);
      }
    });
    *solved += static_cast<std::int64_t>(wave.size());
    for (std::size_t k = 0; k < found.size(); ++k) {
      PlacedPlan& plan = found[k];
      if (plan.time_s == kInfinite) {
        *empty += below[k] == kInfinite;
        continue;
      }
      leaders.add(plan, kind_of(space, space.rows[at(plan.layout)].layout));
      plans.push_back(std::move(plan));
    }
  }
  std::stable_sort(plans.begin(), plans.end(), [](const PlacedPlan& a, const PlacedPlan& b) {
    if (a.time_s != b.time_s) return a.time_s < b.time_s;
    return a.memory_bytes != b.memory_bytes ? a.memory_bytes < b.memory_bytes : a.layout < b.layout;
  });
  return leading(space, std::move(plans), top);
}

}  // namespace phaze
