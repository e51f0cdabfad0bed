// The exact choice of what becomes of a block's outputs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "phaze/mapping.hpp"

namespace phaze {

// Exact choice of outputs: least time with at least so many bytes saved. Items in the order of
// what a saved byte costs, as for a knapsack; a branch is left once it cannot beat the best even
// if an item that fits by itself could be split, and where exchanging two items would do as well.
template <typename Item>
class Chooser {
  static std::size_t place(int i) noexcept { return static_cast<std::size_t>(i); }

 public:
  template <typename Block>
  Chooser(const Item* items, int count, const Block& block)
      : waits_f_s_(block.blocking_f_s),
        work_f_s_(block.forward_s),
        by_work_(block.backward_s >= block.hidden_b_s) {
    count_ = count;
    for (int i = 0; i < count; ++i) {  // in the order of rates; ties as the operators stand
      const double least = again_s(items[i]), rate = least / items[i].saved_bytes;
      int at = i;
      for (; at > 0 && rate_[place(at) - 1] > rate; --at) {
        order_[place(at)] = order_[place(at) - 1];
        rate_[place(at)] = rate_[place(at) - 1];
      }
      order_[place(at)] = items + i;
      rate_[place(at)] = rate;
    }
    for (int i = 0; i < count; ++i) {
      if (!items[i].offload) continue;
      offloads_ = true;
      stream_s_per_byte_ = items[i].stream_s / items[i].saved_bytes;
    }
    rest_[place(count)] = 0.0;
    for (int i = count - 1; i >= 0; --i) {
      rest_[place(i)] = rest_[place(i) + 1] + order_[place(i)]->saved_bytes;
    }
    for (int i = 0; i < count; ++i) sure_ += items[i].recompute ? items[i].saved_bytes : 0.0;
    start_ = {block.blocking_b_s,
              block.backward_s,
              block.hidden_b_s,
              block.hidden_f_s,
              block.stream_s,
              0.0,
              0.0};
  }

  // Whether items that can all be computed again save so much.
  bool surely(double needed) const noexcept { return sure_ >= needed; }

  // No choice that saves so much takes less.
  double least_s(double needed) noexcept {
    needed_ = needed;
    return bound(0, start_);
  }

  // Least time with enough saved, by operator; false where that takes `worst_s` or more. Where
  // nothing saves enough, all is computed again. The same as last asked is answered from memory;
  // where less was to be saved, it took no longer, and where more, no less.
  template <typename Outputs>
  bool choose(double needed, double stream_room, double worst_s, Outputs& outputs) {
    const bool known = solved_ && needed == needed_at_ && stream_room == stream_room_;
    if (!(worst_s < std::numeric_limits<double>::infinity()) || !surely(needed)) {
      worst_s = std::numeric_limits<double>::infinity();
    }
    if (known) {
      if (!(best_s_ < worst_s)) return false;
      for (int i = 0; i < count_; ++i) outputs[place(order_[place(i)]->op)] = best_[place(i)];
      return true;
    }
    const bool more = solved_ && needed >= needed_at_ && stream_room <= stream_room_;
    const bool less = solved_ && needed <= needed_at_ && stream_room >= stream_room_;
    least_s_ = more ? best_s_ : 0.0;
    if (less) worst_s = std::min(worst_s, best_s_ * (1.0 + 1e-9));
    stream_room_ = stream_room;
    needed_at_ = needed_ = needed;
    best_s_ = less ? worst_s : std::min(worst_s, rounded_s() * (1.0 + 1e-9));
    if (!compared_) compare();
    now_.fill(0);
    const double before = best_s_;
    follow(0, start_);
    const bool found = best_s_ < before;
    solved_ = found;
    if (!found && worst_s < std::numeric_limits<double>::infinity()) return false;
    for (int i = 0; i < count_; ++i) {
      const Item& item = *order_[place(i)];
      const auto all =
          static_cast<std::uint8_t>(item.recompute ? Output::kRecompute : Output::kStash);
      outputs[place(item.op)] = found ? best_[place(i)] : all;
    }
    return true;
  }

 private:
  struct Sums {
    double blocking, work, hidden, hidden_f, stream, saved, moved;
  };
  double forward_s(const Sums& s) const noexcept {
    return waits_f_s_ + std::max(work_f_s_, s.hidden_f);
  }
  double again_s(const Item& item) const noexcept {
    if (!item.recompute) return std::numeric_limits<double>::infinity();
    return item.blocking_s + (by_work_ ? item.work_s : item.hidden_s);
  }
  // Bytes still missing are computed again in parts, the cheapest first, and the others stream.
  double bound(int at, const Sums& s) const noexcept {
    double cost = forward_s(s) + s.blocking + (by_work_ ? s.work : s.hidden);
    double missing = needed_ - s.saved;
    double stream = s.stream + (offloads_ ? stream_s_per_byte_ * missing : 0.0);
    for (int i = at; i < count_ && missing > 0.0; ++i) {
      const Item& item = *order_[place(i)];
      if (offloads_ && (cost >= stream || !item.recompute)) break;
      if (!item.recompute) continue;
      const double part = std::min(item.saved_bytes, missing);
      const double rate = rate_[place(i)];
      const double eased = offloads_ ? stream_s_per_byte_ : 0.0;
      if (offloads_ && cost + rate * part >= stream - eased * part) {
        return cost + rate * (stream - cost) / (rate + eased);
      }
      cost += rate * part;
      stream -= eased * part;
      missing -= part;
    }
    return std::max(cost, stream);
  }
  // Sizes and costs side by side, and which items can be exchanged.
  void compare() noexcept {
    compared_ = true;
    std::array<double, kMaxMapOps> by_work, by_hidden;  // what computing it again adds
    spent_s_[0] = again_bytes_[0] = 0.0;
    again_end_ = 0;
    for (int i = 0; i < count_; ++i) {
      const Item& item = *order_[place(i)];
      const double cost = again_s(item);
      cost_[place(i)] = cost;
      if (item.recompute) {  // those that are not come last
        spent_s_[place(i) + 1] = spent_s_[place(i)] + cost;
        again_bytes_[place(i) + 1] = again_bytes_[place(i)] + item.saved_bytes;
        again_end_ = i + 1;
      }
      size_[place(i)] = item.saved_bytes;
      saved_per_s_[place(i)] = item.recompute && cost != 0.0 ? item.saved_bytes / cost : 0.0;
      free_bytes_[place(i)] = cost == 0.0 ? item.saved_bytes : 0.0;
      movable_bytes_[place(i)] =
          item.offload ? item.saved_bytes : std::numeric_limits<double>::infinity();
      gained_s_ -= std::min(cost, 0.0);
      by_work[place(i)] = item.blocking_s + item.work_s;
      by_hidden[place(i)] = item.blocking_s + item.hidden_s;
      worse_[place(i)] = equal_[place(i)] = 0;
    }
    for (int i = 0; i < count_; ++i) {
      const Item& item = *order_[place(i)];
      std::uint64_t worse = 0;
      for (int k = i + 1; k < count_; ++k) {
        const bool same = order_[place(k)]->offload == item.offload;
        const bool no_better = (size_[place(k)] <= size_[place(i)]) &
                               (by_work[place(k)] >= by_work[place(i)]) &
                               (by_hidden[place(k)] >= by_hidden[place(i)]);
        worse |= static_cast<std::uint64_t>(same & no_better) << k;
        const bool equal = same & (size_[place(k)] == size_[place(i)]);
        equal_[place(k)] |= static_cast<std::uint64_t>(equal) << i;
      }
      worse_[place(i)] = item.recompute ? worse : 0;
    }
  }
  // No less than what items from `at` on save when computed again in parts in so much time.
  double again_within(int at, double left_s) const noexcept {
    if (gained_s_ > 0.0) return rest_[place(at)];
    const double until = spent_s_[place(at)] + left_s;
    int i = at;
    while (i < again_end_ && spent_s_[place(i) + 1] <= until) ++i;
    const double whole = again_bytes_[place(i)] - again_bytes_[place(at)];
    return i < again_end_ ? whole + (until - spent_s_[place(i)]) * saved_per_s_[place(i)] : whole;
  }
  // Whether items from `at` on could save what is missing in less than `most_s`: those that fit by
  // themselves computed again in parts, the cheapest first, and so many bytes moved as there is
  // time for.
  bool may_fit(int at, const Sums& s, double most_s) const noexcept {
    const double left_s = most_s - (forward_s(s) + s.blocking + (by_work_ ? s.work : s.hidden));
    const double fits_s = left_s + gained_s_;
    if (!(fits_s > 0.0) || !(s.stream < most_s)) return false;
    double away = 0.0;
    if (offloads_) {
      away = std::min((most_s - s.stream) / stream_s_per_byte_, stream_room_ - s.moved);
    }
    const double missing = needed_ - s.saved;
    if ((again_within(at, left_s) + away) * (1.0 + 1e-9) < missing) return false;
    double rest_s = left_s, again = 0.0, moved = 0.0, either = 0.0;
    for (int i = at; i < count_; ++i) {
      const double cost = cost_[place(i)], size = size_[place(i)];
      const bool in = cost < fits_s && (barred_ >> i & 1) == 0;
      const double out = movable_bytes_[place(i)] <= away ? size : 0.0;
      const double used = in ? std::min(cost, rest_s) : 0.0;
      again += used * saved_per_s_[place(i)] + (in ? free_bytes_[place(i)] : 0.0);
      rest_s -= used;
      moved += out;
      either += in ? size : out;
    }
    const double most = std::min(either, again + std::min(away, moved));
    return most * (1.0 + 1e-12) >= missing;
  }
  // The time of some choice that saves enough: the first so many computed again, the costliest of
  // the others moved off the wafer, less what then proves unneeded.
  double rounded_s() const noexcept {
    double best = std::numeric_limits<double>::infinity();
    Sums s = start_;
    for (int k = 0; k <= count_; ++k) {
      if (k > 0) {
        if (!order_[place(k) - 1]->recompute) break;
        s = again(s, *order_[place(k) - 1]);
      }
      double spare = s.saved - needed_, stream = s.stream, room = stream_room_, links = 0.0;
      for (int i = count_ - 1; i >= k && spare < 0.0; --i) {
        const Item& item = *order_[place(i)];
        if (!item.offload || item.saved_bytes > room) continue;
        spare += item.saved_bytes;
        room -= item.saved_bytes;
        stream += item.stream_s;
        links += item.link_s;
      }
      if (spare < 0.0) continue;
      double blocking = s.blocking, work = s.work, hidden = s.hidden + links;
      for (int i = k - 1; i >= 0; --i) {
        const Item& item = *order_[place(i)];
        if (item.saved_bytes > spare) continue;
        spare -= item.saved_bytes;
        blocking -= item.blocking_s;
        work -= item.work_s;
        hidden -= item.hidden_s;
      }
      const double forward = waits_f_s_ + std::max(work_f_s_, s.hidden_f + links);
      best = std::min(best, std::max(forward + blocking + std::max(work, hidden), stream));
      if (forward_s(s) + s.blocking + (by_work_ ? s.work : s.hidden) >= 1.5 * best) break;
    }
    return best;
  }
  static Sums again(const Sums& s, const Item& item) noexcept {
    return {s.blocking + item.blocking_s,
            s.work + item.work_s,
            s.hidden + item.hidden_s,
            s.hidden_f,
            s.stream,
            s.saved + item.saved_bytes,
            s.moved};
  }
  static Sums away(const Sums& s, const Item& item) noexcept {
    return {s.blocking,
            s.work,
            s.hidden + item.link_s,
            s.hidden_f + item.link_s,
            s.stream + item.stream_s,
            s.saved + item.saved_bytes,
            s.moved + item.saved_bytes};
  }
  // One more item with its output chosen: done where enough is saved, else those that follow.
  // `sure`: what the item before it could save by itself, it now saves, so that may_fit() stays.
  void follow(int at, const Sums& s, bool sure = false) {
    if (s.saved >= needed_) {  // computing still more again never makes a step shorter
      const double time_s =
          std::max(forward_s(s) + s.blocking + std::max(s.work, s.hidden), s.stream);
      if (time_s < best_s_) {
        best_s_ = time_s;
        best_ = now_;
        std::fill(best_.begin() + at, best_.end(), std::uint8_t{0});
      }
    } else if (at < count_ && s.saved + rest_[place(at)] >= needed_ && best_s_ > least_s_) {
      // Relative slack: a bound that ties but for rounding is no improvement.
      const double most = best_s_ * (1.0 - 1e-12);
      if (sure || may_fit(at, s, most)) descend(at, s, most);
    }
  }
  // Of two items the one that saves no less and costs no more is computed again first; of two that
  // are as large, the earlier one is moved first.
  void descend(int at, const Sums& s, double most_s) {
    const Item& item = *order_[place(at)];
    const std::uint64_t bit = std::uint64_t{1} << at, barred = barred_;
    if (item.recompute && (barred & bit) == 0) {
      now_[place(at)] = static_cast<std::uint8_t>(Output::kRecompute);
      const double left_s = most_s - (forward_s(s) + s.blocking + (by_work_ ? s.work : s.hidden));
      follow(at + 1, again(s, item), cost_[place(at)] <= left_s);
    }
    barred_ |= worse_[place(at)];
    const bool room = s.moved + item.saved_bytes <= stream_room_;
    if (item.offload && room && (equal_[place(at)] & kept_) == 0) {
      now_[place(at)] = static_cast<std::uint8_t>(Output::kOffload);
      follow(at + 1, away(s, item));
    }
    now_[place(at)] = 0;
    kept_ |= bit;
    follow(at + 1, s);
    kept_ &= ~bit;
    barred_ = barred;
  }

  std::array<const Item*, kMaxMapOps> order_;
  std::array<double, kMaxMapOps> rate_;  // seconds per byte saved, of the first `count_` items
  std::array<double, kMaxMapOps + 1> rest_;
  std::array<std::uint8_t, kMaxMapOps> now_{}, best_{};
  bool compared_ = false;  // whether what follows is filled in
  std::array<double, kMaxMapOps> cost_, size_, saved_per_s_, free_bytes_, movable_bytes_;
  std::array<std::uint64_t, kMaxMapOps> worse_;  // later items that save no more and cost no less
  std::array<std::uint64_t, kMaxMapOps> equal_;  // earlier items that are as large
  std::array<double, kMaxMapOps + 1> spent_s_, again_bytes_;  // by all items before
  int again_end_ = 0;                    // items from here on cannot be computed again
  double gained_s_ = 0.0;                // by items that cost less than nothing
  std::uint64_t barred_ = 0, kept_ = 0;  // not to be computed again; kept so far
  double sure_ = 0.0;                    // bytes that computing again saves in all
  double least_s_ = 0.0;                 // no choice takes less
  double waits_f_s_, work_f_s_, stream_room_ = 0.0;
  bool by_work_;
  int count_;
  Sums start_{};
  bool offloads_ = false;
  double stream_s_per_byte_ = 0.0;
  double needed_ = 0.0, best_s_ = 0.0;
  double needed_at_ = 0.0;  // of the last choice
  bool solved_ = false;
};

}  // namespace phaze
