"""The outcome of a search as data: status and gap, budgets, means, and texts of plans."""

import math
from types import SimpleNamespace

import pytest

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import (
    Budget,
    Outcome,
    Progress,
    Winner,
    fullest_text,
    geometric_mean,
    share_text,
)

WINNER = Winner(
    group=0, capacity=0, chip=0, score=4.0, time_s=4.0, area_mm2=1.0, energy_j=1.0, hbm_bytes=1,
    cost_usd=1.0, plans=(),
)  # fmt: skip


def outcome(complete, bound, winners=(WINNER,)):
    return Outcome(
        complete=complete, bound=bound, winners=winners, front=(), objectives=(), counts={},
        points=0, designs=0, groups_placed=0, unproven=0, seconds=0.0,
        history=(Progress(0.0, 1, 1, 1, 1, math.inf, 0.0),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("complete", "bound", "winners", "status", "gap"),
    [
        (True, 4.0, (WINNER,), "optimal", 0.0),
        (True, 5.0, (WINNER,), "optimal", 0.0),
        (True, 2.0, (WINNER,), "feasible", 1.0),
        (False, 4.0, (WINNER,), "feasible", 0.0),
        (False, 3.2, (WINNER,), "feasible", 0.25),
        (False, 0.0, (WINNER,), "feasible", math.inf),
        (True, math.inf, (), "infeasible", 0.0),
        (False, 1.0, (), "unknown", math.inf),
    ],
)
def test_an_outcome_is_optimal_only_without_a_gap(complete, bound, winners, status, gap):
    found = outcome(complete, bound, winners)
    assert found.status == status
    assert found.gap == pytest.approx(gap)
    data = found.to_dict()
    assert data["bound"] == (bound if bound < math.inf else "inf")
    assert data["history"][0]["incumbent"] == "inf"
    assert Outcome.from_dict(data) == found


@pytest.mark.parametrize("name", ["time_limit_s", "max_points"])
def test_limits_of_a_budget_are_numbers_from_zero(name):
    assert getattr(Budget(**{name: 0}), name) == 0
    assert getattr(Budget(**{name: 2.5}), name) == 2.5
    for value in (-1, math.nan, True, "3", None):
        with pytest.raises(InvalidInputError, match=f"{name}: .*expected a number, zero or more"):
            Budget(**{name: value})


def test_means_are_weighted_geometric_means():
    assert geometric_mean([0.1], (7.0,)) == 0.1
    assert geometric_mean([2.0, 8.0], (1.0, 1.0)) == pytest.approx(4.0)
    assert geometric_mean([2.0, 16.0], (4.0, 2.0)) == pytest.approx(4.0)


def test_texts_of_a_plan_name_its_largest_parts_and_its_memory():
    plan = SimpleNamespace(time_s=8.0, memory_bytes=3 * 2**30)
    plan.parts_s = {"fill": 1.0, "work": 4.0, "send": 2.0, "wait": 0.5}
    assert share_text(plan) == "work 50%, send 25%, fill 12%"
    plan.parts_s = {"fill": 2.0, "work": 6.0, "send": 0.0}
    assert share_text(plan) == "work 75%, fill 25%"
    assert fullest_text(plan, 4 * 2**30).endswith("(75%)")
