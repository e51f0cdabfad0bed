"""Axes of a space whose values have names: generations of HBM, and number formats.

A generation gives what one stack holds and carries, so that capacity and bandwidth come in stacks.
A format gives what the arrays multiply besides bf16, and in what a step then computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.units import GIB

__all__ = ["FORMATS", "FP8_RATE", "HBM_GENERATIONS", "NAMED_AXES", "HbmGeneration", "with_stacks"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class HbmGeneration:
    """One 1,024-bit stack of a generation."""

    bandwidth_bytes_per_s: float
    capacity_bytes: int
    source: str


HBM_GENERATIONS = {
    "hbm2": HbmGeneration(256e9, 8 * GIB, "JEDEC JESD235A: 2.0 Gb/s a pin, 8 dies of 8 Gb"),
    "hbm2e": HbmGeneration(409.6e9, 16 * GIB, "JEDEC JESD235C: 3.2 Gb/s a pin, 8 dies of 16 Gb"),
    "hbm3": HbmGeneration(819.2e9, 16 * GIB, "JEDEC JESD238: 6.4 Gb/s a pin, 8 dies of 16 Gb"),
    "hbm3e": HbmGeneration(1177.6e9, 24 * GIB, "Micron, HBM3E, 2023: 9.2 Gb/s a pin, 8 x 24 Gb"),
}
"""What one stack carries and holds, by generation."""

FORMATS = ("bf16", "fp8")
"""What the arrays multiply fastest: a step computes in it."""
FP8_RATE = 2.0
"""Products in FP8 per product in bf16, as on the H100."""

NAMED_AXES = {"hbm.generation": tuple(HBM_GENERATIONS), "format": FORMATS}
"""Axes whose values have names, and those names."""


def axis_number(field: str, value: Any) -> float:
    """Give what stands for a value in the grid's column: a stack's bytes/s, or 1 for FP8."""
    if field == "hbm.generation":
        return HBM_GENERATIONS[value].bandwidth_bytes_per_s
    if field == "format":
        return float(FORMATS.index(value))
    return float(value)


def axis_name(field: str, number: float) -> str:
    """Give the value that a number stands for."""
    return next(name for name in NAMED_AXES[field] if axis_number(field, name) == number)


def with_stacks(chips: Array) -> Array:
    """Give chips of a grid over generations with the bytes and bytes/s of all their stacks."""
    made = chips.copy()
    for generation in HBM_GENERATIONS.values():
        own = chips["hbm_bytes_per_s"] == generation.bandwidth_bytes_per_s
        made["hbm_bytes"][own] = chips["hbm_stacks"][own] * generation.capacity_bytes
        made["hbm_bytes_per_s"][own] *= chips["hbm_stacks"][own]
    return made
