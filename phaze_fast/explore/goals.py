"""Objectives, and the front: points of which none is at most another in every objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, nearest

__all__ = ["OBJECTIVES", "BestFew", "Front", "ScoreTable", "checked_objectives", "front_of"]

Array = np.ndarray[Any, Any]

OBJECTIVES = ("time", "area", "energy", "hbm", "cost")
"""Seconds of a step, mm2 of a chip, joules of a step, bytes of HBM of a device, dollars of all."""


def checked_objectives(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse what is not an objective."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    for name in names:
        if name not in OBJECTIVES:
            raise InvalidInputError(
                f"pareto: {name!r} is not accepted; {nearest(str(name), OBJECTIVES)}"
            )
    if names and "time" not in names:
        raise InvalidInputError(f"pareto: {','.join(names)} leaves out time; expected it as well")
    chosen = tuple(dict.fromkeys(names))
    if len(chosen) == 1:
        raise InvalidInputError("pareto: time alone is not accepted; expected another as well")
    return chosen


def front_of(values: Array) -> Array:
    """Positions of the rows that no other row is at most everywhere, of equal ones the first.

    Parameters
    ----------
    values
        One row per point and one column per objective; smaller is better.

    Examples
    --------
    >>> front_of(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [2.0, 2.0]])).tolist()
    [0, 1]
    """
    at = np.lexsort((np.arange(len(values)), *values.T[::-1]))
    columns = [np.ascontiguousarray(column[at]) for column in values.T]
    kept: list[int] = []
    while len(at):  # the first of what is left is at least none of the others
        kept.append(int(at[0]))
        beaten = np.logical_and.reduce([column[0] <= column[1:] for column in columns])
        stay = np.flatnonzero(~beaten) + 1
        at, columns = at[stay], [column[stay] for column in columns]
    return np.array(sorted(kept), dtype=np.int64)


_FEW_POINTS, _PAIRS = 8, 2**19
"""Points of a front that are held against others at once at first, and pairs at most."""


@dataclass
class Front:
    """Points found so far of which none is at most another in every objective."""

    objectives: tuple[str, ...]
    values: Array
    """One row each, in the order of `objectives` with time first."""
    points: list[tuple[int, ...]]
    """What they are: (chip group, capacity, strategy)."""

    @classmethod
    def empty(cls, objectives: tuple[str, ...]) -> Front:
        """Without points."""
        names = ("time", *(name for name in objectives if name != "time"))
        return cls(names, np.empty((0, len(names))), [])

    def add(self, point: tuple[int, ...], values: Array) -> None:
        """Take a point in, and drop those it is at most."""
        same = (self.values == values).all(axis=1)
        if same.any():
            at = int(np.flatnonzero(same)[0])
            if point < self.points[at]:
                self.points[at] = point
            return
        if (self.values <= values).all(axis=1).any():
            return
        kept: Array = np.invert((self.values >= values).all(axis=1))
        self.values = np.vstack([self.values[kept], values])
        self.points = [p for p, keep in zip(self.points, kept, strict=True) if keep] + [point]

    def below_s(self, others: Array) -> Array:
        """How long a point may take, at most, to be on the front: by its other objectives.

        Parameters
        ----------
        others
            One row per point: lower bounds of all objectives but time.
        """
        found = np.full(len(others), np.inf)
        fastest_first = self.values[np.argsort(self.values[:, 0], kind="stable")]
        left, columns = np.arange(len(others)), [np.ascontiguousarray(x) for x in others.T]
        begin, size = 0, _FEW_POINTS
        while begin < len(fastest_first) and len(left):
            some = fastest_first[begin : begin + size]
            begin, size = begin + size, max(_FEW_POINTS, min(2 * size, _PAIRS // len(left)))
            at_most = np.logical_and.reduce(
                [some[:, j + 1, None] <= column for j, column in enumerate(columns)]
            )
            beaten = at_most.any(axis=0)
            found[left[beaten]] = some[at_most[:, beaten].argmax(axis=0), 0]
            left, columns = left[~beaten], [column[~beaten] for column in columns]
        return found


class BestFew:
    """The goal of the best chip groups: what is worth looking at is below the k-th best score."""

    def __init__(self, top: int) -> None:
        self.top, self.limit = top, float("inf")
        self.scores: dict[int, float] = {}
        """Best score of each chip group of which something was found."""

    def note(self, group: int, score: float) -> None:
        """Take a score in."""
        if score >= self.scores.get(group, np.inf):
            return
        self.scores[group] = score
        if score < self.limit and len(self.scores) >= self.top:
            values = np.fromiter(self.scores.values(), dtype=float)
            self.limit = float(np.partition(values, self.top - 1)[self.top - 1])

    @property
    def best(self) -> float:
        """The best score of all; infinite before anything was found."""
        return min(self.scores.values(), default=float("inf"))


class ScoreTable:
    """Scores of chip groups with each capacity: seconds, or a mean of several models' seconds."""

    def __init__(self, weights: Sequence[float], shape: tuple[int, int]) -> None:
        shares = [w / max(weights) for w in weights]
        self.weights = [share / sum(shares) for share in shares]
        self.values = np.full((len(weights), *shape), np.inf)
        """Best value of each model, shape (models, groups, capacities)."""
        self.scores = np.full(shape, np.inf)

    def combined(self, times: Sequence[Array]) -> Array:
        """One number for several models' times: their weighted geometric mean."""
        if len(times) == 1:
            return times[0]
        with np.errstate(divide="ignore"):
            logs = [w * np.log(t) for w, t in zip(self.weights, times, strict=True)]
        found: Array = np.exp(np.sum(logs, axis=0))
        return found

    def mean(self, values: Sequence[float]) -> float:
        """One number for several models' values: their weighted geometric mean."""
        return float(self.combined([np.array([value]) for value in values])[0])

    def take(self, model: int, group: int, capacity: int, value: float) -> float:
        """Note a model's value; give the score that the group now has with that capacity."""
        self.values[model, group, capacity] = min(self.values[model, group, capacity], value)
        own = self.values[:, group, capacity]
        if not np.isfinite(own).all():
            return float("inf")
        score = float(self.combined([own[i : i + 1] for i in range(len(own))])[0])
        self.scores[group, capacity] = score
        return score

    def limits(self, model: int, least: Sequence[Array], limit: Array) -> Array:
        """Say what a model may take if the score may be `limit` and others take their least."""
        if len(least) == 1:
            return limit
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            left = np.log(limit * _ALMOST)
            for other, times in enumerate(least):
                if other != model:
                    left = left - self.weights[other] * np.log(times)
            found: Array = np.exp(left / self.weights[model]) * _ALMOST
        return np.where(np.isnan(found), -np.inf, found)


_ALMOST = 1.0 + 1e-12
