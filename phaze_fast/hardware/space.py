"""Takes a grid over chip fields and a filter, gives the chips that pass, as arrays.

A space is described by `SpaceSpec`; `ArchitectureSpace` enumerates it lazily. Points keep the order
of the grid (the last axis varies fastest), so an index means the same chip on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, overload

import numpy as np
from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from phaze_fast import _core
from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.hardware import presets
from phaze_fast.hardware.chip import Accelerator, chip_records
from phaze_fast.hardware.silicon import PUBLISHED_AREA, AreaTerms, energy_table
from phaze_fast.records import FrozenDict, NamedOr, Quantity, Record, SquareMillimetres, Watts
from phaze_fast.units import MIB

__all__ = ["ArchitectureSpace", "AreaLimit", "SpaceChunk", "SpaceSpec"]

Array = np.ndarray[Any, Any]

# Field of a chip -> column of the kernels' record.
_COLUMNS = {
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
}
_COLUMN = {field: list(_core.CHIP_DTYPE.fields or ()).index(c) for field, c in _COLUMNS.items()}
_NO_ENERGY = np.zeros(1, dtype=_core.ENERGY_DTYPE)
_CHUNK = 1 << 16  # grid points enumerated at a time
_MAX_GRID = 1 << 40


_NUMBERS = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1}
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
        "properties": {field: {"anyOf": _AXIS_FORMS} for field in _COLUMNS},
        "additionalProperties": False,
    }
)


class AreaLimit(Record):
    """Which areas a space keeps."""

    what: ClassVar[str] = "area limit"
    max_mm2: SquareMillimetres
    """Largest area kept."""
    min_fraction: Annotated[Quantity, Field(le=1)] = 0.0
    """Smallest area kept, as a fraction of the largest."""
    keep_small_single_core: bool = False
    """Waive the smallest area where a chip has one tensor or one vector core, as PHAZE does."""
    terms: AreaTerms = PUBLISHED_AREA
    """Which terms the area has."""


class SpaceSpec(Record):
    """A grid over any fields of a chip, with ties between fields and limits on area and power.

    Examples
    --------
    >>> spec = SpaceSpec(
    ...     name="two", base=presets.chip("phaze-tpuv4"), axes={"tensor_core.count": (4, 8)}
    ... )
    >>> len(ArchitectureSpace(spec))
    2
    """

    what: ClassVar[str] = "space"
    name: str = Field(min_length=1)
    """What to call it."""
    base: Annotated[Accelerator, NamedOr()]
    """The chip that gives every field which is no axis; in a file also a preset's name."""
    axes: Annotated[dict[str, tuple[float, ...]], AfterValidator(FrozenDict), _AXES_SCHEMA]
    """Values of each field, for example ``tensor_core.width: [8, 16, 32]``; in a file also
    ``{powers_of_two: [1, 8]}`` (exponents) or ``{start: 8, stop: 256, step: 8}``."""
    ties: Annotated[dict[str, str], AfterValidator(FrozenDict)] = Field(
        default={}, validate_default=True
    )
    """Fields that take another field's value, for example vector lanes = array width."""
    area: AreaLimit | None = None
    """Keep chips whose area lies within this."""
    max_power_w: Watts | None = None
    """Keep chips whose peak power (energy table '7nm') is at most this."""

    @field_validator("base", mode="before")
    @classmethod
    def _named_base(cls, value: object) -> object:
        return presets.chip(value) if isinstance(value, str) else value

    @field_validator("axes", mode="before")
    @classmethod
    def _expand_axes(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {field: _axis_values(str(field), values) for field, values in value.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in (*self.axes, *self.ties, *self.ties.values()):
            if field not in _COLUMNS:
                raise ValueError(f"axes: unknown field {field!r}; {nearest(field, _COLUMNS)}")
        for field, source in self.ties.items():
            if field in self.axes or source in self.ties:
                raise ValueError(f"ties.{field}: a tied field can be neither an axis nor a source")
        if any(f.startswith("hbm.") for f in (*self.axes, *self.ties)) and self.base.hbm is None:
            raise ValueError(f"axes: {self.base.name} has no hbm to vary")
        for field, values in self.axes.items():  # a chip with each extreme must be a valid chip
            column = _COLUMNS[field]
            whole = _core.CHIP_DTYPE[column].kind == "i"
            for value in {min(values), max(values)}:
                tried = _with_fields(self.base, {field: int(value) if whole else value}, "axes")
                try:
                    Accelerator.from_dict(tried.model_dump())
                except InvalidInputError as error:
                    raise ValueError(f"axes.{error}") from None
        if self.grid_size > _MAX_GRID:
            raise ValueError(f"axes: a grid of {self.grid_size} points is more than {_MAX_GRID}")
        return self

    @property
    def grid_size(self) -> int:
        """Points of the grid before any filter."""
        return math.prod(len(values) for values in self.axes.values())


def _axis_values(field: str, values: object) -> tuple[float, ...]:
    if isinstance(values, Mapping):
        if set(values) == {"powers_of_two"} and len(list(values["powers_of_two"])) == 2:
            low, high = values["powers_of_two"]
            values = [2**e for e in range(int(low), int(high) + 1)]
        elif set(values) == {"start", "stop", "step"} and values["step"] > 0:
            count = math.floor((values["stop"] - values["start"]) / values["step"] + 1e-9) + 1
            values = [values["start"] + i * values["step"] for i in range(max(count, 0))]
        else:
            raise ValueError(
                f"axes.{field}: {dict(values)!r} is not accepted; expected a list, "
                "{powers_of_two: [first, last]} or {start:, stop:, step:}"
            )
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"axes.{field}: {values!r} is not accepted; expected a list of numbers")
    column = _COLUMNS.get(field)
    whole = column is not None and _core.CHIP_DTYPE[column].kind == "i"
    for value in values:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value <= 0 or (whole and value != int(value)):
            kind = "a whole number >= 1" if whole else "a finite number > 0"
            raise ValueError(f"axes.{field}: {value!r} is not accepted; expected {kind}")
    if len(set(values)) != len(values):
        raise ValueError(f"axes.{field}: a value is given twice")
    return tuple(values)


@dataclass(frozen=True)
class SpaceChunk:
    """Consecutive points of a space."""

    index: Array
    """Position of each point in the unfiltered grid, int64."""
    chips: Array
    """Chip records, dtype ``_core.CHIP_DTYPE``."""
    area_mm2: Array
    """Area of each, with the terms of the space's limit."""


class ArchitectureSpace:
    """The chips of a `SpaceSpec` that pass its filter, in grid order.

    Nothing is enumerated until it is asked for. Slices and selections are spaces again. Two spaces
    with the same content are equal and hash alike.

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
        """Describe a space; `selection`, where given, lists the grid positions it keeps."""
        self.spec = spec
        self._selection = selection

    @classmethod
    def tpuv4_area(cls) -> ArchitectureSpace:
        """Return the space of the PHAZE paper: 29,360 chips no larger than its TPUv4-like chip."""
        base = presets.chip("phaze-tpuv4")
        powers = tuple(float(2**e) for e in range(13))
        sizes = tuple(float(2**e) for e in range(1, 9))
        largest = _core.chip_area_total(chip_records([base]), 0.0, 0.0, 1)
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
                    max_mm2=float(largest[0]), min_fraction=0.3, keep_small_single_core=True
                ),
            )
        )

    @classmethod
    def load(cls, name_or_path: str | Path) -> ArchitectureSpace:
        """Load a space by name (``tpuv4-area``) or from a YAML or JSON file."""
        if str(name_or_path) == "tpuv4-area":
            return cls.tpuv4_area()
        if not str(name_or_path).endswith((".yaml", ".yml", ".json")):
            raise InvalidInputError(
                f"space: {str(name_or_path)!r} is neither a preset nor a .yaml or .json file; "
                f"{nearest(str(name_or_path), ['tpuv4-area'])}"
            )
        return cls(SpaceSpec.from_file(name_or_path))

    # ---- content ----

    @property
    def grid_size(self) -> int:
        """Points of the grid before the filter."""
        return self.spec.grid_size

    def chunks(self, size: int = _CHUNK) -> Iterator[SpaceChunk]:
        """Enumerate the space in pieces of at most `size` grid points; nothing is kept."""
        limit, power = self.spec.area, self.spec.max_power_w
        terms = (PUBLISHED_AREA if limit is None else limit.terms).rates
        if self._selection is not None:
            for start in range(0, len(self._selection), size):
                yield SpaceChunk(*self._grid.pick(self._selection[start : start + size], terms))
            return
        smallest, largest = 0.0, math.inf
        if limit is not None:
            smallest, largest = limit.min_fraction * limit.max_mm2, limit.max_mm2
        waived = limit is not None and limit.keep_small_single_core
        energy = energy_table().to_record() if power is not None else _NO_ENERGY
        for start in range(0, self.grid_size, size):
            stop = min(start + size, self.grid_size)
            rows = self._grid.filter(
                start, stop, terms, (smallest, largest), waived, energy, power or math.inf
            )
            if len(rows[0]):
                yield SpaceChunk(*rows)

    @cached_property
    def _grid(self) -> _core.ChipGrid:
        base, varied = self.spec.base, {*self.spec.axes, *self.spec.ties}
        return _core.ChipGrid(
            base=chip_records([base]),
            axes=[(_COLUMN[field], list(values)) for field, values in self.spec.axes.items()],
            ties=[(_COLUMN[field], _COLUMN[source]) for field, source in self.spec.ties.items()],
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
        if field not in _COLUMNS:
            raise InvalidInputError(f"field: {field!r} is unknown; {nearest(field, _COLUMNS)}")
        values: Array = self.chips[_COLUMNS[field]]
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
            key = key.astype(np.int64) if key.dtype.kind != "b" else key
        picked = np.ascontiguousarray(self.index[key])
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
        row = self._grid.pick(np.array([index], dtype=np.int64), PUBLISHED_AREA.rates)[1][0]
        varied = {
            field: row[_COLUMNS[field]].item() for field in (*self.spec.axes, *self.spec.ties)
        }
        return _with_fields(self.spec.base, varied, f"{self.spec.name}[{index}]")


def _with_fields(base: Accelerator, varied: dict[str, Any], name: str) -> Accelerator:
    """Copy a chip with some fields changed. Values were validated with the space's axes."""
    own: dict[str, Any] = {"name": name}
    parts: dict[str, dict[str, Any]] = {}
    for field, value in varied.items():
        part, _, leaf = field.rpartition(".")
        (parts.setdefault(part, {}) if part else own)[leaf] = value
    for part, changes in parts.items():
        own[part] = getattr(base, part).model_copy(update=changes)
    # These describe the base, not this chip.
    own.update(die_area_mm2=None, power_w=None, sources=(), notes="")
    return base.model_copy(update=own)
