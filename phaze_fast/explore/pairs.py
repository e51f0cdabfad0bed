"""Takes one model's pairs of strategy and die, gives bounds, then times, then plans of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.cost.machines import machines
from phaze_fast.errors import PhazeError
from phaze_fast.explore.dies import Dies
from phaze_fast.explore.memory import Memory
from phaze_fast.explore.placing import Found
from phaze_fast.explore.timing import STEPS, Totals
from phaze_fast.explore.workload import Question, Timed
from phaze_fast.runs.chunks import Lost, run_chunks
from phaze_fast.runs.executors import Workers

__all__ = ["PLACED", "SCHEDULED", "Answer", "Pairs"]

Array = np.ndarray[Any, Any]

PLACED = len(STEPS)
SCHEDULED = STEPS.index("scheduled") + 1
_TASK = {"bound": 2048, "time": 128, "place": 16}
"""Chips of one task where tasks go to other processes."""


class Answer(NamedTuple):
    """A plan of a die with an HBM capacity under a strategy."""

    die: int
    capacity: int
    strategy: int
    found: Found
    energy_j: float


def _work(question: Question, name: str, s: int, *rest: Any) -> Any:
    """Put a question to a workload, here or in another process."""
    return getattr(question.workload(), name)(s, *rest)


def _work_all(tasks: list[tuple[int, tuple[Any, ...]]]) -> list[tuple[Any, Exception | None]]:
    """Do tasks in another process; what goes wrong is an answer like any other."""
    found: list[tuple[Any, Exception | None]] = []
    for _, task in tasks:
        try:
            found.append((_work(*task), None))
        except Exception as error:
            found.append((None, error))
    return found


class Pairs:
    """What is known of one model's pairs of strategy and die.

    Attributes
    ----------
    level
        Steps done, shape (strategies, dies).
    least
        Lower bounds in seconds, with the die's largest HBM.
    energy
        Lower bounds in joules; empty where nobody asks.
    unproven
        Scheduled pairs of which some layer's schedule is not proven.
    """

    def __init__(
        self,
        question: Question,
        dies: Dies,
        threads: int = 1,
        workers: Workers | None = None,
        memory: Memory | None = None,
        with_energy: bool = False,
    ) -> None:
        self.question, self.work, self.dies = question, question.workload(), dies
        self._threads, self._workers = threads, workers
        self._memory = Memory() if memory is None else memory
        self._name = question.digest
        shape = (len(self.work), len(dies))
        self.level = np.zeros(shape, dtype=np.uint8)
        self.least = np.zeros(shape)
        self.energy = np.zeros(shape if with_energy else (0, 0))
        self.unproven: set[tuple[int, int]] = set()
        self.last = dies.chip.shape[1] - 1 - np.argmax(dies.chip[:, ::-1] >= 0, axis=1)
        """Largest capacity of each die."""
        self._rate = self.work.rate(dies.records)
        self._watts = machines(dies.records, like=dies.like).static_w if with_energy else None
        self._timed: dict[tuple[int, int], tuple[Timed, int]] = {}

    def _each(self, name: str, s: int, arrays: Sequence[Any], *rest: Any) -> list[Any]:
        """Put a question about chips to the workload: whole here, in pieces to other processes."""
        if self._workers is None:
            return [_work(self.question, name, s, *arrays, *rest, self._threads)]
        tasks: list[tuple[int, tuple[Any, ...]]] = []
        for begin in range(0, len(arrays[0]), _TASK[name]):
            piece = slice(begin, begin + _TASK[name])
            given = [a.at(piece) if isinstance(a, Timed) else a[piece] for a in arrays]
            tasks.append((len(tasks), (self.question, name, s, *given, *rest)))
        found: list[Any] = [None] * len(tasks)
        for items, results in run_chunks(_work_all, tasks, 1, self._workers):
            if isinstance(results, Lost):
                raise PhazeError(f"executor: {results.reason}")
            for (number, _), (result, error) in zip(items, results, strict=True):
                if error is not None:
                    raise error
                found[number] = result
        return found

    def _raise(self, s: int, dies: Array, totals: Totals, level: int) -> None:
        """Bound the step with each die's largest HBM."""
        rows, rate = self.work.strategies[s].rows, self._rate[dies]
        least = np.full(len(dies), np.inf)
        for c in np.unique(self.last[dies]):
            mine = np.flatnonzero(self.last[dies] == c)
            some = totals.at(mine)
            rough = level == 1
            least[mine] = rows[c].rough(some.work_s) if rough else rows[c].least(some, rate[mine])
        self.least[s, dies] = np.maximum(self.least[s, dies], least)
        self.level[s, dies] = level
        if self._watts is not None:
            joules = self.work.least_energy_j(s, totals, self._watts[dies])
            self.energy[s, dies] = np.maximum(self.energy[s, dies], joules)

    def bound(self, s: int, dies: Array, level: int) -> None:
        """Take pairs to a step before `scheduled`."""
        step = STEPS[level - 1]
        totals = Totals.joined(self._each("bound", s, [self.dies.records[dies]], step))
        self._raise(s, dies, totals, level)

    def schedule(self, s: int, dies: Array) -> None:
        """Schedule pairs."""
        made = Timed.joined(self._each("time", s, [self.dies.records[dies]]))
        self._raise(s, dies, made.totals, SCHEDULED)
        for k, die in enumerate(dies.tolist()):
            self._timed[s, die] = (made, k)
            if not made.kinds.proven[k]:
                self.unproven.add((s, die))

    def prove(self, s: int, die: int, nodes: int, reached_s: float) -> None:
        """Bound a pair whose schedules are not proven by what more patience proves of them.

        Parameters
        ----------
        s, die
            The pair, placed.
        nodes
            Of the search for one layer's schedule.
        reached_s
            Seconds of the pair's plan with the die's largest HBM.
        """
        records = self.dies.records[die : die + 1]
        last = int(self.last[die])
        limits = np.full((1, self.dies.chip.shape[1]), -np.inf)
        limits[0, last] = reached_s
        bounds = self.work.time(s, records, self._threads, nodes, bounds=True)
        found = self.work.place(s, records, bounds, limits, self._threads)[0][last]
        least = min(found.time_s, reached_s)
        self.least[s, die] = max(self.least[s, die], least)
        if least >= reached_s:
            self.unproven.discard((s, die))

    def place(self, s: int, dies: Array, below: Array) -> Iterator[Answer]:
        """Place pairs that are scheduled; equal times are placed once.

        Parameters
        ----------
        s, dies
            The pairs.
        below
            Seconds worth looking at, shape (dies, capacities); minus infinity: none are.

        Yields
        ------
        Answer
            The best plan of each die and capacity where it takes at most that.
        """
        picked = [self._timed.pop((s, die)) for die in dies.tolist()]
        timed = Timed.joined([made.at(slice(k, k + 1)) for made, k in picked])
        rate = self._rate[dies]
        keys = [
            self._memory.key(self._name, s, key, float(r))
            for key, r in zip(timed.same_times(), rate, strict=True)
        ]
        self._ask(s, dies, timed, below, keys)
        self.level[s, dies] = PLACED
        for k, die in enumerate(dies.tolist()):
            found = self._memory[keys[k]][1]
            for c, each in enumerate(found):
                if each.layout >= 0 and each.time_s <= below[k, c]:
                    yield Answer(die, c, s, each, self.work.energy_j(s, timed, k, each))
            last = int(self.last[die])
            if (s, die) not in self.unproven:
                known = min(found[last].time_s, float(below[k, last]))
                self.least[s, die] = max(self.least[s, die], known)

    def _ask(self, s: int, dies: Array, timed: Timed, below: Array, keys: list[str]) -> None:
        """Put to the kernel what was not asked before, or not for so long a time."""
        asked: dict[str, int] = {}
        wanted: dict[str, Array] = {}
        for k, key in enumerate(keys):
            known = self._memory.get(key)
            if known is None or (known[0] < below[k]).any():
                asked.setdefault(key, k)
                before = -np.inf if known is None else known[0]
                wanted[key] = np.maximum(wanted.get(key, before), below[k])
        if not asked:
            return
        at = np.array(list(asked.values()))
        limits = np.stack([wanted[key] for key in asked])
        parts = self._each("place", s, [self.dies.records[dies[at]], timed.at(at), limits])
        answers = [row for part in parts for row in part]
        self._memory.put(zip(asked, limits, answers, strict=True))
