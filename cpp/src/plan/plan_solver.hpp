// The best partition of one layout on one chip: the layers and the recomputation of each stage.
// Private to the kernel; one object per thread, reused so that memory is allocated once.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/numbers.hpp"
#include "phaze/pipeline_schedule.hpp"
#include "phaze/plan.hpp"
#include "plan/pass_chains.hpp"
#include "plan/plan_sums.hpp"
#include "plan/schedule_cache.hpp"

namespace phaze {

// The recomputation options with which a stage fits, as codes of `StageRecompute`, in order of
// preference: of options whose seconds differ only by rounding the first is taken. They do not
// depend on the chip, so they are computed once for all chips.
struct FeasibleRecompute {
  std::vector<std::int32_t> whole;  // all blocks in one variant
  // Fewest blocks in a variant with which a whole stage fits, the others in one that does not.
  std::vector<std::int32_t> fewest;
  // As many blocks as possible in a variant that does not fit, the others in one that does.
  std::vector<std::int32_t> filling;
  bool partial = false;  // only the first variant was tried: it fits, and none is faster
};

// `most` is the number of blocks of the longest chunk; bytes decrease as more blocks are
// recomputed. `first_is_fastest`: no variant is faster than the first.
template <typename Bytes>
FeasibleRecompute feasible_recompute(int variants, bool first_is_fastest, bool some_blocks,
                                     bool equal_blocks, int most, double usable_bytes,
                                     const Bytes& bytes) {
  FeasibleRecompute feasible;
  bool fits[kMaxVariants];
  for (int v = 0; v < variants; ++v) {
    fits[v] = bytes(StageRecompute{v, v, 0}) <= usable_bytes;
    if (fits[v]) feasible.whole.push_back(v);
    feasible.partial = first_is_fastest && fits[0];
    if (feasible.partial) return feasible;
  }
  if (!some_blocks || feasible.whole.empty()) return feasible;
  // The border between block counts that fit and that do not, between `low` and `high`.
  const auto border = [&](int rest, int more, bool low_fits) {
    int low = 0;
    int high = most;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool own = bytes(StageRecompute{rest, more, middle}) <= usable_bytes;
      (own == low_fits ? low : high) = middle;
    }
    return low_fits ? low : high;
  };
  for (int rest = 0; rest < variants; ++rest) {
    for (int more = 0; more < variants && !fits[rest]; ++more) {
      if (!fits[more]) continue;
      const int count = border(rest, more, false);
      if (count < most) feasible.fewest.push_back(StageRecompute{rest, more, count}.code());
    }
  }
  if (equal_blocks) return feasible;
  // If blocks or chunks differ, those that come later may need less memory. So as many of the first
  // blocks as fit are tried in `more`, which does not fit in all of them.
  for (int rest = 0; rest < variants; ++rest) {
    for (int more = 0; more < variants && fits[rest]; ++more) {
      if (fits[more]) continue;
      const int count = border(rest, more, true);
      if (count > 0) feasible.filling.push_back(StageRecompute{rest, more, count}.code());
    }
  }
  return feasible;
}

// The fastest of the feasible options, or -1.
template <typename Seconds>
std::int32_t fastest_recompute(const FeasibleRecompute& feasible, bool first_is_fastest,
                               const Seconds& seconds) {
  std::int32_t best = -1;
  double best_s = kInfinite;
  const auto offer = [&](std::int32_t code) {
    const double own = seconds(StageRecompute::of(code));
    if (best >= 0 && !(own < best_s * (1.0 - 1e-12))) return;
    best = code;
    best_s = own;
  };
  if (first_is_fastest && !feasible.whole.empty() && feasible.whole.front() == 0) return 0;
  for (const std::int32_t code : feasible.whole) offer(code);
  std::int32_t last = -1;  // the variant of the other blocks
  bool faster = false;     // whether all blocks in that variant take less than the best option
  for (const std::int32_t code : feasible.fewest) {
    const std::int32_t rest = StageRecompute::of(code).rest;
    if (rest != last) faster = seconds(StageRecompute{rest, rest, 0}) < best_s;
    last = rest;
    if (faster) offer(code);
  }
  for (const std::int32_t code : feasible.filling) offer(code);
  return best;
}

// Cache of the feasible options of the stages of a space's layouts. One object per thread.
class RecomputeCache {
 public:
  struct Key {
    std::int64_t layout;
    std::int64_t stage;  // identifies the stage and its contents
    double usable_bytes;

    bool operator==(const Key&) const = default;
  };

  // The options of a key; `make` computes them if they are not stored or only stored in part.
  template <typename Make>
  const FeasibleRecompute& of(const Key& key, bool first_is_fastest, const Make& make) {
    const auto known = feasible_.find(key);
    if (known != feasible_.end() && (first_is_fastest || !known->second.partial))
      return known->second;
    FeasibleRecompute feasible = make();
    if (feasible_.size() >= kMost) feasible_.clear();
    return feasible_.insert_or_assign(key, std::move(feasible)).first->second;
  }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      std::uint64_t hash = std::bit_cast<std::uint64_t>(key.usable_bytes);
      for (const std::int64_t part : {key.layout, key.stage}) {
        hash = mixed(hash, static_cast<std::uint64_t>(part));
      }
      return static_cast<std::size_t>(hash);
    }
  };
  static constexpr std::size_t kMost = 1 << 15;
  std::unordered_map<Key, FeasibleRecompute, Hash> feasible_;
};

// One layout with the times of one chip: times and memory of its stages, for any partition. Between
// start() and forget() all members belong to the same layout and times; other classes only read
// them. Points into the space, which must outlive it.
class LayoutOnChip {
 public:
  // lay() computes what does not depend on times: chunks, messages, activations in flight.
  // start() also computes the sums of the layout on a chip.
  void lay(const PlanSpaceImpl& of, std::size_t number, PipelinePlayer* player);
  void start(const PlanSpaceImpl& of, std::size_t number, const KindTimes& times,
             PipelinePlayer* player);
  // Drops cached times, which may change between calls of the kernel.
  void forget() noexcept { sums.forget(); }

  const LayoutRecord& record() const noexcept { return layout->record; }
  PipelineSchedule schedule() const noexcept { return schedule_of(layout->record); }
  std::int64_t number() const noexcept { return layout - space->layouts.data(); }

  // The chunk of the model that corresponds to a chunk of a stage.
  int chain_of(int stage, int chunk) const noexcept {
    return places_[at(stage) * at(layout->record.vpp) + at(chunk)];
  }
  // The stage that has chunk `place` of the model, in the direction of a stage's chunk `chunk`.
  int stage_of(int place, int chunk = 0) const noexcept {
    if (bidirectional(record())) return chunk == 0 ? place : stages - 1 - place;
    const bool folded = schedule() != PipelineSchedule::kInterleaved && place >= stages;
    return folded ? 2 * stages - 1 - place : place % stages;
  }
  // Seconds of messages before the forward (enters) or backward pass (leaves) of layers i..j.
  double enters_s(int stage, int chunk, int i, int j) const noexcept {
    return space->enters(i, j) * enter_each_[at(stage) * at(record().vpp) + at(chunk)];
  }
  double leaves_s(int stage, int chunk, int i, int j) const noexcept {
    return space->leaves(i, j) * leave_each_[at(stage) * at(record().vpp) + at(chunk)];
  }

  // Seconds of one message into and out of a chunk of a stage, for a layout of the same shape.
  double enter_s(const PricedLayout& of, std::size_t chunk_of_stage) const noexcept {
    return message_s(of, enter_at_[chunk_of_stage]);
  }
  double leave_s(const PricedLayout& of, std::size_t chunk_of_stage) const noexcept {
    return message_s(of, leave_at_[chunk_of_stage]);
  }

  // Peak bytes of a stage.
  double stage_bytes(const Partition& partition, int stage, StageRecompute recompute) const;
  // Bytes of activations of a stage for each micro-batch in flight at its peak: those of all its
  // chunks; more if chunks differ and the peak has more of the larger ones.
  double stash_bytes(const Partition& partition, int stage, StageRecompute recompute) const;
  // The same, given the bytes of each chunk and the micro-batches in flight.
  double stash_bytes(std::span<const double> by_chunk, int stage, double in_flight) const;
  LateGradients late_gradients(const Partition& partition, int stage,
                               StageRecompute recompute) const;

  const PlanSpaceImpl* space = nullptr;
  const PricedLayout* layout = nullptr;
  const LayoutCosts* costs = nullptr;
  int stages = 0;
  std::int64_t micro_batches = 0;
  bool zero_bubble = false;
  PlanSums sums;

 private:
  static constexpr std::int32_t kWrap = -1;   // from the last stage to the first
  using Shape = std::array<std::int32_t, 3>;  // schedule, stages, chunks
  void find_places();
  void find_messages();
  double message_s(const PricedLayout& of, std::int32_t at_stage) const noexcept {
    return at_stage == kWrap ? of.wrap_s : of.message_s[at(at_stage)];  // entry 0 is zero
  }

  Shape shape_{-1, 0, 0};                          // of the next three members
  std::vector<std::int32_t> places_;               // by stage and chunk, see chain_of
  std::vector<std::int32_t> enter_at_, leave_at_;  // the same: message's later stage, or kWrap
  std::vector<double> enter_each_, leave_each_;    // the same: seconds of that message
  PipelinePlayer* player_ = nullptr;
  mutable std::vector<const std::vector<double>*> held_;  // in flight, by stage; or null
  mutable std::vector<double> own_bytes_;                 // scratch: by chunk of a stage
};

// Simulates the step of partitions of a started layout. The passes are those of the last simulated
// partition; caches of steps change no answer.
class StepPlayer {
 public:
  explicit StepPlayer(const LayoutOnChip& on) noexcept : on_(on) {}

  // `played`, if given, is looked up before a step is simulated; several players may share it.
  void look_up(PlayedSteps* played) noexcept { played_ = played; }
  PipelinePlayer* player() noexcept { return &player_; }

  // The simulated step of a partition: its time without the tail, and the longest tail.
  struct Played {
    double step_s;
    double tail_s;
  };
  Played play(const Partition& partition);
  // The step's time and the longest tail, with the exchange of a tied embedding's gradients.
  double time_s(const Partition& partition);
  // Computes the passes of a partition, each stage in its variant: `forward_s` and the other
  // accessors return them, loads() and step_s() use them. Returns the longest tail.
  double take_passes(const Partition& partition);
  PipelineLoads loads() const noexcept;
  double step_s();
  // By stage and chunk: seconds of the passes, messages included.
  const std::vector<double>& forward_s() const noexcept { return forward_s_; }
  const std::vector<double>& backward_s() const noexcept { return backward_s_; }
  const std::vector<double>& weight_grad_s() const noexcept { return weight_grad_s_; }

 private:
  const LayoutOnChip& on_;
  PipelinePlayer player_;
  PlayedSteps* played_ = nullptr;
  PlayedSteps::Key key_;
  std::vector<double> forward_s_, backward_s_, weight_grad_s_;
};

// Chooses the recomputation of a stage: the fastest feasible option. All blocks are recomputed by
// one variant, or the first few by one and the others by another. Cached results belong to the
// layout and memory limit of the last restart().
class RecomputeChooser {
 public:
  explicit RecomputeChooser(const LayoutOnChip& on) noexcept : on_(on) {}

  // Starts another layout, chip or limit.
  void restart(double usable_bytes);

  // The fastest feasible option for the stage i..j of a layout without chunks, or -1.
  std::int32_t fastest_fitting(int i, int j, int stage);
  // The same for a stage of any partition, and for one whose chunks differ by one or two layers.
  std::int32_t fastest_of_chunks(const Partition& partition, int stage, double usable_bytes) const;
  std::int32_t fastest_of_assigned(const Partition& partition, int stage);
  // For every stage the fastest option that fits, or, if none does, the one that needs the least
  // memory.
  void choose(double usable_bytes, Partition* partition) const;

 private:
  struct Known {
    std::uint32_t epoch;
    std::int32_t code;
  };
  // Identifies a stage by its position and the layers of its chunks; none if there are too many.
  std::optional<std::int64_t> contents_of(const Partition& partition, int stage) const;
  FeasibleRecompute feasible_of_chunks(const Partition& partition, int stage,
                                       double usable_bytes) const;
  std::int32_t fastest_chunks(const FeasibleRecompute& feasible, const Partition& partition,
                              int stage) const;

  const LayoutOnChip& on_;
  double usable_bytes_ = 0.0;
  std::uint32_t epoch_ = 0;  // version of the cached results
  std::vector<Known> known_;
  // By stage: known contents of its chunks (contents_of), and the option chosen for them.
  std::vector<std::vector<std::pair<std::int64_t, std::int32_t>>> assigned_;
  RecomputeCache cache_;
};

// Exact search over the partitions of a layout under 1F1B, the zero-bubble schedule ZB-H1 or
// without a pipeline. Stages are built from the last to the first, since memory depends on the
// later stages. The non-dominated tails of each cut (partitions of the layers after it) are stored.
// A quick plan gives an incumbent, and with it a limit on the load of a stage (the seconds of both
// its passes), which leaves few cuts to examine.
//
// Invariants: between calls only allocated memory is reused; during a call, every plan below
// `limit_s_` has stages below `load_limit_s_`, and stage k begins between `earliest_[k]` and
// `latest_[k]`.
class PartitionSearch {
 public:
  PartitionSearch(const LayoutOnChip& on, RecomputeChooser& recompute, StepPlayer& step) noexcept
      : on_(on), recompute_(recompute), step_(step) {}

  // Improves `best`, which is infinite, by plans that take at most `below_s`.
  void run(double usable_bytes, double below_s, double load_s, PlacedPlan* best);

 private:
  void set_limits(double limit_s);
  double sends_s(int stages) const noexcept;
  double timed(const Partition& partition, double* max_load_s) const;
  std::int32_t fastest(int i, int j, int stage, double* load_s);
  bool pack(double load_s, PlacedPlan* plan, double* next_s);
  double quick_plan(double load_s, PlacedPlan* best);
  bool find_windows();
  void search(PlacedPlan* best);
  double least_with(int i, int j, int after, double work) const noexcept;
  void extend(int i, int s, double before_s, std::size_t mine);
  void finish(std::size_t from, PlacedPlan* best) const;
  void walk_all(double clock_s, PlacedPlan* best);
  void walk(int stage, int j, const PipelineClock& rest, PlacedPlan* best);

  const LayoutOnChip& on_;
  RecomputeChooser& recompute_;
  StepPlayer& step_;
  double usable_bytes_ = 0.0;
  double limit_s_ = 0.0;       // a plan must take less
  double load_limit_s_ = 0.0;  // the load of every stage must be less
  double nothing_s_ = 0.0;     // sums in another order differ by at most this
  std::vector<ClockedTail> tails_;
  std::vector<std::int32_t> starts_, ends_, own_starts_, own_ends_;  // tails of each cut
  std::vector<std::int32_t> latest_, earliest_;                      // where stage k may begin
  Partition walked_;
  std::int64_t steps_left_ = 0;
};

// Branch and bound over the assignments of one class: chunks of `base` layers, of which `extras`
// have one more. Where all blocks are equal, the passes of a stage depend on its own chunks alone.
// So the groups of chunks that share a device choose one after another which of their chunks are
// longer; such a choice is a pattern. A chain of passes bounds every step from below, and a dynamic
// program over groups and longer chunks gives the chain's least sum over the groups still open.
//
// Invariant: a pattern is dropped only if no assignment with it is below the limit of that moment,
// and limits only fall.
class AssignmentTree {
 public:
  AssignmentTree(const LayoutOnChip& on, RecomputeChooser& recompute) noexcept
      : on_(on), recompute_(recompute) {}

  // Whether groups are independent, and their patterns few enough.
  bool applies() const noexcept;
  // `first`: layers before the first counted one. `limit_s`: limit of step and tail together.
  void start(int first, int base, int extras, double limit_s);
  // Adds a chain as a bound.
  void add(const PassChain& chain, double limit_s);
  // Examines the assignments that may take at most limit_s(): calls offer(extra), which may add
  // chains, for each that no bound rules out. Returns the least bound of those that the limit of
  // work left out. Work counts examined patterns; a simulated step counts as many as take its time.
  template <typename Limit, typename Offer>
  double search(std::int64_t work, const Limit& limit_s, const Offer& offer) {
    open_s_ = kInfinite;
    work_left_ = work;
    offer_work_ = 64 + at(on_.stages) * at(on_.record().vpp) * at(on_.micro_batches) / 4;
    descend(0, 0, limit_s, offer);
    return open_s_;
  }

 private:
  struct Seconds {
    double forward, backward, weight_grad;
  };
  struct StageTail {
    double sync_s, step_s, own_s;
  };
  struct Pattern {
    std::int32_t mask;  // bit c: whether the group's chunk c is longer
    int extras;
    std::vector<Seconds> passes;  // by stage of the group and chunk
    std::vector<StageTail> tails;
  };
  struct Group {
    std::vector<int> stages;
    std::vector<int> places;
    std::vector<Pattern> patterns;
  };
  struct Bound {
    std::vector<std::vector<double>> pattern_s;  // by group and pattern
    std::vector<double> rest_s;    // by group and longer chunks before it: the least from there on
    std::vector<double> before_s;  // by group: of the chosen patterns before it
  };
  struct Child {
    double least_s;
    std::size_t pattern;
  };

  std::size_t cell(std::size_t group, int longer) const noexcept {
    return group * at(extras_ + 1) + at(longer);
  }
  void add_patterns(int first, int base, double limit_s, Group* group);
  PassChain chain_of_stage(int stage) const;
  void find_rest(Bound* bound) const;
  bool drop_patterns(const Bound& bound, double limit_s);
  double tail_s(std::size_t group, const Pattern& pattern, double* before_s) const noexcept;
  double least_s(std::size_t group, int longer, std::size_t pattern,
                 double enough_s) const noexcept;
  std::vector<Child> children(std::size_t group, int longer, double limit_s) const;
  void choose(std::size_t group, std::size_t pattern);

  template <typename Limit, typename Offer>
  void descend(std::size_t group, int longer, const Limit& limit_s, const Offer& offer) {
    if (group == groups_.size()) {
      work_left_ -= offer(extra_) ? offer_work_ : std::ssize(extra_);
      return;
    }
    const std::vector<Child> left = children(group, longer, limit_s());
    work_left_ -= static_cast<std::int64_t>(groups_[group].patterns.size());
    for (const Child& child : left) {
      const Pattern& own = groups_[group].patterns[child.pattern];
      const double limit = limit_s();  // lower than when the children were listed, and more bounds
      const double least = least_s(group, longer, child.pattern, limit);
      if (dropped_[group][child.pattern] || least > limit) continue;
      if (work_left_ < 0) {
        open_s_ = std::min(open_s_, least);
        continue;
      }
      choose(group, child.pattern);
      descend(group + 1, longer + own.extras, limit_s, offer);
    }
  }

  const LayoutOnChip& on_;
  RecomputeChooser& recompute_;
  int extras_ = 0;
  std::vector<Group> groups_;
  std::vector<std::vector<bool>> dropped_;  // by group and pattern
  std::vector<Bound> bounds_;
  std::vector<std::size_t> chosen_;                  // pattern by group
  std::vector<double> tails_s_, backward_before_s_;  // of the chosen patterns before a group
  std::vector<std::int32_t> extra_;                  // by place, of the chosen patterns
  Partition partition_;                              // scratch
  std::int64_t work_left_ = 0, offer_work_ = 0;
  double open_s_ = 0.0;
};

// Assigns layers to chunks so that chunk sizes differ by at most one layer, or as the software
// divides them, and simulates the schedule: used for schedules whose partitions are not searched. A
// few assignments are enumerated, many are searched by branch and bound, up to a limit of work.
// Stores chains of passes that ruled out assignments from one layout to the next; they change no
// answer.
class AssignmentSearch {
 public:
  AssignmentSearch(const LayoutOnChip& on, RecomputeChooser& recompute, StepPlayer& step) noexcept
      : on_(on), recompute_(recompute), step_(step) {}

  // The cuts of the even assignment: stages have even shares of the layers, or those of software
  // that divides layers by work.
  PlanStatus even(Partition* partition);
  // Improves `best`, which is infinite, by plans of the given classes (class_bit) that take at most
  // `below_s`, with so much work.
  void run(double below_s, std::int64_t work, unsigned classes, PlacedPlan* best);

 private:
  // Seconds of both passes of a stage: its first chunk, all chunks; infinite if it does not fit.
  struct StageLoad {
    double first_s;
    double load_s;
  };
  // Lower bound on the schedule, stage by stage from the first: a stage's work, and, if chunks are
  // interleaved, the passes through the first chunks of the stages before it, in both directions.
  struct Bound {
    double before_s = 0.0;
    double least_s = 0.0;
  };
  // The load of a stage with certain longer chunks, in class number `of_class` of assignments: with
  // the recomputation chosen for it, or, if none was chosen (-1), a lower bound.
  struct KnownLoad {
    std::uint32_t of_class = 0;
    StageLoad load{};
    std::int32_t recompute = -1;
  };

  PlanStatus check() const;
  bool cut(bool count_first, int base, Partition* partition) const;
  void spread_evenly(int total);
  void spread_by_load(int base, int extras, bool count_first, bool count_last);
  // `recompute`: of the stage, or -1 for the fastest variant of every layer.
  StageLoad load_of(const Partition& partition, int stage, std::int32_t recompute) const;
  double add_stage(const StageLoad& stage, Bound* bound) const;
  void start_class(int base);
  std::uint32_t class_of(int stage) const noexcept {
    return stage == 0 || stage + 1 == on_.stages ? class_ : inner_class_;
  }
  KnownLoad* known_load(int stage);
  bool known_too_long(double limit_s);
  double limit_s(double below_s, const PlacedPlan& best) const noexcept;
  StageLoad least_load(const Partition& partition, int stage);
  StageLoad chosen_load(const Partition& partition, int stage, std::int32_t* code);
  bool choose_recompute(double limit_s, Partition* partition);
  bool offer(double below_s, PlacedPlan* best);  // whether a step was simulated
  void find_rows(int first, int base, int extras, double limit_s);
  void try_all(bool count_first, bool count_last, double below_s, PlacedPlan* best);
  double tree_limit_s(double below_s, const PlacedPlan& best) const noexcept;
  double known_s(const std::vector<std::int32_t>& cuts, double below_s);

  const LayoutOnChip& on_;
  RecomputeChooser& recompute_;
  StepPlayer& step_;
  std::vector<std::int32_t> extra_;  // by chunk: whether it has one more layer than others
  std::vector<double> loads_s_;      // scratch: by stage
  std::vector<std::uint8_t> rows_;   // by first chunk: whether that row of longer chunks is tried
  Partition partition_;              // that is offered
  std::vector<KnownLoad> known_;     // by stage and longer chunks
  std::uint32_t class_ = 0;          // number of the class of assignments
  std::uint32_t inner_class_ = 0;    // that of the first class with the same loads of inner stages
  int inner_base_ = -1;              // layers of a chunk in that class; -1: in no other
  int last_too_long_ = 0;            // the stage that ruled out the last assignment
  PassChains chains_;
  AssignmentTree tree_{on_, recompute_};
  PassChains tree_chains_;  // of one search, whose work thus does not depend on others
  std::int64_t work_ = 0;   // of the tree, for one class
  bool in_tree_ = false;    // whether partitions are offered by the tree
  // Cuts of the last best assignment of each layout, which limit the time on the next chip, as all
  // chips try them. `by_load_`: whether the offered partition depends on the chip's loads instead.
  std::unordered_map<std::int64_t, std::vector<std::int32_t>> last_cuts_;
  bool by_load_ = false, best_by_load_ = false;
};

// What is known of the layouts of a strategy from earlier calls with the same times: a time below
// which a layout has no plan. One object per thread.
class KnownLayouts {
 public:
  // The time of a layout, which may be raised; minus infinity where nothing is known.
  double& none_below_s(const PlanSpaceImpl& space, std::size_t layout, const KindTimes& times,
                       double usable_bytes);

 private:
  struct Strategy {
    std::vector<double> seconds;  // all times that plans depend on, and the memory limit
    std::unordered_map<std::size_t, double> none_below_s;  // by layout
  };
  std::unordered_map<std::int32_t, Strategy> strategies_;
  std::vector<double> seconds_;  // scratch
};

// Work of a search over assignments, for each class of a layout: about 1 ms and 10 ms. Without work
// some assignments are tried, and the rest is left open.
inline constexpr std::int64_t kLittleWork = std::int64_t{1} << 12;
inline constexpr std::int64_t kMuchWork = std::int64_t{1} << 17;

// The parts of a solver, for one layout at a time. Neither copyable nor movable: its parts refer to
// each other.
// Gives every stage the same variant, which the layout's strategy must have.
PlanStatus use_variant(const PlanSpaceImpl& space, const LayoutRecord& layout, std::int32_t variant,
                       Partition* partition);

class PlanSolver {
 public:
  PlanSolver() = default;
  PlanSolver(const PlanSolver&) = delete;
  PlanSolver& operator=(const PlanSolver&) = delete;

  void look_up(PlayedSteps* played) noexcept { step_.look_up(played); }
  void forget() noexcept { on_.forget(); }
  void lay(const PlanSpaceImpl& space, std::size_t layout) {
    on_.lay(space, layout, step_.player());
  }
  void start(const PlanSpaceImpl& space, std::size_t layout, const KindTimes& times) {
    on_.start(space, layout, times, step_.player());
  }

  // The fastest plan that takes at most `below_s`; time_s is infinite if there is none. `load_s` is
  // a known lower bound on the largest load of a stage; it only saves time. `work` limits the
  // search over assignments of layers to chunks; only those of `classes` are searched.
  PlacedPlan best(const PlanSpaceImpl& space, std::size_t layout, const KindTimes& times,
                  double usable_bytes, double below_s, double load_s = 0.0,
                  std::int64_t work = kMuchWork, unsigned classes = kAllClasses);

  // The even partition in the given variant; if it is negative, each stage has the fastest variant
  // that fits, or, if none does, the one that needs the least memory.
  PlanStatus even(const PlanSpaceImpl& space, std::size_t layout, const KindTimes& times,
                  std::int32_t variant, double usable_bytes, Partition* partition);

  // The layout of the last best plan of a list of layouts; -1: there is none yet.
  std::int64_t& last_best(std::size_t list) {
    return last_best_.try_emplace(list, -1).first->second;
  }

  const LayoutOnChip& on() const noexcept { return on_; }
  StepPlayer& step() noexcept { return step_; }
  const RecomputeChooser& recompute() const noexcept { return recompute_; }

 private:
  LayoutOnChip on_;
  StepPlayer step_{on_};
  RecomputeChooser recompute_{on_};
  PartitionSearch partitions_{on_, recompute_, step_};
  AssignmentSearch assignments_{on_, recompute_, step_};
  std::unordered_map<std::size_t, std::int64_t> last_best_;
  KnownLayouts known_;
};

// The best plan of a strategy's layouts, and the best over several strategies on one chip; see
// phaze/plan.hpp.
PlacedPlan best_of_strategy(const PlanSpaceImpl& space, std::int32_t strategy,
                            const KindTimes& times, const KindTimes& least,
                            std::size_t memory_limit, double below_s, PlanSolver* solver);
bool comes_before(const PlanSpaceImpl& space, const PlacedPlan& a, const PlacedPlan& b);
std::vector<PlacedPlan> top_plans(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                  std::size_t memory_limit, std::size_t top, int threads,
                                  SettledLayouts* settled, const AskedToStop& stop, double below_s);
std::vector<PlacedPlan> plan_front(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                   std::size_t memory_limit, double most_s, int threads,
                                   SettledLayouts* settled);

// Safe to use from several threads: a solver is lent to one thread at a time. Data that a solver
// caches saves time and changes no answer.
class SolverPool {
 public:
  class Lease {
   public:
    Lease(SolverPool* pool, std::unique_ptr<PlanSolver> solver) noexcept
        : pool_(pool), solver_(std::move(solver)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { pool_->give_back(std::move(solver_)); }

    PlanSolver* get() const noexcept { return solver_.get(); }

   private:
    SolverPool* pool_;
    std::unique_ptr<PlanSolver> solver_;
  };

  // A solver that looks up steps in `played` while it is lent.
  Lease lend(PlayedSteps* played) {
    std::unique_ptr<PlanSolver> solver;
    {
      const std::scoped_lock lock(mutex_);
      if (!idle_.empty()) {
        solver = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (solver == nullptr) solver = std::make_unique<PlanSolver>();
    solver->look_up(played);
    solver->forget();
    return {this, std::move(solver)};
  }

 private:
  void give_back(std::unique_ptr<PlanSolver> solver) noexcept {
    solver->look_up(nullptr);
    const std::scoped_lock lock(mutex_);
    try {
      idle_.push_back(std::move(solver));
    } catch (...) {  // no memory for the list: the cached data is dropped
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<PlanSolver>> idle_;
};

}  // namespace phaze
