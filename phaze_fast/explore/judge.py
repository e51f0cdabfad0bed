"""Takes dies one by one or in batches, gives the best score of each: the search's exact answer.

What other methods of search are compared by, and what an outside optimiser asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phaze_fast.explore.dies import Dies
from phaze_fast.explore.searcher import Searcher, Winner
from phaze_fast.explore.workload import Question

__all__ = ["Judge"]

Array = np.ndarray[Any, Any]


class Judge:
    """Scores dies exactly, each once: seconds of a step, or their weighted geometric mean."""

    def __init__(
        self,
        questions: Sequence[Question],
        dies: Dies,
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        self.questions, self.dies, self.weights = list(questions), dies, tuple(weights)
        self.threads = threads
        self._known: dict[int, Winner | None] = {}

    @property
    def evaluations(self) -> int:
        """Dies that were evaluated so far."""
        return len(self._known)

    def winners(self, dies: Sequence[int] | Array) -> list[Winner | None]:
        """Best capacity, strategies and plans of each die; none where nothing fits."""
        wanted = [int(d) for d in dies]
        new = np.array([d for d in dict.fromkeys(wanted) if d not in self._known], dtype=np.int64)
        if len(new):
            search = Searcher(
                self.questions,
                self.dies.take(new),
                weights=self.weights,
                top=len(new),
                each=True,
                threads=self.threads,
            )
            search.run()
            found = {w.die: w for w in search.winners()}
            for k, die in enumerate(new.tolist()):
                self._known[die] = found[k].of_die(die) if k in found else None
        return [self._known[d] for d in wanted]

    def scores(self, dies: Sequence[int] | Array) -> Array:
        """Best score of each die; infinite where nothing fits."""
        return np.array([np.inf if w is None else w.score for w in self.winners(dies)])
