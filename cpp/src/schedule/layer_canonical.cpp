#include "phaze/layer_canonical.hpp"

#include <algorithm>
#include <bit>

#include "schedule/layer_facts.hpp"

namespace phaze {
namespace {

std::uint64_t mixed(std::uint64_t h) noexcept {
  h ^= h >> 30;
  h *= 0xBF58476D1CE4E5B9ULL;
  h ^= h >> 27;
  h *= 0x94D049BB133111EBULL;
  return h ^ (h >> 31);
}

// The nearest number with 44 binary digits.
double rounded(double value) noexcept {
  const double high = value * 513.0;
  return high - (high - value);
}

// Operators by level, then by a hash of all they wait for and all that wait for them. `part` are
// the seconds of the modes.
void order_operators(const LayerProblem& problem, const double* part,
                     std::int32_t* order) noexcept {
  const int n = problem.size;
  std::int32_t level[kMaxLayerOps];
  std::uint64_t own[kMaxLayerOps];
  std::uint64_t down[kMaxLayerOps];  // an operator and all it waits for
  std::uint64_t up[kMaxLayerOps];    // an operator and all that wait for it
  for (int i = 0; i < n; ++i) {
    std::uint64_t h = 0;
    for (int m = problem.first_mode[i]; m < problem.first_mode[i + 1]; ++m) {
      h = mixed(h ^ std::bit_cast<std::uint64_t>(part[m]));
      for (const std::int32_t use : problem.modes[m].use) {
        h = h * 0x9E3779B97F4A7C15ULL + static_cast<std::uint32_t>(use);
      }
    }
    own[i] = mixed(h);
    level[i] = 0;
    std::uint64_t sum = 0;
    for_ops(problem.before[i], [&](int b) {
      level[i] = std::max(level[i], level[b] + 1);
      sum += down[b];
    });
    down[i] = mixed(own[i] + 3 * sum);
    up[i] = 0;
  }
  for (int i = n - 1; i >= 0; --i) {
    up[i] = mixed(own[i] + 5 * up[i]);
    for_ops(problem.before[i], [&](int b) { up[b] += up[i]; });
  }
  for (int i = 0; i < n; ++i) own[i] = mixed(down[i] + 7 * up[i]);
  for (int i = 0; i < n; ++i) {
    int at = i;
    const auto later = [&](int other) {
      return level[other] != level[i] ? level[other] > level[i] : own[other] > own[i];
    };
    for (; at > 0 && later(order[at - 1]); --at) order[at] = order[at - 1];
    order[at] = i;
  }
}

}  // namespace

void canonical_layer(const LayerProblem& problem, CanonicalLayer* out) noexcept {
  const int n = problem.size;
  const int modes = problem.first_mode[n];
  double most = 0.0;
  for (int m = 0; m < modes; ++m) most = std::max(most, problem.modes[m].seconds);
  out->scale = most > 0.0 ? most : 1.0;
  double part[kMaxLayerOps * kMaxModes];
  for (int m = 0; m < modes; ++m) part[m] = rounded(problem.modes[m].seconds / out->scale);
  order_operators(problem, part, out->order);

  std::int32_t place[kMaxLayerOps];
  for (int k = 0; k < n; ++k) place[out->order[k]] = k;
  LayerProblem& form = out->problem;
  form.size = n;
  std::copy(problem.capacity, problem.capacity + kResources, form.capacity);
  int next = 0;
  for (int k = 0; k < n; ++k) {
    const int i = out->order[k];
    form.before[k] = 0;
    for_ops(problem.before[i], [&](int b) { form.before[k] |= op_bit(place[b]); });
    form.first_mode[k] = next;
    for (int m = problem.first_mode[i]; m < problem.first_mode[i + 1]; ++m) {
      form.modes[next] = problem.modes[m];
      form.modes[next++].seconds = part[m];
    }
  }
  form.first_mode[n] = next;
}

LayerSolution replay(const LayerProblem& problem, const CanonicalLayer& form,
                     const LayerSolution& canonical) noexcept {
  const int n = problem.size;
  LayerSolution own;
  own.proved_by = canonical.proved_by;
  own.nodes = canonical.nodes;
  own.makespan_s = 0.0;
  double end[kMaxLayerOps];  // canonical
  std::int32_t in_time[kMaxLayerOps];
  for (int k = 0; k < n; ++k) {
    const LayerProblem& p = form.problem;
    end[k] = canonical.start_s[k] + p.modes[p.first_mode[k] + canonical.mode[k]].seconds;
    int at = k;
    for (; at > 0 && canonical.start_s[in_time[at - 1]] > canonical.start_s[k]; --at) {
      in_time[at] = in_time[at - 1];
    }
    in_time[at] = k;
  }
  double end_s[kMaxLayerOps];
  for (int t = 0; t < n; ++t) {
    const int k = in_time[t];
    const int i = form.order[k];
    double start_s = 0.0;
    for (int earlier = 0; earlier < t; ++earlier) {
      const int j = in_time[earlier];
      if (end[j] <= canonical.start_s[k]) start_s = std::max(start_s, end_s[j]);
    }
    own.start_s[i] = start_s;
    own.mode[i] = canonical.mode[k];
    end_s[k] = start_s + problem.modes[problem.first_mode[i] + canonical.mode[k]].seconds;
    own.makespan_s = std::max(own.makespan_s, end_s[k]);
  }
  own.bound_s = own.proved_by != ProvedBy::kNothing
                    ? own.makespan_s
                    : std::min(own.makespan_s, canonical.bound_s * form.scale * kRoundedDown);
  return own;
}

}  // namespace phaze
