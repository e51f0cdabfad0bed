"""The best plan of every chip: a search in which each chip has a limit of its own.

A chip's first plan rules out most of its other candidates, so the most promising candidate goes
first and alone. How promising one is says its lower bound times the factor by which the plans of
its strategy exceeded their bounds on chips before it. The factor decides the order and nothing
else: a candidate is left out only where its bound is above the chip's best plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.bounds import STEPS
from phaze_fast.explore.candidates import PLACED, SCHEDULED, Answer
from phaze_fast.explore.result import Budget
from phaze_fast.explore.waves import at_once

__all__ = ["PerChipSearch"]

Array = np.ndarray[Any, Any]

_BLOCK = 1024
"""Chip groups whose candidates are priced at once."""
_FIRST_BLOCK = 64
_ROUNDS = (1, 1, 1, 2**30)
"""How many candidates of a chip group go in each round, at most."""
_PIECE = 128
"""Chip groups of a strategy that one thread schedules and places, where there are several."""
_LEADING = 3
"""Of which the one that goes first is chosen by the bound of its schedules."""
_MAPPED, _SCHEDULE_BOUND = (STEPS.index(name) + 1 for name in ("mapped", "schedule_bound"))


class PerChipSearch(BestFirstSearch):
    """The best plan of every chip of every group, for every model."""

    every = True

    def run(self, budget: Budget | None = None) -> bool:
        """Search; whether it went to the end. The budget's seconds count, at the end of a block."""
        count, most_s = len(self.groups), (budget or Budget()).time_limit_s
        everything = np.arange(count)
        for table in self.tables:
            for s in range(len(table.evaluator)):
                table.bound(s, everything, 1)
        self._excess = [np.ones(len(table.evaluator)) for table in self.tables]
        first = everything[:: max(1, count // _FIRST_BLOCK)]
        rest = np.setdiff1d(everything, first)
        blocks = [first, *(rest[k : k + _BLOCK] for k in range(0, len(rest), _BLOCK))]
        for groups in blocks:
            if time.monotonic() - self._began > most_s:
                self._note(count, 0.0)
                return False
            self._settle(groups)
        self._alive = everything[:0]
        self._note(0, np.inf)
        return True

    def _settle(self, groups: Array) -> None:
        """Find the best plans of some chip groups."""
        tasks = []
        for table in self.tables:
            for s in range(len(table.evaluator)):
                possible = groups[np.isfinite(table.least[s, groups])]
                if len(possible):
                    tasks.append(partial(table.bound, s, possible, _MAPPED))
        at_once(tasks, self.tables[0].threads)
        self._bound_leaders(groups)
        before = [table.least[:, groups] for table in self.tables]
        for most in _ROUNDS:
            self._finish(self._most_promising(groups, most))
        for table, least, excess in zip(self.tables, before, self._excess, strict=True):
            table.forget_prices()
            done = table.level[:, groups] == PLACED
            for s in np.flatnonzero(done.any(axis=1)).tolist():
                ratios = table.least[s, groups[done[s]]] / least[s, done[s]]
                ratios = ratios[np.isfinite(ratios)]
                excess[s] = np.quantile(ratios, 0.1) if len(ratios) else excess[s]

    def _bound_leaders(self, groups: Array) -> None:
        """Bound schedules until the most promising candidate of each group is so bounded."""
        while True:
            leading = self._most_promising(groups, 1)
            if not (self._levels(leading) == _MAPPED).any():
                return
            ahead = self._most_promising(groups, _LEADING)
            wanted = _by_strategy(ahead[:, self._levels(ahead) == _MAPPED])
            tasks = [partial(self.tables[i].bound, s, at, _SCHEDULE_BOUND) for i, s, at in wanted]
            at_once(tasks, self.tables[0].threads)

    def _levels(self, candidates: Array) -> Array:
        """Give the steps done of each candidate."""
        levels = np.zeros(candidates.shape[1], dtype=np.int64)
        for k, table in enumerate(self.tables):
            own = candidates[0] == k
            levels[own] = table.level[candidates[1, own], candidates[2, own]]
        return levels

    def _most_promising(self, groups: Array, most: int) -> Array:
        """Candidates of chip groups worth looking at, at most so many of each group and model."""
        self._alive = groups
        waiting, _, _ = self._open()
        i, s, group = waiting
        key = np.zeros(len(i))
        for k, table in enumerate(self.tables):
            own = i == k
            key[own] = table.least[s[own], group[own]] * self._excess[k][s[own]]
        return waiting[:, _first_of_each(i.astype(np.int64) * len(self.groups) + group, key, most)]

    def _finish(self, candidates: Array) -> None:
        """Schedule and place candidates, as far as they are worth it."""
        threads = self.tables[0].threads
        pieces = [
            (i, s, at[k : k + size])
            for i, s, at in _by_strategy(candidates)
            for size in (len(at) if threads == 1 else _PIECE,)
            for k in range(0, len(at), size)
        ]
        pieces.sort(key=lambda piece: -len(piece[2]))  # the longest first, so that all end at once
        found: list[list[Answer]] = [[] for _ in pieces]

        def finish(number: int, threads: int) -> None:
            i, s, at = pieces[number]
            table = self.tables[i]
            table.schedule(s, at, self._below_of(i, s, at).max(axis=1), threads)
            ready = at[table.level[s, at] == SCHEDULED]
            found[number] = list(table.place(s, ready, self._below_of(i, s, ready), threads))
            self.placed += len(ready)

        at_once([partial(finish, number) for number in range(len(pieces))], threads)
        for (i, _, _), answers in zip(pieces, found, strict=True):
            for answer in answers:
                self._take(i, answer)


def _by_strategy(candidates: Array) -> Iterator[tuple[int, int, Array]]:
    """Model, strategy, and the chip groups of candidates."""
    for i, s in np.unique(candidates[:2], axis=1).T.tolist():
        yield i, s, candidates[2, (candidates[0] == i) & (candidates[1] == s)].astype(np.int64)


def _first_of_each(owner: Array, key: Array, most: int) -> Array:
    """Positions of the smallest keys of each owner, at most so many of each."""
    order = np.lexsort((np.arange(len(key)), key, owner))
    _, begins, counts = np.unique(owner[order], return_index=True, return_counts=True)
    rank = np.arange(len(key)) - np.repeat(begins, counts)
    first: Array = np.sort(order[rank < most])
    return first
