"""Memory of plans: the plan kernel against `footprint`, the oracle, and all partitions tried out."""

import random
from itertools import accumulate, pairwise

import pytest
from case_counts import slow_or_thorough, some_or_many
from oracle_cases import ACTIVATIONS, FIVE, PIPED, random_cases, small_problem
from plan_cases import PLAIN, spec_of
from reference.plan import least_memory, stage_memory
from reference.plan_layers import Layers, Network

from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import TERMS, Pipeline, footprint_batch, stage_rows
from phaze_fast.planning import PlanEvaluator, Training, plan, predict

CLOSE = 1e-9


def layers_of(model, cluster, spec):
    return Layers(model, cluster, spec, Network(cluster, spec))


def chunks_of(stage):
    """Positions of each chunk of a stage."""
    ends = [0, *accumulate(stage.chunks)]
    return [stage.layers[a:b] for a, b in pairwise(ends)]


def test_even_plans_have_the_footprint_that_users_ask_for():
    """`footprint` divides blocks evenly, as predict does where no stages are given."""
    for seed in range(7100, 7115):
        model, cluster, specs = random_cases(random.Random(seed), 2)
        for given in specs:
            mode = "full" if given.recompute == "auto" else "none"
            fields = {"stages": None, "recompute": mode, "software": PLAIN}
            fields["offload_optimizer"] = False  # footprint is of the device alone
            if given.vpp > 1:  # whose chunks footprint does not tell apart
                fields |= {"schedule": "1f1b", "vpp": 1}
            spec = given.replace(**fields)
            found = predict(model, cluster, spec)
            layers = layers_of(model, cluster, spec)
            pipeline = Pipeline(
                pp=spec.pp, micro_batches=found.micro_batches, schedule=spec.schedule,
                dp=(spec.shard or spec.dp) * spec.cp, zero=spec.zero,
            )  # fmt: skip
            rows = stage_rows(layers.graph, pipeline, mode, spec.optimizer_name)
            for stage, counted in zip(found.stages, footprint_batch(rows), strict=True):
                expected = {term: float(counted[term]) for term in TERMS}
                assert stage.memory == pytest.approx(expected, rel=CLOSE), spec


# ---- what fits ----


SCHEDULES_TRIED = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
MIXED = ("none", "norms+activations", "full")


def searched(spec):
    """Whether all partitions of a plan are searched; those of other schedules are dealt."""
    rounds = spec.global_batch // (spec.dp * spec.micro_batch)
    few = spec.schedule == "zb-h1" and rounds < spec.pp
    return spec.pp == 1 or (spec.schedule in ("1f1b", "zb-h1") and not few)


def has_plan(evaluator, times, r, room):
    """Whether a plan is found for one layout in so many bytes."""
    given = (evaluator.sizes, evaluator.layouts[r : r + 1])
    alone = PlanEvaluator(evaluator.model, evaluator.cluster, evaluator.training, [room], given)
    return bool(alone.fits.any()) and bool(alone.top(times, 1).plans)


def needs_and_fits(model, cluster, training, rows):
    """What layouts need at least, capacities just below and above, and whether they are said to fit.

    With each whether it is marked, and whether there is a plan.
    """
    modes = training.recompute_modes
    layouts = PlanEvaluator(model, cluster, training, [1e15])
    times = layouts.times(cluster)
    chosen = [r % len(layouts.layouts) for r in rows]
    specs = [spec_of(layouts, layouts.layouts[r]) for r in chosen]
    needs = [least_memory(model, cluster, spec, modes) for spec in specs]
    rooms = sorted({need * factor for need in needs for factor in (1 - 1e-7, 1 + 1e-7)})
    fits = PlanEvaluator(model, cluster, training, rooms).fits
    for r, spec, need in zip(chosen, specs, needs, strict=True):
        for room, marked in zip(rooms, fits[r].tolist(), strict=True):
            near = 1 - 1e-6 < need / room < 1 + 1e-6
            made = has_plan(layouts, times, r, room) if near else None
            yield spec, need <= room, bool(marked), made


@pytest.mark.parametrize("recompute", ["auto", "none", MIXED], ids=["auto", "none", "mixed"])
@slow_or_thorough(5, 15)
def test_a_layout_fits_where_one_of_all_partitions_does(recompute, cases):
    checked, wrong, dealt, made_of_dealt = 0, 0, 0, 0
    for seed in range(cases):
        rows = random.Random(seed).choices(range(100_000), k=12)
        model, cluster, training = small_problem(seed, recompute)
        training = training.replace(schedule=SCHEDULES_TRIED)
        for spec, fits, marked, made in needs_and_fits(model, cluster, training, rows):
            assert marked or not fits, spec  # nothing that fits is left out
            assert made in (None, fits), (
                spec
            )  # and there is a plan of what fits, and of nothing else
            checked += 1
            if searched(spec):
                wrong += marked and not fits
            else:
                dealt += not fits
                made_of_dealt += bool(made)
    assert checked > 130 * cases
    assert wrong == 0  # of those that are searched; of dealt ones the mark means that they may
    assert dealt > 20 * cases
    assert made_of_dealt > cases


LATE = PLAIN.replace(resident_gradients=False, workspace_bytes=123_456)


@some_or_many(2, 12)
def test_gradients_that_come_late_fit_where_one_of_all_partitions_does(cases):
    checked, instants = 0, set()
    for seed in range(40, 40 + cases):
        rows = random.Random(seed).choices(range(100_000), k=8)
        model, cluster, training = small_problem(seed, MIXED)
        few = training.replace(schedule=SCHEDULES_TRIED, software=LATE, global_batch=4)
        for spec, fits, marked, made in needs_and_fits(model, cluster, few, rows):
            assert marked or not fits, spec
            assert made in (None, fits), spec
            assert not (searched(spec) and marked and not fits), spec
            checked += 1
            if made:
                instants |= {s.instant for s in predict(model, cluster, spec).stages}
    assert checked > 25 * cases
    assert len(instants) >= 3


@pytest.mark.slow
def test_late_gradients_take_what_the_oracle_says():
    for seed in range(7200, 7210):
        model, cluster, specs = random_cases(random.Random(seed), 3)
        for given in specs:
            spec = given.replace(software=LATE, optimizer="adam-bf16-grad")
            plan = predict(model, cluster, spec)
            layers = layers_of(model, cluster, spec)
            for k, stage in enumerate(plan.stages):
                expected = stage_memory(model, layers, spec, chunks_of(stage), k, stage.recompute)
                assert stage.memory == pytest.approx(expected, rel=CLOSE), spec


def test_every_stage_of_a_layout_that_fits_has_layers():
    """Five stages need 99 MB, since one of them holds a block for four micro-batches; three, 75 MB."""
    for spec, fits, marked, made in needs_and_fits(ACTIVATIONS, FIVE, PIPED, [0]):
        assert marked == made == fits, spec
    low = PlanEvaluator(ACTIVATIONS, FIVE, PIPED, [80e6])
    assert not low.fits.any()


def test_a_layout_that_is_marked_but_does_not_fit_has_no_plan():
    hbm = FIVE.chip.hbm.replace(capacity_bytes=80_000_000)
    assert len(plan(ACTIVATIONS, FIVE.replace(chip=FIVE.chip.replace(hbm=hbm)), PIPED)) == 0


@pytest.mark.parametrize("headroom", ["5%", 0.05, "4 GiB"])
def test_plans_leave_headroom(headroom):
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=64, micro_batch=(1, 2), schedule=("1f1b",))
    tight, roomy = (plan("llama2-7b", cluster, step, headroom=h) for h in (0.0, headroom))
    kept = 4 * 2**30  # 5% of 80 GiB
    assert roomy.best.reserved_bytes == tight.best.reserved_bytes + kept
    assert all(p.memory_bytes + step.reserved_bytes + kept <= 80 * 2**30 for p in roomy.plans)
    assert tight.best.time_s <= roomy.best.time_s
    assert predict("llama2-7b", cluster, roomy.best) == roomy.best
    device = roomy.best.device_memory
    assert list(device) == ["allocated", "reserved", "device"]
    assert device["allocated"] < device["reserved"] == roomy.best.memory_bytes
    assert device["device"] == roomy.best.memory_bytes + roomy.best.reserved_bytes


@pytest.mark.parametrize("headroom", ["lots", "-1%", -1, "100%", "90 GiB", "3", True])
def test_impossible_headroom_is_refused(headroom):
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    with pytest.raises(InvalidInputError, match="headroom"):
        plan("llama2-7b", cluster, Training(global_batch=64), headroom=headroom)
