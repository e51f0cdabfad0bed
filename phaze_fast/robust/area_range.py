"""Which chips fit an area limit where the terms of the area are intervals.

An area is linear in the factors of its terms, and so is the limit, whether it is a number or the
area of the space's base chip. So the factors with which a chip fits form a box cut by one plane,
and the quotient of two areas is largest at a corner of that region.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from phaze_fast.hardware import ArchitectureSpace, AreaTerms, area_batch, chip_records
from phaze_fast.robust.constants import AREA_TERMS, Uncertainty
from phaze_fast.tables import Array

_ALMOST = 1.0 + 1e-12


def terms_mm2(space: ArchitectureSpace, records: Array) -> Array:
    """Area of chips by term, shape (chips, terms), mm2."""
    terms = space.spec.area_terms
    areas = area_batch(records, terms)
    multiplier, lane = _unit_mm2(space)
    arrays = records["tensor_cores"] * records["tensor_width"] * float(multiplier)
    arrays = arrays * records["tensor_depth"]
    other = records["other_cores"] * records["other_width"] * float(multiplier)
    arrays = arrays + other * records["other_depth"]
    if terms.formats:
        arrays = arrays * np.where(records["fp8"] > 0, 1.0 + terms.fp8_share, 1.0)
    lanes = records["vector_cores"] * records["vector_lanes"] * records["vector_alus_per_lane"]
    lanes = lanes * float(lane)
    columns = {
        "tensor": arrays,
        "tensor_local": areas["tensor_mm2"] - arrays,
        "vector": lanes,
        "vector_local": areas["vector_mm2"] - lanes,
    }
    columns |= {term: areas[f"{term}_mm2"] for term in AREA_TERMS if term not in columns}
    by_term = np.stack([columns[term] for term in AREA_TERMS], axis=1)
    if terms.die_to_die:  # the area of these links is a share of all other terms
        by_term *= np.where(records["dies"] > 1, 1.0 + terms.die_to_die_share, 1.0)[:, None]
    return by_term


def _unit_mm2(space: ArchitectureSpace) -> tuple[float, float]:
    """Area of one multiplier and of one ALU of a lane, from the difference of two chips."""
    two = np.repeat(chip_records([space.spec.base]), 2)
    for field in ("tensor_cores", "tensor_depth", "vector_cores", "vector_alus_per_lane"):
        two[field] = 1
    two["fp8"] = two["other_cores"] = 0
    two["tensor_width"] = two["vector_lanes"] = (1, 2)
    areas = area_batch(two, AreaTerms(process_nm=space.spec.area_terms.process_nm))
    return float(np.diff(areas["tensor_mm2"])[0]), float(np.diff(areas["vector_mm2"])[0])


@dataclass(frozen=True, eq=False)
class AreaRange:
    """Chips and an area limit, with an interval for the factor of each area term."""

    terms: Array
    """Areas of the chips by term, shape (chips, terms), mm2."""
    fixed_mm2: float
    """The part of the limit that does not depend on the factors."""
    base: Array
    """The other part, by term: areas of the base chip where the limit follows it, else 0."""
    low: Array
    high: Array

    @classmethod
    def of(cls, space: ArchitectureSpace, records: Array, box: Uncertainty) -> AreaRange:
        """Combine the area limit of a space with the intervals of a box."""
        low, high = box.area_range()
        own, limit = terms_mm2(space, records), space.spec.area
        nothing = np.zeros(len(AREA_TERMS))
        if limit is None:
            return cls(own, np.inf, nothing, low, high)
        if not limit.follows_base:
            return cls(own, limit.max_mm2, nothing, low, high)
        base = terms_mm2(space, chip_records([space.spec.base]))[0]
        return cls(own, 0.0, base * (limit.max_mm2 / base.sum()), low, high)

    def _limit(self, factors: Array) -> Array:
        """Compute the area limit at points, each a factor for every term; mm2."""
        limits: Array = self.fixed_mm2 + factors @ self.base
        return limits

    @cached_property
    def _corners(self) -> Array:
        ends = [sorted({a, b}) for a, b in zip(self.low, self.high, strict=True)]
        return np.array(list(product(*ends)))

    @cached_property
    def _edges(self) -> tuple[Array, Array]:
        """The edges of the box: pairs of corners that differ in one factor."""
        corners = self._corners
        differ = (corners[:, None, :] != corners[None, :, :]).sum(axis=2) == 1
        first, second = np.nonzero(np.triu(differ))
        return corners[first], corners[second]

    @cached_property
    def _at_corners(self) -> Array:
        """Areas divided by the limit, at the corners, shape (chips, corners)."""
        quotients: Array = (self.terms @ self._corners.T) / self._limit(self._corners)
        return quotients

    @property
    def fits_somewhere(self) -> Array:
        """Chips that fit with some factors."""
        fits: Array = self._at_corners.min(axis=1) <= _ALMOST
        return fits

    @property
    def fits_always(self) -> Array:
        """Chips that fit with all factors."""
        fits: Array = self._at_corners.max(axis=1) <= _ALMOST
        return fits

    def largest_excess(self, chip: int) -> float:
        """Largest quotient of a chip's area and the limit; 1 for a chip that always fits."""
        return max(1.0, float(self._at_corners[chip].max()))

    def _where_fits(self, chip: int) -> Array:
        """Corners of the part of the box where a chip fits, shape (points, terms)."""
        inside = self._corners[self._at_corners[chip] <= _ALMOST]
        first, second = self._edges
        own = self.terms[chip]
        over = [end @ own - self._limit(end) for end in (first, second)]
        cut = (over[0] > 0) != (over[1] > 0)
        share = over[0][cut] / (over[0][cut] - over[1][cut])
        crossing = first[cut] + share[:, None] * (second[cut] - first[cut])
        return np.concatenate([inside, crossing])

    def excess_where_fits(self, rival: int, chips: Array | None = None) -> Array:
        """Largest quotient of each chip's area and the limit where a rival fits, at least 1.

        The rival has to fit somewhere in the box.
        """
        terms = self.terms if chips is None else self.terms[chips]
        if not np.isfinite(self.fixed_mm2):
            return np.ones(len(terms))
        points = self._where_fits(rival)
        worst = ((terms @ points.T) / self._limit(points)).max(axis=1, initial=1.0)
        return np.where(worst <= _ALMOST, 1.0, worst)

    def excess_against(self, chip: int, rivals: Array) -> Array:
        """Largest quotient of one chip's area and the limit where each rival fits, at least 1.

        Returns the numbers of `excess_where_fits` for one chip and many rivals.
        """
        if not np.isfinite(self.fixed_mm2):
            return np.ones(len(rivals))
        own = self.terms[chip]
        inside = self._at_corners[rivals] <= _ALMOST
        worst = np.where(inside, self._at_corners[chip], 1.0).max(axis=1, initial=1.0)
        first, second = self._edges
        terms = self.terms[rivals]
        limits = self._limit(first), self._limit(second)
        over_first, over_second = terms @ first.T - limits[0], terms @ second.T - limits[1]
        cut = (over_first > 0) != (over_second > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(cut, over_first / (over_first - over_second), 0.0)
        mine = first @ own + share * (second @ own - first @ own)
        there = limits[0] + share * (limits[1] - limits[0])
        crossing = np.where(cut, mine / there, 1.0).max(axis=1, initial=1.0)
        worst = np.maximum(worst, crossing)
        return np.where(worst <= _ALMOST, 1.0, worst)


def widened_space(space: ArchitectureSpace, box: Uncertainty) -> ArchitectureSpace:
    """Return a space with all chips that fit its area limit with some factors of the box.

    The minimum area only keeps a space small, so it is applied at the nominal factors. A selection
    from a space is returned unchanged.
    """
    limit, (low, high) = space.spec.area, box.area_range()
    if limit is None or space.selection is not None or ((low == high).all() and (low == 1.0).all()):
        return space
    factor = float(high.max() / low.min()) if limit.follows_base else float(1.0 / low.min())
    if factor <= 1.0:
        return space
    wide = limit.replace(max_mm2=limit.max_mm2 * factor, min_fraction=limit.min_fraction / factor)
    larger = ArchitectureSpace(space.spec.replace(area=wide))
    more = larger.area_mm2 > limit.max_mm2
    records = np.ascontiguousarray(larger.chips[more])
    fits = AreaRange.of(space, records, box).fits_somewhere
    index = np.union1d(space.index, larger.index[more][fits])
    return ArchitectureSpace(space.spec, index) if len(index) > len(space) else space
