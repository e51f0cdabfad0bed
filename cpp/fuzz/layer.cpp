#include <cmath>
#include <memory>

#include "bytes.hpp"
#include "phaze/layer_schedule.hpp"
#include "schedule/layer_facts.hpp"

namespace phaze::fuzz {
namespace {

void draw(Bytes& bytes, LayerProblem* problem) {
  problem->size = 1 + bytes.below(9);
  for (std::int32_t& cores : problem->capacity) cores = 1 + bytes.below(3);
  std::int32_t modes = 0;
  for (int i = 0; i < problem->size; ++i) {
    problem->before[i] = i > 0 ? static_cast<OpBits>(bytes.below(1 << i)) : 0;
    problem->first_mode[i] = modes;
    for (int count = 1 + bytes.below(3); count > 0; --count) {
      problem->modes[modes++] = {bytes.number(0.5),
                                 {bytes.below(3), bytes.below(3), bytes.below(2)}};
    }
  }
  problem->first_mode[problem->size] = modes;
}

void spoil(Bytes& bytes, LayerProblem* problem) {
  const int at = bytes.below(problem->size);
  switch (bytes.below(12)) {
    case 0:
      problem->size = bytes.awkward_int();
      break;
    case 1:
      problem->capacity[bytes.below(kResources)] = bytes.awkward_int();
      break;
    case 2:
      problem->before[at] = static_cast<OpBits>(bytes.awkward_integer());
      break;
    case 3:
      problem->first_mode[at] = bytes.awkward_int();
      break;
    case 4:
      problem->modes[at].seconds = bytes.awkward();
      break;
    case 5:
      problem->modes[at].use[bytes.below(kResources)] = bytes.awkward_int();
      break;
    default:
      break;
  }
}

// Every operator waits for those before it, and nowhere are more cores in use than there are.
void require_legal(const LayerProblem& p, const LayerSolution& found) {
  double last = 0.0;
  const auto mode = [&](int i) { return p.modes[p.first_mode[i] + found.mode[i]]; };
  const auto end = [&](int i) { return found.start_s[i] + mode(i).seconds; };
  for (int i = 0; i < p.size; ++i) {
    REQUIRE(found.mode[i] >= 0 && p.first_mode[i] + found.mode[i] < p.first_mode[i + 1]);
    REQUIRE(found.start_s[i] >= 0.0);
    last = std::fmax(last, end(i));
    std::int64_t used[kResources] = {};
    for (int j = 0; j < p.size; ++j) {
      if ((p.before[i] >> j & 1U) != 0) REQUIRE(end(j) <= found.start_s[i]);
      const bool runs = found.start_s[j] <= found.start_s[i] && found.start_s[i] < end(j);
      for (int r = 0; r < kResources && runs; ++r) used[r] += mode(j).use[r];
    }
    for (int r = 0; r < kResources; ++r) REQUIRE(used[r] <= p.capacity[r]);
  }
  REQUIRE(found.makespan_s == last);
}

}  // namespace

void layer(Bytes bytes) {
  const auto problem = std::make_unique<LayerProblem>();
  draw(bytes, problem.get());
  spoil(bytes, problem.get());
  if (check_layer(*problem) != Status::kOk) return;
  const LayerSolution found = solve_layer(*problem, {1000, kInfinite, nullptr, nullptr});
  REQUIRE(found.bound_s <= found.makespan_s);
  REQUIRE(found.makespan_s <= best_list_schedule(LayerFacts<OpBits>(*problem)).makespan_s);
  require_legal(*problem, found);
}

}  // namespace phaze::fuzz
