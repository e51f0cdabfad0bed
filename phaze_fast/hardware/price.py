"""Purchase price of the silicon and the HBM of a device, in dollars."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from phaze_fast.hardware.silicon import process_node
from phaze_fast.records import Quantity, Record
from phaze_fast.units import GIB

Array = np.ndarray[Any, Any]


class Prices(Record):
    """Prices of wafers and memory. Assumptions, to be replaced by better figures.

    Examples
    --------
    >>> Prices().device_usd(np.array([278.83]), np.array([32 * 2**30])).round(0).tolist()
    [376.0]
    """

    what: ClassVar[str] = "prices"
    wafer_usd: Quantity = 9346.0
    """A processed 300 mm wafer at 7 nm: Khan and Mann, AI Chips, CSET 2020, table 9."""
    wafer_mm: Quantity = 300.0
    """Diameter of a wafer."""
    defects_per_cm2: Quantity = 0.09
    """Defect density of a mature 7 nm process, as published by its maker."""
    cluster: Quantity = 3.0
    """How defects cluster: the exponent of the negative binomial yield model."""
    hbm_usd_per_gib: Quantity = 10.0
    """An assumption; trade press gives 10 to 20 dollars for HBM2e and HBM3."""

    @classmethod
    def at_node(cls, nm: float) -> Prices:
        """Return the prices of a process node.

        Examples
        --------
        >>> Prices.at_node(7.0) == Prices(), Prices.at_node(16.0).wafer_usd
        (True, 3984.0)
        """
        node = process_node(nm)
        return cls(wafer_usd=node.wafer_usd, defects_per_cm2=node.defects_per_cm2)

    def good(self, area_mm2: Array) -> Array:
        """Share of dies that work: negative binomial."""
        faults = area_mm2 / 100.0 * self.defects_per_cm2 / self.cluster
        share: Array = (1.0 + faults) ** -self.cluster
        return share

    def die_usd(self, area_mm2: Array) -> Array:
        """Dollars of a good die: a share of a wafer over the yield."""
        across = math.pi * self.wafer_mm
        per_wafer = across * self.wafer_mm / 4.0 / area_mm2 - across / np.sqrt(2.0 * area_mm2)
        good = self.good(area_mm2)
        with np.errstate(divide="ignore"):
            usd: Array = np.where(per_wafer > 0, self.wafer_usd / (per_wafer * good), np.inf)
        return usd

    def device_usd(self, area_mm2: Array, hbm_bytes: Array) -> Array:
        """Dollars of a die and its HBM."""
        usd: Array = self.die_usd(area_mm2) + self.hbm_usd_per_gib * hbm_bytes / GIB
        return usd


class RunningCosts(Record):
    """Costs of owning and running devices. Assumptions, to be replaced by better figures.

    Examples
    --------
    >>> round(RunningCosts().usd_per_joule * 3.6e6, 3)
    0.088
    """

    what: ClassVar[str] = "running costs"
    years: Quantity = 4.0
    """Depreciation period of devices. Assumption: four years, as cloud operators state."""
    used: Quantity = 0.9
    """Share of that time in which they train. Assumption."""
    usd_per_kwh: Quantity = 0.08
    """Electricity. Assumption: about the price that industry pays in the United States."""
    overhead: Quantity = 1.1
    """Power usage effectiveness (PUE): energy of the building over that of the devices. Google,
    Environmental Report 2023: 1.10."""

    @property
    def seconds(self) -> float:
        """Seconds of training over the depreciation period of a device."""
        return self.years * 365.25 * 86400.0 * self.used

    @property
    def usd_per_joule(self) -> float:
        """Dollars per joule drawn by a device."""
        return self.usd_per_kwh / 3.6e6 * self.overhead
