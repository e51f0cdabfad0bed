"""Names of flags of training frameworks: data with the version that they were read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from phaze_fast.documents import parse_text
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.records import FrozenDict

__all__ = ["FORMATS", "FlagNames", "flag_names"]

FORMATS = ("megatron", "bridge", "deepspeed", "torchtitan", "maxtext")
"""Formats that plans are exported to and read from."""


@dataclass(frozen=True)
class FlagNames:
    """What a framework calls the parts of a plan."""

    format: str
    """A name of `FORMATS`."""
    title: str
    """What a file of the format is."""
    version: str
    """Of the framework."""
    read_from: tuple[str, ...]
    """Public files that the names were read in."""
    names: Mapping[str, str]
    """Flag or key by what it says."""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=FrozenDict)
    """Other words of the format, by what they say."""

    def __getitem__(self, key: str) -> str:
        return self.names[key]


@cache
def flag_names(name: str) -> FlagNames:
    """Look up what a framework calls the parts of a plan.

    Raises
    ------
    InvalidInputError
        Where there is no such format.

    Examples
    --------
    >>> flag_names("megatron")["tp"]
    '--tensor-model-parallel-size'
    """
    if name not in FORMATS:
        raise InvalidInputError(f"format: {name!r} is not accepted; {nearest(name, FORMATS)}")
    text = (resources.files(__package__) / "data" / f"{name}.yaml").read_text("utf-8")
    data: dict[str, Any] = parse_text(text, f"{name}.yaml")
    known = ("title", "version", "read_from", "names")
    return FlagNames(
        format=name,
        title=data["title"],
        version=data["version"],
        read_from=tuple(data["read_from"]),
        names=FrozenDict(data["names"]),
        tables=FrozenDict({key: data[key] for key in data if key not in known}),
    )
