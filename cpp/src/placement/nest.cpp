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
    tiers |= 1U << static_cast<unsigned>(
                 nest_tier(network, (s - 1) * stage_devices, s * stage_devices));
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
      visit(pairs, i, [&](int j, double load) {
        if (load < best) {
          best = load;
          ends[at(i)] = j;
          next_[at(i)] = load;
        }
        return best;
      }, limit_s);
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
  template <typename Done>
  void visit(NestTierPairs pairs, int i, const Done& done, double limit_s) const {
    if (std::has_single_bit(pairs)) {
      const int bit = std::countr_zero(pairs);
      const double* forward = tables_.forward(bit / 8, i);
      const double* backward = tables_.backward(bit % 8, i);
      scan(i, forward, done, limit_s, [&](std::size_t k) { return forward[k] + backward[k]; });
      return;
    }
    const int low = std::countr_zero(pairs);
    scan(i, tables_.forward(low / 8, i), done, limit_s, [&](std::size_t k) {
      double load = 0.0;
      for (NestTierPairs left = pairs; left != 0; left &= left - 1) {
        const int bit = std::countr_zero(left);
        load = std::max(load, tables_.forward(bit / 8, i)[k] + tables_.backward(bit % 8, i)[k]);
      }
      return load;
    });
  }

  // `rising` never falls with j and is never above the load.
  template <typename Done, typename Load>
  void scan(int i, const double* rising, const Done& done, double limit_s,
            const Load& load_of) const {
    const int n = tables_.layers();
    const int after = stages();
    const double* held = tables_.held(i);
    const double* stash = tables_.stash(i);
    if (after == 0) {
      const std::size_t k = at(n - i - 1);
      if (held[k] <= rules_.memory_bytes) {
        const double load = rising[k] + tables_.last_backward(i);
        if (load < limit_s) done(n, load);
      }
      return;
    }
    double limit = limit_s;
    for (int j = i + 1; j <= n - after; ++j) {
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
    std::vector<double> fewest_rounds(at(most_stages_) + 1, kInfinite);  // of so many or more
    for (int p = most_stages_; p > 0; --p) {
      const std::int64_t each = (rules_.microbatches + most_replicas(p) - 1) / most_replicas(p);
      const auto rounds = static_cast<double>(each + p - 1);
      fewest_rounds[at(p)] = p < most_stages_ ? std::min(rounds, fewest_rounds[at(p) + 1]) : rounds;
    }
    if (rules_.all_replicas) {
      run_all_replicas();
      return;
    }
    int out = 0;
    for (int s = 1; s <= most_stages_; ++s) {
      const double limit_s = below_s_ / fewest_rounds[at(s)] * kSlack;
      finish(nest_pair(0, out), {1, most_replicas(s)});
      if (s == most_stages_) break;
      const int in = nest_tier(network_, (s - 1) * stage_devices_, s * stage_devices_);
      rows_.add_stage(nest_pair(in, out), limit_s);
      out = in;
    }
  }

 private:
  [[nodiscard]] std::int64_t looked_at() const noexcept {
    return rules_.all_replicas ? devices_ / stage_devices_ : most_stages_;
  }

  [[nodiscard]] std::int64_t most_replicas(int stages) const noexcept {
    return std::min(devices_ / (stages * stage_devices_), rules_.microbatches);
  }

  // Puts the first stage in front of the rows, with any of the replica counts.
  void finish(NestTierPairs pairs, NestEpoch among) {
    const int stages = rows_.stages() + 1;
    const std::int64_t apart = stages * stage_devices_;
    const std::vector<NestReplicas> counts =
        nest_replica_counts(network_, stages, apart, rules_.microbatches, among);
    double fewest = kInfinite;
    for (const NestReplicas& count : counts) fewest = std::min(fewest, count.rounds);
    int end = -1;
    rows_.first_stages(pairs, below_s_ / fewest * kSlack, [&](int j, double load) {
      for (const NestReplicas& count : counts) {
        const double time = load * count.rounds + count.latency_s +
                            count.s_per_byte * tables_.weights(j);
        if (time >= below_s_) continue;
        below_s_ = time;
        best_->load_s = load;
        best_->replicas = count.replicas;
        best_->time_s = load * count.rounds +
                        nest_sync(network_, count.replicas, tables_.weights(j), apart);
        end = j;
      }
      return below_s_ / fewest * kSlack;
    });
    if (end >= 0) best_->begins = rows_.begins(end);
  }

  // Plans of one count of stages, by runs of replica counts that bring the same tiers.
  void run_all_replicas() {
    for (int p = 1; p <= most_stages_; ++p) {
      NestTiers tiers(network_, stage_devices_, p);
      tiers.add_replica();
      std::int64_t fewest = 1;
      for (std::int64_t d = 2; d <= most_replicas(p) + 1; ++d) {
        const std::vector<NestTierPairs> pairs = tiers.pairs();
        if (d <= most_replicas(p) && !tiers.add_replica()) continue;
        solve(pairs, {fewest, d - 1});
        fewest = d;
      }
    }
  }

  void solve(const std::vector<NestTierPairs>& pairs, NestEpoch among) {
    const auto p = static_cast<std::int64_t>(pairs.size());
    const std::int64_t each = (rules_.microbatches + among.most - 1) / among.most;
    const double limit_s = below_s_ / static_cast<double>(each + p - 1) * kSlack;
    rows_.restart();
    for (std::size_t s = 0; s + 1 < pairs.size(); ++s) rows_.add_stage(pairs[s], limit_s);
    finish(pairs.back(), among);
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
  const std::int64_t most =
      std::min<std::int64_t>(n, device_count(network) / layers.stage_devices);
  std::vector<double> least(at(n) + 1, kInfinite);  // of layers i to the end
  least.back() = 0.0;
  for (int s = 1; s <= most; ++s) {
    for (int i = 0; i <= n - s; ++i) {  // what row i reads lies behind it
      double best = kInfinite;
      for (int j = s == 1 ? n : i + 1; j <= n - s + 1; ++j) {
        const std::size_t k = at(j - i - 1);
        best = std::min(best, std::max(least[at(j)], tables.held(i)[k] +
                                                         (s - 1) * tables.stash(i)[k]));
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
