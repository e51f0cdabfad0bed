"""Takes points that were found, gives what is still worth looking at: the best few and the front.

Chips are ranked by time, then area, then energy, then HBM, then their place in the space. A point
is on the front if no other is at most it in every objective; of equal ones the first counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, nearest

__all__ = ["OBJECTIVES", "Front", "front_of"]

Array = np.ndarray[Any, Any]

OBJECTIVES = ("time", "area", "energy", "hbm", "cost")
"""Seconds of a step, mm2 of a die, joules of a step, bytes of HBM of a device, dollars of all."""


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
    order = np.lexsort((np.arange(len(values)), *values.T[::-1]))
    kept: list[int] = []
    best = np.empty((0, values.shape[1]))
    for k in order:
        if not len(best) or not (best <= values[k]).all(axis=1).any():
            kept.append(int(k))
            best = np.vstack([best, values[k]])
    return np.array(sorted(kept), dtype=np.int64)


@dataclass
class Front:
    """Points found so far of which none is at most another in every objective."""

    objectives: tuple[str, ...]
    values: Array
    """One row each, in the order of `objectives` with time first."""
    points: list[tuple[int, ...]]
    """What they are: (die, capacity, strategy)."""

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
        for values in self.values:
            at_most = (values[1:] <= others).all(axis=1)
            found[at_most] = np.minimum(found[at_most], values[0])
        return found
