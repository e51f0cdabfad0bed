"""What a search minimises: an objective of the best chips, and the objectives of a Pareto front.

Every objective of the best chips is linear in a step's seconds and joules,

    value = rate(chip, HBM) x seconds + joule x joules,

with coefficients that do not depend on the plan. A step takes at least the joules of its operators
and the static power of all devices until it ends, so a lower bound of the seconds gives one of the
value, and an upper limit of the value gives one of the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.cost.machines import machines
from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.explore.candidates import CandidateTable
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.problem import SearchProblem
from phaze_fast.hardware.package import RunningCosts
from phaze_fast.tables import Array

UNITS = {
    "time": "s a step",
    "energy": "J a step",
    "cost": "USD s a step",
    "area": "mm2 s a step",
    "tokens": "USD for a trillion tokens",
}
"""Objectives of the best chips and their units: most samples per second, per joule, per dollar of
devices, per mm2 of silicon, or the cheapest trillion tokens."""

OBJECTIVES = ("time", "area", "energy", "hbm", "cost")
"""Objectives of a front: seconds of a step, mm2 of a chip, joules of a step, bytes of HBM of a
device, dollars of all devices."""

_SAFE = 1.0 - 1e-9
_ALMOST = 1.0 + 1e-12


# ---- the objective of the best chips ----


def checked_objective(name: str) -> str:
    """Return the name of an objective of the best chips, or raise InvalidInputError."""
    check_one_of("objective", name, UNITS)
    return name


@dataclass(frozen=True, eq=False)
class Objective:
    """An objective, with its coefficients on the chip groups of a search."""

    name: str
    rates: tuple[Array, ...]
    """Value per second of each model's step, shape (groups, capacities)."""
    joules: tuple[float, ...]
    """Value per joule of each model's step."""
    least_rates: tuple[Array, ...]
    """Least of `rates` over the capacities of each group, an array for each model."""
    static_w: Array
    """Static power of a device of each group, watts."""
    devices: tuple[Array, ...]
    """Fewest devices of a plan of each strategy of each model."""

    @property
    def is_time(self) -> bool:
        """Whether the value is the step's seconds."""
        return self.name == "time"

    @property
    def has_energy(self) -> bool:
        """Whether the value depends on joules."""
        return any(joule > 0.0 for joule in self.joules)

    def value(self, i: int, group: int, capacity: int, time_s: float, joules: float) -> float:
        """Value of a plan of model `i`."""
        if self.is_time:
            return time_s
        return float(self.rates[i][group, capacity]) * time_s + self.joules[i] * joules

    def least(self, i: int, table: CandidateTable, groups: Any, some: slice = slice(None)) -> Array:
        """Lower bounds of the values of model `i`, shape (strategies, groups).

        Parameters
        ----------
        i, table
            The model and its candidate table.
        groups
            Positions of chip groups.
        some
            Strategies, by default all.
        """
        times = table.least[some, groups]
        if self.is_time:
            return times
        ruled_out = np.isinf(times)  # their values are infinite even if the rate is zero
        times = np.where(ruled_out, 0.0, times)
        values = self.least_rates[i][groups] * times
        if self.joules[i]:
            static = self.devices[i][some, None] * self.static_w[groups] * times
            joules = np.maximum(table.dynamic[some, groups] + static, table.energy[some, groups])
            values = values + self.joules[i] * joules
        bounds: Array = np.where(ruled_out, np.inf, values * _SAFE)
        return bounds

    def seconds(self, i: int, s: int, table: CandidateTable, groups: Array, most: Array) -> Array:
        """Longest step of strategy `s` of model `i` whose value can be at most `most`.

        Parameters
        ----------
        i, s, table
            The model, the strategy and the candidate table.
        groups
            Chip groups.
        most
            Values, shape (groups, capacities).
        """
        if self.is_time:
            return most
        per_s, left = self.rates[i][groups], most
        if self.joules[i]:
            static = self.joules[i] * self.devices[i][s] * self.static_w[groups]
            per_s = per_s + static[:, None]
            left = most - self.joules[i] * table.dynamic[s, groups][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds: Array = left / per_s / _SAFE
        return np.where(np.isnan(seconds), np.inf, seconds)


def _fewest_devices(problem: SearchProblem) -> Array:
    """Fewest devices of the plans of each strategy."""
    counts = []
    for s in range(len(problem)):
        evaluator, k = problem.of(s)
        own = evaluator.layouts["strategy"] == k
        replicas = evaluator.layouts["pp"][own] * evaluator.layouts["dp"][own]
        counts.append(evaluator.sizes[k].inner * int(replicas.min()) if own.any() else 1)
    return np.array(counts, dtype=float)


def objective_of(name: str, problems: Sequence[SearchProblem], groups: ChipGroups) -> Objective:
    """Compute the coefficients of an objective on chip groups.

    Parameters
    ----------
    name
        A name of `UNITS`.
    problems
        One for each model.
    groups
        The chips.
    """
    if checked_objective(name) == "time":  # skips loading prices, since proofs run many searches
        return Objective(name, (), (0.0,) * len(problems), (), np.zeros(0), ())
    running = RunningCosts()
    shape = groups.chip.shape
    devices = float(problems[0].cluster.devices)
    usd = groups.device_usd() * devices
    rates: list[Array] = []
    joules: list[float] = []
    for problem in problems:
        step = problem.training
        tokens = step.global_batch * float(step.seq or problem.model.seq)
        trillion = 1e12 / tokens
        per_second = {
            "energy": np.zeros(shape),
            "cost": usd,
            "area": np.repeat(groups.area_mm2[:, None] * devices, shape[1], axis=1),
            "tokens": usd * trillion / running.seconds,
        }
        per_joule = {"energy": 1.0, "tokens": trillion * running.usd_per_joule}
        rates.append(per_second[name])
        joules.append(per_joule.get(name, 0.0))
    exists = groups.chip >= 0
    static_w = machines(groups.records, like=groups.like).static_w
    fewest = [_fewest_devices(p) if any(joules) else np.ones(len(p)) for p in problems]
    return Objective(
        name=name,
        rates=tuple(rates),
        joules=tuple(joules),
        least_rates=tuple(np.where(exists, rate, np.inf).min(axis=1) for rate in rates),
        static_w=static_w * _SAFE,
        devices=tuple(fewest),
    )


# ---- the front ----


def checked_objectives(names: Sequence[str]) -> tuple[str, ...]:
    """Return the objectives of a front, each once, or raise InvalidInputError."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    for name in names:
        check_one_of("pareto", name, OBJECTIVES)
    if names and "time" not in names:
        raise InvalidInputError(f"pareto: {','.join(names)} leaves out time; expected it as well")
    chosen = tuple(dict.fromkeys(names))
    if len(chosen) == 1:
        raise InvalidInputError("pareto: time alone is not accepted; expected another as well")
    return chosen


_FIRST_BLOCK, _COMPARISONS = 8, 2**19
"""Points of a front in the first block that is compared, and most comparisons of any block."""


@dataclass
class Front:
    """The non-dominated points found so far."""

    objectives: tuple[str, ...]
    values: Array
    """One row per point, in the order of `objectives` with time first."""
    points: list[tuple[int, ...]]
    """Chip group, capacity and strategy of each point; for several models without the strategy."""

    @classmethod
    def empty(cls, objectives: tuple[str, ...]) -> Front:
        """Return a front without points."""
        names = ("time", *(name for name in objectives if name != "time"))
        return cls(names, np.empty((0, len(names))), [])

    def add(self, point: tuple[int, ...], values: Array) -> None:
        """Add a point unless it is dominated, and drop the points that it dominates."""
        same = (self.values == values).all(axis=1)
        if same.any():
            at = int(np.flatnonzero(same)[0])
            if point < self.points[at]:
                self.points[at] = point
            return
        if (self.values <= values).all(axis=1).any():
            return
        stay: Array = np.invert((self.values >= values).all(axis=1))
        self.values = np.vstack([self.values[stay], values])
        self.points = [p for p, keep in zip(self.points, stay, strict=True) if keep] + [point]

    def below_s(self, others: Array) -> Array:
        """Longest time with which points can be non-dominated, by their other objectives.

        Parameters
        ----------
        others
            One row per point: lower bounds of all objectives but time.
        """
        longest = np.full(len(others), np.inf)
        fastest_first = self.values[np.argsort(self.values[:, 0], kind="stable")]
        left, columns = np.arange(len(others)), [np.ascontiguousarray(x) for x in others.T]
        begin, size = 0, _FIRST_BLOCK
        while begin < len(fastest_first) and len(left):
            block = fastest_first[begin : begin + size]
            begin, size = begin + size, max(_FIRST_BLOCK, min(2 * size, _COMPARISONS // len(left)))
            at_most = np.logical_and.reduce(
                [block[:, j + 1, None] <= column for j, column in enumerate(columns)]
            )
            beaten = at_most.any(axis=0)
            longest[left[beaten]] = block[at_most[:, beaten].argmax(axis=0), 0]
            left, columns = left[~beaten], [column[~beaten] for column in columns]
        return longest


# ---- scores of chip groups ----


class BestGroups:
    """The scores of chip groups, and the k-th best of them: the limit of a search for k groups."""

    def __init__(self, top: int) -> None:
        self.top, self.limit = top, float("inf")
        self.scores: dict[int, float] = {}
        """Best score of each chip group that has a plan."""

    def note(self, group: int, score: float) -> None:
        """Record a score of a group, and lower the limit where it is among the best."""
        if score >= self.scores.get(group, np.inf):
            return
        self.scores[group] = score
        if score < self.limit and len(self.scores) >= self.top:
            values = np.fromiter(self.scores.values(), dtype=float)
            self.limit = float(np.partition(values, self.top - 1)[self.top - 1])

    @property
    def best(self) -> float:
        """The best score; infinite before the first is recorded."""
        return min(self.scores.values(), default=float("inf"))


class ScoreTable:
    """Scores of chip groups with each capacity: the weighted geometric mean over the models."""

    def __init__(self, weights: Sequence[float], shape: tuple[int, int]) -> None:
        self.weights = [weight / sum(weights) for weight in weights]
        self.values = np.full((len(weights), *shape), np.inf)
        """Best value of each model, shape (models, groups, capacities)."""
        self.scores = np.full(shape, np.inf)

    def combined(self, values: Sequence[Array]) -> Array:
        """Weighted geometric mean of arrays of values, one array for each model."""
        if len(values) == 1:
            return values[0]
        with np.errstate(divide="ignore"):
            logs = [w * np.log(v) for w, v in zip(self.weights, values, strict=True)]
        means: Array = np.exp(np.sum(logs, axis=0))
        return means

    def mean(self, values: Sequence[float]) -> float:
        """Weighted geometric mean of one value for each model."""
        return float(self.combined([np.array([value]) for value in values])[0])

    def take(self, model: int, group: int, capacity: int, value: float) -> float:
        """Record a model's value; return the score of the group with that capacity."""
        self.values[model, group, capacity] = min(self.values[model, group, capacity], value)
        values = self.values[:, group, capacity]
        if not np.isfinite(values).all():
            return float("inf")
        self.scores[group, capacity] = score = self.mean(values.tolist())
        return score

    def limits(self, model: int, least: Sequence[Array], limit: Array) -> Array:
        """Largest value of a model with which the score does not exceed `limit`.

        The values of the other models are at their lower bounds `least`.
        """
        if len(least) == 1:
            return limit
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            left = np.log(limit * _ALMOST)
            for other, times in enumerate(least):
                if other != model:
                    left = left - self.weights[other] * np.log(times)
            values: Array = np.exp(left / self.weights[model]) * _ALMOST
        return np.where(np.isnan(values), -np.inf, values)
