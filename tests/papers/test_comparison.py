"""Baselines of a search, and its sensitivity under area limits that stay or follow the base chip."""

import math

import pytest
from search_cases import some_chips

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import AreaLimit
from phaze_fast.papers.comparison import variations


@pytest.mark.slow
def test_baselines_and_sensitivity_of_a_search():
    cluster = pf.Cluster(devices=16, fabric="tpuv4-pod")
    step = pf.Training(global_batch=64, micro_batch=(1, 2), tp=(1, 2), schedule="1f1b")
    best = pf.search("bert-large", some_chips(14, 9), cluster, step, top=2)
    lines = []
    compared = pf.compare(best, "tpuv4", sensitivity=True, say=lines.append)
    assert set(compared.baselines) == {"built", "hand_plan", "megatron_plan", "our_plan"}
    gain, built = compared.gain, compared.baselines["built"]
    assert [row["cause"] for row in gain][1:3] == ["plan", "HBM"]
    assert (gain[1]["time_s"], gain[-1]["time_s"]) == (built["time_s"], best.best.time_s)
    assert gain[0]["gain"] == 1.0
    assert gain[1]["gain"] >= 1.0  # no Megatron plan is faster than the free one
    assert math.prod(row["gain"] for row in gain) == pytest.approx(
        gain[0]["time_s"] / best.best.time_s
    )
    ours = compared.baselines["our_plan"]
    assert ours["speedup"] == ours["time_s"] / best.best.time_s
    moved = {(row["what"], row["factor"]): row["time_s"] for row in compared.sensitivity}
    assert moved["HBM bandwidth", 2.0] <= best.best.time_s <= moved["HBM bandwidth", 0.5]
    assert best.best.time_s <= moved["fabric bandwidth", 0.5]
    assert lines
    with pytest.raises(InvalidInputError, match="baselines"):
        pf.compare(best, "spotlight")


def test_an_area_limit_that_is_a_number_stays_where_an_area_is_scaled():
    base = pf.presets.chip("phaze-tpuv4")
    axes = {"tensor_core.count": (2.0, 4.0, 8.0, 16.0), "buffer.capacity_bytes": (2.0**25, 2.0**27)}
    limit = AreaLimit(max_mm2=300.0)
    pod = pf.Cluster(devices=8, fabric="tpuv4-pod")
    for follows in (False, True):
        spec = pf.hardware.SpaceSpec(
            name="few", base=base, axes=axes, area=limit.replace(follows_base=follows)
        )
        space = pf.ArchitectureSpace(spec)
        kept = {(v.what, v.factor): set(v.space.index) for v in variations(space, pod)}
        whole = pf.ArchitectureSpace(spec.replace(area=None))
        rows = pf.hardware.area_batch(whole.chips)
        for term in ("tensor", "vector", "buffer"):
            for factor in (0.5, 2.0):
                sizes = rows["total_mm2"] + (factor - 1) * rows[f"{term}_mm2"]
                own = pf.area(base)
                most = 300.0
                if follows:
                    most *= 1 + (factor - 1) * getattr(own, f"{term}_mm2") / own.total_mm2
                assert kept[f"{term} area", factor] == set(whole.index[sizes <= most])
    # What takes less area leaves room for more chips, never for fewer.
    spec = spec.replace(area=limit)
    kept = {(v.what, v.factor): len(v.space) for v in variations(pf.ArchitectureSpace(spec), pod)}
    for term in ("tensor", "vector", "buffer"):
        few = len(pf.ArchitectureSpace(spec))
        assert kept[f"{term} area", 2.0] <= few <= kept[f"{term} area", 0.5]


def test_sensitivity_says_none_where_no_chip_is_left_within_the_limit():
    base = pf.presets.chip("phaze-tpuv4")
    spec = pf.hardware.SpaceSpec(
        name="one", base=base, axes={"tensor_core.count": (4.0, 8.0)}, area=AreaLimit(max_mm2=280.0)
    )
    step = pf.Training(global_batch=8, micro_batch=1, pp=1)
    pod = pf.Cluster(devices=4, fabric="tpuv4-pod")
    found = pf.search("gpt2-small", pf.ArchitectureSpace(spec), pod, step, top=1)
    rows = {
        (row["what"], row["factor"]): row
        for row in pf.compare(found, "none", sensitivity=True).sensitivity
    }
    assert rows["buffer area", 2.0]["time_s"] is None
    assert rows["buffer area", 0.5]["time_s"] <= found.best.time_s
    assert rows["tensor area", 2.0]["time_s"] > found.best.time_s
    assert not rows["tensor area", 2.0]["same_chip"]


def test_a_chip_of_the_users_own_is_a_baseline(tmp_path):
    own = pf.presets.chip("h100").replace(name="mine", clock_hz=1.2e9)
    (tmp_path / "mine.yaml").write_text(own.to_yaml())
    space = pf.ArchitectureSpace.published()[45_000:45_004]
    step = pf.Training(global_batch=8, micro_batch=1, tp=1, pp=1)
    pod = pf.Cluster(devices=4, fabric="tpuv4-pod")
    found = pf.search("gpt2-small", space, pod, step, top=1)
    rows = pf.compare(found, [str(tmp_path / "mine.yaml"), "h100", own]).baselines
    assert list(rows) == ["chip mine", "chip h100"]
    alone = pf.plan("gpt2-small", pod.replace(chip=own), step, top=1).best
    assert rows["chip mine"]["time_s"] == alone.time_s
    assert rows["chip mine"]["speedup"] == alone.time_s / found.best.time_s
    with pytest.raises(InvalidInputError, match="baselines: 'h1000' is not accepted; did you mean"):
        pf.compare(found, "h1000")
