"""Plans as the kernel places them: which layout, where stages begin, what each recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Placed", "placed_plans"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Placed:
    """The best plan of a chip under one strategy, as the kernel gives it."""

    time_s: float
    """Infinite where nothing fits, or nothing takes at most what was asked for."""
    memory_bytes: float
    layout: int
    """Position among the layouts; -1 where there is none."""
    cuts: tuple[int, ...] = ()
    """Positions at which chunks begin, and the end."""
    variants: tuple[int, ...] = ()
    """Variant of each stage."""


def placed_plans(records: Array, pool: Array) -> list[Placed]:
    """Read what the kernel gives: records, and the numbers that they point into."""
    found = []
    for r in records.tolist():
        time_s, memory, layout, cuts_at, cuts, variants_at, variants = r
        found.append(
            Placed(
                time_s,
                memory,
                layout,
                tuple(pool[cuts_at : cuts_at + cuts].tolist()),
                tuple(pool[variants_at : variants_at + variants].tolist()),
            )
        )
    return found
