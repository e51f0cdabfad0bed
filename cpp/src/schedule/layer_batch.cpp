#include "phaze/layer_batch.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "phaze/layer_canonical.hpp"
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

void write(const LayerBatch& batch, std::size_t b, const LayerSolution& found,
           const LayerAnswers& out) noexcept {
  const auto first = static_cast<std::size_t>(batch.op_ptr[b]);
  const auto last = static_cast<std::size_t>(batch.op_ptr[b + 1]);
  out.makespan_s[b] = found.makespan_s;
  out.bound_s[b] = found.bound_s;
  out.proved_by[b] = static_cast<std::int32_t>(found.proved_by);
  out.nodes[b] = found.nodes;
  for (std::size_t i = first; i < last; ++i) {
    out.start_s[i] = found.start_s[i - first];
    out.mode[i] = found.mode[i - first];
  }
}

// What stands where there is no answer.
void refuse(const LayerBatch& batch, std::size_t b, const LayerAnswers& out) noexcept {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  out.makespan_s[b] = out.bound_s[b] = nan;
  out.proved_by[b] = 0;
  out.nodes[b] = 0;
  for (auto i = static_cast<std::size_t>(batch.op_ptr[b]);
       i < static_cast<std::size_t>(batch.op_ptr[b + 1]); ++i) {
    out.start_s[i] = nan;
    out.mode[i] = -1;
  }
}

struct Scratch {
  LayerProblem* problem;
  CanonicalLayer* form;
};

void solve(const LayerBatch& batch, std::size_t b, SearchLimits limits, Terms terms,
           const Scratch& scratch, const LayerAnswers& out) {
  const Status status = load(batch, b, scratch.problem);
  out.status[b] = static_cast<std::int32_t>(status);
  if (status != Status::kOk) {
    refuse(batch, b, out);
    return;
  }
  canonical_layer(*scratch.problem, scratch.form);
  if (!batch.enough_s.empty()) limits.enough_s = batch.enough_s[b] / scratch.form->scale;
  const LayerSolution found = solve_layer(scratch.form->problem, limits);
  const bool own = terms == Terms::kGiven;
  write(batch, b, own ? replay(*scratch.problem, *scratch.form, found) : found, out);
}

}  // namespace

void solve_layers(const LayerBatch& batch, const SearchLimits& limits, Terms terms,
                  const LayerAnswers& out, int threads) {
  // Some layers take a thousand times as long as others: each thread takes the next few.
  constexpr std::size_t kFew = 4;
  const std::size_t count = out.status.size();
  const std::size_t most = (count + kFew - 1) / kFew;
  const std::size_t workers = std::min(most, static_cast<std::size_t>(std::max(threads, 1)));
  std::atomic<std::size_t> next = 0;
  parallel_for(workers, static_cast<int>(workers), 1, [&](std::size_t, std::size_t) {
    const auto problem = std::make_unique<LayerProblem>();
    const auto form = std::make_unique<CanonicalLayer>();
    for (std::size_t first = next.fetch_add(kFew); first < count; first = next.fetch_add(kFew)) {
      for (std::size_t b = first; b < std::min(count, first + kFew); ++b) {
        solve(batch, b, limits, terms, {problem.get(), form.get()}, out);
      }
    }
  });
}

Status canonical_bytes(const LayerBatch& batch, std::size_t layer, std::vector<std::uint8_t>* out) {
  const auto problem = std::make_unique<LayerProblem>();
  const auto form = std::make_unique<CanonicalLayer>();
  const Status status = load(batch, layer, problem.get());
  out->clear();
  if (status != Status::kOk) return status;
  canonical_layer(*problem, form.get());
  const auto append = [&](const auto* first, int count) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(first);
    out->insert(out->end(), bytes, bytes + sizeof(*first) * static_cast<std::size_t>(count));
  };
  const LayerProblem& p = form->problem;
  append(&p.size, 1);
  append(p.capacity, kResources);
  append(p.before, p.size);
  append(p.first_mode, p.size + 1);
  for (int m = 0; m < p.first_mode[p.size]; ++m) {
    append(&p.modes[m].seconds, 1);
    append(p.modes[m].use, kResources);
  }
  return Status::kOk;
}

void replay_layers(const LayerBatch& batch, const LayerAnswers& answers) {
  const auto problem = std::make_unique<LayerProblem>();
  const auto form = std::make_unique<CanonicalLayer>();
  for (std::size_t b = 0; b < answers.status.size(); ++b) {
    const auto first = static_cast<std::size_t>(batch.op_ptr[b]);
    Status status = load(batch, b, problem.get());
    if (status == Status::kOk) {
      canonical_layer(*problem, form.get());
      LayerSolution known;
      known.bound_s = 0.0;
      known.nodes = 0;
      known.proved_by = ProvedBy::kNothing;
      for (int k = 0; k < problem->size; ++k) {
        const LayerProblem& p = form->problem;
        known.start_s[k] = answers.start_s[first + static_cast<std::size_t>(k)];
        known.mode[k] = answers.mode[first + static_cast<std::size_t>(k)];
        const bool good = known.mode[k] >= 0 &&
                          known.mode[k] < p.first_mode[k + 1] - p.first_mode[k] &&
                          std::isfinite(known.start_s[k]) && known.start_s[k] >= 0.0;
        if (!good) status = Status::kBadMode;
      }
      if (status == Status::kOk) write(batch, b, replay(*problem, *form, known), answers);
    }
    answers.status[b] = static_cast<std::int32_t>(status);
    if (status != Status::kOk) refuse(batch, b, answers);
  }
}

}  // namespace phaze
