"""Fields of a chip that say how its buffer and memory take tiles and sums."""

from dataclasses import replace

import numpy as np
import pytest

from phaze_fast import ArchitectureSpace, Cluster, Training, evaluate_batch, models
from phaze_fast.cost import BufferRules, FusedGroup, estimate_costs, group_traffic
from phaze_fast.cost.machines import machines
from phaze_fast.cost.operators import gemm
from phaze_fast.cost.residency import layer_traffic
from phaze_fast.explore import find_chips
from phaze_fast.hardware import presets
from phaze_fast.hardware.chip import StackedDram
from phaze_fast.opgraph import Strategy, layer_graph

TPU = presets.chip("tpuv4")
SHAPE = (8192, 8192, 8192)


def changed(**fields):
    parts = {}
    for name, value in fields.items():
        part, _, leaf = name.partition("__")
        parts[part] = getattr(TPU, part).replace(**{leaf: value})
    buffer = parts.get("buffer", TPU.buffer).replace(capacity_bytes=2**20)
    return TPU.replace(name="changed", **{**parts, "buffer": buffer})


def bytes_of(**fields):
    return gemm(changed(**fields), *SHAPE).hbm_bytes


def test_narrow_sums_thin_strips_and_adders_move_fewer_bytes():
    usual = bytes_of()
    assert bytes_of(tensor_core__sum_bytes=2) < usual
    assert bytes_of(buffer__strip_depth=16) < usual
    assert bytes_of(buffer__copies=4) > usual
    assert bytes_of(hbm__adder_bytes=4) <= usual


def test_adders_spare_reading_sums_that_leave_the_chip():
    usual, adding = (machines(chip).precision for chip in (TPU, changed(hbm__adder_bytes=4)))
    assert (adding.spills, usual.spills) == (1.0, 2.0)
    rules = [BufferRules(strip_depth=1, strip_copies=1, sum_transfers=n) for n in (2, 1)]
    group = FusedGroup(rows=96, inner=0, hidden=512, outer=64, row_step=96, hidden_step=64)
    sizes = np.arange(1e4, 8e4, 500.0)
    read_back, added = (group_traffic(group, sizes, own) for own in rules)
    spilled = np.array(["output" not in kept for kept in added.kept])
    spilled &= np.isfinite(added.hbm_bytes) & (added.column_passes > 1)
    assert spilled.any()
    # B once, Y once, and each of the other sums of Y once.
    sums = (added.column_passes - 1) * 96 * 64 * 4.0
    own = 2.0 * (512 * 64 + 96 * 64) + sums
    assert (added.hbm_bytes[spilled] == own[spilled]).all()
    assert (added.hbm_bytes[spilled] < read_back.hbm_bytes[spilled]).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hbm__adder_bytes": 2}, "hbm.adder_bytes: 2 is not accepted; expected the 4 bytes"),
        ({"hbm__adder_bytes": 3}, "adder_bytes"),
        ({"tensor_core__sum_bytes": 8}, "sum_bytes"),
        ({"buffer__copies": 1}, "copies"),
        ({"buffer__strip_depth": 0}, "strip_depth"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        changed(**fields)


def test_chips_that_differ_in_them_are_asked_one_by_one():
    with pytest.raises(ValueError, match="ask for them one by one"):
        machines([TPU, changed(buffer__copies=3)])


STACK = StackedDram(capacity_bytes=2**30, bandwidth_bytes_per_s=4e12)


@pytest.mark.parametrize(
    ("stacked", "chip", "words"),
    [
        (STACK.replace(capacity_bytes=2**20), TPU, "stacked.capacity_bytes"),
        (STACK.replace(bandwidth_bytes_per_s=1e12), TPU, "stacked.bandwidth_bytes_per_s"),
        (STACK, TPU.replace(hbm=None), "stacked: not accepted without hbm"),
    ],
)
def test_stacked_dram_that_is_no_tier_is_refused(stacked, chip, words):
    with pytest.raises(ValueError, match=words):
        chip.replace(stacked=stacked)


@pytest.mark.parametrize("fusion", ["none", "full"])
def test_stacked_dram_moves_fewer_bytes_from_hbm_and_by_hand_where_it_is_the_bottleneck(fusion):
    hbm = TPU.hbm.replace(bandwidth_bytes_per_s=2e11)
    small = TPU.replace(buffer=TPU.buffer.replace(capacity_bytes=2**20), hbm=hbm)
    fast = small.replace(stacked=STACK.replace(bandwidth_bytes_per_s=1e15))
    slow = small.replace(stacked=STACK.replace(bandwidth_bytes_per_s=2.1e11))
    graph = layer_graph(models.load("gpt3-175b"), Strategy(), fusion).layers[1].forward
    costs = {chip: estimate_costs(graph, chip) for chip in (small, slow, fast)}
    times = [cost.time_s().sum() for cost in costs.values()]
    assert times[2] < times[1] < times[0]
    joules = [cost.dynamic_j().sum() for cost in costs.values()]
    assert joules[1] == pytest.approx(
        joules[2], rel=1e-4
    )  # the same bytes of both memories; others
    # by the mapping, which is the fastest of each chip
    # Joules by hand: what the HBM no longer moves, less what the stack moves.
    streams = machines(small).precision
    near, far = (
        layer_traffic(graph, np.array([float(size)]), streams).moved for size in (2**20, 2**30)
    )
    near, far = near.sum(), np.minimum(near, far).sum()
    hbm_j = float(machines(small).energy["hbm_byte_j"][0])
    assert joules[0] - joules[1] == pytest.approx((near - far) * hbm_j - near * 30e-12, rel=1e-3)


BASES = {
    "adders": lambda base: base.replace(hbm=base.hbm.replace(adder_bytes=4)),
    "narrow sums": lambda base: base.replace(tensor_core=base.tensor_core.replace(sum_bytes=2)),
    "stacked": lambda base: base.replace(stacked=STACK),
}


@pytest.mark.parametrize(("name", "fusion"), [*((n, "full") for n in BASES), ("stacked", "none")])
def test_such_chips_are_searched_end_to_end(name, fusion):
    base = BASES[name](presets.chip("phaze-tpuv4"))
    space = ArchitectureSpace(ArchitectureSpace.tpuv4_area().spec.replace(base=base))[::4999]
    pod = Cluster(devices=8, fabric="tpuv4-pod")
    step = Training(global_batch=64, micro_batch=(2, 4), tp=1, fusion=fusion)
    found = find_chips([models.load("bertlarge")], space, pod, step)
    every = evaluate_batch(models.load("bertlarge"), space, pod, step)
    assert found.status == "optimal"
    assert found.winners[0].score == every.time_s.min()
    by_joules = find_chips([models.load("bertlarge")], space, pod, step, objective="energy")
    assert by_joules.winners[0].energy_j == every.energy_j.min()
