#include <algorithm>
#include <cmath>
#include <limits>

#include "phaze/placement.hpp"
#include "placement/placement_cuts.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::int64_t divided_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

// A way to place everything after a cut.
struct Tail {
  double load_s;
  std::int32_t devices;
  std::int32_t next_cut;
  std::int32_t next_tail;  // position among those of that cut, one stage fewer
};

// Stages are found from the last to the first: a stage's memory depends on how many follow it. For
// every number of stages and every cut the tails are kept of which none has both a lower load and
// fewer devices than another.
class Published {
 public:
  Published(const PlacementCuts& cuts, const PublishedRules& rules, PlacementPlan* best)
      : cuts_(cuts), rules_(rules), best_(best) {
    most_stages_ = std::min<std::int64_t>(cuts.layers().layers, rules.devices);
    if (rules.stages > 0) most_stages_ = std::min<std::int64_t>(most_stages_, rules.stages);
    find_bounds();
  }

  void run() {
    if (cuts_.chain() && !guess()) return;
    const int last = cuts_.count() - 1;
    find_limits();
    while (most_stages_ > 0 && limits_s_[index(static_cast<int>(most_stages_))] <= 0.0) {
      --most_stages_;
    }
    tails_.push_back({0.0, 0, -1, -1});
    if (cuts_.chain()) {
      balanced_ =
          balanced_shares(last, most_stages_, [&](int i, int j) { return work_s(i, j, 2); });
    }
    for (int s = 1; s <= most_stages_; ++s) {
      find_limits();
      const std::size_t before = tails_.size();
      std::vector<std::int32_t> starts(static_cast<std::size_t>(last) + 2);
      // Tails of cut i lie from starts[i] to ends: filled from the last cut down.
      std::vector<std::int32_t> ends(static_cast<std::size_t>(last) + 2);
      const double largest = *std::max_element(limits_s_.begin() + s, limits_s_.end());
      for (int i = last - 1; i >= 0; --i) {
        starts[index(i)] = static_cast<std::int32_t>(tails_.size());
        // What is before cut i shrinks, what s stages must hold grows.
        const bool possible = cuts_.work_s(i, last) < largest * s * (1.0 + 1e-12);
        if (i > 0 && possible) extend(s, i);
        if (i == 0) complete(s);
        ends[index(i)] = static_cast<std::int32_t>(tails_.size());
      }
      starts[index(last)] = ends[index(last)] = 0;
      spans_.push_back({std::move(starts), std::move(ends)});
      if (tails_.size() == before) break;
    }
    if (best_->stages > 0) write();
  }

 private:
  struct Span {
    std::vector<std::int32_t> starts;
    std::vector<std::int32_t> ends;
  };

  static std::size_t index(int i) noexcept { return static_cast<std::size_t>(i); }

  // Tails of a cut with a number of stages after it.
  std::pair<std::int32_t, std::int32_t> tails(int s, int cut) const noexcept {
    if (s == 0) return cut == cuts_.count() - 1 ? std::pair{0, 1} : std::pair{0, 0};
    const Span& span = spans_[index(s - 1)];
    return {span.starts[index(cut)], span.ends[index(cut)]};
  }

  // Whatever has this many stages takes at least this long.
  void find_bounds() {
    bound_s_.assign(index(static_cast<int>(most_stages_)) + 2, kInfinite);
    for (auto s = static_cast<int>(most_stages_); s >= 1; --s) {
      const std::int64_t most = std::max<std::int64_t>(1, rules_.devices / s);
      const double rounds = static_cast<double>(divided_up(rules_.micro_batches, most) + s - 1);
      bound_s_[index(s)] = even_share(s) * rounds * (1.0 - 1e-12);
    }
  }

  // Work of the layers between two cuts in a stage that s - 1 others follow.
  double work_s(int i, int j, int s) const noexcept {
    const double once = cuts_.work_s(i, j);
    return rules_.recompute && s > 1 ? once + cuts_.forward_s(0, i, j) : once;
  }

  // The largest load of p stages is no less. The forward pass that the last one does not repeat is
  // no more than its load.
  double even_share(std::int64_t p) const noexcept {
    const int last = cuts_.count() - 1;
    const double once = cuts_.work_s(0, last) / static_cast<double>(p);
    if (!rules_.recompute) return once;
    const double twice = work_s(0, last, 2) / static_cast<double>(p + 1);
    return std::max(once, twice);
  }

  struct Stage {
    double load_s;
    std::int32_t devices;
    bool fits;
  };

  Stage stage(int i, int j, int s) const noexcept {
    const PlacementCuts::Traffic traffic = cuts_.traffic(i, j);
    const double kept = rules_.recompute ? traffic.in_bytes : cuts_.stash_bytes(0, i, j);
    const double bytes = cuts_.resident_bytes(i, j) + cuts_.once_bytes(i, j) + (s - 1) * kept;
    const double forward = cuts_.forward_s(0, i, j);
    const double backward = cuts_.backward_s(0, i, j);
    const double out = rules_.recompute && s > 1 ? std::max(forward, traffic.out_s) : traffic.out_s;
    const std::int32_t devices = cuts_.wide(i, j) ? rules_.width : 1;
    return {traffic.in_s + forward + out + backward, devices, bytes <= rules_.memory_bytes * kFits};
  }

  double least_time(double load_s, std::int64_t devices, int stages) const noexcept {
    const std::int64_t most = rules_.devices / devices;
    if (most < 1) return kInfinite;
    return load_s * static_cast<double>(divided_up(rules_.micro_batches, most) + stages - 1);
  }

  // What lies before a cut does not fit into fewer stages, whatever else they hold.
  double least_stages(int i) const noexcept {
    const double held = cuts_.resident_bytes(0, i);
    if (held <= rules_.memory_bytes) return 1.0;
    return std::ceil(held / rules_.memory_bytes * (1.0 - 1e-12));
  }

  // Loads from which on a plan with p stages takes as long as the best so far.
  void find_limits() {
    limits_s_.assign(index(static_cast<int>(most_stages_)) + 1, 0.0);
    const int narrow = cuts_.narrow_before(cuts_.count() - 1);
    for (int p = 1; p <= most_stages_; ++p) {
      const std::int64_t devices =
          std::int64_t{rules_.width} * p - std::int64_t{rules_.width - 1} * std::min(p, narrow);
      const std::int64_t most = rules_.devices / devices;
      if (most < 1 || (rules_.stages > 0 && p != rules_.stages)) continue;
      const auto rounds = static_cast<double>(divided_up(rules_.micro_batches, most) + p - 1);
      const double limit = best_->time_s / rounds * (1.0 + 1e-12);
      if (p >= least_stages(cuts_.count() - 1) && even_share(p) < limit)
        limits_s_[index(p)] = limit;
    }
  }

  // No stage after cut i, s of them, may have this load or more in a plan that is better than the
  // best so far.
  double load_limit(int s, int i) const noexcept {
    if (s >= most_stages_) return 0.0;
    if (!cuts_.chain()) return *std::max_element(limits_s_.begin() + s + 1, limits_s_.end());
    // An even share of the work is already too much for fewer than this.
    const double most = limits_s_[index(s) + 1] > 0.0 ? limits_s_[index(s) + 1] : kInfinite;
    const double few = std::max(least_stages(i), std::ceil(work_s(0, i, 2) / most * (1.0 - 1e-12)));
    if (!(few <= static_cast<double>(most_stages_))) return 0.0;
    for (int p = s + static_cast<int>(few); p <= most_stages_; ++p) {
      if (balanced_[index(p - s)][index(i)] < limits_s_[index(p)]) return limits_s_[index(p)];
    }
    return 0.0;
  }

  // Stages from the last to the first, each as long as memory and a load allow. True where that
  // covers all layers; `cuts` are then the cuts from the last one down.
  bool greedy(double load_s, std::int64_t most, Tail* whole,
              std::vector<std::int32_t>* cuts) const {
    int j = cuts_.count() - 1;
    *whole = {0.0, 0, j, -1};
    cuts->assign(1, j);
    for (int s = 1; j > 0; ++s) {
      if (s > most) return false;
      int i = j;
      Stage longest{};
      for (int h = j - 1; h >= 0; --h) {
        const Stage made = stage(h, j, s);
        if (!made.fits || made.load_s > load_s) break;
        i = h;
        longest = made;
      }
      if (i == j) return false;
      whole->load_s = std::max(whole->load_s, longest.load_s);
      whole->devices += longest.devices;
      whole->next_cut = j;
      cuts->push_back(i);
      j = i;
    }
    return whole->devices <= rules_.devices;
  }

  // A first plan for the search to beat. False where there is none at all: without recomputation
  // bytes rise with every layer and every stage that follows, so that the longest stages from the
  // end on reach furthest.
  bool guess() {
    Tail whole;
    std::vector<std::int32_t> cuts;
    if (!greedy(kInfinite, most_stages_, &whole, &cuts)) {
      return rules_.recompute || whole.devices > rules_.devices || cuts.back() == 0;
    }
    const auto fewest = static_cast<std::int64_t>(cuts.size()) - 1;
    constexpr int kSteps = 7;
    for (std::int64_t p = fewest; p <= most_stages_; p += 1 + (p - fewest) / 2) {
      if (bound_s_[index(static_cast<int>(p))] >= best_->time_s) continue;
      double low = even_share(p);
      double high = 2.0 * low;
      for (int step = 0; step < kSteps; ++step) {
        const double load = step == 0 ? high : 0.5 * (low + high);
        if (!greedy(load, p, &whole, &cuts)) {
          low = load;
          if (step == 0) high *= 2.0;
          continue;
        }
        high = std::min(high, whole.load_s);
        const auto s = static_cast<int>(cuts.size()) - 1;
        if (rules_.stages > 0 && s != rules_.stages) continue;
        if (try_replicas(whole, s)) guessed_.assign(cuts.rbegin(), cuts.rend());
      }
    }
    return true;
  }

  void extend(int s, int i) {
    const double limit_s = load_limit(s, i);
    if (limit_s <= 0.0) return;
    const std::size_t mine = tails_.size();
    // No tail has fewer devices than this.
    const int narrow = std::min(s, cuts_.layers_after(i) - cuts_.wide_after(i));
    const std::int64_t fewest = std::int64_t{rules_.width} * s - (rules_.width - 1) * narrow;
    double enough_s = kInfinite;  // load of a tail with the fewest devices
    cuts_.for_after(i, [&](int j) {
      // Cuts come by rising work without recomputation; with it, on graphs, in no order.
      if (cuts_.work_s(i, j) >= std::min(enough_s, limit_s)) return false;
      if (work_s(i, j, s) >= std::min(enough_s, limit_s)) return !cuts_.chain();
      const auto [from, to] = tails(s - 1, j);
      if (from == to) return true;
      const Stage made = stage(i, j, s);
      if (!made.fits) {
        // Bytes rise with every layer; only what enters a stage may fall again.
        const double held = cuts_.resident_bytes(i, j) + cuts_.once_bytes(i, j);
        return !(cuts_.chain() && (!rules_.recompute || held > rules_.memory_bytes));
      }
      for (std::int32_t t = from; t < to; ++t) {
        const Tail& rest = tails_[index(t)];
        const double load = std::max(made.load_s, rest.load_s);
        const std::int32_t devices = made.devices + rest.devices;
        if (load >= limit_s || least_time(load, devices + 1, s + 1) >= best_->time_s) continue;
        keep(mine, {load, devices, j, t - from});
      }
      enough_s = kInfinite;
      for (std::size_t t = mine; t < tails_.size(); ++t) {
        if (tails_[t].devices <= fewest) enough_s = std::min(enough_s, tails_[t].load_s);
      }
      return true;
    });
  }

  void keep(std::size_t mine, const Tail& tail) {
    for (std::size_t t = mine; t < tails_.size(); ++t) {
      if (tails_[t].load_s <= tail.load_s && tails_[t].devices <= tail.devices) return;
    }
    std::size_t kept = mine;
    for (std::size_t t = mine; t < tails_.size(); ++t) {
      if (tail.load_s <= tails_[t].load_s && tail.devices <= tails_[t].devices) continue;
      tails_[kept++] = tails_[t];
    }
    tails_.resize(kept);
    tails_.push_back(tail);
  }

  // Plans with this many stages, the first of them from the beginning.
  void complete(int s) {
    if (rules_.stages > 0 && s != rules_.stages) return;
    cuts_.for_after(0, [&](int j) {
      if (least_time(cuts_.work_s(0, j), s, s) >= best_->time_s) return false;
      if (least_time(work_s(0, j, s), s, s) >= best_->time_s) return !cuts_.chain();
      const auto [from, to] = tails(s - 1, j);
      if (from == to) return true;
      const Stage made = stage(0, j, s);
      if (!made.fits) return true;
      for (std::int32_t t = from; t < to; ++t) {
        const Tail& rest = tails_[index(t)];
        const Tail whole{std::max(made.load_s, rest.load_s), made.devices + rest.devices, j,
                         t - from};
        if (try_replicas(whole, s)) guessed_.clear();
      }
      return true;
    });
  }

  // time(d) = load * (ceil(m / d) + s - 1) + sync * (1 - 1 / d) is at least the same without
  // rounding up, which falls or rises with d all the way: from its better end on until that alone
  // is too much.
  bool try_replicas(const Tail& whole, int s) {
    const double before = best_->time_s;
    const double sync = cuts_.sync_s(0, whole.next_cut);
    const double load = whole.load_s;
    const auto m = static_cast<double>(rules_.micro_batches);
    std::int64_t most = std::min(rules_.devices / whole.devices, rules_.micro_batches);
    if (rules_.replicas > 0) {
      if (rules_.devices / whole.devices >= rules_.replicas) consider(whole, s, rules_.replicas);
      return best_->time_s < before;
    }
    const auto least = [&](double d) { return load * (m / d + s - 1) + sync * (1.0 - 1.0 / d); };
    if (load * m >= sync) {
      while (most >= 1 && least(static_cast<double>(most)) * (1.0 - 1e-12) < best_->time_s) {
        // The fewest replicas with this many rounds.
        const std::int64_t rounds = divided_up(rules_.micro_batches, most);
        const std::int64_t fewest = divided_up(rules_.micro_batches, rounds);
        consider(whole, s, fewest);
        most = fewest - 1;
      }
      return best_->time_s < before;
    }
    for (std::int64_t d = 1;
         d <= most && least(static_cast<double>(d)) * (1.0 - 1e-12) < best_->time_s;) {
      consider(whole, s, d);
      const std::int64_t rounds = divided_up(rules_.micro_batches, d);
      if (rounds == 1) break;
      d = divided_up(rules_.micro_batches, rounds - 1);  // the fewest with fewer rounds
    }
    return best_->time_s < before;
  }

  void consider(const Tail& whole, int s, std::int64_t d) {
    const auto rounds = static_cast<double>(divided_up(rules_.micro_batches, d) + s - 1);
    const auto replicas = static_cast<double>(d);
    const double time =
        whole.load_s * rounds + cuts_.sync_s(0, whole.next_cut) * (replicas - 1.0) / replicas;
    if (!(time < best_->time_s)) return;
    best_->time_s = time;
    best_->max_load_s = whole.load_s;
    best_->stages = s;
    best_->replicas = d;
    best_->devices = whole.devices;
    found_ = whole;
  }

  void write() {
    best_->variant_of.assign(index(best_->stages), 0);
    if (!guessed_.empty()) {
      best_->stage_of = cuts_.stages(guessed_);
      return;
    }
    std::vector<std::int32_t> cuts{0};
    Tail at = found_;
    for (int s = best_->stages - 1;; --s) {
      cuts.push_back(at.next_cut);
      if (s == 0) break;
      at = tails_[index(tails(s, at.next_cut).first + at.next_tail)];
    }
    best_->stage_of = cuts_.stages(cuts);
  }

  const PlacementCuts& cuts_;
  const PublishedRules& rules_;
  PlacementPlan* best_;
  std::int64_t most_stages_;
  std::vector<double> bound_s_;
  std::vector<double> limits_s_;
  std::vector<std::vector<double>> balanced_;
  std::vector<Tail> tails_;
  std::vector<Span> spans_;
  Tail found_{};
  std::vector<std::int32_t> guessed_;  // cuts of the plan at hand, where it was guessed
};

}  // namespace

Status place_published(const PlacementLayers& layers, const PublishedRules& rules, double below_s,
                       PlacementPlan* best) {
  *best = {kInfinite, 0.0, 0.0, 0, 0, 0, {}, {}};
  const Status status = check_placement(layers);
  if (status != Status::kOk) return status;
  if (rules.devices < 1 || rules.micro_batches < 1 || rules.width < 1 || rules.stages < 0 ||
      rules.replicas < 0 || !(rules.memory_bytes >= 0.0) || rules.devices > kMostDevices ||
      rules.micro_batches > kMostMicroBatches) {
    return Status::kBadRules;
  }
  PlacementCuts cuts;
  const Status built = cuts.build(layers, true);
  if (built != Status::kOk) return built;
  best->time_s = below_s;
  PublishedRules own = rules;  // a stage that is wider than the cluster does not fit, however wide
  own.width = static_cast<std::int32_t>(std::min<std::int64_t>(rules.width, rules.devices + 1));
  Published(cuts, own, best).run();
  if (best->stages == 0) best->time_s = kInfinite;
  return Status::kOk;
}

}  // namespace phaze
