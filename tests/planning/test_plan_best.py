"""The plan that is found is the best of all: every partition, every mode of every stage, tried out."""

import random

import pytest
from case_counts import first_slow
from oracle_cases import small_problem
from plan_cases import spec_of
from reference.plan import (
    chunks_on,
    exchange,
    least_memory,
    longest_tail,
    partitions,
    passes,
    played,
    recompute_texts,
    stage_backward,
    stage_memory,
)
from reference.plan_layers import Layers, Network

from phaze_fast.planning import PlanEvaluator, plan

MODES = ("none", "norms+activations", "full")


def least_time(model, cluster, spec, room):
    """Seconds of the best of all plans of a layout that fit."""
    layers, p = Layers(model, cluster, spec, Network(cluster, spec)), spec.pp
    best = float("inf")
    for chunks in partitions(layers, spec):
        stages = [[chunks[c] for c in chunks_on(spec, k)] for k in range(p)]
        chosen = []
        for k, own in enumerate(stages):
            longest = max(sum(map(layers.is_block, chunk)) for chunk in own)
            fitting = [
                text
                for text in recompute_texts(longest, MODES)
                if sum(stage_memory(model, layers, spec, own, k, text).values()) <= room
            ]
            if not fitting:
                break
            # A slower stage never makes a schedule faster.
            chosen.append(min(fitting, key=lambda t, own=own: stage_backward(layers, own, t)))
        if len(chosen) == p:
            f, b, w = passes(model, layers, spec, chunks, chosen)
            tail = longest_tail(layers, spec, [[i for c in own for i in c] for own in stages])
            best = min(best, played(spec, f, b, w) + tail)
    return best + exchange(layers, spec)


def alone(training, spec):
    """A training step that allows one layout."""
    return training.replace(
        global_batch=spec.global_batch, micro_batch=spec.micro_batch, tp=spec.tp,
        cp=spec.cp, ep=spec.ep, pp=spec.pp, dp=spec.dp,
        zero=spec.zero, schedule=spec.schedule, vpp=max(spec.vpp, 2),
        rank_order=spec.rank_order, shard=spec.shard or "all", cp_kind=spec.cp_kind,
    )  # fmt: skip


def assert_best(seed):
    """Four layouts of a small model, with just enough memory, more, or plenty."""
    rng = random.Random(seed)
    model, cluster, training = small_problem(seed, MODES)
    model = model.replace(layers=min(model.layers, 2 if model.encoder_layers else 4))
    layouts = PlanEvaluator(model, cluster, training, [1e15])
    for row in rng.choices(range(len(layouts.layouts)), k=4):
        spec = spec_of(layouts, layouts.layouts[row])
        if spec.pp > 4:
            continue
        needed = least_memory(model, cluster, spec, MODES)
        room = int(needed * rng.choice([1 + 1e-9, 1.1, 1.5, 3, 100])) + 1
        hbm = cluster.chip.hbm.replace(capacity_bytes=room)
        tight = cluster.replace(chip=cluster.chip.replace(hbm=hbm))
        best = plan(model, tight, alone(training, spec)).best
        expected = least_time(model, tight, spec, room)
        assert best.time_s == pytest.approx(expected, rel=1e-9), spec


def test_no_partition_is_faster_than_the_plan_that_is_found():
    for seed in range(8):
        assert_best(seed)


@first_slow("block", range(3))
def test_no_partition_is_faster_on_many_small_models(block):
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        assert_best(seed)
