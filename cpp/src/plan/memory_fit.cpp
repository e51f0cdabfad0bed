// Which layouts have a partition that fits, before anything is priced.
#include <algorithm>
#include <vector>

#include "base/numbers.hpp"
#include "plan/memory_rule.hpp"

namespace phaze {
namespace {

// Whether devices hold the same share of each layer's state in two layouts.
bool same_shares(const LayoutRecord& a, const LayoutRecord& b) noexcept {
  return a.strategy == b.strategy && a.dp == b.dp && a.zero == b.zero && a.shard == b.shard;
}

// Whether two consecutive 1F1B layouts differ only in the number of stages.
bool differ_in_stages(const LayoutRecord& before, const LayoutRecord& layout) noexcept {
  constexpr auto k1f1b = static_cast<std::int32_t>(PipelineSchedule::kOneForwardOneBackward);
  return layout.schedule == k1f1b && before.schedule == k1f1b && same_shares(before, layout) &&
         1 < before.pp && before.pp <= layout.pp;
}

// Packs the layers of one layout after another into stages of limited memory.
class StagePacker {
 public:
  StagePacker(const FitProblem& problem, double limit)
      : training_(problem.training),
        sizes_(problem.sizes),
        order_(problem.order.begin(), problem.order.end()),
        last_kind_(problem.order.back()),
        bytes_(problem.sizes.size() / problem.strategies.size()),
        counts_(bytes_.size(), 0),
        begins_(order_.size() + 2, 0),
        lost_(1.0 + problem.training.fragmentation),
        limit_(limit * kFits) {
    for (const std::int32_t kind : order_) ++counts_[at(kind)];
  }

  // `before` is the layout of the last call, if there was one.
  bool fits(const LayoutRecord& layout, const LayoutRecord* before,
            const StrategyRecord& strategy) {
    layout_ = &layout;
    own_ = &sizes_[at(layout.strategy) * bytes_.size()];
    variants_ = strategy.variants;
    buffers_ = training_.workspace_bytes + strategy.gathered_bytes;
    if (layout.pp > 1) buffers_ += 2.0 * strategy.message_bytes;
    if (before == nullptr || !differ_in_stages(*before, layout)) {
      if (before == nullptr || !same_shares(*before, layout)) find_bytes(strategy);
      order_.back() = layout.pp > 1 ? static_cast<std::int32_t>(bytes_.size()) - 1 : last_kind_;
      packed_ = 0;
      begins_[0] = static_cast<int>(order_.size());
    }
    const auto schedule = static_cast<PipelineSchedule>(layout.schedule);
    const bool in_order =
        schedule == PipelineSchedule::kOneForwardOneBackward ||
        (schedule == PipelineSchedule::kZeroBubbleH1 && layout.micro_batches >= layout.pp);
    if (layout.pp > 1 && !in_order) return fewest_blocks_fit();
    if (layout.pp > static_cast<int>(order_.size())) return false;
    for (; packed_ < layout.pp; ++packed_) {
      begins_[at(packed_) + 1] = longest_stage(0, begins_[at(packed_)], layout.pp - packed_ - 1);
    }
    return all_stages_fit();
  }

 private:
  // Of one layer, in bytes of a device.
  struct KindBytes {
    double state, late, unsharded;
  };

  void find_bytes(const StrategyRecord& strategy) {
    const auto shards = static_cast<double>(sharing_replicas(*layout_) * strategy.cp);
    for (std::size_t k = 0; k < bytes_.size(); ++k) {
      const LayerKindRecord& size = own_[k];
      const LayerParameters p = layer_parameters(size, shards, expert_spread(strategy));
      const StateBytes state = state_bytes(training_, layout_->zero, size, p);
      const double late = training_.late_gradients != 0 ? state.gradients : 0.0;
      bytes_[k] = {(state.weights + (state.gradients - late) + state.optimizer) +
                       copied_weights(size.copy_bytes, layout_->zero, p.all, p.shared),
                   late, 0.0};
      if (size.boundary != 0) continue;
      bytes_[k].unsharded =
          size.shape_bytes +
          unsharded_bytes(layout_->zero, p.all, p.trained,
                          mean_weight_bytes(size, training_.gather_bytes),
                          training_.late_gradients != 0 ? 0.0 : training_.gradient_bytes, shards,
                          static_cast<double>(training_.whole_layers));
    }
  }

  double in_flight(int stage, std::int64_t chunks) const noexcept {
    return micro_batches_in_flight(static_cast<PipelineSchedule>(layout_->schedule), layout_->pp,
                                   stage, layout_->micro_batches, chunks);
  }

  // The first layer, `stop` or later, of the longest stage that ends before position `last` and
  // fits in some variant. The last variants store least, so they come first.
  int longest_stage(int stop, int last, int stage) const noexcept {
    int first = last;
    for (int v = variants_ - 1; v >= 0 && first > stop; --v) {
      first = std::min(first, longest_in(v, stop, last, in_flight(stage, 1)));
    }
    return first;
  }

  int longest_in(int v, int stop, int last, double waiting) const noexcept {
    const auto micro_batches = static_cast<double>(layout_->micro_batches);
    double state = 0.0;
    double gathered = 0.0;
    double most = -kInfinite;
    MovingBytes moving{0.0, 0.0, 0.0, 0.0, own_[0].layer_peaks != 0};
    LateGradients late{0.0, 0.0, 0.0, 0.0};
    for (int i = last; i > stop; --i) {
      const auto kind = at(order_[at(i) - 1]);
      const LayerKindRecord& size = own_[kind];
      const KindBytes& own = bytes_[kind];
      state += own.state;
      if (moving.by_layer) {
        const double peak =
            size.live_bytes[v] - moving.stash + (micro_batches > waiting ? 0.0 : late.all);
        if (peak > most) {
          most = peak;
          moving.live = size.live_bytes[v];
          moving.freed = moving.stash;
          moving.later = late.all;
        }
      } else {
        moving.live = std::max(moving.live, size.live_bytes[v]);
      }
      moving.stash += size.stash_bytes[v];
      moving.once += size.once_bytes;
      gathered = std::max(gathered, own.unsharded);
      moving.buffers = buffers_ + gathered;
      late.all += own.late;
      if (size.boundary != 0 && i == static_cast<int>(order_.size())) late.last = own.late;
      late.first = own.late;
      late.first_stash = size.stash_bytes[v];
      if (size.boundary != 0 && i == 1 && last > 1) {
        late.first += bytes_[at(order_[1])].late;
        late.first_stash += own_[order_[1]].stash_bytes[v];
      }
      const double peak = peak_bytes(moving, late, waiting, micro_batches, lost_ - 1.0).total;
      if (state + peak > limit_) return i;
    }
    return stop;
  }

  // Whether a stage without boundary layers fits with the fewest blocks that it can be assigned.
  bool fewest_blocks_fit() const noexcept {
    const std::int64_t stages = layout_->pp;
    const std::int64_t chunks = layout_->vpp;
    std::int64_t blocks = 0;
    KindBytes least{kInfinite, kInfinite, kInfinite};
    bool by_work = false;  // whether layers are divided by work, not count
    for (std::size_t k = 0; k < bytes_.size(); ++k) {
      by_work = by_work || own_[k].stage_work > 0.0;
      if (!is_block(k)) continue;
      blocks += counts_[k];
      least.state = std::min(least.state, bytes_[k].state);
      least.late = std::min(least.late, bytes_[k].late);
      least.unsharded = std::min(least.unsharded, bytes_[k].unsharded);
    }
    const int stage = stages > 2 ? 1 : 0;
    std::int64_t fewest = chunks * (blocks / (stages * chunks)) - (stage == 0 ? 2 : 0);
    if (chunks == 1 && by_work) fewest = std::min<std::int64_t>(fewest, stage);
    if (fewest <= 0) return true;
    const double waiting = in_flight(stage, chunks);
    if (static_cast<double>(layout_->micro_batches) > waiting) {
      least.state += least.late;  // gradients of earlier micro-batches are resident
    }
    const auto count = static_cast<double>(fewest);
    for (int v = variants_ - 1; v >= 0; --v) {
      double stash = kInfinite;
      double live = kInfinite;
      for (std::size_t k = 0; k < bytes_.size(); ++k) {
        if (!is_block(k)) continue;
        stash = std::min(stash, own_[k].stash_bytes[v]);
        live = std::min(live, own_[k].live_bytes[v]);
      }
      const double moving = waiting * count * stash + live + buffers_ + least.unsharded;
      if (count * least.state + lost_ * moving <= limit_) return true;
    }
    return false;
  }

  bool is_block(std::size_t kind) const noexcept {
    return counts_[kind] > 0 && own_[kind].boundary == 0;
  }

  // The last s stages, each as long as fits, begin at begins_[s]. Once at most one layer per
  // earlier stage is left, the earlier stages must fit with one each.
  bool all_stages_fit() const noexcept {
    const int stages = layout_->pp;
    for (int s = 1; s <= stages; ++s) {
      if (begins_[at(s)] > stages - s) continue;
      for (int stage = stages - s - 1; stage >= 0; --stage) {
        if (longest_stage(stage, stage + 1, stage) == stage + 1) return false;
      }
      return true;
    }
    return false;
  }

  const TrainingRecord& training_;
  std::span<const LayerKindRecord> sizes_;
  std::vector<std::int32_t> order_;  // the last layer with its copy of a tied embedding, if any
  std::int32_t last_kind_;
  std::vector<KindBytes> bytes_;  // by kind
  std::vector<int> counts_;       // layers of each kind
  std::vector<int> begins_;
  int packed_ = 0;
  double lost_;
  double limit_;
  const LayoutRecord* layout_ = nullptr;
  const LayerKindRecord* own_ = nullptr;  // of the strategy, by kind
  int variants_ = 0;
  double buffers_ = 0.0;
};

}  // namespace

Status layouts_fit(const FitProblem& problem, std::span<const double> usable_bytes,
                   std::span<std::uint8_t> fits) {
  const std::size_t strategies = problem.strategies.size();
  const std::size_t limits = usable_bytes.size();
  if (problem.order.empty() || strategies == 0 || problem.sizes.size() % strategies != 0 ||
      fits.size() != problem.layouts.size() * limits) {
    return Status::kBadRules;
  }
  const std::size_t kinds = problem.sizes.size() / strategies;
  for (const std::int32_t kind : problem.order) {
    if (kind < 0 || at(kind) + 1 >= kinds) return Status::kBadLayers;
  }
  for (const StrategyRecord& s : problem.strategies) {
    if (s.variants < 1 || s.variants > kMaxVariants || s.tp < 1 || s.cp < 1) {
      return Status::kBadRules;
    }
  }
  for (const LayoutRecord& l : problem.layouts) {
    if (l.strategy < 0 || at(l.strategy) >= strategies || l.pp < 1 || l.vpp < 1 || l.dp < 1 ||
        l.micro_batches < 1 || l.schedule < 0 || l.schedule >= kPipelineScheduleCount) {
      return Status::kBadRules;
    }
  }
  for (std::size_t c = 0; c < limits; ++c) {
    StagePacker packer(problem, usable_bytes[c]);
    const LayoutRecord* before = nullptr;
    for (std::size_t r = 0; r < problem.layouts.size(); ++r) {
      const LayoutRecord& layout = problem.layouts[r];
      fits[r * limits + c] = packer.fits(layout, before, problem.strategies[at(layout.strategy)]);
      before = &layout;
    }
  }
  return Status::kOk;
}

}  // namespace phaze
