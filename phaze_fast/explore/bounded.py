"""Bounded searches: exact scores of chip groups up to a limit, and lower bounds above it.

Proofs over intervals of constants and over pairs of chips consist of many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.objectives import Objective
from phaze_fast.explore.problem import SearchProblem

Array = np.ndarray[Any, Any]


class _BoundedSearch(BestFirstSearch):
    """A search with limits from outside, that may start from known lower bounds.

    A candidate's bound where every constant is more favourable is one here as well.
    """

    known: Sequence[Array] | None = None
    """Lower bounds of every candidate of each model, shape (strategies, groups)."""

    def _begin(self) -> None:
        if self.known is None:
            super()._begin()
            return
        for table, least in zip(self.tables, self.known, strict=True):
            table.least[:] = least
            table.level[:] = 1

    def _prove(self) -> None:
        """Leave unproven schedules as they are: the search returns their bounds."""

    def candidate_bounds(self) -> list[Array]:
        """Lower bounds of every candidate of each model."""
        return [table.least for table in self.tables]

    def lower_bounds(self) -> Array:
        """Lower bound of the score of each group."""
        return self.scores.combined(self.least_values(slice(None)))


class LimitedSearch(_BoundedSearch):
    """The best score of each group that is at most the limit of the group."""

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        limits: Array,
        *,
        weights: Sequence[float] = (),
        threads: int = 1,
        objective: Objective | None = None,
    ) -> None:
        super().__init__(
            problems,
            groups,
            weights=weights,
            top=len(groups),
            threads=threads,
            objective=objective,
        )
        self._most = limits

    def _limits(self, groups: Array) -> Array:
        limits: Array = np.minimum(self._most[groups], self.scores.scores[groups].min(axis=1))
        return limits

    def _seed(self, budgeted: bool) -> None:
        """Start without an incumbent: the limits are given."""

    def exact(self) -> tuple[Array, Array]:
        """Best score of each group, infinite where above its limit, and lower bounds of all."""
        self.run()
        scores = self.scores.scores.min(axis=1)
        return np.where(scores <= self._most, scores, np.inf), self.lower_bounds()


class LeastProductSearch(_BoundedSearch):
    """The least product of a group's factor and its score, where it is below a limit.

    A product is looked for only where it is smaller than the incumbent by the fraction `slack`, so
    that near ties need no proof.
    """

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        factors: Array,
        limit: float,
        slack: float,
        *,
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        super().__init__(problems, groups, weights=weights, threads=threads)
        self._factors, self._limit, self._slack = factors, limit, slack

    def _limits(self, groups: Array) -> Array:
        most = min(self.best.limit * (1.0 - self._slack), self._limit)
        limits: Array = most / self._factors[groups]
        return limits

    def _note_best(self, group: int) -> None:
        score = float(self.scores.scores[group].min())
        self.best.note(group, score * float(self._factors[group]))

    def begin_with(self, groups: Array, scores: Array) -> None:
        """Use known scores of groups as incumbents."""
        for group, score in zip(groups.tolist(), scores.tolist(), strict=True):
            if score * self._factors[group] <= self._limit:
                self.best.note(group, float(score * self._factors[group]))

    def _seed(self, budgeted: bool) -> None:
        if not np.isfinite(min(self._limit, self.best.limit)):
            super()._seed(budgeted)

    def least(self) -> tuple[float, int, float]:
        """Find the least product, its group (-1: none is below the limit), and a lower bound."""
        self.run()
        value = self.best.best
        bound = min(self._limit, value * (1.0 - self._slack) if self._slack else value)
        if any(table.unproven for table in self.tables):
            bound = min(bound, float((self.lower_bounds() * self._factors).min()))
        if not np.isfinite(value):
            return value, -1, bound
        return value, min(g for g, score in self.best.scores.items() if score == value), bound
