#include <cstring>

#include "bytes.hpp"
#include "phaze/mapping_search.hpp"
#include "phaze/relaxation.hpp"
#include "wafer/mapping_chain.hpp"

namespace phaze::fuzz {
namespace {

test::Owned draw(Bytes& bytes) {
  std::vector<MeshRun> slots;
  std::int32_t stride = 1;
  for (int k = bytes.below(3); k > 0; --k) {
    slots.push_back({0, 2 + bytes.below(2), stride});
    stride *= slots.back().size;
  }
  stride = 1;
  for (int k = bytes.below(2); k > 0; --k) {
    slots.push_back({1, 2 + bytes.below(2), stride});
    stride *= slots.back().size;
  }
  test::Owned made = test::chain_of(1 + bytes.below(4), slots, 1 + bytes.below(31));
  for (double& value : made.table) value = 0.25 * bytes.below(16);
  made.rules.capacity_bytes = 1.0 + 8.0 * bytes.below(256);
  made.rules.micro_batches = 1 + bytes.below(8);
  made.rules.modes = 1 + bytes.below(63);
  made.rules.volume = bytes.below(2);
  made.rules.linear = bytes.below(2);
  made.rules.stream_shared = bytes.below(2);
  made.rules.chunks = 1 + bytes.below(2);
  made.rules.zero_bubble = made.rules.chunks == 1 ? bytes.below(2) : 0;
  for (std::int32_t& count : made.blocks) count = bytes.below(4);
  for (MapOpRecord& op : made.ops) {
    op.part = bytes.rarely(6) ? bytes.below(3) : 1;
    op.expert = bytes.below(2);
    op.output_stored = bytes.below(2);
    op.outputs = bytes.below(8);
    op.limit[bytes.below(4)] = 1 + bytes.below(8);
  }
  return made;
}

void spoil(Bytes& bytes, test::Owned* made) {
  switch (bytes.below(14)) {
    case 0:
      bytes.spoil(&made->table);
      break;
    case 1:
      made->edges[0].to = bytes.awkward_int();
      break;
    case 2:
      made->edges[0].bytes = bytes.awkward();
      break;
    case 3:
      made->rules.micro_batches = bytes.awkward_integer();
      break;
    case 4:
      made->rules.capacity_bytes = bytes.awkward();
      break;
    case 5:
      made->blocks[0] = bytes.awkward_int();
      break;
    case 6:
      made->ops[0].roles = bytes.awkward_int();
      break;
    case 7:
      made->rules.chunks = bytes.awkward_int();
      break;
    case 8:
      made->ops[0].limit[0] = bytes.awkward_integer();
      break;
    case 9:
      if (!made->slots.empty()) made->slots[0].size = bytes.awkward_int();
      break;
    case 10:
      made->ops[0].outputs = bytes.awkward_int();
      break;
    default:
      break;
  }
}

}  // namespace

void mapping(Bytes bytes) {
  test::Owned made = draw(bytes);
  spoil(bytes, &made);
  if (check_problem(made.problem()) != Status::kOk) return;
  Mapping mapping(made.problem());
  std::vector<OpMapping> start;
  for (int i = 0; i < mapping.ops(); ++i) {
    if (mapping.choices(i).empty()) return;
    start.push_back(mapping.choices(i)[static_cast<std::size_t>(
        bytes.below(static_cast<std::int32_t>(mapping.choices(i).size())))]);
  }
  mapping.assign(start);
  const MapScore before = mapping.score();
  REQUIRE(before.time_s >= 0.0 && before.memory_bytes >= 0.0);
  const int op = bytes.below(mapping.ops());
  mapping.change(op, mapping.choices(op).back());
  mapping.change(op, start[static_cast<std::size_t>(op)]);
  const MapScore again = mapping.score();
  REQUIRE(std::memcmp(&before, &again, sizeof before) == 0);
  const double bound = Relaxation(mapping).bound(bytes.below(5) / 4.0, 0.0, 0.0).time_s;
  const MapSearchResult found = anneal(mapping, {7, 30, 0.1});
  REQUIRE(objective(mapping, found.score) <= objective(mapping, before));
  const bool fits = found.score.over_bytes == 0.0 && found.score.stream_over_bytes == 0.0;
  REQUIRE(!fits || bound <= found.score.time_s * (1.0 + 1e-9));
}

}  // namespace phaze::fuzz
