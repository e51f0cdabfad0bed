#include "phaze/path_bounds.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <unordered_map>

#include "base/numbers.hpp"
#include "cost/op_on_chip.hpp"
#include "phaze/parallel.hpp"

namespace phaze {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// All that some figure depends on of a chip: it is the same, to the last bit, on chips with equal
// rates.
struct Rates {
  std::array<double, 12> rates;
  std::int32_t tuning;
  bool operator==(const Rates&) const = default;
};

struct HashOfRates {
  std::size_t operator()(const Rates& own) const noexcept {
    auto h = static_cast<std::uint64_t>(own.tuning);
    for (const double rate : own.rates) {
      h = std::rotl(h ^ std::bit_cast<std::uint64_t>(rate), 29) * 0x9E3779B97F4A7C15ULL;
    }
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

// All that `bound_on` reads of a chip with all cores, computed as there.
std::array<double, 12> roofline_rates(const Machine& m, double vector_per_core) noexcept {
  const auto cores = static_cast<double>(m.cores);
  const TuningRecord& t = *m.tuning;
  const bool unaligned = t.port_even_bytes_per_cycle > 0.0 || t.port_odd_bytes_per_cycle > 0.0;
  const double lanes = m.lane_ops_per_s / m.vector_cores * vector_per_core;
  return {m.macs_per_s,
          m.sustained_macs_per_s,
          m.hbm_bytes_per_s,
          m.product_hbm_bytes_per_s,
          m.buffer_bytes_per_s,
          m.lane_ops_per_s,
          lanes * cores,
          cores * m.port_bytes_per_s,
          m.vector_cores * m.port_bytes_per_s,
          unaligned ? cores : 0.0,
          unaligned ? m.clock_hz : 0.0,
          t.resident_share > 0.0 ? m.buffer_bytes : 0.0};
}

// The first chip with each set of rates, and the position among these of every chip's own; kNone
// for a bad chip. With several formats, each chip counts as different from all others.
struct AlikeChips {
  std::vector<std::size_t> first;
  std::vector<std::size_t> same;

  explicit AlikeChips(std::span<const ChipBatch> formats) : same(formats[0].chips.size(), kNone) {
    const std::vector<CheckedChips> checks(formats.begin(), formats.end());
    std::unordered_map<Rates, std::size_t, HashOfRates> known;
    for (std::size_t c = 0; c < same.size(); ++c) {
      const auto good = [&](const CheckedChips& check) { return check(c) == Status::kOk; };
      if (!std::ranges::all_of(checks, good)) continue;
      same[c] = first.size();
      if (formats.size() == 1) {
        const ChipBatch& batch = formats[0];
        const double vectors = vector_per_core(batch.chips[c], Cores::kAll);
        const Rates own{roofline_rates(machine_of(batch, c, Cores::kAll), vectors),
                        batch.tuning_of[c]};
        same[c] = known.try_emplace(own, first.size()).first->second;
      }
      if (same[c] == first.size()) first.push_back(c);
    }
  }
};

// The chips as each of several formats runs them, and the status of all operators.
struct FormatBatches {
  FormatBatches(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                std::span<const std::int32_t> tuning_of) {
    for (const FormatOps& own : formats) {
      batches.push_back({chips, tuning_of, own.tunings, own.precision});
      states.push_back(checked(own.ops));
      count += own.ops.size();
    }
  }

  std::vector<ChipBatch> batches;
  std::vector<std::vector<Status>> states;
  std::size_t count = 0;
};

// Earliest ends of the nodes of a graph that take least_s each; returns the latest, NaN if one is.
double longest_path_s(const PathBatch& paths, std::size_t graph, std::span<const double> least_s,
                      std::span<double> end_s) noexcept {
  double longest = 0.0;
  for (auto i = static_cast<std::size_t>(paths.node_ptr[graph]);
       i < static_cast<std::size_t>(paths.node_ptr[graph + 1]); ++i) {
    double ready = 0.0;
    for (auto e = static_cast<std::size_t>(paths.before_ptr[i]);
         e < static_cast<std::size_t>(paths.before_ptr[i + 1]); ++e) {
      ready = std::max(ready, end_s[static_cast<std::size_t>(paths.before[e])]);
    }
    end_s[i] = ready + (least_s[static_cast<std::size_t>(paths.op[i])] + paths.extra_s[i]);
    // A NaN bound stays NaN.
    if (!(end_s[i] <= longest)) longest = end_s[i];
  }
  return longest;
}

// Bit r is set if the operator needs resource r: tensor cores, vector cores.
unsigned cores_needed(const OperatorRecord& op) noexcept {
  constexpr unsigned kOfUnit[] = {1, 2, 3, 0};  // tensor, vector, both, network
  return kOfUnit[op.unit & 3];
}

// Lower bounds of operators on one chip: on all cores, on one core of each type, and the less.
struct WorkOnChip {
  explicit WorkOnChip(std::size_t ops) : all_s(ops), one_s(ops), least_s(ops), needed(ops) {}

  // What all operators of a graph take in all, where a core or their number limits them.
  double shared_s(const PathBatch& paths, std::size_t graph, const SharedWork& shared,
                  const ChipRecord& chip) const noexcept {
    double work_s = 0.0;
    double of_cores_s[2] = {0.0, 0.0};
    const double cores[2] = {static_cast<double>(chip.tensor_cores),
                             static_cast<double>(chip.vector_cores)};
    for (auto i = static_cast<std::size_t>(paths.node_ptr[graph]);
         i < static_cast<std::size_t>(paths.node_ptr[graph + 1]); ++i) {
      const auto op = static_cast<std::size_t>(paths.op[i]);
      const double on_all_s = all_s[op] + paths.extra_s[i];
      const double on_one_s = one_s[op] + paths.extra_s[i];
      work_s += std::min(on_all_s, on_one_s / shared.most_at_once[i]);
      for (std::size_t r = 0; r < 2; ++r) {
        if ((needed[op] >> r & 1) != 0) of_cores_s[r] += std::min(on_all_s, on_one_s / cores[r]);
      }
    }
    return std::max({work_s, of_cores_s[0], of_cores_s[1]}) * kRounding;
  }

  std::vector<double> all_s, one_s, least_s;
  std::vector<unsigned> needed;
};

}  // namespace

void path_bound_batch(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                      std::span<const std::int32_t> tuning_of, const PathBatch& paths,
                      std::span<double> out, int threads) {
  const FormatBatches all(formats, chips, tuning_of);
  const AlikeChips alike(all.batches);
  const std::vector<std::size_t>& first = alike.first;
  const std::size_t sums = chips.empty() ? 0 : out.size() / chips.size();
  std::vector<double> bounds(first.size() * sums, 0.0);
  constexpr std::size_t kChips = 256;
  parallel_for(first.size(), threads, kChips, [&](std::size_t begin, std::size_t end) {
    std::vector<double> bound_s(all.count, kNan);
    std::vector<double> end_s(paths.op.size());
    for (std::size_t d = begin; d < end; ++d) {
      const ChipRecord& chip = chips[first[d]];
      std::size_t next = 0;
      for (std::size_t f = 0; f < formats.size(); ++f) {
        const Machine machine = machine_of(all.batches[f], first[d], Cores::kAll);
        for (std::size_t o = 0; o < formats[f].ops.size(); ++o, ++next) {
          if (all.states[f][o] != Status::kOk) continue;
          bound_s[next] = bound_on(formats[f].ops[o], machine, vector_per_core(chip, Cores::kAll));
        }
      }
      for (std::size_t g = 0; g + 1 < paths.node_ptr.size(); ++g) {
        bounds[d * sums + static_cast<std::size_t>(paths.sum_of[g])] +=
            paths.count[g] * longest_path_s(paths, g, bound_s, end_s);
      }
    }
  });
  for (std::size_t c = 0; c < chips.size(); ++c) {
    for (std::size_t n = 0; n < sums; ++n) {
      const bool known = alike.same[c] != kNone;
      out[n * chips.size() + c] = known ? bounds[alike.same[c] * sums + n] : kNan;
    }
  }
}

void work_bound_batch(std::span<const FormatOps> formats, std::span<const ChipRecord> chips,
                      std::span<const std::int32_t> tuning_of, const PathBatch& paths,
                      const SharedWork& shared, std::span<double> out, int threads) {
  const FormatBatches all(formats, chips, tuning_of);
  std::vector<TrafficTable> traffic;
  std::vector<CheckedChips> check;
  for (std::size_t f = 0; f < formats.size(); ++f) {
    traffic.emplace_back(formats[f].ops, all.states[f], all.batches[f], threads);
    check.emplace_back(all.batches[f]);
  }
  constexpr std::size_t kChips = 32;
  parallel_for(chips.size(), threads, kChips, [&](std::size_t begin, std::size_t end) {
    WorkOnChip work(all.count);
    std::vector<double> end_s(paths.op.size());
    for (std::size_t c = begin; c < end; ++c) {
      const ChipRecord& chip = chips[c];
      std::size_t next = 0;
      for (std::size_t f = 0; f < formats.size(); ++f) {
        const std::span<const OperatorRecord> ops = formats[f].ops;
        if (check[f](c) != Status::kOk) {
          std::fill_n(&work.least_s[next], ops.size(), kNan);
          next += ops.size();
          continue;
        }
        const Machine on_all = machine_of(all.batches[f], c, Cores::kAll);
        const Machine on_one = machine_of(all.batches[f], c, Cores::kOne);
        for (std::size_t o = 0; o < ops.size(); ++o, ++next) {
          work.least_s[next] = kNan;
          if (all.states[f][o] != Status::kOk) continue;
          const Traffic& moved = shared.loads_again ? traffic[f].at(c, o) : kNoTraffic;
          work.all_s[next] =
              block_bound_on(ops[o], on_all, moved, vector_per_core(chip, Cores::kAll));
          work.one_s[next] =
              block_bound_on(ops[o], on_one, moved, vector_per_core(chip, Cores::kOne));
          work.least_s[next] = std::min(work.all_s[next], work.one_s[next]);
          work.needed[next] = cores_needed(ops[o]);
        }
      }
      for (std::size_t n = 0; n * chips.size() < out.size(); ++n) out[n * chips.size() + c] = 0.0;
      for (std::size_t g = 0; g + 1 < paths.node_ptr.size(); ++g) {
        double graph_s = longest_path_s(paths, g, work.least_s, end_s);
        const double shared_s = work.shared_s(paths, g, shared, chip);
        if (graph_s < shared_s) graph_s = shared_s;  // NaN stays
        out[static_cast<std::size_t>(paths.sum_of[g]) * chips.size() + c] +=
            paths.count[g] * graph_s;
      }
    }
  });
}

}  // namespace phaze
