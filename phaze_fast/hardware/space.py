"""Spaces of chips: grids over chip fields, and the chips that pass their limits, as arrays.

A space is described by `SpaceSpec`; `ArchitectureSpace` enumerates it lazily. Points keep the
order of the grid (the last axis varies fastest), so an index means the same chip on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, overload

import numpy as np
from pydantic import Field, WithJsonSchema, field_validator, model_validator

from phaze_fast import _core
from phaze_fast.documents import Presets, digest
from phaze_fast.errors import InvalidInputError, InvalidTypeError, brief, nearest, not_accepted
from phaze_fast.hardware.chip import (
    CHIPS,
    FIELD_COLUMNS,
    Accelerator,
    Links,
    chip_records,
    limit_by_dies,
)
from phaze_fast.hardware.package import PackageModel
from phaze_fast.hardware.silicon import (
    EVERY_AREA,
    FULL_AREA,
    PUBLISHED_AREA,
    AreaTerms,
    PowerModel,
    area,
    area_batch,
    energy_table_at,
    power_batch,
)
from phaze_fast.hardware.sustained import SUSTAINED, SustainedRates
from phaze_fast.hardware.tuning import Tuning
from phaze_fast.records import (
    Bytes,
    FrozenDict,
    NamedOr,
    OrderedFrozenDict,
    Quantity,
    Record,
    SquareMillimetres,
    Watts,
)
from phaze_fast.tables import Array
from phaze_fast.units import GIB, MIB, format_bytes, parse_quantity

# ---- the description of a space: axes, ties, limits ----


@dataclass(frozen=True)
class HbmGeneration:
    """One 1,024-bit stack of an HBM generation."""

    bandwidth_bytes_per_s: float
    capacity_bytes: int
    source: str


HBM_GENERATIONS = {
    "hbm2": HbmGeneration(256e9, 8 * GIB, "JEDEC JESD235A: 2.0 Gb/s a pin, 8 dies of 8 Gb"),
    "hbm2e": HbmGeneration(409.6e9, 16 * GIB, "JEDEC JESD235C: 3.2 Gb/s a pin, 8 dies of 16 Gb"),
    "hbm3": HbmGeneration(819.2e9, 16 * GIB, "JEDEC JESD238: 6.4 Gb/s a pin, 8 dies of 16 Gb"),
    "hbm3e": HbmGeneration(1177.6e9, 24 * GIB, "Micron, HBM3E, 2023: 9.2 Gb/s a pin, 8 x 24 Gb"),
}
"""Bandwidth and capacity of one stack, by generation."""

FORMATS = ("bf16", "fp8")
"""Number formats that the products of a training step may have."""
FP8_RATE = 2.0
"""Products in FP8 per product in bf16, as on the H100."""

NAMED_AXES = {"hbm.generation": ("base", *HBM_GENERATIONS), "format": FORMATS}
"""Axes whose values have names, and the names; ``base`` is the HBM stack of the base chip."""


def _stack(base: Accelerator, name: str) -> HbmGeneration:
    """Return bandwidth and capacity of one stack of a generation."""
    if name != "base":
        return HBM_GENERATIONS[name]
    assert base.hbm is not None
    rate = base.hbm.bandwidth_bytes_per_s / base.hbm.stacks
    return HbmGeneration(rate, base.hbm.capacity_bytes // base.hbm.stacks, base.name)


def axis_number(base: Accelerator, field: str, value: Any) -> float:
    """Return a value as the grid's column has it; names as a stack's bytes/s, or 1 for FP8."""
    if field == "hbm.generation":
        return _stack(base, value).bandwidth_bytes_per_s
    if field == "format":
        return float(FORMATS.index(value))
    return float(value)


def with_stacks(base: Accelerator, names: Sequence[Any], chips: Array) -> Array:
    """Multiply HBM capacity and bandwidth of chips by their number of stacks."""
    counted = chips.copy()
    for generation in (_stack(base, name) for name in names):
        own = chips["hbm_bytes_per_s"] == generation.bandwidth_bytes_per_s
        counted["hbm_bytes"][own] = chips["hbm_stacks"][own] * generation.capacity_bytes
        counted["hbm_bytes_per_s"][own] *= chips["hbm_stacks"][own]
    return counted


COLUMNS = {
    **FIELD_COLUMNS,
    "hbm.generation": "hbm_bytes_per_s",  # of one stack; `with_stacks` multiplies it
    "format": "fp8",
}
"""Column of the kernels' record for each axis: a field of a chip, or an axis with names."""
COLUMN_NUMBER = {
    field: list(_core.CHIP_DTYPE.fields or ()).index(c) for field, c in COLUMNS.items()
}
_MAX_GRID = 1 << 40
_MAX_AXIS = 1_000_000
_LARGEST = 1e24


_NUMBER: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
_NUMBERS = {
    "type": "array",
    "items": {"anyOf": [_NUMBER, {"type": "string"}]},  # with a unit, such as 32 MiB
    "minItems": 1,
}
_AXIS_FORMS: list[dict[str, Any]] = [
    _NUMBERS,
    {
        "type": "object",
        "properties": {
            "powers_of_two": {
                "type": "array",
                "items": {"type": "integer"},
                "minItems": 2,
                "maxItems": 2,
            }
        },
        "required": ["powers_of_two"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {name: {"type": "number"} for name in ("start", "stop", "step")},
        "required": ["start", "stop", "step"],
        "additionalProperties": False,
    },
]
_AXES_SCHEMA = WithJsonSchema(
    {
        "type": "object",
        "properties": {
            field: {
                "type": "array",
                "items": {"enum": list(NAMED_AXES[field])},
                "minItems": 1,
            }
            if field in NAMED_AXES
            else {"anyOf": _AXIS_FORMS}
            for field in COLUMNS
        },
        "additionalProperties": False,
    }
)


class AreaLimit(Record):
    """Range of accepted chip areas."""

    what: ClassVar[str] = "area limit"
    max_mm2: SquareMillimetres
    """Largest accepted area."""
    min_fraction: Annotated[Quantity, Field(le=1)] = 0.0
    """Smallest accepted area, as a fraction of the largest."""
    keep_small_single_core: Annotated[bool, Field(strict=True)] = False
    """Waive the smallest area where a chip has one tensor or one vector core, as PHAZE does."""
    terms: AreaTerms = PUBLISHED_AREA
    """Terms of the area."""
    follows_base: Annotated[bool, Field(strict=True)] = False
    """Whether `max_mm2` stands for the area of the base chip, so that the limit changes where the
    area of a term is varied (uncertainty, sensitivity); else the limit is a fixed number."""


class SpaceSpec(Record):
    """A grid over any fields of a chip, with ties between fields and limits on area and power.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> SpaceSpec(
    ...     name="two", base=presets.chip("phaze-tpuv4"), axes={"tensor_core.count": (4, 8)}
    ... ).grid_size
    2
    """

    what: ClassVar[str] = "space"
    name: str = Field(min_length=1)
    """Name of the space."""
    base: Annotated[Accelerator, NamedOr(CHIPS.load)]
    """The chip that supplies every field without an axis; in a file also a preset's name."""
    axes: Annotated[OrderedFrozenDict[str, tuple[float | str, ...]], _AXES_SCHEMA]
    """Values of each field, for example ``tensor_core.width: [8, 16, 32]`` or
    ``buffer.capacity_bytes: [16 MiB, 32 MiB]``; in a file also ``{powers_of_two: [1, 8]}``
    (exponents) or ``{start: 8, stop: 256, step: 8}``. ``links.count`` scales the interconnect's
    bandwidth with the links of a chip; ``hbm.generation`` gives capacity and bandwidth of each of
    ``hbm.stacks``; ``format: [bf16, fp8]`` is the number format of products, ``dies`` the number of
    dies into which the logic is cut. Values are sorted."""
    ties: FrozenDict[str, str] = FrozenDict()
    """Fields that copy the value of another field, for example vector lanes = array width."""
    area: AreaLimit | None = None
    """Keep chips whose area lies within this range."""
    max_power_w: Watts | None = None
    """Keep chips whose peak power (energy table '7nm') is at most this."""
    above_power: Literal["drop", "slow"] = "drop"
    """What happens to chips above `max_power_w`: they are excluded, or run at the highest clock
    within it (docs/robust.md); those above it by leakage, links and HBM alone are excluded."""
    sustained: Annotated[SustainedRates | None, NamedOr(SUSTAINED.load)] = None
    """Shares of their peaks that the chips reach, in a file also a preset's name (tpu); by default
    the full peaks, as in the PHAZE paper. Not accepted for a base with a tuning of its own."""
    package: PackageModel | None = None
    """Keep chips whose dies fit a reticle and whose dies and stacks fit an interposer."""
    min_hbm_bytes: Bytes = 0
    """Keep chips with at least this much memory."""
    max_hbm_bytes: Bytes | None = None
    """Keep chips with at most this much memory."""

    @field_validator("axes", mode="before")
    @classmethod
    def _expand_axes(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {field: _axis_values(str(field), values) for field, values in value.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in (*self.axes, *self.ties, *self.ties.values()):
            if field not in COLUMNS:
                raise ValueError(f"axes: unknown field {field!r}; {nearest(field, COLUMNS)}")
        for field, source in self.ties.items():
            if field in self.axes or source in self.ties:
                raise ValueError(
                    f"ties.{field}: a tied field cannot be an axis too, nor can another tie "
                    "depend on it"
                )
            if field in NAMED_AXES or source in NAMED_AXES:
                raise ValueError(f"ties.{field}: a field with named values takes no part in ties")
            if _is_whole(field) and not _is_whole(source):
                raise ValueError(f"ties.{field}: takes whole numbers, which {source} does not give")
        self._check_parts()
        for field, values in self.axes.items():  # both extremes must give valid chips
            if field in NAMED_AXES:
                continue
            numbers = [value for value in values if not isinstance(value, str)]
            for value in sorted({min(numbers), max(numbers)}):
                number = int(value) if _is_whole(field) else value
                tried = with_fields(self.base, {field: number}, "axes")
                if tried.repeats_shape:  # such points are left out of the grid
                    continue
                try:
                    Accelerator.from_dict(tried.model_dump())
                except InvalidInputError as error:
                    raise ValueError(f"axes.{error}") from None
        if self.grid_size > _MAX_GRID:
            raise ValueError(f"axes: a grid of {self.grid_size} points is more than {_MAX_GRID}")
        return self

    def _check_parts(self) -> None:
        """Refuse axes over parts that the base lacks, or over fields that another axis sets."""
        fields = (*self.axes, *self.ties)
        for part in ("hbm", "links", "other_tensor_core"):
            if any(f.startswith(f"{part}.") for f in fields) and getattr(self.base, part) is None:
                raise ValueError(f"axes: {self.base.name} has no {part} to vary")
        if self.sustained is not None and self.base.tuning != Tuning():
            raise ValueError(
                f"sustained: {self.sustained.name} is not accepted; {self.base.name} has rates of "
                "its own"
            )
        for field in ("hbm.capacity_bytes", "hbm.bandwidth_bytes_per_s"):
            if "hbm.generation" in self.axes and field in fields:
                raise ValueError(f"axes.{field}: hbm.generation gives it; expected one of the two")
        if self.max_hbm_bytes is not None and self.max_hbm_bytes < self.min_hbm_bytes:
            raise ValueError(
                f"max_hbm_bytes: {self.max_hbm_bytes} is below min_hbm_bytes, {self.min_hbm_bytes}"
            )

    @property
    def like(self) -> Accelerator:
        """The base chip with the sustained rates of the space, which all its chips have."""
        return self.base if self.sustained is None else self.sustained.applied(self.base)

    @property
    def area_terms(self) -> AreaTerms:
        """Area terms that are counted for the chips of the space."""
        return PUBLISHED_AREA if self.area is None else self.area.terms

    @property
    def varies_step(self) -> bool:
        """Whether the interconnect's bandwidth or the number format of a step varies over chips."""
        return bool({"links.count", "links.bandwidth_bytes_per_s", "format"} & set(self.axes))

    def digest(self) -> str:
        """Return a hash of the content; it depends on the order of the axes."""
        return digest([super().digest(), list(self.axes)])

    @property
    def grid_size(self) -> int:
        """Points of the grid before any filter."""
        return math.prod(len(values) for values in self.axes.values())


def _is_whole(field: str) -> bool:
    return _core.CHIP_DTYPE[COLUMNS[field]].kind == "i"


def _is_number(value: object) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


_FORMS = "expected a list of numbers, {powers_of_two: [first, last]} or {start:, stop:, step:}"


def _expanded(field: str, form: Mapping[Any, Any]) -> list[float]:
    """Expand a short form of an axis to its values."""
    refused = ValueError(f"axes.{field}: {brief(dict(form))} is not accepted; {_FORMS}")
    if set(form) == {"powers_of_two"}:
        ends = form["powers_of_two"]
        if not isinstance(ends, list | tuple) or len(ends) != 2:
            raise refused
        if not all(isinstance(e, int) and not isinstance(e, bool) and 0 <= e <= 62 for e in ends):
            raise ValueError(f"axes.{field}.powers_of_two: expected whole numbers from 0 to 62")
        return [2**e for e in range(ends[0], ends[1] + 1)]
    if set(form) == {"start", "stop", "step"}:
        start, stop, step = (form[name] for name in ("start", "stop", "step"))
        if not all(map(_is_number, (start, stop, step))) or step <= 0:
            raise refused
        count = (stop - start) / step + 1e-9
        if count > _MAX_AXIS:
            raise ValueError(f"axes.{field}: more than {_MAX_AXIS} values")
        return [start + i * step for i in range(max(math.floor(count) + 1, 0))]
    raise refused


def _with_unit(field: str, value: Any) -> Any:
    """Convert text such as ``32 MiB`` where a field has a unit; return other values unchanged."""
    unit = next((u for end, u in _UNITS.items() if field.endswith(end)), None)
    if unit is None or not isinstance(value, str):
        return value
    try:
        number = parse_quantity(value, unit)
    except InvalidInputError as error:
        raise ValueError(f"axes.{field}: {error}") from None
    return int(number) if number.is_integer() else number


_UNITS = {"bandwidth_bytes_per_s": "bytes/s", "_hz": "Hz", "_bytes": "bytes"}


def _axis_values(field: str, values: object) -> tuple[float | str, ...]:
    """Check and expand the values of an axis: numbers, or names for axes with names."""
    if field not in COLUMNS:
        raise ValueError(f"axes: unknown field {field[:60]!r}; {nearest(field[:60], COLUMNS)}")
    names, forms = NAMED_AXES.get(field), _FORMS
    if names is not None:
        forms = f"expected a list of some of {', '.join(names)}"
    elif isinstance(values, Mapping):
        values = _expanded(field, values)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"axes.{field}: {brief(values)} is not accepted; {forms}")
    if len(values) > _MAX_AXIS:
        raise ValueError(f"axes.{field}: more than {_MAX_AXIS} values")
    plain = [v.item() if isinstance(v, np.generic) else _with_unit(field, v) for v in values]
    for value in plain:
        if names is not None:
            expected = "" if value in names else nearest(str(value), names)
        elif _is_whole(field):
            good = _is_number(value) and value > 0 and value == int(value)
            expected = "" if good else "expected a whole number >= 1"
        else:
            good = _is_number(value) and value > 0
            expected = "" if good else "expected a finite number > 0"
        if expected:
            raise ValueError(f"axes.{field}: {brief(value)} is not accepted; {expected}")
    if len(set(plain)) != len(plain):
        raise ValueError(f"axes.{field}: a value is given twice")
    return tuple(sorted(plain, key=None if names is None else list(names).index))


def with_fields(base: Accelerator, varied: dict[str, Any], name: str) -> Accelerator:
    """Copy a chip with some fields changed. Values were validated with the space's axes."""
    own: dict[str, Any] = {"name": name}
    parts: dict[str, dict[str, Any]] = {}
    for field, value in varied.items():
        if field == "format":
            rates: dict[Any, float] = dict(base.tensor_core.rates)
            rates.pop("fp8", None)
            rates |= {"fp8": FP8_RATE} if value else {}
            parts.setdefault("tensor_core", {})["rates"] = FrozenDict(rates)
            continue
        part, _, leaf = field.rpartition(".")
        (parts.setdefault(part, {}) if part else own)[leaf] = value
    for part, changes in parts.items():
        own[part] = getattr(base, part).model_copy(update=changes)
    if own.get("dies", base.dies) == 1:
        own["die_to_die"] = None
    # These fields describe the base chip only.
    own.update(die_area_mm2=None, power_w=None, sources=(), notes="")
    if base.tuning.fitted:  # constants were fitted on the base chip, not on this one
        own["tuning"] = base.tuning.model_copy(update={"fitted": (), "carried_from": base.name})
    return base.model_copy(update=own)


# ---- its chips ----


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
        """Return the points selected by a mask."""
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
        """Return the published grid with network and HBM PHYs counted, and ports of 64 to 512 B.

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

        Cores and buffer vary as published; chips have 2 to 6 stacks of HBM2e or HBM3, 6 or 12 links
        and one or two dies. A chip may be as large as the TPUv4-like one with every term and six
        links of 50 GB/s, and draw as much power; a chip that would draw more has a lower clock.
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
        """Grid positions of the points of a part of a space; None for a whole space."""
        return self._selection

    # ---- content ----

    @property
    def grid_size(self) -> int:
        """Points of the grid before the filter."""
        return self.spec.grid_size

    def chunks(self, size: int = _CHUNK) -> Iterator[SpaceChunk]:
        """Enumerate the space in chunks of at most `size` grid points, without caching."""
        if size < 1:
            raise not_accepted("size", size, "a number >= 1")
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
        """Whether power is limited after the grid filter, which ignores stacks and clocks."""
        slow = self.spec.above_power == "slow"
        return self.spec.max_power_w is not None and (slow or "hbm.generation" in self.spec.axes)

    def _limited(self, chunk: SpaceChunk) -> SpaceChunk:
        """Multiply HBM by stacks, lower clocks, and apply limits that the grid filter ignores."""
        spec = self.spec
        if not len(chunk.index):
            return chunk
        if "hbm.generation" in spec.axes:
            chips = with_stacks(spec.base, spec.axes["hbm.generation"], chunk.chips)
            chunk = replace(chunk, chips=chips)
        if spec.max_power_w is not None and self._late_power:
            chunk = self._within_power(chunk, spec.max_power_w)
        if spec.base.die_to_die is not None:
            chips = chunk.chips.copy()
            limit_by_dies(chips, spec.base.die_to_die)
            chunk = replace(chunk, chips=chips)
        if spec.min_hbm_bytes or spec.max_hbm_bytes is not None:
            size = chunk.chips["hbm_bytes"]
            most = np.inf if spec.max_hbm_bytes is None else spec.max_hbm_bytes
            chunk = chunk.where((size >= spec.min_hbm_bytes) & (size <= most))
        if spec.package is not None:
            dies, stacks = chunk.chips["dies"], chunk.chips["hbm_stacks"]
            chunk = chunk.where(spec.package.fits(chunk.area_mm2, dies, stacks))
        return chunk

    def _within_power(self, chunk: SpaceChunk, max_w: float) -> SpaceChunk:
        """Drop chips above a power cap, or lower their clocks to meet it."""
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
        """Return in one line which limit of an empty space excludes all chips, and by how much."""
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
            least_w = PowerModel().watts(free.chips, 0.0, terms=spec.area_terms)
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
            base=chip_records([base.model_copy(update={"die_to_die": None})]),
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
        """Hash of the space's content, the same on every machine."""
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
        return with_fields(self.spec.like, varied, f"{self.spec.name}[{index}]")


_MAKERS = {
    "tpuv4-area": ArchitectureSpace.tpuv4_area,
    "published": ArchitectureSpace.published,
    "full-area": ArchitectureSpace.full_area,
    "every-term": ArchitectureSpace.every_term,
}


class _SpacePresets(Presets[SpaceSpec]):
    """Spaces by name; built in code, since area limits depend on the base chip's area."""

    names = tuple(_MAKERS)

    def preset(self, name: str) -> SpaceSpec:
        self.check(name)
        return _MAKERS[name]().spec


_SPACES = _SpacePresets("space", "", SpaceSpec.from_dict)
