"""Prices of silicon, HBM and electricity in dollars, and packages of dies and HBM stacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from phaze_fast.errors import InfeasibleError, not_accepted
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


@dataclass(frozen=True)
class Package:
    """Dies and HBM on an interposer."""

    dies: int
    die_mm2: float
    """Area of one die, its part of the die-to-die links included."""
    package_mm2: float
    """Area of all dies and stacks."""
    good: float
    """Share of dies that work."""
    dies_usd: float
    hbm_usd: float
    interposer_usd: float

    @property
    def usd(self) -> float:
        """Total price in dollars."""
        return self.dies_usd + self.hbm_usd + self.interposer_usd


class PackageModel(Record):
    """Limits and prices of packages.

    Examples
    --------
    >>> one = PackageModel().package(700.0, stacks=4, hbm_bytes=32 * 2**30)
    >>> two = PackageModel().package(700.0, stacks=4, hbm_bytes=32 * 2**30, dies=2)
    >>> round(one.good, 2), round(two.good, 2), round(two.die_mm2)
    (0.56, 0.72, 385)
    """

    what: ClassVar[str] = "package"
    reticle_mm2: SquareMillimetres = 858.0
    """Largest die: the 26 mm x 33 mm field of a lithography scanner."""
    interposer_mm2: SquareMillimetres = 2700.0
    """Usable area for dies and stacks: 3.3 reticles, TSMC CoWoS-S as announced for 2023."""
    hbm_footprint_mm2: SquareMillimetres = 110.0
    """Area of one stack: about 10 mm x 11 mm, JEDEC HBM2E."""
    links_share: Quantity = 0.1
    """Fraction of area that die-to-die links add to several dies. Naffziger et al., ISCA 2021:
    four dies of 213 mm2 instead of one of 777 mm2, 10% more."""
    interposer_usd_per_mm2: Quantity = 0.05
    """Silicon interposer, bonding and substrate. Assumption."""

    def fits(self, area_mm2: Array, dies: Array, stacks: Array) -> Array:
        """Whether chips of an area (links between dies included) on a number of dies fit."""
        total = area_mm2 + stacks * self.hbm_footprint_mm2
        fitting: Array = (area_mm2 / np.maximum(dies, 1) <= self.reticle_mm2) & (
            total <= self.interposer_mm2
        )
        return fitting

    def complaint(self, area_mm2: float, dies: int, stacks: int) -> str:
        """Return what is too large for a package; empty if it fits."""
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
        stacks: Array,
        hbm_bytes: Array,
        prices: Prices | None = None,
    ) -> Array:
        """Dollars of many packages: dies at their yield, HBM, interposer.

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

    def package(
        self,
        area_mm2: float,
        stacks: int,
        hbm_bytes: float,
        dies: int = 1,
        prices: Prices | None = None,
    ) -> Package:
        """Return a package: logic of an area on a number of dies, and HBM, on an interposer.

        Raises
        ------
        InfeasibleError
            If a die is larger than a reticle, or the package than the interposer.
        """
        for name, value in (("dies", dies), ("stacks", stacks)):
            least = 1 if name == "dies" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise not_accepted(name, value, f"a whole number, {least} or more")
        prices = Prices() if prices is None else prices
        area_mm2 = area_mm2 * (1.0 + (self.links_share if dies > 1 else 0.0))
        if said := self.complaint(area_mm2, dies, stacks):
            raise InfeasibleError(f"package: {said}")
        die = area_mm2 / dies
        total = area_mm2 + stacks * self.hbm_footprint_mm2
        return Package(
            dies=dies,
            die_mm2=die,
            package_mm2=total,
            good=float(prices.good(np.array([die]))[0]),
            dies_usd=dies * float(prices.die_usd(np.array([die]))[0]),
            hbm_usd=prices.hbm_usd_per_gib * hbm_bytes / GIB,
            interposer_usd=self.interposer_usd_per_mm2 * total,
        )
