// Lower bound on the step time of every mapping of a problem: the operators of a block as a chain.
//
// The relaxation keeps each operator's work and its conversion to the next; all other terms are
// dropped, and memory of the first stage is priced at `price` seconds per byte: a dynamic program
// over all legal operator mappings. `theta` in [0, 1] weighs work against the collectives that
// overlap it, `phi` both against the stream from off the wafer: a maximum is at least any weighted
// mean. For any weights and price, no mapping that fits takes less.
//
// Terms that do not depend on weights and price are computed once, so that many weights and prices
// can be tried, by one thread at a time. Operator mappings that cannot be part of the cheapest
// chain, because even with the cheapest neighbours they cost more than a known chain, are pruned:
// the answer is the same to the last bit.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "phaze/mapping.hpp"

namespace phaze {

struct MapBound {
  double time_s;                       // no mapping of this problem takes less
  std::vector<OpMapping> op_mappings;  // of the relaxed optimum: a start for a search
};

class Relaxation {
 public:
  // The mapping must outlive the relaxation; every operator has a legal operator mapping.
  explicit Relaxation(const Mapping& mapping);
  ~Relaxation();
  Relaxation(Relaxation&&) noexcept;
  Relaxation& operator=(Relaxation&&) noexcept;

  // Evaluation may stop at a bound of at least `enough`: this is faster, but the operator mappings
  // of the result are then a weaker start.
  MapBound bound(double theta, double phi, double price,
                 double enough = std::numeric_limits<double>::infinity());

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phaze
