"""Ours against other systems' plans and our own ablations: none is better."""

import pytest
from wafer_baseline_cases import CASES, DRAM, QUICK, in_rank_order, problem_of, rank

from phaze_fast.wafer import evaluate
from phaze_fast.wafer.search.baselines import is_linear
from phaze_fast.wafer.search.result import Effort
from phaze_fast.wafer.studies.comparison import ABLATIONS, compare_mappings


@pytest.fixture(
    scope="module", params=["odd", "dead", pytest.param("tight", marks=pytest.mark.slow)]
)
def compared(request):
    return compare_mappings(CASES[request.param][0], QUICK)


def test_ours_is_no_worse_than_any_other(compared):
    ours = compared.ours.best
    name, best = compared.best_baseline
    assert ours.fits
    assert ours.time_s <= best.time_s
    assert best.time_s == min(b.best.time_s for b in compared.baselines.values() if b.best.fits)
    assert compared.baselines[name].best.time_s == best.time_s
    for found in compared.baselines.values():
        for way in (found.default, found.tuned, found.tiled):
            assert not way.fits or ours.time_s <= way.time_s


def test_ours_is_no_worse_than_any_ablation(compared):
    assert set(compared.ablations) == set(ABLATIONS)
    assert len(ABLATIONS) == 5
    for found in compared.ablations.values():
        assert not found.fits or compared.ours.best.time_s <= found.time_s
    assert compared.ours.bound_s <= compared.ours.best.time_s


def test_ablations_take_away_what_they_say(compared):
    problem = compared.ours.problem
    kept = compared.ablations["no_recompute"].encoding
    assert all(
        set(op_mapping.output) <= {"stash", "offload"} for op_mapping in kept.operator_mappings
    )
    straight = compared.ablations["no_placement"].encoding
    assert is_linear(problem, straight.layout)
    assert all(in_rank_order(op_mapping) for op_mapping in straight.operator_mappings)
    megatrons = compared.ablations["megatron_partitions"]
    assert rank(megatrons) <= rank(compared.baselines["megatron"].tiled)
    for found in compared.ablations.values():
        assert found.encoding.faults(problem) == []
        assert evaluate(problem, found.encoding).time_s == found.time_s


def test_memory_at_equal_speed_is_less(compared):
    for name, found in compared.memory_at_equal_speed.items():
        best = compared.baselines[name].best
        assert found.memory_bytes <= best.memory_bytes
        assert found.time_s <= best.time_s
        again = evaluate(compared.ours.problem, found.encoding)
        assert again.memory_bytes == found.memory_bytes
        assert again.time_s == found.time_s
    fitting = {name for name, each in compared.baselines.items() if each.best.fits}
    assert set(compared.memory_at_equal_speed) == fitting


def test_names_and_ablations_can_be_chosen():
    problem = CASES["one"][0]
    said = []
    found = compare_mappings(problem, QUICK, names=["zero3"], ablations=False, report=said.append)
    assert set(found.baselines) == {"zero3"}
    assert found.ablations == {}
    assert said == ["baselines", "ours", "memory at equal speed"]


def test_nothing_fits_and_all_say_so():
    problem = problem_of(DRAM.replace(columns=2, rows=1), "gpt3-13b")
    found = compare_mappings(problem, QUICK)
    assert found.best_baseline is None
    assert not found.ours.best.fits
    assert found.memory_at_equal_speed == {}
    for each in found.baselines.values():
        assert each.best.reason.startswith("OOM: ")
        assert rank(found.ours.best)[0] <= rank(each.best)[0]


def test_a_short_budget_leaves_ours_no_worse():
    """Plans of others are looked at first: they cannot be what the budget leaves out."""
    problem = CASES["small"][0]
    hurry = Effort(seeds=1, steps=10, promising=1, budget_s=1e-6)
    found = compare_mappings(problem, hurry, names=["megatron", "zero3"], ablations=False)
    assert found.ours.best.time_s <= found.best_baseline[1].time_s
