// A time that no mapping of a problem beats: the operators of a block as a chain.
//
// Each operator keeps its own work and the conversion to the next; all else is left out, and memory
// of the first stage is priced at `price` seconds per byte: a dynamic program over all legal
// operator mappings. `theta` in [0, 1] weighs work against the collectives beside it, `phi` both
// against the stream from off the wafer: a maximum is at least any weighted mean. Whatever the
// weights and the price, no mapping that fits takes less.
//
// What does not depend on weights and price is computed once, so that many of them can be tried, by
// one thread at a time.
// Operator mappings that cannot be part of the cheapest chain, because even the cheapest company
// would cost more than a chain that is known, are left out of the program: the answer is the same
// to the last bit.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "phaze/mapping.hpp"

namespace phaze {

struct MapBound {
  double time_s;                       // no mapping of this problem takes less
  std::vector<OpMapping> op_mappings;  // that the relaxation chose: a start for a search
};

class Relaxation {
 public:
  // The mapping must outlive it; every operator has a legal operator mapping.
  explicit Relaxation(const Mapping& mapping);

  // A bound that is `enough` need not be the best: it comes sooner, and its operator mappings are
  // worth less.
  MapBound bound(double theta, double phi, double price,
                 double enough = std::numeric_limits<double>::infinity());

 private:
  struct Own {  // of one operator mapping, whatever its weight mode
    double work_s, forward_s, blocking_s, blocking_f_s, stash_bytes;
  };
  struct Kept {  // of one operator mapping in one weight mode
    double hidden_s, stream_s, state_bytes, gathered_bytes;
  };
  struct Prices {  // of the operator mappings of one operator, each in its cheapest mode
    std::vector<double> cost;
    std::vector<std::uint8_t> mode;
    double least;
    int cheapest;  // where it is
  };
  struct Weights {
    double theta, phi, price;
  };
  using Settled = std::function<bool(double)>;  // whether no block below a cost is enough to know
  struct Block {
    double block_s, before_s, behind_s;
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
  std::vector<double> bytes_;            // of the tensor that enters each operator of the chain
  std::vector<std::vector<Own>> own_;    // of each operator, by operator mapping
  std::vector<std::vector<Kept>> kept_;  // of each operator, by operator mapping and mode
  std::vector<std::vector<std::uint8_t>> modes_;  // that make a difference to each operator
  double held_bytes_;
  std::vector<double> gathers_;  // of each operator: its share of the weights that are gathered
  double idle_share_;            // of the other stages' work, that the slowest one waits at least
  std::vector<int> last_;        // the last chain, as places among the choices
  double theta_ = -1.0, phi_ = -1.0;  // of what follows
  Block free_{};                      // without a price
};

// One bound of a problem that is not asked again.
MapBound chain_bound(const Mapping& mapping, double theta, double phi, double price);

}  // namespace phaze
