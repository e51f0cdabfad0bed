"""The plan that is found is the best of all: every partition, every mode of every stage, tried out."""

import random
from itertools import combinations, pairwise, product

import pytest
from oracle_cases import small_problem, spec_of
from reference.plan import (
    chunks_of,
    exchange,
    least_memory,
    longest_tail,
    passes,
    stage_memory,
    time_1f1b,
    time_interleaved,
    time_zero_bubble,
)
from reference.plan_layers import MODES, Layers, Network

from phaze_fast.placement import PlanEvaluator, plan


def partitions(layers, spec):
    if spec.schedule == "interleaved":  # dealt out evenly, nothing to choose
        yield chunks_of(layers, spec)
        return
    count = len(layers.order)
    for cuts in combinations(range(1, count), spec.pp - 1):
        yield [list(range(a, b)) for a, b in pairwise([0, *cuts, count])]


def least_time(model, cluster, spec, room):
    """Seconds of the best of all plans of a layout that fit."""
    layers, p = Layers(model, cluster, spec, Network(cluster, spec)), spec.pp
    m = spec.global_batch // (spec.dp * spec.microbatch)
    known = MODES if model.attention == "eager" else ("none", "full")  # selective is none then
    best = float("inf")
    for chunks in partitions(layers, spec):
        stages = [[i for chunk in chunks[k::p] for i in chunk] for k in range(p)]
        fitting = [
            [
                mode
                for mode in known
                if sum(stage_memory(model, layers, spec, at, k, mode).values()) <= room
            ]
            for k, at in enumerate(stages)
        ]
        tail = longest_tail(layers, spec, stages)
        for modes in product(*fitting):
            f, b, w = passes(model, layers, spec, chunks, modes)
            if spec.schedule == "interleaved":
                pipeline = time_interleaved(f, b, p, m)
            elif spec.schedule == "zero-bubble":
                pipeline = time_zero_bubble(f, b, w, m)
            else:
                pipeline = time_1f1b(f, b, m)
            best = min(best, pipeline + tail)
    return best + exchange(layers, spec)


def alone(training, spec):
    """A training step that allows one layout."""
    return training.replace(
        global_batch=spec.global_batch, microbatch=spec.microbatch, tensor_parallel=spec.tp,
        context_parallel=spec.cp, expert_parallel=spec.ep, pipeline=spec.pp, data_parallel=spec.dp,
        zero=spec.zero, schedule=spec.schedule, virtual=max(spec.virtual, 2),
        rank_order=spec.rank_order,
    )  # fmt: skip


def assert_best(seed):
    """Four layouts of a small model, with just enough memory, more, or plenty."""
    rng = random.Random(seed)
    model, cluster, training = small_problem(seed)
    model = model.replace(layers=min(model.layers, 2 if model.encoder_layers else 4))
    layouts = PlanEvaluator(model, cluster, training, [1e15])
    for row in rng.choices(range(len(layouts.layouts)), k=4):
        spec = spec_of(layouts, layouts.layouts[row])
        if spec.pp > 4:
            continue
        needed = least_memory(model, cluster, spec)
        room = int(needed * rng.choice([1 + 1e-9, 1.1, 1.5, 3, 100])) + 1
        hbm = cluster.chip.hbm.replace(capacity_bytes=room)
        tight = cluster.replace(chip=cluster.chip.replace(hbm=hbm))
        best = plan(model, tight, alone(training, spec)).best
        expected = least_time(model, tight, spec, room)
        assert best.time_s == pytest.approx(expected, rel=1e-9), spec


def test_no_partition_is_faster_than_the_plan_that_is_found():
    for seed in range(25):
        assert_best(seed)


@pytest.mark.slow
def test_no_partition_is_faster_on_many_small_models():
    for seed in range(1000, 1250):
        assert_best(seed)
