"""Laws that whole plans obey whatever the formulas are: bytes must cross, faster is never slower."""

import math
import random

import numpy as np
import pytest
from case_counts import some_or_many
from oracle_cases import random_cases
from reference.plan_layers import Layers, Network, rank_numbers

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.explore import scaled_cluster, tier_names
from phaze_fast.hardware import Cluster, FlatFabric, Host, TieredFabric, chip_records, presets
from phaze_fast.hardware.tuning import FunctionCost
from phaze_fast.memory import optimizer
from phaze_fast.planning import PARTS, PlanEvaluator, Training, predict
from phaze_fast.planning.times import (
    free_times_on_chip,
    host_s,
    least_work_s,
    optimizer_bytes_per_s,
    optimizer_products_s,
)
from phaze_fast.software import load_software

SLACK = 1e-9
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Schedules in which weight gradients are passes of their own."""


def plans(seeds, count=3):
    """Random plans that stay the same plan on other hardware."""
    for seed in seeds:
        rng = random.Random(seed)
        model, cluster, specs = random_cases(rng, count)
        for spec in specs:
            if spec.recompute == "auto":
                spec = spec.replace(recompute=rng.choice(["none", "full"]))
            yield rng, model, cluster, spec


def wired(cluster, rate=1.0, latency=1.0):
    """The same cluster with rates and latencies of all wires multiplied."""
    tiers = len(tier_names(cluster))
    return scaled_cluster(cluster, [rate] * tiers, [latency] * tiers)


def with_slices_of(spec, factor):
    """The software of a plan, whose host takes so many times as long for each slice of weights."""
    written = spec.software
    software = load_software(written) if isinstance(written, str) else written
    return software.replace(slice_host_s=factor * software.slice_host_s)


def slowed(chip):
    """The same chip with every rate halved and every latency doubled."""
    tuning, attention = chip.tuning, chip.tuning.attention
    latencies = ("unit_overhead_s", "reduction_s")
    latencies += tuple(f"unaligned_{name}" for name in latencies)
    fields = {name: 2 * getattr(tuning, name) for name in latencies}
    if tuning.sustained_flops is not None:
        fields["sustained_flops"] = tuning.sustained_flops / 2
    fields["step_flops"] = {name: rate / 2 for name, rate in tuning.step_flops.items()}
    fields["attention"] = attention.replace(unit_overhead_s=2 * attention.unit_overhead_s)
    return chip.replace(
        clock_hz=chip.clock_hz / 2,
        hbm=chip.hbm.replace(bandwidth_bytes_per_s=chip.hbm.bandwidth_bytes_per_s / 2),
        launch_latency_s=2 * chip.launch_latency_s,
        tuning=tuning.replace(**fields),
        host=None if chip.host is None else Host(**{name: r / 2 for name, r in chip.host}),
    )


# ---- bytes that must move ----


def units_of(fabric):
    """Ranks of one unit of each tier, and the bytes/s that leave it by a device's fastest port."""
    if isinstance(fabric, TieredFabric):
        rates = [tier.bandwidth_bytes_per_s for tier in fabric.tiers]
        unit = 1
        for level, tier in enumerate(fabric.tiers):
            yield unit, max(rates[level:])
            unit *= tier.size or 2**60
    elif isinstance(fabric, FlatFabric):
        yield 1, fabric.bandwidth_bytes_per_s
    else:
        yield 1, 2 * len(fabric.dims) * fabric.link_bandwidth_bytes_per_s


def least_scatter_s(fabric, ranks, payload):
    """Seconds of what must leave the fullest unit so that every unit has its part of a sum."""
    least = 0.0
    for unit, rate in units_of(fabric):
        where = [rank // unit for rank in ranks]
        units = len(set(where))
        fullest = max(where.count(each) for each in set(where))
        least = max(least, (units - 1) / units * payload / (fullest * rate))
    return least


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_and_weights_must_cross(zero):
    """A step takes what its gradients take over the ports, and with ZeRO-3 its weights."""
    for _, model, cluster, given in plans(range(4000, 4015), count=2):
        spec = given.replace(zero=zero, shard=None)
        plan = predict(model, cluster, spec)
        layers = Layers(model, cluster, spec, Network(cluster, spec))
        ranks = layers.network.replicas(experts=False)
        for stage in plan.stages:
            dense = 0
            for i in stage.layers:
                held, experts = layers.parameters(i)
                dense += held - experts
            weights = least_scatter_s(
                cluster.fabric, ranks, dense * layers.optimizer.gathered_bytes
            )
            scatter = least_scatter_s(
                cluster.fabric, ranks, dense * layers.optimizer.gradient_bytes
            )
            m = plan.micro_batches / (2 if spec.schedule == "dualpipe" else 1)  # half each way
            least = (2 * scatter, scatter + weights, m * scatter, m * (scatter + 2 * weights))[zero]
            assert plan.time_s >= least * (1 - SLACK), spec


def message_rate(fabric, a, b):
    """Bytes/s of the lowest tier that holds both ranks; on a grid of all links of a device."""
    if isinstance(fabric, TieredFabric):
        unit = 1
        for tier in fabric.tiers:
            unit *= tier.size or 2**60
            if a // unit == b // unit:
                return tier.bandwidth_bytes_per_s
    return next(units_of(fabric))[1]


@some_or_many(4, 10)
def test_messages_must_cross_every_border(cases):
    """Every micro-batch sends its rows over each border, and their gradients come back."""
    for _, model, cluster, spec in plans(range(4100, 4100 + cases)):
        plan, rank = predict(model, cluster, spec), rank_numbers(spec)
        rows = spec.micro_batch * model.seq / spec.cp
        shared = spec.tp if spec.sequence_parallel else 1
        for k in range(1, spec.pp):
            rate = message_rate(cluster.fabric, rank[0, 0, 0, k - 1], rank[0, 0, 0, k])
            payload = 2 * rows * model.hidden / shared
            assert plan.time_s >= plan.micro_batches * payload / rate * (1 - SLACK), spec


@some_or_many(4, 8)
def test_a_step_is_as_long_as_its_slowest_stage_works(cases):
    for _, model, cluster, spec in plans(range(4200, 4200 + cases)):
        plan = predict(model, cluster, spec)
        slowest = max(stage.load_s for stage in plan.stages)
        assert plan.time_s >= plan.micro_batches * slowest * (1 - SLACK)
        # one micro-batch passes every stage forward, and back but for weight gradients
        least = sum(stage.load_s for stage in plan.stages)
        assert plan.time_s >= least * (0.5 if spec.schedule in SPLIT else 1 - SLACK), spec


# ---- other hardware ----


def both_proven(*plans):
    """Layer schedules that are not proven may be better on worse hardware."""
    return all(plan.layers_proven for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [40])
def test_an_infinitely_fast_fabric_removes_the_communication_parts_and_nothing_else(cases):
    """But for what hosts copy, and for copies to them, which wait longer where passes are shorter."""
    seen = dict.fromkeys(PARTS, 0)
    for _, model, cluster, spec in plans(range(4300, 4300 + cases)):
        if "offload" in str(spec.recompute):
            continue
        spec = spec.replace(software=with_slices_of(spec, 0.0))
        plan = predict(model, cluster, spec)
        same = spec.replace(recompute=tuple(stage.recompute for stage in plan.stages))
        ideal = predict(model, wired(cluster, 1e12, 0.0), same)
        if not both_proven(plan, ideal):
            continue
        for name in PARTS:
            expected = 0.0 if name.endswith("_comm") else plan.parts_s[name]
            near = pytest.approx(expected, abs=1e-6 * plan.time_s)
            assert ideal.parts_s[name] == near, (name, spec)
            seen[name] += plan.parts_s[name] > 0
    assert all(count > 0 for name, count in seen.items() if name != "host"), seen


@some_or_many(4, 7)
def test_a_faster_network_never_makes_a_plan_slower(cases):
    seen = 0
    for rng, model, cluster, spec in plans(range(4400, 4400 + cases)):
        factor = rng.choice([1.05, 1.3, 2.0, 10.0, 100.0])
        faster, nearer = wired(cluster, rate=factor), wired(cluster, latency=1 / factor)
        plan, *others = (predict(model, c, spec) for c in (cluster, faster, nearer))
        for other in others:
            if both_proven(plan, other):
                assert other.time_s <= plan.time_s * (1 + SLACK), spec
                seen += 1
    assert seen >= 3 * cases


@some_or_many(5, 13)
def test_faster_memory_never_makes_a_plan_slower(cases):
    """But for split passes with ZeRO-2 and 3, and for copies to the host.

    Where the network sets the backward pass, less waits; and what a forward pass waits for its
    copies counts in the backward pass, so that a faster one moves time there.
    """
    seen = 0
    for rng, model, cluster, spec in plans(range(4500, 4500 + cases)):
        if (spec.schedule in SPLIT and spec.zero >= 2) or "offload" in str(spec.recompute):
            continue
        hbm = cluster.chip.hbm
        rate = hbm.bandwidth_bytes_per_s * rng.choice([1.05, 1.3, 2.0, 10.0])
        chip = cluster.chip.replace(hbm=hbm.replace(bandwidth_bytes_per_s=rate))
        plan, faster = (predict(model, c, spec) for c in (cluster, cluster.replace(chip=chip)))
        if both_proven(plan, faster):
            assert faster.time_s <= plan.time_s * (1 + SLACK), spec
            seen += 1
    assert seen > 1.2 * cases


@some_or_many(4, 7)
def test_half_of_every_rate_and_twice_every_latency_is_twice_the_time(cases):
    for _, model, cluster, spec in plans(range(4600, 4600 + cases)):
        slow = wired(cluster, 0.5, 2.0).replace(chip=slowed(cluster.chip))
        plan = predict(model, cluster, spec)
        slower = predict(model, slow, spec.replace(software=with_slices_of(spec, 2.0)))
        assert slower.time_s == pytest.approx(2 * plan.time_s, rel=SLACK), spec
        assert slower.memory_bytes == plan.memory_bytes
        doubled = {name: 2 * seconds for name, seconds in plan.parts_s.items()}
        assert slower.parts_s == pytest.approx(doubled, rel=1e-6, abs=SLACK * plan.time_s)


@some_or_many(4, 10)
def test_energy_is_spent_and_more_of_it_where_more_is_computed(cases):
    for _, model, cluster, spec in plans(range(4700, 4700 + cases)):
        plain, again = (
            predict(model, cluster, spec.replace(recompute=mode)) for mode in ("none", "full")
        )
        assert 0 < plain.energy_j < math.inf
        assert again.energy_j >= plain.energy_j * (1 - SLACK)
        assert again.time_s >= plain.time_s * (1 - SLACK)


def small_evaluator(name="mixtral-8x7b", layers=2, **free):
    """The strategies of a model of a few layers, and its problem."""
    model = models.load(name).replace(layers=layers)
    training = Training(global_batch=16, micro_batch=(1, 2), **free)
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    return PlanEvaluator(model, cluster, training, [80e9])


@pytest.mark.parametrize("software", ["nemo", "megatron-core", "fsdp-torchtitan"])
def test_the_least_work_is_that_of_the_bounds_of_layers(software):
    own = small_evaluator(tp=(1, 2), cp=1, ep=(1, 4), etp=1, software=software)
    rows = own.lazy_times(own.cluster, None, 1).rows
    for s, work_s in enumerate(least_work_s(tuple(own.sizes), own.cluster)):
        layers = own.sizes[s].graph.layers
        each = zip(layers, rows.forward_s[s] + rows.plain_s[s], strict=True)
        both_s = sum(layer.count * seconds for layer, seconds in each)
        assert work_s == pytest.approx(both_s, rel=1e-12)


def test_layouts_within_a_time_are_those_whose_work_takes_no_longer():
    own = small_evaluator(tp=(1, 2, 4), cp=1, ep=(1, 2), etp=1)
    work_s = least_work_s(tuple(own.sizes), own.cluster)
    bounds_s = own.layout_work_bounds_s(work_s)
    for most_s in (0.0, *np.sort(bounds_s)[[0, 9, len(bounds_s) // 2, -1]], math.inf):
        some, strategies = own.within(work_s, most_s), own.work_bounds_s(work_s) <= most_s
        allowed = strategies[own.layouts["strategy"]]
        assert [one.strategy for one in some.sizes] == [
            one.strategy for one, kept in zip(own.sizes, strategies, strict=True) if kept
        ]
        kept = own.layouts[allowed & (bounds_s <= most_s)]
        assert some.layouts_left_out == allowed.sum() - len(kept)
        for column in ("pp", "dp", "zero", "schedule", "micro_batches", "shard"):
            assert some.layouts[column].tolist() == kept[column].tolist()


def test_weights_on_chip_are_among_the_forms_of_strategies_that_are_built_together():
    small = models.load("gpt2-small").replace(layers=2)
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    found = pf.plan(small, cluster, Training(global_batch=16, fusion="full+any", tp=(1, 2)))
    assert found.status == "optimal"


def test_the_host_is_ahead_by_what_backward_passes_last_beyond_their_launches():
    own = small_evaluator("gpt2-small", tp=(1, 2), software="fsdp-torchtitan")
    times = own.times(own.cluster)
    for s, sizes in enumerate(own.sizes):
        passes = [
            (layer.forward.products[:0], layer.backward.products) for layer in sizes.graph.layers
        ]
        launch_s = np.array([host_s(sizes.software, *both) for both in passes])
        assert times.ahead_s[s] == pytest.approx(times.plain_s[s] - launch_s, abs=1e-12)
    assert times.ahead_s.max() > 0


def test_passes_are_shorter_where_the_communication_of_their_groups_is_free():
    """Experts', context and tensor groups in turn; a part of the gradients of weights stays one."""
    own = small_evaluator(tp=4, cp=1, ep=2, etp=2)
    base, levels = own.times(own.cluster), free_times_on_chip(own.sizes, own.cluster, own.optimizer)
    before = base
    for times, less in zip(levels, (True, False, True), strict=False):
        block = own.sizes[0].graph.order[1]
        assert ((times.forward_s < before.forward_s)[:, block] == less).all()
        assert (times.weight_grad_s < times.plain_s)[:, block].all()
        before = times


def test_kernels_of_an_optimizer_are_launched_by_matrix_and_product():
    """Muon's products of two kinds of layers: the host launches each, and seven more a shape."""
    matrices = ((), ((2, 64, 128), (1, 256, 64), (1, 32, 32)))
    muon = optimizer("muon")
    launches = len(muon.products(matrices[1])) + 7 * 3
    for each_s, launch_s in ((1e-3, None), (0.0, 2e-3)):
        software = load_software("megatron-core").replace(host_s=each_s, optimizer_host_s=launch_s)
        chip = presets.chip("h100")
        seconds, launching = optimizer_products_s(matrices, chip, software, muon)
        rows = optimizer_products_s(matrices, chip_records([chip]), software, muon, like=chip)
        assert (rows[0].tolist(), rows[1].tolist()) == (seconds.tolist(), launching.tolist())
        assert (seconds[0, 0], launching[0, 0]) == (0.0, 0.0)
        if launch_s is None:
            assert (seconds[0, 1], launching[0, 1]) == (pytest.approx(launches * each_s), 0.0)
        else:
            assert launching[0, 1] == pytest.approx(launches * launch_s)
            assert 0.0 < seconds[0, 1] < launching[0, 1]


def test_an_optimizer_streams_at_the_rate_of_memory_or_of_vector_units():
    chip, adam = presets.chip("h100"), optimizer("adam")
    chip = chip.replace(vector_core=chip.vector_core.replace(alus_per_lane=2))
    records = chip_records([chip])
    lanes_hz = chip.vector_core.count * chip.vector_core.lanes * chip.clock_hz
    moved = 2.0 * adam.state_bytes + adam.gradient_bytes + adam.weight_bytes
    for ops in (1.0, 1000.0):
        cost = FunctionCost(ops_per_element=ops)
        tuned = chip.replace(tuning=chip.tuning.replace(functions={"adamw": cost}))
        vector = lanes_hz * chip.vector_core.alus_per_lane * tuned.tuning.clock_factor * moved / ops
        memory = chip.memory.bandwidth_bytes_per_s * tuned.tuning.hbm_share
        found = optimizer_bytes_per_s(records, tuned, adam)
        assert found[0] == pytest.approx(min(memory, vector))
        assert (vector < memory) == (ops > 1.0)


@pytest.mark.parametrize(("schedule", "layers", "some"), [
    ("1f1b", 3, True), ("interleaved", 8, True), ("interleaved", 6, False)
])  # fmt: skip
def test_only_interleaved_chunks_have_to_be_equal(schedule, layers, some):
    """Two stages of 3 blocks are even enough, four chunks of 6 blocks are not."""
    widths = {"tp": 1, "pp": 2, "dp": 4, "zero": 0, "vpp": 2, "rank_order": "replicas-inside"}
    own = small_evaluator("gpt2-small", layers, schedule=schedule, recompute="none", **widths)
    found = own.best_even(own.times(own.cluster))
    assert bool(found) == some
    if some:
        given = {"pp": 2, "dp": 4, "global_batch": 16, "schedule": schedule, "recompute": "none"}
        given |= {"vpp": 2 if schedule == "interleaved" else 1}
        each = [predict(own.model, own.cluster, {**given, "micro_batch": b}) for b in (1, 2)]
        assert found[0].time_s == pytest.approx(min(plan.time_s for plan in each), rel=1e-12)
