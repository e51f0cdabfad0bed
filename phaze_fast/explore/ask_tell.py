"""Ask and tell: which chip to try next, the best and the front so far.

For optimisers outside this package: they ask for points or bring their own, have them evaluated
here or measure them elsewhere, and tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.exact import ExactEvaluator
from phaze_fast.explore.goals import Front
from phaze_fast.explore.problem import problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.hardware.space_spec import COLUMNS
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.threads import thread_count

__all__ = ["Explorer", "Point", "Told"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Point:
    """A chip of the space."""

    index: int
    """Position in the space."""
    values: dict[str, float]
    """Of every axis, by name, such as ``tensor_core.width``."""
    bound_s: float
    """No plan on it takes less by this package's model; infinite: no plan fits."""


@dataclass(frozen=True)
class Told:
    """A point and what is known of it."""

    point: Point
    score: float
    """Seconds of a step, for several models their weighted geometric mean; infinite: none fits."""
    area_mm2: float
    winner: Winner | None = None
    """Its plans, where it was evaluated here and something fits."""


class Explorer:
    """A space that is asked and told.

    Parameters
    ----------
    models
        One, or several that share the cluster and the training step.
    space
        Chips to choose from.
    cluster
        Devices and fabric; its chip, if any, is not looked at.
    training
        The step, and what plans may look like.
    weights
        Of the models in the geometric mean; by default equal.
    threads
        At most this many for an evaluation, by default all cores; results do not depend on it.

    Raises
    ------
    InfeasibleError
        Where no chip passes the limits of the space.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:7000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, micro_batch=1)
    >>> explorer = Explorer(models.load("bertlarge"), few, pod, step)
    >>> while not explorer.done:
    ...     told = explorer.evaluate(explorer.ask(1))
    >>> explorer.best.point.index, len(explorer.told)
    (3, 1)
    """

    def __init__(
        self,
        models: Model | Sequence[Model],
        space: ArchitectureSpace,
        cluster: Cluster,
        training: Training,
        weights: Sequence[float] = (),
        threads: int | None = None,
    ) -> None:
        several = [models] if isinstance(models, Model) else list(models)
        if not several or (weights and len(weights) != len(several)):
            raise InvalidInputError(
                f"models, weights: {len(several)} and {len(weights)} are not accepted; expected at "
                "least one model, and a weight for each or none"
            )
        self.space, self._groups = space, ChipGroups.of(space)
        problems = problems_of(several, self._groups, cluster, training)
        shares = np.array(weights or [1.0] * len(several), dtype=float)
        self._shares = shares / shares.sum()
        self._exact = ExactEvaluator(problems, self._chips(), weights, thread_count(threads))
        self._told: dict[int, Told] = {}
        self._front = Front.empty(("time", "area"))

    def _chips(self) -> ChipGroups:
        """Every chip as a group of its own, with the one HBM capacity that it has."""
        chips, groups = self.space.chips, self._groups
        own = np.full((len(chips), len(groups.capacities)), -1, dtype=np.int64)
        at = np.arange(len(chips))
        of_chip = np.stack([at, np.searchsorted(groups.capacities, chips["hbm_bytes"])], axis=1)
        own[at, of_chip[:, 1]] = at
        return ChipGroups(chips, self.space.area_mm2, groups.capacities, own, of_chip, groups.like)

    # ---- points ----

    @cached_property
    def bounds_s(self) -> Array:
        """Lower bounds of every chip's score, shape (chips,), read-only.

        Rooflines of operators along each layer's longest path, layers spread evenly over stages,
        the least fill and drain, and what messages and gradients take at least; the smallest over
        strategies and layouts that may fit the chip's HBM.
        """
        groups, logs = self._groups, np.zeros(self._groups.chip.shape)
        for problem, share in zip(self._exact.problems, self._shares, strict=True):
            least = np.full(logs.shape, np.inf)
            for s in range(len(problem.evaluator)):
                work = problem.work_s(s, groups.records, self._exact.threads)
                for c in range(len(groups.capacities)):
                    rooms = np.full(len(work), c, dtype=np.int64)
                    bounds = problem.evaluator.work_bounds(s, work, rooms)
                    np.minimum(least[:, c], bounds, out=least[:, c])
            logs += share * np.log(least)
        has = groups.chip >= 0
        found = np.zeros(len(self.space))
        found[groups.chip[has]] = np.exp(logs[has]) * (1.0 - 1e-12)
        found.setflags(write=False)
        return found

    def point(self, index: int) -> Point:
        """Give the chip at a position of the space.

        Raises
        ------
        InvalidInputError
            Where there is none.
        """
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise InvalidTypeError(
                f"point: {index!r} is not accepted; expected a Point or a position in the space"
            )
        if not 0 <= index < len(self.space):
            raise InvalidInputError(
                f"point: {index} is unknown; expected a position from 0 to {len(self.space) - 1}"
            )
        row = self.space.chips[int(index)]
        values = {field: row[COLUMNS[field]].item() for field in self.space.spec.axes}
        return Point(int(index), values, float(self.bounds_s[index]))

    @cached_property
    def _index(self) -> dict[tuple[float, ...], int]:
        columns = [self.space.column(field).astype(float) for field in self.space.spec.axes]
        points = zip(*(column.tolist() for column in columns), strict=True)
        return {point: index for index, point in enumerate(points)}

    def find(self, values: Mapping[str, float]) -> Point | None:
        """Give the chip with these values of the axes; none where the limits leave it out.

        Raises
        ------
        InvalidInputError
            Where an axis is missing or unknown, or a value is not on its axis.
        """
        axes = self.space.spec.axes
        for field in values:
            if field not in axes:
                raise InvalidInputError(f"values: {field!r} is unknown; {nearest(field, axes)}")
        for field, accepted in axes.items():
            if field not in values:
                raise InvalidInputError(f"values: {field!r} is missing; expected every axis")
            if values[field] not in accepted:
                listed = ", ".join(f"{v:g}" for v in accepted)
                raise InvalidInputError(
                    f"values.{field}: {values[field]!r} is not accepted; expected one of {listed}"
                )
        index = self._index.get(tuple(float(values[field]) for field in axes))
        return None if index is None else self.point(index)

    def ask(self, n: int = 1) -> list[Point]:
        """Give points that were not told yet, those with the lowest bounds first.

        Points on which no plan fits are never given. Asking twice gives the same points until some
        are told; fewer than `n`, in the end none, where that is all there is.
        """
        if isinstance(n, bool) or not isinstance(n, int | np.integer):
            raise InvalidTypeError(f"n: {n!r} is not accepted; expected a whole number")
        if n < 1:
            raise InvalidInputError(f"n: {n} is not accepted; expected at least 1")
        return [self.point(int(index)) for index in self._open()[: int(n)]]

    def _open(self) -> Array:
        """Positions that were not told and may fit, lowest bounds first."""
        left = self._order[np.isfinite(self.bounds_s[self._order])]
        told = np.fromiter(self._told, dtype=np.int64, count=len(self._told))
        found: Array = left[~np.isin(left, told)]
        return found

    @cached_property
    def _order(self) -> Array:
        return np.argsort(self.bounds_s, kind="stable")

    # ---- results ----

    def _known(self, point: Point | int) -> Point:
        """Refuse what is no point of this space, or was told before."""
        own = self.point(point.index if isinstance(point, Point) else point)
        if isinstance(point, Point) and point.values != own.values:
            raise InvalidInputError(
                f"point: {point.index} with {point.values} is unknown; in this space it has "
                f"{own.values}"
            )
        if own.index in self._told:
            raise InvalidInputError(
                f"point: {own.index} was told before, with {self._told[own.index].score:g} s"
            )
        return own

    def _distinct(self, points: Iterable[Point | int]) -> list[Point]:
        found = [self._known(point) for point in points]
        indices = [point.index for point in found]
        for index in indices:
            if indices.count(index) > 1:
                raise InvalidInputError(f"point: {index} is given twice in one batch")
        return found

    def tell(self, batch: Iterable[tuple[Point | int, float]]) -> list[Told]:
        """Take results that were measured elsewhere.

        Parameters
        ----------
        batch
            Pairs of a point, or its position in the space, and seconds of a step; infinite where
            nothing fits. If one is refused, none is taken.

        Raises
        ------
        InvalidInputError
            Where a point is unknown, was told before or is given twice, or a time is NaN or not
            above zero.
        """
        pairs = list(batch)
        points = self._distinct(point for point, _ in pairs)
        for point, (_, score) in zip(points, pairs, strict=True):
            number = isinstance(score, int | float | np.integer | np.floating)
            if isinstance(score, bool) or not number:
                raise InvalidTypeError(
                    f"time_s of point {point.index}: {score!r} is not accepted; expected seconds"
                )
            if not score > 0:
                raise InvalidInputError(
                    f"time_s of point {point.index}: {score} is not accepted; expected more than "
                    "0 seconds, infinite where nothing fits"
                )
        scores = [float(score) for _, score in pairs]
        return self._take(points, scores, [None] * len(points))

    def evaluate(self, points: Iterable[Point | int]) -> list[Told]:
        """Evaluate points exactly by this package's model, and tell them."""
        distinct = self._distinct(points)
        winners = self._exact.winners([point.index for point in distinct])
        scores = [math.inf if w is None else w.score for w in winners]
        return self._take(distinct, scores, winners)

    def _take(
        self, points: Sequence[Point], scores: Sequence[float], winners: Sequence[Winner | None]
    ) -> list[Told]:
        found = []
        for point, score, winner in zip(points, scores, winners, strict=True):
            told = Told(point, score, float(self.space.area_mm2[point.index]), winner)
            self._told[point.index] = told
            if score < math.inf:
                self._front.add((point.index,), np.array([score, told.area_mm2]))
            found.append(told)
        return found

    @property
    def told(self) -> list[Told]:
        """Everything that was told, in order."""
        return list(self._told.values())

    @property
    def best(self) -> Told | None:
        """The fastest so far, of equal ones the smallest; none before anything fits."""
        fitting = [told for told in self._told.values() if told.score < math.inf]
        return min(fitting, key=lambda t: (t.score, t.area_mm2, t.point.index), default=None)

    @property
    def front(self) -> list[Told]:
        """Points of which none is both faster and smaller than another, fastest first."""
        found = [self._told[index] for (index,) in self._front.points]
        return sorted(found, key=lambda told: told.score)

    @property
    def done(self) -> bool:
        """Whether nothing that was not told can be faster, if what was told is by this model."""
        left, best = self._open(), self.best
        return not len(left) or (best is not None and float(self.bounds_s[left[0]]) >= best.score)
