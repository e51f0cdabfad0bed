// The longest path beside the network, and the gaps in which what nothing waits for could hide:
// the fourth bound of docs/schedule.md.
#include <algorithm>

#include "base/numbers.hpp"
#include "schedule/layer_facts.hpp"

namespace phaze {
namespace {

constexpr int kNetwork = kResources - 1;

}  // namespace

void LayerFacts::prepare_search() noexcept {
  find_spine();
  add_spine_mix();
  find_waste();
  find_gains();
  find_twins();
  add_even_mixes();
}

void LayerFacts::find_twins() noexcept {
  const auto same = [&](int a, int b) {
    const int first_a = problem_.first_mode[a];
    const int first_b = problem_.first_mode[b];
    const int count = problem_.first_mode[a + 1] - first_a;
    if (count != problem_.first_mode[b + 1] - first_b) return false;
    for (int m = 0; m < count; ++m) {
      const LayerMode& x = problem_.modes[first_a + m];
      const LayerMode& y = problem_.modes[first_b + m];
      if (x.seconds != y.seconds || !std::equal(x.use, x.use + kResources, y.use)) return false;
    }
    return true;
  };
  // Whether no way to run an operator ends sooner than one begun before it that leaves it room:
  // only then is what takes another's place never later than it was.
  const auto in_order = [&](int op) {
    for (int u = 0; u < useful_count_[op]; ++u) {
      for (int v = 0; v < u; ++v) {  // the faster of the two
        const std::int32_t* slow = problem_.modes[useful_[op][u]].use;
        const std::int32_t* fast = problem_.modes[useful_[op][v]].use;
        bool apart = false;
        for (int r = 0; r < kResources; ++r) {
          apart = apart || slow[r] + fast[r] > problem_.capacity[r];
        }
        if (!apart) return false;
      }
    }
    return true;
  };
  std::fill(twins_, twins_ + size(), OpBits{0});
  std::fill(urgent_, urgent_ + size(), OpBits{0});
  for (int i = 0; i < size(); ++i) {
    int at = i;
    const int own = std::popcount(after_[i]);
    for (; at > 0 && std::popcount(after_[in_turn_[at - 1]]) < own; --at) {
      in_turn_[at] = in_turn_[at - 1];
    }
    in_turn_[at] = i;
  }
  for (int i = 0; i < size(); ++i) {
    for (int j = 0; j < i; ++j) {
      if (!same(i, j)) continue;
      if (after_[i] == after_[j]) {
        twins_[i] |= op_bit(j);
        twins_[j] |= op_bit(i);
      } else if (!in_order(i)) {
        continue;
      } else if ((after_[i] & ~after_[j]) == 0) {
        urgent_[i] |= op_bit(j);
      } else if ((after_[j] & ~after_[i]) == 0) {
        urgent_[j] |= op_bit(i);
      }
    }
  }
}

void LayerFacts::find_spine() noexcept {
  int at = 0;
  for (int i = 1; i < size(); ++i) {
    if (tail_s(i) > tail_s(at)) at = i;
  }
  while (at >= 0) {
    spine_[spine_size_++] = at;
    on_spine_ |= op_bit(at);
    int next = -1;
    for_ops(after_[at], [&](int op) {
      if (next < 0 || tail_s(op) > tail_s(next)) next = op;
    });
    at = next;
  }
  for (int i = 0; i < size(); ++i) {
    bool always = true;  // whatever the mode, no two of them fit beside each other
    for (int u = 0; u < useful_count_[i]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[i][u]];
      always = always && !alone(i, u) && 2 * mode.use[kNetwork] > problem_.capacity[kNetwork];
    }
    if (always) wires_ |= op_bit(i);
  }
}

// At any moment at most one operator of the spine runs and at most one that takes the network. One
// on the network counts fully on the spine, else with one rate for all; other operators of the
// spine with the rate at which running beside others gains nothing, as far as the network's leaves
// room. The network's rate is the one with the largest sum.
void LayerFacts::add_spine_mix() noexcept {
  const auto even = [&](int op) {
    return alone_s_[op] < beside_s_[op] ? alone_s_[op] / beside_s_[op] : 1.0;
  };
  const OpBits plain = on_spine_ & ~wires_;
  double most = -1.0;
  const auto consider = [&](double rate) {
    double sum = 0.0;
    for_ops(wires_ & ~on_spine_, [&](int op) { sum += rate * beside_s_[op]; });
    for_ops(plain, [&](int op) {
      sum += std::min(alone_s_[op], std::min(even(op), 1.0 - rate) * beside_s_[op]);
    });
    if (sum <= most) return;
    most = sum;
    wire_rate_ = rate;
  };
  consider(0.0);
  for_ops(plain, [&](int op) { consider(1.0 - even(op)); });
  for (int i = 0; i < size(); ++i) {
    const bool spine = (on_spine_ & op_bit(i)) != 0;
    const bool wire = (wires_ & op_bit(i)) != 0;
    for (int u = 0; u < useful_count_[i]; ++u) {
      double rate = 0.0;
      if (alone(i, u)) {
        rate = 1.0;
      } else if (wire) {
        rate = spine ? 1.0 : wire_rate_;
      } else if (spine) {
        rate = std::min(even(i), 1.0 - wire_rate_);
      }
      rate_[mixes_][useful_[i][u]] = rate;
    }
  }
  find_shares(mixes_);
  spine_mix_ = mixes_++;
}

void LayerFacts::find_waste() noexcept {
  double wires_s = 0.0;  // on the network, beside the spine
  for_ops(wires_ & ~on_spine_, [&](int op) { wires_s += beside_s_[op]; });
  for_ops(all_ & ~on_spine_ & ~wires_, [&](int op) {
    int first = 0;
    while (first < spine_size_ && (later_[spine_[spine_size_ - 1 - first]] & op_bit(op)) == 0)
      ++first;
    first = spine_size_ - first;
    int last = first;
    while (last < spine_size_ && (later_[op] & op_bit(spine_[last])) == 0) ++last;
    const double waste = least_waste(first, last, beside_s_[op], wires_s);
    int at = aside_count_++;
    for (; at > 0 && waste_s_[at - 1] < waste; --at) {
      aside_[at] = aside_[at - 1];
      waste_s_[at] = waste_s_[at - 1];
      beside_spine_[at] = beside_spine_[at - 1];
    }
    beside_spine_[at] = 0;
    for (int k = first; k < last; ++k) beside_spine_[at] |= op_bit(spine_[k]);
    aside_[at] = op;
    waste_s_[at] = waste;
  });
}

// A gap is a time in which nothing runs alone; what starts in it ends in it. While an operator runs
// in a gap, the spine gets on by a run of consecutive operators that neither wait for it nor it for
// them, the first perhaps begun before. The rest of the time, less what the network does beside, is
// wasted. The least over runs and over gaps of at least this length.
double LayerFacts::least_waste(int from, int to, double length_s, double wires_s) const noexcept {
  double least = std::max(0.0, length_s - wire_rate_ * std::min(wires_s, length_s));
  for (int first = from; first < to; ++first) {
    const int begun = spine_[first];  // any part of it
    const bool wire = (wires_ & op_bit(begun)) != 0;
    const double rate = rate_[spine_mix_][useful_[begun][useful_count_[begun] - 1]];
    double full_s = 0.0;    // time of the rest of the run
    double credit_s = 0.0;  // and its share
    double taken_s = 0.0;   // of it on the network
    for (int last = first; last < to; ++last) {
      if (last > first) {
        const int op = spine_[last];
        full_s += beside_s_[op];
        credit_s += share_s_[spine_mix_][op];
        if ((wires_ & op_bit(op)) != 0) taken_s += beside_s_[op];
      }
      if (full_s == kInfinite) break;
      const double gap_s = std::max(length_s, full_s);
      const double begun_s = std::min(beside_s_[begun], gap_s - full_s);
      const double free_s = gap_s - taken_s - (wire ? begun_s : 0.0);
      const double beside_s = wire_rate_ * std::min(wires_s, free_s);
      least = std::min(least, gap_s - credit_s - rate * begun_s - beside_s);
    }
  }
  return std::max(0.0, least);
}

// Operators of the spine by what a second beside others gains: their rate, less the share of the
// tensor cores that they keep from what is aside.
void LayerFacts::find_gains() noexcept {
  for (int at = 0; at < spine_size_; ++at) {
    const int op = spine_[at];
    const LayerMode& mode = problem_.modes[useful_[op][useful_count_[op] - 1]];
    const double kept = mode.use[0] > 0 ? 1.0 / problem_.capacity[0] : 0.0;
    gain_[op] = std::max(0.0, rate_[spine_mix_][useful_[op][useful_count_[op] - 1]] - kept);
    int place = at;
    for (; place > 0 && gain_[by_gain_[place - 1]] < gain_[op]; --place) {
      by_gain_[place] = by_gain_[place - 1];
    }
    by_gain_[place] = op;
  }
  for (int op = 0; op < size(); ++op) {
    area_s_[op] = kInfinite;
    for (int u = 0; u < useful_count_[op]; ++u) {
      const LayerMode& mode = problem_.modes[useful_[op][u]];
      if (!alone(op, u)) area_s_[op] = std::min(area_s_[op], mode.seconds * mode.use[0]);
    }
    area_s_[op] /= std::max(1, problem_.capacity[0]);
  }
}

// The most that the spine from a place on can gain in a time beside others.
double LayerFacts::most_gained(OpBits open, const double* left_s, double room_s) const noexcept {
  double gained = 0.0;
  for (int i = 0; i < spine_size_ && room_s > 0.0; ++i) {
    const int op = by_gain_[i];
    if ((open & op_bit(op)) == 0) continue;
    const double time_s = std::min(room_s, left_s[op]);
    gained += gain_[op] * time_s;
    room_s -= time_s;
  }
  return gained;
}

double LayerFacts::spine_bound(const Moment& m, OpBits barred) const noexcept {
  double sum = m.now_s;
  double left_s[kMaxLayerOps];
  // What runs now may do so longer than the wastes reckon with, in a mode that is not its fastest.
  double longer_s = 0.0;
  for (int i = 0; i < m.running_count; ++i) {
    const Running& r = m.running[i];
    const double rate = rate_[spine_mix_][r.mode];
    left_s[r.op] = r.finish_s - m.now_s;
    sum += rate * left_s[r.op];
    if (((on_spine_ | wires_) & op_bit(r.op)) != 0) {
      longer_s += rate * std::max(0.0, left_s[r.op] - beside_s_[r.op]);
    }
  }
  double wires = 0.0;
  for_ops((on_spine_ | wires_) & ~m.started, [&](int op) {
    const bool beside = (barred & op_bit(op)) != 0;
    const double share = beside ? beside_share_s_[spine_mix_][op] : share_s_[spine_mix_][op];
    sum += share;
    left_s[op] = beside_s_[op];
    if ((on_spine_ & op_bit(op)) == 0) wires += share;
  });
  for (int i = 0; i < m.running_count; ++i) {
    const OpBits own = op_bit(m.running[i].op);
    if ((wires_ & ~on_spine_ & own) != 0) {
      wires += rate_[spine_mix_][m.running[i].mode] * left_s[m.running[i].op];
    }
  }
  // What is left aside runs alone at the end; or, of what does not, the one with the most waste is
  // in a gap, and all of it fills the tensor cores, less what the spine gains in that time.
  double alone_before_s[kMaxLayerOps];  // of what is left aside before aside_[i]
  double alone_left = 0.0;
  for (int i = 0; i < aside_count_; ++i) {
    alone_before_s[i] = alone_left;
    if ((m.started & op_bit(aside_[i])) == 0) alone_left += alone_s_[aside_[i]];
  }
  double least = alone_left;
  const int cores = problem_.capacity[0];
  double area = 0.0;
  double fill = 0.0;
  OpBits open = 0;
  for (int i = aside_count_ - 1; i >= 0; --i) {
    const int op = aside_[i];
    if ((m.started & op_bit(op)) != 0) continue;
    area += area_s_[op];
    fill += std::min(area_s_[op], alone_s_[op]);
    open |= beside_spine_[i] & ~m.done;
    const double waste = std::max(0.0, waste_s_[i] - longer_s);
    if (alone_before_s[i] + waste >= least) continue;
    const double room = cores > 1 ? area * cores / (cores - 1) : kInfinite;
    const double filled = fill - wires - most_gained(open, left_s, room);
    least = std::min(least, alone_before_s[i] + std::max(waste, filled));
  }
  return sum + least;
}

}  // namespace phaze
