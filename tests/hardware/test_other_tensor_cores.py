"""Chips with tensor cores of two shapes: each product runs on the kind that is quickest for it."""

import random

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast import _core
from phaze_fast.cost import estimate_costs
from phaze_fast.cost.engine import roofline_work_j, roofline_work_s
from phaze_fast.cost.machines import machines
from phaze_fast.cost.operators import gemm, operator_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    FULL_AREA,
    Accelerator,
    ArchitectureSpace,
    SpaceSpec,
    area,
    chip_records,
    power_batch,
    presets,
)
from phaze_fast.hardware.silicon import EVERY_AREA, energy_table
from phaze_fast.opgraph import layer_graph
from phaze_fast.robust.area_range import terms_mm2
from phaze_fast.robust.constants import AREA_TERMS
from tests.reference import gemm as oracle

TPU = presets.chip("tpuv4")
MIXED = TPU.replace(
    name="mixed",
    tensor_core=TPU.tensor_core.replace(count=4),
    other_tensor_core={"count": 64, "width": 32, "depth": 32},
)
ARRAYS = ("count", "width", "depth")


def alone(chip, kind):
    """The chip with one of its kinds of tensor cores."""
    core = getattr(chip, kind)
    sides = {name: getattr(core, name) for name in ARRAYS}
    if kind == "other_tensor_core":
        sides["local_buffer_bytes"] = None  # as in PHAZE
    return chip.replace(
        name=kind, tensor_core=chip.tensor_core.replace(**sides), other_tensor_core=None
    )


def kinds(chip):
    return alone(chip, "tensor_core"), alone(chip, "other_tensor_core")


def random_chip(rng):
    sides = rng.sample([(4, 4), (8, 2), (2, 8), (16, 16), (8, 8)], 2)
    first, other = ({"count": rng.choice([1, 2, 4, 7]), "width": w, "depth": d} for w, d in sides)
    buffer = {
        "capacity_bytes": rng.choice([2048, 65536]),
        "bytes_per_cycle": rng.choice([8.0, 64.0]),
        "port_bytes_per_cycle": rng.choice([0.0, 16.0]),
    }
    hbm = TPU.hbm.replace(bandwidth_bytes_per_s=rng.choice([1e9, 5e10]))
    core = TPU.tensor_core.replace(**first, local_buffer_bytes=None)
    return TPU.replace(tensor_core=core, other_tensor_core=other, buffer=buffer, hbm=hbm)


def oracle_chip(chip):
    core, vector, buffer = chip.tensor_core, chip.vector_core, chip.buffer
    edges = 2.0 * (core.width + core.depth)
    port = buffer.port_bytes_per_cycle or edges
    local = max(1024, core.width * core.depth * 16)
    lanes = (vector.count, vector.lanes, vector.alus_per_lane)
    sizes = (buffer.capacity_bytes, buffer.bytes_per_cycle, port)
    rates = (chip.hbm.bandwidth_bytes_per_s, chip.clock_hz)
    return oracle.Chip(core.count, core.depth, core.width, local, *lanes, *sizes, *rates)


def test_a_product_takes_the_least_time_of_all_mappings_on_either_kind():
    rng, chosen = random.Random(5), set()
    for _ in range(60):
        chip = random_chip(rng)
        shape = (rng.choice([1, 3]), *(rng.randint(1, 48) for _ in range(3)))
        tuning = oracle.Tuning(launch_s=chip.launch_latency_s)
        least = [
            oracle.best_mapping(
                *shape, oracle_chip(one), tuning, oracle.Precision(), False, 0.0, 0.0
            )["time_s"]
            for one in kinds(chip)
        ]
        b, m, k, n = shape
        found = gemm(chip, m, k, n, b)
        assert found.time_s == pytest.approx(min(least), rel=1e-11), (chip, shape)
        assert found.bound_s <= found.time_s
        one = gemm(alone(chip, "tensor_core"), m, k, n, b)
        assert found.one_core_s == one.one_core_s  # the cores that a schedule counts
        chosen.add(int(least[1] < least[0]))
    assert chosen == {0, 1}


@pytest.mark.parametrize("sparsity", [None, {"weight_share": 0.5}])
def test_operators_of_layers_take_the_quicker_kind_and_its_joules(sparsity):
    chip = MIXED.replace(tensor_core=MIXED.tensor_core.replace(sparsity=sparsity))
    graph = layer_graph(pf.models.load("gpt2-small"), pf.Strategy(micro_batch=1, tp=4))
    listed = [chip, *kinds(chip), TPU.replace(tensor_core=chip.tensor_core)]
    pod = pf.Cluster(devices=4, fabric="tpuv4-pod")
    both = estimate_costs(graph, listed, pod)
    rough = estimate_costs(graph, listed, pod, bounds_only=True)
    seen = set()
    for g, part in enumerate(both.graphs):
        time_s, joules, bound = both.time_s(g), both.dynamic_j(g), both.bound_s(g)
        product = np.isin(part.ops["function"], [0, 1, 2])
        other = product & (time_s[2] < time_s[1])
        seen |= set(other[product].tolist())
        assert (time_s[0] == np.where(other, time_s[2], time_s[1])).all()
        assert (joules[0] == np.where(other, joules[2], joules[1])).all()
        least = np.where(product, bound[1:3].min(axis=0), bound[1])
        assert (bound[0] == least).all()
        assert (rough.time_s(g)[0] == bound[0]).all()
        assert (both.one_core_s(g)[0] == both.one_core_s(g)[1]).all()
        assert (time_s[3] == time_s[1]).all()  # a chip without others in the same batch
        (single,) = [operator_costs(chip, part.ops[:1])] if sparsity is None else [[]]
        assert [cost.time_s for cost in single] == time_s[0, : len(single)].tolist()
    assert seen == {False, True}


def test_area_and_power_are_the_sum_of_both_kinds_by_hand():
    first, other = (area(one, FULL_AREA) for one in kinds(MIXED))
    both = area(MIXED, FULL_AREA)
    assert both.tensor_mm2 == pytest.approx(first.tensor_mm2 + other.tensor_mm2)
    # 64 other cores with a port of 2 x (32 + 32) bytes each; vector cores keep the first ports.
    ports = 64 * 128 * FULL_AREA.network_mm2_per_port_byte
    assert both.network_mm2 == pytest.approx(first.network_mm2 + ports)
    more_mm2 = other.tensor_mm2 + ports
    assert both.total_mm2 == pytest.approx(first.total_mm2 + more_mm2)
    table = energy_table("7nm")
    cycle_j = 64 * 32 * 32 * table.mac_j + 64 * 64 * 2 * table.local_byte_j
    watts = power_batch([MIXED], terms=FULL_AREA)[0] - power_batch(kinds(MIXED), terms=FULL_AREA)[0]
    more_w = cycle_j * MIXED.clock_hz + more_mm2 * table.static_w_per_mm2
    assert watts == pytest.approx(more_w)
    assert MIXED.peak_flops() == sum(one.peak_flops() for one in kinds(MIXED))


def test_rooflines_bound_layers_on_either_kind():
    rng = random.Random(9)
    graph = layer_graph(pf.models.load("gpt2-small"), pf.Strategy(micro_batch=2))
    counts = np.repeat([layer.count for layer in graph.layers], 2)
    pod = pf.Cluster(devices=1, fabric="tpuv4-pod")
    # Of few wide cores and many narrow ones, vector units have the wide ports.
    few = MIXED.replace(
        tensor_core=MIXED.tensor_core.replace(count=1),
        other_tensor_core={"count": 512, "width": 32, "depth": 32},
    )
    chips = [*(random_chip(rng) for _ in range(40)), few, MIXED]
    records = chip_records(chips)
    bound_s = roofline_work_s(graph, records, pod, TPU)
    bound_j, _ = roofline_work_j(graph, records, TPU)
    costs = estimate_costs(graph, records, pod, like=TPU)
    time_s, joules = np.zeros(len(chips)), np.zeros(len(chips))
    for g, part in enumerate(costs.graphs):
        finish = np.zeros((len(chips), len(part)))
        own, before = costs.time_s(g), part.edges()
        for k in range(len(part)):
            ready = [finish[:, early] for early, late in before if late == k]
            finish[:, k] = own[:, k] + (np.max(ready, axis=0) if ready else 0.0)
        time_s += counts[g] * finish.max(axis=1)
        joules += counts[g] * costs.dynamic_j(g).sum(axis=1)
    assert (bound_s <= time_s).all()
    assert (bound_j <= joules * (1.0 + 1e-12)).all()
    # Not so low that they say nothing.
    assert bound_s[-1] > 0.8 * time_s[-1]
    apart, _ = roofline_work_j(graph, chip_records(kinds(MIXED)), TPU)
    assert 0.9 * apart.min() < bound_j[-1] <= apart.min()


def test_control_of_a_product_is_that_of_its_kind():
    batch = machines(MIXED)
    table = batch.energy["mac_j"][0], batch.other.energy["mac_j"][0]
    apart = tuple(machines(one).energy["mac_j"][0] for one in kinds(MIXED))
    assert table == apart
    assert table[1] > table[0]  # smaller arrays share the control among fewer products


def test_a_space_varies_both_kinds_and_skips_chips_of_one_shape(tmp_path):
    axes = {"tensor_core.width": (32.0, 128.0), "other_tensor_core.count": (16.0, 64.0)}
    flat = MIXED.replace(tensor_core=MIXED.tensor_core.replace(depth=32))
    space = ArchitectureSpace(SpaceSpec(name="both", base=flat, axes=axes))
    assert [(c.tensor_core.width, c.other_tensor_core.count) for c in space] == [
        (128, 16),
        (128, 64),
    ]
    assert (chip_records(list(space)) == space.chips).all()
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED.to_yaml(), "utf-8")
    assert Accelerator.from_file(path) == MIXED
    assert presets.chip(str(path)) == MIXED


def test_terms_of_the_area_add_up():
    limit = {"max_mm2": 1e4, "terms": EVERY_AREA}
    axes = {"other_tensor_core.count": (16.0, 64.0)}
    space = ArchitectureSpace(SpaceSpec(name="terms", base=MIXED, axes=axes, area=limit))
    by_term = terms_mm2(space, space.chips)
    assert by_term.sum(axis=1) == pytest.approx(space.area_mm2, rel=1e-12)
    first, other = terms_mm2(space, chip_records(kinds(MIXED)))
    arrays = [AREA_TERMS.index(name) for name in ("tensor", "tensor_local")]
    assert by_term[1, arrays] == pytest.approx(first[arrays] + other[arrays], rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"other_tensor_core": {"count": 4, "width": 128, "depth": 128}}, "128x128 is the shape"),
        ({"other_tensor_core": {"count": 0, "width": 32, "depth": 32}}, "count"),
        ({"other_tensor_core": {"count": 4, "width": 32}}, "depth"),
        (
            {"buffer": {"capacity_bytes": 0, "bytes_per_cycle": 0.0}},
            "other_tensor_core: not accepted without a buffer",
        ),
        ({"tuning": {"sustained_flops": 1e14}}, "other_tensor_core: not accepted with fitted"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(changes, said):
    with pytest.raises(InvalidInputError, match=said) as refused:
        Accelerator.from_dict({**MIXED.to_dict(), **changes})
    assert "\n" not in str(refused.value)


def test_axes_of_other_cores_need_a_base_that_has_some():
    with pytest.raises(InvalidInputError, match="tpuv4 has no other_tensor_core to vary"):
        SpaceSpec(name="none", base=TPU, axes={"other_tensor_core.count": (1.0, 2.0)})


def test_negative_records_are_malformed():
    records = np.repeat(chip_records([MIXED]), 3)
    records["other_cores"][1] = -1
    status = _core.chip_area(records, FULL_AREA.rates, 1)["status"]
    assert status.tolist() == [0, 9, 0]
