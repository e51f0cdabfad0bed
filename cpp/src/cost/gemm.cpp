#include "phaze/gemm.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"
#include "cost/gemm_search.hpp"

namespace phaze {
namespace {

using gemm_search::Candidate;
using gemm_search::Kernels;
using gemm_search::kernels_of;
using gemm_search::Search;

// Terms that do not depend on the mapping.
struct Floor {
  bool resident;
  double macs;
  double hbm_bytes;
  double hbm_s;
  double power_s;
  double vector_s;
  double vector_ops;

  double seconds() const noexcept { return std::max(std::max(hbm_s, power_s), vector_s); }
};

// Operands that heads share count less than those of the shape; resident ones not at all.
double extra_bytes(const Epilogue& epilogue, bool resident) noexcept {
  return resident ? std::max(epilogue.extra_bytes, 0.0) : epilogue.extra_bytes;
}

// Whether operands of so many bytes are still in the buffer from the operator before.
bool is_resident(double operands, const Machine& machine) noexcept {
  const double share = machine.tuning->resident_share;
  return share > 0.0 && operands <= share * machine.buffer_bytes;
}

Floor floor_of(const GemmShape& g, const Machine& machine, double product_hbm_bytes,
               const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const auto b = static_cast<double>(g.b);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  Floor f{};
  const double operands = b * (m * k + k * n) * p.in_bytes;
  f.resident = is_resident(operands, machine);
  f.macs = b * m * k * n;
  const double bytes = f.resident ? b * m * n * p.out_bytes : b * product_hbm_bytes;
  const bool hbm = std::isfinite(machine.product_hbm_bytes_per_s);
  f.hbm_bytes = hbm ? std::max(bytes + extra_bytes(epilogue, f.resident), 0.0) : 0.0;
  const double written = b * m * n * p.out_bytes;
  f.hbm_s = (f.hbm_bytes + machine.write_penalty * written) / machine.product_hbm_bytes_per_s;
  f.power_s = f.macs / machine.sustained_macs_per_s;
  f.vector_ops = b * m * n * epilogue.ops_per_output;
  f.vector_s = f.vector_ops / machine.lane_ops_per_s;
  return f;
}

Limit limit_of(const Candidate& c, const Floor& f, double launch_s) noexcept {
  Largest most{c.compute_s, Limit::kCompute};
  most.consider(c.port_s, Limit::kPort);
  most.consider(c.buffer_s, Limit::kBuffer);
  most.consider(f.hbm_s, Limit::kHbm);
  most.consider(f.power_s, Limit::kPower);
  most.consider(f.vector_s, Limit::kVector);
  most.consider(launch_s, Limit::kLaunch);
  return most.limit;
}

}  // namespace

double best_gemm_time(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                      const Epilogue& epilogue) noexcept {
  const Floor floor = floor_of(shape, machine, traffic.hbm_bytes, epilogue);
  return Search(shape, machine, floor.seconds(), floor.resident).run().time_s;
}

CostRecord best_gemm(const GemmShape& shape, const Machine& machine, const Traffic& traffic,
                     const Epilogue& epilogue) noexcept {
  const Floor floor = floor_of(shape, machine, traffic.hbm_bytes, epilogue);
  const Candidate best = Search(shape, machine, floor.seconds(), floor.resident).run();
  CostRecord record{};
  record.time_s = best.time_s;
  record.bound_s = gemm_bound(shape, machine, epilogue);
  record.compute_s = best.compute_s;
  record.port_s = best.port_s;
  record.buffer_s = best.buffer_s;
  record.hbm_s = floor.hbm_s;
  record.power_s = floor.power_s;
  record.vector_s = floor.vector_s;
  record.fill_s = best.fill_s;
  record.fixed_s = best.fixed_s;
  record.overhead_s = best.overhead_s;
  record.compute_cycles = best.compute_cycles;
  record.macs = floor.macs;
  record.vector_ops = floor.vector_ops;
  record.port_bytes = best.port_bytes;
  record.buffer_bytes = best.buffer_bytes;
  record.hbm_bytes = floor.hbm_bytes;
  record.utilization =
      floor.macs / (best.time_s * (machine.macs_per_s / machine.tuning->efficiency));
  record.block_m = best.block_m;
  record.block_n = best.block_n;
  record.split = best.split;
  record.tiles_i = traffic.i;
  record.tiles_j = traffic.j;
  record.dataflow = static_cast<std::int32_t>(best.dataflow);
  record.order = static_cast<std::int32_t>(traffic.order);
  record.limit = static_cast<std::int32_t>(limit_of(best, floor, best.fixed_s + best.overhead_s));
  record.status = static_cast<std::int32_t>(Status::kOk);
  return record;
}

double gemm_bound(const GemmShape& g, const Machine& machine, const Epilogue& epilogue) noexcept {
  const Precision& p = machine.precision;
  const auto b = static_cast<double>(g.b);
  const auto m = static_cast<double>(g.m);
  const auto k = static_cast<double>(g.k);
  const auto n = static_cast<double>(g.n);
  const double operands = b * (m * k + k * n) * p.in_bytes;
  const double outputs = b * m * n * p.out_bytes;
  const double macs = b * m * k * n;
  const bool resident = is_resident(operands, machine);
  const double compulsory = resident ? outputs : operands + outputs;
  const double hbm = std::max(compulsory + extra_bytes(epilogue, resident), 0.0);
  const Kernels kernels = kernels_of(g, machine);
  const double ports = static_cast<double>(machine.cores) * kernels.port_bytes_per_s;
  double most = macs / machine.macs_per_s;
  most = std::max(most, macs / machine.sustained_macs_per_s);
  most = std::max(most, (hbm + machine.write_penalty * outputs) / machine.product_hbm_bytes_per_s);
  most = std::max(most, (operands + outputs) / machine.buffer_bytes_per_s);
  most = std::max(most, std::max(operands, outputs) / ports);
  most = std::max(most, b * m * n * epilogue.ops_per_output / machine.lane_ops_per_s);
  return (kernels.launch_s + most) * kRounding;
}

}  // namespace phaze
