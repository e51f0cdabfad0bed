"""The outcome of a search as plain data: winners, front, proof; and designs, which users see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from phaze_fast.errors import not_accepted
from phaze_fast.hardware import Accelerator
from phaze_fast.planning import Plan
from phaze_fast.tables import Brief
from phaze_fast.units import format_bytes, format_time


@dataclass(frozen=True)
class Budget:
    """Limits after which a search stops."""

    time_limit_s: float = float("inf")
    max_points: float = float("inf")
    """Candidates that are placed; the wave that reaches the limit is finished."""
    stop: Callable[[], bool] | None = field(default=None, compare=False)
    """Called after every wave: whether to stop."""

    def __post_init__(self) -> None:
        for name, value in (("time_limit_s", self.time_limit_s), ("max_points", self.max_points)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise not_accepted(name, value, "a number, zero or more")


@dataclass(frozen=True)
class Progress:
    """The state of a search after a wave."""

    seconds: float
    bounded: int
    """Candidates with a bound."""
    scheduled: int
    placed: int
    open: int
    """Candidates that are neither placed nor pruned."""
    incumbent: float
    """Score of the best chip so far."""
    bound: float
    """Lower bound of all scores."""


@dataclass(frozen=True)
class Winner:
    """A chip with its HBM, and the best plan of each model on it."""

    group: int
    """Position among the chip groups."""
    capacity: int
    """Position among the HBM capacities."""
    chip: int
    """Position in the space."""
    score: float
    """Value of the objective, seconds of a step unless another was given; of several models their
    weighted geometric mean."""
    time_s: float
    """Seconds of a step; of several models their weighted geometric mean."""
    area_mm2: float
    energy_j: float
    """Joules of one step of every model."""
    hbm_bytes: int
    cost_usd: float
    """Dollars of all devices."""
    plans: tuple[Plan, ...]
    """The plan of each model."""

    @property
    def rank(self) -> tuple[float, float, float, int, int]:
        """Sort key, smaller is better: score, area, energy, HBM, position in the space."""
        return (self.score, self.area_mm2, self.energy_j, self.hbm_bytes, self.chip)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "plans": [plan.to_dict() for plan in self.plans]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Winner:
        """Read what `to_dict` returned."""
        return cls(**{**data, "plans": tuple(Plan.from_dict(plan) for plan in data["plans"])})


def json_number(value: float) -> float | str:
    """Convert an infinite number to text, since JSON has no infinity."""
    return value if np.isfinite(value) else str(value)


@dataclass(frozen=True)
class Outcome(Brief):
    """The best chips of a space, the front, and the proof."""

    complete: bool
    """Whether every candidate was placed or pruned."""
    bound: float
    """Lower bound of all scores."""
    winners: tuple[Winner, ...]
    front: tuple[Winner, ...]
    objectives: tuple[str, ...]
    counts: dict[str, int]
    """Points by the step at which they were placed or pruned."""
    points: int
    designs: int
    """Number of chips; each HBM capacity of a chip counts."""
    groups_placed: int
    """Chip groups with a strategy that was placed."""
    unproven: int
    """Placed candidates with a layer schedule, or an assignment of layers to chunks, that is not
    proven to be the best."""
    history: tuple[Progress, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    """Sentences about a cache or a journal that was repaired or could not be used."""
    recalled: bool = False
    """Whether the outcome was read from the cache of an earlier run."""

    @property
    def gap(self) -> float:
        """How much better another chip may be, as a fraction of the bound."""
        if not self.winners:
            return 0.0 if self.complete else float("inf")
        if not self.bound > 0:
            return float("inf")
        return max(0.0, self.winners[0].score / self.bound - 1.0)

    @property
    def status(self) -> str:
        """``optimal`` only with a proof over all points; else ``feasible`` or ``infeasible``."""
        if not self.winners:
            return "infeasible" if self.complete else "unknown"
        return "optimal" if self.complete and self.gap == 0.0 else "feasible"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["bound"] = json_number(self.bound)
        data["winners"] = [winner.to_dict() for winner in self.winners]
        data["front"] = [point.to_dict() for point in self.front]
        data["history"] = [
            {name: json_number(value) for name, value in asdict(progress).items()}
            for progress in self.history
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read what `to_dict` returned."""

        def progress(item: Mapping[str, Any]) -> Progress:
            numbers: dict[str, Any] = {
                k: float(v) if isinstance(v, str) else v for k, v in item.items()
            }
            return Progress(**numbers)

        read = {
            "bound": float(data["bound"]),
            "winners": tuple(Winner.from_dict(w) for w in data["winners"]),
            "front": tuple(Winner.from_dict(p) for p in data["front"]),
            "objectives": tuple(data["objectives"]),
            "history": tuple(progress(m) for m in data["history"]),
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **read})


@dataclass(frozen=True)
class Design:
    """A chip with its HBM, and the best plan of each model on it."""

    chip: Accelerator
    index: int
    """Position in the space: ``space[index]`` is the chip."""
    grid_index: int
    """Position in the space's whole grid, the number in the chip's name."""
    plans: dict[str, Plan]
    """Plans by name of the model."""
    time_s: float
    """Seconds of a step; of several models, their weighted geometric mean."""
    value: float
    """Value of the objective, seconds unless another was given."""
    samples_per_s: float
    """Sequences per second; of several models, their weighted geometric mean."""
    area_mm2: float
    energy_j: float
    """Joules of one step of every model, over all devices."""
    hbm_bytes: int
    cost_usd: float
    """Dollars of the dies and HBM of all devices."""

    @property
    def plan(self) -> Plan:
        """The plan of the first model."""
        return next(iter(self.plans.values()))

    @property
    def bottleneck(self) -> str:
        """The part that takes most of the first model's step."""
        return self.plan.bottleneck

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Return plain data, with the stages of the plans or without."""
        plans = {name: plan.to_dict(stages) for name, plan in self.plans.items()}
        return {
            "chip": self.chip.to_dict(),
            "chip_text": str(self.chip),
            "index": self.index,
            "grid_index": self.grid_index,
            "plan": next(iter(plans.values())),
            "plans": plans,
            "time_s": self.time_s,
            "value": self.value,
            "samples_per_s": self.samples_per_s,
            "area_mm2": self.area_mm2,
            "energy_j": self.energy_j,
            "hbm_bytes": self.hbm_bytes,
            "cost_usd": self.cost_usd,
            "bottleneck": self.bottleneck,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.chip}",
            f"{self.area_mm2:.2f} mm2, a step in {format_time(self.time_s)}, "
            f"{self.samples_per_s:,.2f} samples/s, {self.energy_j:,.0f} J",
        ]
        lines += [f"{name}: {plan}" for name, plan in self.plans.items()]
        return "\n".join(lines)


def share_text(plan: Plan) -> str:
    """Write what a step is spent on, largest share first."""
    parts = sorted(plan.parts_s.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds / plan.time_s:.0%}" for name, seconds in parts[:3] if seconds > 0]
    return ", ".join(shown)


def fullest_text(plan: Plan, hbm_bytes: int) -> str:
    """Write the peak memory of the fullest device and its share of the HBM."""
    share = plan.memory_bytes / hbm_bytes
    return f"{format_bytes(plan.memory_bytes)} of {format_bytes(hbm_bytes)} ({share:.0%})"


def geometric_mean(values: list[float], weights: tuple[float, ...]) -> float:
    """Weighted geometric mean; that of a single value is the value itself."""
    if len(values) == 1:
        return values[0]
    total = sum(weights)
    logs = [w / total * np.log(v) for w, v in zip(weights, values, strict=True)]
    return float(np.exp(sum(logs)))
