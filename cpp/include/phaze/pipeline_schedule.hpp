// Pipeline schedules: the order in which each device of a pipeline runs its passes, the step time
// when those orders are simulated event by event, and the activations a device stores. Every
// schedule is a fixed order per device, stated in docs/pipelines.md with its source; the time of a
// step is a max-plus linear function of the passes' seconds, so a slower pass never makes a step
// shorter.
//
// Functions that allocate may throw std::bad_alloc and nothing else. A PipelinePlayer is used by
// one thread at a time; everything else may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

namespace phaze {

// Orders of forward and backward passes; the codes are those of the memory model.
enum class PipelineSchedule : std::int32_t {
  kOneForwardOneBackward = 0,
  kGpipe = 1,
  kInterleaved = 2,
  kZeroBubbleH1 = 3,
  kZeroBubble = kZeroBubbleH1,  // older name
  kZeroBubbleH2 = 4,
  kZeroBubbleV = 5,
  kDualPipe = 6,
  kDualPipeV = 7,
};
inline constexpr int kPipelineScheduleCount = 8;

// The name of a schedule in files, options and Python; static storage, safe from any thread.
inline constexpr const char* kPipelineScheduleNames[] = {
    "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
};
constexpr const char* name(PipelineSchedule schedule) noexcept {
  const auto code = static_cast<std::size_t>(schedule);
  return code < std::size(kPipelineScheduleNames) ? kPipelineScheduleNames[code] : "unknown";
}

// Whether a device has two chunks of the model: folded into a V, or in DualPipe one from each end.
constexpr bool has_two_chunks(PipelineSchedule schedule) noexcept {
  return schedule == PipelineSchedule::kZeroBubbleV || schedule == PipelineSchedule::kDualPipe ||
         schedule == PipelineSchedule::kDualPipeV;
}

// Whether a plan may have this many chunks per stage: several if interleaved, two for the schedules
// above, else one.
constexpr bool takes_chunks(PipelineSchedule schedule, std::int64_t chunks) noexcept {
  if (has_two_chunks(schedule)) return chunks == 2;
  return schedule == PipelineSchedule::kInterleaved ? chunks > 1 : chunks == 1;
}

// The rule that a combination of schedule, stages, chunks and micro-batches violates.
enum class PipelineStatus : std::int32_t {
  kOk = 0,
  kBadSchedule = 1,
  kBadSizes = 2,
  kOneChunk = 3,
  kTwoChunks = 4,
  kOddStages = 5,
  kOddMicroBatches = 6,
  kFewMicroBatches = 7,
  kTooLarge = 8,
};
// The sentence of a status; static storage, safe from any thread.
inline constexpr const char* kPipelineStatusSentences[] = {
    "ok",
    "unknown pipeline schedule",
    "stages, chunks and micro-batches must be at least 1",
    "this schedule has exactly one chunk on a device",
    "this schedule has exactly two chunks on a device",
    "DualPipe needs an even number of stages",
    "DualPipe needs an even number of micro-batches, half for each direction",
    "DualPipe and DualPipeV need at least twice as many micro-batches as stages",
    ("the pipeline is too large: expected stages x stages x chunks up to 2^24 and "
     "micro-batches up to 2^40"),
};
inline constexpr int kPipelineStatusCount = static_cast<int>(std::size(kPipelineStatusSentences));

constexpr const char* sentence(PipelineStatus status) noexcept {
  const auto code = static_cast<std::size_t>(status);
  return code < std::size(kPipelineStatusSentences) ? kPipelineStatusSentences[code]
                                                    : "unknown status";
}

PipelineStatus check_schedule(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                              std::int64_t micro_batches) noexcept;

// Position, from 0, of a device's chunk in the model's chain of stages. There are stages x chunks
// positions; DualPipe has `stages` positions, each on two devices.
std::int64_t chunk_of(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                      std::int64_t device, std::int64_t chunk) noexcept;

// Peak number of activations on a device, counting one per micro-batch and chunk, from the start of
// the forward pass to the end of the backward pass (of the weight gradient if that is a separate
// pass). 0 if check_schedule refuses the combination or the device is not in the pipeline.
double chunks_in_flight(PipelineSchedule schedule, std::int64_t stages, std::int64_t device,
                        std::int64_t micro_batches, std::int64_t chunks) noexcept;

// Seconds of one micro-batch's passes with the receipt of inputs, at [device * chunks + chunk].
struct PipelineLoads {
  std::int32_t stages;  // devices of one pipeline
  std::int32_t chunks;  // of the model on one device; 2 for ZB-V, DualPipe and DualPipeV
  std::int64_t micro_batches;
  std::span<const double> forward_s;
  std::span<const double> backward_s;     // weight gradient and recomputation included
  std::span<const double> weight_grad_s;  // deferrable part of backward_s; ZB-* and DualPipe*
  double overlap;  // DualPipe*: a forward and a backward pass run together take this share of the
                   // sum of both; 1 = nothing gained
};

// Kinds of passes, by the letters of docs/pipelines.md: F, B, I, W, F&B.
inline constexpr int kPassKinds = 5;

// A pass with its simulated times.
struct PassEvent {
  std::int32_t device;
  std::int32_t kind;
  std::int32_t chunk;  // of the device; for F&B that of F
  std::int32_t unused;
  std::int64_t micro_batch;        // from 0; for F&B that of F
  std::int64_t other_micro_batch;  // for F&B that of B, else -1
  double start_s;
  double end_s;
};

class PipelinePlayer {
 public:
  PipelinePlayer();
  ~PipelinePlayer();
  PipelinePlayer(PipelinePlayer&&) noexcept;
  PipelinePlayer& operator=(PipelinePlayer&&) noexcept;

  // Seconds from the first pass of any device to the end of the last. NaN if sizes disagree, a
  // value is negative or not finite, a weight gradient is longer than its backward pass, or
  // check_schedule refuses. Orders are cached between calls: calls with the same schedule and sizes
  // allocate nothing. Steady rounds that shift every clock by the same amount are skipped.
  double step_s(PipelineSchedule schedule, const PipelineLoads& loads);

  // step_s() of several steps of one shape at once: step number k of `step_s.size()` has the passes
  // [(device * chunks + chunk) * step_s.size() + k]. Faster for multiples of four.
  void steps_s(PipelineSchedule schedule, const PipelineLoads& loads, std::span<double> step_s);

  // step_s() without skipping rounds: O(stages x chunks x micro-batches) time.
  double full_step_s(PipelineSchedule schedule, const PipelineLoads& loads);

  // Every pass of the step, simulated without skipping, device by device, each in its order. Empty
  // if full_step_s is NaN.
  std::vector<PassEvent> events(PipelineSchedule schedule, const PipelineLoads& loads);

  // A chain of passes, each waiting for the one before, that takes the whole step: how often it
  // contains each pass, at [kind * stages * chunks + device * chunks + chunk]; F&B counts at the
  // chunk of F. Empty if full_step_s is NaN.
  std::vector<double> critical_passes(PipelineSchedule schedule, const PipelineLoads& loads);

  // Of the last simulated step, by device: the start of its first pass, the end of its last pass,
  // and its busy seconds. Call right after step_s; valid until the next step.
  std::span<const double> start_s();
  std::span<const double> end_s() const noexcept;
  std::span<const double> busy_s();

  // Maximum of end - start over the devices of the last simulated step: the time between steps if
  // no device waits for all others between steps (Zero Bubble's post-validated optimiser).
  double longest_device_s();

  // Lower bound on a step of this schedule: the maximum over devices of the passes that precede the
  // device's first, its own work, and the passes that must follow its last.
  double step_bound_s(PipelineSchedule schedule, const PipelineLoads& loads);

  // Peak bytes of activations of a device: `chunk_bytes` [chunks] are stored from the start of a
  // chunk's forward pass to the end of its backward pass. If the weight gradient is a separate
  // pass, the share `kept_for_weight_grad` of these bytes is stored until that pass ends. NaN if
  // sizes disagree.
  double peak_bytes(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                    std::int64_t micro_batches, std::int64_t device,
                    std::span<const double> chunk_bytes, double kept_for_weight_grad);

  // Micro-batches in flight of each chunk of a device, at every non-dominated moment of the step:
  // `chunks` numbers per moment. Activations are stored until the weight gradient. Empty if the
  // schedule is not possible.
  void peaks_in_flight(PipelineSchedule schedule, std::int64_t stages, std::int64_t chunks,
                       std::int64_t micro_batches, std::int64_t device, std::vector<double>* held);

 private:
  class Game;
  std::unique_ptr<Game> game_;
};

}  // namespace phaze
