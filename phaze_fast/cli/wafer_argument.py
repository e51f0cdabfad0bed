"""Wafers that a command is given: presets or files, several joined, with faults."""

from __future__ import annotations

from pathlib import Path

from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.wafer import (
    WAFER_SPACES,
    WAFERS,
    Wafer,
    WaferSpace,
    load_faults,
    load_wafer,
    load_wafer_space,
)

__all__ = ["joined_wafers", "wafer_of", "with_faults"]


def wafer_of(name: str) -> Wafer | WaferSpace:
    """Look a wafer or a space of wafers up: a preset, or a file of either kind."""
    if name in WAFER_SPACES.names:
        return load_wafer_space(name)
    if name in WAFERS.names:
        return load_wafer(name)
    if not name.endswith((".yaml", ".yml", ".json")):
        known = [*WAFERS.names, *WAFER_SPACES.names]
        raise InvalidInputError(
            f"--wafer: {name!r} is not accepted; {nearest(name, known)}, or a file"
        )
    data = read_document(name)
    if isinstance(data, dict) and "axes" in data:
        return WaferSpace.from_dict(data, source=name)
    return Wafer.from_dict(data, source=name)


def joined_wafers(wafers: list[Wafer | WaferSpace], count: int) -> list[Wafer | WaferSpace]:
    """Join several wafers of each kind."""
    if count == 1:
        return wafers
    found: list[Wafer | WaferSpace] = []
    for where in wafers:
        if isinstance(where, WaferSpace):
            raise InvalidInputError(
                f"--joined: {where.name} is not accepted with it; expected wafers, not a space"
            )
        found.append(where.replace(wafer_count=count))
    return found


def with_faults(wafers: list[Wafer | WaferSpace], path: Path | None) -> list[Wafer | WaferSpace]:
    """Break the dies and links of a file on every wafer."""
    if path is None:
        return wafers
    faults = load_faults(path)
    found: list[Wafer | WaferSpace] = []
    for where in wafers:
        if isinstance(where, WaferSpace):
            raise InvalidInputError(
                f"--faults: {where.name} is not accepted with it; expected wafers, not a space"
            )
        found.append(faults.on(where, str(path)))
    return found
