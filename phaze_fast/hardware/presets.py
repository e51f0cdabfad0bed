"""Takes a name or a file, gives a chip, a fabric or a cluster with its sources.

Each preset is one YAML file in ``hardware/data``; adding a file adds a preset.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_text, read_document
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware.chip import Accelerator
from phaze_fast.hardware.fabric import (
    FlatFabric,
    MeshFabric,
    TieredFabric,
    TorusFabric,
    fabric_from_dict,
)

__all__ = ["chip", "chip_names", "fabric", "fabric_names"]

_SUFFIXES = (".yaml", ".yml", ".json")


@cache
def _names(kind: str) -> tuple[str, ...]:
    folder = resources.files(__package__) / "data" / kind
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")))


def _is_file(name_or_path: str | Path) -> bool:
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith(_SUFFIXES) or "/" in text


def _bundled(kind: str, what: str, name: str) -> Any:
    if name not in _names(kind):
        raise InvalidInputError(
            f"{what}: {name!r} is neither a preset nor a .yaml or .json file; "
            f"{nearest(name, _names(kind))}"
        )
    file = resources.files(__package__) / "data" / kind / f"{name}.yaml"
    return parse_text(file.read_text("utf-8"), name)


@cache  # records are frozen, so one of each is enough
def _bundled_chip(name: str) -> Accelerator:
    return Accelerator.from_dict(_bundled("chips", "chip", name), name)


@cache
def _bundled_fabric(name: str) -> FlatFabric | TieredFabric | TorusFabric | MeshFabric:
    return fabric_from_dict(_bundled("fabrics", "fabric", name), name)


def chip_names() -> tuple[str, ...]:
    """Names of the chips that come with the package.

    Examples
    --------
    >>> "h100" in chip_names()
    True
    """
    return _names("chips")


def fabric_names() -> tuple[str, ...]:
    """Names of the fabrics that come with the package.

    Examples
    --------
    >>> "dgx-a100" in fabric_names()
    True
    """
    return _names("fabrics")


def chip(name_or_path: str | Path) -> Accelerator:
    """Load a chip by preset name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or the file is not a valid chip.

    Examples
    --------
    >>> chip("a100-80").hbm.stacks
    5
    """
    if _is_file(name_or_path):
        return Accelerator.from_file(name_or_path)
    return _bundled_chip(str(name_or_path))


def fabric(name_or_path: str | Path) -> FlatFabric | TieredFabric | TorusFabric | MeshFabric:
    """Load a fabric by preset name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or the file is not a valid fabric.

    Examples
    --------
    >>> fabric("tpuv4-pod").dims
    (16, 16, 16)
    """
    if _is_file(name_or_path):
        return fabric_from_dict(read_document(name_or_path), str(name_or_path))
    return _bundled_fabric(str(name_or_path))
