"""Spaces of wafers: a grid over some fields of a wafer, without the points that break a rule."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

import numpy as np
from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from phaze_fast.documents import Presets, digest, read_document
from phaze_fast.hardware.chip import Accelerator
from phaze_fast.records import FrozenDict, NamedOr, OrderedFrozenDict, Record, explain
from phaze_fast.tables import picked
from phaze_fast.units import format_bytes
from phaze_fast.wafer.hardware.wafer import WAFERS, Rule, Wafer, broken_rules, load_wafer

_MAX_GRID = 1_000_000
# Fields that cannot be axes: texts and lists, descriptions of a product, and the chip's HBM, which
# `die.hbm_stacks` determines.
_NO_AXIS = {"name", "sources", "notes", "dead", "reticle_mm", "rates", "tuning", "hbm"}
_NO_AXIS |= {"dead_links", "process_nm", "die_area_mm2", "power_w"}
_ACCEPTED = (
    "accepted: a number of the wafer (columns), of its die (die.width_mm), of the die's chip "
    "(die.chip.tensor_core.count), of off_wafer or of rules (rules.window_mm)"
)
_AXES_SCHEMA = WithJsonSchema(
    {
        "type": "object",
        "additionalProperties": {
            "type": "array",
            "items": {"type": ["number", "string", "boolean", "null"]},
            "minItems": 1,
        },
    }
)


class WaferSpace(Record):
    """A grid over any numbers of a wafer, of its die and of the die's chip, with ties.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> space = WaferSpace(
    ...     name="stacks",
    ...     base=load_wafer("dram-wafer"),
    ...     axes={"die.hbm_stacks": (0, 2, 6)},
    ... )
    >>> wafers, rejected = space.wafers()
    >>> [(wafer.name, wafer.dies) for wafer in wafers][:2]
    [('stacks[0]: hbm_stacks 0', 64), ('stacks[1]: hbm_stacks 2', 40)]
    >>> rejected
    {'area': 1, 'shoreline': 1}
    """

    what: ClassVar[str] = "wafer space"
    name: str = Field(min_length=1)
    """Name of the space."""
    base: Annotated[Wafer, NamedOr(load_wafer)]
    """The wafer that supplies every field without an axis; in a file also a preset's name."""
    axes: Annotated[OrderedFrozenDict[str, tuple[Any, ...]], _AXES_SCHEMA]
    """Values of each field, for example ``die.hbm_stacks: [0, 2, 4]``, sorted; the last axis
    runs fastest."""
    ties: FrozenDict[str, str] = FrozenDict()
    """Fields that copy the value of another field, for example vector cores = tensor cores."""

    @field_validator("axes", mode="before")
    @classmethod
    def _read_axes(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {str(field): _axis_values(str(field), values) for field, values in value.items()}

    @field_validator("ties")
    @classmethod
    def _read_ties(cls, value: dict[str, str]) -> dict[str, str]:
        for field in (*value, *value.values()):
            _reader(field)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field, source in self.ties.items():
            if field in self.axes or source in self.ties:
                raise ValueError(
                    f"ties.{field}: a tied field cannot be an axis too, nor can another tie "
                    "depend on it"
                )
        for field in (*self.axes, *self.ties, *self.ties.values()):
            if field.startswith("off_wafer.") and self.base.off_wafer is None:
                raise ValueError(f"axes: {self.base.name} has no off_wafer to vary")
        for field, source in self.ties.items():
            for value in self.axes.get(source, (_get(self.base, source),)):
                _read(field, value, "ties")
        if self.grid_size > _MAX_GRID:
            raise ValueError(f"axes: a grid of {self.grid_size} points is more than {_MAX_GRID}")
        return self

    def digest(self) -> str:
        """Return a hash of the content; it depends on the order of the axes."""
        return digest([super().digest(), list(self.axes)])

    @property
    def grid_size(self) -> int:
        """Number of grid points before any rule is applied."""
        return math.prod(len(values) for values in self.axes.values())

    def wafers(self) -> tuple[tuple[Wafer, ...], dict[Rule, int]]:
        """Enumerate the grid: the wafers that break no rule, and how many points break each rule.

        A point that breaks two rules counts under both. Wafers are in grid order and cached.

        Raises
        ------
        InvalidInputError
            If a combination of values is not a valid chip, for example a buffer without bandwidth.

        Examples
        --------
        >>> wafers, rejected = load_wafer_space("wafer-space").wafers()
        >>> len(wafers), rejected
        (674, {'area': 502, 'shoreline': 288})
        """
        return self._found[0], dict(self._found[1])

    @property
    def index(self) -> tuple[int, ...]:
        """Grid position of each wafer of `wafers`."""
        return self._found[2]

    @property
    def base_index(self) -> int | None:
        """Position of the base in `wafers`; None if it is not a point of the grid.

        Examples
        --------
        >>> space = load_wafer_space("wafer-space")
        >>> space.wafers()[0][space.base_index].die.hbm_stacks == space.base.die.hbm_stacks
        True
        """
        own = tuple(_get(self.base, field) for field in self.axes)
        if any(_get(self.base, f) != _get(self.base, s) for f, s in self.ties.items()):
            return None
        grid = enumerate(itertools.product(*self.axes.values()))
        place = next((place for place, values in grid if values == own), -1)
        return self.index.index(place) if place in self.index else None

    @cached_property
    def _found(self) -> tuple[tuple[Wafer, ...], dict[Rule, int], tuple[int, ...]]:
        """Wafers that break no rule, number of points by broken rule, and the wafers' positions."""
        found: dict[int, Wafer] = {}
        rejected: Counter[Rule] = Counter()
        for position, wafer in enumerate(self._points()):
            broken = {rule for rule, _ in broken_rules(wafer)}
            rejected.update(sorted(broken))
            if not broken:
                found[position] = wafer
        return tuple(found.values()), dict(rejected), tuple(found)

    def _points(self) -> Iterator[Wafer]:
        """Yield the wafer of each point in grid order, before rules are checked."""
        base = self.base.model_copy(update={"sources": (), "notes": ""})  # these describe the base
        tied = {field: _get(base, source) for field, source in self.ties.items()}
        known: dict[Any, Any] = {}
        for position, values in enumerate(itertools.product(*self.axes.values())):
            varied = dict(zip(self.axes, values, strict=True))
            varied |= {f: varied.get(self.ties[f], value) for f, value in tied.items()}
            name = f"{self.name}[{position}]: {_describe(self.axes, values)}".removesuffix(": ")
            yield _with(base, {"name": name, **varied}, known)


# ---- fields -------------------------------------------------------------------------------------


@cache
def _readers() -> dict[str, TypeAdapter[Any]]:
    """Return every field that can be an axis, with the validator of its values."""
    return dict(_fields_of(Wafer, ""))


def _fields_of(record: type[Record], path: str) -> Iterator[tuple[str, TypeAdapter[Any]]]:
    for name, field in record.model_fields.items():
        if name in _NO_AXIS:
            continue
        kind: Any = field.annotation
        union = get_origin(kind) in (Union, UnionType)
        for part in get_args(kind) if union else (kind,):
            if isinstance(part, type) and issubclass(part, Record):
                yield from _fields_of(part, f"{path}{name}.")
                break
        else:
            extra = tuple(field.metadata)
            yield f"{path}{name}", TypeAdapter(Annotated[kind, *extra] if extra else kind)


def _reader(field: str) -> TypeAdapter[Any]:
    readers = _readers()
    if field not in readers:
        close = get_close_matches(field[:60], readers, n=1, cutoff=0.6)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(f"unknown field {field[:60]!r}; {hint}{_ACCEPTED}")
    return readers[field]


def _read(field: str, value: object, where: str) -> Any:
    try:
        return _reader(field).validate_python(value)
    except ValidationError as error:
        raise ValueError(explain(error, f"{where}.{field}", "").partition("\n")[0]) from None


def _axis_values(field: str, values: object) -> tuple[Any, ...]:
    _reader(field)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"axes.{field}: {str(values)[:80]} is not accepted; expected a list")
    plain = (value.item() if isinstance(value, np.generic) else value for value in values)
    axis_values = tuple(_read(field, value, "axes") for value in plain)
    if len(set(axis_values)) != len(axis_values):
        raise ValueError(f"axes.{field}: a value is given twice")
    return tuple(sorted(axis_values, key=lambda value: (value is not None, value)))


def _get(record: Record, field: str) -> Any:
    value: Any = record
    for part in field.split("."):
        value = getattr(value, part)
    return value


def _with(record: Record, varied: Mapping[str, Any], known: dict[Any, Any], path: str = "") -> Any:
    """Copy a record with some fields changed, nested records included.

    `known` caches nested records, which many points share. A wafer itself is not validated: its
    rules of manufacture are checked later.
    """
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for field, value in varied.items():
        head, _, rest = field.partition(".")
        if rest:
            parts.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    for head, inner in parts.items():
        key = (path, head, *inner.values())
        if key not in known:
            known[key] = _with(getattr(record, head), inner, known, f"{path}{head}.")
        changes[head] = known[key]
    if isinstance(record, Wafer):
        return Wafer.model_construct(**{**picked(record, *Wafer.model_fields), **changes})
    if isinstance(record, Accelerator):
        about = {"die_area_mm2": None, "power_w": None, "sources": (), "notes": ""}  # of the base
        name = f"{record.name}: {_describe(varied, varied.values())}"
        changes = {"name": name, **about, **changes}
    return record.replace(**changes)


# ---- names --------------------------------------------------------------------------------------


def _describe(fields: Iterable[str], values: Iterable[Any]) -> str:
    """Name values by their fields, for example ``hbm_stacks 2, buffer.capacity_bytes 64 MiB``."""
    return ", ".join(
        f"{field.removeprefix('die.').removeprefix('chip.')} {_text(field, value)}"
        for field, value in zip(fields, values, strict=True)
    )


def _text(field: str, value: object) -> str:
    if isinstance(value, int) and field.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


WAFER_SPACES = Presets(
    "wafer space", "phaze_fast.wafer.hardware/data/wafer_spaces", WaferSpace.from_dict
)
"""Spaces of wafers that come with the package."""

load_wafer_space = WAFER_SPACES.load


def load_wafer_or_space(name: str) -> Wafer | WaferSpace:
    """Load a wafer or a space of wafers: a preset, or a file, which is a space if it has axes.

    Examples
    --------
    >>> [type(load_wafer_or_space(name)).__name__ for name in ("dram-wafer", "wafer-space")]
    ['Wafer', 'WaferSpace']
    """
    if name in WAFER_SPACES.names:
        return load_wafer_space(name)
    if name in WAFERS.names or not name.endswith((".yaml", ".yml", ".json")):
        return load_wafer(name)
    data = read_document(name)
    is_space = isinstance(data, dict) and "axes" in data
    return (WaferSpace if is_space else Wafer).from_dict(data, source=name)
