"""The table of candidates: bounds that only rise, plans within limits, prices and plans kept."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from search_cases import few_groups, random_case, some_chips

import phaze_fast as pf
from phaze_fast.errors import PhazeError
from phaze_fast.explore import BestFirstSearch, SearchProblem, candidates, problems_of
from phaze_fast.explore.best_first import _MAPPED as MAPPED
from phaze_fast.explore.candidates import PLACED, SCHEDULED, CachedPlans, CandidateTable, PlanCache
from phaze_fast.planning import Placed
from phaze_fast.runs.executors import Workers

MODEL = pf.models.load("gpt2-small").replace(layers=3)
CLUSTER = pf.Cluster(devices=4, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=16, seq=256, micro_batch=4, tp=(1, 2), schedule="1f1b")


def table_of(groups, **options):
    return CandidateTable(*problems_of([MODEL], groups, CLUSTER, STEP), groups, **options)


def scheduled(groups, **options):
    """A table whose first strategy is scheduled on all groups."""
    table = table_of(groups, **options)
    table.schedule(0, np.arange(len(groups)))
    return table


def placed(table, groups, below):
    """Seconds of the plans found, by group and capacity."""
    answers = table.place(0, np.asarray(groups), np.asarray(below, dtype=float))
    return {(answer.group, answer.capacity): answer.placed.time_s for answer in answers}


def calls_of(monkeypatch, owner, name):
    """What is passed to a function of a class from now on."""
    calls, method = [], getattr(owner, name)

    def noted(*given, **named):
        calls.append(given)
        return method(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    return calls


def test_bounds_are_those_with_the_largest_capacity_of_each_group():
    groups = few_groups(3, (32, 16, 8))
    table = table_of(groups.single(np.array([0, 0, 2, 2]), np.array([2, 0, 2, 1])), threads=3)
    assert table.largest.tolist() == [2, 0, 2, 1]
    assert table.threads == 3
    assert table_of(groups).largest.tolist() == [2, 2, 2]  # the first chip has the largest


def test_a_part_of_the_groups_has_the_bounds_that_all_have():
    groups = few_groups(4, (16,))
    whole, part = table_of(groups, with_energy=True), table_of(groups, with_energy=True)
    whole.bound_all()
    for some in ([1, 3], [0, 2]):
        part._bound_by_rooflines([0], np.array(some))
        assert part.least[0, some].tolist() == whole.least[0, some].tolist()
        assert part.energy[0, some].tolist() == whole.energy[0, some].tolist()
    assert len(set(whole.least[0].tolist())) == 4


def test_schedules_that_are_not_proven_have_bounds_of_their_own():
    case = random_case(40, (), devices=8, layers=5)
    records = some_chips(0, 1).chips
    times, least = case.problem.schedule(1, records, nodes=1)
    assert not times.proven.any()
    assert (least.forward_s <= times.forward_s).all()
    assert (least.forward_s < times.forward_s).any()


def test_each_step_bounds_layers_from_below_and_more_tightly():
    (problem,) = problems_of([MODEL], few_groups(3, (16,)), CLUSTER, STEP)
    records = few_groups(3, (16,)).records
    for s in range(len(problem)):
        mapped, root = (problem.bound(s, records, step) for step in ("mapped", "schedule_bound"))
        times, _ = problem.schedule(s, records)
        assert (mapped.backward_s <= root.backward_s * (1.0 + 1e-9)).all()
        assert (root.backward_s <= times.backward_s * (1.0 + 1e-9)).all()
        assert (mapped.backward_s < root.backward_s * (1.0 - 1e-3)).any()


def test_plans_are_ordered_by_time_then_memory_then_fewest_devices_and_least_widths():
    step = STEP.replace(micro_batch=1, zero=(0, 1), pp=(1, 2))
    (problem,) = problems_of([MODEL], few_groups(1), CLUSTER, step)
    for s in range(len(problem)):
        evaluator, k = problem.of(s)
        width = evaluator.sizes[k].strategy.tp
        rows = np.flatnonzero(evaluator.layouts["strategy"] == k).tolist()
        assert len(rows) > 2
        for at in rows:
            pp, dp, zero = (int(evaluator.layouts[at][name]) for name in ("pp", "dp", "zero"))
            order = problem.plan_order(s, Placed(3.0, 5.0, at))
            assert order == (3.0, 5.0, width * pp * dp, width, pp, dp, zero, s, at)


# ---- plans kept in a journal ----


def test_plans_in_a_journal_are_plain_numbers_and_read_again():
    plans = [
        Placed(1.5, 2.0, 3, (0, 2, 5), (1, 0)),
        Placed(1.5, 2.0, 0, (0, 5), (1,), 1.25),
        Placed(np.inf, 0.0, -1),
    ]
    journal = SimpleNamespace(rows={}, written=[])
    journal.append = journal.written.extend
    PlanCache(journal).put([("a", CachedPlans(np.array([np.inf, 1.0, -np.inf]), plans))])
    (row,) = json.loads(json.dumps(journal.written, allow_nan=False))
    assert row.pop("key") == "a"
    assert [len(plan) for plan in row["placed"]] == [5, 6, 5]
    read = PlanCache(SimpleNamespace(rows={"b": row})).get("b")
    assert read.plans == plans
    assert read.limits_s.tolist() == [np.inf, 1.0, -np.inf]


def test_plans_that_were_looked_for_up_to_a_limit_are_not_planned_again(monkeypatch):
    groups, cache = few_groups(3, (16,)), PlanCache()
    problems, found = problems_of([MODEL], groups, CLUSTER, STEP), []
    planned = calls_of(monkeypatch, PlanCache, "put")
    for _ in range(2):
        calls = len(planned)
        search = BestFirstSearch(problems, groups, top=3, cache=cache)
        search.run()
        found.append([(winner.chip, winner.score) for winner in search.winners()])
    assert found[0] == found[1]
    assert len(planned) == calls > 0


# ---- what is priced once ----


def test_chips_are_priced_once_unless_they_are_many_or_others(monkeypatch):
    groups = few_groups(5, (16,))
    whole = table_of(groups)
    whole.bound(0, np.arange(5), MAPPED)
    table, priced = table_of(groups), calls_of(monkeypatch, SearchProblem, "price")
    table.bound_all()
    monkeypatch.setattr(candidates, "KEPT_PRICES", 3)
    for some, times in (
        ([0, 2, 3], 1), ([3, 0], 1), ([0, 4], 2), ([0], 2), ([1], 3), ([0, 1, 2, 4], 4), ([1], 5),
    ):  # fmt: skip
        table.bound(0, np.array(some), MAPPED)
        made = [chips for _, _, chips, *_ in priced if isinstance(chips, np.ndarray)]
        assert len(made) == times, some
    table.bound(0, np.array([3]), MAPPED)
    assert table.least[0].tolist() == whole.least[0].tolist()


# ---- limits ----


def test_a_candidate_is_scheduled_unless_its_bound_exceeds_its_limit():
    groups = few_groups(4, (16,))
    table = table_of(groups)
    table.bound_all()
    everything = np.arange(4)
    table.bound(0, everything, MAPPED + 1)
    limits = table.least[0] * (0.5, 1.0, 2.0, 1.0)
    limits[3] = np.inf
    table.least[0, :2] = table.least[0, :2] * 1e6  # as if it was proven before
    limits[1] = table.least[0, 1]
    table.schedule(0, everything, limits)
    assert table.level[0].tolist() == [PLACED, SCHEDULED, SCHEDULED, SCHEDULED]
    table.schedule(0, everything[:1], limits[:1])
    assert table.level[0, 0] == PLACED


def test_a_plan_is_found_with_its_own_time_as_limit():
    groups = few_groups(3, (0.01, 16))
    free = placed(scheduled(groups), [0, 1, 2], np.full((3, 2), np.inf))
    assert sorted(free) == [(0, 1), (1, 1), (2, 1)]  # nothing fits with the smaller capacity
    for share, found in ((1.0, free), (1.0 - 1e-12, {})):
        below = [[np.inf, free[group, 1] * share] for group in range(3)]
        assert placed(scheduled(groups), [0, 1, 2], below) == found


@pytest.mark.parametrize(
    ("time_s", "open_s", "below_s", "before_s", "least_s", "open_"),
    [
        (2.0, np.inf, 3.0, 1.0, 2.0, False),
        (2.0, np.inf, 3.0, 2.5, 2.5, False),
        (2.0, 2.0, 3.0, 1.0, 2.0, False),
        (2.0, 1.5, 3.0, 1.0, 1.5, True),
        (2.0, 1.5, 3.0, 1.75, 1.75, True),
        (np.inf, np.inf, 3.0, 1.0, 3.0, False),
        (np.inf, 2.5, 3.0, 1.0, 2.5, True),
        (np.inf, np.inf, np.inf, 1.0, np.inf, False),
    ],
)
def test_a_placed_candidate_is_bounded_by_its_plan_and_by_what_was_not_looked_at(
    monkeypatch, time_s, open_s, below_s, before_s, least_s, open_
):
    groups = few_groups(2, (16,))
    table = scheduled(groups)
    plan = Placed(time_s, 1.0, 0 if np.isfinite(time_s) else -1, (0, 5), (0,), open_s)
    monkeypatch.setattr(table, "_cached_plans", lambda *_: [[plan], [plan]])
    table.least[0], table.unproven = before_s, {(0, 1)}
    found = placed(table, [0, 1], [[below_s], [below_s]])
    assert found == ({(0, 0): time_s, (1, 0): time_s} if np.isfinite(time_s) else {})
    assert table.least[0].tolist() == [least_s, before_s]  # schedules of the second are not proven
    assert table.unproven == ({(0, 0), (0, 1)} if open_ else {(0, 1)})


@pytest.mark.parametrize(
    ("time_s", "open_s", "before_s", "least_s", "proven"),
    [
        (4.0, np.inf, 1.0, 4.0, True),
        (3.0, np.inf, 1.0, 3.0, False),
        (3.0, np.inf, 3.5, 3.5, False),
        (4.0, 2.0, 1.0, 2.0, False),
        (np.inf, np.inf, 1.0, 4.0, True),
    ],
)
def test_a_bound_of_better_schedules_proves_a_plan_or_raises_its_bound(
    monkeypatch, time_s, open_s, before_s, least_s, proven
):
    """The plan to be proven takes 4 seconds."""
    groups = few_groups(2, (8, 16))
    table, asked = table_of(groups), []
    table.least[0], table.unproven = before_s, {(0, 1)}
    plans = [[Placed(9.0, 1.0, 0), Placed(time_s, 1.0, 0, open_s=open_s)]]

    def scheduled_on(_, s, records, threads, nodes):
        asked.append((s, records.tolist(), nodes))
        return None, "least"

    def place(_, s, times, least, limits, threads):
        asked.append((s, times, least, limits.tolist()))
        return plans

    monkeypatch.setattr(SearchProblem, "schedule", scheduled_on)
    monkeypatch.setattr(SearchProblem, "place", place)
    table.prove(0, 1, 77, 4.0)
    record = groups.records[1:2].tolist()
    assert asked == [(0, record, 77), (0, "least", "least", [[-np.inf, 4.0]])]
    assert table.least[0].tolist() == [before_s, least_s]
    assert table.unproven == (set() if proven else {(0, 1)})


# ---- work in other processes ----


def test_work_in_pieces_gives_the_same(monkeypatch):
    groups = few_groups(7, (8, 16))
    for method in candidates._CHIPS_OF_A_TASK:
        monkeypatch.setitem(candidates._CHIPS_OF_A_TASK, method, 3)
    monkeypatch.setattr(candidates, "_ROOFLINES", 4)
    tables = []
    with ThreadPoolExecutor(2) as pool, Workers(pool, 2) as workers:
        for options in ({}, {"workers": workers, "threads": 2}):
            table = table_of(groups, with_energy=True, **options)
            assert table.threads == 1  # of strategies at once: other processes have their own
            table.bound_all()
            for level in (MAPPED - 1, MAPPED, MAPPED + 1):
                table.bound(0, np.arange(7), level)
            table.schedule(0, np.arange(7), np.where(np.arange(7) % 2, np.inf, 1e6))
            found = placed(table, np.arange(7), np.full((7, 2), np.inf))
            tables.append((found, table.least.tolist(), table.energy.tolist()))
    assert tables[0] == tables[1]
    assert len(tables[0][0]) == 14


@pytest.mark.parametrize("error", [ValueError("no such chip"), None])
def test_what_fails_in_another_process_is_raised(monkeypatch, error):
    def work_s(*_):
        raise error

    with Workers(None, 1) as workers:
        table = table_of(few_groups(2, (16,)), workers=workers)
        if error is None:
            lost = candidates.Lost("worker died")
            monkeypatch.setattr(candidates, "run_chunks", lambda *_: [([], lost)])
            with pytest.raises(PhazeError, match="executor: worker died"):
                table.bound_all()
            return
        monkeypatch.setattr(SearchProblem, "works_s", work_s)
        monkeypatch.setitem(candidates._CHIPS_OF_A_TASK, work_s, 1)
        with pytest.raises(ValueError, match="no such chip"):
            table.bound_all()


def test_bounds_of_joules_are_rounded_down():
    (problem,) = problems_of([MODEL], few_groups(1), CLUSTER, STEP)
    for s in range(len(problem)):
        evaluator, k = problem.of(s)
        passes = evaluator.sizes[k].inner * 16 / 4  # of a micro-batch on a device
        found = problem.step_energy_j(s, np.array([3.0]), np.array([2.0]), np.array([5.0]))
        for (bound_j,), joules in zip(found, (13.0, 3.0), strict=True):
            assert bound_j < passes * joules
            assert bound_j == pytest.approx(passes * joules, rel=1e-8, abs=0.0)
