#include "phaze/placement.hpp"

#include "bytes.hpp"
#include "plan/placement_tables.hpp"

namespace phaze::fuzz {
namespace {

void spoil(Bytes& bytes, test::Table* table) {
  std::vector<double>* const columns[] = {&table->forward,  &table->backward,  &table->stash,
                                          &table->resident, &table->once,      &table->sync,
                                          &table->edge_s,   &table->edge_bytes};
  for (int changes = bytes.below(3); changes > 0; --changes) {
    bytes.spoil(columns[bytes.below(static_cast<std::int32_t>(std::size(columns)))]);
  }
  if (!table->from.empty() && bytes.rarely(6)) table->from[0] = bytes.awkward_int();
  if (!table->to.empty() && bytes.rarely(6)) table->to[0] = bytes.awkward_int();
}

}  // namespace

void placement(Bytes bytes) {
  test::Table table = test::random_chain(bytes, 1 + bytes.below(7));
  if (bytes.below(2) == 1) test::branch(bytes, &table);
  spoil(bytes, &table);
  PlacementLayers view = table.view();
  if (bytes.rarely(8)) view.layers = bytes.awkward_int();
  const PublishedRules rules{bytes.rarely(4) ? bytes.awkward() : bytes.below(60),
                             bytes.rarely(4) ? bytes.awkward_integer() : 1 + bytes.below(9),
                             bytes.rarely(4) ? bytes.awkward_integer() : 1 + bytes.below(9),
                             1 + bytes.below(3), bytes.below(2) == 0};
  PlacementPlan best;
  if (check_placement(view) != Status::kOk) {
    REQUIRE(place_published(view, rules, kInfinite, &best) != Status::kOk);
    return;
  }
  if (place_published(view, rules, kInfinite, &best) == Status::kOk) REQUIRE(best.time_s >= 0.0);
}

}  // namespace phaze::fuzz
