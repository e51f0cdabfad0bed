"""The candidate table of one model: bounds and plans of each strategy on each chip group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.errors import PhazeError
from phaze_fast.explore.bounds import STEPS, PricedChips
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.problem import SearchProblem
from phaze_fast.explore.result import json_number
from phaze_fast.planning import Placed
from phaze_fast.planning.times import KindTimes
from phaze_fast.runs.executors import Lost, Workers, run_chunks
from phaze_fast.runs.journal import Journal
from phaze_fast.tables import Array

PLACED = len(STEPS)
SCHEDULED = STEPS.index("scheduled") + 1
_CHIPS_OF_A_TASK: dict[Callable[..., Any], int] = {
    SearchProblem.works_s: 4096,
    SearchProblem.work_j: 4096,
    SearchProblem.bound: 2048,
    SearchProblem.rule_out: 256,
    SearchProblem.schedule: 128,
    SearchProblem.place: 64,
}
"""Chips of one task where tasks go to other processes."""
KEPT_PRICES = 2048
"""Most chip groups of a strategy whose priced operators stay in memory for the next step."""
_ROOFLINES = 2**16
"""Most chips bounded by rooflines at once, to limit the memory of temporary arrays."""


# ---- the plan cache ----


class CachedPlans(NamedTuple):
    """The best plans of a strategy on chips with certain layer times."""

    limits_s: Array
    """Longest step that a plan was searched for, in seconds, for each HBM capacity."""
    plans: list[Placed]
    """The best plan with each capacity."""


class PlanCache:
    """Best plans by a hash of the problem, the strategy and the times of its layers.

    With a journal, every plan is on disk before the search goes on, so that a killed search finds
    all its plans when it is run again.

    Parameters
    ----------
    journal
        Where plans are written, and where those of an earlier run are read from.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        rows = journal.rows if journal is not None else {}
        self._plans = {key: self._from_row(row) for key, row in rows.items()}

    @staticmethod
    def key(problem: str, strategy: int, times: bytes) -> str:
        """Hash a problem, one of its strategies and the times of its layers."""
        text = f"{problem} {strategy} ".encode()
        return hashlib.blake2b(text + times, digest_size=16).hexdigest()

    @staticmethod
    def _from_row(row: dict[str, Any]) -> CachedPlans:
        plans = [
            Placed(float(time_s), float(memory), int(layout), tuple(cuts), tuple(variants), *open_s)
            for time_s, memory, layout, cuts, variants, *open_s in row["placed"]
        ]
        return CachedPlans(np.array([float(x) for x in row["limits"]]), plans)

    @staticmethod
    def _to_row(key: str, cached: CachedPlans) -> dict[str, Any]:
        return {
            "key": key,
            "status": "placed",
            "limits": [json_number(float(x)) for x in cached.limits_s],
            "placed": [
                [json_number(p.time_s), p.memory_bytes, p.layout, list(p.cuts), list(p.variants)]
                + ([p.open_s] if p.open_s < float("inf") else [])
                for p in cached.plans
            ],
        }

    def get(self, key: str) -> CachedPlans | None:
        """Look up plans; None where the key is not stored."""
        return self._plans.get(key)

    def put(self, entries: Iterable[tuple[str, CachedPlans]]) -> None:
        """Store plans by key, in the journal first."""
        new = dict(entries)
        if self._journal is not None:
            self._journal.append([self._to_row(key, cached) for key, cached in new.items()])
        self._plans.update(new)


# ---- the table ----


class Answer(NamedTuple):
    """The best plan of a chip group with an HBM capacity under a strategy."""

    group: int
    capacity: int
    strategy: int
    placed: Placed
    energy_j: float
    times: KindTimes
    """Times of the layers, on several chips."""
    row: int
    """Row of the group's chip in `times`."""


Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function or method, and its arguments."""


def _run(tasks: list[tuple[int, Task]]) -> list[tuple[Any, Exception | None]]:
    """Run tasks in another process; an exception is a result like any other."""
    results: list[tuple[Any, Exception | None]] = []
    for _, (method, arguments) in tasks:
        try:
            results.append((method(*arguments), None))
        except Exception as error:
            results.append((None, error))
    return results


def run_elsewhere(tasks: Sequence[Task], workers: Workers) -> Iterator[tuple[int, Any]]:
    """Run tasks in other processes; yield the number of each and its result as they complete."""
    for items, chunk in run_chunks(_run, list(enumerate(tasks)), 1, workers):
        if isinstance(chunk, Lost):
            raise PhazeError(f"executor: {chunk.reason}")
        for (number, _), (result, error) in zip(items, chunk, strict=True):
            if error is not None:
                raise error
            yield number, result


class CandidateTable:
    """Bounds and progress of one model's candidates: every strategy on every chip group.

    Attributes
    ----------
    level
        Steps done, shape (strategies, groups).
    least
        Lower bounds in seconds, with the group's largest HBM; infinite where the strategy does not
        run on the group.
    energy, dynamic
        Lower bounds in joules, with static power and without; empty unless energy is an objective.
    unproven
        Candidates with a layer schedule, or an assignment of layers to chunks, that is not proven
        to be the best.
    """

    def __init__(
        self,
        problem: SearchProblem,
        groups: ChipGroups,
        *,
        threads: int = 1,
        workers: Workers | None = None,
        cache: PlanCache | None = None,
        with_energy: bool = False,
    ) -> None:
        self.problem, self.groups = problem, groups
        self._threads, self._workers = threads, workers
        self.threads = threads if workers is None else 1
        """How many threads may evaluate strategies at once."""
        self._cache = PlanCache() if cache is None else cache
        shape = (len(problem), len(groups))
        self.level = np.zeros(shape, dtype=np.uint8)
        self.least = np.zeros(shape)
        self.energy = np.zeros(shape if with_energy else (0, 0))
        self.dynamic = np.zeros(shape if with_energy else (0, 0))
        self.unproven: set[tuple[int, int]] = set()
        last = groups.chip.shape[1] - 1 - np.argmax(groups.chip[:, ::-1] >= 0, axis=1)
        self.largest = np.ascontiguousarray(last, dtype=np.int64)
        """Position of the largest HBM capacity of each group."""
        self._priced: dict[int, tuple[Array, PricedChips]] = {}
        """By strategy: the groups that were priced last, and their prices, where they are few."""
        self._timed: dict[tuple[int, int], tuple[KindTimes, KindTimes, int]] = {}

    def _evaluate(
        self,
        method: Callable[..., Any],
        s: int | Sequence[int],
        arrays: Sequence[Any],
        *rest: Any,
        threads: int,
    ) -> list[Any]:
        """Call a method of the problem: once in this process, or in pieces in other processes."""
        if self._workers is None:
            return [method(self.problem, s, *arrays, *rest, threads)]
        size = _CHIPS_OF_A_TASK[method]
        tasks: list[Task] = []
        for begin in range(0, len(arrays[-1]), size):
            piece = slice(begin, begin + size)
            parts = [a.at(piece) if isinstance(a, KindTimes) else a[piece] for a in arrays]
            tasks.append((method, (self.problem, s, *parts, *rest)))
        results = dict(run_elsewhere(tasks, self._workers))
        return [results[number] for number in range(len(tasks))]

    def _raise(self, s: int, groups: Array, least: Array, level: int) -> None:
        """Raise the bounds of candidates, and note the step that they reached."""
        self.least[s, groups] = np.maximum(self.least[s, groups], least)
        self.level[s, groups] = level

    def _raise_by_work(self, s: int, groups: Array, work_s: Array, level: int) -> None:
        """Raise the bounds of steps from lower bounds of a micro-batch's work."""
        evaluator, k = self.problem.of(s)
        self._raise(s, groups, evaluator.work_bounds(k, work_s, self.largest[groups]), level)

    def _raise_by(self, s: int, groups: Array, least: KindTimes, level: int, threads: int) -> None:
        """Raise the bounds of steps, with each group's largest HBM, from lower bounds of layers."""
        evaluator, k = self.problem.of(s)
        bounds = evaluator.bounds(k, least, self.largest[groups], threads)
        self._raise(s, groups, bounds, level)
        if self.energy.size:
            self._raise_energy(s, groups, *self.problem.least_energy_j(s, least))

    def _raise_energy(self, s: int, groups: Array, total_j: Array, dynamic_j: Array) -> None:
        self.energy[s, groups] = np.maximum(self.energy[s, groups], total_j)
        self.dynamic[s, groups] = np.maximum(self.dynamic[s, groups], dynamic_j)

    def bound(self, s: int, groups: Array, level: int, threads: int | None = None) -> None:
        """Advance candidates to `work`, `mapped` or `schedule_bound`, strategies in parallel.

        Parameters
        ----------
        s, groups
            The strategy and the chip groups.
        level
            The step, counted from 1.
        threads
            At most this many, by default all of the table's.
        """
        threads = threads or self._threads
        step = STEPS[level - 1]
        if step == "work":
            records = self.groups.records[groups]
            works = self._evaluate(SearchProblem.works_s, [s], [records], True, threads=threads)
            self._raise_by_work(s, groups, np.concatenate(works, axis=-1)[0], level)
            return
        chips = self._chips(s, groups, threads)
        parts = self._evaluate(SearchProblem.bound, s, [chips], step, threads=threads)
        self._raise_by(s, groups, KindTimes.concatenated(parts), level, threads)

    def bound_all(self) -> None:
        """Bound every candidate by rooflines."""
        by_variant: dict[int, list[int]] = {}
        for s, (variant, _) in enumerate(self.problem.strategies):
            by_variant.setdefault(variant, []).append(s)
        for some in by_variant.values():
            runs = self.problem.runs(some[0], self.groups)
            for s in some:
                self.least[s, ~runs] = np.inf
            groups = np.flatnonzero(runs)
            for k in range(0, len(groups), _ROOFLINES):
                self._bound_by_rooflines(some, groups[k : k + _ROOFLINES])

    def _bound_by_rooflines(self, strategies: Sequence[int], groups: Array) -> None:
        """Bound strategies of one variant on chip groups of that variant."""
        records = self.groups.records[groups]

        def on_chips(method: Callable[..., Any], which: Any, *rest: bool) -> Array:
            parts = self._evaluate(method, which, [records], *rest, threads=self._threads)
            return np.concatenate(parts, axis=-1)

        works_s = on_chips(SearchProblem.works_s, strategies, False)
        for s, work_s in zip(strategies, works_s, strict=True):
            self._raise_by_work(s, groups, work_s, 1)
            if self.energy.size:
                joules, static_w = on_chips(SearchProblem.work_j, s)
                bounds = self.problem.step_energy_j(s, joules, static_w, work_s)
                self._raise_energy(s, groups, *bounds)

    def _chips(self, s: int, groups: Array, threads: int) -> Array | PricedChips:
        """Return the chips to evaluate: priced here, or as records for other processes."""
        if self._workers is not None:
            return self.groups.records[groups]
        known, priced = self._priced.get(s, (groups[:0], None))
        at = np.minimum(np.searchsorted(known, groups), max(len(known) - 1, 0))
        if priced is None or not (known[at] == groups).all():
            known = np.sort(groups)
            priced = self.problem.price(s, self.groups.records[known], threads)
            if len(known) <= KEPT_PRICES:
                self._priced[s] = (known, priced)
            else:
                self._priced.pop(s, None)
            at = np.searchsorted(known, groups)
        return priced.at(at)

    def schedule(
        self,
        s: int,
        groups: Array,
        limits_s: Array | None = None,
        threads: int | None = None,
    ) -> None:
        """Schedule candidates, except those proven to take longer than their limit."""
        threads = threads or self._threads
        limits_s = np.full(len(groups), np.inf) if limits_s is None else limits_s
        limited = np.isfinite(limits_s)
        if limited.any():
            some = groups[limited]
            arrays = [self._chips(s, some, threads), self.largest[some], limits_s[limited]]
            parts = self._evaluate(SearchProblem.rule_out, s, arrays, False, threads=threads)
            self._raise(s, some, np.concatenate([own for _, own in parts]), SCHEDULED - 1)
            if self.energy.size:
                least = KindTimes.concatenated([own for own, _ in parts])
                self._raise_energy(s, some, *self.problem.least_energy_j(s, least))
            over = self.least[s, groups] > limits_s  # limits never rise, so these stay pruned
            self.level[s, groups[over]] = PLACED
            groups = groups[~over]
        if not len(groups):
            return
        chips = self._chips(s, groups, threads)
        parts = self._evaluate(SearchProblem.schedule, s, [chips], threads=threads)
        times = KindTimes.concatenated([times for times, _ in parts])
        least = KindTimes.concatenated([least for _, least in parts])
        self._raise_by(s, groups, least, SCHEDULED, threads)
        proven = times.proven.tolist()
        for k, group in enumerate(groups.tolist()):
            self._timed[s, group] = (times, least, k)
            if not proven[k]:
                self.unproven.add((s, group))

    def prove(self, s: int, group: int, nodes: int, reached_s: float) -> None:
        """Raise the bound of a candidate whose schedules are not proven, with a larger node limit.

        Parameters
        ----------
        s, group
            A placed candidate.
        nodes
            Node limit of the branch and bound for one layer's schedule.
        reached_s
            Seconds of the candidate's plan with the group's largest HBM.
        """
        last = int(self.largest[group])
        limits = np.full((1, self.groups.chip.shape[1]), -np.inf)
        limits[0, last] = reached_s
        records = self.groups.records[group : group + 1]
        _, least = self.problem.schedule(s, records, self._threads, nodes)
        placed = self.problem.place(s, least, least, limits, self._threads)[0][last]
        bound_s = min(placed.time_s, placed.open_s, reached_s)
        self.least[s, group] = max(self.least[s, group], bound_s)
        if bound_s >= reached_s:
            self.unproven.discard((s, group))

    def _take_times(self, s: int, groups: Array) -> tuple[KindTimes, KindTimes]:
        """Remove and return the times of scheduled candidates and their lower bounds."""
        batches: dict[int, tuple[KindTimes, KindTimes, list[int], list[int]]] = {}
        for at, group in enumerate(groups.tolist()):
            times, least, k = self._timed.pop((s, group))
            batches.setdefault(id(times), (times, least, [], []))[2].append(k)
            batches[id(times)][3].append(at)
        order = np.argsort(np.concatenate([b[3] for b in batches.values()]), kind="stable")
        times = KindTimes.concatenated([b[0].at(b[2]) for b in batches.values()])
        least = KindTimes.concatenated([b[1].at(b[2]) for b in batches.values()])
        return times.at(order), least.at(order)

    def place(
        self, s: int, groups: Array, below: Array, threads: int | None = None
    ) -> Iterator[Answer]:
        """Find the best plans of scheduled candidates; equal times are planned once.

        Parameters
        ----------
        s, groups
            The candidates.
        below
            Longest step of interest, shape (groups, capacities); minus infinity: none is.
        threads
            At most this many, by default all of the table's.

        Yields
        ------
        Answer
            The best plan of each group and capacity, if it takes at most `below`.
        """
        if not len(groups):
            return
        times, least = self._take_times(s, groups)
        keys = [self._cache.key(self.problem.digest, s, key) for key in times.same_times()]
        cached = self._cached_plans(s, times, least, below, keys, threads or self._threads)
        self.level[s, groups] = PLACED
        wanted: list[tuple[int, int, int, Placed]] = []
        for k, group in enumerate(groups.tolist()):
            plans = cached[k]
            for c, placed in enumerate(plans):
                if placed.layout >= 0 and placed.time_s <= below[k, c]:
                    wanted.append((k, group, c, placed))
            last = int(self.largest[group])
            if (s, group) not in self.unproven:
                reached = min(plans[last].time_s, float(below[k, last]))
                open_s = plans[last].open_s
                self.least[s, group] = max(self.least[s, group], min(reached, open_s))
                if open_s < reached:
                    self.unproven.add((s, group))
        plans, rows = [item[3] for item in wanted], [item[0] for item in wanted]
        evaluator, _ = self.problem.of(s)
        joules = evaluator.energies_j(plans, times, rows).tolist() if wanted else []
        for (k, group, c, placed), energy in zip(wanted, joules, strict=True):
            yield Answer(group, c, s, placed, energy, times, k)

    def _cached_plans(
        self,
        s: int,
        times: KindTimes,
        least: KindTimes,
        below: Array,
        keys: list[str],
        threads: int,
    ) -> list[list[Placed]]:
        """Return the plans of chips from the cache, after planning those that are not in it."""
        first: dict[str, int] = {}
        wanted: dict[str, Array] = {}
        for k, key in enumerate(keys):
            cached = self._cache.get(key)
            if cached is None or (cached.limits_s < below[k]).any():
                first.setdefault(key, k)
                before = -np.inf if cached is None else cached.limits_s
                wanted[key] = np.maximum(wanted.get(key, before), below[k])
        if first:
            at = np.array(list(first.values()))
            limits = np.stack([wanted[key] for key in first])
            arrays = [times.at(at), least.at(at), limits]
            parts = self._evaluate(SearchProblem.place, s, arrays, threads=threads)
            plans = [row for part in parts for row in part]
            self._cache.put(zip(first, map(CachedPlans, limits, plans), strict=True))
        return [self._cache.get(key).plans for key in keys]  # type: ignore[union-attr]
