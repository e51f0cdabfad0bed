// Even partitions: what Megatron-LM runs, and all that there is for the interleaved schedule. Chunk
// c lies on stage c mod p; blocks are dealt out evenly, the embedding goes with the first chunk and
// the head with the last.
#include <algorithm>
#include <limits>

#include "placement/plan_solver.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

}  // namespace

PlanStatus PlanSolver::deal_evenly(Partition* partition) const {
  const int count = stages_ * row_->layout.virtual_stages;
  const int blocks = space_->blocks;
  const bool interleaved =
      row_->layout.schedule == static_cast<std::int32_t>(PipelineSchedule::kInterleaved);
  if (count > std::max(1, blocks)) return PlanStatus::kTooManyStages;
  if (interleaved && blocks % count != 0) return PlanStatus::kUneven;
  if (interleaved && rounds_ % stages_ != 0) return PlanStatus::kBadRounds;
  if (zero_bubble_ && rounds_ < stages_) return PlanStatus::kFewRounds;
  partition->cuts.assign(at(count) + 1, 0);
  partition->cuts[at(count)] = space_->layers;
  for (int c = 1; c < count; ++c) {
    const std::int64_t before = static_cast<std::int64_t>(c) * blocks / count;
    partition->cuts[at(c)] = space_->first_block + static_cast<std::int32_t>(before);
    if (space_->may_cut[at(partition->cuts[at(c)])] == 0) return PlanStatus::kBrokenTie;
  }
  return PlanStatus::kOk;
}

PlanStatus PlanSolver::even(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times,
                            std::int32_t variant, double room_bytes, Partition* partition) {
  start(space, row, times);
  const PlanStatus status = deal_evenly(partition);
  if (status != PlanStatus::kOk) return status;
  if (variant >= 0) {
    const StageRecompute way = StageRecompute::of(variant);
    if (std::max(way.rest, way.more) >= sums_.variants()) return PlanStatus::kBadStrategy;
    partition->variants.assign(at(stages_), variant);
  } else {
    choose_recompute(room_bytes, true, partition);
  }
  return PlanStatus::kOk;
}

PlanSolver::Interleaved PlanSolver::interleaved(const Partition& partition) {
  const int chunks = row_->layout.virtual_stages;
  const std::size_t count = at(stages_) * at(chunks);
  forward_s_.assign(count, 0.0);
  backward_s_.assign(count, 0.0);
  Interleaved found{0.0, 0.0, 0.0, 0};
  double before_s = 0.0;
  for (int stage = 0; stage < stages_; ++stage) {
    const StageRecompute way = StageRecompute::of(partition.variants[at(stage)]);
    double sync = 0.0;
    double step = 0.0;
    double own_s = 0.0;
    double load = 0.0;
    for (int c = 0; c < chunks; ++c) {
      const std::size_t chunk = at(c) * at(stages_) + at(stage);
      const int i = partition.cuts[chunk];
      const int j = partition.cuts[chunk + 1];
      // Every chunk receives, but for the first going forward and the last coming back.
      const double in_s = stage > 0 ? frame_->message_s[at(stage)] : row_->wrap_s;
      const double out_s = stage + 1 < stages_ ? frame_->message_s[at(stage) + 1] : row_->wrap_s;
      const std::size_t own = at(stage) * at(chunks) + at(c);
      forward_s_[own] = sums_.forward_s(i, j) + space_->enters(i, j) * in_s;
      backward_s_[own] = sums_.backward_s(way, i, j) + space_->leaves(i, j) * out_s;
      sync += sums_.sync_s(i, j);
      step += sums_.step_s(i, j);
      own_s += sums_.plain_s(i, j);
      load += forward_s_[own] + backward_s_[own];
    }
    const double tail_s =
        tail_after(sync, own_s / chunks, frame_->bucket_s, step, before_s / chunks);
    if (tail_s > found.tail_s) found.longest_tail = stage;
    found.tail_s = std::max(found.tail_s, tail_s);
    found.max_load_s = std::max(found.max_load_s, load);
    before_s += own_s;
  }
  found.step_s = player_.step_s(PipelineSchedule::kInterleaved,
                                {stages_, chunks, rounds_, forward_s_, backward_s_, {}, 1.0});
  return found;
}

PlacedPlan PlanSolver::best_interleaved(double room_bytes, double below_s) {
  PlacedPlan best{kInfinite, 0.0, 0, {}};
  Partition partition;
  if (deal_evenly(&partition) != PlanStatus::kOk) return best;
  if (!choose_recompute(room_bytes, false, &partition)) return best;
  const Interleaved found = interleaved(partition);
  const double time_s = found.step_s + found.tail_s + row_->exchange_s;
  if (!(time_s <= below_s)) return best;
  best.time_s = time_s;
  for (int stage = 0; stage < stages_; ++stage) {
    best.memory_bytes =
        std::max(best.memory_bytes,
                 stage_bytes(partition, stage, StageRecompute::of(partition.variants[at(stage)])));
  }
  best.partition = std::move(partition);
  return best;
}

}  // namespace phaze
