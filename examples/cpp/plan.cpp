// The fastest parallel plans of a model, from C++: a table of its layers on one chip in, plans with
// their stages out. The layers are those of a GPT with 96 blocks, split over the eight devices of a
// node; the search covers stages, replicas, ZeRO stage and what each stage recomputes.
#include "phaze/plan.hpp"

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr std::int64_t kDevices = 128;
constexpr std::int64_t kGlobalBatch = 256;  // sequences
constexpr double kUsableBytes = 72e9;       // of one device, for the model
enum Kind : std::int32_t { kEmbedding, kBlock, kHead, kKinds };

// One row per kind of layer, per device and micro-batch of one sequence. Two recompute variants:
// nothing, or the whole block.
struct Layer {
  double parameters;
  double stash_bytes, stash_recomputed_bytes;  // kept for the backward pass
  double live_bytes;                           // while a block is recomputed and runs backward
  double forward_s, backward_s, weight_grad_s;
};
constexpr Layer kLayers[kKinds] = {
    {78e6, 6.3e6, 6.3e6, 0.0, 0.0002, 0.0004, 0.0002},  // embedding
    {226e6, 430e6, 6.3e6, 424e6, 0.0075, 0.0150, 0.0073},
    {78e6, 26e6, 26e6, 0.0, 0.0045, 0.0090, 0.0045},  // head
};

// Eight devices to a node at 300 GB/s, nodes joined at 25 GB/s a device.
phaze::FabricRecord cluster() {
  phaze::FabricRecord fabric{};
  fabric.kind = static_cast<std::int32_t>(phaze::FabricKind::kSwitched);
  fabric.levels = 2;
  fabric.devices = kDevices;
  fabric.size[0] = 8;
  fabric.bytes_per_s[0] = 300e9;
  fabric.latency_s[0] = 3e-6;
  fabric.bytes_per_s[1] = 25e9;
  fabric.latency_s[1] = 5e-6;
  return fabric;
}

phaze::TrainingRecord mixed_precision_adam() {
  phaze::TrainingRecord training{};
  training.weight_bytes = 2.0;
  training.gradient_bytes = 4.0;
  training.state_bytes = 12.0;
  training.gather_bytes = 2.0;
  training.bucket_bytes = 100e6;
  training.whole_layers = 2;  // under ZeRO 3: the one that runs and the one prefetched
  return training;
}

// Layouts of every number of stages and ZeRO stage that use all devices: 1F1B, and interleaved with
// two chunks a stage.
std::vector<phaze::LayoutRecord> layouts() {
  std::vector<phaze::LayoutRecord> found;
  for (const std::int32_t pp : {1, 2, 4, 8, 16}) {
    for (const std::int32_t vpp : {1, 2}) {
      for (const std::int32_t zero : {0, 1, 3}) {
        phaze::LayoutRecord layout{};
        layout.schedule =
            static_cast<std::int32_t>(vpp == 1 ? phaze::PipelineSchedule::kOneForwardOneBackward
                                               : phaze::PipelineSchedule::kInterleaved);
        layout.pp = pp;
        layout.vpp = vpp;
        layout.zero = zero;
        layout.dp = kDevices / (8 * pp);
        layout.micro_batches = kGlobalBatch / layout.dp;
        const bool useful = (pp > 1 || vpp == 1) && (layout.dp > 1 || zero == 0);
        if (useful) found.push_back(layout);
      }
    }
  }
  return found;
}

}  // namespace

int main() {
  std::vector<std::int32_t> order(98, kBlock);  // kind of each layer
  order.front() = kEmbedding;
  order.back() = kHead;
  std::vector<std::int32_t> from, to;
  for (std::int32_t i = 0; i + 1 < static_cast<std::int32_t>(order.size()); ++i) {
    from.push_back(i);
    to.push_back(i + 1);
  }

  phaze::StrategyRecord strategy{};  // one way to split layers: tensor parallelism inside a node
  strategy.tp = strategy.etp = 8;    // a model without experts: etp is tp
  strategy.cp = strategy.ep = strategy.micro_batch = 1;
  strategy.message_bytes = 6.3e6;
  strategy.variants = 2;
  std::vector<phaze::LayerKindRecord> sizes(kKinds);
  std::vector<double> forward_s, plain_s, weight_grad_s;
  const std::vector<double> forward_j(kKinds, 0.0), backward_j(2 * kKinds, 0.0);
  std::vector<double> backward_s(2 * kKinds);  // by variant and kind
  for (std::size_t k = 0; k < kKinds; ++k) {
    const Layer& layer = kLayers[k];
    sizes[k].parameters = layer.parameters;
    sizes[k].stash_bytes[0] = layer.stash_bytes;
    sizes[k].stash_bytes[1] = layer.stash_recomputed_bytes;
    sizes[k].live_bytes[1] = layer.live_bytes;
    sizes[k].boundary = k == kBlock ? 0 : 1;
    forward_s.push_back(layer.forward_s);
    plain_s.push_back(layer.backward_s);
    weight_grad_s.push_back(layer.weight_grad_s);
    backward_s[k] = layer.backward_s;
    backward_s[kKinds + k] = layer.backward_s + (k == kBlock ? layer.forward_s : 0.0);
  }
  const phaze::KindTimes times{forward_s.data(),         plain_s.data(),   backward_s.data(),
                               weight_grad_s.data(),     forward_j.data(), backward_j.data(),
                               /*hbm_bytes_per_s=*/2e12, /*static_w=*/0.0};

  const std::vector<phaze::LayoutRecord> all = layouts();
  phaze::PlanProblem problem{};
  problem.fabric = cluster();
  problem.devices = kDevices;
  problem.training = mixed_precision_adam();
  problem.kinds = kKinds;
  problem.order = order;
  problem.edge_from = from;
  problem.edge_to = to;
  problem.strategies = {&strategy, 1};
  problem.sizes = sizes;
  problem.layouts = all;
  const std::vector<double> memory_limits{kUsableBytes};
  const std::vector<std::uint8_t> may_fit(all.size(), 1);
  phaze::PlanSpace space;
  if (const phaze::Status status = space.build(problem, memory_limits, may_fit);
      status != phaze::Status::kOk) {
    std::fprintf(stderr, "%s\n", phaze::sentence(status));
    return 1;
  }

  phaze::SettledLayouts settled{};
  const std::vector<phaze::PlacedPlan> plans =
      space.top_plans({&times, 1}, /*memory_limit=*/0, /*top=*/5, /*threads=*/2, &settled);
  std::printf("%3s %3s %4s %5s  %-11s %9s %9s  %s\n", "pp", "dp", "vpp", "zero", "schedule",
              "step_s", "GB", "blocks recomputed");
  for (const phaze::PlacedPlan& plan : plans) {
    const phaze::LayoutRecord& layout = space.layout(static_cast<std::size_t>(plan.layout));
    int recomputed = 0;
    for (const std::int32_t variant : plan.partition.variants) recomputed += variant != 0;
    std::printf("%3d %3lld %4d %5d  %-11s %9.4f %9.2f  in %d of %d stages\n", layout.pp,
                static_cast<long long>(layout.dp), layout.vpp, layout.zero,
                phaze::name(static_cast<phaze::PipelineSchedule>(layout.schedule)), plan.time_s,
                plan.memory_bytes / 1e9, recomputed, layout.pp);
  }
  std::printf("stages of the fastest begin at layer");
  for (const std::int32_t cut : plans.front().partition.cuts) std::printf(" %d", cut);
  std::printf("\n");
  return 0;
}
