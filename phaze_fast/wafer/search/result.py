"""Effort and result of a wafer search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from phaze_fast.errors import not_accepted
from phaze_fast.tables import Table, joined_columns
from phaze_fast.units import format_time
from phaze_fast.wafer.hardware.wafer import FaultMap
from phaze_fast.wafer.mapping.details import details
from phaze_fast.wafer.mapping.evaluate import Evaluation
from phaze_fast.wafer.mapping.operators import PIECES
from phaze_fast.wafer.mapping.problem import Problem

_ROUNDING = 1e-8  # relative; bounds are lowered by several 1e-9 so that rounding never lifts them


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """Return a whole number; raise an error if it is not one, or out of range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise not_accepted(name, value, f"a whole number from {least} to {most}")
    return value


def bound_space_of(problem: Problem, layouts: str = "") -> str:
    """Describe the mappings for which a bound of a problem holds.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Layouts for which the bound holds; by default all.

    Examples
    --------
    >>> from phaze_fast.wafer import WaferTraining
    >>> bound_space_of(Problem("bertlarge", "dram-wafer", WaferTraining(64))).split(",")[0]
    'equal rectangles of dies as stages'
    """
    batch = problem.training.global_batch
    placed = "equal rectangles of dies as stages, in bands, or equal lines along one walk"
    if problem.wafer.switch is not None:
        placed = "equal numbers of any dies with switches as stages, at most three roles each"
    stages = "any number of them; blocks shared out evenly or by FLOPs"
    if problem.work.encodes:
        stages = "one stage, which has all blocks of the encoder and of the decoder"
    known = (
        f"{placed}; {stages}; micro-batches that divide {batch}; where a stage's dies do not "
        "divide it, also the least multiples of them for a number of micro-batches, with at most a "
        "tenth of padding"
    )
    if not problem.work.encodes:
        known += "; 1F1B, ZB-H1, or 2 to 4 interleaved runs of blocks"
    if problem.wafer.wafer_count > 1:
        count = problem.wafer.wafer_count
        known += f"; pipelines over equal shares of {count} wafers, stages on each alike"
    if problem.wafer.dead or problem.wafer.dead_links:
        known += "; no dead die or link inside a stage, all stages in one connected part"
    limits = [] if problem.recompute else ["nothing computed again"]
    limits += ["dies given out in rank order"] if problem.linear else []
    if problem.overlap and not problem.volume:
        limits.append(f"conversions whole or in {PIECES} pieces that overlap with a product")
    said = [layouts or known, "every legal operator mapping", *limits]
    return "; ".join(said)


def status_of(fits: bool, gap: float, proven_oom: bool) -> str:
    """Return the status of a search.

    ``optimal``: no mapping of the bound's space is faster, up to the rounding of bounds.
    ``feasible``: the best mapping found, with a gap. ``infeasible``: proven that none fits.
    ``unknown``: none that fits was found, and no proof that there is none.

    Examples
    --------
    >>> status_of(True, 0.01, False), status_of(False, 1.0, True), status_of(False, 1.0, False)
    ('feasible', 'infeasible', 'unknown')
    """
    if fits:
        return "optimal" if gap <= _ROUNDING else "feasible"
    return "infeasible" if proven_oom else "unknown"


@dataclass(frozen=True)
class Effort:
    """Effort of a search.

    Examples
    --------
    >>> Effort(seeds=1).steps
    20000
    """

    seeds: int = 4
    """Number of annealing runs per promising layout."""
    steps: int = 20_000
    """Evaluations per annealing run."""
    promising: int = 6
    """Number of layouts that are annealed."""
    budget_s: float | None = None
    """Seconds after which no further layout is visited; the result then depends on the machine."""
    stop: Callable[[], bool] | None = None
    """Called periodically; once it returns true, no further layout is visited, as if the budget
    were spent. Worker processes do not call it."""

    def __post_init__(self) -> None:
        for name, most in (("seeds", 1000), ("steps", 10**9), ("promising", 10**6)):
            whole_number(name, getattr(self, name), 1, most)
        if self.budget_s is not None and not self.budget_s > 0:
            raise not_accepted("budget_s", self.budget_s, "seconds > 0")

    def spent(self, began: float) -> bool:
        """Whether a search that began at `began`, a `time.perf_counter` value, is to stop."""
        if self.stop is not None and self.stop():
            return True
        return self.budget_s is not None and time.perf_counter() - began > self.budget_s


@dataclass(frozen=True)
class MappingResult(Table):
    """The fastest mapping found on one wafer, and what is proven about it."""

    problem: Problem
    best: Evaluation
    """Best mapping; if none that fits was found, the one that exceeds memory least (see
    `Evaluation.fits`)."""
    bound_s: float
    """A lower bound on the time of every mapping of `bound_space`; infinite if none of them
    fits."""
    evaluations: int
    seconds: float
    kernel_s: float
    """CPU seconds of incremental evaluations."""
    kernel_evaluations: int
    layouts: int
    pruned: int
    """Layouts pruned by a bound."""
    unseen: int
    """Layouts not visited because the budget ran out."""
    seed: int
    bound_space: str = ""
    """Description of the mappings for which the bound holds."""
    runners_up: tuple[Evaluation, ...] = field(repr=False, default=())
    """Best mapping of each of the other promising layouts."""
    shortfall: str = ""
    """The constraint that no mapping meets, where this is proven; empty otherwise."""

    @property
    def gap(self) -> float:
        """Relative gap between the best time and the bound; 1 if no mapping that fits is known."""
        return max(0.0, 1.0 - self.bound_s / self.best.time_s) if self.best.fits else 1.0

    @property
    def status(self) -> str:
        """``optimal``, ``feasible``, ``infeasible`` or ``unknown``; see `status_of`."""
        return status_of(self.best.fits, self.gap, bool(self.shortfall))

    @property
    def reason(self) -> str:
        """Why there is no mapping: the constraint, or what was not examined; empty if there is."""
        if self.best.fits:
            return ""
        case = f"{self.problem.model.name} on {self.problem.wafer.name}"
        if self.shortfall:
            return f"{case}: {self.shortfall}"
        left = f"{self.unseen:,} of {self.layouts:,} layouts were not examined"
        if not self.unseen:
            left = f"all {self.layouts:,} layouts were examined, but not every mapping"
        return (
            f"{case}: no mapping that fits was found, which does not prove that there is none: "
            f"{left}. The closest is {self.best.reason}"
        )

    def proof(self) -> dict[str, Any]:
        """Status, bound, gap and bound space as plain data; null where there is none."""
        return {
            "status": self.status,
            "reason": self.reason,
            "bound": self.bound_s if math.isfinite(self.bound_s) else None,
            "gap": self.gap if self.best.fits else None,
            "bound_space": self.bound_space,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the document that ``phaze-fast wafer --json`` prints."""
        return {
            "model": self.problem.model.name,
            "wafer": self.problem.wafer.name,
            "ours": self.best.to_dict(),
            **self.proof(),
            **details(self.problem, self.best),
            **self.faults(),
            "evaluations": self.evaluations,
            "evaluations_per_s": self.evaluations_per_s,
            "seconds": self.seconds,
            "seed": self.seed,
            "layouts": {"all": self.layouts, "pruned": self.pruned, "unseen": self.unseen},
        }

    def faults(self) -> dict[str, Any]:
        """Return dead dies and links by row and column; empty if there are none."""
        wafer = self.problem.wafer
        if not (wafer.dead or wafer.dead_links):
            return {}
        dead = FaultMap(
            dead_dies=tuple((row, column) for column, row in wafer.dead),
            dead_links=tuple(((b, a), (d, c)) for (a, b), (c, d) in wafer.dead_links),
        )
        return {"faults": dead.to_plain()}

    def to_columns(self) -> dict[str, Any]:
        """Return the best mapping and those of the other promising layouts as a table."""
        return joined_columns([evaluation.to_row() for evaluation in (self.best, *self.runners_up)])

    def to_record(self) -> dict[str, Any]:
        """Return all fields except the problem as plain data, which `from_record` reads."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "problem"}
        record["bound_s"] = self.bound_s if math.isfinite(self.bound_s) else None
        record["best"] = self.best.to_dict()
        record["runners_up"] = [evaluation.to_dict() for evaluation in self.runners_up]
        return record

    @classmethod
    def from_record(cls, problem: Problem, data: Mapping[str, Any]) -> MappingResult:
        """Read the output of `to_record` for the same problem."""
        values = dict(data)
        values["bound_s"] = float("inf") if values["bound_s"] is None else values["bound_s"]
        values["best"] = Evaluation.from_dict(values["best"])
        values["runners_up"] = tuple(map(Evaluation.from_dict, values["runners_up"]))
        return cls(problem=problem, **values)

    def __str__(self) -> str:
        if not self.best.fits:
            return f"{self.status}: {self.reason}"
        sure = f"bound {format_time(self.bound_s)}, gap {self.gap:.1%}"
        return f"{self.status}: {self.best}; {sure}, over {self.bound_space}"

    @property
    def evaluations_per_s(self) -> float:
        """Incremental evaluations per second of one core."""
        return self.kernel_evaluations / self.kernel_s if self.kernel_s > 0 else 0.0
