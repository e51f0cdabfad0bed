#include "phaze/relaxation.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/numbers.hpp"

namespace phaze {
namespace {

constexpr double kAsCheap = 1e-12;          // relative tolerance: ties are not pruned
constexpr double kFirstSlack = 1.0 / 1024;  // slack above the minimum of the chains examined first
constexpr double kWider = 2.0;              // growth of the slack per round
constexpr double kLeastSlack = 1.0 / 4096;  // least slack, relative to the gap to a known chain

double bytes_between(const Mapping& mapping, int from, int to) {
  for (const MapEdgeRecord& edge : mapping.edges()) {
    if (edge.from == from && edge.to == to && edge.kind == 0) return edge.bytes;
  }
  return 0.0;
}

// Indices of values, the smallest first.
std::vector<int> rising(const std::vector<double>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return values[at(a)] < values[at(b)]; });
  return order;
}

}  // namespace

// Owns the data that does not depend on weights and price; `free_` is the cheapest block without a
// price for `theta_` and `phi_`, and `last_` the chain of the last answer.
class Relaxation::Impl {
 public:
  explicit Impl(const Mapping& mapping);
  MapBound bound(double theta, double phi, double price, double enough);

 private:
  struct Own {  // terms of one operator mapping that do not depend on the weight mode
    double work_s, forward_s, blocking_s, blocking_f_s, stash_bytes;
  };
  struct ModeTerms {  // terms of one operator mapping in one weight mode
    double hidden_s, stream_s, state_bytes, gathered_bytes;
  };
  struct Prices {  // costs of the mappings of one operator, each in its cheapest mode
    std::vector<double> cost;
    std::vector<std::uint8_t> mode;
    double least;
    int cheapest;  // index of the cheapest mapping
  };
  struct Weights {
    double theta, phi, price;
  };
  using Settled = std::function<bool(double)>;  // whether this lower bound suffices
  struct Block {
    double block_s, before_s, after_s;
    std::vector<OpMapping> op_mappings;
  };

  void share_gathers();
  Prices priced(int op, const Weights& weights) const;
  double convert_s(std::size_t at, int before, int here) const;
  double known(const std::vector<Prices>& prices, double phi) const;
  double cheapest(const std::vector<Prices>& prices, double phi, double most);
  double cheapest(const std::vector<Prices>& prices, double phi, const Settled& settled);
  Block apart(const Weights& weights, std::vector<Prices>& prices) const;
  Block together(const Weights& weights, Block block, const std::vector<Prices>& prices,
                 const Settled& settled);
  double step_s(const Block& free, const Block& dear, double price) const;

  const Mapping& mapping_;
  std::vector<double> bytes_;          // of the tensor that enters each operator of the chain
  std::vector<std::vector<Own>> own_;  // of each operator, by operator mapping
  std::vector<std::vector<ModeTerms>>
      mode_terms_;                                // of each operator, by operator mapping and mode
  std::vector<std::vector<std::uint8_t>> modes_;  // weight modes that differ for each operator
  double held_bytes_;
  std::vector<double> gathers_;  // of each operator: how much of its gathered weights is counted
  double idle_share_;  // least idle time of the slowest stage, as a share of the other stages' work
  std::vector<int> last_;             // the last chain, as indices among the choices
  double theta_ = -1.0, phi_ = -1.0;  // weights of the members below
  Block free_{};                      // cheapest block without a price
};

Relaxation::Impl::Impl(const Mapping& mapping)
    : mapping_(mapping),
      own_(at(mapping.ops())),
      mode_terms_(at(mapping.ops())),
      modes_(at(mapping.ops())) {
  const auto chain = mapping.chain();
  for (std::size_t link = 0; link < chain.size(); ++link) {
    bytes_.push_back(link == 0 ? 0.0 : bytes_between(mapping, chain[link - 1], chain[link]));
  }
  // Bytes of the first stage in addition to its blocks that every mapping needs: its boundary
  // layers, and the operator whose inputs and outputs are largest under the best split.
  const double flight = mapping.flight(0);
  double weight_share = 0.0;  // largest share of the weight gradient in any operator's work
  double ends = 0.0, live = 0.0;
  for (int op = 0; op < mapping.ops(); ++op) {
    for (std::uint8_t w = 0; w < kWeightModeCount; ++w) {
      if ((mapping.rules().modes >> w & 1) == 0) continue;
      modes_[at(op)].push_back(w);
      if (!mapping.weighted(op)) break;
    }
    double least_kept = kInfinite, least_live = kInfinite;
    for (OpMapping op_mapping : mapping.choices(op)) {
      MapNode n{};
      for (const std::uint8_t w : modes_[at(op)]) {
        op_mapping.mode = w;
        n = mapping.node(op, op_mapping);
        mode_terms_[at(op)].push_back(
            {n.hidden_f_s + n.hidden_b_s, n.stream_s, n.state_bytes, n.gathered_bytes});
        least_kept = std::min(least_kept, n.state_bytes + flight * n.stash_bytes);
        least_live = std::min(least_live, n.live_bytes);
      }
      own_[at(op)].push_back({n.forward_s + n.backward_s, n.forward_s,
                              n.blocking_f_s + n.blocking_b_s, n.blocking_f_s, n.stash_bytes});
      const double work = n.forward_s + n.backward_s;
      if (work > 0.0) weight_share = std::max(weight_share, n.weight_grad_s / work);
    }
    const int part = mapping.op(op).part;
    if ((part == 0 && !mapping.is_first(0)) || (part == 2 && !mapping.is_last(0))) continue;
    if (part != 1) ends += least_kept;
    live = std::max(live, least_live);
  }
  held_bytes_ = ends + live;
  share_gathers();
  idle_share_ = 1.0 / mapping.rules().chunks;
  if (mapping.rules().zero_bubble != 0) idle_share_ = std::max(0.0, 1.0 - 2.0 * weight_share);
}

// A stage reserves space for twice the largest gathered weights of any operator, which is at least
// twice a mean: that over the operators of a block whose unsplit weights are largest.
void Relaxation::Impl::share_gathers() {
  std::vector<double> most(at(mapping_.ops()), 0.0);
  for (int op = 0; op < mapping_.ops(); ++op) {
    if (mapping_.op(op).part != 1) continue;
    for (const ModeTerms& mode : mode_terms_[at(op)]) {
      most[at(op)] = std::max(most[at(op)], mode.gathered_bytes);
    }
  }
  const double largest = *std::max_element(most.begin(), most.end());
  gathers_.assign(most.size(), 0.0);
  if (!(largest > 0.0) || mapping_.blocks()[0] == 0) return;
  const auto count = std::count(most.begin(), most.end(), largest);
  for (std::size_t op = 0; op < most.size(); ++op) {
    if (most[op] == largest) gathers_[op] = 2.0 / static_cast<double>(count);
  }
}

// Least cost of an operator's own terms over weight modes and outputs.
Relaxation::Impl::Prices Relaxation::Impl::priced(int op, const Weights& weights) const {
  const auto& [theta, phi, price] = weights;
  const MapRulesRecord& rules = mapping_.rules();
  const double blocks = mapping_.blocks()[0];
  const double copies = blocks * mapping_.flight(0);
  const int outputs = mapping_.op(op).outputs;
  const bool again = (outputs >> static_cast<int>(Output::kRecompute) & 1) != 0;
  const bool away = (outputs >> static_cast<int>(Output::kOffload) & 1) != 0;
  const std::vector<std::uint8_t>& modes = modes_[at(op)];
  Prices prices{std::vector<double>(own_[at(op)].size(), kInfinite),
                std::vector<std::uint8_t>(own_[at(op)].size()), kInfinite, 0};
  for (std::size_t h = 0; h < own_[at(op)].size(); ++h) {
    const Own& own = own_[at(op)][h];
    double out = 0.0;
    if (price > 0.0) {
      out = price * copies * own.stash_bytes;
      if (again) {
        const double once_more = (1.0 - phi) * (own.blocking_f_s + theta * own.forward_s);
        out = std::min(out, once_more + price * own.stash_bytes);
      }
      if (away) {
        const double bytes = rules.streamed(own.stash_bytes, own.stash_bytes);
        const double moved = bytes / rules.stream_bytes_per_s;
        const double links =
            2.0 * own.stash_bytes * mapping_.stream_link_s();  // overlapping both passes
        const double link_s = (1.0 - phi) * (1.0 - theta) * links;
        out = std::min(out, phi * moved + link_s + price * own.stash_bytes);
      }
    }
    for (std::size_t w = 0; w < modes.size(); ++w) {
      const ModeTerms& mode = mode_terms_[at(op)][h * modes.size() + w];
      double cost = own.blocking_s + theta * own.work_s + (1.0 - theta) * mode.hidden_s;
      cost = (1.0 - phi) * cost + phi * mode.stream_s;
      if (price > 0.0) {
        const double gathered = gathers_[at(op)] * mode.gathered_bytes;
        cost += price * (blocks * mode.state_bytes + gathered) + out;
      }
      if (!(cost < prices.cost[h])) continue;
      prices.cost[h] = cost;
      prices.mode[h] = modes[w];
    }
    if (!(prices.cost[h] < prices.least)) continue;
    prices.least = prices.cost[h];
    prices.cheapest = static_cast<int>(h);
  }
  return prices;
}

double Relaxation::Impl::convert_s(std::size_t k, int before, int here) const {
  const int from = mapping_.chain()[k - 1], to = mapping_.chain()[k];
  return mapping_.conversion_s(mapping_.choices(from)[at(before)], from,
                               mapping_.choices(to)[at(here)], to, bytes_[k]);
}

// The cost of the last answer's chain at the current prices.
double Relaxation::Impl::known(const std::vector<Prices>& prices, double phi) const {
  const auto chain = mapping_.chain();
  double cost = 0.0;
  for (std::size_t link = 0; link < chain.size(); ++link) {
    if (link > 0) cost += (1.0 - phi) * convert_s(link, last_[link - 1], last_[link]);
    cost += prices[at(chain[link])].cost[at(last_[link])];
  }
  return cost;
}

// The cheapest chain among those that cost at most `most`; infinite if there is none.
double Relaxation::Impl::cheapest(const std::vector<Prices>& prices, double phi, double most) {
  const auto chain = mapping_.chain();
  double rest = 0.0;  // least cost of the remaining operators, each in isolation
  for (const std::int32_t op : chain) rest += prices[at(op)].least;
  std::vector<std::vector<int>> from(chain.size()), alive(chain.size());
  std::vector<double> reached;  // costs up to the previous operator, ascending
  for (std::size_t link = 0; link < chain.size(); ++link) {
    const Prices& here = prices[at(chain[link])];
    rest -= here.least;
    const double before = link == 0 ? 0.0 : reached[0];
    std::vector<int> places, origins;
    std::vector<double> values;
    for (std::size_t h = 0; h < here.cost.size(); ++h) {
      const double slack = most - here.cost[h] - rest;
      if (before > slack) continue;
      double best = link == 0 ? 0.0 : kInfinite;
      int origin = -1;
      for (std::size_t g = 0; g < reached.size() && reached[g] < best && reached[g] <= slack; ++g) {
        const double value =
            reached[g] + (1.0 - phi) * convert_s(link, alive[link - 1][g], static_cast<int>(h));
        if (!(value < best)) continue;
        best = value;
        origin = static_cast<int>(g);
      }
      if (best > slack) continue;
      places.push_back(static_cast<int>(h));
      origins.push_back(origin);
      values.push_back(best + here.cost[h]);
    }
    if (places.empty()) return kInfinite;
    reached.clear();
    for (const int i : rising(values)) {
      reached.push_back(values[at(i)]);
      alive[link].push_back(places[at(i)]);
      from[link].push_back(origins[at(i)]);
    }
  }
  last_.resize(chain.size());
  int link = 0;
  for (std::size_t k = chain.size(); k-- > 0;) {
    last_[k] = alive[k][at(link)];
    link = from[k][at(link)];
  }
  return reached[0];
}

// Least cost of the chain in the relaxation, its operator mappings in last_; or a lower bound on
// it, as soon as that decides whether the chain is cheap enough.
double Relaxation::Impl::cheapest(const std::vector<Prices>& prices, double phi,
                                  const Settled& settled) {
  double alone = 0.0;
  for (const std::int32_t op : mapping_.chain()) alone += prices[at(op)].least;
  if (last_.empty()) {
    last_.reserve(
        mapping_.chain().size());  // so that an exception never leaves it partially filled
    for (const std::int32_t op : mapping_.chain()) last_.push_back(prices[at(op)].cheapest);
  }
  const double upper = known(prices, phi);
  if (upper <= alone) return upper;  // no chain can cost less
  const double ceiling = upper + std::abs(upper) * kAsCheap;
  double slack = std::max(alone * kFirstSlack, (upper - alone) * kLeastSlack);
  for (;; slack *= kWider) {
    const double most = std::min(ceiling, alone + slack);
    const double cost = cheapest(prices, phi, most);
    if (cost < kInfinite) return cost;
    if (settled(most)) return most;
    if (!(most < ceiling)) return alone;  // if costs are not finite
  }
}

// A block whose operators each have their least cost, without conversions.
Relaxation::Impl::Block Relaxation::Impl::apart(const Weights& weights,
                                                std::vector<Prices>& prices) const {
  Block block{0.0, 0.0, 0.0, std::vector<OpMapping>(at(mapping_.ops()))};
  for (int op = 0; op < mapping_.ops(); ++op) {
    prices.push_back(priced(op, weights));
    const Prices& own = prices.back();
    block.op_mappings[at(op)] = mapping_.choices(op)[at(own.cheapest)];
    block.op_mappings[at(op)].mode = own.mode[at(own.cheapest)];
    const int part = mapping_.op(op).part;
    (part == 1 ? block.block_s : part == 0 ? block.before_s : block.after_s) += own.least;
  }
  return block;
}

// A block whose operators form the cheapest chain, conversions included.
Relaxation::Impl::Block Relaxation::Impl::together(const Weights& weights, Block block,
                                                   const std::vector<Prices>& prices,
                                                   const Settled& settled) {
  const auto chain = mapping_.chain();
  double others_s = 0.0;
  std::uint64_t on_chain = 0;
  for (const std::int32_t op : chain) on_chain |= std::uint64_t{1} << op;
  for (int op = 0; op < mapping_.ops(); ++op) {
    const bool inside = mapping_.op(op).part == 1 && (on_chain >> op & 1) == 0;
    if (inside) others_s += prices[at(op)].least;
  }
  const auto whole = [&](double chain_s) { return settled(chain_s + others_s); };
  block.block_s = cheapest(prices, weights.phi, whole) + others_s;
  for (std::size_t link = 0; link < chain.size(); ++link) {
    const int op = chain[link];
    block.op_mappings[at(op)] = mapping_.choices(op)[at(last_[link])];
    block.op_mappings[at(op)].mode = prices[at(op)].mode[at(last_[link])];
  }
  return block;
}

// A block of the first stage takes at least `dear`, with its memory priced, minus the price of the
// capacity; a block of any stage takes at least `free`, the block without a price.
double Relaxation::Impl::step_s(const Block& free, const Block& dear, double price) const {
  const double capacity_price = price * mapping_.rules().capacity_bytes;
  const auto blocks = mapping_.blocks();
  const double heavy = std::max(free.block_s, dear.block_s + price * held_bytes_ - capacity_price);
  double sum = 0.0, slowest = 0.0;
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    double load = blocks[k] * (k == 0 ? heavy : free.block_s) +
                  mapping_.boundary()[k] * mapping_.rules().boundary_bytes;
    if (mapping_.is_first(static_cast<int>(k))) load += free.before_s;
    if (mapping_.is_last(static_cast<int>(k))) load += free.after_s;
    sum += load;
    slowest = std::max(slowest, load);
  }
  const auto batches = static_cast<double>(mapping_.rules().micro_batches);
  const double step = batches * slowest + idle_share_ * (sum - slowest);
  return (step + mapping_.rules().outer_tail_s) * (1.0 - 1e-9);  // rounding
}

MapBound Relaxation::Impl::bound(double theta, double phi, double price, double enough) {
  const Weights without{theta, phi, 0.0}, with{theta, phi, price};
  if (theta != theta_ || phi != phi_) {
    std::vector<Prices> prices;
    Block block = apart(without, prices);
    const auto settled = [&](double block_s) {
      const Block least{block_s, block.before_s, block.after_s, {}};
      return step_s(least, least, 0.0) >= enough;
    };
    if (!settled(block.block_s)) block = together(without, block, prices, settled);
    if (settled(block.block_s)) return {step_s(block, block, 0.0), std::move(block.op_mappings)};
    free_ = std::move(block);
    theta_ = theta;
    phi_ = phi;
  }
  if (!(price > 0.0)) return {step_s(free_, free_, 0.0), free_.op_mappings};
  std::vector<Prices> prices;
  Block block = apart(with, prices);
  const auto settled = [&](double block_s) {
    return step_s(free_, {block_s, 0.0, 0.0, {}}, price) >= enough;
  };
  if (!settled(block.block_s)) block = together(with, block, prices, settled);
  return {step_s(free_, block, price), std::move(block.op_mappings)};
}

Relaxation::Relaxation(const Mapping& mapping) : impl_(std::make_unique<Impl>(mapping)) {}
Relaxation::~Relaxation() = default;
Relaxation::Relaxation(Relaxation&&) noexcept = default;
Relaxation& Relaxation::operator=(Relaxation&&) noexcept = default;

MapBound Relaxation::bound(double theta, double phi, double price, double enough) {
  return impl_->bound(theta, phi, price, enough);
}

}  // namespace phaze
