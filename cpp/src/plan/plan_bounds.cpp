// Lower bounds on time and bytes over all plans of a layout. docs/search.md has the proof of each
// term; a test compares every bound with the exact time that `PlanSolver` finds.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "base/numbers.hpp"
#include "plan/pipeline_clock.hpp"
#include "plan/plan_space.hpp"

namespace phaze {

// Sums in another order differ in their last digits; stages that fit must not seem too large.
inline constexpr double kRoundedUp = 1.0 + 1e-9;

// Bytes that a block counts at least: of blocks without bytes, any number then fits.
inline constexpr double kNoBytes = std::numeric_limits<double>::min();

int PlanSpaceImpl::plain_variant(int strategy) const noexcept {
  int plain = 0;
  double most = -1.0;
  for (int v = 0; v < strategies[at(strategy)].variants; ++v) {
    double bytes = 0.0;
    for (int k = 0; k < kinds; ++k) {
      bytes += block_count[at(k)] * size_of(strategy, k).stash_bytes[v];
    }
    if (bytes > most) plain = v;
    most = std::max(most, bytes);
  }
  return plain;
}

// The blocks as large as some kind or larger, for which count times least parameters is largest.
CountedBlocks PlanSpaceImpl::counted_blocks(int strategy) const {
  CountedBlocks best{0.0, blocks};
  double most = -1.0;
  for (int k = 0; k < kinds; ++k) {
    if (block_count[at(k)] == 0) continue;
    CountedBlocks own{size_of(strategy, k).parameters, 0};
    for (int other = 0; other < kinds; ++other) {
      if (size_of(strategy, other).parameters >= own.parameters)
        own.count += block_count[at(other)];
    }
    const double all = own.count * own.parameters;
    if (all < most || (all == most && own.count <= best.count)) continue;
    most = all;
    best = own;
  }
  return best;
}

// Blocks of a stage at most.
double PlanSpaceImpl::most_blocks(const LayoutRecord& layout) const {
  if (searches_partitions(layout)) return blocks;
  const int ends = (first_block > 0 ? 1 : 0) + (layers > last_block ? 1 : 0);
  double most = layout.vpp * std::ceil(static_cast<double>(blocks + ends) / places_of(layout));
  const std::vector<std::int32_t> cuts = cuts_of_software(layout);
  for (std::size_t k = 1; k < cuts.size(); ++k) {
    most = std::max(most, static_cast<double>(cuts[k] - cuts[k - 1]));
  }
  return most;
}

// The number of blocks that fit into a stage of a layout, for the smallest counted kind. In this
// class the plain variant and the strategy's first variant (number 0) have exchanged numbers.
class BlockCapacity {
 public:
  BlockCapacity(const PlanSpaceImpl& space, const PricedLayout& layout, double usable_bytes)
      : blocks_(space.counted[at(layout.record.strategy)].count), some_blocks_(space.some_blocks) {
    const LayoutCosts& costs = space.layout_costs[at(layout.costs)];
    const int strategy = layout.record.strategy;
    variants_ = space.strategies[at(strategy)].variants;
    plain_ = space.plain_variant(strategy);
    const auto given = [&](int v) { return v == 0 ? plain_ : v == plain_ ? 0 : v; };
    const double lost = 1.0 + space.training.fragmentation;
    double gather = kInfinite;
    std::fill_n(stash_, kMaxVariants, kInfinite);
    std::fill_n(live_, kMaxVariants, kInfinite);
    for (int k = 0; k < space.kinds; ++k) {
      const LayerKindRecord& size = space.size_of(strategy, k);
      const double held = costs.resident_bytes[at(k)];
      once_ += space.last_count[at(k)] * lost * size.once_bytes;
      first_ += space.first_count[at(k)] * held;
      last_ += space.last_count[at(k)] * held;
      for (int v = 0; v < variants_; ++v) {
        first_stash_[v] += space.first_count[at(k)] * lost * size.stash_bytes[given(v)];
      }
      if (!space.counts(strategy, k)) continue;
      alike_ = space.block_count[at(k)] == space.blocks && space.training.late_gradients == 0 &&
               size.layer_peaks == 0;
      resident_ = std::min(resident_, costs.resident_bytes[at(k)]);
      gather = std::min(gather, costs.gather_bytes[at(k)]);
      for (int v = 0; v < variants_; ++v) {
        stash_[v] = std::min(stash_[v], lost * size.stash_bytes[given(v)]);
        live_[v] = std::min(live_[v], lost * size.live_bytes[given(v)]);
      }
    }
    if (layout.record.pp > 1) {  // the last layer with its copy of a tied embedding
      last_ += costs.resident_bytes[at(space.kinds)] - costs.resident_bytes[at(space.order.back())];
    }
    for (int v = 0; v < variants_; ++v) live_[v] += lost * gather;
    least_live_ = *std::min_element(live_, live_ + variants_);
    buffers_ = lost * space.buffer_bytes(layout);
    left_ = usable_bytes * kRoundedUp - buffers_;
  }

  int variants() const noexcept { return variants_; }
  int counted() const noexcept { return blocks_; }

  // Blocks that fit in addition to embedding and head; minus infinity if those do not fit.
  double blocks(int v, double in_flight, bool first, bool last) const noexcept {
    return std::floor(share(v, live_[v], in_flight, first, last));
  }

  // As blocks() for given live bytes, plus the fraction of the next block that still fits.
  double share(int v, double live, double in_flight, bool first, bool last) const noexcept {
    double left = left_;
    if (first) left -= first_ + in_flight * first_stash_[v];
    if (last) left -= last_;
    const double loss = last ? std::min(in_flight, 1.0) * once_ : 0.0;
    const double each = std::max(resident_ + in_flight * stash_[v], kNoBytes);
    const double fit = (left - std::max(live, loss)) / each * kRoundedUp;
    const double none = left >= loss ? 0.0 : -kInfinite;  // a stage of boundary layers alone
    return std::min(std::max(fit, none), static_cast<double>(blocks_));
  }

  // Least memory of a stage with `least` to `most` blocks, without recomputation if that fits.
  double least_bytes(double least, double most, double in_flight, bool first,
                     bool last) const noexcept {
    const double ends = first_ * first + last_ * last;
    double found = kInfinite;
    for (int v = 0; v < variants_; ++v) {
      const double fixed = ends + (first ? in_flight * first_stash_[v] : 0.0) + buffers_;
      const double each = resident_ + in_flight * stash_[v];
      const double loss = last ? std::min(in_flight, 1.0) * once_ : 0.0;
      const double needed = fixed + std::max(least > 0.0 ? live_[v] : 0.0, loss) + least * each;
      found = std::min(found, v == 0 ? needed : std::max(needed, filled(in_flight)));
      const double all = fixed + std::max(live_[v], loss) + most * each;
      if (v == 0 && alike_ && all <= left_ + buffers_) break;
    }
    return found;
  }

  // Least memory, anywhere in the pipeline, of a stage with `even` blocks or more.
  double even_bytes(double even, double most, double most_in_flight) const noexcept {
    double found = kInfinite;
    for (int v = 0; v < variants_; ++v) {
      const double needed = buffers_ + live_[v] + even * (resident_ + stash_[v]);
      found = std::min(found, v == 0 ? needed : std::max(needed, filled(most_in_flight)));
      const double all =
          std::max(live_[v], once_) + most * (resident_ + most_in_flight * stash_[v]);
      if (v == 0 && alike_ && first_ + last_ + most_in_flight * first_stash_[v] + all <= left_)
        break;
    }
    return found;
  }

  // Bytes that `count` blocks of a stage may store of one micro-batch; negative if they do not fit.
  double stash_left(double count, double in_flight, bool first, bool last) const noexcept {
    double left = left_ - count * resident_;
    if (first)
      left -= first_ + in_flight * *std::min_element(first_stash_, first_stash_ + variants_);
    if (last) left -= last_;
    const double loss = last ? std::min(in_flight, 1.0) * once_ : 0.0;
    return (left - std::max(least_live_, loss)) / in_flight;
  }
  // Bytes that a block stores of one micro-batch in the strategy's variant v.
  double stash_of(int v) const noexcept { return stash_[v == plain_ ? 0 : v == 0 ? plain_ : v]; }

  // The most blocks of a stage that needs at most `bytes`.
  double blocks_within(double bytes, double in_flight) const noexcept {
    double found = 0.0;
    const double plain = blocks(0, in_flight, true, true);  // most blocks without any recomputation
    for (int v = 0; v < variants_; ++v) {
      const double each = std::max(resident_ + in_flight * stash_[v], kNoBytes);
      const double most = std::floor((bytes - buffers_ - live_[v]) / each * kRoundedUp);
      const double fitting = blocks(v, in_flight, false, false);
      if (v > 0 && bytes < filled(in_flight)) break;
      if (v == 0 || !alike_ || most > plain) {
        found = std::max(found, std::min(most, std::max(fitting, 0.0)));
      }
    }
    return std::min(found, static_cast<double>(blocks_));
  }

  // Blocks that fit without recomputation; fractional if a stage may recompute only some blocks,
  // since part of a block's bytes may be enough. Beyond that, each byte costs the time to save it,
  // except live bytes, which may be fewer once all blocks are recomputed.
  double plain(double in_flight, bool first, bool last) const noexcept {
    return some_blocks_ ? share(0, least_live_, in_flight, first, last)
                        : blocks(0, in_flight, first, last);
  }

 private:
  // A stage that recomputes some blocks recomputes as few as possible, so with one fewer recomputed
  // block it would not fit: that gives a lower bound on its memory.
  double filled(double in_flight) const noexcept {
    if (!some_blocks_ || !alike_) return 0.0;
    const double least = *std::min_element(stash_, stash_ + variants_);
    return (left_ + buffers_) * (1.0 - 1e-8) - in_flight * (stash_[0] - least) -
           (live_[0] - least_live_);
  }

  int blocks_;
  bool some_blocks_;
  int variants_ = 1;
  int plain_ = 0;
  bool alike_ = false;  // all blocks are of one kind, so their number determines a stage's bytes
  double left_ = 0.0;
  double buffers_ = 0.0;
  double resident_ = kInfinite;
  double first_ = 0.0;
  double last_ = 0.0;
  double once_ = 0.0;  // bytes of the last stage while the loss is computed
  double stash_[kMaxVariants];
  double live_[kMaxVariants];
  double least_live_ = 0.0;
  double first_stash_[kMaxVariants] = {};
};

// The blocks that fit into a stage without embedding and head, by micro-batches in flight; stored
// for the latest BlockCapacity.
class InnerStages {
 public:
  struct Blocks {
    double in_flight, plain, smallest;
    std::int64_t use;
  };

  void clear() noexcept { ++use_; }

  const Blocks& of(const BlockCapacity& capacity, double in_flight) noexcept {
    const std::uint64_t hash = std::bit_cast<std::uint64_t>(in_flight) * 0x9E3779B97F4A7C15ULL;
    Blocks& own = known_[hash >> 55];
    if (own.use == use_ && own.in_flight == in_flight) return own;
    own = {in_flight, capacity.plain(in_flight, false, false), 0.0, use_};
    for (int v = 1; v < capacity.variants(); ++v) {
      own.smallest = std::max(own.smallest, capacity.blocks(v, in_flight, false, false));
    }
    return own;
  }

 private:
  std::int64_t use_ = 0;
  std::array<Blocks, 512> known_{};
};

namespace {

constexpr double kSure = 1.0 - 1e-9;

}  // namespace

// If no stage has more than `most` blocks, every stage has a minimum number of blocks, so the first
// and the last need the memory of that many, in the first variant that fits; and some stage has at
// least an even share, with one or more micro-batches in flight.
double least_memory(const PlanSpaceImpl& space, const PricedLayout& layout, double usable_bytes,
                    double most) {
  const BlockCapacity capacity(space, layout, usable_bytes);
  const LayoutRecord& l = layout.record;
  const double least = std::max(0.0, capacity.counted() - (l.pp - 1) * most);
  const auto bytes = [&](int stage, bool first, bool last) {
    const double in_flight =
        micro_batches_in_flight(schedule_of(l), l.pp, stage, l.micro_batches, l.vpp);
    return capacity.least_bytes(least, most, in_flight, first, last);
  };
  if (l.pp == 1) return bytes(0, true, true) * kSure;
  const double in_flight = micro_batches_in_flight(schedule_of(l), l.pp, 0, l.micro_batches, l.vpp);
  return std::max({bytes(0, true, false), bytes(l.pp - 1, false, true),
                   capacity.even_bytes(std::ceil(static_cast<double>(capacity.counted()) / l.pp),
                                       most, in_flight)}) *
         kSure;
}

namespace {

bool all_held(const LayoutRecord& l, const BlockCapacity& capacity, double bytes) {
  double held = 0.0;
  double in_flight = -1.0;
  double own = 0.0;
  for (int stage = l.pp - 1; stage >= 0; --stage) {
    const double now = micro_batches_in_flight(schedule_of(l), l.pp, stage, l.micro_batches, l.vpp);
    if (now != in_flight) own = capacity.blocks_within(bytes, now);
    in_flight = now;
    held += own;
    if (held >= capacity.counted()) return true;
  }
  return false;
}

}  // namespace

bool holds_all(const PlanSpaceImpl& space, const PricedLayout& layout, double usable_bytes,
               double bytes) {
  return all_held(layout.record, BlockCapacity(space, layout, usable_bytes), bytes * kRoundedUp);
}

// A lower bound, by bisection, on the memory limit with which all stages together, each with the
// recomputation it needs, hold every block.
double least_memory_of_all(const PlanSpaceImpl& space, const PricedLayout& layout,
                           double usable_bytes, double low) {
  const BlockCapacity capacity(space, layout, usable_bytes);
  double high = usable_bytes;
  for (int step = 0; step < 8; ++step) {
    const double middle = 0.5 * (low + high);
    (all_held(layout.record, capacity, middle) ? high : low) = middle;
  }
  return low * kSure;
}

// Sums in another order differ in their last digits; this factor keeps the number of blocks of a
// stage from being underestimated.
inline constexpr double kLoose = 1.0 + 1e-9;

// The floor of a number of blocks, which is neither negative nor above the blocks of a model.
inline double whole(double blocks) noexcept {
  return static_cast<double>(static_cast<std::int32_t>(blocks));
}

// The most blocks that a stage with a given load holds, if a stage recomputes all of its blocks or
// none. Loads are in units of a block that is not recomputed; a recomputed one takes 1 + r.
struct WholeStages {
  double r;
  double operator()(double load, double plain, double smallest) const noexcept {
    return whole(
        std::max(std::min(plain, load * kLoose), std::min(smallest, load / (1.0 + r) * kLoose)));
  }
};

// The most blocks if a stage recomputes as many of its blocks as it must, and r is the time to save
// the bytes of one block.
struct SomeBlocks {
  double r;
  double operator()(double load, double plain, double smallest) const noexcept {
    const double own = load <= plain ? load : (load + r * plain) / (1.0 + r);
    return whole(std::min(std::max(whole(plain), smallest), own * kLoose));
  }
};

template <typename Held>
bool all_held(const StageCapacities& capacities, int stages, int blocks, double load,
              const Held& held) noexcept {
  double sum = 0.0;
  for (int s = 0; s < stages; ++s) {
    sum += held(load, capacities.plain[at(s)], capacities.smallest[at(s)]);
    if (sum >= blocks) return true;
  }
  return false;
}

// The smallest load, or a lower bound on it, with which all stages together hold every block.
inline double longest_stage(const StageCapacities& capacities, int stages, int blocks,
                            WholeStages held) noexcept {
  const auto holds = [&](double load) { return all_held(capacities, stages, blocks, load, held); };
  double least = kInfinite;
  for (const double unit : {1.0, 1.0 + held.r}) {
    int low = 0;
    int high = blocks;
    if (!holds(high * unit)) continue;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (holds(middle * unit) ? high : low) = middle;
    }
    least = std::min(least, high * unit);
  }
  return std::isfinite(least) ? least : 1.0;
}

inline double longest_stage(const StageCapacities& capacities, int stages, int blocks,
                            SomeBlocks held) noexcept {
  const auto holds = [&](double load) { return all_held(capacities, stages, blocks, load, held); };
  double low = std::ceil(static_cast<double>(blocks) / stages);
  if (holds(low)) return low;
  double high = blocks * (1.0 + held.r);
  for (int step = 0; step < 12; ++step) {
    const double middle = 0.5 * (low + high);
    (holds(middle) ? high : low) = middle;
  }
  return low;
}

// Whether the stages of an interleaved pipeline, each with its waiting time before its first pass
// and after its last, can process all blocks in the given seconds (docs/search.md, 6).
template <typename Held>
class InterleavedStages {
 public:
  InterleavedStages(const PlanSpaceImpl& space, const PricedLayout& layout,
                    const StageCapacities& capacities, const StepTotals& t,
                    const Held& held) noexcept
      : layout_(layout.record),
        message_s_(layout.message_s),
        capacities_(capacities),
        totals_(t),
        held_(held),
        blocks_(space.counted[at(layout.record.strategy)].count),
        chunk_(layout.bound.chunk),
        wrap_s_((layout.record.vpp - 1.0) *
                (layout.record.pp == 2 ? message_s_[1] : layout.wrap_s)) {}

  bool through(double time_s) const noexcept {
    const auto m = static_cast<double>(layout_.micro_batches);
    const double chunks = layout_.vpp;
    double before_s = 0.0;
    double sum = 0.0;
    for (int k = 0; k < layout_.pp; ++k) {
      const bool last = k + 1 == layout_.pp;
      const double enters_s = k > 0 ? message_s_[at(k)] : 0.0;
      const double leaves_s = last ? 0.0 : message_s_[at(k) + 1];
      // The first chunk of the model may have one block fewer, if the embedding counts as one.
      const double waits_s = before_s + std::max(0.0, k * chunk_ - 1.0) * totals_.block_s;
      double load_s = (time_s - waits_s) / m - chunks * (enters_s + leaves_s);
      if (k == 0) load_s -= totals_.first_s + wrap_s_;
      if (last) load_s -= totals_.last_s + wrap_s_;
      if (load_s < 0.0) return false;
      const std::size_t place = at(layout_.pp - 1 - k);
      sum += held_(load_s / totals_.counted_s * kLoose, capacities_.plain[place],
                   capacities_.smallest[place]);
      before_s += enters_s + leaves_s;
    }
    return sum >= blocks_;
  }

  // A lower bound on the seconds in which the stages can; `low_s` is one that is known.
  double least_s(double low_s) const noexcept {
    if (through(low_s)) return low_s;
    double high_s = low_s * 1.125;
    for (int step = 0; step < 24 && !through(high_s); ++step) {
      low_s = high_s;
      high_s *= 1.125;
    }
    for (int step = 0; step < 8; ++step) {
      const double middle_s = 0.5 * (low_s + high_s);
      (through(middle_s) ? high_s : low_s) = middle_s;
    }
    return low_s;
  }

 private:
  const LayoutRecord& layout_;
  std::span<const double> message_s_;
  const StageCapacities& capacities_;
  const StepTotals& totals_;
  Held held_;
  int blocks_;
  double chunk_;
  double wrap_s_;
};

namespace {

// Load of the longest stage without a memory limit. With at most `whole` blocks per stage some
// places stay empty, and each boundary layer takes as many of them as blocks of its length would.
// If that is too many, the longest stage has one block more, or `whole` blocks and the remainder of
// a boundary layer.
double load_with_ends(const LayoutBound& b, const StepTotals& t) noexcept {
  const double block = std::max(t.block_s, 1e-300);
  const double first = t.first_s / block;
  const double last = t.last_s / block;
  const double taken_first = std::ceil(first * kSure);
  const double taken_last = std::ceil(last * kSure);
  const double rest_first = first - std::max(taken_first - 1.0, 0.0);
  const double rest_last = last - std::max(taken_last - 1.0, 0.0);
  const double missing = b.missing + taken_first + taken_last;
  if (missing <= 0.0) return b.whole * t.block_s;
  const double rest =
      missing <= 1.0 ? std::min(rest_first, rest_last) : std::max(rest_first, rest_last);
  return (b.whole + std::min(rest, 1.0)) * t.block_s;
}

std::vector<BoundLine> lowest_lines(std::vector<BoundLine> lines) {
  std::sort(lines.begin(), lines.end(), [](const BoundLine& a, const BoundLine& b) {
    return a.height_s != b.height_s ? a.height_s < b.height_s : a.slope < b.slope;
  });
  std::vector<BoundLine> lines_left;
  for (const BoundLine& line : lines) {
    if (lines_left.empty() || line.slope < lines_left.back().slope) lines_left.push_back(line);
  }
  return lines_left;
}

}  // namespace

LayoutBound PlanSpaceImpl::bound_of(const PricedLayout& layout) const {
  const LayoutRecord& l = layout.record;
  const LayoutCosts& costs = layout_costs[at(layout.costs)];
  const double p = l.pp;
  const auto m = static_cast<double>(l.micro_batches);
  LayoutBound b{};
  if (schedule_of(l) == PipelineSchedule::kInterleaved) {
    b.works = 1.0;
    b.chunk = std::floor(blocks / (p * l.vpp));
  } else if (schedule_of(l) == PipelineSchedule::kOneForwardOneBackward) {
    const bool many = m >= p + 1.0;
    b.loads = many ? m - p - 1.0 : 0.0;
    b.works = many ? 2.0 : l.pp == 1 ? m : 1.0;
    b.early = many || l.pp == 1 ? 0.0 : p - m + 1.0;
  }
  if (static_cast<int>(schedule_of(l)) < static_cast<int>(PipelineSchedule::kZeroBubbleH1)) {
    for (int k = 1; k < l.pp; ++k) b.sends_s += 2.0 * layout.message_s[at(k)];
    if (b.chunk > 0.0) {
      const double around_s = l.pp == 2 ? layout.message_s[1] : layout.wrap_s;
      b.sends_s = l.vpp * b.sends_s + 2.0 * (l.vpp - 1.0) * around_s;
    }
  }
  const int own = l.pp == 1 ? layers : 1;  // the first of several stages has at least one
  double sync = 0.0;
  double shared = 0.0;
  for (int i = 0; i < own; ++i) {
    const std::size_t kind = at(kind_at(i, l.pp));
    sync += costs.sync_s[kind];
    shared += costs.shared_s[kind];
    b.step_bytes += costs.step_bytes[kind];
  }
  double all = 0.0;
  double most = 0.0;
  double least_block = kInfinite;
  for (int k = 0; k < kinds; ++k) {
    const double each = costs.sync_s[at(k)] + costs.shared_s[at(k)];
    all += (first_count[at(k)] + block_count[at(k)] + last_count[at(k)]) * each;
    most = std::max(most, each);
    if (block_count[at(k)] > 0) least_block = std::min(least_block, each);
  }
  b.tail_s = std::min(sync, costs.bucket_s) + shared;
  b.whole = std::ceil(blocks / p);
  b.missing = blocks - p * b.whole;
  b.sync_s = std::max({all / p, blocks > 0 ? b.whole * least_block : 0.0, most});
  return b;
}

StageCapacities PlanSpaceImpl::capacities_of(const PricedLayout& layout,
                                             const BlockCapacity& capacity, InnerStages* inner) {
  const LayoutRecord& l = layout.record;
  const bool shared = schedule_of(l) == PipelineSchedule::kOneForwardOneBackward && l.pp > 1;
  const std::size_t count = at(shared ? layout_costs[at(layout.costs)].most_stages : l.pp);
  constexpr std::size_t kMany = std::size_t{1} << 16;  // values that are allocated at once
  auto& chunks = bounds.stage_values;
  if (chunks.empty() || chunks.back().capacity() - chunks.back().size() < 5 * count) {
    chunks.emplace_back().reserve(std::max(kMany, 5 * count));
  }
  const std::size_t first = chunks.back().size();
  chunks.back().resize(first + 5 * count);
  const std::span<double> values = std::span(chunks.back()).subspan(first);
  const StageCapacities found{values.first(count), values.subspan(count, count),
                              values.subspan(2 * count, count), values.subspan(3 * count, count),
                              values.last(count)};
  const double most = most_blocks(l);
  double plain_sum = 0.0;
  double best_sum = 0.0;
  const auto stages = static_cast<std::int64_t>(count);
  for (std::size_t s = 0; s < count; ++s) {
    const double in_flight = micro_batches_in_flight(
        schedule_of(l), stages, stages - 1 - static_cast<std::int64_t>(s), l.micro_batches, l.vpp);
    const InnerStages::Blocks& own = inner->of(capacity, in_flight);
    found.in_flight[s] = in_flight;
    found.plain[s] = std::clamp(own.plain, 0.0, most);
    found.smallest[s] = std::min(own.smallest, most);
    found.plain_sum[s] = plain_sum += found.plain[s];
    found.best_sum[s] = best_sum += std::max(std::floor(found.plain[s]), found.smallest[s]);
  }
  return found;
}

// The blocks that do not fit into the stages of a layout without recomputation: these must be
// recomputed.
double PlanSpaceImpl::recomputed_blocks(const PricedLayout& layout, const StageCapacities& stage,
                                        const BlockCapacity& capacity) const {
  const LayoutRecord& l = layout.record;
  const auto in_flight = [&](int s) {
    return micro_batches_in_flight(schedule_of(l), l.pp, l.pp - s, l.micro_batches, l.vpp);
  };
  double held = 0.0;
  if (l.pp == 1) {
    held = capacity.plain(in_flight(1), true, true);
  } else {
    held = capacity.plain(in_flight(l.pp), true, false) +
           capacity.plain(in_flight(1), false, true) + stage.plain_sum[at(l.pp) - 2] -
           stage.plain_sum[0];
  }
  return std::max(0.0, capacity.counted() - std::max(0.0, held));
}

void PlanSpaceImpl::add_bounds(std::span<const std::uint8_t> fits) {
  bounds.layout_fits.assign(layouts.size() * bounds.memory_limits.size(), {});
  bounds.without_plan.assign(bounds.memory_limits.size(), 0);
  std::vector<std::vector<BoundLine>> found(strategies.size() * bounds.memory_limits.size());
  std::vector<BoundLine> row_lines(layouts.size(), BoundLine{0.0, 0.0});
  bounds.fitting.assign(found.size(), {});
  using Key = std::array<std::int64_t, 6>;
  const auto inner = std::make_unique<InnerStages>();
  for (std::size_t c = 0; c < bounds.memory_limits.size(); ++c) {
    Key known{-1};  // 1F1B stages have the same capacity in layouts of any length
    // Layouts with the same costs are adjacent, and have the same capacity unless there is one
    // stage.
    std::optional<BlockCapacity> capacity;
    std::int32_t capacity_costs = -1;
    std::int32_t capacity_strategy = -1;
    bool capacity_alone = false;
    for (std::size_t r = 0; r < layouts.size(); ++r) {
      PricedLayout& layout = layouts[r];
      if (c == 0) layout.bound = bound_of(layout);
      if (fits[r * bounds.memory_limits.size() + c] == 0) continue;
      const LayoutRecord& l = layout.record;
      if (capacity_costs != layout.costs || capacity_strategy != l.strategy ||
          capacity_alone != (l.pp == 1)) {
        capacity.emplace(*this, layout, bounds.memory_limits[c]);
        inner->clear();
        capacity_costs = layout.costs;
        capacity_strategy = l.strategy;
        capacity_alone = l.pp == 1;
      }
      const bool plain = schedule_of(l) == PipelineSchedule::kOneForwardOneBackward;
      const Key key{layout.costs, l.strategy,     l.schedule, plain && l.pp > 1 ? 0 : l.pp,
                    l.vpp,        l.micro_batches};
      if (known != key) {
        known = key;
        bounds.stage_capacities.push_back(capacities_of(layout, *capacity, inner.get()));
      }
      const StageCapacities& own = bounds.stage_capacities.back();
      if (own.best_sum[at(l.pp) - 1] < capacity->counted()) {
        ++bounds.without_plan[c];
        continue;
      }
      bounds.layout_fits[r * bounds.memory_limits.size() + c] = {
          static_cast<std::int32_t>(bounds.stage_capacities.size()) - 1,
          recomputed_blocks(layout, own, *capacity)};
      const LayoutBound& b = layout.bound;
      const double part = 1.0 / l.pp;
      const double slope =
          std::max(b.loads * part + b.works, static_cast<double>(l.micro_batches) * part);
      row_lines[r] = {slope, slope * b.sends_s + b.tail_s + layout.exchange_s};
      const std::size_t own_list = at(l.strategy) * bounds.memory_limits.size() + c;
      bounds.fitting[own_list].push_back(static_cast<std::int64_t>(r));
      found[own_list].push_back(row_lines[r]);
    }
  }
  keep_lines(std::move(found), row_lines);
}

void PlanSpaceImpl::keep_lines(std::vector<std::vector<BoundLine>> found,
                               std::span<const BoundLine> row_lines) {
  bounds.fitting_lines.assign(found.size(), {});
  for (std::size_t k = 0; k < bounds.fitting.size(); ++k) {
    std::vector<std::int64_t>& list = bounds.fitting[k];
    std::stable_sort(list.begin(), list.end(), [&](std::int64_t a, std::int64_t b) {
      return row_lines[at(a)].slope < row_lines[at(b)].slope;
    });
    for (const std::int64_t r : list) bounds.fitting_lines[k].push_back(row_lines[at(r)]);
  }
  bounds.lines.clear();
  for (std::vector<BoundLine>& own : found) bounds.lines.push_back(lowest_lines(std::move(own)));
}

StepTotals totals_of(const PlanSpaceImpl& space, int strategy, const KindTimes& times,
                     const LayoutCosts* costs) noexcept {
  StepTotals t{0.0, 0.0, kInfinite, kInfinite, kInfinite, 0.0, 0.0, 0.0, 0.0, true};
  const int variants = space.strategies[at(strategy)].variants;
  const int plain = space.plain_variant(strategy);
  double byte_s = kInfinite;  // to save a byte by recomputation
  double least_stash = kInfinite;
  for (int k = 0; k < space.kinds; ++k) {
    double fetch_s = 0.0;
    double exchange_s = 0.0;  // of backward passes
    if (costs != nullptr) {
      // The last layer may have a copy of a tied embedding, or not.
      const std::size_t last = at(k == space.order.back() ? space.kinds : k);
      fetch_s = std::min(costs->fetch_s[at(k)], costs->fetch_s[last]);
      exchange_s = std::min(costs->fetch_s[at(k)] + costs->each_s[at(k)],
                            costs->fetch_s[last] + costs->each_s[last]);
    }
    const auto with = [&](double own_s, double beside_s) {
      return overlapped_s(own_s, beside_s, space.training.contention);
    };
    const auto backward_s = [&](int v) {
      return with(times.backward_s[at(v) * at(space.kinds) + at(k)], exchange_s);
    };
    const double plain_s = with(times.plain_s[k], exchange_s);
    const double both = with(times.forward_s[k], fetch_s) + plain_s;
    const int first = space.first_count[at(k)];
    const int last = space.last_count[at(k)];
    const int count = space.block_count[at(k)];
    t.work_s += (first + count + last) * both;
    t.backward_s += (first + count + last) * plain_s;
    t.first_s += first * both;
    t.last_s += last * both;
    if (count == 0) continue;
    const bool counts = space.counts(strategy, k);
    t.block_s = std::min(t.block_s, both);
    if (counts) t.counted_s = std::min(t.counted_s, both);
    t.blocks_backward_s += count * plain_s;
    if (both > 0.0) t.backward_share = std::max(t.backward_share, plain_s / both);
    const LayerKindRecord& size = space.size_of(strategy, k);
    if (counts) least_stash = std::min(least_stash, size.stash_bytes[plain]);
    for (int v = 0; v < variants; ++v) {
      if (v == plain) continue;
      const double more_s = backward_s(v) - backward_s(plain);
      t.plain_is_fastest = t.plain_is_fastest && more_s >= 0.0;
      if (!counts) continue;
      t.again_s = std::min(t.again_s, backward_s(v) - plain_s);
      const double saved = size.stash_bytes[plain] - size.stash_bytes[v];
      if (saved > 0.0) byte_s = std::min(byte_s, std::max(0.0, more_s) / saved);
    }
  }
  if (space.some_blocks) t.again_s = byte_s * least_stash;
  for (double* const seconds : {&t.block_s, &t.counted_s, &t.again_s}) {
    if (!std::isfinite(*seconds)) *seconds = 0.0;
  }
  return t;
}

namespace {

double bound_with(const PlanSpaceImpl& space, std::size_t r, const LayoutFit& own,
                  const StepTotals& t, double hbm_bytes_per_s, double enough_s,
                  double* load_s) noexcept {
  const PricedLayout& layout = space.layouts[r];
  const LayoutBound& b = layout.bound;
  const double p = layout.record.pp;
  const auto m = static_cast<double>(layout.record.micro_batches);
  const double work = t.work_s + own.recomputed * t.again_s + b.sends_s;
  const double step_s = b.step_bytes / hbm_bytes_per_s;
  // Fewer micro-batches than stages: stages followed by at least m others add their backward work
  // for every micro-batch, the rest all of their work (docs/search.md, 2).
  const double backs_s =
      b.early > 0.0 ? (m - 1.0) * t.blocks_backward_s / (b.early + t.backward_share * (m - 1.0))
                    : 0.0;
  const auto passes = [&](double load, double works, double rounds) {
    return std::max(b.loads * load + works * work + backs_s, rounds * load);
  };
  double load = work / p;
  const double after = b.tail_s + step_s + layout.exchange_s;
  // A stage waits for the first chunks of the stages before it, on average for half of all of them.
  double filled = m * work / p;
  if (b.chunk > 0.0) {
    filled += std::max(0.0, 0.5 * (p - 1.0) * b.chunk - (p - 1.0) / p) * t.block_s;
  }
  const double quick = (std::max(filled, passes(load, b.works, m)) + after) * kSure;
  if (quick > enough_s) return quick;
  // A folded pipeline has both the embedding and the head on its first stage.
  if (layout.record.schedule <= static_cast<std::int32_t>(PipelineSchedule::kZeroBubbleH2)) {
    load = std::max(load, load_with_ends(b, t));
  }
  const StageCapacities& capacities = space.bounds.stage_capacities[at(own.capacities)];
  const double r_share = (t.counted_s > 0.0 ? std::max(0.0, t.again_s / t.counted_s) : 0.0) * kSure;
  const int counted = space.counted[at(layout.record.strategy)].count;
  bool above = false;  // whether the bound is above `enough_s`, regardless of other terms
  const auto hold_blocks = [&](const auto& held) {
    if (b.chunk > 0.0 && layout.record.pp > 1 && t.counted_s > 0.0) {
      const InterleavedStages stages(space, layout, capacities, t, held);
      above = !stages.through(enough_s - after);
      if (above) return;
      filled = stages.least_s(filled);
    }
    const double longest = longest_stage(capacities, layout.record.pp, counted, held);
    load = std::max(load, longest * t.counted_s * kSure);
  };
  if (space.blocks > 0 && !bidirectional(layout.record)) {  // two devices have half of each load
    space.some_blocks ? hold_blocks(SomeBlocks{r_share}) : hold_blocks(WholeStages{r_share});
  }
  if (above) return std::max(quick, std::nextafter(enough_s, kInfinite));
  if (load_s != nullptr) *load_s = load;
  // `less`: the step without the work of one micro-batch. Gradient exchanges overlap at most the
  // backward part of that work, so its forward part and all exchanges are added.
  const double less = passes(load, std::max(b.works - 1.0, 0.0), std::max(m - p, 0.0));
  // The optimiser's time is that of the first stage, which need not be the stage of this bound.
  const double exposed = t.work_s - t.backward_s + less + b.sync_s +
                         (layout.record.pp == 1 ? step_s : 0.0) + layout.exchange_s;
  return std::max({filled + after, passes(load, b.works, m) + after, exposed}) * kSure;
}

// The plans of an interleaved layout of equal blocks, class by class: chunks of `base` counted
// layers, some of which have one more, with the embedding and the head counted or not. A lower
// bound on their time, from the fewest blocks that a stage has and what must be recomputed for them
// (docs/search.md, 8).
class InterleavedClasses {
 public:
  InterleavedClasses(const PlanSpaceImpl& space, const PricedLayout& layout,
                     const StageCapacities& capacities, const BlockCapacity& capacity,
                     const KindTimes& times) noexcept
      : space_(space),
        layout_(layout),
        costs_(space.layout_costs[at(layout.costs)]),
        capacities_(capacities),
        capacity_(capacity),
        times_(times),
        block_(at(space.order[at(space.first_block)])),
        last_group_(static_cast<double>((layout.record.micro_batches - 1) % layout.record.pp + 1)) {
    own_ = seconds(block_, block_);
    passes_s_ = own_.passes_s();
    for (int v = 0; v < capacity.variants(); ++v) {
      again_s_[v] = backward_s(v, block_, block_) - own_.least_backward_s;
      stash_[v] = capacity.stash_of(v);
    }
    if (space.first_block > 0) first_ = seconds(0, 0);
    if (space.layers > space.last_block) {
      last_ = seconds(at(space.order.back()), at(space.kinds));
    }
  }

  // Whether this bound holds for the space's layers.
  static bool applies(const PlanSpaceImpl& space, const PricedLayout& layout) noexcept {
    return space.equal_blocks && space.chain && space.first_block <= 1 &&
           space.layers - space.last_block <= 1 && layout.record.pp > 1 && layout.record.vpp > 1 &&
           schedule_of(layout.record) == PipelineSchedule::kInterleaved;
  }

  // The bound, or some bound above `enough_s`.
  double least_s(double enough_s, unsigned* classes) {
    double least = kInfinite;
    *classes = 0;
    for (const int first : {0, 1}) {
      for (const int last : {0, 1}) {
        if (first > space_.first_block || last > space_.layers - space_.last_block) continue;
        const double own_s = class_s(first, last, enough_s);
        if (own_s <= enough_s) *classes |= class_bit(first > 0, last > 0);
        least = std::min(least, own_s);
      }
    }
    return least;
  }

 private:
  struct LayerSeconds {
    double forward_s = 0.0;
    double least_backward_s = 0.0;
    double plain_s = 0.0;
    double sync_s = 0.0;
    double step_s = 0.0;
    double passes_s() const noexcept { return forward_s + least_backward_s; }
  };

  double backward_s(int v, std::size_t timed, std::size_t kind) const noexcept {
    return overlapped_s(times_.backward_s[at(v) * at(space_.kinds) + timed],
                        costs_.fetch_s[kind] + costs_.each_s[kind], space_.training.contention);
  }

  LayerSeconds seconds(std::size_t timed, std::size_t kind) const noexcept {
    LayerSeconds own;
    const double contention = space_.training.contention;
    own.forward_s = overlapped_s(times_.forward_s[timed], costs_.fetch_s[kind], contention);
    own.plain_s =
        overlapped_s(times_.plain_s[timed], costs_.fetch_s[kind] + costs_.each_s[kind], contention);
    own.least_backward_s = kInfinite;
    for (int v = 0; v < capacity_.variants(); ++v) {
      own.least_backward_s = std::min(own.least_backward_s, backward_s(v, timed, kind));
    }
    own.sync_s = costs_.sync_s[kind];
    own.step_s = costs_.step_bytes[kind] / times_.hbm_bytes_per_s + costs_.shared_s[kind];
    if (times_.step_s != nullptr) own.step_s += times_.step_s[timed] * costs_.step_share[kind];
    return own;
  }

  // Least seconds that recomputation adds to a stage of `count` blocks which may store `left`
  // bytes, in one variant or in two: `recomputed` returns how many blocks use the second, given how
  // many must.
  template <typename Recomputed>
  double again_s(double count, double left, const Recomputed& recomputed) const noexcept {
    double least = kInfinite;
    for (int v = 0; v < capacity_.variants(); ++v) {
      if (count * stash_[v] > left) continue;
      least = std::min(least, count * again_s_[v]);
      for (int other = 0; space_.some_blocks && other < capacity_.variants(); ++other) {
        if (count * stash_[other] <= left || again_s_[other] >= again_s_[v]) continue;
        const double some = (count * stash_[other] - left) / (stash_[other] - stash_[v]);
        least = std::min(least, count * again_s_[other] + std::min(count, recomputed(some)) *
                                                              (again_s_[v] - again_s_[other]));
      }
    }
    return least;
  }

  // Least seconds of the exchanges and the optimiser of the first stage after its last pass.
  double tail_s(double least, double most) const noexcept {
    const double sync_s = least * own_.sync_s + first_.sync_s;
    const auto exposed_s = [&](double count) {
      return count * own_.sync_s + first_.sync_s -
             (count * own_.plain_s + first_.plain_s) / layout_.record.vpp;
    };
    const double exposed =
        std::min(sync_s, std::max(std::min(exposed_s(least), exposed_s(most)), costs_.bucket_s));
    return std::max(0.0, exposed + least * own_.step_s + first_.step_s);
  }

  // A stage without its blocks.
  struct Stage {
    double fixed_s;   // messages of a micro-batch, and the passes of the embedding or the head
    double before_s;  // the first chunks of the stages before it
    double last_s;    // before its first pass and from the last group of micro-batches on
    double in_flight;
    bool first, last;
  };

  // Seconds until a stage of `count` blocks has run all its passes and sent its last gradient on,
  // or until the last group of micro-batches, which has `last_group_`, has gone back through all
  // stages after it.
  template <typename Recomputed>
  double stage_s(const Stage& stage, double count, const Recomputed& recomputed) const noexcept {
    const double left =
        capacity_.stash_left(count, stage.in_flight, stage.first && space_.first_block > 0,
                             stage.last && space_.layers > space_.last_block);
    const double load_s = stage.fixed_s + count * passes_s_ + again_s(count, left, recomputed);
    const auto m = static_cast<double>(layout_.record.micro_batches);
    return std::max(stage.before_s + m * load_s, stage.last_s + (m - last_group_) * load_s +
                                                     last_group_ * count * own_.forward_s);
  }

  // Least seconds of the backward passes of the last group's first micro-batch, the last chunks of
  // stages after the first left out, and of the group's others through the first chunk.
  double way_back_s(double least_first, double longest, double wraps_s) const noexcept {
    const LayoutRecord& l = layout_.record;
    const double first_s = least_first * own_.least_backward_s + first_.least_backward_s;
    double sends_s = 0.0;
    for (int k = 1; k < l.pp; ++k) sends_s += layout_.message_s[at(k)];
    return (space_.blocks - (l.pp - 1) * longest) * own_.least_backward_s +
           first_.least_backward_s + (last_group_ - 1.0) * first_s + (l.vpp - 1.0) * sends_s +
           wraps_s;
  }

  double class_s(int first, int last, double enough_s) {
    const LayoutRecord& l = layout_.record;
    const int places = l.pp * l.vpp;
    const int total = space_.blocks + first + last;
    if (total < places) return kInfinite;
    const int base = total / places;
    const int extras = total % places;
    const int most_extras = std::min(l.vpp, extras);  // of a stage
    const double chunks = l.vpp;
    const double wrap_s = (chunks - 1.0) * (l.pp == 2 ? layout_.message_s[1] : layout_.wrap_s);
    const double fewest = chunks * base - first;
    const double longest = base + (extras > 0 ? 1.0 : 0.0);  // blocks of a chunk at most
    double last_s = way_back_s(base - first, longest, wrap_s);
    const double after_s = tail_s(fewest, fewest + most_extras) + layout_.exchange_s;
    double least = 0.0;
    double before_s = 0.0;
    more_s_.clear();
    for (int k = 0; k < l.pp; ++k) {
      const bool end = k + 1 == l.pp;
      const double in_s = k > 0 ? layout_.message_s[at(k)] : 0.0;
      const double out_s = end ? 0.0 : layout_.message_s[at(k) + 1];
      // The last chunk of the stage runs forward before this way back at least so often.
      const double forwards = std::min(last_group_, 2.0 * (l.pp - 1 - k) + 1.0);
      last_s += out_s + (end ? last_.least_backward_s : 0.0);
      Stage stage{chunks * (in_s + out_s),
                  before_s,
                  last_s - (last_group_ - forwards) * longest * own_.forward_s,
                  capacities_.in_flight[at(l.pp - 1 - k)],
                  k == 0,
                  end};
      if (k == 0) stage.fixed_s += wrap_s + first_.passes_s();
      if (end) stage.fixed_s += wrap_s + last_.passes_s();
      const double fewer = (k == 0 ? first : 0) + (end ? last : 0);
      const double count = chunks * base - fewer;
      // Equal chunks, of which one may have fewer blocks, have as many in each of two variants.
      const auto of_chunks = [&](double some) {
        return std::max(some, chunks * std::ceil(some / chunks * kSure) - fewer);
      };
      const auto of_blocks = [](double some) { return some; };
      least = std::max(least, stage_s(stage, count, of_chunks));
      if (least + after_s > enough_s) return least + after_s;
      for (int e = 1; e <= most_extras; ++e)
        more_s_.push_back(stage_s(stage, count + e, of_blocks));
      const double own = base - (k == 0 ? first : 0);  // blocks of the first chunk
      before_s += in_s + out_s + own * passes_s_;
      last_s += in_s + own * own_.forward_s + longest * own_.least_backward_s;
      if (k > 0) continue;
      before_s += first_.passes_s();
      last_s += first_.forward_s;
    }
    if (extras > 0) {  // the stages have so many blocks more
      const auto last_extra = more_s_.begin() + (extras - 1);
      std::nth_element(more_s_.begin(), last_extra, more_s_.end());
      least = std::max(least, *last_extra);
    }
    return least + after_s;
  }

  const PlanSpaceImpl& space_;
  const PricedLayout& layout_;
  const LayoutCosts& costs_;
  const StageCapacities& capacities_;
  const BlockCapacity& capacity_;
  const KindTimes& times_;
  std::size_t block_;                  // kind of the blocks
  double last_group_;                  // micro-batches of the last group
  double passes_s_ = 0.0;              // both passes of a block in its fastest variant
  double again_s_[kMaxVariants] = {};  // by variant: what it takes longer than the fastest
  double stash_[kMaxVariants] = {};    // by variant: bytes that a block stores of a micro-batch
  LayerSeconds own_, first_, last_;    // a block, the embedding and the head
  std::vector<double> more_s_;         // scratch: by stage, with one block more, and so on
};

}  // namespace

double bound_of_layout(const PlanSpaceImpl& space, std::size_t r, std::size_t memory_limit,
                       const StepTotals& totals, const KindTimes& times, double enough_s,
                       double* load_s) noexcept {
  const LayoutFit& own =
      space.bounds.layout_fits[r * space.bounds.memory_limits.size() + memory_limit];
  if (own.capacities < 0) return kInfinite;
  const PricedLayout& layout = space.layouts[r];
  const bool exchanges = layout.record.zero >= 2;  // during the passes: of parameters or gradients
  const auto bound_s = [&](const StepTotals& t, double enough, double* load) {
    return bound_with(space, r, own, t, times.hbm_bytes_per_s, enough, load);
  };
  if (!exchanges) return bound_s(totals, enough_s, load_s);
  const double quick_s = bound_s(totals, -kInfinite, nullptr);
  if (quick_s > enough_s) return quick_s;
  const LayoutCosts& costs = space.layout_costs[at(layout.costs)];
  return bound_s(totals_of(space, layout.record.strategy, times, &costs), enough_s, load_s);
}

double bound_of_chunks(const PlanSpaceImpl& space, std::size_t r, std::size_t memory_limit,
                       const KindTimes& times, double enough_s, unsigned* classes) {
  const LayoutFit& own =
      space.bounds.layout_fits[r * space.bounds.memory_limits.size() + memory_limit];
  const PricedLayout& layout = space.layouts[r];
  if (own.capacities < 0) return kInfinite;
  if (!InterleavedClasses::applies(space, layout)) return 0.0;
  const BlockCapacity capacity(space, layout, space.bounds.memory_limits[memory_limit]);
  const StageCapacities& stages = space.bounds.stage_capacities[at(own.capacities)];
  InterleavedClasses found(space, layout, stages, capacity, times);
  unsigned within = 0;
  const double least_s = found.least_s(enough_s / kSure, &within) * kSure;
  if (classes != nullptr) *classes = within;
  return least_s;
}

}  // namespace phaze
