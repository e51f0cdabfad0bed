"""Chips grouped by all but their HBM capacity.

Times do not depend on how much HBM there is, so that chips which differ in nothing else are one
group, which is timed once and placed for each capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InfeasibleError
from phaze_fast.hardware import Accelerator, ArchitectureSpace

__all__ = ["ChipGroups"]

Array = np.ndarray[Any, Any]


def _contents(chips: Array) -> Array:
    """One number per chip, equal where all but the HBM capacity is.

    Column by column, each chip gets the number of what it has in all columns so far.
    """
    number = np.zeros(len(chips), dtype=np.int64)
    for name in chips.dtype.names or ():
        if name == "hbm_bytes":
            continue
        values, which = np.unique(chips[name], return_inverse=True)
        if len(values) > 1:
            pairs = number * len(values) + which.reshape(-1)
            number = np.unique(pairs, return_inverse=True)[1].reshape(-1)
    return number


@dataclass(frozen=True, eq=False)
class ChipGroups:
    """Groups in the order in which chips first name them."""

    records: Array
    """Of each group, dtype ``_core.CHIP_DTYPE``, with the HBM of its first chip."""
    area_mm2: Array
    capacities: Array
    """Bytes of HBM that occur, rising."""
    chip: Array
    """Which chip each group with each capacity is, shape (groups, capacities); -1: none."""
    of_chip: Array
    """Group and capacity of each chip that was given, shape (chips, 2)."""
    like: Accelerator
    """The chip whose tuning, launch latency and formats they all share."""

    def __len__(self) -> int:
        return len(self.records)

    def peak_flops(self, record: Any) -> float:
        """FLOP/s of one chip in bf16 at its rated clock."""
        macs = float(record["tensor_cores"]) * float(record["tensor_width"])
        macs *= float(record["tensor_depth"])
        rate = self.like.tensor_core.rates.get("bf16", 0.0)
        return 2.0 * rate * macs * float(record["clock_hz"])

    def take(self, groups: Array) -> ChipGroups:
        """Give some of them; the capacities stay."""
        records = np.ascontiguousarray(self.records[groups])
        none = np.zeros((0, 2), dtype=np.int64)
        chips = self.chip[groups]
        return ChipGroups(records, self.area_mm2[groups], self.capacities, chips, none, self.like)

    @classmethod
    def of(cls, space: ArchitectureSpace) -> ChipGroups:
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
    def of_records(cls, chips: Array, area_mm2: Array, like: Accelerator) -> ChipGroups:
        """Group chips; of equal ones the first stands for all."""
        capacities, which = np.unique(chips["hbm_bytes"], return_inverse=True)
        _, first, group = np.unique(_contents(chips), return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        first, group = first[order], rank[group.reshape(-1)]
        chip = np.full((len(first), len(capacities)), -1, dtype=np.int64)
        backwards = np.arange(len(chips))[::-1]
        of_chip = np.stack([group, which.reshape(-1)], axis=1)
        chip[of_chip[backwards, 0], of_chip[backwards, 1]] = backwards
        records = chips if len(first) == len(chips) else chips[first]
        return cls(records, area_mm2[first], capacities, chip, of_chip, like)
