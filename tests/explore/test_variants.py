"""Chips that differ in links, formats, stacks and dies, searched together: brute force, regrets."""

import math
from dataclasses import replace

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast.cost.engine import LayersToBound, estimate_costs, roofline_works_s
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import ChipGroups, Variant, problems_of, scaled_cluster
from phaze_fast.explore.best_first import run_together
from phaze_fast.hardware import EVERY_AREA, AreaLimit, Links
from phaze_fast.robust import terms_mm2

BASE = pf.presets.chip("phaze-tpuv4").replace(links=Links(count=6, bandwidth_bytes_per_s=50e9))
AXES = {
    "format": ["bf16", "fp8"],
    "links.count": [3, 12],
    "dies": [1, 2],
    "hbm.generation": ["hbm2", "hbm3"],
    "hbm.stacks": [2, 4],
    "vector_core.count": [8, 32],
}
LIMIT = AreaLimit(max_mm2=600.0, terms=EVERY_AREA)
SPACE = pf.ArchitectureSpace(pf.hardware.SpaceSpec(name="mixed", base=BASE, axes=AXES, area=LIMIT))
CLUSTER = pf.Cluster(devices=8, fabric="tpuv4-pod")
MODEL = pf.models.load("gpt2-small")
STEP = pf.Training(global_batch=32, seq=256, micro_batch=4, tp=(1, 4))


def one_by_one(space):
    """Seconds of each chip alone, over the links and in the format that it has."""
    found = []
    for chip in space:
        rate = 50e9 * chip.links.count / 6
        fabric = CLUSTER.fabric.replace(link_bandwidth_bytes_per_s=rate)
        fp8 = "fp8" in chip.tensor_core.rates
        step = STEP.replace(precision="fp8") if fp8 else STEP
        cluster = CLUSTER.replace(fabric=fabric)
        found.append(pf.evaluate_batch(MODEL, chip, cluster, step, threads=1).time_s[0])
    return np.array(found)


def test_links_are_scaled():
    for name, rate, latency in (
        ("tpuv4-pod", "link_bandwidth_bytes_per_s", "hop_latency_s"),
        ("phaze-flat", "bandwidth_bytes_per_s", "latency_s"),
    ):
        fabric = pf.presets.fabric(name).replace(**{latency: 1e-6})
        scaled = scaled_cluster(CLUSTER.replace(fabric=fabric), [4.0], [8.0]).fabric
        assert getattr(scaled, rate) == 4.0 * getattr(fabric, rate)
        assert getattr(scaled, latency) == 8e-6


def test_only_the_innermost_links_of_a_variant_are_scaled():
    cluster = CLUSTER.replace(fabric="dgx-h100")
    inner, *outer = cluster.fabric.tiers
    assert outer
    assert inner.latency_s > 0
    scaled = Variant(link_share=0.5).cluster(cluster).fabric.tiers
    half = inner.bandwidth_bytes_per_s / 2
    assert scaled == (inner.replace(bandwidth_bytes_per_s=half), *outer)
    assert Variant().cluster(cluster) is cluster
    assert Variant(fp8=True).cluster(CLUSTER) is CLUSTER
    tripled = scaled_cluster(cluster, [1.0, 1.0], [1.0, 3.0]).fabric.tiers
    assert [tier.latency_s for tier in tripled] == [inner.latency_s, 3.0 * outer[0].latency_s]


@pytest.mark.parametrize(
    ("tasks", "threads", "each"),
    [(3, 7, [2, 2, 2]), (2, 2, [1, 1]), (2, 4, [2, 2]), (1, 4, [4]), (3, 1, [1, 1, 1]), (0, 4, [])],
)
def test_threads_are_shared_out_among_tasks(tasks, threads, each):
    threads_of_tasks = []
    run_together([lambda threads: threads_of_tasks.append(threads)] * tasks, threads)
    assert threads_of_tasks == each


@pytest.fixture(scope="module")
def some():
    return SPACE[np.random.default_rng(5).permutation(len(SPACE))[:14]]


@pytest.fixture(scope="module")
def seconds(some):
    return one_by_one(some)


def test_a_search_over_links_and_formats_is_that_of_brute_force(some, seconds):
    together = pf.evaluate_batch(MODEL, some, CLUSTER, STEP, threads=1)
    assert together.time_s.tolist() == seconds.tolist()
    found = pf.search(MODEL, some, CLUSTER, STEP, top=3, threads=2)
    assert found.status == "optimal"
    assert found.best.time_s == seconds.min()
    assert len(set(seconds.tolist())) > 6
    plan = found.best.plan
    assert plan.time_s == found.best.time_s
    assert 0.0 < plan.mfu < 1.0
    area = pf.search(MODEL, some, CLUSTER, STEP, objective="area", threads=1)
    values = seconds * some.area_mm2 * 8
    assert math.isclose(area.best.value, values.min(), rel_tol=1e-12)


def test_points_are_counted_once_for_each_chip_and_strategy(some):
    small = {"hbm.capacity_bytes": [2.0**28, 2.0**36]}  # in the smaller nothing fits
    spec = SPACE.spec.replace(axes={k: v for k, v in AXES.items() if "hbm" not in k} | small)
    for chips in (some, pf.ArchitectureSpace(spec)[::5]):
        found = pf.search(MODEL, chips, CLUSTER, STEP.replace(tp=(1, 4, 5)), threads=1)
        assert found.outcome.points == len(chips) * 3
        assert found.outcome.counts["rules"] == len(chips)  # 5 does not divide the heads
    assert found.outcome.counts["memory"] > 0


def test_regrets_over_links_and_formats_hold_at_every_corner(some, seconds):
    box = {"fabric_bandwidth": [0.5, 1.0], "links_area": [0.7, 1.75], "control_area": [0.5, 1.5]}
    robust = pf.search(MODEL, some, CLUSTER, STEP, uncertainty=box, tolerance=0.1).robust
    assert robust.proven
    slow = CLUSTER.replace(fabric=CLUSTER.fabric.replace(link_bandwidth_bytes_per_s=25e9))
    at_ends = [seconds, pf.evaluate_batch(MODEL, some, slow, STEP, threads=1).time_s]
    terms = terms_mm2(some, some.chips)
    assert np.allclose(terms.sum(axis=1), some.area_mm2)
    own = next(
        k for k, c in enumerate(some) if c.replace(name="c") == robust.chip.replace(name="c")
    )
    worst = 1.0
    for control in (0.5, 1.0, 1.5):
        for links in (0.7, 1.0, 1.75):
            factors = np.array([1.0] * 7 + [control, links])
            mm2 = terms @ factors
            excess = max(1.0, mm2[own] / 600.0)
            for times in at_ends:
                worst = max(worst, excess * times[own] / times[mm2 <= 600.0].min())
    assert worst <= robust.max_regret * (1 + 1e-9)


def test_chips_have_one_number_if_they_differ_in_capacity_alone():
    rng = np.random.default_rng(7)
    chips = np.zeros(300, dtype=SPACE.chips.dtype)
    names = chips.dtype.names
    for name in ("hbm_bytes", *rng.choice([n for n in names if n != "hbm_bytes"], 4, False)):
        chips[name] = rng.integers(1, 5, len(chips))
    rows = [tuple(chip[name] for name in names if name != "hbm_bytes") for chip in chips]
    groups = ChipGroups.of_records(chips, np.ones(len(chips)), SPACE.spec.like)
    pairs = set(zip(rows, groups.of_chip[:, 0].tolist(), strict=True))
    assert len(pairs) == len(set(rows)) == len({number for _, number in pairs}) > 100


def test_a_precision_and_a_format_axis_are_refused_together():
    groups = ChipGroups.of(SPACE)
    with pytest.raises(InvalidInputError, match="axis format; expected bf16"):
        problems_of([MODEL], groups, CLUSTER, STEP.replace(precision="fp16"))
    assert len(groups.variants) == 4
    (problem,) = problems_of([MODEL], groups, CLUSTER, STEP)
    assert (problem.cluster, problem.training) == (CLUSTER, STEP)  # and not those of one variant
    assert len(ChipGroups.of(SPACE[:4]).variants) == 1


def test_peak_rates_are_those_of_the_format_that_the_step_computes_in():
    groups = ChipGroups.of(SPACE)
    fp8 = [groups.peak_flops(record) for record in groups.records[groups.records["fp8"] > 0]]
    bf16 = [groups.peak_flops(record) for record in groups.records[groups.records["fp8"] == 0]]
    assert set(fp8) == {2.0 * BASE.peak_flops()}
    assert set(bf16) == {BASE.peak_flops()}
    rates = {**BASE.tensor_core.rates, "fp8": 2.0}
    both = BASE.replace(
        tensor_core=BASE.tensor_core.replace(rates=rates),
        other_tensor_core={"count": 4, "width": 32, "depth": 16},
    )
    spec = pf.hardware.SpaceSpec(name="both", base=both, axes={"vector_core.count": [8, 32]})
    groups = ChipGroups.of(pf.ArchitectureSpace(spec))  # a step in bf16 on chips that have FP8
    macs = BASE.tensor_core.count * BASE.tensor_core.width * BASE.tensor_core.depth + 4 * 32 * 16
    rate = 2.0 * rates["bf16"] * macs * BASE.clock_hz
    assert [groups.peak_flops(record) for record in groups.records] == [rate, rate]


@pytest.mark.parametrize("rate", [2.0, 8.0])
def test_bounds_of_work_count_products_in_the_format_that_they_have(rate):
    """A product in a format `rate` times as fast must not be bounded as if it were in bf16."""
    rates = {**BASE.tensor_core.rates, "fp8": rate}
    chip = BASE.replace(tensor_core=BASE.tensor_core.replace(rates=rates))
    records = pf.hardware.chip_records([chip])
    precision = STEP.replace(precision="fp8").precision
    graph = pf.layer_graph(pf.models.load("gpt3-175b"), precision=precision)
    own = estimate_costs(graph, records, CLUSTER, like=chip).total_s()[:, 0]
    one_after_another_s = own @ np.repeat([layer.count for layer in graph.layers], 2)
    for tight in (False, True):
        work = [LayersToBound(graph)]
        (bound_s,) = roofline_works_s(work, records, CLUSTER, chip, tight=tight)[0]
        assert 0.4 * one_after_another_s < bound_s <= one_after_another_s


@pytest.mark.parametrize("fusion", ["none", "full+any"])
@pytest.mark.parametrize("name", ["gpt2-small", "mixtral-8x7b"])
def test_no_bound_of_work_exceeds_a_step_and_tight_ones_come_near(name, fusion):
    axes = {"tensor_core.width": [32, 256], "vector_core.count": [2, 64]}
    axes |= {"tensor_core.count": [1, 8], "buffer.capacity_bytes": [2**21, 2**28]}
    spec = pf.hardware.SpaceSpec(name="wide", base=BASE.replace(links=None), axes=axes)
    groups, model = ChipGroups.of(pf.ArchitectureSpace(spec)), pf.models.load(name)
    step = STEP.replace(fusion=fusion, micro_batch=(1, 4))
    (problem,) = problems_of([model.replace(layers=4)], groups, CLUSTER, step)
    (evaluator,), shares = problem.evaluators, []
    any_s, at = np.full((len(groups), 1), 1e30), np.zeros(len(groups), dtype=np.int64)
    for s in range(len(problem)):
        placed = evaluator.best(s, *problem.schedule(s, groups.records), any_s)
        exact_s = np.array([row[0].time_s for row in placed])
        works_s = [problem.works_s([s], groups.records, tight)[0] for tight in (False, True)]
        roofline, work = (evaluator.work_bounds(s, work_s, at) for work_s in works_s)
        assert (roofline <= work * (1.0 + 1e-9)).all()
        assert (work <= exact_s).all()
        shares.append(work / exact_s)
    assert np.max(shares) > 0.95


def test_problems_of_other_variants_have_other_digests():
    (problem,) = problems_of([MODEL], ChipGroups.of(SPACE), CLUSTER, STEP)
    some = [problem.variants[:k] for k in range(1, 5)] + [problem.variants[::2]]
    digests = {replace(problem, variants=variants).digest for variants in some}
    assert len(digests) == len(some) == 5


def test_strategies_that_differ_in_fusion_alone_have_one_bound_of_their_work():
    groups, step = ChipGroups.of(SPACE), STEP.replace(fusion="full+any", tp=(1, 4))
    (problem,) = problems_of([MODEL], groups, CLUSTER, step)
    records, numbers = groups.records[:3], range(len(problem))
    sizes = [evaluator.sizes[k] for evaluator, k in map(problem.of, numbers)]
    kinds = [(problem.strategies[s][0], sizes[s].strategy.tp) for s in numbers]
    assert len(set(kinds)) == 8 < len({(*kinds[s], sizes[s].fusion) for s in numbers})
    work = {kind: problem.work_s(kinds.index(kind), records).tolist() for kind in kinds}
    for s in numbers:
        assert problem.work_s(s, records).tolist() == work[kinds[s]]
    for variant in range(len(problem.evaluators)):
        own = [s for s in numbers if kinds[s][0] == variant]
        together = problem.works_s(own, records).tolist()
        assert together == [work[kinds[s]] for s in own]


def test_an_explorer_evaluates_chips_with_their_own_links_and_formats(some, seconds):
    told = pf.Explorer(MODEL, some, CLUSTER, STEP, threads=1).evaluate(range(len(some)))
    assert [each.score for each in told] == seconds.tolist()
    assert all(each.point.bound_s <= each.score for each in told)
