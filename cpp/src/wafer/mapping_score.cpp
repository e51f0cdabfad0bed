// Step time of a mapping: sums over its terms, the memory and the load of each stage, the exact
// choice of outputs if memory is short, and the pipeline of the stages. docs/wafer.md has the
// formulas.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>

#include "base/numbers.hpp"
#include "phaze/mapping.hpp"
#include "plan/memory_rule.hpp"
#include "wafer/mapping_terms.hpp"
#include "wafer/output_choice.hpp"

namespace phaze {
namespace {

// Limits are relaxed by this factor, so that steps that equal the limit are evaluated exactly.
constexpr double kLimitRounding = 1e-9;

MapScore too_long() noexcept {
  MapScore score{};
  score.time_s = kInfinite;
  return score;
}

// Sums over one part of the model: a block, the layers before the blocks, or those after them.
struct Block {
  double forward_s = 0.0, backward_s = 0.0, weight_grad_s = 0.0;
  double blocking_f_s = 0.0, blocking_b_s = 0.0;
  double hidden_f_s = 0.0, hidden_b_s = 0.0;
  double stream_s = 0.0;
  double sync_s = 0.0, step_s = 0.0;
  double state_bytes = 0.0, stream_bytes = 0.0, stash_bytes = 0.0;
  double live_bytes = 0.0, gathered_bytes = 0.0;

  void add(const MapNode& n) noexcept {
    forward_s += n.forward_s;
    backward_s += n.backward_s;
    weight_grad_s += n.weight_grad_s;
    blocking_f_s += n.blocking_f_s;
    blocking_b_s += n.blocking_b_s;
    hidden_f_s += n.hidden_f_s;
    hidden_b_s += n.hidden_b_s;
    stream_s += n.stream_s;
    sync_s += n.sync_s;
    step_s += n.step_s;
    state_bytes += n.state_bytes;
    stream_bytes += n.stream_bytes;
    stash_bytes += n.stash_bytes;
    live_bytes = std::max(live_bytes, n.live_bytes);
    gathered_bytes = std::max(gathered_bytes, n.gathered_bytes);
  }
  void add(const MapFan& f) noexcept {
    blocking_f_s += f.forward_s;
    blocking_b_s += f.backward_s;
    hidden_f_s += f.overlapped_f_s;
    hidden_b_s += f.again_s + f.overlapped_b_s;
  }
  // Both passes with every output stored.
  double plain_s() const noexcept {
    const double passes = blocking_f_s + std::max(forward_s, hidden_f_s) + blocking_b_s +
                          std::max(backward_s, hidden_b_s);
    return std::max(passes, stream_s);
  }
};

// Seconds of a step by its schedule, accumulated stage by stage.
struct Pipeline {
  const MapRulesRecord* rules;
  double sum_s = 0.0, slowest_s = 0.0;
  // Idle seconds while the pipeline fills: of all stages, of the slowest, and the maximum.
  double idle_s = 0.0, slowest_idle_s = 0.0, most_idle_s = 0.0;

  explicit Pipeline(const MapRulesRecord& of) noexcept : rules(&of) {}

  void add(double load_s, double weight_grad_s) noexcept {
    const double waits =
        rules->zero_bubble != 0 ? std::max(0.0, load_s - 2.0 * weight_grad_s) : load_s;
    sum_s += load_s;
    idle_s += waits;
    most_idle_s = std::max(most_idle_s, waits);
    if (load_s > slowest_s) {
      slowest_s = load_s;
      slowest_idle_s = waits;
    }
  }
  double time_s() const noexcept {
    const auto batches = static_cast<double>(rules->micro_batches);
    if (rules->zero_bubble == 0 && rules->chunks == 1) return (batches - 1.0) * slowest_s + sum_s;
    return batches * slowest_s + (idle_s - slowest_idle_s) / rules->chunks;
  }
  // Lower bound on the step if each stage takes at least the load added so far; another stage may
  // then be the slowest.
  double least_s() const noexcept {
    if (rules->zero_bubble == 0) return time_s();
    return static_cast<double>(rules->micro_batches) * slowest_s +
           (idle_s - most_idle_s) / rules->chunks;
  }
  // Upper limit on the time of a stage, now `load_s`, in a step of at most `limit_s`: all
  // micro-batches pass this stage or the slowest one, and one micro-batch passes the others.
  double most_s(double limit_s, double load_s) const noexcept {
    const auto batches = static_cast<double>(rules->micro_batches);
    const double part = rules->zero_bubble != 0 ? 0.0 : 1.0 / rules->chunks;
    const double left_s = limit_s - part * (sum_s - load_s);
    if (rules->zero_bubble != 0 || rules->chunks != 1) return left_s / batches;
    return std::min(left_s / batches, left_s - (batches - 1.0) * slowest_s);
  }
  // Replaces the bound `least_s` of a stage by its actual time.
  void now(double load_s, double least_s) noexcept {
    sum_s += load_s - least_s;
    slowest_s = std::max(slowest_s, load_s);
  }
};

// Budget of one stage, before the choice of its outputs.
struct StageBudget {
  double flight;       // micro-batches whose activations it stores
  double state_bytes;  // weights, gradients, optimiser state
  double stash_bytes;  // activations of its boundary layers
  double fixed_bytes;  // all memory except the activations of its blocks
  double stream_bytes;
  double sync_s, step_s;
  double others_s;           // seconds of everything except its blocks
  double needed_bytes;       // bytes that every block must save; 0 if all activations fit
  double stream_free_bytes;  // off-wafer memory for the outputs of a block
  double least_s;            // if there is a limit: lower bound, outputs saved fractionally
};

// Bytes between a die and the rim, for one micro-batch.
struct Moved {
  double taken_bytes, given_bytes;
};

// One evaluation of a mapping: a local object of score_step(), which reads the terms and the state
// and changes neither. Invariant: members are filled in the order of run()'s steps; each step reads
// only members that earlier steps have filled.
class StepScorer {
 public:
  StepScorer(const MapTerms& terms, const MapState& state, const ScoreRequest& request) noexcept
      : terms_(terms),
        state_(state),
        rules_(terms.rules),
        request_(request),
        count_(terms.stage_count()),
        limit_s_(request.limit_s * (1.0 + kLimitRounding)),
        most_s_(limit_s_ - rules_.outer_tail_s),
        least_(rules_) {}

  MapScore run() {
    sum_parts();
    const bool short_of_memory = budget_stages();
    if (least_.least_s() > most_s_) return too_long();
    chooses_ = request_.outputs.empty() && short_of_memory;
    if (chooses_ || !request_.outputs.empty()) list_items();
    chooser_.emplace(
        items_.data(), item_count_,
        OutputBlock{block_.blocking_f_s, block_.forward_s, block_.hidden_f_s, block_.blocking_b_s,
                    block_.backward_s, block_.hidden_b_s, block_.stream_s});
    const bool limited = chooses_ && most_s_ < kInfinite;
    if (limited && !may_be_in_time()) return too_long();
    least_step_s_ = least_.least_s();
    if (limited && surely_lacks()) return too_long();
    tail_s_ = tail_s();
    const bool plain =
        rules_.zero_bubble == 0 && rules_.chunks == 1 && terms_.cross_stage_s.empty();
    if (request_.range != nullptr && limited && plain && narrow(*request_.range)) {
      MapScore score = too_long();
      if (request_.range->most_s < kInfinite) score.time_s = kNan;
      return score;
    }
    return add_stages() ? total() : too_long();
  }

 private:
  // ---- parts of the model and stages ----
  double weight_grad_s(int k) const noexcept {
    return blocks(k) * block_.weight_grad_s + (terms_.is_first(k) ? ends_[0].weight_grad_s : 0.0) +
           (terms_.is_last(k) ? ends_[1].weight_grad_s : 0.0);
  }
  double blocks(int k) const noexcept { return terms_.blocks[at(k)]; }

  bool lacks(double over_bytes) const noexcept {
    return over_bytes > 0.0 &&
           least_step_s_ * (1.0 + request_.shortage * over_bytes / rules_.capacity_bytes) >
               limit_s_;
  }

  // Seconds of a stage for one micro-batch without the streams of other stages, and bytes between
  // each of its dies and the rim.
  struct StageStreams {
    double isolated_s, taken_bytes, given_bytes;
  };

  // Sums of a block, and of the layers before and after the blocks.
  void sum_parts() noexcept {
    for (int i = 0; i < terms_.op_count(); ++i) {
      const int part = terms_.ops[at(i)].part;
      (part == 1 ? block_ : ends_[part == 0 ? 0 : 1]).add(state_.nodes[at(i)]);
    }
    for (std::size_t f = 0; f < terms_.fans.size(); ++f) {
      const int part = terms_.ops[at(terms_.fans[f].from)].part;
      const bool exit = terms_.fans[f].kind == static_cast<int>(EdgeKind::kExit);
      (part == 1 && !exit ? block_ : ends_[part == 0 ? 0 : 1]).add(state_.fans[f]);
    }
    plain_s_ = block_.plain_s();
  }

  // Fills `stages_`, and `least_` with every output stored; returns whether some stage is then
  // short of memory.
  bool budget_stages() noexcept {
    // Between stages each die sends its share; replicated data is sent once, then gathered.
    const TensorState between = terms_.at_boundary(state_);
    const double share = rules_.boundary_bytes / terms_.size(between.split());
    const double regather_s =
        terms_.gather_s(between.whole, share, state_.op_mappings[at(terms_.last)].algorithm);
    const double copies = terms_.size(between.whole);
    bool short_of_memory = false;
    for (int k = 0; k < count_; ++k) {
      stages_[at(k)] = budget(k, regather_s, copies);
      short_of_memory = short_of_memory || stages_[at(k)].needed_bytes > 0.0;
      least_.add(stages_[at(k)].others_s + blocks(k) * plain_s_, weight_grad_s(k));
    }
    return short_of_memory;
  }

  StageBudget budget(int k, double regather_s, double copies) const noexcept {
    const double own_blocks = blocks(k);
    StageBudget b{};
    b.flight = terms_.flights[at(k)];
    b.state_bytes = own_blocks * block_.state_bytes;
    b.stream_bytes = own_blocks * block_.stream_bytes;
    b.sync_s = own_blocks * block_.sync_s;
    b.step_s = own_blocks * block_.step_s;
    double live = own_blocks > 0.0 ? block_.live_bytes : 0.0;
    double gathered = own_blocks > 0.0 ? block_.gathered_bytes : 0.0;
    for (int e = 0; e < 2; ++e) {
      if (!(e == 0 ? terms_.is_first(k) : terms_.is_last(k))) continue;
      const Block& end = ends_[at(e)];
      b.state_bytes += end.state_bytes;
      live = std::max(live, end.live_bytes);
      gathered = std::max(gathered, end.gathered_bytes);
      b.stash_bytes += b.flight * end.stash_bytes;
      b.stream_bytes += end.stream_bytes;
      b.sync_s += end.sync_s;
      b.step_s += end.step_s;
    }
    b.fixed_bytes = b.state_bytes + live + 2.0 * gathered + b.stash_bytes;
    b.others_s = others_s(k, regather_s, copies);
    const double stashes = b.flight * own_blocks;  // copies of a block's activations
    const double usable_bytes = rules_.capacity_bytes - b.fixed_bytes;
    b.stream_free_bytes =
        stashes > 0.0 ? std::max(0.0, rules_.stream_capacity_bytes - b.stream_bytes) / stashes
                      : 0.0;
    if (stashes * block_.stash_bytes > usable_bytes && stashes > 1.0) {
      b.needed_bytes =
          (stashes * block_.stash_bytes - usable_bytes) / (stashes - 1.0) * (1.0 - 1e-12);
    }
    return b;
  }

  // Seconds of a stage in addition to its blocks: boundary layers and messages.
  double others_s(int k, double regather_s, double copies) const noexcept {
    const bool first = terms_.is_first(k), last = terms_.is_last(k);
    double sending = terms_.boundary_s[at(k)] * rules_.boundary_bytes;
    if (count_ > 1) {
      const double ways = 2.0 * rules_.chunks - (first ? 1.0 : 0.0) - (last ? 1.0 : 0.0);
      sending = std::min(sending * copies, sending + ways * regather_s);
    }
    return (first ? ends_[0].plain_s() : 0.0) + (last ? ends_[1].plain_s() : 0.0) + sending;
  }

  // Gradient reduction of all blocks but the last overlaps the backward pass of other blocks.
  double tail_s() const noexcept {
    double longest_s = 0.0;
    for (int k = 0; k < count_; ++k) {
      const StageBudget& b = stages_[at(k)];
      const double later_backward_s = std::max(0.0, blocks(k) - 1.0) * block_.backward_s;
      const double exposed =
          std::max(b.sync_s - later_backward_s, std::min(b.sync_s, block_.sync_s));
      longest_s = std::max(longest_s, exposed + b.step_s);
    }
    return longest_s;
  }

  // Lists the outputs that may be recomputed or moved off the wafer, and what either costs.
  void list_items() noexcept {
    std::array<MapFan, kMaxMapOps> sent{};
    for (std::size_t f = 0; f < terms_.fans.size(); ++f) {
      const FanShape& shape = terms_.fans[f];
      if (terms_.ops[at(shape.from)].part != 1 || shape.kind == static_cast<int>(EdgeKind::kExit))
        continue;
      sent[at(shape.from)].forward_s += state_.fans[f].forward_s;
      sent[at(shape.from)].again_s += state_.fans[f].again_s;
      sent[at(shape.from)].overlapped_f_s += state_.fans[f].overlapped_f_s;
    }
    std::array<double, kMaxMapOps> entering{};
    for (const MapEdgeRecord& edge : terms_.edges) {
      const bool passes = edge.kind == static_cast<int>(EdgeKind::kInside) ||
                          edge.kind == static_cast<int>(EdgeKind::kWrap);
      if (passes && terms_.ops[at(edge.to)].part == 1) {
        entering[at(edge.to)] += terms_.reentry_s(edge, state_);
      }
    }
    for (int i = 0; i < terms_.op_count(); ++i) {
      const MapOpRecord& record = terms_.ops[at(i)];
      const bool again = (record.outputs >> static_cast<int>(Output::kRecompute) & 1) != 0;
      const bool out = (record.outputs >> static_cast<int>(Output::kOffload) & 1) != 0 &&
                       rules_.stream_capacity_bytes > 0.0;
      const MapNode& own = state_.nodes[at(i)];
      if (record.part != 1 || !(own.stash_bytes > 0.0) || !(again || out)) continue;
      OutputItem item{i, again, out, own.stash_bytes, own.forward_s, 0.0, 0.0, 0.0, 0.0};
      item.blocking_s = own.blocking_f_s + sent[at(i)].forward_s;
      if (record.output_stored != 0) item.blocking_s += entering[at(i)];
      item.hidden_s = sent[at(i)].overlapped_f_s - sent[at(i)].again_s;
      for (const std::int32_t f : terms_.forced[at(i)]) {
        item.work_s += state_.nodes[at(f)].forward_s;
        item.blocking_s +=
            state_.nodes[at(f)].blocking_f_s + sent[at(f)].forward_s + entering[at(f)];
        item.hidden_s += sent[at(f)].overlapped_f_s;
      }
      if (out) {
        const double moved = rules_.streamed(own.stash_bytes, own.stash_bytes);
        item.stream_s = moved / rules_.stream_bytes_per_s;
        item.link_s = own.stash_bytes * terms_.link_s;
      }
      items_[at(item_count_++)] = item;
    }
  }

  double block_s(const Outputs& outputs) const noexcept {
    double blocking = block_.blocking_b_s, work = block_.backward_s, hidden = block_.hidden_b_s;
    double stream = block_.stream_s, hidden_f = block_.hidden_f_s;
    for (int i = 0; i < item_count_; ++i) {
      const OutputItem& item = items_[at(i)];
      switch (static_cast<Output>(outputs[at(item.op)])) {
        case Output::kStash:
          break;
        case Output::kRecompute:
          blocking += item.blocking_s;
          work += item.work_s;
          hidden += item.hidden_s;
          break;
        case Output::kOffload:
          stream += item.stream_s;
          hidden_f += item.link_s;
          hidden += item.link_s;
          break;
      }
    }
    const double forward = block_.blocking_f_s + std::max(block_.forward_s, hidden_f);
    return std::max(forward + blocking + std::max(work, hidden), stream);
  }

  double saved_bytes(const Outputs& outputs) const noexcept {
    double saved = 0.0;
    for (int i = 0; i < item_count_; ++i) {
      const OutputItem& item = items_[at(i)];
      if (outputs[at(item.op)] != 0) saved += item.saved_bytes;
    }
    return saved;
  }

  // Whether the step may meet the limit if each stage saves outputs fractionally, in its best way;
  // fills `least_` and the stages' least seconds.
  bool may_be_in_time() noexcept {
    least_ = Pipeline(rules_);
    for (int k = 0; k < count_; ++k) {
      StageBudget& b = stages_[at(k)];
      double block_s = plain_s_;
      if (b.needed_bytes > 0.0 && chooser_->surely(b.needed_bytes, b.stream_free_bytes)) {
        block_s = std::max(plain_s_, chooser_->least_s(b.needed_bytes));
      }
      b.least_s = b.others_s + blocks(k) * block_s;
      least_.add(b.least_s, weight_grad_s(k));
    }
    return !(least_.least_s() > most_s_);
  }

  // Whether some stage lacks too much memory under every choice.
  bool surely_lacks() const noexcept {
    for (int k = 0; k < count_; ++k) {
      const StageBudget& b = stages_[at(k)];
      const double stashes = b.flight * blocks(k);
      if (chooser_->most_saved() >= b.needed_bytes) continue;
      const double saved_bytes = (stashes - 1.0) * chooser_->most_saved();
      if (lacks(b.fixed_bytes + stashes * block_.stash_bytes - saved_bytes -
                rules_.capacity_bytes * (1.0 + 1e-12))) {
        return true;
      }
    }
    return false;
  }

  // Settles a 1F1B step without its exact time, or returns false. If the time is certain to lie in
  // `range`, narrows `range` to bounds on the time; if it is certain to exceed the limit, makes
  // `range.most_s` infinite. Outputs are chosen for stages that may be the slowest, the fullest
  // first: stages with less to save and at least as much off-wafer memory take at most the time of
  // the same choice, and at least the time with outputs saved fractionally.
  bool narrow(MapRange& range) noexcept {
    const auto count = at(count_);
    const double tail_s = tail_s_ + rules_.outer_tail_s;
    Pipeline least = least_;
    std::array<double, kMaxMapStages> most;  // first `count` entries
    std::array<bool, kMaxMapStages> exact;
    for (std::size_t k = 0; k < count; ++k) {
      const StageBudget& b = stages_[k];
      exact[k] = !(b.needed_bytes > 0.0);
      most[k] = exact[k] ? b.others_s + terms_.blocks[k] * plain_s_ : kInfinite;
    }
    for (bool first = true;; first = false) {
      std::size_t slowest = 0;  // ties: of stages not bounded yet, the fullest
      for (std::size_t k = 1; k < count; ++k) {
        const bool fuller = stages_[k].needed_bytes > stages_[slowest].needed_bytes;
        if (most[k] > most[slowest] || (most[k] == most[slowest] && fuller)) slowest = k;
      }
      const StageBudget& full = stages_[slowest];
      const double own_blocks = terms_.blocks[slowest];
      if (exact[slowest]) return false;
      exact[slowest] = true;
      const double worst_s =
          (least.most_s(limit_s_ - tail_s, full.least_s) - full.others_s) / own_blocks;
      const double block_s =
          chooser_->solve(full.needed_bytes, full.stream_free_bytes, worst_s, range.again);
      if (!(block_s < kInfinite)) {
        range.most_s = kInfinite;
        return chooser_->surely(full.needed_bytes, full.stream_free_bytes);
      }
      if (first) range.again = chooser_->again();
      least.now(full.others_s + own_blocks * block_s, full.least_s);
      Pipeline longest(rules_);
      for (std::size_t k = 0; k < count; ++k) {
        const StageBudget& b = stages_[k];
        const bool less =
            b.needed_bytes <= full.needed_bytes && b.stream_free_bytes >= full.stream_free_bytes;
        if (less) most[k] = std::min(most[k], b.others_s + terms_.blocks[k] * block_s);
        longest.add(most[k], 0.0);
      }
      const double least_s = (least.time_s() + tail_s) * (1.0 - kLimitRounding);
      const double most_s = (longest.time_s() + tail_s) * (1.0 + kLimitRounding);
      if (least_s >= range.least_s && most_s <= range.most_s) {
        range.least_s = least_s;
        range.most_s = most_s;
        return true;
      }
    }
  }

  // Chooses the outputs of a stage's blocks; returns false if the step is certain to exceed the
  // limit.
  bool choose(int k, Outputs* outputs) noexcept {
    const StageBudget& b = stages_[at(k)];
    if (!request_.outputs.empty()) {
      const auto ops = at(terms_.op_count());
      for (std::size_t i = 0; i < ops; ++i) (*outputs)[i] = request_.outputs[at(k) * ops + i];
      return true;
    }
    if (!(b.needed_bytes > 0.0)) {
      outputs->fill(0);
      return true;
    }
    double worst_s = kInfinite;
    if (most_s_ < kInfinite) {
      worst_s = (least_.most_s(most_s_, b.least_s) - b.others_s) / blocks(k);
    }
    return chooser_->choose(b.needed_bytes, b.stream_free_bytes, worst_s, *outputs);
  }

  // Sums memory and loads, stage by stage; returns false once the step is certain to exceed the
  // limit.
  bool add_stages() {
    if (request_.stages != nullptr) request_.stages->resize(at(count_));
    const bool streams = !terms_.cross_stage_s.empty();  // cross-stage streams exist
    if (streams) weights_ = moved_weights();
    Outputs outputs{};
    for (int k = 0; k < count_; ++k) {
      if (!choose(k, &outputs)) return false;
      const StageBudget& b = stages_[at(k)];
      const double stashes = b.flight * blocks(k);
      const double saved = saved_bytes(outputs);
      const double activations =
          stashes * (block_.stash_bytes - saved) + (stashes > 0.0 ? saved : 0.0);
      const double memory = b.fixed_bytes + activations;
      const double over = std::max(0.0, memory - rules_.capacity_bytes * (1.0 + 1e-12));
      if (lacks(over)) return false;
      double moved = 0.0;
      for (int i = 0; i < item_count_; ++i) {
        const OutputItem& item = items_[at(i)];
        if (outputs[at(item.op)] == static_cast<std::uint8_t>(Output::kOffload)) {
          moved += item.saved_bytes;
        }
      }
      const double stream = b.stream_bytes + stashes * moved;
      const double per_block_s = block_s(outputs);
      const double load_s = b.others_s + blocks(k) * per_block_s;
      loads_s_[at(k)] = load_s;
      least_.now(load_s, b.least_s);
      if (streams) isolated_[at(k)] = streams_of(k, load_s, moved);
      score_.memory_bytes = std::max(score_.memory_bytes, memory);
      score_.over_bytes = std::max(score_.over_bytes, over);
      score_.stream_bytes = std::max(score_.stream_bytes, stream);
      score_.stream_over_bytes =
          std::max(score_.stream_over_bytes, stream - rules_.stream_capacity_bytes * (1.0 + 1e-12));
      if (request_.stages != nullptr) describe(k, outputs, load_s, activations, over);
    }
    return true;
  }

  void describe(int k, const Outputs& outputs, double load_s, double activations,
                double over_bytes) {
    const StageBudget& b = stages_[at(k)];
    MapStage& stage = (*request_.stages)[at(k)];
    stage.load_s = load_s;
    stage.memory_bytes = b.fixed_bytes + activations;
    stage.state_bytes = b.state_bytes;
    stage.activation_bytes = activations + b.stash_bytes;
    stage.over_bytes = over_bytes;
    stage.isolated_s = load_s;
    stage.outputs = outputs;
  }

  MapScore total() {
    score_.compute_s = block_.forward_s + block_.backward_s;
    score_.blocking_s = block_.blocking_f_s + block_.blocking_b_s;
    score_.hidden_s = block_.hidden_f_s + block_.hidden_b_s;
    Pipeline pipeline(rules_);
    const double links_s = terms_.cross_stage_s.empty() ? 0.0 : charge_cross_stage();
    for (int k = 0; k < count_; ++k) {
      pipeline.add(loads_s_[at(k)], weight_grad_s(k));
      if (request_.stages != nullptr) (*request_.stages)[at(k)].load_s = loads_s_[at(k)];
    }
    if (!terms_.cross_stage_s.empty()) {
      const double more = std::max(0.0, links_s - pipeline.slowest_s);  // per micro-batch
      score_.time_s = static_cast<double>(rules_.micro_batches - 1) * more;
    }
    if (!(score_.stream_over_bytes > 0.0)) score_.stream_over_bytes = 0.0;
    score_.slowest_stage_s = pipeline.slowest_s;
    score_.tail_s = tail_s_ + rules_.outer_tail_s;
    score_.time_s += pipeline.time_s() + score_.tail_s;
    return score_;
  }

  // Weights and gradients of the layers before the blocks, of one block, and of the layers after
  // the blocks.
  std::array<Moved, 3> moved_weights() const noexcept {
    std::array<Moved, 3> weights{};
    const double all = rules_.weight_bytes + rules_.gradient_bytes + rules_.state_bytes;
    for (int i = 0; i < terms_.op_count(); ++i) {
      const auto mode = static_cast<WeightMode>(state_.op_mappings[at(i)].mode);
      const double off_wafer = state_.nodes[at(i)].stream_bytes;  // bytes of a die's parameters
      Moved& part = weights[at(terms_.ops[at(i)].part)];
      if (mode == WeightMode::kStream) {
        part.taken_bytes += 2.0 * rules_.weight_bytes * (off_wafer / all);
        part.given_bytes += rules_.gradient_bytes * (off_wafer / all);
      } else if (mode == WeightMode::kOffload) {
        part.given_bytes += rules_.gradient_bytes * (off_wafer / (all - rules_.weight_bytes));
      }
    }
    return weights;
  }

  // Bytes that a stage's dies read and write for one micro-batch; activations moved off the wafer
  // (`offloaded`, per block) are written and read back.
  StageStreams streams_of(int k, double isolated_s, double offloaded) const noexcept {
    StageStreams traffic{isolated_s, blocks(k) * (weights_[1].taken_bytes + offloaded),
                         blocks(k) * (weights_[1].given_bytes + offloaded)};
    for (const std::size_t end : {std::size_t{0}, std::size_t{2}}) {
      if (!(end == 0 ? terms_.is_first(k) : terms_.is_last(k))) continue;
      traffic.taken_bytes += weights_[end].taken_bytes;
      traffic.given_bytes += weights_[end].given_bytes;
    }
    return traffic;
  }

  // Collectives of a stage share its links with the cross-stage streams of other stages. Each stage
  // streams once per period of the slowest stage, so a stage is delayed by these streams in
  // proportion to its share of that period. Replaces `loads_s_` by the resulting times of the
  // stages, and returns a lower bound on the seconds of the busiest link to the rim: those if every
  // stage streamed only the least bytes of any stage.
  double charge_cross_stage() noexcept {
    const std::size_t count = at(count_);
    const std::array<StageStreams, kMaxMapStages>& all = isolated_;
    double least_in = all[0].taken_bytes, least_out = all[0].given_bytes, most = 0.0, pace_s = 0.0;
    for (std::size_t j = 0; j < count; ++j) {
      least_in = std::min(least_in, all[j].taken_bytes);
      least_out = std::min(least_out, all[j].given_bytes);
      most = std::max({most, all[j].taken_bytes, all[j].given_bytes});
      pace_s = std::max(pace_s, all[j].isolated_s);
    }
    if (!(most > 0.0) || !(pace_s > 0.0)) return 0.0;
    for (std::size_t k = 0; k < count; ++k) {
      double past_s = 0.0;
      for (std::size_t j = 0; j < count; ++j) {
        const double less = std::min(all[j].taken_bytes, all[j].given_bytes);
        const double rest = std::max(all[j].taken_bytes, all[j].given_bytes) - less;
        if (j == k || !(rest + less > 0.0)) continue;
        const double* cost = &terms_.cross_stage_s[(k * count + j) * 2];
        past_s += rest * cost[0] + less * cost[1];
      }
      loads_s_[k] = all[k].isolated_s + all[k].isolated_s / pace_s * past_s;
    }
    return rules_.streamed_link_s(least_in, least_out);
  }

  const MapTerms& terms_;
  const MapState& state_;
  const MapRulesRecord& rules_;
  const ScoreRequest& request_;
  int count_;                // number of stages
  double limit_s_, most_s_;  // limits on the step, and on the step without its tail
  Block block_;
  std::array<Block, 2> ends_;
  double plain_s_;                                 // seconds of a block with every output stored
  std::array<StageBudget, kMaxMapStages> stages_;  // first `count_` entries
  Pipeline least_;  // lower bounds of the stages over every choice of outputs
  bool chooses_ = false;
  int item_count_ = 0;
  std::array<OutputItem, kMaxMapOps> items_;
  std::optional<OutputChooser> chooser_;
  double least_step_s_, tail_s_;
  MapScore score_{};
  // First `count_` entries. isolated_: without streams of other stages, set if there are any.
  std::array<double, kMaxMapStages> loads_s_;
  std::array<StageStreams, kMaxMapStages> isolated_;
  std::array<Moved, 3> weights_{};  // moved before the blocks, of a block, after the blocks
};

}  // namespace

double MapRulesRecord::in_flight(int stages, int stage) const noexcept {
  const PipelineSchedule schedule = zero_bubble != 0 ? PipelineSchedule::kZeroBubbleH1
                                    : chunks > 1     ? PipelineSchedule::kInterleaved
                                                     : PipelineSchedule::kOneForwardOneBackward;
  return micro_batches_in_flight(schedule, stages, stage, micro_batches, chunks);
}

MapScore score_step(const MapTerms& terms, const MapState& state, const ScoreRequest& request) {
  return StepScorer(terms, state, request).run();
}

}  // namespace phaze
