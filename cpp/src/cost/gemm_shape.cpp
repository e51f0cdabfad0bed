#include <algorithm>
#include <initializer_list>

#include "base/numbers.hpp"
#include "phaze/gemm.hpp"

namespace phaze {
namespace {

constexpr std::int64_t kMaxDimension = std::int64_t{1} << 40;

bool multiply(std::int64_t a, std::int64_t b, std::int64_t* out) noexcept {
  return !__builtin_mul_overflow(a, b, out);
}

bool add(std::int64_t a, std::int64_t b, std::int64_t* out) noexcept {
  return !__builtin_add_overflow(a, b, out);
}

}  // namespace

std::int64_t array_cycles(std::int64_t m, std::int64_t k, std::int64_t n, std::int64_t rows,
                          std::int64_t cols, Dataflow dataflow, bool overlapped,
                          Status* status) noexcept {
  *status = Status::kBadShape;
  for (const std::int64_t size : {m, k, n, rows, cols}) {
    if (size < 1) return -1;
  }
  *status = Status::kTooLarge;
  for (const std::int64_t size : {m, k, n, rows, cols}) {
    if (size > kMaxDimension) return -1;
  }
  const bool output = dataflow == Dataflow::kOutput;
  const std::int64_t down = ceil_div(output ? m : k, rows);
  const std::int64_t across = ceil_div(dataflow == Dataflow::kInput ? m : n, cols);
  const std::int64_t stream = output ? k : (dataflow == Dataflow::kWeight ? m : n);
  const std::int64_t fill = output ? rows + cols - 2 : 2 * rows + cols - 2;
  std::int64_t folds = 0;
  std::int64_t cycles = 0;
  if (!multiply(down, across, &folds)) return -1;
  if (overlapped) {
    if (!multiply(folds - 1, std::max(stream, rows), &cycles)) return -1;
    if (!add(cycles, stream + fill, &cycles)) return -1;
  } else if (!multiply(folds, stream + fill, &cycles)) {
    return -1;
  }
  *status = Status::kOk;
  return cycles;
}

Status check_shape(const GemmShape& g) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t size : {g.b, g.m, g.k, g.n}) {
    if (size < 1) return Status::kBadShape;
  }
  for (const std::int64_t size : {g.b, g.m, g.k, g.n}) {
    if (size > kMaxDimension || !multiply(product, size, &product)) return Status::kTooLarge;
  }
  return product > (std::int64_t{1} << 62) ? Status::kTooLarge : Status::kOk;
}

}  // namespace phaze
