#include <algorithm>
#include <limits>

#include "phaze/placement.hpp"
#include "placement/pipeline_clock.hpp"
#include "placement/placement_cuts.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::size_t index(int i) noexcept { return static_cast<std::size_t>(i); }

// A way to place everything after a cut.
struct Tail {
  PipelineClock clock;
  std::int32_t variant;
  std::int32_t next_cut;
  std::int32_t next_tail;  // position in `tails_`
};

// Stages are found from the last to the first, as in the published objective. Of the tails of a cut
// those are kept of which none is better than another in every respect. A first pass with the load
// alone gives plans to beat.
class Pipeline {
 public:
  Pipeline(const PlacementCuts& cuts, const PipelineRules& rules, std::vector<PlacementPlan>* plans)
      : cuts_(cuts), rules_(rules), plans_(*plans) {
    nothing_s_ = 1e-13 * cuts.work_s(0, cuts.count() - 1);
  }

  void run() {
    const int first = rules_.first_stages;
    const int last = std::min(rules_.last_stages, cuts_.layers().layers);
    plans_.assign(index(rules_.last_stages - first + 1), {kInfinite, 0.0, 0.0, 0, 1, 0, {}, {}});
    if (rules_.kind == PipelineKind::kZeroBubble) {
      // Fewer micro-batches than stages leave nothing to fill the gaps with.
      const auto most = static_cast<int>(std::min<std::int64_t>(last, rules_.micro_batches));
      for (int p = first; p <= most; ++p) solve(p, p, p);
    } else {
      solve(first, last, 0);
    }
    if (rules_.best_only) keep_best();
  }

 private:
  void keep_best() {
    std::size_t best = 0;
    for (std::size_t k = 1; k < plans_.size(); ++k) {
      if (plans_[k].time_s < plans_[best].time_s) best = k;
    }
    for (std::size_t k = 0; k < plans_.size(); ++k) {
      if (k != best) plans_[k] = {kInfinite, 0.0, 0.0, 0, 1, 0, {}, {}};
    }
  }

  struct Stage {
    double forward_s;
    double backward_s;
    std::int32_t variant;
  };

  // The variants that fit, in a stage that s - 1 others follow, of which none is faster both ways
  // than another. Messages are received before a pass.
  int stages(int i, int j, int s, Stage* found) const noexcept {
    const PlacementCuts::Traffic traffic = cuts_.traffic(i, j);
    const auto schedule = rules_.kind == PipelineKind::kZeroBubble
                              ? PipelineSchedule::kZeroBubble
                              : PipelineSchedule::kOneForwardOneBackward;
    const double waiting = micro_batches_in_flight(
        schedule, stages_ > 0 ? stages_ : s, stages_ > 0 ? stages_ - s : 0, rules_.micro_batches, 1);
    const bool single = i == 0 && j == cuts_.count() - 1;
    const double held =
        cuts_.resident_bytes(i, j) + cuts_.once_bytes(i, j) + (single ? 0.0 : rules_.piped_bytes);
    int count = 0;
    for (int v = 0; v < cuts_.layers().variants; ++v) {
      const double bytes = held + waiting * cuts_.stash_bytes(v, i, j) + cuts_.live_bytes(v, i, j);
      if (bytes > rules_.memory_bytes * kFits) continue;
      const Stage made{traffic.in_s + cuts_.forward_s(v, i, j),
                       traffic.out_s + cuts_.backward_s(v, i, j), v};
      bool faster = true;
      for (int k = 0; k < count && faster; ++k) {
        faster = made.forward_s < found[k].forward_s || made.backward_s < found[k].backward_s;
      }
      if (faster) found[count++] = made;
    }
    return count;
  }

  double tail_s(int i, int j) const noexcept {
    return tail_after(cuts_.sync_s(i, j), cuts_.backward_s(0, i, j), rules_.bucket_s,
                      cuts_.step_s(i, j), cuts_.backward_s(0, 0, i));
  }

  Tail joined_with(const Stage& made, const Tail& rest, int i, int j, int s,
                   double own_tail_s) const noexcept {
    const StagePass pass{made.forward_s, made.backward_s, cuts_.weight_grad_s(i, j), own_tail_s};
    const bool zero_bubble = rules_.kind == PipelineKind::kZeroBubble;
    return {joined(rest.clock, pass, rules_.micro_batches, s - 1, stages_ - s, zero_bubble),
            made.variant, j, 0};
  }

  static double time(const Tail& t) noexcept { return t.clock.time_s(); }

  PlacementPlan& plan(int p) { return plans_[index(p - rules_.first_stages)]; }

  void solve(int first, int last, std::int64_t stages) {
    stages_ = static_cast<int>(stages);
    pass(first, last, true);
    if (cuts_.chain() && balanced_.empty()) {
      const int end = cuts_.count() - 1;
      const int most = std::min(rules_.last_stages, cuts_.layers().layers);
      balanced_ = balanced_shares(end, most, [&](int i, int j) { return cuts_.work_s(i, j); });
    }
    pass(first, last, false);
  }

  // The time that some plan with s stages or more must beat, and loads from which on a plan with p
  // stages does not.
  void find_limits(int first, int last) {
    limits_s_.assign(index(last) + 2, 0.0);
    loads_s_.assign(index(last) + 2, 0.0);
    double best = kInfinite;
    for (const PlacementPlan& each : plans_) best = std::min(best, each.time_s);
    for (int p = last; p >= 1; --p) {
      double own = p >= first ? plan(p).time_s : 0.0;
      if (rules_.best_only) own = std::min(own, best);
      limits_s_[index(p)] = std::max(limits_s_[index(p) + 1], own);
      if (p >= first) {
        loads_s_[index(p)] = own / static_cast<double>(rules_.micro_batches) * (1.0 + 1e-12);
      }
    }
  }

  // No stage after cut i, s of them, may have this load or more in a plan that beats its own limit.
  double load_limit(int s, int i, int first, int last) const noexcept {
    if (i == 0) return s >= first ? loads_s_[index(s)] : 0.0;
    double most = 0.0;
    for (int p = std::max(s + 1, first); p <= last; ++p) {
      const double own = loads_s_[index(p)];
      const bool fits = balanced_.empty() || balanced_[index(p - s)][index(i)] < own;
      if (fits) most = std::max(most, own);
    }
    return most;
  }

  void pass(int first, int last, bool rough) {
    const int end = cuts_.count() - 1;
    tails_.assign(1, {PipelineClock{}, -1, -1, -1});
    find_limits(first, last);
    std::vector<std::int32_t> starts(index(end) + 1, 0);
    std::vector<std::int32_t> ends(index(end) + 1, 0);
    ends[index(end)] = 1;
    for (int s = 1; s <= last; ++s) {
      std::vector<std::int32_t> own_starts(index(end) + 1, 0);
      std::vector<std::int32_t> own_ends(index(end) + 1, 0);
      bool any = false;
      for (int i = end - 1; i >= 0; --i) {
        const std::size_t mine = tails_.size();
        const double load_s = rough ? kInfinite : load_limit(s, i, first, last);
        if (load_s > 0.0) extend(i, s, starts, ends, mine, rough, load_s);
        own_starts[index(i)] = static_cast<std::int32_t>(mine);
        own_ends[index(i)] = static_cast<std::int32_t>(tails_.size());
        any = any || tails_.size() > mine;
      }
      if (s >= first) finish(s, own_starts[0], own_ends[0]);
      if (!any) break;
      starts = std::move(own_starts);
      ends = std::move(own_ends);
    }
  }

  void extend(int i, int s, const std::vector<std::int32_t>& starts,
              const std::vector<std::int32_t>& ends, std::size_t mine, bool rough, double load_s) {
    const double limit_s = limits_s_[index(s)];
    // By 1F1B every stage before adds its work.
    const bool plain = rules_.kind != PipelineKind::kZeroBubble;
    const double before_s = plain ? cuts_.work_s(0, i) : 0.0;
    double enough_s = kInfinite;
    Stage ways[kMaxVariants];
    cuts_.for_after(i, [&](int j) {
      const double work = cuts_.work_s(i, j);
      if ((rough && work >= enough_s) || work >= load_s) return false;
      if (starts[index(j)] == ends[index(j)]) return true;
      const int count = stages(i, j, s, ways);
      if (count == 0) {
        const double held = cuts_.resident_bytes(i, j) + cuts_.once_bytes(i, j);
        return !(cuts_.chain() && held > rules_.memory_bytes);
      }
      const double own_tail_s = tail_s(i, j);
      for (std::int32_t t = starts[index(j)]; t < ends[index(j)]; ++t) {
        const Tail rest = tails_[index(t)];
        for (int way = 0; way < count; ++way) {
          Tail whole = joined_with(ways[way], rest, i, j, s, own_tail_s);
          whole.next_tail = t;
          if (rough) {
            keep_lightest(mine, whole);
            enough_s = tails_[mine].clock.load_s;
          } else if ((time(whole) + before_s) * (1.0 - 1e-12) < limit_s) {
            keep(mine, whole);
          }
        }
      }
      return true;
    });
  }

  void keep_lightest(std::size_t mine, const Tail& tail) {
    if (tails_.size() == mine) {
      tails_.push_back(tail);
    } else if (tail.clock.load_s < tails_[mine].clock.load_s ||
               (tail.clock.load_s == tails_[mine].clock.load_s &&
                time(tail) < time(tails_[mine]))) {
      tails_[mine] = tail;
    }
  }

  void keep(std::size_t mine, const Tail& tail) {
    // Sums in another order differ in their last digits; that makes no plan worth keeping.
    const auto no_worse = [&](const PipelineClock& a, const PipelineClock& b) {
      return a.bound_s <= b.bound_s + nothing_s_ && a.trip_s <= b.trip_s + nothing_s_ &&
             a.tail_s <= b.tail_s + nothing_s_ && a.sent_s <= b.sent_s + nothing_s_;
    };
    for (std::size_t t = mine; t < tails_.size(); ++t) {
      if (no_worse(tails_[t].clock, tail.clock)) return;
    }
    std::size_t kept = mine;
    for (std::size_t t = mine; t < tails_.size(); ++t) {
      if (!no_worse(tail.clock, tails_[t].clock)) tails_[kept++] = tails_[t];
    }
    tails_.resize(kept);
    tails_.push_back(tail);
  }

  void finish(int p, std::int32_t from, std::int32_t to) {
    for (std::int32_t t = from; t < to; ++t) {
      PlacementPlan& best = plan(p);
      const double taken = time(tails_[index(t)]);
      if (!(taken < best.time_s)) continue;
      best.time_s = taken;
      best.tail_s = tails_[index(t)].clock.tail_s;
      best.max_load_s = tails_[index(t)].clock.load_s;
      best.stages = p;
      best.replicas = 1;
      best.devices = p;
      best.variant_of.clear();
      std::vector<std::int32_t> cuts{0};
      for (std::int32_t at = t; tails_[index(at)].next_tail >= 0;
           at = tails_[index(at)].next_tail) {
        best.variant_of.push_back(tails_[index(at)].variant);
        cuts.push_back(tails_[index(at)].next_cut);
      }
      best.stage_of = cuts_.stages(cuts);
    }
  }

  const PlacementCuts& cuts_;
  const PipelineRules& rules_;
  std::vector<PlacementPlan>& plans_;
  double nothing_s_;
  int stages_ = 0;  // of the zero-bubble schedule, which must know; 0: any
  std::vector<double> limits_s_;
  std::vector<double> loads_s_;
  std::vector<std::vector<double>> balanced_;
  std::vector<Tail> tails_;
};

}  // namespace

Status place_pipeline(const PlacementLayers& layers, const PipelineRules& rules,
                      std::vector<PlacementPlan>* plans) {
  plans->clear();
  const Status status = check_placement(layers);
  if (status != Status::kOk) return status;
  if (rules.micro_batches < 1 || rules.micro_batches > kMostMicroBatches || rules.first_stages < 1 ||
      rules.last_stages < rules.first_stages || !(rules.memory_bytes >= 0.0) ||
      !(rules.piped_bytes >= 0.0) || !(rules.bucket_s >= 0.0)) {
    return Status::kBadRules;
  }
  PlacementCuts cuts;
  const Status built = cuts.build(layers, false);
  if (built != Status::kOk) return built;
  Pipeline(cuts, rules, plans).run();
  return Status::kOk;
}

}  // namespace phaze
