// A time that no mapping of a problem beats: the operators of a block as a chain.
//
// Each operator keeps its own work and the conversion to the next; all else is left out, and memory
// of the first stage is priced at `price` seconds per byte: a dynamic program over all legal
// operator mappings. `theta` in [0, 1] weighs work against the collectives that overlap it, `phi`
// both against the stream from off the wafer: a maximum is at least any weighted mean. Whatever the
// weights and the price, no mapping that fits takes less.
//
// What does not depend on weights and price is computed once, so that many of them can be tried, by
// one thread at a time.
// Operator mappings that cannot be part of the cheapest chain, because even the cheapest company
// would cost more than a chain that is known, are left out of the program: the answer is the same
// to the last bit.
#pragma once

#include <limits>
#include <memory>
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
  ~Relaxation();
  Relaxation(Relaxation&&) noexcept;
  Relaxation& operator=(Relaxation&&) noexcept;

  // A bound that is `enough` need not be the best: it comes sooner, and its operator mappings are
  // worth less.
  MapBound bound(double theta, double phi, double price,
                 double enough = std::numeric_limits<double>::infinity());

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// One bound of a problem that is not asked again.
MapBound chain_bound(const Mapping& mapping, double theta, double phi, double price);

}  // namespace phaze
