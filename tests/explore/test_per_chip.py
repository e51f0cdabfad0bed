"""The best plan of every chip: the order of candidates, blocks, time limits, and rows of a batch."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from search_cases import few_groups

import phaze_fast as pf
from phaze_fast.explore import Budget, per_chip, problems_of
from phaze_fast.explore.candidates import PLACED, CandidateTable
from phaze_fast.explore.per_chip import _MAPPED, _SCHEDULE_BOUND, PerChipSearch

MODEL = pf.models.load("gpt2-small").replace(layers=3)
CLUSTER = pf.Cluster(devices=4, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=16, seq=256, micro_batch=(1, 4), tp=(1, 2), schedule="1f1b")


def search_of(groups, models=(MODEL,), **options):
    return PerChipSearch(problems_of(models, groups, CLUSTER, STEP), groups, **options)


@pytest.mark.parametrize(
    ("passed_s", "limit_s", "complete"), [(2.0, 1.0, False), (2.0, 2.0, True), (2.0, 3.0, True)]
)
def test_a_batch_stops_once_more_than_its_time_has_passed(monkeypatch, passed_s, limit_s, complete):
    search = search_of(few_groups(3, (16,)))
    search._began, now = 100.0, 100.0 + passed_s
    monkeypatch.setattr(per_chip, "time", SimpleNamespace(monotonic=lambda: now))
    assert search.run(Budget(time_limit_s=limit_s)) is complete
    assert (search.history[-1].open, search.placed > 0) == (0 if complete else 3, complete)


def test_the_most_promising_candidate_is_scheduled_first():
    """By its bound times what plans of its strategy exceeded their bounds by, for each model."""
    groups = few_groups(4, (16,))
    search = search_of(groups, (MODEL, MODEL.replace(name="twice", layers=6)))
    search._begin()
    everything = np.arange(4)
    search._excess = [np.array([1.0, 3.0, 1.0, 4.0]), np.array([1.0, 1.0, 1.0, 0.1])]
    for table in search.tables:
        table.least[:] = np.array([[4.0, 8.0, 5.0, 9.0], [2.0, 2.0, 1.0, 9.0], [3.0, 7.0, 4.0, 1.0],
                                   [1.0, 1.0, 1.0, 9.0]])  # fmt: skip
    for most, wanted in ((1, [[2, 3, 1, 2], [3, 3, 3, 3]]), (2, None)):
        found = search._most_promising(everything, most)
        assert found.shape[1] == 8 * most
        for i, strategies in enumerate(wanted or ()):
            own = found[1:, found[0] == i]
            assert own[0][np.argsort(own[1])].tolist() == strategies
    some = search._most_promising(everything[2:], 9)
    assert sorted(set(some[2].tolist())) == [2, 3]
    assert some.shape[1] == 16


def test_leaders_have_the_tighter_bound_before_any_schedule():
    search = search_of(few_groups(6, (16,)))
    search._begin()
    (table,), everything = search.tables, np.arange(6)
    search._excess = [np.ones(len(table.problem))]
    for s in range(len(table.problem)):
        table.bound(s, everything, _MAPPED)
    search._bound_leaders(everything)
    leading = search._most_promising(everything, 1)
    assert (search._levels(leading) == _SCHEDULE_BOUND).all()
    assert (table.level == _MAPPED).any()


def test_factors_of_strategies_are_learnt_from_their_plans(monkeypatch):
    search, steps = search_of(few_groups(6, (16,))), []
    (table,) = search.tables
    bound = table.bound

    def noted(s, groups, level, threads=None):
        steps.append((s, level, len(groups)))
        bound(s, groups, level, threads)

    monkeypatch.setattr(table, "bound", noted)
    search.run()
    (excess,) = search._excess
    assert (excess >= 1.0).all()
    assert (excess > 1.0).any()
    assert not table._priced
    assert 0 < search.placed <= (table.level == PLACED).sum()
    assert [step for step in steps if step[1] == _MAPPED] == [(s, _MAPPED, 6) for s in range(4)]


@pytest.mark.parametrize(("threads", "pieces"), [(1, [5]), (2, [2, 2, 1])])
def test_chips_go_to_threads_in_pieces(monkeypatch, threads, pieces):
    search, asked = search_of(few_groups(5, (16,)), threads=threads), []
    monkeypatch.setattr(per_chip, "_PIECE", 2)
    search._begin()
    (table,), everything = search.tables, np.arange(5)
    schedule = table.schedule

    def noted(s, groups, limits_s, threads, planned):
        asked.append(len(groups))
        schedule(s, groups, limits_s, threads, planned)

    monkeypatch.setattr(table, "schedule", noted)
    search._finish(np.stack([0 * everything, 0 * everything, everything]))
    assert sorted(asked, reverse=True) == pieces
    assert search.placed == 5
    assert np.isfinite(search.scores.scores).all()


def test_each_capacity_has_the_plan_that_it_would_have_alone():
    """Candidates are pruned by the capacity for which the longest step is still of interest."""
    sizes = (2, 16)  # only slower plans fit, and the fastest
    together = search_of(few_groups(6, sizes))
    assert together.run()
    for c, size in enumerate(sizes):
        alone = search_of(few_groups(6, (size,)))
        assert alone.run()
        assert alone.scores.scores[:, 0].tolist() == together.scores.scores[:, c].tolist()
    assert (together.scores.scores[:, 0] > together.scores.scores[:, 1]).all()


@pytest.mark.parametrize(
    ("pooled", "optimizer"), [(False, "adam"), (True, "adam"), (False, "muon")]
)
def test_rows_of_a_batch_are_those_of_plan(monkeypatch, pooled, optimizer):
    chips = pf.ArchitectureSpace.published()[40_000:40_009:3]
    made, init, step = [], CandidateTable.__init__, STEP.replace(optimizer=optimizer)

    def noted(self, *given, **named):
        made.append(named["workers"] is not None)
        init(self, *given, **named)

    monkeypatch.setattr(CandidateTable, "__init__", noted)
    with ThreadPoolExecutor(1) as pool:
        rows = pf.evaluate_batch(
            MODEL, chips, CLUSTER, step, threads=1, executor=pool if pooled else None
        )
    assert made == [pooled]
    for row, chip in enumerate(chips):
        best = pf.plan(MODEL, CLUSTER.replace(chip=chip), step, top=1).best
        found = {name: values[row].item() for name, values in rows.to_dict().items()}
        area_mm2 = found.pop("area_mm2")
        assert area_mm2 == pytest.approx(float(chips.area_mm2[row]), rel=1e-12)
        assert found.pop("feasible")
        assert found.pop("energy_j") == pytest.approx(best.energy_j, rel=1e-9)
        assert found == {name: getattr(best, name) for name in found}
