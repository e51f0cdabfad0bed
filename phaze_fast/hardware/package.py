"""Packages of dies and HBM stacks: limits and prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware.price import Prices
from phaze_fast.records import Quantity, Record, SquareMillimetres
from phaze_fast.units import GIB

Array = np.ndarray[Any, Any]


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
                raise InvalidInputError(
                    f"{name}: {value!r} is not accepted; expected a whole number, {least} or more"
                )
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
