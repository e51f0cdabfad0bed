// Plain records shared by every kernel. Units are part of each field's name; everything is SI
// except area, which is in mm^2. No Python header is included anywhere below include/phaze.
//
// All records are trivially copyable, own nothing, and may be read from any thread.
#pragma once

#include <cstdint>

namespace phaze {

// One accelerator as the kernels see it: a row of an architecture space.
struct ChipRecord {
  std::int64_t tensor_cores;           // number of systolic arrays (or SMs on a GPU)
  std::int64_t tensor_width;           // columns of one array
  std::int64_t tensor_depth;           // rows of one array
  std::int64_t tensor_local_bytes;     // local buffer of one array
  std::int64_t vector_cores;           // number of vector units
  std::int64_t vector_lanes;           // lanes of one vector unit
  std::int64_t vector_alus_per_lane;   // scalar operations one lane starts per cycle
  std::int64_t vector_local_bytes;     // local buffer of one vector unit
  std::int64_t buffer_bytes;           // global buffer shared by all cores
  double buffer_bytes_per_cycle;       // global buffer bandwidth, all ports together
  double buffer_port_bytes_per_cycle;  // width of one core's port; 0 = as wide as the array's edges
  std::int64_t hbm_bytes;              // off-chip capacity; 0 if the chip has none
  double hbm_bytes_per_s;              // off-chip bandwidth; 0 if the chip has none
  std::int64_t hbm_stacks;             // number of 1,024-bit stacks; 0 if there are none
  double clock_hz;                     // one clock for cores and buffer
  std::int64_t links;                  // off-package links; 0 if not specified
  double link_bytes_per_s;             // of one link and direction
  std::int64_t dies;                   // dies of the logic; 0 and 1 mean a single die
  std::int64_t fp8;                    // 1 if the arrays multiply FP8 at twice the rate of bf16
  std::int64_t other_cores;            // systolic arrays of another shape; 0 if there are none
  std::int64_t other_width;            // columns of one of those
  std::int64_t other_depth;            // rows of one of those
};

// Bytes per cycle of one core's port: as given, or one bf16 value per row and column of the array.
inline double port_bytes_per_cycle(const ChipRecord& chip) noexcept {
  if (chip.buffer_port_bytes_per_cycle > 0.0) return chip.buffer_port_bytes_per_cycle;
  return 2.0 * (static_cast<double>(chip.tensor_width) + static_cast<double>(chip.tensor_depth));
}

inline constexpr int kMaxTiles = 12;      // block shapes a GPU's kernels come in
inline constexpr int kMaxFunctions = 80;  // rows of the table of function costs

// Cost of one vector function; see docs/cost.md.
struct VectorCost {
  double ops_per_element;   // lane operations
  double ops_per_row;       // lane operations
  double launches;          // number of kernels
  double byte_factor;       // moved bytes divided by compulsory bytes
  double row_limit;         // longer rows do not fit on the core; 0 = no limit
  double long_ops;          // factor on operations of longer rows
  double long_bytes;        // factor on bytes of longer rows
  double most_rows = 0.0;   // rows for which `ops_per_row` counts, at most; 0 = no limit
  double row_cycles = 0.0;  // cycles per element of a row that one core alone works on
};

// Software efficiencies of a chip: neutral for an ideal systolic chip, fitted for a GPU.
struct TuningRecord {
  double clock_factor;               // clock while operators run, relative to the rated clock
  double launch_s;                   // starting one kernel
  double vector_launch_share;        // launch_s of a vector kernel relative to launch_s
  double efficiency;                 // share of its peak that a core reaches inside a unit of work
  double unit_overhead_s;            // starting and ending one unit of work on a core
  double reduction_s;                // adding the partial sums of a split
  double sustained_macs_per_s;       // limit from the power limit, in bf16; 0 = no limit
  double hbm_share;                  // achievable share of HBM bandwidth
  double hbm_write_share;            // speed of writing to HBM relative to reading
  double product_hbm_share;          // share of that bandwidth that matrix products reach
  double port_share;                 // achievable share of a core's port
  double port_even_bytes_per_cycle;  // port width if rows are 4-byte aligned; 0 = no difference
  double port_odd_bytes_per_cycle;   // port width if rows are 2-byte aligned; 0 = no difference
  double unaligned_unit_overhead_s;  // unit_overhead_s of the blocks for unaligned rows below
  double unaligned_reduction_s;      // reduction_s of the blocks for unaligned rows
  double resident_share;             // share of the buffer that survives between operators
  double attention_efficiency;       // share of a core's peak inside fused attention
  double attention_unit_s;           // starting and ending one unit of fused attention
  double attention_ops;              // lane operations per score
  double attention_backward_efficiency;  // efficiency and operations of the backward pass
  double attention_backward_ops;
  std::int32_t overlapped;       // 1 if a fold loads while the previous one drains
  std::int32_t tiles;            // used entries below; 0 = blocks are multiples of the array
  std::int32_t dataflows;        // bit d is set if Dataflow d may be used; bit 0 if there are tiles
  std::int32_t attention_least;  // fewest queries of one unit; 0 = always the most
  std::int32_t attention_most;   // most queries of one unit; 0 = 128
  std::int32_t even_tiles;       // used blocks if rows are 4-byte aligned; 0 = `tiles`
  std::int32_t odd_tiles;        // used blocks if rows are 2-byte aligned; 0 = `tiles`
  std::int32_t unused;
  std::int64_t tile_m[kMaxTiles];
  std::int64_t tile_n[kMaxTiles];
  std::int64_t even_m[kMaxTiles];
  std::int64_t even_n[kMaxTiles];
  std::int64_t odd_m[kMaxTiles];
  std::int64_t odd_n[kMaxTiles];
  VectorCost functions[kMaxFunctions];
};

// Bytes of one number as input, output and accumulator, its speed relative to bf16, and how it
// streams through the buffer: elements of a row at a time, and copies of each such strip and tile.
struct Precision {
  double in_bytes;
  double out_bytes;
  double acc_bytes;
  double rate;
  double strip_depth = 64.0;
  double copies = 2.0;  // double buffers
  double spills = 2.0;  // transfers of a partial sum: written and read, or 1 if added in memory
};

inline constexpr int kMaxLevels = 4;  // tiers of a switched fabric, dimensions of a grid

enum class FabricKind : std::int32_t {
  kSwitched = 0,  // non-blocking switches nested in tiers; a flat fabric is one unbounded tier
  kGrid = 1,      // neighbours linked along each dimension; wrapped dimensions close into rings
};

inline constexpr int kMaxProtocols = 4;  // protocols of a library

// Classes of collectives with separate protocol parameters; broadcasts use those of all-gathers,
// messages between two ranks those of all-to-alls.
enum class Transfer : std::int32_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kExchange = 3,
};
inline constexpr int kTransfers = 4;

// One protocol of a library, per level of the fabric: the start-up time of a collective that
// reaches the level, the latency of one step, the share of the level's bandwidth that steps use,
// and seconds per byte of the vector in addition to the links' time (copies and sums in local
// memory). A share may exceed 1 if those seconds compensate for it: no collective is faster than
// its bound.
struct ProtocolRecord {
  double most_bytes;  // of one rank's part of the vector; 0 = no limit
  double startup_s[kMaxLevels];
  double step_s[kMaxLevels];
  double share[kMaxLevels];
  double copy_s_per_byte[kMaxLevels];
};

// How devices are wired. Level 0 is the innermost: rank r of a group sits at level-0 coordinate
// r mod size[0], level-1 coordinate (r / size[0]) mod size[1], and so on.
struct FabricRecord {
  std::int32_t kind;               // a FabricKind
  std::int32_t levels;             // used entries of the arrays below, 1..kMaxLevels
  std::int64_t devices;            // number of devices; 0 = as many as the levels hold
  std::int64_t size[kMaxLevels];   // members of a level; 0 = unbounded (last tier only)
  double bytes_per_s[kMaxLevels];  // switched: per device, per direction; grid: per link
  double latency_s[kMaxLevels];    // per message step (switched) or per hop (grid)
  std::int32_t wrap[kMaxLevels];   // grid only: 1 if the dimension is a ring
  // Switched only: 1 if the units of a tier are linked pairwise. Each of the size - 1 links of a
  // device then has bytes_per_s / (size - 1).
  std::int32_t full_mesh[kMaxLevels];
  // Switched only: number of a library's measured protocols; 0: the links' own rates and latencies.
  std::int32_t protocols[kTransfers];
  // In-switch all-reduces of three or more members inside one unit; share 0 = not available.
  double in_switch_startup_s[kMaxLevels];
  double in_switch_share[kMaxLevels];
  ProtocolRecord protocol[kTransfers][kMaxProtocols];
};

inline constexpr int kMaxEpilogues = 4;  // element-wise operators fused onto one product

// The units that an operator occupies.
enum class Unit : std::int32_t {
  kTensor = 0,        // matrix units
  kVector = 1,        // vector units
  kTensorVector = 2,  // a matrix product with an element-wise epilogue
  kNetwork = 3,       // a collective
};

// One operator of a layer on one device: loop dimensions, work and compulsory traffic.
struct OperatorRecord {
  std::int32_t kind;        // position in the opgraph package's list of kinds
  std::int32_t unit;        // a Unit
  std::int64_t b;           // batched products, or 1
  std::int64_t m;           // rows
  std::int64_t n;           // columns
  std::int64_t k;           // inner dimension of a product; 0 for vector operators
  double flops;             // a multiply-accumulate counts as two
  double read_bytes;        // inputs and weights, each once
  double write_bytes;       // outputs, each once
  double payload_bytes;     // of a collective; 0 otherwise
  std::int32_t collective;  // a CollectiveOp if unit is kNetwork, -1 otherwise
  std::int32_t group;       // the ranks that take part; 0 if unit is not kNetwork
  std::int32_t causal;      // 1 if a causal mask skips half of the products of attention
  std::int32_t epilogue;    // element-wise operators fused onto the product
  std::int32_t function;    // position in the opgraph package's list of vector functions
  std::int32_t format;      // position in the opgraph package's list of number formats
  // Functions of fused operators, then 0; a fused operator without an entry is an addition.
  std::int32_t epilogue_functions[kMaxEpilogues];
  double kept_share;  // share of the operator's HBM bytes that stays on chip; negative: moves more
};

}  // namespace phaze
