// Every pass of a step with the time it was played at, for timelines.
#include <cmath>

#include "placement/pipeline_schedule_game.hpp"

namespace phaze {

void PipelinePlayer::Game::record(std::size_t device, Token token, double end_s) {
  const std::size_t slot = token.slot();
  const auto chunks = static_cast<std::size_t>(shape_.chunks);
  std::int64_t micro_batch = 0;
  std::int64_t other = -1;
  switch (token.kind()) {
    case Pass::kForward:
      micro_batch = forwards_[slot] - 1;
      break;
    case Pass::kBackward:
    case Pass::kInputGrad:
      micro_batch = backwards_[slot] - 1;
      // A whole backward pass holds the weight gradient.
      if (token.kind() == Pass::kBackward) ++weight_grads_[slot];
      break;
    case Pass::kWeightGrad:
      micro_batch = weight_grads_[slot]++;
      break;
    case Pass::kPair:
      micro_batch = forwards_[slot] - 1;
      other = backwards_[slot ^ 1U] - 1;
      ++weight_grads_[slot ^ 1U];
      break;
  }
  (*recorded_)[device].push_back({static_cast<std::int32_t>(device),
                                  static_cast<std::int32_t>(token.kind()),
                                  static_cast<std::int32_t>(slot % chunks), 0, micro_batch, other,
                                  end_s - seconds(token), end_s});
}

std::vector<PassEvent> PipelinePlayer::Game::events() {
  std::vector<std::vector<PassEvent>> passes;
  recorded_ = &passes;
  double step_s = std::nan("");
  try {
    do {  // a ring that is too small is made larger, and all is played again
      passes.assign(devices(), {});
      weight_grads_.assign(slots_, 0);
      step_s = play_once(false);
      if (!std::isnan(step_s) || !ring_full_) break;
      ring_ *= 2;
    } while (ring_ <= 4 * shape_.micro_batches);
  } catch (...) {
    recorded_ = nullptr;
    throw;
  }
  recorded_ = nullptr;
  std::vector<PassEvent> all;
  if (std::isnan(step_s)) return all;
  for (const auto& own : passes) all.insert(all.end(), own.begin(), own.end());
  return all;
}

std::vector<PassEvent> PipelinePlayer::events(PipelineSchedule schedule,
                                              const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->events() : std::vector<PassEvent>{};
}

}  // namespace phaze
