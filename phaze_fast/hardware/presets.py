"""Takes a name or a file, gives a chip, a fabric, a wafer or a space of wafers with its sources.

Each preset is one YAML file in ``hardware/data``; adding a file adds a preset.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:  # they read presets themselves, so they are imported late
    from phaze_fast.hardware.wafer import Wafer
    from phaze_fast.hardware.wafer_space import WaferSpace

__all__ = [
    "chip",
    "chip_names",
    "fabric",
    "fabric_names",
    "wafer",
    "wafer_names",
    "wafer_space",
    "wafer_space_names",
]

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


@cache
def _bundled_wafer(name: str) -> Wafer:
    from phaze_fast.hardware.wafer import Wafer

    return Wafer.from_dict(_bundled("wafers", "wafer", name), name)


@cache
def _bundled_wafer_space(name: str) -> WaferSpace:
    from phaze_fast.hardware.wafer_space import WaferSpace

    return WaferSpace.from_dict(_bundled("wafer_spaces", "wafer space", name), name)


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


def wafer_names() -> tuple[str, ...]:
    """Names of the wafers that come with the package.

    Examples
    --------
    >>> "wse3-like" in wafer_names()
    True
    """
    return _names("wafers")


def wafer_space_names() -> tuple[str, ...]:
    """Names of the spaces of wafers that come with the package.

    Examples
    --------
    >>> wafer_space_names()
    ('wafer-space',)
    """
    return _names("wafer_spaces")


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


def wafer(name_or_path: str | Path) -> Wafer:
    """Load a wafer by preset name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or the file is not a valid wafer.

    Examples
    --------
    >>> wafer("wse3-like").grid
    (12, 7)
    """
    if _is_file(name_or_path):
        from phaze_fast.hardware.wafer import Wafer

        return Wafer.from_file(name_or_path)
    return _bundled_wafer(str(name_or_path))


def wafer_space(name_or_path: str | Path) -> WaferSpace:
    """Load a space of wafers by preset name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or the file is not a valid space.

    Examples
    --------
    >>> wafer_space("wafer-space").base.name
    'dram-wafer'
    """
    if _is_file(name_or_path):
        from phaze_fast.hardware.wafer_space import WaferSpace

        return WaferSpace.from_file(name_or_path)
    return _bundled_wafer_space(str(name_or_path))
