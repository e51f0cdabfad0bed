"""The description of a space of chips: axes, ties, limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from phaze_fast import _core
from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError, brief, nearest
from phaze_fast.hardware.chip import CHIPS, Accelerator
from phaze_fast.hardware.package import PackageModel
from phaze_fast.hardware.silicon import PUBLISHED_AREA, AreaTerms
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
from phaze_fast.units import GIB, parse_quantity

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class HbmGeneration:
    """One 1,024-bit stack of a generation."""

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
"""Number formats of the products of a step."""
FP8_RATE = 2.0
"""Products in FP8 per product in bf16, as on the H100."""

NAMED_AXES = {"hbm.generation": ("base", *HBM_GENERATIONS), "format": FORMATS}
"""Axes whose values have names, and those names; ``base`` is a stack of the space's base."""


def _stack(base: Accelerator, name: str) -> HbmGeneration:
    """Return bandwidth and capacity of one stack of a generation."""
    if name != "base":
        return HBM_GENERATIONS[name]
    assert base.hbm is not None
    rate = base.hbm.bandwidth_bytes_per_s / base.hbm.stacks
    return HbmGeneration(rate, base.hbm.capacity_bytes // base.hbm.stacks, base.name)


def axis_number(base: Accelerator, field: str, value: Any) -> float:
    """Return the number of a named value in the grid's column: a stack's bytes/s, or 1 for FP8."""
    if field == "hbm.generation":
        return _stack(base, value).bandwidth_bytes_per_s
    if field == "format":
        return float(FORMATS.index(value))
    return float(value)


def with_stacks(base: Accelerator, names: Sequence[Any], chips: Array) -> Array:
    """Return the chips with the capacity and bandwidth of all their stacks."""
    counted = chips.copy()
    for generation in (_stack(base, name) for name in names):
        own = chips["hbm_bytes_per_s"] == generation.bandwidth_bytes_per_s
        counted["hbm_bytes"][own] = chips["hbm_stacks"][own] * generation.capacity_bytes
        counted["hbm_bytes_per_s"][own] *= chips["hbm_stacks"][own]
    return counted


# Field of a chip -> column of the kernels' record.
COLUMNS = {
    "tensor_core.count": "tensor_cores",
    "tensor_core.width": "tensor_width",
    "tensor_core.depth": "tensor_depth",
    "tensor_core.local_buffer_bytes": "tensor_local_bytes",
    "vector_core.count": "vector_cores",
    "vector_core.lanes": "vector_lanes",
    "vector_core.alus_per_lane": "vector_alus_per_lane",
    "vector_core.local_buffer_bytes": "vector_local_bytes",
    "buffer.capacity_bytes": "buffer_bytes",
    "buffer.bytes_per_cycle": "buffer_bytes_per_cycle",
    "buffer.port_bytes_per_cycle": "buffer_port_bytes_per_cycle",
    "hbm.capacity_bytes": "hbm_bytes",
    "hbm.bandwidth_bytes_per_s": "hbm_bytes_per_s",
    "hbm.stacks": "hbm_stacks",
    "clock_hz": "clock_hz",
    "links.count": "links",
    "links.bandwidth_bytes_per_s": "link_bytes_per_s",
    "dies": "dies",
    "hbm.generation": "hbm_bytes_per_s",  # of one stack, until all are counted
    "format": "fp8",
}
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
    """Whether `max_mm2` represents the area of the base chip, so that it grows with the area of a
    term that is varied; else it is a fixed number of mm2."""


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
    base: Annotated[Accelerator, NamedOr()]
    """The chip that supplies every field without an axis; in a file also a preset's name."""
    axes: Annotated[
        dict[str, tuple[float | str, ...]], AfterValidator(OrderedFrozenDict), _AXES_SCHEMA
    ]
    """Values of each field, for example ``tensor_core.width: [8, 16, 32]`` or
    ``buffer.capacity_bytes: [16 MiB, 32 MiB]``; in a file also ``{powers_of_two: [1, 8]}``
    (exponents) or ``{start: 8, stop: 256, step: 8}``. ``links.count`` scales the interconnect's
    bandwidth with the links of a chip; ``hbm.generation`` gives capacity and bandwidth of each of
    ``hbm.stacks``; ``format: [bf16, fp8]`` what a step computes in; ``dies`` what the logic is cut
    into. Values are sorted."""
    ties: Annotated[dict[str, str], AfterValidator(FrozenDict)] = Field(
        default={}, validate_default=True
    )
    """Fields that copy the value of another field, for example vector lanes = array width."""
    area: AreaLimit | None = None
    """Keep chips whose area lies within this range."""
    max_power_w: Watts | None = None
    """Keep chips whose peak power (energy table '7nm') is at most this."""
    above_power: Literal["drop", "slow"] = "drop"
    """What happens to chips above it: they are left out, or run at the highest clock that it allows
    (docs/robust.md); those that leakage and HBM alone take above it are left out in any case."""
    package: PackageModel | None = None
    """Keep chips whose dies fit a reticle and whose dies and stacks fit an interposer."""
    min_hbm_bytes: Bytes = 0
    """Keep chips with at least this much memory."""
    max_hbm_bytes: Bytes | None = None
    """Keep chips with at most this much memory."""

    @field_validator("base", mode="before")
    @classmethod
    def _named_base(cls, value: object) -> object:
        return CHIPS.load(value) if isinstance(value, str) else value

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
        for field, values in self.axes.items():  # a chip with each extreme must be a valid chip
            if field in NAMED_AXES:
                continue
            numbers = [value for value in values if not isinstance(value, str)]
            for value in sorted({min(numbers), max(numbers)}):
                number = int(value) if _is_whole(field) else value
                tried = with_fields(self.base, {field: number}, "axes")
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
        for part in ("hbm", "links"):
            if any(f.startswith(f"{part}.") for f in fields) and getattr(self.base, part) is None:
                raise ValueError(f"axes: {self.base.name} has no {part} to vary")
        for field in ("hbm.capacity_bytes", "hbm.bandwidth_bytes_per_s"):
            if "hbm.generation" in self.axes and field in fields:
                raise ValueError(f"axes.{field}: hbm.generation gives it; expected one of the two")
        if self.max_hbm_bytes is not None and self.max_hbm_bytes < self.min_hbm_bytes:
            raise ValueError(
                f"max_hbm_bytes: {self.max_hbm_bytes} is below min_hbm_bytes, {self.min_hbm_bytes}"
            )

    @property
    def area_terms(self) -> AreaTerms:
        """Terms that the areas of its chips have."""
        return PUBLISHED_AREA if self.area is None else self.area.terms

    @property
    def varies_step(self) -> bool:
        """Whether chips differ in links or number format, not only in rates."""
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
    """Write out a short form of an axis."""
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
    """Read text such as ``32 MiB`` where a field has a unit; everything else as it is."""
    unit = next((u for end, u in _UNITS.items() if field.endswith(end)), None)
    if unit is None or not isinstance(value, str):
        return value
    try:
        number = parse_quantity(value, unit)
    except InvalidInputError as error:
        raise ValueError(f"axes.{field}: {error}") from None
    return int(number) if number.is_integer() else number


_UNITS = {"bandwidth_bytes_per_s": "bytes/s", "_hz": "Hz", "_bytes": "bytes"}


def _named_values(field: str, values: object) -> tuple[str, ...]:
    """Check the values of an axis that has names."""
    names = NAMED_AXES[field]
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(
            f"axes.{field}: {brief(values)} is not accepted; expected a list of some of "
            f"{', '.join(names)}"
        )
    for value in values:
        if value not in names:
            raise ValueError(
                f"axes.{field}: {brief(value)} is not accepted; {nearest(str(value), names)}"
            )
    if len(set(values)) != len(values):
        raise ValueError(f"axes.{field}: a value is given twice")
    return tuple(name for name in names if name in values)


def _axis_values(field: str, values: object) -> tuple[float | str, ...]:
    if field not in COLUMNS:
        raise ValueError(f"axes: unknown field {field[:60]!r}; {nearest(field[:60], COLUMNS)}")
    if field in NAMED_AXES:
        return _named_values(field, values)
    if isinstance(values, Mapping):
        values = _expanded(field, values)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"axes.{field}: {brief(values)} is not accepted; {_FORMS}")
    if len(values) > _MAX_AXIS:
        raise ValueError(f"axes.{field}: more than {_MAX_AXIS} values")
    plain = [v.item() if isinstance(v, np.generic) else _with_unit(field, v) for v in values]
    for value in plain:
        good = _is_number(value) and value > 0
        if not good or (_is_whole(field) and value != int(value)):
            kind = "a whole number >= 1" if _is_whole(field) else "a finite number > 0"
            raise ValueError(f"axes.{field}: {brief(value)} is not accepted; expected {kind}")
    if len(set(plain)) != len(plain):
        raise ValueError(f"axes.{field}: a value is given twice")
    return tuple(sorted(plain))


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
    # These describe the base, not this chip.
    own.update(die_area_mm2=None, power_w=None, sources=(), notes="")
    if base.tuning.fitted:  # this chip was not measured
        own["tuning"] = base.tuning.model_copy(update={"fitted": (), "carried_from": base.name})
    return base.model_copy(update=own)
