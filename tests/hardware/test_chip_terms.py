"""Terms and axes beyond the published chip: hand-worked areas, laws, limits, one-line refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phaze_fast as pf
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware import EVERY_AREA, AreaLimit, Links, chip_records, power_batch
from phaze_fast.hardware.package import PackageModel
from phaze_fast.hardware.price import Prices
from phaze_fast.hardware.silicon import PowerModel, process_node
from phaze_fast.hardware.space_spec import HBM_GENERATIONS

BASE = pf.presets.chip("phaze-tpuv4").replace(links=Links(count=6, bandwidth_bytes_per_s=50e9))
GIB = 2**30


def spec(axes, base=BASE, **limits):
    return pf.hardware.SpaceSpec(name="few", base=base, axes=axes, **limits)


def test_every_term_is_what_a_hand_works_out():
    found = pf.area(BASE, EVERY_AREA)
    # 256 lanes of 0.9962 M transistors at 96.3 M/mm2, and 23.553 mm2 at 90 nm shared by 32 lanes.
    lane = 0.9962 / 96.3 + 23.553 * 1.6 / 96.3 / 32
    assert math.isclose(found.control_mm2, 256 * lane)
    # Six links of 50 GB/s; an NVLink 3 of 25 GB/s takes 1.888 mm2 and 74.632 M transistors.
    assert math.isclose(found.links_mm2, 12 * (1.888 + 74.632 / 96.3))
    assert found.die_to_die_mm2 == 0.0
    full = pf.area(BASE, pf.hardware.FULL_AREA)
    assert math.isclose(found.total_mm2, full.total_mm2 + found.control_mm2 + found.links_mm2)
    two = pf.area(BASE.replace(dies=2), EVERY_AREA)
    assert math.isclose(two.total_mm2, 1.1 * found.total_mm2)
    rates = {"bf16": 1.0, "fp8": 2.0}
    fp8 = BASE.replace(tensor_core=BASE.tensor_core.replace(rates=rates))
    more = pf.area(fp8, EVERY_AREA).total_mm2 - found.total_mm2
    assert math.isclose(more, 0.1 * 131072 * 760.041386e-6)
    # Off means off: the published formula does not see any of it.
    assert (
        pf.area(fp8.replace(dies=2)).total_mm2 == pf.area(pf.presets.chip("phaze-tpuv4")).total_mm2
    )


def test_nodes_are_what_a_hand_works_out():
    old = pf.area(BASE, pf.hardware.FULL_AREA.replace(process_nm=16.0))
    now = pf.area(BASE, pf.hardware.FULL_AREA)
    assert math.isclose(old.buffer_mm2, now.buffer_mm2 * 0.070 / 0.027)
    assert math.isclose(old.network_mm2, now.network_mm2 * 96.3 / 28.9)
    assert math.isclose(old.hbm_mm2, 4 * (10.45 + 552.743 / 28.9))  # PHYs do not shrink
    assert pf.area(BASE, pf.hardware.FULL_AREA.replace(process_nm=5.0)).total_mm2 < now.total_mm2
    watts = [
        power_batch([BASE], terms=pf.hardware.FULL_AREA.replace(process_nm=n))[0]
        for n in (5.0, 16.0)
    ]
    assert watts[0] < power_batch([BASE], terms=pf.hardware.FULL_AREA)[0] < watts[1]
    usd = [Prices.at_node(n).die_usd(np.array([300.0]))[0] for n in (16.0, 7.0, 5.0)]
    assert usd == sorted(usd)
    with pytest.raises(InvalidInputError, match="process_nm: .*expected one of 28, 16, 10, 7, 5"):
        pf.hardware.FULL_AREA.replace(process_nm=6.0)
    assert process_node(7.0).logic_growth == process_node(7.0).sram_growth == 0.0


def test_links_and_stacks_draw_what_a_hand_works_out():
    found = PowerModel().at(BASE, terms=EVERY_AREA)
    assert math.isclose(found.links_w, 6 * 50e9 * 80e-12)
    assert math.isclose(found.hbm_w, 1.2e12 * 43.75e-12)
    half = PowerModel().at(BASE, 0.5, terms=EVERY_AREA)
    assert (half.links_w, half.hbm_w) == (found.links_w, found.hbm_w)
    capped = PowerModel().under(BASE, 160.0, terms=EVERY_AREA)
    assert math.isclose(capped.total_w, 160.0, rel_tol=1e-9)


@settings(max_examples=60)
@given(data=st.data())
def test_more_of_anything_never_costs_less(data):
    """Area, power and dollars of a chip with more of one thing are never below those without."""
    row = chip_records([BASE])
    more = row.copy()
    columns = {"tensor_cores": 64, "vector_cores": 64, "vector_lanes": 512, "hbm_stacks": 12}
    columns |= {"links": 24, "dies": 8, "buffer_bytes": 2**28, "fp8": 1, "tensor_width": 512}
    columns |= {"hbm_bytes_per_s": 10e12, "link_bytes_per_s": 200e9, "clock_hz": 2e9}
    for name, most in columns.items():
        if name in ("hbm_bytes_per_s", "link_bytes_per_s", "clock_hz"):
            draw = st.floats(most / 50, most)
        else:
            draw = st.integers(0 if name == "fp8" else 1, most)
        row[name] = more[name] = data.draw(draw)
    name = data.draw(st.sampled_from(sorted(columns)))
    more[name] = max(row[name][0], columns[name])
    nm = data.draw(st.sampled_from([28.0, 16.0, 7.0, 5.0]))
    terms = EVERY_AREA.replace(process_nm=nm)
    small, large = (pf.hardware.area_batch(r, terms)["total_mm2"] for r in (row, more))
    assert small[0] <= large[0] * (1 + 1e-12)
    assert power_batch(row, terms=terms)[0] <= power_batch(more, terms=terms)[0] * (1 + 1e-12)
    assert PowerModel().idle_w(row, terms=terms)[0] <= power_batch(row, terms=terms)[0] * (
        1 + 1e-12
    )
    shares = [PowerModel().clock_shares(r, 300.0, terms=terms)[0] for r in (row, more)]
    if name != "clock_hz" and np.isfinite(shares[1]):
        assert shares[1] <= shares[0] + 1e-9
    if name not in ("dies", "clock_hz"):  # cutting a die in two may well pay
        dies, stacks, size = (row[n].astype(float) for n in ("dies", "hbm_stacks", "hbm_bytes"))
        usd = [PackageModel().device_usd(a, dies, stacks, size)[0] for a in (small, large)]
        assert usd[0] <= usd[1] * (1 + 1e-12)


def test_capacity_and_bandwidth_come_in_stacks():
    axes = {"hbm.generation": ["hbm2e", "hbm3e"], "hbm.stacks": [2, 6], "tensor_core.count": [4, 8]}
    space = pf.ArchitectureSpace(spec(axes))
    assert len(space) == 8
    for i, chip in enumerate(space):
        generation = HBM_GENERATIONS["hbm2e" if i < 4 else "hbm3e"]
        stacks = chip.hbm.stacks
        assert stacks == (2, 6)[i // 2 % 2]
        assert chip.hbm.capacity_bytes == stacks * generation.capacity_bytes
        assert chip.hbm.bandwidth_bytes_per_s == stacks * generation.bandwidth_bytes_per_s
        assert chip_records([chip])[0] == space.chips[i]
    assert space[3:5].chips.tolist() == space.chips[3:5].tolist()
    again = pf.hardware.SpaceSpec.from_dict(space.spec.to_dict())
    assert pf.ArchitectureSpace(again) == space
    roomy = pf.ArchitectureSpace(spec(axes, min_hbm_bytes=40 * GIB, max_hbm_bytes=100 * GIB))
    assert sorted(set(roomy.column("hbm.capacity_bytes") // GIB)) == [48, 96]


def test_formats_links_and_dies_are_axes():
    axes = {"format": ["bf16", "fp8"], "links.count": [6, 12], "dies": [1, 2]}
    limit = AreaLimit(max_mm2=2000.0, terms=EVERY_AREA)
    space = pf.ArchitectureSpace(spec(axes, area=limit))
    assert [("fp8" in c.tensor_core.rates, c.links.count, c.dies) for c in space] == [
        (fp8, links, dies) for fp8 in (False, True) for links in (6, 12) for dies in (1, 2)
    ]
    for chip, mm2 in zip(space, space.area_mm2, strict=True):
        assert math.isclose(pf.area(chip, EVERY_AREA).total_mm2, mm2)


@pytest.mark.parametrize(
    ("axes", "limits", "said"),
    [
        ({"tensor_core.count": [64, 128]}, {"package": PackageModel(), "area": None}, "reticle"),
        ({"hbm.stacks": [24, 32]}, {"package": PackageModel()}, "interposer has 2700"),
        ({"links.count": [6]}, {"max_power_w": 60.0, "above_power": "slow"}, "alone take .* W at"),
        ({"links.count": [6]}, {"max_power_w": 60.0}, "a chip at its peak take"),
        ({"hbm.stacks": [4]}, {"min_hbm_bytes": 64 * GIB}, "memories are 32 GiB to 32 GiB"),
        ({"dies": [1, 2]}, {"area": AreaLimit(max_mm2=100.0)}, "areas of its grid are 278.8"),
    ],
)
def test_a_space_that_no_chip_passes_says_why_in_one_line(axes, limits, said):
    space = pf.ArchitectureSpace(spec(axes, **limits))
    step = pf.Training(global_batch=8, micro_batch=1)
    cluster = pf.Cluster(devices=4, fabric="tpuv4-pod")
    with pytest.raises(InfeasibleError, match=said) as error:
        pf.search("gpt2-small", space, cluster, step)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("few: ")


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"hbm.generation": ["hbm9"]}, "axes.hbm.generation: 'hbm9' is not accepted"),
        ({"format": "fp8"}, "axes.format: 'fp8' is not accepted; expected a list"),
        ({"format": ["fp8", "fp8"]}, "given twice"),
        ({"hbm.generation": ["hbm3"], "hbm.capacity_bytes": [2**35]}, "hbm.generation gives it"),
    ],
)
def test_bad_axes_are_refused_in_one_line(axes, said):
    with pytest.raises(InvalidInputError, match=said) as error:
        spec(axes)
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidInputError, match="has no links to vary"):
        spec({"links.count": [1]}, base=pf.presets.chip("phaze-tpuv4"))
    with pytest.raises(InvalidInputError, match="max_hbm_bytes: 1 is below min_hbm_bytes, 2"):
        spec({"dies": [1]}, min_hbm_bytes=2, max_hbm_bytes=1)


@pytest.mark.slow
def test_the_space_of_every_term_holds_its_limits():
    space = pf.ArchitectureSpace.load("every-term")
    assert len(space) > 100_000
    limit = space.spec.area.max_mm2
    assert space.area_mm2.max() <= limit
    some = space[:: len(space) // 500]
    assert (power_batch(some.chips, terms=EVERY_AREA) <= space.spec.max_power_w * 1.6).all()
    slowed = some.chips["clock_hz"] < space.spec.base.clock_hz
    assert 0 < slowed.sum() < len(some)
