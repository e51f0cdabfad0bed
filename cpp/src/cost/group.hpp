// Position of a group of ranks on a fabric: members per level, and the limits of each level.
// Private to the collective kernel.
#pragma once

#include <cstdint>

#include "phaze/collective.hpp"
#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

// Bandwidth and latency of each level for a collective.
struct LinkRates {
  double bytes_per_s[kMaxLevels];
  double latency_s[kMaxLevels];
};
LinkRates link_rates(const FabricRecord& fabric) noexcept;
// Rates under a protocol; if `merged`, copies are part of the links' time.
LinkRates link_rates(const FabricRecord& fabric, const ProtocolRecord& protocol,
                     bool merged) noexcept;

// One level (tier or dimension) on which the group has more than one member.
struct ActiveLevel {
  std::int64_t members;
  double inverse;           // 1 / members
  double seconds_per_byte;  // of one direction of one port or link, divided among sharing groups
  double hop_latency_s;     // between neighbours: `stride` hops on a grid, one step on a switch
  double step_latency_s;    // of one step round the ring through the members
  bool ring;                // grid: the members close into a ring
  bool chain;               // trees pass from member to member here
  // One pass around that ring, a reduce-scatter or an all-gather of v bytes, takes v *
  // pass_seconds_per_byte + pass_latency_s.
  double pass_seconds_per_byte;
  double pass_latency_s;
};

struct Group {
  Status status = Status::kOk;
  bool regular = true;  // equally many members in every unit the group touches
  int active = 0;
  ActiveLevel level[kMaxLevels];
  // Over all levels the group spans; irregular groups have only these fields.
  double slowest_seconds_per_byte = 0.0;
  double fastest_seconds_per_byte = 0.0;
  double step_latency_s = 0.0;
  double ring_latency_s = 0.0;  // once round a ring through all members
  bool contiguous = true;       // grid: stride 1 in every active dimension
  int outermost = 0;            // level of the fabric that the group reaches
};

// The same group with the smaller stride first, and as one run (outer_ranks 1, outer_stride 0) if
// it is one; kBadRanks, kBadStride or kGroupTooLarge if the runs are not a valid group.
Status normalise(GroupShape& shape) noexcept;

// Number of ranks of the fabric. Precondition: check_fabric(fabric) == kOk.
std::int64_t capacity(const FabricRecord& fabric) noexcept;

// The group's layout. Precondition: check_fabric(fabric) == kOk, `shape` is normalised, ranks >= 2.
Group lay_out(const FabricRecord& fabric, const GroupShape& shape, const LinkRates& rates) noexcept;
Group lay_out(const FabricRecord& fabric, const GroupShape& shape) noexcept;

}  // namespace phaze
