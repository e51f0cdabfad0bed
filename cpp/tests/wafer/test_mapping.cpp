// Edge cases of the evaluation of mappings: bad problems, largest sizes, changes and reverted
// changes. tests/wafer/test_mapping.py compares the terms with an oracle.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"
#include "phaze/relaxation.hpp"
#include "wafer/mapping_chain.hpp"

namespace {

using namespace phaze;
using test::chain_of;
using test::Owned;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool same_bits(const MapScore& a, const MapScore& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void bad_problems_get_a_status() {
  const auto status = [](auto&& change) {
    Owned made = chain_of(3, {{0, 2, 1}, {1, 3, 1}}, 31);
    change(made);
    return check_problem(made.problem());
  };
  CHECK(status([](Owned&) {}) == Status::kOk);
  CHECK(status([](Owned& o) { o.ops.clear(); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.ops.resize(kMaxMapOps + 1); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.slots.resize(kMaxSlots + 1, {0, 2, 1}); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.slots[0].size = 1; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.slots[0].axis = -1; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.slots[0].size = 1 << 30; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.divisors = {1, 6}; }) != Status::kOk);
  CHECK(status([](Owned& o) { std::swap(o.divisors[1], o.divisors[2]); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.column.pop_back(); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.column[0] = o.columns; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.column[1] = -1; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.table.pop_back(); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.table[4] = kNan; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.table[4] = 1.7e308; }) != Status::kOk);  // sums are infinite
  CHECK(status([](Owned& o) { o.edges[0].bytes = kNan; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.edges[0].to = 3; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.edges[0].from = -1; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.edges.erase(o.edges.begin()); }) != Status::kOk);  // not joined
  CHECK(status([](Owned& o) { o.chain[0] = 3; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.chain.clear(); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.blocks[0] = -1; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.blocks.clear(); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.boundary.pop_back(); }) != Status::kOk);
  CHECK(status([](Owned& o) { o.boundary[0] = kNan; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.micro_batches = 0; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.capacity_bytes = kNan; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.memory_bytes_per_s = 0.0; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.stream_bytes_per_s = 0.0; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.hop_s = kNan; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.y_bytes_per_s = 0.0; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.modes = 0; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.modes = 1 << kWeightModeCount; }) != Status::kOk);
  CHECK(status([](Owned& o) { o.rules.modes = (1 << kWeightModeCount) - 1; }) == Status::kOk);
  CHECK(status([](Owned& o) { o.edges[2].kind = 3; }) == Status::kOk);
  CHECK(status([](Owned& o) { o.edges[2].kind = 4; }) != Status::kOk);
}

// The largest numbers of operators and slots: no mask, count or table may overflow.
void largest_sizes() {
  std::vector<MeshRun> slots;
  for (int axis = 0; axis < 2; ++axis) {
    for (int k = 0; k < kMaxSlots / 2; ++k) slots.push_back({axis, 2, 1 << k});
  }
  constexpr std::int32_t kBatchOrColumns = 5;
  const Owned made = chain_of(kMaxMapOps, slots, kBatchOrColumns);
  CHECK(check_problem(made.problem()) == Status::kOk);
  Mapping mapping(made.problem());
  std::vector<OpMapping> op_mappings;
  for (int i = 0; i < mapping.ops(); ++i) {
    const std::vector<OpMapping>& choices = mapping.choices(i);
    CHECK(!choices.empty());
    op_mappings.push_back(choices[static_cast<std::size_t>(i * 7) % choices.size()]);
  }
  mapping.assign(op_mappings);
  const MapScore before = mapping.score();
  CHECK(before.time_s > 0.0 && std::isfinite(before.time_s));
  mapping.change(kMaxMapOps - 1, mapping.choices(kMaxMapOps - 1).back());
  mapping.change(kMaxMapOps - 1, op_mappings.back());
  CHECK(same_bits(mapping.score(), before));
  const MapSearchResult found = anneal(mapping, {7, 200, 0.1});
  CHECK(objective(mapping, found.score) <= objective(mapping, before));
  CHECK(Relaxation(mapping).bound(0.5, 0.0, 0.0).time_s <= found.score.time_s);
}

void no_slots_and_one_operator() {
  const Owned made = chain_of(1, {}, 31);
  CHECK(check_problem(made.problem()) == Status::kOk);
  Mapping mapping(made.problem());
  CHECK(mapping.choices(0).size() == 1);
  mapping.assign(mapping.choices(0));
  // Two blocks in the first stage, one in the last; forward and backward one second each.
  const MapScore score = mapping.score();
  CHECK(score.slowest_stage_s == 2.0 * 2.0 + 0.25);
  CHECK(score.tail_s == 2.0 * 30.0 / 8.0);
  CHECK(score.time_s == 3.0 * 4.25 + 4.25 + 2.5 + 7.5);
  CHECK(descend(mapping, 2).score.time_s <= score.time_s);
}

// Outputs of many operators with the same price per byte: exact, and within the time limit.
void many_outputs_of_one_price() {
  constexpr int kOps = 24;
  Owned made = chain_of(kOps, {}, 31);
  made.rules.stream_capacity_bytes = 0.0;
  made.rules.state_bytes = made.rules.weight_bytes = made.rules.gradient_bytes = 0.0;
  made.blocks = {4};
  made.boundary = {0.0};
  made.rules.capacity_bytes = 2.0 * kOps + 1.5;
  Mapping mapping(made.problem());
  std::vector<OpMapping> op_mappings;
  for (int i = 0; i < kOps; ++i) op_mappings.push_back(mapping.choices(i)[0]);
  mapping.assign(op_mappings);
  const MapScore score = mapping.score();
  CHECK(score.over_bytes == 0.0);
  // A limit above the time changes nothing.
  CHECK(same_bits(mapping.score({}, nullptr, score.time_s * (1.0 + 1e-9)), score));
  // 4 * 24 stored, three of four saved per output: 16 of them leave 1 * 24 + 3 * 8 and the live
  // bytes.
  CHECK(score.memory_bytes <= made.rules.capacity_bytes);
}

// Six outputs of one byte in four blocks and two micro-batches in flight, one byte of working set:
// 49 bytes with a memory limit of 40. At 1/8 s per byte, storing an output costs one second, as
// much as recomputing it: a block takes 12 + 6 + (1 - 40) / 8 s in the first stage, 12 s in the
// second.
void memory_has_a_price() {
  Owned made = chain_of(6, {}, 31);
  made.rules.state_bytes = made.rules.weight_bytes = made.rules.gradient_bytes = 0.0;
  made.rules.capacity_bytes = 40.0;
  made.blocks = {4, 4};
  made.boundary = {0.0, 0.0};
  for (MapOpRecord& op : made.ops) op.outputs = 3;
  Mapping mapping(made.problem());
  std::vector<OpMapping> op_mappings;
  for (int i = 0; i < 6; ++i) op_mappings.push_back(mapping.choices(i)[0]);
  mapping.assign(op_mappings);
  CHECK_CLOSE(Relaxation(mapping).bound(1.0, 0.0, 0.0).time_s, 4.0 * 48.0 + 48.0, 1e-8);
  const double priced_s = Relaxation(mapping).bound(1.0, 0.0, 0.125).time_s;
  CHECK_CLOSE(priced_s, 4.0 * 4.0 * 13.125 + 48.0, 1e-8);
  CHECK(priced_s <= mapping.score().time_s);
}

// Enumerates every mapping of two operators on four dies.
void exhaust_tries_every_mapping() {
  const Owned made = chain_of(2, {{0, 2, 1}, {1, 2, 1}}, 31);
  Mapping mapping(made.problem());
  std::vector<std::vector<OpMapping>> options(2);
  for (int op = 0; op < 2; ++op) {
    for (const OpMapping& choice : mapping.choices(op)) {
      for (std::uint8_t mode = 0; mode < kWeightModeCount; ++mode) {
        if ((made.rules.modes >> mode & 1) == 0) continue;
        options[static_cast<std::size_t>(op)].push_back(choice);
        if (mapping.weighted(op)) {
          options[static_cast<std::size_t>(op)].back().mode = mode;
        } else {
          break;
        }
      }
    }
  }
  double best = std::numeric_limits<double>::infinity();
  for (const OpMapping& first : options[0]) {
    for (const OpMapping& second : options[1]) {
      mapping.assign(std::vector<OpMapping>{first, second});
      best = std::min(best, objective(mapping, mapping.score()));
    }
  }
  const MapSearchResult found = exhaust(mapping);
  CHECK(objective(mapping, found.score) == best);
  CHECK(found.evaluations == static_cast<std::int64_t>(options[0].size()) *
                                 static_cast<std::int64_t>(options[1].size()));
}

}  // namespace

int main() {
  bad_problems_get_a_status();
  largest_sizes();
  no_slots_and_one_operator();
  many_outputs_of_one_price();
  memory_has_a_price();
  exhaust_tries_every_mapping();
  return phaze::test::report("mapping");
}
