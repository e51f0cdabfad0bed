"""Sustained rates of a space: those of measured TPUs, on its chips and its baselines alike."""

import pytest

import phaze_fast as pf
from phaze_fast import ArchitectureSpace
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import ChipGroups, find_chips
from phaze_fast.explore.problem import problems_of
from phaze_fast.hardware import presets, sustained_rates
from phaze_fast.papers.comparison import baselines_of, gain_by_cause

POD = pf.Cluster(devices=16, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=64, micro_batch=(1, 2), zero=(0, 1))
TPU = sustained_rates("tpu")

# MaxText at e591f30cb, src/maxtext/configs/tpu/v4/README.md: blocks, hidden, heads, ffn, chips,
# chips that share the parameters, micro-batch, batch, MFU. No constant was fitted on TPU v4.
MAXTEXT_V4 = [
    (48, 6144, 24, 24576, 128, 64, 13, 1664, 0.552),
    (48, 6144, 24, 24576, 256, 64, 13, 3328, 0.543),
    (32, 12288, 32, 49152, 192, 192, 7, 1344, 0.560),
]


def _space(step, **changes):
    spec = ArchitectureSpace.published().spec.replace(sustained=TPU.replace(**changes))
    whole = ArchitectureSpace(spec)
    return whole[45_000 : 45_000 + step * 7 : step]


@pytest.mark.parametrize("run", MAXTEXT_V4, ids=str)
def test_mfu_of_tpu_v4_is_as_published(run):
    layers, hidden, heads, ffn, devices, shard, micro_batch, batch, published = run
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": ffn}
    model = pf.models.load("llama2-7b").replace(name="maxtext", seq=2048, **sizes)
    given = {"dp": devices, "zero": 3, "shard": shard, "micro_batch": micro_batch}
    given |= {"global_batch": batch, "recompute": "full", "software": "maxtext"}
    mfu = {}
    for name, chip in (
        ("peak", presets.chip("tpuv4")),
        ("tpu", TPU.applied(presets.chip("tpuv4"))),
    ):
        cluster = pf.Cluster(devices=devices, fabric="tpuv4-pod", chip=chip)
        mfu[name] = pf.predict(model, cluster, given).mfu
    assert mfu["tpu"] == pytest.approx(published, abs=0.03)
    assert mfu["peak"] > published + 0.10


@pytest.mark.parametrize("changes", [{}, {"hbm": 0.6, "network": 0.5}])
def test_a_search_with_sustained_rates_finds_what_every_chip_alone_does(changes):
    space, model = _space(13, **changes), pf.models.load("bert-large")
    found = find_chips([model], space, POD, STEP, top=3)
    assert found.status == "optimal"
    problem = problems_of([model], ChipGroups.of(space), POD, STEP)[0]
    alone = []
    for chip in space:
        assert chip.tuning.efficiency == 0.78
        assert chip.tuning.hbm_share == changes.get("hbm", 1.0)
        alone.append(pf.plan(model, problem.cluster.replace(chip=chip), STEP, top=1).best.time_s)
    assert found.winners[0].time_s == min(alone)
    ideal = ArchitectureSpace(space.spec.replace(sustained=None), space.selection)
    assert find_chips([model], ideal, POD, STEP, top=1).winners[0].time_s < min(alone)


def test_baselines_and_causes_have_the_rates_of_the_space():
    space, model = _space(13), pf.models.load("bert-large")
    found = find_chips([model], space, POD, STEP, top=1)
    problems = problems_of([model], ChipGroups.of(space), POD, STEP)
    rows = baselines_of(problems, space, (1.0,), found, "tpuv4")
    for key in ("built", "our_plan", "megatron_plan"):
        assert rows[key]["chip"]["tuning"]["efficiency"] == 0.78
    slow = TPU.applied(presets.chip("tpuv4"))
    by_hand = pf.plan(model, POD.replace(chip=slow), STEP, top=1).best
    assert rows["built"]["time_s"] == by_hand.time_s
    causes = gain_by_cause(problems[0], space[found.winners[0].chip], found.winners[0].time_s)
    assert causes[1]["time_s"] == by_hand.time_s


def test_links_at_half_their_rate_are_those_of_half_the_bandwidth():
    space, model = _space(13, network=0.5), pf.models.load("bert-large")
    problem = problems_of([model], ChipGroups.of(space), POD, STEP)[0]
    rate = problem.cluster.fabric.link_bandwidth_bytes_per_s
    assert rate == POD.fabric.link_bandwidth_bytes_per_s / 2


def test_wrong_rates_are_refused_in_one_line():
    spec = ArchitectureSpace.published().spec
    with pytest.raises(InvalidInputError, match="h200 has rates of its own") as refused:
        spec.replace(base=presets.chip("h200"), axes={"tensor_core.count": (64.0,)}, sustained=TPU)
    assert "\n" not in str(refused.value)
    with pytest.raises(InvalidInputError, match="did you mean 'tpu'"):
        spec.replace(sustained="tpo")
    with pytest.raises(InvalidInputError, match="compute"):
        TPU.replace(compute=1.5)
    assert spec.replace(sustained="tpu").sustained == TPU


def test_every_kernel_of_the_tensor_cores_reaches_the_share():
    tuning = sustained_rates("tpu").applied(presets.chip("tpuv4")).tuning
    found = (tuning.efficiency, tuning.attention.efficiency, tuning.attention.backward_efficiency)
    assert found == (0.78,) * 3
