"""The candidate table of one model: what is known of each strategy on each chip group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.errors import PhazeError
from phaze_fast.explore.bounds import STEPS, PricedChips
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.plan_cache import PlanCache
from phaze_fast.explore.problem import Problem
from phaze_fast.explore.variants import VariedProblem
from phaze_fast.planning import Placed
from phaze_fast.planning.times import KindTimes
from phaze_fast.runs.executors import Lost, Workers, run_chunks

__all__ = ["PLACED", "SCHEDULED", "Answer", "CandidateTable"]

Array = np.ndarray[Any, Any]

PLACED = len(STEPS)
SCHEDULED = STEPS.index("scheduled") + 1
_TASK = {"work_s": 4096, "bound": 2048, "rule_out": 256, "schedule": 128, "place": 64}
"""Chips of one task where tasks go to other processes."""
_KEPT_PRICES = 2048
"""Chip groups of a strategy whose priced operators are kept for the next step, at most."""
_ROOFLINES = 2**16
"""Chips bounded by rooflines at once: what is laid out for them takes as much memory as they do."""


class Answer(NamedTuple):
    """A plan of a chip group with an HBM capacity under a strategy."""

    group: int
    capacity: int
    strategy: int
    placed: Placed
    energy_j: float
    times: KindTimes
    """That it was placed with."""
    row: int
    """Which of those."""


def _asked(problem: Problem, name: str, s: int, *rest: Any) -> Any:
    """Ask a problem, here or in another process."""
    return getattr(problem, name)(s, *rest)


def _asked_all(tasks: list[tuple[int, tuple[Any, ...]]]) -> list[tuple[Any, Exception | None]]:
    """Do tasks in another process; what goes wrong is an answer like any other."""
    results: list[tuple[Any, Exception | None]] = []
    for _, task in tasks:
        try:
            results.append((_asked(*task), None))
        except Exception as error:
            results.append((None, error))
    return results


class CandidateTable:
    """What is known of one model's candidates, pairs of strategy and chip group.

    Attributes
    ----------
    level
        Steps done, shape (strategies, groups).
    least
        Lower bounds in seconds, with the group's largest HBM.
    energy, dynamic
        Lower bounds in joules, all of them and without leakage; empty where nobody asks.
    unproven
        Scheduled candidates of which some layer's schedule is not proven.
    """

    def __init__(
        self,
        problem: Problem,
        groups: ChipGroups,
        threads: int = 1,
        workers: Workers | None = None,
        cache: PlanCache | None = None,
        with_energy: bool = False,
    ) -> None:
        self.problem, self.evaluator, self.groups = problem, problem.evaluator, groups
        self._threads, self._workers = threads, workers
        self.threads = threads if workers is None else 1
        """That may ask about strategies at once."""
        self._cache = PlanCache() if cache is None else cache
        self._name = problem.digest
        shape = (len(self.evaluator), len(groups))
        self.level = np.zeros(shape, dtype=np.uint8)
        self.least = np.zeros(shape)
        self.energy = np.zeros(shape if with_energy else (0, 0))
        self.dynamic = np.zeros(shape if with_energy else (0, 0))
        self.unproven: set[tuple[int, int]] = set()
        self.last = groups.chip.shape[1] - 1 - np.argmax(groups.chip[:, ::-1] >= 0, axis=1)
        """Largest capacity of each group."""
        self._priced: dict[int, tuple[Array, PricedChips]] = {}
        """Of each strategy, the groups that were priced last, where they are few."""
        self._timed: dict[tuple[int, int], tuple[KindTimes, KindTimes, int]] = {}

    def _each(
        self, name: str, s: int, arrays: Sequence[Any], *rest: Any, threads: int
    ) -> list[Any]:
        """Ask about chips: all at once here, in pieces where other processes do the work."""
        if self._workers is None:
            return [_asked(self.problem, name, s, *arrays, *rest, threads)]
        tasks: list[tuple[int, tuple[Any, ...]]] = []
        for begin in range(0, len(arrays[-1]), _TASK[name]):
            piece = slice(begin, begin + _TASK[name])
            given = [a.at(piece) if isinstance(a, KindTimes) else a[piece] for a in arrays]
            tasks.append((len(tasks), (self.problem, name, s, *given, *rest)))
        answers: list[Any] = [None] * len(tasks)
        for items, results in run_chunks(_asked_all, tasks, 1, self._workers):
            if isinstance(results, Lost):
                raise PhazeError(f"executor: {results.reason}")
            for (number, _), (result, error) in zip(items, results, strict=True):
                if error is not None:
                    raise error
                answers[number] = result
        return answers

    def _raise(self, s: int, groups: Array, least: Array, level: int) -> None:
        """Note better bounds."""
        self.least[s, groups] = np.maximum(self.least[s, groups], least)
        self.level[s, groups] = level

    def _raise_by(self, s: int, groups: Array, least: KindTimes, level: int, threads: int) -> None:
        """Bound the step with each group's largest HBM from bounds of the layers."""
        rooms = np.ascontiguousarray(self.last[groups], dtype=np.int64)
        self._raise(s, groups, self.evaluator.bounds(s, least, rooms, threads), level)
        if self.energy.size:
            joules, spent = self.problem.least_energy_j(s, least)
            self.energy[s, groups] = np.maximum(self.energy[s, groups], joules)
            self.dynamic[s, groups] = np.maximum(self.dynamic[s, groups], spent)

    def bound(self, s: int, groups: Array, level: int, threads: int | None = None) -> None:
        """Take candidates to a step before `scheduled`; strategies may be asked about at once."""
        threads = threads or self._threads
        if level == 1:
            if isinstance(self.problem, VariedProblem):
                own = self.problem.has(s, self.groups.variant[groups])
                self.least[s, groups[~own]] = np.inf  # there is no such candidate
                groups = groups[own]
                if not len(groups):
                    return
            whole = len(groups) == len(self.groups)
            records = self.groups.records if whole else self.groups.records[groups]
            pieces = [records[k : k + _ROOFLINES] for k in range(0, len(records), _ROOFLINES)]
            bounds = [self._each("work_s", s, [piece], threads=threads) for piece in pieces]
            work = np.concatenate([part for several in bounds for part in several])
            rooms = np.ascontiguousarray(self.last[groups], dtype=np.int64)
            self._raise(s, groups, self.evaluator.work_bounds(s, work, rooms), level)
            return
        chips = self._chips(s, groups, threads)
        parts = self._each("bound", s, [chips], STEPS[level - 1], threads=threads)
        self._raise_by(s, groups, KindTimes.joined(parts), level, threads)

    def _chips(self, s: int, groups: Array, threads: int) -> Array | PricedChips:
        """Chips that a step is asked about: priced once here, as records for other processes."""
        if self._workers is not None:
            return self.groups.records[groups]
        known, priced = self._priced.get(s, (groups[:0], None))
        at = np.minimum(np.searchsorted(known, groups), max(len(known) - 1, 0))
        if priced is None or not (known[at] == groups).all():
            known = np.sort(groups)
            priced = self.problem.price(s, self.groups.records[known], threads)
            if len(known) <= _KEPT_PRICES:
                self._priced[s] = (known, priced)
            else:
                self._priced.pop(s, None)
            at = np.searchsorted(known, groups)
        return priced.at(at)

    def forget_prices(self) -> None:
        """Let go of priced chips, which nobody will ask about again."""
        self._priced.clear()

    def schedule(
        self, s: int, groups: Array, limits_s: Array | None = None, threads: int | None = None
    ) -> None:
        """Schedule candidates, but for those that are found to take longer than their limit."""
        threads = threads or self._threads
        rooms = np.ascontiguousarray(self.last[groups], dtype=np.int64)
        limits_s = np.full(len(groups), np.inf) if limits_s is None else limits_s
        bounded = np.isfinite(limits_s)
        if bounded.any():
            some = groups[bounded]
            arrays = [self._chips(s, some, threads), rooms[bounded], limits_s[bounded]]
            parts = self._each("rule_out", s, arrays, threads=threads)
            self._raise_by(s, some, KindTimes.joined(parts), SCHEDULED - 1, threads)
            over = self.least[s, groups] > limits_s  # limits only fall, so this is done with
            self.level[s, groups[over]] = PLACED
            groups = groups[~over]
        if not len(groups):
            return
        parts = self._each("schedule", s, [self._chips(s, groups, threads)], threads=threads)
        times = KindTimes.joined([times for times, _ in parts])
        least = KindTimes.joined([least for _, least in parts])
        self._raise_by(s, groups, least, SCHEDULED, threads)
        proven = times.proven.tolist()
        for k, group in enumerate(groups.tolist()):
            self._timed[s, group] = (times, least, k)
            if not proven[k]:
                self.unproven.add((s, group))

    def prove(self, s: int, group: int, nodes: int, reached_s: float) -> None:
        """Bound a candidate whose schedules are not proven by what more patience proves of them.

        Parameters
        ----------
        s, group
            The candidate, placed.
        nodes
            Of the search for one layer's schedule.
        reached_s
            Seconds of the candidate's plan with the group's largest HBM.
        """
        last = int(self.last[group])
        limits = np.full((1, self.groups.chip.shape[1]), -np.inf)
        limits[0, last] = reached_s
        records = self.groups.records[group : group + 1]
        _, least = self.problem.schedule(s, records, self._threads, nodes)
        placed = self.problem.place(s, least, least, limits, self._threads)[0][last]
        sure = min(placed.time_s, reached_s)
        self.least[s, group] = max(self.least[s, group], sure)
        if sure >= reached_s:
            self.unproven.discard((s, group))

    def _taken(self, s: int, groups: Array) -> tuple[KindTimes, KindTimes]:
        """Take the times of scheduled candidates, and what is proven of them, off the table."""
        batches: dict[int, tuple[KindTimes, KindTimes, list[int], list[int]]] = {}
        for at, group in enumerate(groups.tolist()):
            times, least, k = self._timed.pop((s, group))
            batches.setdefault(id(times), (times, least, [], []))[2].append(k)
            batches[id(times)][3].append(at)
        order = np.argsort(np.concatenate([b[3] for b in batches.values()]), kind="stable")
        times = KindTimes.joined([b[0].at(b[2]) for b in batches.values()])
        least = KindTimes.joined([b[1].at(b[2]) for b in batches.values()])
        return times.at(order), least.at(order)

    def place(
        self, s: int, groups: Array, below: Array, threads: int | None = None
    ) -> Iterator[Answer]:
        """Place candidates that are scheduled; equal times are placed once.

        Parameters
        ----------
        s, groups
            The candidates.
        below
            Seconds worth looking at, shape (groups, capacities); minus infinity: none are.
        threads
            At most this many, by default all of the table's.

        Yields
        ------
        Answer
            The best plan of each group and capacity where it takes at most that.
        """
        if not len(groups):
            return
        times, least = self._taken(s, groups)
        keys = [self._cache.key(self._name, s, key) for key in times.same_times()]
        self._ask(s, times, least, below, keys, threads or self._threads)
        self.level[s, groups] = PLACED
        wanted: list[tuple[int, int, int, Placed]] = []
        for k, group in enumerate(groups.tolist()):
            known = self._cache[keys[k]][1]
            for c, placed in enumerate(known):
                if placed.layout >= 0 and placed.time_s <= below[k, c]:
                    wanted.append((k, group, c, placed))
            last = int(self.last[group])
            if (s, group) not in self.unproven:
                reached = min(known[last].time_s, float(below[k, last]))
                self.least[s, group] = max(self.least[s, group], reached)
        plans, rows = [item[3] for item in wanted], [item[0] for item in wanted]
        own = self.problem.of(s)[0].evaluator
        joules = own.energies_j(plans, times, rows).tolist() if wanted else []
        for (k, group, c, placed), energy in zip(wanted, joules, strict=True):
            yield Answer(group, c, s, placed, energy, times, k)

    def _ask(
        self,
        s: int,
        times: KindTimes,
        least: KindTimes,
        below: Array,
        keys: list[str],
        threads: int,
    ) -> None:
        """Place what was not placed before, or not for so long a time."""
        first: dict[str, int] = {}
        wanted: dict[str, Array] = {}
        for k, key in enumerate(keys):
            known = self._cache.get(key)
            if known is None or (known[0] < below[k]).any():
                first.setdefault(key, k)
                before = -np.inf if known is None else known[0]
                wanted[key] = np.maximum(wanted.get(key, before), below[k])
        if not first:
            return
        at = np.array(list(first.values()))
        limits = np.stack([wanted[key] for key in first])
        parts = self._each("place", s, [times.at(at), least.at(at), limits], threads=threads)
        answers = [row for part in parts for row in part]
        self._cache.put(zip(first, limits, answers, strict=True))
