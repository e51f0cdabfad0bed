"""The chip of least largest regret over a box of constants, with a proof.

The regret of a chip at a point is its step time divided by that of the fastest chip there. A step
is never slower with a faster constant, and a rate that is k times as high makes it at most k times
faster. So in a part of the box between a slow and a fast corner

    regret <= T_chip(slow corner) / T_fastest(fast corner),

and, if one rate dominates the step time, with the ends of that rate swapped,

    regret <= k * T_chip(that rate fast, others slow) / T_fastest(that rate slow, others fast).

Parts whose bound is above the attained regret are split where that lowers the bound most. Areas
need no branching: see `area_range`.

Points at which some chip has a faster rival are stored as witnesses: each gives a lower bound of
every other chip's regret, first from the roofline bound of the chip's step, in the end from the
exact step. The chip with the least regret at the witnesses is evaluated next: its largest regret
over the box is bounded, and where that bound is too large another witness is found. The search ends
when no chip's regret at the witnesses is below the best bound by more than the tolerance.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.errors import not_accepted
from phaze_fast.explore import ChipGroups, ExactEvaluator, Winner
from phaze_fast.hardware import Accelerator, ArchitectureSpace
from phaze_fast.robust.area_range import widened_space
from phaze_fast.robust.constants import Uncertainty
from phaze_fast.robust.scenarios import Point, Scenarios, UncertainSearch
from phaze_fast.tables import Array, picked

TOLERANCE = 0.05
"""Largest relative distance of the proven regret of the robust chip from its lower bound."""
_INNER = 0.75
"""Fraction of the tolerance for bounding one chip's regret; the rest is for comparing chips."""
_WAVE = 32


# ---- one chip ----


@dataclass(frozen=True)
class Witness:
    """The point of the box with the largest regret so far, and the rival chip group there."""

    point: Point
    rival: int
    rival_s: float


@dataclass(frozen=True)
class LargestRegret:
    """The largest regret of a chip over a box, with a bound."""

    attained: float
    """The regret at some point of the box."""
    bound: float
    """Upper bound of the regret at all points."""
    witness: Witness
    parts: int
    """How many parts of the box were bounded."""


class _Rivals(NamedTuple):
    """Chip groups that may be fastest in a part of the box.

    `at` has their positions in `RegretSearch.all`; `candidates` the bounds of `LeastProduct`.
    """

    at: Array
    candidates: list[Array] | None


class RegretSearch:
    """The largest regret of one chip group over a box, by branch and bound on the box.

    Parameters
    ----------
    scenarios
        Scores at points, and which chips fit where.
    group
        The chip group.
    tolerance
        Relative distance of bound and attained regret to reach.
    deadline
        Value of `time.monotonic` at which the search stops with a bound.
    enough
        Stop once the attained regret is at least this.
    start
        A point and a rival whose regret is computed first.
    """

    def __init__(
        self,
        scenarios: Scenarios,
        group: int,
        *,
        tolerance: float,
        deadline: float = math.inf,
        enough: float = math.inf,
        start: Witness | None = None,
    ) -> None:
        self.scenes, self.areas, self.group = scenarios, scenarios.areas, group
        self.tolerance, self.deadline, self.enough = tolerance, deadline, enough
        own_s = float(self.scenes.scores(self.scenes.nominal, [group])[0])
        self.attained, self.witness = 1.0, Witness(self.scenes.nominal, group, own_s)
        self.settled = 1.0
        """Upper bound of the regret in the parts of the box that are done."""
        self.factors = np.ones(0)
        """By rival: 1 / the largest quotient of the chip's area and the limit if the rival fits."""
        self.least = self.all = np.zeros(0, dtype=np.int64)
        self.parts = 0
        self.queue: list[tuple[float, int, Point, Point, _Rivals, float]] = []
        if start is not None:
            self._try_pair(start.point, start.rival)

    # ---- values at points ----

    def _own(self, point: Point) -> float:
        return float(self.scenes.scores(point, [self.group])[0])

    def _excess(self, rival: int) -> float:
        return float(self.areas.excess_where_fits(rival, np.array([self.group]))[0])

    def _try_pair(self, point: Point, rival: int) -> float:
        own, other = self.scenes.scores(point, [self.group, rival])
        regret = float(self._excess(rival) * own / other)
        if regret > self.attained:
            self.attained, self.witness = regret, Witness(point, rival, float(other))
        return regret

    # ---- the parts ----

    def _swapped(self, slow: Point, fast: Point) -> tuple[Point, Point, float]:
        """Return the points at which the chip and its rivals are timed to bound a part of the box.

        The chip is timed at the part's slow end and rivals at the fast end, except that the two
        ends of the rate `swap` are exchanged; the third value is the factor on the chip's time
        which makes up for the exchange.
        """
        if self.swap < 0:
            return slow, fast, 1.0
        i = self.swap
        own = (*slow[:i], fast[i], *slow[i + 1 :])
        other = (*fast[:i], slow[i], *fast[i + 1 :])
        return own, other, fast[i] / slow[i]

    def _push(self, slow: Point, fast: Point, rivals: _Rivals, known: float) -> None:
        """Bound the regret in a part of the box, and queue the part unless the bound suffices."""
        self.parts += 1
        worst, best, factor = self._swapped(slow, fast)
        own = self._own(worst) * factor
        tolerance = 0.0 if slow == fast else self.tolerance
        cutoff = own / (self.attained * (1.0 + tolerance))
        if known >= cutoff or not len(rivals.at):
            self.settled = max(self.settled, self.attained * (1.0 + tolerance))
            return
        fastest = self.scenes.least_product(
            best,
            self.all[rivals.at],
            self.factors[rivals.at],
            cutoff,
            tolerance / 4.0,
            rivals.candidates,
        )
        if fastest.group >= 0:
            for point in dict.fromkeys((fast, slow)):
                self._try_pair(point, fastest.group)
            if self.parts == 1:
                self._climb(slow, fastest.group)
        bound = own / fastest.bound
        if bound <= self.attained * (1.0 + tolerance) or slow == fast:
            self.settled = max(self.settled, bound)
        else:
            keep = np.flatnonzero(fastest.least * self.factors[rivals.at] < cutoff)
            remaining = _Rivals(rivals.at[keep], [x[:, keep] for x in fastest.candidates])
            heapq.heappush(self.queue, (-bound, self.parts, slow, fast, remaining, fastest.bound))

    def _climb(self, point: Point, rival: int) -> None:
        """Move from corner to corner while the regret against the fastest rival there rises."""
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
            near = np.flatnonzero(self.least * self.factors < cutoff)
            if len(near):
                slack = self.tolerance / 4.0
                args = (point, self.all[near], self.factors[near], cutoff, slack)
                fastest = self.scenes.least_product(*args)
                if fastest.group >= 0:
                    rival = fastest.group
                    reached = self._try_pair(point, rival)
            if reached <= before * (1.0 + self.tolerance / 8.0):
                return

    def _split(self, slow: Point, fast: Point, rivals: _Rivals, bound_s: float) -> None:
        """Halve a part along the constant whose interval adds most to its bound."""
        widths = [self._width(i, slow[i], fast[i]) for i in range(len(slow))]
        i = int(np.argmax(widths))
        ends = slow[i], fast[i]
        middle = math.sqrt(math.prod(ends)) if min(ends) > 0.0 else sum(ends) / 2.0
        near_slow = (*fast[:i], middle, *fast[i + 1 :])
        near_fast = (*slow[:i], middle, *slow[i + 1 :])
        swapped = i == self.swap
        self._push(slow, near_slow, rivals, 0.0 if not swapped else bound_s)
        self._push(near_fast, fast, rivals, bound_s if not swapped else 0.0)

    def _width(self, i: int, slow: float, fast: float) -> float:
        """Logarithm of the factor that a constant's interval adds to a part's bound."""
        whole = _distance(self.scenes.slow[i], self.scenes.fast[i])
        return self.weight[i] * _distance(slow, fast) / whole if whole else 0.0

    def _prepare(self) -> None:
        """Weigh the constants, and choose the rate whose ends are swapped, if any."""
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
        """Bound the regret over the whole box, part by part."""
        slow, fast = self.scenes.slow, self.scenes.fast
        self._prepare()
        worst, _, factor = self._swapped(slow, fast)
        most = self._own(worst) * factor / self.attained * (1.0 + 1e-9)
        least = self.scenes.least_anywhere()
        rivals = np.flatnonzero(
            (least < most * self.areas.largest_excess(self.group)) & self.areas.fits_somewhere
        )
        factors = 1.0 / self.areas.excess_against(self.group, rivals)
        near = least[rivals] * factors < most
        self.all, self.factors, self.least = rivals[near], factors[near], least[rivals[near]]
        self._push(slow, fast, _Rivals(np.arange(len(self.all)), None), 0.0)
        while self.queue:
            bound, _, slow, fast, remaining, bound_s = heapq.heappop(self.queue)
            if -bound <= self.attained * (1.0 + self.tolerance):
                self.settled = max(self.settled, -bound)
                break
            if self.attained >= self.enough or time.monotonic() > self.deadline:
                return LargestRegret(self.attained, -bound, self.witness, self.parts)
            self._split(slow, fast, remaining, bound_s)
        bound = max(self.settled, self.attained)
        return LargestRegret(self.attained, bound, self.witness, self.parts)


def _distance(slow: float, fast: float) -> float:
    """Width of an interval: log of the quotient of its ends; relative where an end is zero."""
    if slow <= 0.0 or fast <= 0.0:
        return abs(slow - fast) * 1e6
    return abs(math.log(fast / slow))


# ---- all chips ----


@dataclass(frozen=True, eq=False)
class RobustResult:
    """The chip of least largest regret, compared with the nominal winner."""

    chip: Accelerator
    index: int
    """Position in the grid of the space."""
    max_regret: float
    """Upper bound of the chip's regret at all points of the box."""
    attained: float
    """The chip's regret at the point `worst_at`."""
    bound: float
    """Lower bound of the largest regret of any chip."""
    proven: bool
    """Whether `max_regret` is at most `bound` times 1 + tolerance."""
    tolerance: float
    time_s: float
    """Step time of the chip at the nominal constants."""
    worst_at: dict[str, float]
    """The point of the box with the regret `attained`."""
    rival: Accelerator
    """The fastest chip at `worst_at`."""
    possible_winners: int
    """Number of chips that may be the fastest at some point of the box."""
    nominal: LargestRegret
    """Largest regret of the chip that is best at the nominal constants."""
    nominal_chip: Accelerator
    nominal_s: float
    uncertainty: Uncertainty
    seconds: float
    evaluations: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "robust": {
                "chip": self.chip.to_dict(),
                "chip_text": str(self.chip),
                "grid_index": self.index,
                "max_regret": self.max_regret,
                "attained_regret": self.attained,
                **picked(self, "bound", "proven", "tolerance", "time_s"),
                "cost": self.time_s / self.nominal_s - 1.0,
                "worst_at": self.worst_at,
                "rival_text": str(self.rival),
            },
            "possible_winners": self.possible_winners,
            "nominal_max_regret": self.nominal.bound,
            "nominal_attained_regret": self.nominal.attained,
            "constants": self.uncertainty.to_dict(),
            "robust_seconds": self.seconds,
        }


class _Candidates:
    """Candidates, each with a lower bound of its largest regret.

    A witness is a point of the box and a rival. The factor by which a candidate is slower than the
    rival at this point bounds the candidate's largest regret from below.
    """

    def __init__(self, scenarios: Scenarios, candidates: Array) -> None:
        self.scenes, self.groups = scenarios, candidates
        self.ratios = np.zeros(len(candidates))
        """Largest known quotient of each candidate's step and a rival's; below 1: it is faster."""
        self.witnesses: list[tuple[Witness, Array]] = []
        self.done = np.zeros(len(candidates), dtype=np.int64)
        """Number of witnesses, in order, at which each candidate's regret is exact."""

    def add(self, witness: Witness) -> None:
        """Add a witness."""
        excess = self.scenes.areas.excess_where_fits(witness.rival, self.groups)
        self.witnesses.append((witness, excess))
        floor = self.scenes.least_anywhere()[self.groups]
        self.ratios = np.maximum(self.ratios, excess * floor / witness.rival_s)

    @property
    def least(self) -> Array:
        """Lower bounds of every candidate's largest regret."""
        return np.maximum(self.ratios, 1.0)

    def next(self, below: float) -> int:
        """Position of the candidate of least regret at the witnesses; -1 if all reach `below`."""
        while True:
            unsure = self.done < len(self.witnesses)  # among equal bounds, exact ones go first
            order = np.lexsort((self.ratios, unsure, self.least))
            first = int(order[0])
            if self.least[first] >= below:
                return -1
            if not unsure[first]:
                return first
            wave = order[:_WAVE]
            wave = wave[(self.done[wave] < len(self.witnesses)) & (self.least[wave] < below)]
            for k, (witness, excess) in enumerate(self.witnesses):
                todo = wave[(self.done[wave] <= k) & (self.least[wave] < below)]
                if len(todo):
                    limits = below * witness.rival_s / excess[todo]
                    exact, least = self.scenes.within(witness.point, self.groups[todo], limits)
                    reached = np.where(np.isfinite(exact), exact, np.maximum(least, limits))
                    regret = excess[todo] * reached / witness.rival_s
                    self.ratios[todo] = np.maximum(self.ratios[todo], regret)
                    self.done[todo] = k + 1

    def worst_witness(self, at: int) -> Witness:
        """Find the witness at which a candidate has its largest regret."""
        regrets = [
            float(excess[at] * self.scenes.scores(w.point, [self.groups[at]])[0] / w.rival_s)
            for w, excess in self.witnesses
        ]
        return self.witnesses[int(np.argmax(regrets))][0]


def _checked(tolerance: float) -> float:
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not is_number or not 1e-6 <= tolerance <= 1.0:
        raise not_accepted("tolerance", tolerance, "a number from 1e-06 to 1")
    return float(tolerance)


def robust_chip(
    search: UncertainSearch,
    uncertainty: Uncertainty,
    nominal: Winner,
    *,
    tolerance: float = TOLERANCE,
    time_limit_s: float = math.inf,
    say: Callable[[str], None] | None = None,
) -> RobustResult:
    """Find the chip of least largest regret over a box of constants; see `phaze_fast.search`.

    Parameters
    ----------
    search
        The search: models, chips, cluster and step.
    uncertainty
        The box.
    nominal
        The best chip at the nominal constants, as the search found it.
    tolerance
        How far the least largest regret may be from its bound, as a fraction.
    time_limit_s
        Stop after so many seconds, with a bound.
    say
        Called with a line on the progress.
    """
    began, tolerance = time.monotonic(), _checked(tolerance)
    space, wide = search.space, widened_space(search.space, uncertainty)
    groups = ChipGroups.of(wide)
    scenes = Scenarios(search, groups, uncertainty)
    deadline, say = began + time_limit_s, say or (lambda _: None)
    first_chip = groups.chip.max(axis=1)
    inside = np.isin(wide.index[first_chip], space.index) & scenes.areas.fits_somewhere
    table = _Candidates(scenes, np.flatnonzero(inside))
    start = int(np.flatnonzero(wide.index == space.index[nominal.chip])[0])
    start = int(groups.of_chip[start, 0])
    say("largest regret of the nominal winner")
    of_nominal = RegretSearch(scenes, start, tolerance=tolerance, deadline=deadline).run()
    table.add(of_nominal.witness)
    best, of_best = start, of_nominal
    while time.monotonic() < deadline:
        at = table.next(of_best.bound / (1.0 + tolerance))
        if at < 0:
            break
        group = int(table.groups[at])
        say(f"chip {group}: regret {table.least[at]:.4f} at witnesses, best {of_best.bound:.4f}")
        regret = RegretSearch(
            scenes,
            group,
            tolerance=tolerance * _INNER,
            deadline=deadline,
            enough=of_best.bound,
            start=table.worst_witness(at),
        ).run()
        if regret.bound < of_best.bound:
            best, of_best = group, regret
        table.add(regret.witness)
        table.ratios[at] = max(table.ratios[at], regret.attained)
        table.done[at] = len(table.witnesses)
    return _result(table, wide, (start, of_nominal), (best, of_best), tolerance, began)


def _result(
    table: _Candidates,
    wide: ArchitectureSpace,
    nominal: tuple[int, LargestRegret],
    robust: tuple[int, LargestRegret],
    tolerance: float,
    began: float,
) -> RobustResult:
    """Describe the robust chip and the nominal winner, each a chip group with its regret."""
    (start, of_nominal), (best, of_best), scenes = nominal, robust, table.scenes
    search, groups = scenes.search, scenes.groups
    least = max(1.0, min(float(table.least.min()), of_best.attained))
    at_nominal = ExactEvaluator(
        search.problems(groups, search.cluster), groups, search.weights, search.threads
    )

    def chip(group: int) -> int:
        """Position of a group's chip, with the HBM of its best plan."""
        winner = at_nominal.winners([group])[0]
        return int(groups.chip[group].max()) if winner is None else winner.chip

    return RobustResult(
        chip=wide[chip(best)],
        index=int(wide.index[chip(best)]),
        max_regret=of_best.bound,
        attained=of_best.attained,
        bound=least,
        proven=of_best.bound <= least * (1.0 + tolerance) * (1.0 + 1e-9),
        tolerance=tolerance,
        time_s=float(at_nominal.scores([best])[0]),
        worst_at=dict(zip((c.name for c in scenes.rates), of_best.witness.point, strict=True)),
        rival=wide[chip(of_best.witness.rival)],
        possible_winners=len(scenes.possible_winners()),
        nominal=of_nominal,
        nominal_chip=wide[chip(start)],
        nominal_s=float(at_nominal.scores([start])[0]),
        uncertainty=scenes.box,
        seconds=time.monotonic() - began,
        evaluations=scenes.evaluations,
    )
