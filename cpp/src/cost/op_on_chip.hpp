// Operators on one chip, and the parts of batches that several kernels share. Private to the cost
// kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "phaze/op_cost.hpp"

namespace phaze {

inline constexpr Traffic kNoTraffic{0.0, Order::kNothing, 0, 0};

bool is_product(const OperatorRecord& op) noexcept;
bool is_convolution(const OperatorRecord& op) noexcept;
bool is_collective(const OperatorRecord& op) noexcept;

Status check_op(const OperatorRecord& op) noexcept;
std::vector<Status> checked(std::span<const OperatorRecord> ops);

// The product of an operator. Patches of a convolution overlap: the bytes that its record reads
// beyond the right operand are those of distinct values.
GemmShape shape_of(const OperatorRecord& op, const Precision& p) noexcept;

// Bytes that the product's record reads and writes beyond its own operands.
double extra_bytes_of(const OperatorRecord& op, const Precision& p) noexcept;

// Vector units per tensor core; 1 if costs are those of one core of each type.
double vector_per_core(const ChipRecord& chip, Cores cores) noexcept;

// A record whose figures are NaN.
CostRecord failed(Status status) noexcept;

// Figures of a valid operator on a valid chip; `vectors` is vector_per_core().
CostRecord cost_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                   double vectors, KnownGemm* known = nullptr) noexcept;
double time_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
               double vectors, KnownGemm* known = nullptr) noexcept;
double bound_on(const OperatorRecord& op, const Machine& machine, double vectors) noexcept;

// A tighter bound of products, by their blocks; and the time of attention, which has few mappings.
double block_bound_on(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                      double vectors) noexcept;

// Events that an operator has at least; bytes that attention moves on the chip are not counted.
CostRecord least_events(const OperatorRecord& op, const Machine& machine, const Traffic& traffic,
                        double vectors) noexcept;

double energy_j(const CostRecord& cost, const EnergyTable& table, double static_w) noexcept;

// HBM traffic depends on the shape and the buffer alone, so chips with equal buffers share it.
class TrafficTable {
 public:
  TrafficTable(std::span<const OperatorRecord> ops, std::span<const Status> good,
               const ChipBatch& batch, int threads);

  const Traffic& at(std::size_t chip, std::size_t op) const noexcept {
    return table_[row_of_[chip] * ops_ + op];
  }

 private:
  std::size_t ops_;
  std::vector<double> capacities_;
  std::vector<double> distinct_;
  std::vector<std::size_t> row_of_;
  std::vector<Traffic> table_;
};

// The status of each chip with its tuning; every tuning is checked once.
class CheckedChips {
 public:
  explicit CheckedChips(const ChipBatch& batch) : batch_(batch), tunings_(batch.tunings.size()) {
    std::transform(batch.tunings.begin(), batch.tunings.end(), tunings_.begin(),
                   [&](const TuningRecord& t) { return check_tuning(t, batch.precision); });
  }

  Status operator()(std::size_t c) const noexcept {
    const auto t = static_cast<std::size_t>(batch_.tuning_of[c]);  // negative: beyond the end
    if (t >= tunings_.size()) return Status::kBadTuning;
    const Status status = check_chip(batch_.chips[c]);
    return status == Status::kOk ? tunings_[t] : status;
  }

 private:
  const ChipBatch& batch_;
  std::vector<Status> tunings_;
};

// A valid chip of a batch as it runs operators.
inline Machine machine_of(const ChipBatch& batch, std::size_t c, Cores cores) noexcept {
  const auto t = static_cast<std::size_t>(batch.tuning_of[c]);
  return {batch.chips[c], batch.tunings[t], batch.precision, cores == Cores::kOne};
}

}  // namespace phaze
