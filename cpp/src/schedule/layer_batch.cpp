#include "phaze/layer_batch.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "base/numbers.hpp"
#include "phaze/layer_schedule.hpp"
#include "phaze/parallel.hpp"
#include "schedule/layer_facts.hpp"

namespace phaze {

// ---- the canonical form of a layer ----

// Operators sorted by depth, then by their own properties and those of their neighbours; latencies
// relative to the longest, rounded to 44 binary digits. Canonicalisation is idempotent.
struct CanonicalLayer {
  LayerProblem problem;
  std::int32_t order[kMaxLayerOps];  // position in the given layer of each operator
  double scale;                      // seconds per unit of the canonical form
};

// `problem` must have passed check_layer.
void canonical_layer(const LayerProblem& problem, CanonicalLayer* out) noexcept;

// The solution of a layer whose canonical form has the solution `canonical`: the same modes, and
// each operator starts when the operators that end before it in `canonical` have ended.
LayerSolution replay(const LayerProblem& problem, const CanonicalLayer& form,
                     const LayerSolution& canonical) noexcept;

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

// Operators by level, then by a hash of all predecessors and all successors. `part` are the scaled
// seconds of the modes.
void order_operators(const LayerProblem& problem, const double* part,
                     std::int32_t* order) noexcept {
  const int n = problem.size;
  std::int32_t level[kMaxLayerOps];
  std::uint64_t own[kMaxLayerOps];
  std::uint64_t down[kMaxLayerOps];  // an operator and all its predecessors
  std::uint64_t up[kMaxLayerOps];    // an operator and all its successors
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
  double end[kMaxLayerOps];  // in the canonical schedule
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

// ---- many layers ----

namespace {

// Cores occupied by a mode that requests `requested` cores of each type it needs; 0 = all.
Status take_cores(std::int32_t requested, std::uint8_t type, ScheduleRule rule,
                  const std::int32_t* capacity, LayerMode* mode) noexcept {
  if (requested < 0) return Status::kBadMode;
  for (int r = 0; r < kResources; ++r) {
    const bool needs = (type >> r & 1) != 0;
    if (needs && capacity[r] == 0) return Status::kBadMode;
    if (requested == 0) {
      mode->use[r] = needs || rule == ScheduleRule::kExclusive ? capacity[r] : 0;
    } else {
      mode->use[r] = needs ? std::min(requested, capacity[r]) : 0;
    }
  }
  return Status::kOk;
}

Status load_edge(std::int32_t from, std::int32_t to, LayerProblem* problem) noexcept {
  if (from < 0 || to >= problem->size || from >= to) return Status::kBadEdge;
  problem->before[to] |= OpBits{1} << from;
  return Status::kOk;
}

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
      const Status taken =
          take_cores(batch.mode_cores[m], batch.types[op], batch.rule, problem->capacity, &mode);
      if (taken != Status::kOk) return taken;
    }
  }
  problem->first_mode[problem->size] = modes;
  for (auto e = static_cast<std::size_t>(batch.edge_ptr[b]);
       e < static_cast<std::size_t>(batch.edge_ptr[b + 1]); ++e) {
    const Status placed = load_edge(batch.edge_from[e], batch.edge_to[e], problem);
    if (placed != Status::kOk) return placed;
  }
  return check_layer(*problem);
}

// Loads the data common to all chips.
Status load_graph(const GraphOnChips& given, LayerProblem* problem) noexcept {
  if (given.types.empty()) return Status::kBadShape;
  if (given.types.size() > kMaxLayerOps) return Status::kTooManyOps;
  problem->size = static_cast<std::int32_t>(given.types.size());
  std::fill(problem->before, problem->before + problem->size, OpBits{0});
  for (int i = 0; i <= problem->size; ++i) problem->first_mode[i] = 2 * i;
  for (std::size_t e = 0; e < given.edge_from.size(); ++e) {
    const Status placed = load_edge(given.edge_from[e], given.edge_to[e], problem);
    if (placed != Status::kOk) return placed;
  }
  return Status::kOk;
}

// Loads the data of one chip: cores and latencies. Modes are one core, then all.
Status load_chip(const GraphOnChips& given, std::size_t chip, LayerProblem* problem) noexcept {
  const std::size_t ops = given.types.size();
  for (int r = 0; r < kResources; ++r) {
    problem->capacity[r] = given.cores[chip * kResources + static_cast<std::size_t>(r)];
    if (problem->capacity[r] < 0) return Status::kBadChip;
  }
  for (std::size_t i = 0; i < ops; ++i) {
    for (std::size_t all = 0; all < 2; ++all) {
      LayerMode& mode = problem->modes[2 * i + all];
      mode.seconds = (all == 0 ? given.one_core_s : given.all_cores_s)[chip * ops + i];
      const Status taken =
          take_cores(all == 0 ? 1 : 0, given.types[i], given.rule, problem->capacity, &mode);
      if (taken != Status::kOk) return taken;
    }
  }
  return check_layer(*problem);
}

// For each chip the first one with the same latencies and cores.
std::vector<std::size_t> first_equal(const GraphOnChips& given, std::size_t chips) {
  const std::size_t ops = given.types.size();
  const auto compare = [&](std::size_t a, std::size_t b) {
    const int by_cores = std::memcmp(&given.cores[a * kResources], &given.cores[b * kResources],
                                     kResources * sizeof(std::int32_t));
    if (by_cores != 0 || ops == 0) return by_cores;
    const std::size_t bytes = ops * sizeof(double);
    const int by_all = std::memcmp(&given.all_cores_s[a * ops], &given.all_cores_s[b * ops], bytes);
    if (by_all != 0) return by_all;
    return std::memcmp(&given.one_core_s[a * ops], &given.one_core_s[b * ops], bytes);
  };
  std::vector<std::size_t> order(chips);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const int by = compare(a, b);
    return by != 0 ? by < 0 : a < b;
  });
  std::vector<std::size_t> first(chips);
  for (std::size_t k = 0; k < chips; ++k) {
    const bool same = k > 0 && compare(order[k - 1], order[k]) == 0;
    first[order[k]] = same ? first[order[k - 1]] : order[k];
  }
  return first;
}

// Writes the answer of layer b, whose operators are `first` up to `last`; `solution` is read only
// if there is one.
void write(std::size_t b, std::size_t first, std::size_t last, Status status,
           const LayerSolution& solution, const LayerAnswers& out) noexcept {
  const bool solved = status == Status::kOk;
  out.status[b] = static_cast<std::int32_t>(status);
  out.makespan_s[b] = solved ? solution.makespan_s : kNan;
  out.bound_s[b] = solved ? solution.bound_s : kNan;
  out.proved_by[b] = solved ? static_cast<std::int32_t>(solution.proved_by) : 0;
  out.nodes[b] = solved ? solution.nodes : 0;
  for (std::size_t i = first; i < last; ++i) {
    out.start_s[i] = solved ? solution.start_s[i - first] : kNan;
    out.mode[i] = solved ? solution.mode[i - first] : -1;
  }
}

// Solves a layer that was loaded with a status, in its canonical form.
Status solve(const LayerProblem& problem, Status loaded, const SearchLimits& limits, Terms terms,
             LayerSolution* out) {
  if (loaded != Status::kOk) return loaded;
  CanonicalLayer form;
  canonical_layer(problem, &form);
  SearchLimits scaled = limits;
  scaled.enough_s /= form.scale;
  const LayerSolution solution = solve_layer(form.problem, scaled);
  *out = terms == Terms::kGiven ? replay(problem, form, solution) : solution;
  return Status::kOk;
}

// Calls one(k) for every k below `count`. Some layers take a thousand times as long as others, so
// threads take the next few dynamically.
template <typename One>
void for_each_layer(std::size_t count, int threads, const One& one) {
  constexpr std::size_t kFew = 4;
  const std::size_t most = (count + kFew - 1) / kFew;
  const std::size_t workers = std::min(most, static_cast<std::size_t>(std::max(threads, 1)));
  std::atomic<std::size_t> next = 0;
  parallel_for(workers, static_cast<int>(workers), 1, [&](std::size_t, std::size_t) {
    for (std::size_t first = next.fetch_add(kFew); first < count; first = next.fetch_add(kFew)) {
      for (std::size_t k = first; k < std::min(count, first + kFew); ++k) one(k);
    }
  });
}

}  // namespace

void solve_layers(const LayerBatch& batch, const SearchLimits& limits, Terms terms,
                  const LayerAnswers& out, int threads) {
  for_each_layer(out.status.size(), threads, [&](std::size_t b) {
    SearchLimits own = limits;
    if (!batch.enough_s.empty()) own.enough_s = batch.enough_s[b];
    LayerProblem problem;
    LayerSolution solution;
    const Status status = solve(problem, load(batch, b, &problem), own, terms, &solution);
    write(b, static_cast<std::size_t>(batch.op_ptr[b]),
          static_cast<std::size_t>(batch.op_ptr[b + 1]), status, solution, out);
  });
}

Status solve_on_chip(const GraphOnChips& given, std::size_t chip, const SearchLimits& limits,
                     LayerSolution* out) {
  LayerProblem problem;
  Status status = load_graph(given, &problem);
  if (status == Status::kOk) status = load_chip(given, chip, &problem);
  return solve(problem, status, limits, Terms::kGiven, out);
}

void solve_on_chips(const GraphOnChips& given, const SearchLimits& limits, const LayerAnswers& out,
                    int threads) {
  const std::size_t chips = out.status.size();
  const std::size_t ops = given.types.size();
  const std::vector<std::size_t> first = first_equal(given, chips);
  std::vector<double> enough_s(given.enough_s.begin(), given.enough_s.end());
  std::vector<std::size_t> distinct;
  for (std::size_t chip = 0; chip < chips; ++chip) {
    if (first[chip] == chip) distinct.push_back(chip);
    if (!enough_s.empty()) enough_s[first[chip]] = std::max(enough_s[first[chip]], enough_s[chip]);
  }
  for_each_layer(distinct.size(), threads, [&](std::size_t k) {
    const std::size_t chip = distinct[k];
    SearchLimits own = limits;
    if (!enough_s.empty()) own.enough_s = enough_s[chip];
    LayerSolution solution;
    const Status status = solve_on_chip(given, chip, own, &solution);
    write(chip, chip * ops, (chip + 1) * ops, status, solution, out);
  });
  for (std::size_t chip = 0; chip < chips; ++chip) {
    const std::size_t same = first[chip];
    if (same == chip) continue;
    out.makespan_s[chip] = out.makespan_s[same];
    out.bound_s[chip] = out.bound_s[same];
    out.proved_by[chip] = out.proved_by[same];
    out.nodes[chip] = out.nodes[same];
    out.status[chip] = out.status[same];
    std::copy_n(&out.start_s[same * ops], ops, &out.start_s[chip * ops]);
    std::copy_n(&out.mode[same * ops], ops, &out.mode[chip * ops]);
  }
}

Status canonical_bytes(const LayerBatch& batch, std::size_t layer, std::vector<std::uint8_t>* out) {
  LayerProblem problem;
  CanonicalLayer form;
  const Status status = load(batch, layer, &problem);
  out->clear();
  if (status != Status::kOk) return status;
  canonical_layer(problem, &form);
  const auto append = [&](const auto* first, int count) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(first);
    out->insert(out->end(), bytes, bytes + sizeof(*first) * static_cast<std::size_t>(count));
  };
  const LayerProblem& p = form.problem;
  append(&p.size, 1);
  append(p.capacity, kResources);
  for (int i = 0; i < p.size; ++i) {  // up to 64 operators have one word each, as in stored keys
    const std::uint64_t halves[] = {low_bits(p.before[i]), high_bits(p.before[i])};
    append(halves, p.size > 64 ? 2 : 1);
  }
  append(p.first_mode, p.size + 1);
  for (int m = 0; m < p.first_mode[p.size]; ++m) {
    append(&p.modes[m].seconds, 1);
    append(p.modes[m].use, kResources);
  }
  return Status::kOk;
}

void replay_layers(const LayerBatch& batch, const LayerAnswers& answers) {
  LayerProblem problem;
  CanonicalLayer form;
  LayerSolution known;
  known.bound_s = 0.0;
  known.nodes = 0;
  known.proved_by = ProvedBy::kNothing;
  for (std::size_t b = 0; b < answers.status.size(); ++b) {
    const auto first = static_cast<std::size_t>(batch.op_ptr[b]);
    const auto last = static_cast<std::size_t>(batch.op_ptr[b + 1]);
    Status status = load(batch, b, &problem);
    if (status == Status::kOk) {
      canonical_layer(problem, &form);
      for (int k = 0; k < problem.size; ++k) {
        const LayerProblem& p = form.problem;
        known.start_s[k] = answers.start_s[first + static_cast<std::size_t>(k)];
        known.mode[k] = answers.mode[first + static_cast<std::size_t>(k)];
        const bool good = known.mode[k] >= 0 &&
                          known.mode[k] < p.first_mode[k + 1] - p.first_mode[k] &&
                          std::isfinite(known.start_s[k]) && known.start_s[k] >= 0.0;
        if (!good) status = Status::kBadMode;
      }
    }
    const bool good = status == Status::kOk;
    write(b, first, last, status, good ? replay(problem, form, known) : known, answers);
  }
}

}  // namespace phaze
