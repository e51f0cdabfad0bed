// Placement of layers on devices under PHAZE's objective: the cuts of a graph of layers, and the
// dynamic program over them.
#include "phaze/placement.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/numbers.hpp"
#include "plan/memory_rule.hpp"

namespace phaze {

// A chain has one cut per position; other graphs have one per set of layers that is closed under
// predecessors. Cut 0 has no layer before it, the last cut has all layers.
class PlacementCuts {
 public:
  Status build(const PlacementLayers& layers);

  int count() const noexcept { return count_; }
  bool chain() const noexcept { return chain_; }
  const PlacementLayers& layers() const noexcept { return *layers_; }

  // Calls f(j) for the cuts that contain cut i, by ascending work, until it returns false; on a
  // chain from cut `first` to `last`.
  template <typename F>
  void for_after(int i, int first, int last, const F& f) const {
    if (chain()) {
      for (int j = std::max(i + 1, first); j <= last; ++j) {
        if (!f(j)) return;
      }
      return;
    }
    for (const std::int32_t j : next_[static_cast<std::size_t>(i)]) {
      if (!f(j)) return;
    }
  }

  // Seconds and bytes of the messages into and out of the stage between two cuts.
  struct Traffic {
    double in_s;
    double out_s;
    double in_bytes;
  };
  Traffic traffic(int i, int j) const noexcept {
    if (chain()) return {cut_s_[at(i)], cut_s_[at(j)], cut_bytes_[at(i)]};
    return crossing(i, j);
  }

  // Sums over the layers of a stage.
  double work_s(int i, int j) const noexcept { return work_[at(j)] - work_[at(i)]; }
  double forward_s(int i, int j) const noexcept { return forward_[at(j)] - forward_[at(i)]; }
  double backward_s(int i, int j) const noexcept { return backward_[at(j)] - backward_[at(i)]; }
  double stash_bytes(int i, int j) const noexcept { return stash_[at(j)] - stash_[at(i)]; }
  double resident_bytes(int i, int j) const noexcept { return resident_[at(j)] - resident_[at(i)]; }
  double once_bytes(int i, int j) const noexcept { return once_[at(j)] - once_[at(i)]; }
  double sync_s(int i, int j) const noexcept { return sync_[at(j)] - sync_[at(i)]; }
  int wide_after(int i) const noexcept { return wide_.back() - wide_[at(i)]; }
  int narrow_before(int i) const noexcept { return size_[at(i)] - wide_[at(i)]; }
  bool wide(int i, int j) const noexcept { return wide_[at(j)] > wide_[at(i)]; }
  int layers_after(int i) const noexcept { return size_.back() - size_[at(i)]; }

  // The stage of each layer, given the cuts between stages in order (0 and the last included).
  std::vector<std::int32_t> stages(const std::vector<std::int32_t>& cuts) const;

 private:
  Status find_cuts();
  Status find_closed_sets(const std::vector<std::vector<std::int32_t>>& preds);
  void sort_by_work();
  void add_sums();
  void add_edges();
  Traffic crossing(int i, int j) const noexcept;
  bool before(int cut, int layer) const noexcept {
    if (words_ == 0) return layer < cut_size_[at(cut)];
    return (bits_[at(cut) * at(words_) + at(layer / 64)] >> (layer % 64) & 1) != 0;
  }
  void find_next();

  const PlacementLayers* layers_ = nullptr;
  bool chain_ = false;
  std::vector<double> layer_work_;  // per layer: forward and backward pass
  int count_ = 0;
  int words_ = 0;                    // of a set; 0 where cuts are positions
  std::vector<std::uint64_t> bits_;  // [cut][word]
  std::vector<std::int32_t> cut_size_;
  std::vector<std::vector<std::int32_t>> next_;
  std::vector<double> work_, forward_, backward_, stash_, resident_, once_, sync_;
  std::vector<std::int32_t> wide_, size_;
  std::vector<double> cut_s_, cut_bytes_;  // of the message over each cut of a chain
  struct Crossing {
    std::int32_t source;
    std::int32_t target;
    double seconds;
    double bytes;
  };
  std::vector<std::vector<Crossing>> crossing_;  // edges from before a cut to after it, by source
};

// The min-max work of r stages before cut i of a chain, in row r below `most`; `work(i, j)` of a
// stage must increase with its layers.
template <typename Work>
std::vector<double> balanced_shares(int last, std::int64_t most, const Work& work) {
  const std::size_t columns = at(last) + 1;
  std::vector<double> found(columns * static_cast<std::size_t>(std::max<std::int64_t>(most, 1)),
                            kInfinite);
  found[0] = 0.0;
  const double* fewer = found.data();
  for (std::int64_t r = 1; r < most; ++r) {
    double* row = found.data() + columns * static_cast<std::size_t>(r);
    int j = static_cast<int>(r) - 1;  // every stage has a layer
    for (int i = j + 1; i <= last; ++i) {
      const auto largest = [&](int cut) { return std::max(fewer[cut], work(cut, i)); };
      double least = largest(j);
      for (double next; j + 1 < i && (next = largest(j + 1)) <= least; ++j) least = next;
      row[i] = least;
    }
    fewer = row;
  }
  return found;
}

Status check_placement(const PlacementLayers& l) noexcept {
  if (l.layers < 1 || l.layers > kMaxPlacedLayers) return Status::kBadLayers;
  const auto n = static_cast<std::size_t>(l.layers);
  for (const auto& values :
       {l.forward_s, l.backward_s, l.stash_bytes, l.resident_bytes, l.once_bytes, l.sync_s}) {
    if (values.size() != n) return Status::kBadLayers;
    if (!all_finite_sizes(values)) return Status::kNotFinite;
  }
  if (l.wide.size() != n) return Status::kBadLayers;
  const std::size_t edges = l.edge_from.size();
  if (l.edge_to.size() != edges || l.edge_s.size() != edges || l.edge_bytes.size() != edges) {
    return Status::kBadLayers;
  }
  if (!all_finite_sizes(l.edge_s) || !all_finite_sizes(l.edge_bytes)) return Status::kNotFinite;
  for (std::size_t e = 0; e < edges; ++e) {
    if (l.edge_from[e] < 0 || l.edge_to[e] >= l.layers || l.edge_from[e] >= l.edge_to[e]) {
      return Status::kBadEdge;
    }
  }
  return Status::kOk;
}

Status PlacementCuts::build(const PlacementLayers& layers) {
  layers_ = &layers;
  layer_work_.resize(at(layers.layers));
  for (std::size_t i = 0; i < layer_work_.size(); ++i) {
    layer_work_[i] = layers.forward_s[i] + layers.backward_s[i];
  }
  const Status status = find_cuts();
  if (status != Status::kOk) return status;
  add_sums();
  add_edges();
  chain_ = next_.empty();
  return Status::kOk;
}

// If every layer follows the one before it, cuts are positions; otherwise sets closed under
// predecessors.
Status PlacementCuts::find_cuts() {
  const PlacementLayers& l = *layers_;
  std::vector<std::vector<std::int32_t>> preds(at(l.layers));
  for (std::size_t e = 0; e < l.edge_from.size(); ++e) {
    preds[at(l.edge_to[e])].push_back(l.edge_from[e]);
  }
  bool ordered = true;
  for (int i = 1; i < l.layers && ordered; ++i) {
    const auto& p = preds[at(i)];
    ordered = std::find(p.begin(), p.end(), i - 1) != p.end();
  }
  if (!ordered) return find_closed_sets(preds);
  for (int size = 0; size <= l.layers; ++size) cut_size_.push_back(size);
  count_ = static_cast<int>(cut_size_.size());
  return Status::kOk;
}

// From the empty set up, one layer at a time.
Status PlacementCuts::find_closed_sets(const std::vector<std::vector<std::int32_t>>& preds) {
  const int n = layers_->layers;
  words_ = (n + 63) / 64;
  using Set = std::vector<std::uint64_t>;
  const auto holds = [](const Set& set, int layer) {
    return (set[at(layer / 64)] >> (layer % 64) & 1) != 0;
  };
  struct Hash {
    std::size_t operator()(const Set& set) const noexcept {
      std::uint64_t h = 0;
      for (const std::uint64_t word : set) h = mixed(h, word);
      return static_cast<std::size_t>(h);
    }
  };
  std::vector<Set> level{Set(at(words_), 0)};
  for (int size = 0; size <= n; ++size) {
    std::sort(level.begin(), level.end());
    std::unordered_set<Set, Hash> grown;
    for (const Set& set : level) {
      bits_.insert(bits_.end(), set.begin(), set.end());
      cut_size_.push_back(size);
      for (int layer = 0; layer < n; ++layer) {
        if (holds(set, layer)) continue;
        const auto& p = preds[at(layer)];
        if (!std::all_of(p.begin(), p.end(), [&](int b) { return holds(set, b); })) continue;
        Set larger = set;
        larger[at(layer / 64)] |= std::uint64_t{1} << (layer % 64);
        grown.insert(std::move(larger));
      }
      if (static_cast<std::int64_t>(grown.size()) + static_cast<std::int64_t>(cut_size_.size()) >
          kMaxCuts) {
        return Status::kTooManyCuts;
      }
    }
    level.assign(grown.begin(), grown.end());
  }
  count_ = static_cast<int>(cut_size_.size());
  sort_by_work();
  find_next();
  return Status::kOk;
}

// Work increases with every layer, so a set never precedes one that it contains.
void PlacementCuts::sort_by_work() {
  const PlacementLayers& l = *layers_;
  std::vector<double> work(at(count_), 0.0);
  for (int c = 0; c < count_; ++c) {
    for (int layer = 0; layer < l.layers; ++layer) {
      if (before(c, layer)) work[at(c)] += layer_work_[at(layer)];
    }
  }
  std::vector<std::int32_t> order(at(count_));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return work[at(a)] != work[at(b)] ? work[at(a)] < work[at(b)]
                                      : cut_size_[at(a)] < cut_size_[at(b)];
  });
  std::vector<std::uint64_t> bits(bits_.size());
  std::vector<std::int32_t> sizes(at(count_));
  for (int c = 0; c < count_; ++c) {
    std::copy_n(bits_.begin() + order[at(c)] * words_, words_, bits.begin() + c * words_);
    sizes[at(c)] = cut_size_[at(order[at(c)])];
  }
  bits_ = std::move(bits);
  cut_size_ = std::move(sizes);
}

void PlacementCuts::find_next() {
  next_.resize(at(count_));
  for (int i = 0; i < count_; ++i) {
    const std::uint64_t* small = &bits_[at(i) * at(words_)];
    for (int j = i + 1; j < count_; ++j) {
      const std::uint64_t* large = &bits_[at(j) * at(words_)];
      bool inside = true;
      for (int w = 0; w < words_ && inside; ++w) inside = (small[w] & ~large[w]) == 0;
      if (inside) next_[at(i)].push_back(j);
    }
  }
}

void PlacementCuts::add_sums() {
  const PlacementLayers& l = *layers_;
  const auto fill = [&](std::vector<double>& sums, std::span<const double> values) {
    sums.assign(at(count_), 0.0);
    if (words_ == 0) {
      double sum = 0.0;
      std::size_t next = 0;
      for (std::size_t c = 0; c < sums.size(); ++c) {
        for (; next < at(cut_size_[c]); ++next) sum += values[next];
        sums[c] = sum;
      }
      return;
    }
    for (int c = 0; c < count_; ++c) {
      for (int layer = 0; layer < l.layers; ++layer) {
        if (before(c, layer)) sums[at(c)] += values[at(layer)];
      }
    }
  };
  fill(forward_, l.forward_s);
  fill(backward_, l.backward_s);
  fill(stash_, l.stash_bytes);
  fill(resident_, l.resident_bytes);
  fill(once_, l.once_bytes);
  fill(sync_, l.sync_s);
  fill(work_, layer_work_);
  size_ = cut_size_;
  wide_.assign(at(count_), 0);
  for (int c = 0; c < count_; ++c) {
    if (words_ == 0) {
      wide_[at(c)] = c == 0 ? 0 : wide_[at(c) - 1] + (l.wide[at(c) - 1] != 0);
      continue;
    }
    for (int layer = 0; layer < l.layers; ++layer) {
      if (before(c, layer)) wide_[at(c)] += l.wide[at(layer)] != 0;
    }
  }
}

void PlacementCuts::add_edges() {
  const PlacementLayers& l = *layers_;
  std::vector<Crossing> edges(l.edge_from.size());
  bool plain = words_ == 0;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    edges[e] = {l.edge_from[e], l.edge_to[e], l.edge_s[e], l.edge_bytes[e]};
    plain = plain && l.edge_to[e] == l.edge_from[e] + 1;
  }
  std::stable_sort(edges.begin(), edges.end(),
                   [](const Crossing& a, const Crossing& b) { return a.source < b.source; });
  if (plain) {
    cut_s_.assign(at(count_), 0.0);
    cut_bytes_.assign(at(count_), 0.0);
    for (const Crossing& e : edges) {
      cut_s_[at(e.target)] += e.seconds;
      cut_bytes_[at(e.target)] += e.bytes;
    }
    return;
  }
  if (next_.empty()) {
    next_.resize(at(count_));
    for (int i = 0; i < count_; ++i) {
      for (int j = i + 1; j < count_; ++j) next_[at(i)].push_back(j);
    }
  }
  crossing_.resize(at(count_));
  for (int c = 0; c < count_; ++c) {
    for (const Crossing& e : edges) {
      if (before(c, e.source) && !before(c, e.target)) crossing_[at(c)].push_back(e);
    }
  }
}

// Every edge over a boundary is sent. The edges of one layer are added first.
PlacementCuts::Traffic PlacementCuts::crossing(int i, int j) const noexcept {
  const auto sum = [&](int cut, const auto& counts) {
    const std::vector<Crossing>& edges = crossing_[at(cut)];
    Crossing total{};
    for (std::size_t e = 0; e < edges.size();) {
      const std::int32_t source = edges[e].source;
      Crossing layer{};
      for (; e < edges.size() && edges[e].source == source; ++e) {
        if (!counts(edges[e])) continue;
        layer.seconds += edges[e].seconds;
        layer.bytes += edges[e].bytes;
      }
      total.seconds += layer.seconds;
      total.bytes += layer.bytes;
    }
    return total;
  };
  const Crossing in = sum(i, [&](const Crossing& e) { return before(j, e.target); });
  const Crossing out = sum(j, [&](const Crossing& e) { return !before(i, e.source); });
  return {in.seconds, out.seconds, in.bytes};
}

std::vector<std::int32_t> PlacementCuts::stages(const std::vector<std::int32_t>& cuts) const {
  std::vector<std::int32_t> stage_of(at(layers_->layers), 0);
  for (int layer = 0; layer < layers_->layers; ++layer) {
    std::int32_t stage = 0;
    while (!before(cuts[at(stage + 1)], layer)) ++stage;
    stage_of[at(layer)] = stage;
  }
  return stage_of;
}

namespace {

// A placement of everything after a cut.
struct Tail {
  double load_s;
  std::int32_t devices;
  std::int32_t next_cut;
  std::int32_t next_tail;  // position among those of that cut, one stage fewer
};

// Stages are built from the last to the first: a stage's memory depends on the number of later
// stages. For every number of stages and every cut, the tails that are non-dominated in load and
// devices are stored.
class Published {
 public:
  Published(const PlacementCuts& cuts, const PublishedRules& rules, PlacementPlan* best)
      : cuts_(cuts), rules_(rules), best_(best) {
    most_stages_ = std::min<std::int64_t>(cuts.layers().layers, rules.devices);
    find_bounds();
    find_rounds();
  }

  void run() {
    if (cuts_.chain() && !guess()) return;
    const int last = cuts_.count() - 1;
    find_limits();
    while (most_stages_ > 0 && limits_s_[at(static_cast<int>(most_stages_))] <= 0.0) {
      --most_stages_;
    }
    tails_.push_back({0.0, 0, -1, -1});
    first_with_tails_ = last_with_tails_ = last;
    if (cuts_.chain()) {
      balanced_ =
          balanced_shares(last, most_stages_, [&](int i, int j) { return work_s(i, j, 2); });
    }
    for (int s = 1; s <= most_stages_; ++s) {
      find_limits();
      find_reach(s);
      const std::size_t before = tails_.size();
      spans_.resize(spans_.size() + at(last) + 1);
      const double largest = *std::max_element(limits_s_.begin() + s, limits_s_.end());
      int first = last;  // cuts with tails, from `first` to `furthest`
      int furthest = 0;
      for (int i = cuts_.chain() ? std::min(last - 1, furthest_) : last - 1; i > 0; --i) {
        // As i falls, fewer layers remain before cut i and the s stages after it have more work.
        if (cuts_.work_s(i, last) >= largest * s * (1.0 + 1e-12)) break;
        const auto begin = static_cast<std::int32_t>(tails_.size());
        extend(s, i);
        const auto end = static_cast<std::int32_t>(tails_.size());
        if (begin == end) continue;
        spans_[spans_.size() - 1 - at(last) + at(i)] = {begin, end};
        first = i;
        furthest = std::max(furthest, i);
      }
      complete(s);
      first_with_tails_ = first;
      last_with_tails_ = furthest;
      if (tails_.size() == before) break;
    }
    if (best_->stages > 0) write();
  }

 private:
  struct Span {
    std::int32_t begin = 0;
    std::int32_t end = 0;
  };

  // Tails of a cut with a number of stages after it.
  std::pair<std::int32_t, std::int32_t> tails(int s, int cut) const noexcept {
    if (s == 0) return cut == cuts_.count() - 1 ? std::pair{0, 1} : std::pair{0, 0};
    const Span& span = spans_[at(s - 1) * at(cuts_.count()) + at(cut)];
    return {span.begin, span.end};
  }

  // Lower bound on the time of every plan with this many stages.
  void find_bounds() {
    bound_s_.assign(at(static_cast<int>(most_stages_)) + 2, kInfinite);
    for (auto s = static_cast<int>(most_stages_); s >= 1; --s) {
      bound_s_[at(s)] = even_share(s) * (rounds_of(s) + (s - 1.0)) * (1.0 - 1e-12);
    }
  }

  // Work of the layers between two cuts in a stage followed by s - 1 others.
  double work_s(int i, int j, int s) const noexcept {
    const double once = cuts_.work_s(i, j);
    return rules_.recompute && s > 1 ? once + cuts_.forward_s(i, j) : once;
  }

  // Lower bound on the largest load of p stages. The forward pass that the last stage does not
  // repeat is at most the load of that stage.
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
    const double stash = rules_.recompute ? traffic.in_bytes : cuts_.stash_bytes(i, j);
    const double bytes = cuts_.resident_bytes(i, j) + cuts_.once_bytes(i, j) + (s - 1) * stash;
    const double forward = cuts_.forward_s(i, j);
    const double backward = cuts_.backward_s(i, j);
    const double out = rules_.recompute && s > 1 ? std::max(forward, traffic.out_s) : traffic.out_s;
    const std::int32_t devices = cuts_.wide(i, j) ? rules_.width : 1;
    return {traffic.in_s + forward + out + backward, devices, bytes <= rules_.memory_bytes * kFits};
  }

  // Rounds of micro-batches with as many replicas of `devices` devices as fit; infinite: none fits.
  double rounds_of(std::int64_t devices) noexcept {
    const auto own = static_cast<std::size_t>(devices);
    double& known = own < kKnownRounds ? rounds_of_[own] : rounds_of_[0];
    if (known > 0.0 && own < kKnownRounds) return known;
    const std::int64_t most = rules_.devices / devices;
    known = most < 1 ? kInfinite : static_cast<double>(ceil_div(rules_.micro_batches, most));
    return known;
  }

  double least_time(double load_s, std::int64_t devices, int stages) noexcept {
    const double rounds = rounds_of(devices);
    return rounds == kInfinite ? kInfinite : load_s * (rounds + (stages - 1.0));
  }

  // Lower bound on the number of stages before a cut, from resident bytes alone.
  double least_stages(int i) const noexcept {
    const double held = cuts_.resident_bytes(0, i);
    if (held <= rules_.memory_bytes) return 1.0;
    return std::ceil(held / rules_.memory_bytes * (1.0 - 1e-12));
  }

  // Fills `even_s_`, and `rounds_`: the least rounds of a plan with p stages (infinite: no plan).
  void find_rounds() {
    const int last = cuts_.count() - 1;
    const int narrow = cuts_.narrow_before(last);
    limits_s_.assign(at(static_cast<int>(most_stages_)) + 1, 0.0);
    reach_.assign(limits_s_.size(), -1);
    fewest_.assign(at(cuts_.count()), kNone);
    rounds_.assign(limits_s_.size(), kInfinite);
    even_s_.assign(limits_s_.size(), kInfinite);
    for (int p = 1; p <= most_stages_; ++p) {
      const std::int64_t devices =
          std::int64_t{rules_.width} * p - std::int64_t{rules_.width - 1} * std::min(p, narrow);
      if (p < least_stages(last)) continue;
      rounds_[at(p)] = rounds_of(devices) + (p - 1.0);
      even_s_[at(p)] = even_share(p);
    }
  }

  // Loads at which a plan with p stages takes as long as the incumbent.
  void find_limits() {
    for (int p = 1; p <= most_stages_; ++p) {
      limits_s_[at(p)] = 0.0;
      if (rounds_[at(p)] == kInfinite) continue;
      const double limit = best_->time_s / rounds_[at(p)] * (1.0 + 1e-12);
      if (even_s_[at(p)] < limit) limits_s_[at(p)] = limit;
    }
  }

  // For plans of a chain with s stages after a cut and p stages in all. reach_[p]: the last cut
  // before which the other p - s stages may all have loads below the limit (their least load
  // increases with the cut). fewest_[cut]: the least p that reaches this cut.
  void find_reach(int s) {
    if (!cuts_.chain()) return;
    furthest_ = -1;
    std::fill(fewest_.begin(), fewest_.end(), kNone);
    for (auto p = static_cast<int>(most_stages_); p > s; --p) {
      const double* least_s = balanced_.data() + at(p - s) * at(cuts_.count());
      const double* above =
          std::partition_point(least_s + (p - s), least_s + cuts_.count(),
                               [&](double own) { return own < limits_s_[at(p)]; });
      reach_[at(p)] = static_cast<std::int32_t>(above - least_s) - 1;
      if (reach_[at(p)] < p - s) {
        reach_[at(p)] = -1;
        continue;
      }
      furthest_ = std::max(furthest_, reach_[at(p)]);
      fewest_[at(reach_[at(p)])] = p;
    }
    for (int i = furthest_ - 1; i > 0; --i) {
      fewest_[at(i)] = std::min(fewest_[at(i)], fewest_[at(i) + 1]);
    }
  }

  // In a plan better than the incumbent, each of the s stages after cut i has a load below this.
  double load_limit(int s, int i) const noexcept {
    if (s >= most_stages_) return 0.0;
    if (!cuts_.chain()) return *std::max_element(limits_s_.begin() + s + 1, limits_s_.end());
    const double least = s + least_stages(i);
    const int most = std::min(s + i, static_cast<int>(most_stages_));
    for (int p = fewest_[at(i)]; p <= most; ++p) {
      if (p >= least && i <= reach_[at(p)]) return limits_s_[at(p)];
    }
    return 0.0;
  }

  // Packs stages from the last to the first, each as long as memory and a load allow. Returns true
  // if that covers all layers; `cuts` are then the cuts from the last one down.
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

  // Finds an initial incumbent for the search. Returns false if no plan exists: without
  // recomputation bytes increase with every layer and every later stage, so the longest stages from
  // the end on reach furthest.
  bool guess() {
    Tail whole;
    std::vector<std::int32_t> cuts;
    if (!greedy(kInfinite, most_stages_, &whole, &cuts)) {
      return rules_.recompute || whole.devices > rules_.devices || cuts.back() == 0;
    }
    const auto fewest = static_cast<std::int64_t>(cuts.size()) - 1;
    constexpr int kSteps = 7;
    for (std::int64_t p = fewest; p <= most_stages_; p += 1 + (p - fewest) / 2) {
      if (bound_s_[at(static_cast<int>(p))] >= best_->time_s) continue;
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
        if (try_replicas(whole, s)) guessed_.assign(cuts.rbegin(), cuts.rend());
      }
    }
    return true;
  }

  void extend(int s, int i) {
    const double limit_s = load_limit(s, i);
    if (limit_s <= 0.0) return;
    const std::size_t mine = tails_.size();
    // Lower bound on the devices of a tail.
    const int narrow = std::min(s, cuts_.layers_after(i) - cuts_.wide_after(i));
    const std::int64_t fewest = std::int64_t{rules_.width} * s - (rules_.width - 1) * narrow;
    double enough_s = kInfinite;  // load of a tail with the fewest devices
    cuts_.for_after(i, first_with_tails_, last_with_tails_, [&](int j) {
      // Cuts are sorted by ascending work without recomputation; with it, on graphs, they are
      // unordered.
      if (cuts_.work_s(i, j) >= std::min(enough_s, limit_s)) return false;
      if (work_s(i, j, s) >= std::min(enough_s, limit_s)) return !cuts_.chain();
      const auto [from, to] = tails(s - 1, j);
      if (from == to) return true;
      const Stage made = stage(i, j, s);
      if (!made.fits) {
        // Bytes increase with every layer; only the messages into a stage may decrease.
        const double held = cuts_.resident_bytes(i, j) + cuts_.once_bytes(i, j);
        return !(cuts_.chain() && (!rules_.recompute || held > rules_.memory_bytes));
      }
      for (std::int32_t t = from; t < to; ++t) {
        const Tail& rest = tails_[at(t)];
        const double load = std::max(made.load_s, rest.load_s);
        const std::int32_t devices = made.devices + rest.devices;
        if (load >= limit_s || least_time(load, devices + 1, s + 1) >= best_->time_s) continue;
        keep(mine, {load, devices, j, t - from});
        if (devices <= fewest) enough_s = std::min(enough_s, load);
      }
      return true;
    });
  }

  void keep(std::size_t mine, const Tail& tail) {
    for (std::size_t t = mine; t < tails_.size(); ++t) {
      if (tails_[t].load_s <= tail.load_s && tails_[t].devices <= tail.devices) return;
    }
    std::size_t end = mine;
    for (std::size_t t = mine; t < tails_.size(); ++t) {
      if (tail.load_s <= tails_[t].load_s && tail.devices <= tails_[t].devices) continue;
      tails_[end++] = tails_[t];
    }
    tails_.resize(end);
    tails_.push_back(tail);
  }

  // Plans with this many stages, the first of which starts at the first layer.
  void complete(int s) {
    cuts_.for_after(0, first_with_tails_, last_with_tails_, [&](int j) {
      if (least_time(cuts_.work_s(0, j), s, s) >= best_->time_s) return false;
      if (least_time(work_s(0, j, s), s, s) >= best_->time_s) return !cuts_.chain();
      const auto [from, to] = tails(s - 1, j);
      if (from == to) return true;
      const Stage made = stage(0, j, s);
      if (!made.fits) return true;
      for (std::int32_t t = from; t < to; ++t) {
        const Tail& rest = tails_[at(t)];
        const Tail whole{std::max(made.load_s, rest.load_s), made.devices + rest.devices, j,
                         t - from};
        if (try_replicas(whole, s)) guessed_.clear();
      }
      return true;
    });
  }

  // time(d) = load * (ceil(m / d) + s - 1) + sync * (1 - 1 / d) is at least this sum without
  // rounding m / d up, which is monotone in d: replica counts are tried from the end where this
  // bound is lower, until the bound exceeds the incumbent.
  bool try_replicas(const Tail& whole, int s) {
    const double before = best_->time_s;
    const double sync = cuts_.sync_s(0, whole.next_cut);
    const double load = whole.load_s;
    const auto m = static_cast<double>(rules_.micro_batches);
    std::int64_t most = std::min(rules_.devices / whole.devices, rules_.micro_batches);
    const auto least = [&](double d) { return load * (m / d + s - 1) + sync * (1.0 - 1.0 / d); };
    if (load * m >= sync) {
      while (most >= 1 && least(static_cast<double>(most)) * (1.0 - 1e-12) < best_->time_s) {
        // The smallest replica count with this many rounds.
        const std::int64_t rounds = ceil_div(rules_.micro_batches, most);
        const std::int64_t fewest = ceil_div(rules_.micro_batches, rounds);
        consider(whole, s, fewest);
        most = fewest - 1;
      }
      return best_->time_s < before;
    }
    for (std::int64_t d = 1;
         d <= most && least(static_cast<double>(d)) * (1.0 - 1e-12) < best_->time_s;) {
      consider(whole, s, d);
      const std::int64_t rounds = ceil_div(rules_.micro_batches, d);
      if (rounds == 1) break;
      d = ceil_div(rules_.micro_batches, rounds - 1);  // the smallest count with fewer rounds
    }
    return best_->time_s < before;
  }

  void consider(const Tail& whole, int s, std::int64_t d) {
    const auto rounds = static_cast<double>(ceil_div(rules_.micro_batches, d) + s - 1);
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
    if (!guessed_.empty()) {
      best_->stage_of = cuts_.stages(guessed_);
      return;
    }
    std::vector<std::int32_t> cuts{0};
    Tail tail = found_;
    for (int s = best_->stages - 1;; --s) {
      cuts.push_back(tail.next_cut);
      if (s == 0) break;
      tail = tails_[at(tails(s, tail.next_cut).first + tail.next_tail)];
    }
    best_->stage_of = cuts_.stages(cuts);
  }

  const PlacementCuts& cuts_;
  const PublishedRules& rules_;
  PlacementPlan* best_;
  std::int64_t most_stages_;
  std::vector<double> bound_s_;
  std::vector<double> rounds_, even_s_;  // by stages of a plan
  std::vector<double> limits_s_;
  static constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> reach_, fewest_;  // see find_reach
  std::int32_t furthest_ = -1;
  static constexpr std::size_t kKnownRounds = 1024;
  std::vector<double> rounds_of_ = std::vector<double>(kKnownRounds);  // by devices; 0: not known
  std::vector<double> balanced_;
  std::vector<Tail> tails_;
  std::vector<Span> spans_;   // of the tails, by stages of a tail and cut
  int first_with_tails_ = 0;  // cuts of a chain with tails of one stage less
  int last_with_tails_ = 0;
  Tail found_{};
  std::vector<std::int32_t> guessed_;  // cuts of the incumbent, if guess() found it
};

}  // namespace

Status place_published(const PlacementLayers& layers, const PublishedRules& rules, double below_s,
                       PlacementPlan* best) {
  *best = {kInfinite, 0.0, 0, 0, 0, {}};
  const Status status = check_placement(layers);
  if (status != Status::kOk) return status;
  if (rules.devices < 1 || rules.micro_batches < 1 || rules.width < 1 ||
      !(rules.memory_bytes >= 0.0) || rules.devices > kMostDevices ||
      rules.micro_batches > kMostMicroBatches) {
    return Status::kBadRules;
  }
  PlacementCuts cuts;
  const Status built = cuts.build(layers);
  if (built != Status::kOk) return built;
  best->time_s = below_s;
  PublishedRules own = rules;  // a stage wider than the cluster does not fit, at any width
  own.width = static_cast<std::int32_t>(std::min<std::int64_t>(rules.width, rules.devices + 1));
  Published(cuts, own, best).run();
  if (best->stages == 0) best->time_s = kInfinite;
  return Status::kOk;
}

}  // namespace phaze
