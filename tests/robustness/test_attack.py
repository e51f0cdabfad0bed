"""The checker of certificates: it finds nothing in a few answers, and does find what is wrong."""

import random
from dataclasses import replace

import pytest
from reference import certificates
from reference.layers_at_random import any_way
from robustness.attack import KINDS, attack

from phaze_fast.papers import LayerTable, PublishedProblem, nest_from_dict, place, solve_nest
from phaze_fast.schedule import instance_from_dict, schedule_instances

FEW = {"layers": 20, "published": 20, "nest": 20, "wafers": 20, "lists": 6, "documents": 20}


@pytest.mark.parametrize("name", FEW)
def test_a_few_certificates_hold(name):
    cases, wrong, _ = attack(name, random.Random(f"few {name}"), 60.0, FEW[name])
    assert cases >= FEW[name]
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS))
def test_some_more_certificates_hold(name):
    assert attack(name, random.Random(f"more {name}"), 0.6, 2000)[1] == 0


def test_a_bound_that_is_too_high_is_found():
    layer = instance_from_dict(any_way(random.Random(1), 4))
    (found,) = schedule_instances([layer], "overlap", highs=False)
    assert certificates.layer(found) == []
    higher = replace(found, bound=found.makespan * 1.5)
    assert "is above a schedule" in certificates.layer(higher)[0]
    longer = replace(found, makespan=found.makespan * 2, bound=found.makespan)
    assert certificates.layer(longer)


def test_a_placement_that_is_not_the_best_is_found():
    table = LayerTable(names="ab", forward_s=[1.0, 2.0], backward_s=[1.0, 2.0])
    problem = PublishedProblem({1: table}, 2, 1e9, 4)
    found = place(problem)
    assert certificates.placement(problem, found) == []
    worse = place(replace(problem, devices=1))
    assert certificates.placement(problem, worse)


def test_a_plan_of_nest_that_is_not_the_best_is_found():
    from nest_cases import nest_problem

    data = nest_problem(3)
    (plan,) = solve_nest([nest_from_dict(data)], threads=1)
    assert plan["status"] == "optimal"
    assert certificates.nest_plan(data, plan, False) == []
    slower = {**plan, "finalTimePerBatch": plan["finalTimePerBatch"] * 1.01}
    assert len(certificates.nest_plan(data, slower, False)) == 2
