#include "placement/placement_cuts.hpp"

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <unordered_set>

namespace phaze {
namespace {

bool all_good(std::span<const double> values) noexcept {
  return std::all_of(values.begin(), values.end(),
                     [](double v) { return std::isfinite(v) && v >= 0.0; });
}

bool right_size(std::span<const double> values, std::size_t size) noexcept {
  return values.size() == size;
}

}  // namespace

Status check_placement(const PlacementLayers& l) noexcept {
  if (l.layers < 1 || l.layers > kMaxPlacedLayers) return Status::kBadLayers;
  if (l.variants < 1 || l.variants > kMaxVariants) return Status::kBadLayers;
  const auto n = static_cast<std::size_t>(l.layers);
  const std::size_t rows = n * static_cast<std::size_t>(l.variants);
  for (const auto& values : {l.forward_s, l.backward_s, l.stash_bytes, l.live_bytes}) {
    if (!right_size(values, rows)) return Status::kBadLayers;
    if (!all_good(values)) return Status::kNotFinite;
  }
  for (const auto& values :
       {l.resident_bytes, l.once_bytes, l.gather_bytes, l.sync_s, l.step_s, l.weight_grad_s}) {
    if (!right_size(values, n)) return Status::kBadLayers;
    if (!all_good(values)) return Status::kNotFinite;
  }
  if (l.wide.size() != n) return Status::kBadLayers;
  const std::size_t edges = l.edge_from.size();
  if (l.edge_to.size() != edges || l.edge_s.size() != edges || l.edge_bytes.size() != edges ||
      l.tied_from.size() != l.tied_to.size()) {
    return Status::kBadLayers;
  }
  if (!all_good(l.edge_s) || !all_good(l.edge_bytes)) return Status::kNotFinite;
  for (std::size_t e = 0; e < edges; ++e) {
    if (l.edge_from[e] < 0 || l.edge_to[e] >= l.layers || l.edge_from[e] >= l.edge_to[e]) {
      return Status::kBadEdge;
    }
  }
  for (std::size_t e = 0; e < l.tied_from.size(); ++e) {
    if (l.tied_from[e] < 0 || l.tied_from[e] >= l.layers || l.tied_to[e] < 0 ||
        l.tied_to[e] >= l.layers) {
      return Status::kBadEdge;
    }
  }
  return Status::kOk;
}

Status PlacementCuts::build(const PlacementLayers& layers, bool per_edge) {
  layers_ = &layers;
  per_edge_ = per_edge;
  const std::size_t n = at(layers.layers);
  least_.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    least_[i] = layers.forward_s[i] + layers.backward_s[i];
    for (int v = 1; v < layers.variants; ++v) {
      const std::size_t k = at(v) * n + i;
      least_[i] = std::min(least_[i], layers.forward_s[k] + layers.backward_s[k]);
    }
  }
  const Status status = find_closed_sets();
  if (status != Status::kOk) return status;
  add_sums();
  add_kinds();
  add_edges(per_edge);
  return Status::kOk;
}

// Sets closed under predecessors, from the empty one up, a layer at a time. Where each set but the
// last can grow in one way only, cuts are positions.
Status PlacementCuts::find_closed_sets() {
  const PlacementLayers& l = *layers_;
  const int n = l.layers;
  std::vector<std::vector<std::int32_t>> preds(at(n));
  for (std::size_t e = 0; e < l.edge_from.size(); ++e) {
    preds[at(l.edge_to[e])].push_back(l.edge_from[e]);
  }
  bool ordered = true;  // every layer follows the one before it
  for (int i = 1; i < n && ordered; ++i) {
    const auto& p = preds[at(i)];
    ordered = std::find(p.begin(), p.end(), i - 1) != p.end();
  }
  const auto keeps_ties = [&](const auto& holds) {
    for (std::size_t t = 0; t < l.tied_from.size(); ++t) {
      if (holds(l.tied_from[t]) != holds(l.tied_to[t])) return false;
    }
    return true;
  };
  if (ordered) {
    for (int size = 0; size <= n; ++size) {
      if (keeps_ties([&](int layer) { return layer < size; })) cut_size_.push_back(size);
    }
    count_ = static_cast<int>(cut_size_.size());
    return Status::kOk;
  }
  words_ = (n + 63) / 64;
  using Set = std::vector<std::uint64_t>;
  const auto holds = [](const Set& set, int layer) {
    return (set[at(layer / 64)] >> (layer % 64) & 1) != 0;
  };
  struct Hash {
    std::size_t operator()(const Set& set) const noexcept {
      std::uint64_t h = 0;
      for (const std::uint64_t word : set) {
        h = (h ^ word) * 0x9E3779B97F4A7C15ULL;
        h ^= h >> 29;
      }
      return static_cast<std::size_t>(h);
    }
  };
  std::vector<Set> level{Set(at(words_), 0)};
  for (int size = 0; size <= n; ++size) {
    std::sort(level.begin(), level.end());
    std::unordered_set<Set, Hash> grown;
    for (const Set& set : level) {
      if (keeps_ties([&](int layer) { return holds(set, layer); })) {
        bits_.insert(bits_.end(), set.begin(), set.end());
        cut_size_.push_back(size);
      }
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

// Work rises with every layer, so a set never stands before one it contains.
void PlacementCuts::sort_by_work() {
  const PlacementLayers& l = *layers_;
  std::vector<double> work(at(count_), 0.0);
  for (int c = 0; c < count_; ++c) {
    for (int layer = 0; layer < l.layers; ++layer) {
      if (before(c, layer)) work[at(c)] += least_[at(layer)];
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
  const std::size_t n = at(l.layers);
  const auto fill = [&](std::vector<double>& sums, std::span<const double> values, int rows) {
    sums.assign(at(rows) * at(count_), 0.0);
    for (int v = 0; v < rows; ++v) {
      double* row = &sums[at(v) * at(count_)];
      const double* value = values.data() + at(v) * n;
      if (words_ == 0) {
        double sum = 0.0;
        int next = 0;
        for (int c = 0; c < count_; ++c) {
          for (; next < cut_size_[at(c)]; ++next) sum += value[next];
          row[c] = sum;
        }
        continue;
      }
      for (int c = 0; c < count_; ++c) {
        for (int layer = 0; layer < l.layers; ++layer) {
          if (before(c, layer)) row[c] += value[layer];
        }
      }
    }
  };
  fill(forward_, l.forward_s, l.variants);
  fill(backward_, l.backward_s, l.variants);
  fill(stash_, l.stash_bytes, l.variants);
  fill(resident_, l.resident_bytes, 1);
  fill(once_, l.once_bytes, 1);
  fill(sync_, l.sync_s, 1);
  fill(step_, l.step_s, 1);
  fill(weight_grad_, l.weight_grad_s, 1);
  fill(work_, least_, 1);
  size_ = cut_size_;
  wide_.assign(at(count_), 0);
  for (int c = 0; c < count_; ++c) {
    for (int layer = 0; layer < l.layers; ++layer) {
      if (before(c, layer)) wide_[at(c)] += l.wide[at(layer)] != 0;
    }
  }
}

// Layers with the same bytes at a time are one kind; a stage has a kind where its count rises.
void PlacementCuts::add_kinds() {
  const PlacementLayers& l = *layers_;
  const std::size_t n = at(l.layers);
  std::vector<std::int32_t> first;  // a layer of each kind
  std::vector<std::int32_t> kind_of(n, -1);
  const auto same = [&](std::size_t a, std::size_t b) {
    if (l.gather_bytes[a] != l.gather_bytes[b]) return false;
    for (int v = 0; v < l.variants; ++v) {
      if (l.live_bytes[at(v) * n + a] != l.live_bytes[at(v) * n + b]) return false;
    }
    return true;
  };
  const auto nothing = [&](std::size_t a) {
    bool none = l.gather_bytes[a] == 0.0;
    for (int v = 0; v < l.variants; ++v) none = none && l.live_bytes[at(v) * n + a] == 0.0;
    return none;
  };
  for (std::size_t i = 0; i < n; ++i) {
    if (nothing(i)) continue;
    for (std::size_t k = 0; k < first.size() && kind_of[i] < 0; ++k) {
      if (same(i, at(first[k]))) kind_of[i] = static_cast<std::int32_t>(k);
    }
    if (kind_of[i] >= 0) continue;
    kind_of[i] = static_cast<std::int32_t>(first.size());
    first.push_back(static_cast<std::int32_t>(i));
  }
  kinds_ = static_cast<int>(first.size());
  for (const std::int32_t layer : first) {
    kind_gather_.push_back(l.gather_bytes[at(layer)]);
    for (int v = 0; v < l.variants; ++v) {
      kind_live_.push_back(l.live_bytes[at(v) * n + at(layer)]);
    }
  }
  kind_count_.assign(at(kinds_) * at(count_), 0);
  for (std::size_t i = 0; i < n; ++i) {
    if (kind_of[i] < 0) continue;
    for (int c = 0; c < count_; ++c) {
      if (before(c, static_cast<int>(i))) ++kind_count_[at(kind_of[i]) * at(count_) + at(c)];
    }
  }
}

double PlacementCuts::live_bytes(int v, int i, int j) const noexcept {
  double live = 0.0;
  double gather = 0.0;
  for (int k = 0; k < kinds_; ++k) {
    const std::int32_t* counts = &kind_count_[at(k) * at(count_)];
    if (counts[j] == counts[i]) continue;
    live = std::max(live, kind_live_[at(k) * at(layers_->variants) + at(v)]);
    gather = std::max(gather, kind_gather_[at(k)]);
  }
  return live + gather;
}

void PlacementCuts::add_edges(bool per_edge) {
  const PlacementLayers& l = *layers_;
  std::vector<Crossing> edges(l.edge_from.size());
  bool plain = words_ == 0;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    edges[e] = {l.edge_from[e], l.edge_to[e], l.edge_s[e], l.edge_bytes[e]};
    plain = plain && l.edge_to[e] == l.edge_from[e] + 1;
  }
  std::stable_sort(edges.begin(), edges.end(),
                   [](const Crossing& a, const Crossing& b) { return a.source < b.source; });
  if (plain && (per_edge || edges.size() + 1 == at(l.layers))) {
    cut_s_.assign(at(count_), 0.0);
    cut_bytes_.assign(at(count_), 0.0);
    for (int c = 0; c < count_; ++c) {
      for (const Crossing& e : edges) {
        if (e.target != cut_size_[at(c)]) continue;
        cut_s_[at(c)] += e.seconds;
        cut_bytes_[at(c)] += e.bytes;
      }
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

// Sums over edges, or over layers whose output is needed; of a layer's edges the largest counts.
PlacementCuts::Traffic PlacementCuts::crossing(int i, int j) const noexcept {
  Traffic found{0.0, 0.0, 0.0};
  const auto sum = [&](int cut, const auto& counts, double* seconds, double* bytes) {
    const std::vector<Crossing>& edges = crossing_[at(cut)];
    for (std::size_t e = 0; e < edges.size();) {
      const std::int32_t source = edges[e].source;
      double most_s = 0.0;
      double most_bytes = 0.0;
      for (; e < edges.size() && edges[e].source == source; ++e) {
        if (!counts(edges[e])) continue;
        if (per_edge_) {
          most_s += edges[e].seconds;
          most_bytes += edges[e].bytes;
        } else {
          most_s = std::max(most_s, edges[e].seconds);
          most_bytes = std::max(most_bytes, edges[e].bytes);
        }
      }
      *seconds += most_s;
      *bytes += most_bytes;
    }
  };
  double unused = 0.0;
  sum(i, [&](const Crossing& e) { return before(j, e.target); }, &found.in_s, &found.in_bytes);
  sum(j, [&](const Crossing& e) { return !before(i, e.source); }, &found.out_s, &unused);
  return found;
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

}  // namespace phaze
