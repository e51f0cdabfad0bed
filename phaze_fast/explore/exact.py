"""Exact scores of chip groups, one by one or in batches.

What other methods of search are compared by, and what an outside optimiser asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.per_chip import PerChipSearch
from phaze_fast.explore.problem import SearchProblem
from phaze_fast.explore.result import Winner

__all__ = ["ExactEvaluator"]

Array = np.ndarray[Any, Any]


class ExactEvaluator:
    """Scores of chip groups, exactly, each once: seconds of a step, or a mean of several."""

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        self.problems, self.groups, self.weights = list(problems), groups, tuple(weights)
        self.threads = threads
        self._known: dict[int, Winner | None] = {}

    @property
    def evaluations(self) -> int:
        """Chip groups that were evaluated so far."""
        return len(self._known)

    def winners(self, groups: Sequence[int] | Array) -> list[Winner | None]:
        """Best capacity, strategies and plans of each group; none where nothing fits."""
        wanted = [int(g) for g in groups]
        new = np.array([d for d in dict.fromkeys(wanted) if d not in self._known], dtype=np.int64)
        if len(new):
            search = PerChipSearch(
                self.problems,
                self.groups.take(new),
                weights=self.weights,
                top=len(new),
                threads=self.threads,
            )
            search.run()
            found = {w.group: w for w in search.winners()}
            for k, group in enumerate(new.tolist()):
                self._known[group] = found[k].of_group(group) if k in found else None
        return [self._known[d] for d in wanted]

    def scores(self, groups: Sequence[int] | Array) -> Array:
        """Best score of each group; infinite where nothing fits."""
        return np.array([np.inf if w is None else w.score for w in self.winners(groups)])
