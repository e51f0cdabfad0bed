"""Chips and interconnects by name or from a file, with their sources.

Each preset is one file of ``hardware/data``, read by `phaze_fast.documents.Presets`.
"""

from __future__ import annotations

from pathlib import Path

from phaze_fast.hardware.chip import CHIPS, Accelerator
from phaze_fast.hardware.fabric import FABRICS, AnyFabric


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
