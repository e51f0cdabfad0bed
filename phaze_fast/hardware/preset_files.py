"""Preset files that come with the package: their names, and what they hold as plain data.

Each preset is one YAML file in the folder ``data`` of its package; adding a file adds a preset.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_text
from phaze_fast.errors import InvalidInputError, nearest

__all__ = ["is_file", "preset_names", "read_preset"]

_SUFFIXES = (".yaml", ".yml", ".json")


@cache
def preset_names(kind: str, package: str = __package__) -> tuple[str, ...]:
    """Names of the presets of a kind, such as ``chips``, that come with a package.

    Examples
    --------
    >>> preset_names("energy")
    ('45nm', '7nm')
    """
    folder = resources.files(package) / "data" / kind
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")))


def is_file(name_or_path: str | Path) -> bool:
    """Tell a path from a preset's name.

    Examples
    --------
    >>> is_file("h100"), is_file("mine.yaml")
    (False, True)
    """
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith(_SUFFIXES) or "/" in text


def read_preset(kind: str, what: str, name: str, package: str = __package__) -> Any:
    """Read a preset as plain data.

    Raises
    ------
    InvalidInputError
        Where there is none of that name; `what` is what the message calls it.
    """
    name = name.lower()
    if name not in preset_names(kind, package):
        raise InvalidInputError(
            f"{what}: {name!r} is neither a preset nor a .yaml or .json file; "
            f"{nearest(name, preset_names(kind, package))}"
        )
    file = resources.files(package) / "data" / kind / f"{name}.yaml"
    return parse_text(file.read_text("utf-8"), name)
