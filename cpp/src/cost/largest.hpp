// The largest of several times of an operator, and the resource it belongs to.
#pragma once

#include "phaze/gemm.hpp"

namespace phaze {

// Ties go to the time that was considered first.
struct Largest {
  double seconds;
  Limit limit;

  void consider(double other_s, Limit which) noexcept {
    if (!(other_s > seconds)) return;
    seconds = other_s;
    limit = which;
  }
};

}  // namespace phaze
