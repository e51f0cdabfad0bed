"""Searches with a limit for each chip group, on which proofs over boxes of constants rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.objective import Objective
from phaze_fast.explore.problem import Problem

__all__ = ["LeastShareSearch", "WithinSearch"]

Array = np.ndarray[Any, Any]


class _Limited(BestFirstSearch):
    """A search that begins with limits, and with the bounds of a faster point where there are some.

    A candidate's bound where every constant is faster holds here as well.
    """

    known: Sequence[Array] | None = None
    """Lower bounds of every candidate, of each model, shape (strategies, groups)."""

    def _begin(self) -> None:
        if self.known is None:
            super()._begin()
            return
        for table, least in zip(self.tables, self.known, strict=True):
            table.least[:] = least
            table.level[:] = 1

    def candidate_bounds(self) -> list[Array]:
        """Lower bounds of every candidate, of each model."""
        return [table.least for table in self.tables]

    def lower_bounds(self) -> Array:
        """Scores that each group has at least."""
        return self.scores.combined(self.least_values(slice(None)))


class WithinSearch(_Limited):
    """The best score of each group, where that is at most the group's limit."""

    def __init__(
        self,
        problems: Sequence[Problem],
        groups: ChipGroups,
        limits: Array,
        weights: Sequence[float] = (),
        threads: int = 1,
        objective: Objective | None = None,
    ) -> None:
        top = len(groups)
        super().__init__(
            problems, groups, weights=weights, top=top, threads=threads, objective=objective
        )
        self._most = limits

    def _limits(self, groups: Array) -> Array:
        found: Array = np.minimum(self._most[groups], self.scores.scores[groups].min(axis=1))
        return found

    def _prove(self) -> None:
        """Leave unproven schedules as they are: their bounds count."""

    def _seed(self, limited: bool) -> None:
        """Go without: the limits are there."""

    def exact(self) -> tuple[Array, Array]:
        """Best score of each group, infinite where above its limit, and lower bounds of all."""
        self.run()
        found = self.scores.scores.min(axis=1)
        return np.where(found <= self._most, found, np.inf), self.lower_bounds()


class LeastShareSearch(_Limited):
    """The least product of a group's share and its score, where that is below a limit.

    Products that are not smaller than those found by a part of `slack` are not told apart, so that
    ties cost nothing.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        groups: ChipGroups,
        shares: Array,
        limit: float,
        slack: float,
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        super().__init__(problems, groups, weights=weights, threads=threads)
        self._shares, self._limit, self._slack = shares, limit, slack

    def _limits(self, groups: Array) -> Array:
        most = min(self.best.limit * (1.0 - self._slack), self._limit)
        found: Array = most / self._shares[groups]
        return found

    def _note_best(self, group: int) -> None:
        self.best.note(group, float(self.scores.scores[group].min()) * float(self._shares[group]))

    def begin_with(self, groups: Array, scores: Array) -> None:
        """Take in scores that are known."""
        for group, score in zip(groups.tolist(), scores.tolist(), strict=True):
            if score * self._shares[group] <= self._limit:
                self.best.note(group, float(score * self._shares[group]))

    def _seed(self, limited: bool) -> None:
        if not np.isfinite(min(self._limit, self.best.limit)):
            super()._seed(limited)

    def _prove(self) -> None:
        """Leave unproven schedules as they are: their bounds count."""

    def least(self) -> tuple[float, int, float]:
        """Least product found, its group (-1: none is below the limit), and a bound of all."""
        self.run()
        value = self.best.best
        sure = min(self._limit, value * (1.0 - self._slack) if self._slack else value)
        if any(table.unproven for table in self.tables):
            sure = min(sure, float((self.lower_bounds() * self._shares).min()))
        if not np.isfinite(value):
            return value, -1, sure
        return value, min(g for g, score in self.best.scores.items() if score == value), sure
