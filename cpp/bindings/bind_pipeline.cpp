#include "arrays.hpp"
#include "phaze/pipeline_schedule.hpp"

namespace phaze::bindings {
namespace {

PipelineSchedule checked(std::int32_t code, std::int64_t stages, std::int64_t chunks,
                         std::int64_t micro_batches) {
  const auto schedule = static_cast<PipelineSchedule>(code);
  const PipelineStatus status = check_schedule(schedule, stages, chunks, micro_batches);
  if (status != PipelineStatus::kOk) throw InvalidInput(sentence(status));
  return schedule;
}

PipelineLoads loads_of(std::int32_t stages, std::int32_t chunks, std::int64_t micro_batches,
                       const py::object& forward, const py::object& backward,
                       const py::object& weight_grad, double overlap) {
  const py::ssize_t slots = py::ssize_t{stages} * chunks;
  return {stages,
          chunks,
          micro_batches,
          view<double>(forward, "forward_s", slots),
          view<double>(backward, "backward_s", slots),
          view<double>(weight_grad, "weight_grad_s", slots),
          overlap};
}

// One simulated step: seconds of the whole step, and by device.
py::object step(std::int32_t code, std::int32_t stages, std::int32_t chunks,
                std::int64_t micro_batches, const py::object& forward, const py::object& backward,
                const py::object& weight_grad, double overlap, bool full) {
  const PipelineSchedule schedule = checked(code, stages, chunks, micro_batches);
  const PipelineLoads loads =
      loads_of(stages, chunks, micro_batches, forward, backward, weight_grad, overlap);
  PipelinePlayer player;
  double bound_s = 0.0;
  double step_s = 0.0;
  {
    const py::gil_scoped_release release;
    bound_s = player.step_bound_s(schedule, loads);
    step_s = full ? player.full_step_s(schedule, loads) : player.step_s(schedule, loads);
  }
  if (!(step_s >= 0.0)) {
    throw InvalidInput(
        "forward_s, backward_s, weight_grad_s, overlap: expected finite numbers, zero or more, and "
        "no weight gradient longer than its backward pass");
  }
  return result("PipelineStep", step_s, player.longest_device_s(), bound_s, array(player.start_s()),
                array(player.end_s()), array(player.busy_s()));
}

// Every pass of a step; refuses a step with too many passes to display.
py::array_t<PassEvent> events(std::int32_t code, std::int32_t stages, std::int32_t chunks,
                              std::int64_t micro_batches, const py::object& forward,
                              const py::object& backward, const py::object& weight_grad,
                              double overlap) {
  const PipelineSchedule schedule = checked(code, stages, chunks, micro_batches);
  const py::ssize_t slots = py::ssize_t{stages} * chunks;
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  if (micro_batches > kMost / (3 * slots)) {
    throw InvalidInput("micro_batches: too many passes; expected up to 2^24");
  }
  const PipelineLoads loads =
      loads_of(stages, chunks, micro_batches, forward, backward, weight_grad, overlap);
  std::vector<PassEvent> events;
  {
    const py::gil_scoped_release release;
    PipelinePlayer player;
    events = player.events(schedule, loads);
  }
  if (events.empty()) {
    throw InvalidInput(
        "forward_s, backward_s, weight_grad_s, overlap: expected finite numbers, zero or more, and "
        "no weight gradient longer than its backward pass");
  }
  return array(events);
}

// Peak bytes of activations on each device.
py::array_t<double> peak(std::int32_t code, std::int64_t stages, std::int64_t chunks,
                         std::int64_t micro_batches, const py::object& chunk_bytes,
                         double weight_grad_share) {
  const PipelineSchedule schedule = checked(code, stages, chunks, micro_batches);
  const auto bytes = view<double>(chunk_bytes, "chunk_bytes", stages * chunks);
  return computed<double>(static_cast<std::size_t>(stages), [&](std::span<double> filled) {
    PipelinePlayer player;
    for (std::size_t d = 0; d < filled.size(); ++d) {
      const auto width = static_cast<std::size_t>(chunks);
      filled[d] =
          player.peak_bytes(schedule, stages, chunks, micro_batches, static_cast<std::int64_t>(d),
                            bytes.subspan(d * width, width), weight_grad_share);
    }
  });
}

// Peak number of activations on each device, one per micro-batch and chunk.
py::array_t<double> in_flight(std::int32_t code, std::int64_t stages, std::int64_t chunks,
                              std::int64_t micro_batches) {
  const PipelineSchedule schedule = checked(code, stages, chunks, micro_batches);
  py::array_t<double> peaks(stages);
  const auto filled = writable(peaks);
  for (std::size_t d = 0; d < filled.size(); ++d) {
    filled[d] =
        chunks_in_flight(schedule, stages, static_cast<std::int64_t>(d), micro_batches, chunks);
  }
  return freeze(std::move(peaks));
}

// Position in the model's chain of each device's chunks, [device * chunks + chunk].
py::array_t<std::int64_t> chain(std::int32_t code, std::int64_t stages, std::int64_t chunks) {
  const PipelineSchedule schedule = checked(code, stages, chunks, 4 * stages);
  py::array_t<std::int64_t> chunks_of(stages * chunks);
  for (std::int64_t d = 0; d < stages; ++d) {
    for (std::int64_t c = 0; c < chunks; ++c) {
      chunks_of.mutable_at(d * chunks + c) = chunk_of(schedule, stages, chunks, d, c);
    }
  }
  return freeze(std::move(chunks_of));
}

PipelineStatus check(std::int32_t code, std::int64_t stages, std::int64_t chunks,
                     std::int64_t micro_batches) {
  return check_schedule(static_cast<PipelineSchedule>(code), stages, chunks, micro_batches);
}

// The status of each pair of stages and micro-batches under one schedule.
py::array_t<std::int32_t> check_all(std::int32_t code, const py::object& stages,
                                    std::int64_t chunks, const py::object& micro_batches) {
  const auto all_stages = view<std::int64_t>(stages, "stages");
  const auto size = static_cast<py::ssize_t>(all_stages.size());
  const auto batches = view<std::int64_t>(micro_batches, "micro_batches", size);
  py::array_t<std::int32_t> statuses(size);
  const auto filled = writable(statuses);
  for (std::size_t i = 0; i < filled.size(); ++i) {
    filled[i] = static_cast<std::int32_t>(check(code, all_stages[i], chunks, batches[i]));
  }
  return freeze(std::move(statuses));
}

}  // namespace

void bind_pipeline(py::module_& module) {
  module.attr("PIPELINE_SCHEDULES") = names_of<PipelineSchedule>(kPipelineScheduleCount, &name);
  py::tuple two_chunks(kPipelineScheduleCount);
  for (int i = 0; i < kPipelineScheduleCount; ++i) {
    two_chunks[static_cast<std::size_t>(i)] =
        py::bool_(has_two_chunks(static_cast<PipelineSchedule>(i)));
  }
  module.attr("HAS_TWO_CHUNKS") = two_chunks;
  module.attr("PIPELINE_SENTENCES") = names_of<PipelineStatus>(kPipelineStatusCount, &sentence);
  bind_outcomes<PipelineStatus>(
      module, "PipelineStatus",
      {"OK", "BAD_SCHEDULE", "BAD_SIZES", "ONE_CHUNK", "TWO_CHUNKS", "ODD_STAGES",
       "ODD_MICRO_BATCHES", "FEW_MICRO_BATCHES", "TOO_LARGE"});
  bind_result(module, "PipelineStep", "step_s longest_device_s bound_s start_s end_s busy_s");
  PYBIND11_NUMPY_DTYPE(PassEvent, device, kind, chunk, unused, micro_batch, other_micro_batch,
                       start_s, end_s);
  module.attr("PASS_KINDS") = py::make_tuple("F", "B", "I", "W", "F&B");
  module.def("pipeline_step", &step, py::arg("schedule"), py::arg("stages"), py::arg("chunks"),
             py::arg("micro_batches"), py::arg("forward_s"), py::arg("backward_s"),
             py::arg("weight_grad_s"), py::arg("overlap"), py::arg("full"));
  module.def("pipeline_events", &events, py::arg("schedule"), py::arg("stages"), py::arg("chunks"),
             py::arg("micro_batches"), py::arg("forward_s"), py::arg("backward_s"),
             py::arg("weight_grad_s"), py::arg("overlap"));
  module.def("pipeline_peak", &peak, py::arg("schedule"), py::arg("stages"), py::arg("chunks"),
             py::arg("micro_batches"), py::arg("chunk_bytes"), py::arg("kept_for_weight_grad"));
  module.def("pipeline_in_flight", &in_flight, py::arg("schedule"), py::arg("stages"),
             py::arg("chunks"), py::arg("micro_batches"));
  module.def("pipeline_chain", &chain, py::arg("schedule"), py::arg("stages"), py::arg("chunks"));
  module.def("check_pipeline", &check, py::arg("schedule"), py::arg("stages"), py::arg("chunks"),
             py::arg("micro_batches"));
  module.def(
      "takes_chunks",
      [](std::int32_t code, std::int64_t chunks) {
        return takes_chunks(static_cast<PipelineSchedule>(code), chunks);
      },
      py::arg("schedule"), py::arg("chunks"));
  module.def("check_pipelines", &check_all, py::arg("schedule"), py::arg("stages"),
             py::arg("chunks"), py::arg("micro_batches"));
}

}  // namespace phaze::bindings
