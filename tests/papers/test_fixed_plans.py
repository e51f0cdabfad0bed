"""Plans on a given chip: the published ones by hand, Megatron's kind, and ours."""

import math

import pytest

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.papers.fixed_plans import FixedChip, hand_plans, uniform_plans

GIB = 2**30
POD = pf.Cluster(devices=8, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=32, micro_batch=1, tp=(1, 2), schedule="1f1b")


# ---- fixed plans ----


def blocks(stage):
    return sum(n for kind, n in stage.kinds.items() if kind not in ("embedding", "head"))


def test_hand_plans_are_the_published_ones():
    assert hand_plans()["megatrongpt3"] == hand_plans()["gpt3-175b"] == (32, 8, 4)
    assert hand_plans()["opt"] == hand_plans()["opt-1.3b"] == (12, 85, 1)
    assert len(hand_plans()) == 13
    assert set(hand_plans()) <= set(pf.models.names())
    assert all(1000 < p * d * t <= 1024 for p, d, t in hand_plans().values())


def test_the_hand_plan_on_1024_devices():
    cluster = pf.Cluster(devices=1024, fabric="tpuv4-pod")
    step = pf.Training(global_batch=4096, micro_batch=(1, 2))
    found = FixedChip(cluster, step, [64 * GIB, 32 * GIB]).hand_plan(pf.models.load("opt"))
    plan = found.plan
    assert (plan.pp, plan.dp, plan.tp, plan.zero, plan.schedule) == (12, 64, 1, 0, "1f1b")
    assert plan.recompute in ("none", "full")
    assert found.score == plan.time_s
    assert found.chip.hbm.capacity_bytes == 32 * GIB
    assert found.note.startswith("64 replicas instead of 85")


def test_a_hand_plan_that_needs_zero_says_so():
    cluster = pf.Cluster(devices=64, fabric="tpuv4-pod")
    step = pf.Training(global_batch=64, micro_batch=1)
    roomy = FixedChip(cluster, step, [64 * GIB]).hand_plan(pf.models.load("llama2")).plan
    assert roomy.zero == 0
    found = FixedChip(cluster, step, [int(15 * GIB)]).hand_plan(pf.models.load("llama2"))
    assert found.plan.zero == 1
    assert "without ZeRO it does not fit" in found.note


@pytest.mark.parametrize(
    ("model", "devices", "capacity", "why"),
    [
        ("llama2", 64, 4 * GIB, "does not fit into 2.5 GiB of a device"),
        ("gpt2", 8, 32 * GIB, "32 stages of width 1 are more than 8 devices"),
        ("gpt2-small", 8, 32 * GIB, "no hand plan is published for gpt2-small"),
    ],
)
def test_no_hand_plan_is_a_result_with_a_reason(model, devices, capacity, why):
    cluster = pf.Cluster(devices=devices, fabric="tpuv4-pod")
    found = FixedChip(cluster, STEP, [capacity]).hand_plan(pf.models.load(model))
    assert (found.plan, found.score) == (None, math.inf)
    assert why in found.note


@pytest.mark.parametrize("method", ["hand_plan", "megatron_plan"])
def test_a_batch_that_nothing_divides_is_named(method):
    step = pf.Training(global_batch=24, micro_batch=5)
    found = getattr(FixedChip(POD, step, [32 * GIB]), method)(pf.models.load("bertlarge"))
    assert found.score == math.inf
    assert found.note == "micro_batch: 5 does not divide the batch of 24"


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_megatron_plan_is_even_and_none_is_faster_than_the_free_one(stages, schedule):
    cluster = POD.model_copy(update={"chip": pf.presets.chip("phaze-tpuv4")})
    model, modes = pf.models.load("gpt2-small"), ("none", "selective", "full")
    step = pf.Training(global_batch=48, micro_batch=1, tp=1, pp=stages, schedule=schedule)
    even, free = (uniform_plans(model, cluster, step, modes, (0, 1), e)[0] for e in (True, False))
    if schedule == "interleaved" and all(12 % (stages * chunks) for chunks in step.vpp):
        assert not even  # chunks of unlike sizes are for free plans alone
        assert (len(free) > 0) == (stages > 1)
        return
    assert len(even) == len(free)
    if schedule == "1f1b":
        assert len(even) == 6  # three ways to recompute, two ZeRO stages
        # With fused attention selective recomputation changes nothing.
        assert {plan.recompute for plan in even} == {"none", "selective", "full"}
        assert {even[k].time_s == even[k + 2].time_s for k in (0, 1)} == {True}
    for plan, other in zip(even, free, strict=True):
        assert plan.pp == stages
        assert {blocks(stage) for stage in plan.stages} == {12 // stages}
        assert (plan.recompute, plan.zero) == (other.recompute, other.zero)
        assert plan.time_s >= other.time_s
        assert plan.over_bytes == 0


def test_our_plan_is_that_of_plan():
    model, step = pf.models.load("gpt2-small"), STEP
    found = FixedChip(POD, step, [8 * GIB, 32 * GIB]).our_plan(model)
    cluster = POD.model_copy(update={"chip": pf.presets.chip("phaze-tpuv4")})
    assert found.score == pf.plan(model, cluster, step).best.time_s
    tight = FixedChip(POD, step, [2 * GIB]).our_plan(pf.models.load("llama2-7b"))
    assert tight.score == math.inf
    assert "too much" in tight.note
    with pytest.raises(InvalidInputError, match="capacities"):
        FixedChip(POD, step, [])
