#include "phaze/mapping_search.hpp"

#include <algorithm>
#include <cmath>

#include "base/numbers.hpp"

namespace phaze {
namespace {

class Numbers {  // splitmix64: the same numbers on every machine
 public:
  explicit Numbers(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int below(int limit) noexcept {
    return static_cast<int>((next() >> 33) % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_;
};

constexpr double kShortage = 4.0;      // penalty, in step times, of missing one die's memory
constexpr double kNeverSoLong = 1e18;  // seconds: any mapping that fits is below this

// Every mapping that fits is better than every mapping that does not.
double shortage(double best) noexcept { return best < kNeverSoLong ? kInfinite : 0.0; }

std::vector<OpMapping> op_mappings_of(const Mapping& mapping) {
  std::vector<OpMapping> op_mappings;
  for (int i = 0; i < mapping.ops(); ++i) op_mappings.push_back(mapping.op_mapping(i));
  return op_mappings;
}

bool same_slots(const OpMapping& a, const OpMapping& b) noexcept { return a.slots == b.slots; }

// Proposes changes of one to a few operators, each of them legal.
class Mover {
 public:
  Mover(Mapping& mapping, std::uint64_t seed) : mapping_(mapping), numbers_(seed) {
    for (int w = 0; w < kWeightModeCount; ++w) {
      if ((mapping.rules().modes >> w & 1) != 0) modes_.push_back(static_cast<std::uint8_t>(w));
    }
    for (const MapEdgeRecord& edge : mapping.edges()) {
      if (edge.kind != static_cast<int>(EdgeKind::kEntry)) edges_.push_back(edge);
    }
  }

  // Changes the mapping; withdraw() reverts it, keep() does not. Returns false if the score is
  // unchanged.
  bool propose() {
    choose();
    return mapping_.settle();
  }

 private:
  void choose() {
    const int kind = numbers_.below(16);
    if (kind < 5) {
      draw_mapping(numbers_.below(mapping_.ops()));
    } else if (kind < 8) {
      follow(1);
    } else if (kind < 11) {
      const int op = numbers_.below(mapping_.ops());
      draw_mapping(op);
      spread(op, 1 + numbers_.below(mapping_.ops()));
    } else if (kind < 13 && modes_.size() > 1) {
      const int op = numbers_.below(mapping_.ops());  // drawn first, in a fixed order
      keep(op, modes_[at(numbers_.below(size(modes_)))]);
    } else if (kind < 14 && modes_.size() > 1) {
      const std::uint8_t mode = modes_[at(numbers_.below(size(modes_)))];
      for (int i = 0; i < mapping_.ops(); ++i) keep(i, mode);
    } else {
      exchange_slots();
    }
  }

  static int size(const std::vector<std::uint8_t>& v) { return static_cast<int>(v.size()); }

  void set(int op, const OpMapping& op_mapping) {
    const OpMapping& now = mapping_.op_mapping(op);
    if (same_slots(now, op_mapping) && now.mode == op_mapping.mode) return;
    mapping_.propose(op, op_mapping);
  }

  void draw_mapping(int op) {
    const std::vector<OpMapping>& choices = mapping_.choices(op);
    OpMapping op_mapping = choices[at(numbers_.below(static_cast<int>(choices.size())))];
    op_mapping.mode = mapping_.op_mapping(op).mode;
    op_mapping.algorithm = mapping_.op_mapping(op).algorithm;
    set(op, op_mapping);
  }

  void keep(int op, std::uint8_t mode) {
    OpMapping op_mapping = mapping_.op_mapping(op);
    op_mapping.mode = mode;
    set(op, op_mapping);
  }

  // Gives one operator of an edge the slots with which the other operator splits the tensor.
  bool align(const MapEdgeRecord& edge, bool forward) {
    const int of = forward ? edge.to : edge.from;
    const OpMapping& other = mapping_.op_mapping(forward ? edge.from : edge.to);
    const bool mine = mapping_.op(of).product != 0;
    const bool theirs = mapping_.op(forward ? edge.from : edge.to).product != 0;
    OpMapping op_mapping = mapping_.op_mapping(of);
    op_mapping.slots = {other.slots[0], other.slots[1], 0, 0, 0};
    if (forward) {  // features split as produced, the rest not split
      const std::uint16_t features = other.slots[2];
      const auto rest = static_cast<std::uint16_t>(other.slots[3] | other.slots[4]);
      op_mapping.slots[mine ? 3 : 2] = features;
      op_mapping.slots[mine ? 2 : 4] = rest;
    } else {
      const std::uint16_t features = other.slots[theirs ? 3 : 2];
      const auto rest = static_cast<std::uint16_t>(other.slots[theirs ? 2 : 3] | other.slots[4]);
      op_mapping.slots[2] = features;
      op_mapping.slots[mine ? 3 : 4] = rest;
    }
    if (!mapping_.legal(of, op_mapping)) return false;
    set(of, op_mapping);
    return true;
  }

  void follow(int times) {
    for (int t = 0; t < times && !edges_.empty(); ++t) {
      const MapEdgeRecord& edge = edges_[at(numbers_.below(static_cast<int>(edges_.size())))];
      align(edge, numbers_.below(2) == 0);
    }
  }

  // Aligns the successors of an operator, up to `most` edges.
  void spread(int op, int most) {
    std::uint64_t reached = std::uint64_t{1} << op;
    for (const MapEdgeRecord& edge : edges_) {
      if (most == 0) return;
      const bool from = (reached >> edge.from & 1) != 0, to = (reached >> edge.to & 1) != 0;
      if (!from || to || edge.kind == static_cast<int>(EdgeKind::kWrap)) continue;
      if (align(edge, true)) {
        reached |= std::uint64_t{1} << edge.to;
        --most;
      }
    }
  }

  // Exchanges two slots in every operator that allows it.
  void exchange_slots() {
    if (mapping_.slots() < 2) return;
    const int a = numbers_.below(mapping_.slots()), b = numbers_.below(mapping_.slots());
    if (a == b) return;
    for (int i = 0; i < mapping_.ops(); ++i) {
      OpMapping op_mapping = mapping_.op_mapping(i);
      for (std::uint16_t& mask : op_mapping.slots) {
        const unsigned had_a = mask >> a & 1U, had_b = mask >> b & 1U;
        const unsigned rest = mask & ~(1U << a) & ~(1U << b);
        mask = static_cast<std::uint16_t>(rest | had_a << b | had_b << a);
      }
      if (mapping_.legal(i, op_mapping)) set(i, op_mapping);
    }
  }

  Mapping& mapping_;
  Numbers numbers_;
  std::vector<std::uint8_t> modes_;
  std::vector<MapEdgeRecord> edges_;
};

}  // namespace

double objective(const Mapping& mapping, const MapScore& score) noexcept {
  const double over = score.over_bytes + score.stream_over_bytes;
  if (!(over > 0.0)) return score.time_s;
  return kNeverSoLong * (1.0 + over / mapping.rules().capacity_bytes);
}

namespace {

// Objective of threshold accepting, finite for mappings that exceed the memory slightly.
double soft_objective(const Mapping& mapping, const MapScore& score) noexcept {
  const double over = score.over_bytes + score.stream_over_bytes;
  return score.time_s * (1.0 + kShortage * over / mapping.rules().capacity_bytes);
}

// Current state of the search: the step time of its mapping, exact or as a range.
struct Now {
  MapRange takes;

  bool exact() const noexcept { return takes.least_s == takes.most_s; }
  void set(double seconds) noexcept { takes.least_s = takes.most_s = seconds; }
};

// Computes the exact objective of the mapping before the proposal, and repeats the proposal.
double exactly_before(Mapping& mapping) {
  const std::vector<OpMapping> proposed = op_mappings_of(mapping);
  mapping.withdraw();
  const double before = soft_objective(mapping, mapping.score());
  for (int i = 0; i < mapping.ops(); ++i) {
    const OpMapping& now = mapping.op_mapping(i);
    const OpMapping& then = proposed[at(i)];
    if (!same_slots(now, then) || now.mode != then.mode) mapping.propose(i, then);
  }
  mapping.settle();
  return before;
}

}  // namespace

MapSearchResult anneal(Mapping& mapping, const MapSearchRules& rules) {
  MapScore score = mapping.score();
  double best = objective(mapping, score);
  Now now{};
  now.set(soft_objective(mapping, score));
  MapSearchResult result{op_mappings_of(mapping), score, 1};
  Mover mover(mapping, rules.seed);
  for (std::int64_t step = 0; step < rules.steps; ++step) {
    const double left = 1.0 - static_cast<double>(step) / static_cast<double>(rules.steps);
    const double accepted = 1.0 + rules.start * left * left;
    const bool differs = mover.propose();
    ++result.evaluations;
    if (!differs) {
      mapping.keep();
      continue;
    }
    // No exact time is needed for a proposal that is accepted in any case and not a new best.
    MapRange range{best, now.takes.least_s * accepted, now.takes.again};
    const double limit = now.takes.most_s * accepted;  // the objective is no less than the time
    score = mapping.score({}, nullptr, limit, kShortage, &range);
    if (std::isnan(score.time_s)) {
      mapping.keep();
      now.takes = range;
      continue;
    }
    const double next = soft_objective(mapping, score);
    if (next <= limit && !(next <= now.takes.least_s * accepted) && !now.exact()) {
      now.set(exactly_before(mapping));
    }
    if (!(next <= now.takes.most_s * accepted)) {
      mapping.withdraw();
      continue;
    }
    mapping.keep();
    now.set(next);
    now.takes.again = range.again;
    const double value = objective(mapping, score);
    if (value < best) {
      best = value;
      result.op_mappings = op_mappings_of(mapping);
      result.score = score;
    }
  }
  mapping.assign(result.op_mappings);
  return result;
}

MapSearchResult descend(Mapping& mapping, int rounds) {
  MapScore score = mapping.score();
  double best = objective(mapping, score);
  MapSearchResult result{{}, score, 1};
  for (int round = 0; round < rounds; ++round) {
    bool better = false;
    for (int op = 0; op < mapping.ops(); ++op) {
      OpMapping best_choice = mapping.op_mapping(op);
      for (int w = 0; w < kWeightModeCount; ++w) {
        if ((mapping.rules().modes >> w & 1) == 0) continue;
        if (w != best_choice.mode && !(mapping.node(op, best_choice).state_bytes +
                                           mapping.node(op, best_choice).stream_bytes >
                                       0.0)) {
          continue;
        }
        for (const OpMapping& choice : mapping.choices(op)) {
          OpMapping op_mapping = choice;
          op_mapping.mode = static_cast<std::uint8_t>(w);
          op_mapping.algorithm = best_choice.algorithm;
          mapping.change(op, op_mapping);
          const MapScore tried = mapping.score({}, nullptr, best, shortage(best));
          ++result.evaluations;
          const double value = objective(mapping, tried);
          if (value < best) {
            best = value;
            score = tried;
            best_choice = op_mapping;
            better = true;
          }
        }
      }
      mapping.change(op, best_choice);
    }
    if (!better) break;
  }
  result.op_mappings = op_mappings_of(mapping);
  result.score = score;
  return result;
}

double ways(const Mapping& mapping) noexcept {
  double count = 1.0;
  int modes = 0;
  for (int w = 0; w < kWeightModeCount; ++w) modes += mapping.rules().modes >> w & 1;
  for (int op = 0; op < mapping.ops(); ++op) {
    count *= static_cast<double>(mapping.choices(op).size()) *
             static_cast<double>(mapping.weighted(op) ? modes : 1);
  }
  return count;
}

MapSearchResult exhaust(Mapping& mapping) {
  std::vector<std::vector<OpMapping>> options(at(mapping.ops()));
  for (int op = 0; op < mapping.ops(); ++op) {
    const bool any = mapping.weighted(op);
    for (const OpMapping& choice : mapping.choices(op)) {
      for (std::uint8_t w = 0; w < kWeightModeCount; ++w) {
        if ((mapping.rules().modes >> w & 1) == 0) continue;
        OpMapping op_mapping = choice;
        op_mapping.mode = any ? w : choice.mode;
        options[at(op)].push_back(op_mapping);
        if (!any) break;
      }
    }
    mapping.change(op, options[at(op)][0]);
  }
  MapSearchResult result{op_mappings_of(mapping), mapping.score(), 1};
  double best = objective(mapping, result.score);
  std::vector<std::size_t> at(options.size(), 0);
  for (;;) {
    std::size_t op = 0;
    while (op < at.size() && ++at[op] == options[op].size()) {
      at[op] = 0;
      mapping.change(static_cast<int>(op), options[op][0]);
      ++op;
    }
    if (op == at.size()) break;
    mapping.change(static_cast<int>(op), options[op][at[op]]);
    const MapScore score = mapping.score({}, nullptr, best, shortage(best));
    ++result.evaluations;
    const double value = objective(mapping, score);
    if (!(value < best)) continue;
    best = value;
    result.score = score;
    result.op_mappings = op_mappings_of(mapping);
  }
  mapping.assign(result.op_mappings);
  return result;
}

namespace {

// Bytes of one operator in one stage under one operator mapping, and seconds to break ties.
struct OpMemory {
  double bytes;                       // of the terms that are sums over operators
  double live_bytes, gathered_bytes;  // of the terms that are maxima
  double work_s;
  OpMapping op_mapping;
};

// Whether stage k needs no more memory than stage j under any mapping; of equal stages the first
// one needs more.
bool needs_less(const Mapping& mapping, int k, int j) noexcept {
  const auto at_most = [&](int a, int b) {
    return mapping.is_first(a) <= mapping.is_first(b) && mapping.is_last(a) <= mapping.is_last(b) &&
           mapping.blocks()[at(a)] <= mapping.blocks()[at(b)] &&
           mapping.flight(a) <= mapping.flight(b);
  };
  return at_most(k, j) && (j < k || !at_most(j, k));
}

OpMemory memory_of(const Mapping& mapping, int k, int op, const OpMapping& op_mapping,
                   double off_wafer) noexcept {
  const MapNode n = mapping.node(op, op_mapping);
  const MapOpRecord& record = mapping.op(op);
  const double work_s = n.forward_s + n.backward_s + n.blocking_f_s + n.blocking_b_s +
                        std::max(n.hidden_f_s + n.hidden_b_s, n.stream_s);
  OpMemory found{n.state_bytes + off_wafer * n.stream_bytes, n.live_bytes, 2.0 * n.gathered_bytes,
                 work_s, op_mapping};
  if (record.part != 1) {
    found.bytes += mapping.flight(k) * n.stash_bytes;
    return found;
  }
  const double stashes = mapping.flight(k) * mapping.blocks()[at(k)];
  const bool again = (record.outputs >> static_cast<int>(Output::kRecompute) & 1) != 0;
  const bool out = (record.outputs >> static_cast<int>(Output::kOffload) & 1) != 0 &&
                   mapping.rules().stream_capacity_bytes > 0.0;
  double copies = stashes;  // of the output
  if (again) copies = std::min(copies, 1.0);
  if (out) copies = std::min(copies, 1.0 + off_wafer * stashes);
  found.bytes = mapping.blocks()[at(k)] * found.bytes + copies * n.stash_bytes;
  return found;
}

// The operator mappings of one operator that are non-dominated in the terms of memory, by bytes.
std::vector<OpMemory> non_dominated(const Mapping& mapping, int k, int op, double off_wafer) {
  std::vector<OpMemory> every, front;
  for (OpMapping op_mapping : mapping.choices(op)) {
    for (std::uint8_t w = 0; w < kWeightModeCount; ++w) {
      if ((mapping.rules().modes >> w & 1) == 0) continue;
      op_mapping.mode = w;
      every.push_back(memory_of(mapping, k, op, op_mapping, off_wafer));
      if (!mapping.weighted(op)) break;
    }
  }
  std::stable_sort(every.begin(), every.end(), [](const OpMemory& a, const OpMemory& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.work_s < b.work_s;
  });
  for (const OpMemory& one : every) {
    const bool worse = std::any_of(front.begin(), front.end(), [&](const OpMemory& other) {
      return other.live_bytes <= one.live_bytes && other.gathered_bytes <= one.gathered_bytes;
    });
    if (!worse) front.push_back(one);
  }
  return front;
}

// The values of a term that is a maximum over operators, rising, from the least that all can meet.
std::vector<double> limits_of(const std::vector<std::vector<OpMemory>>& fronts,
                              double OpMemory::* term) {
  double least = 0.0;
  std::vector<double> limits;
  for (const std::vector<OpMemory>& front : fronts) {
    double own = kInfinite;
    for (const OpMemory& one : front) {
      own = std::min(own, one.*term);
      limits.push_back(one.*term);
    }
    least = std::max(least, front.empty() ? 0.0 : own);
  }
  std::erase_if(limits, [&](double limit) { return limit < least; });
  std::sort(limits.begin(), limits.end());
  limits.erase(std::unique(limits.begin(), limits.end()), limits.end());
  return limits;
}

// The least memory of one stage.
MapMemory least_memory_of(const Mapping& mapping, int k, double off_wafer) {
  MapMemory found{kInfinite, {}};
  std::vector<std::vector<OpMemory>> fronts;  // of operators in other stages: empty
  for (int op = 0; op < mapping.ops(); ++op) {
    const int part = mapping.op(op).part;
    const bool here = part == 0   ? mapping.is_first(k)
                      : part == 2 ? mapping.is_last(k)
                                  : mapping.blocks()[at(k)] > 0;
    fronts.push_back(non_dominated(mapping, here ? k : 0, op, off_wafer));
    found.op_mappings.push_back(fronts.back()[0].op_mapping);
    if (!here) fronts.back().clear();
  }
  const std::vector<double> gathers = limits_of(fronts, &OpMemory::gathered_bytes);
  for (const double live : limits_of(fronts, &OpMemory::live_bytes)) {
    for (const double gathered : gathers) {
      double bytes = live + gathered;
      std::vector<const OpMemory*> chosen;
      for (const std::vector<OpMemory>& front : fronts) {
        const auto first = std::find_if(front.begin(), front.end(), [&](const OpMemory& one) {
          return one.live_bytes <= live && one.gathered_bytes <= gathered;
        });
        chosen.push_back(first == front.end() ? nullptr : &*first);
        if (first != front.end()) bytes += first->bytes;
        if (first == front.end() && !front.empty()) bytes = kInfinite;
        if (bytes >= found.bytes) break;
      }
      if (bytes >= found.bytes) continue;
      found.bytes = bytes;
      for (std::size_t op = 0; op < chosen.size(); ++op) {
        if (chosen[op] != nullptr) found.op_mappings[op] = chosen[op]->op_mapping;
      }
    }
  }
  return found;
}

}  // namespace

MapMemory least_memory(const Mapping& mapping, double off_wafer) {
  MapMemory fullest{-1.0, {}}, first, last;
  for (int k = 0; k < mapping.stages(); ++k) {
    bool less = false;
    for (int j = 0; j < mapping.stages() && !less; ++j) less = j != k && needs_less(mapping, k, j);
    if (less) continue;
    MapMemory stage = least_memory_of(mapping, k, off_wafer);
    if (mapping.is_first(k)) first = stage;
    if (mapping.is_last(k)) last = stage;
    if (stage.bytes > fullest.bytes) fullest = std::move(stage);
  }
  for (int op = 0; op < mapping.ops(); ++op) {  // boundary layers lie in these stages only
    const int part = mapping.op(op).part;
    if (part == 0 && !first.op_mappings.empty()) {
      fullest.op_mappings[at(op)] = first.op_mappings[at(op)];
    }
    if (part == 2 && !last.op_mappings.empty()) {
      fullest.op_mappings[at(op)] = last.op_mappings[at(op)];
    }
  }
  return fullest;
}

}  // namespace phaze
