"""Power of a chip at a clock, and the clock that a power cap leaves.

Logic draws dynamic power in proportion to clock x voltage squared, and leaks in proportion to
voltage; a lower clock needs less voltage, down to a least one. HBM has a supply of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware.chip import Accelerator, chip_records
from phaze_fast.hardware.silicon import (
    FULL_AREA,
    AreaTerms,
    EnergyTable,
    area,
    area_batch,
    energy_table_at,
    power_batch,
)
from phaze_fast.records import Quantity, Record

__all__ = ["ChipPower", "PowerModel"]

Array = np.ndarray[Any, Any]

_HALVINGS = 60


@dataclass(frozen=True)
class ChipPower:
    """Peak power of a chip at a share of its rated clock, watts."""

    clock_share: float
    volts: float
    dynamic_w: float
    """Of logic and SRAM, every unit busy."""
    leakage_w: float
    hbm_w: float
    """At full bandwidth."""
    links_w: float
    """At full bandwidth; SerDes run at a clock of their own."""

    @property
    def total_w(self) -> float:
        """All together."""
        return self.dynamic_w + self.leakage_w + self.hbm_w + self.links_w


class PowerModel(Record):
    """How power follows clock and voltage.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> model, chip = PowerModel(), presets.chip("tpuv4")
    >>> full = model.at(chip)
    >>> capped = model.under(chip, 150.0)
    >>> round(full.total_w), round(capped.total_w), capped.clock_share < 1.0
    (214, 150, True)
    """

    what: ClassVar[str] = "power model"
    volts: Quantity = 0.75
    """At the rated clock. Assumption: a nominal supply of 7 nm logic."""
    least_volts: Quantity = 0.55
    """Below which it does not work. Assumption."""
    least_volts_at: Quantity = 0.5
    """Share of the rated clock that the least voltage is enough for. Assumption: voltage rises
    linearly from there."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0.0 < self.least_volts <= self.volts:
            raise ValueError(
                f"least_volts: {self.least_volts!r} is not accepted; expected more than 0 and at "
                f"most volts, {self.volts!r}"
            )
        if not 0.0 < self.least_volts_at < 1.0:
            raise ValueError(
                f"least_volts_at: {self.least_volts_at!r} is not accepted; expected a share "
                "between 0 and 1"
            )
        return self

    def _volts(self, share: Any) -> Any:
        """Volts that a share of the rated clock needs, or shares do."""
        way = np.maximum(0.0, (share - self.least_volts_at) / (1.0 - self.least_volts_at))
        return self.least_volts + way * (self.volts - self.least_volts)

    def at(
        self,
        chip: Accelerator,
        clock_share: float = 1.0,
        table: EnergyTable | None = None,
        terms: AreaTerms = FULL_AREA,
    ) -> ChipPower:
        """Peak power at a share of the rated clock."""
        if not 0.0 <= clock_share <= 1.0:
            raise InvalidInputError(
                f"clock_share: {clock_share!r} is not accepted; expected 0 to 1"
            )
        table = energy_table_at(terms.process_nm) if table is None else table
        total = float(power_batch([chip], table, terms)[0])
        hbm = 0.0 if chip.hbm is None else chip.hbm.bandwidth_bytes_per_s * table.hbm_byte_j
        links = 0.0
        if chip.links is not None:
            links = chip.links.count * chip.links.bandwidth_bytes_per_s * table.network_byte_j
        leakage = table.static_w_per_mm2 * area(chip, terms).total_mm2
        volts = float(self._volts(clock_share))
        swing = volts / self.volts
        return ChipPower(
            clock_share=clock_share,
            volts=volts,
            dynamic_w=(total - hbm - links - leakage) * clock_share * swing**2,
            leakage_w=leakage * swing,
            hbm_w=hbm,
            links_w=links,
        )

    def under(
        self,
        chip: Accelerator,
        max_w: float,
        table: EnergyTable | None = None,
        terms: AreaTerms = FULL_AREA,
    ) -> ChipPower:
        """Peak power at the highest clock, at most the rated one, that a power cap allows.

        Raises
        ------
        InfeasibleError
            Where leakage and HBM alone are above the cap.
        """
        share = float(self.clock_shares(chip_records([chip]), max_w, table, terms)[0])
        if math.isnan(share):
            idle = self.at(chip, 0.0, table, terms)
            raise InfeasibleError(
                f"max_power_w: {max_w:g} W is not above what {chip.name} draws without a clock, "
                f"{idle.leakage_w:.1f} W of leakage and {idle.hbm_w + idle.links_w:.1f} W of HBM "
                "and links"
            )
        return self.at(chip, share, table, terms)

    def clock_shares(
        self,
        records: Array,
        max_w: float,
        table: EnergyTable | None = None,
        terms: AreaTerms = FULL_AREA,
    ) -> Array:
        """Highest shares of the rated clock, at most 1, that a power cap leaves many chips.

        Parameters
        ----------
        records
            Chips, such as `ArchitectureSpace.chips`.
        max_w
            The cap, watts.

        Returns
        -------
        numpy.ndarray
            One share per chip; NaN where leakage, links and HBM alone are above the cap.
        """
        table = energy_table_at(terms.process_nm) if table is None else table
        fixed, leakage = _unclocked_w(records, table, terms)
        dynamic = power_batch(records, table, terms) - fixed - leakage

        def total(share: Array) -> Array:
            swing = self._volts(share) / self.volts
            found: Array = dynamic * share * swing**2 + leakage * swing + fixed
            return found

        low, high = np.zeros(len(records)), np.ones(len(records))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            within = total(middle) <= max_w
            low, high = np.where(within, middle, low), np.where(within, high, middle)
        shares = np.where(total(np.ones(len(records))) <= max_w, 1.0, low)
        found: Array = np.where(total(np.zeros(len(records))) < max_w, shares, np.nan)
        return found

    def idle_w(
        self, records: Array, table: EnergyTable | None = None, terms: AreaTerms = FULL_AREA
    ) -> Array:
        """Watts that chips draw without a clock: leakage at the least voltage, links and HBM."""
        table = energy_table_at(terms.process_nm) if table is None else table
        fixed, leakage = _unclocked_w(records, table, terms)
        found: Array = fixed + leakage * float(self._volts(0.0)) / self.volts
        return found


def _unclocked_w(records: Array, table: EnergyTable, terms: AreaTerms) -> tuple[Array, Array]:
    """Watts of HBM and links at full bandwidth, and of leakage at the rated voltage."""
    fixed = records["hbm_bytes_per_s"] * table.hbm_byte_j
    fixed = fixed + records["links"] * records["link_bytes_per_s"] * table.network_byte_j
    return fixed, table.static_w_per_mm2 * area_batch(records, terms)["total_mm2"]
