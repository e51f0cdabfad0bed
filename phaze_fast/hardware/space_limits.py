"""What a space does to its chips after the grid's filter: stacks, clocks, and limits.

Areas are limited while the grid is enumerated; all else is decided here, piece by piece.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from phaze_fast.hardware.named_axes import with_stacks
from phaze_fast.hardware.power import PowerModel
from phaze_fast.hardware.silicon import PUBLISHED_AREA, AreaTerms, area_batch, power_batch
from phaze_fast.hardware.space_spec import SpaceSpec
from phaze_fast.units import format_bytes

if TYPE_CHECKING:
    from phaze_fast.hardware.space import ArchitectureSpace, SpaceChunk

__all__ = ["area_terms", "finished", "why_empty"]

Array = np.ndarray[Any, Any]


def area_terms(spec: SpaceSpec) -> AreaTerms:
    """Give the terms that the areas of a space have."""
    return PUBLISHED_AREA if spec.area is None else spec.area.terms


def late_power(spec: SpaceSpec) -> bool:
    """Whether power is limited here, since the grid does not know it."""
    slow = spec.above_power == "slow"
    return spec.max_power_w is not None and (slow or "hbm.generation" in spec.axes)


def finished(spec: SpaceSpec, chunk: SpaceChunk) -> SpaceChunk:
    """Count stacks, lower clocks and apply the limits that the grid's filter does not know."""
    if not len(chunk.index):
        return chunk
    if "hbm.generation" in spec.axes:
        names = spec.axes["hbm.generation"]
        chunk = replace(chunk, chips=with_stacks(spec.base, names, chunk.chips))
    if late_power(spec):
        chunk = _powered(spec, chunk)
    keep = np.ones(len(chunk.index), dtype=bool)
    if spec.min_hbm_bytes or spec.max_hbm_bytes is not None:
        size = chunk.chips["hbm_bytes"]
        keep &= size >= spec.min_hbm_bytes
        keep &= size <= (np.inf if spec.max_hbm_bytes is None else spec.max_hbm_bytes)
    if spec.package is not None:
        dies, stacks = chunk.chips["dies"], chunk.chips["hbm_stacks"]
        keep &= spec.package.fits(chunk.area_mm2, dies, stacks)
    return chunk if keep.all() else _kept(chunk, keep)


def _kept(chunk: SpaceChunk, keep: Array) -> SpaceChunk:
    chips = np.ascontiguousarray(chunk.chips[keep])
    return replace(chunk, index=chunk.index[keep], chips=chips, area_mm2=chunk.area_mm2[keep])


def _powered(spec: SpaceSpec, chunk: SpaceChunk) -> SpaceChunk:
    """Leave chips out that would draw too much, or give them the clock that the limit allows."""
    terms, most_w = area_terms(spec), spec.max_power_w
    assert most_w is not None
    if spec.above_power == "drop":
        keep = power_batch(chunk.chips, terms=terms) <= most_w
        return chunk if keep.all() else _kept(chunk, keep)
    shares = PowerModel().clock_shares(chunk.chips, most_w, terms=terms)
    runs = np.isfinite(shares)
    slowed = _kept(chunk, runs)
    chips = slowed.chips.copy()
    chips["clock_hz"] = chips["clock_hz"] * shares[runs]
    return replace(slowed, chips=chips)


def why_empty(space: ArchitectureSpace) -> str:
    """Say in one line which limit of an empty space leaves no chip, and what the least would be."""
    spec, kind = space.spec, type(space)

    def without(**changes: Any) -> Any:
        return kind(spec.replace(**changes))

    if spec.package is not None and len(free := without(package=None)):
        small = int(np.argmin(free.area_mm2))
        chip, model = free.chips[small], spec.package
        said = model.complaint(
            float(free.area_mm2[small]), int(chip["dies"]), int(chip["hbm_stacks"])
        )
        return f"{spec.name}: no package holds any of its chips; of the smallest, {said}"
    if spec.max_power_w is not None and len(free := without(max_power_w=None)):
        records, terms = free.chips, area_terms(spec)
        least = PowerModel().idle_w(records, terms=terms)
        what = "leakage, links and HBM alone"
        if spec.above_power == "drop":
            least, what = power_batch(records, terms=terms), "a chip at its peak"
        return (
            f"{spec.name}: max_power_w {spec.max_power_w:g} W leaves no chip; {what} take "
            f"{float(least.min()):.1f} W at least"
        )
    if spec.area is not None and len(free := without(area=None)):
        return (
            f"{spec.name}: area.max_mm2 {spec.area.max_mm2:g} leaves no chip; areas of its grid "
            f"are {_range(free, spec)} mm2"
        )
    if len(free := without(min_hbm_bytes=0, max_hbm_bytes=None)):
        sizes = free.chips["hbm_bytes"]
        return (
            f"{spec.name}: min_hbm_bytes and max_hbm_bytes leave no chip; memories are "
            f"{format_bytes(int(sizes.min()))} to {format_bytes(int(sizes.max()))}"
        )
    return f"{spec.name}: there is no chip in it, or none that passes its limits"


def _range(free: ArchitectureSpace, spec: SpaceSpec) -> str:
    total = area_batch(free.chips, area_terms(spec))["total_mm2"]
    return f"{float(total.min()):.1f} to {float(total.max()):.1f}"
