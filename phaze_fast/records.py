"""Frozen validated records, read from YAML, JSON or mappings and written back.

`Record` is the base of every specification a user can write. Unknown keys are refused with the
nearest valid name, numbers must be finite, and every fault becomes one line of an
`InvalidInputError` that names the field, the value and what would be accepted.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar, cast, get_args

import numpy as np
from annotated_types import GroupedMetadata
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from phaze_fast.caching import LruCache
from phaze_fast.documents import digest, read_document, to_yaml
from phaze_fast.errors import InvalidInputError, brief, nearest
from phaze_fast.units import parse_quantity


@dataclass(frozen=True)
class Measure(GroupedMetadata):
    """Marks a number with a unit: text such as ``128 MiB`` is accepted in its place."""

    unit: str
    above: float | None = None
    """The number must be larger than this; where this is None, the number must be 0 or more."""
    most: float | None = None
    """The largest number accepted; None where there is no limit."""
    whole: bool = False
    """Whether the number has to be a whole one."""

    def __iter__(self) -> Iterator[object]:
        """Yield the pydantic annotations that this marker consists of."""
        yield BeforeValidator(self._convert)
        finite = None if self.whole else False
        if self.above is None:
            yield Field(ge=0, le=self.most, allow_inf_nan=finite)
        else:
            yield Field(gt=self.above, le=self.most, allow_inf_nan=finite)
        limit = "minimum" if self.above is None else "exclusiveMinimum"
        yield WithJsonSchema(
            {
                "anyOf": [{"type": "number", limit: 0}, {"type": "string"}],
                "description": f"number of {self.unit}, or text with a unit",
            }
        )

    def _convert(self, value: object) -> object:
        try:
            number = parse_quantity(value, self.unit)
        except InvalidInputError as error:
            raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None
        if not self.whole or not math.isfinite(number):
            return number
        if number != int(number):
            text = f"{brief(value)} is not a whole number of {self.unit}"
            raise PydanticCustomError("quantity", "{text}", {"text": text})
        return value if isinstance(value, int) else int(number)


@dataclass(frozen=True)
class Several(GroupedMetadata):
    """Marks a set of values to try, stored as a tuple; a single value is accepted too.

    Values are sorted and duplicates dropped, so that no answer depends on the order of a list.
    """

    order: Callable[[Any], Any] | None = None
    """Key by which values are sorted; None where values compare with each other."""
    least: int = 1
    """The fewest values accepted."""

    def __iter__(self) -> Iterator[object]:
        """Yield the pydantic annotations that this marker consists of."""
        yield BeforeValidator(lambda v: tuple(v) if isinstance(v, list | tuple) else (v,))
        yield Field(min_length=self.least)
        yield AfterValidator(lambda v: tuple(sorted(set(v), key=self.order)))


@dataclass(frozen=True)
class NamedOr(GroupedMetadata):
    """Marks a record that may also be given by a preset's name or as a file."""

    load: Callable[[str], Any] | None = None
    """Reads the record from a name or file; None where the record that owns the field does so."""

    def __iter__(self) -> Iterator[object]:
        """Yield the pydantic annotations that this marker consists of."""
        if (load := self.load) is not None:
            yield BeforeValidator(lambda value: load(value) if isinstance(value, str) else value)
        yield _OrName()


class _OrName:
    """Adds a preset's name to what the JSON Schema of a field accepts."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        named = {"type": "string", "description": "a preset's name, or a .yaml or .json file"}
        return {"anyOf": [handler(core), named]}


Count = Annotated[int, Field(strict=True, ge=1, le=2**31)]
"""A whole number, 1 or more."""

Side = Annotated[int, Field(strict=True, ge=1, le=2**20)]
"""A whole number from 1 to 2^20: several such numbers are multiplied with one another."""

Bytes = Annotated[int, Measure("bytes", most=2**62, whole=True)]
"""Bytes as an integer; accepts text such as '128 MiB'."""

Quantity = Annotated[float, Field(strict=True, ge=0, le=1e24, allow_inf_nan=False)]
"""A finite number, zero or more, with no unit text."""

Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
"""More than 0, at most 1."""

Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
"""From 0 to 1."""

Bandwidth = Annotated[float, Measure("bytes/s", above=0, most=1e24)]
"""Bytes per second; accepts text such as '1.2 TB/s' or '200 Gb/s'."""

Hertz = Annotated[float, Measure("Hz", above=0, most=1e15)]
"""Hertz; accepts text such as '1.05 GHz'."""

Seconds = Annotated[float, Measure("s", most=1e9)]
"""Seconds; accepts text such as '2 us'."""

Watts = Annotated[float, Measure("W", above=0)]
"""Watts; accepts text such as '400 W'."""

SquareMillimetres = Annotated[float, Measure("mm2", above=0)]
"""mm2; accepts text such as '278.83 mm2'."""


K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that cannot change, so that a frozen record is frozen at every level.

    As the type of a field, ``FrozenDict[K, V]`` accepts a plain mapping of K to V.

    Examples
    --------
    >>> hash(FrozenDict(a=1)) == hash(FrozenDict(a=1))
    True
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = handler(dict.__class_getitem__(get_args(source) or (Any, Any)))
        return core_schema.no_info_after_validator_function(cls, plain)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping belongs to a frozen record and cannot change")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = _refuse
    __ior__ = _refuse


class OrderedFrozenDict(FrozenDict[K, V]):
    """A `FrozenDict` whose order matters for equality."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@cache
def _texts_in(module: str) -> dict[tuple[str, str], str]:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # typed at a prompt
        return {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        (node.name, field.target.id): inspect.cleandoc(str(text.value.value))
        for node in classes
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def field_texts(type_: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class, from its source and that of its bases.

    The source is read only where help or a schema shows docstrings: reading that of every record
    takes longer than most commands do.
    """
    texts: dict[str, str] = {}
    for one in reversed(type_.__mro__):
        known = _texts_in(one.__module__)
        texts |= {name: text for (owner, name), text in known.items() if owner == one.__name__}
    return texts


_UNION_TAGS: set[str] = set()  # values of `kind`; filled as record types are defined


class Record(BaseModel):
    """Base of every frozen, validated specification.

    Subclasses list their fields with types from this module. `what` is the noun used in messages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    what: ClassVar[str] = "record"
    __slots__ = ("_hash",)  # not in the dict of fields, so neither copies nor pickles have the hash

    def __hash__(self) -> int:  # stored: hashing nested records is slow, and every cache needs it
        try:
            return cast(int, object.__getattribute__(self, "_hash"))
        except AttributeError:
            values = self.__dict__
            known = hash(tuple(values[name] for name in type(self).model_fields))
            object.__setattr__(self, "_hash", known)
            return known

    def __init__(self, /, **data: Any) -> None:
        # Constructing a record by hand reports faults just as reading a file does.
        try:
            self.__pydantic_validator__.validate_python(data, self_instance=self)
        except ValidationError as error:
            raise InvalidInputError(explain(error, self.what, "")) from None

    # Nested records are validated by pydantic itself, so that a message names the full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        kind = cls.model_fields.get("kind")
        if kind is not None:
            tags = get_args(kind.annotation)
            if len(tags) == 1:  # a field of several values cannot distinguish types
                _UNION_TAGS.update(tags)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        named = handler(core)
        properties = handler.resolve_ref_schema(named).get("properties", {})
        for name, text in field_texts(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return named

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        if isinstance(data, Mapping):
            # NumPy scalars, such as elements of arrays, are accepted as numbers.
            data = {k: v.item() if isinstance(v, np.generic) else v for k, v in data.items()}
            fields = cls.model_fields
            unknown = [key for key in data if key not in fields]
            if unknown:
                key = brief(unknown[0]).strip("'")
                hint = nearest(key, fields)
                raise PydanticCustomError(
                    "unknown_key", "unknown key '{key}'; {hint}", {"key": key, "hint": hint}
                )
            name = data.get("name")
            if isinstance(name, str) and not name.isprintable():
                text = f"name: {brief(name)} is not accepted; expected printable characters"
                raise PydanticCustomError("name", "{text}", {"text": text})
        return data

    @classmethod
    def from_dict(cls, data: object, source: str = "") -> Self:
        """Validate plain data.

        Parameters
        ----------
        data
            A mapping of plain values, as read from YAML or JSON.
        source
            Where the data came from, put in front of every message.

        Raises
        ------
        InvalidInputError
            One line per fault, each naming the field, the value and what is accepted.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidInputError(explain(error, cls.what, source)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a ``.yaml``, ``.yml`` or ``.json`` file."""
        return cls.from_dict(read_document(path), source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the fields that hold their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_json(self) -> str:
        """Return one line of JSON that `from_dict` reads back to an equal record."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_yaml(self) -> str:
        """Return YAML that `from_file` reads back to an equal record."""
        return to_yaml(self.to_dict())

    def replace(self, **changes: object) -> Self:
        """Return a copy with some fields changed, validated again; defaults stay defaults.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> presets.chip("tpuv4").replace(name="mine").name
        'mine'
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).from_dict({**fields, **changes})

    def changed(self, **changes: object) -> Self:
        """Return a copy with some fields set to values that are valid, in a tenth of the time."""
        copy = object.__new__(type(self))
        object.__setattr__(copy, "__dict__", {**self.__dict__, **changes})
        known = self.__pydantic_fields_set__ | changes.keys()
        object.__setattr__(copy, "__pydantic_fields_set__", known)
        object.__setattr__(copy, "__pydantic_extra__", None)
        object.__setattr__(copy, "__pydantic_private__", None)
        return copy

    def digest(self) -> str:
        """Return a hash of the content, the same on every machine."""
        known = _DIGESTS.get(id(self))
        if known is None:  # the entry refers to the record, so that its id is not reused
            known = self, digest([type(self).__name__, self.model_dump(mode="json")])
            _DIGESTS.put(id(self), known)
        return known[1]


T = TypeVar("T")


def changed(record: T, **changes: object) -> T:
    """Copy a frozen dataclass without `__post_init__` with some fields changed.

    This takes a tenth of the time of `dataclasses.replace`.
    """
    copy = object.__new__(type(record))
    values = copy.__dict__
    values.update(record.__dict__)
    count = len(values)
    values.update(changes)
    if len(values) != count:
        raise TypeError(f"{type(record).__name__} has no field {', '.join(changes)}")
    return copy


_DIGESTS: LruCache[int, tuple[object, str]] = LruCache(4096)
"""Hashes of the latest records, by identity: the points of a sweep share their parts."""


# ---- faults, one line each ----------------------------------------------------------------------

_EXPECTED: dict[str, str] = {
    "finite_number": "expected a finite number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "dict_type": "expected a mapping of keys to values",
    "model_type": "expected a mapping of keys to values",
    "model_attributes_type": "expected a mapping of keys to values",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
}
_LIMITS = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


def _fault(error: ErrorDetails) -> str:
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return "is missing and has no default"
    if kind in ("unknown_key", "quantity", "name"):
        return error["msg"][:400]
    if kind in _LIMITS:
        name, sign = _LIMITS[kind]
        return f"{brief(value)} is not accepted; expected a number {sign} {context[name]}"
    if kind in ("literal_error", "enum"):
        accepted = context.get("expected", "").replace("'", "").replace(" or ", ", ").split(", ")
        return f"{brief(value)} is not accepted; {nearest(str(value)[:60], accepted)}"
    if kind == "union_tag_invalid":
        accepted = context["expected_tags"].replace("'", "").split(", ")
        tag = str(context["tag"])[:60]
        return f"{context['discriminator']} {tag!r} is not accepted; {nearest(tag, accepted)}"
    if kind == "union_tag_not_found":
        return f"{context['discriminator']} is missing; it says which kind this is"
    if kind == "value_error":
        return str(context["error"])[:400]
    if kind == "string_too_short":
        return f"{value!r} is not accepted; expected at least {context['min_length']} character"
    if kind in ("too_short", "too_long"):
        sign, limit = ("least", "min_length") if kind == "too_short" else ("most", "max_length")
        return f"{context['actual_length']} entries; expected at {sign} {context[limit]}"
    expected = _EXPECTED.get(kind, error["msg"])
    return f"{brief(value)} is not accepted; {expected}"


_MOST_FAULTS = 8


def explain(error: ValidationError, what: str, source: str) -> str:
    """Return the faults of a record, one line each, at most the first few."""
    prefix = f"{source}: " if source else ""
    lines = []
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "too_short" and any(
            other["loc"][: len(detail["loc"])] == detail["loc"] and other is not detail
            for other in details
        ):
            continue  # the entries of this list are faulty, and each fault has a line of its own
        # Pydantic inserts the tag of a discriminated union, which the file does not have.
        path = ".".join(str(part) for part in detail["loc"] if part not in _UNION_TAGS)
        fault = _fault(detail)
        if detail["type"] in ("value_error", "name") and re.match(r"[a-z_0-9.]+: ", fault):
            # The message of a check across several fields begins with the rest of the path.
            own = not path or fault.startswith((f"{path}.", f"{path}:"))
            inner = fault if own else f"{path}.{fault}"
            lines.append(f"{prefix}{inner}")
        else:
            lines.append(f"{prefix}{path or what}: {fault}")
    lines = list(dict.fromkeys(lines))
    if len(lines) > _MOST_FAULTS:
        kept = _MOST_FAULTS - 1
        lines[kept:] = [f"{prefix}{len(lines) - kept} more faults"]
    return "\n".join(lines)
