#include "placement/nest_tables.hpp"

#include <algorithm>
#include <cmath>

namespace phaze {
namespace {

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

// One message over a tier, of which the slowest link below counts; above the lowest it goes up and
// down.
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

bool all_valid(std::span<const double> values) noexcept {
  return std::all_of(values.begin(), values.end(),
                     [](double v) { return std::isfinite(v) && v >= 0.0; });
}

Status check_network(const NestNetwork& network) noexcept {
  const std::size_t levels = network.size.size();
  if (levels < 1 || levels > kMaxNestLevels || network.bytes_per_s.size() != levels ||
      network.latency_s.size() != levels || !all_valid(network.latency_s)) {
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
  if (!all_valid(layers.forward_s) || !all_valid(layers.backward_s) ||
      !all_valid(layers.weight_bytes) || !all_valid(layers.kept_bytes) ||
      !all_valid(layers.edge_bytes)) {
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
  double below = 0.0;  // up to the level below
  double halved = bytes;
  for (std::int64_t group = replicas; group > 1; group /= 2) {
    below += network.latency_s[0] + halved / network.bytes_per_s[0];
    halved *= 0.5;
  }
  double between = 0.0;  // levels 1 to the one below, which are counted again
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
    double kept = 0.0;
    double bytes = 0.0;
    for (int j = i; j < count_; ++j) {
      weights += layers.weight_bytes[at(j)];
      kept += layers.kept_bytes[at(j)];
      bytes += entering[at(j)];
      const std::size_t pair = row(i) + at(j - i);
      held_[pair] = rules.states * weights + kept;
      stash_[pair] = rules.recompute ? bytes : kept;
    }
  }
}

// The longest path through a stage. Every layer waits for the one before it, so what skips layers
// inside the stage adds nothing; a message from outside is waited for.
void NestTables::fill_forward(const NestNetwork& network, const NestLayers& layers, int tier) {
  const Message message(network, tier);
  std::vector<double>& table = forward_[at(tier)];
  table.resize(row(count_));
  std::vector<double> arrives(at(count_));  // at each layer, of messages from before layer i
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
  std::vector<double> arrives(at(count_));  // at each layer, of messages from layer j on
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

}  // namespace phaze
