"""Pipelines of two classes of stages that are known on one wafer, carried on to the next.

A study of fault maps asks for the best mapping on many wafers that differ in what is dead. A pair
of classes found for one of them is scored on the next wherever it has a place, and only pairs that
were not looked at yet and may be faster by their work are improved, a few for each wafer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.class_search import (
    Batches,
    improved_classes,
    placed_pairs,
    ranked_pairs,
    rebalanced,
)
from phaze_fast.wafer.classes import Classes, Pair, accepts_classes
from phaze_fast.wafer.evaluate import Evaluation
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.problem import Problem

__all__ = ["KnownClasses"]

Array = np.ndarray[Any, Any]
Known = tuple[Layout, Array]

_SCORED = 4  # known pairs that are scored again on each wafer
_NEW = 2  # pairs of a micro-batch that are improved on each
_LONGER = 5  # times the steps, for the best of them
_PLACED = 16  # pairs that a place is looked for
_NEAR = 1.02  # times what a pair has to beat: worth scoring again


def _batches(problem: Problem, layout: Layout) -> list[Batches]:
    """Micro-batch of a layout and the next smaller one: two stages keep more of them."""
    share, b = problem.training.global_batch // layout.replicas, layout.micro_batch
    smaller = [each for each in range(1, b) if share % each == 0][-1:]
    return [(each, layout.replicas) for each in (b, *smaller)]


class KnownClasses:
    """Pairs of classes found so far, and those that are known to have no room.

    Parameters
    ----------
    steps
        Evaluations of each annealing of a pair.
    seed
        Of all random choices.
    """

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.seed = steps, seed
        self.mappings: dict[Pair, tuple[float, tuple[Array, Array]]] = {}
        self.lost: set[Pair] = set()

    def best(
        self,
        problem: Problem,
        layouts: Iterable[Layout],
        known: Sequence[Known],
        below_s: float,
        pool: ThreadPoolExecutor,
    ) -> float:
        """Time of the fastest pair on one wafer; infinite where none is below a time.

        Parameters
        ----------
        problem
            The model, the wafer and the step.
        layouts
            Of one shape; their shapes are paired.
        known
            The best of them with their operator mappings, the best first.
        below_s
            Seconds of a step that are of no interest.
        pool
            Threads; the answer does not depend on their number.
        """
        if not accepts_classes(problem) or not known:
            return float("inf")
        every = list(layouts)
        best_s = min(self._scored(problem, below_s), default=float("inf"))
        below_s = min(below_s, best_s)

        def tried(batches: Batches) -> list[Evaluation]:
            """Improve some pairs of one micro-batch that were not looked at yet."""
            ranked = ranked_pairs(problem, every, [batches], below_s)
            new = [pair for pair in ranked if self._is_new(pair)][:_PLACED]
            new = placed_pairs(problem, new, _NEW)
            return self._improved(problem, new, known, pool, self.steps)

        found = [each for batches in _batches(problem, known[0][0]) for each in tried(batches)]
        if found:  # the best at length, its blocks shared out again
            best = min(found, key=lambda each: each.time_s)
            steps = _LONGER * self.steps
            found += self._improved(problem, [rebalanced(problem, best)], known, pool, steps)
        return min([best_s, *(each.time_s for each in found)])

    def _is_new(self, pair: Pair) -> bool:
        return pair not in self.mappings and pair not in self.lost

    def _scored(self, problem: Problem, below_s: float) -> list[float]:
        """Score the best known pairs that have a place; give their times."""
        near = [pair for pair, (time_s, _) in self.mappings.items() if time_s < _NEAR * below_s]
        near.sort(key=lambda pair: (self.mappings[pair][0], pair))
        found = []
        for pair in placed_pairs(problem, near[:_PLACED], _SCORED):
            classes = Classes(problem, pair)
            for mapping, op_mappings in zip(classes.mappings, self.mappings[pair][1], strict=True):
                mapping.assign(op_mappings)
            score = classes.score()
            if score["over_bytes"] + score["stream_over_bytes"] <= 0.0:
                found.append(score["time_s"])
        return found

    def _improved(
        self,
        problem: Problem,
        pairs: list[Pair],
        known: Sequence[Known],
        pool: ThreadPoolExecutor,
        steps: int,
    ) -> list[Evaluation]:
        """Improve pairs, and keep those that fit."""

        def improved(pair: Pair) -> Evaluation | None:
            try:
                return improved_classes(problem, pair, known, steps, self.seed)[0]
            except InvalidInputError:  # some operator cannot be split so
                return None

        found = []
        for pair, scored in zip(pairs, pool.map(improved, pairs), strict=True):
            if scored is None or not scored.fits:
                self.lost.add(pair)  # memory is as short wherever dies are dead
                continue
            first, second = scored.encoding.classes
            arrays = (first.arrays(problem)[0], second.arrays(problem)[0])
            if scored.time_s < self.mappings.get(pair, (float("inf"),))[0]:
                self.mappings[pair] = (scored.time_s, arrays)
            found.append(scored)
        return found
