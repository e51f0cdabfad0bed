// The layouts of a strategy that a step and a cluster allow, and why others are impossible.
//
// A layout adds replicas, stages, a pipeline schedule, a ZeRO stage, the replicas that share state
// and a rank order to a strategy. Strategies with the same widths have the same layouts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phaze/plan.hpp"

namespace phaze {

// Widths of strategies, and what is fixed or free for their layouts. The numbers are at least 1.
struct LayoutRules {
  std::int64_t devices;
  std::int64_t node_devices;
  std::int64_t global_batch;  // a multiple of `micro_batch`
  std::int64_t blocks;
  std::int64_t layers;  // blocks, embedding and head
  std::int64_t inner;   // tensor x context: devices of a stage of one replica
  std::int64_t cp;
  std::int64_t expert_devices;   // neighbouring devices that have one copy of all experts
  std::int64_t expert_replicas;  // fewest replicas whose devices have whole copies of all experts
  std::int64_t micro_batch;
  std::int64_t most_stages;
  std::int32_t single_schedule;      // of layouts with one stage; -1: there are none
  std::int32_t rank_order;           // -1: both are tried
  std::span<const std::int64_t> dp;  // rising; empty: all that divide the batch
  std::span<const std::int64_t> pp;  // rising; empty: all
  // Schedules of pipelines to try, with their chunks.
  std::span<const std::int64_t> schedules;
  std::span<const std::int64_t> chunks;
  // ZeRO stages, rising, each with every choice of the replicas that share state.
  std::span<const std::int64_t> zero;
  std::span<const std::int64_t> shards;  // 0: all replicas, kNodeShards: those of a node
};

inline constexpr std::int64_t kNodeShards = -1;

enum class LayoutFault : std::int64_t {
  kManyChunks,  // more chunks than layers; `value`: chunks of a stage
  kSchedule,    // `value`: PipelineStatus
  kShards,      // `value`: replicas that do not share state evenly
};

struct RejectedLayouts {
  LayoutFault fault;
  std::int64_t schedule;
  std::int64_t value;
  std::int64_t count;
};

class LayoutGrid {
 public:
  explicit LayoutGrid(const LayoutRules& rules);

  std::size_t size() const noexcept { return size_; }
  // The numbers of replicas that divide the batch and fit the cluster, rising.
  const std::vector<std::int64_t>& replicas() const noexcept { return replicas_; }
  // In the order in which the reasons first occur.
  const std::vector<RejectedLayouts>& rejected() const noexcept { return rejected_; }
  // The micro-batches of a replica over the number of stages, for each layout.
  std::vector<double> shares() const;
  // Appends the layouts whose share, times `work_s`, times `factor` is at most `most_s`.
  void list(std::int32_t strategy, double work_s, double factor, double most_s,
            std::vector<LayoutRecord>* layouts) const;

 private:
  struct Widths {
    std::int64_t dp, pp, micro_batches;
    double share;
  };
  // A pipeline: schedule, chunks, rank order, and the widths that allow it.
  struct Pipeline {
    std::int32_t schedule, vpp, rank_order;
    std::vector<std::uint8_t> allowed;
  };
  // A ZeRO stage and a choice of sharing replicas under a rank order; -1 where it is impossible or
  // the same as an earlier choice.
  struct Sharing {
    std::int32_t zero;
    std::vector<std::int64_t> shard[2];
  };

  void find_widths(const LayoutRules& rules);
  void add_pipelines(const LayoutRules& rules);
  void add_sharing(const LayoutRules& rules);
  std::vector<std::int64_t> shards_of(const LayoutRules& rules, std::size_t choice, int order,
                                      bool all_share);
  void reject(LayoutFault fault, std::int64_t schedule, std::int64_t value, std::int64_t count);
  // Calls `put` for the layouts with some of the widths: positions in `widths_`, rising.
  template <typename Put>
  void each(std::span<const std::size_t> some, const Put& put) const;

  std::vector<std::int64_t> replicas_;
  std::vector<Widths> widths_;
  std::vector<Pipeline> pipelines_;
  std::vector<Sharing> sharing_;
  std::vector<RejectedLayouts> rejected_;
  std::size_t size_ = 0;
};

}  // namespace phaze
