"""The ask-and-tell interface for external optimisers: which chip to try next, the best so far.

An optimiser asks for points or proposes its own, evaluates them here (`Explorer.evaluate`) or
elsewhere, and reports their times (`Explorer.tell`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest, not_accepted
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.objectives import Front
from phaze_fast.explore.per_chip import ExactEvaluator
from phaze_fast.explore.problem import problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.hardware.space import COLUMNS
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.tables import Array
from phaze_fast.threads import thread_count


@dataclass(frozen=True)
class Point:
    """A chip of the space, with a lower bound of its score."""

    index: int
    """Position in the space."""
    values: dict[str, float]
    """Values of all axes by name, such as ``tensor_core.width``."""
    bound_s: float
    """Lower bound of the chip's score by this package's cost model; infinite: no plan fits."""


@dataclass(frozen=True)
class Told:
    """A point with its score, evaluated here or reported by `Explorer.tell`."""

    point: Point
    score: float
    """Seconds of a step, for several models the weighted geometric mean; infinite: no plan fits."""
    area_mm2: float
    winner: Winner | None = None
    """The plans on the chip; None where the score was reported, or where no plan fits."""


class Explorer:
    """A space of chips with the ask-and-tell interface of optimisers.

    Parameters
    ----------
    models
        One model, or several that share the cluster and the training step.
    space
        Chips to choose from.
    cluster
        Devices and fabric; its chip, if any, is ignored.
    training
        The training step, and the options that its plans may use.
    weights
        Weights of the models in the geometric mean; by default equal.
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
        chips = self._groups.single(*self._groups.of_chip.T)
        shares = np.array(weights or [1.0] * len(several), dtype=float)
        self._shares = shares / shares.sum()
        self._exact = ExactEvaluator(problems, chips, weights, thread_count(threads))
        self._told: dict[int, Told] = {}
        self._front = Front.empty(("time", "area"))

    # ---- points ----

    @cached_property
    def bounds_s(self) -> Array:
        """Lower bounds of every chip's score, shape (chips,), read-only.

        The bound is the least sum, over strategies and layouts that may fit the HBM, of rooflines
        of operators along each layer's longest path with layers spread evenly over stages, the
        least fill and drain of the pipeline, and lower bounds of messages and gradient reduction.
        """
        groups, logs = self._groups, np.zeros(self._groups.chip.shape)
        for problem, share in zip(self._exact.problems, self._shares, strict=True):
            least = np.full(logs.shape, np.inf)
            for s in range(len(problem)):
                runs = problem.runs(s, groups)
                work = problem.work_s(s, groups.records[runs], self._exact.threads)
                evaluator, k = problem.of(s)
                for c in range(len(groups.capacities)):
                    capacity = np.full(len(work), c, dtype=np.int64)
                    bounds = evaluator.work_bounds(k, work, capacity)
                    least[runs, c] = np.minimum(least[runs, c], bounds)
            logs += share * np.log(least)
        group, capacity = groups.of_chip.T
        bounds_s: Array = np.exp(logs[group, capacity]) * (1.0 - 1e-12)
        bounds_s.setflags(write=False)
        return bounds_s

    def point(self, index: int) -> Point:
        """Return the chip at a position of the space.

        Raises
        ------
        InvalidInputError
            Where the space has no such position.
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
        """Return the chip with these values of the axes; None where the limits exclude it.

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
                raise not_accepted(f"values.{field}", values[field], f"one of {listed}")
        index = self._index.get(tuple(float(values[field]) for field in axes))
        return None if index is None else self.point(index)

    def ask(self, n: int = 1) -> list[Point]:
        """Return points without a recorded score, those with the lowest bounds first.

        Points on which no plan fits are never returned. Repeated calls return the same points until
        scores are recorded; where fewer than `n` points are left, all of them are returned.
        """
        if isinstance(n, bool) or not isinstance(n, int | np.integer):
            raise InvalidTypeError(f"n: {n!r} is not accepted; expected a whole number")
        if n < 1:
            raise InvalidInputError(f"n: {n} is not accepted; expected at least 1")
        return [self.point(int(index)) for index in self._open()[: int(n)]]

    def _open(self) -> Array:
        """Positions without a recorded score on which a plan may fit, lowest bounds first."""
        feasible = self._order[np.isfinite(self.bounds_s[self._order])]
        recorded = np.fromiter(self._told, dtype=np.int64, count=len(self._told))
        still_open: Array = feasible[~np.isin(feasible, recorded)]
        return still_open

    @cached_property
    def _order(self) -> Array:
        return np.argsort(self.bounds_s, kind="stable")

    # ---- results ----

    def _untold(self, point: Point | int) -> Point:
        """Return a point of this space without a score, or raise InvalidInputError."""
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
        distinct = [self._untold(point) for point in points]
        indices = [point.index for point in distinct]
        for index in indices:
            if indices.count(index) > 1:
                raise InvalidInputError(f"point: {index} is given twice in one batch")
        return distinct

    def tell(self, batch: Iterable[tuple[Point | int, float]]) -> list[Told]:
        """Record times that were measured elsewhere.

        Parameters
        ----------
        batch
            Pairs of a point, or its position in the space, and seconds of a step; infinite where
            no plan fits. If one pair is refused, none is recorded.

        Raises
        ------
        InvalidInputError
            Where a point is unknown, already has a score or is given twice, or a time is NaN or not
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
        """Evaluate points exactly by this package's model, and record their scores."""
        distinct = self._distinct(points)
        winners = self._exact.winners([point.index for point in distinct])
        scores = [math.inf if w is None else w.score for w in winners]
        return self._take(distinct, scores, winners)

    def _take(
        self, points: Sequence[Point], scores: Sequence[float], winners: Sequence[Winner | None]
    ) -> list[Told]:
        batch = []
        for point, score, winner in zip(points, scores, winners, strict=True):
            record = Told(point, score, float(self.space.area_mm2[point.index]), winner)
            self._told[point.index] = record
            if score < math.inf:
                self._front.add((point.index,), np.array([score, record.area_mm2]))
            batch.append(record)
        return batch

    @property
    def told(self) -> list[Told]:
        """All points with a score, in the order in which the scores were recorded."""
        return list(self._told.values())

    @property
    def best(self) -> Told | None:
        """The fastest point so far, the smallest chip among ties; None before a plan fits."""
        fitting = [record for record in self._told.values() if record.score < math.inf]
        return min(fitting, key=lambda t: (t.score, t.area_mm2, t.point.index), default=None)

    @property
    def front(self) -> list[Told]:
        """The points that are non-dominated in time and area, fastest first."""
        front = [self._told[index] for (index,) in self._front.points]
        return sorted(front, key=lambda record: record.score)

    @property
    def done(self) -> bool:
        """Whether no other point can be faster, given that all scores are of this cost model."""
        left, best = self._open(), self.best
        return not len(left) or (best is not None and float(self.bounds_s[left[0]]) >= best.score)
