"""What came out of a search, as plain data that can be kept: winners, front, counts, history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import Plan
from phaze_fast.tables import Brief

__all__ = ["Budget", "FrontPoint", "Outcome", "Progress", "Winner"]


@dataclass(frozen=True)
class Budget:
    """When to stop at the latest."""

    time_limit_s: float = float("inf")
    max_points: float = float("inf")
    """Candidates that are placed; the wave in which they are goes to its end."""
    stop: Callable[[], bool] | None = field(default=None, compare=False)
    """Asked after every wave: whether to end with what is found so far."""

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "max_points"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InvalidInputError(
                    f"{name}: {value!r} is not accepted; expected a number, zero or more"
                )


@dataclass(frozen=True)
class Progress:
    """How a search stands."""

    seconds: float
    bounded: int
    """Candidates with a bound."""
    scheduled: int
    placed: int
    open: int
    """Candidates that may still be of interest."""
    incumbent: float
    """Seconds of the best step found; for several models their weighted geometric mean."""
    bound: float
    """Nothing is better than this."""


@dataclass(frozen=True)
class Winner:
    """A chip with its HBM, and for each model the best plan on it."""

    group: int
    """Position among the chip groups."""
    capacity: int
    """Position among the HBM capacities."""
    chip: int
    """Position in the space."""
    score: float
    """What is least: seconds of a step, or what the objective counts; of several models their
    weighted geometric mean."""
    time_s: float
    """Seconds of a step; of several models their weighted geometric mean."""
    area_mm2: float
    energy_j: float
    """Of one step of every model."""
    hbm_bytes: int
    cost_usd: float
    """Of all devices."""
    plans: tuple[Plan, ...]
    """One for each model."""

    def of_group(self, group: int) -> Winner:
        """Give the same with the group's number in a larger set."""
        return replace(self, group=group)

    @property
    def rank(self) -> tuple[float, float, float, int, int]:
        """Smaller is better: time, area, energy, HBM, place in the space."""
        return (self.score, self.area_mm2, self.energy_j, self.hbm_bytes, self.chip)

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "plans": [plan.to_dict() for plan in self.plans]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Winner:
        """Read it back."""
        return cls(**{**data, "plans": tuple(Plan.from_dict(plan) for plan in data["plans"])})


FrontPoint = Winner
"""A point of the front is a chip with its HBM and its plans as well."""


def _finite(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


@dataclass(frozen=True)
class Outcome(Brief):
    """The best chips of a space, the front, and the proof."""

    complete: bool
    """Whether the search went to the end."""
    bound: float
    """Nothing in the space has a better score, seconds."""
    winners: tuple[Winner, ...]
    front: tuple[Winner, ...]
    objectives: tuple[str, ...]
    counts: dict[str, int]
    """Points by the step that settled them."""
    points: int
    designs: int
    """Chips, each with its HBM."""
    groups_placed: int
    """Chip groups of which some strategy was evaluated in full."""
    unproven: int
    """Placed candidates with a layer whose schedule is not proven to be the best."""
    history: tuple[Progress, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    """What was mended on the way."""
    recalled: bool = False
    """Whether it was found by an earlier run and looked up."""

    @property
    def gap(self) -> float:
        """How much better something might be, as a fraction of the bound."""
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
        """Give it as plain data that `from_dict` reads back."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["bound"] = _finite(self.bound)
        data["winners"] = [winner.to_dict() for winner in self.winners]
        data["front"] = [point.to_dict() for point in self.front]
        data["history"] = [
            {name: _finite(value) for name, value in asdict(progress).items()}
            for progress in self.history
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read it back."""

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
