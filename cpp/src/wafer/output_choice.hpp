// The exact choice for a block's outputs: stored, recomputed, or moved off the wafer. Private to
// the wafer kernel; one object per thread, nothing is allocated or thrown.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/numbers.hpp"
#include "phaze/mapping.hpp"

namespace phaze {

// An output that may be recomputed or moved off the wafer instead of being stored.
struct OutputItem {
  int op;
  bool recompute, offload;
  double saved_bytes;
  double work_s, blocking_s, hidden_s;  // seconds that recomputation adds to the backward pass
  double stream_s;                      // stream seconds to move it out and back
  double link_s;                        // seconds each direction adds to overlapped collectives
};

// Seconds of a block with all outputs stored, by pass: blocking collectives, work, collectives that
// overlap it; and of the stream to and from off-wafer memory, which overlaps everything.
struct OutputBlock {
  double blocking_f_s, forward_s, hidden_f_s, blocking_b_s, backward_s, hidden_b_s, stream_s;
};

using Outputs = std::array<std::uint8_t, kMaxMapOps>;  // an Output by operator

// A subset of items with at least `needed` and at most `most` bytes. If subsets of at most `enough`
// bytes exist, the first of these in search order (including an item before omitting it); otherwise
// the subset with the least bytes.
struct LeastMoved {
  LeastMoved(double needed_bytes, double enough_bytes, double most_bytes) noexcept
      : needed(needed_bytes), enough(enough_bytes), most(most_bytes) {}

  // `as_large`: earlier items of the same size.
  void add(int item, double bytes, std::uint64_t as_large) noexcept;
  void search() noexcept;

  double needed, enough, most;
  double least = kInfinite;  // bytes of the subset found; infinite if there is none
  std::uint64_t subset = 0;  // the subset as a bit mask of items

 private:
  bool pick(std::size_t k, double moved, std::uint64_t away, std::uint64_t stored) noexcept;

  std::size_t count_ = 0;
  std::array<int, kMaxMapOps> item_;
  std::array<double, kMaxMapOps> size_;
  std::array<std::uint64_t, kMaxMapOps> equal_;
  std::array<double, kMaxMapOps> left_, smallest_;  // total and smallest bytes from an item on
};

// Least time with at least `needed` bytes saved. The cost of moving outputs follows from their
// bytes alone, so a choice is a set of recomputed items, in the order of cost per saved byte, as
// for a knapsack, and, of the others, the least bytes that are enough.
//
// Pruning: in the linear relaxation of a choice below a time limit, items are recomputed in order
// of cost, the last one fractionally, and as many bytes are moved as the time allows. The
// relaxation saves `surplus` bytes more than needed. Each item that deviates from it reduces the
// surplus by its reduced cost; only sets with a remaining surplus are examined, and none that an
// exchange of two items improves (Martello and Toth 1990, Knapsack Problems, chapter 2).
class OutputChooser {
 public:
  // `items` must outlive the chooser.
  OutputChooser(const OutputItem* items, int count, const OutputBlock& block) noexcept;

  // Whether recomputing the items that can be, and moving all others, is certain to save `needed`.
  bool surely(double needed, double stream_free_bytes) const noexcept {
    return items_.all - (items_.only_moved <= stream_free_bytes ? 0.0 : items_.only_moved) >=
           needed;
  }

  double most_saved() const noexcept { return items_.all; }  // upper bound in bytes

  // Lower bound on the time of every choice that saves `needed`: bytes are recomputed fractionally,
  // the cheapest first, and the others stream.
  double least_s(double needed) const noexcept;

  // Least time with enough saved; infinite if nothing saves enough, or every choice takes `worst_s`
  // or more. A repeated query is answered from the last answer; if less is to be saved, or more may
  // be moved, the last choice is feasible here as well. `hint`: operators recomputed in a similar
  // choice, for a bound on the time; `first`: among ties the first in improve()'s order.
  double solve(double needed, double stream_free_bytes, double worst_s,
               std::optional<std::uint64_t> hint = {}, bool first = false) noexcept;

  // Writes the choice of solve() by operator, among ties the first, whatever the earlier queries;
  // false if the choice takes `worst_s` or more. If nothing saves enough, everything is recomputed.
  bool choose(double needed, double stream_free_bytes, double worst_s, Outputs& outputs) noexcept;

  std::uint64_t again()
      const noexcept;  // bit mask of the operators that the last choice recomputes

 private:
  // The items by seconds per byte saved, ties in operator order. Everything before `compared` is
  // filled by the constructor, the rest by compare(); constant from then on.
  struct Items {
    int count;
    std::array<const OutputItem*, kMaxMapOps> order;
    std::array<double, kMaxMapOps> rate;  // seconds per byte saved
    double all = 0.0, only_moved = 0.0;   // bytes of all items; of those that cannot be recomputed
    bool offloads = false;
    double stream_s_per_byte = 0.0, bytes_per_stream_s = 0.0, link_s_per_byte = 0.0;
    bool compared = false;
    std::array<double, kMaxMapOps> cost, size;    // seconds, bytes
    std::array<int, kMaxMapOps> by_size;          // items, the largest first
    std::array<std::uint64_t, kMaxMapOps> worse;  // later items that save no more and cost no less
    std::array<std::uint64_t, kMaxMapOps> equal;  // earlier items of the same size
    std::array<double, kMaxMapOps + 1> spent_s, again_bytes;  // sums over the items before each
    std::uint64_t movable = 0;
    int again_end = 0;   // items from here on cannot be recomputed
    bool gains = false;  // whether some item has a negative cost
  };
  // The current query and the best choice for it so far. Invariant: if `solved`, `again` and `away`
  // are a choice that saves `needed`, moves at most `stream_free_bytes` and takes `best_s`.
  struct Answer {
    double needed = 0.0, stream_free_bytes = 0.0, best_s = kInfinite, moved = 0.0;
    std::uint64_t again = 0, away = 0;
    bool solved = false, first = false;
  };
  // Limits of a better choice: its time, moved bytes, and bytes saved by recomputation; derived
  // from the answer by aim().
  struct Target {
    double most_s = kInfinite, most_moved = 0.0, again_needed = 0.0;
  };
  // State of one branch-and-bound search. Open items are those whose decision is not forced.
  struct Branching {
    int open = 0;
    std::array<int, kMaxMapOps> list;
    std::array<double, kMaxMapOps> later_fixed_bytes;   // of items in `fixed` after each open item
    std::array<double, kMaxMapOps + 1> seconds, bytes;  // sums over the open items before each
    std::uint64_t fixed = 0, barred = 0;  // items forced to be recomputed, or not to be
  };
  struct Sums {  // seconds and saved bytes of a block with `items` recomputed
    double blocking, work, hidden, saved;
    std::uint64_t items;
  };

  double again_s(const OutputItem& item) const noexcept {
    if (!item.recompute) return kInfinite;
    return item.blocking_s + (by_work_ ? item.work_s : item.hidden_s);
  }
  double passes_s(const Sums& s) const noexcept {  // exact if nothing is moved, else a lower bound
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
  double slack_bytes() const noexcept { return 1e-12 * items_.all; }  // rounding tolerance
  bool may_fit(int position, const Sums& s) const noexcept;
  void follow(int position, const Sums& s, bool fits) noexcept;
  bool follow_hint(std::uint64_t ops) noexcept;
  double free_bytes(const Sums& s) const noexcept;
  void move_rest(const Sums& s) noexcept;
  void take(const Sums& s, double moved, std::uint64_t away) noexcept;
  std::uint64_t first_moved() const noexcept;

  OutputBlock block_;
  bool by_work_;      // whether the backward pass has more work than overlapped collectives
  double forward_s_;  // seconds of the forward pass with nothing moved
  Sums start_;        // nothing recomputed
  Items items_;
  Answer answer_;
  Target target_;
  Branching branching_;
};

}  // namespace phaze
