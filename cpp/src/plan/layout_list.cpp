// Lists the layouts of strategies: every combination of widths, pipelines and sharing that is
// legal.
#include "phaze/layout_list.hpp"

#include <algorithm>
#include <numeric>

#include "base/numbers.hpp"
#include "phaze/pipeline_schedule.hpp"

namespace phaze {
namespace {

constexpr auto kStagesInside = static_cast<std::int32_t>(RankOrder::kStagesInside);

// The divisors of `number`, rising.
std::vector<std::int64_t> divisors(std::int64_t number) {
  std::vector<std::int64_t> low, high;
  for (std::int64_t n = 1; n * n <= number; ++n) {
    if (number % n != 0) continue;
    low.push_back(n);
    if (n * n != number) high.push_back(number / n);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

// The most replicas of a node that can share the state of `dp` replicas where experts span `ep` of
// them; 0 if none or all can.
std::int64_t replicas_in_node(std::int64_t dp, std::int64_t most, std::int64_t ep) {
  for (std::int64_t count = std::min(most, dp - 1) / ep * ep; count > 0; count -= ep) {
    if (dp % count == 0) return count;
  }
  return 0;
}

}  // namespace

LayoutGrid::LayoutGrid(const LayoutRules& rules) {
  find_widths(rules);
  add_pipelines(rules);
  add_sharing(rules);
  std::vector<std::size_t> all(widths_.size());
  std::iota(all.begin(), all.end(), 0);
  each(all, [&](const auto&...) { ++size_; });
}

void LayoutGrid::find_widths(const LayoutRules& rules) {
  const std::int64_t rounds = rules.global_batch / rules.micro_batch;
  const std::int64_t groups = rules.devices / rules.inner;
  std::vector<std::int64_t> wanted(rules.dp.begin(), rules.dp.end());
  if (wanted.empty()) wanted = divisors(rounds);
  for (const std::int64_t dp : wanted) {
    if (dp > std::min(groups, rounds) || rounds % dp != 0 || dp % rules.expert_replicas != 0) {
      continue;
    }
    replicas_.push_back(dp);
    const std::int64_t most =
        std::min({rules.devices / (rules.inner * dp), rules.blocks, rules.most_stages});
    const std::int64_t micro_batches = rules.global_batch / (rules.micro_batch * dp);
    const auto add = [&](std::int64_t pp) {
      if (pp > most) return;
      const double share = static_cast<double>(micro_batches) / static_cast<double>(pp);
      widths_.push_back({dp, pp, micro_batches, share});
    };
    if (rules.pp.empty()) {
      for (std::int64_t pp = 1; pp <= most; ++pp) add(pp);
    } else {
      for (const std::int64_t pp : rules.pp) add(pp);
    }
  }
}

void LayoutGrid::add_pipelines(const LayoutRules& rules) {
  const std::size_t count = widths_.size();
  const bool both = rules.rank_order < 0;
  Pipeline single{rules.single_schedule, 1, std::max(rules.rank_order, 0), {}};
  for (const Widths& w : widths_) {
    single.allowed.push_back(w.pp == 1 && rules.single_schedule >= 0);
  }
  pipelines_.push_back(std::move(single));
  // Whether a replica has all experts: else stages cannot lie between replicas.
  const bool whole = rules.inner % rules.expert_devices == 0;
  for (std::size_t k = 0; k < rules.schedules.size(); ++k) {
    const auto schedule = static_cast<PipelineSchedule>(rules.schedules[k]);
    const std::int64_t vpp = rules.chunks[k];
    const std::int64_t places = schedule == PipelineSchedule::kDualPipe ? 1 : vpp;
    std::vector<std::uint8_t> allowed(count, 0);
    std::int64_t many = 0;
    std::vector<std::int64_t> faults(kPipelineStatusCount, 0);
    for (std::size_t c = 0; c < count; ++c) {
      const Widths& w = widths_[c];
      if (w.pp == 1) continue;
      if (places * w.pp > rules.layers) {
        ++many;
        continue;
      }
      const PipelineStatus status = check_schedule(schedule, w.pp, vpp, w.micro_batches);
      ++faults[static_cast<std::size_t>(status)];
      allowed[c] = status == PipelineStatus::kOk;
    }
    reject(LayoutFault::kManyChunks, rules.schedules[k], vpp, many);
    for (int code = 1; code < kPipelineStatusCount; ++code) {
      reject(LayoutFault::kSchedule, rules.schedules[k], code, faults[at(code)]);
    }
    for (std::int32_t order = 0; order <= kStagesInside; ++order) {
      if (!both && order != rules.rank_order) continue;
      Pipeline own{static_cast<std::int32_t>(schedule), static_cast<std::int32_t>(vpp), order,
                   allowed};
      for (std::size_t c = 0; c < count && order == kStagesInside; ++c) {
        const Widths& w = widths_[c];
        const bool tried = !both || (w.dp > 1 && w.pp * rules.inner <= rules.node_devices);
        own.allowed[c] = own.allowed[c] != 0 && tried && (whole || w.pp == 1);
      }
      pipelines_.push_back(std::move(own));
    }
  }
}

void LayoutGrid::add_sharing(const LayoutRules& rules) {
  bool used[2] = {false, false};
  for (const Pipeline& p : pipelines_) used[p.rank_order] = true;
  for (std::size_t k = 0; k < rules.zero.size(); ++k) {
    Sharing own{static_cast<std::int32_t>(rules.zero[k]), {}};
    bool all_share = false;
    for (std::size_t j = 0; j < rules.zero.size(); ++j) {
      all_share = all_share || (rules.zero[j] == own.zero && rules.shards[j] == 0);
    }
    for (int order = 0; order < 2; ++order) {
      if (used[order]) own.shard[order] = shards_of(rules, k, order, all_share);
    }
    sharing_.push_back(std::move(own));
  }
}

std::vector<std::int64_t> LayoutGrid::shards_of(const LayoutRules& rules, std::size_t choice,
                                                int order, bool all_share) {
  const std::int64_t wanted = rules.shards[choice];
  // A single shard is the same under every ZeRO stage.
  const bool first = rules.zero[choice] == rules.zero.front();
  std::vector<std::int64_t> shards;
  std::int64_t uneven = 0;
  for (const Widths& w : widths_) {
    std::int64_t shard = wanted;
    if (wanted == kNodeShards) {
      const std::int64_t apart = rules.inner * (order == kStagesInside ? w.pp : 1);
      shard = replicas_in_node(w.dp, rules.node_devices / apart, rules.expert_replicas);
      if (shard * rules.cp <= 1) shard = -1;
    } else if (wanted > 0 && (w.dp % wanted != 0 || wanted % rules.expert_replicas != 0)) {
      ++uneven;
      shard = -1;
    } else if (wanted == w.dp) {
      shard = all_share ? -1 : 0;
    }
    shards.push_back(first || w.dp * rules.cp > 1 ? shard : -1);
  }
  if (wanted > 0) reject(LayoutFault::kShards, 0, wanted, uneven);
  return shards;
}

void LayoutGrid::reject(LayoutFault fault, std::int64_t schedule, std::int64_t value,
                        std::int64_t count) {
  if (count == 0) return;
  for (RejectedLayouts& known : rejected_) {
    if (known.fault == fault && known.schedule == schedule && known.value == value) {
      known.count += count;
      return;
    }
  }
  rejected_.push_back({fault, schedule, value, count});
}

template <typename Put>
void LayoutGrid::each(std::span<const std::size_t> some, const Put& put) const {
  for (std::size_t begin = 0, end = 0; begin < sharing_.size(); begin = end) {
    while (end < sharing_.size() && sharing_[end].zero == sharing_[begin].zero) ++end;
    for (const Pipeline& pipeline : pipelines_) {
      for (std::size_t k = begin; k < end; ++k) {
        const std::vector<std::int64_t>& shard = sharing_[k].shard[pipeline.rank_order];
        for (const std::size_t c : some) {
          if (pipeline.allowed[c] != 0 && shard[c] >= 0) {
            put(widths_[c], pipeline, sharing_[k].zero, shard[c]);
          }
        }
      }
    }
  }
}

std::vector<double> LayoutGrid::shares() const {
  std::vector<std::size_t> all(widths_.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<double> shares;
  shares.reserve(size_);
  each(all, [&](const Widths& w, const auto&...) { shares.push_back(w.share); });
  return shares;
}

void LayoutGrid::list(std::int32_t strategy, double work_s, double factor, double most_s,
                      std::vector<LayoutRecord>* layouts) const {
  std::vector<std::size_t> some;
  for (std::size_t c = 0; c < widths_.size(); ++c) {
    if (widths_[c].share * work_s * factor <= most_s) some.push_back(c);
  }
  each(some, [&](const Widths& w, const Pipeline& p, std::int32_t zero, std::int64_t shard) {
    layouts->push_back({strategy, p.schedule, static_cast<std::int32_t>(w.pp), p.vpp, zero,
                        p.rank_order, w.dp, w.micro_batches, shard});
  });
}

}  // namespace phaze
