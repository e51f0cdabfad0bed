"""Spaces of chips: the published one point by point, and what any space promises."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.area import published_space
from refusals import refusal

from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import (
    FULL_AREA,
    ArchitectureSpace,
    AreaLimit,
    SpaceSpec,
    area,
    area_batch,
    chip_records,
    power_batch,
    presets,
)

BASE = presets.chip("phaze-tpuv4")


def space_of(axes, base=BASE, **limits):
    return ArchitectureSpace(SpaceSpec(name="s", base=base, axes=axes, **limits))


@pytest.fixture(scope="module")
def published():
    return ArchitectureSpace.tpuv4_area()


def test_the_published_space_point_by_point(published):
    expected = list(published_space())
    assert len(published) == len(expected) == 29_360
    assert published.grid_size == 75_712
    fields = ("tensor_core.count", "vector_core.count", "tensor_core.width", "tensor_core.depth")
    columns = [published.column(f).tolist() for f in fields]
    buffers = (published.column("buffer.capacity_bytes") // 2**20).tolist()
    points = list(zip(*columns, buffers, strict=True))
    assert points == [point for point, _ in expected]
    assert published.column("vector_core.lanes").tolist() == columns[2]
    areas = np.array([area for _, area in expected])
    np.testing.assert_allclose(published.area_mm2, areas, rtol=1e-12, atol=0)
    assert round(float(published.area_mm2.max()), 2) == 278.83


def test_a_point_is_the_chip_its_row_says(published):
    for i in (0, 7, 12_345, len(published) - 1):
        chip = published[i]
        assert chip_records([chip])[0] == published.chips[i]
        assert area(chip).total_mm2 == published.area_mm2[i]
    assert published[-1].name == f"phaze-tpuv4-area[{published.index[-1]}]"
    # Figures of the base are not those of a point.
    point = space_of({"clock_hz": (1e9,)}, presets.chip("h100"))[0]
    assert (point.die_area_mm2, point.power_w, point.notes, point.sources) == (None, None, "", ())


def test_chunks_cover_the_space_in_order(published):
    small = published[:50]
    assert [int(part.index[0]) for part in small.chunks(1)] == small.index.tolist()
    for size in (1000, 75_712, 10**6):
        index = np.concatenate([part.index for part in published.chunks(size)])
        assert index.tolist() == published.index.tolist()


def test_slices_are_spaces(published):
    part = published[100:200:3]
    assert isinstance(part, ArchitectureSpace)
    assert part.index.tolist() == published.index[100:200:3].tolist()
    assert part.area_mm2.tolist() == published.area_mm2[100:200:3].tolist()
    assert part[5] == published[115]
    mask = published.area_mm2 > 278
    assert len(published[mask]) == int(mask.sum())
    assert published[[5, 3]].index.tolist() == published.index[[5, 3]].tolist()
    assert len(published[[]]) == 0
    assert len(part[:0]) == 0
    assert [chip.name for chip in published[:3]] == [published[i].name for i in range(3)]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ([0, 0], InvalidInputError),
        ([0.5], InvalidTypeError),
        ("abc", InvalidTypeError),
        (10**6, IndexError),
    ],
)
def test_bad_positions_are_refused(published, key, error):
    assert refusal(lambda: published[key], error=error)


def test_identity(published):
    again = ArchitectureSpace.tpuv4_area()
    assert again == published
    assert hash(again) == hash(published)
    assert published[:5] != published
    assert published[:5] == again[:5]
    assert hash(published[:5]) == hash(again[:5])
    assert published != "space"
    copied = pickle.loads(pickle.dumps(published))
    assert copied == published
    assert copied.index.tobytes() == published.index.tobytes()
    assert len({published, again, published[:5]}) == 2
    assert published[:] == published[np.ones(len(published), bool)] == published


def test_the_order_of_axes_is_part_of_a_space():
    axes = {"tensor_core.count": (1, 2, 3), "tensor_core.width": (8, 16)}
    turned = dict(reversed(axes.items()))
    a, b = space_of(axes), space_of(turned)
    assert a != b
    assert a.spec != b.spec
    assert a.digest != b.digest
    for space in (a, ArchitectureSpace.tpuv4_area()):
        again = ArchitectureSpace(SpaceSpec.from_dict(json.loads(space.spec.to_json())))
        assert again == space
        assert hash(again.spec) == hash(space.spec)
        assert again.chips.tobytes() == space.chips.tobytes()


def test_slices_keep_the_areas_of_their_terms():
    limit = AreaLimit(max_mm2=1e4, terms=FULL_AREA)
    space = space_of({"tensor_core.count": (1, 2, 3)}, area=limit)
    assert space[1:].area_mm2.tolist() == space.area_mm2[1:].tolist()
    assert space[[2]].area_mm2[0] == area(space[2], FULL_AREA).total_mm2


def test_bad_ties_limits_and_chunks_are_refused(published):
    ties = {"vector_core.lanes": "buffer.bytes_per_cycle"}
    assert "whole numbers, which buffer.bytes_per_cycle" in refusal(space_of, {}, ties=ties)
    said = refusal(space_of, {"dies": [1]}, min_hbm_bytes=2, max_hbm_bytes=1)
    assert "max_hbm_bytes: 1 is below min_hbm_bytes, 2" in said
    for size in (0, -1):
        assert "size" in refusal(list, published.chunks(size), error=InvalidInputError)


def test_numpy_numbers_are_numbers(published):
    width = published.column("tensor_core.width")[7]
    core = BASE.tensor_core.replace(width=width)
    assert core.width == int(width)
    spec = SpaceSpec(name="s", base=BASE, axes={"tensor_core.width": np.array([8, 16])})
    assert spec.axes["tensor_core.width"] == (8, 16)


def test_arrays_are_read_only(published):
    for array in (published.index, published.chips, published.area_mm2):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[1]


def test_any_field_can_be_an_axis():
    axes = {
        "tensor_core.count": (3, 5),
        "tensor_core.width": (48, 100),
        "tensor_core.depth": (7,),
        "tensor_core.local_buffer_bytes": (3000,),
        "vector_core.count": (6,),
        "vector_core.lanes": (96, 200),
        "vector_core.alus_per_lane": (2,),
        "vector_core.local_buffer_bytes": (5000,),
        "buffer.capacity_bytes": (3 * 2**20,),
        "buffer.bytes_per_cycle": (1000.5,),
        "buffer.port_bytes_per_cycle": (32.0,),
        "hbm.capacity_bytes": (10**10,),
        "hbm.bandwidth_bytes_per_s": (1e12, 2.5e12),
        "hbm.stacks": (3,),
        "clock_hz": (0.9e9,),
    }
    space = space_of(axes)
    assert len(space) == space.grid_size == 16
    for i in range(16):
        assert chip_records([space[i]])[0] == space.chips[i]
    # the last axis varies fastest
    assert space.column("tensor_core.count").tolist() == [3] * 8 + [5] * 8
    assert space.column("hbm.bandwidth_bytes_per_s").tolist() == [1e12, 2.5e12] * 8


def test_local_buffers_follow_their_cores():
    axes = {"tensor_core.width": (8, 64), "vector_core.lanes": (16, 640)}
    space = space_of(axes)
    assert space.chips["tensor_local_bytes"].tolist() == [16384, 16384, 131072, 131072]
    assert space.chips["vector_local_bytes"].tolist() == [1024, 10240] * 2
    held = BASE.replace(vector_core=BASE.vector_core.replace(local_buffer_bytes=4096))
    space = space_of(axes, held)
    assert set(space.chips["vector_local_bytes"].tolist()) == {4096}
    assert space.chips["tensor_local_bytes"].tolist() == [16384, 16384, 131072, 131072]
    given_too = {**axes, "vector_core.local_buffer_bytes": (2048,)}
    space = space_of(given_too)
    assert set(space.chips["vector_local_bytes"].tolist()) == {2048}
    assert len(set(space.chips["tensor_local_bytes"].tolist())) == 2
    fixed = presets.chip("a100-80")
    space = space_of(axes, fixed)
    assert set(space.chips["tensor_local_bytes"].tolist()) == {192 * 1024}


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True),
    widths=st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True),
    clocks=st.lists(st.floats(1e8, 3e9), min_size=1, max_size=3, unique=True),
    limit=st.floats(1.0, 400.0),
    floor=st.floats(0.0, 1.0),
    waive=st.booleans(),
    power=st.one_of(st.none(), st.floats(10, 400)),
    full=st.booleans(),
)
def test_the_filter_keeps_exactly_what_it_should(
    counts, widths, clocks, limit, floor, waive, power, full
):
    terms = FULL_AREA if full else AreaLimit(max_mm2=1).terms
    axes = {"tensor_core.count": counts, "tensor_core.width": widths, "clock_hz": clocks}
    everything = space_of(axes, ties={"vector_core.lanes": "tensor_core.width"})
    spec = everything.spec.replace(
        area=AreaLimit(
            max_mm2=limit, min_fraction=floor, keep_small_single_core=waive, terms=terms
        ),
        max_power_w=power,
    )
    sizes = area_batch(everything.chips, terms)["total_mm2"]
    watts = power_batch(everything.chips, terms=terms)
    expected = []
    for i, size in enumerate(sizes):
        single = 1 in (everything.chips["tensor_cores"][i], everything.chips["vector_cores"][i])
        inside = size <= limit and (size >= floor * limit or (waive and single))
        if inside and (power is None or watts[i] <= power):
            expected.append(i)
    assert ArchitectureSpace(spec).index.tolist() == expected


def test_limits_include_their_ends():
    one = SpaceSpec(name="s", base=BASE, axes={"clock_hz": (1.05e9,)})
    size = float(ArchitectureSpace(one).area_mm2[0])
    watts = float(power_batch([BASE])[0])
    exact = one.replace(area=AreaLimit(max_mm2=size, min_fraction=1.0), max_power_w=watts)
    assert len(ArchitectureSpace(exact)) == 1


def test_a_space_from_a_file(tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text(
        """
name: mine
base: phaze-tpuv4
axes:
  tensor_core.count: {powers_of_two: [0, 3]}
  tensor_core.width: {start: 8, stop: 32, step: 8}
  clock_hz: [0.9e9, 1.05e9]
ties: {vector_core.lanes: tensor_core.width}
area: {max_mm2: 200 mm2, terms: {network: true, hbm: true}}
max_power_w: 150 W
"""
    )
    space = ArchitectureSpace.load(file)
    assert space.grid_size == 4 * 4 * 2
    assert space.spec.axes["tensor_core.width"] == (8, 16, 24, 32)
    assert len(space) == 0  # the base's 128 MiB buffer and four stacks alone exceed 200 mm2
    wider = ArchitectureSpace(space.spec.replace(area=space.spec.area.replace(max_mm2=250.0)))
    assert 0 < len(wider) <= 32
    axes = {"buffer.bytes_per_cycle": {"start": 0.1, "stop": 0.7, "step": 0.1}}
    assert space_of(axes).grid_size == 7  # the end is reached in spite of rounding
    assert SpaceSpec.from_dict(space.spec.to_dict()) == space.spec


def test_a_million_points_enumerate_without_holding_the_grid():
    axes = {"tensor_core.count": tuple(range(1, 101))}
    axes |= dict.fromkeys(("tensor_core.width", "tensor_core.depth"), tuple(range(8, 108)))
    limit = AreaLimit(max_mm2=180.0)
    space = space_of(axes, area=limit)
    kept = sum(len(part.index) for part in space.chunks())
    assert space.grid_size == 1_000_000
    assert 0 < kept < 1_000_000
    assert "grid of 1000000" in repr(space)
    assert "_all" not in vars(space)
