"""HiGHS on layers: latencies of very different sizes, what it proves, what it is not believed."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from case_counts import slow_ones, slow_or_thorough, some_or_many
from reference.layer import best_makespan
from reference.layers_at_random import check, random_layer, wide_range

from phaze_fast.schedule import highs, instance_from_dict, schedule_instances
from phaze_fast.schedule.highs import TOLERANCE, earliest_starts, is_feasible, solve_with_highs

GOLDEN = Path(__file__).parents[1] / "golden" / "layer_golden.jsonl"


def rough_schedule(layer, rule="exclusive"):
    (rough,) = schedule_instances([layer], rule, max_nodes=0, highs=False)
    return rough


def layer_of(cores, ops, edges):
    """A layer from type, latency on one core and latency on all of each operator."""
    listed = [
        {"id": i, "type": kind, "lat_single": one, "lat_all": every}
        for i, (kind, one, every) in enumerate(ops)
    ]
    pairs = [list(edge) for edge in edges]
    record = {"name": "found", "ops": listed, "edges": pairs, "num_tc": cores[0]}
    return instance_from_dict({**record, "num_vc": cores[1]})


FOUND = [  # by search: each once was called optimal with another makespan, above or below this one
    (
        "exclusive",
        0.02620000000813,
        (3, 2),
        [
            ("TC", 0.0262, 8.21e5),
            ("NET", 9.14e-11, 2.31e-10),
            ("NET", 0.525, 8.13e-12),
            ("TCandVC", 0.0239, 65.8),
        ],
        [(1, 3), (2, 3)],
    ),
    (
        "overlap",
        432.0000000772,
        (3, 1),
        [("TCandVC", 432.0, 12900.0), ("VC", 0.837, 7.72e-08), ("NET", 347000.0, 54.2)],
        [(1, 2)],
    ),
    (
        "exclusive",
        41.080000000297,
        (4, 3),
        [("NET", 37.3, 32200.0), ("TC", 4.36e6, 2.97e-10), ("TC", 3.78, 5.31)],
        [(0, 1), (1, 2)],
    ),
    (
        "overlap",
        7108.00000000757,
        (3, 2),
        [
            ("TC", 6920.0, 778000.0),
            ("TC", 0.252, 7.57e-09),
            ("VC", 3.21e-07, 1200.0),
            ("TC", 188.0, 781.0),
        ],
        [(0, 1), (1, 2), (1, 3)],
    ),
]


@pytest.mark.parametrize(("rule", "optimum", "cores", "ops", "edges"), FOUND)
def test_latencies_of_very_different_sizes(rule, optimum, cores, ops, edges):
    layer = layer_of(cores, ops, edges)
    assert best_makespan(layer, rule == "overlap") == pytest.approx(optimum, rel=1e-12)
    (exact,) = schedule_instances([layer], rule, highs=False)
    found = solve_with_highs(rough_schedule(layer, rule), 60.0)
    check(found)
    assert found.status == exact.status == "optimal"
    assert found.makespan == pytest.approx(optimum, rel=1e-12)
    assert optimum * (1 - TOLERANCE) <= found.bound <= optimum * (1 + 1e-12)


def between_bounds(layer, rule, optimum):
    """A bound is never above the optimum, a makespan never below, and a proof keeps its word."""
    found = solve_with_highs(rough_schedule(layer, rule), 60.0)
    assert is_feasible(layer, found.starts, found.mode, found.overlap)
    ends = [s + d for s, d in zip(found.starts, found.durations, strict=True)]
    assert found.makespan == max(ends)
    assert found.bound <= optimum * (1 + 1e-12)
    assert found.makespan >= optimum * (1 - 1e-12)
    assert (found.status == "optimal") == (found.proved_by != "nothing")
    if found.status == "optimal":
        assert found.makespan <= optimum * (1 + TOLERANCE)
    return found


@some_or_many(8, 20)
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
@pytest.mark.parametrize("decades", [3, 7, 13, 18])
def test_bound_optimum_and_makespan_are_in_order_for_all_ranges(rule, decades, cases):
    rng = random.Random(31 + decades)
    proven = 0
    for _ in range(cases):
        layer = instance_from_dict(wide_range(rng, rng.randint(2, 4), decades))
        optimum = best_makespan(layer, rule == "overlap")
        proven += between_bounds(layer, rule, optimum).status == "optimal"
        (exact,) = schedule_instances([layer], rule, highs=False)
        assert exact.status == "optimal"
        assert exact.makespan == pytest.approx(optimum, rel=1e-12)
    assert proven >= cases - 1


@slow_or_thorough(120, 800)
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_more_layers_of_all_ranges(rule, cases):
    rng = random.Random(32)
    for _ in range(cases):
        layer = instance_from_dict(wide_range(rng, rng.randint(2, 7), rng.choice([2, 7, 13, 18])))
        (exact,) = schedule_instances([layer], rule, highs=False)
        between_bounds(layer, rule, exact.makespan)


def test_a_makespan_proven_before_stays_proven():
    layer = layer_of((1, 1), [("TC", 3.0, 3.0), ("TC", 2.0, 2.0)], [(0, 1)])
    rough = rough_schedule(layer)
    assert rough.status == "optimal"
    assert solve_with_highs(rough, 60.0) == rough


def test_layers_without_any_time():
    layer = layer_of((1, 1), [("TC", 0.0, 0.0), ("VC", 0.0, 0.0)], [])
    assert solve_with_highs(rough_schedule(layer), 60.0).makespan == 0.0


def test_two_ways_of_one_core_count():
    op = {"id": 0, "type": "TC", "lat_single": 8.0, "lat_cores": {"1": 5.0}}
    layer = instance_from_dict({"name": "x", "ops": [op], "edges": [], "num_tc": 2, "num_vc": 1})
    slow = replace(rough_schedule(layer), mode=(0,), makespan=8.0, bound=1.0, status="feasible")
    found = solve_with_highs(slow, 60.0)
    assert (found.makespan, found.mode, found.status) == (5.0, (1,), "optimal")


# ---- what is not believed ----


def answered(monkeypatch, **said):
    """HiGHS as it would be if it said something else."""
    run = highs._run

    def other(program, end, time_limit_s):
        return replace(run(program, end, time_limit_s), **said)

    monkeypatch.setattr(highs, "_run", other)


@pytest.fixture
def open_layer():
    """A layer that list schedules do not solve: schedule at hand, optimum."""
    rng = random.Random(13)
    while True:
        layer = instance_from_dict(random_layer(rng, 7))
        rough = rough_schedule(layer)
        (exact,) = schedule_instances([layer], highs=False)
        if rough.status == "feasible" and exact.makespan < rough.makespan * 0.99:
            return rough, exact.makespan


def test_a_bound_above_the_schedule_is_not_believed(monkeypatch, open_layer):
    rough, optimum = open_layer
    answered(monkeypatch, dual_bound=2.0)
    found = solve_with_highs(rough, 60.0)
    check(found)
    assert (found.status, found.bound) == ("feasible", rough.bound)
    assert found.makespan == pytest.approx(optimum, rel=1e-9)


def test_a_run_with_doubts_proves_nothing(monkeypatch, open_layer):
    rough, optimum = open_layer
    answered(monkeypatch, sound=False)
    found = solve_with_highs(rough, 60.0)
    check(found)
    assert (found.status, found.bound) == ("feasible", rough.bound)
    assert found.makespan == pytest.approx(optimum, rel=1e-9)


def test_a_run_without_a_solution_changes_nothing(monkeypatch, open_layer):
    rough, _ = open_layer
    answered(monkeypatch, values=[], objective=float("inf"), dual_bound=0.0, sound=False)
    assert solve_with_highs(rough, 60.0) == rough


def test_a_bound_that_is_not_met_leaves_a_gap(monkeypatch, open_layer):
    rough, optimum = open_layer
    between = (rough.bound + optimum) / 2 / rough.makespan
    answered(monkeypatch, dual_bound=between)
    found = solve_with_highs(rough, 60.0)
    assert found.status == "feasible"
    assert rough.bound < found.bound < optimum
    assert found.gap == pytest.approx(found.makespan / found.bound - 1.0)


@pytest.mark.parametrize("seed", slow_ones(range(20), *range(7, 20)))
def test_whatever_a_solver_says_the_schedule_is_one(monkeypatch, open_layer, seed):
    rough, optimum = open_layer
    rng = random.Random(seed)
    program, _ = highs._build(rough, highs._modes_of(rough))
    noise = [rng.random() for _ in program.lower]
    answered(monkeypatch, values=noise, sound=False)
    found = solve_with_highs(rough, 60.0)
    check(found)
    assert is_feasible(found.instance, found.starts, found.mode, found.overlap)
    assert optimum * (1 - 1e-12) <= found.makespan <= rough.makespan


def test_a_time_limit_leaves_a_true_bound():
    records = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    record = next(r for r in records if r["name"] == "gptbwd_8x2_w128")
    layer = instance_from_dict(record)
    found = solve_with_highs(rough_schedule(layer), 0.5)
    check(found)
    assert found.bound <= record["best_known"] <= found.makespan


# ---- exact replay ----


def test_replay_gives_schedules_and_knows_others():
    rng = random.Random(41)
    for _ in range(100):
        layer = instance_from_dict(random_layer(rng, 8, most_modes=3))
        overlap = rng.random() < 0.5
        mode = [rng.randrange(len(modes)) for modes in layer.modes]
        starts = earliest_starts(layer, range(len(layer)), mode, overlap)
        assert is_feasible(layer, starts, mode, overlap)
        late = max(range(len(layer)), key=lambda i: starts[i])
        if starts[late] > 0:  # it starts as early as it can, so any earlier is too early
            earlier = [s * 0.99 if i == late else s for i, s in enumerate(starts)]
            assert not is_feasible(layer, earlier, mode, overlap)


def test_an_operator_of_no_length_still_needs_its_cores():
    layer = layer_of((2, 1), [("TC", 4.0, 4.0), ("TC", 0.0, 0.0)], [])
    assert is_feasible(layer, [0.0, 2.0], [0, 0], False)
    assert not is_feasible(layer, [0.0, 2.0], [0, 1], False)  # it takes all cores
    assert not is_feasible(layer, [0.0, 2.0], [1, 0], True)
    assert is_feasible(layer, [0.0, 4.0], [0, 1], False)
    assert earliest_starts(layer, [0, 1], [0, 1], False) == [0.0, 0.0]
    assert not is_feasible(layer, [0.0, -1.0], [0, 0], False)
