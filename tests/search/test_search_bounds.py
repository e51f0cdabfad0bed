"""The search against what it bounds and against looking at everything.

Every lower bound is held against the exact time of `placement`, row by row; winners and fronts are
held, bit for bit, against all pairs of strategy and die placed with every layout, without bounds.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from phaze_fast.explore import placing, searcher
from phaze_fast.explore.dies import Dies
from phaze_fast.explore.goals import front_of
from phaze_fast.explore.judge import Judge
from phaze_fast.explore.pairs import Pairs
from phaze_fast.explore.searcher import Searcher
from phaze_fast.explore.workload import Question, Workload
from phaze_fast.placement.interleaved import interleaved
from phaze_fast.placement.layers import MAX_NODES
from search_cases import (
    FRONTS,
    GIB,
    LARGE,
    PRESETS,
    SCHEDULES,
    Case,
    _case,
    _space,
)

import phaze_fast as pf
from phaze_fast.hardware import FlatFabric
from phaze_fast.hardware.price import Prices
from phaze_fast.models import TransformerModel
from phaze_fast.placement import plan
from phaze_fast.placement.problems import PipelineProblem, place_counts
from phaze_fast.runs.executors import Workers

# ---- exact times ----


def _every_plan(
    work: Workload, s: int, timed: Any, chip: int, rates: Any, c: int
) -> dict[tuple[int, int], float]:
    """Give exact seconds by layout and count of stages."""
    mine = work.strategies[s]
    if mine.room[c] < mine.sizes.gathered_bytes:
        return {}
    frames, kinds, found = mine.frames, timed.kinds, {}
    problems, numbers = [], []
    for number, layout in enumerate(mine.layouts):
        table = frames.table(frames.columns(number, kinds, chip, float(rates[chip])))
        problem = PipelineProblem(
            table=table,
            memory_bytes=float(mine.room[c]) - mine.sizes.gathered_bytes,
            microbatches=layout.microbatches,
            stages=layout.stages,
            schedule="1f1b" if layout.schedule == "interleaved" else layout.schedule,
            piped_bytes=mine.sizes.piped_bytes,
            bucket_s=mine.sizes.bucket_s(layout.groups),
        )
        if layout.schedule == "interleaved":
            even = interleaved(problem, layout.groups.stages, layout.virtual)
            if even is not None:
                found[number, layout.groups.stages] = even.time_s
        else:
            problems.append(problem)
            numbers.append(number)
    for number, plans in zip(numbers, place_counts(problems), strict=True):
        found |= {(number, len(each.stages)): each.time_s for each in plans}
    return found


def _hold_bounds(question: Question, records: Any, strategies: Any = None) -> int:
    """Hold every bound of every step against the exact times; how many those were."""
    work, held = question.workload(), 0
    rates = work.rate(records)
    for s in range(len(work)) if strategies is None else strategies:
        mine, timed = work.strategies[s], work.time(s, records)
        steps = {n: work.bound(s, records, n) for n in ("roofline", "mapped", "listed")}
        steps["scheduled"] = timed.totals
        for c, rows in enumerate(mine.rows):
            for chip in range(len(records)):
                exact = _every_plan(work, s, timed, chip, rates, c)
                held += len(exact)
                keys = list(zip(rows.layout.tolist(), rows.stages.astype(int), strict=True))
                assert exact.keys() <= set(keys), (s, c, chip)
                if not exact:
                    continue
                one, fastest = slice(chip, chip + 1), min(exact.values())
                rough = rows.rough(steps["roofline"].work_s[one])[0]
                assert rough <= fastest, (s, c, chip, rough / fastest)
                for name in ("mapped", "listed", "scheduled"):
                    totals = steps[name].at(one)
                    bounds = rows.each(totals, rates[one])
                    assert rows.least(totals, rates[one])[0] == bounds.min()
                    for key, bound in zip(keys, bounds.tolist(), strict=True):
                        most = exact.get(key, math.inf)
                        assert bound <= most, (s, c, chip, name, mine.layouts[key[0]], key, most)
    return held


def _chips(rng: np.random.Generator, count: int) -> Any:
    picked = np.sort(rng.choice(len(_space()), count, replace=False))
    return _space().chips[picked].copy()


def _bounds_of(seed: int, presets: tuple[str, ...] = PRESETS) -> int:
    case = _case(seed, presets)
    records = _chips(case.rng, 2)
    some = case.rng.permutation(len(case.question.workload()))[:2]
    return _hold_bounds(case.question, records, sorted(some.tolist()))


def test_no_bound_is_above_the_exact_time() -> None:
    assert sum(_bounds_of(seed) for seed in range(40)) > 1000


@pytest.mark.slow
def test_no_bound_is_above_the_exact_time_of_many_cases() -> None:
    assert sum(_bounds_of(seed) for seed in range(1000, 1100)) > 3000
    assert sum(_bounds_of(seed, LARGE) for seed in range(2000, 2010)) > 0


def test_gradients_that_recomputation_hides() -> None:
    # From ZeRO 2 on a backward pass takes as long as its gradients, recomputation included.
    slow = FlatFabric(name="slow", bandwidth_bytes_per_s=2e10)
    step = pf.Training(
        global_batch=8,
        microbatch=4,
        tensor_parallel=1,
        pipeline=1,
        data_parallel=2,
        zero=2,
        reserved_bytes=0,
    )
    cluster, model = pf.Cluster(devices=2, fabric=slow), pf.models.load("bertlarge")
    question = Question(model, cluster, step, _space().spec.base, (4 * GIB,))
    assert _hold_bounds(question, _space().chips[25000:25001]) == 1


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
        microbatch=1,
        tensor_parallel=1,
        pipeline=2,
        data_parallel=2,
        zero=0,
        schedule="1f1b",
        rank_order="replicas-inside",
        reserved_bytes=0,
    )
    cluster = pf.Cluster(devices=4, fabric=late)
    question = Question(model, cluster, step, _space().spec.base, (32 * GIB,))
    assert _hold_bounds(question, _space().chips[15000:15001]) == 1


# ---- the search against everything ----


Everything = dict[tuple[int, int, int], tuple[placing.Found, float]]


def _everything(question: Question, dies: Dies) -> Everything:
    """Place every die, capacity and strategy with every layout, without a bound."""
    work, found = question.workload(), {}
    rate = work.rate(dies.records)
    for s, mine in enumerate(work.strategies):
        timed = work.time(s, dies.records)
        for die, c in np.argwhere(dies.chip >= 0).tolist():
            if mine.room[c] < mine.sizes.gathered_bytes:
                continue
            asked = [
                placing._Asked(die, c, number, float(mine.room[c]), 0.0)
                for number in range(len(mine.layouts))
            ]
            plans = placing._solve(mine.frames, timed.kinds, rate, asked, 1)
            fits = [each for each in plans if each.layout >= 0]
            if fits:
                best = min(fits, key=lambda each: (each.time_s, each.layout))
                found[die, c, s] = (best, work.energy_j(s, timed, die, best))
    return found


def _ranked(found: Everything, dies: Dies) -> list[tuple[Any, ...]]:
    """Rank dies, each with its best capacity and strategy."""
    best: dict[tuple[int, int], tuple[Any, ...]] = {}
    for (die, c, s), (plan_, joules) in found.items():
        best[die, c] = min(best.get((die, c), (math.inf,)), (plan_.time_s, joules, s))
    of_die: dict[int, tuple[Any, ...]] = {}
    for (die, c), (time_s, joules, s) in best.items():
        rank = (time_s, float(dies.area_mm2[die]), joules, int(dies.capacities[c]))
        own = (*rank, int(dies.chip[die, c]), die, c, s)
        of_die[die] = min(of_die.get(die, (math.inf,)), own)
    return sorted(of_die.values())


def _winners(winners: Any) -> list[tuple[Any, ...]]:
    return [(*w.rank, w.die, w.capacity, w.strategies[0]) for w in winners]


def _front(found: Everything, dies: Dies, names: tuple[str, ...], devices: int) -> Any:
    usd = Prices().device_usd(dies.area_mm2[:, None], dies.capacities[None, :].astype(float))
    points = sorted(found)
    columns = {
        "time": [found[p][0].time_s for p in points],
        "area": [float(dies.area_mm2[p[0]]) for p in points],
        "energy": [found[p][1] for p in points],
        "hbm": [float(dies.capacities[p[1]]) for p in points],
        "cost": [float(usd[p[0], p[1]]) * devices for p in points],
    }
    values = np.array([columns[name] for name in names]).T.reshape(-1, len(names))
    return {points[k]: tuple(values[k].tolist()) for k in front_of(values)}


def _ragged(rng: np.random.Generator, capacities: tuple[int, ...], count: int) -> Dies:
    """Give dies near one another, some with the same times, each with some of the capacities."""
    first = int(rng.integers(0, len(_space()) - 60))
    chips, areas = [], []
    for at in np.sort(rng.choice(60, count, replace=False)) + first:
        for size in [c for c in capacities if rng.random() < 0.7] or capacities[-1:]:
            chip = _space().chips[at].copy()
            chip["hbm_bytes"] = size
            chips.append(chip)
            areas.append(float(_space().area_mm2[at]))
    order = rng.permutation(len(chips))
    records = np.array(chips, dtype=_space().chips.dtype)[order]
    return Dies.of_records(records, np.array(areas)[order], _space().spec.base)


def _small(seed: int) -> tuple[Case, Dies]:
    case = _case(seed, ("t5-small", "gpt2-small"), devices=8, layers=7)
    dies = _ragged(case.rng, case.capacities, int(case.rng.choice([4, 8])))
    return case._replace(capacities=tuple(int(c) for c in dies.capacities)), dies


def _all_proven(question: Question, dies: Dies) -> bool:
    work = question.workload()
    return all(work.time(s, dies.records).kinds.proven.all() for s in range(len(work)))


def _hold_search(seed: int, quick: bool = True) -> int:
    case, dies = _small(seed)
    if quick and not _all_proven(case.question, dies):
        return 0
    question, top = case.question, int(case.rng.choice([1, 2, 3, 8]))
    found = _everything(question, dies)
    wanted = _ranked(found, dies)
    plain = Searcher([question], dies, top=top)
    assert plain.run()
    assert _winners(plain.winners()) == wanted[:top], seed
    with ThreadPoolExecutor(2) as pool, Workers(pool, 2) as workers:
        others = [Searcher([question], dies, top=top, threads=2)]
        others.append(Searcher([question], dies, top=top, workers=workers))
        for names in FRONTS[seed % 2 :: 2]:
            others.append(Searcher([question], dies, top=top, objectives=names))
            others.append(Searcher([question], dies, top=top, objectives=names, workers=workers))
        for other in others:
            assert other.run()
            assert _winners(other.winners()) == wanted[:top], (seed, other.objectives)
            if other.objectives:
                names = other.front.objectives
                points = zip(other.front.points, other.front.values.tolist(), strict=True)
                front = {point: tuple(values) for point, values in points}
                assert front == _front(found, dies, names, case.cluster.devices), (seed, names)
    each = Judge([question], dies).winners(range(len(dies)))
    assert sorted(_winners([w for w in each if w is not None])) == wanted, seed
    return len(wanted)


@pytest.fixture
def same_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search look as long for schedules as `plan` does, so that both are the same."""
    monkeypatch.setattr(searcher, "_MORE_NODES", MAX_NODES)


@pytest.mark.usefixtures("same_patience")
def test_the_search_finds_what_looking_at_everything_finds() -> None:
    assert sum(_hold_search(seed) for seed in range(8)) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("same_patience")
def test_the_search_finds_what_looking_at_everything_finds_in_many_cases() -> None:
    assert sum(_hold_search(seed) for seed in range(100, 120)) > 0
    assert sum(_hold_search(seed, quick=False) for seed in (0, 2, 5)) > 0


@pytest.mark.usefixtures("same_patience")
@pytest.mark.parametrize("model", ["gpt2-small", "t5-small"])
def test_winners_are_those_of_plan(model: str) -> None:
    spec = _space().spec
    axes = {**spec.axes, "hbm.capacity_bytes": (float(2 * GIB), float(8 * GIB))}
    space = pf.ArchitectureSpace(spec.replace(axes=axes))
    picked = np.sort(np.random.default_rng(3).choice(len(space), 6, replace=False))
    space = space[picked]
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    step = pf.Training(global_batch=8, microbatch=(1, 2), zero=(0, 2), schedule=SCHEDULES)
    dies, loaded = Dies.of(space), pf.models.load(model)
    question = Question(loaded, cluster, step, dies.like, tuple(dies.capacities.tolist()))
    search = Searcher([question], dies, top=len(space))
    assert search.run()
    best: dict[int, float] = {}
    for die, c in np.argwhere(dies.chip >= 0).tolist():
        chip = space[int(dies.chip[die, c])]
        found = plan(loaded, cluster.replace(chip=chip), step, top=1)
        if found.plans:
            best[die] = min(best.get(die, math.inf), found.best.time_s)
    assert {w.die: w.score for w in search.winners()} == best


# ---- several models ----


def _hold_several(seed: int) -> int:
    case, dies = _small(seed)
    other = _case(seed + 10**6, (), devices=8, layers=5)
    first = case.question
    second = Question(other.model, case.cluster, other.training, first.like, first.capacities)
    weights = tuple(float(w) for w in case.rng.choice([0.001, 0.5, 1.0, 3.0], 2))
    best: list[dict[tuple[int, int], float]] = []
    for question in (first, second):
        times: dict[tuple[int, int], float] = {}
        for (die, c, _), (found, _) in _everything(question, dies).items():
            times[die, c] = min(times.get((die, c), math.inf), found.time_s)
        best.append(times)
    search = Searcher([first, second], dies, weights=weights, top=3, objectives=("time", "area"))
    assert search.run()
    scores: dict[int, float] = {}
    for at in best[0].keys() & best[1].keys():
        times_of = [np.array([own[at]]) for own in best]
        score = float(search._score(times_of)[0])
        assert score == pytest.approx(
            math.exp(
                sum(w * math.log(own[at]) for w, own in zip(weights, best, strict=True))
                / sum(weights)
            )
        )
        scores[at[0]] = min(scores.get(at[0], math.inf), score)
    wanted = sorted((score, float(dies.area_mm2[die])) for die, score in scores.items())
    assert [(w.score, w.area_mm2) for w in search.winners()] == wanted[:3], seed
    front = np.array(wanted).reshape(-1, 2)
    kept = {tuple(row) for row in front[front_of(front)].tolist()}
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


def test_dies_with_the_same_times_share_plans_of_all_their_capacities() -> None:
    chips = np.repeat(_space().chips[20000:20001], 4)
    chips["hbm_bytes"] = [16 * GIB, 32 * GIB] * 2
    chips["hbm_stacks"][2:] += 1
    dies = Dies.of_records(chips, np.array([1.0, 1.0, 2.0, 2.0]), _space().spec.base)
    assert len(dies) == 2
    step = pf.Training(global_batch=16, microbatch=4, tensor_parallel=1)
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    model = pf.models.load("gpt2-small")
    pairs = Pairs(Question(model, cluster, step, dies.like, (16 * GIB, 32 * GIB)), dies)
    both = np.arange(2)
    pairs.schedule(0, both)
    (first, _) = pairs.place(0, both[:1], np.full((1, 2), 1e9))
    pairs.schedule(0, both)
    time_s = first.found.time_s
    # The second die asks for longer plans, but not for the larger HBM; the first has asked before.
    below = np.array([[2 * time_s, 2 * time_s], [1e10, -np.inf]])
    found = [(each.die, each.capacity) for each in pairs.place(0, both, below)]
    assert found == [(0, 0), (0, 1), (1, 0)]


def test_no_strategy_at_all() -> None:
    # A micro-batch that does not divide the batch leaves nothing to bound.
    step = pf.Training(global_batch=4, microbatch=3)
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    dies = Dies.of_records(_space().chips[:2], _space().area_mm2[:2], _space().spec.base)
    capacities = tuple(dies.capacities.tolist())
    question = Question(pf.models.load("gpt2-small"), cluster, step, dies.like, capacities)
    for objectives in ((), ("time", "area"), ("time", "energy")):
        search = Searcher([question], dies, objectives=objectives)
        assert search.run()
        assert search.winners() == []
