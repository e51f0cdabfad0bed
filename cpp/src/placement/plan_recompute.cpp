// What a stage recomputes: of all that fits the least seconds. Blocks are recomputed as one variant
// has it, or the first few as one and the others as another.
#include <algorithm>
#include <limits>

#include "placement/plan_solver.hpp"

namespace phaze {

std::int32_t PlanSolver::recompute(int i, int j, int stage) {
  std::int32_t* known = nullptr;
  std::int64_t key = 0;
  if (space_->alike) {  // stages with as many blocks and the same ends are alike
    const std::size_t ends = (i < space_->first_block ? 2 : 0) + (j == space_->layers ? 1 : 0);
    const std::size_t own =
        (at(stage) * at(space_->blocks + 1) + at(sums_.blocks(i, j))) * 4 + ends;
    if (own >= known_.size()) known_.resize(at(stages_) * at(space_->blocks + 1) * 4, {0, -1});
    if (known_[own].epoch == epoch_) return known_[own].code;
    known_[own].epoch = epoch_;
    known = &known_[own].code;
    key = static_cast<std::int64_t>(own);
  }
  const auto bytes = [&](StageRecompute r) { return sums_.bytes(r, i, j, stage); };
  const auto make = [&] {
    return fitting_ways(sums_.variants(), sums_.first_is_fastest(), space_->some_blocks,
                        space_->alike, sums_.blocks(i, j), room_bytes_, bytes);
  };
  const auto seconds = [&](StageRecompute r) { return sums_.backward_s(r, i, j); };
  if (known == nullptr) return fastest_way(make(), sums_.first_is_fastest(), seconds);
  const FittingWays& ways =
      ways_.of({row_index(), 2 * key, room_bytes_}, sums_.first_is_fastest(), make);
  *known = fastest_way(ways, sums_.first_is_fastest(), seconds);
  return *known;
}

double PlanSolver::stash_bytes(const Partition& partition, int stage, StageRecompute way) const {
  const auto chunks = static_cast<std::size_t>(row_->layout.vpp);
  double sum = 0.0;
  double least = std::numeric_limits<double>::infinity();
  double most = 0.0;
  own_bytes_.resize(chunks);
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, static_cast<int>(c)));
    const double bytes = sums_.stash_bytes(way, partition.cuts[chunk], partition.cuts[chunk + 1]);
    own_bytes_[c] = bytes;
    sum += bytes;
    least = std::min(least, bytes);
    most = std::max(most, bytes);
  }
  if (chunks == 1 || least == most || stages_ == 1) return sum;
  const std::vector<double>& held = (*held_)[at(stage)];
  double peak = 0.0;
  for (std::size_t k = 0; k < held.size(); k += chunks) {
    double now = 0.0;
    for (std::size_t c = 0; c < chunks; ++c) now += held[k + c] * own_bytes_[c];
    peak = std::max(peak, now);
  }
  return std::max(sum, peak / sums_.in_flight(stage));
}

double PlanSolver::stage_bytes(const Partition& partition, int stage, StageRecompute way) const {
  const int chunks = row_->layout.vpp;
  if (chunks == 1) {
    return sums_.bytes(way, partition.cuts[at(stage)], partition.cuts[at(stage) + 1], stage);
  }
  double resident = 0.0;
  double gather = 0.0;
  MovingBytes moving{0.0, 0.0, 0.0, space_->buffer_bytes(*row_)};
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    resident += sums_.resident_bytes(i, j);
    gather = std::max(gather, sums_.gather_bytes(i, j));
    moving.once += sums_.once_bytes(i, j);
    moving.live = std::max(moving.live, sums_.live_bytes(way, i, j));
  }
  moving.buffers += gather;
  moving.stash = stash_bytes(partition, stage, way);
  return resident + sums_.peak(moving, late_gradients(partition, stage, way), stage).total;
}

// Of several chunks, the first of the model is the last to run backward.
LateGradients PlanSolver::late_gradients(const Partition& partition, int stage,
                                         StageRecompute way) const {
  LateGradients found{0.0, 0.0, 0.0, 0.0};
  std::size_t lowest = at(space_->layers);
  for (int c = 0; c < row_->layout.vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const LateGradients own =
        sums_.late_gradients(way, partition.cuts[chunk], partition.cuts[chunk + 1]);
    found.all += own.all;
    found.last += own.last;
    if (chunk >= lowest) continue;
    lowest = chunk;
    found.first = own.first;
    found.first_stash = own.first_stash;
  }
  return found;
}

std::int32_t PlanSolver::recompute_chunks(const Partition& partition, int stage,
                                          double room_bytes) const {
  return fastest_chunks(ways_of_chunks(partition, stage, room_bytes), partition, stage);
}

FittingWays PlanSolver::ways_of_chunks(const Partition& partition, int stage,
                                       double room_bytes) const {
  int most = 0;
  int least = space_->layers;
  for (int c = 0; c < row_->layout.vpp; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int own = sums_.blocks(partition.cuts[chunk], partition.cuts[chunk + 1]);
    most = std::max(most, own);
    least = std::min(least, own);
  }
  return fitting_ways(sums_.variants(), sums_.first_is_fastest(), space_->some_blocks,
                      space_->alike && least == most, most, room_bytes * kFits,
                      [&](StageRecompute r) { return stage_bytes(partition, stage, r); });
}

std::int32_t PlanSolver::fastest_chunks(const FittingWays& ways, const Partition& partition,
                                        int stage) const {
  return fastest_way(ways, sums_.first_is_fastest(), [&](StageRecompute r) {
    double sum = 0.0;
    for (int c = 0; c < row_->layout.vpp; ++c) {
      const std::size_t chunk = at(chain_of(stage, c));
      sum += sums_.backward_s(r, partition.cuts[chunk], partition.cuts[chunk + 1]);
    }
    return sum;
  });
}

bool PlanSolver::choose_recompute(double room_bytes, bool any, Partition* partition) const {
  partition->variants.assign(at(stages_), 0);
  for (int stage = 0; stage < stages_; ++stage) {
    std::int32_t code = recompute_chunks(*partition, stage, room_bytes);
    if (code < 0) {
      if (!any) return false;
      const auto bytes = [&](int v) { return stage_bytes(*partition, stage, {v, v, 0}); };
      code = 0;  // none fits: the leanest
      for (int v = 1; v < sums_.variants(); ++v) {
        if (bytes(v) < bytes(code)) code = v;
      }
    }
    partition->variants[at(stage)] = code;
  }
  return true;
}

// Stages of a deal are alike where their chunks have as many layers each and the same ends.
std::int32_t PlanSolver::recompute_dealt(const Partition& partition, int stage, double room_bytes) {
  const int chunks = row_->layout.vpp;
  if (!space_->alike || chunks > 22) return recompute_chunks(partition, stage, room_bytes);
  int least = space_->layers;
  std::int64_t ends = 0;
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int i = partition.cuts[chunk];
    const int j = partition.cuts[chunk + 1];
    least = std::min(least, sums_.blocks(i, j));
    if (i < space_->first_block) ends += 1;
    if (j == space_->layers) ends += 2;
  }
  std::int64_t longer = 0;  // by chunk, how many blocks more than the shortest has
  for (int c = 0; c < chunks; ++c) {
    const std::size_t chunk = at(chain_of(stage, c));
    const int own = sums_.blocks(partition.cuts[chunk], partition.cuts[chunk + 1]);
    longer = longer * 3 + (own - least);
  }
  const std::int64_t key = ((longer * 4096 + least) * 4 + ends) * 4096 + stage;
  std::vector<std::pair<std::int64_t, std::int32_t>>& dealt = dealt_[at(stage)];
  const auto known = std::find_if(dealt.begin(), dealt.end(),
                                  [&](const auto& entry) { return entry.first == key; });
  if (known != dealt.end()) return known->second;
  const FittingWays& ways =
      ways_.of({row_index(), 2 * key + 1, room_bytes}, sums_.first_is_fastest(),
               [&] { return ways_of_chunks(partition, stage, room_bytes); });
  const std::int32_t code = fastest_chunks(ways, partition, stage);
  dealt.emplace_back(key, code);
  return code;
}

bool PlanSolver::choose_dealt(double room_bytes, double limit_s, Partition* partition) {
  partition->variants.assign(at(stages_), 0);
  DealtBound bound;
  for (int stage = 0; stage < stages_; ++stage) {
    const std::int32_t code = recompute_dealt(*partition, stage, room_bytes);
    if (code < 0) return false;
    partition->variants[at(stage)] = code;
    if (add_stage(*partition, stage, StageRecompute::of(code), &bound) > limit_s) return false;
  }
  return true;
}

}  // namespace phaze
