"""What a best-first search does before its waves: it finds something to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from phaze_fast.explore.candidates import PLACED, SCHEDULED
from phaze_fast.explore.goals import front_of
from phaze_fast.explore.waves import first_of

if TYPE_CHECKING:
    from phaze_fast.explore.best_first import BestFirstSearch

__all__ = ["seed_best", "seed_front"]

Array = np.ndarray[Any, Any]

_SEEDS = (512, 128, 32, 4)
"""How many candidates go to each step in the first wave, which finds something to beat."""
_ROUNDS = 4
_FRONT_ROUNDS = 8


def seed_best(search: BestFirstSearch, limited: bool) -> None:
    """Let the most promising candidates of each model go all the way.

    Again until as many chip groups are placed as are asked for: without a limit every candidate of
    a large space would be listed. Once where the budget is limited.
    """
    for _ in range(1 if limited else _ROUNDS):
        for i in range(len(search.tables)):
            for level, count in enumerate(_SEEDS, start=1):
                more = 0 if limited else search.best.top * (5 - level)
                _seed_level(search, i, level, max(count, more))
        if np.isfinite(search.best.limit):
            return


def _seed_level(search: BestFirstSearch, i: int, level: int, count: int) -> None:
    table = search.tables[i]
    values = search.objective.least(i, table, slice(None))
    best = [np.zeros((2, 0), dtype=np.int64)]
    for s, least in enumerate(values):  # one after another, so that memory stays small
        waiting = np.flatnonzero(table.level[s] == level)
        waiting = waiting[first_of(least[waiting], count)]
        best.append(np.stack([np.full(len(waiting), s), waiting]))
    at = np.concatenate(best, axis=1)
    key = values[at[0], at[1]]
    first = first_of(key, count)
    s, group = at[:, first[np.isfinite(key[first])]]
    step = 1 if level == SCHEDULED else len(s) or 1
    for one in range(0, len(s), step):
        some = slice(one, one + step)
        search.advance(np.stack([np.full(len(s[some]), i), s[some], group[some]]))


def seed_front(search: BestFirstSearch) -> None:
    """Place what is on the front of the bounds: near it is the front itself.

    What is found there says over the whole range of the other objectives what is still worth
    looking at.
    """
    for _ in range(_FRONT_ROUNDS):
        for i, table in enumerate(search.tables):
            if not len(table.evaluator):
                continue
            energy = np.zeros(len(search.groups))
            if table.energy.size:
                energy = table.energy.min(axis=0, initial=np.inf)
            s = table.least.argmin(axis=0)
            least = table.least[s, np.arange(len(s))]
            others = search.others(np.arange(len(s)), search.has.shape[1] - 1, energy)
            groups = front_of(np.column_stack([least, others]))
            groups = groups[np.isfinite(least[groups])]
            for level in range(1, PLACED):
                ahead = groups[table.level[s[groups], groups] == level]
                search.advance(np.stack([np.full(len(ahead), i), s[ahead], ahead]), everything=True)
