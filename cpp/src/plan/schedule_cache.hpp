// Caches of results about pipeline schedules: simulated steps, and activations in flight. Private
// to the kernel; safe to use from several threads.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/numbers.hpp"
#include "phaze/pipeline_schedule.hpp"

namespace phaze {

// Cache of activations in flight. Safe to use from several threads; returned references stay valid.
class InFlightCache {
 public:
  // The result of PipelinePlayer::peaks_in_flight for one stage.
  const std::vector<double>& of(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                                std::int64_t micro_batches, std::int64_t stage,
                                PipelinePlayer* player) {
    const Key key{static_cast<std::int64_t>(schedule), stages, chunks, micro_batches, stage};
    {
      const std::scoped_lock lock(mutex_);
      const auto known = held_.find(key);
      if (known != held_.end()) return known->second;
    }
    std::vector<double> held;
    player->peaks_in_flight(schedule, stages, chunks, micro_batches, stage, &held);
    const std::scoped_lock lock(mutex_);
    return held_.emplace(key, std::move(held)).first->second;
  }

 private:
  using Key = std::array<std::int64_t, 5>;
  std::mutex mutex_;
  std::map<Key, std::vector<double>> held_;
};

// Cache of the times of simulated steps. Safe to use from several threads.
class PlayedSteps {
 public:
  struct Key {
    std::array<std::int64_t, 4> shape;  // schedule, stages, chunks, micro-batches
    std::vector<double> passes_s;       // PipelineLoads::overlap, then the seconds of all passes
    std::uint64_t hash;

    // The hash uses a few passes only: where steps differ, their first stages usually do.
    void set(PipelineSchedule schedule, const PipelineLoads& loads) {
      shape = {static_cast<std::int64_t>(schedule), loads.stages, loads.chunks,
               loads.micro_batches};
      hash = std::bit_cast<std::uint64_t>(loads.overlap);
      for (const std::int64_t part : shape) hash = mixed(hash, static_cast<std::uint64_t>(part));
      passes_s.assign(1, loads.overlap);
      const bool split = schedule >= PipelineSchedule::kZeroBubbleH1;
      for (const auto& own : {loads.forward_s, loads.backward_s, loads.weight_grad_s}) {
        if (own.data() == loads.weight_grad_s.data() && !split) continue;  // part of `backward_s`
        passes_s.insert(passes_s.end(), own.begin(), own.end());
        for (const std::size_t k :
             {std::size_t{0}, std::size_t{1}, own.size() / 2, own.size() - 1}) {
          if (k < own.size()) hash = mixed(hash, std::bit_cast<std::uint64_t>(own[k]));
        }
      }
    }
  };

  bool find(const Key& key, double* step_s) const {
    const std::scoped_lock lock(mutex_);
    const auto known = steps_.find(key.hash);
    if (known == steps_.end()) return false;
    const Key& own = known->second.key;
    if (own.shape != key.shape || own.passes_s != key.passes_s) return false;
    *step_s = known->second.step_s;
    return true;
  }

  void add(const Key& key, double step_s) {
    const std::scoped_lock lock(mutex_);
    if (steps_.size() >= kMost) steps_.clear();
    steps_.insert_or_assign(key.hash, Step{key, step_s});
  }

 private:
  struct Step {
    Key key;
    double step_s;
  };
  static constexpr std::size_t kMost = 4096;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, Step> steps_;
};

}  // namespace phaze
