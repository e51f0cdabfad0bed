"""What a search makes least: seconds, joules, or what a chip costs for as long as a step takes.

Every objective is linear in a step's seconds and joules,

    value = rate(chip, HBM) x seconds + joule x joules,

with numbers that do not depend on the plan. Joules are at least those of the operators and what all
devices leak until the step ends, so a lower bound of the seconds gives one of the value, and a
value that must not be exceeded gives seconds that must not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.explore.candidates import CandidateTable
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.problem import Problem
from phaze_fast.hardware import area_batch, energy_table
from phaze_fast.hardware.price import RunningCosts

__all__ = ["UNITS", "Objective", "checked_objective", "objective_of"]

Array = np.ndarray[Any, Any]

UNITS = {
    "time": "s a step",
    "energy": "J a step",
    "cost": "USD s a step",
    "area": "mm2 s a step",
    "tokens": "USD for a trillion tokens",
}
"""What may be made least, and in what unit: most samples per second, per joule, per dollar of
devices, per mm2 of silicon, or the cheapest trillion tokens."""

_SAFE = 1.0 - 1e-9


def checked_objective(name: str) -> str:
    """Refuse what is not an objective."""
    if name not in UNITS:
        raise InvalidInputError(
            f"objective: {name!r} is not accepted; {nearest(str(name), tuple(UNITS))}"
        )
    return name


@dataclass(frozen=True, eq=False)
class Objective:
    """An objective on the chip groups of a search."""

    name: str
    rates: tuple[Array, ...]
    """Value per second of each model's step, shape (groups, capacities)."""
    joules: tuple[float, ...]
    """Value per joule of each model's step."""
    least_rates: tuple[Array, ...]
    """The least of a group's rates over its capacities."""
    static_w: Array
    """What a device of each group leaks, watts."""
    devices: tuple[Array, ...]
    """Devices that the plans of each strategy of each model use at least."""

    @property
    def plain(self) -> bool:
        """Whether the value is the step's seconds."""
        return self.name == "time"

    @property
    def has_energy(self) -> bool:
        """Whether joules count."""
        return any(joule > 0.0 for joule in self.joules)

    def value(self, i: int, group: int, capacity: int, time_s: float, joules: float) -> float:
        """Give the value of a plan of model `i`."""
        if self.plain:
            return time_s
        return float(self.rates[i][group, capacity]) * time_s + self.joules[i] * joules

    def least(self, i: int, table: CandidateTable, groups: Any, some: slice = slice(None)) -> Array:
        """Lower bounds of the values of strategies of model `i`, shape (strategies, groups)."""
        times = table.least[some, groups]
        if self.plain:
            return times
        found = self.least_rates[i][groups] * times
        if self.joules[i]:
            leaks = self.devices[i][some, None] * self.static_w[groups] * times
            spent = np.maximum(table.dynamic[some, groups] + leaks, table.energy[some, groups])
            found = found + self.joules[i] * spent
        bounded: Array = found * _SAFE
        return bounded

    def seconds(self, i: int, s: int, table: CandidateTable, groups: Array, most: Array) -> Array:
        """Say how long plans may take for their value to be at most `most`.

        Parameters
        ----------
        i, s, table
            The model, the strategy and what is known of them.
        groups
            Chip groups.
        most
            Values, shape (groups, capacities).
        """
        if self.plain:
            return most
        per_s, left = self.rates[i][groups], most
        if self.joules[i]:
            leaks = self.joules[i] * self.devices[i][s] * self.static_w[groups]
            per_s = per_s + leaks[:, None]
            left = most - self.joules[i] * table.dynamic[s, groups][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Array = left / per_s / _SAFE
        return np.where(np.isnan(found), np.inf, found)


def _least_devices(problem: Problem) -> Array:
    """Devices that the plans of each strategy use at least."""
    found = []
    for s in range(len(problem.evaluator)):
        own, k = problem.of(s)
        evaluator = own.evaluator
        mine = evaluator.layouts["strategy"] == k
        replicas = evaluator.layouts["pp"][mine] * evaluator.layouts["dp"][mine]
        found.append(evaluator.sizes[k].inner * int(replicas.min(initial=1)) if mine.any() else 1)
    return np.array(found, dtype=float)


def objective_of(
    name: str,
    problems: Sequence[Problem],
    groups: ChipGroups,
    running: RunningCosts | None = None,
) -> Objective:
    """Give an objective on chip groups.

    Parameters
    ----------
    name
        One of `UNITS`.
    problems
        One for each model.
    groups
        The chips.
    running
        What electricity costs and how long devices are used, where dollars are counted.
    """
    if checked_objective(name) == "time":  # nothing is looked up: proofs make many searches
        none = np.zeros(0)
        return Objective(name, (), (0.0,) * len(problems), (), none, ())
    running = RunningCosts() if running is None else running
    shape = groups.chip.shape
    devices = float(problems[0].cluster.devices)
    rates: list[Array] = []
    joules: list[float] = []
    for problem in problems:
        step = problem.training
        tokens = step.global_batch * float(step.seq or problem.model.seq)
        trillion = 1e12 / tokens
        usd = groups.device_usd() * devices
        own = {
            "energy": np.zeros(shape),
            "cost": usd,
            "area": np.repeat(groups.area_mm2[:, None] * devices, shape[1], axis=1),
            "tokens": usd * trillion / running.seconds,
        }
        rates.append(own[name])
        per_joule = {"energy": 1.0, "tokens": trillion * running.usd_per_joule}
        joules.append(per_joule.get(name, 0.0))
    there = groups.chip >= 0
    static_w = area_batch(groups.records)["total_mm2"] * energy_table().static_w_per_mm2
    energy = any(joules)
    return Objective(
        name=name,
        rates=tuple(rates),
        joules=tuple(joules),
        least_rates=tuple(np.where(there, rate, np.inf).min(axis=1) for rate in rates),
        static_w=static_w * _SAFE,
        devices=tuple(_least_devices(p) if energy else np.ones(len(p.evaluator)) for p in problems),
    )
