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
  std::int64_t tensor_local_bytes;     // local buffer beside one array
  std::int64_t vector_cores;           // number of vector units
  std::int64_t vector_lanes;           // lanes of one vector unit
  std::int64_t vector_alus_per_lane;   // scalar operations one lane starts per cycle
  std::int64_t vector_local_bytes;     // local buffer beside one vector unit
  std::int64_t buffer_bytes;           // global buffer shared by all cores
  double buffer_bytes_per_cycle;       // global buffer bandwidth, all ports together
  double buffer_port_bytes_per_cycle;  // width of one core's port to the global buffer
  std::int64_t hbm_bytes;              // off-chip capacity; 0 where the chip has none
  double hbm_bytes_per_s;              // off-chip bandwidth; 0 where the chip has none
  std::int64_t hbm_stacks;             // number of 1,024-bit stacks; 0 where there is none
  double clock_hz;                     // one clock for cores and buffer
};

inline constexpr int kMaxLevels = 4;  // tiers of a switched fabric, dimensions of a grid

enum class FabricKind : std::int32_t {
  kSwitched = 0,  // non-blocking switches nested in tiers; a flat fabric is one unbounded tier
  kGrid = 1,      // neighbours linked along each dimension; wrapped dimensions close into rings
};

// How devices are wired. Level 0 is the innermost: rank r of a group sits at level-0 coordinate
// r mod size[0], level-1 coordinate (r / size[0]) mod size[1], and so on.
struct FabricRecord {
  std::int32_t kind;               // a FabricKind
  std::int32_t levels;             // used entries of the arrays below, 1..kMaxLevels
  std::int64_t devices;            // at most this many are there; 0 = as many as the levels hold
  std::int64_t size[kMaxLevels];   // members of a level; 0 = unbounded (last tier only)
  double bytes_per_s[kMaxLevels];  // switched: per device, per direction; grid: per link
  double latency_s[kMaxLevels];    // per message step (switched) or per hop (grid)
  std::int32_t wrap[kMaxLevels];   // grid only: 1 where the dimension is a ring
};

// What an operator occupies.
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
  std::int64_t b;           // products side by side, or 1
  std::int64_t m;           // rows
  std::int64_t n;           // columns
  std::int64_t k;           // inner dimension of a product; 0 for vector operators
  double flops;             // a multiply-accumulate counts as two
  double read_bytes;        // inputs and weights, each once
  double write_bytes;       // outputs, each once
  double payload_bytes;     // of a collective; 0 otherwise
  std::int32_t collective;  // a CollectiveOp where unit is kNetwork, -1 otherwise
  std::int32_t group;       // which ranks take part; 0 where unit is not kNetwork
  std::int32_t causal;      // 1 where attention leaves out half of its products
  std::int32_t epilogue;    // element-wise operators fused onto the product
};

}  // namespace phaze
