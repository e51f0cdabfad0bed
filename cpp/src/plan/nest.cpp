// NEST's pipelines on nested networks, solved exactly: prices of every stage, tiers between stages,
// and the search.
#include "phaze/nest.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/numbers.hpp"

namespace phaze {

// Stages are pairs: layers i up to j, j not included. Pairs of one i are contiguous.
class NestTables {
 public:
  // Messages are priced for the levels marked in `tiers`, bit l for level l.
  NestTables(const NestNetwork& network, const NestLayers& layers, const NestRules& rules,
             std::uint32_t tiers);

  [[nodiscard]] int layers() const noexcept { return count_; }

  // Position of the pair (i, i + 1); the pair (i, j) is at that position + j - i - 1.
  [[nodiscard]] std::size_t row(int i) const noexcept {
    const auto n = static_cast<std::size_t>(count_);
    const auto k = static_cast<std::size_t>(i);
    return k * (2 * n - k + 1) / 2;
  }

  [[nodiscard]] const double* forward(int tier, int i) const noexcept {
    return forward_[static_cast<std::size_t>(tier)].data() + row(i);
  }
  // Backward times of all stages but the last; with recomputation they include the rerun.
  [[nodiscard]] const double* backward(int tier, int i) const noexcept {
    return backward_[static_cast<std::size_t>(tier)].data() + row(i);
  }
  // Backward time of the last stage, which never reruns its layers.
  [[nodiscard]] double last_backward(int i) const noexcept {
    return last_backward_[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] const double* held(int i) const noexcept { return held_.data() + row(i); }
  [[nodiscard]] const double* stash(int i) const noexcept { return stash_.data() + row(i); }
  // Bytes of the weights of layers 0 up to j.
  [[nodiscard]] double weights(int j) const noexcept {
    return weights_[static_cast<std::size_t>(j)];
  }

 private:
  void fill_memory(const NestLayers& layers, const NestRules& rules);
  void fill_forward(const NestNetwork& network, const NestLayers& layers, int tier);
  void fill_backward(const NestNetwork& network, const NestLayers& layers, int tier, bool again);

  int count_;
  std::vector<std::vector<std::int32_t>> edges_from_;  // edges out of each layer
  std::vector<std::vector<std::int32_t>> edges_to_;    // edges into each layer
  std::vector<std::vector<double>> forward_;
  std::vector<std::vector<double>> backward_;
  std::vector<double> last_backward_;
  std::vector<double> held_;   // bytes of states and activations
  std::vector<double> stash_;  // bytes of activations, once more for every later stage
  std::vector<double> weights_;
};

namespace {

// One message over a tier, at the rate of the slowest link up to that tier; above the lowest tier
// the time counts twice, for the way up and the way down.
class Message {
 public:
  Message(const NestNetwork& network, int tier)
      : bytes_per_s_(
            *std::min_element(network.bytes_per_s.begin(), network.bytes_per_s.begin() + tier + 1)),
        latency_s_(network.latency_s[at(tier)]),
        hops_(tier == 0 ? 1.0 : 2.0) {}

  [[nodiscard]] double operator()(double bytes) const noexcept {
    return hops_ * (bytes / bytes_per_s_ + latency_s_);
  }

 private:
  double bytes_per_s_;
  double latency_s_;
  double hops_;
};

Status check_network(const NestNetwork& network) noexcept {
  const std::size_t levels = network.size.size();
  if (levels < 1 || levels > kMaxNestLevels || network.bytes_per_s.size() != levels ||
      network.latency_s.size() != levels || !all_finite_sizes(network.latency_s)) {
    return Status::kBadFabric;
  }
  std::int64_t devices = 1;
  for (std::size_t l = 0; l < levels; ++l) {
    const double rate = network.bytes_per_s[l];
    if (!std::isfinite(rate) || rate <= 0.0 || network.size[l] < 1 ||
        network.size[l] > kMaxNestDevices / devices) {
      return Status::kBadFabric;
    }
    devices *= network.size[l];
  }
  return Status::kOk;
}

Status check_layers(const NestLayers& layers) {
  const std::size_t n = layers.forward_s.size();
  const std::size_t edges = layers.edge_from.size();
  if (n < 1 || n > kMaxNestLayers || layers.backward_s.size() != n ||
      layers.weight_bytes.size() != n || layers.kept_bytes.size() != n ||
      layers.edge_to.size() != edges || layers.edge_bytes.size() != edges) {
    return Status::kBadLayers;
  }
  if (!all_finite_sizes(layers.forward_s) || !all_finite_sizes(layers.backward_s) ||
      !all_finite_sizes(layers.weight_bytes) || !all_finite_sizes(layers.kept_bytes) ||
      !all_finite_sizes(layers.edge_bytes)) {
    return Status::kNotFinite;
  }
  std::size_t joined = 0;
  for (std::size_t e = 0; e < edges; ++e) {
    const std::int32_t from = layers.edge_from[e];
    const std::int32_t to = layers.edge_to[e];
    if (from < 0 || to <= from || at(to) >= n) return Status::kBadEdge;
    if (to == from + 1) ++joined;
  }
  return joined + 1 == n ? Status::kOk : Status::kBadLayers;
}

}  // namespace

Status check_nest(const NestNetwork& network, const NestLayers& layers,
                  const NestRules& rules) noexcept {
  if (const Status status = check_network(network); status != Status::kOk) return status;
  if (const Status status = check_layers(layers); status != Status::kOk) return status;
  std::int64_t devices = 1;
  for (const std::int64_t size : network.size) devices *= size;
  const bool good = layers.stage_devices >= 1 && rules.micro_batches >= 1 &&
                    rules.micro_batches <= kMaxNestDevices && std::isfinite(rules.memory_bytes) &&
                    rules.memory_bytes >= 0.0 && std::isfinite(rules.states) &&
                    rules.states >= 0.0 && (!rules.all_replicas || devices <= kMaxNestReplicated);
  return good ? Status::kOk : Status::kBadRules;
}

int nest_tier(const NestNetwork& network, std::int64_t x, std::int64_t y) noexcept {
  const int levels = static_cast<int>(network.size.size());
  int level = 0;
  for (; level + 1 < levels; ++level) {
    x /= network.size[at(level)];
    y /= network.size[at(level)];
    if (x == y) return level;
  }
  return level;
}

double nest_sync(const NestNetwork& network, std::int64_t replicas, double bytes,
                 std::int64_t apart) noexcept {
  if (replicas <= 1) return 0.0;
  const int highest = nest_tier(network, 0, (replicas - 1) * apart);
  double below = 0.0;  // time up to the level below
  double halved = bytes;
  for (std::int64_t group = replicas; group > 1; group /= 2) {
    below += network.latency_s[0] + halved / network.bytes_per_s[0];
    halved *= 0.5;
  }
  double between = 0.0;  // times of levels 1 to the one below, which count again
  for (int level = 1; level <= highest; ++level) {
    const double own =
        2.0 * (network.latency_s[at(level)] + bytes / network.bytes_per_s[at(level)]);
    below = below + own + between;
    between += below;
  }
  return below;
}

NestTables::NestTables(const NestNetwork& network, const NestLayers& layers, const NestRules& rules,
                       std::uint32_t tiers)
    : count_(static_cast<int>(layers.forward_s.size())),
      edges_from_(at(count_)),
      edges_to_(at(count_)),
      forward_(network.size.size()),
      backward_(network.size.size()),
      last_backward_(at(count_)),
      weights_(at(count_) + 1) {
  for (std::size_t e = 0; e < layers.edge_from.size(); ++e) {
    edges_from_[at(layers.edge_from[e])].push_back(static_cast<std::int32_t>(e));
    edges_to_[at(layers.edge_to[e])].push_back(static_cast<std::int32_t>(e));
  }
  fill_memory(layers, rules);
  for (int tier = 0; tier < static_cast<int>(network.size.size()); ++tier) {
    if ((tiers >> static_cast<unsigned>(tier) & 1U) == 0) continue;
    fill_forward(network, layers, tier);
    fill_backward(network, layers, tier, rules.recompute);
  }
  double sum = 0.0;
  for (int i = count_ - 1; i >= 0; --i) {
    sum += layers.backward_s[at(i)];
    last_backward_[at(i)] = sum;
  }
  for (int j = 0; j < count_; ++j) {
    weights_[at(j) + 1] = weights_[at(j)] + layers.weight_bytes[at(j)];
  }
}

void NestTables::fill_memory(const NestLayers& layers, const NestRules& rules) {
  held_.resize(row(count_));
  stash_.resize(row(count_));
  std::vector<double> entering(at(count_));  // bytes into each layer from before layer i
  for (int i = 0; i < count_; ++i) {
    if (i > 0) {
      for (const std::int32_t e : edges_from_[at(i) - 1]) {
        entering[at(layers.edge_to[at(e)])] += layers.edge_bytes[at(e)];
      }
    }
    double weights = 0.0;
    double stored_bytes = 0.0;
    double bytes = 0.0;
    for (int j = i; j < count_; ++j) {
      weights += layers.weight_bytes[at(j)];
      stored_bytes += layers.kept_bytes[at(j)];
      bytes += entering[at(j)];
      const std::size_t pair = row(i) + at(j - i);
      held_[pair] = rules.states * weights + stored_bytes;
      stash_[pair] = rules.recompute ? bytes : stored_bytes;
    }
  }
}

// The longest path through a stage. Every layer waits for the one before it, so edges that skip
// layers inside the stage add nothing; a message from outside delays the layer that reads it.
void NestTables::fill_forward(const NestNetwork& network, const NestLayers& layers, int tier) {
  const Message message(network, tier);
  std::vector<double>& table = forward_[at(tier)];
  table.resize(row(count_));
  std::vector<double> arrives(at(count_));  // time at each layer of messages from before layer i
  for (int i = 0; i < count_; ++i) {
    if (i > 0) {
      for (const std::int32_t e : edges_from_[at(i) - 1]) {
        double& last = arrives[at(layers.edge_to[at(e)])];
        last = std::max(last, message(layers.edge_bytes[at(e)]));
      }
    }
    double done = 0.0;
    for (int j = i; j < count_; ++j) {
      done = layers.forward_s[at(j)] + std::max(done, arrives[at(j)]);
      table[row(i) + at(j - i)] = done;
    }
  }
}

void NestTables::fill_backward(const NestNetwork& network, const NestLayers& layers, int tier,
                               bool again) {
  const Message message(network, tier);
  std::vector<double>& table = backward_[at(tier)];
  table.resize(row(count_));
  std::vector<double> arrives(at(count_));  // time at each layer of messages from layer j on
  for (int j = count_; j > 0; --j) {
    if (j < count_) {
      for (const std::int32_t e : edges_to_[at(j)]) {
        double& last = arrives[at(layers.edge_from[at(e)])];
        last = std::max(last, message(layers.edge_bytes[at(e)]));
      }
    }
    double done = 0.0;
    double sum = 0.0;
    for (int i = j - 1; i >= 0; --i) {
      sum += layers.backward_s[at(i)];
      done = layers.backward_s[at(i)] + std::max(done, arrives[at(i)]);
      table[row(i) + at(j - 1 - i)] = again ? std::max(2.0 * sum, done) : done;
    }
  }
}

// Pairs of tiers (in, out) of one stage, bit 8 * in + out for each pair that occurs in some
// replica.
using NestTierPairs = std::uint64_t;

inline constexpr NestTierPairs nest_pair(int in, int out) noexcept {
  return NestTierPairs{1} << static_cast<unsigned>(8 * in + out);
}

// A number of replicas and its effect on the time: load * rounds + latency + per_byte * weights.
struct NestReplicas {
  std::int64_t replicas;
  double rounds;
  double latency_s;
  double s_per_byte;
};

// Ranges of replica counts in which the tiers of all stages are the same.
struct NestEpoch {
  std::int64_t fewest;
  std::int64_t most;
};

// One replica count of each run of counts for which gradient exchanges take the same time: the
// smallest with as few rounds as the run's largest count has.
std::vector<NestReplicas> nest_replica_counts(const NestNetwork& network, std::int64_t stages,
                                              std::int64_t apart, std::int64_t micro_batches,
                                              NestEpoch among);

// Tier pairs of the stages of a pipeline, last stage first, over replicas 0 to `replicas` - 1.
class NestTiers {
 public:
  NestTiers(const NestNetwork& network, std::int64_t stage_devices, int stages);

  // Adds the next replica; returns whether any pair changed.
  bool add_replica();

  [[nodiscard]] const std::vector<NestTierPairs>& pairs() const noexcept { return pairs_; }

 private:
  const NestNetwork& network_;
  std::int64_t stage_devices_;
  std::int64_t base_ = 0;
  std::vector<NestTierPairs> pairs_;
};

std::vector<NestReplicas> nest_replica_counts(const NestNetwork& network, std::int64_t stages,
                                              std::int64_t apart, std::int64_t micro_batches,
                                              NestEpoch among) {
  std::vector<std::int64_t> begins;  // of runs with equally many exchange rounds over the same tier
  for (std::int64_t power = 1; power <= among.most; power *= 2) begins.push_back(power);
  std::int64_t inside = 1;
  for (const std::int64_t size : network.size) {
    inside *= size;
    begins.push_back(ceil_div(inside, apart) + 1);
  }
  begins.push_back(among.fewest);
  std::erase_if(begins, [&](std::int64_t d) { return d < among.fewest || d > among.most; });
  std::sort(begins.begin(), begins.end());
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  std::vector<NestReplicas> counts;
  for (std::size_t k = 0; k < begins.size(); ++k) {
    const std::int64_t last = k + 1 < begins.size() ? begins[k + 1] - 1 : among.most;
    const std::int64_t each = ceil_div(micro_batches, last);
    const std::int64_t replicas = std::max(begins[k], ceil_div(micro_batches, each));
    const double latency_s = nest_sync(network, replicas, 0.0, apart);
    // The time per byte alone: the linear part, without latencies.
    NestNetwork silent = network;
    constexpr double kNone[kMaxNestLevels] = {};
    silent.latency_s = std::span<const double>(kNone).first(network.size.size());
    counts.push_back({replicas, static_cast<double>(each + stages - 1), latency_s,
                      nest_sync(silent, replicas, 1.0, apart)});
  }
  return counts;
}

NestTiers::NestTiers(const NestNetwork& network, std::int64_t stage_devices, int stages)
    : network_(network),
      stage_devices_(stage_devices),
      pairs_(static_cast<std::size_t>(stages), 0) {}

bool NestTiers::add_replica() {
  bool changed = false;
  int out = 0;  // of the last stage, which sends nothing
  for (std::size_t s = 0; s < pairs_.size(); ++s) {
    const std::int64_t begin = base_ + static_cast<std::int64_t>(s) * stage_devices_;
    const bool first = s + 1 == pairs_.size();
    const int in = first ? 0 : nest_tier(network_, begin, begin + stage_devices_);
    const NestTierPairs pair = nest_pair(in, out);
    changed = changed || (pairs_[s] & pair) == 0;
    pairs_[s] |= pair;
    out = in;
  }
  base_ += static_cast<std::int64_t>(pairs_.size()) * stage_devices_;
  return changed;
}

namespace {

constexpr double kSlack = 1.0 + 1e-12;  // relaxes bounds by the rounding error

std::int64_t device_count(const NestNetwork& network) noexcept {
  std::int64_t devices = 1;
  for (const std::int64_t size : network.size) devices *= size;
  return devices;
}

// Levels between any two adjacent stages, bit l for level l; never empty.
std::uint32_t tiers_between(const NestNetwork& network, std::int64_t stage_devices,
                            std::int64_t stages) {
  std::uint32_t tiers = 1;
  for (std::int64_t s = 1; s < stages; ++s) {
    tiers |=
        1U << static_cast<unsigned>(nest_tier(network, (s - 1) * stage_devices, s * stage_devices));
  }
  return tiers;
}

// The min-max load of layers i to the end in s stages, for s = 1, 2, ...: row by row, since tiers
// and memory of a stage depend on the number of later stages.
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

  // Prepends one stage. Suffixes whose load is not below `limit_s` are dropped.
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

  // Calls done(j, load) for every stage of layers 0 up to j that can precede the placed stages;
  // done returns the load above which further stages are of no interest.
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
  // Stages that begin at layer i and precede the placed stages; `done` as in first_stages().
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

  // visit() with given loads; `rising` is a lower bound on the load that does not decrease with j.
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
  std::vector<std::vector<std::int32_t>> ends_;  // [later stages][first layer]: end of the stage
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
    std::vector<double> fewest_rounds(at(most_stages_) + 1, kInfinite);  // by stages at least
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
  // A plan with a first stage before `end` and a suffix in `rows_`; `end` is -1 if there is none.
  struct Completed {
    double time_s;
    double load_s;
    std::int64_t replicas;
    int end;
  };

  // Plans with `stages` stages and a replica count in `among` take at least `bound_s`.
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

  // The tier between the stage followed by s - 1 others and the stage before it.
  [[nodiscard]] int tier_after(int s) const noexcept {
    return nest_tier(network_, (s - 1) * stage_devices_, s * stage_devices_);
  }

  // The best first stage and replica count with a time below `below_s`.
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

  // Finds the runs of replica counts that use the same tiers, bounds each by the time of the first
  // replica alone, and solves those that can be best, in the order of their bounds.
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
  // The search sums in another order than the reported time: a plan may be below the limit only by
  // rounding.
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
    for (int i = 0; i <= n - s; ++i) {  // row i reads only later rows
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
