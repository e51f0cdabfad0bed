"""Limits of a wafer search, and what it found, as records that others can use."""

from __future__ import annotations

from dataclasses import dataclass, field

from phaze_fast.errors import InvalidInputError
from phaze_fast.units import format_time
from phaze_fast.wafer.evaluate import Evaluation
from phaze_fast.wafer.problem import Problem

__all__ = ["Effort", "MappingResult", "whole_number"]


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """Refuse what is no whole number in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInputError(
            f"{name}: {value!r} is not accepted; expected a whole number from {least} to {most}"
        )
    return value


@dataclass(frozen=True)
class Effort:
    """How long to search.

    Examples
    --------
    >>> Effort(seeds=1).steps
    20000
    """

    seeds: int = 4
    """Annealings for each promising layout."""
    steps: int = 20_000
    """Evaluations of each."""
    promising: int = 6
    """Layouts that get them."""
    budget_s: float | None = None
    """Stop looking at further layouts after so long; the answer then depends on the machine."""

    def __post_init__(self) -> None:
        for name, most in (("seeds", 1000), ("steps", 10**9), ("promising", 10**6)):
            whole_number(name, getattr(self, name), 1, most)
        if self.budget_s is not None and not self.budget_s > 0:
            raise InvalidInputError(
                f"budget_s: {self.budget_s!r} is not accepted; expected seconds > 0"
            )


@dataclass(frozen=True)
class MappingResult:
    """The fastest mapping found on one wafer."""

    problem: Problem
    best: Evaluation
    """Where nothing fits, the one that comes closest; see `Evaluation.fits`."""
    bound_s: float
    """No mapping takes less, over all layouts."""
    evaluations: int
    seconds: float
    kernel_s: float
    """Of a core, in incremental evaluations."""
    kernel_evaluations: int
    layouts: int
    pruned: int
    """Layouts left out because of a bound."""
    unseen: int
    """Layouts left out because the budget ran out."""
    seed: int
    runners_up: tuple[Evaluation, ...] = field(repr=False, default=())
    """Best mapping of each of the other promising layouts."""

    @property
    def gap(self) -> float:
        """Time that a faster mapping could still save, relative to the best; 1 where none fits."""
        return max(0.0, 1.0 - self.bound_s / self.best.time_s) if self.best.fits else 1.0

    def proof(self) -> dict[str, float | None]:
        """Bound and gap as plain data; none where nothing fits."""
        fits = self.best.fits
        return {"bound": self.bound_s if fits else None, "gap": self.gap if fits else None}

    def __str__(self) -> str:
        return f"{self.best}; bound {format_time(self.bound_s)}, gap {self.gap:.1%}"

    @property
    def evaluations_per_s(self) -> float:
        """Incremental evaluations per second of one core, while it does nothing else."""
        return self.kernel_evaluations / self.kernel_s if self.kernel_s > 0 else 0.0
