"""Chips grouped by all but their HBM capacity.

Times do not depend on how much HBM there is, so that chips which differ in nothing else are one
group, which is timed once and placed for each capacity.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InfeasibleError
from phaze_fast.explore.variants import Variant, variants_of
from phaze_fast.hardware import Accelerator, ArchitectureSpace
from phaze_fast.hardware.package import PackageModel
from phaze_fast.hardware.price import Prices
from phaze_fast.hardware.space_spec import FP8_RATE

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
    variants: tuple[Variant, ...] = ()
    """Links and formats that occur, where those are axes; none where all chips share theirs."""
    variant: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Which of them each group has."""
    prices: Prices = field(default_factory=Prices)
    """Of wafers and HBM."""
    package: PackageModel | None = None
    """What holds dies and stacks, where that is priced."""

    def device_usd(self) -> Array:
        """Dollars of a device of each group with each capacity, shape (groups, capacities)."""
        area_mm2, sizes = self.area_mm2[:, None], self.capacities[None, :].astype(float)
        if self.package is None:
            return self.prices.device_usd(area_mm2, sizes)
        dies, stacks = self.records["dies"][:, None], self.records["hbm_stacks"][:, None]
        return self.package.device_usd(area_mm2, dies, stacks, sizes, self.prices)

    def __len__(self) -> int:
        return len(self.records)

    def peak_flops(self, record: Any) -> float:
        """FLOP/s of one chip in bf16 at its rated clock."""
        macs = float(record["tensor_cores"]) * float(record["tensor_width"])
        macs *= float(record["tensor_depth"])
        rate = self.like.tensor_core.rates.get("bf16", 0.0)
        if any(variant.fp8 for variant in self.variants) and record["fp8"]:
            rate = FP8_RATE
        return 2.0 * rate * macs * float(record["clock_hz"])

    def take(self, groups: Array) -> ChipGroups:
        """Give some of them; the capacities stay."""
        records = np.ascontiguousarray(self.records[groups])
        return replace(
            self,
            records=records,
            area_mm2=self.area_mm2[groups],
            chip=self.chip[groups],
            of_chip=np.zeros((0, 2), dtype=np.int64),
            variant=self.variant[groups] if self.variants else self.variant,
        )

    @classmethod
    def of(cls, space: ArchitectureSpace) -> ChipGroups:
        """Group the chips of a space.

        Raises
        ------
        InfeasibleError
            Where no chip passes its limits.
        """
        if not len(space):
            raise InfeasibleError(space.why_empty())
        spec = space.spec
        found = cls.of_records(space.chips, space.area_mm2, spec.base)
        cut = spec.package is None and ("dies" in spec.axes or spec.base.dies > 1)
        found = replace(
            found,
            prices=Prices.at_node(spec.area_terms.process_nm),
            package=PackageModel() if cut else spec.package,
        )
        if not spec.varies_step:
            return found
        variants, which = variants_of(found.records, spec.base, "format" in spec.axes)
        return replace(found, variants=variants, variant=which)

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
