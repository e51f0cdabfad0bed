"""`plan` is never beaten by a plan that it could score, lists what it was asked for, and no bound of it is above."""

import itertools
import math
import random
from itertools import accumulate, islice

import numpy as np
import pytest
from case_counts import first_slow, slow_ones, slow_or_thorough, some_or_many
from plan_cases import (
    SCHEDULES,
    allowed,
    evaluator_of,
    exhaustive,
    h100,
    kind_of_layout,
    partitions,
    plans_of_layout,
    random_problem,
    some,
    spec_of,
    with_memory,
)
from search_cases import tpuv4_space

import phaze_fast as pf
from phaze_fast.hardware import Cluster, FlatFabric
from phaze_fast.models import TransformerModel
from phaze_fast.planning import Training, plan, planner, predict
from phaze_fast.planning.times import _known_times, _latest_layers, least_work_s
from phaze_fast.planning.training import modes_in

HUGE = 1e300


def cut_apart(rng, model, training):
    """The step with layers that one stage must hold."""
    layers = model.layers + model.encoder_layers + 2
    first = rng.randrange(layers - 1)
    more = {"uncut": (rng.randint(1, layers - 1),)}
    if rng.random() < 0.5:
        more["tied"] = ((first, first + 1),)
    return training.model_copy(update=more)


def best_of_kinds(evaluator, time_s):
    """Seconds of the best plan of each kind, rising."""
    best = {}
    for at in np.argsort(time_s, kind="stable").tolist():
        if np.isfinite(time_s[at]):
            best.setdefault(kind_of_layout(evaluator, at), time_s[at])
    return list(best.values())


def solved(evaluator, times):
    """Seconds, bytes and bound of the best plan of each layout."""
    rows = []
    for at in range(len(evaluator.layouts)):
        bound, record, _ = evaluator.space.solve(times, at, 0, HUGE)
        rows.append((record["time_s"][0], record["memory_bytes"][0], bound))
    return np.array(rows).reshape(-1, 3)


# ---- every plan there is ----


def check_exhaustively(seed, most_blocks, most_devices):
    """Hold one random problem against the search over all plans; gives how many those were."""
    rng = random.Random(seed)
    model, cluster, training = random_problem(rng, most_blocks, most_devices)
    if rng.random() < 0.3:
        training = cut_apart(rng, model, training)
    every = exhaustive(model, cluster, training)
    evaluator = every.evaluator
    assert (evaluator.fits[:, 0].astype(bool) | ~np.isfinite(every.time_s)).all()
    if not len(evaluator.layouts):
        return 0
    time_s, _, bound_s = solved(evaluator, every.times).T
    assert np.array_equal(np.isfinite(time_s), np.isfinite(every.time_s))
    fit = np.isfinite(time_s)
    assert time_s[fit] == pytest.approx(every.time_s[fit], rel=1e-9)
    assert (bound_s[fit] <= every.time_s[fit]).all()
    plans = plan(model, cluster, training, top=5, threads=1)
    wanted = best_of_kinds(evaluator, every.time_s)[:5]
    assert [each.time_s for each in plans.plans] == pytest.approx(wanted, rel=1e-9)
    if wanted:
        assert plans.best.time_s == pytest.approx(every.time_s.min(), rel=1e-9)
    return every.tried


@pytest.mark.parametrize("block", slow_ones((*range(20), 40, 41), *range(20), 40))
def test_no_plan_of_a_small_problem_is_faster(block):
    seeds = range(4 * block, 4 * block + 4)
    assert sum(check_exhaustively(seed, 4, 4) for seed in seeds) > 20 * len(seeds)


@first_slow("block", range(4))
def test_no_plan_of_a_middling_problem_is_faster(block):
    seeds = range(1000 + 40 * block, 1040 + 40 * block)
    assert sum(check_exhaustively(seed, 5, 6) for seed in seeds) > 2000


@some_or_many(80, 300)
def test_every_plan_that_predict_scores_is_one_that_was_looked_at(cases):
    rng = random.Random(7)
    compared = 0
    while compared < cases:
        model, cluster, training = random_problem(rng, 3, 4)
        evaluator, times = evaluator_of(model, cluster, training)
        if not len(evaluator.layouts):
            continue
        best = plan(model, cluster, training, top=1, threads=1)
        for at in rng.sample(range(len(evaluator.layouts)), min(3, len(evaluator.layouts))):
            layout, fits = evaluator.layouts[at], 0
            words = evaluator.sizes[int(layout["strategy"])].variants
            for cuts, chosen in islice(plans_of_layout(evaluator, at), 200):
                spec = spec_of(evaluator, layout, cuts, tuple(words[v] for v in chosen))
                scored = predict(model, cluster, spec)
                estimate, _ = evaluator.space.estimate(
                    times, at, np.array(cuts, np.int32), np.array(chosen, np.int32), 1.0
                )
                assert scored.time_s == estimate["time_s"][0]
                assert scored.memory_bytes == estimate["memory_bytes"][0]
                compared += 1
                if scored.over_bytes == 0:
                    fits += 1
                    assert scored.time_s >= best.best.time_s * (1 - 1e-9)
            assert fits == 0 or len(best)


@pytest.mark.parametrize("seed", [1021, 1024])
def test_plans_of_a_search_that_was_stopped_are_listed_by_their_seconds(seed):
    """Though bounds of layers ranked them, since few were scheduled."""
    problem = random_problem(random.Random(seed), 6, 16)
    asked = itertools.count()  # the first wave has four layouts, the second as many
    found = plan(*problem, top=20, threads=1, stop=lambda: next(asked) >= 1)
    assert not found.complete
    seconds = [each.time_s for each in found.plans]
    assert len(seconds) >= 8
    assert seconds == sorted(seconds)


# ---- larger problems: random plans, and laws ----

LARGER = {
    "gpt2-small": {"micro_batch": (1, 2), "zero": (0, 1, 3)},
    "t5-base": {"schedule": ("1f1b", "interleaved"), "vpp": (2, 3)},
    "mixtral-8x7b": {"ep": 4, "zero": 1, "rank_order": "replicas-inside"},
    "llama2-7b": {"tp": (2, 4), "zero": (2, 1), "schedule": "zero-bubble"},
}


def larger(model):
    on = Cluster(devices=16, fabric="dgx-h100", chip="h100")
    memory = {"gpt2-small": 6, "t5-base": 8, "mixtral-8x7b": 100, "llama2-7b": 40}[model]
    step = Training(global_batch=32, **LARGER[model])
    return pf.models.load(model), with_memory(on, memory * 2**30), step


def random_cuts(rng, evaluator, layout):
    layers = len(evaluator.sizes[0].graph.order)
    if layout["schedule"] != 0:
        return next(partitions(evaluator, layout))
    inner = sorted(rng.sample(range(1, layers), int(layout["pp"]) - 1))
    return (0, *inner, layers)


@pytest.mark.parametrize("name", LARGER)
@slow_or_thorough(40, 120)
def test_no_random_plan_is_faster(name, cases):
    model, cluster, training = larger(name)
    best = plan(model, cluster, training, threads=1).best
    evaluator, _ = evaluator_of(model, cluster, training)
    rng, fits = random.Random(3), 0
    for at in rng.choices(range(len(evaluator.layouts)), k=cases):
        layout = evaluator.layouts[at]
        words = evaluator.sizes[int(layout["strategy"])].variants
        chosen = tuple(rng.choice(words) for _ in range(int(layout["pp"])))
        spec = spec_of(evaluator, layout, random_cuts(rng, evaluator, layout), chosen)
        scored = predict(model, cluster, spec)
        assert 0 < scored.mfu <= scored.hfu <= 1
        if scored.over_bytes == 0:
            fits += 1
            assert scored.time_s >= best.time_s
    assert fits > cases // 6


def obeys(each, training):
    """Whether a listed plan is one that was asked for."""
    piped = each.pp > 1
    assert training.pp is None or each.pp in training.pp
    assert training.dp is None or each.dp in training.dp
    assert training.tp is None or each.tp in training.tp
    assert each.cp in training.cp
    assert each.ep in training.ep
    assert each.zero in training.zero
    assert each.micro_batch in training.micro_batch
    assert not piped or each.schedule in training.schedule
    chunks = {"interleaved": training.vpp, "zb-v": (2,), "dualpipe-v": (2,)}
    assert each.vpp in chunks.get(each.schedule, (1,))
    assert training.rank_order in ("auto", each.rank_order)
    for stage in each.stages:
        assert set(modes_in([stage.recompute])) <= {*training.recompute, "none"}
    assert each.micro_batch * each.micro_batches * each.dp == training.global_batch
    starts = set()
    for stage in each.stages:
        starts |= {stage.layers[n] for n in accumulate((0, *stage.chunks[:-1]))}
    assert allowed(training, (0, *sorted(starts - {0}), -1))


def some_problem(seed):
    """A random problem in which more is asked for; None where ties leave no partition."""
    rng = random.Random(seed)
    model, cluster, training = random_problem(rng, 8, 16)
    if rng.random() < 0.4:
        training = training.model_copy(update={"pp": some(rng, [1, 2, 3, 4])})
    if rng.random() < 0.4:
        training = training.model_copy(update={"dp": some(rng, [1, 2, 4])})
    if rng.random() < 0.4:
        training = cut_apart(rng, model, training)
    evaluator, times = evaluator_of(model, cluster, training)
    if not len(evaluator.layouts):
        return None
    rows = solved(evaluator, times)
    return model, cluster, training, evaluator, rows


@slow_or_thorough(10, 40)
def test_every_listed_plan_is_one_that_was_asked_for(cases):
    listed = 0
    for problem in map(some_problem, range(3000, 3000 + cases)):
        if problem is None:
            continue
        model, cluster, training = problem[:3]
        plans = plan(model, cluster, training, threads=1)
        for each in (*plans.plans, *plans.front):
            obeys(each, training)
            assert each.memory_bytes <= cluster.chip.hbm.capacity_bytes * (1 + 1e-9)
            assert 0 < each.mfu_causal <= each.mfu <= each.hfu
            assert each.mfu_causal <= 1
            assert sum(each.parts_s.values()) == pytest.approx(each.time_s, rel=1e-9)
            assert predict(model, cluster, each) == each  # seconds and bytes, bit for bit
            listed += 1
    assert listed > cases


def front_of(rows):
    """Of (seconds, bytes) those of which none is smaller and as fast."""
    front = []
    for time_s, memory in sorted(rows):
        if not front or memory < front[-1][1]:
            front.append((time_s, memory))
    return front


@slow_or_thorough(10, 40)
def test_the_front_is_that_of_the_fastest_plans_of_all_layouts(cases):
    compared = 0
    for problem in map(some_problem, range(4000, 4000 + cases)):
        if problem is None:
            continue
        model, cluster, training, _, rows = problem
        plans = plan(model, cluster, training, top=3, threads=1)
        front = [(each.time_s, each.memory_bytes) for each in plans.front]
        near = rows[:, 0] <= 2.0 * rows[:, 0].min()  # none on it takes more than twice as long
        wanted = front_of(map(tuple, rows[np.isfinite(rows[:, 0]) & near, :2].tolist()))
        assert len(front) == len(wanted)
        assert np.allclose(front, wanted, rtol=1e-9, atol=0)
        compared += len(front)
    assert compared > cases // 2


def shuffled(rng, training):
    """The same step, every list in another order."""
    names = ("micro_batch", "tp", "pp", "dp", "cp")
    names += ("ep", "zero", "schedule", "vpp", "tied", "uncut")
    given = {name: getattr(training, name) for name in names}
    mixed = {n: tuple(rng.sample(v, len(v))) for n, v in given.items() if v is not None}
    return training.model_copy(update=mixed)


@some_or_many(5, 12)
def test_neither_threads_nor_the_order_of_lists_change_anything(cases):
    rng = random.Random(5)
    compared = 0
    for problem in map(some_problem, range(5000, 5000 + cases)):
        if problem is None:
            continue
        model, cluster, training = problem[:3]
        plans = plan(model, cluster, training, threads=1)
        for step, threads in ((training, 2), (shuffled(rng, training), 1)):
            again = plan(model, cluster, step, threads=threads)
            assert again.plans == plans.plans
            assert again.front == plans.front
            assert (again.tried, again.rejected) == (plans.tried, plans.rejected)
        compared += len(plans)
    assert compared > 1.7 * cases


# ---- bounds: no pruning may rest on one above the exact time ----


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


@pytest.mark.slow
def test_bounds_of_random_problems_are_never_above_exact_times():
    assert len(check_problems(range(16), 8, 8)) > 400


@first_slow("block", range(6))
def test_bounds_of_many_random_problems_are_never_above_exact_times(block):
    seeds = range(1000 + 40 * block, 1040 + 40 * block)
    assert len(check_problems(seeds, 12, 16)) > 1500


@pytest.mark.slow
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


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_bounds_hold_where_the_last_group_of_micro_batches_is_small(pp):
    """Its backward passes go through all stages while most of them have nothing else to do."""
    cluster = with_memory(Cluster(devices=16, fabric="dgx-h100", chip="h100"), 400 * 2**30)
    ratios = []
    for micro_batches in (pp + 1, 2 * pp - 1, 3 * pp + 1, 5 * pp - 1, 4 * pp + pp // 2):
        given = {"schedule": "interleaved", "vpp": (2, 4), "pp": pp, "tp": 1, "recompute": "none"}
        step = Training(global_batch=16 // pp * micro_batches, micro_batch=1, zero=0, **given)
        for layers in (64, 66):
            model = pf.models.load("llama2-7b").replace(layers=layers)
            evaluator, times = evaluator_of(model, cluster, step)
            ratios += check_layouts(evaluator, times)
    assert len(ratios) >= 10
    assert np.median(ratios) > 0.9


def test_bounds_count_what_layouts_exchange_during_passes():
    """With ZeRO 3 on a slow interconnect a step is mostly exchanges."""
    cluster = Cluster(devices=16, fabric=FlatFabric(name="slow", bandwidth_bytes_per_s=1e9))
    given = {"schedule": ("1f1b", "interleaved"), "vpp": 2, "pp": (2, 4), "zero": (2, 3)}
    step = Training(global_batch=64, micro_batch=1, tp=(1, 2), recompute="none", **given)
    on = with_memory(cluster.replace(chip="h100"), 400 * 2**30)
    ratios = check_layouts(*evaluator_of(pf.models.load("llama2-7b"), on, step))
    assert len(ratios) > 10
    assert np.median(ratios) > 0.9


def test_bounds_are_not_those_of_a_few_small_blocks():
    """Layouts into which the mixtures of experts do not fit have no plan, whatever dense blocks."""
    model = pf.models.load("deepseek-v3")
    cluster = Cluster(devices=64, fabric="dgx-h100", chip="h100")
    given = {"schedule": "interleaved", "vpp": 2, "pp": (4, 8), "zero": 1, "ep": (4, 8)}
    step = Training(global_batch=64, micro_batch=1, tp=1, cp=1, recompute="full", **given)
    evaluator, times = evaluator_of(model, with_memory(cluster, 300 * 2**30), step)
    time_s, _, bound_s = solved(evaluator, times).T
    assert np.isfinite(time_s).any()
    assert np.isinf(time_s).sum() > 5
    assert (bound_s <= time_s).all()
    assert np.isinf(bound_s).sum() > np.isinf(time_s).sum() / 2


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


# ---- layouts that are excluded by their work ----


@pytest.mark.parametrize("seed", slow_ones(range(8), 5))
def test_layouts_excluded_by_their_work_change_no_plan(seed, monkeypatch):
    """The bound holds for every layout, and the list is the same however few are compared first."""
    model, cluster, training = random_problem(random.Random(1000 + seed), 6, 16)
    evaluator, times = evaluator_of(model, cluster, training)
    if not len(evaluator.layouts):
        return
    work_s = least_work_s(tuple(evaluator.sizes), cluster)
    bounds_s = evaluator.layout_work_bounds_s(work_s)
    time_s = solved(evaluator, times).T[0]
    assert (bounds_s <= time_s).all()
    assert (
        evaluator.work_bounds_s(work_s)[evaluator.layouts["strategy"]] <= bounds_s * 1.000001
    ).all()
    answers = []
    for few in ((64, 4096), (1, 2), (2, 16)):
        monkeypatch.setattr(planner, "_FEW_STRATEGIES", few[0])
        monkeypatch.setattr(planner, "_FEW_LAYOUTS", few[1])
        planner._evaluator.cache_clear()
        for stop in (None, lambda: False):  # which never stops
            answers.append(plan(model, cluster, training, top=3, threads=1, stop=stop))
    planner._evaluator.cache_clear()
    for answer in answers:
        assert answer.plans == answers[0].plans
        assert (answer.status, answer.open_s) == (answers[0].status, answers[0].open_s)
    assert sum(answers[0].excluded) == 0


@pytest.mark.parametrize("seed", range(4))
def test_plans_do_not_depend_on_how_many_layouts_come_first(seed, monkeypatch):
    """Strategies are scheduled after some waves of layouts, or after all."""
    model, cluster, training = random_problem(random.Random(2000 + seed), 6, 16)
    answers = []
    for waves in ((), (0,), (1, 2, 3)):
        monkeypatch.setattr(planner, "_FIRST_WAVES", waves)
        planner._evaluator.cache_clear()
        _known_times.cache_clear()
        _latest_layers.cache_clear()
        answers.append(plan(model, cluster, training, top=3, threads=1))
    planner._evaluator.cache_clear()
    assert answers[0].plans == answers[1].plans == answers[2].plans
    assert [answer.status for answer in answers] == [answers[0].status] * 3


def test_more_layouts_than_few_are_excluded_and_counted(monkeypatch):
    monkeypatch.setattr(planner, "_FEW_STRATEGIES", 8)
    model = pf.models.load("gpt2-small")
    cluster = Cluster(devices=64, fabric="dgx-a100", chip="a100-80")
    found = plan(model, cluster, Training(global_batch=512), top=1, threads=1)
    evaluator = planner._evaluator(model, cluster, Training(global_batch=512))
    assert found.status == "optimal"
    assert 0 < found.excluded[1] <= len(evaluator.layouts) - found.tried


def test_where_the_least_work_does_not_fit_eight_times_as_much_comes_next(monkeypatch):
    """A node of little memory: every layout is tried, refused or left out, and some are left out."""
    monkeypatch.setattr(planner, "_FEW_STRATEGIES", 2)
    monkeypatch.setattr(planner, "_FEW_LAYOUTS", 4)
    problem = pf.models.load("gpt2-small"), h100(8, 3), Training(global_batch=32, tp=(1, 2))
    planner._evaluator.cache_clear()
    found = plan(*problem, top=1, threads=1)
    evaluator = planner._evaluator(*problem)
    assert found.status == "optimal"
    assert found.excluded[1] > 0
    left_out = len(evaluator.layouts) - found.excluded[1]
    over = sum(count for why, count in found.rejected.items() if why.startswith("memory: tp"))
    assert found.excluded[0] == 0
    assert found.tried + over == left_out


def test_few_layouts_of_few_strategies_are_compared_first(monkeypatch):
    """Those of the least work: as many strategies as a search says that it has."""
    problem = pf.models.load("gpt2-small"), h100(8), Training(global_batch=32, tp=(1, 2))
    planner._evaluator.cache_clear()
    evaluator = planner._evaluator(*problem)
    work_s = least_work_s(tuple(evaluator.sizes), problem[1])
    strategies_s, layouts_s = (
        np.sort(bounds_s(work_s))
        for bounds_s in (evaluator.work_bounds_s, evaluator.layout_work_bounds_s)
    )
    first = []
    for few, least_s in (
        ((2, 4), layouts_s[4]), ((1, 400), strategies_s[1]),
        ((10**6, 4), layouts_s[4]), ((1, 10**6), strategies_s[1]),
    ):  # fmt: skip
        monkeypatch.setattr(planner, "_FEW_STRATEGIES", few[0])
        monkeypatch.setattr(planner, "_FEW_LAYOUTS", few[1])
        planner._evaluator.cache_clear()
        seen = []
        plan(*problem, top=1, threads=1, progress=lambda *counts, seen=seen: seen.append(counts))
        first.append(seen[0][1])
        assert first[-1] == (strategies_s <= least_s).sum()
    assert first[0] != first[1]
    assert sum(plan(*problem, top=1, threads=1, framework="megatron").excluded) == 0


@pytest.mark.parametrize("memory_gib", [80, 3])
def test_a_search_that_is_stopped_reaches_no_further(memory_gib, monkeypatch):
    """What it left out counts as open: no plan is faster than its bound."""
    monkeypatch.setattr(planner, "_FEW_STRATEGIES", 2)
    monkeypatch.setattr(planner, "_FEW_LAYOUTS", 4)
    problem = pf.models.load("gpt2-small"), h100(8, memory_gib), Training(global_batch=32, tp=1)
    asked = []
    planner._evaluator.cache_clear()
    stopped = plan(*problem, top=1, threads=1, stop=lambda: not asked.append(1))
    assert 1 <= len(asked) <= 2  # once more where what was left is slower than what was found
    assert not stopped.complete
    assert stopped.bound_s <= plan(*problem, top=1, threads=1).best.time_s


@pytest.mark.parametrize("seed", range(4))
def test_a_limit_just_above_a_layout_s_plan_does_not_lose_it(seed):
    model, cluster, step = random_problem(random.Random(seed), 6, 16)
    evaluator = planner._evaluator(model, cluster, step)
    times = evaluator.times(cluster)
    for layout in range(len(evaluator.layouts)):
        free = evaluator.space.solve(times, layout, 0, math.inf)
        (time_s,) = free.placed["time_s"] if free.placed.size else [math.inf]
        assert free.bound_s <= time_s
        if math.isfinite(time_s):
            for slack in (1e-9, 0.3):
                found = evaluator.space.solve(times, layout, 0, time_s * (1 + slack))
                assert found.placed["time_s"] == time_s
