"""Chips, interconnects, wafers and spaces of wafers by name or from a file, with their sources.

Each is one file of ``hardware/data``, read by `phaze_fast.documents.Presets`.
"""

from __future__ import annotations

from pathlib import Path

from phaze_fast.hardware.chip import CHIPS, Accelerator
from phaze_fast.hardware.fabric import FABRICS, AnyFabric
from phaze_fast.hardware.wafer import WAFERS, Wafer
from phaze_fast.hardware.wafer_space import WAFER_SPACES, WaferSpace

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


def chip_names() -> tuple[str, ...]:
    """Names of the chips that come with the package.

    Examples
    --------
    >>> "h100" in chip_names()
    True
    """
    return CHIPS.names


def fabric_names() -> tuple[str, ...]:
    """Names of the interconnects that come with the package.

    Examples
    --------
    >>> "dgx-a100" in fabric_names()
    True
    """
    return FABRICS.names


def wafer_names() -> tuple[str, ...]:
    """Names of the wafers that come with the package.

    Examples
    --------
    >>> "wse3-like" in wafer_names()
    True
    """
    return WAFERS.names


def wafer_space_names() -> tuple[str, ...]:
    """Names of the spaces of wafers that come with the package.

    Examples
    --------
    >>> wafer_space_names()
    ('wafer-space',)
    """
    return WAFER_SPACES.names


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
    return CHIPS.load(name_or_path)


def fabric(name_or_path: str | Path) -> AnyFabric:
    """Load an interconnect by preset name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or the file is not a valid interconnect.

    Examples
    --------
    >>> fabric("tpuv4-pod").dims
    (16, 16, 16)
    """
    return FABRICS.load(name_or_path)


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
    return WAFERS.load(name_or_path)


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
    return WAFER_SPACES.load(name_or_path)
