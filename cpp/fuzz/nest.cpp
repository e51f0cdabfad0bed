#include "phaze/nest.hpp"

#include "bytes.hpp"

namespace phaze::fuzz {

void nest(Bytes bytes) {
  std::vector<std::int64_t> size;
  std::vector<double> rate, latency;
  for (int level = 1 + bytes.below(4); level > 0; --level) {
    size.push_back(bytes.rarely(20) ? bytes.awkward_integer() : 1 + bytes.below(4));
    rate.push_back(1.0 + bytes.number(1.0));
    latency.push_back(bytes.number(0.25));
  }
  std::vector<double> forward, backward, weights, kept, sent;
  std::vector<std::int32_t> from, to;
  const std::int32_t layers = 1 + bytes.below(7);
  for (std::int32_t i = 0; i < layers; ++i) {
    forward.push_back(bytes.number(1.0));
    backward.push_back(bytes.number(1.0));
    weights.push_back(bytes.number(1.0));
    kept.push_back(bytes.number(1.0));
    for (std::int32_t j = i + 1; j < layers; ++j) {
      if (j > i + 1 && bytes.below(3) > 0) continue;
      from.push_back(bytes.rarely(40) ? bytes.awkward_int() : i);
      to.push_back(bytes.rarely(40) ? bytes.awkward_int() : j);
      sent.push_back(bytes.number(1.0));
    }
  }
  const NestNetwork network{size, rate, latency};
  const NestLayers model{bytes.rarely(16) ? bytes.awkward_integer() : 1 + bytes.below(4),
                         forward,
                         backward,
                         weights,
                         kept,
                         from,
                         to,
                         sent};
  const NestRules rules{bytes.rarely(8) ? bytes.awkward() : 4.0 * bytes.below(60),
                        bytes.rarely(8) ? bytes.awkward() : 8.0,
                        bytes.rarely(8) ? bytes.awkward_integer() : 1 + bytes.below(20),
                        bytes.below(2) == 1, bytes.below(3) == 1};
  NestPlan best;
  const Status status = place_nest(network, model, rules, kInfinite, &best);
  REQUIRE((status == Status::kOk) == (check_nest(network, model, rules) == Status::kOk));
  if (status != Status::kOk) return;
  NestNeed need{};
  REQUIRE(least_nest_memory(network, model, rules, &need) == Status::kOk);
  if (best.begins.empty()) return;
  REQUIRE(best.time_s >= best.load_s && best.replicas >= 1);
  REQUIRE(best.begins[0] == 0 && need.bytes <= rules.memory_bytes);
  NestPlan below;
  REQUIRE(place_nest(network, model, rules, best.time_s, &below) == Status::kOk);
  REQUIRE(below.begins.empty());
}

}  // namespace phaze::fuzz
