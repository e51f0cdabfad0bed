"""The best-first search: candidates in the order of their lower bounds, each taken a step further.

What is known of a candidate (a strategy on a chip group) rises in steps (`bounds.STEPS`), each
costlier than the one before. Those with the lowest bounds go first, in waves; a candidate is
settled when its bound is above what the goals still ask for, or when it is placed. Waves do not
depend on threads or workers, and neither does anything that comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from phaze_fast.explore.candidates import PLACED, SCHEDULED, Answer, CandidateTable
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.goals import BestFew, Front, ScoreTable
from phaze_fast.explore.objective import Objective, objective_of
from phaze_fast.explore.plan_cache import PlanCache
from phaze_fast.explore.problem import Problem
from phaze_fast.explore.result import Budget, Outcome, Progress, Winner
from phaze_fast.explore.seeds import seed_best, seed_front
from phaze_fast.explore.summary import counts_of, front_points_of, outcome_of, winners_of
from phaze_fast.explore.waves import at_once, first_of_parts, later_of_group
from phaze_fast.runs.executors import Workers

__all__ = ["BestFirstSearch"]

Array = np.ndarray[Any, Any]

_WAVE, _LARGE_WAVE = 4096, 2**15
_PLACED_AT_ONCE = 256
_MORE_NODES = 2_000_000


class BestFirstSearch:
    """One search. `run` does it; `outcome` says what came out.

    Parameters
    ----------
    problems
        One for each model.
    groups
        Chips to choose from.
    weights
        Of the models; by default equal.
    top
        How many of the best chip groups are asked for.
    objectives
        Of the front that is asked for; none where empty.
    threads, workers
        Who does the work; the answer does not depend on it.
    cache
        Plans that were placed before.
    objective
        What is made least; by default seconds of a step.
    progress
        Called after every wave.
    """

    every = False
    """Whether the best plan of every chip is asked for."""

    def __init__(
        self,
        problems: Sequence[Problem],
        groups: ChipGroups,
        weights: Sequence[float] = (),
        top: int = 1,
        objectives: tuple[str, ...] = (),
        threads: int = 1,
        workers: Workers | None = None,
        cache: PlanCache | None = None,
        progress: Callable[[Progress], None] | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.groups, self.problems = groups, list(problems)
        self.front, self.objectives = Front.empty(objectives), objectives
        self.best = BestFew(top)
        self._progress, self._began = progress, time.monotonic()
        self.has: Array = groups.chip >= 0
        shape = (self.has.shape[0], self.has.shape[1])
        self.scores = ScoreTable(list(weights) or [1.0] * len(self.problems), shape)
        self.objective = objective or objective_of("time", self.problems, groups)
        with_energy = "energy" in objectives or self.objective.has_energy
        self.tables = [
            CandidateTable(problem, groups, threads, workers, cache, with_energy)
            for problem in self.problems
        ]
        self.chosen: list[dict[tuple[int, int], Answer]] = [{} for _ in self.problems]
        self.points: dict[tuple[int, ...], Answer] = {}
        # Capacities that no plan of some model fits are of no interest anywhere.
        fits = [table.evaluator.fits.any(axis=0) for table in self.tables]
        self._hopeless: Array = ~np.logical_and.reduce(fits)
        self._alive = np.arange(len(groups))
        self.left = np.zeros((3, 0), dtype=np.int32)
        """Candidates that a budget left unsettled."""
        self.placed = 0
        self.history: list[Progress] = []

    @cached_property
    def usd(self) -> Array:
        """Dollars of all devices, shape (groups, capacities)."""
        return self.groups.device_usd() * float(self.problems[0].cluster.devices)

    # ---- what the goals still ask for ----

    def others(self, groups: Array, c: int, energy: Array) -> Array:
        """Objectives of chips with a capacity but for time, as the front orders them."""
        columns = {
            "area": self.groups.area_mm2[groups],
            "energy": energy,
            "hbm": np.full(len(groups), float(self.groups.capacities[c])),
            "cost": self.usd[groups, c],
        }
        return np.stack([columns[name] for name in self.front.objectives[1:]], axis=1)

    def _limits(self, groups: Array) -> Array:
        """Scores worth looking at where only the best chip groups are asked for.

        A group that something is known of is looked at again only for what is no worse.
        """
        known: Array = self.scores.scores[groups].min(axis=1)
        return np.minimum(self.best.limit, known)

    def _note_best(self, group: int) -> None:
        """Tell the goal of the best chip groups what is found."""
        self.best.note(group, float(self.scores.scores[group].min()))

    def _below(self, groups: Array, energy: Array) -> Array:
        """Scores worth looking at, shape (groups, capacities); minus infinity: there is none."""
        below = np.repeat(self._limits(groups)[:, None], self.has.shape[1], axis=1)
        if self.every:
            below = np.where(self._hopeless, -np.inf, self.scores.scores[groups])
        if self.objectives:
            for c in range(below.shape[1]):
                others = self.others(groups, c, energy)
                below[:, c] = np.maximum(below[:, c], self.front.below_s(others))
        below[~self.has[groups]] = -np.inf
        return below

    # ---- answers ----

    def _below_of(self, i: int, s: int, groups: Array) -> Array:
        """Seconds worth looking at for candidates of model `i`, shape (groups, capacities)."""
        table = self.tables[i]
        energy = table.energy[s, groups] if table.energy.size else np.zeros(len(groups))
        below = self._below(groups, energy)
        if len(self.tables) > 1:
            least = self.least_values(groups)
            columns = [self.scores.limits(i, least, below[:, c]) for c in range(below.shape[1])]
            below = np.where(self.has[groups], np.stack(columns, axis=1), -np.inf)
        return self.objective.seconds(i, s, table, groups, below)

    def least_values(self, groups: Any) -> list[Array]:
        """Lower bounds of each model's value on chip groups, whatever the strategy."""
        found = []
        for i, table in enumerate(self.tables):
            # One strategy after another: no copy of all of them is made.
            least = np.full(len(self.groups.area_mm2[groups]), np.inf)
            for s in range(len(table.least)):
                own = self.objective.least(i, table, groups, slice(s, s + 1))
                np.minimum(least, own[0], out=least)
            found.append(least)
        return found

    def _place(self, i: int, s: int, groups: Array) -> None:
        """Place candidates of model `i` that are scheduled, and note what is found."""
        for answer in self.tables[i].place(s, groups, self._below_of(i, s, groups)):
            self._take(i, answer)
        self.placed += len(groups)

    def _take(self, i: int, answer: Answer) -> None:
        """Note a plan of a chip group and capacity."""
        group, c, s, placed, joules = answer[:5]
        old = self.chosen[i].get((group, c))
        known = self.scores.values[i, group, c]
        value = self.objective.value(i, group, c, placed.time_s, joules)
        if old is None or (value, joules, s) < (known, old.energy_j, old.strategy):
            self.chosen[i][group, c] = answer
        score = self.scores.take(i, group, c, value)
        if self.objectives:
            alone = len(self.tables) == 1
            point = (group, c, s) if alone else (group, c)
            if alone or np.isfinite(score):
                values = (placed.time_s, joules) if alone else (score, 0.0)
                others = self.others(np.array([group]), c, np.array([values[1]]))[0]
                self.front.add(point, np.array([values[0], *others]))
                self.points[point] = answer
        self._note_best(group)

    # ---- the waves ----

    def _open(self, wave: Callable[[int], int] | None = None) -> tuple[Array, int, float]:
        """Candidates worth looking at as (model, strategy, group), how many, and the least bound.

        Where a `wave` says how many of so many are wanted, those with the lowest bounds.
        """
        alive = self._alive
        every = slice(None) if len(alive) == len(self.groups) else alive
        least = self.least_values(every)
        score = self.scores.combined(least)
        limit = self._limits(alive)
        if self.every or self.objectives:
            energy = self.tables[0].energy
            floor = np.zeros(len(alive))
            if energy.size:
                floor = energy[:, alive].min(axis=0, initial=np.inf)
            limit = self._below(alive, floor).max(axis=1)
        keep = score <= limit
        if not keep.all():
            self._alive = alive = alive[keep]
            least, score, limit = [x[keep] for x in least], score[keep], limit[keep]
        tops = [self.scores.limits(i, least, limit) for i in range(len(self.tables))]

        def bounds_of(i: int, s: int, groups: Array) -> Array:
            own: Array = self.objective.least(i, self.tables[i], groups, slice(s, s + 1))[0]
            return own

        def open_of(i: int, s: int) -> Array:
            own, levels = bounds_of(i, s, alive), self.tables[i].level[s, alive]
            return np.flatnonzero((levels < PLACED) & (own <= tops[i]) & np.isfinite(own))

        # One strategy after another, and only those of the wave are listed: memory stays small.
        rows = [(i, s) for i, table in enumerate(self.tables) for s in range(len(table.least))]
        places = [open_of(i, s).astype(np.int32) for i, s in rows]
        count, alone = sum(len(at) for at in places), len(self.tables) == 1
        if wave is None:
            owners = np.repeat(np.arange(len(rows)), [len(at) for at in places])
            groups = np.concatenate([alive[:0], *(alive[at] for at in places)])
        else:
            keys = (
                bounds_of(i, s, alive[at]) if alone else score[at]
                for (i, s), at in zip(rows, places, strict=True)
            )
            owners, chosen = first_of_parts(keys, wave(count))
            groups = np.empty(len(owners), dtype=np.int64)
            for k in np.unique(owners).tolist():
                groups[owners == k] = alive[places[k][chosen[owners == k]]]
        models, strategies = np.array(rows, dtype=np.int32).reshape(-1, 2).T
        found = np.empty((3, len(owners)), dtype=np.int32)
        found[0], found[1], found[2] = models[owners], strategies[owners], groups
        return found, count, float(score.min(initial=np.inf))

    def _wave(self, waiting: int) -> int:
        """How many of the candidates that wait go next."""
        return max(_WAVE * len(self.tables), min(waiting // 8, _LARGE_WAVE))

    def advance(self, candidates: Array, everything: bool = False) -> None:
        """Take candidates one step further; those to be placed come last and are few."""
        level = np.zeros(candidates.shape[1], dtype=np.int64)
        for i, table in enumerate(self.tables):
            own = candidates[0] == i
            level[own] = table.level[candidates[1, own], candidates[2, own]]
        ready = level == SCHEDULED
        keep = ~ready | (np.cumsum(ready) <= (len(ready) if everything else _PLACED_AT_ONCE))
        if not everything:
            keep &= ~later_of_group(candidates, level == SCHEDULED - 1)
        steps = np.stack([level, *candidates[:2]])[:, keep]
        groups = candidates[2, keep]
        bounds, schedules, waiting = [], [], []
        for step in np.unique(steps, axis=1).T:
            at = groups[(steps == step[:, None]).all(axis=0)]
            reached, i, s = step.tolist()
            if reached + 1 < SCHEDULED:
                bounds.append(partial(self.tables[i].bound, s, at, reached + 1))
            elif reached + 1 == SCHEDULED:
                limits_s = self._below_of(i, s, at).max(axis=1)
                schedules.append(partial(self.tables[i].schedule, s, at, limits_s))
            else:
                waiting.append((i, s, at))
        at_once(bounds, self.tables[0].threads)
        at_once(schedules, self.tables[0].threads)
        for i, s, at in waiting:
            self._place(i, s, at)

    def _note(self, waiting: int, bound: float) -> None:
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

    def _begin(self) -> None:
        """Bound every candidate by rooflines."""
        for table in self.tables:
            for s in range(len(table.evaluator)):
                table.bound(s, np.arange(len(self.groups)), 1)

    def run(self, budget: Budget | None = None) -> bool:
        """Search; whether it went to the end."""
        budget = budget or Budget()
        self._begin()
        self._note(sum(table.level.size for table in self.tables), 0.0)
        self._seed(limited=budget != Budget())
        if self.objectives:
            seed_front(self)
        while True:
            wanted, waiting, least = self._open(self._wave)
            self._note(waiting, least if waiting else np.inf)
            if not waiting:
                self._prove()
                return True
            spent = time.monotonic() - self._began
            over = spent > budget.time_limit_s or self.placed >= budget.max_points
            if over or (budget.stop is not None and budget.stop()):
                self.left = self._open()[0]
                return False
            self.advance(wanted)

    def _seed(self, limited: bool) -> None:
        """Find something to beat."""
        seed_best(self, limited)

    def _prove(self) -> None:
        """Bound with more patience what is not proven and might be better than what was found.

        The schedules themselves stay as they are, those that `plan` has as well.
        """
        if self.objectives or self.objective.has_energy:
            return
        least = self.scores.combined(self.least_values(slice(None)))
        for i, table in enumerate(self.tables):
            for s, group in sorted(table.unproven):
                if table.level[s, group] == PLACED and least[group] < self.best.limit:
                    answer = self.chosen[i].get((group, int(table.last[group])))
                    if answer is None:
                        continue
                    if table.least[s, group] > answer.placed.time_s:
                        table.unproven.discard((s, group))
                    else:
                        table.prove(s, group, _MORE_NODES, answer.placed.time_s)

    # ---- what came out ----

    @property
    def bound(self) -> float:
        """Nothing in the space has a better score."""
        unproven = float("inf")
        if any(table.unproven for table in self.tables):
            unproven = float(self.scores.combined(self.least_values(slice(None))).min())
        return min(self.history[-1].bound, self.best.best, unproven)

    def answer(self, group: int, capacity: int, model: int = 0) -> Answer | None:
        """Give the best plan of a model on a group with a capacity; none where nothing fits."""
        return self.chosen[model].get((group, capacity))

    def winners(self) -> list[Winner]:
        """List the best groups, each with its best capacity, best first; at most `top`."""
        return winners_of(self)

    def front_points(self) -> list[Winner]:
        """List the front, fastest first."""
        return front_points_of(self)

    def counts(self) -> dict[str, int]:
        """Count points by the step that settled them; ``open``: not settled."""
        return counts_of(self)

    def outcome(self, complete: bool) -> Outcome:
        """Give what came out."""
        return outcome_of(self, complete)
