// Rates at which running beside others gains nothing: the fifth bound of docs/schedule.md.
#include <algorithm>

#include "base/numbers.hpp"
#include "schedule/layer_facts.hpp"

namespace phaze {
// Each operator in turn gets the rate at which its way beside others counts as much as alone, as
// far as those that have one and may run beside it leave room. Of any operators that run at once
// the last to get its rate had that much room, so that together they never exceed one.
void LayerFacts::add_even_mix(const std::int32_t* order) noexcept {
  double rate[kMaxLayerOps];
  OpBits rated = 0;
  for (int k = 0; k < size(); ++k) {
    const int op = order[k];
    rate[op] = 0.0;
    if (beside_s_[op] < kInfinite) {
      const double even = alone_s_[op] < beside_s_[op] ? alone_s_[op] / beside_s_[op] : 1.0;
      rate[op] = std::max(0.0, std::min(even, 1.0 - most_beside(op, rated, rate)));
      if (rate[op] > 0.0) rated |= op_bit(op);
    }
    for (int u = 0; u < useful_count_[op]; ++u) {
      rate_[mixes_][useful_[op][u]] = alone(op, u) ? 1.0 : rate[op];
    }
  }
  find_shares(mixes_++);
}

// The most that the rates of operators can add up to which run beside one: of operators in a row
// only one runs at a time, and no more than there are cores.
double LayerFacts::most_beside(int op, OpBits rated, const double* rate) const noexcept {
  const OpBits others = apart_[op] & rated;
  double by_type = 0.0;
  OpBits left = others;
  for (int r = 0; r < kResources && left != 0; ++r) {
    const OpBits own = left & holds_[r];
    left &= ~own;
    int least = problem_.capacity[r];
    for (int u = 0; u < useful_count_[op]; ++u) {
      if (!alone(op, u)) least = std::min(least, problem_.modes[useful_[op][u]].use[r]);
    }
    by_type += most_in_rows(own, problem_.capacity[r] - least, rate);
  }
  if (left != 0) return kInfinite;
  return std::min(by_type, most_in_rows(others, kMaxLayerOps, rate));
}

// Deals a set into rows of operators that wait for one another, and sums the largest rates of at
// most `count` rows.
double LayerFacts::most_in_rows(OpBits set, int count, const double* rate) const noexcept {
  double largest[kMaxLayerOps];
  int rows = 0;
  while (set != 0) {
    double most = 0.0;
    OpBits row = set;
    while (row != 0) {
      const int op = std::countr_zero(row);
      most = std::max(most, rate[op]);
      set &= ~op_bit(op);
      row &= later_[op];
    }
    int at = rows++;
    for (; at > 0 && largest[at - 1] < most; --at) largest[at] = largest[at - 1];
    largest[at] = most;
  }
  double sum = 0.0;
  for (int i = 0; i < std::min(rows, count); ++i) sum += largest[i];
  return sum;
}

// Longest first, and once more with what takes the first type of cores before all others.
void LayerFacts::add_even_mixes() noexcept {
  std::int32_t order[kMaxLayerOps];
  for (const bool by_type : {false, true}) {
    const auto before = [&](int a, int b) {
      const bool first_a = (holds_[0] & op_bit(a)) != 0;
      const bool first_b = (holds_[0] & op_bit(b)) != 0;
      if (by_type && first_a != first_b) return first_a;
      return shortest_s_[a] > shortest_s_[b];
    };
    for (int i = 0; i < size(); ++i) {
      int at = i;
      for (; at > 0 && before(i, order[at - 1]); --at) order[at] = order[at - 1];
      order[at] = i;
    }
    add_even_mix(order);
  }
}

}  // namespace phaze
