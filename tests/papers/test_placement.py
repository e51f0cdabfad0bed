"""Layers on devices: enumeration of every cut, a checker, cases by hand, laws, threads, bad input."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from case_counts import some_or_many
from golden_files import refused_calls
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import branching, chain, random_published
from reference.placement import best_published, faults

from phaze_fast.errors import InvalidInputError
from phaze_fast.papers import LayerTable, PublishedProblem, place, place_batch

# ---- enumeration ----


def same(found, best, problem):
    """Whether a placement is the one of enumeration; also says whether there is one."""
    if best is None:
        assert found.status == "infeasible", problem
        return False
    assert faults(problem, found) == [], problem
    assert found.time_s == pytest.approx(best[0], rel=1e-9), (problem, found, best)
    return True


@some_or_many((200, 80), (1500, 400), (5000, 1200))
def test_placements_are_those_of_enumeration(cases):
    for shape, count in zip((chain, branching), cases, strict=True):
        rng = random.Random(41)
        problems = [random_published(rng, shape) for _ in range(count)]
        feasible = [same(place(p), best_published(p), p) for p in problems]
        assert 0.05 < feasible.count(False) / count < 0.7


# ---- by hand: a wrong kernel once missed these, or would ----


def test_narrow_ends_make_room_for_a_wide_middle():
    table = LayerTable(
        names="abcd",
        forward_s=[1.0] * 4,
        backward_s=[1.0] * 4,
        resident_bytes=[1.0] * 4,
        wide=[0, 1, 1, 0],
    )
    found = place(PublishedProblem({4: table}, 6, memory_bytes=2.0, micro_batches=1))
    assert (found.time_s, found.stages) == (12.0, ((0,), (1, 2), (3,)))


def test_what_fits_exactly_fits():
    table = LayerTable(names="abc", forward_s=[1.0] * 3, backward_s=[1.0] * 3)
    table = replace(table, resident_bytes=[0.3, 0.1, 0.2])
    found = place(PublishedProblem({1: table}, 2, 0.1 + 0.2, 1))
    assert found.stages == ((0,), (1, 2))


def test_a_layer_that_is_slow_backward_alone_may_be_the_first_stage():
    # Found by search: its work with the forward pass twice is less than that of lighter sets.
    table = LayerTable(
        names="abcd", forward_s=[2] * 4, backward_s=[0, 0, 3, 0], wide=[0, 0, 1, 0], edges=()
    )
    problem = PublishedProblem({2: table}, 3, memory_bytes=1, micro_batches=2, recompute=True)
    assert best_published(problem)[0] == 21
    assert place(problem).time_s == 21


# ---- laws ----

TIMES = ("forward_s", "backward_s", "sync_s", "edge_s")


def table_with(table, **changes):
    return LayerTable(**{f.name: getattr(table, f.name) for f in fields(table)} | changes)


def with_tables(problem, change):
    return replace(problem, tables={width: change(t) for width, t in problem.tables.items()})


def scaled(problem, factor):
    return with_tables(
        problem, lambda table: table_with(table, **{n: getattr(table, n) * factor for n in TIMES})
    )


def any_problem(seed):
    rng = random.Random(seed)
    return rng, random_published(rng, rng.choice((chain, branching)))


@given(st.integers(0, 2**32))
def test_scale_changes_nothing_but_the_scale(seed):
    _, problem = any_problem(seed)
    before = place(problem)
    for factor in (2.0**-33, 2.0**33):
        after = place(scaled(problem, factor))
        assert after.stages == before.stages
        assert after.replicas == before.replicas
        np.testing.assert_equal(after.time_s, before.time_s * factor)
    for factor in (1e-10, 1e10):
        after = place(scaled(problem, factor))
        assert after.status == before.status
        assert after.time_s == pytest.approx(before.time_s * factor, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("factor", [1e-10, 1e10])
def test_stages_do_not_depend_on_the_unit(factor):
    rng = random.Random(48)
    for _ in range(200):
        count = rng.randint(1, 7)
        times = [[rng.uniform(1.0, 10.0) for _ in range(count)] for _ in range(2)]
        sizes = [float(rng.randint(1, 9)) for _ in range(count)]
        edge_s = [rng.uniform(0.1, 0.5) for _ in range(count - 1)]
        table = LayerTable(range(count), *times, sizes, resident_bytes=sizes, edge_s=edge_s)
        problem = PublishedProblem({1: table}, count, 2 * sum(sizes), rng.randint(2, 12))
        assert place(scaled(problem, factor)).stages == place(problem).stages


def never_slower(after, before):
    if before.status == "optimal":
        assert after.status == "optimal"
        assert after.time_s <= before.time_s * (1 + 1e-9)


@given(st.integers(0, 2**32))
def test_more_devices_or_memory_is_never_slower(seed):
    rng, problem = any_problem(seed)
    before = place(problem)
    never_slower(place(replace(problem, memory_bytes=problem.memory_bytes * 1.5)), before)
    never_slower(place(replace(problem, devices=problem.devices + rng.randint(1, 4))), before)


@given(st.integers(0, 2**32))
def test_slower_edges_are_never_faster(seed):
    rng, problem = any_problem(seed)
    added = [rng.choice((0.0, 0.5, 3.0)) for _ in range(20)]

    def change(table):
        return table_with(table, edge_s=table.edge_s + added[: len(table.edges)])

    never_slower(place(problem), place(with_tables(problem, change)))


@given(st.integers(0, 2**32))
def test_the_stages_described_are_within_memory_and_have_the_largest_load(seed):
    _, problem = any_problem(seed)
    found = place(problem)
    if found.details:
        assert found.memory_bytes <= problem.memory_bytes * (1 + 1e-12)
        assert max(s.load_s for s in found.details) == pytest.approx(found.max_load_s)
        assert "is the slowest" in str(found)


def alike(one, other):
    names = [f.name for f in fields(one) if f.name not in ("table", "solve_s")]
    for name in names:
        np.testing.assert_equal(getattr(one, name), getattr(other, name))


@some_or_many(60, 200)
def test_batches_equal_single_calls_for_any_thread_count(cases):
    problems = [any_problem(seed)[1] for seed in range(cases)]
    one, two = (place_batch(problems, threads=threads) for threads in (1, 2))
    for problem, a, b in zip(problems, one, two, strict=True):
        alike(a, b)
        alike(a, place(problem))
    assert place_batch([]) == []


# ---- bad input ----

NAN, INF = float("nan"), float("inf")
TABLE = {"names": "abc", "forward_s": [1.0, 2.0, 3.0], "backward_s": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *refused_calls("placement"),
        ({"resident_bytes": [1.0, INF, 0.0]}, r"resident_bytes\[1\]: inf"),
    ],
)
def test_tables_that_are_not_right(change, words):
    with pytest.raises(InvalidInputError, match=words):
        LayerTable(**{**TABLE, **change})


PUBLISHED = PublishedProblem({1: LayerTable(**TABLE)}, 4, 1e9, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *refused_calls("published problem"),
        ({"tables": {0: LayerTable(**TABLE)}}, "tables: width 0"),
    ],
)
def test_problems_that_are_not_right(change, words):
    with pytest.raises(InvalidInputError, match=words):
        place(replace(PUBLISHED, **change))


def test_only_problems_are_placed():
    with pytest.raises(InvalidInputError, match="problems: expected"):
        place_batch([LayerTable(**TABLE)])
