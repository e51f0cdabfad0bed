
#include "plan/plan_sums.hpp"

#include <algorithm>

#include "plan/pipeline_clock.hpp"

namespace phaze {

void PassSums::build(const PlanSpaceImpl& space, const PricedLayout& layout,
                     const LayoutCosts& costs, const KindTimes& times) {
  const int zero = layout.record.zero;
  const double contention = space.training.contention;
  const auto layers = at(space.layers);
  const auto kinds = at(space.kinds);
  first_block_ = space.first_block;
  variants_ = space.strategies[at(layout.record.strategy)].variants;
  before_.resize(layers + 1);
  backward_.resize(at(variants_) * (layers + 1));
  // Exchanges overlap passes: weights are prefetched while the previous layer runs; sharded
  // gradients are exchanged with every micro-batch.
  const auto seconds = [&](std::size_t timed, std::size_t kind) {
    Seconds own{times.forward_s[timed], times.plain_s[timed], times.weight_grad_s[timed], 0.0};
    if (zero >= 3) own.forward = overlapped_s(own.forward, costs.fetch_s[kind], contention);
    if (zero >= 2) {
      own.plain = overlapped_s(own.plain, costs.fetch_s[kind] + costs.each_s[kind], contention);
    }
    return own;
  };
  const auto backward_s = [&](std::size_t v, std::size_t timed, std::size_t kind) {
    const double own_s = times.backward_s[v * kinds + timed];
    if (zero < 2) return own_s;
    return overlapped_s(own_s, costs.fetch_s[kind] + costs.each_s[kind], contention);
  };
  // The last layer may have the costs of another kind than its times, see kind_at().
  const std::size_t last = at(space.kind_at(space.layers - 1, layout.record.pp));
  const std::int32_t* const order = space.order.data();
  by_kind_.resize(kinds + 1);
  for (std::size_t k = 0; k < kinds; ++k) by_kind_[k] = seconds(k, k);
  by_kind_[kinds] = seconds(at(order[layers - 1]), last);
  Seconds sum = before_[0] = {};
  const auto add = [&](std::size_t n, const Seconds& own) {
    sum.forward += own.forward;
    sum.plain += own.plain;
    sum.weight_grad += own.weight_grad;
    before_[n + 1] = sum;
  };
  for (std::size_t n = 0; n + 1 < layers; ++n) add(n, by_kind_[at(order[n])]);
  add(layers - 1, by_kind_[kinds]);
  for (std::size_t v = 0; v < at(variants_); ++v) {
    double* const backward = &backward_[v * (layers + 1)];
    for (std::size_t k = 0; k < kinds; ++k) by_kind_[k].unused = backward_s(v, k, k);
    double total_s = backward[0] = 0.0;
    for (std::size_t n = 0; n + 1 < layers; ++n) {
      backward[n + 1] = total_s += by_kind_[at(order[n])].unused;
    }
    backward[layers] = total_s + backward_s(v, at(order[layers - 1]), last);
  }
}

void PlanSums::build(const PlanSpaceImpl& space, const PricedLayout& layout,
                     const LayoutCosts& costs, const KindTimes& times) {
  const bool alone = layout.record.pp == 1;
  const bool same_costs = costs_ == &costs && alone_ == alone;
  const bool same_sizes = costs_ != nullptr && space_ == &space && alone_ == alone &&
                          layout_->record.strategy == layout.record.strategy;
  const bool same_times = same_sizes && times_ == times.forward_s;
  const bool exchanges = layout.record.zero >= 2;  // during the passes
  const bool same_passes = same_times && (same_costs || !(exchanges || layout_->record.zero >= 2));
  const bool same_stages = same_sizes && same_shape(layout_->record, layout.record);
  space_ = &space;
  layout_ = &layout;
  buffers_ = space.buffer_bytes(layout);
  if (!same_stages) add_in_flight();
  if (same_costs && same_times) return;
  costs_ = &costs;
  times_ = times.forward_s;
  alone_ = alone;
  layers_ = space.layers;
  lost_ = 1.0 + space.training.fragmentation;
  if (!same_passes) {
    PassSums::build(space, layout, costs, times);
    worked_ = false;
  }
  if (!same_times) find_fastest(times);
  if (!same_sizes) add_bytes();
  add_costs(times);
  add_kinds(same_sizes);
}

void PlanSums::find_fastest(const KindTimes& times) {
  first_is_fastest_ = true;
  for (int k = 0; k < space_->kinds; ++k) {
    for (int v = 1; v < variants(); ++v) {
      first_is_fastest_ =
          first_is_fastest_ &&
          times.backward_s[at(v) * at(space_->kinds) + at(k)] >= times.backward_s[k];
    }
  }
}

// Sums of the exchanges and the optimiser after the last pass, and of the bytes of state.
void PlanSums::add_costs(const KindTimes& times) {
  const std::size_t width = at(layers_) + 1;
  after_.resize(width);
  resident_.resize(width);
  late_.resize(width);
  const auto after = [&](std::size_t timed, std::size_t kind) {
    double own_s = costs_->step_bytes[kind] / times.hbm_bytes_per_s;
    if (times.step_s != nullptr) own_s += times.step_s[timed] * costs_->step_share[kind];
    return After{costs_->sync_s[kind], own_s + costs_->shared_s[kind]};
  };
  const std::size_t last = at(layers_) - 1;
  const std::size_t last_kind = at(space_->kind_at(layers_ - 1, layout_->record.pp));
  by_kind_.clear();
  for (std::size_t k = 0; k < at(space_->kinds); ++k) by_kind_.push_back(after(k, k));
  by_kind_.push_back(after(at(space_->order[last]), last_kind));
  After sum = after_[0] = {};
  double resident = resident_[0] = 0.0;
  double late = late_[0] = 0.0;
  for (std::size_t i = 0; i <= last; ++i) {
    const std::size_t kind = at(space_->order[i]);
    const After& own = by_kind_[i == last ? at(space_->kinds) : kind];
    sum.sync += own.sync;
    sum.step += own.step;
    after_[i + 1] = sum;
    resident_[i + 1] = resident += costs_->resident_bytes[i == last ? last_kind : kind];
    late_[i + 1] = late += costs_->late_bytes[i == last ? last_kind : kind];
  }
}

// Sums of both passes, the backward pass of each layer in its fastest variant.
void PlanSums::find_work() {
  if (worked_) return;
  work_.resize(at(layers_) + 1);
  work_[0] = 0.0;
  for (int i = 0; i < layers_; ++i) {
    work_[at(i) + 1] = work_[at(i)] + (forward_s(i, i + 1) + least_backward_s(i));
  }
  worked_ = true;
}

// Sums of activation bytes, which depend on the strategy alone and not on ZeRO or replicas.
void PlanSums::add_bytes() {
  const int strategy = layout_->record.strategy;
  const std::size_t width = at(layers_) + 1;
  stash_.resize(at(variants()) * width);
  once_.resize(width);
  once_[0] = 0.0;
  for (int i = 0; i < layers_; ++i) {
    const int kind = space_->kind_at(i, layout_->record.pp);
    once_[at(i) + 1] = once_[at(i)] + space_->size_of(strategy, kind).once_bytes;
  }
  for (int v = 0; v < variants(); ++v) {
    double* stash = &stash_[at(v) * width];
    stash[0] = 0.0;
    for (int i = 0; i < layers_; ++i) {
      const int kind = space_->kind_at(i, layout_->record.pp);
      stash[i + 1] = stash[i] + space_->size_of(strategy, kind).stash_bytes[v];
    }
  }
}

void PlanSums::add_in_flight() {
  const LayoutRecord& l = layout_->record;
  in_flight_.resize(at(l.pp));
  for (int stage = 0; stage < l.pp; ++stage) {
    in_flight_[at(stage)] = micro_batches_in_flight(static_cast<PipelineSchedule>(l.schedule), l.pp,
                                                    stage, l.micro_batches, l.vpp);
  }
}

void PlanSums::add_kinds(bool same_sizes) {
  const std::size_t width = at(layers_) + 1;
  const int strategy = layout_->record.strategy;
  std::size_t count = 0;
  bool same = same_sizes;
  for (int kind = 0; kind <= space_->kinds; ++kind) {
    const LayerKindRecord& size = space_->size_of(strategy, kind);
    bool holds = costs_->gather_bytes[at(kind)] > 0.0;
    for (int v = 0; v < variants(); ++v) holds = holds || size.live_bytes[v] > 0.0;
    if (!holds) continue;
    same = same && count < live_kinds_.size() && live_kinds_[count] == kind;
    if (live_kinds_.size() <= count) live_kinds_.push_back(kind);
    live_kinds_[count++] = kind;
  }
  same = same && count == live_kinds_.size();
  live_kinds_.resize(count);
  if (same) return;
  kind_count_.resize(live_kinds_.size() * width);
  for (std::size_t k = 0; k < live_kinds_.size(); ++k) {
    std::int32_t* own = &kind_count_[k * width];
    own[0] = 0;
    for (int i = 0; i < layers_; ++i) {
      own[i + 1] = own[i] + (space_->kind_at(i, layout_->record.pp) == live_kinds_[k]);
    }
  }
}

double PlanSums::live_of(int v, int i, int j) const noexcept {
  double live = 0.0;
  for (std::size_t k = 0; k < live_kinds_.size(); ++k) {
    const std::int32_t* count = &kind_count_[k * (at(layers_) + 1)];
    if (count[j] == count[i]) continue;
    live = std::max(live, space_->size_of(layout_->record.strategy, live_kinds_[k]).live_bytes[v]);
  }
  return live;
}

void find_layer_peak(const PlanSpaceImpl& space, const LayoutRecord& layout,
                     const LayoutCosts& costs, StageRecompute r, std::array<int, 3> i_border_j,
                     bool late, MovingBytes* moving) noexcept {
  const auto [i, border, j] = i_border_j;
  if (space.size_of(layout.strategy, 0).layer_peaks == 0 || i == j) return;
  double freed = 0.0;
  double later = 0.0;
  double most = -kInfinite;
  for (int p = j - 1; p >= i; --p) {
    const int kind = space.kind_at(p, layout.pp);
    const int v = p < border ? r.more : r.rest;
    const LayerKindRecord& size = space.size_of(layout.strategy, kind);
    const double peak = size.live_bytes[v] - freed + (late ? later : 0.0);
    if (peak > most) {
      most = peak;
      moving->live = size.live_bytes[v];
      moving->freed = freed;
      moving->later = later;
    }
    freed += size.stash_bytes[v];
    later += costs.late_bytes[at(kind)];
  }
  moving->by_layer = true;
}

double PlanSums::gather_bytes(int i, int j) const noexcept {
  double gather = 0.0;
  for (std::size_t k = 0; k < live_kinds_.size(); ++k) {
    const std::int32_t* count = &kind_count_[k * (at(layers_) + 1)];
    if (count[j] > count[i]) gather = std::max(gather, costs_->gather_bytes[at(live_kinds_[k])]);
  }
  return gather;
}

double PlanSums::bytes(StageRecompute r, int i, int j, int stage) const noexcept {
  MovingBytes moving{stash_bytes(r, i, j), live_bytes(r, i, j), once_bytes(i, j),
                     buffers_ + gather_bytes(i, j)};
  const bool late = !(static_cast<double>(layout_->record.micro_batches) > in_flight(stage));
  find_layer_peak(*space_, layout_->record, *costs_, r, {i, border_of(r, i, j), j}, late, &moving);
  return resident_bytes(i, j) + peak(moving, late_gradients(r, i, j), stage).total;
}

LateGradients PlanSums::late_gradients(StageRecompute r, int i, int j) const noexcept {
  const int first = std::min(std::max(i, space_->first_block) + 1, j);
  return {part(late_, 0, i, j), part(late_, 0, std::min(std::max(i, space_->last_block), j), j),
          part(late_, 0, i, first), first_stash(r, i, j, first)};
}

double PlanSums::first_stash(StageRecompute r, int i, int j, int first) const noexcept {
  const int border = std::min(border_of(r, i, j), first);
  return part(stash_, r.more, i, border) + part(stash_, r.rest, border, first);
}

PeakBytes PlanSums::peak(const MovingBytes& moving, const LateGradients& late,
                         int stage) const noexcept {
  return peak_bytes(moving, late, in_flight_[at(stage)],
                    static_cast<double>(layout_->record.micro_batches), lost_ - 1.0);
}

StagePass PlanSums::pass(StageRecompute r, int i, int j, int stage) const noexcept {
  const std::size_t k = at(stage);
  const double in_s = stage > 0 ? space_->enters(i, j) * layout_->message_s[k] : 0.0;
  const double out_s =
      stage + 1 < layout_->record.pp ? space_->leaves(i, j) * layout_->message_s[k + 1] : 0.0;
  return {in_s + forward_s(i, j), out_s + backward_s(r, i, j), weight_grad_s(i, j),
          tail_after(sync_s(i, j), plain_s(i, j), costs_->bucket_s, step_s(i, j), plain_s(0, i),
                     space_->training.contention)};
}

}  // namespace phaze
