"""No bound of the plan kernel is above the exact time: the law that pruning rests on."""

import random

import numpy as np
import pytest
from case_counts import first_slow
from plan_cases import SCHEDULES, evaluator_of, random_problem, with_memory
from search_cases import tpuv4_space

import phaze_fast as pf
from phaze_fast.hardware import Cluster, FlatFabric
from phaze_fast.models import TransformerModel
from phaze_fast.planning import Training

HUGE = 1e300


def check_layouts(evaluator, times):
    """Hold the bounds of all layouts, and of their strategies, below exact times."""
    exact = np.full(len(evaluator.layouts), np.inf)
    ratios = []
    for at in range(len(evaluator.layouts)):
        bound, record, _ = evaluator.space.solve(times, at, 0, HUGE)
        exact[at] = record["time_s"][0]
        assert bound <= exact[at], (at, evaluator.layouts[at], bound / exact[at])
        if np.isfinite(exact[at]):
            ratios.append(bound / exact[at])
    whole = evaluator.layouts["strategy"]
    room = np.zeros(1, dtype=np.int64)
    for s, sizes in enumerate(evaluator.sizes):
        least = min(exact[whole == s], default=np.inf)
        own = times.at(slice(s, s + 1))
        bound = evaluator.bounds(s, own, room)[0]
        assert bound <= least
        order = np.array(sizes.graph.order)
        work = (own.forward_s[0] + own.plain_s[0])[order].sum()
        assert evaluator.work_bounds(s, np.array([work]), room)[0] <= bound * (1 + 1e-9)
        placed = evaluator.best(s, own, own, np.array([[HUGE]]))[0][0]
        assert placed.time_s == pytest.approx(least, rel=1e-9)
    return ratios


def check_problems(seeds, most_blocks, most_devices):
    solved = []
    for seed in seeds:
        rng = random.Random(seed)
        model, cluster, training = random_problem(rng, most_blocks, most_devices)
        training = training.model_copy(update={"zero": (0, 1, 2, 3), "schedule": SCHEDULES})
        evaluator, times = evaluator_of(model, cluster, training)
        if len(evaluator.layouts):
            solved += check_layouts(evaluator, times)
    return solved


def test_bounds_of_random_problems_are_never_above_exact_times():
    assert len(check_problems(range(16), 8, 8)) > 400


@first_slow("block", range(6))
def test_bounds_of_many_random_problems_are_never_above_exact_times(block):
    seeds = range(1000 + 40 * block, 1040 + 40 * block)
    assert len(check_problems(seeds, 12, 16)) > 1500


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [("llama2-7b", 40), ("t5-base", 4), ("mixtral-8x7b", 120), ("gpt2-xl", 24)],
)
@pytest.mark.parametrize(("some", "share"), [(False, 0.8), (True, 0.65)])
def test_bounds_of_models_are_close_to_exact_times_and_never_above(name, memory_gib, some, share):
    cluster = Cluster(devices=16, fabric="dgx-h100", chip="h100")
    step = Training(
        global_batch=64, micro_batch=(1, 2), zero=(0, 1, 3), schedule=SCHEDULES[:3] if some else ("1f1b", "zb-h1"),
        recompute=("auto",) if some else ("none", "selective", "full"), recompute_some=some,
        ep=(1, 4) if name == "mixtral-8x7b" else 1,
    )  # fmt: skip
    on = with_memory(cluster, memory_gib * 2**30)
    evaluator, times = evaluator_of(pf.models.load(name), on, step)
    ratios = check_layouts(evaluator, times)
    assert len(ratios) > 100
    assert np.median(ratios) > share


def test_bounds_of_interleaved_layouts_are_close():
    """A bound that left out what stages wait for would hold as well, and rule nothing out."""
    cluster = Cluster(devices=16, fabric="dgx-h100", chip="h100")
    given = {"schedule": "interleaved", "vpp": (2, 4), "pp": (4, 8), "zero": 0}
    step = Training(global_batch=64, micro_batch=1, tp=(1, 2), recompute="none", **given)
    model = pf.models.load("llama2-7b")
    evaluator, times = evaluator_of(model, with_memory(cluster, 400 * 2**30), step)
    ratios = check_layouts(evaluator, times)
    assert len(ratios) > 10
    assert np.median(ratios) > 0.9


WIDE = TransformerModel(
    name="wide", layers=4, hidden=256, heads=4, ffn=256, vocab=250_000, seq=128, max_positions=128,
    head="none", tied_embeddings=False,
)  # fmt: skip
CORNERS = {
    # From ZeRO 2 on a backward pass takes as long as its gradients, recomputation included.
    "gradients that recomputation hides": (
        pf.models.load("bertlarge"), 25_000,
        FlatFabric(name="slow", bandwidth_bytes_per_s=2e10),
        Training(global_batch=8, micro_batch=4, tp=1, pp=1, dp=2, zero=2, reserved_bytes=0),
    ),
    # The optimiser's time of the embedding does not come on top of another stage's gradients.
    "most gradients in another stage than the first": (
        WIDE, 15_000,
        FlatFabric(name="late", bandwidth_bytes_per_s=1e12, latency_s=1e-4),
        Training(
            global_batch=8, micro_batch=1, tp=1, pp=2, dp=2, zero=0, schedule="1f1b",
            rank_order="replicas-inside", reserved_bytes=0,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "chip", "fabric", "step"), CORNERS.values(), ids=CORNERS)
def test_bounds_that_were_once_above_the_exact_time(model, chip, fabric, step):
    cluster = Cluster(devices=step.pp[0] * step.dp[0], fabric=fabric, chip=tpuv4_space()[chip])
    on = with_memory(cluster, 32 * 2**30 if model is WIDE else 4 * 2**30)
    assert len(check_layouts(*evaluator_of(model, on, step))) == 1
