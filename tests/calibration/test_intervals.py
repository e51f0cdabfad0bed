"""Intervals: what they promise holds for runs that were not seen, and every plan carries one."""

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import phaze_fast as pf
from phaze_fast.calibration.published import read_run
from phaze_fast.planning import predict
from phaze_fast.planning.plans import groups_of, plan_groups, plan_kind

TOOL = Path(__file__).parents[2] / "tools" / "accuracy.py"
SPEC = importlib.util.spec_from_file_location("accuracy", TOOL)
accuracy = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(accuracy)
TABLE = Path(pf.planning.__file__).parent / "data" / "intervals.yaml"
RATIOS = yaml.safe_load(TABLE.read_text())["ratios"]


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
        group = next(name for name in plan_groups(plan, some) if name in RATIOS)
        assert [low / plan.time_s, high / plan.time_s] == pytest.approx(RATIOS[group])
        assert 0 < low < high
        assert plan.to_dict()["interval_s"] == [low, high]


def test_groups_from_the_most_alike_to_all():
    named = list(groups_of("h100", "megatron-core", False, plan_kind(8, 1, 1, 1, 8)))
    assert named[0] == "h100, megatron-core, node, tensor"
    assert named[-1] == "all"
    assert plan_kind(1, 1, 1, 0, 1) == "one device"
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    for given, last in (
        ({}, []),
        ({"ep": 8}, ["with experts"]),
        ({"precision": "fp8"}, ["fewer than 16 bits"]),
        ({"ep": 8, "precision": "fp8"}, ["with experts"]),
    ):
        plan = predict("mixtral-8x7b", cluster, {"dp": 8, "zero": 3, "global_batch": 8, **given})
        groups = list(plan_groups(plan, cluster))
        assert all("megatron-core" in name for name in groups[:4])
        assert groups[4:] == [*last, "all"]


@pytest.mark.parametrize(
    ("chip", "fabric", "known"),
    [
        ("gb300", "nvl72-gb300", "chip carried over"),
        ("trainium1-core", "trn1-32xlarge", "chip not fitted"),
        ("h100", "dgx-h100", ""),
        ("tpuv5p", "tpuv5p-pod", ""),  # a rate of its own in running jobs
    ],
)
@pytest.mark.parametrize("software", ["generic", "deepspeed"])
def test_intervals_are_wider_where_a_chip_was_not_measured(chip, fabric, known, software):
    cluster = pf.Cluster(devices=16, fabric=fabric, chip=chip)
    spec = {"tp": 2, "dp": 8, "zero": 1, "global_batch": 16, "software": software}
    plan = predict("gpt3-13b", cluster, spec)
    group = next(name for name in plan_groups(plan, cluster) if name in RATIOS)
    as_named = f"generic, {known}" if software == "generic" else known
    assert group == (as_named if known else "generic" if software == "generic" else "all")
    for part in group.split(", "):  # where less is known, no interval is narrower
        assert RATIOS[group][0] <= RATIOS[part][0] < RATIOS[part][1] <= RATIOS[group][1]


def test_bounds_of_what_is_left_out_cover_it():
    """Five groups with medians of their own: each is covered by bounds learnt with it, or widened."""
    draw = random.Random(2)
    by_group = {
        str(k): [middle * draw.lognormvariate(0.0, 0.05) for _ in range(30)]
        for k, middle in enumerate((0.8, 0.95, 1.0, 1.1, 1.4))
    }
    low, high = accuracy.unseen_bounds(by_group)
    inner = accuracy.group_quantiles(by_group)
    assert low <= inner[0] < 1.0 < inner[1] <= high
    assert accuracy.unseen_coverage(by_group, 1.0) < 0.8
    shifted = {name: [5.0 * ratio for ratio in some] for name, some in by_group.items()}
    assert accuracy.unseen_bounds(shifted)[0] == 1.0


def test_a_chip_carried_over_keeps_its_own_peak():
    row = {
        **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), ""),
        "model": "llama3-8b", "devices": "8", "chip": "A100", "tp": "8", "micro_batch": "1",
        "global_batch": "8", "recompute": "none", "precision": "bf16", "step_s": "1",
    }  # fmt: skip
    run = read_run(2, row)
    other = accuracy.carried_over(run).cluster.chip
    own, h100 = run.cluster.chip, pf.presets.chip("h100")
    assert other.peak_flops("bf16") == own.peak_flops("bf16")
    share = other.tuning.step_flops["bf16"] / other.peak_flops("bf16")
    assert share == pytest.approx(h100.tuning.step_flops["bf16"] / h100.peak_flops("bf16"))
    assert accuracy.not_fitted(run).cluster.chip.tuning == pf.hardware.Tuning()
    assert accuracy.not_fitted(read_run(2, {**row, "chip": "MI355X"})) is None


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
    covered = accuracy.held_out_coverage(rows, {})
    assert covered["far"] == 0.0
    assert 0.7 <= covered["near"] <= 0.9
