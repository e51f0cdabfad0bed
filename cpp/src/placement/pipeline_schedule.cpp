// What a schedule allows, which part of the model a device has, and activations in flight.
#include "phaze/pipeline_schedule.hpp"

#include <algorithm>
#include <limits>

#include "placement/pipeline_schedule_game.hpp"

namespace phaze {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kMostCells = std::int64_t{1} << 24;         // stages x stages x chunks
constexpr std::int64_t kMostMicroBatches = std::int64_t{1} << 40;  // exact in a double, with room

// Counts the activations of a short order, each segment repeated as often as it says.
struct Counter {
  std::int64_t held = 0;
  std::int64_t most = 0;

  void pass(Pass kind, std::int64_t /*chunk*/) {
    if (kind == Pass::kForward || kind == Pass::kPair) most = std::max(most, ++held);
    if (kind == Pass::kBackward || kind == Pass::kWeightGrad || kind == Pass::kPair) --held;
  }
  void segment(std::int64_t /*repeats*/) {}  // held is the same after every round
};

}  // namespace

PipelineStatus check_schedule(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                              std::int64_t micro_batches) noexcept {
  const auto code = static_cast<std::int32_t>(schedule);
  if (code < 0 || code >= kPipelineScheduleCount) return PipelineStatus::kBadSchedule;
  if (stages < 1 || chunks < 1 || micro_batches < 1) return PipelineStatus::kBadSizes;
  if (stages > kMostCells || chunks > kMostCells || stages * chunks > kMostCells ||
      stages * chunks * stages > kMostCells || micro_batches > kMostMicroBatches) {
    return PipelineStatus::kTooLarge;
  }
  if (has_two_chunks(schedule)) {
    if (chunks != 2) return PipelineStatus::kTwoChunks;
  } else if (schedule != PipelineSchedule::kInterleaved && chunks != 1) {
    return PipelineStatus::kOneChunk;
  }
  if (schedule == PipelineSchedule::kDualPipe) {
    if (stages % 2 != 0) return PipelineStatus::kOddStages;
    if (micro_batches % 2 != 0) return PipelineStatus::kOddMicroBatches;
  }
  if (pairs_passes(schedule) && micro_batches < 2 * stages) return PipelineStatus::kFewMicroBatches;
  return PipelineStatus::kOk;
}

std::int64_t chunk_of(PipelineSchedule schedule, std::int64_t stages, std::int64_t /*chunks*/,
                      std::int64_t device, std::int64_t chunk) noexcept {
  switch (schedule) {
    case PipelineSchedule::kZeroBubbleV:
    case PipelineSchedule::kDualPipeV:
      return chunk == 0 ? device : 2 * stages - 1 - device;
    case PipelineSchedule::kDualPipe:
      return chunk == 0 ? device : stages - 1 - device;
    default:
      return chunk * stages + device;
  }
}

double chunks_in_flight(PipelineSchedule schedule, std::int64_t stages, std::int64_t device,
                        std::int64_t micro_batches, std::int64_t chunks) noexcept {
  if (check_schedule(schedule, stages, chunks, micro_batches) != PipelineStatus::kOk || device < 0 ||
      device >= stages) {
    return 0.0;
  }
  switch (schedule) {
    case PipelineSchedule::kGpipe:
      return static_cast<double>(micro_batches);
    case PipelineSchedule::kOneForwardOneBackward:
      return static_cast<double>(std::min(micro_batches, stages - device));
    case PipelineSchedule::kZeroBubbleH1:
      return static_cast<double>(std::min(micro_batches, stages));
    case PipelineSchedule::kZeroBubbleH2:
      return static_cast<double>(std::min(micro_batches, 2 * stages - 1));
    case PipelineSchedule::kInterleaved: {
      const std::int64_t most = 2 * (stages - device - 1) + (chunks - 1) * stages + 1;
      if (chunks > 1 && most <= micro_batches / stages * stages * chunks) {
        return static_cast<double>(most);
      }
      break;  // the step ends before, or a last group that is not full takes part
    }
    case PipelineSchedule::kZeroBubbleV:
      if (micro_batches >= 2 * stages - 1) return static_cast<double>(2 * stages);
      break;
    case PipelineSchedule::kDualPipe:
      return static_cast<double>(stages + 1);
    case PipelineSchedule::kDualPipeV:
      return static_cast<double>(2 * stages + 1);
  }
  Counter counter;
  tell_order({schedule, stages, chunks, micro_batches}, device, counter);
  return static_cast<double>(counter.most);
}

// ---- the player ----

PipelinePlayer::PipelinePlayer() : game_(std::make_unique<Game>()) {}
PipelinePlayer::~PipelinePlayer() = default;
PipelinePlayer::PipelinePlayer(PipelinePlayer&&) noexcept = default;
PipelinePlayer& PipelinePlayer::operator=(PipelinePlayer&&) noexcept = default;

double PipelinePlayer::step_s(PipelineSchedule schedule, const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->play(true) : kNan;
}

double PipelinePlayer::full_step_s(PipelineSchedule schedule, const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->play(false) : kNan;
}

std::span<const double> PipelinePlayer::start_s() {
  game_->count_work();
  return game_->start_s;
}

std::span<const double> PipelinePlayer::end_s() const noexcept { return game_->end_s; }

std::span<const double> PipelinePlayer::busy_s() {
  game_->count_work();
  return game_->busy_s;
}

double PipelinePlayer::longest_device_s() {
  const std::span<const double> begins = start_s();
  double longest = 0.0;
  for (std::size_t d = 0; d < begins.size(); ++d) {
    longest = std::max(longest, game_->end_s[d] - begins[d]);
  }
  return longest;
}

double PipelinePlayer::step_bound_s(PipelineSchedule schedule, const PipelineLoads& loads) {
  const bool good = game_->prepare(schedule, loads) && game_->load(loads);
  return good ? game_->bound() : kNan;
}

double PipelinePlayer::peak_bytes(PipelineSchedule schedule, std::int64_t stages,
                                  std::int64_t chunks, std::int64_t micro_batches,
                                  std::int64_t device, std::span<const double> chunk_bytes,
                                  double kept_for_weight_grad) {
  if (!game_->prepare({schedule, stages, chunks, micro_batches})) return kNan;
  return game_->peak(device, chunk_bytes, kept_for_weight_grad);
}

void PipelinePlayer::held_chunks(PipelineSchedule schedule, std::int64_t stages,
                                 std::int64_t chunks, std::int64_t micro_batches,
                                 std::int64_t device, std::vector<double>* held) {
  held->clear();
  if (device < 0 || device >= stages) return;
  if (game_->prepare({schedule, stages, chunks, micro_batches})) game_->held(device, held);
}

}  // namespace phaze
