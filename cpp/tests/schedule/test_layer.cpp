#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/numbers.hpp"
#include "check.hpp"
#include "numbers.hpp"
#include "phaze/layer_batch.hpp"
#include "phaze/layer_schedule.hpp"
#include "schedule/layer_facts.hpp"

namespace {

using namespace phaze;
using phaze::test::Numbers;

constexpr SearchLimits kEnough{1'000'000, kInfinite, nullptr, nullptr};

void random_problem(Numbers& numbers, int most, LayerProblem* p) {
  p->size = 1 + numbers.below(most);
  p->capacity[0] = 1 + numbers.below(4);
  p->capacity[1] = 1 + numbers.below(3);
  p->capacity[2] = 1;
  for (int i = 0; i < p->size; ++i) {
    p->before[i] = 0;
    for (int b = 0; b < i; ++b) {
      if (numbers.below(4) == 0) p->before[i] |= OpBits{1} << b;
    }
    p->first_mode[i] = 2 * i;
    const int type = numbers.below(3);
    LayerMode& single = p->modes[2 * i];
    single = {1.0 + numbers.below(50), {type == 0, type == 1, type == 2}};
    p->modes[2 * i + 1] = {single.seconds / (1 + numbers.below(3)),
                           {p->capacity[0], p->capacity[1], p->capacity[2]}};
  }
  p->first_mode[p->size] = 2 * p->size;
}

void check_schedule(const LayerProblem& p, const LayerSolution& s) {
  CHECK(s.bound_s <= s.makespan_s);
  double last = 0.0;
  for (int i = 0; i < p.size; ++i) {
    const LayerMode& mode = p.modes[p.first_mode[i] + s.mode[i]];
    const double end = s.start_s[i] + mode.seconds;
    last = std::max(last, end);
    for (int b = 0; b < i; ++b) {
      if ((p.before[i] >> b & 1) == 0) continue;
      CHECK(s.start_s[i] >= s.start_s[b] + p.modes[p.first_mode[b] + s.mode[b]].seconds);
    }
    for (int r = 0; r < kResources; ++r) {
      std::int32_t held = 0;  // at the moment i starts
      for (int j = 0; j < p.size; ++j) {
        const LayerMode& other = p.modes[p.first_mode[j] + s.mode[j]];
        const bool runs =
            s.start_s[j] <= s.start_s[i] && s.start_s[i] < s.start_s[j] + other.seconds;
        if (runs) held += other.use[r];
      }
      CHECK(held <= p.capacity[r]);
    }
  }
  CHECK(last == s.makespan_s);
}

void random_layers_are_scheduled() {
  Numbers numbers(42);
  const auto p = std::make_unique<LayerProblem>();
  for (int i = 0; i < 400; ++i) {
    random_problem(numbers, 9, p.get());
    CHECK(check_layer(*p) == Status::kOk);
    LayerFacts<OpBits> facts(*p);
    LayerSolution listed = best_list_schedule(facts);
    listed.bound_s = facts.root_bound(kInfinite) * kRoundedDown;
    check_schedule(*p, listed);
    const LayerSolution best = solve_layer(*p, kEnough);
    check_schedule(*p, best);
    CHECK(best.proved_by != ProvedBy::kNothing);
    CHECK(best.makespan_s <= listed.makespan_s && listed.bound_s <= best.makespan_s);
    const LayerSolution cut = solve_layer(*p, {3, kInfinite, nullptr, nullptr});
    check_schedule(*p, cut);
    CHECK(cut.bound_s <= best.makespan_s && best.makespan_s <= cut.makespan_s);
  }
}

void largest_layers_and_no_time() {
  Numbers numbers(42);
  const auto p = std::make_unique<LayerProblem>();
  for (int i = 0; i < 5; ++i) {
    do {
      random_problem(numbers, kMaxLayerOps, p.get());
    } while (p->size < kMaxLayerOps - 3);
    check_schedule(*p, solve_layer(*p, {2000, kInfinite, nullptr, nullptr}));
    check_schedule(*p, solve_layer(*p, {1'000'000'000, 0.0, nullptr, nullptr}));
    const auto stop = [](void*) { return true; };
    check_schedule(*p, solve_layer(*p, {1'000'000'000, kInfinite, stop, nullptr}));
  }
}

// A search that stops soon after its first schedule was improved: operators without successors
// overlap others, and others are delayed, which saves at least a tenth of the time.
void schedules_are_improved() {
  Numbers numbers(11);
  const auto p = std::make_unique<LayerProblem>();
  double listed_s = 0.0;
  double improved_s = 0.0;
  for (int i = 0; i < 40; ++i) {
    do {
      random_problem(numbers, 30, p.get());
    } while (p->size < 16);
    const LayerSolution cut = solve_layer(*p, {2060, kInfinite, nullptr, nullptr});
    check_schedule(*p, cut);
    listed_s += best_list_schedule(LayerFacts<OpBits>(*p)).makespan_s;
    improved_s += cut.makespan_s;
  }
  CHECK(improved_s < 0.9 * listed_s);
}

// A graph of four operators on seven chips, two of them equal, against single layers.
struct Chips {
  std::vector<std::uint8_t> types{1, 2, 1, 4};
  std::vector<std::int32_t> from{0, 1, 0}, to{1, 3, 2};
  std::vector<std::int32_t> cores{4, 2, 1, 2, 3, 1, 1, 1, 1, 4, 2, 1, 3, 5, 1, 2, 1, 1, 8, 8, 1};
  std::vector<double> one_core_s, all_cores_s;

  Chips() {
    Numbers numbers(5);
    for (std::size_t chip = 0; chip < 7; ++chip) {
      for (std::size_t op = 0; op < 4; ++op) {
        one_core_s.push_back(chip == 3 ? one_core_s[op] : 1.0 + numbers.below(40));
        all_cores_s.push_back(chip == 3 ? all_cores_s[op] : one_core_s.back() / 2.0);
      }
    }
  }
};

struct Rows {
  std::vector<double> makespan_s, bound_s, start_s;
  std::vector<std::int32_t> proved_by, status, mode;
  std::vector<std::int64_t> nodes;

  Rows(std::size_t layers, std::size_t ops)
      : makespan_s(layers),
        bound_s(layers),
        start_s(layers * ops),
        proved_by(layers),
        status(layers, -1),
        mode(layers * ops),
        nodes(layers) {}
  LayerAnswers view() { return {makespan_s, bound_s, proved_by, nodes, status, start_s, mode}; }
};

Rows one_layer(const Chips& c, std::size_t chip, std::int32_t first_from) {
  const std::vector<std::int64_t> op_ptr{0, 4}, mode_ptr{0, 2, 4, 6, 8}, edge_ptr{0, 3};
  std::vector<std::int32_t> cores(8), from = c.from;
  from[0] = first_from;
  std::vector<double> seconds;
  for (std::size_t op = 0; op < 4; ++op) {
    cores[2 * op] = 1;
    seconds.push_back(c.one_core_s[4 * chip + op]);
    seconds.push_back(c.all_cores_s[4 * chip + op]);
  }
  const std::span<const std::int32_t> own{&c.cores[kResources * chip], kResources};
  const LayerBatch batch{op_ptr,   c.types, mode_ptr, cores, seconds,
                         edge_ptr, from,    c.to,     own,   ScheduleRule::kExclusive};
  Rows rows(1, 4);
  solve_layers(batch, kEnough, Terms::kGiven, rows.view(), 1);
  return rows;
}

void a_graph_on_chips_is_layers_one_by_one() {
  const Chips c;
  for (const int threads : {1, 3}) {
    Rows rows(7, 4);
    const GraphOnChips given{
        c.types, c.from, c.to, c.one_core_s, c.all_cores_s, c.cores, ScheduleRule::kExclusive};
    solve_on_chips(given, kEnough, rows.view(), threads);
    for (std::size_t chip = 0; chip < 7; ++chip) {
      const Rows alone = one_layer(c, chip, 0);
      CHECK(rows.status[chip] == 0 && alone.status[0] == 0);
      CHECK(rows.makespan_s[chip] == alone.makespan_s[0] && rows.nodes[chip] == alone.nodes[0]);
      for (std::size_t op = 0; op < 4; ++op) {
        CHECK(rows.start_s[4 * chip + op] == alone.start_s[op]);
        CHECK(rows.mode[4 * chip + op] == alone.mode[op]);
      }
    }
  }
  for (const std::int32_t from : {-1, 1, 2}) {  // edge 0 leads to operator 1
    CHECK(one_layer(c, 0, from).status[0] == static_cast<std::int32_t>(Status::kBadEdge));
  }
}

void bad_layers_have_a_status() {
  Numbers numbers(42);
  const auto p = std::make_unique<LayerProblem>();
  random_problem(numbers, 6, p.get());
  p->modes[0].seconds = std::numeric_limits<double>::quiet_NaN();
  CHECK(check_layer(*p) == Status::kNotFinite);
  p->modes[0].seconds = -1.0;
  CHECK(check_layer(*p) == Status::kNegative);
  p->modes[0].seconds = 1.0;
  p->modes[0].use[0] = 99;
  CHECK(check_layer(*p) == Status::kBadMode);
  // An operator on no core would overlap operators that the bounds assume to run alone.
  std::fill(p->modes[0].use, p->modes[0].use + kResources, 0);
  CHECK(check_layer(*p) == Status::kBadMode);
  p->modes[0].use[0] = 1;
  p->before[0] = 1;
  CHECK(check_layer(*p) == Status::kBadEdge);
  p->size = 0;
  CHECK(check_layer(*p) == Status::kBadShape);
  p->size = kMaxLayerOps + 1;
  CHECK(check_layer(*p) == Status::kTooManyOps);
}

}  // namespace

int main() {
  random_layers_are_scheduled();
  largest_layers_and_no_time();
  schedules_are_improved();
  a_graph_on_chips_is_layers_one_by_one();
  bad_layers_have_a_status();
  return phaze::test::report("layer");
}
