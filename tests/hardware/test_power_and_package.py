"""Clock under a power cap, and packages: laws, hand-worked values, refusals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phaze_fast as pf
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware.chip import chip_records
from phaze_fast.hardware.package import PackageModel
from phaze_fast.hardware.price import Prices
from phaze_fast.hardware.silicon import PowerModel

CHIP = pf.presets.chip("phaze-tpuv4")


def test_power_is_what_a_hand_works_out():
    # 131,072 multipliers at 0.59 pJ and 256 lanes at 0.845 pJ, 1.05 GHz; HBM 1.2 TB/s at 43.75 pJ.
    full = PowerModel().at(CHIP, terms=pf.hardware.PUBLISHED_AREA)
    assert math.isclose(full.hbm_w, 52.5)
    assert math.isclose(full.leakage_w, 0.15 * pf.area(CHIP).total_mm2)
    assert full.dynamic_w > 131072 * 1.05e9 * 0.59e-12
    assert math.isclose(full.total_w, pf.hardware.power_batch([CHIP])[0])
    # Half the clock needs 0.55 of 0.75 V: dynamic power falls to 0.5 x (0.55 / 0.75)^2.
    half = PowerModel().at(CHIP, 0.5, terms=pf.hardware.PUBLISHED_AREA)
    assert math.isclose(half.dynamic_w / full.dynamic_w, 0.5 * (0.55 / 0.75) ** 2)
    assert math.isclose(half.leakage_w / full.leakage_w, 0.55 / 0.75)


def test_a_chip_without_a_clock_draws_what_is_left_of_its_power():
    still = PowerModel().at(CHIP, 0.0)
    assert still.dynamic_w == 0.0
    assert PowerModel().idle_w(chip_records([CHIP])).tolist() == pytest.approx([still.total_w])


@given(share=st.floats(0.0, 1.0), more=st.floats(0.0, 1.0))
def test_a_higher_clock_never_draws_less(share, more):
    low, high = sorted((share, more))
    assert PowerModel().at(CHIP, low).total_w <= PowerModel().at(CHIP, high).total_w + 1e-9


@pytest.mark.parametrize("cap", [110.0, 130.0, 150.0, 190.0, 1000.0])
def test_a_cap_binds_where_the_chip_would_draw_more(cap):
    found, full = PowerModel().under(CHIP, cap), PowerModel().at(CHIP)
    assert found.total_w <= cap
    if full.total_w <= cap:
        assert found == full
    else:
        assert math.isclose(found.total_w, cap, rel_tol=1e-9)
        assert 0.0 < found.clock_share < 1.0


def test_a_cap_below_leakage_is_said_in_one_line():
    with pytest.raises(InfeasibleError, match="leakage") as error:
        PowerModel().under(CHIP, 20.0)
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidInputError, match="least_volts"):
        PowerModel(least_volts=0.9)


def test_peak_power_against_published_chips():
    """Peak power by the 7 nm table over the published figure; docs/robust.md states these."""
    stated = {"tpuv4": 1.11, "a100-80": 0.69, "h100": 0.88}
    for name, ratio in stated.items():
        chip = pf.presets.chip(name)
        assert math.isclose(PowerModel().at(chip).total_w / chip.power_w, ratio, abs_tol=0.01)


@given(
    area=st.floats(50.0, 850.0),
    more=st.floats(1.0, 1.5),
    stacks=st.integers(0, 8),
    dies=st.integers(1, 4),
)
def test_more_silicon_or_memory_never_costs_less(area, more, stacks, dies):
    model = PackageModel(reticle_mm2=5000.0, interposer_mm2=20000.0)
    small = model.package(area, stacks, stacks * 2**34, dies)
    assert model.package(area * more, stacks, stacks * 2**34, dies).usd >= small.usd
    assert model.package(area, stacks + 1, (stacks + 1) * 2**34, dies).usd > small.usd
    assert model.package(area, stacks, stacks * 2**34, dies + 1).good >= small.good * 0.99


def test_a_package_is_what_a_hand_works_out():
    # 600 mm2: 0.54 defects, (1 + 0.54 / 3)^-3 = 0.609; pi 300^2 / 4 / 600 - pi 300 / sqrt(1200) = 90.6
    found = PackageModel().package(600.0, 4, 64 * 2**30)
    assert math.isclose(found.good, 1.18**-3)
    assert math.isclose(found.dies_usd, 9346.0 / (90.604 * 1.18**-3), rel_tol=1e-4)
    assert (found.package_mm2, found.hbm_usd) == (1040.0, 640.0)
    assert math.isclose(found.interposer_usd, 52.0)
    assert math.isclose(found.usd, found.dies_usd + 692.0)
    assert math.isclose(Prices().good(np.array([600.0]))[0], found.good)


@pytest.mark.parametrize(
    ("given_", "said"),
    [((900.0, 4), "reticle"), ((800.0, 20), "interposer has 2700")],
)
def test_an_impossible_package_is_said_in_one_line(given_, said):
    with pytest.raises(InfeasibleError, match=said) as error:
        PackageModel().package(*given_, hbm_bytes=2**35)
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidInputError, match="dies"):
        PackageModel().package(100.0, 1, 2**30, dies=0)


def test_a_space_slows_chips_that_draw_too_much():
    axes = {"tensor_core.count": (4.0, 8.0, 16.0), "buffer.capacity_bytes": (2.0**25, 2.0**27)}
    free = pf.hardware.SpaceSpec(name="few", base=CHIP, axes=axes)
    whole, cap = pf.ArchitectureSpace(free), 160.0
    slow = pf.ArchitectureSpace(free.replace(max_power_w=cap, above_power="slow"))
    dropped = pf.ArchitectureSpace(free.replace(max_power_w=cap))
    assert len(dropped) < len(slow) == len(whole)
    drawn = pf.hardware.power_batch(whole.chips)
    for i, chip in enumerate(slow):
        assert chip.clock_hz == slow.chips["clock_hz"][i]
        assert (chip.clock_hz == CHIP.clock_hz) == (drawn[i] <= cap)
        model = PowerModel().under(whole[i], cap, terms=pf.hardware.PUBLISHED_AREA)
        assert math.isclose(chip.clock_hz, CHIP.clock_hz * model.clock_share)
    assert slow[1:3].chips["clock_hz"].tolist() == slow.chips["clock_hz"][1:3].tolist()
    # A higher cap never lowers a clock; one below leakage leaves no chip.
    more = pf.ArchitectureSpace(free.replace(max_power_w=200.0, above_power="slow"))
    assert (more.chips["clock_hz"] >= slow.chips["clock_hz"]).all()
    none = pf.ArchitectureSpace(free.replace(max_power_w=20.0, above_power="slow"))
    assert len(none) == 0
    step = pf.Training(global_batch=8, micro_batch=1, pp=1)
    with pytest.raises(InfeasibleError, match="max_power_w 20 W leaves no chip"):
        pf.search("gpt2-small", none, pf.Cluster(devices=4, fabric="tpuv4-pod"), step)
