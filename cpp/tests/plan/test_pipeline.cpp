// Pipeline schedules under the sanitizers: skipping against the full simulation, bounds, peaks
// against counts, refusals, no allocation once a shape is known, and allocations that fail.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <span>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "phaze/pipeline_schedule.hpp"

namespace {

std::size_t allocations = 0;
std::size_t refused = 0;  // the allocation that fails; 0: none

}  // namespace

void* operator new(std::size_t bytes) {
  void* found = ++allocations == refused ? nullptr : std::malloc(bytes);  // NOLINT
  if (found == nullptr) throw std::bad_alloc();
  return found;
}

void operator delete(void* pointer) noexcept { std::free(pointer); }               // NOLINT
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }  // NOLINT

namespace {

using phaze::PipelineLoads;
using phaze::PipelinePlayer;
using phaze::PipelineSchedule;
using phaze::PipelineStatus;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : numbers_(seed) {}
  std::int32_t whole(std::int32_t from, std::int32_t to) {
    return from + numbers_.below(to - from + 1);
  }
  double real() { return numbers_.below(1 << 20) / static_cast<double>(1 << 20); }

 private:
  phaze::test::Numbers numbers_;
};

struct Case {
  PipelineSchedule schedule;
  std::int32_t stages;
  std::int32_t chunks;
  std::int64_t micro_batches;
  std::vector<double> forward, backward, weight_grad;
  double overlap;

  PipelineLoads loads() const {
    return {stages, chunks, micro_batches, forward, backward, weight_grad, overlap};
  }
};

bool has_two_chunks(int code) { return code >= 5; }

Case random_case(Draw& numbers, int code) {
  Case made{};
  made.schedule = static_cast<PipelineSchedule>(code);
  made.stages = numbers.whole(1, 8);
  made.chunks = has_two_chunks(code) ? 2 : code == 2 ? numbers.whole(1, 4) : 1;
  made.micro_batches = numbers.whole(1, 200);
  if (made.schedule == PipelineSchedule::kDualPipe) {
    made.stages = 2 * numbers.whole(1, 4);
    made.micro_batches = 2 * (made.stages + numbers.whole(0, 60));
  }
  if (made.schedule == PipelineSchedule::kDualPipeV) made.micro_batches += 2 * made.stages;
  made.overlap = 0.5 + 0.6 * numbers.real();
  for (int i = 0; i < made.stages * made.chunks; ++i) {
    made.forward.push_back(0.5 + numbers.real());
    made.weight_grad.push_back(numbers.real());
    made.backward.push_back(made.weight_grad.back() + numbers.real());
  }
  return made;
}

void test_skipping_and_bounds() {
  Draw numbers(71);
  PipelinePlayer player;
  for (int k = 0; k < 400; ++k) {
    const Case one = random_case(numbers, k % phaze::kPipelineScheduleCount);
    const double full_s = player.full_step_s(one.schedule, one.loads());
    const double step_s = player.step_s(one.schedule, one.loads());
    CHECK_CLOSE(step_s, full_s, 1e-12);
    CHECK(player.step_bound_s(one.schedule, one.loads()) <= step_s * (1.0 + 1e-12));
    CHECK(player.longest_device_s() <= step_s * (1.0 + 1e-12));
    const std::vector<double> ones(static_cast<std::size_t>(one.chunks), 1.0);
    for (int d = 0; d < one.stages; ++d) {
      CHECK(player.peak_bytes(one.schedule, one.stages, one.chunks, one.micro_batches, d, ones,
                              1.0) ==
            phaze::chunks_in_flight(one.schedule, one.stages, d, one.micro_batches, one.chunks));
    }
  }
}

// Every pass occurs once, passes of a device do not overlap, and the last ends with the step.
// Steps that are simulated together are what each is alone, bit for bit: they skip other rounds,
// and one that cannot be simulated affects no other.
void test_several_steps_at_once() {
  Draw numbers(29);
  PipelinePlayer together;
  PipelinePlayer alone;
  for (int k = 0; k < 400; ++k) {
    const Case shape = random_case(numbers, k % phaze::kPipelineScheduleCount);
    const auto steps = static_cast<std::size_t>(numbers.whole(1, 9));
    Case all = shape;
    for (auto* passes : {&all.forward, &all.backward, &all.weight_grad}) passes->clear();
    std::vector<Case> each(steps, shape);
    for (Case& own : each) {
      for (std::size_t s = 0; s < own.forward.size(); ++s) {
        if (numbers.whole(0, 2) == 0) own.forward[s] = numbers.real();
        if (numbers.whole(0, 2) == 0) own.backward[s] = own.weight_grad[s] + numbers.real();
      }
    }
    if (numbers.whole(0, 3) == 0) each.back().backward[0] = -1.0;
    for (std::size_t s = 0; s < shape.forward.size(); ++s) {
      for (const Case& own : each) {
        all.forward.push_back(own.forward[s]);
        all.backward.push_back(own.backward[s]);
        all.weight_grad.push_back(own.weight_grad[s]);
      }
    }
    std::vector<double> step_s(steps);
    together.steps_s(shape.schedule, all.loads(), step_s);
    for (std::size_t s = 0; s < steps; ++s) {
      const double own_s = alone.step_s(shape.schedule, each[s].loads());
      CHECK(step_s[s] == own_s || (std::isnan(step_s[s]) && std::isnan(own_s)));
      const double full_s = alone.full_step_s(shape.schedule, each[s].loads());
      if (!std::isnan(own_s)) CHECK_CLOSE(step_s[s], full_s, 1e-12);
    }
  }
}

void test_events() {
  Draw numbers(75);
  PipelinePlayer player;
  for (int k = 0; k < 80; ++k) {
    const Case one = random_case(numbers, k % phaze::kPipelineScheduleCount);
    const double full_s = player.full_step_s(one.schedule, one.loads());
    const std::vector<phaze::PassEvent> events = player.events(one.schedule, one.loads());
    double end_s = 0.0;
    std::int64_t forwards = 0;
    std::int64_t backwards = 0;
    for (std::size_t i = 0; i < events.size(); ++i) {
      const phaze::PassEvent& own = events[i];
      end_s = std::max(end_s, own.end_s);
      CHECK(own.start_s <= own.end_s);
      if (i > 0 && events[i - 1].device == own.device) {
        CHECK(events[i - 1].end_s <= own.start_s + 1e-9);
      }
      forwards += own.kind == 0 || own.kind == 4;
      backwards += own.kind == 1 || own.kind == 2 || own.kind == 4;
    }
    const bool bidirectional = one.schedule == PipelineSchedule::kDualPipe;
    const std::int64_t passes = one.micro_batches * one.stages * (bidirectional ? 1 : one.chunks);
    CHECK(forwards == passes);
    CHECK(backwards == passes);
    CHECK_CLOSE(end_s, full_s, 1e-12);
    CHECK_CLOSE(player.step_s(one.schedule, one.loads()), full_s, 1e-12);
  }
}

void test_known_shapes_allocate_nothing() {
  Draw numbers(72);
  PipelinePlayer player;
  for (int code = 0; code < phaze::kPipelineScheduleCount; ++code) {
    Case one = random_case(numbers, code);
    player.step_s(one.schedule, one.loads());
    player.step_bound_s(one.schedule, one.loads());
    const std::size_t before = allocations;
    for (int k = 0; k < 20; ++k) {
      for (double& own_s : one.forward) own_s *= 0.9 + 0.2 * numbers.real();
      player.step_s(one.schedule, one.loads());
      player.step_bound_s(one.schedule, one.loads());
    }
    CHECK(allocations == before);
  }
}

void test_failed_allocations_leave_a_player_that_works() {
  Draw numbers(74);
  for (int code = 0; code < phaze::kPipelineScheduleCount; ++code) {
    const Case one = random_case(numbers, code);
    const Case other = random_case(numbers, (code + 1) % phaze::kPipelineScheduleCount);
    const double step_s = PipelinePlayer().step_s(one.schedule, one.loads());
    const double other_s = PipelinePlayer().step_s(other.schedule, other.loads());
    bool failed = true;
    for (std::size_t nth = 1; failed; ++nth) {
      PipelinePlayer player;
      CHECK(player.step_s(other.schedule, other.loads()) == other_s);
      failed = false;
      refused = allocations + nth;
      try {
        CHECK(player.step_s(one.schedule, one.loads()) == step_s);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      refused = 0;
      CHECK(player.step_s(one.schedule, one.loads()) == step_s);
    }
  }
}

void test_refusals() {
  const auto check = [](int code, std::int64_t p, std::int64_t v, std::int64_t m) {
    return phaze::check_schedule(static_cast<PipelineSchedule>(code), p, v, m);
  };
  CHECK(check(8, 1, 1, 1) == PipelineStatus::kBadSchedule);
  CHECK(check(-1, 1, 1, 1) == PipelineStatus::kBadSchedule);
  CHECK(check(1, 0, 0, 0) == PipelineStatus::kBadSizes);
  CHECK(check(0, 4, 2, 8) == PipelineStatus::kOneChunk);
  CHECK(check(5, 4, 3, 8) == PipelineStatus::kTwoChunks);
  CHECK(check(6, 3, 2, 8) == PipelineStatus::kOddStages);
  CHECK(check(6, 4, 2, 9) == PipelineStatus::kOddMicroBatches);
  CHECK(check(7, 4, 2, 7) == PipelineStatus::kFewMicroBatches);
  const std::int64_t large = std::numeric_limits<std::int64_t>::max();
  CHECK(check(2, large, large, 8) == PipelineStatus::kTooLarge);
  CHECK(check(0, 2, 1, large) == PipelineStatus::kTooLarge);
  for (int i = 0; i < phaze::kPipelineStatusCount; ++i) {
    CHECK(*phaze::sentence(static_cast<PipelineStatus>(i)) != '\0');
  }
  CHECK(phaze::chunks_in_flight(PipelineSchedule::kGpipe, 2, 2, 4, 1) == 0.0);

  PipelinePlayer player;
  std::vector<double> two(2, 1.0);
  const std::vector<double> three(3, 1.0);
  const auto step = [&](PipelineSchedule schedule, std::span<const double> forward,
                        std::span<const double> backward, std::span<const double> weight_grad) {
    return player.step_s(schedule, {2, 1, 4, forward, backward, weight_grad, 1.0});
  };
  CHECK(std::isnan(player.step_s(PipelineSchedule::kGpipe, {0, 0, 0, {}, {}, {}, 1.0})));
  CHECK(std::isnan(step(PipelineSchedule::kGpipe, three, two, {})));
  CHECK(std::isnan(step(PipelineSchedule::kGpipe, two, three, {})));
  CHECK(std::isnan(step(PipelineSchedule::kZeroBubbleH1, two, two, {})));
  CHECK(step(PipelineSchedule::kZeroBubbleH1, two, two, two) > 0.0);
  CHECK(std::isnan(player.peak_bytes(PipelineSchedule::kGpipe, 2, 1, 4, 2, two, 1.0)));
  for (const double bad : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    two[1] = bad;
    CHECK(std::isnan(step(PipelineSchedule::kOneForwardOneBackward, two, {three.data(), 2}, {})));
  }
}

void test_many_micro_batches() {
  Draw numbers(73);
  PipelinePlayer player;
  for (int code = 0; code < phaze::kPipelineScheduleCount; ++code) {
    Case one = random_case(numbers, code);
    double before_s = 0.0;
    for (const std::int64_t m : {1000000, 2000000, 4000000}) {
      one.micro_batches = m;
      const double step_s = player.step_s(one.schedule, one.loads());
      CHECK(step_s > before_s * 1.9);
      before_s = step_s;
    }
  }
}

}  // namespace

int main() {
  test_skipping_and_bounds();
  test_several_steps_at_once();
  test_events();
  test_known_shapes_allocate_nothing();
  test_failed_allocations_leave_a_player_that_works();
  test_refusals();
  test_many_micro_batches();
  return phaze::test::report("pipeline");
}
