"""The result of a search in full: designs, front and proof, as data, tables and a page."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from phaze_fast.errors import InfeasibleError, InvalidInputError, nearest
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.designs import Design, geometric_mean
from phaze_fast.explore.find import checked_weights, search_digest
from phaze_fast.explore.goals import OBJECTIVES, checked_objectives, front_of
from phaze_fast.explore.objective import UNITS
from phaze_fast.explore.portfolio import Portfolio
from phaze_fast.explore.problem import SearchProblem, problems_of
from phaze_fast.explore.result import Outcome, Winner
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training, infeasible, layer_schedules, plan
from phaze_fast.robust.information import Information
from phaze_fast.robust.robust_chip import RobustResult
from phaze_fast.tables import Table, flat_row, joined_columns
from phaze_fast.units import format_time

__all__ = ["ParetoFront", "SearchResult", "result_of"]


@dataclass(frozen=True)
class ParetoFront(Table):
    """Points of which none is at most another in every objective, fastest first."""

    objectives: tuple[str, ...]
    proven: bool
    rows: list[dict[str, Any]]
    """Chip, plan and objectives of each."""

    shown: ClassVar[tuple[str, ...]] = (
        *("chip.name", "time_s", "area_mm2", "energy_j", "hbm_bytes", "cost_usd"),
    )

    def headline(self) -> str:
        """Say what the front is over, and whether it is proven."""
        proven = "proven" if self.proven else "not proven"
        return f"Pareto front of {', '.join(self.objectives)}, {proven}"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self.rows[at]

    def to_columns(self) -> dict[str, Any]:
        """Give the points as a table: the chip's cores and sizes, the plan, the objectives."""
        return joined_columns([flat_row(row) for row in self.rows])


_VALUES = {
    "time": lambda p: p.time_s,
    "area": lambda p: p.area_mm2,
    "energy": lambda p: p.energy_j,
    "hbm": lambda p: p.hbm_bytes,
    "cost": lambda p: p.cost_usd,
}


@dataclass(frozen=True, eq=False)
class SearchResult(Table):
    """The best chips and plans that a search found, with the certificate."""

    problems: tuple[SearchProblem, ...]
    space: ArchitectureSpace
    weights: tuple[float, ...]
    outcome: Outcome
    digest: str
    """Of all that was asked."""
    threads: int = 1
    asked_top: int = 10
    """How many of the best chips were asked for."""
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What other methods find, by name."""
    sensitivity: list[dict[str, Any]] = field(default_factory=list)
    """How the winner moves when something halves or doubles."""
    robust: RobustResult | None = None
    """The chip of least largest regret, where constants were given as intervals."""
    information: Information | None = None
    """What the constants decide, where samples of the intervals were asked for."""
    portfolio: Portfolio | None = None
    """The best two chips, where they were asked for."""
    objective: str = "time"
    """What was made least: a name of `phaze_fast.explore.objective.UNITS`."""

    @property
    def status(self) -> str:
        """``optimal`` (proven over all points), ``feasible`` (with a gap) or ``infeasible``."""
        return self.outcome.status

    @property
    def bound(self) -> float:
        """No chip and plan takes less: seconds, or what the objective counts."""
        return self.outcome.bound

    @property
    def gap(self) -> float:
        """How much better something might be, as a fraction of the bound; 0 where proven."""
        return self.outcome.gap

    @property
    def complete(self) -> bool:
        """Whether all of the best chips, and the front, are proven, and not the first alone."""
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
        """
        if not self.outcome.winners:
            raise InfeasibleError(self.reason)
        return self.top[0]

    @property
    def reason(self) -> str:
        """Why there is no answer; empty where there is."""
        if self.outcome.winners:
            return ""
        names = ", ".join(problem.model.name for problem in self.problems)
        counts = {k: v for k, v in self.outcome.counts.items() if v}
        said = ", ".join(f"{count:,} by {step}" for step, count in counts.items())
        if self.status == "unknown":
            return f"{names}: the budget ended before any plan was found ({said})"
        return f"{names}: no chip of {self.space.spec.name} fits any plan ({said}). {self._why()}"

    def _why(self) -> str:
        """Say of the first model that nothing fits what is in its way, on the roomiest chip."""
        roomiest = self.space[int(np.argmax(self.space.chips["hbm_bytes"]))]
        for problem in self.problems:
            cluster = problem.cluster.replace(chip=roomiest)
            found = plan(problem.model, cluster, problem.training, top=1)
            if not found.plans:
                return str(infeasible(found))
        return "Each model fits some chip, and no chip fits all."

    def _design(self, winner: Winner) -> Design:
        names = [problem.model.name for problem in self.problems]
        rates = [plan.samples_per_s for plan in winner.plans]
        return Design(
            chip=self.space[winner.chip],
            index=winner.chip,
            grid_index=int(self.space.index[winner.chip]),
            plans=dict(zip(names, winner.plans, strict=True)),
            time_s=winner.time_s,
            value=winner.score,
            samples_per_s=geometric_mean(rates, self.weights),
            area_mm2=winner.area_mm2,
            energy_j=winner.energy_j,
            hbm_bytes=winner.hbm_bytes,
            cost_usd=winner.cost_usd,
        )

    def amount(self, value: float) -> str:
        """Write a value of the objective with its unit."""
        if self.objective == "time":
            return format_time(value)
        return f"{value:,.4g} {UNITS[self.objective]}"

    def _slower(self) -> int:
        """Position of the first of the best chips that is slower than the best; 0: none is."""
        best = self.top[0].time_s
        return next((k for k, each in enumerate(self.top) if each.time_s > best), 0)

    def _layers(self, k: int) -> dict[str, Any]:
        """Give the layer schedules of one of the best chips, by the models' names."""
        design, found = self.top[k], {}
        for problem in self.problems:
            name = problem.model.name
            cluster = problem.cluster.replace(chip=design.chip)
            made = layer_schedules(problem.model, cluster, design.plans[name])
            found[name] = [layer.to_dict() for layer in made]
        return {"rank": k + 1, "models": found}

    def _row(self, point: Winner) -> dict[str, Any]:
        row = self._design(point).to_dict(stages=False)
        texts = [str(plan) for plan in point.plans]
        return {**row, "plan_text": "; ".join(texts)}

    def pareto(self, *objectives: str) -> ParetoFront:
        """Give the front over some of the objectives that were searched for; by default all.

        Raises
        ------
        InvalidInputError
            Where the search was not asked for one of them.
        """
        known = self.outcome.objectives
        wanted = tuple(objectives) or known
        for name in wanted:
            if name not in known:
                asked = (
                    f"this search was asked for {', '.join(known)}"
                    if known
                    else ("this search was asked for none: search(..., pareto=('time', 'area'))")
                )
                hint = nearest(name, OBJECTIVES) if name not in OBJECTIVES else asked
                raise InvalidInputError(f"pareto: {name!r} is not accepted; {hint}")
        points = self.outcome.front
        if points and wanted != known:
            table = np.array([[_VALUES[name](p) for name in wanted] for p in points], dtype=float)
            points = tuple(points[k] for k in front_of(table))
        return ParetoFront(wanted, self.complete, [self._row(p) for p in points])

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data: the document that ``--json`` prints."""
        outcome = self.outcome
        pruned = {k: v for k, v in outcome.counts.items() if k not in ("placed", "open")}
        found: dict[str, Any] = {
            "status": self.status,
            "models": [problem.model.name for problem in self.problems],
            "objective": {"name": self.objective, "unit": UNITS[self.objective]},
            "points": outcome.points,
            "designs": outcome.designs,
            "evaluated": outcome.counts["placed"],
            "pruned": pruned,
            "open": outcome.counts["open"],
            "bound": _plain(outcome.bound),
            "gap": _plain(outcome.gap),
            "unproven_schedules": outcome.unproven,
        }
        if not outcome.winners:
            found["reason"] = self.reason
        else:
            found["top_status"] = "optimal" if self.complete else "feasible"
            found["best"] = self.best.to_dict()
            found["calibration"] = self.best.chip.calibration.to_dict()
            found["top"] = [design.to_dict(stages=False) for design in self.top]
            found["layers"] = [self._layers(k) for k in dict.fromkeys([0, self._slower()])]
        if outcome.objectives:
            front = self.pareto()
            found["pareto"] = {
                "objectives": list(front.objectives),
                "status": "optimal" if front.proven else "feasible",
                "designs": front.rows,
            }
        if self.robust is not None:
            found |= self.robust.to_dict()
        if self.portfolio is not None:
            found["portfolio"] = self.portfolio.to_dict()
        if self.information is not None:
            found["information"] = self.information.to_dict()
        found["baselines"] = self.baselines
        found["sensitivity"] = self.sensitivity
        found["history"] = [
            {
                "seconds": m.seconds,
                "placed": m.placed,
                "incumbent_s": _plain(m.incumbent),
                "bound_s": _plain(m.bound),
            }
            for m in outcome.history
        ]
        found["manifest"] = self.manifest
        return found

    @property
    def manifest(self) -> dict[str, Any]:
        """What was asked, by what version, and how long it took."""
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
                "top": self.asked_top,
                "pareto": list(self.outcome.objectives),
            },
        }

    def to_columns(self) -> dict[str, Any]:
        """Give the front as a table, or the best chips where there is none."""
        if self.outcome.objectives:
            return self.pareto().to_columns()
        return joined_columns([flat_row(design.to_dict(stages=False)) for design in self.top])

    def report(self, path: Path | str) -> None:
        """Write one self-contained page; needs the extra ``plot``."""
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


def _plain(value: float) -> float | None:
    """Give a number that JSON has; none for infinity."""
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
    """Put what came out of a search together with what was asked."""
    problems = problems_of(models, ChipGroups.of(space), cluster, training)
    shares = checked_weights(weights, len(models))
    name = search_digest(problems, space, shares, top, checked_objectives(pareto), objective)
    return SearchResult(
        tuple(problems), space, shares, outcome, name, threads, top, objective=objective
    )
