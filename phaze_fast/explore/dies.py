"""Takes chips, gives their dies and the HBM capacities each comes with.

Times do not depend on how much HBM there is, so that chips which differ in nothing else are one die
that is timed once and placed for each capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InfeasibleError
from phaze_fast.hardware import Accelerator, ArchitectureSpace

__all__ = ["Dies"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Dies:
    """Dies in the order in which chips first name them."""

    records: Array
    """Of each die, dtype ``_core.CHIP_DTYPE``, with the HBM of its first chip."""
    area_mm2: Array
    capacities: Array
    """Bytes of HBM that occur, rising."""
    chip: Array
    """Which chip each die with each capacity is, shape (dies, capacities); -1: none."""
    of_chip: Array
    """Die and capacity of each chip that was given, shape (chips, 2)."""
    like: Accelerator
    """The chip whose tuning, launch latency and formats they all share."""

    def __len__(self) -> int:
        return len(self.records)

    def take(self, dies: Array) -> Dies:
        """Give some of them; the capacities stay."""
        records = np.ascontiguousarray(self.records[dies])
        none = np.zeros((0, 2), dtype=np.int64)
        chips = self.chip[dies]
        return Dies(records, self.area_mm2[dies], self.capacities, chips, none, self.like)

    @classmethod
    def of(cls, space: ArchitectureSpace) -> Dies:
        """Group the chips of a space.

        Raises
        ------
        InfeasibleError
            Where no chip passes its limits.
        """
        if not len(space):
            raise InfeasibleError(
                f"{space.spec.name}: there is no chip in it, or none that passes its limits"
            )
        return cls.of_records(space.chips, space.area_mm2, space.spec.base)

    @classmethod
    def of_records(cls, chips: Array, area_mm2: Array, like: Accelerator) -> Dies:
        """Group chips; of equal ones the first stands for all."""
        capacities, which = np.unique(chips["hbm_bytes"], return_inverse=True)
        key = chips.copy()
        key["hbm_bytes"] = 1
        content = key.view(np.dtype((np.void, key.dtype.itemsize)))
        _, first, group = np.unique(content, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        first, group = first[order], rank[group.reshape(-1)]
        chip = np.full((len(first), len(capacities)), -1, dtype=np.int64)
        backwards = np.arange(len(chips))[::-1]
        of_chip = np.stack([group, which.reshape(-1)], axis=1)
        chip[of_chip[backwards, 0], of_chip[backwards, 1]] = backwards
        return cls(chips[first], area_mm2[first], capacities, chip, of_chip, like)
