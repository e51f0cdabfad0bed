// Time of one algorithm for one collective, given how the group lies on the fabric. Private to the
// collective kernel; docs/collectives.md derives each formula.
#pragma once

#include <cstdint>
#include <limits>

#include "cost/group.hpp"
#include "phaze/collective.hpp"
#include "phaze/types.hpp"

namespace phaze {

inline constexpr double kNever = std::numeric_limits<double>::infinity();  // "cannot run"

inline bool is_grid(const FabricRecord& fabric) noexcept {
  return fabric.kind == static_cast<std::int32_t>(FabricKind::kGrid);
}

struct Call {
  const FabricRecord& fabric;
  CollectiveOp op;
  double bytes;
  GroupShape shape;    // normalised
  std::int64_t ranks;  // in all
};

struct Choice {
  double time_s;
  Algorithm algorithm;
};

// The fastest algorithm; time kNever where none gives a finite time. Preconditions as below.
Choice fastest_algorithm(const Call& call, const Group& group) noexcept;

// Seconds; kNever where the algorithm cannot run this call. Precondition: the call was checked and
// `group` is lay_out(call.fabric, call.shape) with status kOk. Under a library's protocols the
// fastest one that may be used counts.
double time_with(const Call& call, const Group& group, Algorithm algorithm) noexcept;

// Which of a library's ways to move messages an operation takes.
Transfer transfer_of(CollectiveOp op) noexcept;

// Seconds of one message. Precondition: both ranks are on the fabric, and it was checked.
double message_s(const FabricRecord& fabric, double bytes, std::int64_t from,
                 std::int64_t to) noexcept;

}  // namespace phaze
