#include <algorithm>
#include <limits>
#include <numeric>

#include "phaze/mapping.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };

class Numbers {  // splitmix64: integers only, so alike everywhere
 public:
  explicit Numbers(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int below(int limit) noexcept {
    return static_cast<int>((next() >> 33) % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_;
};

constexpr double kShortage = 4.0;  // what lacking all of a die's memory costs, in times of the step
constexpr double kNeverSoLong = 1e18;  // seconds: what does not fit is worse than what does

std::vector<MapGene> genes_of(const Mapping& mapping) {
  std::vector<MapGene> genes;
  for (int i = 0; i < mapping.ops(); ++i) genes.push_back(mapping.gene(i));
  return genes;
}

bool same_slots(const MapGene& a, const MapGene& b) noexcept { return a.slots == b.slots; }

// Proposes changes of one to a few operators; each is legal, and each is made through change().
class Mover {
 public:
  Mover(Mapping& mapping, std::uint64_t seed) : mapping_(mapping), numbers_(seed) {
    for (int w = 0; w < kWeightModeCount; ++w) {
      if ((mapping.rules().modes >> w & 1) != 0) modes_.push_back(static_cast<std::uint8_t>(w));
    }
    for (const MapEdgeRecord& edge : mapping.edges()) {
      if (edge.kind != static_cast<int>(EdgeKind::kEntry)) edges_.push_back(edge);
    }
  }

  // Changes the mapping; undo() takes it back.
  void propose() {
    undo_.clear();
    const int kind = numbers_.below(16);
    if (kind < 5) {
      deal(numbers_.below(mapping_.ops()));
    } else if (kind < 8) {
      follow(1);
    } else if (kind < 11) {
      const int op = numbers_.below(mapping_.ops());
      deal(op);
      spread(op, 1 + numbers_.below(mapping_.ops()));
    } else if (kind < 13 && modes_.size() > 1) {
      keep(numbers_.below(mapping_.ops()), modes_[kAt(numbers_.below(size(modes_)))]);
    } else if (kind < 14 && modes_.size() > 1) {
      const std::uint8_t mode = modes_[kAt(numbers_.below(size(modes_)))];
      for (int i = 0; i < mapping_.ops(); ++i) keep(i, mode);
    } else {
      exchange_slots();
    }
  }

  void undo() {
    for (auto it = undo_.rbegin(); it != undo_.rend(); ++it) mapping_.change(it->first, it->second);
    undo_.clear();
  }

 private:
  static int size(const std::vector<std::uint8_t>& v) { return static_cast<int>(v.size()); }

  void set(int op, const MapGene& gene) {
    const MapGene& now = mapping_.gene(op);
    if (same_slots(now, gene) && now.mode == gene.mode) return;
    undo_.emplace_back(op, now);
    mapping_.change(op, gene);
  }

  void deal(int op) {
    const std::vector<MapGene>& choices = mapping_.choices(op);
    MapGene gene = choices[kAt(numbers_.below(static_cast<int>(choices.size())))];
    gene.mode = mapping_.gene(op).mode;
    gene.algorithm = mapping_.gene(op).algorithm;
    set(op, gene);
  }

  void keep(int op, std::uint8_t mode) {
    MapGene gene = mapping_.gene(op);
    gene.mode = mode;
    set(op, gene);
  }

  // Makes one end of an edge take the tensor as the other end leaves it.
  bool align(const MapEdgeRecord& edge, bool forward) {
    const int of = forward ? edge.to : edge.from;
    const MapGene& other = mapping_.gene(forward ? edge.from : edge.to);
    const bool mine = mapping_.op(of).product != 0;
    const bool theirs = mapping_.op(forward ? edge.from : edge.to).product != 0;
    MapGene gene = mapping_.gene(of);
    gene.slots = {other.slots[0], other.slots[1], 0, 0, 0};
    if (forward) {  // features as made, the rest whole
      const std::uint16_t features = other.slots[2];
      const auto rest = static_cast<std::uint16_t>(other.slots[3] | other.slots[4]);
      gene.slots[mine ? 3 : 2] = features;
      gene.slots[mine ? 2 : 4] = rest;
    } else {
      const std::uint16_t features = other.slots[theirs ? 3 : 2];
      const auto rest = static_cast<std::uint16_t>(other.slots[theirs ? 2 : 3] | other.slots[4]);
      gene.slots[2] = features;
      gene.slots[mine ? 3 : 4] = rest;
    }
    if (!mapping_.legal(of, gene)) return false;
    set(of, gene);
    return true;
  }

  void follow(int times) {
    for (int t = 0; t < times && !edges_.empty(); ++t) {
      const MapEdgeRecord& edge = edges_[kAt(numbers_.below(static_cast<int>(edges_.size())))];
      align(edge, numbers_.below(2) == 0);
    }
  }

  // Aligns what follows an operator, up to so many edges.
  void spread(int op, int most) {
    std::uint64_t reached = std::uint64_t{1} << op;
    for (const MapEdgeRecord& edge : edges_) {
      if (most == 0) return;
      const bool from = (reached >> edge.from & 1) != 0, to = (reached >> edge.to & 1) != 0;
      if (!from || to || edge.kind == static_cast<int>(EdgeKind::kWrap)) continue;
      if (align(edge, true)) {
        reached |= std::uint64_t{1} << edge.to;
        --most;
      }
    }
  }

  // Two slots change places in every operator that may.
  void exchange_slots() {
    if (mapping_.slots() < 2) return;
    const int a = numbers_.below(mapping_.slots()), b = numbers_.below(mapping_.slots());
    if (a == b) return;
    for (int i = 0; i < mapping_.ops(); ++i) {
      MapGene gene = mapping_.gene(i);
      for (std::uint16_t& mask : gene.slots) {
        const unsigned had_a = mask >> a & 1U, had_b = mask >> b & 1U;
        const unsigned rest = mask & ~(1U << a) & ~(1U << b);
        mask = static_cast<std::uint16_t>(rest | had_a << b | had_b << a);
      }
      if (mapping_.legal(i, gene)) set(i, gene);
    }
  }

  Mapping& mapping_;
  Numbers numbers_;
  std::vector<std::uint8_t> modes_;
  std::vector<MapEdgeRecord> edges_;
  std::vector<std::pair<int, MapGene>> undo_;
};

}  // namespace

double energy(const Mapping& mapping, const MapScore& score) noexcept {
  const double over = score.over_bytes + score.stream_over_bytes;
  if (!(over > 0.0)) return score.time_s;
  return kNeverSoLong * (1.0 + over / mapping.rules().capacity_bytes);
}

namespace {

// What an annealing walks by: it may pass through mappings that do not quite fit.
double soft_energy(const Mapping& mapping, const MapScore& score) noexcept {
  const double over = score.over_bytes + score.stream_over_bytes;
  return score.time_s * (1.0 + kShortage * over / mapping.rules().capacity_bytes);
}

}  // namespace

MapFound anneal(Mapping& mapping, const MapSearchRules& rules) {
  MapScore score = mapping.score();
  double now = soft_energy(mapping, score), best = energy(mapping, score);
  MapFound found{genes_of(mapping), score, 1};
  Mover mover(mapping, rules.seed);
  for (std::int64_t step = 0; step < rules.steps; ++step) {
    const double left = 1.0 - static_cast<double>(step) / static_cast<double>(rules.steps);
    const double accepted = rules.start * left * left;
    mover.propose();
    score = mapping.score();
    ++found.evaluations;
    const double next = soft_energy(mapping, score);
    if (!(next <= now * (1.0 + accepted))) {
      mover.undo();
      continue;
    }
    now = next;
    const double value = energy(mapping, score);
    if (value < best) {
      best = value;
      found.genes = genes_of(mapping);
      found.score = score;
    }
  }
  mapping.assign(found.genes);
  return found;
}

MapFound descend(Mapping& mapping, int rounds) {
  MapScore score = mapping.score();
  double best = energy(mapping, score);
  MapFound found{{}, score, 1};
  for (int round = 0; round < rounds; ++round) {
    bool better = false;
    for (int op = 0; op < mapping.ops(); ++op) {
      MapGene kept = mapping.gene(op);
      for (int w = 0; w < kWeightModeCount; ++w) {
        if ((mapping.rules().modes >> w & 1) == 0) continue;
        if (w != kept.mode &&
            !(mapping.node(op, kept).state_bytes + mapping.node(op, kept).stream_bytes > 0.0)) {
          continue;
        }
        for (const MapGene& choice : mapping.choices(op)) {
          MapGene gene = choice;
          gene.mode = static_cast<std::uint8_t>(w);
          gene.algorithm = kept.algorithm;
          mapping.change(op, gene);
          const MapScore tried = mapping.score();
          ++found.evaluations;
          const double value = energy(mapping, tried);
          if (value < best) {
            best = value;
            score = tried;
            kept = gene;
            better = true;
          }
        }
      }
      mapping.change(op, kept);
    }
    if (!better) break;
  }
  found.genes = genes_of(mapping);
  found.score = score;
  return found;
}

namespace {

bool weighted(const Mapping& mapping, int op) noexcept {
  for (const MapGene& gene : mapping.choices(op)) {
    const Mapping::Node n = mapping.node(op, gene);
    if (n.state_bytes + n.stream_bytes > 0.0) return true;
  }
  return false;
}

}  // namespace

double ways(const Mapping& mapping) noexcept {
  double count = 1.0;
  int modes = 0;
  for (int w = 0; w < kWeightModeCount; ++w) modes += mapping.rules().modes >> w & 1;
  for (int op = 0; op < mapping.ops(); ++op) {
    count *= static_cast<double>(mapping.choices(op).size()) *
             static_cast<double>(weighted(mapping, op) ? modes : 1);
  }
  return count;
}

MapFound exhaust(Mapping& mapping) {
  std::vector<std::vector<MapGene>> options(kAt(mapping.ops()));
  for (int op = 0; op < mapping.ops(); ++op) {
    const bool any = weighted(mapping, op);
    for (const MapGene& choice : mapping.choices(op)) {
      for (std::uint8_t w = 0; w < kWeightModeCount; ++w) {
        if ((mapping.rules().modes >> w & 1) == 0) continue;
        MapGene gene = choice;
        gene.mode = any ? w : choice.mode;
        options[kAt(op)].push_back(gene);
        if (!any) break;
      }
    }
    mapping.change(op, options[kAt(op)][0]);
  }
  MapFound found{genes_of(mapping), mapping.score(), 1};
  double best = energy(mapping, found.score);
  std::vector<std::size_t> at(options.size(), 0);
  for (;;) {
    std::size_t op = 0;
    while (op < at.size() && ++at[op] == options[op].size()) {
      at[op] = 0;
      mapping.change(static_cast<int>(op), options[op][0]);
      ++op;
    }
    if (op == at.size()) break;
    mapping.change(static_cast<int>(op), options[op][at[op]]);
    const MapScore score = mapping.score();
    ++found.evaluations;
    const double value = energy(mapping, score);
    if (!(value < best)) continue;
    best = value;
    found.score = score;
    found.genes = genes_of(mapping);
  }
  mapping.assign(found.genes);
  return found;
}

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
