#include <algorithm>

#include "base/numbers.hpp"
#include "phaze/gemm.hpp"

namespace phaze {
namespace {

constexpr double kStrip = 64.0;  // depth of a strip in elements

// 1, 2, 3, 4, 6, 8, 12, ...: each number after 2 is 3/2 or 4/3 of the one before.
std::int64_t next_on_ladder(std::int64_t i) noexcept {
  if (i == 1) return 2;
  return (i & (i - 1)) == 0 ? i / 2 * 3 : i / 3 * 4;
}

// Largest whole t with fixed + t * per_unit <= capacity, at most `most`; 0 where none fits.
std::int64_t largest_fitting(double fixed, double per_unit, double capacity,
                             std::int64_t most) noexcept {
  const double room = (capacity - fixed) / per_unit;
  if (!(room >= 0.5)) return 0;  // below 1 even if the division was rounded down
  if (room >= static_cast<double>(most) + 1.0) return most;
  auto t = static_cast<std::int64_t>(room);
  while (t < most && fixed + static_cast<double>(t + 1) * per_unit <= capacity) ++t;
  while (t > 0 && fixed + static_cast<double>(t) * per_unit > capacity) --t;
  return std::min(t, most);
}

struct Sizes {
  double a;  // bytes of the left operand
  double b;
  double d;         // bytes of the output
  double partials;  // bytes of all accumulators
};

// Keeps a t_x by t_y tile of outputs while strips of both operands stream past.
void outputs_stay(const GemmShape& g, double capacity, const Precision& p, const Sizes& z,
                  Traffic& best) noexcept {
  for (std::int64_t i = 1; i <= g.m; i = next_on_ladder(i)) {
    if (z.a + z.b * static_cast<double>(i) + z.d >= best.hbm_bytes) return;
    const auto tile = static_cast<double>(ceil_div(g.m, i));
    const double strips = 2.0 * kStrip * p.in_bytes;
    const std::int64_t most =
        largest_fitting(strips * tile, tile * p.acc_bytes + strips, capacity, g.n);
    if (most == 0) continue;
    const std::int64_t j = ceil_div(g.n, most);
    const double bytes = z.a * static_cast<double>(j) + z.b * static_cast<double>(i) + z.d;
    if (bytes < best.hbm_bytes) best = {bytes, Order::kOutputs, i, j};
  }
}

// Keeps a tile of one operand (`kept` bytes, `x` elements along its outer side) while strips of the
// other (`streamed` bytes) and of the outputs pass.
void operand_stays(std::int64_t x, std::int64_t k, double kept, double streamed, double capacity,
                   const Precision& p, const Sizes& z, Order order, Traffic& best) noexcept {
  for (std::int64_t i = 1; i <= x; i = next_on_ladder(i)) {
    const double reads = kept + streamed * static_cast<double>(i) + z.d;
    if (reads >= best.hbm_bytes) return;
    const auto tile = static_cast<double>(ceil_div(x, i));
    const double outputs = 2.0 * kStrip * tile * p.acc_bytes;
    const double strip = 2.0 * kStrip * p.in_bytes;
    std::int64_t j = 1;
    const bool whole =
        i == 1 && (tile * p.in_bytes + strip) * static_cast<double>(k) + outputs <= capacity;
    if (!whole) {
      const std::int64_t most =
          largest_fitting(outputs, 2.0 * tile * p.in_bytes + strip, capacity, k);
      if (most == 0) continue;
      j = ceil_div(k, most);
    }
    const double bytes = reads + 2.0 * static_cast<double>(j - 1) * z.partials;
    if (bytes < best.hbm_bytes) best = {bytes, order, i, j};
  }
}

}  // namespace

Traffic hbm_traffic(const GemmShape& g, double capacity, const Precision& p) noexcept {
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  const Sizes z{m * k * p.in_bytes, k * n * p.in_bytes, m * n * p.out_bytes, m * n * p.acc_bytes};
  // With no room at all, operands are read again for every element of the output.
  Traffic best{z.a * n + z.b * m + z.d, Order::kNothing, g.m, g.n};
  outputs_stay(g, capacity, p, z, best);
  operand_stays(g.m, g.k, z.a, z.b, capacity, p, z, Order::kInputs, best);
  operand_stays(g.n, g.k, z.b, z.a, capacity, p, z, Order::kWeights, best);
  return best;
}

}  // namespace phaze
