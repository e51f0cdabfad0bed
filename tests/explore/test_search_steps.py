"""Steps of the search against plain loops and by hand: bounds, best partitions, joules of a step."""

import itertools
import math

import numpy as np
import pytest
from search_cases import LARGE, random_case, tpuv4_space

import phaze_fast as pf
from phaze_fast.explore import SearchProblem
from phaze_fast.explore.bounds import STEPS
from phaze_fast.hardware import FlatFabric, energy_table
from phaze_fast.planning import Placed, PlanEvaluator
from phaze_fast.planning.times import KindTimes

GIB = 2**30
ANY_TIME_S = 1e300
RECOMPUTED = (("none", "full"), ("none", "norms+activations"), ("full",), ("norms", "full"))


def test_steps_are_named_as_documents_name_them():
    assert STEPS == ("roofline", "mapped", "schedule_bound", "scheduled", "placed")


# ---- every partition, one by one ----


def small_cases(first, count):
    for seed in range(first, first + count):
        case = random_case(seed, (), devices=8, layers=5)
        free = {"uncut": (), "tied": (), "recompute": RECOMPUTED[seed % len(RECOMPUTED)]}
        free["recompute_some"] = seed % 5 != 0
        training = case.training.model_copy(update=free)
        yield seed, case._replace(training=training)


@pytest.mark.parametrize("count", [1, 3])
def test_a_limit_leaves_out_what_takes_longer_and_nothing_else(count):
    rng = np.random.default_rng(count)
    for seed, case in small_cases(40, 6):
        evaluator = case.problem.evaluators[0]
        records = tpuv4_space().chips[rng.integers(0, len(tpuv4_space()), count)].copy()
        for s in range(len(evaluator)):
            times, least = case.problem.schedule(s, records)
            shape = (count, len(evaluator.limits_bytes))
            free = evaluator.best(s, times, least, np.full(shape, ANY_TIME_S))
            exact = np.array([[placed.time_s for placed in row] for row in free])
            fits = np.isfinite(exact)
            same = evaluator.best(s, times, least, np.where(fits, exact, -np.inf))
            less = evaluator.best(s, times, least, np.where(fits, exact * (1 - 1e-9), -np.inf))
            for row, kept, lost in zip(free, same, less, strict=True):
                assert [p for p in kept if p.layout >= 0] == [p for p in row if p.layout >= 0], seed
                assert all(p.layout == -1 and p.time_s == math.inf for p in lost), seed


def check_bounds(case, chips, rising=False):
    """Compare the bounds of every step with the exact time, and with the next; how many plans."""
    problem, evaluator, plans = case.problem, case.problem.evaluators[0], 0
    records = tpuv4_space().chips[list(chips)].copy()
    limits = np.full((len(records), len(evaluator.limits_bytes)), ANY_TIME_S)
    for s in range(len(evaluator)):
        times, least = problem.schedule(s, records)
        steps = [problem.bound(s, records, step) for step in ("mapped", "schedule_bound")]
        work_s, placed = problem.work_s(s, records), evaluator.best(s, times, least, limits)
        for c in range(len(evaluator.limits_bytes)):
            at = np.full(len(records), c, dtype=np.int64)
            bounds = [evaluator.work_bounds(s, work_s, at)]
            bounds += [evaluator.bounds(s, own, at) for own in (*steps, least)]
            for lower, higher in itertools.pairwise(bounds) if rising else ():
                assert (lower <= higher * (1.0 + 1e-9)).all()
            exact = np.array([row[c].time_s for row in placed])
            assert all((own <= exact).all() for own in bounds)
            plans += int(np.isfinite(exact).sum())
    return plans


def test_bounds_rise_from_step_to_step_towards_the_exact_time():
    """Each step is made of what the one before is made of, and more."""
    chips = (1000, 8000, 15000, 22000)
    assert sum(check_bounds(case, chips, rising=True) for _, case in small_cases(80, 6)) > 10
    assert sum(check_bounds(random_case(s), (9000, 25000)) for s in range(1000, 1012)) > 50


@pytest.mark.slow
def test_no_bound_is_above_the_exact_time_in_many_cases():
    assert sum(check_bounds(random_case(seed), (9000, 25000)) for seed in range(1012, 1072)) > 300
    assert sum(check_bounds(random_case(s, LARGE), (25000,)) for s in range(2000, 2010)) > 0


def test_what_is_ruled_out_takes_longer_than_its_limit():
    ruled_out = 0
    for seed, case in small_cases(40, 6):
        problem, records = case.problem, tpuv4_space().chips[[11000 + seed, 15000, 25000, 28000]]
        evaluator = problem.evaluators[0]
        rooms = np.full(len(records), len(problem.capacities) - 1)
        for s in range(len(evaluator)):
            made, _ = problem.schedule(s, records)  # not all proven: then above the optimum
            exact_s = evaluator.bounds(s, made, rooms)
            for share in (0.97, 0.9999, 1.0001, 1.1):
                limits = exact_s * share
                least = evaluator.bounds(s, problem.rule_out(s, records, rooms, limits), rooms)
                assert (least <= exact_s * (1 + 1e-9)).all(), (seed, s, share)
                ruled_out += int((np.isfinite(limits) & (least > limits)).sum())
    assert ruled_out > 25


def test_what_is_known_of_chips_priced_together_changes_no_answer():
    """Roots of search trees are kept and looked up: asked in any order, the same bits."""
    for seed, case in small_cases(20, 1):
        problem, records = case.problem, tpuv4_space().chips[[11000 + seed, 15000, 25000, 28000]]
        rooms = np.full(len(records), len(problem.capacities) - 1)
        for s in range(len(problem)):
            priced = problem.price(s, records)
            some = np.array([2, 0])
            problem.bound(s, priced.at(some), "schedule_bound")
            problem.bound(s, priced.at(np.array([3])).at(np.array([0])), "schedule_bound")
            limits = (
                problem.evaluators[0].bounds(s, problem.schedule(s, records)[0], rooms) * 0.9999
            )
            pairs = [
                (problem.bound(s, chips, "schedule_bound"), problem.schedule(s, chips)[0],
                 problem.rule_out(s, chips, rooms, limits))
                for chips in (priced, records)
            ]  # fmt: skip
            for kept, fresh in zip(*pairs, strict=True):
                assert kept.same_times() == fresh.same_times(), (seed, s)
                assert kept.proven.tolist() == fresh.proven.tolist(), (seed, s)


def test_work_of_rooflines_is_that_of_a_plain_loop():
    seed, case = next(iter(small_cases(3, 1)))
    problem, records = case.problem, tpuv4_space().chips[[0, 9000, 28000]]
    for s, sizes in enumerate(problem.evaluators[0].sizes):
        expected = np.zeros(len(records))
        costs = pf.estimate_costs(
            sizes.graph,
            records,
            problem.cluster,
            like=problem.like,
            bounds_only=True,
            expert_stride=sizes.expert_stride if sizes.strategy.ep > 1 else None,
        )
        for g, graph in enumerate(costs.graphs):
            seconds = costs.time_s(g)
            for chip in range(len(records)):
                finish = [0.0] * len(graph)
                for i in range(len(graph)):
                    before = [finish[a] for a, b in graph.edges() if b == i]
                    finish[i] = max(before, default=0.0) + seconds[chip, i]
                expected[chip] += sizes.graph.layers[g // 2].count * max(finish, default=0.0)
        assert np.array_equal(problem.work_s(s, records), expected), (seed, s)


# ---- joules ----


def test_joules_of_a_step_by_hand():
    """Two replicas of two stages of gpt2-small, ZeRO 1, eight micro-batches each."""
    cluster = pf.Cluster(devices=4, fabric=FlatFabric(name="flat", bandwidth_bytes_per_s=1e11))
    step = pf.Training(
        global_batch=16,
        micro_batch=1,
        tp=1,
        pp=2,
        dp=2,
        zero=1,
        schedule="1f1b",
        rank_order="replicas-inside",
        recompute=("none", "selective", "full"),
        reserved_bytes=0,
    )
    model = pf.models.load("gpt2-small")
    problem = SearchProblem(model, cluster, step, tpuv4_space().spec.base, (64 * GIB,))
    evaluator: PlanEvaluator = problem.evaluators[0]
    assert len(evaluator) == len(evaluator.layouts) == 1
    (sizes,) = evaluator.sizes
    assert sizes.variants == ("none", "full")  # attention is fused: there is nothing selective
    kinds, count = len(sizes.kinds), len(sizes.graph.order)
    one = np.ones((1, kinds))
    joules = np.stack([5.0 * one, 8.0 * one], axis=1)
    seconds = np.stack([2.0 * one, 3.0 * one], axis=1)
    times = KindTimes(
        forward_s=one,
        plain_s=2.0 * one,
        backward_s=seconds,
        weight_grad_s=one,
        forward_j=3.0 * one,
        backward_j=joules,
        hbm_bytes_per_s=np.array([1e12]),
        static_w=np.array([10.0]),
        proven=np.array([True]),
    )
    first = count // 2
    placed = Placed(0.0, 0.0, 0, (0, first, count), (1, 0))
    (found,) = evaluator.energies_j([placed], times, [0])
    passes = 2 * 8 * (first * (3.0 + 8.0) + (count - first) * (3.0 + 5.0))
    prices = energy_table()
    held = float(sizes.kinds["parameters"][list(sizes.graph.order)].sum())
    held += model.vocab * model.hidden  # the last stage's copy of the embedding
    step_bytes = held / 2 * (2 * 12 + 4 + 2)
    sent = 2 * 8 * 2 * (1024 * 768 * 2) + 2 * held * (4 + 2) / 2
    by_hand = passes + 2 * step_bytes * prices.hbm_byte_j + sent * prices.network_byte_j
    time_s = evaluator.plan(placed, times, peak_flops=1e12).time_s
    assert found == pytest.approx(by_hand + 10.0 * time_s * 4, rel=1e-12)
    assert evaluator.plan(placed, times, peak_flops=1e12).energy_j == found
