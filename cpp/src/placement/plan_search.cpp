// The best plans over many layouts: layouts in the order of their bounds, each solved exactly as
// long as its bound does not rule it out.
#include <algorithm>
#include <array>
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
  double load_s;
  double least_bytes;
  std::int64_t row;
};

bool sooner(const Candidate& a, const Candidate& b) noexcept {
  return a.bound_s != b.bound_s ? a.bound_s < b.bound_s : a.row < b.row;
}

// Layouts that differ in rank order alone are one kind of plan.
using Kind = std::array<std::int64_t, 7>;
Kind kind_of(const LayoutRecord& l) noexcept {
  return {l.strategy, l.schedule, l.stages, l.virtual_stages, l.zero, l.data_parallel,
          l.microbatches};
}

// The fullest stage of any plan of a layout holds at least an even share of the blocks, each with
// its state and one micro-batch in the leanest variant; the first stage the embedding as well.
double least_memory(const PlanSpaceImpl& space, const PlanRow& row) noexcept {
  const PlanFrame& frame = space.frames[at(row.frame)];
  const LayoutRecord& l = row.layout;
  const StrategyRecord& s = space.strategies[at(l.strategy)];
  const double lost = 1.0 + space.training.fragmentation;
  double block = kInfinite;
  double first = 0.0;
  double last = 0.0;
  double state = 0.0;
  for (int i = 0; i < space.layers; ++i) {
    const int kind = space.kind_at(i, l.stages);
    const LayerKindRecord& size = space.size_of(l.strategy, kind);
    double stash = kInfinite;
    for (int v = 0; v < s.variants; ++v) stash = std::min(stash, size.stash_bytes[v]);
    const double own = frame.resident_bytes[at(kind)] + lost * stash;
    state += own;
    if (i < space.first_block) first += own;
    if (i >= space.last_block) last += own + lost * size.once_bytes;
    if (i >= space.first_block && i < space.last_block) block = std::min(block, own);
  }
  const double even = space.blocks > 0 ? row.bound.whole * block : 0.0;
  const double most = l.stages == 1 ? std::max(state, first + even + last)
                                    : std::max({even, first, last, state / l.stages});
  return (most + lost * space.buffer_bytes(row)) * (1.0 - 1e-9);
}

// Plans found so far: the best of each kind, and the front of time and memory.
class Leaders {
 public:
  explicit Leaders(std::size_t top) : top_(top) {}

  // What a plan of at least so many bytes may take to be of interest.
  double below(double least_bytes) const {
    double limit = times_.size() < top_ ? kInfinite : times_[top_ - 1];
    double front = kInfinite;
    for (const auto& [bytes, time_s] : front_) {
      if (bytes <= least_bytes) front = std::min(front, time_s);
    }
    return std::max(limit, front);
  }

  void add(const PlacedPlan& plan, const Kind& kind) {
    const auto known = best_.find(kind);
    if (known != best_.end()) {
      if (!(plan.time_s < known->second)) return;
      times_.erase(std::find(times_.begin(), times_.end(), known->second));
      known->second = plan.time_s;
    } else {
      best_.emplace(kind, plan.time_s);
    }
    times_.insert(std::upper_bound(times_.begin(), times_.end(), plan.time_s), plan.time_s);
    for (const auto& [bytes, time_s] : front_) {
      if (bytes <= plan.memory_bytes && time_s <= plan.time_s) return;
    }
    std::erase_if(front_, [&](const auto& p) {
      return p.first >= plan.memory_bytes && p.second >= plan.time_s;
    });
    front_.emplace_back(plan.memory_bytes, plan.time_s);
  }

 private:
  std::size_t top_;
  std::map<Kind, double> best_;
  std::vector<double> times_;                     // of the best of each kind, rising
  std::vector<std::pair<double, double>> front_;  // bytes, seconds
};

}  // namespace

PlacedPlan best_of_strategy(const PlanSpaceImpl& space, std::int32_t strategy,
                            const KindTimes& times, const KindTimes& least, std::size_t room,
                            double below_s, PlanSolver* solver) {
  PlacedPlan best{kInfinite, 0.0, -1, {}};
  const StepTotals totals = totals_of(space, strategy, least);
  std::vector<Candidate> candidates;
  for (std::int64_t r = space.first_row[at(strategy)]; r < space.first_row[at(strategy) + 1]; ++r) {
    double load = 0.0;
    const double bound =
        bound_of_row(space, at(r), room, totals, times.hbm_bytes_per_s, below_s, &load);
    if (bound <= below_s) candidates.push_back({bound, load, 0.0, r});
  }
  std::sort(candidates.begin(), candidates.end(), sooner);
  double limit = below_s;
  for (const Candidate& c : candidates) {
    if (c.bound_s > limit) break;
    PlacedPlan found =
        solver->best(space, at(c.row), times, space.rooms[room], limit, c.load_s);
    const bool better = found.time_s < best.time_s ||
                        (found.time_s == best.time_s && found.layout < best.layout);
    if (found.time_s == kInfinite || !better) continue;
    best = std::move(found);
    limit = std::min(limit, best.time_s);
  }
  return best;
}

std::vector<PlacedPlan> top_plans(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                  std::size_t room, std::size_t top, int threads,
                                  std::int64_t* solved) {
  std::vector<Candidate> candidates;
  for (std::size_t s = 0; s < space.strategies.size(); ++s) {
    const StepTotals totals = totals_of(space, static_cast<int>(s), times[s]);
    for (std::int64_t r = space.first_row[s]; r < space.first_row[s + 1]; ++r) {
      double load = 0.0;
      const double bound = bound_of_row(space, at(r), room, totals, times[s].hbm_bytes_per_s,
                                        kInfinite, &load);
      if (bound == kInfinite) continue;
      candidates.push_back({bound, load, least_memory(space, space.rows[at(r)]), r});
    }
  }
  std::sort(candidates.begin(), candidates.end(), sooner);
  Leaders leaders(top);
  std::vector<PlacedPlan> plans;
  std::vector<const Candidate*> wave;
  std::vector<double> below;
  *solved = 0;
  for (std::size_t next = 0; next < candidates.size();) {
    wave.clear();
    below.clear();
    for (; next < candidates.size() && wave.size() < kWave; ++next) {
      const double limit = leaders.below(candidates[next].least_bytes);
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
    for (PlacedPlan& plan : found) {
      if (plan.time_s == kInfinite) continue;
      leaders.add(plan, kind_of(space.rows[at(plan.layout)].layout));
      plans.push_back(std::move(plan));
    }
  }
  std::stable_sort(plans.begin(), plans.end(), [](const PlacedPlan& a, const PlacedPlan& b) {
    if (a.time_s != b.time_s) return a.time_s < b.time_s;
    return a.memory_bytes != b.memory_bytes ? a.memory_bytes < b.memory_bytes
                                            : a.layout < b.layout;
  });
  return plans;
}

}  // namespace phaze
