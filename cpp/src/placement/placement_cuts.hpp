// Ways to cut a graph of layers in two, with sums over the layers before each, so that a stage
// between two cuts costs a few subtractions. Shared by the objectives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "phaze/placement.hpp"
#include "placement/memory_rule.hpp"

namespace phaze {

// A chain has one cut per position; other graphs have one per set of layers that is closed under
// predecessors. Cut 0 has nothing before it, the last has everything.
class PlacementCuts {
 public:
  // `per_edge`: every edge over a boundary is sent; else a layer's output once to each stage.
  Status build(const PlacementLayers& layers, bool per_edge);

  int count() const noexcept { return count_; }
  bool chain() const noexcept { return next_.empty(); }
  const PlacementLayers& layers() const noexcept { return *layers_; }

  // Calls f(j) for the cuts that contain cut i, by rising work, until it says false.
  template <typename F>
  void for_after(int i, const F& f) const {
    if (chain()) {
      for (int j = i + 1; j < count_; ++j) {
        if (!f(j)) return;
      }
      return;
    }
    for (const std::int32_t j : next_[static_cast<std::size_t>(i)]) {
      if (!f(j)) return;
    }
  }

  // Seconds and bytes of what enters and leaves the stage between two cuts.
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
  double forward_s(int v, int i, int j) const noexcept { return part(forward_, v, i, j); }
  double backward_s(int v, int i, int j) const noexcept { return part(backward_, v, i, j); }
  double stash_bytes(int v, int i, int j) const noexcept { return part(stash_, v, i, j); }
  double resident_bytes(int i, int j) const noexcept { return part(resident_, 0, i, j); }
  double once_bytes(int i, int j) const noexcept { return part(once_, 0, i, j); }
  double sync_s(int i, int j) const noexcept { return part(sync_, 0, i, j); }
  double step_s(int i, int j) const noexcept { return part(step_, 0, i, j); }
  double weight_grad_s(int i, int j) const noexcept { return part(weight_grad_, 0, i, j); }
  int wide_after(int i) const noexcept { return wide_.back() - wide_[at(i)]; }
  int narrow_before(int i) const noexcept { return size_[at(i)] - wide_[at(i)]; }
  bool wide(int i, int j) const noexcept { return wide_[at(j)] > wide_[at(i)]; }
  int layers_after(int i) const noexcept { return size_.back() - size_[at(i)]; }
  // The largest of what one layer at a time takes.
  double live_bytes(int v, int i, int j) const noexcept;

  // Which stage each layer is in, given the cuts between stages in order (0 and the last included).
  std::vector<std::int32_t> stages(const std::vector<std::int32_t>& cuts) const;

 private:
  static std::size_t at(int i) noexcept { return static_cast<std::size_t>(i); }
  double part(const std::vector<double>& sums, int v, int i, int j) const noexcept {
    const std::size_t row = at(v) * at(count_);
    return sums[row + at(j)] - sums[row + at(i)];
  }
  Status find_closed_sets();
  void sort_by_work();
  void add_sums();
  void add_kinds();
  void add_edges(bool per_edge);
  Traffic crossing(int i, int j) const noexcept;
  bool before(int cut, int layer) const noexcept {
    if (words_ == 0) return layer < cut_size_[at(cut)];
    return (bits_[at(cut) * at(words_) + at(layer / 64)] >> (layer % 64) & 1) != 0;
  }
  void find_next();

  const PlacementLayers* layers_ = nullptr;
  std::vector<double> least_;  // per layer: work that no variant avoids
  int count_ = 0;
  int words_ = 0;                    // of a set; 0 where cuts are positions
  std::vector<std::uint64_t> bits_;  // [cut][word]
  std::vector<std::int32_t> cut_size_;
  std::vector<std::vector<std::int32_t>> next_;
  std::vector<double> work_, forward_, backward_, stash_, resident_, once_, sync_, step_,
      weight_grad_;
  std::vector<std::int32_t> wide_, size_;
  int kinds_ = 0;
  std::vector<double> kind_live_;          // [kind][variant]
  std::vector<double> kind_gather_;        // [kind]
  std::vector<std::int32_t> kind_count_;   // [kind][cut]
  std::vector<double> cut_s_, cut_bytes_;  // of a chain
  struct Crossing {
    std::int32_t source;
    std::int32_t target;
    double seconds;
    double bytes;
  };
  std::vector<std::vector<Crossing>> crossing_;  // edges from before a cut to after it, by source
  bool per_edge_ = true;
};

// found[r][i]: the least that the largest of r stages before cut i of a chain must work, r below
// `most`; `work(i, j)` of a stage must rise with its layers.
template <typename Work>
std::vector<std::vector<double>> balanced_shares(int last, std::int64_t most, const Work& work) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  const auto at = [](int i) { return static_cast<std::size_t>(i); };
  std::vector<std::vector<double>> found(1, std::vector<double>(at(last) + 1, infinite));
  found[0][0] = 0.0;
  for (std::int64_t r = 1; r < most; ++r) {
    const std::vector<double>& fewer = found.back();
    std::vector<double> row(at(last) + 1, infinite);
    int j = 0;
    for (int i = 1; i <= last; ++i) {
      const auto largest = [&](int cut) { return std::max(fewer[at(cut)], work(cut, i)); };
      while (j + 1 < i && largest(j + 1) <= largest(j)) ++j;
      row[at(i)] = largest(j);
    }
    found.push_back(std::move(row));
  }
  return found;
}

}  // namespace phaze
