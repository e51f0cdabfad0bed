"""Prices of silicon, HBM and electricity in dollars, and packages of dies and HBM stacks."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from phaze_fast.hardware.silicon import process_node
from phaze_fast.records import Quantity, Record, SquareMillimetres
from phaze_fast.tables import Array
from phaze_fast.units import GIB


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
    """Price of HBM. Assumption: trade press gives 10 to 20 dollars for HBM2e and HBM3."""

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
        """Yield: the share of dies without defects, by the negative binomial model."""
        faults = area_mm2 / 100.0 * self.defects_per_cm2 / self.cluster
        share: Array = (1.0 + faults) ** -self.cluster
        return share

    def die_usd(self, area_mm2: Array) -> Array:
        """Dollars of a good die: its share of the wafer price, divided by the yield."""
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
    """Share of the depreciation period in which devices train. Assumption."""
    usd_per_kwh: Quantity = 0.08
    """Price of electricity. Assumption: about what industry pays in the United States."""
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


class PackageModel(Record):
    """Limits and prices of packages.

    Examples
    --------
    >>> areas_mm2, dies = np.array([700.0, 770.0]), np.array([1, 2])
    >>> PackageModel().device_usd(areas_mm2, dies, stacks=4, hbm_bytes=32 * 2**30).round().tolist()
    [595.0, 554.0]
    """

    what: ClassVar[str] = "package"
    reticle_mm2: SquareMillimetres = 858.0
    """Largest die: the 26 mm x 33 mm field of a lithography scanner."""
    interposer_mm2: SquareMillimetres = 2700.0
    """Usable area for dies and stacks: 3.3 reticles, TSMC CoWoS-S as announced for 2023."""
    hbm_footprint_mm2: SquareMillimetres = 110.0
    """Area of one stack: about 10 mm x 11 mm, JEDEC HBM2E."""
    interposer_usd_per_mm2: Quantity = 0.05
    """Price of silicon interposer, bonding and substrate. Assumption."""

    def fits(self, area_mm2: Array, dies: Array, stacks: Array) -> Array:
        """Whether chips fit a package, by area (links between dies included), dies and stacks."""
        total = area_mm2 + stacks * self.hbm_footprint_mm2
        fitting: Array = (area_mm2 / np.maximum(dies, 1) <= self.reticle_mm2) & (
            total <= self.interposer_mm2
        )
        return fitting

    def complaint(self, area_mm2: float, dies: int, stacks: int) -> str:
        """Return which limit of a package is exceeded; empty if it fits."""
        die = area_mm2 / max(dies, 1)
        if die > self.reticle_mm2:
            return (
                f"a die of {die:.0f} mm2 is larger than a reticle, {self.reticle_mm2:.0f} mm2; "
                "expected more dies"
            )
        total = area_mm2 + stacks * self.hbm_footprint_mm2
        if total > self.interposer_mm2:
            return (
                f"{dies} x {die:.0f} mm2 and {stacks} stacks take {total:.0f} mm2; the "
                f"interposer has {self.interposer_mm2:.0f} mm2"
            )
        return ""

    def device_usd(
        self,
        area_mm2: Array,
        dies: Array,
        stacks: Array | int,
        hbm_bytes: Array | int,
        prices: Prices | None = None,
    ) -> Array:
        """Price of many packages in dollars: dies at their yield, HBM, interposer.

        Parameters
        ----------
        area_mm2
            Area of all dies of a chip together, links between them included.
        dies, stacks, hbm_bytes
            Number of dies, number of HBM stacks and HBM capacity of each chip.
        prices
            Prices of wafers and HBM.
        """
        prices = Prices() if prices is None else prices
        count = np.maximum(dies, 1)
        silicon = count * prices.die_usd(area_mm2 / count)
        total = area_mm2 + stacks * self.hbm_footprint_mm2
        dollars: Array = (
            silicon + prices.hbm_usd_per_gib * hbm_bytes / GIB + self.interposer_usd_per_mm2 * total
        )
        return dollars
