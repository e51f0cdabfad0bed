// Every outcome a kernel can report, with one sentence each. Kernels never print or exit, and throw
// only std::bad_alloc; the binding turns a status into a named Python exception, or passes it
// through in a batch.
#pragma once

#include <cstdint>

namespace phaze {

enum class Status : std::uint8_t {
  kOk = 0,
  kNotFinite = 1,
  kNegative = 2,
  kBadRanks = 3,
  kBadStride = 4,
  kGroupTooLarge = 5,
  kBadOperation = 6,
  kBadFabric = 7,
  kNotApplicable = 8,
  kBadChip = 9,
  kBadShape = 10,
  kTooLarge = 11,
  kBadTuning = 12,
  kTooManyOps = 13,
  kBadMode = 14,
  kBadEdge = 15,
  kNoMapping = 16,
  kBadLayers = 17,
  kTooManyCuts = 18,
  kBadRules = 19,
};

inline constexpr int kStatusCount = 20;

// The sentence of a status; static storage, safe from any thread.
constexpr const char* sentence(Status status) noexcept {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kNotFinite:
      return "a size is NaN or infinite; expected a finite number";
    case Status::kNegative:
      return "a size is negative; expected zero or more";
    case Status::kBadRanks:
      return "ranks must be at least 1 (exactly 1 or 2 for point-to-point)";
    case Status::kBadStride:
      return "stride must be at least 1";
    case Status::kGroupTooLarge:
      return "the group does not fit the fabric: (ranks - 1) * stride + 1 exceeds its devices";
    case Status::kBadOperation:
      return "unknown collective operation";
    case Status::kBadFabric:
      return "the fabric record is malformed: levels, sizes, bandwidths or latencies out of range";
    case Status::kNotApplicable:
      return "this algorithm cannot run this operation on this group";
    case Status::kBadChip:
      return "the chip record is malformed: a count, size or bandwidth is negative or not finite";
    case Status::kBadShape:
      return "a dimension of the operator is zero or negative; expected at least 1";
    case Status::kTooLarge:
      return "the operator is too large: b * m * k * n may be at most 2^62, a dimension 2^40";
    case Status::kTooManyOps:
      return "the layer has too many operators; expected at most 64";
    case Status::kBadMode:
      return "an operator has no way to run, or needs cores that the chip does not have";
    case Status::kBadEdge:
      return "an edge points to an operator that stands earlier; expected topological order";
    case Status::kBadLayers:
      return "the table of layers is malformed: expected 1 to 4096 layers, 1 to 4 variants, and "
             "one value each";
    case Status::kTooManyCuts:
      return "the graph can be cut in more than 20000 ways; tie layers that belong together";
    case Status::kBadRules:
      return "a limit is out of range: expected at least one device, micro-batch and stage";
    case Status::kNoMapping:
      return "no block of the product fits a core's local buffer under the allowed dataflows";
    case Status::kBadTuning:
      return "the tuning or precision is malformed: a share, rate or size is out of range";
  }
  return "unknown status";
}

}  // namespace phaze
