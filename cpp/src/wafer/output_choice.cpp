#include "wafer/output_choice.hpp"

#include <algorithm>
#include <bit>

namespace phaze {
namespace {

// For each item: the later items that save no more bytes and cost no less, both in work and in
// overlapped collectives; and the earlier items of equal size. Two items are compared only if both
// or neither can be moved.
void compare_items(int count, const double* bytes, const double* by_work, const double* by_hidden,
                   std::uint64_t movable, std::uint64_t* worse, std::uint64_t* equal) noexcept {
  for (int i = 0; i < count; ++i) equal[i] = 0;
  for (int i = 0; i < count; ++i) {
    std::uint64_t no_better = 0, as_large = 0;
    for (int k = count - 1; k > i; --k) {
      const bool less =
          (bytes[k] <= bytes[i]) & (by_work[k] >= by_work[i]) & (by_hidden[k] >= by_hidden[i]);
      no_better = no_better << 1 | static_cast<std::uint64_t>(less);
      as_large = as_large << 1 | static_cast<std::uint64_t>(bytes[k] == bytes[i]);
    }
    const std::uint64_t same_movability = (movable >> i & 1) != 0 ? movable : ~movable;
    worse[i] = no_better << 1 << i & same_movability;
    for (as_large = as_large << 1 << i & same_movability; as_large != 0; as_large &= as_large - 1) {
      equal[std::countr_zero(as_large)] |= std::uint64_t{1} << i;
    }
  }
}

}  // namespace

// ---- the subset with the least sufficient bytes ----

void LeastMoved::add(int item, double bytes, std::uint64_t as_large) noexcept {
  item_[count_] = item;
  size_[count_] = bytes;
  equal_[count_++] = as_large;
}

void LeastMoved::search() noexcept {
  double sum = 0.0, least_size = kInfinite;
  for (std::size_t k = count_; k-- > 0;) {
    left_[k] = sum += size_[k];
    smallest_[k] = least_size = size_[k] < least_size ? size_[k] : least_size;
  }
  pick(0, 0.0, 0, 0);
}

bool LeastMoved::pick(std::size_t k, double moved, std::uint64_t away,
                      std::uint64_t stored) noexcept {
  for (; k < count_ && moved + left_[k] >= needed && moved + smallest_[k] <= most; ++k) {
    const double more = moved + size_[k];
    const std::uint64_t bit = std::uint64_t{1} << item_[k];
    // Of two items of equal size, the later one is moved only with the earlier one.
    if (more <= most && more < least && (equal_[k] & stored) == 0) {
      if (more >= needed) {
        least = more;
        subset = away | bit;
        if (more <= enough) return true;
      } else if (pick(k + 1, more, away | bit, stored)) {
        return true;
      }
    }
    stored |= bit;
  }
  return false;
}

// ---- items ----

OutputChooser::OutputChooser(const OutputItem* items, int count, const OutputBlock& block) noexcept
    : block_(block),
      by_work_(block.backward_s >= block.hidden_b_s),
      forward_s_(block.blocking_f_s + std::max(block.forward_s, block.hidden_f_s)),
      start_{block.blocking_b_s, block.backward_s, block.hidden_b_s, 0.0, 0} {
  items_.count = count;
  for (int i = 0; i < count; ++i) {
    const double least = again_s(items[i]), rate = least / items[i].saved_bytes;
    int position = i;
    for (; position > 0 && items_.rate[at(position) - 1] > rate; --position) {
      items_.order[at(position)] = items_.order[at(position) - 1];
      items_.rate[at(position)] = items_.rate[at(position) - 1];
    }
    items_.order[at(position)] = items + i;
    items_.rate[at(position)] = rate;
    items_.all += items[i].saved_bytes;
    items_.only_moved += items[i].recompute ? 0.0 : items[i].saved_bytes;
    if (!items[i].offload) continue;
    items_.offloads = true;
    items_.stream_s_per_byte = items[i].stream_s / items[i].saved_bytes;
    items_.bytes_per_stream_s = items[i].saved_bytes / items[i].stream_s;
    items_.link_s_per_byte = items[i].link_s / items[i].saved_bytes;
  }
}

// Copies sizes and costs into arrays, and finds items that can be exchanged.
void OutputChooser::compare() noexcept {
  items_.compared = true;
  std::array<double, kMaxMapOps> by_work, by_hidden;  // seconds added by recomputation
  items_.spent_s[0] = items_.again_bytes[0] = 0.0;
  items_.again_end = 0;
  for (int i = 0; i < items_.count; ++i) {
    const OutputItem& item = *items_.order[at(i)];
    const double cost = again_s(item);
    items_.cost[at(i)] = cost;
    items_.gains = items_.gains || cost < 0.0;
    items_.size[at(i)] = item.saved_bytes;
    if (item.recompute) {  // items that cannot be recomputed come last
      items_.spent_s[at(i) + 1] = items_.spent_s[at(i)] + cost;
      items_.again_bytes[at(i) + 1] = items_.again_bytes[at(i)] + item.saved_bytes;
      items_.again_end = i + 1;
    }
    by_work[at(i)] = item.blocking_s + item.work_s;
    by_hidden[at(i)] = item.blocking_s + item.hidden_s;
    items_.movable |= static_cast<std::uint64_t>(item.offload) << i;
    int position = i;
    while (position > 0 && items_.size[at(items_.by_size[at(position) - 1])] < item.saved_bytes) {
      items_.by_size[at(position)] = items_.by_size[at(position) - 1];
      --position;
    }
    items_.by_size[at(position)] = i;
  }
  compare_items(items_.count, items_.size.data(), by_work.data(), by_hidden.data(), items_.movable,
                items_.worse.data(), items_.equal.data());
  for (int i = items_.again_end; i < items_.count; ++i) items_.worse[at(i)] = 0;
}

double OutputChooser::time_s(const Sums& s, double moved) const noexcept {
  const double links = moved * items_.link_s_per_byte;
  const double forward =
      block_.blocking_f_s + std::max(block_.forward_s, block_.hidden_f_s + links);
  return std::max(forward + s.blocking + std::max(s.work, s.hidden + links),
                  block_.stream_s + items_.stream_s_per_byte * moved);
}

OutputChooser::Sums OutputChooser::with(const Sums& s, int i) const noexcept {
  const OutputItem& item = *items_.order[at(i)];
  return {s.blocking + item.blocking_s, s.work + item.work_s, s.hidden + item.hidden_s,
          s.saved + item.saved_bytes, s.items | std::uint64_t{1} << i};
}

// ---- answers ----

double OutputChooser::least_s(double needed) const noexcept {
  double cost = passes_s(start_), missing = needed;
  double stream = block_.stream_s + (items_.offloads ? items_.stream_s_per_byte * missing : 0.0);
  for (int i = 0; i < items_.count && missing > 0.0; ++i) {
    const OutputItem& item = *items_.order[at(i)];
    if (items_.offloads && (cost >= stream || !item.recompute)) break;
    if (!item.recompute) continue;
    const double part = std::min(item.saved_bytes, missing);
    const double rate = items_.rate[at(i)];
    const double eased = items_.offloads ? items_.stream_s_per_byte : 0.0;
    if (items_.offloads && cost + rate * part >= stream - eased * part) {
      return cost + rate * (stream - cost) / (rate + eased);
    }
    cost += rate * part;
    stream -= eased * part;
    missing -= part;
  }
  return std::max(cost, stream);
}

double OutputChooser::solve(double needed, double stream_free_bytes, double worst_s,
                            std::optional<std::uint64_t> hint, bool first) noexcept {
  if (!surely(needed, stream_free_bytes)) worst_s = kInfinite;
  const bool same =
      answer_.solved && needed == answer_.needed && stream_free_bytes == answer_.stream_free_bytes;
  const bool less =
      answer_.solved && needed <= answer_.needed && stream_free_bytes >= answer_.stream_free_bytes;
  answer_.needed = needed;
  answer_.stream_free_bytes = stream_free_bytes;
  if (!same || (first && !answer_.first)) {
    if (!items_.compared) compare();
    answer_.first = first;
    answer_.solved = less && answer_.best_s < worst_s;
    if (!answer_.solved) answer_.best_s = worst_s;
    if (items_.all >= needed) {
      aim();
      if (!less && !(hint && follow_hint(*hint))) round();
      if (first) widen(worst_s);
      improve();
      if (!answer_.solved && answer_.best_s < worst_s) {  // the bound is not met because of
        answer_.best_s = worst_s;                         // rounding
        aim();
        improve();
      }
    }
  }
  return answer_.solved && answer_.best_s < worst_s ? answer_.best_s : kInfinite;
}

bool OutputChooser::choose(double needed, double stream_free_bytes, double worst_s,
                           Outputs& outputs) noexcept {
  if (!surely(needed, stream_free_bytes)) worst_s = kInfinite;
  const bool feasible = solve(needed, stream_free_bytes, worst_s, {}, true) < kInfinite;
  if (!feasible && worst_s < kInfinite) return false;
  const std::uint64_t away_items = feasible ? first_moved() : 0;
  for (int i = 0; i < items_.count; ++i) {
    const OutputItem& item = *items_.order[at(i)];
    const bool again = feasible ? (answer_.again >> i & 1) != 0 : item.recompute;
    const Output output = again                        ? Output::kRecompute
                          : (away_items >> i & 1) != 0 ? Output::kOffload
                                                       : Output::kStash;
    outputs[at(item.op)] = static_cast<std::uint8_t>(output);
  }
  return true;
}

std::uint64_t OutputChooser::again() const noexcept {
  std::uint64_t ops = 0;
  for (int i = 0; i < items_.count; ++i) {
    ops |= (answer_.again >> i & 1) << items_.order[at(i)]->op;
  }
  return ops;
}

// Forgets the last choice but for its time, which limits that of the next, as `worst_s` does.
void OutputChooser::widen(double worst_s) noexcept {
  if (!answer_.solved) return;
  answer_.solved = false;
  answer_.best_s = std::min(answer_.best_s * (1.0 + 1e-9), worst_s);
  aim();
}

void OutputChooser::aim() noexcept {
  // A relative slack: a tie up to rounding is no improvement.
  target_.most_s = answer_.best_s * (1.0 - 1e-12);
  target_.most_moved = 0.0;
  if (items_.offloads) {
    target_.most_moved = std::min(answer_.stream_free_bytes,
                                  (target_.most_s - block_.stream_s) * items_.bytes_per_stream_s);
  }
  target_.again_needed = answer_.needed - target_.most_moved;
}

void OutputChooser::take(const Sums& s, double moved, std::uint64_t away) noexcept {
  const double time = time_s(s, moved);
  if (!(time < target_.most_s)) return;
  answer_.best_s = time;
  answer_.again = s.items;
  answer_.away = away;
  answer_.moved = moved;
  answer_.solved = true;
  aim();
}

// ---- initial choices ----

// An initial choice: recomputes items in order until that takes as long as moving the others; also
// tries one item more.
void OutputChooser::round() noexcept {
  Sums s = start_;
  for (int i = 0; i < items_.again_end; ++i) {
    const Sums next = with(s, i);
    const double missing = answer_.needed - next.saved;
    const bool enough = missing <= 0.0;
    if (enough || (items_.offloads &&
                   passes_s(next) >= block_.stream_s + items_.stream_s_per_byte * missing)) {
      if (items_.offloads) move_rest(s);
      move_rest(next);
      return;
    }
    s = next;
  }
  move_rest(s);
}

// Takes the time of the choice that recomputes the operators `ops` as a bound, if it is feasible.
bool OutputChooser::follow_hint(std::uint64_t ops) noexcept {
  Sums s = start_;
  for (int i = 0; i < items_.again_end; ++i) {
    if ((ops >> items_.order[at(i)]->op & 1) != 0) s = with(s, i);
  }
  move_rest(s);
  const bool solved = answer_.solved;
  widen(kInfinite);
  return solved;
}

// ---- branch and bound ----

// Examines every set of recomputed items that may take less than the incumbent.
void OutputChooser::improve() noexcept {
  aim();
  const double budget = target_.most_s - passes_s(start_);
  if (!(block_.stream_s < target_.most_s)) return;
  int last = 0;  // the fractionally recomputed item
  while (last < items_.again_end &&
         (items_.spent_s[at(last) + 1] <= budget || items_.cost[at(last)] <= 0.0)) {
    ++last;
  }
  const double per_s =
      last < items_.again_end ? items_.size[at(last)] / items_.cost[at(last)] : 0.0;
  const double surplus = surplus_of(last, per_s, budget);
  if (surplus < 0.0) return;
  Sums s = start_;
  open_items(last, per_s, surplus, &s);
  if ((branching_.barred & branching_.fixed) == 0) follow(0, s, true);
}

// Bytes saved beyond those needed if items up to `last` are recomputed, `last` fractionally.
double OutputChooser::surplus_of(int last, double per_s, double budget) const noexcept {
  if (!(budget < kInfinite)) return kInfinite;
  const double parts = per_s * (budget - items_.spent_s[at(last)]);
  return items_.again_bytes[at(last)] + parts + slack_bytes() - target_.again_needed;
}

// Finds the open items: the others are either certain to be recomputed, and added to `s`, or
// certain not to be.
void OutputChooser::open_items(int last, double per_s, double surplus, Sums* s) noexcept {
  Branching& b = branching_;
  b.open = 0;
  b.barred = b.fixed = 0;
  b.seconds[0] = b.bytes[0] = 0.0;
  for (int i = 0; i < items_.again_end; ++i) {
    const double gain = items_.size[at(i)] - per_s * items_.cost[at(i)];
    if ((i < last ? gain : -gain) <= surplus) {
      const std::size_t position = at(b.open++);
      b.list[position] = i;
      b.seconds[position + 1] = b.seconds[position] + items_.cost[at(i)];
      b.bytes[position + 1] = b.bytes[position] + items_.size[at(i)];
    } else if (i < last) {
      *s = with(*s, i);
      b.fixed |= std::uint64_t{1} << i;
    } else {
      b.barred |= items_.worse[at(i)];
    }
  }
  double later_bytes = 0.0;
  for (int position = b.open - 1, i = items_.again_end - 1; position >= 0; --position) {
    for (; i > b.list[at(position)]; --i) {
      later_bytes += (b.fixed >> i & 1) != 0 ? items_.size[at(i)] : 0.0;
    }
    b.later_fixed_bytes[at(position)] = later_bytes;
  }
}

// Whether open items from `position` on, recomputed fractionally, could save enough in time.
bool OutputChooser::may_fit(int position, const Sums& s) const noexcept {
  const Branching& b = branching_;
  const double left_s = target_.most_s - passes_s(s), missing = target_.again_needed - s.saved;
  if (!(left_s > 0.0)) return items_.gains;
  if (missing <= 0.0) return true;
  const double until_s = b.seconds[at(position)] + left_s;
  int k = position;
  while (k < b.open && b.seconds[at(k) + 1] <= until_s) ++k;
  double saved = b.bytes[at(k)] - b.bytes[at(position)];
  if (k < b.open) {
    const auto item = at(b.list[at(k)]);
    saved += (until_s - b.seconds[at(k)]) * (items_.size[item] / items_.cost[item]);
  }
  return saved + slack_bytes() >= missing || items_.gains;
}

// Branches on one more open item: recomputed or not. `fits`: may_fit() is known to be true.
void OutputChooser::follow(int position, const Sums& s, bool fits) noexcept {
  Branching& b = branching_;
  // Once enough is saved, recomputing further items never shortens the step.
  if (position == b.open || s.saved - b.later_fixed_bytes[at(position)] >= answer_.needed) {
    move_rest(s);
    return;
  }
  if (!fits && !may_fit(position, s)) return;
  const int i = b.list[at(position)];
  if ((b.barred >> i & 1) == 0) {
    follow(position + 1, with(s, i), items_.cost[at(i)] <= target_.most_s - passes_s(s));
  }
  if ((items_.worse[at(i)] & b.fixed) != 0) return;
  const std::uint64_t barred = b.barred;
  b.barred |= items_.worse[at(i)];
  follow(position + 1, s, false);
  b.barred = barred;
}

// ---- moved outputs ----

// Bytes that can be moved, given the recomputed items, without increasing the time.
double OutputChooser::free_bytes(const Sums& s) const noexcept {
  const double free = (time_s(s, 0.0) - block_.stream_s) * items_.bytes_per_stream_s;
  if (!(items_.link_s_per_byte > 0.0)) return free;
  return std::min(free, std::min(block_.forward_s - block_.hidden_f_s, s.work - s.hidden) /
                            items_.link_s_per_byte);
}

// Given the recomputed items, moves the least sufficient bytes of the others.
void OutputChooser::move_rest(const Sums& s) noexcept {
  const double missing = answer_.needed - s.saved;
  if (!(time_s(s, std::max(missing, 0.0)) < target_.most_s)) return;
  if (missing <= 0.0) {
    take(s, 0.0, 0);
    return;
  }
  if (missing > target_.most_moved) return;
  LeastMoved moved{missing, free_bytes(s), target_.most_moved};
  for (int k = 0; k < items_.count; ++k) {
    const int i = items_.by_size[at(k)];
    if ((items_.movable & ~s.items) >> i & 1) {
      moved.add(i, items_.size[at(i)], items_.equal[at(i)]);
    }
  }
  moved.search();
  if (moved.least < kInfinite) take(s, moved.least, moved.subset);
}

// Among the sets that move enough and take no longer, the first in the order of the items.
std::uint64_t OutputChooser::first_moved() const noexcept {
  Sums s = start_;
  for (int i = 0; i < items_.again_end; ++i) {
    if ((answer_.again >> i & 1) != 0) s = with(s, i);
  }
  if (s.saved >= answer_.needed) return 0;
  const double enough = std::max(free_bytes(s), answer_.moved * (1.0 + 1e-12));
  LeastMoved moved{answer_.needed - s.saved, enough, std::min(enough, answer_.stream_free_bytes)};
  for (int i = 0; i < items_.count; ++i) {
    if ((items_.movable & ~answer_.again) >> i & 1) {
      moved.add(i, items_.size[at(i)], items_.equal[at(i)]);
    }
  }
  moved.search();
  return moved.least < kInfinite ? moved.subset : answer_.away;
}

}  // namespace phaze
