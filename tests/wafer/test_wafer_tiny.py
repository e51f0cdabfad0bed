"""The search for mappings and its bound against brute force, over every micro-batch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import starmap

import pytest
from case_counts import slow_or_thorough
from wafer_tiny_cases import BERT, FAST, tiny_problem, tiny_workload

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import Layout, Problem, WaferTraining, evaluate, load_wafer, megatron
from phaze_fast.wafer.mapping.encoding import layout_faults
from phaze_fast.wafer.mapping.layout import weighed_split
from phaze_fast.wafer.search.bounds import any_placement_bound, quick_bound, roofline, tight_bound
from phaze_fast.wafer.search.result import Effort
from phaze_fast.wafer.search.search import search_mapping


def every_layout(problem: Problem) -> list[Layout]:
    """Whatever the rules accept, found by trying: every rectangle, count and micro-batch."""
    columns, rows = problem.wafer.grid
    sides = [range(1, rows * columns + 1), range(1, rows + 1), range(1, problem.work.blocks + 1)]
    tried = itertools.product(*sides, range(1, 2 * problem.training.global_batch + 1))
    plain = [layout for layout in starmap(Layout, tried) if not layout_faults(problem, layout)]
    piped = [
        replace(layout, schedule=schedule, chunks=chunks)
        for layout in plain
        if layout.stages > 1
        for schedule, chunks in (("zb-h1", 1), *(("interleaved", v) for v in range(1, 7)))
    ]
    found = plain + [layout for layout in piped if not layout_faults(problem, layout)]
    blocks, ends = problem.work.blocks, problem.work.ends
    for layout in [each for each in found if each.schedule != "interleaved"]:
        uneven = weighed_split(blocks, layout.stages, ends)
        if uneven != problem.blocks(layout):
            found.append(replace(layout, blocks=uneven))
    return found


def brute_force(problem: Problem, most: float) -> tuple[float, float] | None:
    """(bytes over, time) of the best of all mappings; None where there are too many to try."""
    mappings = []
    for layout in every_layout(problem):
        try:
            mappings.append(problem.mapping(layout))
        except InvalidInputError:
            continue
    if sum(mapping.mapping_count() for mapping in mappings) > most:
        return None
    scores = [mapping.exhaust()[1][0] for mapping in mappings]
    return min(
        (float(s["over_bytes"] + s["stream_over_bytes"]), float(s["time_s"])) for s in scores
    )


def tiny_gaps(cases: int, most: float, seed: int) -> list[float]:
    """Time of the search relative to the best there is, case by case; infeasible ones agree."""
    rng = random.Random(seed)
    effort = Effort(seeds=3, steps=3000, promising=6)
    gaps: list[float] = []
    while len(gaps) < cases:
        problem = tiny_problem(rng)
        best = brute_force(problem, most)
        if best is None:
            continue
        found = search_mapping(problem, effort, seed=len(gaps))
        # Stages of two shapes are tried by brute force in test_wafer_classes.py.
        every = (found.best, *found.runners_up)
        alone = min(
            (each for each in every if each.encoding.second_class is None), key=lambda e: e.rank
        )
        assert alone.fits == (best[0] <= 0.0)
        if not alone.fits:
            continue
        assert found.best.time_s <= alone.time_s
        assert found.bound_s <= best[1] * (1 + 1e-12)
        assert alone.time_s >= best[1] * (1 - 1e-12)
        gaps.append(alone.time_s / best[1] - 1.0)
    return gaps


def test_tiny_instances_are_solved_as_brute_force_solves_them():
    gaps = tiny_gaps(8, 3e4, seed=5)
    assert sum(gap <= 1e-9 for gap in gaps) >= 7
    assert max(gaps) <= 0.01


@slow_or_thorough(60, 300)
def test_three_hundred_tiny_instances(cases):
    """At least 98% are optimal, the others within 1%, over every micro-batch that is accepted."""
    gaps = tiny_gaps(cases, 5e4, seed=1)
    assert sum(gap <= 1e-9 for gap in gaps) >= 0.98 * cases
    assert max(gaps) <= 0.01


@pytest.mark.parametrize("batch", [6, 12, pytest.param(45, marks=pytest.mark.slow)])
def test_the_layouts_are_those_that_the_rules_accept(batch):
    wafer = load_wafer("dojo-tile-like").replace(dead=((2, 1),))
    problem = Problem(BERT, wafer, WaferTraining(batch))
    listed = list(problem.layouts())
    assert sorted(listed) == sorted(every_layout(problem))
    assert len(set(listed)) == len(listed)


def test_a_batch_of_375_sequences():
    """Micro-batch 75 beats all powers of two that divide the batch: only 1 does."""
    problem = Problem(BERT, load_wafer("dojo-tile-like"), WaferTraining(375))
    found = search_mapping(problem, Effort(seeds=1, steps=1000, promising=2))
    known = evaluate(problem, megatron(problem, Layout(5, 5, 1, 75), 1, weights="zero1"), True)
    assert found.bound_s <= found.best.time_s <= 0.066
    assert not known.fits or found.bound_s <= known.time_s
    assert "micro-batches that divide 375" in found.bound_space
    assert found.bound_space in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_micro_batch_beats_the_bound(every):
    """One search for each divisor of the batch (or some), held against the bound over all."""
    batch = 500
    problem = Problem(BERT, load_wafer("dojo-tile-like"), WaferTraining(batch))
    quick = Effort(seeds=1, steps=500, promising=1)
    found = search_mapping(problem, quick)
    listed = list(problem.layouts())
    for micro_batch in [b for b in range(1, batch + 1) if batch % b == 0][::every]:
        wanted = [each for each in listed if each.micro_batch == micro_batch]
        one = search_mapping(problem, quick, wanted=wanted)
        assert not one.best.fits or found.bound_s <= one.best.time_s
        assert "given layouts" in one.bound_space


def test_bounds_hold_for_every_op_mapping_of_tiny_layouts():
    rng = random.Random(11)
    checked = streamed = 0
    while checked < 30:
        problem = tiny_problem(rng)
        over = roofline(problem)
        anywhere_s = any_placement_bound(problem)
        for layout in every_layout(problem):
            mapping = problem.mapping(layout)
            if mapping.mapping_count() > 3e3:
                continue
            score = mapping.exhaust()[1][0]
            if score["over_bytes"] + score["stream_over_bytes"] > 0:
                continue
            least = float(score["time_s"]) * (1 + 1e-12)
            assert over.bound_s(problem, layout) <= least
            assert anywhere_s <= least
            relaxation = mapping.relaxation()
            free = relaxation.bound(1.0, 0.0)[0]
            assert free <= quick_bound(problem, layout, relaxation, free) <= least
            tight = tight_bound(problem, layout, relaxation)
            assert free <= tight <= least
            streamed += layout.dies > 1 and bool((mapping.op_mappings()["mode"] >= 4).any())
            # One that is enough stops there, and is a bound as well.
            enough = free + rng.random() * (tight - free)
            assert enough <= tight_bound(problem, layout, relaxation, 0.0, enough) <= least
            checked += 1
    assert streamed > 3


def test_a_bound_over_any_placement_is_met_by_one_operator_on_one_die():
    """A chain without conversions on all dies takes what the bound says, but for the optimiser."""
    rng = random.Random(3)
    for _ in range(10):
        work = tiny_workload(rng)
        wafer = load_wafer("dram-wafer").replace(columns=1, rows=1)
        problem = Problem(BERT, wafer, WaferTraining(6), work=work)
        best = min(
            float(problem.mapping(layout).score()["time_s"][0] - _tail_s(problem, layout))
            for layout in problem.layouts()
        )
        assert any_placement_bound(problem) <= best * (1 + 1e-12)
        assert best == pytest.approx(any_placement_bound(problem), rel=1e-6)


def _tail_s(problem: Problem, layout: Layout) -> float:
    return float(problem.mapping(layout).score()["tail_s"][0])


def short_of_room(rng: random.Random) -> Problem | None:
    """A tiny problem whose state may have no room, on the wafer or off it; None without state."""
    problem = tiny_problem(rng)
    state = roofline(problem).state_bytes
    if not state:
        return None
    wafer = problem.wafer.replace(
        off_wafer={"capacity_bytes": int(state * rng.uniform(0.2, 1.2)) + 8, **FAST}
    )
    room = state * rng.uniform(0.05, 0.5) / wafer.dies
    given = (problem.model, wafer, problem.training)
    return Problem(*given, capacity_bytes=room, work=problem.work)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_no_mapping_fits_where_state_has_no_room_on_or_off_the_wafer(seed):
    """Every mapping of layouts that are left out at once: none of them fits.

    Problems are drawn until there were enough layouts of both kinds.
    """
    rng = random.Random(seed)
    left_out = fitting = 0
    for _ in range(400):
        if left_out > 20 and fitting > 8:
            return
        problem = short_of_room(rng)
        if problem is None:
            continue
        over = roofline(problem)
        for layout in every_layout(problem):
            mapping = problem.mapping(layout)
            if mapping.mapping_count() > 300:
                continue
            score = mapping.exhaust()[1][0]
            fits = score["over_bytes"] + score["stream_over_bytes"] <= 0
            bound_s = over.bound_s(problem, layout)
            assert not fits or bound_s <= float(score["time_s"]) * (1 + 1e-12)
            left_out += bound_s == float("inf")
            fitting += bool(fits)
    pytest.fail(f"{left_out} layouts left out and {fitting} that fit in 400 problems")
