"""The search against what it bounds and against looking at everything.

Every lower bound is held against the exact time of its layout; winners and fronts are held, bit for
bit, against every strategy of every chip group placed with every layout, without bounds.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from search_cases import (
    FRONTS,
    GIB,
    LARGE,
    PRESETS,
    SCHEDULES,
    Case,
    random_case,
    tpuv4_space,
)

import phaze_fast as pf
from phaze_fast.explore import ChipGroups, ExactEvaluator, SearchProblem, best_first
from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.candidates import CandidateTable
from phaze_fast.hardware import FlatFabric
from phaze_fast.hardware.package import Prices
from phaze_fast.models import TransformerModel
from phaze_fast.planning import Placed, PlanEvaluator, plan
from phaze_fast.planning.times import MAX_NODES, KindTimes
from phaze_fast.runs.executors import Workers
from phaze_fast.tables import non_dominated

# ---- exact times ----

_ANY_TIME_S = 1e300


def _alike(evaluator: PlanEvaluator, times: KindTimes, chip: int) -> KindTimes:
    """Times of one chip, as if every strategy had them: the kernel reads those of the layout's."""
    return times.at(np.full(len(evaluator), chip))


def _of_strategy(evaluator: PlanEvaluator, s: int) -> list[int]:
    return np.flatnonzero(evaluator.layouts["strategy"] == s).tolist()


def _best_of_layout(
    evaluator: PlanEvaluator, times: KindTimes, layout: int, room: int
) -> Placed | None:
    """Give the best plan of one layout, whatever it takes."""
    _, (record,), pool = evaluator.space.solve(times, layout, room, _ANY_TIME_S)
    if record["layout"] < 0:
        return None
    assert record["layout"] == layout
    cuts = pool[record["cuts_at"] :][: record["cuts"]]
    variants = pool[record["variants_at"] :][: record["variants"]]
    borders = (tuple(cuts.tolist()), tuple(variants.tolist()))
    return Placed(float(record["time_s"]), float(record["memory_bytes"]), layout, *borders)


def _bound_of_layout(evaluator: PlanEvaluator, least: KindTimes, layout: int, room: int) -> float:
    bound, _, _ = evaluator.space.solve(least, layout, room, -math.inf)
    return float(bound)


def _hold_bounds(problem: SearchProblem, records: Any, strategies: Any = None) -> int:
    """Hold every bound of every step against the exact times; how many those were."""
    evaluator, held = problem.evaluators[0], 0
    for s in range(len(evaluator)) if strategies is None else strategies:
        times, least = problem.schedule(s, records)
        steps = {name: problem.bound(s, records, name) for name in ("mapped", "schedule_bound")}
        steps["scheduled"] = least
        work = problem.work_s(s, records)
        for room in range(len(evaluator.limits_bytes)):
            rooms = np.full(len(records), room, dtype=np.int64)
            rough = evaluator.work_bounds(s, work, rooms)
            bounds = {name: evaluator.bounds(s, own, rooms) for name, own in steps.items()}
            for chip in range(len(records)):
                exact = {}
                timed = _alike(evaluator, times, chip)
                for layout in _of_strategy(evaluator, s):
                    best = _best_of_layout(evaluator, timed, layout, room)
                    if best is not None:
                        assert evaluator.fits[layout, room], (s, room, chip, layout)
                        exact[layout] = best.time_s
                held += len(exact)
                if not exact:
                    continue
                fastest = min(exact.values())
                assert rough[chip] <= fastest, (s, room, chip, rough[chip] / fastest)
                for name, own in steps.items():
                    assert bounds[name][chip] <= fastest, (s, room, chip, name)
                    known = _alike(evaluator, own, chip)
                    each = {
                        layout: _bound_of_layout(evaluator, known, layout, room)
                        for layout in _of_strategy(evaluator, s)
                    }
                    assert bounds[name][chip] <= min(each.values()), (s, room, chip, name)
                    for layout, most in exact.items():
                        ratio = each[layout] / most
                        assert ratio <= 1.0, (s, room, chip, name, evaluator.layouts[layout], ratio)
    return held


def _chips(rng: np.random.Generator, count: int) -> Any:
    picked = np.sort(rng.choice(len(tpuv4_space()), count, replace=False))
    return tpuv4_space().chips[picked].copy()


def _bounds_of(seed: int, presets: tuple[str, ...] = PRESETS) -> int:
    case = random_case(seed, presets)
    records = _chips(case.rng, 2)
    some = case.rng.permutation(len(case.problem))[:2]
    return _hold_bounds(case.problem, records, sorted(some.tolist()))


def test_no_bound_is_above_the_exact_time() -> None:
    assert sum(_bounds_of(seed) for seed in range(16)) > 150


@pytest.mark.slow
def test_no_bound_is_above_the_exact_time_of_many_cases() -> None:
    assert sum(_bounds_of(seed) for seed in range(1000, 1100)) > 3000
    assert sum(_bounds_of(seed, LARGE) for seed in range(2000, 2010)) > 0


def test_gradients_that_recomputation_hides() -> None:
    # From ZeRO 2 on a backward pass takes as long as its gradients, recomputation included.
    slow = FlatFabric(name="slow", bandwidth_bytes_per_s=2e10)
    step = pf.Training(
        global_batch=8,
        micro_batch=4,
        tp=1,
        pp=1,
        dp=2,
        zero=2,
        reserved_bytes=0,
    )
    cluster, model = pf.Cluster(devices=2, fabric=slow), pf.models.load("bertlarge")
    problem = SearchProblem(model, cluster, step, tpuv4_space().spec.base, (4 * GIB,))
    assert _hold_bounds(problem, tpuv4_space().chips[25000:25001]) == 1


def test_the_stage_with_most_gradients_is_not_the_first() -> None:
    # The optimiser's time of the embedding does not come on top of another stage's gradients.
    late = FlatFabric(name="late", bandwidth_bytes_per_s=1e12, latency_s=1e-4)
    model = TransformerModel(
        name="wide",
        layers=4,
        hidden=256,
        heads=4,
        ffn=256,
        vocab=250_000,
        seq=128,
        max_positions=128,
        head="none",
        tied_embeddings=False,
    )
    step = pf.Training(
        global_batch=8,
        micro_batch=1,
        tp=1,
        pp=2,
        dp=2,
        zero=0,
        schedule="1f1b",
        rank_order="replicas-inside",
        reserved_bytes=0,
    )
    cluster = pf.Cluster(devices=4, fabric=late)
    problem = SearchProblem(model, cluster, step, tpuv4_space().spec.base, (32 * GIB,))
    assert _hold_bounds(problem, tpuv4_space().chips[15000:15001]) == 1


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


@pytest.mark.usefixtures("same_patience")
@pytest.mark.parametrize("model", ["gpt2-small", "t5-small"])
def test_winners_are_those_of_plan(model: str) -> None:
    spec = tpuv4_space().spec
    axes = {**spec.axes, "hbm.capacity_bytes": (float(2 * GIB), float(8 * GIB))}
    space = pf.ArchitectureSpace(spec.replace(axes=axes))
    picked = np.sort(np.random.default_rng(3).choice(len(space), 6, replace=False))
    space = space[picked]
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    step = pf.Training(global_batch=8, micro_batch=(1, 2), zero=(0, 2), schedule=SCHEDULES)
    groups, loaded = ChipGroups.of(space), pf.models.load(model)
    problem = SearchProblem(loaded, cluster, step, groups.like, tuple(groups.capacities.tolist()))
    search = BestFirstSearch([problem], groups, top=len(space))
    assert search.run()
    best: dict[int, float] = {}
    for group, c in np.argwhere(groups.chip >= 0).tolist():
        chip = space[int(groups.chip[group, c])]
        found = plan(loaded, cluster.replace(chip=chip), step, top=1)
        if found.plans:
            best[group] = min(best.get(group, math.inf), found.best.time_s)
    assert {w.group: w.score for w in search.winners()} == best


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


@pytest.mark.usefixtures("same_patience")
def test_several_models_are_weighed_as_a_plain_loop_weighs_them() -> None:
    assert sum(_hold_several(seed) for seed in range(206, 211)) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("same_patience")
def test_several_models_in_many_cases() -> None:
    assert sum(_hold_several(seed) for seed in range(300, 308)) > 0


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
