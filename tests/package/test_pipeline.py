"""The survey: bounds of every chip, in a total order."""

import numpy as np
import pytest
from phaze_fast.explore import compute_bound_s, training_flops

import phaze_fast as pf


@pytest.fixture(scope="module")
def cluster():
    return pf.Cluster(devices=1024, fabric=pf.presets.fabric("tpuv4-pod"))


def test_order_is_total(cluster):
    space = pf.ArchitectureSpace.tpuv4_area()
    found = pf.survey(space, cluster, 175e9, 4096 * 2048)
    keys = [(found.bound_s[i], space.area_mm2[i], space.index[i]) for i in found.order]
    assert keys == sorted(keys)
    assert sorted(found.order.tolist()) == list(range(len(space)))
    assert found.ties == int((found.bound_s == found.bound_s.min()).sum())


def test_the_bound_scales(cluster):
    space = pf.ArchitectureSpace.tpuv4_area()[:100]
    once = pf.survey(space, cluster, 1e9, 1e6).bound_s
    np.testing.assert_allclose(pf.survey(space, cluster, 2e9, 1e6).bound_s, 2 * once, rtol=1e-14)
    np.testing.assert_allclose(pf.survey(space, cluster, 1e9, 3e6).bound_s, 3 * once, rtol=1e-14)


def test_the_bound_honours_the_rate_of_bf16(cluster):
    base = pf.presets.chip("phaze-tpuv4")
    axes = {"tensor_core.count": (4,)}
    spaces = [
        pf.ArchitectureSpace(
            pf.SpaceSpec(
                name="s",
                base=base.replace(tensor_core=base.tensor_core.replace(rates=r)),
                axes=axes,
            )
        )
        for r in ({"bf16": 1.0}, {"bf16": 2.0}, {"fp16": 1.0})
    ]
    once, twice = (pf.survey(s, cluster, 1e9, 1e6).bound_s[0] for s in spaces[:2])
    assert twice == once / 2
    assert str(spaces[2][0]).endswith("no bf16 at 1.05 GHz")
    with pytest.raises(pf.InfeasibleError, match="do not multiply bf16"):
        pf.survey(spaces[2], cluster, 1e9, 1e6)


def test_chips_that_cannot_hold_the_state_come_last(cluster):
    axes = {"hbm.capacity_bytes": (2**20, 2**35)}
    space = pf.ArchitectureSpace(
        pf.SpaceSpec(name="s", base=pf.presets.chip("phaze-tpuv4"), axes=axes)
    )
    found = pf.survey(space, cluster, 1e9, 1e6)
    assert np.isinf(found.bound_s[0])
    assert found.order.tolist() == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        found.bound_s[0] = 1.0


def test_the_bound_by_hand():
    chips = pf.hardware.chip_records([pf.presets.chip("h100")])
    flops = training_flops(7e9, 4e6)
    assert flops == 6 * 7e9 * 4e6
    expected = flops / (8 * pf.presets.chip("h100").peak_flops())
    assert compute_bound_s(chips, flops, 8)[0] == pytest.approx(expected, rel=1e-14)


def test_infeasible_and_bad_input(cluster):
    space = pf.ArchitectureSpace.tpuv4_area()
    with pytest.raises(pf.InfeasibleError, match="no chip of the grid passes"):
        pf.survey(space[:0], cluster, 1e9, 1e6)
    with pytest.raises(pf.InfeasibleError, match="exceeds the HBM of 1024 devices"):
        pf.survey(space, cluster, 1e14, 1e6)
    wafers = pf.SpaceSpec(name="w", base=pf.presets.chip("wse-2"), axes={"clock_hz": (1e9,)})
    with pytest.raises(pf.InfeasibleError, match="no chip has HBM"):
        pf.survey(pf.ArchitectureSpace(wafers), cluster, 1e9, 1e6)
    for parameters, tokens in ((0, 1), (1, -1), (float("nan"), 1), (1, float("inf")), ("7e9", 1)):
        with pytest.raises(pf.InvalidInputError, match="expected a number > 0"):
            pf.survey(space, cluster, parameters, tokens)
    with pytest.raises(pf.InvalidInputError, match="devices: 0"):
        compute_bound_s(space.chips, 1.0, 0)
