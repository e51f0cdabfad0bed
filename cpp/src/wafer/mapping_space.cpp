// What a mapping may choose from: the tables of a problem, and its legal operator mappings.
#include <algorithm>
#include <bit>

#include "phaze/mapping.hpp"

namespace phaze {
namespace {

constexpr auto kAt = [](auto i) { return static_cast<std::size_t>(i); };

}  // namespace

Mapping::Mapping(const MapProblem& p)
    : slots_(p.slots.begin(), p.slots.end()),
      ops_(p.ops.begin(), p.ops.end()),
      edges_(p.edges.begin(), p.edges.end()),
      rules_(p.rules),
      column_(p.column.begin(), p.column.end()),
      divisors_(p.divisors.size()),
      columns_(kAt(p.columns)),
      forward_s_(p.tables.forward_s.begin(), p.tables.forward_s.end()),
      backward_s_(p.tables.backward_s.begin(), p.tables.backward_s.end()),
      stash_bytes_(p.tables.stash_bytes.begin(), p.tables.stash_bytes.end()),
      live_bytes_(p.tables.live_bytes.begin(), p.tables.live_bytes.end()),
      parameters_(p.tables.parameters.begin(), p.tables.parameters.end()),
      weight_grad_s_(p.tables.weight_grad_s.begin(), p.tables.weight_grad_s.end()),
      blocks_(p.blocks.begin(), p.blocks.end()),
      boundary_(p.boundary_s.begin(), p.boundary_s.end()),
      cross_stage_s_(p.cross_stage_s.begin(), p.cross_stage_s.end()),
      link_s_(p.rules.stream_link_s),
      both_s_(p.rules.stream_both_s),
      chain_(p.chain.begin(), p.chain.end()),
      last_(p.chain.back()),
      entry_(p.chain.back()) {
  const MeshLinks links{{rules_.x_bytes_per_s, rules_.y_bytes_per_s},
                        rules_.hop_s,
                        static_cast<MeshFabric>(rules_.fabric)};
  reduce_line_ = mesh_reduce_line(links);
  for (int k = 0; k < stages(); ++k) flights_.push_back(flight(k));
  if (!cross_stage_s_.empty()) {  // every stage as the one of these that stands worst
    link_s_ = both_s_ = 0.0;
    for (int k = rules_.first_stage; k < rules_.first_stage + stages(); ++k) {
      const double* own = &cross_stage_s_[kAt(k) * kAt(pipeline_stages() + 1) * 2];
      link_s_ = std::max(link_s_, own[0]);
      both_s_ = std::max(both_s_, own[1]);
    }
  }
  const std::size_t sets = std::size_t{1} << slots_.size();
  sizes_.resize(sets);
  gather_lines_.resize(sets);
  exchange_lines_.resize(sets);
  for (std::size_t set = 0; set < sets; ++set) {
    std::vector<MeshRun> runs;  // neighbouring slots of one axis are one run
    double product = 1.0;
    for (std::size_t k = 0; k < slots_.size(); ++k) {
      if ((set >> k & 1) == 0) continue;
      const MeshRun& slot = slots_[k];
      product *= slot.size;
      if (!runs.empty() && runs.back().axis == slot.axis &&
          runs.back().stride * runs.back().size == slot.stride) {
        runs.back().size *= slot.size;
      } else {
        runs.push_back(slot);
      }
    }
    sizes_[set] = product;
    gather_lines_[set] = mesh_gather_lines(runs, links);
    exchange_lines_[set] = mesh_exchange_line(runs, links);
  }
  for (const MapEdgeRecord& entry : edges_) {
    if (entry.kind != static_cast<int>(EdgeKind::kEntry)) continue;
    for (const MapEdgeRecord& wrap : edges_) {
      if (wrap.kind == static_cast<int>(EdgeKind::kWrap) && wrap.to == entry.to) entry_ = wrap.from;
    }
  }
  position_.assign(kAt(p.divisors.back()) + 1, -1);
  for (std::size_t i = 0; i < divisors_; ++i) position_[kAt(p.divisors[i])] = static_cast<int>(i);
  for (const MapEdgeRecord& edge : edges_) {
    auto same = std::find_if(fans_.begin(), fans_.end(), [&](const FanShape& f) {
      return f.from == edge.from && f.kind == edge.kind;
    });
    if (same == fans_.end()) {
      fans_.push_back({edge.from, edge.kind, edge.bytes, {}, {}});
      same = fans_.end() - 1;
    }
    // The next of the chain pays first where consumers share: the relaxation prices it alone.
    const auto at = std::find(chain_.begin(), chain_.end(), edge.from);
    const bool next = at != chain_.end() && at + 1 != chain_.end() && *(at + 1) == edge.to &&
                      edge.kind == static_cast<int>(EdgeKind::kInside);
    same->to.insert(next ? same->to.begin() : same->to.end(), edge.to);
    same->again.insert(next ? same->again.begin() : same->again.end(), edge.again != 0);
  }
  fans_of_.resize(ops_.size());
  for (std::size_t f = 0; f < fans_.size(); ++f) {
    std::vector<std::int32_t> touched = fans_[f].to;
    touched.push_back(fans_[f].from);
    // The tensor that enters a block lies as the block before leaves it.
    if (fans_[f].kind == static_cast<int>(EdgeKind::kEntry)) touched.push_back(entry_);
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    for (const std::int32_t op : touched) fans_of_[kAt(op)].push_back(static_cast<int>(f));
  }
  forced_.resize(ops_.size());
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    std::vector<std::int32_t>& found = forced_[i];
    std::vector<std::int32_t> open{static_cast<std::int32_t>(i)};
    if (ops_[i].kept == 0) open.clear();  // a mask comes from its seed, statistics with the output
    while (!open.empty()) {
      const std::int32_t at = open.back();
      open.pop_back();
      for (const MapEdgeRecord& edge : edges_) {
        if (edge.kind != 0 || edge.to != at || ops_[kAt(edge.from)].part != 1) continue;
        if (ops_[kAt(edge.from)].kept != 0 ||
            std::find(found.begin(), found.end(), edge.from) != found.end())
          continue;
        found.push_back(edge.from);
        open.push_back(edge.from);
      }
    }
    std::sort(found.begin(), found.end());
  }
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    const auto row = parameters_.begin() + static_cast<std::ptrdiff_t>(i * columns_);
    const bool any = std::any_of(row, row + static_cast<std::ptrdiff_t>(columns_),
                                 [](double count) { return count > 0.0; });
    weighted_.push_back(any ? 1 : 0);
  }
  // No proposal has more changes, so that none of them runs out of memory half way.
  proposed_.op_mappings.reserve(4 * ops_.size());
  proposed_.nodes.reserve(4 * ops_.size());
  proposed_.touched.reserve(4 * ops_.size());
  proposed_.fans.reserve(fans_.size());
  proposed_.seen.reserve(fans_.size());
  choices_.resize(ops_.size());
  for (int i = 0; i < ops(); ++i) enumerate(i);
}

bool Mapping::legal(int op, const OpMapping& op_mapping) const noexcept {
  const MapOpRecord& record = ops_[kAt(op)];
  const unsigned all = (1U << slots_.size()) - 1U;
  unsigned seen = 0;
  for (int r = 0; r < kRoleCount; ++r) {
    const unsigned mask = op_mapping.slots[kAt(r)];
    if ((mask & seen) != 0 || (mask & ~all) != 0) return false;
    seen |= mask;
    if (mask == 0) continue;
    if ((record.roles >> r & 1) == 0) return false;
    if (r < 4 && size(static_cast<std::uint16_t>(mask)) > static_cast<double>(record.limit[r])) {
      return false;
    }
  }
  if (seen != all || op_mapping.mode >= kWeightModeCount ||
      op_mapping.algorithm >= kMeshAlgorithmCount) {
    return false;
  }
  if ((rules_.modes >> op_mapping.mode & 1) == 0) return false;
  int changes[2] = {0, 0};
  for (std::size_t k = 1; k < slots_.size(); ++k) {
    if (slots_[k].axis != slots_[k - 1].axis) continue;
    for (const std::uint16_t mask : op_mapping.slots) {
      if ((mask >> (k - 1) & 1) != 0 && (mask >> k & 1) == 0) ++changes[slots_[k].axis];
    }
  }
  if (changes[0] >= kRunsPerAxis || changes[1] >= kRunsPerAxis) return false;
  if (rules_.linear == 0) return true;
  constexpr int kRank[kRoleCount] = {2, 1, 0, 0, 1};
  int rank = 0;
  for (std::size_t k = 0; k < slots_.size(); ++k) {
    for (std::size_t r = 0; r < kRoleCount; ++r) {
      if ((op_mapping.slots[r] >> k & 1) == 0) continue;
      if (kRank[r] < rank) return false;
      rank = kRank[r];
    }
  }
  return true;
}

void Mapping::enumerate(int op) {
  // Per axis: every way to give each slot a role with few enough changes from the inside out.
  using Pattern = std::array<std::uint16_t, kRoleCount>;
  const auto patterns = [&](int axis) {
    std::vector<std::pair<Pattern, std::pair<int, int>>> open{{Pattern{}, {-1, 0}}};
    for (std::size_t k = 0; k < slots_.size(); ++k) {
      if (slots_[k].axis != axis) continue;
      std::vector<std::pair<Pattern, std::pair<int, int>>> longer;
      for (const auto& [pattern, last] : open) {
        for (int role = 0; role < kRoleCount; ++role) {
          const int runs = last.second + (role != last.first ? 1 : 0);
          if (runs > kRunsPerAxis) continue;
          Pattern next = pattern;
          next[kAt(role)] = static_cast<std::uint16_t>(next[kAt(role)] | 1U << k);
          longer.push_back({next, {role, runs}});
        }
      }
      open = std::move(longer);
    }
    std::vector<Pattern> found;
    for (const auto& [pattern, last] : open) found.push_back(pattern);
    return found;
  };
  const auto along_x = patterns(0), along_y = patterns(1);
  for (const auto& x : along_x) {
    for (const auto& y : along_y) {
      OpMapping op_mapping{{}, static_cast<std::uint8_t>(std::countr_zero(kAt(rules_.modes))), 0};
      for (std::size_t r = 0; r < kRoleCount; ++r) {
        op_mapping.slots[r] = static_cast<std::uint16_t>(x[r] | y[r]);
      }
      if (legal(op, op_mapping)) choices_[kAt(op)].push_back(op_mapping);
    }
  }
}

}  // namespace phaze
