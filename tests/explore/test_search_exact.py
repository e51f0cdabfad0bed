"""Steps of the search against plain loops and by hand, and the search against looking at everything."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from case_counts import some_or_many
from search_cases import FRONTS, GIB, LARGE, Case, random_case, some_with_every_hbm, tpuv4_space

import phaze_fast as pf
from phaze_fast._core import OPERATOR_DTYPE, LayersOnChips
from phaze_fast.cost.engine import CostTable
from phaze_fast.explore import (
    ChipGroups,
    ExactEvaluator,
    LeastProductSearch,
    SearchProblem,
    best_first,
    per_chip,
    problems_of,
)
from phaze_fast.explore.best_first import BestFirstSearch, LimitedSearch
from phaze_fast.explore.bounds import STEPS
from phaze_fast.explore.candidates import CandidateTable
from phaze_fast.explore.objectives import _fewest_devices
from phaze_fast.hardware import FlatFabric, chip_records, energy_table_of, presets
from phaze_fast.hardware.package import Prices
from phaze_fast.opgraph import OpGraph
from phaze_fast.planning import Placed, PlanEvaluator
from phaze_fast.planning.times import MAX_NODES, KindTimes, LayerCosts, LayerGraphs
from phaze_fast.runs.executors import Workers
from phaze_fast.schedule.layers import _Limits, _Problem, _scheduled, graph_arrays
from phaze_fast.software import software_names
from phaze_fast.tables import non_dominated

ANY_TIME_S = 1e300
RECOMPUTED = (("none", "full"), ("none", "norms+activations"), ("full",), ("norms", "full"))


def test_steps_are_named_as_documents_name_them():
    assert STEPS == ("roofline", "work", "mapped", "schedule_bound", "scheduled", "placed")


def drawn_graph(rng, count, share):
    """Operators, those with even numbers on tensor cores, the others on vector cores."""
    pairs = np.argwhere(np.triu(rng.random((count, count)) < share, 1))
    begins = np.searchsorted(pairs[:, 0], np.arange(count + 1)).astype(np.int32)
    ops = np.zeros(count, dtype=OPERATOR_DTYPE)
    ops["unit"] = np.arange(count) % 2
    return OpGraph("drawn", ops, ("",) * count, begins, pairs[:, 1].astype(np.int32))


def mapped_bound_s(graph, one_s, all_s, cores):
    """The bound of a layer whose forward pass is the graph; one chip a row of seconds."""
    chips, ops = one_s.shape
    types, starts, ends = graph_arrays(graph)
    zeros = np.zeros(ops, dtype=np.uint8)
    graphs = LayerGraphs(
        kinds=1, variants=1, op_ptr=np.array([0, ops, ops]), types=types,
        most_at_once=graph.most_at_once,
        edge_ptr=np.array([0, len(ends), len(ends)]), edge_from=starts, edge_to=ends,
        in_order=np.array([graph.in_order, 0], dtype=np.uint8), again=zeros, late=zeros,
        host_s=np.zeros(2), host_again_s=np.zeros(1), wait_s=np.zeros(2),
    )  # fmt: skip
    rows, columns = np.arange(chips), np.arange(ops)
    table = CostTable(all_s, one_s, all_s, 0.0 * all_s, rows, columns)
    priced = LayerCosts(
        (table,), zeros.astype(np.int32), columns, np.zeros(ops), np.tile(cores, chips),
        *np.ones((3, chips)), *np.zeros((2, chips)),
    )  # fmt: skip
    return LayersOnChips(graphs, priced).map(rows, 1)["forward_s"][:, 0]


def test_operators_that_run_at_once_are_counted_as_by_trying_all_sets():
    for seed in range(60):
        graph = drawn_graph(np.random.default_rng(seed), 7, 0.1 + 0.01 * seed)
        before = np.eye(7, dtype=bool)
        for i, j in reversed(list(graph.edges())):
            before[i] |= before[j]
        apart = ~(before | before.T) | np.eye(7, dtype=bool)
        most = np.zeros(7)
        for size in range(1, 8):
            for some in map(list, itertools.combinations(range(7), size)):
                if apart[np.ix_(some, some)].all():
                    most[some] = size
        found = graph.most_at_once
        assert (found == most).all(), seed


def test_the_mapped_bound_is_at_most_the_schedule_and_counts_that_nothing_runs_beside_all_cores():
    met = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        graph, cores = drawn_graph(rng, 6, 0.4), np.array([4, 4, 1], dtype=np.int32)
        all_s = rng.random((1, 6))
        one_s = all_s * rng.uniform(2.0, 4.0, (1, 6))
        problem = _Problem(graph, one_s, all_s, cores[None])
        exact_s = _scheduled(problem, _Limits(False, 10**6, np.inf, 1)).makespan
        bound_s = mapped_bound_s(graph, one_s, all_s, cores)
        assert (bound_s <= exact_s).all(), seed
        met += int(bound_s[0] > 0.9 * exact_s[0])
    assert met > 20


@pytest.mark.parametrize(
    ("units", "one_s", "all_s", "cores", "edges", "least_s"),
    [
        ((0, 1), (2.0, 2.0), (1.5, 1.5), (4, 4), (), 2.0),  # both at once: half of the time each
        ((0, 1), (2.0, 2.0), (1.5, 1.5), (4, 4), (1,), 3.0),  # one after the other, on all cores
        ((0, 1, 2), (1.0, 2.0, 4.0), (1.0, 2.0, 4.0), (1, 1), (), 6.0),  # the third needs both
        ((0, 0, 0), (4.0, 4.0, 2.0), (9.0, 9.0, 9.0), (2, 8), (), 5.0),  # ten seconds of two cores
    ],
)
def test_the_mapped_bound_by_hand(units, one_s, all_s, cores, edges, least_s):
    ops = np.zeros(len(units), dtype=OPERATOR_DTYPE)
    ops["unit"] = units
    begins = np.array([0] + [len(edges)] * len(units), dtype=np.int32)
    graph = OpGraph("drawn", ops, ("",) * len(units), begins, np.array(edges, dtype=np.int32))
    some = np.array([*cores, 1], dtype=np.int32)
    (bound_s,) = mapped_bound_s(graph, np.array([one_s]), np.array([all_s]), some)
    assert bound_s == pytest.approx(least_s, rel=1e-11)
    assert bound_s <= least_s
    assert bound_s < least_s or units != (0, 1) or edges  # sums of shares are rounded down


def small_cases(first, count):
    for seed in range(first, first + count):
        case = random_case(seed, (), devices=8, layers=5)
        free = {"uncut": (), "tied": (), "recompute": RECOMPUTED[seed % len(RECOMPUTED)]}
        free["recompute_some"] = seed % 5 != 0
        training = case.training.model_copy(update=free)
        yield seed, case._replace(training=training)


@pytest.mark.parametrize("count", [1, 3])
def test_a_limit_leaves_out_what_takes_longer_and_nothing_else(count):
    rng = np.random.default_rng(count)
    for seed, case in small_cases(40, 6):
        evaluator = case.problem.evaluators[0]
        records = tpuv4_space().chips[rng.integers(0, len(tpuv4_space()), count)].copy()
        for s in range(len(evaluator)):
            times, least = case.problem.schedule(s, records)
            shape = (count, len(evaluator.limits_bytes))
            free = evaluator.best(s, times, least, np.full(shape, ANY_TIME_S))
            exact = np.array([[placed.time_s for placed in row] for row in free])
            fits = np.isfinite(exact)
            same = evaluator.best(s, times, least, np.where(fits, exact, -np.inf))
            less = evaluator.best(s, times, least, np.where(fits, exact * (1 - 1e-9), -np.inf))
            for row, kept, lost in zip(free, same, less, strict=True):
                assert [p for p in kept if p.layout >= 0] == [p for p in row if p.layout >= 0], seed
                assert all(p.layout == -1 and p.time_s == math.inf for p in lost), seed


def check_bounds(case, chips, rising=False):
    """Compare the bounds of every step with the exact time, and with the next; how many plans."""
    problem, evaluator, plans = case.problem, case.problem.evaluators[0], 0
    records = tpuv4_space().chips[list(chips)].copy()
    limits = np.full((len(records), len(evaluator.limits_bytes)), ANY_TIME_S)
    for s in range(len(evaluator)):
        times, least = problem.schedule(s, records)
        steps = [problem.bound(s, records, step) for step in ("mapped", "schedule_bound")]
        works_s = [problem.works_s([s], records, tight)[0] for tight in (False, True)]
        placed = evaluator.best(s, times, least, limits)
        for c in range(len(evaluator.limits_bytes)):
            at = np.full(len(records), c, dtype=np.int64)
            bounds = [evaluator.work_bounds(s, work_s, at) for work_s in works_s]
            bounds += [evaluator.bounds(s, own, at) for own in (*steps, least)]
            for lower, higher in itertools.pairwise(bounds) if rising else ():
                assert (lower <= higher * (1.0 + 1e-9)).all()
            exact = np.array([row[c].time_s for row in placed])
            assert all((own <= exact).all() for own in bounds)
            plans += int(np.isfinite(exact).sum())
    return plans


@pytest.mark.slow
def test_bounds_rise_from_step_to_step_towards_the_exact_time():
    """Each step is made of what the one before is made of, and more."""
    chips = (1000, 8000, 15000, 22000)
    assert sum(check_bounds(case, chips, rising=True) for _, case in small_cases(80, 6)) > 10
    assert sum(check_bounds(random_case(s), (9000, 25000)) for s in range(1000, 1012)) > 50


@pytest.mark.slow
def test_no_bound_is_above_the_exact_time_in_many_cases():
    assert sum(check_bounds(random_case(seed), (9000, 25000)) for seed in range(1012, 1072)) > 300
    assert sum(check_bounds(random_case(s, LARGE), (25000,)) for s in range(2000, 2010)) > 0


def test_layers_that_are_not_proven_have_bounds_below_their_times():
    """With one node of search, bounds are at most the optimum that all nodes find."""
    below = 0
    for seed, case in small_cases(40, 6):
        problem, records = case.problem, tpuv4_space().chips[[11000 + seed, 15000, 25000]]
        for s in range(len(problem.evaluators[0])):
            times, least = problem.schedule(s, records, nodes=1)
            best, _ = problem.schedule(s, records)
            for made, bound, exact in zip(
                *(t.forward_s for t in (times, least, best)), strict=True
            ):
                assert (bound <= made * (1 + 1e-12)).all(), (seed, s)
                assert (bound <= exact * (1 + 1e-12)).all(), (seed, s)
                below += int((bound < made).sum())
    assert below


def test_a_search_with_slack_claims_no_more_than_the_slack_allows():
    groups = ChipGroups.of(some_with_every_hbm(3, 12))
    cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    step = pf.Training(global_batch=32, seq=256, micro_batch=(1, 4), tp=(1, 2))
    problems = problems_of([pf.models.load("gpt2-small")], groups, cluster, step)
    factors = np.linspace(1.0, 1.5, len(groups))
    exact, at, bound = LeastProductSearch(problems, groups, factors, np.inf, 0.0).least()
    assert bound == exact
    alone = LimitedSearch(problems, groups, np.full(len(groups), np.inf)).exact()[0] * factors
    assert (exact, at) == (alone.min(), int(alone.argmin()))
    for slack in (0.05, 0.3):
        value, _, bound = LeastProductSearch(problems, groups, factors, np.inf, slack).least()
        assert bound <= exact <= value
        assert math.isclose(bound, value * (1.0 - slack), rel_tol=1e-12)
    none = LeastProductSearch(problems, groups, factors, exact / 2, 0.0).least()
    assert none == (np.inf, -1, exact / 2)
    assert 0 <= at < len(groups)


@some_or_many(3, 6)
def test_what_is_ruled_out_takes_longer_than_its_limit(cases):
    ruled_out = [0, 0]
    for seed, case in small_cases(40, cases):
        problem, records = case.problem, tpuv4_space().chips[[11000 + seed, 15000, 25000, 28000]]
        evaluator = problem.evaluators[0]
        rooms = np.full(len(records), len(problem.capacities) - 1)
        for s in range(len(evaluator)):
            made, _ = problem.schedule(s, records)  # not all proven: then above the optimum
            bounds_s = evaluator.bounds(s, made, rooms)
            wanted = np.full((len(records), len(problem.capacities)), -np.inf)
            wanted[:, -1] = np.inf
            plans_s = evaluator.best_s(s, made, made, wanted)
            for planned, share in itertools.product((0, 1), (0.97, 0.9999, 1.0001, 1.1)):
                limits = (bounds_s, plans_s)[planned] * share
                layers, steps_s = problem.rule_out(s, records, rooms, limits, bool(planned))
                least = evaluator.bounds(s, layers, rooms)
                assert (least <= bounds_s * (1 + 1e-9)).all(), (seed, s, share)
                assert (steps_s <= plans_s * (1 + 1e-9)).all(), (seed, s, share)
                ruled_out[planned] += int((np.isfinite(limits) & (steps_s > limits)).sum())
    assert min(ruled_out) > 25 * cases // 6, ruled_out


def test_what_is_known_of_chips_priced_together_changes_no_answer():
    """Roots of search trees are kept and looked up: asked in any order, the same bits."""
    for seed, case in small_cases(20, 1):
        problem, records = case.problem, tpuv4_space().chips[[11000 + seed, 15000, 25000, 28000]]
        rooms = np.full(len(records), len(problem.capacities) - 1)
        for s in range(len(problem)):
            priced = problem.price(s, records)
            some = np.array([2, 0])
            problem.bound(s, priced.at(some), "schedule_bound")
            problem.bound(s, priced.at(np.array([3])).at(np.array([0])), "schedule_bound")
            limits = (
                problem.evaluators[0].bounds(s, problem.schedule(s, records)[0], rooms) * 0.9999
            )
            pairs = [
                (problem.bound(s, chips, "schedule_bound"), problem.schedule(s, chips)[0],
                 problem.rule_out(s, chips, rooms, limits, False)[0])
                for chips in (priced, records)
            ]  # fmt: skip
            for kept, fresh in zip(*pairs, strict=True):
                assert kept.same_times() == fresh.same_times(), (seed, s)
                assert kept.proven.tolist() == fresh.proven.tolist(), (seed, s)


def test_work_of_rooflines_is_that_of_a_plain_loop():
    seed, case = next(iter(small_cases(3, 1)))
    problem, records = case.problem, tpuv4_space().chips[[0, 9000, 28000]]
    for s, sizes in enumerate(problem.evaluators[0].sizes):
        expected = np.zeros(len(records))
        costs = pf.estimate_costs(
            sizes.graph, records, problem.cluster, like=problem.like, bounds_only=True
        )
        for g, graph in enumerate(costs.graphs):
            seconds = costs.time_s(g)
            for chip in range(len(records)):
                finish = [0.0] * len(graph)
                for i in range(len(graph)):
                    before = [finish[a] for a, b in graph.edges() if b == i]
                    finish[i] = max(before, default=0.0) + seconds[chip, i]
                expected[chip] += sizes.graph.layers[g // 2].count * max(finish, default=0.0)
        assert np.array_equal(problem.work_s(s, records), expected), (seed, s)


# ---- joules ----


EAGER = pf.TransformerModel(
    name="eager", layers=1, hidden=256, heads=4, ffn=256, vocab=128, seq=4096, positions="rotary"
)


@pytest.mark.parametrize("software", software_names())
def test_rooflines_are_those_of_kernels_that_the_software_uses(software):
    """Kernels of a profile may be faster than those of the chip's own tuning."""
    like = presets.chip("a100-80")
    step = pf.Training(global_batch=64, micro_batch=8, tp=1, pp=1, zero=1, software=software)
    cluster, records = pf.Cluster(devices=8, fabric="dgx-a100"), chip_records([like])
    problem = SearchProblem(EAGER, cluster, step, like, (80 * 2**30,))
    counts = [layer.count for layer in problem.evaluators[0].sizes[0].graph.layers]
    _, least = problem.schedule(0, records)
    (exact_s,) = (least.forward_s + least.plain_s) @ np.array(counts, dtype=float)
    (work_s,) = problem.work_s(0, records)
    assert 0.1 * exact_s < work_s <= exact_s * (1 + 1e-12)


def test_joules_are_bounded_by_those_of_the_cheapest_recomputation():
    """Which need not be the first: attention is one set of operators, and norms and activations two."""
    like = presets.chip("tpuv4")
    modes = ("attention", "norms+activations")
    step = pf.Training(global_batch=64, micro_batch=1, tp=1, pp=1, zero=1, recompute=modes)
    cluster, records = pf.Cluster(devices=8, fabric="tpuv4-pod"), chip_records([like])
    model = EAGER.replace(attention="flash", layers=12)
    problem = SearchProblem(model, cluster, step, like, (32 * 2**30,))
    times, least = problem.schedule(0, records)
    assert problem.evaluators[0].sizes[0].variants == modes
    ((best,),) = problem.evaluators[0].best(0, times, least, np.full((1, 1), ANY_TIME_S))
    assert best.variants == (1,)
    (spent_j,) = problem.evaluators[0].energies_j([best], times, [0])
    assert 0.5 * spent_j < problem.least_energy_j(0, least)[0][0] <= spent_j


def test_joules_of_a_step_by_hand():
    """Two replicas of two stages of gpt2-small, ZeRO 1, eight micro-batches each."""
    cluster = pf.Cluster(devices=4, fabric=FlatFabric(name="flat", bandwidth_bytes_per_s=1e11))
    step = pf.Training(
        global_batch=16,
        micro_batch=1,
        tp=1,
        pp=2,
        dp=2,
        zero=1,
        schedule="1f1b",
        rank_order="replicas-inside",
        recompute=("none", "selective", "full"),
        reserved_bytes=0,
    )
    model = pf.models.load("gpt2-small")
    problem = SearchProblem(model, cluster, step, tpuv4_space().spec.base, (64 * GIB,))
    evaluator: PlanEvaluator = problem.evaluators[0]
    assert len(evaluator) == len(evaluator.layouts) == 1
    (sizes,) = evaluator.sizes
    assert sizes.variants == ("none", "full")  # attention is fused: there is nothing selective
    kinds, count = len(sizes.kinds), len(sizes.graph.order)
    one = np.ones((1, kinds))
    joules = np.stack([5.0 * one, 8.0 * one], axis=1)
    seconds = np.stack([2.0 * one, 3.0 * one], axis=1)
    times = KindTimes(
        forward_s=one,
        plain_s=2.0 * one,
        backward_s=seconds,
        weight_grad_s=one,
        forward_j=3.0 * one,
        backward_j=joules,
        hbm_bytes_per_s=np.array([1e12]),
        static_w=np.array([10.0]),
        limit_w=np.array([np.inf]),
        proven=np.array([True]),
        step_s=0.0 * one,
        ahead_s=0.0 * one,
    )
    first = count // 2
    placed = Placed(0.0, 0.0, 0, (0, first, count), (1, 0))
    (found,) = evaluator.energies_j([placed], times, [0])
    passes = 2 * 8 * (first * (3.0 + 8.0) + (count - first) * (3.0 + 5.0))
    prices = energy_table_of()
    held = float(sizes.kinds["parameters"][list(sizes.graph.order)].sum())
    held += model.vocab * model.hidden  # the last stage's copy of the embedding
    step_bytes = held / 2 * (2 * 12 + 4 + 2)
    sent = 2 * 8 * 2 * (1024 * 768 * 2) + 2 * held * (4 + 2) / 2
    by_hand = passes + 2 * step_bytes * prices.hbm_byte_j + sent * prices.network_byte_j
    time_s = evaluator.plan(placed, times, peak_flops=1e12).time_s
    assert found == pytest.approx(by_hand + 10.0 * time_s * 4, rel=1e-12)
    assert evaluator.plan(placed, times, peak_flops=1e12).energy_j == found


# ---- the search ----


def _alike(evaluator: PlanEvaluator, times: KindTimes, chip: int) -> KindTimes:
    """Times of one chip, as if every strategy had them: the kernel reads those of the layout's."""
    return times.at(np.full(len(evaluator), chip))


def _of_strategy(evaluator: PlanEvaluator, s: int) -> list[int]:
    return np.flatnonzero(evaluator.layouts["strategy"] == s).tolist()


def _best_of_layout(
    evaluator: PlanEvaluator, times: KindTimes, layout: int, room: int
) -> Placed | None:
    """Give the best plan of one layout, whatever it takes."""
    _, (record,), pool = evaluator.space.solve(times, layout, room, ANY_TIME_S)
    if record["layout"] < 0:
        return None
    assert record["layout"] == layout
    cuts = pool[record["cuts_at"] :][: record["cuts"]]
    variants = pool[record["variants_at"] :][: record["variants"]]
    borders = (tuple(cuts.tolist()), tuple(variants.tolist()))
    return Placed(float(record["time_s"]), float(record["memory_bytes"]), layout, *borders)


# ---- the search against everything ----


Everything = dict[tuple[int, int, int], tuple[Placed, float]]


def _everything(problem: SearchProblem, groups: ChipGroups) -> Everything:
    """Place every chip group, capacity and strategy with every layout, without a bound."""
    evaluator, found = problem.evaluators[0], {}
    for s in range(len(evaluator)):
        times, least = problem.schedule(s, groups.records)
        limits = np.where(groups.chip >= 0, np.inf, -np.inf)
        quick = evaluator.best(s, times, least, limits)
        for group, c in np.argwhere(groups.chip >= 0).tolist():
            timed = _alike(evaluator, times, group)
            layouts = _of_strategy(evaluator, s)
            plans = [_best_of_layout(evaluator, timed, layout, c) for layout in layouts]
            fits = [placed for placed in plans if placed is not None]
            if fits:
                best = min(fits, key=lambda placed: (placed.time_s, placed.layout))
                assert quick[group][c] == best
                (joules,) = evaluator.energies_j([best], times, [group])
                found[group, c, s] = (best, float(joules))
            else:
                assert quick[group][c].layout == -1
    return found


def _layout_of(problem: SearchProblem, s: int, placed: Placed) -> tuple[Any, ...]:
    """Say which plan it is by the names that a plan has."""
    strategy = problem.evaluators[0].sizes[s].strategy
    layout = problem.evaluators[0].layouts[placed.layout]
    widths = (strategy.tp, strategy.cp, strategy.ep)
    names = ("pp", "dp", "zero", "vpp", "micro_batches")
    counts = tuple(int(layout[name]) for name in names)
    order = ("replicas-inside", "stages-inside")[layout["rank_order"]]
    return (*widths, strategy.micro_batch, *counts, order, len(placed.variants))


def _ranked(problem: SearchProblem, found: Everything, groups: ChipGroups) -> list[tuple[Any, ...]]:
    """Rank chip groups, each with its best capacity and strategy."""
    best: dict[tuple[int, int], tuple[Any, ...]] = {}
    for (group, c, s), (placed, joules) in found.items():
        best[group, c] = min(best.get((group, c), (math.inf,)), (placed.time_s, joules, s))
    of_group: dict[int, tuple[Any, ...]] = {}
    for (group, c), (time_s, joules, s) in best.items():
        rank = (time_s, float(groups.area_mm2[group]), joules, int(groups.capacities[c]))
        which = _layout_of(problem, s, found[group, c, s][0])
        own = (*rank, int(groups.chip[group, c]), group, c, *which)
        of_group[group] = min(of_group.get(group, (math.inf,)), own)
    return sorted(of_group.values())


def _winners(winners: Any) -> list[tuple[Any, ...]]:
    rows = []
    for w in winners:
        p = w.plans[0]
        assert p.time_s == w.score
        which = (p.tp, p.cp, p.ep, p.micro_batch, p.pp, p.dp, p.zero, p.vpp, p.micro_batches)
        rows.append((*w.rank, w.group, w.capacity, *which, p.rank_order, len(p.stages)))
    return rows


def _front(found: Everything, groups: ChipGroups, names: tuple[str, ...], devices: int) -> Any:
    usd = Prices().device_usd(groups.area_mm2[:, None], groups.capacities[None, :].astype(float))
    points = sorted(found)
    columns = {
        "time": [found[p][0].time_s for p in points],
        "area": [float(groups.area_mm2[p[0]]) for p in points],
        "energy": [found[p][1] for p in points],
        "hbm": [float(groups.capacities[p[1]]) for p in points],
        "cost": [float(usd[p[0], p[1]]) * devices for p in points],
    }
    values = np.array([columns[name] for name in names]).T.reshape(-1, len(names))
    return {points[k]: tuple(values[k].tolist()) for k in non_dominated(values)}


def _ragged(rng: np.random.Generator, capacities: tuple[int, ...], count: int) -> ChipGroups:
    """Give chip groups near one another, some with the same times, each with some of the capacities."""
    first = int(rng.integers(0, len(tpuv4_space()) - 60))
    chips, areas = [], []
    for at in np.sort(rng.choice(60, count, replace=False)) + first:
        for size in [c for c in capacities if rng.random() < 0.7] or capacities[-1:]:
            chip = tpuv4_space().chips[at].copy()
            chip["hbm_bytes"] = size
            chips.append(chip)
            areas.append(float(tpuv4_space().area_mm2[at]))
    order = rng.permutation(len(chips))
    records = np.array(chips, dtype=tpuv4_space().chips.dtype)[order]
    return ChipGroups.of_records(records, np.array(areas)[order], tpuv4_space().spec.base)


def _small(seed: int) -> tuple[Case, ChipGroups]:
    case = random_case(seed, ("t5-small", "gpt2-small"), devices=8, layers=7)
    groups = _ragged(case.rng, case.capacities, int(case.rng.choice([4, 8])))
    return case._replace(capacities=tuple(int(c) for c in groups.capacities)), groups


def _all_proven(problem: SearchProblem, groups: ChipGroups) -> bool:
    strategies = range(len(problem))
    return all(problem.schedule(s, groups.records)[0].proven.all() for s in strategies)


def _hold_search(seed: int, quick: bool = True) -> int:
    case, groups = _small(seed)
    if quick and not _all_proven(case.problem, groups):
        return 0
    problem, top = case.problem, int(case.rng.choice([1, 2, 3, 8]))
    found = _everything(problem, groups)
    wanted = _ranked(problem, found, groups)
    plain = BestFirstSearch([problem], groups, top=top)
    assert plain.run()
    assert _winners(plain.winners()) == wanted[:top], seed
    with ThreadPoolExecutor(2) as pool, Workers(pool, 2) as workers:
        others = [BestFirstSearch([problem], groups, top=top, threads=2)]
        others.append(BestFirstSearch([problem], groups, top=top, workers=workers))
        for names in FRONTS[seed % 2 :: 2]:
            others.append(BestFirstSearch([problem], groups, top=top, objectives=names))
            others.append(
                BestFirstSearch([problem], groups, top=top, objectives=names, workers=workers)
            )
        for other in others:
            assert other.run()
            assert _winners(other.winners()) == wanted[:top], (seed, other.objectives)
            if other.objectives:
                names = other.front.objectives
                points = zip(other.front.points, other.front.values.tolist(), strict=True)
                front = {point: tuple(values) for point, values in points}
                assert front == _front(found, groups, names, case.cluster.devices), (seed, names)
    each = ExactEvaluator([problem], groups).winners(range(len(groups)))
    assert sorted(_winners([w for w in each if w is not None])) == wanted, seed
    return len(wanted)


@pytest.fixture
def same_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search look as long for schedules as `plan` does, so that both are the same."""
    monkeypatch.setattr(best_first, "_MORE_NODES", MAX_NODES)


@pytest.mark.usefixtures("same_patience")
def test_the_search_finds_what_looking_at_everything_finds() -> None:
    assert sum(_hold_search(seed) for seed in range(2)) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("same_patience")
def test_the_search_finds_what_looking_at_everything_finds_in_many_cases() -> None:
    assert sum(_hold_search(seed) for seed in range(100, 120)) > 0
    assert sum(_hold_search(seed, quick=False) for seed in (0, 2, 5)) > 0


# ---- several models ----


def _hold_several(seed: int) -> int:
    case, groups = _small(seed)
    other = random_case(seed + 10**6, (), devices=8, layers=5)
    first = case.problem
    second = SearchProblem(other.model, case.cluster, other.training, first.like, first.capacities)
    weights = tuple(float(w) for w in case.rng.choice([0.001, 0.5, 1.0, 3.0], 2))
    best: list[dict[tuple[int, int], float]] = []
    for problem in (first, second):
        times: dict[tuple[int, int], float] = {}
        for (group, c, _), (found, _) in _everything(problem, groups).items():
            times[group, c] = min(times.get((group, c), math.inf), found.time_s)
        best.append(times)
    search = BestFirstSearch(
        [first, second], groups, weights=weights, top=3, objectives=("time", "area")
    )
    assert search.run()
    scores: dict[int, float] = {}
    for at in best[0].keys() & best[1].keys():
        times_of = [np.array([own[at]]) for own in best]
        score = float(search.scores.combined(times_of)[0])
        assert score == pytest.approx(
            math.exp(
                sum(w * math.log(own[at]) for w, own in zip(weights, best, strict=True))
                / sum(weights)
            )
        )
        scores[at[0]] = min(scores.get(at[0], math.inf), score)
    wanted = sorted((score, float(groups.area_mm2[group])) for group, score in scores.items())
    assert [(w.score, w.area_mm2) for w in search.winners()] == wanted[:3], seed
    front = np.array(wanted).reshape(-1, 2)
    kept = {tuple(row) for row in front[non_dominated(front)].tolist()}
    assert {tuple(row) for row in search.front.values.tolist()} == kept, seed
    return len(wanted)


@some_or_many(range(206, 211), range(300, 308))
@pytest.mark.usefixtures("same_patience")
def test_several_models_are_weighed_as_a_plain_loop_weighs_them(cases: range) -> None:
    assert sum(_hold_several(seed) for seed in cases) > 0


# ---- corners ----


def test_groups_with_the_same_times_share_plans_of_all_their_capacities() -> None:
    chips = np.repeat(tpuv4_space().chips[20000:20001], 4)
    chips["hbm_bytes"] = [16 * GIB, 32 * GIB] * 2
    chips["hbm_stacks"][2:] += 1
    groups = ChipGroups.of_records(chips, np.array([1.0, 1.0, 2.0, 2.0]), tpuv4_space().spec.base)
    assert len(groups) == 2
    step = pf.Training(global_batch=16, micro_batch=4, tp=1)
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    model = pf.models.load("gpt2-small")
    table = CandidateTable(
        SearchProblem(model, cluster, step, groups.like, (16 * GIB, 32 * GIB)), groups
    )
    both = np.arange(2)
    table.schedule(0, both)
    (first, _) = table.place(0, both[:1], np.full((1, 2), 1e9))
    table.schedule(0, both)
    time_s = first.placed.time_s
    # The second group asks for longer plans, but not for the larger HBM; the first has asked before.
    below = np.array([[2 * time_s, 2 * time_s], [1e10, -np.inf]])
    found = [(each.group, each.capacity) for each in table.place(0, both, below)]
    assert found == [(0, 0), (0, 1), (1, 0)]


def test_no_strategy_at_all() -> None:
    # A micro-batch that does not divide the batch leaves nothing to bound.
    step = pf.Training(global_batch=4, micro_batch=3)
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    groups = ChipGroups.of_records(
        tpuv4_space().chips[:2], tpuv4_space().area_mm2[:2], tpuv4_space().spec.base
    )
    capacities = tuple(groups.capacities.tolist())
    problem = SearchProblem(pf.models.load("gpt2-small"), cluster, step, groups.like, capacities)
    for objectives in ((), ("time", "area"), ("time", "energy")):
        search = BestFirstSearch([problem], groups, objectives=objectives)
        assert search.run()
        assert search.winners() == []


# ---- parts of bounds and limits, by hand ----


def test_the_longest_path_of_a_layer_is_that_of_its_operators():
    """A fast matrix unit leaves the path of dependent operators as the bound of a layer."""
    _, case = next(small_cases(40, 1))
    evaluator, found = case.problem.evaluators[0], 0
    for layer in evaluator.sizes[0].graph.layers:
        graph = layer.backward
        seconds = np.random.default_rng(3).random((len(graph.names), 4))
        ends = np.zeros_like(seconds)
        for i in range(len(seconds)):
            own = [
                int(j)
                for j in range(i)
                if i in graph.indices[graph.indptr[j] :][: np.diff(graph.indptr)[j]]
            ]
            ends[i] = seconds[i] + (ends[own].max(axis=0) if own else 0.0)
        many = np.array([2**20, 2**20, 1], dtype=np.int32)  # work of a core type counts for little
        bounds_s = mapped_bound_s(
            graph, np.ascontiguousarray(seconds.T), np.full(seconds.T.shape, 1e9), many
        )
        most = graph.most_at_once
        shared_s = (seconds / most[:, None]).sum(axis=0)
        expected = np.maximum(ends.max(axis=0), shared_s)
        assert bounds_s == pytest.approx(expected, rel=1e-11)
        found += int((ends.max(axis=0) > shared_s).sum())
    assert found > 0


def test_the_fewest_devices_of_a_strategy_are_those_of_its_smallest_layout():
    model = pf.models.load("mixtral-8x7b").replace(layers=2)
    step = pf.Training(global_batch=16, micro_batch=1, ep=(1, 4), tp=(1, 2), cp=1, etp=1)
    groups = ChipGroups.of(some_with_every_hbm(3, 2))
    (problem,) = problems_of([model], groups, pf.Cluster(devices=8, fabric="tpuv4-pod"), step)
    found = _fewest_devices(problem).tolist()
    for s, least in enumerate(found):
        evaluator, k = problem.of(s)
        rows = evaluator.layouts[evaluator.layouts["strategy"] == k]
        assert least == evaluator.sizes[k].inner * min(rows["pp"] * rows["dp"])
    assert len(set(found)) > 2


def test_blocks_of_chips_change_no_answer(monkeypatch):
    space, step = some_with_every_hbm(8, 8), pf.Training(global_batch=4, micro_batch=1, tp=1)
    cluster, model = pf.Cluster(devices=2, fabric="tpuv4-pod"), "gpt2-small"
    whole = pf.evaluate_batch(model, space, cluster, step)
    monkeypatch.setattr(per_chip, "_AT_ONCE", 4)
    parts = pf.evaluate_batch(model, space, cluster, step)
    assert parts.time_s.tolist() == whole.time_s.tolist()
    assert np.isfinite(whole.time_s).any()


@pytest.mark.parametrize("slack", [0.0, 0.1])
def test_known_scores_are_incumbents_of_products(slack):
    """A search that begins with scores finds no product above theirs, nor one above its limit."""
    groups = ChipGroups.of(some_with_every_hbm(5, 6))
    case = random_case(5, (), devices=8, layers=4)
    problems = problems_of([case.model], groups, case.cluster, case.training)
    every = np.full(len(groups), np.inf)
    scores, _ = LimitedSearch(problems, groups, every).exact()
    factors = np.linspace(2.0, 1.0, len(groups))
    products = scores * factors
    for limit in (np.inf, products.min() * 1.01, products.min() * 0.99):
        search = LeastProductSearch(problems, groups, factors, limit, slack)
        first = np.flatnonzero(np.isfinite(scores))
        search.begin_with(first, scores[first])
        assert search.best.best == (products.min() if products.min() <= limit else np.inf)
        value, group, bound = search.least()
        within = products.min() <= limit
        assert (value, group) == (
            (products.min(), int(products.argmin())) if within else (np.inf, -1)
        )
        assert bound <= min(limit, products.min())
        assert bound >= min(limit, products.min()) * (1.0 - slack - 1e-12)
