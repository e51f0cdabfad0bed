"""Options that several commands share: a dataclass of them, written once, as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["with_groups"]


def _expanded(group: type) -> list[inspect.Parameter]:
    """Give the fields of a dataclass as keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: each parameter that is a dataclass becomes its fields.

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
    groups: dict[str, type] = {}
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            groups[parameter.name] = annotation
            parameters += _expanded(annotation)
        else:
            plain = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
            parameters.append(plain)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {}
        for name, group in groups.items():
            known = [field.name for field in fields(group)]
            made[name] = group(**{key: given.pop(key) for key in known if key in given})
        command(**given, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    del run.__wrapped__
    return run
