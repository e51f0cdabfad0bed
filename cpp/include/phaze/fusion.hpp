// Least off-chip traffic of matrix products, alone and fused into groups, in front of one buffer.
//
// A group multiplies an input X (rows x inner) by weights A (inner x hidden), works on the result H
// (rows x hidden) element by element or row by row, and multiplies it by weights B (hidden x outer)
// into Y (rows x outer). H never leaves the chip. It runs in token tiles of a rows and hidden tiles
// of g columns, n_a = ceil(rows / a) and n_c = ceil(hidden / g) of them. Either loop may be outer:
// X and Y may be kept on chip during the inner loop (k_X, k_Y) if the loop over rows is the outer,
// A and B (k_A, k_B) if that over columns is. A partial sum is transferred s times:
//
//   bytes = X (k_X ? 1 : n_c) + A (k_A ? 1 : n_a) + B (k_B ? 1 : n_a)
//           + Y + (k_Y ? 0 : s (n_c - 1) rows outer e_a) + moved
//
// The buffer holds the tile of H, what is kept, and strips of what streams through it. Its use is
// linear in g for a given a, so the largest g, which has the fewest bytes, follows by a division.
// The bytes with n_c = 1 are a lower bound that rises with n_a: walking the distinct n_a upwards
// until it reaches the best is exact. O(sqrt(rows)) steps, a few microseconds.
//
// Fused loop nests of this kind: Alwani et al., "Fused-layer CNN accelerators", MICRO 2016; Gilbert
// et al., "LoopTree: exploring the fused-layer dataflow accelerator design space", 2024.
//
// All functions are pure, never throw, allocate nothing, and may run from any thread.
#pragma once

#include <cstdint>

namespace phaze {

// How a chip uses its buffer.
struct BufferRules {
  double element_bytes;  // e: of inputs, weights and results
  double sum_bytes;      // e_a: of partial sums
  double strip;          // elements in flight of each row that streams, all copies of a strip
  double spills = 2.0;   // s: a partial sum is written and read; 1 if it is added in memory
};

struct FusedGroup {
  std::int64_t count;        // independent groups of this shape, such as heads
  std::int64_t rows;         // of X, H and Y
  std::int64_t row_step;     // token tiles are multiples of it, such as the length of a sequence
  std::int64_t inner;        // columns of X; 0: H is read, not computed, and counted in `moved`
  std::int64_t hidden;       // columns of H
  std::int64_t hidden_step;  // hidden tiles are multiples of it, such as the width of a head
  std::int64_t outer;        // columns of Y; 0: H is the result, and counted in `moved`
  double first;              // columns of A per column of H: 2 if gated, 3 for Q, K and V
  double second;             // rows of B per column of H
  double held;               // arrays like the tile of H that are on chip at the same time
  double inputs;             // times that X is fetched and held; 1 unless products do not share it
  double moved;              // further bytes of one group that are moved once
};

enum class Loops : std::int32_t { kRowsOuter = 0, kColumnsOuter = 1 };

// Bits of FusedTraffic::kept.
inline constexpr std::int32_t kKeepInput = 1;
inline constexpr std::int32_t kKeepOutput = 2;
inline constexpr std::int32_t kKeepFirst = 4;
inline constexpr std::int32_t kKeepSecond = 8;

struct FusedTraffic {
  double hbm_bytes;    // infinite if no tile fits
  std::int32_t loops;  // a Loops
  std::int32_t kept;
  std::int64_t row_passes;     // n_a
  std::int64_t column_passes;  // n_c
};

// Whether sizes, steps and factors are in range: positive, but `inner` or `outer` may be 0 (not
// both), and `moved` may be 0.
bool is_valid(const FusedGroup& group, const BufferRules& rules) noexcept;

// Least off-chip bytes of a valid group with a buffer of `capacity_bytes`.
FusedTraffic least_group_traffic(const FusedGroup& group, double capacity_bytes,
                                 const BufferRules& rules) noexcept;

// Least off-chip bytes of one product of m x k by k x n, alone: a tile of the output stays on chip,
// or a tile of an operand while partial sums are written and read again. Infinite if nothing fits.
double least_product_bytes(std::int64_t m, std::int64_t k, std::int64_t n, double capacity_bytes,
                           const BufferRules& rules) noexcept;

}  // namespace phaze
