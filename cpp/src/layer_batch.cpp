#include "phaze/layer_batch.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "phaze/parallel.hpp"

namespace phaze {
namespace {

Status load(const LayerBatch& batch, std::size_t b, LayerProblem* problem) noexcept {
  const std::int64_t first = batch.op_ptr[b];
  const std::int64_t size = batch.op_ptr[b + 1] - first;
  if (size < 1) return Status::kBadShape;
  if (size > kMaxLayerOps) return Status::kTooManyOps;
  problem->size = static_cast<std::int32_t>(size);
  for (int r = 0; r < kResources; ++r) {
    problem->capacity[r] = batch.cores[b * kResources + static_cast<std::size_t>(r)];
    if (problem->capacity[r] < 0) return Status::kBadChip;
  }
  int modes = 0;
  for (int i = 0; i < problem->size; ++i) {
    const auto op = static_cast<std::size_t>(first + i);
    problem->before[i] = 0;
    problem->first_mode[i] = modes;
    if (batch.mode_ptr[op + 1] - batch.mode_ptr[op] > kMaxModes) return Status::kBadMode;
    for (auto m = static_cast<std::size_t>(batch.mode_ptr[op]);
         m < static_cast<std::size_t>(batch.mode_ptr[op + 1]); ++m) {
      LayerMode& mode = problem->modes[modes++];
      mode.seconds = batch.mode_s[m];
      const std::int32_t asked = batch.mode_cores[m];
      if (asked < 0) return Status::kBadMode;
      for (int r = 0; r < kResources; ++r) {
        const std::int32_t capacity = problem->capacity[r];
        const bool needs = (batch.types[op] >> r & 1) != 0;
        if (needs && capacity == 0) return Status::kBadMode;
        if (asked == 0) {
          mode.use[r] = needs || batch.rule == ScheduleRule::kExclusive ? capacity : 0;
        } else {
          mode.use[r] = needs ? std::min(asked, capacity) : 0;
        }
      }
    }
  }
  problem->first_mode[problem->size] = modes;
  for (auto e = static_cast<std::size_t>(batch.edge_ptr[b]);
       e < static_cast<std::size_t>(batch.edge_ptr[b + 1]); ++e) {
    const std::int32_t from = batch.edge_from[e];
    const std::int32_t to = batch.edge_to[e];
    if (from < 0 || to >= problem->size || from >= to) return Status::kBadEdge;
    problem->before[to] |= OpBits{1} << from;
  }
  return check_layer(*problem);
}

}  // namespace

void solve_layers(const LayerBatch& batch, const SearchLimits& limits, const LayerAnswers& out,
                  int threads) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  parallel_for(out.status.size(), threads, 16, [&](std::size_t begin, std::size_t end) {
    const auto problem = std::make_unique<LayerProblem>();
    for (std::size_t b = begin; b < end; ++b) {
      const auto first = static_cast<std::size_t>(batch.op_ptr[b]);
      const auto last = static_cast<std::size_t>(batch.op_ptr[b + 1]);
      const Status status = load(batch, b, problem.get());
      out.status[b] = static_cast<std::int32_t>(status);
      if (status != Status::kOk) {
        out.makespan_s[b] = out.bound_s[b] = nan;
        out.proved_by[b] = 0;
        out.nodes[b] = 0;
        for (std::size_t i = first; i < last; ++i) {
          out.start_s[i] = nan;
          out.mode[i] = -1;
        }
        continue;
      }
      const LayerSolution found = solve_layer(*problem, limits);
      out.makespan_s[b] = found.makespan_s;
      out.bound_s[b] = found.bound_s;
      out.proved_by[b] = static_cast<std::int32_t>(found.proved_by);
      out.nodes[b] = found.nodes;
      for (std::size_t i = first; i < last; ++i) {
        out.start_s[i] = found.start_s[i - first];
        out.mode[i] = found.mode[i - first];
      }
    }
  });
}

}  // namespace phaze
