// What a mapping's step takes.
#pragma once

#include <cstdint>
#include <optional>

namespace phaze {

struct MapScore {
  double time_s;        // of one step
  double memory_bytes;  // of the fullest die
  double over_bytes;    // beyond its capacity, when all that may be recomputed is
  double stream_bytes;  // off the wafer, a die's share
  double stream_over_bytes;
  double slowest_stage_s;  // of one micro-batch
  double compute_s;        // of one block, both passes, without recomputation
  double blocking_s;       // collectives it waits for
  double hidden_s;         // collectives beside it
  double tail_s;           // after the last micro-batch
};

// Seconds that a step takes at least and at most, and operators that its fullest stage computes
// again, for a mapping that is alike.
struct MapRange {
  double least_s, most_s;
  std::optional<std::uint64_t> again = {};
};

}  // namespace phaze
