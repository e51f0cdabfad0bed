// The exact choice of what becomes of a block's outputs.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/numbers.hpp"
#include "phaze/mapping.hpp"

namespace phaze {

// Of each item the later ones that save no more bytes and cost no less, by work and by what is
// beside it, and the earlier ones that are as large; only items of which both or none can be moved.
inline void compare_items(int count, const double* bytes, const double* by_work,
                          const double* by_hidden, std::uint64_t movable, std::uint64_t* worse,
                          std::uint64_t* equal) noexcept {
  for (int i = 0; i < count; ++i) equal[i] = 0;
  for (int i = 0; i < count; ++i) {
    std::uint64_t no_better = 0, as_large = 0;
    for (int k = count - 1; k > i; --k) {
      const bool less =
          (bytes[k] <= bytes[i]) & (by_work[k] >= by_work[i]) & (by_hidden[k] >= by_hidden[i]);
      no_better = no_better << 1 | static_cast<std::uint64_t>(less);
      as_large = as_large << 1 | static_cast<std::uint64_t>(bytes[k] == bytes[i]);
    }
    const std::uint64_t alike = (movable >> i & 1) != 0 ? movable : ~movable;
    worse[i] = no_better << 1 << i & alike;
    for (as_large = as_large << 1 << i & alike; as_large != 0; as_large &= as_large - 1) {
      equal[std::countr_zero(as_large)] |= std::uint64_t{1} << i;
    }
  }
}

// Of items added one by one, a set with at least `needed` and at most `most` bytes: the first of
// all with no more than `enough`, in the order that tries each item before leaving it out, else the
// one with the least.
struct LeastMoved {
  LeastMoved(double needed_bytes, double enough_bytes, double most_bytes) noexcept
      : needed(needed_bytes), enough(enough_bytes), most(most_bytes) {}

  double needed, enough, most;
  double least = kInfinite;  // bytes of the set that was found
  std::uint64_t found = 0;   // that set, a bit per item
  std::size_t count = 0;
  std::array<int, kMaxMapOps> item;
  std::array<double, kMaxMapOps> size;
  std::array<std::uint64_t, kMaxMapOps> equal;    // items before it that are as large
  std::array<double, kMaxMapOps> left, smallest;  // of an item and those behind it, bytes

  void add(int i, double bytes, std::uint64_t as_large) noexcept {
    item[count] = i;
    size[count] = bytes;
    equal[count++] = as_large;
  }
  void search() noexcept {
    double sum = 0.0, least_size = kInfinite;
    for (std::size_t k = count; k-- > 0;) {
      left[k] = sum += size[k];
      smallest[k] = least_size = size[k] < least_size ? size[k] : least_size;
    }
    pick(0, 0.0, 0, 0);
  }

 private:
  bool pick(std::size_t k, double moved, std::uint64_t away, std::uint64_t kept) noexcept {
    for (; k < count && moved + left[k] >= needed && moved + smallest[k] <= most; ++k) {
      const double more = moved + size[k];
      const std::uint64_t bit = std::uint64_t{1} << item[k];
      // Of two that are as large, the earlier one is moved first.
      if (more <= most && more < least && (equal[k] & kept) == 0) {
        if (more >= needed) {
          least = more;
          found = away | bit;
          if (more <= enough) return true;
        } else if (pick(k + 1, more, away | bit, kept)) {
          return true;
        }
      }
      kept |= bit;
    }
    return false;
  }
};

// Exact choice of outputs: least time with at least so many bytes saved. What moving outputs costs
// follows from their bytes alone, so that a choice is a set of items computed again, in the order
// of what a saved byte costs, as for a knapsack, and of the others the least bytes that are enough.
//
// To take less than `most_s`, items computed again in parts, the cheapest first, and as many bytes
// moved as there is time for would save `surplus` more than is needed. Every item that is not
// computed again although it is cheaper than the last one in part, or is although it is not, loses
// a part of that (its price in bytes, as reduced costs of linear programs): only sets that lose no
// more than the surplus are looked at, and of those none where exchanging two items does as well.
template <typename Item>
class Chooser {
 public:
  template <typename Block>
  Chooser(const Item* items, int count, const Block& block)
      : waits_f_s_(block.blocking_f_s),
        work_f_s_(block.forward_s),
        hidden_f_s_(block.hidden_f_s),
        stream_s_(block.stream_s),
        by_work_(block.backward_s >= block.hidden_b_s),
        count_(count),
        start_{block.blocking_b_s, block.backward_s, block.hidden_b_s, 0.0, 0} {
    forward_s_ = waits_f_s_ + std::max(work_f_s_, hidden_f_s_);
    for (int i = 0; i < count; ++i) {  // in the order of rates; ties as the operators stand
      const double least = again_s(items[i]), rate = least / items[i].saved_bytes;
      int position = i;
      for (; position > 0 && rate_[at(position) - 1] > rate; --position) {
        order_[at(position)] = order_[at(position) - 1];
        rate_[at(position)] = rate_[at(position) - 1];
      }
      order_[at(position)] = items + i;
      rate_[at(position)] = rate;
      all_ += items[i].saved_bytes;
      only_moved_ += items[i].recompute ? 0.0 : items[i].saved_bytes;
      if (!items[i].offload) continue;
      offloads_ = true;
      stream_s_per_byte_ = items[i].stream_s / items[i].saved_bytes;
      bytes_per_stream_s_ = items[i].saved_bytes / items[i].stream_s;
      link_s_per_byte_ = items[i].link_s / items[i].saved_bytes;
    }
  }

  // Whether items that can be computed again, and all others moved, surely save so much.
  bool surely(double needed, double stream_room) const noexcept {
    return all_ - (only_moved_ <= stream_room ? 0.0 : only_moved_) >= needed;
  }

  double most_saved() const noexcept { return all_; }  // bytes, of any choice

  // No choice that saves so much takes less: bytes are computed again in parts, the cheapest first,
  // and the others stream.
  double least_s(double needed) const noexcept {
    double cost = passes_s(start_), missing = needed;
    double stream = stream_s_ + (offloads_ ? stream_s_per_byte_ * missing : 0.0);
    for (int i = 0; i < count_ && missing > 0.0; ++i) {
      const Item& item = *order_[at(i)];
      if (offloads_ && (cost >= stream || !item.recompute)) break;
      if (!item.recompute) continue;
      const double part = std::min(item.saved_bytes, missing);
      const double rate = rate_[at(i)];
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

  // Least time with enough saved; infinite where nothing saves enough, or all takes `worst_s` or
  // more. The same as last asked is answered from memory; where less is to be saved, or more may be
  // moved, the last choice is a choice here as well. `hint`: operators that were computed again in
  // a similar choice, for a bound of the time; `first`: of several the first in improve()'s order.
  double solve(double needed, double stream_room, double worst_s,
               std::optional<std::uint64_t> hint = {}, bool first = false) noexcept {
    if (!surely(needed, stream_room)) worst_s = kInfinite;
    const bool same = solved_ && needed == needed_ && stream_room == stream_room_;
    const bool less = solved_ && needed <= needed_ && stream_room >= stream_room_;
    needed_ = needed;
    stream_room_ = stream_room;
    if (!same || (first && !first_)) {
      if (!compared_) compare();
      first_ = first;
      solved_ = less && best_s_ < worst_s;
      if (!solved_) best_s_ = worst_s;
      if (all_ >= needed) {
        aim();
        if (!less && !(hint && follow_hint(*hint))) round();
        if (first) widen(worst_s);
        improve();
        if (!solved_ && best_s_ < worst_s) {  // a bound that nothing keeps but for rounding
          best_s_ = worst_s;
          aim();
          improve();
        }
      }
    }
    return solved_ && best_s_ < worst_s ? best_s_ : kInfinite;
  }

  // What solve() finds, by operator, and of several the first, whatever was asked before; false
  // where that takes `worst_s` or more. Where nothing saves enough, all is computed again.
  template <typename Outputs>
  bool choose(double needed, double stream_room, double worst_s, Outputs& outputs) noexcept {
    if (!surely(needed, stream_room)) worst_s = kInfinite;
    const bool found = solve(needed, stream_room, worst_s, {}, true) < kInfinite;
    if (!found && worst_s < kInfinite) return false;
    const std::uint64_t away_items = found ? first_moved() : 0;
    for (int i = 0; i < count_; ++i) {
      const Item& item = *order_[at(i)];
      const bool again = found ? (again_ >> i & 1) != 0 : item.recompute;
      outputs[at(item.op)] = again ? kAgain : (away_items >> i & 1) != 0 ? kAway : kKept;
    }
    return true;
  }

  std::uint64_t again() const noexcept {  // operators, by the last choice
    std::uint64_t ops = 0;
    for (int i = 0; i < count_; ++i) ops |= (again_ >> i & 1) << order_[at(i)]->op;
    return ops;
  }

 private:
  static constexpr auto kKept = static_cast<std::uint8_t>(Output::kStash);
  static constexpr auto kAgain = static_cast<std::uint8_t>(Output::kRecompute);
  static constexpr auto kAway = static_cast<std::uint8_t>(Output::kOffload);

  struct Sums {  // of a block with some items computed again, and their set
    double blocking, work, hidden, saved;
    std::uint64_t items;
  };
  double again_s(const Item& item) const noexcept {
    if (!item.recompute) return kInfinite;
    return item.blocking_s + (by_work_ ? item.work_s : item.hidden_s);
  }
  double passes_s(const Sums& s) const noexcept {  // with nothing moved, and no less with more
    return forward_s_ + s.blocking + (by_work_ ? s.work : s.hidden);
  }
  double time_s(const Sums& s, double moved) const noexcept {
    const double links = moved * link_s_per_byte_;
    const double forward = waits_f_s_ + std::max(work_f_s_, hidden_f_s_ + links);
    return std::max(forward + s.blocking + std::max(s.work, s.hidden + links),
                    stream_s_ + stream_s_per_byte_ * moved);
  }
  Sums with(const Sums& s, int i) const noexcept {
    const Item& item = *order_[at(i)];
    return {s.blocking + item.blocking_s, s.work + item.work_s, s.hidden + item.hidden_s,
            s.saved + item.saved_bytes, s.items | std::uint64_t{1} << i};
  }
  // Keeps the time of a choice, and forgets the choice.
  void widen(double worst_s) noexcept {
    if (!solved_) return;
    solved_ = false;
    best_s_ = std::min(best_s_ * (1.0 + 1e-9), worst_s);
    aim();
  }
  // Sizes and costs side by side, and which items can be exchanged.
  void compare() noexcept {
    compared_ = true;
    std::array<double, kMaxMapOps> by_work, by_hidden;  // what computing it again adds
    spent_s_[0] = again_bytes_[0] = 0.0;
    again_end_ = 0;
    for (int i = 0; i < count_; ++i) {
      const Item& item = *order_[at(i)];
      const double cost = again_s(item);
      cost_[at(i)] = cost;
      gains_ = gains_ || cost < 0.0;
      size_[at(i)] = item.saved_bytes;
      if (item.recompute) {  // those that are not come last
        spent_s_[at(i) + 1] = spent_s_[at(i)] + cost;
        again_bytes_[at(i) + 1] = again_bytes_[at(i)] + item.saved_bytes;
        again_end_ = i + 1;
      }
      by_work[at(i)] = item.blocking_s + item.work_s;
      by_hidden[at(i)] = item.blocking_s + item.hidden_s;
      movable_ |= static_cast<std::uint64_t>(item.offload) << i;
      int position = i;
      for (; position > 0 && size_[at(by_size_[at(position) - 1])] < item.saved_bytes; --position) {
        by_size_[at(position)] = by_size_[at(position) - 1];
      }
      by_size_[at(position)] = i;
    }
    compare_items(count_, size_.data(), by_work.data(), by_hidden.data(), movable_, worse_.data(),
                  equal_.data());
    for (int i = again_end_; i < count_; ++i) worse_[at(i)] = 0;
  }
  // Some choices to begin with: the first so many computed again, up to where that takes as long as
  // moving the others, and one more.
  void round() noexcept {
    Sums s = start_;
    for (int i = 0; i < again_end_; ++i) {
      const Sums next = with(s, i);
      const double missing = needed_ - next.saved;
      const bool enough = missing <= 0.0;
      if (enough || (offloads_ && passes_s(next) >= stream_s_ + stream_s_per_byte_ * missing)) {
        if (offloads_) move_rest(s);
        move_rest(next);
        return;
      }
      s = next;
    }
    move_rest(s);
  }
  // Looks at every set of items computed again that may take less than the best.
  void improve() noexcept {
    aim();
    const double budget = most_s_ - passes_s(start_);
    if (!(stream_s_ < most_s_)) return;
    int last = 0;  // the one computed again in part
    while (last < again_end_ && (spent_s_[at(last) + 1] <= budget || cost_[at(last)] <= 0.0)) {
      ++last;
    }
    const double per_s = last < again_end_ ? size_[at(last)] / cost_[at(last)] : 0.0;
    double surplus = kInfinite;
    if (budget < kInfinite) {
      const double parts = per_s * (budget - spent_s_[at(last)]);
      surplus = again_bytes_[at(last)] + parts + slack_bytes() - again_needed_;
      if (surplus < 0.0) return;
    }
    Sums s = start_;
    open_ = 0;
    barred_ = fixed_ = 0;
    open_s_[0] = open_bytes_[0] = 0.0;
    for (int i = 0; i < again_end_; ++i) {
      const double gain = size_[at(i)] - per_s * cost_[at(i)];
      if ((i < last ? gain : -gain) <= surplus) {
        const std::size_t position = at(open_++);
        list_[position] = i;
        open_s_[position + 1] = open_s_[position] + cost_[at(i)];
        open_bytes_[position + 1] = open_bytes_[position] + size_[at(i)];
      } else if (i < last) {
        s = with(s, i);
        fixed_ |= std::uint64_t{1} << i;
      } else {
        barred_ |= worse_[at(i)];
      }
    }
    double behind = 0.0;
    for (int position = open_ - 1, i = again_end_ - 1; position >= 0; --position) {
      for (; i > list_[at(position)]; --i) behind += (fixed_ >> i & 1) != 0 ? size_[at(i)] : 0.0;
      behind_[at(position)] = behind;
    }
    if ((barred_ & fixed_) == 0) follow(0, s, true);
  }
  // What a better choice has to take less than, and save by computing again.
  void aim() noexcept {
    most_s_ = best_s_ * (1.0 - 1e-12);  // relative slack: what ties but for rounding is no better
    most_moved_ = 0.0;
    if (offloads_)
      most_moved_ = std::min(stream_room_, (most_s_ - stream_s_) * bytes_per_stream_s_);
    again_needed_ = needed_ - most_moved_;
  }
  double slack_bytes() const noexcept { return 1e-12 * all_; }  // for rounding
  // Whether open items from `at` on, computed again in parts, could save enough in time.
  bool may_fit(int position, const Sums& s) const noexcept {
    const double left_s = most_s_ - passes_s(s), missing = again_needed_ - s.saved;
    if (!(left_s > 0.0)) return gains_;
    if (missing <= 0.0) return true;
    const double until_s = open_s_[at(position)] + left_s;
    int k = position;
    while (k < open_ && open_s_[at(k) + 1] <= until_s) ++k;
    double saved = open_bytes_[at(k)] - open_bytes_[at(position)];
    if (k < open_) {
      const auto item = at(list_[at(k)]);
      saved += (until_s - open_s_[at(k)]) * (size_[item] / cost_[item]);
    }
    return saved + slack_bytes() >= missing || gains_;
  }
  // One more open item: computed again or not. `fits`: may_fit() is known to hold.
  void follow(int position, const Sums& s, bool fits) noexcept {
    // More computed again than is enough, in their order, never makes a step shorter.
    if (position == open_ || s.saved - behind_[at(position)] >= needed_) {
      move_rest(s);
      return;
    }
    if (!fits && !may_fit(position, s)) return;
    const int i = list_[at(position)];
    if ((barred_ >> i & 1) == 0) {
      follow(position + 1, with(s, i), cost_[at(i)] <= most_s_ - passes_s(s));
    }
    if ((worse_[at(i)] & fixed_) != 0) return;
    const std::uint64_t barred = barred_;
    barred_ |= worse_[at(i)];
    follow(position + 1, s, false);
    barred_ = barred;
  }
  // The time of another choice with the same operators computed again, where that is one here.
  bool follow_hint(std::uint64_t ops) noexcept {
    Sums s = start_;
    for (int i = 0; i < again_end_; ++i) {
      if ((ops >> order_[at(i)]->op & 1) != 0) s = with(s, i);
    }
    move_rest(s);
    const bool found = solved_;
    widen(kInfinite);
    return found;
  }
  // Bytes that can be moved besides while a set is computed again, without taking longer.
  double free_bytes(const Sums& s) const noexcept {
    const double free = (time_s(s, 0.0) - stream_s_) * bytes_per_stream_s_;
    if (!(link_s_per_byte_ > 0.0)) return free;
    return std::min(free, std::min(work_f_s_ - hidden_f_s_, s.work - s.hidden) / link_s_per_byte_);
  }
  // With a set of items computed again, moves the least of the others that is enough.
  void move_rest(const Sums& s) noexcept {
    const double missing = needed_ - s.saved;
    if (!(time_s(s, std::max(missing, 0.0)) < most_s_)) return;
    if (missing <= 0.0) {
      take(s, 0.0, 0);
      return;
    }
    if (missing > most_moved_) return;
    LeastMoved moved{missing, free_bytes(s), most_moved_};
    for (int k = 0; k < count_; ++k) {
      const int i = by_size_[at(k)];
      if ((movable_ & ~s.items) >> i & 1) moved.add(i, size_[at(i)], equal_[at(i)]);
    }
    moved.search();
    if (moved.least < kInfinite) take(s, moved.least, moved.found);
  }
  void take(const Sums& s, double moved, std::uint64_t away) noexcept {
    const double time = time_s(s, moved);
    if (!(time < most_s_)) return;
    best_s_ = time;
    again_ = s.items;
    away_ = away;
    moved_ = moved;
    solved_ = true;
    aim();
  }
  // Of all ways to move enough that take no longer, the first in the order of the items.
  std::uint64_t first_moved() const noexcept {
    Sums s = start_;
    for (int i = 0; i < again_end_; ++i) {
      if ((again_ >> i & 1) != 0) s = with(s, i);
    }
    if (s.saved >= needed_) return 0;
    const double enough = std::max(free_bytes(s), moved_ * (1.0 + 1e-12));
    LeastMoved moved{needed_ - s.saved, enough, std::min(enough, stream_room_)};
    for (int i = 0; i < count_; ++i) {
      if ((movable_ & ~again_) >> i & 1) moved.add(i, size_[at(i)], equal_[at(i)]);
    }
    moved.search();
    return moved.least < kInfinite ? moved.found : away_;
  }

  std::array<const Item*, kMaxMapOps> order_;
  std::array<double, kMaxMapOps> rate_;  // seconds per byte saved, of the first `count_` items
  bool compared_ = false;                // whether what follows is filled in
  std::array<double, kMaxMapOps> cost_, size_;
  std::array<int, kMaxMapOps> by_size_;  // items, the largest first
  std::uint64_t movable_ = 0;
  std::array<std::uint64_t, kMaxMapOps> worse_;  // later items that save no more and cost no less
  std::array<std::uint64_t, kMaxMapOps> equal_;  // earlier items that are as large
  std::array<double, kMaxMapOps + 1> spent_s_, again_bytes_;  // by all items before
  int again_end_ = 0;  // items from here on cannot be computed again

  double waits_f_s_, work_f_s_, hidden_f_s_, stream_s_;
  bool by_work_;
  int count_;
  Sums start_;
  double forward_s_ = 0.0;
  double all_ = 0.0, only_moved_ = 0.0;  // bytes of all; of those that cannot be computed again
  bool offloads_ = false;
  bool gains_ = false;  // whether some item costs less than nothing
  double stream_s_per_byte_ = 0.0, bytes_per_stream_s_ = 0.0, link_s_per_byte_ = 0.0;
  // Of the choice that is made, or was made last:
  double needed_ = 0.0, stream_room_ = 0.0, best_s_ = kInfinite, moved_ = 0.0;
  std::uint64_t again_ = 0, away_ = 0;
  bool solved_ = false, first_ = false;
  double most_s_ = kInfinite, most_moved_ = 0.0, again_needed_ = 0.0;  // of a better one
  int open_ = 0;  // items that may be computed again or not
  std::array<int, kMaxMapOps> list_;
  std::array<double, kMaxMapOps> behind_;  // bytes of what is surely computed again behind them
  std::array<double, kMaxMapOps + 1> open_s_, open_bytes_;  // of all open items before
  std::uint64_t fixed_ = 0, barred_ = 0;                    // surely computed again; not to be
};

}  // namespace phaze
