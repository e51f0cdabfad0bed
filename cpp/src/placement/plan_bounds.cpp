// Times that no plan of a layout can beat. docs/search.md has the proof of each term; a test holds
// every bound against the exact time that `PlanSolver` finds.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "placement/plan_rooms.hpp"
#include "placement/stage_loads.hpp"

namespace phaze {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Sums in another order differ in their last digits; a bound must not be above what it bounds.
constexpr double kSure = 1.0 - 1e-9;

std::size_t at(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

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
  const auto m = static_cast<double>(l.micro_batches);
  LayoutBound b{};
  if (schedule_of(l) == PipelineSchedule::kInterleaved) {
    b.works = 1.0;
    b.chunk = std::floor(blocks / (p * l.vpp));
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
      b.sends_s = l.vpp * b.sends_s + 2.0 * (l.vpp - 1.0) * around_s;
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
        micro_batches_in_flight(schedule_of(l), count, count - s, l.micro_batches, l.vpp);
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
    return micro_batches_in_flight(schedule_of(l), l.stages, l.stages - s, l.micro_batches,
                                  l.vpp);
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
  std::vector<BoundLine> row_lines(rows.size(), BoundLine{0.0, 0.0});
  fitting.assign(found.size(), {});
  using Key = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int64_t>;
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
      const Key key{row.frame, l.schedule, plain && l.stages > 1 ? 0 : l.stages, l.vpp,
                    l.micro_batches};
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
          std::max(b.loads * part + b.works, static_cast<double>(l.micro_batches) * part);
      row_lines[r] = {slope, slope * b.sends_s + b.tail_s + row.exchange_s};
      const std::size_t own_list = at(l.strategy) * rooms.size() + c;
      fitting[own_list].push_back(static_cast<std::int64_t>(r));
      found[own_list].push_back(row_lines[r]);
    }
  }
  fitting_lines.assign(found.size(), {});
  for (std::size_t k = 0; k < fitting.size(); ++k) {
    std::vector<std::int64_t>& list = fitting[k];
    std::stable_sort(list.begin(), list.end(), [&](std::int64_t a, std::int64_t b) {
      return row_lines[at(a)].slope < row_lines[at(b)].slope;
    });
    for (const std::int64_t r : list) fitting_lines[k].push_back(row_lines[at(r)]);
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
  const auto m = static_cast<double>(row.layout.micro_batches);
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
  bool above = false;  // `enough_s`, whatever else there is
  const auto hold_blocks = [&](const auto& held) {
    if (b.chunk > 0.0 && row.layout.stages > 1 && t.block_s > 0.0) {
      const InterleavedStages stages(space, row, rooms, t, held);
      above = !stages.through(enough_s - after);
      if (above) return;
      filled = stages.least_s(filled);
    }
    const double longest = longest_stage(rooms, row.layout.stages, space.blocks, held);
    load = std::max(load, longest * t.block_s * kSure);
  };
  if (space.blocks > 0 && !both_ways(row.layout)) {  // two devices have half of each load
    space.some_blocks ? hold_blocks(SomeBlocks{r_share}) : hold_blocks(WholeStages{r_share});
  }
  if (above) return std::max(quick, std::nextafter(enough_s, kInfinite));
  if (load_s != nullptr) *load_s = load;
  // Of the step, all but the backward work; and that hides as much of the gradients at most.
  const double less = passes(load, std::max(b.works - 1.0, 0.0), std::max(m - p, 0.0));
  // The optimiser's time is that of the first stage, which need not be the one meant here.
  const double exposed = t.work_s - t.backward_s + less + b.sync_s +
                         (row.layout.stages == 1 ? step_s : 0.0) + row.exchange_s;
  return std::max({filled + after, passes(load, b.works, m) + after, exposed}) * kSure;
}

}  // namespace phaze
