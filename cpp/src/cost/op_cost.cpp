// Operators on chips, in batches.
#include "phaze/op_cost.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "base/numbers.hpp"
#include "cost/op_on_chip.hpp"
#include "phaze/parallel.hpp"

namespace phaze {
namespace {

// Calls good(chip, machine, op) for every valid pair and bad(chip, op, status) for every invalid
// one.
template <typename Good, typename Bad>
void for_pairs(std::span<const OperatorRecord> ops, std::span<const Status> state,
               const ChipBatch& batch, Cores cores, int threads, const Good& good, const Bad& bad) {
  const CheckedChips check(batch);
  const std::size_t grain = 1 + 256 / std::max<std::size_t>(ops.size(), 1);
  parallel_for(batch.chips.size(), threads, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t c = begin; c < end; ++c) {
      const Status status = check(c);
      if (status != Status::kOk) {
        for (std::size_t o = 0; o < ops.size(); ++o) bad(c, o, status);
        continue;
      }
      const Machine machine = machine_of(batch, c, cores);
      for (std::size_t o = 0; o < ops.size(); ++o) {
        if (state[o] == Status::kOk) {
          good(c, machine, o);
        } else {
          bad(c, o, state[o]);
        }
      }
    }
  });
}

// A chip of a batch, with all that the search over mappings reads of it: of one core, then the
// number of cores. The other limits of a product enter by their seconds.
struct OrderedChip {
  std::array<double, 10> rates;
  std::size_t chip;

  bool same_core(const OrderedChip& other) const noexcept {
    return std::equal(rates.begin(), rates.end() - 1, other.rates.begin());
  }
};

// The valid chips of a batch, those with the same tensor cores next to each other.
std::vector<OrderedChip> by_tensor_cores(const ChipBatch& batch) {
  const CheckedChips check(batch);
  std::vector<OrderedChip> order;
  for (std::size_t c = 0; c < batch.chips.size(); ++c) {
    if (check(c) != Status::kOk) continue;
    const std::int32_t tuning = batch.tuning_of[c];
    const Machine m(batch.chips[c], batch.tunings[static_cast<std::size_t>(tuning)],
                    batch.precision, true);
    order.push_back(
        {{static_cast<double>(tuning), static_cast<double>(m.rows), static_cast<double>(m.cols),
          m.local_bytes, m.buffer_bytes, m.clock_hz, m.port_bytes_per_s, m.buffer_bytes_per_s,
          m.product_hbm_bytes_per_s, static_cast<double>(batch.chips[c].tensor_cores)},
         c});
  }
  std::ranges::sort(order, {},
                    [](const OrderedChip& own) { return std::pair(own.rates, own.chip); });
  return order;
}

constexpr std::size_t kChipsAtOnce = 64;

}  // namespace

void op_cost_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                   std::span<const EnergyTable> energy, std::span<const double> static_w,
                   std::span<CostRecord> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  for_pairs(
      ops, state, batch, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        CostRecord& cost = out[c * ops.size() + o];
        cost = cost_on(ops[o], machine, traffic.at(c, o), vector_per_core(batch.chips[c], cores));
        cost.energy_j = energy_j(cost, energy[c], static_w[c]);
      },
      [&](std::size_t c, std::size_t o, Status status) {
        out[c * ops.size() + o] = failed(status);
      });
}

void op_time_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                   std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  for_pairs(
      ops, state, batch, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        out[c * ops.size() + o] =
            time_on(ops[o], machine, traffic.at(c, o), vector_per_core(batch.chips[c], cores));
      },
      [&](std::size_t c, std::size_t o, Status) { out[c * ops.size() + o] = kNan; });
}

void op_figures_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                      std::span<const EnergyTable> energy, const OpFigures& out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  const std::vector<OrderedChip> order = by_tensor_cores(batch);
  const std::size_t count = ops.size();
  for (const std::span<double> column : {out.time_s, out.one_core_s, out.bound_s, out.dynamic_j}) {
    std::fill(column.begin(), column.end(), kNan);
  }
  parallel_for(order.size(), threads, kChipsAtOnce, [&](std::size_t begin, std::size_t end) {
    std::vector<KnownGemm> on_all(count);
    std::vector<KnownGemm> on_one(count);
    for (std::size_t i = begin; i < end; ++i) {
      if (i == begin || !order[i].same_core(order[i - 1])) on_one.assign(count, {});
      if (i == begin || order[i].rates != order[i - 1].rates) on_all.assign(count, {});
      const std::size_t c = order[i].chip;
      const ChipRecord& chip = batch.chips[c];
      const Machine all = machine_of(batch, c, Cores::kAll);
      const Machine one = machine_of(batch, c, Cores::kOne);
      for (std::size_t o = 0; o < count; ++o) {
        if (state[o] != Status::kOk) continue;
        const std::size_t cell = c * count + o;
        const Traffic& moved = traffic.at(c, o);
        const CostRecord cost =
            cost_on(ops[o], all, moved, vector_per_core(chip, Cores::kAll), &on_all[o]);
        out.time_s[cell] = cost.time_s;
        out.bound_s[cell] = cost.bound_s;
        out.dynamic_j[cell] = energy_j(cost, energy[c], 0.0);
        out.one_core_s[cell] =
            time_on(ops[o], one, moved, vector_per_core(chip, Cores::kOne), &on_one[o]);
      }
    }
  });
}

void op_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch, Cores cores,
                    std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  for_pairs(
      ops, state, batch, cores, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        out[c * ops.size() + o] = bound_on(ops[o], machine, vector_per_core(batch.chips[c], cores));
      },
      [&](std::size_t c, std::size_t o, Status) { out[c * ops.size() + o] = kNan; });
}

void energy_bound_batch(std::span<const OperatorRecord> ops, const ChipBatch& batch,
                        std::span<const EnergyTable> energy, std::span<const double> count,
                        std::span<double> out, int threads) {
  const std::vector<Status> state = checked(ops);
  const TrafficTable traffic(ops, state, batch, threads);
  std::fill(out.begin(), out.end(), 0.0);
  for_pairs(
      ops, state, batch, Cores::kAll, threads,
      [&](std::size_t c, const Machine& machine, std::size_t o) {
        const double vectors = vector_per_core(batch.chips[c], Cores::kAll);
        const CostRecord cost = least_events(ops[o], machine, traffic.at(c, o), vectors);
        out[c] += count[o] * energy_j(cost, energy[c], 0.0) * kRounding;
      },
      [&](std::size_t c, std::size_t, Status) { out[c] = kNan; });
}

}  // namespace phaze
