// Time of a collective over a group of ranks on a fabric.
//
// A group is one run of devices at ranks base, base + stride, base + 2*stride, ..., or equally many
// such runs at equal distances (GroupShape), aligned so that it starts at the beginning of the
// tiers or dimensions it spans. All groups of the same shape are assumed to run at once, so a
// strided group on a grid shares each link with stride - 1 others.
//
// V is `bytes`: the vector each rank holds (all-reduce; input of reduce-scatter; output of
// all-gather; send buffer of all-to-all), or the message (broadcast, point-to-point). With p ranks,
// per-direction bandwidth B and per-step latency a, on one switched tier:
//
//   ring all-reduce            2 (p-1)/p V/B + 2 (p-1) a      (Thakur et al. 2005)
//   tree all-reduce            2 V/B + 2 ceil(log2 p) a       (pipelined double binary tree,
//                                                              Sanders et al. 2009)
//   ring reduce-scatter, all-gather   half the ring all-reduce
//   pairwise all-to-all        (p-1)/p V/B + (p-1) a
//   tree broadcast             V/B + ceil(log2 p) a
//   point-to-point             V/B + a
//
// A library's protocol replaces B and a, and adds a start-up time and the time to copy the bytes;
// the fastest protocol whose size limit allows the message is used. docs/collectives.md derives the
// tiered and grid forms. Every function is pure, O(levels^2) at most, and may run from any thread;
// only a batch can throw, when memory runs out (std::bad_alloc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

#include "phaze/status.hpp"
#include "phaze/types.hpp"

namespace phaze {

enum class CollectiveOp : std::uint8_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kAllToAll = 3,
  kBroadcast = 4,
  kPointToPoint = 5,
};
inline constexpr int kCollectiveOpCount = 6;

// Ties between algorithms go to the one listed first here.
enum class Algorithm : std::uint8_t {
  kNone = 0,              // one rank or no bytes: nothing to do
  kRing = 1,              // one ring through every rank, as fast as its slowest link
  kTree = 2,              // pipelined tree; few steps, for small messages
  kHierarchical = 3,      // tier by tier, innermost first
  kRailRing = 4,          // as many rings as inner members, so that each uses its own outer port
  kPairwise = 5,          // all-to-all, one partner after another
  kDirect = 6,            // point-to-point
  kSnakeRing = 7,         // grid: one Hamiltonian cycle through the brick, both directions
  kDimensionOrdered = 8,  // grid: one dimension after another, fastest first
  kMultiRing = 9,         // grid: the vector split over all dimensions, rotating among them
  kInSwitch = 10,         // all-reduce summed inside the switch
};
inline constexpr int kAlgorithmCount = 11;

// Names used in files, options and Python; static storage.
inline constexpr const char* kCollectiveOpNames[] = {
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "point-to-point",
};
constexpr const char* name(CollectiveOp op) noexcept {
  const auto code = static_cast<std::size_t>(op);
  return code < std::size(kCollectiveOpNames) ? kCollectiveOpNames[code] : "unknown";
}

inline constexpr const char* kAlgorithmNames[] = {
    "none",      "ring",   "tree",       "hierarchical",      "rail-ring",
    "pairwise",  "direct", "snake-ring", "dimension-ordered", "multi-ring",
    "in-switch",
};
constexpr const char* name(Algorithm algorithm) noexcept {
  const auto code = static_cast<std::size_t>(algorithm);
  return code < std::size(kAlgorithmNames) ? kAlgorithmNames[code] : "unknown";
}

struct CollectiveResult {
  double time_s;  // NaN unless status is kOk
  Algorithm algorithm;
  Status status;
};

// Ranks base + i * stride + j * outer_stride, i < ranks, j < outer_ranks; outer_ranks = 1 means one
// run. The two runs may be given in either order. The status is kBadStride if they overlap, that is
// if the larger stride does not reach beyond the run of the smaller one.
struct GroupShape {
  std::int64_t ranks;
  std::int64_t stride = 1;
  std::int64_t outer_ranks = 1;
  std::int64_t outer_stride = 0;
};

// Checks every constraint on a FabricRecord; returns kOk or kBadFabric.
Status check_fabric(const FabricRecord& fabric) noexcept;

// A fabric that is checked once and then used for many calls.
struct CheckedFabric {
  explicit CheckedFabric(const FabricRecord& record) noexcept;

  FabricRecord record;
  Status status;
  std::int64_t devices;  // number of devices; 0 if the fabric is invalid
};

// Returns the fastest algorithm for this group and its time. Two runs that form one contiguous run
// (outer_stride == ranks * stride) give the bits of that one run.
CollectiveResult collective(const FabricRecord& fabric, CollectiveOp op, double bytes,
                            const GroupShape& shape) noexcept;
CollectiveResult collective(const CheckedFabric& fabric, CollectiveOp op, double bytes,
                            const GroupShape& shape) noexcept;
inline CollectiveResult collective(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                   std::int64_t ranks, std::int64_t stride) noexcept {
  return collective(fabric, op, bytes, GroupShape{ranks, stride});
}

// Time of one message from rank `from` to rank `to` while every pair at the same distance also
// sends one. Unlike point-to-point over a stride, it takes the position of the pair into account:
// ranks 7 and 8 are in different nodes of 8. From rank 0 the two are equal to the last bit. A
// message to oneself is free; kBadRanks for a negative rank, kGroupTooLarge for a rank that the
// fabric does not have.
CollectiveResult message(const FabricRecord& fabric, double bytes, std::int64_t from,
                         std::int64_t to) noexcept;
CollectiveResult message(const CheckedFabric& fabric, double bytes, std::int64_t from,
                         std::int64_t to) noexcept;

// Time of one named algorithm; kNotApplicable if it cannot run.
CollectiveResult collective_with(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                 const GroupShape& shape, Algorithm algorithm) noexcept;
inline CollectiveResult collective_with(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                        std::int64_t ranks, std::int64_t stride,
                                        Algorithm algorithm) noexcept {
  return collective_with(fabric, op, bytes, GroupShape{ranks, stride}, algorithm);
}

// Lower bound from the bytes a rank must send, over its fastest port (on a grid, over all its links
// at once): no algorithm here is ever faster, to the last bit. NaN if collective() returns an error
// status.
double collective_bound_s(const FabricRecord& fabric, CollectiveOp op, double bytes,
                          const GroupShape& shape) noexcept;
inline double collective_bound_s(const FabricRecord& fabric, CollectiveOp op, double bytes,
                                 std::int64_t ranks, std::int64_t stride) noexcept {
  return collective_bound_s(fabric, op, bytes, GroupShape{ranks, stride});
}

// Struct-of-arrays batch: row i is collective(fabrics[fabric[i]], op[i], bytes[i], {ranks[i],
// stride[i], outer_ranks[i], outer_stride[i]}). All spans but `fabrics` have one length, or both
// outer ones are empty and every group is one run. A bad row gets its status and NaN.
struct CollectiveQuery {
  std::span<const FabricRecord> fabrics;
  std::span<const std::int32_t> fabric;
  std::span<const std::uint8_t> op;
  std::span<const double> bytes;
  std::span<const std::int64_t> ranks;
  std::span<const std::int64_t> stride;
  std::span<const std::int64_t> outer_ranks;
  std::span<const std::int64_t> outer_stride;
};
struct CollectiveAnswer {
  std::span<double> time_s;
  std::span<std::uint8_t> algorithm;
  std::span<std::uint8_t> status;
};
void collective_batch(const CollectiveQuery& query, const CollectiveAnswer& answer, int threads);

// Row i is message(fabric, bytes[i], from[i], to[i]); all spans have one length.
struct MessageQuery {
  FabricRecord fabric;
  std::span<const double> bytes;
  std::span<const std::int64_t> from;
  std::span<const std::int64_t> to;
};
void message_batch(const MessageQuery& query, const CollectiveAnswer& answer) noexcept;

}  // namespace phaze
