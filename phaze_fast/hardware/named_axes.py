"""Axes of a space whose values have names: generations of HBM, and number formats.

A generation gives what one stack holds and carries, so that capacity and bandwidth come in stacks.
A format gives what the arrays multiply besides bf16, and in what a step then computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.hardware.chip import Accelerator
from phaze_fast.units import GIB

__all__ = [
    "FORMATS",
    "FP8_RATE",
    "HBM_GENERATIONS",
    "NAMED_AXES",
    "HbmGeneration",
    "axis_number",
    "with_stacks",
]

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

NAMED_AXES = {"hbm.generation": ("base", *HBM_GENERATIONS), "format": FORMATS}
"""Axes whose values have names, and those names; ``base`` is a stack of the space's base."""


def _stack(base: Accelerator, name: str) -> HbmGeneration:
    """Give what one stack of a generation carries and holds."""
    if name != "base":
        return HBM_GENERATIONS[name]
    assert base.hbm is not None
    rate = base.hbm.bandwidth_bytes_per_s / base.hbm.stacks
    return HbmGeneration(rate, base.hbm.capacity_bytes // base.hbm.stacks, base.name)


def axis_number(base: Accelerator, field: str, value: Any) -> float:
    """Give what stands for a value in the grid's column: a stack's bytes/s, or 1 for FP8."""
    if field == "hbm.generation":
        return _stack(base, value).bandwidth_bytes_per_s
    if field == "format":
        return float(FORMATS.index(value))
    return float(value)


def with_stacks(base: Accelerator, names: Sequence[Any], chips: Array) -> Array:
    """Give chips of a grid over generations with the bytes and bytes/s of all their stacks."""
    made = chips.copy()
    for generation in (_stack(base, name) for name in names):
        own = chips["hbm_bytes_per_s"] == generation.bandwidth_bytes_per_s
        made["hbm_bytes"][own] = chips["hbm_stacks"][own] * generation.capacity_bytes
        made["hbm_bytes_per_s"][own] *= chips["hbm_stacks"][own]
    return made
