// Every outcome a kernel can report, with one sentence each. Kernels never print or exit, and throw
// only std::bad_alloc; the binding turns a status into a named Python exception, or passes it
// through in a batch. Planning and pipeline schedules add outcomes of their own in the same form
// (PlanStatus, PipelineStatus).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

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

// The sentence of a status; static storage, safe from any thread.
inline constexpr const char* kStatusSentences[] = {
    "ok",
    "a size is NaN or infinite; expected a finite number",
    "a size is negative; expected zero or more",
    "ranks must be at least 1 (exactly 1 or 2 for point-to-point)",
    "stride must be at least 1",
    "the group does not fit the fabric: (ranks - 1) * stride + 1 exceeds its devices",
    "unknown collective operation",
    "the fabric record is malformed: levels, sizes, bandwidths or latencies out of range",
    "this algorithm cannot run this operation on this group",
    "the chip record is malformed: a count, size or bandwidth is negative or not finite",
    "a dimension of the operator is zero or negative; expected at least 1",
    "the operator is too large: b * m * k * n may be at most 2^62, a dimension 2^40",
    "the tuning or precision is malformed: a share, rate or size is out of range",
    "the layer has too many operators; expected at most 128",
    "an operator has no way to run, or needs cores that the chip does not have",
    "an edge points to an earlier operator; expected topological order",
    "no block of the product fits a core's local buffer under the allowed dataflows",
    ("the table of layers is malformed: expected 1 to 4096 layers, 1 to 12 recompute variants, and "
     "one value each"),
    "the graph can be cut in more than 20000 ways; tie layers that belong together",
    "a limit is out of range: expected at least one device, micro-batch and stage",
};
inline constexpr int kStatusCount = static_cast<int>(std::size(kStatusSentences));

constexpr const char* sentence(Status status) noexcept {
  const auto code = static_cast<std::size_t>(status);
  return code < std::size(kStatusSentences) ? kStatusSentences[code] : "unknown status";
}

}  // namespace phaze
