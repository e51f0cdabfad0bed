#include <algorithm>
#include <limits>
#include <numeric>

#include "phaze/mapping.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };

}  // namespace

namespace {

// Least scalar cost of an operator's own terms over weight modes and outputs.
struct NodePrice {
  double cost;
  std::uint8_t mode;
};

class Pricing {
 public:
  Pricing(const Mapping& mapping, double theta, double phi, double price)
      : mapping_(mapping), theta_(theta), phi_(phi), price_(price) {
    const auto stages = static_cast<std::int64_t>(mapping.stages());
    blocks_ = mapping.blocks()[0];
    flight_ = static_cast<double>(std::min(mapping.rules().microbatches, stages));
  }

  NodePrice operator()(int op, MapGene gene) const noexcept {
    NodePrice best{std::numeric_limits<double>::infinity(), 0};
    for (std::uint8_t w = 0; w < kWeightModeCount; ++w) {
      if ((mapping_.rules().modes >> w & 1) == 0) continue;
      gene.mode = w;
      const Mapping::Node n = mapping_.node(op, gene);
      const double work = n.forward_s + n.backward_s;
      const double hidden = n.hidden_f_s + n.hidden_b_s;
      double cost = n.blocking_f_s + n.blocking_b_s + theta_ * work + (1.0 - theta_) * hidden;
      cost = (1.0 - phi_) * cost + phi_ * n.stream_s;
      if (price_ > 0.0) {
        const double kept = blocks_ * flight_;
        double out = price_ * kept * n.stash_bytes;
        const int outputs = mapping_.op(op).outputs;
        if ((outputs >> static_cast<int>(Output::kRecompute) & 1) != 0) {
          const double again = (1.0 - phi_) * (n.blocking_f_s + theta_ * n.forward_s);
          out = std::min(out, again + price_ * n.stash_bytes);
        }
        if ((outputs >> static_cast<int>(Output::kOffload) & 1) != 0) {
          const double moved = 2.0 * n.stash_bytes / mapping_.rules().stream_bytes_per_s;
          out = std::min(out, phi_ * moved + price_ * n.stash_bytes);
        }
        cost += price_ * blocks_ * n.state_bytes + out;
      }
      if (cost < best.cost) best = {cost, w};
    }
    return best;
  }

 private:
  const Mapping& mapping_;
  double theta_, phi_, price_, blocks_, flight_;
};

double bytes_between(const Mapping& mapping, int from, int to) {
  for (const MapEdgeRecord& edge : mapping.edges()) {
    if (edge.from == from && edge.to == to && edge.kind == 0) return edge.bytes;
  }
  return 0.0;
}

// Least cost of one block in the relaxation, and the genes that reach it.
double cheapest_block(const Mapping& mapping, const Pricing& pricing, double phi,
                      std::vector<MapGene>& genes) {
  const auto chain = mapping.chain();
  std::vector<std::vector<double>> cost(chain.size());
  std::vector<std::vector<int>> from(chain.size());
  std::vector<std::vector<std::uint8_t>> mode(chain.size());
  std::vector<int> order;  // choices of the operator before, the cheapest first
  for (std::size_t at = 0; at < chain.size(); ++at) {
    const int op = chain[at];
    const std::vector<MapGene>& choices = mapping.choices(op);
    cost[at].resize(choices.size());
    from[at].assign(choices.size(), -1);
    mode[at].resize(choices.size());
    const double bytes = at == 0 ? 0.0 : bytes_between(mapping, chain[at - 1], op);
    for (std::size_t h = 0; h < choices.size(); ++h) {
      double best = at == 0 ? 0.0 : std::numeric_limits<double>::infinity();
      if (at > 0) {
        const std::vector<MapGene>& before = mapping.choices(chain[at - 1]);
        for (const int ranked : order) {
          const auto g = kAt(ranked);
          if (!(cost[at - 1][g] < best)) break;
          const double value =
              cost[at - 1][g] +
              (1.0 - phi) * mapping.conversion_s(before[g], chain[at - 1], choices[h], op, bytes);
          if (value < best) {
            best = value;
            from[at][h] = static_cast<int>(g);
          }
        }
      }
      const NodePrice own = pricing(op, choices[h]);
      cost[at][h] = best + own.cost;
      mode[at][h] = own.mode;
    }
    order.resize(choices.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return cost[at][kAt(a)] < cost[at][kAt(b)]; });
  }
  const std::vector<double>& end = cost.back();
  auto at = std::min_element(end.begin(), end.end()) - end.begin();
  const double least = end[kAt(at)];
  for (std::size_t k = chain.size(); k-- > 0;) {
    MapGene gene = mapping.choices(chain[k])[kAt(at)];
    gene.mode = mode[k][kAt(at)];
    genes[kAt(chain[k])] = gene;
    at = from[k][kAt(at)];
  }
  return least;
}

// Bytes of the first stage beside its blocks that no mapping goes without: the ends that stand in
// it, and the operator whose inputs and outputs are largest when split best.
double held_at_least(const Mapping& mapping) {
  const bool alone = mapping.stages() == 1;
  const auto flight =
      static_cast<double>(std::min<std::int64_t>(mapping.rules().microbatches, mapping.stages()));
  double held = 0.0, live = 0.0;
  for (int op = 0; op < mapping.ops(); ++op) {
    const int part = mapping.op(op).part;
    if (part == 2 && !alone) continue;
    double kept = std::numeric_limits<double>::infinity(), least = kept;
    for (MapGene gene : mapping.choices(op)) {
      for (std::uint8_t w = 0; w < kWeightModeCount; ++w) {
        if ((mapping.rules().modes >> w & 1) == 0) continue;
        gene.mode = w;
        const Mapping::Node n = mapping.node(op, gene);
        kept = std::min(kept, n.state_bytes + flight * n.stash_bytes);
        least = std::min(least, n.live_bytes);
      }
    }
    if (part != 1) held += kept;
    live = std::max(live, least);
  }
  return held + live;
}

}  // namespace

MapBound chain_bound(const Mapping& mapping, double theta, double phi, double price) {
  MapBound found{0.0, std::vector<MapGene>(kAt(mapping.ops()))};
  const Pricing priced(mapping, theta, phi, price), free(mapping, theta, phi, 0.0);
  double block = cheapest_block(mapping, priced, phi, found.genes);
  std::vector<MapGene> unpriced = found.genes;
  double light = price > 0.0 ? cheapest_block(mapping, free, phi, unpriced) : block;
  double ends = 0.0;
  std::uint64_t on_chain = 0;
  for (const std::int32_t op : mapping.chain()) on_chain |= std::uint64_t{1} << op;
  for (int op = 0; op < mapping.ops(); ++op) {
    if ((on_chain >> op & 1) != 0) continue;
    NodePrice best{std::numeric_limits<double>::infinity(), 0};
    double without = std::numeric_limits<double>::infinity();
    for (const MapGene& gene : mapping.choices(op)) {
      const NodePrice tried = priced(op, gene);
      without = std::min(without, price > 0.0 ? free(op, gene).cost : tried.cost);
      if (!(tried.cost < best.cost)) continue;
      best = tried;
      found.genes[kAt(op)] = gene;
      found.genes[kAt(op)].mode = tried.mode;
    }
    if (mapping.op(op).part == 1) {
      block += best.cost;
      light += without;
    } else {
      ends += without;
    }
  }
  if (price > 0.0) block += price * held_at_least(mapping);
  // The first stage has the block's price less what its memory was priced at, at least the block
  // without a price; all others have at least that.
  const double room = price * mapping.rules().capacity_bytes;
  const auto blocks = mapping.blocks();
  const double heavy = std::max(light, block - room);
  double sum = 0.0, slowest = 0.0;
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    const double load = blocks[k] * (k == 0 ? heavy : light) +
                        mapping.boundary()[k] * mapping.rules().boundary_bytes;
    sum += load;
    slowest = std::max(slowest, load);
  }
  found.time_s = static_cast<double>(mapping.rules().microbatches - 1) * slowest + sum + ends;
  found.time_s *= 1.0 - 1e-9;  // rounding
  return found;
}

}  // namespace phaze
