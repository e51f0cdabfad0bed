#include "phaze/nest.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "placement/nest_replicas.hpp"
#include "placement/nest_tables.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kSlack = 1.0 + 1e-12;  // what bounds are widened by, for rounding

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

std::int64_t device_count(const NestNetwork& network) noexcept {
  std::int64_t devices = 1;
  for (const std::int64_t size : network.size) devices *= size;
  return devices;
}

// Levels that lie between two stages anywhere, bit l for level l; never none.
std::uint32_t tiers_between(const NestNetwork& network, std::int64_t stage_devices,
                            std::int64_t stages) {
  std::uint32_t tiers = 1;
  for (std::int64_t s = 1; s < stages; ++s) {
    tiers |=
        1U << static_cast<unsigned>(nest_tier(network, (s - 1) * stage_devices, s * stage_devices));
  }
  return tiers;
}

// The least largest load of layers i to the end in s stages, for s = 1, 2, ...: row by row, since
// tiers and memory of a stage depend on how many stages follow it.
class SuffixRows {
 public:
  SuffixRows(const NestTables& tables, const NestRules& rules)
      : tables_(tables), rules_(rules), loads_(at(tables.layers()) + 1, kInfinite), next_(loads_) {
    loads_.back() = 0.0;
  }

  void restart() {
    std::fill(loads_.begin(), loads_.end(), kInfinite);
    loads_.back() = 0.0;
    ends_.clear();
  }

  // Adds one stage in front. Suffixes whose load is not below `limit_s` are dropped.
  void add_stage(NestTierPairs pairs, double limit_s) {
    const int s = stages() + 1;
    const int n = tables_.layers();
    std::vector<std::int32_t> ends(at(n), -1);
    std::fill(next_.begin(), next_.end(), kInfinite);
    for (int i = n - s; i > 0; --i) {
      double best = limit_s;
      visit(
          pairs, i,
          [&](int j, double load) {
            if (load < best) {
              best = load;
              ends[at(i)] = j;
              next_[at(i)] = load;
            }
            return best;
          },
          limit_s);
    }
    loads_.swap(next_);
    ends_.push_back(std::move(ends));
  }

  // Calls done(j, load) for every way to put one stage of layers 0 up to j in front of what is
  // there; it gives the load from which on there is no interest.
  template <typename Done>
  void first_stages(NestTierPairs pairs, double limit_s, const Done& done) const {
    visit(pairs, 0, done, limit_s);
  }

  [[nodiscard]] int stages() const noexcept { return static_cast<int>(ends_.size()); }

  // First layers of the stages, first to last, where the first stage ends before layer j.
  [[nodiscard]] std::vector<std::int32_t> begins(int j) const {
    std::vector<std::int32_t> found{0};
    for (int s = stages(); s > 0; --s) {
      found.push_back(j);
      j = ends_[at(s) - 1][at(j)];
    }
    return found;
  }

 private:
  // Stages that begin at layer i, in front of what is there, as first_stages() says.
  template <typename Done>
  void visit(NestTierPairs pairs, int i, const Done& done, double limit_s) const {
    if (stages() == 0) {
      last_stage(pairs, i, done, limit_s);
      return;
    }
    const int lowest = std::countr_zero(pairs);
    const double* forward = tables_.forward(lowest / 8, i);
    const double* backward = tables_.backward(lowest % 8, i);
    if (std::has_single_bit(pairs)) {
      scan(i, forward, done, limit_s, [&](std::size_t k) { return forward[k] + backward[k]; });
      return;
    }
    scan(i, forward, done, limit_s, [&](std::size_t k) {
      double load = 0.0;
      for (NestTierPairs left = pairs; left != 0; left &= left - 1) {
        const int bit = std::countr_zero(left);
        load = std::max(load, tables_.forward(bit / 8, i)[k] + tables_.backward(bit % 8, i)[k]);
      }
      return load;
    });
  }

  template <typename Done>
  void last_stage(NestTierPairs pairs, int i, const Done& done, double limit_s) const {
    const std::size_t k = at(tables_.layers() - i - 1);
    if (tables_.held(i)[k] > rules_.memory_bytes) return;
    double load = 0.0;
    for (NestTierPairs left = pairs; left != 0; left &= left - 1) {
      const int in = std::countr_zero(left) / 8;
      load = std::max(load, tables_.forward(in, i)[k] + tables_.last_backward(i));
    }
    if (load < limit_s) done(tables_.layers(), load);
  }

  // `rising` never falls with j and is never above the load.
  template <typename Done, typename Load>
  void scan(int i, const double* rising, const Done& done, double limit,
            const Load& load_of) const {
    const int after = stages();
    const double* held = tables_.held(i);
    const double* stash = tables_.stash(i);
    for (int j = i + 1; j <= tables_.layers() - after; ++j) {
      const std::size_t k = at(j - i - 1);
      if (held[k] > rules_.memory_bytes || rising[k] >= limit) return;
      if (loads_[at(j)] >= limit) continue;
      const double load = std::max(load_of(k), loads_[at(j)]);
      if (load >= limit || held[k] + after * stash[k] > rules_.memory_bytes) continue;
      limit = done(j, load);
    }
  }

  const NestTables& tables_;
  const NestRules& rules_;
  std::vector<double> loads_;  // of layers i to the end in stages() stages
  std::vector<double> next_;
  std::vector<std::vector<std::int32_t>> ends_;  // by stages after it: where a stage ends
};

class NestSearch {
 public:
  NestSearch(const NestNetwork& network, const NestLayers& layers, const NestRules& rules,
             double below_s, NestPlan* best)
      : network_(network),
        rules_(rules),
        stage_devices_(layers.stage_devices),
        devices_(device_count(network)),
        most_stages_(static_cast<int>(std::min<std::int64_t>(
            static_cast<std::int64_t>(layers.forward_s.size()), devices_ / stage_devices_))),
        tables_(network, layers, rules, tiers_between(network, stage_devices_, looked_at())),
        rows_(tables_, rules),
        below_s_(below_s),
        best_(best) {}

  void run() {
    if (rules_.all_replicas) {
      run_all_replicas();
      return;
    }
    std::vector<double> fewest_rounds(at(most_stages_) + 1, kInfinite);  // of so many or more
    for (int p = most_stages_; p > 0; --p) {
      const double rounds = rounds_of(p, most_replicas(p));
      fewest_rounds[at(p)] = p < most_stages_ ? std::min(rounds, fewest_rounds[at(p) + 1]) : rounds;
    }
    int out = 0;
    for (int s = 1; s <= most_stages_; ++s) {
      take(completed(nest_pair(0, out), {1, most_replicas(s)}, below_s_));
      if (s == most_stages_) break;
      const int in = tier_after(s);
      rows_.add_stage(nest_pair(in, out), below_s_ / fewest_rounds[at(s) + 1] * kSlack);
      out = in;
    }
  }

 private:
  // A first stage in front of the rows; `end` is -1 where there is none.
  struct Completed {
    double time_s;
    double load_s;
    std::int64_t replicas;
    int end;
  };

  // Plans with so many stages and one of these counts of replicas take no less than `bound_s`.
  struct Candidate {
    double bound_s;
    int stages;
    NestEpoch among;
  };

  [[nodiscard]] std::int64_t looked_at() const noexcept {
    return rules_.all_replicas ? devices_ / stage_devices_ : most_stages_;
  }

  [[nodiscard]] std::int64_t most_replicas(int stages) const noexcept {
    return std::min(devices_ / (stages * stage_devices_), rules_.micro_batches);
  }

  [[nodiscard]] double rounds_of(int stages, std::int64_t replicas) const noexcept {
    return static_cast<double>((rules_.micro_batches + replicas - 1) / replicas + stages - 1);
  }

  // Between the stage with s - 1 after it and the one before it.
  [[nodiscard]] int tier_after(int s) const noexcept {
    return nest_tier(network_, (s - 1) * stage_devices_, s * stage_devices_);
  }

  // The best first stage and count of replicas that take less than `below_s`.
  [[nodiscard]] Completed completed(NestTierPairs pairs, NestEpoch among, double below_s) const {
    const int stages = rows_.stages() + 1;
    const std::int64_t apart = stages * stage_devices_;
    const std::vector<NestReplicas> counts =
        nest_replica_counts(network_, stages, apart, rules_.micro_batches, among);
    const double fewest = rounds_of(stages, among.most);
    Completed best{below_s, 0.0, 0, -1};
    rows_.first_stages(pairs, below_s / fewest * kSlack, [&](int j, double load) {
      for (const NestReplicas& count : counts) {
        const double time =
            load * count.rounds + count.latency_s + count.s_per_byte * tables_.weights(j);
        if (time < best.time_s) best = {time, load, count.replicas, j};
      }
      return best.time_s / fewest * kSlack;
    });
    return best;
  }

  void take(const Completed& found) {
    if (found.end < 0) return;
    below_s_ = found.time_s;
    best_->begins = rows_.begins(found.end);
    best_->load_s = found.load_s;
    best_->replicas = found.replicas;
    const auto stages = static_cast<int>(best_->begins.size());
    best_->time_s =
        found.load_s * rounds_of(stages, found.replicas) +
        nest_sync(network_, found.replicas, tables_.weights(found.end), stages * stage_devices_);
  }

  // Runs of replica counts that bring the same tiers, each bounded by what the first replica alone
  // would take; then those that can be best, in the order of their bounds.
  void run_all_replicas() {
    std::vector<Candidate> candidates;
    int out = 0;
    for (int p = 1; p <= most_stages_; ++p) {
      add_candidates(p, nest_pair(0, out), &candidates);
      if (p == most_stages_) break;
      const int in = tier_after(p);
      rows_.add_stage(nest_pair(in, out), kInfinite);
      out = in;
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.bound_s < b.bound_s; });
    for (const Candidate& candidate : candidates) {
      if (candidate.bound_s >= below_s_ * kSlack) break;
      solve(candidate);
    }
  }

  void add_candidates(int stages, NestTierPairs first_pair, std::vector<Candidate>* candidates) {
    NestTiers tiers(network_, stage_devices_, stages);
    tiers.add_replica();
    std::int64_t fewest = 1;
    for (std::int64_t d = 2; d <= most_replicas(stages) + 1; ++d) {
      if (d <= most_replicas(stages) && !tiers.add_replica()) continue;
      const NestEpoch among{fewest, d - 1};
      const Completed bound = completed(first_pair, among, kInfinite);
      if (bound.end >= 0) candidates->push_back({bound.time_s, stages, among});
      fewest = d;
    }
  }

  void solve(const Candidate& candidate) {
    NestTiers tiers(network_, stage_devices_, candidate.stages);
    for (std::int64_t d = 1; d <= candidate.among.fewest; ++d) tiers.add_replica();
    const double rounds = rounds_of(candidate.stages, candidate.among.most);
    rows_.restart();
    for (int s = 0; s + 1 < candidate.stages; ++s) {
      rows_.add_stage(tiers.pairs()[at(s)], below_s_ / rounds * kSlack);
    }
    take(completed(tiers.pairs().back(), candidate.among, below_s_));
  }

  const NestNetwork& network_;
  const NestRules& rules_;
  std::int64_t stage_devices_;
  std::int64_t devices_;
  int most_stages_;
  NestTables tables_;
  SuffixRows rows_;
  double below_s_;
  NestPlan* best_;
};

}  // namespace

Status place_nest(const NestNetwork& network, const NestLayers& layers, const NestRules& rules,
                  double below_s, NestPlan* best) {
  *best = {kInfinite, 0.0, 0, {}};
  if (const Status status = check_nest(network, layers, rules); status != Status::kOk) {
    return status;
  }
  if (layers.stage_devices > device_count(network)) return Status::kOk;
  NestSearch(network, layers, rules, below_s, best).run();
  // The search adds up in another order than what it reports: a plan may be less by rounding alone.
  if (!(best->time_s < below_s)) *best = {kInfinite, 0.0, 0, {}};
  return Status::kOk;
}

Status least_nest_memory(const NestNetwork& network, const NestLayers& layers,
                         const NestRules& rules, NestNeed* need) {
  *need = {kInfinite, 0};
  if (const Status status = check_nest(network, layers, rules); status != Status::kOk) {
    return status;
  }
  const NestTables tables(network, layers, rules, 0);
  const int n = tables.layers();
  const std::int64_t most = std::min<std::int64_t>(n, device_count(network) / layers.stage_devices);
  std::vector<double> least(at(n) + 1, kInfinite);  // of layers i to the end
  least.back() = 0.0;
  for (int s = 1; s <= most; ++s) {
    for (int i = 0; i <= n - s; ++i) {  // what row i reads lies behind it
      double best = kInfinite;
      for (int j = s == 1 ? n : i + 1; j <= n - s + 1; ++j) {
        const std::size_t k = at(j - i - 1);
        best = std::min(best,
                        std::max(least[at(j)], tables.held(i)[k] + (s - 1) * tables.stash(i)[k]));
        if (tables.held(i)[k] >= best) break;
      }
      least[at(i)] = best;
    }
    for (int i = n - s + 1; i <= n; ++i) least[at(i)] = kInfinite;  // too few layers
    if (least[0] < need->bytes) *need = {least[0], s};
  }
  return Status::kOk;
}

}  // namespace phaze
