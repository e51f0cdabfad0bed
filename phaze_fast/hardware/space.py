"""The chips of a grid over chip fields that pass its limits, as arrays.

A space is described by `SpaceSpec`; `ArchitectureSpace` enumerates it lazily. Points keep the
order of the grid (the last axis varies fastest), so an index means the same chip on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from phaze_fast import _core
from phaze_fast.documents import Presets, digest
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.hardware.chip import CHIPS, Accelerator, Links, chip_records
from phaze_fast.hardware.package import PackageModel
from phaze_fast.hardware.silicon import (
    EVERY_AREA,
    FULL_AREA,
    PUBLISHED_AREA,
    PowerModel,
    area,
    area_batch,
    energy_table_at,
    power_batch,
)
from phaze_fast.hardware.space_spec import (
    COLUMN_NUMBER,
    COLUMNS,
    AreaLimit,
    SpaceSpec,
    axis_number,
    with_fields,
    with_stacks,
)
from phaze_fast.units import GIB, MIB, format_bytes

Array = np.ndarray[Any, Any]


_NO_ENERGY = np.zeros(1, dtype=_core.ENERGY_DTYPE)
_CHUNK = 1 << 16  # grid points enumerated at a time


@dataclass(frozen=True)
class SpaceChunk:
    """Consecutive points of a space."""

    index: Array
    """Position of each point in the unfiltered grid, int64."""
    chips: Array
    """Chip records, dtype ``_core.CHIP_DTYPE``."""
    area_mm2: Array
    """Area of each chip, with the terms of the space's area limit."""

    def where(self, keep: Array) -> SpaceChunk:
        """Return the points that a mask keeps."""
        if keep.all():
            return self
        chips = np.ascontiguousarray(self.chips[keep])
        return SpaceChunk(self.index[keep], chips, self.area_mm2[keep])


class ArchitectureSpace:
    """The chips of a `SpaceSpec` that pass its filter, in grid order.

    Points are enumerated lazily. Slices and selections are spaces too. Two spaces with the same
    content are equal and have the same hash.

    Examples
    --------
    >>> space = ArchitectureSpace.tpuv4_area()
    >>> len(space)
    29360
    >>> round(float(space.area_mm2.max()), 2)
    278.83
    >>> len(space[:100]), space[0].name
    (100, 'phaze-tpuv4-area[0]')
    """

    def __init__(self, spec: SpaceSpec, selection: Array | None = None) -> None:
        """Create a space; `selection`, if given, lists its grid positions."""
        self.spec = spec
        self._selection = selection

    @classmethod
    def tpuv4_area(cls) -> ArchitectureSpace:
        """Return the space of the PHAZE paper: 29,360 chips no larger than its TPUv4-like chip."""
        base = CHIPS.load("phaze-tpuv4")
        powers = tuple(float(2**e) for e in range(13))
        sizes = tuple(float(2**e) for e in range(1, 9))
        largest = _core.chip_area_total(chip_records([base]), PUBLISHED_AREA.rates, 1)
        return cls(
            SpaceSpec(
                name="phaze-tpuv4-area",
                base=base,
                axes={
                    "tensor_core.count": powers,
                    "vector_core.count": powers,
                    "tensor_core.width": sizes,
                    "tensor_core.depth": sizes,
                    "buffer.capacity_bytes": tuple(float(2**e * MIB) for e in range(1, 8)),
                },
                ties={"vector_core.lanes": "tensor_core.width"},
                area=AreaLimit(
                    max_mm2=float(largest[0]),
                    min_fraction=0.3,
                    keep_small_single_core=True,
                    follows_base=True,
                ),
            )
        )

    @classmethod
    def published(cls) -> ArchitectureSpace:
        """Return what the PHAZE paper searches: its chips, each with 32, 64 and 80 GiB of HBM."""
        spec = cls.tpuv4_area().spec
        capacities = tuple(float(size * GIB) for size in (32, 64, 80))
        axes = {**spec.axes, "hbm.capacity_bytes": capacities}
        return cls(spec.replace(name="phaze-published", axes=axes))

    @classmethod
    def full_area(cls) -> ArchitectureSpace:
        """Return the published grid with every area counted, and ports of 64 to 512 bytes.

        The published formula leaves out the network between cores and buffer and the HBM PHYs, and
        a search exploits missing costs. Here a chip may be as large as the TPUv4-like one with
        both, 380.39 mm2, and the bytes per cycle of a core's port are an axis as well.
        """
        spec = cls.published().spec
        largest = area(spec.base, FULL_AREA).total_mm2
        axes = {**spec.axes, "buffer.port_bytes_per_cycle": (64.0, 128.0, 256.0, 512.0)}
        limit = AreaLimit(
            max_mm2=largest,
            min_fraction=0.3,
            keep_small_single_core=True,
            terms=FULL_AREA,
            follows_base=True,
        )
        return cls(spec.replace(name="phaze-full-area", axes=axes, area=limit))

    @classmethod
    def every_term(cls) -> ArchitectureSpace:
        """Return a space with all costs: every area term, a package, a power cap, more axes.

        Cores and buffer as published, with HBM2e or HBM3 in 2 to 6 stacks, 6 or 12 links and one
        or two dies. A chip may be as large as the TPUv4-like one is with every term and six links
        of 50 GB/s, and draw as many watts as that one does; above that its clock is lowered.
        """
        spec = cls.tpuv4_area().spec
        links = Links(count=6, bandwidth_bytes_per_s=50e9)
        base = spec.base.replace(name="phaze-tpuv4-links", links=links)
        axes: dict[str, Any] = {
            **spec.axes,
            "hbm.generation": ("hbm2e", "hbm3"),
            "hbm.stacks": (2.0, 4.0, 6.0),
            "links.count": (6.0, 12.0),
            "dies": (1.0, 2.0),
        }
        limit = AreaLimit(
            max_mm2=area(base, EVERY_AREA).total_mm2,
            min_fraction=0.3,
            terms=EVERY_AREA,
            follows_base=True,
        )
        watts = float(power_batch([base], terms=EVERY_AREA)[0])
        return cls(
            SpaceSpec(
                name="phaze-every-term",
                base=base,
                axes=axes,
                ties=dict(spec.ties),
                area=limit,
                max_power_w=watts,
                above_power="slow",
                package=PackageModel(),
            )
        )

    @classmethod
    def load(cls, name_or_path: str | Path) -> ArchitectureSpace:
        """Load ``published``, ``full-area``, ``every-term`` or ``tpuv4-area``, or a file."""
        return cls(_SPACES.load(name_or_path))

    @property
    def selection(self) -> Array | None:
        """Grid positions of its points, if it is a part of a space."""
        return self._selection

    # ---- content ----

    @property
    def grid_size(self) -> int:
        """Points of the grid before the filter."""
        return self.spec.grid_size

    def chunks(self, size: int = _CHUNK) -> Iterator[SpaceChunk]:
        """Enumerate the space in chunks of at most `size` grid points, without caching."""
        if size < 1:
            raise InvalidInputError(f"size: {size} is not accepted; expected a number >= 1")
        limit, terms = self.spec.area, self.spec.area_terms
        if self._selection is not None:
            for start in range(0, len(self._selection), size):
                picked = self._grid.pick(self._selection[start : start + size], terms.rates)
                yield self._limited(SpaceChunk(*picked))
            return
        smallest, largest = 0.0, math.inf
        if limit is not None:
            smallest, largest = limit.min_fraction * limit.max_mm2, limit.max_mm2
        waived = limit is not None and limit.keep_small_single_core
        power = None if self._late_power else self.spec.max_power_w
        energy = _NO_ENERGY if power is None else energy_table_at(terms.process_nm).to_record()
        for start in range(0, self.grid_size, size):
            stop = min(start + size, self.grid_size)
            rows = self._grid.filter(
                start, stop, terms.rates, (smallest, largest), waived, energy, power or math.inf
            )
            chunk = self._limited(SpaceChunk(*rows))
            if len(chunk.index):
                yield chunk

    @property
    def _late_power(self) -> bool:
        """Whether power is limited after the grid's filter, which ignores stacks and clocks."""
        slow = self.spec.above_power == "slow"
        return self.spec.max_power_w is not None and (slow or "hbm.generation" in self.spec.axes)

    def _limited(self, chunk: SpaceChunk) -> SpaceChunk:
        """Count stacks, lower clocks and apply the limits that the grid's filter ignores."""
        spec = self.spec
        if not len(chunk.index):
            return chunk
        if "hbm.generation" in spec.axes:
            chips = with_stacks(spec.base, spec.axes["hbm.generation"], chunk.chips)
            chunk = replace(chunk, chips=chips)
        if spec.max_power_w is not None and self._late_power:
            chunk = self._within_power(chunk, spec.max_power_w)
        if spec.min_hbm_bytes or spec.max_hbm_bytes is not None:
            size = chunk.chips["hbm_bytes"]
            most = np.inf if spec.max_hbm_bytes is None else spec.max_hbm_bytes
            chunk = chunk.where((size >= spec.min_hbm_bytes) & (size <= most))
        if spec.package is not None:
            dies, stacks = chunk.chips["dies"], chunk.chips["hbm_stacks"]
            chunk = chunk.where(spec.package.fits(chunk.area_mm2, dies, stacks))
        return chunk

    def _within_power(self, chunk: SpaceChunk, max_w: float) -> SpaceChunk:
        """Drop chips that would draw more than a cap, or lower their clocks until they do not."""
        terms = self.spec.area_terms
        if self.spec.above_power == "drop":
            return chunk.where(power_batch(chunk.chips, terms=terms) <= max_w)
        shares = PowerModel().clock_shares(chunk.chips, max_w, terms=terms)
        runs = np.isfinite(shares)
        slowed = chunk.where(runs)
        chips = slowed.chips.copy()
        chips["clock_hz"] = chips["clock_hz"] * shares[runs]
        return replace(slowed, chips=chips)

    def why_empty(self) -> str:
        """Return in one line which limit of an empty space leaves no chip, and what would fit."""
        spec = self.spec

        def without(**changes: Any) -> ArchitectureSpace:
            return ArchitectureSpace(spec.replace(**changes))

        if spec.package is not None and len(free := without(package=None)):
            small = int(np.argmin(free.area_mm2))
            chip = free.chips[small]
            reason = spec.package.complaint(
                float(free.area_mm2[small]), int(chip["dies"]), int(chip["hbm_stacks"])
            )
            return f"{spec.name}: no package holds any of its chips; of the smallest, {reason}"
        if spec.max_power_w is not None and len(free := without(max_power_w=None)):
            least_w = PowerModel().idle_w(free.chips, terms=spec.area_terms)
            consumer = "leakage, links and HBM alone"
            if spec.above_power == "drop":
                least_w, consumer = (
                    power_batch(free.chips, terms=spec.area_terms),
                    "a chip at its peak",
                )
            return (
                f"{spec.name}: max_power_w {spec.max_power_w:g} W leaves no chip; {consumer} take "
                f"{float(least_w.min()):.1f} W at least"
            )
        if spec.area is not None and len(free := without(area=None)):
            areas = area_batch(free.chips, spec.area_terms)["total_mm2"]
            return (
                f"{spec.name}: area.max_mm2 {spec.area.max_mm2:g} leaves no chip; areas of its "
                f"grid are {float(areas.min()):.1f} to {float(areas.max()):.1f} mm2"
            )
        if len(free := without(min_hbm_bytes=0, max_hbm_bytes=None)):
            sizes = free.chips["hbm_bytes"]
            return (
                f"{spec.name}: min_hbm_bytes and max_hbm_bytes leave no chip; memories are "
                f"{format_bytes(int(sizes.min()))} to {format_bytes(int(sizes.max()))}"
            )
        return f"{spec.name}: there is no chip in it, or none that passes its limits"

    @cached_property
    def _grid(self) -> _core.ChipGrid:
        base, varied = self.spec.base, {*self.spec.axes, *self.spec.ties}
        return _core.ChipGrid(
            base=chip_records([base]),
            axes=[
                (COLUMN_NUMBER[field], [axis_number(base, field, value) for value in values])
                for field, values in self.spec.axes.items()
            ],
            ties=[
                (COLUMN_NUMBER[field], COLUMN_NUMBER[source])
                for field, source in self.spec.ties.items()
            ],
            # Local buffers follow their cores unless the space or its base sets them.
            derive_tensor_local=base.tensor_core.local_buffer_bytes is None
            and "tensor_core.local_buffer_bytes" not in varied,
            derive_vector_local=base.vector_core.local_buffer_bytes is None
            and "vector_core.local_buffer_bytes" not in varied,
        )

    @cached_property
    def _all(self) -> SpaceChunk:
        parts = list(self.chunks())
        if not parts:
            nothing = np.zeros(0, dtype=np.int64)
            return SpaceChunk(*self._grid.pick(nothing, PUBLISHED_AREA.rates))
        index, chips, area_mm2 = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("index", "chips", "area_mm2")
        )
        for column in (index, chips, area_mm2):
            column.setflags(write=False)
        return SpaceChunk(index, chips, area_mm2)

    @property
    def index(self) -> Array:
        """Grid position of each point, int64, read-only."""
        return self._all.index

    @property
    def chips(self) -> Array:
        """Chip records of every point, dtype ``_core.CHIP_DTYPE``, read-only."""
        return self._all.chips

    @property
    def area_mm2(self) -> Array:
        """Area of every point in mm2, read-only."""
        return self._all.area_mm2

    def column(self, field: str) -> Array:
        """Values of one chip field at every point, for example ``tensor_core.width``."""
        if field not in COLUMNS:
            raise InvalidInputError(f"field: {field!r} is unknown; {nearest(field, COLUMNS)}")
        values: Array = self.chips[COLUMNS[field]]
        return values

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Accelerator]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, key: int) -> Accelerator: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | Array) -> ArchitectureSpace: ...
    def __getitem__(self, key: Any) -> Accelerator | ArchitectureSpace:
        """Return one chip for an integer, a sub-space for a slice, mask or list of positions."""
        if isinstance(key, int | np.integer):
            return self._chip(int(self.index[key]))
        if not isinstance(key, slice):
            key = np.asarray(key)
            if key.size and key.dtype.kind not in "iub":
                raise InvalidTypeError(
                    f"index: dtype {key.dtype} is not accepted; expected integers or a mask"
                )
            if key.ndim != 1:
                raise InvalidInputError(
                    f"index: {key.ndim} dimensions are not accepted; expected 1"
                )
            if key.dtype.kind != "b":
                if key.size and int(key.max()) >= len(self):
                    raise IndexError(f"index: {int(key.max())} is beyond {len(self)} chips")
                key = key.astype(np.int64)
        picked = np.ascontiguousarray(self.index[key])
        if np.array_equal(picked, self.index):
            return self  # all points in order: the same space
        if len(np.unique(picked)) != len(picked):
            raise InvalidInputError("index: a position is given twice; a space holds a chip once")
        picked.setflags(write=False)
        return ArchitectureSpace(self.spec, picked)

    # ---- identity ----

    @cached_property
    def digest(self) -> str:
        """Hash of the content, the same on every machine."""
        chosen = None if self._selection is None else digest(self._selection.tolist())
        return digest([self.spec.digest(), chosen])

    def __reduce__(self) -> tuple[type[ArchitectureSpace], tuple[SpaceSpec, Array | None]]:
        return ArchitectureSpace, (self.spec, self._selection)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArchitectureSpace) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        chosen = "" if self._selection is None else f", {len(self._selection)} selected"
        return f"ArchitectureSpace({self.spec.name!r}, grid of {self.grid_size}{chosen})"

    def _chip(self, index: int) -> Accelerator:
        picked = self._grid.pick(np.array([index], dtype=np.int64), PUBLISHED_AREA.rates)
        row = self._limited(SpaceChunk(*picked)).chips[0]
        varied = {field: row[COLUMNS[field]].item() for field in (*self.spec.axes, *self.spec.ties)}
        if varied.pop("hbm.generation", None) is not None:
            varied["hbm.capacity_bytes"] = row["hbm_bytes"].item()
            varied["hbm.bandwidth_bytes_per_s"] = row["hbm_bytes_per_s"].item()
        if self.spec.above_power == "slow":
            varied["clock_hz"] = row["clock_hz"].item()
        return with_fields(self.spec.base, varied, f"{self.spec.name}[{index}]")


_MAKERS = {
    "tpuv4-area": ArchitectureSpace.tpuv4_area,
    "published": ArchitectureSpace.published,
    "full-area": ArchitectureSpace.full_area,
    "every-term": ArchitectureSpace.every_term,
}


class _SpacePresets(Presets[SpaceSpec]):
    """Spaces by name; their limits follow from the base chip's area, so code makes them."""

    names = tuple(_MAKERS)

    def preset(self, name: str) -> SpaceSpec:
        self.check(name)
        return _MAKERS[name]().spec


_SPACES = _SpacePresets("space", "", SpaceSpec.from_dict)
