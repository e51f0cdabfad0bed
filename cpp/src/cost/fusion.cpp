#include "phaze/fusion.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"

namespace phaze {
namespace {

// Calls visit(tile, passes) for every distinct number of passes over `size`, rising, with the
// smallest tile (a multiple of `step`) that needs so few passes, until visit returns false.
template <typename Visit>
void for_passes(std::int64_t size, std::int64_t step, const Visit& visit) noexcept {
  const std::int64_t units = ceil_div(size, step);
  for (std::int64_t passes = 1; passes <= units;) {
    const std::int64_t tile = ceil_div(units, passes);
    passes = ceil_div(units, tile);
    if (!visit(tile * step, passes)) return;
    if (tile == 1) return;
    passes = ceil_div(units, tile - 1);
  }
}

// Passes over `size` with the largest tile that is a multiple of `step` and at most `most`
// elements; 0 if not even one step fits.
std::int64_t passes_of(double most, std::int64_t size, std::int64_t step) noexcept {
  const std::int64_t units = ceil_div(size, step);
  const double fitting = most / static_cast<double>(step);
  if (!(fitting >= 1.0)) return 0;
  if (fitting >= static_cast<double>(units)) return 1;
  return ceil_div(units, static_cast<std::int64_t>(fitting));
}

// Bytes of the arrays of a group.
struct Arrays {
  double x;
  double a;
  double b;
  double y;
  double sums;  // moving all partial sums of Y off the chip, and back, once
};

// Bytes of the buffer for one loop order and set of kept arrays: `fixed` by the token tile, and
// `per_column` for each column of the hidden tile.
struct Use {
  double fixed;
  double per_column;
};

class GroupSearch {
 public:
  GroupSearch(const FusedGroup& group, double capacity, const BufferRules& rules) noexcept
      : g_(group), capacity_(capacity), p_(rules) {
    const auto rows = static_cast<double>(g_.rows);
    const auto hidden = static_cast<double>(g_.hidden);
    inner_ = static_cast<double>(g_.inner);
    outer_ = static_cast<double>(g_.outer);
    arrays_ = {rows * inner_ * p_.element_bytes * g_.inputs,
               inner_ * hidden * p_.element_bytes * g_.first,
               hidden * outer_ * p_.element_bytes * g_.second, rows * outer_ * p_.element_bytes,
               p_.spills * rows * outer_ * p_.sum_bytes};
  }

  FusedTraffic run() noexcept {
    for (std::int32_t kept = 0; kept < 16; ++kept) {
      const bool rows_kept = (kept & (kKeepInput | kKeepOutput)) != 0;
      const bool columns_kept = (kept & (kKeepFirst | kKeepSecond)) != 0;
      if (rows_kept && columns_kept) continue;
      if (g_.inner == 0 && (kept & (kKeepInput | kKeepFirst)) != 0) continue;
      if (g_.outer == 0 && (kept & (kKeepOutput | kKeepSecond)) != 0) continue;
      walk(kept);
    }
    best_.hbm_bytes = static_cast<double>(g_.count) * (best_.hbm_bytes + g_.moved);
    return best_;
  }

 private:
  bool has(std::int32_t kept, std::int32_t which) const noexcept { return (kept & which) != 0; }

  // Strips of the two products are in flight one after the other: of the first, or the `second`. A
  // product that keeps one factor still streams the other.
  Use use(std::int32_t kept, double tile, bool second) const noexcept {
    const double e = p_.element_bytes;
    Use use{0.0, tile * g_.held * std::max(e, p_.sum_bytes)};
    if (has(kept, kKeepInput)) use.fixed += tile * inner_ * e * g_.inputs;
    if (has(kept, kKeepOutput)) use.fixed += tile * outer_ * p_.sum_bytes;
    if (has(kept, kKeepFirst)) use.per_column += inner_ * e * g_.first;
    if (has(kept, kKeepSecond)) use.per_column += outer_ * e * g_.second;
    if (second) {
      if (!has(kept, kKeepOutput)) use.fixed += p_.strip * tile * p_.sum_bytes;
      if (!has(kept, kKeepSecond)) use.per_column += p_.strip * e;
    } else {
      if (!has(kept, kKeepInput)) use.fixed += p_.strip * tile * e;
      if (!has(kept, kKeepFirst)) use.per_column += p_.strip * e;
    }
    return use;
  }

  double most_columns(const Use& use) const noexcept {
    return std::floor((capacity_ - use.fixed) / use.per_column);
  }

  void walk(std::int32_t kept) noexcept {
    for_passes(g_.rows, g_.row_step, [&](std::int64_t tile, std::int64_t row_passes) {
      const auto n_a = static_cast<double>(row_passes);
      const double weights = arrays_.a * (has(kept, kKeepFirst) ? 1.0 : n_a) +
                             arrays_.b * (has(kept, kKeepSecond) ? 1.0 : n_a) + arrays_.y;
      if (weights + arrays_.x >= best_.hbm_bytes) return false;
      const auto rows = static_cast<double>(tile);
      double most = kInfinite;
      if (g_.inner > 0) most = std::min(most, most_columns(use(kept, rows, false)));
      if (g_.outer > 0) most = std::min(most, most_columns(use(kept, rows, true)));
      const std::int64_t column_passes = passes_of(most, g_.hidden, g_.hidden_step);
      if (column_passes == 0) return true;
      const auto n_c = static_cast<double>(column_passes);
      const double bytes = weights + arrays_.x * (has(kept, kKeepInput) ? 1.0 : n_c) +
                           arrays_.sums * (has(kept, kKeepOutput) ? 0.0 : n_c - 1.0);
      if (bytes < best_.hbm_bytes) {
        const Loops loops =
            (kept & (kKeepFirst | kKeepSecond)) != 0 ? Loops::kColumnsOuter : Loops::kRowsOuter;
        best_ = {bytes, static_cast<std::int32_t>(loops), kept, row_passes, column_passes};
      }
      return true;
    });
  }

  const FusedGroup& g_;
  double capacity_;
  const BufferRules& p_;
  double inner_ = 0.0;
  double outer_ = 0.0;
  Arrays arrays_{};
  FusedTraffic best_{kInfinite, 0, 0, 0, 0};
};

}  // namespace

bool is_valid(const FusedGroup& g, const BufferRules& p) noexcept {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  for (const std::int64_t size : {g.count, g.rows, g.row_step, g.hidden, g.hidden_step}) {
    if (size < 1 || size > kMost) return false;
  }
  for (const std::int64_t size : {g.inner, g.outer}) {
    if (size < 0 || size > kMost) return false;
  }
  for (const double factor :
       {g.first, g.second, g.held, g.inputs, p.element_bytes, p.sum_bytes, p.spills}) {
    if (!(factor > 0.0) || !is_size(factor)) return false;
  }
  return is_size(g.moved) && is_size(p.strip) && (g.inner > 0 || g.outer > 0);
}

FusedTraffic least_group_traffic(const FusedGroup& group, double capacity_bytes,
                                 const BufferRules& rules) noexcept {
  return GroupSearch(group, capacity_bytes, rules).run();
}

double least_product_bytes(std::int64_t m, std::int64_t k, std::int64_t n, double capacity_bytes,
                           const BufferRules& p) noexcept {
  const auto rows = static_cast<double>(m);
  const auto depth = static_cast<double>(k);
  const auto columns = static_cast<double>(n);
  const double e = p.element_bytes;
  const double outputs = rows * columns * e;
  const double sums = p.spills * rows * columns * p.sum_bytes;
  double best = kInfinite;
  // A tile of the output stays: the right operand is read once per tile along m, the left along n.
  const double left = rows * depth * e;
  const double right = depth * columns * e;
  for_passes(m, 1, [&](std::int64_t tile, std::int64_t passes) {
    const double fixed = right * static_cast<double>(passes) + outputs;
    if (fixed + left >= best) return false;
    const auto t = static_cast<double>(tile);
    const double most =
        std::floor((capacity_bytes - p.strip * t * e) / (t * p.sum_bytes + p.strip * e));
    const std::int64_t across = passes_of(most, n, 1);
    if (across > 0) best = std::min(best, fixed + left * static_cast<double>(across));
    return true;
  });
  // A tile of an operand stays; `size` is its dimension that is not k.
  const auto operand_stays = [&](std::int64_t size, double stored, double streamed) {
    for_passes(size, 1, [&](std::int64_t tile, std::int64_t passes) {
      const double fixed = stored + streamed * static_cast<double>(passes) + outputs;
      if (fixed >= best) return false;
      const auto t = static_cast<double>(tile);
      const double most =
          std::floor((capacity_bytes - p.strip * t * p.sum_bytes) / (t * e + p.strip * e));
      const std::int64_t along = passes_of(most, k, 1);
      if (along > 0) best = std::min(best, fixed + sums * static_cast<double>(along - 1));
      return true;
    });
  };
  operand_stays(m, left, right);
  operand_stays(n, right, left);
  return best;
}

}  // namespace phaze
