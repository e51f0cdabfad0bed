// Times that no plan of a layout can beat. docs/search.md has the proof of each term; a test holds
// every bound against the exact time that `PlanSolver` finds.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "placement/plan_rooms.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Sums in another order differ in their last digits; a bound must not be above what it bounds.
constexpr double kSure = 1.0 - 1e-9;
constexpr double kLoose = 1.0 + 1e-9;

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

// Blocks that a stage holds with a load, in blocks that are not recomputed, where a stage
// recomputes all of its blocks or none, and one takes 1 + r.
struct WholeStages {
  double r;
  double operator()(double load, double plain, double lean) const noexcept {
    return std::max(std::min(std::floor(load * kLoose), plain),
                    std::min(std::floor(load / (1.0 + r) * kLoose), lean));
  }
};

// The same where a stage recomputes as many of its blocks as it must, and r is what it takes to
// save the bytes of one.
struct SomeBlocks {
  double r;
  double operator()(double load, double plain, double lean) const noexcept {
    const double own = load <= plain ? load : (load + r * plain) / (1.0 + r);
    return std::min(std::floor(own * kLoose), std::max(std::floor(plain), lean));
  }
};

template <typename Held>
bool all_held(const StageRooms& rooms, int stages, int blocks, double load,
              const Held& held) noexcept {
  double sum = 0.0;
  for (int s = 0; s < stages; ++s) {
    sum += held(load, rooms.plain[at(s)], rooms.lean[at(s)]);
    if (sum >= blocks) return true;
  }
  return false;
}

// The smallest load with which all stages together hold every block.
double longest_stage(const StageRooms& rooms, int stages, int blocks, WholeStages held) noexcept {
  const auto holds = [&](double load) { return all_held(rooms, stages, blocks, load, held); };
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

double longest_stage(const StageRooms& rooms, int stages, int blocks, SomeBlocks held) noexcept {
  const auto holds = [&](double load) { return all_held(rooms, stages, blocks, load, held); };
  double low = std::ceil(static_cast<double>(blocks) / stages);
  if (holds(low)) return low;
  double high = blocks * (1.0 + held.r);
  for (int step = 0; step < 12; ++step) {
    const double middle = 0.5 * (low + high);
    (holds(middle) ? high : low) = middle;
  }
  return low;
}

// The least time in which the stages of an interleaved pipeline, each with what it waits for before
// its first pass and after its last, have all blocks through; `low_s` is known already.
template <typename Held>
double interleaved_s(const PlanSpaceImpl& space, const PlanRow& row, const StageRooms& rooms,
                     const StepTotals& t, double low_s, const Held& held) noexcept {
  const LayoutRecord& l = row.layout;
  const std::vector<double>& message_s = space.frames[at(row.frame)].message_s;
  const auto m = static_cast<double>(l.microbatches);
  const double chunks = l.virtual_stages;
  const double wrap_s = (chunks - 1.0) * (l.stages == 2 ? message_s[1] : row.wrap_s);
  const double block_s = t.block_s * kLoose;  // as many blocks as in exact numbers, or more
  const auto holds = [&](double time_s) {
    double before_s = 0.0;
    double sum = 0.0;
    for (int k = 0; k < l.stages; ++k) {
      const bool last = k + 1 == l.stages;
      const double enters_s = k > 0 ? message_s[at(k)] : 0.0;
      const double leaves_s = last ? 0.0 : message_s[at(k) + 1];
      // The first chunk of all may hold a block less, where the embedding counts as one.
      const double waits_s = before_s + std::max(0.0, k * row.bound.chunk - 1.0) * t.block_s;
      double load_s = (time_s - waits_s) / m - chunks * (enters_s + leaves_s);
      if (k == 0) load_s -= t.first_s + wrap_s;
      if (last) load_s -= t.last_s + wrap_s;
      const std::size_t place = at(l.stages - 1 - k);
      if (load_s < 0.0) return false;
      sum += held(load_s / block_s * (kLoose * kLoose), rooms.plain[place], rooms.lean[place]);
      before_s += enters_s + leaves_s;
    }
    return sum >= space.blocks;
  };
  if (!(t.block_s > 0.0) || holds(low_s)) return low_s;
  double high_s = low_s * 1.125;
  for (int step = 0; step < 24 && !holds(high_s); ++step) {
    low_s = high_s;
    high_s *= 1.125;
  }
  for (int step = 0; step < 8; ++step) {
    const double middle = 0.5 * (low_s + high_s);
    (holds(middle) ? high_s : low_s) = middle;
  }
  return low_s;
}

// Load of the longest stage, were there room for all. With `whole` blocks a stage at most, so many
// places stay empty, and each end takes as many as blocks of its length would. Where that is too
// many, the longest stage has a block more, or `whole` blocks and what is left of an end.
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
  std::vector<BoundLine> kept;
  for (const BoundLine& line : lines) {
    if (kept.empty() || line.slope < kept.back().slope) kept.push_back(line);
  }
  return kept;
}

}  // namespace

LayoutBound PlanSpaceImpl::bound_of(const PlanRow& row) const {
  const LayoutRecord& l = row.layout;
  const PlanFrame& frame = frames[at(row.frame)];
  const double p = l.stages;
  const auto m = static_cast<double>(l.microbatches);
  LayoutBound b{};
  if (schedule_of(l) == PipelineSchedule::kInterleaved) {
    b.works = 1.0;
    b.chunk = std::floor(blocks / (p * l.virtual_stages));
  } else if (schedule_of(l) == PipelineSchedule::kOneForwardOneBackward) {
    const bool many = m >= p + 1.0;
    b.loads = many ? m - p - 1.0 : 0.0;
    b.works = many ? 2.0 : l.stages == 1 ? m : 1.0;
    b.early = many || l.stages == 1 ? 0.0 : p - m + 1.0;
  }
  if (static_cast<int>(schedule_of(l)) < static_cast<int>(PipelineSchedule::kZeroBubbleH1)) {
    for (int k = 1; k < l.stages; ++k) b.sends_s += 2.0 * frame.message_s[at(k)];
    if (b.chunk > 0.0) {
      const double around_s = l.stages == 2 ? frame.message_s[1] : row.wrap_s;
      b.sends_s = l.virtual_stages * b.sends_s + 2.0 * (l.virtual_stages - 1.0) * around_s;
    }
  }
  const int own = l.stages == 1 ? layers : 1;  // of several stages the first holds this at least
  double sync = 0.0;
  double shared = 0.0;
  for (int i = 0; i < own; ++i) {
    const std::size_t kind = at(kind_at(i, l.stages));
    sync += frame.sync_s[kind];
    shared += frame.shared_s[kind];
    b.step_bytes += frame.step_bytes[kind];
  }
  double all = 0.0;
  double most = 0.0;
  double least_block = kInfinite;
  for (int k = 0; k < kinds; ++k) {
    const double each = frame.sync_s[at(k)] + frame.shared_s[at(k)];
    all += (first_count[at(k)] + block_count[at(k)] + last_count[at(k)]) * each;
    most = std::max(most, each);
    if (block_count[at(k)] > 0) least_block = std::min(least_block, each);
  }
  b.tail_s = std::min(sync, frame.bucket_s) + shared;
  b.whole = std::ceil(blocks / p);
  b.missing = blocks - p * b.whole;
  b.sync_s = std::max({all / p, blocks > 0 ? b.whole * least_block : 0.0, most});
  return b;
}

StageRooms PlanSpaceImpl::rooms_of(const PlanRow& row, const RoomForBlocks& room) const {
  const LayoutRecord& l = row.layout;
  const bool shared = schedule_of(l) == PipelineSchedule::kOneForwardOneBackward && l.stages > 1;
  const int count = shared ? static_cast<int>(frames[at(row.frame)].message_s.size()) : l.stages;
  StageRooms found;
  double plain_sum = 0.0;
  double best_sum = 0.0;
  for (int s = 1; s <= count; ++s) {
    const double in_flight =
        microbatches_in_flight(schedule_of(l), count, count - s, l.microbatches, l.virtual_stages);
    const double plain = std::max(0.0, room.plain(in_flight, false, false));
    double lean = 0.0;
    for (int v = 1; v < room.variants(); ++v) {
      lean = std::max(lean, room.blocks(v, in_flight, false, false));
    }
    found.plain.push_back(plain);
    found.lean.push_back(lean);
    found.plain_sum.push_back(plain_sum += plain);
    found.best_sum.push_back(best_sum += std::max(plain, lean));
  }
  return found;
}

// Blocks that the stages of a layout have room for without recomputation leave so many that must
// be recomputed.
double PlanSpaceImpl::recomputed_blocks(const PlanRow& row, const StageRooms& stage,
                                        const RoomForBlocks& room) const {
  const LayoutRecord& l = row.layout;
  const auto in_flight = [&](int s) {
    return microbatches_in_flight(schedule_of(l), l.stages, l.stages - s, l.microbatches,
                                  l.virtual_stages);
  };
  double held = 0.0;
  if (l.stages == 1) {
    held = room.plain(in_flight(1), true, true);
  } else {
    held = room.plain(in_flight(l.stages), true, false) + room.plain(in_flight(1), false, true) +
           stage.plain_sum[at(l.stages) - 2] - stage.plain_sum[0];
  }
  return std::max(0.0, blocks - std::max(0.0, held));
}

void PlanSpaceImpl::add_bounds(std::span<const std::uint8_t> fits) {
  row_rooms.assign(rows.size() * rooms.size(), {});
  std::vector<std::vector<BoundLine>> found(strategies.size() * rooms.size());
  std::vector<double> slopes(rows.size(), 0.0);
  fitting.assign(found.size(), {});
  using Key = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;
  for (std::size_t c = 0; c < rooms.size(); ++c) {
    std::map<Key, std::int32_t> known;  // stages of a layout by 1F1B have room as any others
    // Layouts of a frame stand next to each other, and have the same room but for one stage alone.
    std::optional<RoomForBlocks> room;
    std::int32_t room_frame = -1;
    bool room_alone = false;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      PlanRow& row = rows[r];
      if (c == 0) row.bound = bound_of(row);
      if (fits[r * rooms.size() + c] == 0) continue;
      const LayoutRecord& l = row.layout;
      if (room_frame != row.frame || room_alone != (l.stages == 1)) {
        room.emplace(*this, row, rooms[c]);
        room_frame = row.frame;
        room_alone = l.stages == 1;
      }
      const bool plain = schedule_of(l) == PipelineSchedule::kOneForwardOneBackward;
      const Key key{row.frame, l.schedule, plain && l.stages > 1 ? 0 : l.stages, l.virtual_stages};
      auto at_key = known.find(key);
      if (at_key == known.end()) {
        at_key = known.emplace(key, static_cast<std::int32_t>(stage_rooms.size())).first;
        stage_rooms.push_back(rooms_of(row, *room));
      }
      const StageRooms& own = stage_rooms[at(at_key->second)];
      row_rooms[r * rooms.size() + c] = {at_key->second, recomputed_blocks(row, own, *room)};
      const LayoutBound& b = row.bound;
      const double part = 1.0 / l.stages;
      const double slope =
          std::max(b.loads * part + b.works, static_cast<double>(l.microbatches) * part);
      slopes[r] = slope;
      const std::size_t own_list = at(l.strategy) * rooms.size() + c;
      fitting[own_list].push_back(static_cast<std::int64_t>(r));
      found[own_list].push_back({slope, slope * b.sends_s + b.tail_s + row.exchange_s});
    }
  }
  for (std::vector<std::int64_t>& list : fitting) {
    std::stable_sort(list.begin(), list.end(),
                     [&](std::int64_t a, std::int64_t b) { return slopes[at(a)] < slopes[at(b)]; });
  }
  lines.clear();
  for (std::vector<BoundLine>& own : found) lines.push_back(lowest_lines(std::move(own)));
}

StepTotals totals_of(const PlanSpaceImpl& space, int strategy, const KindTimes& times) noexcept {
  StepTotals t{0.0, 0.0, kInfinite, kInfinite, 0.0, 0.0, 0.0, 0.0};
  const int variants = space.strategies[at(strategy)].variants;
  double byte_s = kInfinite;  // to save a byte by recomputation
  double least_stash = kInfinite;
  for (int k = 0; k < space.kinds; ++k) {
    const double both = times.forward_s[k] + times.plain_s[k];
    const int first = space.first_count[at(k)];
    const int last = space.last_count[at(k)];
    const int count = space.block_count[at(k)];
    t.work_s += (first + count + last) * both;
    t.backward_s += (first + count + last) * times.plain_s[k];
    t.first_s += first * both;
    t.last_s += last * both;
    if (count == 0) continue;
    t.block_s = std::min(t.block_s, both);
    t.blocks_backward_s += count * times.plain_s[k];
    if (both > 0.0) t.backward_share = std::max(t.backward_share, times.plain_s[k] / both);
    const LayerKindRecord& size = space.size_of(strategy, k);
    least_stash = std::min(least_stash, size.stash_bytes[0]);
    for (int v = 1; v < variants; ++v) {
      const double own = times.backward_s[at(v) * at(space.kinds) + at(k)];
      t.again_s = std::min(t.again_s, own - times.plain_s[k]);
      const double saved = size.stash_bytes[0] - size.stash_bytes[v];
      if (saved > 0.0) byte_s = std::min(byte_s, std::max(0.0, own - times.backward_s[k]) / saved);
    }
  }
  if (space.some_blocks) t.again_s = byte_s * least_stash;
  if (!std::isfinite(t.block_s)) t.block_s = 0.0;
  if (!std::isfinite(t.again_s)) t.again_s = 0.0;
  return t;
}

double bound_of_row(const PlanSpaceImpl& space, std::size_t r, std::size_t room,
                    const StepTotals& t, double hbm_bytes_per_s, double enough_s,
                    double* load_s) noexcept {
  const LayoutRoom& own = space.row_rooms[r * space.rooms.size() + room];
  if (own.rooms < 0) return kInfinite;
  const PlanRow& row = space.rows[r];
  const LayoutBound& b = row.bound;
  const double p = row.layout.stages;
  const auto m = static_cast<double>(row.layout.microbatches);
  const double work = t.work_s + own.recomputed * t.again_s + b.sends_s;
  const double step_s = b.step_bytes / hbm_bytes_per_s;
  // Fewer micro-batches than stages: those stages that m others follow add their backward work for
  // every micro-batch, the rest all of their work (docs/search.md, 2).
  const double backs_s =
      b.early > 0.0 ? (m - 1.0) * t.blocks_backward_s / (b.early + t.backward_share * (m - 1.0))
                    : 0.0;
  const auto passes = [&](double load, double works, double rounds) {
    return std::max(b.loads * load + works * work + backs_s, rounds * load);
  };
  double load = work / p;
  const double after = b.tail_s + step_s + row.exchange_s;
  // A stage waits for the first chunks of those before it, on average for half of them all.
  double filled = m * work / p;
  if (b.chunk > 0.0) {
    filled += std::max(0.0, 0.5 * (p - 1.0) * b.chunk - (p - 1.0) / p) * t.block_s;
  }
  const double quick = (std::max(filled, passes(load, b.works, m)) + after) * kSure;
  if (quick > enough_s) return quick;
  // A folded pipeline has both ends on its first stage.
  if (row.layout.schedule <= static_cast<std::int32_t>(PipelineSchedule::kZeroBubbleH2)) {
    load = std::max(load, load_with_ends(b, t));
  }
  const StageRooms& rooms = space.stage_rooms[at(own.rooms)];
  const double r_share = (t.block_s > 0.0 ? std::max(0.0, t.again_s / t.block_s) : 0.0) * kSure;
  if (space.blocks > 0 && !both_ways(row.layout)) {  // two devices have half of each load
    const int stages = row.layout.stages;
    const double longest = space.some_blocks
                               ? longest_stage(rooms, stages, space.blocks, SomeBlocks{r_share})
                               : longest_stage(rooms, stages, space.blocks, WholeStages{r_share});
    load = std::max(load, longest * t.block_s * kSure);
    if (b.chunk > 0.0 && stages > 1) {
      filled = space.some_blocks
                   ? interleaved_s(space, row, rooms, t, filled, SomeBlocks{r_share})
                   : interleaved_s(space, row, rooms, t, filled, WholeStages{r_share});
    }
  }
  if (load_s != nullptr) *load_s = load;
  // Of the step, all but the backward work; and that hides as much of the gradients at most.
  const double less = passes(load, std::max(b.works - 1.0, 0.0), std::max(m - p, 0.0));
  // The optimiser's time is that of the first stage, which need not be the one meant here.
  const double exposed = t.work_s - t.backward_s + less + b.sync_s +
                         (row.layout.stages == 1 ? step_s : 0.0) + row.exchange_s;
  return std::max({filled + after, passes(load, b.works, m) + after, exposed}) * kSure;
}

}  // namespace phaze
