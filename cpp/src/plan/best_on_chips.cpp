// The best plan of all strategies on each of many chips: candidates in the order of their bounds.
#include <algorithm>
#include <atomic>
#include <optional>

#include "base/numbers.hpp"
#include "phaze/layers_on_chips.hpp"
#include "phaze/parallel.hpp"

namespace phaze {
namespace {

constexpr std::size_t kChipsAtOnce = 4;  // taken by a thread; some chips take long
constexpr double kLearned = 0.25;        // weight of the last plan in the excess of its strategy

enum class Step { kMapped, kBounded, kDone };

// A strategy on the chip.
struct Candidate {
  double bound_s;
  Step step;
};

// The search on one chip after another. `excess` is the factor by which plans of a strategy
// exceeded their bounds on earlier chips; it decides the order only.
class ChipSearcher {
 public:
  ChipSearcher(const PlanSpace& space, std::span<const LayersOnChips* const> layers,
               const ChipSearch& asked)
      : space_(space),
        layers_(layers),
        asked_(asked),
        candidates_(layers.size()),
        excess_(layers.size(), 1.0),
        plans_(space.memory_limits()) {
    for (const LayersOnChips* own : layers) {
      rows_.emplace_back(own->kinds(), own->variants());
    }
  }

  Status run(std::size_t chip, std::span<PlacedPlan> plans, std::span<TimesRow> times,
             std::span<double> joules) {
    const std::size_t limits = space_.memory_limits();
    chip_ = chip;
    limit_ = static_cast<std::size_t>(asked_.memory_limit[chip]);
    const auto asked_s = asked_.below_s.subspan(chip * limits, limits);
    below_s_.assign(asked_s.begin(), asked_s.end());
    best_ = plans;
    best_times_ = times;
    for (PlacedPlan& plan : best_) plan = {kInfinite, 0.0, -1, {}};
    for (std::size_t s = 0; s < layers_.size(); ++s) map(s);
    for (std::size_t s = next(); s < layers_.size(); s = next()) {
      const Status status = advance(s);
      if (status != Status::kOk) return status;
    }
    for (std::size_t c = 0; c < limits; ++c) {
      joules[c] = 0.0;
      if (best_[c].layout < 0) continue;
      layers_[strategy_of(best_[c])]->add_joules(chip, &best_times_[c]);
      joules[c] = space_
                      .estimate(at(best_[c].layout), best_[c].partition, best_times_[c].times(), {},
                                0.0, nullptr)
                      .energy_j;
    }
    return Status::kOk;
  }

 private:
  std::size_t strategy_of(const PlacedPlan& plan) const noexcept {
    return at(space_.layout(at(plan.layout)).strategy);
  }
  double longest_s() const noexcept { return *std::max_element(below_s_.begin(), below_s_.end()); }

  double step_s(std::size_t s, const TimesRow& row) const {
    return space_.strategy_bound_s(static_cast<std::int32_t>(s), row.times(), limit_);
  }

  void map(std::size_t s) {
    layers_[s]->map(chip_, &rows_[s]);
    candidates_[s] = {step_s(s, rows_[s]), Step::kMapped};
  }

  // The most promising candidate that may still have a plan of interest; the number of strategies
  // if there is none.
  std::size_t next() const noexcept {
    const double most_s = longest_s();
    std::size_t first = layers_.size();
    double least_s = kInfinite;
    for (std::size_t s = 0; s < candidates_.size(); ++s) {
      const Candidate& own = candidates_[s];
      if (own.step == Step::kDone || own.bound_s > most_s) continue;
      if (own.bound_s * excess_[s] >= least_s) continue;
      least_s = own.bound_s * excess_[s];
      first = s;
    }
    return first;
  }

  Status advance(std::size_t s) {
    Candidate& own = candidates_[s];
    TimesRow& row = rows_[s];
    if (own.step == Step::kMapped) {
      const Status status = layers_[s]->bound(chip_, &row);
      own = {std::max(own.bound_s, step_s(s, row)), Step::kBounded};
      return status;
    }
    own.step = Step::kDone;
    const double limit_s = longest_s();
    if (limit_s < kInfinite) {
      const StepQuery query{&space_, static_cast<std::int32_t>(s), limit_};
      double least_s = 0.0;
      const Status status = layers_[s]->rule_out(chip_, query, limit_s, asked_.planned,
                                                 asked_.search, &row, &least_s);
      if (status != Status::kOk || least_s > limit_s) return status;
    }
    return place(s, own.bound_s);
  }

  Status place(std::size_t s, double bound_s) {
    TimesRow times = rows_[s];
    const Status status = layers_[s]->schedule(chip_, asked_.search, &times, &rows_[s]);
    if (status != Status::kOk) return status;
    space_.best_of_memory_limits(static_cast<std::int32_t>(s), times.times(), rows_[s].times(),
                                 below_s_, plans_);
    for (std::size_t c = 0; c < plans_.size(); ++c) {
      if (plans_[c].layout < 0 || !(plans_[c].time_s <= below_s_[c])) continue;
      if (c == limit_) learn(s, plans_[c].time_s / bound_s);
      if (best_[c].layout >= 0 && !space_.before(plans_[c], best_[c])) continue;
      best_[c] = plans_[c];
      best_times_[c] = times;
      below_s_[c] = std::min(below_s_[c], plans_[c].time_s);
    }
    return Status::kOk;
  }

  void learn(std::size_t s, double excess) noexcept {
    excess_[s] += (excess_[s] == 1.0 ? 1.0 : kLearned) * (excess - excess_[s]);
  }

  const PlanSpace& space_;
  std::span<const LayersOnChips* const> layers_;
  const ChipSearch& asked_;
  std::vector<Candidate> candidates_;
  std::vector<double> excess_;
  std::vector<PlacedPlan> plans_;  // of one strategy, by memory limit
  std::vector<TimesRow> rows_;     // lower bounds, by strategy
  std::vector<double> below_s_;
  std::size_t chip_ = 0;
  std::size_t limit_ = 0;
  std::span<PlacedPlan> best_;
  std::span<TimesRow> best_times_;
};

bool agree(const PlanSpace& space, std::span<const LayersOnChips* const> layers,
           const ChipSearch& asked) {
  if (layers.size() != space.strategies() || layers.empty()) return false;
  const std::size_t chips = layers[0]->chips();
  for (const LayersOnChips* own : layers) {
    if (own->chips() != chips || own->kinds() != space.kinds()) return false;
  }
  const auto known = [&](std::int64_t limit) {
    return limit >= 0 && at(limit) < space.memory_limits();
  };
  return asked.memory_limit.size() == chips &&
         asked.below_s.size() == chips * space.memory_limits() &&
         std::all_of(asked.memory_limit.begin(), asked.memory_limit.end(), known);
}

}  // namespace

Status best_on_chips(const PlanSpace& space, std::span<const LayersOnChips* const> layers,
                     const ChipSearch& asked, std::span<PlacedPlan> plans,
                     std::span<TimesRow> times, std::span<double> joules) {
  if (!agree(space, layers, asked)) return Status::kBadShape;
  const std::size_t chips = layers[0]->chips();
  const std::size_t limits = space.memory_limits();
  const std::size_t most = (chips + kChipsAtOnce - 1) / kChipsAtOnce;
  const std::size_t workers = std::min(most, at(std::max(asked.threads, 1)));
  std::atomic<std::size_t> taken = 0;
  std::vector<Status> statuses(chips, Status::kOk);
  parallel_for(workers, static_cast<int>(workers), 1, [&](std::size_t, std::size_t) {
    ChipSearcher searcher(space, layers, asked);
    const SearchLimits& search = asked.search;
    for (std::size_t first = taken.fetch_add(kChipsAtOnce); first < chips;
         first = taken.fetch_add(kChipsAtOnce)) {
      for (std::size_t chip = first; chip < std::min(chips, first + kChipsAtOnce); ++chip) {
        if (search.interrupted != nullptr && search.interrupted(search.context)) return;
        const std::size_t at_chip = chip * limits;
        statuses[chip] =
            searcher.run(chip, plans.subspan(at_chip, limits), times.subspan(at_chip, limits),
                         joules.subspan(at_chip, limits));
      }
    }
  });
  const auto bad = std::find_if(statuses.begin(), statuses.end(),
                                [](Status status) { return status != Status::kOk; });
  return bad == statuses.end() ? Status::kOk : *bad;
}

}  // namespace phaze
