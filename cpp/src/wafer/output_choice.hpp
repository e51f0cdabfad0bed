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
// if the last item could be split.
template <typename Item>
class Chooser {
  static std::size_t place(int i) noexcept { return static_cast<std::size_t>(i); }

 public:
  Chooser(const Item* items, int count, double forward_s, double blocking_s, double work_s,
          double hidden_s, double stream_s, double stream_room)
      : forward_s_(forward_s), stream_room_(stream_room), by_work_(work_s >= hidden_s) {
    count_ = count;
    for (int i = 0; i < count; ++i) {  // in the order of rates; ties as the operators stand
      const double least = least_s(items[i]), rate = least / items[i].saved_bytes;
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
    start_ = {blocking_s, work_s, hidden_s, stream_s, 0.0, 0.0};
  }

  // Whether items that can all be computed again save so much.
  bool surely(double needed) const noexcept {
    double saved = 0.0;
    for (int i = 0; i < count_; ++i) {
      if (order_[place(i)]->recompute) saved += order_[place(i)]->saved_bytes;
    }
    return saved >= needed;
  }

  // Outputs by position in the order; false where nothing saves enough in less than `worst_s`.
  bool solve(double needed, double worst_s) {
    needed_ = needed;
    best_s_ = worst_s;
    now_.fill(0);
    descend(0, start_);
    return best_s_ < worst_s;
  }
  const Item& item(int i) const { return *order_[place(i)]; }
  std::uint8_t output(int i) const { return best_[place(i)]; }

 private:
  struct Sums {
    double blocking, work, hidden, stream, saved, moved;
  };
  double least_s(const Item& item) const noexcept {
    if (!item.recompute) return std::numeric_limits<double>::infinity();
    return item.blocking_s + (by_work_ ? item.work_s : item.hidden_s);
  }
  // Bytes still missing are computed again in parts, the cheapest first, and the others stream.
  double bound(int at, const Sums& s) const noexcept {
    double cost = forward_s_ + s.blocking + (by_work_ ? s.work : s.hidden);
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
  void descend(int at, const Sums& s) {
    if (s.saved >= needed_) {
      const double time_s =
          std::max(forward_s_ + s.blocking + std::max(s.work, s.hidden), s.stream);
      if (time_s < best_s_) {
        best_s_ = time_s;
        best_ = now_;
        std::fill(best_.begin() + at, best_.end(), std::uint8_t{0});
      }
      return;  // computing still more again never makes a step shorter
    }
    if (at == count_ || s.saved + rest_[place(at)] < needed_) return;
    // Relative slack: a bound that ties but for rounding is no improvement.
    if (bound(at, s) >= best_s_ * (1.0 - 1e-12)) return;
    const Item& item = *order_[place(at)];
    if (item.recompute) {
      now_[place(at)] = static_cast<std::uint8_t>(Output::kRecompute);
      descend(at + 1, {s.blocking + item.blocking_s, s.work + item.work_s, s.hidden + item.hidden_s,
                       s.stream, s.saved + item.saved_bytes, s.moved});
    }
    if (item.offload && s.moved + item.saved_bytes <= stream_room_) {
      now_[place(at)] = static_cast<std::uint8_t>(Output::kOffload);
      descend(at + 1, {s.blocking, s.work, s.hidden, s.stream + item.stream_s,
                       s.saved + item.saved_bytes, s.moved + item.saved_bytes});
    }
    now_[place(at)] = 0;
    descend(at + 1, s);
  }

  std::array<const Item*, kMaxMapOps> order_;
  std::array<double, kMaxMapOps> rate_;  // seconds per byte saved, of the first `count_` items
  std::array<double, kMaxMapOps + 1> rest_;
  std::array<std::uint8_t, kMaxMapOps> now_{}, best_{};
  double forward_s_, stream_room_;
  bool by_work_;
  int count_;
  Sums start_{};
  bool offloads_ = false;
  double stream_s_per_byte_ = 0.0;
  double needed_ = 0.0, best_s_ = 0.0;
};

}  // namespace phaze
