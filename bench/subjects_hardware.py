"""Subjects of the hardware stage: spaces and areas."""

from __future__ import annotations

import numpy as np
from reference.area import GLB_UM2, L2_UM2
from registry import Subject, register

from phaze_fast import _core
from phaze_fast.hardware import (
    PUBLISHED_AREA,
    ArchitectureSpace,
    AreaLimit,
    SpaceSpec,
    area_batch,
    presets,
)

POINTS = 29_360


def _build_published(_: None) -> ArchitectureSpace:
    space = ArchitectureSpace.tpuv4_area()
    len(space)
    return space


def _check_published(_: None, space: ArchitectureSpace) -> None:
    assert len(space) == POINTS
    assert round(float(space.area_mm2.max()), 2) == 278.83


register(
    Subject(
        name="published-space",
        stage="hardware",
        items=75_712,
        build=lambda: None,
        run=_build_published,
        check=_check_published,
        target="< 50 ms",
    )
)


def _million() -> ArchitectureSpace:
    axes = {
        "tensor_core.count": tuple(range(1, 101)),
        "tensor_core.width": tuple(range(8, 108)),
        "tensor_core.depth": tuple(range(8, 108)),
    }
    base = presets.chip("phaze-tpuv4")
    return ArchitectureSpace(
        SpaceSpec(name="million", base=base, axes=axes, area=AreaLimit(max_mm2=250.0))
    )


def _count(space: ArchitectureSpace) -> int:
    return sum(len(part.index) for part in space.chunks())


def _check_million(_: ArchitectureSpace, kept: int) -> None:
    """Count the same chips by NumPy's own interpolation of the published tables."""
    count, width, depth = np.ix_(np.arange(1, 101), np.arange(8, 108), np.arange(8, 108))
    local = np.interp(width * depth / 64, list(L2_UM2), list(L2_UM2.values()))
    vector = 2 * (128 * 759.823853 + L2_UM2[2])
    um2 = count * (width * depth * 760.041386 + local) + vector + GLB_UM2[128]
    assert kept == np.count_nonzero(um2 <= 250e6)


register(
    Subject(
        name="million-point-space",
        stage="hardware",
        items=1_000_000,
        build=_million,
        run=_count,
        check=_check_million,
    )
)


def _published_chips() -> np.ndarray:
    return ArchitectureSpace.tpuv4_area().chips


def _check_area(chips: np.ndarray, found: np.ndarray) -> None:
    assert len(found) == len(chips)
    parts = found["tensor_mm2"] + found["vector_mm2"] + found["buffer_mm2"]
    np.testing.assert_allclose(found["total_mm2"], parts, rtol=1e-12)
    assert round(float(found["total_mm2"].max()), 2) == 278.83


register(
    Subject(
        name="area-breakdown",
        stage="hardware",
        items=POINTS,
        build=_published_chips,
        run=area_batch,
        check=_check_area,
    )
)


def _thousand_chips() -> np.ndarray:
    return np.ascontiguousarray(ArchitectureSpace.tpuv4_area().chips[:1000])


def _check_thousand(chips: np.ndarray, found: np.ndarray) -> None:
    assert len(found) == len(chips) == 1000
    assert found[0] == _core.chip_area_total(chips[:1], PUBLISHED_AREA.rates, 1)[0]


register(
    Subject(
        name="area-call-of-1000",
        stage="hardware",
        items=1000,
        build=_thousand_chips,
        run=lambda chips: _core.chip_area_total(chips, PUBLISHED_AREA.rates, 1),
        check=_check_thousand,
    )
)
