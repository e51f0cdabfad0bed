"""Intervals: what they promise holds for runs that were not seen, and every plan carries one."""

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

import phaze_fast as pf
from phaze_fast.planning import predict
from phaze_fast.planning.plans import groups_of, plan_kind

TOOL = Path(__file__).parents[2] / "tools" / "accuracy.py"
SPEC = importlib.util.spec_from_file_location("accuracy", TOOL)
accuracy = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(accuracy)


@pytest.mark.parametrize("seen", [accuracy.LEAST_RUNS, 40, 200])
def test_new_runs_are_covered_as_often_as_promised(seen):
    draw = random.Random(seen)
    inside = total = 0
    for _ in range(200):
        low, high = accuracy.bounds([draw.lognormvariate(0.05, 0.1) for _ in range(seen)])
        news = [draw.lognormvariate(0.05, 0.1) for _ in range(20)]
        inside += sum(low <= new <= high for new in news)
        total += len(news)
    assert 0.77 <= inside / total <= 0.91


def test_every_prediction_carries_an_interval():
    cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    unmeasured = cluster.replace(chip=cluster.chip.replace(name="x"))
    for some in (cluster, unmeasured):
        plan = predict("llama2-7b", some, {"tp": 4, "pp": 2, "dp": 2, "global_batch": 32})
        low, high = plan.interval_s
        assert 0 < low < high
        assert low < 1.3 * plan.time_s
        assert high > 0.7 * plan.time_s
        assert plan.to_dict()["interval_s"] == [low, high]


def test_groups_from_the_most_alike_to_all():
    named = list(groups_of("h100", "megatron-core", False, plan_kind(8, 1, 1, 1, 8)))
    assert named[0] == "h100, megatron-core, node, tensor"
    assert named[-1] == "all"
    assert plan_kind(1, 1, 1, 0, 1) == "one device"


def test_coverage_is_that_of_runs_that_were_left_out():
    """A run far from all others widens its own interval, and lies outside that of the others."""
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    plan = predict("gpt2-small", cluster, {"dp": 8, "global_batch": 8})
    draw = random.Random(1)
    ratios = [draw.uniform(0.9, 1.1) for _ in range(99)] + [5.0]
    rows = [
        SimpleNamespace(
            plan=plan,
            time_s=plan.time_s,
            run=SimpleNamespace(
                cluster=cluster, source="far" if r > 2 else "near", time_s=r * plan.time_s
            ),
        )
        for r in ratios
    ]
    covered = accuracy.held_out_coverage(rows)
    assert covered["far"] == 0.0
    assert 0.7 <= covered["near"] <= 0.9
