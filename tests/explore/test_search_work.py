"""What a search looks at and when it stops: limits, ties, budgets, and counts of its work."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from search_cases import few_groups, some_with_every_hbm

import phaze_fast as pf
from phaze_fast.explore import (
    BestFirstSearch,
    Budget,
    ChipGroups,
    Explorer,
    LeastProductSearch,
    LimitedSearch,
    best_first,
    problems_of,
)
from phaze_fast.explore.candidates import PLACED, SCHEDULED

MODEL = pf.models.load("gpt2-small").replace(layers=3)
CLUSTER = pf.Cluster(devices=4, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=16, seq=256, micro_batch=(1, 4), tp=(1, 2), schedule="1f1b")


def searched(groups, kind=BestFirstSearch, step=STEP, **options):
    problems = problems_of([MODEL], groups, CLUSTER, step)
    search = kind(problems, groups, **options)
    search.run()
    return search


def work(search):
    """What every wave did."""
    return [(p.bounded, p.scheduled, p.placed, p.open, p.bound) for p in search.history]


@pytest.mark.parametrize(
    ("passed_s", "limit_s", "complete"),
    [(0.0, 0.0, True), (2.0, 2.0, True), (2.0, 3.0, True), (2.0, 1.0, False)],
)
def test_a_search_stops_once_more_than_its_time_has_passed(
    monkeypatch, passed_s, limit_s, complete
):
    groups = few_groups(2, (16,))
    models = [MODEL, MODEL.replace(name="odd", hidden=192, heads=3)]  # no width of 2 divides 3
    search = BestFirstSearch(problems_of(models, groups, CLUSTER, STEP), groups)
    search._began, now = 100.0, 100.0 + passed_s
    monkeypatch.setattr(best_first, "_SEEDS", (1, 1, 1, 1))
    monkeypatch.setattr(best_first, "time", SimpleNamespace(monotonic=lambda: now))
    assert search.run(Budget(time_limit_s=limit_s)) is complete
    assert {progress.seconds for progress in search.history} == {passed_s}
    counts, left = search.counts(), search.history[-1].open
    assert (left > 0, counts["open"]) == (not complete, left)
    sizes = [table.level.size for table in search.tables]
    assert sizes[0] > sizes[1]
    assert sum(counts.values()) == 2 * sizes[0]


def test_a_capacity_on_which_nothing_fits_changes_no_work():
    """A group's limit is the best of its scores, though it has none with some capacity."""
    with_small, alone = (searched(few_groups(40, sizes), top=40) for sizes in ((0.01, 16), (16,)))
    assert work(with_small) == work(alone)
    assert 0 < alone.placed < alone.tables[0].level.size


def test_a_bound_equal_to_its_limit_is_placed():
    groups = few_groups()
    limits = np.full(len(groups), np.inf)
    first = searched(groups, LimitedSearch, limits=limits)
    exact, _ = first.exact()
    assert np.isfinite(exact).all()
    again = LimitedSearch(problems_of([MODEL], groups, CLUSTER, STEP), groups, exact)
    again.known = first.candidate_bounds()
    assert again.exact()[0].tolist() == exact.tolist()


def test_bounds_of_points_are_rounded_down():
    space = some_with_every_hbm(1, 4)
    groups = ChipGroups.of(space)
    (table,) = BestFirstSearch(problems_of([MODEL], groups, CLUSTER, STEP), groups).tables
    table.bound_all()
    least = table.least.min(axis=0)[groups.of_chip[:, 0]]
    bounds = Explorer(MODEL, space, CLUSTER, STEP).bounds_s
    largest = groups.of_chip[:, 1] == len(groups.capacities) - 1
    assert (bounds < least)[largest].all()
    assert bounds[largest] == pytest.approx(least[largest], rel=1e-11, abs=0.0)


@pytest.mark.parametrize("top", [1, 3])
def test_what_is_reported_is_what_is_kept(top):
    """Progress after every wave, and the best groups, the smaller chip first where times tie."""
    groups, reported = few_groups(5, (8, 16)), []
    area_mm2 = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    records = np.repeat(groups.records[:1], 5)
    records["hbm_stacks"] = np.arange(5)  # of no interest to time
    alike = replace(groups, records=records, area_mm2=area_mm2)
    search = searched(alike, top=top, progress=reported.append)
    assert reported == search.history
    assert [winner.area_mm2 for winner in search.winners()] == sorted(area_mm2.tolist())[:top]
    assert {winner.capacity for winner in search.winners()} == {0}
    assert len({winner.score for winner in search.winners()}) == 1


def test_an_outcome_counts_points_designs_and_groups():
    groups = few_groups(3, (0.01, 16))  # nothing fits with the smaller capacity
    search = searched(groups, LimitedSearch, limits=np.array([np.inf, 1e-9, 1e-9]))
    found = search.outcome(True)
    assert (found.designs, found.points, found.groups_placed) == (6, 6 * 4, 1)
    assert (found.counts["memory"], found.counts["rules"], found.counts["open"]) == (12, 0, 0)
    assert (found.front, found.objectives) == ((), ())


@pytest.mark.parametrize("models", [1, 2])
def test_a_front_has_the_plans_of_every_model(models):
    groups = few_groups(4, (8, 16))
    given = [MODEL, MODEL.replace(name="twice", layers=6)][:models]
    search = BestFirstSearch(
        problems_of(given, groups, CLUSTER, STEP), groups, objectives=("time", "area")
    )
    assert search.run()
    found = search.outcome(True)
    assert found.objectives == ("time", "area")
    assert found.front[0].score == found.winners[0].score
    assert all(len(point.plans) == models for point in found.front)
    rows = [(point.score, point.area_mm2) for point in found.front]
    assert rows == [tuple(row) for row in sorted(search.front.values.tolist())]


# ---- waves ----


@pytest.mark.parametrize(
    ("models", "waiting", "size"),
    [
        (1, 1, 16_384), (2, 40_000, 16_384), (5, 40_000, 20_480), (2, 160_000, 20_000),
        (1, 10**6, 32_768), (9, 10**6, 36_864),
    ],
)  # fmt: skip
def test_a_wave_is_an_eighth_of_what_waits_within_limits(models, waiting, size):
    search = object.__new__(BestFirstSearch)
    search.tables = [None] * models
    assert search._wave(waiting) == size


def recorded_bounds(monkeypatch, one_step, limit_s, kept=3):
    """Groups and step of each call to bound seven candidates that did no step yet."""
    groups, calls = few_groups(7).single(np.arange(7), np.ones(7, dtype=int)), []
    search = BestFirstSearch(problems_of([MODEL], groups, CLUSTER, STEP), groups)
    (table,) = search.tables
    search._begin()
    bound = table.bound

    def noted(s, some, level, threads=None):
        calls.append((some.tolist(), level))
        bound(s, some, level, threads)

    monkeypatch.setattr(table, "bound", noted)
    monkeypatch.setattr(best_first, "KEPT_PRICES", kept)
    search.best.limit = limit_s
    search._bound_further(0, 0, np.arange(7), 2, one_step, 1)
    return calls, table.least[0]


def test_candidates_are_bounded_by_all_steps_while_their_prices_are_kept(monkeypatch):
    calls, _ = recorded_bounds(monkeypatch, False, np.inf)
    parts = ([0, 1, 2], [3, 4, 5], [6])
    assert calls == [(part, level) for part in parts for level in (2, 3, 4)]
    assert recorded_bounds(monkeypatch, True, np.inf)[0] == [([0, 1, 2, 3, 4, 5, 6], 2)]
    assert recorded_bounds(monkeypatch, False, 0.0)[0] == [(part, 2) for part in parts]


def test_a_candidate_whose_bound_equals_the_limit_goes_on(monkeypatch):
    _, least = recorded_bounds(monkeypatch, True, np.inf)
    calls, _ = recorded_bounds(monkeypatch, False, least.min(), kept=7)
    assert calls[1:] == [([int(least.argmin())], 3)]


def test_a_wave_schedules_one_candidate_of_each_group_and_places_few(monkeypatch):
    groups, everything = few_groups(3, (16,)), np.arange(3)
    search = BestFirstSearch(problems_of([MODEL], groups, CLUSTER, STEP), groups)
    (table,) = search.tables
    search._begin()
    for s in range(4):
        table.bound(s, everything, SCHEDULED - 1)
    listed = [(0, s, group) for s in (2, 0, 3, 1) for group in (1, 0, 2)]
    search._advance(np.array(listed).T)
    assert (table.level == SCHEDULED).astype(int).tolist() == [[0] * 3, [0] * 3, [1] * 3, [0] * 3]
    monkeypatch.setattr(best_first, "_PLACED_AT_ONCE", 2)
    scheduled = np.array(listed[:3]).T
    search._advance(scheduled)
    assert np.flatnonzero(table.level[2] == PLACED).tolist() == [0, 1]
    search._advance(np.array(listed[3:]).T, all_at_once=True)
    assert (table.level[[0, 1, 3]] >= SCHEDULED).all()
    assert search.placed == 2
    table.level[2], table.level[[0, 1, 3]] = PLACED, PLACED
    table.schedule(2, everything)
    search._advance(scheduled, all_at_once=True)
    assert search.placed == 5


def test_the_first_plans_are_made_one_by_one(monkeypatch):
    """So that each one prunes what comes after it; bounds are raised together."""
    groups, advanced = few_groups(3, (16,)), []
    search = BestFirstSearch(problems_of([MODEL], groups, CLUSTER, STEP), groups)
    search._begin()
    advance = search._advance

    def noted(candidates, one_step):
        advanced.append((int(search._levels(candidates)[0]), candidates.shape[1]))
        advance(candidates, one_step=one_step)

    monkeypatch.setattr(search, "_advance", noted)
    monkeypatch.setattr(best_first, "_SEEDS", (12, 11, 9, 4, 2))
    search._seed(budgeted=True)
    assert advanced[:3] == [(1, 12), (2, 11), (3, 9)]
    assert all(count == 1 for level, count in advanced if level == SCHEDULED)
    assert advanced[-1] == (SCHEDULED, 1)


# ---- searches within limits ----


def test_limits_of_groups_bound_the_work_and_small_capacities_do_not():
    groups, both = few_groups(8, (16,)), few_groups(8, (0.01, 16))
    size = 8 * len(problems_of([MODEL], groups, CLUSTER, STEP)[0])
    free = [searched(some, LimitedSearch, limits=np.full(8, np.inf)) for some in (groups, both)]
    assert work(free[0]) == work(free[1])
    assert 0 < free[0].placed < size
    exact = [search.exact()[0] for search in free]
    assert exact[0].tolist() == exact[1].tolist()
    assert np.isfinite(exact[0]).all()
    assert searched(groups, LimitedSearch, limits=exact[0] / 100.0).placed == 0


def products(limit, slack, factors=(2.0, 1.0, 4.0, 1.0)):
    groups = few_groups(4, (0.01, 16))  # nothing fits with the smaller capacity
    problems = problems_of([MODEL], groups, CLUSTER, STEP)
    return LeastProductSearch(problems, groups, np.array(factors), limit, slack)


@pytest.mark.parametrize(
    ("limit", "slack", "known", "unproven", "wanted"),
    [
        (np.inf, 0.0, {}, False, (np.inf, -1, np.inf)),
        (9.0, 0.0, {}, False, (np.inf, -1, 9.0)),
        (9.0, 0.0, {0: 8.0, 2: 8.0, 3: 8.5}, False, (8.0, 0, 8.0)),
        (9.0, 0.25, {3: 8.0, 2: 8.0}, False, (8.0, 2, 6.0)),
        (5.0, 0.25, {3: 8.0}, False, (8.0, 3, 5.0)),
        (9.0, 0.0, {1: 8.0}, True, (8.0, 1, 3.0)),
        (9.0, 0.75, {1: 8.0}, True, (8.0, 1, 2.0)),
    ],
)
def test_the_least_product_and_its_bound_by_hand(limit, slack, known, unproven, wanted):
    """Bounds of the groups are 2, 3, 1, 5, and so those of their products 4, 3, 4, 5."""
    search = products(limit, slack)
    search.run = lambda: True
    search.tables[0].least[:] = [2.0, 3.0, 1.0, 5.0]
    search.tables[0].unproven = {(0, 1)} if unproven else set()
    for group, product in known.items():
        search.best.note(group, product)
    assert search.least() == wanted


def test_limits_of_products_by_hand():
    search, groups = products(5.0, 0.25), np.array([0, 2, 3])
    assert search._limits(groups).tolist() == [2.5, 1.25, 5.0]
    search.begin_with(groups, np.array([3.0, 1.25, 4.0]))  # products 6, above the limit, 5 and 4
    assert search.best.scores == {2: 5.0, 3: 4.0}
    assert search._limits(groups).tolist() == [1.5, 0.75, 3.0]
    search.scores.scores[2, 1] = 0.5
    search._note_best(2)
    assert search.best.best == 2.0


def test_products_below_a_limit_are_searched_without_a_first_incumbent(monkeypatch):
    seeded = []
    monkeypatch.setattr(BestFirstSearch, "_seed", lambda *given: seeded.append(given))
    for limit, known, first in ((np.inf, [], 1), (5.0, [], 0), (np.inf, [3], 0)):
        search = products(limit, 0.0)
        search.begin_with(np.array(known, dtype=int), np.ones(len(known)))
        search._seed(budgeted=False)
        assert (len(seeded), seeded.clear()) == (first, None)


# ---- schedules that are not proven ----


def unproven_search(**options):
    """A search for two of four groups, all of whose plans count as not proven."""
    search = searched(few_groups(4, (16,)), top=2, **options)
    (table,) = search.tables
    table.unproven = {tuple(at) for at in np.argwhere(table.level >= 0).tolist()}
    search.asked = []
    table.prove = lambda *given: search.asked.append(given)
    return search, table


def test_what_may_be_better_than_the_winners_is_proven():
    search, table = unproven_search()
    first, second, third, _ = np.argsort(search.scores.scores[:, 0]).tolist()
    best, limit = search.scores.scores[[first, second], 0].tolist()
    assert search.best.limit == limit
    table.level[:] = PLACED
    table.least[:] = limit  # not below the limit: no other group is looked at
    table.least[:, first] = (best, best / 2, best * 1.5, best / 2)
    table.level[3, first] = SCHEDULED
    table.least[:, third] = (2.0 * limit, limit / 2, limit, limit)
    table.unproven -= {(k, third) for k in range(1, len(table.least))}
    search.chosen[0].pop((third, 0), None)  # without a plan nothing limits its proof
    before = set(table.unproven)
    search._prove()
    most = best_first._MORE_NODES
    wanted = [(0, first, most, best), (0, third, most, np.inf), (1, first, most, best)]
    assert search.asked == sorted(wanted)
    assert before - table.unproven == {(2, first)}  # longer than the plan of another strategy
    assert search._bound() == min(best, limit) / 2


@pytest.mark.parametrize("options", [{"objectives": ("time", "area")}, {"objective": "energy"}])
def test_no_schedule_is_proven_for_fronts_and_joules(options):
    search, table = unproven_search(**options)
    table.least[:] = 0.0
    search._prove()
    assert search.asked == []
