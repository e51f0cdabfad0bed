#include "arrays.hpp"
#include "phaze/parallel.hpp"
#include "phaze/plan.hpp"
#include "plan_arrays.hpp"

namespace phaze::bindings {
namespace {

class PyPlanSpace {
 public:
  PyPlanSpace(const py::object& fabric, std::int64_t devices, const py::object& training,
              std::int32_t kinds, const py::object& order, const py::object& edges,
              const py::object& tied, const py::object& strategies, const py::object& sizes,
              const py::object& layouts, const py::object& rooms, const py::object& fits,
              bool some_blocks) {
    const Pairs edge(view<std::int32_t>(edges, "edges"));
    const Pairs tie(view<std::int32_t>(tied, "tied"));
    const PlanProblem problem{view<FabricRecord>(fabric, "fabric", 1)[0],
                              devices,
                              view<TrainingRecord>(training, "training", 1)[0],
                              kinds,
                              view<std::int32_t>(order, "order"),
                              edge.from,
                              edge.to,
                              tie.from,
                              tie.to,
                              view<StrategyRecord>(strategies, "strategies"),
                              view<LayerKindRecord>(sizes, "sizes"),
                              view<LayoutRecord>(layouts, "layouts"),
                              some_blocks};
    const auto room = view<double>(rooms, "rooms");
    const auto may = view<std::uint8_t>(fits, "fits");
    const Status status = [&] {
      const py::gil_scoped_release release;
      return space_.build(problem, room, may);
    }();
    if (status != Status::kOk) throw InvalidInput(std::string("plan: ") + sentence(status));
  }

  std::size_t layouts() const { return space_.layouts(); }

  // What even partitions take: one row of estimates per layout.
  py::array_t<PlanEstimate> estimate_even(const py::object& times, const py::object& layout,
                                          const py::object& variant, double room_bytes,
                                          const py::object& free, int threads) const {
    const TimesView timed = by_strategy(times);
    const std::vector<TimesView> freed = levels(free, space_.strategies());
    std::vector<PlanSpace::TimesOf> free_of;
    for (const TimesView& level : freed) {
      free_of.push_back([&level](std::size_t s) { return level[s]; });
    }
    const auto at = view<std::int64_t>(layout, "layout");
    const auto chosen = view<std::int32_t>(variant, "variant", static_cast<py::ssize_t>(at.size()));
    for (std::size_t k = 0; k < at.size(); ++k) row_of(at[k]);
    const int workers = checked_threads(threads);
    py::array_t<PlanEstimate> found(static_cast<py::ssize_t>(at.size()));
    const std::span<PlanEstimate> out = writable(found);
    {
      const py::gil_scoped_release release;
      parallel_for(at.size(), workers, 256, [&](std::size_t begin, std::size_t end) {
        space_.estimate_even(
            at.subspan(begin, end - begin), chosen.subspan(begin, end - begin),
            [&](std::size_t s) { return timed[s]; }, free_of, room_bytes,
            out.subspan(begin, end - begin));
      });
    }
    return freeze(std::move(found));
  }

  // One plan in full: its estimate and its stages. `times` have a row per strategy or, as
  // `free`, the row of the plan's own.
  py::tuple estimate(const py::object& times, std::int64_t layout, const py::object& cuts,
                     const py::object& variants, double room_bytes, const py::object& free) const {
    const TimesView timed(times, space_.kinds(), "times");
    const std::size_t row = row_of(layout);
    const bool one = timed.rows() == 1;
    if (!one && timed.rows() != space_.strategies()) throw InvalidInput("times: expected one row");
    const KindTimes own = timed[one ? 0 : static_cast<std::size_t>(space_.layout(row).strategy)];
    const Partition partition = partition_of(row, cuts, variants);
    std::vector<KindTimes> freed;
    for (const TimesView& level : levels(free, 1)) freed.push_back(level[0]);
    std::vector<StageEstimate> stages;
    py::array_t<PlanEstimate> found(1);
    {
      const py::gil_scoped_release release;
      found.mutable_data()[0] = space_.estimate(row, partition, own, freed, room_bytes, &stages);
    }
    return py::make_tuple(freeze(std::move(found)), array(stages));
  }

  // What the schedule of a plan is played with: (forward_s, backward_s, weight_grad_s, step_s).
  py::tuple passes(const py::object& times, std::int64_t layout, const py::object& cuts,
                   const py::object& variants) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    const auto strategy = static_cast<std::size_t>(space_.layout(row).strategy);
    const PlanPasses found = space_.passes(row, partition_of(row, cuts, variants), timed[strategy]);
    return py::make_tuple(array(found.forward_s), array(found.backward_s),
                          array(found.weight_grad_s), found.step_s);
  }

  // Cuts and variants of the even partition, and its status.
  py::tuple even_partition(const py::object& times, std::int64_t layout, std::int32_t variant,
                           double room_bytes) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    const auto strategy = static_cast<std::size_t>(space_.layout(row).strategy);
    Partition partition;
    const PlanStatus status =
        space_.even_partition(row, timed[strategy], variant, room_bytes, &partition);
    return py::make_tuple(static_cast<int>(status), array(partition.cuts),
                          array(partition.variants));
  }

  // What each stage of given cuts recomputes.
  py::array_t<std::int32_t> recompute(const py::object& times, std::int64_t layout,
                                      const py::object& cuts, double room_bytes) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    const LayoutRecord& l = space_.layout(row);
    const auto borders = view<std::int32_t>(cuts, "cuts");
    const auto stages = static_cast<std::size_t>(l.stages);
    Partition partition{{borders.begin(), borders.end()}, std::vector<std::int32_t>(stages, 0)};
    const PlanStatus status = space_.check_partition(row, partition);
    if (status != PlanStatus::kOk) throw InvalidInput(std::string("stages: ") + sentence(status));
    space_.choose_recompute(row, timed[static_cast<std::size_t>(l.strategy)], room_bytes,
                            &partition);
    return array(partition.variants);
  }

  // The fastest plans of one chip, how many layouts were solved and had none, what is left open.
  py::tuple top_plans(const py::object& times, std::int64_t room, std::int64_t top, int threads,
                      const py::object& stop) const {
    if (top < 1) throw InvalidInput("top: expected at least 1");
    const int workers = checked_threads(threads);
    return leading(times, room, [&](const std::vector<KindTimes>& all, SettledLayouts* settled) {
      return space_.top_plans(all, static_cast<std::size_t>(room), static_cast<std::size_t>(top),
                              workers, settled, asked_to_stop(stop));
    });
  }

  py::tuple front(const py::object& times, std::int64_t room, double most_s, int threads) const {
    const int workers = checked_threads(threads);
    return leading(times, room, [&](const std::vector<KindTimes>& all, SettledLayouts* settled) {
      return space_.front(all, static_cast<std::size_t>(room), most_s, workers, settled);
    });
  }

  // The best plan of a strategy on each chip with each room, where it takes at most `below_s`
  // (chips x rooms; minus infinity: not asked).
  py::tuple best(std::int32_t strategy, const py::object& times, const py::object& least,
                 const py::object& below, int threads) const {
    check_strategy(strategy);
    const TimesView timed(times, space_.kinds(), "times");
    const TimesView floor(least, space_.kinds(), "least");
    if (floor.rows() != timed.rows()) throw InvalidInput("least: expected as many rows as times");
    const std::size_t rooms = space_.rooms();
    const auto limits =
        view<double>(below, "below_s", static_cast<py::ssize_t>(timed.rows() * rooms));
    const int workers = checked_threads(threads);
    std::vector<PlacedPlan> plans(limits.size());
    {
      const py::gil_scoped_release release;
      parallel_for(timed.rows(), workers, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t chip = begin; chip < end; ++chip) {
          const std::size_t first = chip * rooms;
          space_.best_of_rooms(strategy, timed[chip], floor[chip], limits.subspan(first, rooms),
                               std::span(plans).subspan(first, rooms));
        }
      });
    }
    return hand_out(plans);
  }

  // Joules of plans, each on the chip of a row of `times`.
  py::array_t<double> energies(const py::object& times, const py::object& row,
                               const py::object& placed, const py::object& borders) const {
    const TimesView timed(times, space_.kinds(), "times");
    const auto plans = view<PlacedRecord>(placed, "placed");
    const auto rows = view<std::int64_t>(row, "row", static_cast<py::ssize_t>(plans.size()));
    const auto pool = view<std::int32_t>(borders, "borders");
    py::array_t<double> found(static_cast<py::ssize_t>(plans.size()));
    for (std::size_t k = 0; k < plans.size(); ++k) {
      const PlacedRecord& p = plans[k];
      const auto size = static_cast<std::int64_t>(pool.size());
      const bool inside = p.cuts_at >= 0 && p.cuts >= 0 && p.cuts_at <= size - p.cuts &&
                          p.variants_at >= 0 && p.variants >= 0 &&
                          p.variants_at <= size - p.variants;
      if (!inside || rows[k] < 0 || rows[k] >= static_cast<std::int64_t>(timed.rows())) {
        throw InvalidInput("placed: cuts, variants or rows are out of range");
      }
      const std::size_t layout = row_of(p.layout);
      const auto run = [&](std::int64_t at, std::int64_t count) {
        const auto first = pool.begin() + at;
        return std::vector<std::int32_t>(first, first + count);
      };
      const Partition partition{run(p.cuts_at, p.cuts), run(p.variants_at, p.variants)};
      if (space_.check_partition(layout, partition) != PlanStatus::kOk) {
        throw InvalidInput("placed: not a partition of this layout");
      }
      found.mutable_data()[k] =
          space_
              .estimate(layout, partition, timed[static_cast<std::size_t>(rows[k])], {}, 0.0,
                        nullptr)
              .energy_j;
    }
    return freeze(std::move(found));
  }

  // Lower bounds of a strategy on each chip, with the room that each asks for.
  py::array_t<double> bounds(std::int32_t strategy, const py::object& least, const py::object& room,
                             int threads) const {
    check_strategy(strategy);
    const TimesView floor(least, space_.kinds(), "least");
    const auto rooms = view<std::int64_t>(room, "room", static_cast<py::ssize_t>(floor.rows()));
    for (const std::int64_t r : rooms) check_room(r);
    const int workers = checked_threads(threads);
    py::array_t<double> found(static_cast<py::ssize_t>(floor.rows()));
    const std::span<double> out = writable(found);
    {
      const py::gil_scoped_release release;
      parallel_for(out.size(), workers, 16, [&](std::size_t begin, std::size_t end) {
        for (std::size_t k = begin; k < end; ++k) {
          out[k] = space_.strategy_bound_s(strategy, floor[k], static_cast<std::size_t>(rooms[k]));
        }
      });
    }
    return freeze(std::move(found));
  }

  // The same from the work of a micro-batch alone.
  py::array_t<double> work_bounds(std::int32_t strategy, const py::object& work,
                                  const py::object& room) const {
    check_strategy(strategy);
    const auto seconds = view<double>(work, "work_s");
    const auto rooms = view<std::int64_t>(room, "room", static_cast<py::ssize_t>(seconds.size()));
    for (const std::int64_t r : rooms) check_room(r);
    py::array_t<double> found(static_cast<py::ssize_t>(seconds.size()));
    const std::span<double> out = writable(found);
    {
      const py::gil_scoped_release release;
      for (std::size_t k = 0; k < out.size(); ++k) {
        out[k] = space_.work_bound_s(strategy, seconds[k], static_cast<std::size_t>(rooms[k]));
      }
    }
    return freeze(std::move(found));
  }

  // Bound and exact time of one layout: what tests compare.
  py::tuple solve(const py::object& times, std::int64_t layout, std::int64_t room,
                  double below_s) const {
    const TimesView timed = by_strategy(times);
    const std::size_t row = row_of(layout);
    check_room(room);
    const KindTimes own = timed[static_cast<std::size_t>(space_.layout(row).strategy)];
    const double bound = space_.layout_bound_s(row, own, static_cast<std::size_t>(room));
    const PlacedPlan plan =
        space_.best_of_layout(row, own, space_.room_bytes(static_cast<std::size_t>(room)), below_s);
    const py::tuple found = hand_out({plan});
    return py::make_tuple(bound, found[0], found[1]);
  }

 private:
  Partition partition_of(std::size_t row, const py::object& cuts,
                         const py::object& variants) const {
    const auto borders = view<std::int32_t>(cuts, "cuts");
    const auto ways = view<std::int32_t>(variants, "variants");
    const Partition found{{borders.begin(), borders.end()}, {ways.begin(), ways.end()}};
    const PlanStatus status = space_.check_partition(row, found);
    if (status != PlanStatus::kOk) throw InvalidInput(std::string("stages: ") + sentence(status));
    return found;
  }
  // The plans that `find` gives of all strategies' times, with what became of the layouts.
  template <typename Find>
  py::tuple leading(const py::object& times, std::int64_t room, const Find& find) const {
    const TimesView timed = by_strategy(times);
    check_room(room);
    std::vector<KindTimes> all;
    for (std::size_t s = 0; s < timed.rows(); ++s) all.push_back(timed[s]);
    SettledLayouts settled{};
    const auto plans = [&] {
      const py::gil_scoped_release release;
      return find(all, &settled);
    }();
    const py::tuple found = hand_out(plans);
    return py::make_tuple(found[0], found[1], settled.solved, settled.empty, settled.open_s);
  }

  TimesView by_strategy(const py::object& times) const {
    const TimesView timed(times, space_.kinds(), "times");
    if (timed.rows() != space_.strategies()) {
      throw InvalidInput("times: expected one row for each strategy");
    }
    return timed;
  }
  // Times with some of what layers wait for left out, by level; none where parts are not wanted.
  std::vector<TimesView> levels(const py::object& free, std::size_t rows) const {
    std::vector<TimesView> found;
    for (const auto& level : free) {
      found.emplace_back(py::reinterpret_borrow<py::object>(level), space_.kinds(), "free");
      if (found.back().rows() != rows) throw InvalidInput("free: not as many rows as expected");
    }
    if (!found.empty() && found.size() != kFreeLevels) {
      throw InvalidInput("free: expected times of " + std::to_string(kFreeLevels) + " levels");
    }
    return found;
  }
  std::size_t row_of(std::int64_t layout) const {
    if (layout < 0 || layout >= static_cast<std::int64_t>(space_.layouts())) {
      throw InvalidInput("layout: " + std::to_string(layout) + " is not accepted; expected 0 to " +
                         std::to_string(space_.layouts()) + " (exclusive)");
    }
    return static_cast<std::size_t>(layout);
  }
  void check_room(std::int64_t room) const {
    if (room < 0 || room >= static_cast<std::int64_t>(space_.rooms())) {
      throw InvalidInput("room: there is no such room");
    }
  }
  void check_strategy(std::int32_t strategy) const {
    if (strategy < 0 || strategy >= static_cast<std::int32_t>(space_.strategies())) {
      throw InvalidInput("strategy: there is no such strategy");
    }
  }

  PlanSpace space_;
};

// The first rule that each row of widths breaks, as a PlanStatus.
py::array_t<std::int32_t> statuses_of(const py::object& widths, std::int64_t devices,
                                      std::int64_t global_batch) {
  const auto rows = view<PlanWidths>(widths, "widths");
  py::array_t<std::int32_t> statuses(static_cast<py::ssize_t>(rows.size()));
  const auto filled = writable(statuses);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    filled[i] = static_cast<std::int32_t>(check_widths(rows[i], devices, global_batch));
  }
  return statuses;
}

}  // namespace

void bind_plan(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(LayerKindRecord, parameters, expert_parameters, stash_bytes, live_bytes,
                       once_bytes, copy_bytes, cast_bytes, shape_bytes, end, unused);
  PYBIND11_NUMPY_DTYPE(StrategyRecord, tp, cp, ep, micro_batch, message_bytes, gathered_bytes,
                       copied_parameters, sent_bytes, variants, way);
  PYBIND11_NUMPY_DTYPE(LayoutRecord, strategy, schedule, stages, vpp, zero, rank_order, dp,
                       micro_batches, shard);
  PYBIND11_NUMPY_DTYPE(TrainingRecord, weight_bytes, gradient_bytes, state_bytes, fragmentation,
                       bucket_bytes, contention, hbm_byte_j, network_byte_j, gather_bytes,
                       workspace_bytes, late_gradients, unused);
  PYBIND11_NUMPY_DTYPE(PlanParts, compute_s, tensor_comm_s, context_comm_s, expert_comm_s,
                       pipeline_comm_s, data_comm_s, bubble_s, imbalance_s, recompute_s,
                       optimizer_s, host_s);
  PYBIND11_NUMPY_DTYPE(MemoryTerms, weights, gradients, optimizer, activations, recompute, logits,
                       communication, fragmentation);
  PYBIND11_NUMPY_DTYPE(PlanEstimate, time_s, energy_j, parts, memory, memory_bytes, max_load_s,
                       fullest, status, instant, unused);
  PYBIND11_NUMPY_DTYPE(StageEstimate, load_s, memory, instant, unused);
  PYBIND11_NUMPY_DTYPE(PlacedRecord, time_s, memory_bytes, layout, cuts_at, cuts, variants_at,
                       variants);
  PYBIND11_NUMPY_DTYPE(PlanWidths, tp, pp, dp, cp, ep, etp, micro_batch, vpp, zero, shard,
                       schedule);
  module.attr("WIDTHS_DTYPE") = py::dtype::of<PlanWidths>();
  module.def("check_widths", &statuses_of, py::arg("widths"), py::arg("devices"),
             py::arg("global_batch"));
  module.attr("MAX_DEALS") = py::make_tuple(kMaxDeals, kMaxRunChunks);
  module.attr("PLACED_DTYPE") = py::dtype::of<PlacedRecord>();
  module.attr("LAYER_KIND_DTYPE") = py::dtype::of<LayerKindRecord>();
  module.attr("STRATEGY_DTYPE") = py::dtype::of<StrategyRecord>();
  module.attr("LAYOUT_DTYPE") = py::dtype::of<LayoutRecord>();
  module.attr("TRAINING_DTYPE") = py::dtype::of<TrainingRecord>();
  module.attr("ESTIMATE_DTYPE") = py::dtype::of<PlanEstimate>();
  py::tuple sentences(kPlanStatusCount);
  for (int i = 0; i < kPlanStatusCount; ++i) {
    sentences[static_cast<std::size_t>(i)] = py::str(sentence(static_cast<PlanStatus>(i)));
  }
  module.attr("PLAN_STATUS_SENTENCES") = sentences;
  module.attr("PLAN_STATUS") =
      py::dict(py::arg("ok") = static_cast<int>(PlanStatus::kOk),
               py::arg("over_memory") = static_cast<int>(PlanStatus::kOverMemory),
               py::arg("bad_batch") = static_cast<int>(PlanStatus::kBadBatch),
               py::arg("bad_schedule") = static_cast<int>(PlanStatus::kBadSchedule),
               py::arg("bad_experts") = static_cast<int>(PlanStatus::kBadExperts),
               py::arg("bad_strategy") = static_cast<int>(PlanStatus::kBadStrategy),
               py::arg("bad_shard") = static_cast<int>(PlanStatus::kBadShard));
  py::class_<PyPlanSpace>(module, "PlanSpace")
      .def(py::init<const py::object&, std::int64_t, const py::object&, std::int32_t,
                    const py::object&, const py::object&, const py::object&, const py::object&,
                    const py::object&, const py::object&, const py::object&, const py::object&,
                    bool>(),
           py::arg("fabric"), py::arg("devices"), py::arg("training"), py::arg("kinds"),
           py::arg("order"), py::arg("edges"), py::arg("tied"), py::arg("strategies"),
           py::arg("sizes"), py::arg("layouts"), py::arg("rooms"), py::arg("fits"),
           py::arg("some_blocks") = false)
      .def("__len__", &PyPlanSpace::layouts)
      .def("estimate_even", &PyPlanSpace::estimate_even, py::arg("times"), py::arg("layout"),
           py::arg("variant"), py::arg("room_bytes"), py::arg("free"), py::arg("threads"))
      .def("estimate", &PyPlanSpace::estimate, py::arg("times"), py::arg("layout"), py::arg("cuts"),
           py::arg("variants"), py::arg("room_bytes"), py::arg("free") = py::tuple())
      .def("passes", &PyPlanSpace::passes, py::arg("times"), py::arg("layout"), py::arg("cuts"),
           py::arg("variants"))
      .def("even_partition", &PyPlanSpace::even_partition, py::arg("times"), py::arg("layout"),
           py::arg("variant"), py::arg("room_bytes"))
      .def("recompute", &PyPlanSpace::recompute, py::arg("times"), py::arg("layout"),
           py::arg("cuts"), py::arg("room_bytes"))
      .def("top_plans", &PyPlanSpace::top_plans, py::arg("times"), py::arg("room"), py::arg("top"),
           py::arg("threads"), py::arg("stop") = py::none())
      .def("front", &PyPlanSpace::front, py::arg("times"), py::arg("room"), py::arg("most_s"),
           py::arg("threads"))
      .def("best", &PyPlanSpace::best, py::arg("strategy"), py::arg("times"), py::arg("least"),
           py::arg("below_s"), py::arg("threads"))
      .def("energies", &PyPlanSpace::energies, py::arg("times"), py::arg("row"), py::arg("placed"),
           py::arg("borders"))
      .def("bounds", &PyPlanSpace::bounds, py::arg("strategy"), py::arg("least"), py::arg("room"),
           py::arg("threads"))
      .def("work_bounds", &PyPlanSpace::work_bounds, py::arg("strategy"), py::arg("work_s"),
           py::arg("room"))
      .def("solve", &PyPlanSpace::solve, py::arg("times"), py::arg("layout"), py::arg("room"),
           py::arg("below_s"));
}

}  // namespace phaze::bindings
