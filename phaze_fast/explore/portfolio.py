"""The best two chips for several models, each model on the chip that suits it, with a proof.

The geometric mean of a pair is the product of one factor for the models of each chip, so for each
division of the models the two chips are chosen independently. Lower bounds of all models on all
chip groups give a lower bound of each division. Where a chip group may still give a division below
the best pair so far, the models are evaluated on it, up to the largest value of interest.
Once no division has a lower bound below the best pair, the pair is proven optimal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.best_first import BestFirstSearch, LimitedSearch
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.find import checked_weights
from phaze_fast.explore.objectives import UNITS
from phaze_fast.explore.problem import SearchProblem, problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.tables import Array

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
    """Weighted geometric mean of the models' values on the best single chip."""
    objective: str
    seconds: float
    evaluations: int
    """Pairs of a model and a chip group whose exact value was found."""

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


class _PairSearch:
    """Bounds and exact values of every model on every chip group, and of all divisions of models.

    A division is a subset of the models, which run on one chip; the rest run on the other.
    """

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        weights: Sequence[float],
        objective: str,
        threads: int,
    ) -> None:
        self.problems, self.groups, self.threads = list(problems), groups, threads
        self.name, self.evaluations = objective, 0
        search = BestFirstSearch(problems, groups, objective=objective, threads=threads)
        for table in search.tables:
            table.bound_all()
        self.seconds = [table.least for table in search.tables]
        """For each model, lower bounds of steps, shape (strategies, groups)."""
        self.least = np.stack(search.least_values(slice(None)))
        """Lower bounds of values, shape (models, groups)."""
        self.exact = np.full(self.least.shape, np.inf)
        """Exact values; infinite where they are not known or no plan fits."""
        self.known = ~np.isfinite(self.least)
        """Where the exact value is known, or it is known that no plan fits."""
        count = len(weights)
        self.weights = np.array(weights) / sum(weights)
        numbers = np.arange(2**count)
        self.members = (numbers[:, None] >> np.arange(count)) & 1 == 1
        """Models of each subset, shape (subsets, models)."""
        self.rest = 2**count - 1 - numbers
        """The complement of each subset."""

    def evaluate(self, i: int, at: Array, limits: Array) -> None:
        """Evaluate model `i` on chip groups, or prove that its values exceed their limits."""
        groups = self.groups.take(at)
        search = LimitedSearch(
            [self.problems[i]], groups, limits, threads=self.threads, objective=self.name
        )
        search.known = [self.seconds[i][:, at]]
        value, least = search.exact()
        self.seconds[i][:, at] = search.candidate_bounds()[0]
        within = np.isfinite(value)
        self.evaluations += int(within.sum())
        self.exact[i, at[within]] = value[within]
        self.known[i, at[within | (limits == np.inf)]] = True
        above = np.where(limits == np.inf, np.inf, np.maximum(least, limits))
        self.least[i, at] = np.maximum(self.least[i, at], np.where(within, value, above))

    def start(self, single: Winner) -> None:
        """Evaluate all models on the best single chip and on those of their least bounds."""
        first = {int(np.argmin(least)) for least in self.least}
        first |= {int(np.flatnonzero((self.groups.chip == single.chip).any(axis=1))[0])}
        at = np.array(sorted(first))
        for i in range(len(self.problems)):
            todo = at[~self.known[i, at]]
            if len(todo):
                self.evaluate(i, todo, np.full(len(todo), np.inf))

    def _sums(self, values: Array) -> tuple[Array, Array]:
        """Logarithms of values, and their weighted sums over subsets, shape (subsets, groups)."""
        with np.errstate(divide="ignore"):
            logs = np.log(values)
        weighted = self.weights[:, None] * logs
        sums = np.zeros((len(self.members), logs.shape[1]))
        for subset in range(1, len(sums)):
            low = subset & -subset
            sums[subset] = sums[subset - low] + weighted[low.bit_length() - 1]
        return logs, sums

    def limits(self, i: int, best: float) -> Array:
        """Largest value of model `i` on each group with which a division can be below `best`."""
        logs, sums = self._sums(self.least)
        with np.errstate(invalid="ignore"):
            least = sums.min(axis=1)
            own = np.flatnonzero(self.members[:, i])
            others = sums[own] - self.weights[i] * logs[i]
            left = best - least[self.rest[own]][:, None] - others
            most = np.where(np.isnan(left), -np.inf, left).max(axis=0) / self.weights[i]
        limits: Array = np.exp(np.minimum(most, 700.0))
        return limits

    def best(self) -> tuple[float, int, Array]:
        """Find the best evaluated division: log of its value, its subset, best groups."""
        _, sums = self._sums(np.where(self.known, self.exact, np.inf))
        sums = np.where(np.isnan(sums), np.inf, sums)
        sums[0] = 0.0
        least = sums.min(axis=1)
        total = least + least[self.rest]
        subset = int(np.argmin(total))
        return float(total[subset]), subset, sums.argmin(axis=1)

    def bound(self) -> float:
        """Lower bound of the logarithm of every division's value."""
        sums = self._sums(self.least)[1].min(axis=1)
        sums[0] = 0.0
        return float((sums + sums[self.rest]).min())

    def wave(self, size: int) -> bool:
        """Evaluate groups where a division may be below the best; return whether there were any.

        At most `size` groups are evaluated for each model.
        """
        best, busy = self.best()[0], False
        for i in range(len(self.problems)):
            limits = self.limits(i, best - _ALMOST)
            todo = np.flatnonzero(~self.known[i] & (self.least[i] < limits))
            if len(todo):
                order = np.argsort(self.least[i, todo] / limits[todo], kind="stable")
                some = np.sort(todo[order[:size]])
                self.evaluate(i, some, limits[some])
                busy = True
        return busy


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
        Where no chip passes the limits of the space.

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
    problems = problems_of(models, groups, cluster, training)
    search = _PairSearch(problems, groups, shares, objective, threads)
    search.start(single)
    proven, sizes = False, chain(_WAVES, repeat(_WAVES[-1]))
    while not proven and time.monotonic() - began < time_limit_s:
        if say is not None:
            best = np.exp(search.best()[0])
            say(f"best pair {best:.6g}, {search.evaluations} evaluations")
        proven = not search.wave(next(sizes))
    best, subset, chosen = search.best()
    parts = [p for p in (subset, int(search.rest[subset])) if p]
    if len({int(chosen[p]) for p in parts}) == 1:
        parts = [len(search.members) - 1]
    names = np.array([model.name for model in models])
    return Portfolio(
        chips=tuple(space[int(groups.chip[chosen[p]].max())] for p in parts),
        models=tuple(tuple(names[search.members[p]].tolist()) for p in parts),
        value=float(np.exp(best)),
        bound=float(np.exp(best if proven else min(best, search.bound()))),
        proven=proven,
        single=space[single.chip],
        single_value=single.score,
        objective=objective,
        seconds=time.monotonic() - began,
        evaluations=search.evaluations,
    )
