"""The result of a search: designs, Pareto front and proof, as data, tables and a page."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from phaze_fast.errors import InfeasibleError, InvalidInputError, UndecidedError, nearest
from phaze_fast.explore import (
    OBJECTIVES,
    UNITS,
    ChipGroups,
    Design,
    Outcome,
    Portfolio,
    SearchProblem,
    Winner,
    checked_objectives,
    checked_weights,
    geometric_mean,
    problems_of,
    search_digest,
)
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training, layer_schedules, plan
from phaze_fast.planning.plans import plan_interval_s
from phaze_fast.report.text import objective
from phaze_fast.robust import Information, RobustResult
from phaze_fast.tables import Table, flat_row, joined_columns, non_dominated, picked
from phaze_fast.units import format_time


@dataclass(frozen=True)
class ParetoFront(Table):
    """Non-dominated points, fastest first."""

    objectives: tuple[str, ...]
    proven: bool
    rows: list[dict[str, Any]]
    """Chip, plan and objectives of each point."""

    shown: ClassVar[tuple[str, ...]] = (
        *("chip.name", "time_s", "area_mm2", "energy_j", "hbm_bytes", "cost_usd"),
    )

    def headline(self) -> str:
        """Describe the objectives of the front, and whether the front is proven."""
        proven = "proven" if self.proven else "not proven"
        return f"Pareto front of {', '.join(self.objectives)}, {proven}"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.rows[position]

    def to_columns(self) -> dict[str, Any]:
        """Return the points as columns: the chip's cores and sizes, the plan, the objectives."""
        return joined_columns([flat_row(row) for row in self.rows])


@dataclass(frozen=True, eq=False)
class SearchResult(Table):
    """The best chips and plans of a search, with the certificate of their optimality."""

    problems: tuple[SearchProblem, ...]
    space: ArchitectureSpace
    weights: tuple[float, ...]
    outcome: Outcome
    digest: str
    """Hash of all inputs of the search."""
    threads: int = 1
    requested_top: int = 10
    """How many of the best chips the search was to find."""
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Designs that other methods found, by the method's name."""
    gain: list[dict[str, Any]] = field(default_factory=list)
    """The speed gained over TPU v4 as it was built, by cause."""
    sensitivity: list[dict[str, Any]] = field(default_factory=list)
    """The best design with one rate or area term of the hardware halved or doubled."""
    robust: RobustResult | None = None
    """The chip of least largest regret, where constants are intervals."""
    information: Information | None = None
    """Which constants decide the winner, where the intervals were sampled."""
    portfolio: Portfolio | None = None
    """The best two chips, where the search was to find them."""
    objective: str = "time"
    """What the search minimised: a name of `phaze_fast.explore.UNITS`."""

    @property
    def status(self) -> str:
        """``optimal``, ``feasible`` (with a gap), ``infeasible`` or ``unknown`` (stopped first)."""
        return self.outcome.status

    @property
    def bound(self) -> float:
        """A lower bound of the objective over all chips and plans, in seconds or its unit."""
        return self.outcome.bound

    @property
    def gap(self) -> float:
        """The best value over the bound, less 1; 0 where proven."""
        return self.outcome.gap

    @property
    def complete(self) -> bool:
        """Whether all of the best chips and the front are proven, not only the best chip."""
        return self.outcome.complete and not self.outcome.unproven

    @cached_property
    def top(self) -> list[Design]:
        """The best chips, best first."""
        return [self._design(winner) for winner in self.outcome.winners]

    @property
    def best(self) -> Design:
        """The best chip with its plan.

        Raises
        ------
        InfeasibleError
            Where nothing fits.
        UndecidedError
            Where the budget ended before any plan was found.
        """
        if not self.outcome.winners:
            error = UndecidedError if self.status == "unknown" else InfeasibleError
            raise error(self.reason)
        return self.top[0]

    @property
    def reason(self) -> str:
        """Why there is no best chip; empty where there is one."""
        if self.outcome.winners:
            return ""
        names = ", ".join(problem.model.name for problem in self.problems)
        counts = {step: count for step, count in self.outcome.counts.items() if count}
        pruned = ", ".join(f"{count:,} by {step}" for step, count in counts.items())
        if self.status == "unknown":
            return f"{names}: the budget ended before any plan was found ({pruned})"
        return f"{names}: no chip of {self.space.spec.name} fits any plan ({pruned}). {self._why()}"

    def _why(self) -> str:
        """Return why the first model that fits no chip does not fit even the one with most HBM."""
        largest = self.space[int(np.argmax(self.space.chips["hbm_bytes"]))]
        for problem in self.problems:
            cluster = problem.cluster.replace(chip=largest)
            try:
                plans = plan(problem.model, cluster, problem.training, top=1)
            except InvalidInputError as error:  # `reserved_bytes` leave no memory
                return str(error)
            if not plans.plans:
                return str(plans.infeasible)
        return "Each model fits some chip, and no chip fits all."

    def _design(self, winner: Winner) -> Design:
        chip, plans = self.space[winner.chip], {}
        for problem, found in zip(self.problems, winner.plans, strict=True):
            interval_s = plan_interval_s(found, problem.cluster.replace(chip=chip))
            plans[problem.model.name] = replace(found, interval_s=interval_s)
        rates = [plan.samples_per_s for plan in winner.plans]
        return Design(
            chip=chip,
            index=winner.chip,
            grid_index=int(self.space.index[winner.chip]),
            plans=plans,
            value=winner.score,
            samples_per_s=geometric_mean(rates, self.weights),
            **picked(winner, "time_s", "area_mm2", "energy_j", "hbm_bytes", "cost_usd"),
        )

    def amount(self, value: float) -> str:
        """Write a value of the objective with its unit."""
        if self.objective == "time":
            return format_time(value)
        return f"{value:,.4g} {UNITS[self.objective]}"

    def _layers(self, position: int) -> dict[str, Any]:
        """Schedule the layers of every model on one of the best chips."""
        design, schedules = self.top[position], {}
        for problem in self.problems:
            name = problem.model.name
            cluster = problem.cluster.replace(chip=design.chip)
            layers = layer_schedules(problem.model, cluster, design.plans[name])
            schedules[name] = [layer.to_dict() for layer in layers]
        return {"rank": position + 1, "models": schedules}

    def _row(self, point: Winner) -> dict[str, Any]:
        design = self._design(point)
        texts = [str(plan) for plan in design.plans.values()]
        return {**design.to_dict(stages=False), "plan_text": "; ".join(texts)}

    def pareto(self, *objectives: str) -> ParetoFront:
        """Compute the front over some of the objectives of the search's front; by default all.

        Raises
        ------
        InvalidInputError
            Where the search's front has not all of these objectives.
        """
        known = self.outcome.objectives
        wanted = tuple(objectives) or known
        for name in wanted:
            if name in known:
                continue
            hint = f"this search has {', '.join(known)}"
            if name not in OBJECTIVES:
                hint = nearest(name, OBJECTIVES)
            elif not known:
                hint = "this search has none: search(..., pareto=('time', 'area'))"
            raise InvalidInputError(f"pareto: {name!r} is not accepted; {hint}")
        points = self.outcome.front
        if points and wanted != known:
            fields = [objective(name)[0] for name in wanted]
            table = np.array([[getattr(p, name) for name in fields] for p in points], dtype=float)
            points = tuple(points[k] for k in non_dominated(table))
        return ParetoFront(wanted, self.complete, [self._row(p) for p in points])

    def to_dict(self) -> dict[str, Any]:
        """Convert everything to plain data: the document that ``--json`` prints."""
        outcome = self.outcome
        pruned = {k: v for k, v in outcome.counts.items() if k not in ("placed", "open")}
        document: dict[str, Any] = {
            "status": self.status,
            "models": [problem.model.name for problem in self.problems],
            "objective": {"name": self.objective, "unit": UNITS[self.objective]},
            "points": outcome.points,
            "designs": outcome.designs,
            "evaluated": outcome.counts["placed"],
            "pruned": pruned,
            "open": outcome.counts["open"],
            "bound": _finite(outcome.bound),
            "gap": _finite(outcome.gap),
            "unproven_schedules": outcome.unproven,
        }
        if not outcome.winners:
            document["reason"] = self.reason
        else:
            document["top_status"] = "optimal" if self.complete else "feasible"
            document["best"] = self.best.to_dict()
            document["calibration"] = self.best.chip.calibration.to_dict()
            document["top"] = [design.to_dict(stages=False) for design in self.top]
            best_s = self.top[0].time_s
            slower = [k for k, design in enumerate(self.top) if design.time_s > best_s]
            document["layers"] = [self._layers(k) for k in (0, *slower[:1])]
        if outcome.objectives:
            front, status = self.pareto(), "optimal" if self.complete else "feasible"
            document["pareto"] = {"objectives": list(front.objectives), "status": status}
            document["pareto"]["designs"] = front.rows
        document |= {} if self.robust is None else self.robust.to_dict()
        for name, part in picked(self, "portfolio", "information").items():
            document |= {} if part is None else {name: part.to_dict()}
        document |= picked(self, "baselines", "gain", "sensitivity")
        document["history"] = [
            picked(progress, "seconds", "placed")
            | {"incumbent_s": _finite(progress.incumbent), "bound_s": _finite(progress.bound)}
            for progress in outcome.history
        ]
        document["manifest"] = self.manifest
        return document

    @property
    def manifest(self) -> dict[str, Any]:
        """All inputs, the version, and how long the search took."""
        from importlib.metadata import version

        first = self.problems[0]
        return {
            "version": version("phaze-fast"),
            "digest": self.digest,
            "seconds": self.outcome.seconds,
            "threads": self.threads,
            "python": platform.python_version(),
            "inputs": {
                "models": [problem.model.to_dict() for problem in self.problems],
                "space": {**self.space.spec.to_dict(), "digest": self.space.digest},
                "cluster": first.cluster.to_dict(),
                "training": first.training.to_dict(),
                "weights": list(self.weights),
                "top": self.requested_top,
                "pareto": list(self.outcome.objectives),
            },
        }

    def to_columns(self) -> dict[str, Any]:
        """Return the front as columns, or the best chips where there is no front."""
        if self.outcome.objectives:
            return self.pareto().to_columns()
        return joined_columns([flat_row(design.to_dict(stages=False)) for design in self.top])

    def report(self, path: Path | str) -> None:
        """Write one self-contained page."""
        from phaze_fast.report.page import write_report

        write_report(self.to_dict(), path)

    def __str__(self) -> str:
        names = ", ".join(problem.model.name for problem in self.problems)
        if not self.outcome.winners:
            return f"{names}: {self.status}: {self.reason}"
        proof = (
            f"proven over {self.outcome.points:,} points"
            if self.status == "optimal"
            else f"bound {self.amount(self.bound)}, gap {self.gap:.2%}"
        )
        more = "more: .top, .pareto(), .outcome.counts, .report(path), .to_pandas()"
        return f"{names}: {self.status}, {proof}\n{self.best}\n{more}"


def _finite(value: float) -> float | None:
    """Replace infinity, which JSON does not have, by None."""
    return value if value not in (float("inf"), float("-inf")) else None


def result_of(
    models: Sequence[Model],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    outcome: Outcome,
    weights: Sequence[float] | None = None,
    top: int = 10,
    pareto: Sequence[str] = (),
    threads: int = 1,
    objective: str = "time",
) -> SearchResult:
    """Combine the outcome of a search with its inputs."""
    problems = problems_of(models, ChipGroups.of(space), cluster, training)
    shares = checked_weights(weights, len(models))
    return SearchResult(
        problems=tuple(problems),
        space=space,
        weights=shares,
        outcome=outcome,
        digest=search_digest(problems, space, shares, top, checked_objectives(pareto), objective),
        threads=threads,
        requested_top=top,
        objective=objective,
    )
