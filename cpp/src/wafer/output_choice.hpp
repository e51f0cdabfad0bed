// The exact choice of what becomes of a block's outputs: kept, computed again, or moved off the
// wafer. Private to the wafer kernel; one object per thread, nothing is allocated or thrown.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/numbers.hpp"
#include "phaze/mapping.hpp"

namespace phaze {

// An output that may be computed again or moved off the wafer instead of being kept.
struct OutputItem {
  int op;
  bool recompute, offload;
  double saved_bytes;
  double work_s, blocking_s, hidden_s;  // that running it again adds to the backward pass
  double stream_s;                      // that moving it out and back adds
  double link_s;                        // that each of both adds to the overlapped collectives
};

// Seconds of a block with all outputs kept, by pass: collectives that the work waits for, work,
// collectives that overlap it; and of the stream from and to off the wafer, which overlaps all.
struct OutputBlock {
  double blocking_f_s, forward_s, hidden_f_s, blocking_b_s, backward_s, hidden_b_s, stream_s;
};

using Outputs = std::array<std::uint8_t, kMaxMapOps>;  // an Output by operator

// The subset with the least bytes of at least `needed` and at most `most`: of those with no more
// than `enough` the first, in the order that tries each item before leaving it out; else the least.
struct LeastMoved {
  LeastMoved(double needed_bytes, double enough_bytes, double most_bytes) noexcept
      : needed(needed_bytes), enough(enough_bytes), most(most_bytes) {}

  // `as_large`: items added before that have the same size.
  void add(int item, double bytes, std::uint64_t as_large) noexcept;
  void search() noexcept;

  double needed, enough, most;
  double least = kInfinite;  // bytes of the subset that was found; infinite where there is none
  std::uint64_t found = 0;   // that subset, a bit per item

 private:
  bool pick(std::size_t k, double moved, std::uint64_t away, std::uint64_t kept) noexcept;

  std::size_t count_ = 0;
  std::array<int, kMaxMapOps> item_;
  std::array<double, kMaxMapOps> size_;
  std::array<std::uint64_t, kMaxMapOps> equal_;
  std::array<double, kMaxMapOps> left_, smallest_;  // of an item and those behind it, bytes
};

// Least time with at least so many bytes saved. What moving outputs costs follows from their bytes
// alone, so that a choice is a set of items computed again, in the order of what a saved byte
// costs, as for a knapsack, and of the others the least bytes that are enough.
//
// To take less than a limit, items computed again in parts, the cheapest first, and as many bytes
// moved as there is time for would save `surplus` more than is needed. Every item that is not
// computed again although it is cheaper than the last one in part, or is although it is not, loses
// a part of that (its reduced cost, as in linear programs): only sets that lose no more than the
// surplus are looked at, and of those none where exchanging two items does as well (Martello and
// Toth 1990, Knapsack Problems, chapter 2).
class OutputChooser {
 public:
  // `items` must outlive it.
  OutputChooser(const OutputItem* items, int count, const OutputBlock& block) noexcept;

  // Whether items that can be computed again, and all others moved, surely save so much.
  bool surely(double needed, double stream_room) const noexcept {
    return items_.all - (items_.only_moved <= stream_room ? 0.0 : items_.only_moved) >= needed;
  }

  double most_saved() const noexcept { return items_.all; }  // bytes, of any choice

  // No choice that saves so much takes less: bytes are computed again in parts, the cheapest first,
  // and the others stream.
  double least_s(double needed) const noexcept;

  // Least time with enough saved; infinite where nothing saves enough, or all takes `worst_s` or
  // more. The same as last asked is answered from memory; where less is to be saved, or more may be
  // moved, the last choice is a choice here as well. `hint`: operators that were computed again in
  // a similar choice, for a bound of the time; `first`: of several the first in improve()'s order.
  double solve(double needed, double stream_room, double worst_s,
               std::optional<std::uint64_t> hint = {}, bool first = false) noexcept;

  // What solve() finds, by operator, and of several the first, whatever was asked before; false
  // where that takes `worst_s` or more. Where nothing saves enough, all is computed again.
  bool choose(double needed, double stream_room, double worst_s, Outputs& outputs) noexcept;

  std::uint64_t again() const noexcept;  // operators, by the last choice

 private:
  // The items by seconds per byte saved, ties as the operators stand. Everything before `compared`
  // is filled by the constructor, the rest by compare(); constant from then on.
  struct Items {
    int count;
    std::array<const OutputItem*, kMaxMapOps> order;
    std::array<double, kMaxMapOps> rate;  // seconds per byte saved
    double all = 0.0, only_moved = 0.0;   // bytes of all; of those that cannot be computed again
    bool offloads = false;
    double stream_s_per_byte = 0.0, bytes_per_stream_s = 0.0, link_s_per_byte = 0.0;
    bool compared = false;
    std::array<double, kMaxMapOps> cost, size;    // seconds, bytes
    std::array<int, kMaxMapOps> by_size;          // items, the largest first
    std::array<std::uint64_t, kMaxMapOps> worse;  // later items that save no more and cost no less
    std::array<std::uint64_t, kMaxMapOps> equal;  // earlier items that are as large
    std::array<double, kMaxMapOps + 1> spent_s, again_bytes;  // by all items before
    std::uint64_t movable = 0;
    int again_end = 0;   // items from here on cannot be computed again
    bool gains = false;  // whether some item costs less than nothing
  };
  // Of the query at hand and the best choice for it so far; where `solved`, `again` and `away` are
  // a choice that saves `needed`, moves at most `stream_room` and takes `best_s`.
  struct Answer {
    double needed = 0.0, stream_room = 0.0, best_s = kInfinite, moved = 0.0;
    std::uint64_t again = 0, away = 0;
    bool solved = false, first = false;
  };
  // What a better choice has to take less than, may move, and save by computing again; follows from
  // the answer by aim().
  struct Target {
    double most_s = kInfinite, most_moved = 0.0, again_needed = 0.0;
  };
  // One branch-and-bound: items that may be computed again or not, and sums over those before each.
  struct Branching {
    int open = 0;
    std::array<int, kMaxMapOps> list;
    std::array<double, kMaxMapOps> behind;  // bytes of what is surely computed again behind them
    std::array<double, kMaxMapOps + 1> seconds, bytes;  // of all open items before
    std::uint64_t fixed = 0, barred = 0;                // surely computed again; not to be
  };
  struct Sums {  // of a block with some items computed again, and their set
    double blocking, work, hidden, saved;
    std::uint64_t items;
  };

  double again_s(const OutputItem& item) const noexcept {
    if (!item.recompute) return kInfinite;
    return item.blocking_s + (by_work_ ? item.work_s : item.hidden_s);
  }
  double passes_s(const Sums& s) const noexcept {  // with nothing moved, and no less with more
    return forward_s_ + s.blocking + (by_work_ ? s.work : s.hidden);
  }
  double time_s(const Sums& s, double moved) const noexcept;
  Sums with(const Sums& s, int i) const noexcept;
  void widen(double worst_s) noexcept;
  void compare() noexcept;
  void round() noexcept;
  void improve() noexcept;
  double surplus_of(int last, double per_s, double budget) const noexcept;
  void open_items(int last, double per_s, double surplus, Sums* s) noexcept;
  void aim() noexcept;
  double slack_bytes() const noexcept { return 1e-12 * items_.all; }  // for rounding
  bool may_fit(int position, const Sums& s) const noexcept;
  void follow(int position, const Sums& s, bool fits) noexcept;
  bool follow_hint(std::uint64_t ops) noexcept;
  double free_bytes(const Sums& s) const noexcept;
  void move_rest(const Sums& s) noexcept;
  void take(const Sums& s, double moved, std::uint64_t away) noexcept;
  std::uint64_t first_moved() const noexcept;

  OutputBlock block_;
  bool by_work_;      // whether the backward pass has more work than overlapped collectives
  double forward_s_;  // of the forward pass with nothing moved
  Sums start_;        // nothing computed again
  Items items_;
  Answer answer_;
  Target target_;
  Branching branching_;
};

}  // namespace phaze
