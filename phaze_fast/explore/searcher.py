"""Takes workloads and dies, gives the best chips and the front, proven: best-first by lower bounds.

What is known of a pair of strategy and die rises in steps (`timing.STEPS`), each dearer than the
one before. The pairs with the lowest bounds go first, in waves; a pair is done with when its bound
is above what is worth looking at, or when it is placed. Waves do not depend on threads or workers,
and neither does anything that comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.dies import Dies
from phaze_fast.explore.goals import Front
from phaze_fast.explore.memory import Memory
from phaze_fast.explore.pairs import PLACED, SCHEDULED, Answer, Pairs
from phaze_fast.explore.placing import Found
from phaze_fast.explore.workload import Question
from phaze_fast.hardware.price import Prices
from phaze_fast.runs.executors import Workers

__all__ = ["Budget", "Moment", "Searcher", "Winner"]

Array = np.ndarray[Any, Any]

_WAVE = 4096
_PLACED_AT_ONCE = 64
_SEEDS = (512, 128, 32, 4)
"""How many pairs go to each step in the first wave, which finds something to beat."""
_MORE_NODES = 2_000_000
_ALMOST = 1.0 + 1e-12


@dataclass(frozen=True)
class Budget:
    """When to stop at the latest."""

    time_s: float = float("inf")
    points: float = float("inf")
    """Pairs of die and strategy that are placed; the wave in which they are goes to its end."""

    def __post_init__(self) -> None:
        for name in ("time_s", "points"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InvalidInputError(
                    f"{name}: {value!r} is not accepted; expected a number, zero or more"
                )


@dataclass(frozen=True)
class Moment:
    """How a search stands."""

    seconds: float
    bounded: int
    """Pairs of die and strategy with a bound."""
    scheduled: int
    placed: int
    open: int
    """Pairs that may still be of interest."""
    incumbent: float
    """Seconds of the best step found; for several models their weighted geometric mean."""
    bound: float
    """Nothing is better than this."""


@dataclass(frozen=True)
class Winner:
    """A die with an HBM capacity, and for each model the strategy and plan that are best on it."""

    die: int
    capacity: int
    chip: int
    """Position in the space."""
    score: float
    area_mm2: float
    energy_j: float
    hbm_bytes: int
    strategies: tuple[int, ...]
    found: tuple[Found, ...]

    def of_die(self, die: int) -> Winner:
        """Give the same with the die's number in a larger set."""
        return replace(self, die=die)

    @property
    def rank(self) -> tuple[float, float, float, int, int]:
        """Smaller is better: time, area, energy, HBM, place in the space."""
        return (self.score, self.area_mm2, self.energy_j, self.hbm_bytes, self.chip)


class Searcher:
    """One search. `run` does it; `winners`, `front`, `states` and `history` are what came out."""

    def __init__(
        self,
        questions: Sequence[Question],
        dies: Dies,
        weights: Sequence[float] = (),
        top: int = 1,
        each: bool = False,
        objectives: tuple[str, ...] = (),
        threads: int = 1,
        workers: Workers | None = None,
        memory: Memory | None = None,
        prices: Prices | None = None,
        progress: Callable[[Moment], None] | None = None,
    ) -> None:
        self.dies, self.top = dies, top
        self.questions = list(questions)
        shares = [w / max(weights) for w in weights] or [1.0] * len(questions)
        self.weights = [share / sum(shares) for share in shares]
        self.front = Front.empty(objectives)
        self.objectives, self.every = objectives, each
        self._progress, self._began = progress, time.monotonic()
        has = dies.chip >= 0
        self._has, self._hopeless = has, np.zeros(has.shape[1], dtype=bool)
        self._pairs = [
            Pairs(question, dies, threads, workers, memory, "energy" in objectives)
            for question in self.questions
        ]
        self._best_s: list[dict[int, Array]] = [{} for _ in questions]
        self._chosen: list[dict[tuple[int, int], Answer]] = [{} for _ in questions]
        for c in range(has.shape[1]):  # no plan fits with so little
            if not all(any(len(x.rows[c]) for x in p.work.strategies) for p in self._pairs):
                self._hopeless[c] = True
        self._alive = np.arange(len(dies))
        self._limit = float("inf")  # of the score that is worth looking at for the best few
        self._usd = (prices or Prices()).device_usd(
            dies.area_mm2[:, None], dies.capacities[None, :].astype(float)
        ) * float(questions[0].cluster.devices)
        self._scores: dict[int, float] = {}
        self._own = np.full(has.shape, np.inf)  # best score of each die with each capacity
        self._points: dict[tuple[int, ...], Answer] = {}
        self._left = np.zeros((3, 0), dtype=np.int64)
        self.placed = 0
        self.history: list[Moment] = []

    # ---- scores ----

    def _score(self, times: Sequence[Array]) -> Array:
        """One number for several models' times."""
        if len(times) == 1:
            return times[0]
        with np.errstate(divide="ignore"):
            logs = [w * np.log(t) for w, t in zip(self.weights, times, strict=True)]
        found: Array = np.exp(np.sum(logs, axis=0))
        return found

    def _limits(self, i: int, least: Sequence[Array], limit: Array) -> Array:
        """Say what model `i` may take if the score may be `limit` and others take their least."""
        if len(least) == 1:
            return limit
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            left = np.log(limit * _ALMOST)
            for j, times in enumerate(least):
                if j != i:
                    left = left - self.weights[j] * np.log(times)
            found: Array = np.exp(left / self.weights[i]) * _ALMOST
        return np.where(np.isnan(found), -np.inf, found)

    def _others(self, dies: Array, c: int, energy: Array) -> Array:
        """Objectives of dies with a capacity but for time, as the front orders them."""
        columns = {
            "area": self.dies.area_mm2[dies],
            "energy": energy,
            "hbm": np.full(len(dies), float(self.dies.capacities[c])),
            "cost": self._usd[dies, c],
        }
        return np.stack([columns[name] for name in self.front.objectives[1:]], axis=1)

    def _below(self, dies: Array, energy: Array) -> Array:
        """Scores worth looking at, shape (dies, capacities); minus infinity: there is none."""
        found = np.full((len(dies), self._has.shape[1]), self._limit)
        if self.every:
            found = np.where(self._hopeless, -np.inf, self._own[dies])
        if self.objectives:
            for c in range(found.shape[1]):
                found[:, c] = np.maximum(
                    found[:, c], self.front.below_s(self._others(dies, c, energy))
                )
        found[~self._has[dies]] = -np.inf
        return found

    # ---- answers ----

    def _place(self, i: int, s: int, dies: Array) -> None:
        """Place pairs of model `i` that are scheduled, and note what is found."""
        pairs = self._pairs[i]
        energy = pairs.energy[s, dies] if pairs.energy.size else np.zeros(len(dies))
        below = self._below(dies, energy)
        if len(self._pairs) > 1:
            least = [x.least[:, dies].min(axis=0, initial=np.inf) for x in self._pairs]
            columns = [self._limits(i, least, below[:, c]) for c in range(below.shape[1])]
            below = np.where(self._has[dies], np.stack(columns, axis=1), -np.inf)
        for answer in pairs.place(s, dies, below):
            self._take(i, answer)
        self.placed += len(dies)

    def _take(self, i: int, answer: Answer) -> None:
        """Note a plan of a die and capacity."""
        die, c, s, found, joules = answer
        times = self._best_s[i].setdefault(die, np.full(self._has.shape[1], np.inf))
        old = self._chosen[i].get((die, c))
        if old is None or (found.time_s, joules, s) < (times[c], old.energy_j, old.strategy):
            times[c] = found.time_s
            self._chosen[i][die, c] = answer
        if len(self._pairs) == 1:
            self._note_front((die, c, s), found.time_s, joules, answer)
        self._rescore(die, c)

    def _note_front(
        self, point: tuple[int, ...], score: float, joules: float, answer: Answer | None = None
    ) -> None:
        if not self.objectives:
            return
        die, c = point[:2]
        others = self._others(np.array([die]), c, np.array([joules]))[0]
        self.front.add(point, np.array([score, *others]))
        if answer is not None:
            self._points[point] = answer

    def _rescore(self, die: int, c: int) -> None:
        """Note a die's best score, and what is now worth looking at."""
        times = [best.get(die) for best in self._best_s]
        if any(t is None for t in times):
            return
        scores = self._score([t for t in times if t is not None])
        self._own[die] = scores
        if len(self._pairs) > 1 and np.isfinite(scores[c]):
            self._note_front((die, c), float(scores[c]), 0.0)
        best = float(scores.min())
        if best < self._scores.get(die, np.inf):
            self._scores[die] = best
            if best < self._limit and len(self._scores) >= self.top:
                values = np.fromiter(self._scores.values(), dtype=float)
                self._limit = float(np.partition(values, self.top - 1)[self.top - 1])

    # ---- the waves ----

    def _open(self) -> tuple[Array, Array, float]:
        """Pairs worth looking at as (model, strategy, die) with their bounds, and the least."""
        alive = self._alive
        least = [p.least[:, alive].min(axis=0, initial=np.inf) for p in self._pairs]
        score = self._score(least)
        limit = np.full(len(alive), self._limit)
        if self.every:
            limit = self._below(alive, np.zeros(0)).max(axis=1)
        if self.objectives:
            energy = self._pairs[0].energy
            floor = (
                energy[:, alive].min(axis=0, initial=np.inf)
                if energy.size
                else np.zeros(len(alive))
            )
            limit = self._below(alive, floor).max(axis=1)
        keep = score <= limit
        if not keep.all():
            self._alive = alive = alive[keep]
            least, score, limit = [x[keep] for x in least], score[keep], limit[keep]
        found, keys = [], []
        for i, pairs in enumerate(self._pairs):
            top = self._limits(i, least, limit)
            own = pairs.least[:, alive]
            s, d = np.nonzero((pairs.level[:, alive] < PLACED) & (own <= top) & np.isfinite(own))
            found.append(np.stack([np.full(len(s), i), s, alive[d]]))
            keys.append(own[s, d] if len(self._pairs) == 1 else score[d])
        least_of_all = float(score.min(initial=np.inf))
        return np.concatenate(found, axis=1), np.concatenate(keys), least_of_all

    @staticmethod
    def _first(key: Array, count: int) -> Array:
        """Positions of the smallest, in a fixed order."""
        if len(key) > count:
            some = np.flatnonzero(key <= np.partition(key, count - 1)[count - 1])
        else:
            some = np.arange(len(key))
        return some[np.argsort(key[some], kind="stable")][:count]

    def _advance(self, pairs: Array) -> None:
        """Take pairs one step further; those to be placed come last and are few."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        few: set[tuple[int, int, int]] = set()
        for i, s, die in pairs.T.tolist():
            level = int(self._pairs[i].level[s, die])
            if level == SCHEDULED:
                # Where each die counts for itself, its first plan leaves little of the rest.
                one = (i, die, 0) if self.every else (i, die, s)
                if len(few) >= _PLACED_AT_ONCE or one in few:
                    continue
                few.add(one)
            groups.setdefault((level, i, s), []).append(die)
        for (level, i, s), dies in sorted(groups.items()):
            at = np.array(dies)
            if level + 1 < SCHEDULED:
                self._pairs[i].bound(s, at, level + 1)
            elif level + 1 == SCHEDULED:
                self._pairs[i].schedule(s, at)
            else:
                self._place(i, s, at)

    def _seed(self) -> None:
        """Find something to beat: the most promising pairs of each model go all the way."""
        for i, pairs in enumerate(self._pairs):
            for level, count in enumerate(_SEEDS, start=1):
                open_ = np.flatnonzero(pairs.level.reshape(-1) == level)
                key = pairs.least.reshape(-1)[open_]
                at = open_[self._first(key, count)]
                at = at[np.isfinite(pairs.least.reshape(-1)[at])]
                s, die = np.divmod(at, len(self.dies))
                for one in range(0, len(at), 1 if level == SCHEDULED else len(at) or 1):
                    some = slice(one, one + 1) if level == SCHEDULED else slice(None)
                    self._advance(np.stack([np.full(len(s[some]), i), s[some], die[some]]))

    def _note(self, open_: int, bound: float) -> None:
        best = min(self._scores.values(), default=float("inf"))
        levels = [p.level for p in self._pairs]
        moment = Moment(
            seconds=time.monotonic() - self._began,
            bounded=sum(int((x > 0).sum()) for x in levels),
            scheduled=sum(int((x >= SCHEDULED).sum()) for x in levels),
            placed=self.placed,
            open=open_,
            incumbent=best,
            bound=min(bound, best),
        )
        self.history.append(moment)
        if self._progress is not None:
            self._progress(moment)

    def run(self, budget: Budget | None = None) -> bool:
        """Search; whether it went to the end."""
        budget = budget or Budget()
        everything = np.arange(len(self.dies))
        for pairs in self._pairs:
            for s in range(len(pairs.work)):
                pairs.bound(s, everything, 1)
        self._note(sum(p.level.size for p in self._pairs), 0.0)
        self._seed()
        while True:
            open_, key, least = self._open()
            self._left = open_
            self._note(open_.shape[1], least if open_.size else np.inf)
            if not open_.size:
                self._prove()
                return True
            spent = time.monotonic() - self._began
            if spent > budget.time_s or self.placed >= budget.points:
                return False
            self._advance(open_[:, self._first(key, _WAVE)])

    def _prove(self) -> None:
        """Bound with more patience what is not proven and might be better than what was found.

        The schedules themselves stay as they are, those that `placement.plan` has as well.
        """
        if self.objectives or self.every:
            return
        least = self._score([p.least.min(axis=0, initial=np.inf) for p in self._pairs])
        for i, pairs in enumerate(self._pairs):
            for s, die in sorted(pairs.unproven):
                if pairs.level[s, die] == PLACED and least[die] < self._limit:
                    times = self._best_s[i].get(die)
                    if times is not None:
                        pairs.prove(s, die, _MORE_NODES, float(times[pairs.last[die]]))

    # ---- what came out ----

    @property
    def bound(self) -> float:
        """Nothing in the space has a better score."""
        best = min(self._scores.values(), default=float("inf"))
        return min(self.history[-1].bound, best, self._unproven_least())

    def _unproven_least(self) -> float:
        if not any(p.unproven for p in self._pairs):
            return float("inf")
        return float(self._score([p.least.min(axis=0, initial=np.inf) for p in self._pairs]).min())

    def _winner(self, die: int, c: int) -> Winner:
        picks = [chosen[die, c] for chosen in self._chosen]
        return Winner(
            die=die,
            capacity=c,
            chip=int(self.dies.chip[die, c]),
            score=float(self._own[die, c]),
            area_mm2=float(self.dies.area_mm2[die]),
            energy_j=sum(p.energy_j for p in picks),
            hbm_bytes=int(self.dies.capacities[c]),
            strategies=tuple(p.strategy for p in picks),
            found=tuple(p.found for p in picks),
        )

    def answer(self, die: int, capacity: int, model: int = 0) -> Answer | None:
        """Give the best plan of a model on a die with a capacity; none where nothing fits."""
        return self._chosen[model].get((die, capacity))

    def winners(self) -> list[Winner]:
        """List the best dies, each with its best capacity, best first; at most `top`."""
        found = []
        for die, score in self._scores.items():
            if score > self._limit and not self.every:
                continue
            known = [c for c in range(self._has.shape[1]) if self._all_known(die, c)]
            found.append(min((self._winner(die, c) for c in known), key=lambda w: w.rank))
        return sorted(found, key=lambda w: w.rank)[: self.top]

    def front_points(self) -> list[tuple[tuple[int, ...], float, list[Answer]]]:
        """List the front as (point, score, plan of each model), fastest first."""
        found = []
        for point, values in zip(self.front.points, self.front.values, strict=True):
            if len(self._pairs) == 1:
                answers = [self._points[point]]
            else:
                answers = [chosen[point[0], point[1]] for chosen in self._chosen]
            found.append((point, float(values[0]), answers))
        return sorted(found, key=lambda item: (item[1], item[0]))

    def cost_usd(self, die: int, capacity: int) -> float:
        """Dollars of all devices."""
        return float(self._usd[die, capacity])

    def states(self) -> list[tuple[Pairs, Array]]:
        """Give what is known of each model's pairs, and which of them are open, as it stands."""
        open_ = [np.zeros(p.level.shape, dtype=bool) for p in self._pairs]
        for i, s, die in self._left.T.tolist():
            open_[i][s, die] = True
        return list(zip(self._pairs, open_, strict=True))

    @property
    def dies_placed(self) -> int:
        """Dies of which some strategy was placed, of any model."""
        levels = [(pairs.level == PLACED).any(axis=0) for pairs in self._pairs]
        return int(np.any(levels, axis=0).sum())

    @property
    def unproven(self) -> int:
        """Pairs that were placed with a layer whose schedule is not proven."""
        return sum(len(pairs.unproven) for pairs in self._pairs)

    def _all_known(self, die: int, c: int) -> bool:
        return all((die, c) in chosen for chosen in self._chosen)
