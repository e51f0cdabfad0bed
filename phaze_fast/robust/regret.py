"""The largest regret of a chip over a box of constants, with a bound: branch and bound on the box.

The regret of a chip at a point is its step time over that of the fastest chip there. A step is
never slower with a faster constant, and a rate that is k times as high makes it at most k times
faster. So in a part of the box between a slow and a fast corner

    regret <= T_chip(slow corner) / T_fastest(fast corner),

and for one rate, whose ends may be swapped where the step depends on little else,

    regret <= k * T_chip(that rate fast, others slow) / T_fastest(that rate slow, others fast).

Parts whose bound is above what was attained are split where that lowers the bound most. Areas need
no branching: see `area_range`.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.robust.area_range import AreaRange
from phaze_fast.robust.scenarios import Point, Scenarios

__all__ = ["LargestRegret", "RegretBounds", "Witness"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Witness:
    """A point of the box and a chip group that is fast there."""

    point: Point
    rival: int
    rival_s: float


@dataclass(frozen=True)
class LargestRegret:
    """What is known of one chip's largest regret."""

    attained: float
    """Some point of the box has this."""
    bound: float
    """No point has more."""
    witness: Witness
    parts: int
    """Parts of the box that were bounded."""


class RegretBounds:
    """Largest regrets of chip groups over a box.

    Parameters
    ----------
    scenarios
        Scores at points.
    areas
        Which chips fit where.
    tolerance
        Relative distance of bound and attained regret to reach.
    deadline
        Of `time.monotonic`; what is not settled then stays with its bound.
    """

    def __init__(
        self,
        scenarios: Scenarios,
        areas: AreaRange,
        tolerance: float,
        deadline: float = math.inf,
    ) -> None:
        self.scenarios, self.areas, self.tolerance = scenarios, areas, tolerance
        self.deadline = deadline

    def largest(self, group: int, enough: float = math.inf, start: Witness | None = None) -> Any:
        """Bound a group's largest regret; stop early where it is at least `enough`."""
        return _Branching(self, group, enough, start).run()


class _Alive(NamedTuple):
    """Rivals that may matter in a part of the box: positions, and bounds of their candidates."""

    at: Array
    candidates: list[Array] | None


class _Branching:
    """Branch and bound for one chip group."""

    def __init__(
        self, owner: RegretBounds, group: int, enough: float, start: Witness | None
    ) -> None:
        self.owner, self.group, self.enough = owner, group, enough
        self.scenes = owner.scenarios
        own_s = float(self.scenes.scores(self.scenes.nominal, [group])[0])
        self.attained, self.witness = 1.0, Witness(self.scenes.nominal, group, own_s)
        self.settled = 1.0
        self.shares = np.ones(0)
        self.least = self.all = np.zeros(0, dtype=np.int64)
        self.parts = 0
        self.queue: list[tuple[float, int, Point, Point, _Alive, float]] = []
        if start is not None:
            self._try_pair(start.point, start.rival)

    # ---- values at points ----

    def _own(self, point: Point) -> float:
        return float(self.scenes.scores(point, [self.group])[0])

    def _excess(self, rival: int) -> float:
        return float(self.owner.areas.excess_where_fits(rival, np.array([self.group]))[0])

    def _try_pair(self, point: Point, rival: int) -> float:
        own, other = self.scenes.scores(point, [self.group, rival])
        regret = float(self._excess(rival) * own / other)
        if regret > self.attained:
            self.attained, self.witness = regret, Witness(point, rival, float(other))
        return regret

    # ---- the parts ----

    def _swapped(self, slow: Point, fast: Point) -> tuple[Point, Point, float]:
        """Corners that bound a part, and the factor that the swapped rate costs."""
        if self.swap < 0:
            return slow, fast, 1.0
        i = self.swap
        own = (*slow[:i], fast[i], *slow[i + 1 :])
        other = (*fast[:i], slow[i], *fast[i + 1 :])
        return own, other, fast[i] / slow[i]

    def _push(self, slow: Point, fast: Point, alive: _Alive, known: float) -> None:
        """Bound a part and queue it where it is not settled."""
        self.parts += 1
        worst, best, factor = self._swapped(slow, fast)
        own = self._own(worst) * factor
        tolerance = 0.0 if slow == fast else self.owner.tolerance
        cutoff = own / (self.attained * (1.0 + tolerance))
        if known >= cutoff or not len(alive.at):
            self.settled = max(self.settled, self.attained * (1.0 + tolerance))
            return
        found = self.scenes.least_share(
            best,
            self.all[alive.at],
            self.shares[alive.at],
            cutoff,
            tolerance / 4.0,
            alive.candidates,
        )
        if found.group >= 0:
            for point in dict.fromkeys((fast, slow)):
                self._try_pair(point, found.group)
            if self.parts == 1:
                self._climb(slow, found.group)
        bound = own / found.sure
        if bound <= self.attained * (1.0 + tolerance) or slow == fast:
            self.settled = max(self.settled, bound)
        else:
            keep = np.flatnonzero(found.least * self.shares[alive.at] < cutoff)
            left = _Alive(alive.at[keep], [x[:, keep] for x in found.candidates])
            heapq.heappush(self.queue, (-bound, self.parts, slow, fast, left, found.sure))

    def _climb(self, point: Point, rival: int) -> None:
        """Walk from corner to corner while the regret against the best rival there rises."""
        slow, fast = self.scenes.slow, self.scenes.fast
        reached = self._try_pair(point, rival)
        for _ in range(4):
            before = reached
            for i in self.order:
                end = fast[i] if point[i] == slow[i] else slow[i]
                moved = (*point[:i], end, *point[i + 1 :])
                regret = self._try_pair(moved, rival)
                if regret > reached:
                    point, reached = moved, regret
            cutoff = self._own(point) / (max(reached, 1.0) * (1.0 + 1e-6))
            near = np.flatnonzero(self.least * self.shares < cutoff)
            if len(near):
                slack = self.owner.tolerance / 4.0
                args = (point, self.all[near], self.shares[near], cutoff, slack)
                found = self.scenes.least_share(*args)
                if found.group >= 0:
                    rival = found.group
                    reached = self._try_pair(point, rival)
            if reached <= before * (1.0 + self.owner.tolerance / 8.0):
                return

    def _split(self, bound: float, slow: Point, fast: Point, alive: _Alive, sure: float) -> None:
        """Halve a part along the constant whose interval costs its bound most."""
        del bound
        widths = [self._width(i, slow[i], fast[i]) for i in range(len(slow))]
        i = int(np.argmax(widths))
        middle = _between(slow[i], fast[i])
        near_slow = (*fast[:i], middle, *fast[i + 1 :])
        near_fast = (*slow[:i], middle, *slow[i + 1 :])
        swapped = i == self.swap
        self._push(slow, near_slow, alive, 0.0 if not swapped else sure)
        self._push(near_fast, fast, alive, sure if not swapped else 0.0)

    def _width(self, i: int, slow: float, fast: float) -> float:
        """Say what a constant's interval adds to a part's bound, as a logarithm."""
        whole = _distance(self.scenes.slow[i], self.scenes.fast[i])
        return self.weight[i] * _distance(slow, fast) / whole if whole else 0.0

    def _prepare(self) -> None:
        """See which constants matter, and which rate's ends are better swapped."""
        slow, fast = self.scenes.slow, self.scenes.fast
        worst = self._own(slow)
        self.weight, self.swap, best = [], -1, 0.5
        for i, constant in enumerate(self.scenes.rates):
            if slow[i] == fast[i]:
                self.weight.append(0.0)
                continue
            moved = math.log(worst / self._own((*slow[:i], fast[i], *slow[i + 1 :])))
            width = _distance(slow[i], fast[i])
            if constant.kind == "rate" and moved / width > best:
                self.swap, best = i, moved / width
            self.weight.append(moved)
        if self.swap >= 0:
            i = self.swap
            self.weight[i] = max(_distance(slow[i], fast[i]) - self.weight[i], 0.0)
        self.order = [int(i) for i in np.argsort(self.weight)[::-1] if self.weight[i] > 1e-4]

    def run(self) -> LargestRegret:
        """Bound the whole box, part by part."""
        owner, slow, fast = self.owner, self.scenes.slow, self.scenes.fast
        self._prepare()
        worst, _, factor = self._swapped(slow, fast)
        most = self._own(worst) * factor / self.attained * (1.0 + 1e-9)
        least = self.scenes.least_anywhere()
        rivals = np.flatnonzero(
            (least < most * owner.areas.largest_excess(self.group)) & owner.areas.fits_somewhere
        )
        shares = 1.0 / owner.areas.excess_against(self.group, rivals)
        near = least[rivals] * shares < most
        self.all, self.shares, self.least = rivals[near], shares[near], least[rivals[near]]
        self._push(slow, fast, _Alive(np.arange(len(self.all)), None), 0.0)
        while self.queue:
            bound, _, slow, fast, alive, sure = heapq.heappop(self.queue)
            if -bound <= self.attained * (1.0 + owner.tolerance):
                self.settled = max(self.settled, -bound)
                break
            if self.attained >= self.enough or time.monotonic() > owner.deadline:
                return LargestRegret(self.attained, -bound, self.witness, self.parts)
            self._split(-bound, slow, fast, alive, sure)
        bound = max(self.settled, self.attained)
        return LargestRegret(self.attained, bound, self.witness, self.parts)


def _distance(slow: float, fast: float) -> float:
    """Width of an interval: a logarithm, or a number of its own where one end is zero."""
    if slow <= 0.0 or fast <= 0.0:
        return abs(slow - fast) * 1e6
    return abs(math.log(fast / slow))


def _between(slow: float, fast: float) -> float:
    """Give the middle of an interval."""
    return math.sqrt(slow * fast) if slow > 0.0 and fast > 0.0 else (slow + fast) / 2.0
