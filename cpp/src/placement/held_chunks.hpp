// What the stages of a schedule hold at its worst moments, worked out once for each shape.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "phaze/pipeline_schedule.hpp"

namespace phaze {

// Safe to use from several threads; what it has given stays where it is.
class HeldChunks {
 public:
  // By stage, see PipelinePlayer::held_chunks.
  using Stages = std::vector<std::vector<double>>;

  const Stages& of(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                   std::int64_t micro_batches, PipelinePlayer* player) {
    const Shape shape{static_cast<std::int64_t>(schedule), stages, chunks, micro_batches};
    {
      const std::scoped_lock lock(mutex_);
      const auto known = held_.find(shape);
      if (known != held_.end()) return known->second;
    }
    Stages held(static_cast<std::size_t>(stages));
    for (std::size_t k = 0; k < held.size(); ++k) {
      player->held_chunks(schedule, stages, chunks, micro_batches, static_cast<std::int64_t>(k),
                          &held[k]);
    }
    const std::scoped_lock lock(mutex_);
    return held_.emplace(shape, std::move(held)).first->second;
  }

 private:
  using Shape = std::array<std::int64_t, 4>;
  std::mutex mutex_;
  std::map<Shape, Stages> held_;
};

}  // namespace phaze
