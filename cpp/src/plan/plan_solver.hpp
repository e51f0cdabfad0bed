// The best partition of one layout on one chip. Private to the kernel; one object per thread,
// reused so that memory is taken once.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
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

// Ways that fit, as `StageRecompute` writes them, in the order in which they are offered: of ways
// whose seconds differ by rounding alone the first is taken.
struct FittingWays {
  std::vector<std::int32_t> whole;    // all blocks in one variant
  std::vector<std::int32_t> leaning;  // as few blocks as must be in a variant that fits, others not
  std::vector<std::int32_t> filling;  // as many as can be in a variant that does not fit
  bool partial = false;  // only the first variant was looked at: it fits, and none is faster
};

// `most` is the number of blocks of the longest chunk; bytes fall with the blocks that are
// recomputed further. `first_is_fastest`: no variant is faster than the first.
template <typename Bytes>
FittingWays fitting_ways(int variants, bool first_is_fastest, bool some_blocks, bool alike,
                         int most, double room_bytes, const Bytes& bytes) {
  FittingWays ways;
  bool fits[kMaxVariants];
  for (int v = 0; v < variants; ++v) {
    fits[v] = bytes(StageRecompute{v, v, 0}) <= room_bytes;
    if (fits[v]) ways.whole.push_back(v);
    ways.partial = first_is_fastest && fits[0];
    if (ways.partial) return ways;
  }
  if (!some_blocks || ways.whole.empty()) return ways;
  // The border between counts of blocks that fit and that do not, `low` and `high` known of.
  const auto border = [&](int rest, int more, bool low_fits) {
    int low = 0;
    int high = most;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool own = bytes(StageRecompute{rest, more, middle}) <= room_bytes;
      (own == low_fits ? low : high) = middle;
    }
    return low_fits ? low : high;
  };
  for (int rest = 0; rest < variants; ++rest) {
    for (int more = 0; more < variants && !fits[rest]; ++more) {
      if (!fits[more]) continue;
      const int count = border(rest, more, false);
      if (count < most) ways.leaning.push_back(StageRecompute{rest, more, count}.code());
    }
  }
  if (alike) return ways;
  // Where blocks or chunks differ it matters which come first: the others may be the lean ones.
  for (int rest = 0; rest < variants; ++rest) {
    for (int more = 0; more < variants && fits[rest]; ++more) {
      if (fits[more]) continue;
      const int count = border(rest, more, true);
      if (count > 0) ways.filling.push_back(StageRecompute{rest, more, count}.code());
    }
  }
  return ways;
}

// The fastest of ways that fit, or -1.
template <typename Seconds>
std::int32_t fastest_way(const FittingWays& ways, bool first_is_fastest, const Seconds& seconds) {
  std::int32_t best = -1;
  double best_s = kInfinite;
  const auto offer = [&](std::int32_t code) {
    const double own = seconds(StageRecompute::of(code));
    if (best >= 0 && !(own < best_s * (1.0 - 1e-12))) return;
    best = code;
    best_s = own;
  };
  if (first_is_fastest && !ways.whole.empty() && ways.whole.front() == 0) return 0;
  for (const std::int32_t code : ways.whole) offer(code);
  std::int32_t last = -1;  // the variant of the others, and whether it is worth it
  bool faster = false;
  for (const std::int32_t code : ways.leaning) {
    const std::int32_t rest = StageRecompute::of(code).rest;
    if (rest != last) faster = seconds(StageRecompute{rest, rest, 0}) < best_s;
    last = rest;
    if (faster) offer(code);
  }
  for (const std::int32_t code : ways.filling) offer(code);
  return best;
}

// Ways of the stages of a space's layouts that were worked out.
class KnownWays {
 public:
  struct Key {
    std::int64_t row;
    std::int64_t stage;  // with what it holds
    double room_bytes;

    bool operator==(const Key&) const = default;
  };

  // Those of a key, which `make` gives where they are not known as far as they are needed.
  template <typename Make>
  const FittingWays& of(const Key& key, bool first_is_fastest, const Make& make) {
    const auto known = ways_.find(key);
    if (known != ways_.end() && (first_is_fastest || !known->second.partial)) return known->second;
    FittingWays ways = make();
    if (ways_.size() >= kMost) ways_.clear();
    return ways_.insert_or_assign(key, std::move(ways)).first->second;
  }

  void clear() noexcept { ways_.clear(); }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      std::uint64_t hash = std::bit_cast<std::uint64_t>(key.room_bytes);
      for (const std::int64_t part : {key.row, key.stage}) {
        hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9E3779B97F4A7C15ULL;
        hash ^= hash >> 29U;
      }
      return static_cast<std::size_t>(hash);
    }
  };
  static constexpr std::size_t kMost = 1 << 15;
  std::unordered_map<Key, FittingWays, Hash> ways_;
};

class PlanSolver {
 public:
  // `played`, where given, is looked up before a step is played; several solvers may share it.
  void look_up(PlayedSteps* played) noexcept { played_ = played; }

  // Forgets times, which may change from one call of the kernel to the next.
  void forget() noexcept {
    sums_.forget();
    times_ = nullptr;
    free_passes_.clear();
  }

  // The fastest plan that takes at most `below_s`; time_s infinite where there is none.
  // `load_s` is a load that some stage has at least, where that is known; it only saves time.
  PlacedPlan best(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times,
                  double room_bytes, double below_s, double load_s = 0.0);

  // The even partition, in the variant that is asked for; where that is negative each stage has
  // the fastest that fits, or the one that needs least where none does.
  PlanStatus even(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times,
                  std::int32_t variant, double room_bytes, Partition* partition);

  // The step of a partition, played by its schedule: without its tail, and the longest tail.
  struct Played {
    double step_s;
    double tail_s;
  };
  Played play(const Partition& partition);
  // Of the partition played last, by stage and chunk: seconds of its passes, messages included.
  const std::vector<double>& forward_s() const noexcept { return forward_s_; }
  const std::vector<double>& backward_s() const noexcept { return backward_s_; }
  const std::vector<double>& weight_grad_s() const noexcept { return weight_grad_s_; }
  // Seconds of the messages that a chunk of a stage waits for, forward and backward.
  double enters_s(int stage, int chunk, int i, int j) const noexcept;
  double leaves_s(int stage, int chunk, int i, int j) const noexcept;
  // Where in the model a chunk of a stage lies.
  int chain_of(int stage, int chunk) const noexcept {
    return places_[at(stage) * at(row_->layout.vpp) + at(chunk)];
  }

  const PlanSums& sums() const noexcept { return sums_; }
  std::vector<StateBytes>& states() noexcept { return states_; }  // scratch of an estimate
  // Makes the sums of a layout on a chip; whether those of the last one started are still there.
  void start(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times);
  bool started(const PlanSpaceImpl& space, std::size_t row, const KindTimes& times) const noexcept {
    return space_ == &space && row_ == &space.rows[row] && times_ == times.forward_s &&
           !free_.data && !free_.messages;
  }
  // What is free costs no time: exchanges of gradients and weights, messages between stages.
  struct Free {
    bool data = false;
    bool messages = false;
  };
  // The step of a partition of the layout that was started, with other times and exchanges of
  // gradients and weights free; `level` tells apart those that are asked for of one layout.
  Played play_free(const Partition& partition, const KindTimes& times, std::size_t level,
                   bool free_messages);
  // The passes of the layers as they were played last.
  const PassSums& passes() const noexcept { return *passes_; }

  // What each stage recomputes: the fastest that fits; where none does, the leanest or, unless
  // `any`, nothing is chosen.
  bool choose_recompute(double room_bytes, bool any, Partition* partition) const;

  // Sums over the chunks of a stage.
  double stage_bytes(const Partition& partition, int stage, StageRecompute way) const;
  // Activations of a stage at its worst moment, in micro-batches' worth of all its chunks: as many
  // as are in flight; more where chunks differ and the moment holds more of the larger ones.
  double stash_bytes(const Partition& partition, int stage, StageRecompute way) const;
  LateGradients late_gradients(const Partition& partition, int stage, StageRecompute way) const;

 private:
  struct Tail {
    PipelineClock clock;
    std::int32_t variant;
    std::int32_t next_cut;
    std::int32_t next_tail;  // position in `tails_`
  };
  struct Known {
    std::uint32_t epoch;
    std::int32_t code;
  };
  std::int64_t row_index() const noexcept { return row_ - space_->rows.data(); }

  // What makes the stage i..j fastest and fits, or -1; with that its load.
  std::int32_t recompute(int i, int j, int stage);
  std::int32_t recompute_chunks(const Partition& partition, int stage, double room_bytes) const;
  FittingWays ways_of_chunks(const Partition& partition, int stage, double room_bytes) const;
  std::int32_t fastest_chunks(const FittingWays& ways, const Partition& partition, int stage) const;
  std::int32_t recompute_dealt(const Partition& partition, int stage, double room_bytes);
  // Chooses what each stage recomputes; false where a stage does not fit, or once it is clear that
  // the step takes longer than the limit.
  bool choose_dealt(double room_bytes, double limit_s, Partition* partition);
  std::int32_t fastest(int i, int j, int stage, double* load_s);
  bool pack(double load_s, PlacedPlan* plan, double* next_s);
  double quick_plan(double load_s, PlacedPlan* best);
  bool find_windows();
  void search(PlacedPlan* best);
  double least_with(int i, int j, int after, double work) const noexcept;
  void extend(int i, int s, double before_s, std::size_t mine);
  void keep(std::size_t mine, const Tail& tail);
  void finish(std::size_t from, PlacedPlan* best) const;
  void walk_all(PlacedPlan* best);
  void walk(int stage, int j, const PipelineClock& rest, PlacedPlan* best);
  double played_s(const Partition& partition);
  double timed(const Partition& partition, double* max_load_s) const;
  void set_limits(double limit_s);
  PlanStatus check_deal() const;
  bool cut(bool count_first, int base, Partition* partition) const;
  PlanStatus deal_evenly(Partition* partition);
  void spread(int base, int extras, bool count_first, bool count_last);
  // A time that a deal's schedule takes at least, stage by stage from the first: a stage's work,
  // and where chunks are interleaved the passes through the first chunks of the stages before it,
  // both ways.
  struct DealtBound {
    double before_s = 0.0;
    double least_s = 0.0;
  };
  double add_stage(const Partition& partition, int stage, StageRecompute way,
                   DealtBound* bound) const;
  double message_between(int from, int to) const noexcept;
  void find_places();
  // The device that holds a place of the model for the direction of a chunk.
  int stage_of(int place, int chunk = 0) const noexcept {
    if (both_ways(row_->layout)) return chunk == 0 ? place : stages_ - 1 - place;
    const bool folded =
        schedule_of(row_->layout) != PipelineSchedule::kInterleaved && place >= stages_;
    return folded ? 2 * stages_ - 1 - place : place % stages_;
  }
  PlacedPlan best_dealt(double room_bytes, double below_s);
  void offer_deal(double room_bytes, double below_s, Partition* partition, PlacedPlan* best);
  // Passes of a partition, each stage in its variant: what `forward_s` and the others give. The
  // longest tail.
  double take_passes(const Partition& partition);
  PipelineLoads loads() const noexcept;
  // The step of the passes that were taken.
  double step_s();

  const PlanSpaceImpl* space_ = nullptr;
  const PlanRow* row_ = nullptr;
  const PlanFrame* frame_ = nullptr;
  const double* times_ = nullptr;
  Free free_;
  int stages_ = 0;
  std::int64_t rounds_ = 0;
  bool zero_bubble_ = false;
  double room_bytes_ = 0.0;
  double limit_s_ = 0.0;       // a plan must take less
  double load_limit_s_ = 0.0;  // so must every stage
  double nothing_s_ = 0.0;     // sums in another order differ by this
  Partition walked_;
  std::int64_t steps_left_ = 0;
  std::uint32_t epoch_ = 0;  // of what is known of stages
  std::vector<Known> known_;
  // By stage, and how it is dealt.
  std::vector<std::vector<std::pair<std::int64_t, std::int32_t>>> dealt_;
  KnownWays ways_;
  PlanSums sums_;
  std::vector<StateBytes> states_;
  std::vector<Tail> tails_;
  std::vector<std::int32_t> starts_, ends_, own_starts_, own_ends_;
  std::vector<std::int32_t> latest_, earliest_;  // where stage k may begin
  std::vector<std::int32_t> extra_;   // by chunk: whether it has a layer more than others
  std::vector<std::int32_t> places_;  // by stage and chunk, see chain_of
  std::vector<double> enter_each_, leave_each_;  // the same: seconds of one message
  std::vector<double> forward_s_, backward_s_, weight_grad_s_;
  std::vector<double> last_forward_s_, last_backward_s_, last_weight_grad_s_;  // scratch
  double last_step_s_ = 0.0;  // of what was played last
  // Passes with exchanges free, by level; they hold for all layouts of a strategy.
  struct FreePasses {
    const double* times = nullptr;
    PassSums sums;
  };
  std::vector<FreePasses> free_passes_;
  const PassSums* passes_ = nullptr;
  PipelinePlayer player_;
  PassChains chains_;
  PlayedSteps* played_ = nullptr;
  PlayedSteps::Key key_;
  const HeldChunks::Stages* held_ = nullptr;  // of the layout, where it has several chunks
  mutable std::vector<double> own_bytes_;     // scratch: by chunk of a stage
};

// The best plan of a strategy's layouts, and the best over several strategies on one chip; see
// phaze/plan.hpp.
PlacedPlan best_of_strategy(const PlanSpaceImpl& space, std::int32_t strategy,
                            const KindTimes& times, const KindTimes& least, std::size_t room,
                            double below_s, PlanSolver* solver);
std::vector<PlacedPlan> top_plans(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                  std::size_t room, std::size_t top, int threads,
                                  SettledLayouts* settled, const AskedToStop& stop);
std::vector<PlacedPlan> plan_front(const PlanSpaceImpl& space, std::span<const KindTimes> times,
                                   std::size_t room, double most_s, int threads,
                                   SettledLayouts* settled);

// What a step takes by a plan; `solver` is scratch.
PlanEstimate estimate_plan(const PlanSpaceImpl& space, std::size_t row, const Partition& partition,
                           const KindTimes& times, std::span<const KindTimes> free,
                           double room_bytes, std::vector<StageEstimate>* stages,
                           PlanSolver* solver);

// Safe to use from several threads: a solver is lent to one at a time. What a solver has learnt
// saves time and changes no answer.
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

  // A solver that looks steps up in `played` as long as it is lent.
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
    } catch (...) {  // without memory for the list, what was learnt is let go
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<PlanSolver>> idle_;
};

}  // namespace phaze
