"""Groups of options declared as one parameter: the fields of a record or of a dataclass.

A field and its option have the same name; the option's help, type and default are the field's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError
from phaze_fast.records import Record, field_texts
from phaze_fast.units import format_bytes

_PANELS = {
    "The training step": (
        *("global_batch", "seq", "micro_batch", "micro_batches", "optimizer", "precision"),
        *("software", "fusion", "reserved_bytes"),
    ),
    "Parallel widths and sharding": (
        *("tp", "pp", "dp", "cp", "cp_kind", "ep", "etp", "dispatcher"),
        *("expert_imbalance", "expert_overlap", "overlap_experts", "sequence_parallel"),
        *("zero", "shard", "rank_order", "idle"),
    ),
    "Pipeline and recomputation": (
        *("schedule", "vpp", "stages", "recompute", "recompute_some"),
        *("offload", "offload_optimizer"),
    ),
}
_REQUIRED = inspect.Parameter.empty
_PANEL = {field: title for title, names in _PANELS.items() for field in names}


def _names_of(kind: str) -> Callable[[], list[str]]:
    def names() -> list[str]:
        from phaze_fast import software  # imported only by commands with these options

        return list(getattr(software, f"{kind}_names")())

    return names


_COMPLETIONS = {kind: _names_of(kind) for kind in ("precision", "software")}


def _parameter(name: str, type_: Any, option: Any, default: Any) -> inspect.Parameter:
    """Declare an option for the parser."""
    kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[type_, option]
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _alternatives(annotation: Any) -> list[Any]:
    """List the member types of a union, without None and without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [one for part in get_args(annotation) for one in _alternatives(part)]
    return [] if annotation is NoneType else [annotation]


class _FieldOption:
    """The option of one field of a record: its declaration and its parser."""

    def __init__(self, name: str, field: FieldInfo, text: str, several: bool, default: Any) -> None:
        self.name = name
        self._default = default
        self._help = " ".join(text.replace("`", "").split())
        if default is PydanticUndefined:
            self._default = field.get_default(call_default_factory=True)
        else:  # the help text must not show the default of the record
            self._help = self._help.partition("; by default")[0]
        types = _alternatives(field.annotation)
        tuples = [one for one in types if get_origin(one) is tuple]
        inside = [one for members in tuples for one in _alternatives(get_args(members)[0])]
        self._is_flag = types == [bool]
        self._takes_many = several or bool(inside)
        self._takes_one = not several and len(tuples) < len(types)
        words = inside or types
        self._is_text = all(one is str for one in words)
        self._may_be_file = any(isinstance(one, type) and issubclass(one, Record) for one in words)
        values = [value for one in words if get_origin(one) is Literal for value in get_args(one)]
        numeric = any(one in (int, float) for one in words) or any(
            isinstance(value, int) for value in values
        )
        self._word = "SIZE" if name.endswith("_bytes") else "N" if numeric else "NAME"

    def parameter(self) -> inspect.Parameter:
        """Declare the option for the parser."""
        help_, default = self._help, self._default
        if isinstance(default, Record):
            default = getattr(default, "name", "")
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if self._word == "SIZE" and isinstance(default, int):
            default = format_bytes(default)
        if default not in (None, PydanticUndefined) and "by default" not in help_:
            shown = {True: "yes", False: "no"}[default] if self._is_flag else default
            help_ = f"{help_.rstrip('.')} (default {shown})."
        option = "--" + self.name.replace("_", "-")
        metavar = self._word + (",..." if self._takes_many else "")
        declared = typer.Option(
            f"{option}/--no-{option[2:]}" if self._is_flag else option,
            help=help_,
            metavar=None if self._is_flag else metavar,
            rich_help_panel=_PANEL.get(self.name),
            show_default=False,
            autocompletion=_COMPLETIONS.get(self.name),
        )
        type_: Any = bool if self._is_flag else str
        required = self._default is PydanticUndefined
        return _parameter(self.name, type_ | None, declared, _REQUIRED if required else None)

    def value(self, text: Any) -> Any:
        """Convert the option's text to the type of the field; the record validates the value."""
        if self._is_flag:
            return text
        words = [word.strip() for word in text.split(",")]
        if not (self._may_be_file or self._word == "SIZE"):
            words = [word.lower() for word in words]
        read = [word if self._is_text else _number_or_text(word) for word in words]
        if self._takes_many and (len(read) > 1 or not self._takes_one):
            return tuple(read)
        return read[0] if len(read) == 1 else text


def _number_or_text(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


class RecordOptions:
    """One option for each field of a record, as a group of a command's options.

    A command takes a parameter annotated ``Annotated[dict[str, Any], RecordOptions(...)]`` and gets
    the typed values by field, and the defaults that are set here.

    Parameters
    ----------
    record
        The record; its fields' descriptions become the help.
    skip
        Fields without an option.
    several
        Single-valued fields for which the command accepts several values, as a tuple.
    defaults
        Defaults that differ from those of the record; None where the command itself fills in a
        required field.

    Examples
    --------
    >>> from phaze_fast.planning import Training
    >>> options = RecordOptions(Training, global_batch=512)
    >>> options.values({"tp": "1,2", "optimizer": "SGD", "seq": None})
    {'global_batch': 512, 'optimizer': 'sgd', 'tp': (1, 2)}
    """

    def __init__(
        self,
        record: type[Record],
        skip: tuple[str, ...] = (),
        several: tuple[str, ...] = (),
        **defaults: Any,
    ) -> None:
        self._defaults = defaults
        self._options = {}
        texts = field_texts(record)
        for name, field in record.model_fields.items():
            if name not in skip:
                default = defaults.get(name, PydanticUndefined)
                text, many = texts.get(name, ""), name in several
                self._options[name] = _FieldOption(name, field, text, many, default)

    def parameters(self) -> list[inspect.Parameter]:
        """Declare the options for the parser, grouped by panel."""
        order = list(_PANELS)
        panels = {name: order.index(_PANEL.get(name, order[-1])) for name in self._options}
        return [self._options[name].parameter() for name in sorted(panels, key=lambda n: panels[n])]

    def values(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the typed options to values by field."""
        typed_values = {
            name: option.value(typed[name])
            for name, option in self._options.items()
            if typed.get(name) is not None
        }
        defaults = {name: value for name, value in self._defaults.items() if value is not None}
        return {**defaults, **typed_values}


def _group_parameters(group: type) -> list[inspect.Parameter]:
    """Declare the fields of a dataclass as options; its docstring is the title of their panel.

    The docstring of a field is its help text. A field that is False by default is a flag.
    """
    hints, texts = get_type_hints(group, include_extras=True), field_texts(group)
    parameters = []
    for field in dataclass_fields(group):
        hint = hints[field.name]
        type_, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
        flag = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = copy.copy(marks[0]) if marks else typer.Option(*flag)
        option.help = " ".join(texts.get(field.name, "").split())
        option.rich_help_panel = (group.__doc__ or "").partition("\n")[0].rstrip(".")
        if Path in _alternatives(type_) and option.metavar is None:
            option.metavar = "FILE"
        option.show_default = field.default not in ("", math.inf)
        default = _REQUIRED if field.default is MISSING else field.default
        parameters.append(_parameter(field.name, type_, option, default))
    return parameters


_CALIBRATED = ("chip", "fabric", "software")
"""Options for which a calibration of a cluster has a value."""


def _calibration_option() -> inspect.Parameter:
    """Declare the option that sets chip, interconnect and software at once."""
    option = typer.Option(
        help="Chip, interconnect and software as `study calibrate RUNS.csv` wrote them; the "
        "options of each override it.",
        metavar="FILE",
        rich_help_panel="Calibration",
    )
    return _parameter("calibration", Path | None, option, None)


def _with_calibration(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Add the option to a command that takes software, and make its option for a chip optional."""
    if {"software", "calibration"} & {p.name for p in parameters} != {"software"}:
        return parameters
    for at, chip in enumerate(parameters):
        if chip.name == "chip" and chip.default is _REQUIRED:
            type_, option = get_args(chip.annotation)
            parameters[at] = _parameter("chip", type_ | None, option, None)
    return [*parameters, _calibration_option()]


def _check_calibration(path: Path) -> None:
    """Raise an InvalidInputError for a file that `study calibrate` did not write."""
    try:
        data = read_document(path)
    except InvalidInputError as error:
        raise InvalidInputError(f"--calibration: {error}") from None
    if not isinstance(data, Mapping) or not {"chip", "software"} <= set(data):
        raise InvalidInputError(
            f"--calibration: {path} is not accepted; expected a file that `study calibrate "
            "RUNS.csv --output FILE` wrote"
        )


def _fill_in_calibration(typed: dict[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    """Fill in the options of a command that a calibration has a value for."""
    path = typed.pop("calibration", None)
    if path is not None:
        _check_calibration(path)
    for name in _CALIBRATED:
        if name in known and not typed.get(name) and path is not None:
            typed[name] = str(path)
    required = "chip" in known and known["chip"].default is _REQUIRED
    if required and typed.get("chip") is None:
        raise InvalidInputError("--chip: missing; expected a preset or a file, or --calibration")


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: a dataclass, or the fields of a record.

    A command with an option for the software takes ``--calibration`` too, which stands for the
    options of chip, interconnect and software.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     width: int = 1
    ...     depth: int = 2
    >>> def show(size: Size, name: str = "") -> None:
    ...     print(name, size.width * size.depth)
    >>> with_groups(show)(width=5, name="area")
    area 10
    >>> list(inspect.signature(with_groups(show)).parameters)
    ['width', 'depth', 'name']
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[list[str], Callable[[dict[str, Any]], Any]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        marks = [mark for mark in get_args(annotation) if isinstance(mark, RecordOptions)]
        if marks:
            members, read = marks[0].parameters(), marks[0].values
        elif isinstance(annotation, type) and is_dataclass(annotation):
            members = _group_parameters(annotation)
            read = functools.partial(lambda group, typed: group(**typed), annotation)
        else:
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
            )
            continue
        parameters += members
        groups[parameter.name] = [member.name for member in members], read

    known = {p.name: p for p in parameters}
    parameters = _with_calibration(parameters)
    accepts = len(parameters) > len(known)

    @functools.wraps(command)
    def run(**typed: Any) -> None:
        if accepts:
            _fill_in_calibration(typed, known)
        read_groups = {
            name: read({member: typed.pop(member) for member in members if member in typed})
            for name, (members, read) in groups.items()
        }
        command(**typed, **read_groups)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    del run.__wrapped__
    return run
