"""The best two chips for several models, each model on the chip that suits it, with a proof.

The geometric mean of a pair is the product of one factor for the models of each chip, so for each
division of the models the two chips are chosen independently. Lower bounds of all models on all
chip groups give a lower bound of each division. Where it is below the best pair so far, the models
and chip groups that it comes from are evaluated, up to the value that decides. Once no division is
below, the pair is the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.bounded import LimitedSearch
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.find import checked_weights
from phaze_fast.explore.objectives import UNITS, objective_of
from phaze_fast.explore.problem import SearchProblem, problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training

__all__ = ["MOST_MODELS", "Portfolio", "best_pair"]

Array = np.ndarray[Any, Any]

MOST_MODELS = 10
"""All divisions of the models are listed, 2 to the power of their number."""
_WAVES = (64, 512, 4096)
"""Chip groups of each wave: few at first, until there is a good pair."""
_ANY_HBM = ("time", "area")
"""Objectives for which more HBM is never worse: only a group's largest capacity matters."""
_ALMOST = 1e-9


@dataclass(frozen=True, eq=False)
class Portfolio:
    """Two chips, and which models run on each."""

    chips: tuple[Accelerator, ...]
    """Two, or one where a second does not help."""
    models: tuple[tuple[str, ...], ...]
    """Names of the models that run on each."""
    value: float
    """Weighted geometric mean of the models' values, each on its chip."""
    bound: float
    """Lower bound of the value of any two chips."""
    proven: bool
    single: Accelerator
    """The best single chip for all models."""
    single_value: float
    """Its mean."""
    objective: str
    seconds: float
    evaluations: int
    """Models on chip groups that were evaluated in full."""

    @property
    def gain(self) -> float:
        """Value of the best single chip, divided by that of the pair."""
        return self.single_value / self.value

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "chips": [
                {"chip": chip.to_dict(), "chip_text": str(chip), "models": list(names)}
                for chip, names in zip(self.chips, self.models, strict=True)
            ],
            "value": self.value,
            "bound": self.bound,
            "proven": self.proven,
            "single_chip_text": str(self.single),
            "single_value": self.single_value,
            "gain": self.gain,
            "objective": {"name": self.objective, "unit": UNITS[self.objective]},
            "seconds": self.seconds,
            "evaluations": self.evaluations,
        }


class _Fleet:
    """Bounds and exact values of every model on every chip group."""

    def __init__(
        self, problems: Sequence[SearchProblem], groups: ChipGroups, objective: str, threads: int
    ) -> None:
        self.problems, self.groups, self.threads = list(problems), groups, threads
        self.name, self.evaluations = objective, 0
        self.objective = objective_of(objective, problems, groups)
        search = BestFirstSearch(problems, groups, objective=self.objective, threads=threads)
        for table in search.tables:
            table.bound_all()
        self.seconds = [table.least for table in search.tables]
        """Lower bounds of every strategy's step, of each model."""
        self.least = np.stack(search.least_values(slice(None)))
        """Lower bounds of values, shape (models, groups)."""
        self.exact = np.full(self.least.shape, np.inf)
        """Exact values; infinite where they are not known or nothing fits."""
        self.known = ~np.isfinite(self.least)
        """Where the value is known, or nothing is known to fit."""

    def raise_to(self, i: int, at: Array, limits: Array) -> None:
        """Evaluate model `i` on chip groups, or prove that its values exceed their limits."""
        groups = self.groups.take(at)
        objective = objective_of(self.name, [self.problems[i]], groups)
        search = LimitedSearch(
            [self.problems[i]], groups, limits, threads=self.threads, objective=objective
        )
        search.known = [self.seconds[i][:, at]]
        value, least = search.exact()
        self.seconds[i][:, at] = np.maximum(self.seconds[i][:, at], search.candidate_bounds()[0])
        found = np.isfinite(value)
        self.evaluations += int(found.sum())
        self.exact[i, at[found]] = value[found]
        self.known[i, at[found]] = True
        above = np.where(limits == np.inf, np.inf, np.maximum(least, limits))
        self.least[i, at] = np.maximum(self.least[i, at], np.where(found, value, above))
        self.known[i, at[~found & (limits == np.inf)]] = True


class _Divisions:
    """All divisions of the models into those of one chip and those of the other."""

    def __init__(self, weights: Sequence[float]) -> None:
        count = len(weights)
        self.weights = np.array(weights) / sum(weights)
        numbers = np.arange(2**count)
        self.has = (numbers[:, None] >> np.arange(count)) & 1 == 1
        """Members of each subset, shape (subsets, models)."""
        self.rest = 2**count - 1 - numbers

    def sums(self, logs: Array) -> Array:
        """Sum logarithms of values over subsets, shape (subsets, groups)."""
        weighted = self.weights[:, None] * logs
        found = np.zeros((len(self.has), logs.shape[1]))
        for subset in range(1, len(found)):
            low = subset & -subset
            found[subset] = found[subset - low] + weighted[low.bit_length() - 1]
        return found


def _logs(values: Array) -> Array:
    with np.errstate(divide="ignore"):
        found: Array = np.log(values)
    return found


def _start(fleet: _Fleet, single: Winner) -> None:
    """Evaluate the best chip for all, and the chip with the lowest bound of each model."""
    first = {int(np.argmin(fleet.least[i])) for i in range(len(fleet.problems))}
    first |= {int(np.flatnonzero((fleet.groups.chip == single.chip).any(axis=1))[0])}
    at = np.array(sorted(first))
    for i in range(len(fleet.problems)):
        todo = at[~fleet.known[i, at]]
        if len(todo):
            fleet.raise_to(i, todo, np.full(len(todo), np.inf))


def _limits(fleet: _Fleet, divisions: _Divisions, best: float, i: int) -> Array:
    """Values of model `i` on each group above which no division with it is better than `best`."""
    logs = _logs(fleet.least)
    sums = divisions.sums(logs)
    with np.errstate(invalid="ignore"):
        least = sums.min(axis=1)
        mine = np.flatnonzero(divisions.has[:, i])
        others = sums[mine] - divisions.weights[i] * logs[i]
        room = best - least[divisions.rest[mine]][:, None] - others
        most = np.where(np.isnan(room), -np.inf, room).max(axis=0) / divisions.weights[i]
    found: Array = np.exp(np.minimum(most, 700.0))
    return found


def _best_exact(fleet: _Fleet, divisions: _Divisions) -> tuple[float, int, Array]:
    """Find the best evaluated division: its logarithm, its subset, and the group of each subset."""
    sums = divisions.sums(_logs(np.where(fleet.known, fleet.exact, np.inf)))
    sums = np.where(np.isnan(sums), np.inf, sums)
    sums[0] = 0.0
    best = sums.min(axis=1)
    total = best + best[divisions.rest]
    subset = int(np.argmin(total))
    return float(total[subset]), subset, sums.argmin(axis=1)


def best_pair(
    models: Sequence[Model],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    *,
    single: Winner,
    weights: Sequence[float] | None = None,
    objective: str = "time",
    time_limit_s: float = float("inf"),
    threads: int = 1,
    say: Callable[[str], None] | None = None,
) -> Portfolio:
    """Find the two chips of a space that serve several models best, each on its better one.

    Parameters
    ----------
    models, space, cluster, training, weights, objective
        As `phaze_fast.search` takes them.
    single
        The best chip for all models together, as the search found it.
    time_limit_s
        Stop after so many seconds, with a lower bound.
    threads
        At most this many; the result does not depend on it.
    say
        Called with a line on the progress.

    Raises
    ------
    InvalidInputError
        Where there are fewer than two models, or too many.
    InfeasibleError
        Where no chip is left.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> few = pf.ArchitectureSpace.published()[40_000:40_060]
    >>> cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    >>> models, step = ["bert-large", "gpt2-small"], pf.Training(global_batch=64, micro_batch=2)
    >>> pair = pf.search(models, few, cluster, step, portfolio=True).portfolio
    >>> pair.proven, pair.gain >= 1.0
    (True, True)
    """
    if not 2 <= len(models) <= MOST_MODELS:
        raise InvalidInputError(
            f"portfolio: {len(models)} models are not accepted; expected 2 to {MOST_MODELS}"
        )
    began, shares = time.monotonic(), checked_weights(weights, len(models))
    groups = ChipGroups.of(space)
    if objective not in _ANY_HBM:
        groups = groups.single(*np.nonzero(groups.chip >= 0))
    fleet = _Fleet(problems_of(models, groups, cluster, training), groups, objective, threads)
    divisions = _Divisions(shares)
    _start(fleet, single)
    proven, wave = False, 0
    while time.monotonic() - began < time_limit_s:
        best = _best_exact(fleet, divisions)[0]
        if say is not None:
            say(f"best pair {np.exp(best):.6g}, {fleet.evaluations} evaluations")
        busy = False
        for i in range(len(models)):
            limits = _limits(fleet, divisions, best - _ALMOST, i)
            todo = np.flatnonzero(~fleet.known[i] & (fleet.least[i] < limits))
            if len(todo):
                order = np.argsort(fleet.least[i, todo] / limits[todo], kind="stable")
                some = np.sort(todo[order[: _WAVES[min(wave, len(_WAVES) - 1)]]])
                fleet.raise_to(i, some, limits[some])
                busy = True
        wave += 1
        if not busy:
            proven = True
            break
    return _portfolio(fleet, divisions, space, single, proven, time.monotonic() - began)


def _portfolio(
    fleet: _Fleet,
    divisions: _Divisions,
    space: ArchitectureSpace,
    single: Winner,
    proven: bool,
    seconds: float,
) -> Portfolio:
    """Describe the best pair so far."""
    best, subset, chosen = _best_exact(fleet, divisions)
    names = [problem.model.name for problem in fleet.problems]
    parts = [p for p in (subset, int(divisions.rest[subset])) if p]
    if len({int(chosen[p]) for p in parts}) == 1:
        parts = [len(divisions.has) - 1]
    sums = divisions.sums(_logs(fleet.least)).min(axis=1)
    sums[0] = 0.0
    bound = best if proven else min(best, float((sums + sums[divisions.rest]).min()))

    def chip(group: int) -> Accelerator:
        return space[int(fleet.groups.chip[group].max())]

    def own(part: int) -> tuple[str, ...]:
        return tuple(n for n, has in zip(names, divisions.has[part], strict=True) if has)

    return Portfolio(
        chips=tuple(chip(int(chosen[p])) for p in parts),
        models=tuple(own(p) for p in parts),
        value=float(np.exp(best)),
        bound=float(np.exp(bound)),
        proven=proven,
        single=space[single.chip],
        single_value=single.score,
        objective=fleet.name,
        seconds=seconds,
        evaluations=fleet.evaluations,
    )
