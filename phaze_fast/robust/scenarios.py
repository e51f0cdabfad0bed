"""Chips at points of a box of constants: exact scores and bounds, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.limited import LeastShareSearch, WithinSearch
from phaze_fast.explore.problem import problems_of
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.robust.constants import Constant, at_point

__all__ = ["Point", "Scenarios", "ShareBounds"]

Array = np.ndarray[Any, Any]
Point = tuple[float, ...]
"""Values of the rates and latencies of a box, in its order."""


_MANY, _FIRST = 64, 8
"""Where there are more groups than this, so many are tried first, to have something to beat."""


class ShareBounds(NamedTuple):
    """The least product of a share and a score."""

    value: float
    """Infinite where none is below the limit."""
    group: int
    """Which group has it; -1: none is below the limit."""
    sure: float
    """No product is less."""
    least: Array
    """Lower bound of each group's score."""
    candidates: list[Array]
    """Lower bounds of every candidate, of each model."""


class _Scenario:
    """Chip groups with the constants at one point."""

    def __init__(self, owner: Scenarios, point: Point) -> None:
        values = {c.name: v for c, v in zip(owner.rates, point, strict=True)}
        self.groups, self.cluster = at_point(owner.groups, owner.cluster, values)
        self.problems = problems_of(owner.models, self.groups, self.cluster, owner.training)
        self.exact: dict[int, float] = {}


class Scenarios:
    """Scores of chip groups (seconds of a step, or a mean of several) at points of a box.

    Parameters
    ----------
    models, training, cluster, weights
        What is trained, and on what.
    groups
        The chips.
    rates
        Constants that times depend on.
    threads
        At most this many; nothing depends on it.
    """

    def __init__(
        self,
        models: Sequence[Model],
        groups: ChipGroups,
        cluster: Cluster,
        training: Training,
        rates: Sequence[Constant],
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        self.models, self.groups, self.cluster = list(models), groups, cluster
        self.training, self.rates, self.weights = training, tuple(rates), tuple(weights)
        self.threads = threads
        self.evaluations = 0
        self._known: dict[Point, _Scenario] = {}
        self._seen: dict[int, list[tuple[Point, float, list[Array]]]] = {}
        """Of each group, where its score is known, and bounds of its candidates there."""
        self._fast: list[Array] | None = None
        """Lower bounds of every candidate in the whole box, of each model."""

    def _at(self, point: Point) -> _Scenario:
        if point not in self._known:
            self._known[point] = _Scenario(self, point)
        return self._known[point]

    @property
    def slow(self) -> Point:
        """Where every step takes longest."""
        return tuple(c.slow for c in self.rates)

    @property
    def fast(self) -> Point:
        """Where every step is fastest."""
        return tuple(c.fast for c in self.rates)

    @property
    def nominal(self) -> Point:
        """Where a search without intervals is."""
        return tuple(c.nominal for c in self.rates)

    def scores(self, point: Point, groups: Sequence[int] | Array) -> Array:
        """Exact scores of groups; infinite where nothing fits."""
        known = self._at(point).exact
        new = np.array(sorted({int(g) for g in groups} - known.keys()), dtype=np.int64)
        if len(new):
            most = np.array([self._known_limit(g, point) for g in new.tolist()])
            score, _ = self.within(point, new, most)
            missed = new[np.isinf(score) & np.isfinite(most)]
            if len(missed):
                self.within(point, missed, np.full(len(missed), np.inf))
        return np.array([known[int(g)] for g in groups])

    def within(self, point: Point, groups: Array, limits: Array) -> tuple[Array, Array]:
        """Exact scores of groups at most their limits, infinite above; and lower bounds."""
        scene = self._at(point)
        exact = np.array([scene.exact.get(int(g), np.nan) for g in groups])
        new = np.isnan(exact)
        least = np.where(new, 0.0, exact)
        if new.any():
            search = WithinSearch(
                scene.problems,
                scene.groups.take(groups[new]),
                limits[new],
                self.weights,
                self.threads,
            )
            search.known = self._known_bounds(groups[new], point)
            exact[new], least[new] = search.exact()
            self.evaluations += int(np.isfinite(exact[new]).sum())
            found = zip(groups[new].tolist(), exact[new].tolist(), limits[new], strict=True)
            for k, (g, score, most) in enumerate(found):
                if np.isfinite(score) or most == np.inf:
                    scene.exact[g] = score
                    own = [x[:, k].copy() for x in search.candidate_bounds()]
                    self._seen.setdefault(g, []).append((point, score, own))
        return np.where(exact <= limits, exact, np.inf), least

    def _faster(self, one: Point, other: Point) -> bool:
        """Whether no constant is slower at one point than at the other."""
        return all(
            a == b or (a > b) == (c.kind == "rate")
            for a, b, c in zip(one, other, self.rates, strict=True)
        )

    def _known_bounds(self, groups: Array, point: Point) -> list[Array] | None:
        """Bounds of candidates at points that are nowhere slower."""
        if self._fast is None:
            return None
        known = [least[:, groups] for least in self._fast]
        for k, g in enumerate(groups.tolist()):
            for other, _, own in self._seen.get(g, ()):
                if self._faster(other, point):
                    for mine, least in zip(known, own, strict=True):
                        mine[:, k] = np.maximum(mine[:, k], least)
        return known

    def _known_limit(self, group: int, point: Point) -> float:
        """Give a group's score where nothing is faster; infinite where none is known."""
        return min(
            (score for other, score, _ in self._seen.get(group, ()) if self._faster(point, other)),
            default=np.inf,
        )

    def least_anywhere(self) -> Array:
        """Lower bounds of every group's score in the whole box."""
        if self._fast is None:
            scene = self._at(self.fast)
            none = np.full(len(self.groups), -1.0)
            search = WithinSearch(scene.problems, scene.groups, none, self.weights, self.threads)
            search.exact()
            self._fast, self._scores = search.candidate_bounds(), search.scores
            self._rooflines = [x.copy() for x in self._fast]
        return self._scores.combined([x.min(axis=0, initial=np.inf) for x in self._fast])

    def not_ruled_out(self, groups: Array, limit: float) -> Array:
        """Mark groups whose bound with operators mapped, where all is fastest, is within a limit.

        Only rooflines and mapped operators count, whatever else is known by now, so that a wider
        box never has fewer.
        """
        self.least_anywhere()
        scene = self._at(self.fast)
        search = WithinSearch(
            scene.problems,
            scene.groups.take(groups),
            np.full(len(groups), -1.0),
            self.weights,
            self.threads,
        )
        search.known = [x[:, groups] for x in self._rooflines]
        search.exact()
        for table in search.tables:
            for s in range(len(table.least)):
                near = np.flatnonzero(table.least[s] <= limit)
                if len(near) and len(search.tables) == 1:
                    table.bound(s, near, 2)
        marked: Array = search.lower_bounds() <= limit
        return marked

    def least_share(
        self,
        point: Point,
        groups: Array,
        shares: Array,
        limit: float,
        slack: float,
        known: Sequence[Array] | None = None,
    ) -> ShareBounds:
        """Find the least product of share and score below a limit.

        Parameters
        ----------
        point
            Where.
        groups, shares
            Chip groups, and what their scores are multiplied by.
        limit
            Larger products are of no interest.
        slack
            Products that are not smaller than the least by this part are not told apart.
        known
            Bounds of the candidates at a faster point.
        """
        scene = self._at(point)
        search = LeastShareSearch(
            scene.problems,
            scene.groups.take(groups),
            shares,
            limit,
            slack,
            self.weights,
            self.threads,
        )
        search.known = self._known_bounds(groups, point) if known is None else known
        if search.known is not None and len(groups) > _MANY:
            least = search.scores.combined([x.min(axis=0, initial=np.inf) for x in search.known])
            first = np.argsort(least * shares, kind="stable")[:_FIRST]
            search.begin_with(first, self.scores(point, groups[first]))
        value, at, sure = search.least()
        if point == self.fast and self._fast is not None:
            for mine, new in zip(self._fast, search.candidate_bounds(), strict=True):
                mine[:, groups] = np.maximum(mine[:, groups], new)
        chosen = int(groups[at]) if at >= 0 else -1
        return ShareBounds(value, chosen, sure, search.lower_bounds(), search.candidate_bounds())
