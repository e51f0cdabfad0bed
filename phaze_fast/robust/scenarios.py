"""Chip groups at points of a box of constants: exact scores and bounds, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.explore import (
    ChipGroups,
    LeastProductSearch,
    LimitedSearch,
    SearchProblem,
    problems_of,
)
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.robust.area_range import AreaRange
from phaze_fast.robust.constants import Uncertainty, at_point
from phaze_fast.tables import Array

Point = tuple[float, ...]
"""Values of a box's rates and latencies, in the order of `Uncertainty.rates`."""

TIES = 1e-6
"""Relative difference of scores below which `Scenarios.fastest` takes two groups as equal."""
_MANY, _FIRST = 64, 8
"""With more groups than `_MANY`, the `_FIRST` most promising are evaluated first, as incumbents."""


@dataclass(frozen=True, eq=False)
class UncertainSearch:
    """A search under uncertainty: models on the chips of a space."""

    models: tuple[Model, ...]
    space: ArchitectureSpace
    cluster: Cluster
    training: Training
    weights: tuple[float, ...] = ()
    """Weights of the models in the mean of their step times; equal where empty."""
    threads: int = 1
    """Largest number of threads; no result depends on it."""

    def problems(self, groups: ChipGroups, cluster: Cluster) -> list[SearchProblem]:
        """Return the search problem of each model on chip groups, as devices of a cluster."""
        return problems_of(self.models, groups, cluster, self.training)


class LeastProduct(NamedTuple):
    """Over some chip groups, the least product of a group's factor and its score."""

    value: float
    """The least product; infinite where no product is below the limit of the search."""
    group: int
    """The chip group with that product; -1 where no product is below the limit."""
    bound: float
    """Lower bound of the products of all groups."""
    least: Array
    """Lower bound of each group's score."""
    candidates: list[Array]
    """For each model, lower bounds of its step time by strategy and group."""


class _Scenario:
    """Chip groups with the constants at one point, and the exact scores that are known there."""

    def __init__(self, owner: Scenarios, point: Point) -> None:
        values = {c.name: v for c, v in zip(owner.rates, point, strict=True)}
        self.groups, cluster = at_point(owner.groups, owner.search.cluster, values)
        self.problems = owner.search.problems(self.groups, cluster)
        self.exact: dict[int, float] = {}


class Scenarios:
    """Scores of chip groups (seconds of a step, or a mean over models) at points of a box.

    A candidate is a group under one strategy of a model. A rate is slower where it is lower, a
    latency where it is higher.

    Parameters
    ----------
    search
        The search: models, chips, cluster and step.
    groups
        The chip groups.
    box
        The constants and their intervals.
    """

    def __init__(self, search: UncertainSearch, groups: ChipGroups, box: Uncertainty) -> None:
        self.search, self.groups, self.box, self.rates = search, groups, box, box.rates
        self.areas = AreaRange.of(search.space, groups.records, box)
        self.evaluations = 0
        self._known: dict[Point, _Scenario] = {}
        self._seen: dict[int, list[tuple[Point, float, list[Array]]]] = {}
        """By group: points where its score is known, the score, and its candidates' bounds."""
        self._fast: list[Array] | None = None
        """For each model, lower bounds of its candidates that hold in the whole box."""

    @property
    def _options(self) -> dict[str, Any]:
        return {"weights": self.search.weights, "threads": self.search.threads}

    def _at(self, point: Point) -> _Scenario:
        if point not in self._known:
            self._known[point] = _Scenario(self, point)
        return self._known[point]

    @property
    def slow(self) -> Point:
        """The point where every step takes longest."""
        return tuple(c.slow for c in self.rates)

    @property
    def fast(self) -> Point:
        """The point where every step is fastest."""
        return tuple(c.fast for c in self.rates)

    @property
    def nominal(self) -> Point:
        """The point at which every constant has its nominal value."""
        return tuple(c.nominal for c in self.rates)

    def scores(self, point: Point, groups: Sequence[int] | Array) -> Array:
        """Return exact scores of groups at a point; infinite where no plan fits."""
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
        """Return exact scores at a point (infinite above a group's limit), and lower bounds."""
        scene = self._at(point)
        exact = np.array([scene.exact.get(int(g), np.nan) for g in groups])
        new = np.isnan(exact)
        least = np.where(new, 0.0, exact)
        if new.any():
            some = scene.groups.take(groups[new])
            search = LimitedSearch(scene.problems, some, limits[new], **self._options)
            search.known = self._known_bounds(groups[new], point)
            exact[new], least[new] = search.exact()
            self.evaluations += int(np.isfinite(exact[new]).sum())
            evaluated = zip(groups[new].tolist(), exact[new].tolist(), limits[new], strict=True)
            for k, (g, score, most) in enumerate(evaluated):
                if np.isfinite(score) or most == np.inf:
                    scene.exact[g] = score
                    own = [x[:, k].copy() for x in search.candidate_bounds()]
                    self._seen.setdefault(g, []).append((point, score, own))
        return np.where(exact <= limits, exact, np.inf), least

    def _faster(self, one: Point, other: Point) -> bool:
        """Whether no constant is slower at `one` than at `other`."""
        return all(
            a == b or (a > b) == (c.kind == "rate")
            for a, b, c in zip(one, other, self.rates, strict=True)
        )

    def _known_bounds(self, groups: Array, point: Point) -> list[Array] | None:
        """Lower bounds of candidates at a point, from points where no constant is slower."""
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
        """Upper bound of a score: the least at points with no faster constant; else infinite."""
        return min(
            (score for other, score, _ in self._seen.get(group, ()) if self._faster(point, other)),
            default=np.inf,
        )

    def least_anywhere(self) -> Array:
        """Lower bounds of every group's score in the whole box."""
        if self._fast is None:
            scene = self._at(self.fast)
            none = np.full(len(self.groups), -1.0)
            search = LimitedSearch(scene.problems, scene.groups, none, **self._options)
            search.exact()
            self._fast, self._scores = search.candidate_bounds(), search.scores
            self._rooflines = [x.copy() for x in self._fast]
        return self._scores.combined([x.min(axis=0, initial=np.inf) for x in self._fast])

    def _not_ruled_out(self, groups: Array, limit: float) -> Array:
        """Mark groups whose mapped bound at the fastest point is within a limit.

        Only roofline and mapped bounds are used, even where tighter ones are known, so that a wider
        box never has fewer groups.
        """
        self.least_anywhere()
        scene = self._at(self.fast)
        none = np.full(len(groups), -1.0)
        search = LimitedSearch(scene.problems, scene.groups.take(groups), none, **self._options)
        search.known = [x[:, groups] for x in self._rooflines]
        search.exact()
        for table in search.tables:
            for s in range(len(table.least)):
                near = np.flatnonzero(table.least[s] <= limit)
                if len(near) and len(search.tables) == 1:
                    table.bound(s, near, 2)
        marked: Array = search.lower_bounds() <= limit
        return marked

    def possible_winners(self) -> Array:
        """Find the groups that may be the fastest at some point of the box.

        A group whose fastest step in the box takes longer than the slowest step of a chip that fits
        with all areas is never the fastest. In a wider box slow steps are slower, fast steps are
        faster and fewer chips always fit, so no possible winner is ruled out that was not before.
        """
        fits = np.flatnonzero(self.areas.fits_always)
        somewhere = np.flatnonzero(self.areas.fits_somewhere)
        least = self.least_anywhere()
        if not len(fits):
            return somewhere[np.isfinite(least[somewhere])]
        fastest = self.fastest(self.slow, fits)
        if self.slow == self.fast and len(fits) == len(somewhere):
            return np.array([fastest.group])  # the box is one point: the best chip
        return somewhere[self._not_ruled_out(somewhere, fastest.value)]

    def fastest(self, point: Point, groups: Array) -> LeastProduct:
        """Find the fastest of some groups at a point."""
        first = groups[np.argmin(self.least_anywhere()[groups])]
        most = float(self.scores(point, [first])[0]) * (1.0 + 1e-9)
        return self.least_product(point, groups, np.ones(len(groups)), most, TIES)

    def least_product(
        self,
        point: Point,
        groups: Array,
        factors: Array,
        limit: float,
        slack: float,
        known: Sequence[Array] | None = None,
    ) -> LeastProduct:
        """Find the group with the least product of its factor and its score, below a limit.

        Parameters
        ----------
        point
            The point of the box.
        groups, factors
            Chip groups, and the factors of their scores.
        limit
            Only products below this are searched for.
        slack
            Fraction by which a product has to be below the least one so far to be searched for.
        known
            Lower bounds of candidates from a point where no constant is slower; by default all
            that are stored.
        """
        scene = self._at(point)
        some = scene.groups.take(groups)
        search = LeastProductSearch(scene.problems, some, factors, limit, slack, **self._options)
        search.known = self._known_bounds(groups, point) if known is None else known
        if search.known is not None and len(groups) > _MANY:
            least = search.scores.combined([x.min(axis=0, initial=np.inf) for x in search.known])
            first = np.argsort(least * factors, kind="stable")[:_FIRST]
            search.begin_with(first, self.scores(point, groups[first]))
        value, at, bound = search.least()
        if point == self.fast and self._fast is not None:
            for mine, new in zip(self._fast, search.candidate_bounds(), strict=True):
                mine[:, groups] = np.maximum(mine[:, groups], new)
        chosen = int(groups[at]) if at >= 0 else -1
        return LeastProduct(value, chosen, bound, search.lower_bounds(), search.candidate_bounds())
