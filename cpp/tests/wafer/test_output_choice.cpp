// The choice of outputs against enumeration, and ranges of a step's time against the time.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "phaze/mapping.hpp"
#include "wafer/mapping_chain.hpp"
#include "wafer/output_choice.hpp"

namespace {

using namespace phaze;
using test::Numbers;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kMost = 7;

using Item = OutputItem;

struct Case {
  OutputBlock block;
  std::vector<Item> items;

  // Seconds of a choice; infinite if it saves too little, moves too much, or moves an output that
  // must stay.
  double time_s(const Outputs& outputs, double needed, double stream_limit) const {
    double blocking = block.blocking_b_s, work = block.backward_s, hidden = block.hidden_b_s;
    double hidden_f = block.hidden_f_s, stream = block.stream_s, saved = 0.0, moved = 0.0;
    for (const Item& item : items) {
      const int output = outputs[static_cast<std::size_t>(item.op)];
      if ((output == 1 && !item.recompute) || (output == 2 && !item.offload)) return kNever;
      saved += output != 0 ? item.saved_bytes : 0.0;
      if (output == 1) {
        blocking += item.blocking_s;
        work += item.work_s;
        hidden += item.hidden_s;
      } else if (output == 2) {
        moved += item.saved_bytes;
        stream += item.stream_s;
        hidden += item.link_s;
        hidden_f += item.link_s;
      }
    }
    if (saved < needed || moved > stream_limit) return kNever;
    const double forward = block.blocking_f_s + std::max(block.forward_s, hidden_f);
    return std::max(forward + blocking + std::max(work, hidden), stream);
  }
  double least_s(double needed, double stream_limit) const {
    double least = kNever;
    int ways = 1;
    for (std::size_t i = 0; i < items.size(); ++i) ways *= kOutputCount;
    for (int way = 0; way < ways; ++way) {
      Outputs outputs{};
      int rest = way;
      for (const Item& item : items) {
        outputs[static_cast<std::size_t>(item.op)] = static_cast<std::uint8_t>(rest % kOutputCount);
        rest /= kOutputCount;
      }
      least = std::min(least, time_s(outputs, needed, stream_limit));
    }
    return least;
  }
};

// Sizes and times of few values, so that many choices tie.
Case drawn(Numbers& numbers, bool coarse) {
  const auto real = [&](int most) {
    return coarse ? numbers.below(most) : most * (1 + numbers.below(9999)) / 10007.0;
  };
  const bool offloads = numbers.below(3) > 0;
  const double rate = 1.0 / (1 + numbers.below(6)), link = numbers.below(2) * 0.1;
  Case made{
      {real(5), real(20), real(20), offloads ? real(60) : real(20), real(5), real(20), real(25)},
      {}};
  for (int i = 1 + numbers.below(kMost); i > 0; --i) {
    const bool again = !offloads || numbers.below(5) > 0;
    const double bytes = 1.0 + real(8), blocking = real(4);
    const double hidden = numbers.below(2) == 0 ? -0.5 * blocking : real(4);
    made.items.push_back({static_cast<int>(made.items.size()), again, offloads, bytes, real(6),
                          blocking, hidden, offloads ? bytes * rate : 0.0,
                          offloads ? bytes * link : 0.0});
  }
  return made;
}

void no_choice_takes_less() {
  Numbers numbers(11);
  for (int round = 0; round < 1500; ++round) {
    const Case made = drawn(numbers, round % 2 == 0);
    double all = 0.0;
    for (const Item& item : made.items) all += item.saved_bytes;
    OutputChooser chooser(made.items.data(), static_cast<int>(made.items.size()), made.block);
    double share = 1.05, stream_limit = (1.0 + 1e-12) * all * numbers.below(8) / 7.0;
    for (int stage = 0; stage < 4; ++stage) {  // less is needed, and off-wafer memory is no less
      const double needed = (1.0 - 1e-12) * share * all,
                   least_s = made.least_s(needed, stream_limit);
      Outputs outputs{};
      CHECK(chooser.choose(needed, stream_limit, kNever, outputs));
      OutputChooser fresh(made.items.data(), static_cast<int>(made.items.size()), made.block);
      const auto hint = static_cast<std::uint64_t>(numbers.below(1 << kMost));
      const double hinted_s = fresh.solve(needed, stream_limit, kNever, hint);
      if (least_s < kNever) {
        CHECK_CLOSE(made.time_s(outputs, needed, stream_limit), least_s, 1e-11);
        CHECK_CLOSE(hinted_s, least_s, 1e-11);
        CHECK(chooser.least_s(needed) <= least_s * (1.0 + 1e-12));
        OutputChooser limited(made.items.data(), static_cast<int>(made.items.size()), made.block);
        Outputs same{};
        limited.solve(0.9 * needed, stream_limit, kNever, hint);
        CHECK(limited.choose(needed, stream_limit, least_s * (1.0 + 1e-6), same));
        CHECK(same == outputs);
        if (limited.surely(needed, stream_limit))
          CHECK(!limited.choose(needed, stream_limit, least_s * (1.0 - 1e-9), same));
      } else {
        CHECK(!(hinted_s < kNever));
        CHECK(!chooser.surely(needed, stream_limit));
        for (const Item& item : made.items) {
          CHECK(outputs[static_cast<std::size_t>(item.op)] == (item.recompute ? 1 : 0));
        }
      }
      share -= 0.3 * numbers.below(3) / 2.0;
      stream_limit += numbers.below(2) * 0.1 * all;
    }
  }
}

// If a step's time is reported only as a range, the time is within it.
void a_range_holds_the_time() {
  Numbers numbers(12);
  int decided = 0;
  for (int round = 0; round < 400; ++round) {
    test::Owned made = test::chain_of(6, {{0, 2, 1}, {1, 2, 1}}, 31);
    for (double& cell : made.table) cell = (1 + numbers.below(1000)) / 700.0;
    made.rules.capacity_bytes = 5.0 + numbers.below(30);
    made.rules.state_bytes = made.rules.weight_bytes = made.rules.gradient_bytes = 0.01;
    made.rules.micro_batches = 1 + numbers.below(8);
    made.rules.stream_shared = round % 2;
    made.blocks.assign(static_cast<std::size_t>(1 + numbers.below(4)), 1 + numbers.below(4));
    made.boundary.assign(made.blocks.size(), 0.01);
    Mapping mapping(made.problem());
    std::vector<OpMapping> chosen;
    for (int op = 0; op < mapping.ops(); ++op) {
      const auto& choices = mapping.choices(op);
      const auto many = static_cast<std::int32_t>(choices.size());
      chosen.push_back(choices[static_cast<std::size_t>(numbers.below(many))]);
    }
    mapping.assign(chosen);
    const MapScore exact = mapping.score();
    for (const double wide : {1e-6, 0.01, 0.5}) {
      const double most_s = exact.time_s * (1.0 + wide);
      MapRange range{exact.time_s * (1.0 - wide), most_s};
      const MapScore score = mapping.score({}, nullptr, most_s, 0.0, &range);
      if (!std::isnan(score.time_s)) {
        CHECK(exact.over_bytes > 0.0 || score.time_s == exact.time_s);
        continue;
      }
      ++decided;
      CHECK(exact.over_bytes == 0.0);
      CHECK(range.least_s <= exact.time_s && exact.time_s <= range.most_s);
      CHECK(range.least_s >= exact.time_s * (1.0 - wide) && range.most_s <= most_s);
    }
    MapRange none{0.0, 0.5 * exact.time_s};  // a step longer than the range gets its time
    const MapScore late = mapping.score({}, nullptr, 0.5 * exact.time_s, 0.0, &none);
    CHECK(!std::isnan(late.time_s) && late.time_s > 0.5 * exact.time_s);
  }
  CHECK(decided > 100);
}

}  // namespace

int main() {
  no_choice_takes_less();
  a_range_holds_the_time();
  return phaze::test::report("output choice");
}
