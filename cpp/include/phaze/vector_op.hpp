// Latency of everything that is not a plain matrix product: element-wise and row-wise operators on
// the vector units, and fused attention on both. Formulas: docs/cost.md.
//
// All functions are pure, never throw, allocate nothing, and may run from any thread.
#pragma once

#include "phaze/gemm.hpp"
#include "phaze/types.hpp"

namespace phaze {

// One operator on rows of `cols` elements, its bytes counted once each.
struct VectorShape {
  double rows;
  double cols;
  double bytes;            // read and written
  double written;          // part of `bytes` that is written
  double hbm_share = 1.0;  // share of `bytes` that is not kept on chip
};

CostRecord vector_op(const VectorShape& shape, const VectorCost& cost,
                     const Machine& machine) noexcept;
double vector_bound(const VectorShape& shape, const VectorCost& cost,
                    const Machine& machine) noexcept;

// Fused attention: `pairs` of sequence and head, each with queries x keys scores of `width`
// products.
struct AttentionShape {
  std::int64_t pairs;
  std::int64_t queries;
  std::int64_t keys;
  std::int64_t width;
  double bytes;    // read and written
  double written;  // part of `bytes` that is written
  bool causal;
  bool backward;
};

// `vector_per_core` is the number of vector units per tensor core.
CostRecord attention(const AttentionShape& shape, const Machine& machine,
                     double vector_per_core) noexcept;
double attention_bound(const AttentionShape& shape, const Machine& machine,
                       double vector_per_core) noexcept;

}  // namespace phaze
