"""Memory of plans by three hands: the plan kernel, the Numba rule, and all partitions tried out."""

import random
from itertools import combinations

import numpy as np
import pytest
from plan_cases import random_cases, random_cluster, random_model
from reference.plan import chunks_of, stage_memory
from reference.plan_layers import MODES, Layers, Network

from phaze_fast.memory import (
    OPTIMIZERS,
    SCHEDULES,
    STAGE_DTYPE,
    TERMS,
    Pipeline,
    footprint_batch,
    stage_rows,
)
from phaze_fast.placement import PlanEvaluator, PlanSpec, Training, predict
from phaze_fast.placement.training import RANK_ORDERS

CLOSE = 1e-9

# ---- predict and footprint_batch ----


def layers_of(model, cluster, spec):
    return Layers(model, cluster, spec, Network(cluster, spec))


def row_of(layers, spec, stage, k, buffers):
    """A stage of a plan, whatever its layers, as the Numba rule takes it."""
    row = np.zeros(1, dtype=STAGE_DTYPE)
    held = [layers.parameters(i) for i in stage.layers]
    blocks = [i for i in stage.layers if layers.is_block(i)]
    kept = {i: layers.layer(i).forward.stashed_bytes(stage.recompute) for i in blocks}
    whole = {i: layers.layer(i).forward.stashed_bytes() for i in stage.layers}
    for i in stage.layers:
        if layers.layer(i).kind == "head":
            row["head_bytes"] = whole[i]
        elif i not in kept:
            row["stash_bytes"] = whole[i]
    row["parameters"] = sum(mine for mine, _ in held)
    row["expert_parameters"] = sum(experts for _, experts in held)
    row["expert_parallel"] = spec.ep
    row["largest_layer"] = max((layers.parameters(i)[0] for i in blocks), default=0)
    row["stash_bytes"] += sum(kept.values())
    row["live_bytes"] = max((whole[i] - kept[i] for i in blocks), default=0)
    row["buffer_bytes"] = buffers
    optimizer = OPTIMIZERS[spec.optimizer]
    for name in ("weight_bytes", "gradient_bytes", "state_bytes"):
        row[name] = getattr(optimizer, name)
    row["data_parallel"], row["zero"] = spec.dp * spec.cp, spec.zero
    row["schedule"] = SCHEDULES.index(spec.schedule)
    row["stages"], row["stage"], row["virtual"] = spec.pp, k, spec.virtual
    row["microbatches"] = spec.global_batch // (spec.dp * spec.microbatch)
    return row


def test_the_kernel_and_the_numba_rule_count_the_same_bytes():
    for seed in range(7000, 7060):
        model, cluster, specs = random_cases(random.Random(seed), 3)
        for spec in specs:
            plan = predict(model, cluster, spec)
            layers = layers_of(model, cluster, spec)
            rows = 2.0 * spec.microbatch * model.seq / spec.cp * model.hidden
            split = spec.sequence_parallel and spec.tp > 1
            message = rows / spec.tp if split else rows
            buffers = rows * split + 2 * message * (spec.pp > 1)
            described = [row_of(layers, spec, s, k, buffers) for k, s in enumerate(plan.stages)]
            terms = footprint_batch(np.concatenate(described))
            for stage, counted in zip(plan.stages, terms, strict=True):
                expected = {term: float(counted[term]) for term in TERMS}
                assert stage.memory == pytest.approx(expected, rel=CLOSE), spec
            assert plan.memory_bytes == pytest.approx(float(terms["total"].max()), rel=CLOSE)


def test_even_plans_have_the_footprint_that_users_ask_for():
    """`footprint` deals blocks out evenly, as predict does where no stages are given."""
    for seed in range(7100, 7140):
        model, cluster, specs = random_cases(random.Random(seed), 2)
        for given in specs:
            mode = "full" if given.recompute == "auto" else "none"
            fields = {"stages": None, "recompute": mode}
            if given.schedule == "interleaved":  # whose chunks footprint does not tell apart
                fields |= {"schedule": "1f1b", "virtual": 1}
            spec = given.replace(**fields)
            plan = predict(model, cluster, spec)
            layers = layers_of(model, cluster, spec)
            pipeline = Pipeline(
                stages=spec.pp, microbatches=plan.microbatches, schedule=spec.schedule,
                data_parallel=spec.dp * spec.cp, zero=spec.zero,
            )  # fmt: skip
            rows = stage_rows(layers.graph, pipeline, mode, spec.optimizer)
            for stage, counted in zip(plan.stages, footprint_batch(rows), strict=True):
                expected = {term: float(counted[term]) for term in TERMS}
                assert stage.memory == pytest.approx(expected, rel=CLOSE), spec


# ---- what fits ----


def spec_of(evaluator, row):
    """A layout of an evaluator as a plan."""
    strategy = evaluator.sizes[int(row["strategy"])].strategy
    d, b = int(row["data_parallel"]), strategy.microbatch
    return PlanSpec(
        global_batch=int(row["microbatches"]) * d * b,
        tp=strategy.tensor_parallel, cp=strategy.context_parallel, ep=strategy.expert_parallel,
        pp=int(row["stages"]), dp=d, microbatch=b, zero=int(row["zero"]),
        schedule=SCHEDULES[int(row["schedule"])], virtual=int(row["virtual_stages"]),
        rank_order=RANK_ORDERS[int(row["rank_order"])], idle=True,
    )  # fmt: skip


def least_memory(model, cluster, spec):
    """Bytes of the fullest device in the best of all partitions, each stage in its best mode."""
    layers = layers_of(model, cluster, spec)
    count = len(layers.order)
    known = {}

    def needed(positions, k):
        key = (positions, k)
        if key not in known:
            known[key] = min(
                sum(stage_memory(model, layers, spec, positions, k, mode).values())
                for mode in MODES
            )
        return known[key]

    if spec.schedule == "interleaved":  # dealt out evenly, nothing to choose
        chunks = chunks_of(layers, spec)
        stages = [tuple(i for c in chunks[k :: spec.pp] for i in c) for k in range(spec.pp)]
        return max(needed(positions, k) for k, positions in enumerate(stages))
    best = float("inf")
    for cuts in combinations(range(1, count), spec.pp - 1):
        ends = [0, *cuts, count]
        stages = [tuple(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
        best = min(best, max(needed(positions, k) for k, positions in enumerate(stages)))
    return best


def small_problem(seed):
    rng = random.Random(seed)
    model = random_model(rng)
    most = 3 if model.encoder_layers else 6
    fields = {"layers": min(model.layers, most)}
    if model.encoder_layers:
        fields["encoder_layers"] = min(model.encoder_layers, 3)
    model = model.replace(**fields)
    training = Training(
        global_batch=rng.choice([4, 6, 12]),
        microbatch=rng.choice([1, 2]),
        zero=(0, 1, 2, 3),
        tensor_parallel=(1, 2),
        context_parallel=rng.choice([(1,), (1, 2)]),
        expert_parallel=(1, 2) if model.moe else (1,),
        schedule=("1f1b", "interleaved", "zero-bubble"),
        virtual=(2, 3),
        reserved_bytes=0,
    )
    return model, random_cluster(rng, rng.choice([4, 6, 8])), training


def test_a_layout_fits_where_one_of_all_partitions_does():
    checked = 0
    for seed in range(40):
        model, cluster, training = small_problem(seed)
        layouts = PlanEvaluator(model, cluster, training, [1e15])
        rng = random.Random(seed)
        rows = [rng.randrange(len(layouts.layouts)) for _ in range(12)]
        needs = {r: least_memory(model, cluster, spec_of(layouts, layouts.layouts[r])) for r in rows}
        rooms = sorted({n * f for n in needs.values() for f in (1 - 1e-7, 1 + 1e-7)})
        fits = PlanEvaluator(model, cluster, training, rooms).fits
        for r, need in needs.items():
            expected = [need <= room for room in rooms]
            found = fits[r].astype(bool).tolist()
            assert found == expected, spec_of(layouts, layouts.layouts[r])
            checked += len(rooms)
    assert checked > 3000
