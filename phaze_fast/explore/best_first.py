"""The best-first search: candidates in the order of their lower bounds, refined step by step.

A candidate is a strategy on a chip group. Its lower bound rises in steps (`bounds.STEPS`), each
costlier than the one before. In each wave the candidates with the lowest bounds are advanced by
one step; a candidate is pruned once its bound exceeds the limit of the search, and finished once it
is placed (its best plan is known). Waves and outcome do not depend on threads or workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from phaze_fast.explore.bounds import STEPS
from phaze_fast.explore.candidates import (
    KEPT_PRICES,
    PLACED,
    SCHEDULED,
    Answer,
    CandidateTable,
    PlanCache,
)
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.objectives import BestGroups, Front, ScoreTable, objective_of
from phaze_fast.explore.problem import SearchProblem
from phaze_fast.explore.result import Budget, Outcome, Progress, Winner
from phaze_fast.planning import Plan
from phaze_fast.planning.times import KindTimes, LayerSet, free_times
from phaze_fast.runs.executors import Workers
from phaze_fast.tables import Array, non_dominated

_WAVE, _LARGE_WAVE, _WAVE_OF_A_MODEL = 2**14, 2**15, 2**12
_PLACED_AT_ONCE = 256
_MORE_NODES = 2_000_000
"""Node limit for proving layer schedules, where an optimal answer needs no other proof."""
_SEEDS = (2048, 512, 128, 32, 4)
"""How many candidates take each step after the roofline before the first wave, for an incumbent."""
_SEED_ROUNDS = 4
_FIRST_OF_FRONT = (16, 32, 64)
"""How many candidates are placed in each round that begins a front, before any limits it."""
_MAPPED = STEPS.index("mapped") + 1
_FRONT_ROUNDS = 2
_FRONT_MARGINS = (1.1, 1.0)
"""Factors by which limits have to exceed bounds by rooflines for operators to be mapped, in turn:
plans between lower the limits."""


# ---- waves ----


def first_of(key: Array, count: int) -> Array:
    """Return the positions of the `count` smallest keys, in order; ties by position.

    Examples
    --------
    >>> first_of(np.array([3.0, 1.0, 2.0, 1.0]), 3).tolist()
    [1, 3, 2]
    """
    some = np.arange(len(key))
    if len(key) > count:
        some = np.flatnonzero(key <= np.partition(key, count - 1)[count - 1])
    return some[np.argsort(key[some], kind="stable")][:count]


def first_of_parts(parts: Iterable[Array], count: int) -> tuple[Array, Array]:
    """Find the `count` smallest keys of several arrays, without concatenating them.

    Returns
    -------
    tuple
        The number of the part of each key, and its position there, in the order of `first_of`.

    Examples
    --------
    >>> parts, at = first_of_parts([np.array([3.0, 1.0]), np.array([2.0, 1.0])], 3)
    >>> parts.tolist(), at.tolist()
    ([0, 1, 1], [1, 1, 0])
    """
    keys, owners, at = np.zeros(0), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    for number, part in enumerate(parts):
        # Ties are broken by the order of the parts.
        full = len(keys) >= count > 0
        own = np.flatnonzero(part < keys.max()) if full else np.arange(len(part))
        keys, at = np.concatenate([keys, part[own]]), np.concatenate([at, own])
        owners = np.concatenate([owners, np.full(len(own), number, dtype=np.int32)])
        if len(keys) > count:
            smallest = np.sort(first_of(keys, count))
            keys, owners, at = keys[smallest], owners[smallest], at[smallest]
    order = np.argsort(keys, kind="stable")
    return owners[order], at[order]


def _not_first_of_group(candidates: Array, waiting: Array) -> Array:
    """Mark the waiting candidates that are not the first of their model and chip group.

    Schedules are costly, and the plan of the first candidate often rules out the others.

    Parameters
    ----------
    candidates
        Rows of model, strategy and chip group, most promising first.
    waiting
        Marks those that have no schedule yet.
    """
    at = np.flatnonzero(waiting)
    owners = candidates[0, at].astype(np.int64) << 32 | candidates[2, at].astype(np.int64)
    later: Array = waiting.copy()
    later[at[np.unique(owners, return_index=True)[1]]] = False
    return later


def run_together(tasks: Sequence[Callable[..., None]], threads: int) -> None:
    """Run independent tasks; each is called with the number of threads that it may use.

    Examples
    --------
    >>> run_together([lambda threads: print(threads)], threads=4)
    4
    """
    if len(tasks) < 2 or threads < 2:
        for task in tasks:
            task(threads=threads)
        return
    inside = max(1, threads // len(tasks))
    with ThreadPoolExecutor(min(threads, len(tasks))) as pool:
        for _ in pool.map(lambda task: task(threads=inside), tasks):
            pass


# ---- the search ----


class BestFirstSearch:
    """One search: `run` executes it, `outcome` returns its result.

    Parameters
    ----------
    problems
        Search problems, one for each model.
    groups
        Chip groups to choose from.
    weights
        Weights of the models; by default equal.
    top
        How many of the best chip groups to find.
    objectives
        Objectives of a Pareto front to find as well; no front where empty.
    threads, workers
        Threads and executor to use; the outcome does not depend on them.
    cache
        Plans of an earlier run.
    progress
        Called after every wave.
    objective
        What is minimised, a name of `UNITS`; by default seconds of a step.
    """

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        *,
        weights: Sequence[float] = (),
        top: int = 1,
        objectives: tuple[str, ...] = (),
        threads: int = 1,
        workers: Workers | None = None,
        cache: PlanCache | None = None,
        progress: Callable[[Progress], None] | None = None,
        objective: str = "time",
    ) -> None:
        self.groups, self.problems = groups, list(problems)
        self.front, self.objectives = Front.empty(objectives), objectives
        self.best = BestGroups(top)
        self._progress, self._began = progress, time.monotonic()
        self.exists: Array = groups.chip >= 0
        """Which groups have a chip with each capacity, shape (groups, capacities)."""
        shape = (self.exists.shape[0], self.exists.shape[1])
        self.scores = ScoreTable(list(weights) or [1.0] * len(self.problems), shape)
        self.objective = objective_of(objective, self.problems, groups)
        with_energy = "energy" in objectives or self.objective.has_energy
        self.tables = [
            CandidateTable(
                problem,
                groups,
                threads=threads,
                workers=workers,
                cache=cache,
                with_energy=with_energy,
            )
            for problem in self.problems
        ]
        self.chosen: list[dict[tuple[int, int], Answer]] = [{} for _ in self.problems]
        """The best plan of each model by group and capacity."""
        self.points: dict[tuple[int, ...], Answer] = {}
        """The plan of each point that is or was on the front."""
        self._alive = np.arange(len(groups))
        """Chip groups with a candidate that is not pruned."""
        self._unsettled = np.zeros((3, 0), dtype=np.int32)
        """Candidates that a budget left neither placed nor pruned."""
        self.placed = 0
        self.history: list[Progress] = []

    @cached_property
    def usd(self) -> Array:
        """Dollars of all devices, shape (groups, capacities)."""
        return self.groups.device_usd() * float(self.problems[0].cluster.devices)

    def run(self, budget: Budget | None = None) -> bool:
        """Search; return whether every candidate was placed or pruned."""
        budget = budget or Budget()
        self._begin()
        self._note_progress(sum(table.level.size for table in self.tables), 0.0)
        self._seed(budgeted=budget != Budget())
        if self.objectives:
            self._seed_front()
        while True:
            wanted, waiting, least = self._open(self._wave)
            self._note_progress(waiting, least if waiting else np.inf)
            if not waiting:
                self._prove()
                return True
            spent = time.monotonic() - self._began
            over = spent > budget.time_limit_s or self.placed >= budget.max_points
            if over or (budget.stop is not None and budget.stop()):
                self._unsettled = self._open()[0]
                return False
            self._advance(wanted)

    # ---- limits: how good a candidate has to be ----

    def _others(self, groups: Array, c: int, energy: Array) -> Array:
        """Return the objectives other than time, in the order of the front, with capacity `c`."""
        columns = {
            "area": self.groups.area_mm2[groups],
            "energy": energy,
            "hbm": np.full(len(groups), float(self.groups.capacities[c])),
            "cost": self.usd[groups, c],
        }
        return np.stack([columns[name] for name in self.front.objectives[1:]], axis=1)

    def _limits(self, groups: Array) -> Array:
        """Return the largest score of interest of each group, for a search without a front.

        For a group that already has a score, only scores that are no worse are of interest.
        """
        known: Array = self.scores.scores[groups].min(axis=1)
        return np.minimum(self.best.limit, known)

    def _note_best(self, group: int) -> None:
        """Record the score of a group among the best."""
        self.best.note(group, float(self.scores.scores[group].min()))

    def _below(self, groups: Array, energy: Array) -> Array:
        """Largest scores of interest, shape (groups, capacities); minus infinity: none is."""
        below = np.repeat(self._limits(groups)[:, None], self.exists.shape[1], axis=1)
        if self.objectives:
            for c in range(below.shape[1]):
                others = self._others(groups, c, energy)
                below[:, c] = np.maximum(below[:, c], self.front.below_s(others))
        below[~self.exists[groups]] = -np.inf
        return below

    def _below_s(self, i: int, s: int, groups: Array) -> Array:
        """Longest steps of interest of strategy `s` of model `i`, shape (groups, capacities)."""
        table = self.tables[i]
        energy = table.energy[s, groups] if table.energy.size else np.zeros(len(groups))
        below = self._below(groups, energy)
        if len(self.tables) > 1:
            least = self.least_values(groups)
            columns = [self.scores.limits(i, least, below[:, c]) for c in range(below.shape[1])]
            below = np.where(self.exists[groups], np.stack(columns, axis=1), -np.inf)
        return self.objective.seconds(i, s, table, groups, below)

    def least_values(self, groups: Any) -> list[Array]:
        """Lower bounds of each model's value on chip groups, over all strategies."""
        bounds = []
        for i, table in enumerate(self.tables):
            # One strategy at a time, to save memory.
            least = np.full(len(self.groups.area_mm2[groups]), np.inf)
            for s in range(len(table.least)):
                own = self.objective.least(i, table, groups, slice(s, s + 1))
                np.minimum(least, own[0], out=least)
            bounds.append(least)
        return bounds

    # ---- plans ----

    def _place(self, i: int, s: int, groups: Array) -> None:
        """Find and record the best plans of scheduled candidates of model `i`."""
        for answer in self.tables[i].place(s, groups, self._below_s(i, s, groups)):
            self.take(i, answer)
        self.placed += len(groups)

    def take(self, i: int, answer: Answer) -> None:
        """Record a plan of model `i` on a chip group with a capacity."""
        group, c, s, placed, joules = answer[:5]
        old = self.chosen[i].get((group, c))
        known = self.scores.values[i, group, c]
        value = self.objective.value(i, group, c, placed.time_s, joules)
        order = self.problems[i].plan_order
        if old is None or (value, *order(s, placed)) < (known, *order(old.strategy, old.placed)):
            self.chosen[i][group, c] = answer
        score = self.scores.take(i, group, c, value)
        if self.objectives:
            one_model = len(self.tables) == 1
            point = (group, c, s) if one_model else (group, c)
            if one_model or np.isfinite(score):
                values = (placed.time_s, joules) if one_model else (score, 0.0)
                others = self._others(np.array([group]), c, np.array([values[1]]))[0]
                self.front.add(point, np.array([values[0], *others]))
                self.points[point] = answer
        self._note_best(group)

    # ---- before the waves: bounds and an incumbent ----

    def _begin(self) -> None:
        """Bound every candidate by rooflines."""
        for table in self.tables:
            table.bound_all()

    def _seed(self, budgeted: bool) -> None:
        """Place the most promising candidates of each model, to have an incumbent.

        Without a budget, this is repeated until `top` chip groups are placed, at most
        `_SEED_ROUNDS` times: before that no score limits a wave, which would list all candidates.
        """
        for _ in range(1 if budgeted else _SEED_ROUNDS):
            for i in range(len(self.tables)):
                for level, count in enumerate(_SEEDS, start=1):
                    more = 0 if budgeted else self.best.top * (len(STEPS) - level)
                    self._seed_level(i, level, max(count, more))
            if np.isfinite(self.best.limit):
                return

    def _seed_level(self, i: int, level: int, count: int) -> None:
        """Advance the `count` most promising candidates of model `i` at a level by one step."""
        table = self.tables[i]
        values = self.objective.least(i, table, slice(None))
        best = [np.zeros((2, 0), dtype=np.int64)]
        for s, least in enumerate(values):  # one strategy at a time, to save memory
            waiting = np.flatnonzero(table.level[s] == level)
            waiting = waiting[first_of(least[waiting], count)]
            best.append(np.stack([np.full(len(waiting), s), waiting]))
        at = np.concatenate(best, axis=1)
        key = values[at[0], at[1]]
        first = first_of(key, count)
        s, group = at[:, first[np.isfinite(key[first])]]
        step = 1 if level == SCHEDULED else len(s) or 1
        for begin in range(0, len(s), step):
            some = slice(begin, begin + step)
            candidates = np.stack([np.full(len(s[some]), i), s[some], group[some]])
            self._advance(candidates, one_step=True)

    def _seed_front(self) -> None:
        """Place candidates near the front, whose plans prune others over its whole range."""
        for most in _FIRST_OF_FRONT:
            self._advance_front(1, most)
        for margin in _FRONT_MARGINS:
            for level in range(1, _MAPPED):
                wanted = self._open(margin=margin)[0]
                self._advance(wanted[:, self._levels(wanted) == level], one_step=True)
            for _ in range(_FRONT_ROUNDS):
                self._advance_front(_MAPPED)

    def _advance_front(self, first: int, most: int = 2**30) -> None:
        """Advance candidates with non-dominated bounds from level `first` on, until placed.

        Of each model's, about `most` are scheduled, from the whole range of the front.
        """
        models = [i for i, table in enumerate(self.tables) if len(table.problem)]
        for i, level in product(models, range(first, PLACED)):
            ahead = self._least_front(i, level)
            if level == SCHEDULED - 1:
                ahead = ahead[:, :: 1 + ahead.shape[1] // most]
            self._advance(ahead, all_at_once=True, one_step=True)

    def _least_front(self, i: int, level: int) -> Array:
        """List candidates of model `i` at a level that may be on the front, as far as bounds tell.

        Compared are the lowest bounds of the groups, of candidates at that level or beyond it that
        are not placed.
        """
        table = self.tables[i]
        ready = (table.level >= level) & (table.level < PLACED)
        least = np.where(ready, table.least, np.inf)
        s, every = least.argmin(axis=0), np.arange(len(self.groups))
        least = least[s, every]
        energy = table.energy.min(axis=0) if table.energy.size else np.zeros(len(every))
        others = self._others(every, self.exists.shape[1] - 1, energy)
        groups = np.flatnonzero(np.isfinite(least) & (least <= self.front.below_s(others)))
        groups = groups[non_dominated(np.column_stack([least, others])[groups])]
        groups = groups[table.level[s[groups], groups] == level]
        return np.stack([np.full(len(groups), i), s[groups], groups])

    # ---- the waves ----

    def _open(
        self, wave: Callable[[int], int] | None = None, margin: float = 1.0
    ) -> tuple[Array, int, float]:
        """Candidates that are neither placed nor pruned.

        Parameters
        ----------
        wave
            Maps the number of open candidates to the number to list, lowest bounds first; by
            default all are listed.

        Returns
        -------
        tuple
            Rows of model, strategy and group; how many there are in all; and the least bound.
        """
        alive = self._alive
        every = slice(None) if len(alive) == len(self.groups) else alive
        least = self.least_values(every)
        score = self.scores.combined(least)
        limit = self._limits(alive)
        if self.objectives:
            energy = self.tables[0].energy
            floor = np.zeros(len(alive))
            if energy.size:
                floor = energy[:, alive].min(axis=0, initial=np.inf)
            limit = self._below(alive, floor).max(axis=1)
        keep = score <= limit
        if not keep.all():
            self._alive = alive = alive[keep]
            least, score, limit = [x[keep] for x in least], score[keep], limit[keep]
        limits = [self.scores.limits(i, least, limit / margin) for i in range(len(self.tables))]

        def bounds_of(i: int, s: int, groups: Array) -> Array:
            bounds: Array = self.objective.least(i, self.tables[i], groups, slice(s, s + 1))[0]
            return bounds

        def open_of(i: int, s: int) -> Array:
            bounds, levels = bounds_of(i, s, alive), self.tables[i].level[s, alive]
            return np.flatnonzero((levels < PLACED) & (bounds <= limits[i]) & np.isfinite(bounds))

        # One strategy at a time, and only the candidates of the wave, to save memory.
        rows = [(i, s) for i, table in enumerate(self.tables) for s in range(len(table.least))]
        places = [open_of(i, s).astype(np.int32) for i, s in rows]
        count, one_model = sum(len(at) for at in places), len(self.tables) == 1
        if wave is None:
            owners = np.repeat(np.arange(len(rows)), [len(at) for at in places])
            groups = np.concatenate([alive[:0], *(alive[at] for at in places)])
        else:
            keys = (
                bounds_of(i, s, alive[at]) if one_model else score[at]
                for (i, s), at in zip(rows, places, strict=True)
            )
            owners, chosen = first_of_parts(keys, wave(count))
            groups = np.empty(len(owners), dtype=np.int64)
            for k in np.unique(owners).tolist():
                groups[owners == k] = alive[places[k][chosen[owners == k]]]
        models, strategies = np.array(rows, dtype=np.int32).reshape(-1, 2).T
        candidates = np.empty((3, len(owners)), dtype=np.int32)
        candidates[0], candidates[1], candidates[2] = models[owners], strategies[owners], groups
        return candidates, count, float(score.min(initial=np.inf))

    def _wave(self, waiting: int) -> int:
        """Return how many of the waiting candidates are advanced next."""
        return max(_WAVE, _WAVE_OF_A_MODEL * len(self.tables), min(waiting // 8, _LARGE_WAVE))

    def _levels(self, candidates: Array) -> Array:
        """Look up the steps done of each candidate."""
        levels = np.zeros(candidates.shape[1], dtype=np.int64)
        for i, table in enumerate(self.tables):
            own = candidates[0] == i
            levels[own] = table.level[candidates[1, own], candidates[2, own]]
        return levels

    def _bound_further(
        self, i: int, s: int, groups: Array, level: int, one_step: bool, threads: int
    ) -> None:
        """Bound candidates of model `i` by step `level` and, while they stay open, by later ones.

        Operators are priced once for all these bounds. With `one_step`, only `level` is done.
        """
        table, size = self.tables[i], len(groups) if one_step else KEPT_PRICES
        for begin in range(0, len(groups), size):
            some = groups[begin : begin + size]
            table.bound(s, some, level, threads)
            for further in range(level + 1, level if one_step else SCHEDULED):
                below_s = self._below_s(i, s, some).max(axis=1)
                some = some[table.least[s, some] <= below_s]
                if len(some):
                    table.bound(s, some, further, threads)

    def _advance(
        self, candidates: Array, all_at_once: bool = False, one_step: bool = False
    ) -> None:
        """Advance candidates: bounds, then schedules, then plans.

        Unless `all_at_once`, few are placed, and one of each model and chip group is scheduled.
        With `one_step`, bounds advance by one step only.
        """
        level = self._levels(candidates)
        ready = level == SCHEDULED
        keep = ~ready | (np.cumsum(ready) <= (len(ready) if all_at_once else _PLACED_AT_ONCE))
        if not all_at_once:
            keep &= ~_not_first_of_group(candidates, level == SCHEDULED - 1)
        steps = np.stack([level, *candidates[:2]])[:, keep]
        groups = candidates[2, keep]
        bounds, schedules, waiting = [], [], []
        for step in np.unique(steps, axis=1).T:
            at = groups[(steps == step[:, None]).all(axis=0)]
            reached, i, s = step.tolist()
            if reached + 1 < SCHEDULED:
                bounds.append(partial(self._bound_further, i, s, at, reached + 1, one_step))
            elif reached + 1 == SCHEDULED:
                limits_s = self._below_s(i, s, at).max(axis=1)
                schedules.append(partial(self.tables[i].schedule, s, at, limits_s))
            else:
                waiting.append((i, s, at))
        run_together(bounds, self.tables[0].threads)
        run_together(schedules, self.tables[0].threads)
        for i, s, at in waiting:
            self._place(i, s, at)

    def _note_progress(self, waiting: int, bound: float) -> None:
        levels = [table.level for table in self.tables]
        progress = Progress(
            seconds=time.monotonic() - self._began,
            bounded=sum(int((x > 0).sum()) for x in levels),
            scheduled=sum(int((x >= SCHEDULED).sum()) for x in levels),
            placed=self.placed,
            open=waiting,
            incumbent=self.best.best,
            bound=min(bound, self.best.best),
        )
        self.history.append(progress)
        if self._progress is not None:
            self._progress(progress)

    def _prove(self) -> None:
        """Raise the bounds of unproven candidates that might be better than the winners.

        The schedules themselves are not replaced, so that they equal those of `phaze_fast.plan`.
        """
        if self.objectives or self.objective.has_energy:
            return
        least = self.scores.combined(self.least_values(slice(None)))
        for i, table in enumerate(self.tables):
            for s, group in sorted(table.unproven):
                if table.level[s, group] == PLACED and least[group] < self.best.limit:
                    answer = self.chosen[i].get((group, int(table.largest[group])))
                    # A group without a stored plan sets no limit for the proof.
                    reached_s = float("inf") if answer is None else answer.placed.time_s
                    if table.least[s, group] > reached_s:
                        table.unproven.discard((s, group))
                    else:
                        table.prove(s, group, _MORE_NODES, reached_s)

    # ---- the outcome ----

    def _bound(self) -> float:
        """Return a lower bound of all scores."""
        unproven = float("inf")
        if any(table.unproven for table in self.tables):
            unproven = float(self.scores.combined(self.least_values(slice(None))).min())
        return min(self.history[-1].bound, self.best.best, unproven)

    def _plans(self, i: int, answers: Sequence[Answer]) -> list[Plan]:
        """Describe plans of model `i` in full; operators of a strategy are priced once for all."""
        problem, plans = self.problems[i], dict[int, Plan]()
        for s in sorted({answer.strategy for answer in answers}):
            at = [k for k, answer in enumerate(answers) if answer.strategy == s]
            evaluator, number = problem.of(s)
            records = self.groups.records[[answers[k].group for k in at]]
            chips = problem.price(s, records)
            times = KindTimes.concatenated([answers[k].times.at([answers[k].row]) for k in at])
            layers = LayerSet([evaluator.sizes[number]], chips.costs, chips.hbm_bytes_per_s)
            levels = free_times(layers, times)
            for row, k in enumerate(at):
                free = [level.at([row]) for level in levels]
                peak = self.groups.peak_flops(records[row])
                found = answers[k]
                plans[k] = evaluator.plan(found.placed, times, row, found.capacity, peak, free)
        return [plans[k] for k in range(len(answers))]

    def _winners(self, points: Sequence[tuple[float, Sequence[Answer]]]) -> list[Winner]:
        """Build the records of points from their scores and the answer of each model."""
        models = zip(*(answers for _, answers in points), strict=True)
        plans = zip(*(self._plans(i, own) for i, own in enumerate(models)), strict=True)
        winners = []
        for (score, answers), own in zip(points, plans, strict=True):
            group, c = answers[0][:2]
            winners.append(
                Winner(
                    group=group,
                    capacity=c,
                    chip=int(self.groups.chip[group, c]),
                    score=score,
                    time_s=self.scores.mean([plan.time_s for plan in own]),
                    area_mm2=float(self.groups.area_mm2[group]),
                    energy_j=sum(answer.energy_j for answer in answers),
                    hbm_bytes=int(self.groups.capacities[c]),
                    cost_usd=float(self.usd[group, c]),
                    plans=own,
                )
            )
        return winners

    def winners(self) -> list[Winner]:
        """List the best groups, each with its best capacity, best first; at most `top`."""
        ranked = []
        for group, score in self.best.scores.items():
            if score > self.best.limit:
                continue
            for c in range(self.exists.shape[1]):
                own = [chosen.get((group, c)) for chosen in self.chosen]
                answers = [answer for answer in own if answer is not None]
                if len(answers) < len(own):
                    continue
                rank = (
                    float(self.scores.scores[group, c]),
                    float(self.groups.area_mm2[group]),
                    sum(answer.energy_j for answer in answers),
                    int(self.groups.capacities[c]),
                    int(self.groups.chip[group, c]),
                )
                ranked.append((rank, answers))
        ranked.sort(key=lambda item: item[0])
        best: dict[int, tuple[float, Sequence[Answer]]] = {}
        for rank, answers in ranked:
            best.setdefault(answers[0].group, (rank[0], answers))
        return self._winners(list(best.values())[: self.best.top])

    def front_points(self) -> list[Winner]:
        """List the front, fastest first."""
        points = []
        for point, values in zip(self.front.points, self.front.values, strict=True):
            group, c = point[:2]
            if len(self.tables) == 1:
                answers = [self.points[point]]
            else:
                answers = [chosen[group, c] for chosen in self.chosen]
            points.append((float(values[0]), point, answers))
        points.sort(key=lambda item: (item[0], item[1]))
        return self._winners([(score, answers) for score, _, answers in points])

    def counts(self) -> dict[str, int]:
        """Count the points (strategies on chips) by the step at which they were placed or pruned.

        ``rules``: the strategy breaks a rule; ``memory``: no layout fits; ``placed``: the best plan
        was found; ``open``: a budget left them neither placed nor pruned.
        """
        counts = dict.fromkeys(("rules", "memory", *STEPS, "open"), 0)
        for i, table in enumerate(self.tables):
            problem, open_ = table.problem, np.zeros(table.level.shape, dtype=bool)
            own = self._unsettled[:, self._unsettled[0] == i]
            open_[own[1], own[2]] = True
            counts["rules"] += problem.rejected_points(self.groups)
            fits, layouts = problem.strategy_fits, problem.layout_counts
            for s in range(len(problem)):
                runs = problem.runs(s, self.groups)
                for c in range(self.exists.shape[1]):
                    mine = self.exists[:, c] & runs
                    if not fits[s, c]:
                        counts["memory" if layouts[s] else "rules"] += int(mine.sum())
                        continue
                    counts["open"] += int((open_[s] & mine).sum())
                    levels = table.level[s][mine & ~open_[s]]
                    for k, name in enumerate(STEPS):
                        counts[name] += int((levels == k + 1).sum())
        return counts

    def outcome(self, complete: bool) -> Outcome:
        """Return what was found; `complete` is what `run` returned."""
        counts = self.counts()
        placed = [(table.level == PLACED).any(axis=0) for table in self.tables]
        return Outcome(
            complete=complete,
            bound=self._bound(),
            winners=tuple(self.winners()),
            front=tuple(self.front_points()) if self.objectives else (),
            objectives=self.front.objectives if self.objectives else (),
            counts=counts,
            points=sum(counts.values()),
            designs=int(self.exists.sum()),
            groups_placed=int(np.any(placed, axis=0).sum()),
            unproven=sum(len(table.unproven) for table in self.tables),
            history=tuple(self.history),
            seconds=self.history[-1].seconds,
        )


# ---- bounded searches: exact scores of chip groups up to a limit, and lower bounds above it ----

# Proofs over intervals of constants and over pairs of chips run many of these searches.


class _BoundedSearch(BestFirstSearch):
    """A search with given limits that may start from known lower bounds.

    Known bounds may come from a search with more favourable constants, such as faster links.
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
        """Do nothing: callers take the lower bounds, which hold without these proofs."""

    def candidate_bounds(self) -> list[Array]:
        """Lower bounds of every candidate of each model."""
        return [table.least for table in self.tables]

    def lower_bounds(self) -> Array:
        """Lower bound of the score of each group."""
        return self.scores.combined(self.least_values(slice(None)))


class LimitedSearch(_BoundedSearch):
    """Finds the best score of each chip group, where it is at most the limit of that group."""

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        limits: Array,
        *,
        weights: Sequence[float] = (),
        threads: int = 1,
        objective: str = "time",
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
        """Return the best score of each group, infinite where above its limit, and lower bounds."""
        self.run()
        scores = self.scores.scores.min(axis=1)
        return np.where(scores <= self._most, scores, np.inf), self.lower_bounds()


class LeastProductSearch(_BoundedSearch):
    """Finds the least product of a score and a given factor of each chip group, below a limit.

    Only products smaller than the incumbent by the fraction `slack` are searched for, so that near
    ties need no proof.
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
        """Return the least product, its group (-1: none is below the limit), and a lower bound."""
        self.run()
        value = self.best.best
        bound = min(self._limit, value * (1.0 - self._slack) if self._slack else value)
        if any(table.unproven for table in self.tables):
            bound = min(bound, float((self.lower_bounds() * self._factors).min()))
        if not np.isfinite(value):
            return value, -1, bound
        return value, min(g for g, score in self.best.scores.items() if score == value), bound
