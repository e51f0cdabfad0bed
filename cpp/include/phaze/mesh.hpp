// Time of collectives on an open 2-D mesh, and the load that concurrent traffic puts on its links.
//
// A group is a product of runs: a run is `size` members along one axis, `stride` dies apart. All
// groups of the same shape run at once, so that a strided run shares each link with stride - 1
// others: it has B/stride of a link of B bytes/s. With V as in collective.hpp, on runs of sizes
// f_i whose links take w_i = stride_i / B_i seconds per byte:
//
//   ordered     one run after the other, the slowest first while the vector is small:
//               sum over i of w_i (f_i - 1) V / (f_i f_{i+1} ... f_n)          (all-gather)
//               on one contiguous line (p-1)/p V/B: its end die has one link
//   ring        one Hamiltonian cycle through an even rectangle, both directions:
//               max(w_x, w_y) (p-1)/p V/2
//   split       half the vector takes x before y, the other half y before x
//   all-to-all  one run after the other: w_i floor(f/2) ceil(f/2) / f V over a run's middle link
//
// If switches connect the dies instead (FRED: Rashidi et al. 2024), each die has one link of B
// bytes per second to them and any dies form a group: (p-1)/p V/B, also for an all-to-all, two hops
// each. With in-switch reduction an all-reduce takes V/B.
//
// A reduce-scatter is an all-gather in reverse and takes as long; an all-reduce is both. Every
// function here is pure and may run from any thread; what is not noexcept may run out of memory
// (std::bad_alloc) and throws nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "phaze/collective.hpp"
#include "phaze/status.hpp"

namespace phaze {

struct MeshRun {
  std::int32_t axis;    // 0 = along a row, 1 = along a column
  std::int32_t size;    // members
  std::int32_t stride;  // dies from one member to the next
};

enum class MeshFabric : std::int32_t { kMesh = 0, kSwitch = 1, kSummingSwitch = 2 };
inline constexpr int kMeshFabricCount = 3;

struct MeshLinks {
  double bytes_per_s[2];  // of a link along x and y, per direction; switches: [0], die to switch
  double hop_s;           // of one hop
  MeshFabric fabric = MeshFabric::kMesh;
};

// Ties go to the algorithm listed first.
enum class MeshAlgorithm : std::uint8_t { kAuto = 0, kOrdered = 1, kRing = 2, kSplit = 3 };
inline constexpr int kMeshAlgorithmCount = 4;
inline constexpr const char* kMeshAlgorithmNames[] = {"auto", "ordered", "ring", "split"};

inline constexpr int kMaxMeshRuns = 12;

// Time of one algorithm as a line: slope in seconds per byte of V, and a constant. A negative slope
// means that the algorithm is not applicable.
struct MeshLine {
  double s_per_byte;
  double fixed_s;
};
using MeshLines = std::array<MeshLine, kMeshAlgorithmCount>;  // by MeshAlgorithm; kAuto unused

// Lines of an all-gather (also of a reduce-scatter; half of an all-reduce) and of an all-to-all.
MeshLines mesh_gather_lines(std::span<const MeshRun> runs, const MeshLinks& links) noexcept;
MeshLine mesh_exchange_line(std::span<const MeshRun> runs, const MeshLinks& links) noexcept;

// Line of an in-switch all-reduce; the slope is negative if the all-reduce is two all-gathers.
MeshLine mesh_reduce_line(const MeshLinks& links) noexcept;

struct MeshTime {
  double time_s;
  MeshAlgorithm algorithm;
};

// The requested algorithm if it is applicable, else the ordered one; kAuto takes the fastest.
inline MeshTime mesh_gather(const MeshLines& lines, double bytes, MeshAlgorithm wanted) noexcept {
  const auto at = [&](MeshAlgorithm a) {
    const MeshLine& line = lines[static_cast<std::size_t>(a)];
    return line.s_per_byte * bytes + line.fixed_s;
  };
  if (wanted != MeshAlgorithm::kAuto) {
    if (lines[static_cast<std::size_t>(wanted)].s_per_byte < 0.0) wanted = MeshAlgorithm::kOrdered;
    return {at(wanted), wanted};
  }
  MeshTime best{at(MeshAlgorithm::kOrdered), MeshAlgorithm::kOrdered};
  for (const MeshAlgorithm a : {MeshAlgorithm::kRing, MeshAlgorithm::kSplit}) {
    if (lines[static_cast<std::size_t>(a)].s_per_byte < 0.0) continue;
    const double time_s = at(a);
    if (time_s < best.time_s) best = {time_s, a};
  }
  return best;
}

struct MeshResult {
  double time_s;  // NaN unless status is kOk
  MeshAlgorithm algorithm;
  Status status;
};

// All-reduce, reduce-scatter, all-gather or all-to-all over one group and its cosets.
MeshResult mesh_collective(CollectiveOp op, double bytes, std::span<const MeshRun> runs,
                           const MeshLinks& links, MeshAlgorithm wanted) noexcept;

// ---- concurrent traffic ----

struct MeshFlow {
  std::int32_t from;  // die, row by row
  std::int32_t to;
  double bytes;
};

// Links leave each die towards +x, -x, +y and -y: link 4 * die + direction.
inline constexpr int kMeshDirections = 4;

// A grid of dies; nothing passes through dead dies or over dead links.
struct MeshGrid {
  std::int32_t columns;
  std::int32_t rows;
  std::span<const std::uint8_t> dead;        // columns * rows, or empty
  std::span<const std::uint8_t> dead_links;  // 4 * columns * rows, or empty
};

// Adds the flows' bytes to `loads` (4 * columns * rows). A flow is routed along its row, then its
// column; if a dead die or link blocks that route, along its column first; else along a shortest
// detour. Returns kNotApplicable if no route exists and kBadShape if a die is outside the grid.
Status mesh_loads(const MeshGrid& grid, std::span<const MeshFlow> flows, std::span<double> loads);

// One collective over every group of a rectangle of dies: `runs` of sizes that multiply to at most
// the rectangle, at (x, y).
struct MeshCollective {
  CollectiveOp op;
  MeshAlgorithm algorithm;
  double bytes;
  std::int32_t x, y, width, height;
  std::vector<MeshRun> runs;
};

// Adds the bytes that each link carries for the collectives, summed over all phases, to `loads`.
Status mesh_collective_loads(const MeshGrid& grid, std::span<const MeshCollective> collectives,
                             const MeshLinks& links, std::span<double> loads);

}  // namespace phaze
