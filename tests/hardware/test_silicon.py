"""Area against the published closed form; power and laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.area import GLB_UM2, L2_UM2, published_area_mm2

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    FULL_AREA,
    PUBLISHED_AREA,
    Accelerator,
    AreaTerms,
    area,
    area_batch,
    chip_records,
    energy_table,
    energy_table_names,
    power_batch,
    presets,
)

BASE = presets.chip("phaze-tpuv4")
powers = st.integers(0, 12).map(lambda e: 2**e)
sides = st.integers(1, 8).map(lambda e: 2**e)


def template(num_tc, num_vc, width, depth, glb_mib):
    return BASE.replace(
        tensor_core=BASE.tensor_core.replace(count=num_tc, width=width, depth=depth),
        vector_core=BASE.vector_core.replace(count=num_vc, lanes=width),
        buffer=BASE.buffer.replace(capacity_bytes=glb_mib * 2**20),
    )


@given(powers, powers, sides, sides, st.sampled_from(sorted(GLB_UM2)))
def test_area_is_the_published_formula(num_tc, num_vc, width, depth, glb_mib):
    found = area(template(num_tc, num_vc, width, depth, glb_mib))
    assert found.total_mm2 == pytest.approx(
        published_area_mm2(num_tc, num_vc, width, depth, glb_mib), rel=1e-14
    )
    assert not found.extrapolated
    assert (found.network_mm2, found.hbm_mm2) == (0.0, 0.0)


def test_the_tpuv4_like_chip():
    assert round(area(BASE).total_mm2, 2) == 278.83


@given(st.integers(0, 2**26), st.integers(0, 2**26))
def test_a_larger_buffer_is_never_smaller_in_area(a, b):
    small, large = sorted((a, b))
    chips = [
        BASE.replace(buffer=BASE.buffer.replace(capacity_bytes=c * 16)) for c in (small, large)
    ]
    areas = area_batch(chips)["buffer_mm2"]
    assert areas[0] <= areas[1]


@given(st.integers(1, 10), st.floats(0.0, 1.0))
def test_between_two_sizes_the_area_is_linear(step, share):
    low, high = 2 ** (step - 1), 2**step
    kib = low + share * (high - low)
    local = round(kib * 1024)
    chip = BASE.replace(tensor_core=BASE.tensor_core.replace(count=1, local_buffer_bytes=local))
    cores = area(chip).tensor_mm2 * 1e6 - 128 * 128 * 760.041386
    expected = L2_UM2[low] + (L2_UM2[high] - L2_UM2[low]) * (local / 1024 - low) / (high - low)
    assert cores == pytest.approx(expected, rel=1e-6)


def test_outside_the_table_it_says_so():
    assert not area(template(1, 1, 256, 256, 128)).extrapolated
    assert area(template(1, 1, 512, 256, 128)).extrapolated
    assert area(template(1, 1, 256, 256, 256)).extrapolated
    assert area(template(1, 1, 256, 256, 1)).extrapolated
    assert area(template(1, 1, 256, 256, 256)).buffer_mm2 > GLB_UM2[128] / 1e6


def test_terms_switch_on_one_by_one():
    plain = area(BASE, PUBLISHED_AREA)
    network = area(BASE, AreaTerms(network=True))
    hbm = area(BASE, AreaTerms(hbm=True))
    full = area(BASE, FULL_AREA)
    # 10 ports of 2 x (128 + 128) bytes; 64 bytes take 44.3 M transistors, 96.3 M of which take
    # 1 mm2; 4 stacks of 10.45 + 5.74 mm2
    assert network.network_mm2 == pytest.approx(10 * 512 / 64 * 44.3 / 96.3)
    narrow = template(8, 2, 128, 128, 128).to_dict()
    narrow["buffer"]["port_bytes_per_cycle"] = 64.0
    narrow = area(Accelerator.from_dict(narrow), AreaTerms(network=True))
    assert narrow.network_mm2 == pytest.approx(10 * 44.3 / 96.3)
    assert hbm.hbm_mm2 == pytest.approx(4 * (10.45 + 552.743 / 96.3))
    assert full.total_mm2 == pytest.approx(plain.total_mm2 + network.network_mm2 + hbm.hbm_mm2)
    assert plain.total_mm2 == network.total_mm2 - network.network_mm2
    assert AreaTerms(hbm=True, hbm_mm2_per_stack=1.0).rates[:2] == (0.0, 1.0)


def test_chips_without_a_buffer_have_no_buffer_area():
    assert area(presets.chip("wse-2")).buffer_mm2 == 0.0


def test_malformed_rows_get_a_status():
    rows = chip_records([BASE] * 4)
    rows["tensor_cores"][1] = -1
    rows["clock_hz"][2] = math.nan
    found = area_batch(rows)
    assert found["status"].tolist() == [0, 9, 9, 0]
    assert np.isnan(found["total_mm2"]).tolist() == [False, True, True, False]
    assert "malformed" in _core.STATUS_SENTENCES[9]


def test_threads_do_not_change_the_bits():
    rng = np.random.default_rng(3)
    rows = np.repeat(chip_records([BASE]), 50_000)
    rows["tensor_cores"] = rng.integers(1, 4096, len(rows))
    rows["tensor_local_bytes"] = rng.integers(1, 2**22, len(rows))
    rows["buffer_bytes"] = rng.integers(0, 2**28, len(rows))
    first = area_batch(rows, FULL_AREA, threads=1)
    assert first.tobytes() == area_batch(rows, FULL_AREA, threads=4).tobytes()
    power = power_batch(rows, terms=FULL_AREA, threads=1)
    assert power.tobytes() == power_batch(rows, terms=FULL_AREA, threads=4).tobytes()


# ---- energy ----


def test_peak_power_by_hand():
    table = energy_table("7nm")
    per_cycle = (
        8 * 128 * 128 * table.mac_j
        + 8 * 256 * 2 * table.local_byte_j
        + 256 * table.vector_op_j
        + 4096 * table.buffer_byte_j
    )
    watts = per_cycle * 1.05e9 + 1.2e12 * table.hbm_byte_j + 0.15 * area(BASE).total_mm2
    assert power_batch([BASE])[0] == pytest.approx(watts, rel=1e-12)


def test_lanes_with_several_alus_cost_area_and_power():
    wide = BASE.replace(vector_core=BASE.vector_core.replace(alus_per_lane=16))
    gained = area(wide).vector_mm2 - area(BASE).vector_mm2
    assert gained == pytest.approx(2 * 128 * 15 * 759.823853 / 1e6)
    table = energy_table("7nm")
    watts = power_batch([wide])[0] - power_batch([BASE])[0]
    assert watts == pytest.approx(256 * 15 * table.vector_op_j * 1.05e9 + 0.15 * gained)


def test_operands_enter_along_both_sides_of_an_array():
    flat = BASE.replace(tensor_core=BASE.tensor_core.replace(width=256, depth=64))
    table = energy_table("7nm")
    more = 8 * (256 + 64 - 128 - 128) * 2 * table.local_byte_j * 1.05e9
    assert power_batch([flat])[0] - power_batch([BASE])[0] == pytest.approx(more, rel=1e-6)


def test_beyond_the_table_the_last_segment_goes_on():
    last, before = GLB_UM2[128], GLB_UM2[64]
    chip = BASE.replace(buffer=BASE.buffer.replace(capacity_bytes=256 * 2**20))
    assert area(chip).buffer_mm2 == pytest.approx((last + 2 * (last - before)) / 1e6)


def test_peak_power_is_of_the_right_size():
    """Within a factor of 1.6 of the published power, for every chip with HBM that has one, but for
    two: the table is of a 7 nm process, and the template knows no network ports or media engines."""
    outside = {"v100-32": "12 nm", "gaudi2": "24 Ethernet ports on the die"}
    for name in presets.chip_names():
        chip = presets.chip(name)
        if chip.power_w and chip.hbm:
            ratio = power_batch([chip], terms=FULL_AREA)[0] / chip.power_w
            assert (1 / 1.6 < ratio < 1.6) != (name in outside), (name, ratio)
            assert ratio > 1 / 2.4, (name, ratio)


@pytest.mark.parametrize("name", energy_table_names())
def test_energy_tables_have_sources_and_order(name):
    table = energy_table(name)
    assert len(table.sources) >= 2
    assert 0 < table.local_byte_j < table.buffer_byte_j < table.hbm_byte_j
    assert 0 < table.mac_j < table.hbm_byte_j


def test_unknown_energy_table():
    with pytest.raises(InvalidInputError, match="did you mean '7nm'"):
        energy_table("7nn")
