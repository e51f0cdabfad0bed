// Tables of layers drawn at random, the same on every machine.
#pragma once

#include <cstdint>
#include <vector>

#include "numbers.hpp"
#include "phaze/placement.hpp"

namespace phaze::test {

struct Table {
  int size;
  std::vector<double> forward, backward, stash, resident, once, sync;
  std::vector<std::uint8_t> wide;
  std::vector<std::int32_t> from, to;
  std::vector<double> edge_s, edge_bytes;

  PlacementLayers view() const {
    PlacementLayers l{};
    l.layers = size;
    l.forward_s = forward;
    l.backward_s = backward;
    l.stash_bytes = stash;
    l.resident_bytes = resident;
    l.once_bytes = once;
    l.sync_s = sync;
    l.wide = wide;
    l.edge_from = from;
    l.edge_to = to;
    l.edge_s = edge_s;
    l.edge_bytes = edge_bytes;
    return l;
  }
};

template <typename Source>
Table random_chain(Source& numbers, int size) {
  Table t{};
  t.size = size;
  for (int i = 0; i < size; ++i) {
    t.forward.push_back(0.1 * numbers.below(50));
    t.backward.push_back(0.1 * numbers.below(90));
    t.stash.push_back(numbers.below(6));
    t.resident.push_back(numbers.below(12));
    t.once.push_back(numbers.below(4));
    t.sync.push_back(0.5 * numbers.below(20));
    t.wide.push_back(numbers.below(3) > 0 ? 1 : 0);
    if (i == 0) continue;
    t.from.push_back(i - 1);
    t.to.push_back(i);
    t.edge_s.push_back(0.1 * numbers.below(30));
    t.edge_bytes.push_back(numbers.below(8));
  }
  return t;
}

// Removes some edges of a chain and adds others.
template <typename Source>
void branch(Source& numbers, Table* t) {
  for (std::size_t e = 0; e < t->from.size(); ++e) {
    if (numbers.below(3) == 0) t->from[e] = numbers.below(t->to[e]);
  }
}

}  // namespace phaze::test
