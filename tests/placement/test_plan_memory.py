"""Memory of plans by three hands: the plan kernel, the Numba rule, and all partitions tried out."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle_cases import ACTIVATIONS, FIVE, PIPED, random_cases, small_problem, spec_of
from reference.plan import least_memory
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
from phaze_fast.placement import PlanEvaluator, predict

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
    for seed in range(7000, 7030):
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
    for seed in range(7100, 7130):
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


def needs_and_fits(model, cluster, training, rows):
    """What layouts need at least, capacities just below and above, and whether they are said to fit."""
    modes = MODES if training.recompute == "auto" else (training.recompute,)
    layouts = PlanEvaluator(model, cluster, training, [1e15])
    chosen = [r % len(layouts.layouts) for r in rows]
    specs = [spec_of(layouts, layouts.layouts[r]) for r in chosen]
    needs = [least_memory(model, cluster, spec, modes) for spec in specs]
    rooms = sorted({need * factor for need in needs for factor in (1 - 1e-7, 1 + 1e-7)})
    fits = PlanEvaluator(model, cluster, training, rooms).fits
    for r, spec, need in zip(chosen, specs, needs, strict=True):
        for room, marked in zip(rooms, fits[r].tolist(), strict=True):
            yield spec, need <= room, bool(marked)


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_a_layout_fits_where_one_of_all_partitions_does(recompute):
    checked = wrong = 0
    for seed in range(25):
        rows = random.Random(seed).choices(range(1000), k=12)
        for spec, fits, marked in needs_and_fits(*small_problem(seed, recompute), rows):
            assert marked or not fits, spec  # nothing that fits is left out
            checked += 1
            wrong += marked and not fits
    assert checked > 2000
    assert wrong == 0


def test_every_stage_of_a_layout_that_fits_has_layers():
    """Five stages need 99 MB, since one of them holds a block for four micro-batches; three, 75 MB."""
    for spec, fits, marked in needs_and_fits(ACTIVATIONS, FIVE, PIPED, [0]):
        assert marked == fits, spec
    low = PlanEvaluator(ACTIVATIONS, FIVE, PIPED, [80e6])
    assert not low.fits.any()


NOTHING_FITS = """
from oracle_cases import ACTIVATIONS, FIVE, PIPED
from phaze_fast.placement import plan
hbm = FIVE.chip.hbm.replace(capacity_bytes=80_000_000)
chip = FIVE.chip.replace(hbm=hbm)
assert len(plan(ACTIVATIONS, FIVE.replace(chip=chip), PIPED)) == 0
"""


def test_a_layout_that_is_marked_but_does_not_fit_has_no_plan():
    path = str(Path(__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", NOTHING_FITS], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert found.returncode == 0
