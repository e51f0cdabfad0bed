"""Each constant of a box at either end with all others at their nominal value: who is best there.

This is what the pictures of a robust search show: how far each constant moves the nominal winner's
step (a tornado), and the regret of each chip that is best somewhere (chips by constants).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.hardware import ArchitectureSpace
from phaze_fast.robust.area_range import AreaRange
from phaze_fast.robust.constants import Constant, Uncertainty
from phaze_fast.robust.scenarios import Point, Scenarios

__all__ = ["OneAtATime", "one_at_a_time"]

Array = np.ndarray[Any, Any]

_TIES = 1e-6
_MOST = 12
"""Chips that are listed."""


@dataclass(frozen=True, eq=False)
class OneAtATime:
    """Regrets of some chips with one constant at an end."""

    groups: list[int]
    """Chip groups, the nominal winner first."""
    rows: list[dict[str, Any]]
    """One for each constant: ``constant``, ``step`` (the nominal winner's at the low and high end
    over its nominal one) and ``regret`` of each group at its worse end."""


class _Ends:
    """Chips at points where one constant is not nominal."""

    def __init__(self, scenes: Scenarios, space: ArchitectureSpace, box: Uncertainty) -> None:
        self.scenes, self.space = scenes, space
        still = box
        for constant in box.constants:
            still = still.narrowed(constant.name, constant.nominal, constant.nominal)
        self.still = still
        scenes.least_anywhere()

    def at(self, constant: Constant | None, value: float) -> tuple[Point, AreaRange]:
        """Give rates and areas with one constant at a value."""
        box, point = self.still, list(self.scenes.nominal)
        if constant is not None and constant.kind == "area":
            box = box.narrowed(constant.name, value, value)
        elif constant is not None:
            names = [c.name for c in self.scenes.rates]
            point[names.index(constant.name)] = value
        return tuple(point), AreaRange.of(self.space, self.scenes.groups.records, box)

    def best(self, point: Point, areas: AreaRange) -> tuple[int, float]:
        """Find the fastest group that fits, and its step."""
        fits = np.flatnonzero(areas.fits_always)
        first = fits[np.argmin(self.scenes.least_anywhere()[fits])]
        most = float(self.scenes.scores(point, [first])[0]) * (1.0 + 1e-9)
        found = self.scenes.least_share(point, fits, np.ones(len(fits)), most, _TIES)
        return found.group, found.value

    def steps(self, point: Point, areas: AreaRange, groups: Sequence[int]) -> Array:
        """Give steps of groups, slower by the part by which they are too large."""
        times = self.scenes.scores(point, list(groups))
        found: Array = times * np.array([areas.largest_excess(g) for g in groups])
        return found


def one_at_a_time(
    scenes: Scenarios, space: ArchitectureSpace, box: Uncertainty, also: Sequence[int] = ()
) -> OneAtATime:
    """Put each constant of a box at either end, all others at their nominal values.

    Parameters
    ----------
    scenes
        Chips that may be best somewhere in the box.
    space
        Whose area limit holds.
    box
        The constants.
    also
        Groups to list besides the best ones.
    """
    ends = _Ends(scenes, space, box)
    nominal, usual = ends.best(*ends.at(None, 0.0))
    places = []
    for constant in box.constants:
        for value in (constant.low, constant.high):
            point, areas = ends.at(constant, value)
            places.append((constant, point, areas, *ends.best(point, areas)))
    listed = dict.fromkeys([nominal, *also, *(group for *_, group, _ in places)])
    groups = list(listed)[:_MOST]
    rows = []
    for k, constant in enumerate(box.constants):
        steps, regrets = [], []
        for _, point, areas, _, fastest in places[2 * k : 2 * k + 2]:
            own = ends.steps(point, areas, groups)
            steps.append(float(own[0] / usual))
            regrets.append(own / fastest)
        worse = np.maximum(np.max(regrets, axis=0), 1.0)
        rows.append({"constant": constant.name, "step": steps, "regret": worse.tolist()})
    return OneAtATime(groups, rows)
