"""Chips and fabrics by name or from a file, with their sources.

Each is one file; `preset_files` says where.
"""

from __future__ import annotations

from pathlib import Path

from phaze_fast.hardware.chip import Accelerator, load_chip
from phaze_fast.hardware.fabric import (
    FlatFabric,
    MeshFabric,
    TieredFabric,
    TorusFabric,
    load_fabric,
)
from phaze_fast.hardware.preset_files import preset_names

__all__ = [
    "chip",
    "chip_names",
    "fabric",
    "fabric_names",
]


def chip_names() -> tuple[str, ...]:
    """Names of the chips that come with the package.

    Examples
    --------
    >>> "h100" in chip_names()
    True
    """
    return preset_names("chips")


def fabric_names() -> tuple[str, ...]:
    """Names of the fabrics that come with the package.

    Examples
    --------
    >>> "dgx-a100" in fabric_names()
    True
    """
    return preset_names("fabrics")


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
    return load_chip(name_or_path)


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
    return load_fabric(name_or_path)
