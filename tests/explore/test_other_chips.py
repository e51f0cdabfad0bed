"""Chips that are not a TPU: of SRAM only, of several dies, of sparse or mixed tensor cores."""

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast import ArchitectureSpace
from phaze_fast.cost import estimate_costs
from phaze_fast.cost.machines import machines
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import ChipGroups, find_chips
from phaze_fast.hardware import Accelerator, SpaceSpec, chip_records, presets
from phaze_fast.hardware.package import PackageModel
from phaze_fast.opgraph import layer_graph
from phaze_fast.planning.energy import energy_by_tier

MODEL = pf.models.load("gpt2-small")
POD = pf.Cluster(devices=16, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=64, micro_batch=(1, 2), zero=(0, 1))
TPU = presets.chip("tpuv4")
LINKS = {"bandwidth_bytes_per_s": 500e9}
CHIPLET = TPU.replace(name="chiplet", dies=2, die_to_die=LINKS)
SPARSE = TPU.replace(
    name="sparse", tensor_core=TPU.tensor_core.replace(sparsity={"weight_share": 1.0})
)
SRAM = presets.chip("dojo-d1").replace(
    name="sram", buffer={"capacity_bytes": 2 * 2**30, "bytes_per_cycle": 8192.0}
)
MIXED = TPU.replace(
    name="mixed",
    tensor_core=TPU.tensor_core.replace(count=4),
    other_tensor_core={"count": 64, "width": 32, "depth": 32},
)
MIXED_AXES = {"tensor_core.count": (1.0, 4.0), "other_tensor_core.count": (16.0, 64.0, 256.0)}
AXES = {
    "mixed": (MIXED, MIXED_AXES),
    "chiplet": (CHIPLET, {"dies": (1.0, 2.0, 4.0), "tensor_core.count": (4.0, 8.0)}),
    "sparse": (SPARSE, {"tensor_core.count": (2.0, 4.0, 8.0), "tensor_core.width": (64.0, 128.0)}),
    "sram": (SRAM, {"tensor_core.count": (64.0, 128.0, 354.0), "clock_hz": (1e9, 2e9)}),
}


@pytest.mark.parametrize("name", AXES)
def test_a_search_finds_what_a_plan_on_every_chip_does(name):
    base, axes = AXES[name]
    space = ArchitectureSpace(SpaceSpec(name=name, base=base, axes=axes))
    assert len(space) == 6
    found = find_chips([MODEL], space, POD, STEP, top=3, pareto=("time", "energy"))
    assert found.status == "optimal"
    plans = [pf.plan(MODEL, POD.replace(chip=chip), STEP, top=1).best for chip in space]
    times = sorted(plan.time_s for plan in plans)
    assert [winner.time_s for winner in found.winners] == times[:3]
    best = plans[found.winners[0].chip]
    assert found.winners[0].energy_j == pytest.approx(best.energy_j, rel=1e-9)
    assert found.winners[0].chip == int(np.argmin([plan.time_s for plan in plans]))


def test_a_chip_of_sram_only_places_layers_in_it():
    best = pf.plan(MODEL, POD.replace(chip=SRAM), STEP, top=1).best
    assert best.memory_bytes <= SRAM.memory.capacity_bytes
    assert best.over_bytes == 0.0


def test_a_device_costs_its_dies_their_package_and_the_memory_that_it_has():
    for name, (base, axes) in AXES.items():
        space = ArchitectureSpace(SpaceSpec(name=name, base=base, axes=axes))
        groups = ChipGroups.of(space)
        area, capacity = groups.area_mm2[:, None], groups.capacities[None, :] * (name != "sram")
        usd = groups.prices.device_usd(area, capacity)
        if name == "chiplet":
            dies, stacks = groups.records["dies"][:, None], groups.records["hbm_stacks"][:, None]
            usd = PackageModel().device_usd(area, dies, stacks, capacity, groups.prices)
        assert groups.device_usd().tolist() == usd.tolist()
    fixed = ChipGroups.of(ArchitectureSpace(SpaceSpec(name="fixed", base=CHIPLET, axes={})))
    assert fixed.package == PackageModel()


def test_links_between_dies_limit_the_buffer_and_cost_energy_by_hand():
    record = chip_records([CHIPLET])[0]  # half of the bytes cross, over two links of 500 GB/s
    assert record["buffer_bytes_per_cycle"] == pytest.approx(2 * 500e9 / 0.5 / 1.05e9)
    fast = CHIPLET.replace(die_to_die={"bandwidth_bytes_per_s": 100e12})
    assert chip_records([fast])[0]["buffer_bytes_per_cycle"] == 4096.0
    (spent,), (alone,) = machines(CHIPLET).energy, machines(TPU).energy
    assert spent["buffer_byte_j"] - alone["buffer_byte_j"] == pytest.approx(4e-12 / 2)
    steps = {
        chip: pf.plan(MODEL, POD.replace(chip=chip), STEP, top=1).best for chip in (CHIPLET, TPU)
    }
    assert steps[CHIPLET].time_s >= steps[TPU].time_s
    tiers = energy_by_tier(MODEL, POD.replace(chip=CHIPLET), steps[CHIPLET])
    assert tiers["die_to_die"] > 0
    assert sum(tiers.values()) == pytest.approx(steps[CHIPLET].energy_j, rel=1e-9)


def test_records_of_a_space_are_those_of_its_chips():
    base, axes = AXES["chiplet"]
    space = ArchitectureSpace(SpaceSpec(name="dies", base=base, axes=axes))
    assert (chip_records(list(space)) == space.chips).all()
    assert [chip.die_to_die is None for chip in space] == [chip.dies == 1 for chip in space]


def test_two_of_four_weights_halve_forward_products_of_weights_and_nothing_else():
    graph = layer_graph(MODEL, pf.Strategy(micro_batch=8))
    dense, sparse = (estimate_costs(graph, chip) for chip in (TPU, SPARSE))
    for g, part in enumerate(dense.graphs):
        before, after = dense.time_s(g)[0], sparse.time_s(g)[0]
        joules = sparse.dynamic_j(g)[0] / np.maximum(dense.dynamic_j(g)[0], 1e-30)
        for name, old, new, spent in zip(part.names, before, after, joules, strict=True):
            if g % 2 == 0 and name in {"qkv", "proj", "up", "down", "logits"}:
                assert 0.5 * old <= new < old, name
                assert spent < 1.0
            else:
                assert new == old, name
    half = {"weight_share": 0.5}
    some = SPARSE.replace(tensor_core=TPU.tensor_core.replace(sparsity=half))
    assert machines(some).products_done == 0.75


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"die_to_die": LINKS}, "die_to_die: not accepted for one die"),
        (
            {
                "dies": 2,
                "die_to_die": LINKS,
                "buffer": {"capacity_bytes": 0, "bytes_per_cycle": 0.0},
            },
            "die_to_die: not accepted without a buffer",
        ),
        ({"dies": 2, "die_to_die": {"bandwidth_bytes_per_s": -1.0}}, "bandwidth_bytes_per_s"),
        ({"tensor_core": {"sparsity": {"weight_share": 1.5}}}, "weight_share"),
        ({"tensor_core": {"sparsity": {"weight_share": 0.5, "kept": 4}}}, "kept: 4 of 4"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(changes, said):
    fields = TPU.to_dict()
    for name, value in changes.items():
        old = fields.get(name)
        fields[name] = {**old, **value} if isinstance(old, dict) and name != "buffer" else value
    with pytest.raises(InvalidInputError, match=said) as refused:
        Accelerator.from_dict(fields)
    assert "\n" not in str(refused.value)


def test_chips_that_skip_different_shares_are_priced_one_by_one():
    with pytest.raises(InvalidInputError, match="one by one"):
        machines([TPU, SPARSE])
